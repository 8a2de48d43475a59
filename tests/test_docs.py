"""The documentation runs: every block of Python in every page, top to bottom, and every example program."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [path for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")) if "```python" in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page(page):
    names = {"__name__": "__main__"}
    for block in re.finditer(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), page.name, "exec"), names)


@pytest.mark.parametrize("program", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example(program):
    subprocess.run([sys.executable, str(program)], check=True, timeout=240)


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
