"""The documentation holds together: links lead somewhere, numbers agree with the code, the navigation lists every page,
and the API reference every public name. No page runs here: `make quick` includes this file.

tests/unit/test_docs.py runs what pages show. `make docs` builds the site, and fails for any warning.
"""

import ast
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch
import yaml
from torch import nn

from docs import messages
from harness import ROOT
from harness.causes import PAGE, page
from judged.mistakes import MISTAKES
from judged.on_ranks import RIGHT as RIGHT_ON_RANKS
from judged.on_ranks import WRONG as WRONG_ON_RANKS
from judged.published import RIGHT as PUBLISHED_RIGHT
from judged.published import WRONG as PUBLISHED_WRONG
from judged.right import STEPS as RIGHT
from macrobatch import Accumulator, MacroStep, by_count, by_tokens, contrastive_loss, verify
from macrobatch.errors import MacrobatchError
from macrobatch.verification.catalogue import CAUSES, UNKNOWN

MESSAGES = list(messages.messages())
PAGES = sorted(ROOT.glob("docs/**/*.md"))
LINKING = [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("src/**/README.md")]


def test_numbers_of_planted_mistakes():
    """As the README has them."""
    page = (ROOT / "README.md").read_text()
    counts = [
        len(CAUSES.keys() - UNKNOWN - {"unexplained"}),
        len(MISTAKES) + len(WRONG_ON_RANKS) + len(PUBLISHED_WRONG),
        len(RIGHT) + len(RIGHT_ON_RANKS) + len(PUBLISHED_RIGHT),
    ]
    patterns = (r"lists the (\d+) causes", r"(\d+) planted mistakes", r"(\d+) right steps")
    assert [int(re.search(pattern, page)[1]) for pattern in patterns] == counts


def test_every_cause_is_documented_and_planted():
    """The table of causes has each of them, and no other."""
    planted = {cause for mistake in MISTAKES.values() for cause in mistake.causes}
    planted |= {cause for _, cause in WRONG_ON_RANKS.values()}
    planted |= {program.cause for table in (PUBLISHED_RIGHT, PUBLISHED_WRONG) for program in table.values()} - {None}
    assert planted == CAUSES.keys()
    assert PAGE.read_text() == page(), "cd tests && python -m harness.causes"


def test_how_many_are_unknown():
    """As the page says."""
    number = sum(program.verdict == "unknown" for program in PUBLISHED_RIGHT.values())
    others = sum(program.verdict == "unknown" for program in PUBLISHED_WRONG.values())
    said = f"{number} of the {len(PUBLISHED_RIGHT)} right ones and {others} of the {len(PUBLISHED_WRONG)} wrong ones"
    assert said in PAGE.read_text().replace("\n", " ")


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
        if path.stem == "report_card_public":  # of other repositories
            continue
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


# -------------------------------------------------------------------------------------------------- the messages

TROUBLE = (ROOT / "docs/troubleshooting.md").read_text()


def spoken() -> str:
    """All that the package says: its literal strings, with a space where an f-string has a value."""
    said = []
    for path in ROOT.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                said.append("".join(part.value if isinstance(part, ast.Constant) else " " for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    return "\n".join(said)


def unspoken(page: str) -> list[str]:
    """The messages in the table of a page that the package never says."""
    messages, said = page.split("## Messages")[1], spoken()
    return [quoted for quoted in re.findall(r"^\| `([^`]+)` \|", messages, re.MULTILINE) if quoted not in said]


def test_the_messages_of_the_page_are_those_of_the_package():
    assert unspoken(TROUBLE) == []
    assert unspoken(TROUBLE.replace("a second backward()", "another backward()")) == [
        "another backward() in one micro-batch"
    ]


# ------------------------------------------------------------------------------------------------------ the messages


def calls():
    """Wrong calls, each of another part of the library."""
    model, optimizer = nn.Linear(2, 1), torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    own = torch.optim.SGD(model.parameters())
    yield lambda: Accumulator(model, own, steps=0)
    yield lambda: Accumulator(model, own, reduction="max")
    yield lambda: Accumulator(model, own, counts=len, remainder="carry")
    yield lambda: Accumulator(model, nn.Linear(2, 2))
    yield lambda: Accumulator(model, optimizer).step()
    yield lambda: Accumulator(model, own).backward(torch.ones(()))
    yield lambda: next(Accumulator(model, own).batches([]))
    yield lambda: MacroStep(model, own, len, micro=0)
    yield lambda: MacroStep(model, own, lambda model, batch: model(batch).sum(), micro=2)(torch.ones(4, 2))
    yield lambda: by_count("2")
    yield lambda: by_tokens(0)
    yield lambda: verify(model, None, torch.ones(4, 2))
    yield lambda: contrastive_loss(torch.ones(2, 2), torch.ones(3, 2), scale=1.0)


def patterns_of(text):
    """What a text of the page stands for."""
    return ".*".join(map(re.escape, text.split("…")))


@pytest.mark.parametrize("call", list(calls()))
def test_the_page_of_messages_has_what_is_said(call):
    with pytest.raises(MacrobatchError) as raised:
        call()
    texts = [one.text for one in MESSAGES if one.kind == type(raised.value).__name__]
    assert any(re.fullmatch(patterns_of(text), str(raised.value), re.DOTALL) for text in texts), str(raised.value)


def test_the_page_of_messages_is_made_of_the_source(tmp_path):
    (tmp_path / "room.py").write_text(
        "CURE = 'Leave it out.'\ndef f(x):\n    found = f'there is {x} too much.'\n    raise UsageError(found, CURE)\n"
    )
    assert list(messages.messages(tmp_path)) == [(messages.CORE, "UsageError", "there is … too much. Leave it out.")]


# ---------------------------------------------------------------------------------------------------------- the site

SETTINGS = (ROOT / "mkdocs.yml").read_text()
REFERENCE = "\n".join(path.read_text() for path in PAGES if path.parent.name == "reference")
AT_THE_ROOT = {"index.md", "changelog.md", "contributing.md", "security.md", "messages.md"}  # made by docs/*.py


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


def built(page: str, folder: Path, repository: str) -> str:
    """A page of a site that has only these: the start, and that for addresses that do not exist."""
    settings = yaml.safe_load(SETTINGS)
    extra = {"polyfills": [str(name) for name in settings["extra"]["polyfills"]]}
    theme = settings["theme"] | {"custom_dir": str(ROOT / "docs" / "theme")}
    plain = {key: settings[key] for key in ("site_name", "repo_url", "extra_css")}
    plain |= {"theme": theme, "extra": extra, "plugins": ["search", "offline"], "hooks": [str(folder / "address.py")]}
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text("# Start")
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(plain))
    spec = "import importlib.util as u\ns = u.spec_from_file_location('pages', {!r})\np = u.module_from_spec(s)\n"
    hook = spec.format(str(ROOT / "docs" / "pages.py")) + "s.loader.exec_module(p)\non_config = p.on_config\n"
    (folder / "address.py").write_text(hook)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    environment = os.environ | {"REPOSITORY": repository, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
    return (folder / "site" / page).read_text()


def test_a_missing_page_is_at_home_below_the_address_of_the_site(tmp_path):
    pytest.importorskip("mkdocs")
    page = built("404.html", tmp_path, "https://github.com/Owner/name")
    assert 'href="/name/site.css"' in page
    assert 'src="/name/iframe-worker.js"' in page
    assert '<a href="/name/index.html">start</a>' in page
    assert '<a href="https://github.com/Owner/name" title="Go to repository" class="md-source">' in page


def test_a_site_without_a_repository_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    page = built("index.html", tmp_path, "")
    assert "md-source" not in page
    assert re.findall(r'(?:src|<link[^>]* href)="(https?:[^"]*)"', page) == []
    own = yaml.safe_load(SETTINGS)["extra"]["polyfills"]
    assert [name for name in own if not (ROOT / "docs" / name).exists()] == []
    assert (tmp_path / "site" / "search" / "search_index.js").exists()  # read by a search without a server
