"""The stories run, and print what their pages say."""

import difflib
import doctest
import importlib
import re
import subprocess
import sys

import pytest
import torch

from harness.stories import PAGES, SCRIPTS, cells_of, page_of, page_path, run

SCRIPT = '''"""Not shown."""

# %% [markdown]
# # A title
#
# Two lines
# of text.

# %%
x = 2
print("x is", x)

# %%
y = x + 1

# %%
print(y)
print(1 / (x - SHIFT))
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "a_story.py"
    path.write_text(SCRIPT.replace("SHIFT", "0"))
    return path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_story(path, tmp_path):
    shown = run(path, tmp_path)
    page, said = page_of(path, shown), page_path(path).read_text()
    difference = "\n".join(difflib.unified_diff(said.splitlines(), page.splitlines(), "page", "run", lineterm=""))
    assert page == said, f"`make stories` writes the page anew:\n{difference}"
    figures = {name for cell in shown for name, _ in cell.figures}
    assert {file.name for file in tmp_path.iterdir()} == figures
    assert {file.name for file in PAGES.glob(f"{page_path(path).stem}-*.png")} == figures


def test_every_story_is_on_the_first_page_and_every_page_is_of_a_story():
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (PAGES / "index.md").read_text())
    pages = [page_path(path).name for path in SCRIPTS]
    assert len(pages) == 3
    assert sorted(linked) == sorted(pages)
    assert {path.name for path in PAGES.glob("*.md")} == {*pages, "index.md"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_first_block_runs_where_it_is_pasted(path, tmp_path):
    page = page_path(path).read_text()
    block, output = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", output)


def test_a_page_has_text_code_and_output(script, tmp_path):
    page = page_of(script, run(script, tmp_path))
    assert page.startswith("# A title\n\nTwo lines\nof text.\n\n```python\nx = 2\n")
    assert "```\n\n```text\nx is 2\n```\n\n```python\ny = x + 1\n```\n\n```python\nprint(y)" in page
    assert "```text\n3\n0.5\n```\n" in page
    assert "Not shown" not in page


def test_another_output_is_another_page(script, tmp_path):
    said = page_of(script, run(script, tmp_path))
    script.write_text(SCRIPT.replace("SHIFT", "1"))
    assert page_of(script, run(script, tmp_path)) != said.replace("(x - 0)", "(x - 1)")


def test_an_error_names_the_line_of_the_script(script, tmp_path):
    script.write_text(SCRIPT.replace("SHIFT", "2"))
    line = SCRIPT.splitlines().index("print(1 / (x - SHIFT))") + 1
    with pytest.raises(RuntimeError, match=rf'(?s)a_story.py", line {line}, .*ZeroDivisionError'):
        run(script, tmp_path)


def test_a_warning_is_an_error(script, tmp_path):
    script.write_text("# %%\nimport warnings\n\nwarnings.warn('careful', stacklevel=1)\n")
    with pytest.raises(RuntimeError, match="UserWarning: careful"):
        run(script, tmp_path)


def test_figures_are_numbered_over_the_cells(script, tmp_path):
    pytest.importorskip("matplotlib")
    draw = "# %%{}\nimport matplotlib.pyplot as plt\n\nplt.figure(num={!r})\n\n"
    script.write_text(draw.format("", "one") + "# %%\nprint(1)\n\n" + draw.format(" [figure]", "two"))
    shown = run(script, tmp_path)
    assert [cell.figures for cell in shown] == [[("a-story-1.png", "one")], [], [("a-story-2.png", "two")]]
    assert (tmp_path / "a-story-2.png").exists()
    page = page_of(script, shown)
    assert "plt.figure(num='one')\n```\n\n![one](a-story-1.png)\n" in page
    assert page.index("![two](a-story-2.png)") == page.index("```text\n1\n```\n\n") + len("```text\n1\n```\n\n")


def test_cells_keep_their_lines():
    cells = cells_of(SCRIPT)
    assert [cell.is_text for cell in cells] == [True, False, False, False]
    assert [SCRIPT.splitlines()[cell.line - 1] for cell in cells] == [cell.source.splitlines()[0] for cell in cells]


def test_peak_memory(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    memory = importlib.import_module("memory")
    assert doctest.testmod(memory) == (0, 3)

    weight = torch.ones(1024, 1024, requires_grad=True)  # there before: not counted, nor its views
    with memory.PeakMemory() as peak:
        weight.t().sum().backward()
    assert peak.mib == pytest.approx(4, abs=1e-4)  # the gradient of the weight
    with memory.PeakMemory() as peak:
        for _ in range(3):
            (weight * 2).exp().sum().backward()  # the product and its exponential; each time their gradients
    assert 8 <= peak.mib <= 16
