"""Every command of the recipes in docs/train.md, as it is written, one after the other in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness

PAGE = (harness.ROOT / "docs" / "train.md").read_text()
SECTION = PAGE.partition("## Recipes\n")[2].partition("\n## ")[0]
# Each command, with the output that the page shows.
COMMANDS = re.findall(r"^\$ (.*)\n((?:(?!\$ |```).*\n)*)", SECTION, re.MULTILINE)
MADE = ("runs/base", "runs/before", "runs/chat", "runs/lora/adapter", "runs/packed", "runs/ranks")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("recipes")
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = harness.environment(PATH=binaries, MACROBATCH_CACHE=str(place / "cache"), OMP_NUM_THREADS="1")
    for command, expected in COMMANDS:
        done = subprocess.run(
            command, shell=True, cwd=place, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert not expected or done.stdout.endswith(expected), f"{command}\n{done.stdout[-2000:]}"
    return place


def test_there_is_a_recipe_of_each_kind():
    assert len(COMMANDS) == 12
    assert sum(bool(expected) for _, expected in COMMANDS) == 3
    assert {word for word in ("--lora", "--pack", "torchrun", "--chat-template") if word in SECTION} == {
        "--lora", "--pack", "torchrun", "--chat-template"
    }  # fmt: skip


@pytest.mark.parametrize("folder", MADE)
def test_recipes_run_as_written(place, folder):
    assert (place / folder).is_dir()


def test_all_end_with_less_loss_than_they_began(place):
    for name in ("base", "chat", "packed"):
        lines = (place / "runs" / name / "metrics.jsonl").read_text().splitlines()
        first, last = (float(re.search(r'"loss": ([\d.]+)', line)[1]) for line in (lines[0], lines[-1]))
        assert last < first
