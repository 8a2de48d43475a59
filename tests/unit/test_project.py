"""The files around the package, for contributors and releases: what they name exists, and they agree."""

import ast
import os
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

import durations
import macrobatch
from harness import ROOT
from macrobatch._torch.contract import NEWEST_TESTED, OLDEST_TESTED

WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
PINNED = re.compile(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)")  # to a major version
OUTPUTS = {"dist/", "site"}  # made by the targets


def workflow(name: str) -> dict:
    return yaml.safe_load(WORKFLOWS[name].read_text())


def steps_of(job: dict) -> list[dict]:
    return job.get("steps", [])


def missing(text: str) -> list[str]:
    """What a workflow names and the tree does not have: targets of make, and files."""
    said = yaml.safe_load(text)
    found = []
    for job in said["jobs"].values():
        if "uses" in job and not (ROOT / job["uses"]).is_file():
            found.append(job["uses"])
        for step in steps_of(job):
            run = step.get("run", "")
            found += [f"make {target}" for target in re.findall(r"\bmake ([\w-]+)", run) if target not in TARGETS]
            paths = re.findall(r"(?<![\w$])[\w.-]+/[\w./-]+\.\w+|[\w.-]+\.(?:txt|toml|py|md)\b", run)
            paths += [step.get("with", {}).get(key, "") for key in ("path", "cache-dependency-path")]
            found += [path for path in paths if path not in OUTPUTS and not (ROOT / path).exists()]
    return found


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_names_what_exists(name):
    assert missing(WORKFLOWS[name].read_text()) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("tests", "make quick", "make quickly"),
        ("tests", "constraints.txt", "requirements.txt"),
        ("release", "src/macrobatch/__init__.py", "src/macrobatch/version.py"),
        ("release", "workflows/wheel.yml", "workflows/wheels.yml"),
    ],
)
def test_a_name_that_is_wrong_is_seen(name, right, wrong):
    text = WORKFLOWS[name].read_text()
    assert missing(text.replace(right, wrong))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_do_little_and_not_for_long(name):
    said = workflow(name)
    assert said["permissions"] == {"contents": "read"}
    assert "concurrency" in said
    for job in said["jobs"].values():
        assert ("timeout-minutes" in job) == ("steps" in job), "a called workflow has its own"
        for step in steps_of(job):
            assert "uses" not in step or PINNED.fullmatch(step["uses"])
            is_checkout = step.get("uses", "").startswith("actions/checkout@")
            assert not is_checkout or step["with"] == {"persist-credentials": False}


def test_only_those_who_publish_may_write():
    allowed = {
        (name, job): rights["permissions"]
        for name in WORKFLOWS
        for job, rights in workflow(name)["jobs"].items()
        if "permissions" in rights
    }
    assert allowed == {
        ("docs", "publish"): {"pages": "write", "id-token": "write"},
        ("release", "publish"): {"id-token": "write"},
    }
    assert workflow("release")["jobs"]["publish"]["environment"] == "pypi"
    assert set(workflow("release")["jobs"]["publish"]["needs"]) == {"tests", "wheel"}


def test_the_matrix_has_every_python_and_torch():
    matrix = workflow("tests")["jobs"]["all"]["strategy"]["matrix"]
    pairs = {(python, torch) for python in matrix["python"] for torch in matrix["torch"]}
    pairs |= {(more["python"], more["torch"]) for more in matrix["include"]}
    classifiers = PROJECT["project"]["classifiers"]
    assert {python for python, _ in pairs} == set(re.findall(r"Python :: (3\.\d+)", " ".join(classifiers)))
    versions = {tuple(map(int, torch.split(".")[:2])) for _, torch in pairs}
    assert versions == {(2, minor) for minor in range(OLDEST_TESTED[1], NEWEST_TESTED[1] + 1)}
    newest = {python for python, torch in pairs if torch.startswith(".".join(map(str, NEWEST_TESTED)))}
    assert newest == {python for python, _ in pairs}


def test_hooks_before_a_commit_are_those_of_make_check():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"], "versions are those of constraints.txt"
    entries = [hook["entry"] for repository in hooks for hook in repository["hooks"]]
    assert all(entry.startswith(".venv/bin/") for entry in entries)
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    checks = re.findall(r"\$\(BIN\)/(\w+(?: check| format)?)", recipe)
    assert [re.match(r"\.venv/bin/(\w+(?: check| format)?)", entry)[1] for entry in entries] == checks


def test_forms_for_issues():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        fields = form.get("body", [])
        assert len({field["id"] for field in fields}) == len(fields)
        assert path.stem == "config" or {"name", "description", "body"} <= set(form)


def test_links_of_a_released_readme_are_absolute(tmp_path):
    """By the step of the workflow itself."""
    (step,) = [
        one for job in workflow("wheel")["jobs"].values() for one in steps_of(job) if "sed" in one.get("run", "")
    ]
    shutil.copy(ROOT / "README.md", tmp_path)
    before = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    told = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v1.2.3"}
    subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, env=os.environ | told, check=True, timeout=20)
    after = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    kinds = {True: "raw", False: "blob"}
    assert after == [f"https://github.com/owner/name/{kinds[link.endswith('.png')]}/v1.2.3/{link}" for link in before]
    assert "docs/figures/fixed.png" in before
    assert "docs/from-a-loop.md#what-is-exact" in before


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (macrobatch.__version__, PROJECT["project"]["license"])
    releases = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert macrobatch.__version__ in releases
    assert releases[0] in ("Unreleased", macrobatch.__version__)


def test_what_the_tests_need_is_pinned():
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = {re.match(r"[\w.-]+", line)[0].lower() for lines in extras.values() for line in lines}
    assert needed - pinned == set()


# ---------------------------------------------------------------------------------------------------------- the tests


def imported_tests(source: str) -> list[str]:
    """The files of tests among what a file imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in found if any(part.startswith("test_") for part in name.split("."))]


def test_no_file_of_tests_imports_another():
    found = {path: imported_tests(path.read_text()) for path in ROOT.glob("tests/**/*.py")}
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line", ["from tests.unit.test_docs import page", "import tests.unit.test_docs", "from tests.unit import test_docs"]
)
def test_an_import_of_a_file_of_tests_is_seen(line):
    assert set(imported_tests(f"import torch\n{line}\n")) >= {"tests.unit.test_docs"}


def test_the_slowest_files_have_their_reasons():
    """The table is made from what was measured; every file that is named exists."""
    assert durations.PAGE.read_text() == durations.page(), "make durations"
    measured = durations.read()
    assert set(list(measured["files"])[:10]) <= set(durations.REASONS), "say why in tests/durations.py"
    named = {name.partition("::")[0] for kind in measured.values() for name in kind} | set(durations.REASONS)
    assert sorted(file for file in named if not (ROOT / file).exists()) == []


# ---------------------------------------------------------------------------------------------------------- names

IRREGULAR = "begun built chosen done drawn found given gone held kept known left made meant said seen shown taken told"
PARTICIPLE = rf"(?!need|feed|seed|speed|embed)[a-z]+ed|written|{'|'.join(IRREGULAR.split())}"
NAMELESS = re.compile(rf"_*(not_)?({PARTICIPLE})(_(after|at|by|for|from|in|of|on|to|with)(_\w+)?)?")
NAMED_SO_ELSEWHERE = {"cached"}  # like functools.cached_property


def nameless(source: str) -> list[str]:
    """The functions whose names are past participles, which say neither what they do nor what they return."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [node.name for node in nodes if not any("property" in ast.unparse(d) for d in node.decorator_list)]
    return [name for name in names if NAMELESS.fullmatch(name) and name not in NAMED_SO_ELSEWHERE]


@pytest.mark.parametrize("path", sorted((ROOT / "src/macrobatch/train").glob("*.py")), ids=lambda path: path.stem)
def test_a_function_has_the_name_of_what_it_does_or_returns(path):
    assert nameless(path.read_text()) == []


@pytest.mark.parametrize("name", ["made", "_kept", "written", "_not_made", "_handled_by", "held_at_last"])
def test_a_name_that_is_a_participle_is_seen(name):
    assert nameless(f"class A:\n def {name}(self): ...") == [name]


@pytest.mark.parametrize("name", ["make", "load_merged", "named_template", "is_packed", "known_ids", "seed"])
def test_a_name_that_is_none_is_left_alone(name):
    assert nameless(f"def {name}(): ...") == []
