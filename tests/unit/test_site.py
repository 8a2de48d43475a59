"""The documentation holds together: links lead somewhere, numbers agree with the code, the navigation lists every page,
and the API reference every public name. Nothing runs here: `make quick` includes this file.

tests/unit/test_docs.py runs what pages show. `make docs` builds the site, and fails for any warning.
"""

import pkgutil
import re
from pathlib import Path
from types import FunctionType

import pytest
import yaml

from harness import ROOT
from tests.ranks.test_verify import RIGHT as RIGHT_ON_RANKS
from tests.ranks.test_verify import WRONG as WRONG_ON_RANKS
from tests.unit.test_verify_mistakes import MISTAKES, documented_causes
from tests.unit.test_verify_right import STEPS as RIGHT

PAGES = sorted(ROOT.glob("docs/**/*.md"))
LINKING = [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("src/**/README.md")]


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
REFERENCE = "\n".join(path.read_text() for path in PAGES if path.parent.name == "reference")
AT_THE_ROOT = {"index.md", "changelog.md", "contributing.md", "security.md"}  # made by docs/pages.py


def listed(nav: str | list | dict) -> list[str]:
    """The pages of a navigation, however deep they are."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in listed(part)]


def wrongly_listed(settings: str) -> list[str]:
    """The pages that the navigation leaves out or has twice, and those that it has but are not there."""
    found = listed(yaml.safe_load(settings)["nav"])
    there = AT_THE_ROOT | {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}
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
