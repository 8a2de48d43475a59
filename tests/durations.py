"""How long tests take: seconds of processor time, with those of the processes that they start.

    make durations      # or some files only: python -m pytest --write-durations tests/unit/test_verify.py

writes them into tests/durations.json: all files, and the test functions that take two seconds or more, without fixtures
that tests share. Files that did not run keep what they have there. tests/conftest.py orders the files by it, and takes
the slow functions out of `make quick`; CONTRIBUTING.md has a table of the slowest files, which is written too.
Processor time is nearly the same on a busy machine and on a quiet one.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("durations.json")
SLOW = 2.0  # seconds, of a test function with all its parameters
PAGE = FILE.parents[1] / "CONTRIBUTING.md"
START, END = "<!-- slowest: made by tests/durations.py -->\n", "<!-- /slowest -->\n"
REASONS = {  # why files take as long as they do; the ten slowest are in the table
    "tests/contract/test_torch.py": "compiles, and starts ranks, for what it reads of torch's private names",
    "tests/ranks/test_accelerate_programs.py": "runs programs of Accelerate on one process and on two",
    "tests/ranks/test_checkpoint.py": "saves on two ranks and on four, and loads on one, two and four: four torchruns",
    "tests/ranks/test_cluster_files.py": "starts several torchruns as two hosts, and kills and drains them",
    "tests/ranks/test_ddp.py": "two ranks that share no start-up",
    "tests/ranks/test_fsdp.py": "more than 133 scenarios on ranks, in eight ways to shard",
    "tests/ranks/test_fuzz.py": "random programs on ranks",
    "tests/ranks/test_joint.py": "losses of the whole batch on two ranks and on four",
    "tests/ranks/test_macrostep.py": "whole batches in eight ways to shard, with memory that runs out on one rank",
    "tests/ranks/test_ray.py": "starts a cluster of Ray",
    "tests/ranks/test_tensor_parallel.py": "four ranks in meshes of two and three dimensions",
    "tests/ranks/test_terms.py": "losses of several terms on two ranks and on four",
    "tests/ranks/test_train.py": "trains on two ranks and on four, in each precision and each cut",
    "tests/ranks/test_train_hooks.py": "trains with callbacks on two ranks, replicated and sharded",
    "tests/ranks/test_transformers.py": "trains five models on two ranks, each of which imports transformers",
    "tests/ranks/test_trl.py": "trains on two ranks, each of which imports TRL",
    "tests/ranks/test_tune.py": "tunes adapters on two ranks with each optimizer, and resumes",
    "tests/ranks/test_uneven.py": "loaders of different lengths in eight ways to shard",
    "tests/ranks/test_verify.py": "verifies right and wrong programs on two ranks that share no start-up",
    "tests/train/test_hostile.py": "reads files of strangers; what might not end, in processes of its own",
    "tests/train/test_killed.py": "starts the trainer again and again, and kills it",
    "tests/train/test_lora.py": "trains and resumes adapters, and compares each export with peft",
    "tests/train/test_memory.py": "trains on a corpus that is larger than the memory of the run, killed and resumed",
    "tests/train/test_recipes.py": "runs every command of the recipes in docs/train.md",
    "tests/train/test_trackers.py": "starts wandb, mlflow and trackio",
    "tests/unit/test_audit_command.py": "starts `macrobatch audit` on whole programs",
    "tests/unit/test_cli.py": "starts the command, and interrupts it while it imports",
    "tests/unit/test_docs.py": "runs every page of the documentation and every example, each in a process of its own",
    "tests/unit/test_exactness.py": "many windows, drawn at random",
    "tests/unit/test_faults.py": "raises an exception at every line of the kernel, one run for each",
    "tests/unit/test_lightning_verify.py": "fits with Lightning's Trainer inside `verify`, several times a test",
    "tests/unit/test_stories.py": "runs the three stories in processes of their own",
    "tests/unit/test_verify_import.py": "imports and verifies in nine processes, one for each form of import",
    "tests/unit/test_verify_mistakes.py": "verifies every planted mistake",
    "tests/unit/test_wheel.py": "builds the wheel, and installs it in an empty environment",
}

Seconds = dict[str, dict[str, float]]  # of "files", and of "functions"


def read() -> Seconds:
    return json.loads(FILE.read_text()) if FILE.exists() else {"files": {}, "functions": {}}


def write(found: Seconds) -> None:
    """Put what was found in the place of what the file has for the same files."""
    merged = read()
    kept = {name: s for name, s in merged["functions"].items() if name.partition("::")[0] not in found["files"]}
    slow = {name: seconds for name, seconds in found["functions"].items() if seconds >= SLOW}
    merged = {"files": merged["files"] | found["files"], "functions": kept | slow}
    root = FILE.parents[1]
    for kind, seconds in merged.items():
        there = {name: round(s, 1) for name, s in seconds.items() if (root / name.partition("::")[0]).exists()}
        merged[kind] = dict(sorted(there.items(), key=lambda pair: (-pair[1], pair[0])))
    FILE.write_text(json.dumps(merged, indent=2) + "\n")
    PAGE.write_text(page())


def page() -> str:
    """CONTRIBUTING.md with the table of the ten slowest files as it should be."""
    before, _, rest = PAGE.read_text().partition(START)
    slowest = list(read()["files"].items())[:10]
    rows = "".join(f"| `{file}` | {round(seconds)} | {REASONS.get(file, '')} |\n" for file, seconds in slowest)
    head = "| file of tests | seconds | what takes them |\n|---|--:|---|\n"
    return before + START + head + rows + END + rest.partition(END)[2]


class Durations:
    """A plugin of pytest: in a process that runs tests, and in that which started such processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.found: dict[str, Counter[str]] = {"files": Counter(), "functions": Counter()}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = processor_seconds()
        try:
            return (yield)
        finally:
            self.found["files"][item.nodeid.partition("::")[0]] += processor_seconds() - before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = processor_seconds()
        try:
            return (yield)
        finally:
            self.found["functions"][function_of(item)] += processor_seconds() - before

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for kind, seconds in getattr(node, "workeroutput", {}).get("durations", {}).items():
            self.found[kind].update(seconds)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["durations"] = {kind: dict(seconds) for kind, seconds in self.found.items()}
        else:
            write(self.found)


def function_of(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]


def processor_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
