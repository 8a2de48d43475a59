"""The documentation runs: every block of Python in every page, top to bottom, and every example program."""

import os
import re
import subprocess
import sys

import pytest

from harness import ROOT

PAGES = [path for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")) if "```python" in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_page(page):
    """In a process of its own, as it would be pasted; on a CPU, which every machine has."""
    text, program = page.read_text(), ""
    for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        line = text[: block.start(1)].count("\n")
        program += "\n" * (line - program.count("\n")) + block.group(1)  # errors name the lines of the page
    command = [sys.executable, "-W", "error", "-c", f"exec(compile({program!r}, {page.name!r}, 'exec'))"]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("program", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example(program):
    subprocess.run([sys.executable, str(program)], check=True, timeout=240)


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
