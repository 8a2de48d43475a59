"""The documentation runs: every block of Python in every page, top to bottom, and every example program.

What a page says that they print is compared with what they print: a comment behind a `print(...)` is what that prints,
and a block without a language that follows on one of Python is what the last `print` of that block prints.

tests/unit/test_site.py checks what can be read without running it: links, navigation, the API reference.
"""

import ast
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from harness import ROOT, environment
from harness.pages import Block, blocks_of
from harness.preloaded import Preloaded

STORIES = ROOT / "docs" / "stories"  # have a test of their own
WRITTEN = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
PAGES = [path for path in WRITTEN if "```python" in path.read_text() and path.parent != STORIES]


# -------------------------------------------------------------------------------------------------- what pages print

NOTING = """
import builtins, json, sys

printed = []

def note(*values, sep=" ", end="\\n", **_):
    text = sep.join(map(str, values))
    printed.append((sys._getframe(1).f_lineno, text))

program = compile(sys.argv[1], sys.argv[2], "exec")
exec(program, {"__name__": "__main__", "print": note})
json.dump(printed, sys.stdout)
"""


# Lightning and transformers use what torch has deprecated, and warn of loaders as small as those of a page.
WARNINGS = {"from-lightning.md": "ignore", "from-trainer.md": "ignore"}


@pytest.fixture(scope="module")
def python_with() -> Iterator[Callable[..., Preloaded]]:
    """Python with these flags."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda *flags: stack.enter_context(Preloaded("torch", flags=flags)))


def printed_by(python: Preloaded, page: str, name: str) -> list[tuple[int, str]]:
    """Run its blocks in a process of their own, as they would be pasted, on a CPU, which every machine has.

    Returns what was printed, with the lines of the page that did.
    """
    program = ""
    for block in blocks_of(page):
        if block.language == "python":
            program += "\n" * (block.line - 1 - program.count("\n")) + block.text  # errors name the lines of the page
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = python.run("-c", NOTING, program, name, env=environment, timeout=240)
    done.check_returncode()
    return [(line, text) for line, text in json.loads(done.stdout.splitlines()[-1])]


def wrong_results(page: str, printed: list[tuple[int, str]]) -> list[str]:
    """What a page says that it prints, and does not."""
    wrong, before = [], None
    for block in blocks_of(page):
        if block.language == "python":
            said = results_said(block)
        elif block.language == "" and before is not None and before.language == "python":
            last = max((line for line, _ in printed if before.line <= line < before.end), default=0)
            said = {last: block.text.rstrip("\n")}
        else:
            said = {}
        for line, text in said.items():
            found = "\n".join(one for where, one in printed if where == line)
            if found != text:
                wrong.append(f"line {line} of the page prints\n{found}\nwhere the page says\n{text}")
        before = block
    return wrong


def results_said(block: Block) -> dict[int, str]:
    """By line of the page: the comment behind a call of `print`."""
    lines = block.text.splitlines()
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    prints = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    behind = {node.lineno: lines[node.end_lineno - 1][node.end_col_offset :].strip() for node in prints}
    return {block.line + line - 1: text.removeprefix("# ") for line, text in behind.items() if text}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page(python_with, path):
    page, python = path.read_text(), python_with("-W", WARNINGS.get(path.name, "error"))
    assert wrong_results(page, printed_by(python, page, path.name)) == []


PAGE = """
```python
print("a", 1)  # a 1
for number in (1, 2):
    print(
        number + 1, "is the sum"
    )
```

```
2 is the sum
3 is the sum
```
"""


@pytest.mark.parametrize(
    ("right", "wrong"), [("# a 1", "# a 2"), ("\n3 is", "\n4 is"), ("(1, 2)", "()"), ("3 is the sum\n", "")]
)
def test_a_wrong_result_is_seen(python_with, right, wrong):
    python = python_with("-W", "error")
    assert wrong_results(PAGE, printed_by(python, PAGE, "page")) == []
    page = PAGE.replace(right, wrong)
    assert len(wrong_results(page, printed_by(python, page, "page"))) == 1


EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
del EXAMPLES["ray_train.py"]  # tests/ranks/test_ray.py runs it, and sees that Ray leaves nothing behind


@pytest.mark.parametrize("program", EXAMPLES.values(), ids=EXAMPLES)
def test_example(program):
    """In a process of its own: some start others, which import the main module."""
    subprocess.run([sys.executable, str(program)], check=True, timeout=240, env=environment())
