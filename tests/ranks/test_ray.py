"""`examples/ray_train.py` on a real Ray with two workers, which the program starts on this machine, and ends."""

import importlib.util
import os
import re
import secrets
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import ROOT
from harness.processes import end_family, family_of, started

pytest.importorskip("ray.train", reason="needs ray[train], of the extra [dev]")

PROGRAM = ROOT / "examples" / "ray_train.py"
SECONDS = 200  # for the whole program: most of it is the start of some fifteen processes
SECONDS_TO_END = 20  # for what is left of Ray when the program has ended


def test_unequal_shares_resumed_from_a_checkpoint():
    output = output_of(PROGRAM)
    halves = r"steps (\d) to (\d): loss [\d.]+ over (\d+) samples, (\d+) of them on the first of 2 workers"
    assert re.findall(halves, output) == [("1", "3", "32", "22"), ("4", "6", "32", "22")], output
    assert float(re.search(r"one process on whole batches: (\S+)", output)[1]) <= 1e-12


def test_a_mean_of_means_is_seen(monkeypatch, capsys):
    """The comparison of the program can fail: here each worker's mean counts the same, as under DDP alone."""
    example = loaded()
    model = example.make_model()
    optimizer = example.make_optimizer(model)
    for step in range(example.STEPS):
        shares = [example.share_of(example.make_batch(step), rank, 2) for rank in range(2)]
        sum(example.loss_fn(model, share)[0] / 2 for share in shares).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    metrics = {"resumed_from": 0, "step": 6, "loss": 0.0, "items": 32, "own_samples": 22}
    monkeypatch.setattr(example, "train", lambda storage, steps: SimpleNamespace(metrics=metrics, checkpoint=None))
    monkeypatch.setattr(example, "read", lambda checkpoint: {"model": model.state_dict()})
    assert example.compare("") == 1
    assert float(re.search(r"one process on whole batches: (\S+)", capsys.readouterr().out)[1]) > 1e-3


def loaded():
    spec = importlib.util.spec_from_file_location("ray_train", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------- a program that starts Ray


def output_of(program: Path) -> str:
    """Run it to its good end. It must leave no process behind."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # short: paths of sockets have 107 characters
        screen = Path(folder, "screen")
        environment = os.environ | {
            "RAY_TMPDIR": folder, "TMPDIR": folder, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or it leaves one in the home folder
        }  # fmt: skip
        environment.pop("RAY_ADDRESS", None)
        launched = started([sys.executable, program], screen, environment)
        most, deadline = 0, time.monotonic() + SECONDS
        try:
            while launched.poll() is None:
                assert time.monotonic() < deadline, f"running after {SECONDS} s:\n{screen.read_text()[-4000:]}"
                most = max(most, len(family_of(launched.pid)))
                time.sleep(0.5)
            deadline = time.monotonic() + SECONDS_TO_END
            while time.monotonic() < deadline and family_of(launched.pid):
                time.sleep(0.1)
            left = family_of(launched.pid)
        finally:
            end_family(launched)
        output = screen.read_text(errors="replace")
        assert launched.returncode == 0, output[-6000:]
        assert most > 5  # Ray's processes were seen
        assert left == {}
        return output
