"""Whole programs under Accelerate and under `macrobatch.accelerate`, which differ in their import lines alone.

The programs are in accelerate_programs/. Each runs in one process and on two ranks.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import accelerate
import pytest
import torch
from torch import Tensor

import harness
from harness.ranks import Outcome, torchrun
from harness.scripts import Run, run_on_ranks, with_our_imports

SYNC_CHECK = Path(accelerate.__file__).parent / "test_utils" / "scripts" / "test_sync.py"
UNCLIPPED = ["--max_grad_norm", "1e9"]


# ------------------------------------------------------------------------------------------------------ what is run

# The first argument lists train to the end and save on the way; the second ones go on from what was saved.
WHOLE = {
    "text_to_image": Run("text_to_image", [[], ["--resume_from_checkpoint", "latest", "--max_train_steps", "9"]]),
    "causal_lm": Run("causal_lm", [["--checkpointing_steps", "2"], ["--resume_from_checkpoint", "OUT/step_2"]]),
    "causal_lm by epochs": Run(
        "causal_lm", [["--checkpointing_steps", "epoch"], ["--resume_from_checkpoint", "OUT/epoch_0"]]
    ),
    "denoising": Run("denoising", [[], ["--milestone", "1"]]),
    "dreambooth": Run("dreambooth"),
    "dreambooth, one model given": Run("dreambooth", [["--accumulate", "unet"]]),
    "adversarial": Run("adversarial"),
}

# How long a window is; and by the number of processes, the optimizer steps before the first window that is shorter, and
# the length of that one.
SHORT = {
    "text_to_image": (Run("text_to_image", [UNCLIPPED]), 4, {1: (3, 2), 2: (1, 3)}),
    "causal_lm": (Run("causal_lm"), 4, {1: (5, 2), 2: (2, 3)}),
    "dreambooth": (Run("dreambooth", [UNCLIPPED]), 3, {1: (9, 1), 2: (4, 2)}),
    "adversarial": (Run("adversarial", [UNCLIPPED]), 4, {1: (2 * 7, 2), 2: (2 * 3, 3)}),
}

# Programs without random numbers of their own, and the arguments for a window in one big batch of one process.
PLAIN = {
    "causal_lm": (
        Run(
            "causal_lm",
            [["--in_order", "--dropout", "0", "--lr_scheduler_type", "constant_with_warmup"]],
            is_float64=True,
        ),
        "--per_device_train_batch_size",
        {1: "4", 2: "8"},
    ),
    "adversarial": (Run("adversarial", is_float64=True), "--batch_size", {1: "8", 2: "16"}),
}

RUNS = {
    **{f"{name}, theirs": one for name, one in WHOLE.items()},
    **{f"{name}, as theirs": replace(one, library="as theirs") for name, one in WHOLE.items()},
    **{f"{name} short, theirs": one for name, (one, _, _) in SHORT.items()},
    **{f"{name} short, ours": replace(one, library="ours") for name, (one, _, _) in SHORT.items()},
    **{f"{name} plain, ours": replace(one, library="ours") for name, (one, _, _) in PLAIN.items()},
    "dreambooth list, as theirs": Run("dreambooth", [["--accumulate", "list"]], library="as theirs"),
}


@pytest.fixture(scope="module")
def on_processes(tmp_path_factory) -> dict[int, dict[str, list[Outcome]]]:
    """By the number of processes, what each run came to in each of them."""
    folder = tmp_path_factory.mktemp("alone")
    alone = {name: [one.outcome(folder / name)] for name, one in RUNS.items()}
    return {1: alone, 2: run_on_ranks(RUNS, 2, tmp_path_factory.mktemp("ranks"))}


# ------------------------------------------------------------------------------------------------------------- tests


def same(own: list[list[Tensor | None]], other: list[list[Tensor | None]]) -> bool:
    """To the last bit, None for None."""
    pairs = [pair for one, two in zip(own, other, strict=True) for pair in zip(one, two, strict=True)]
    return all(one is two if one is None or two is None else torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", WHOLE)
def test_a_program_does_what_it_does_under_accelerate(on_processes, name, processes):
    theirs, ours = (on_processes[processes][f"{name}, {library}"] for library in ("theirs", "as theirs"))
    assert len(theirs) == len(ours) == processes
    for own, other in zip(ours, theirs, strict=True):
        assert len(own["weights"]) == len(other["weights"]) > 5
        assert same(own["gradients"], other["gradients"])
        assert same(own["weights"], other["weights"])
        assert own["logged"] == other["logged"]
        assert own["files"] == other["files"]


@pytest.mark.parametrize("processes", [1, 2])
def test_models_in_a_list_are_models(on_processes, processes):
    """Accelerate overlooks them, and sends gradients more often than it need: the same but for rounding."""
    theirs, ours = (on_processes[processes][name] for name in ("dreambooth, theirs", "dreambooth list, as theirs"))
    for own, other in zip(ours, theirs, strict=True):
        assert len(own["weights"]) == len(other["weights"])
        for found, expected in zip(own["weights"], other["weights"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", SHORT)
def test_a_short_window_has_its_own_mean(on_processes, name, processes):
    """Up to the first one all is as under Accelerate; that divides the losses in it by the length of the others."""
    _, steps, windows = SHORT[name]
    first, length = windows[processes]
    theirs, ours = (on_processes[processes][f"{name} short, {library}"] for library in ("theirs", "ours"))
    for own, other in zip(ours, theirs, strict=True):
        assert same(own["weights"][:first], other["weights"][:first])
        for one, two in zip(own["gradients"][first], other["gradients"][first], strict=True):
            torch.testing.assert_close(one, two * steps / length, rtol=1e-6, atol=0)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", PLAIN)
def test_all_windows_are_one_big_batch(on_processes, name, processes, tmp_path):
    plain, option, sizes = PLAIN[name]
    arguments = [*plain.arguments[0], "--gradient_accumulation_steps", "1", option, sizes[processes]]
    whole = replace(plain, arguments=[arguments]).outcome(tmp_path)
    for own in on_processes[processes][f"{name} plain, ours"]:
        assert len(own["weights"]) == len(whole["weights"]) > 5
        for one, two in zip(own["weights"], whole["weights"], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-8)  # transformers has its loss in float32


@pytest.mark.parametrize("processes", [1, 2])
def test_accelerates_own_check_of_synchronised_gradients(tmp_path, monkeypatch, processes):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MACROBATCH_EXACT_REMAINDER", "0")
    source = with_our_imports(SYNC_CHECK.read_text())
    assert "from macrobatch.accelerate.accelerator import Accelerator" in source
    script = tmp_path / "check.py"
    script.write_text(source)
    if processes == 1:
        done = subprocess.run(
            [sys.executable, script], env=harness.environment(), capture_output=True, text=True, timeout=120
        )
        output, exit_code = done.stdout + done.stderr, done.returncode
    else:
        launch = torchrun(processes, script, directory=tmp_path, imported=["macrobatch.accelerate"], seconds=120)
        output, exit_code = launch.output, launch.exit_code
    assert exit_code == 0, output
    assert "accumulate" in output
