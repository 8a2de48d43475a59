"""The documentation runs: every block of Python in every page, top to bottom, and every example program.

What a page says that they print is compared with what they print: a comment behind a `print(...)` is what that prints,
and a block without a language that follows on one of Python is what the last `print` of that block prints.

Links and anchors lead somewhere, the site's navigation lists every page, and its API reference every public name.
`make docs` builds the site, and fails for any warning.
"""

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import pytest
import yaml

from harness import ROOT
from tests.ranks.test_verify import RIGHT as RIGHT_ON_RANKS
from tests.ranks.test_verify import WRONG as WRONG_ON_RANKS
from tests.unit.test_verify_mistakes import MISTAKES, documented_causes
from tests.unit.test_verify_right import STEPS as RIGHT

OF_THE_SITE = sorted(ROOT.glob("docs/**/*.md"))
LINKING = [*ROOT.glob("*.md"), *OF_THE_SITE, *ROOT.glob("src/**/README.md")]
STORIES = ROOT / "docs" / "stories"  # have a test of their own
PAGES = [
    path for path in (ROOT / "README.md", *OF_THE_SITE) if "```python" in path.read_text() and path.parent != STORIES
]


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of the page: where the text begins
    text: str

    @property
    def end(self) -> int:
        """The line of the closing fence."""
        return self.line + self.text.count("\n")


def blocks_of(page: str) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Block(one[1], page[: one.start(2)].count("\n") + 1, one[2]) for one in found]


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
WARNINGS = {"from-lightning.md": ("-W", "ignore"), "from-trainer.md": ("-W", "ignore")}


def printed_by(page: str, name: str) -> list[tuple[int, str]]:
    """Run its blocks in a process of their own, as they would be pasted, on a CPU, which every machine has.

    Returns what was printed, with the lines of the page that did.
    """
    program = ""
    for block in blocks_of(page):
        if block.language == "python":
            program += "\n" * (block.line - 1 - program.count("\n")) + block.text  # errors name the lines of the page
    command = [sys.executable, *WARNINGS.get(name, ("-W", "error")), "-c", NOTING, program, name]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120, env=environment)
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
def test_page(path):
    page = path.read_text()
    assert wrong_results(page, printed_by(page, path.name)) == []


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
def test_a_wrong_result_is_seen(right, wrong):
    assert wrong_results(PAGE, printed_by(PAGE, "page")) == []
    page = PAGE.replace(right, wrong)
    assert len(wrong_results(page, printed_by(page, "page"))) == 1


EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
del EXAMPLES["ray_train.py"]  # tests/ranks/test_ray.py runs it, and sees that Ray leaves nothing behind


@pytest.mark.parametrize("program", EXAMPLES.values(), ids=EXAMPLES)
def test_example(program):
    subprocess.run([sys.executable, str(program)], check=True, timeout=240)


def test_numbers_of_planted_mistakes():
    """As the README has them."""
    page = (ROOT / "README.md").read_text()
    counts = [
        len(documented_causes() - {"unexplained"}),
        len(MISTAKES) + len(WRONG_ON_RANKS),
        len(RIGHT) + len(RIGHT_ON_RANKS),
    ]
    patterns = (r"lists the (\d+) causes", r"(\d+) planted mistakes", r"(\d+) right steps")
    assert [int(re.search(pattern, page)[1]) for pattern in patterns] == counts


# ------------------------------------------------------------------------------------------------------------- links


def anchors_of(page: str) -> set[str]:
    """The names that headings get where pages are read."""
    outside = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    names: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", outside, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return set(names)


def broken_links(path: Path, page: str) -> list[str]:
    """The targets, beside that file or on the page itself, that are not there."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if re.match(r"\w+:", target):
            continue  # elsewhere
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        text = page if not file else there.read_text() if there.suffix == ".md" and there.exists() else ""
        if not there.exists() or (anchor and anchor not in anchors_of(text)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert broken_links(path, path.read_text()) == []


def test_files_that_code_names_are_there():
    for path in (*ROOT.glob("src/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*.py")):
        named = re.findall(r"\b(?:docs|examples|benchmarks|tests)/[\w./-]+\.\w+", path.read_text())
        assert [name for name in named if not (ROOT / name).exists()] == [], path


LINKED = """
# What it is: `names`, and more
[here](#what-it-is-names-and-more) [there](docs/train.md) ![a figure](docs/figures/fixed.png)
[a part of it](docs/whole-batches.md#a-gpu-that-waits-for-python) [elsewhere](https://pytorch.org#nothing)
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("#what-it-is-names", "#what-it-is-name"),
        ("docs/train.md", "docs/training.md"),
        ("docs/figures/fixed.png", "figures/fixed.png"),
        ("#a-gpu-that-waits-for-python", "#a-gpu-that-waits"),
        ("whole-batches.md#", "train.md#"),
    ],
)
def test_a_wrong_link_is_seen(right, wrong):
    assert broken_links(ROOT / "README.md", LINKED) == []
    assert len(broken_links(ROOT / "README.md", LINKED.replace(right, wrong))) == 1


# ---------------------------------------------------------------------------------------------------------- the site

SETTINGS = (ROOT / "mkdocs.yml").read_text()
REFERENCE = "\n".join(path.read_text() for path in OF_THE_SITE if path.parent.name == "reference")
AT_THE_ROOT = {"index.md", "changelog.md", "contributing.md", "security.md"}  # made by docs/pages.py


def listed(nav: str | list | dict) -> list[str]:
    """The pages of a navigation, however deep they are."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in listed(part)]


def wrongly_listed(settings: str) -> list[str]:
    """The pages that the navigation leaves out or has twice, and those that it has but are not there."""
    found = listed(yaml.safe_load(settings)["nav"])
    there = AT_THE_ROOT | {path.relative_to(ROOT / "docs").as_posix() for path in OF_THE_SITE}
    return sorted(there.symmetric_difference(found)) + [page for page in set(found) if found.count(page) > 1]


def undocumented(reference: str) -> list[str]:
    """The public names that the API reference does not have."""
    documented = [pkgutil.resolve_name(path) for path in re.findall(r"^::: (\S+)$", reference, re.MULTILINE)]
    modules = ("", ".accelerate", ".errors", ".lightning", ".train", ".transformers", ".verification")
    public = {}
    for module in (pkgutil.resolve_name(f"macrobatch{name}") for name in modules):
        classes = [name for name, one in vars(module).items() if isinstance(one, type)]
        for name in getattr(module, "__all__", classes):
            if is_own(one := getattr(module, name)):
                public[f"{module.__name__}.{name}"] = one
    return [path for path, one in public.items() if not any(one is other for other in documented)]


def is_own(thing: object) -> bool:
    """Whether it is this library's: `macrobatch.accelerate` hands out Accelerate's own names, too."""
    return isinstance(thing, type | FunctionType) and thing.__module__.startswith("macrobatch")


def test_the_navigation_lists_every_page():
    assert wrongly_listed(SETTINGS) == []


@pytest.mark.parametrize(
    ("right", "wrong"), [("recipes.md", "losses.md"), ("reference/errors.md", "errors.md"), ("index.md", "README.md")]
)
def test_a_page_that_is_not_listed_is_seen(right, wrong):
    assert right in SETTINGS
    assert {right, wrong} <= set(wrongly_listed(SETTINGS.replace(right, wrong)))


def test_the_reference_has_every_public_name():
    assert undocumented(REFERENCE) == []


@pytest.mark.parametrize("name", ["MacroStep", "errors.FitError", "train.Outcome", "accelerate.Accelerator"])
def test_a_name_without_documentation_is_seen(name):
    assert undocumented(REFERENCE.replace(f"::: macrobatch.{name}\n", "")) == [f"macrobatch.{name}"]
