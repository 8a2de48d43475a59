"""A real limit: a process that cannot have the memory of its whole batch trains on it, as one that knew the size.

Every case is a process of its own, which is this file run as a program.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import environment
from harness.reference import relative_error
from macrobatch import MacroStep

MIB = 2**20
FEATURES = 2**15  # an activation has 0.25 MiB a sample

# By device: the samples of a batch, and the MiB that its process gets. The forward of the whole batch keeps two
# activations, 128 MiB on a CPU; a tenth of the room would do for one sample.
SIZES = {"cpu": (256, 80), "cuda": (1024, 320)}


# ------------------------------------------------------------------------------------------------- the limited process


class Wide(nn.Module):
    """Few weights, large activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, FEATURES), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def make(device: str, micro: Any) -> tuple[nn.Module, MacroStep, list[int]]:
    """With a list that gets the sizes of all micro-batches, those that fail included."""
    begun: list[int] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        begun.append(len(x))
        return model(x).square().mean()

    torch.manual_seed(0)
    model = Wide().double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    return model, MacroStep(model, optimizer, loss_fn, micro=micro), begun


def set_limit(device: str, room: int) -> None:
    """From here on there are so many bytes more than are in use now."""
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    else:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))


def lift_limit(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def train(device: str, micro: Any, batches: list[Tensor]) -> tuple[dict[str, Tensor], list[int], str]:
    """The weights after some windows, the sizes of the micro-batches that were begun, and the error, if any."""
    model, step, begun = make(device, micro)
    try:
        for batch in batches:
            step(batch)
    except (RuntimeError, MemoryError) as error:
        return {}, begun, str(error)
    return {name: p.detach() for name, p in model.named_parameters()}, begun, ""


def main(device: str) -> None:
    """The whole batch at once, then "auto" under the same limit, then, without it, the size that was found."""
    torch.set_num_threads(1)
    samples, room = SIZES[device]
    batches = [torch.randn(n, 4, dtype=torch.float64).to(device) for n in (samples, samples, samples - 3)]
    train(device, 2, [batches[0][:4]])  # some of torch is loaded at first use
    set_limit(device, room * MIB)
    _, whole, error = train(device, samples, batches)
    found, begun, _ = train(device, "auto", batches)
    lift_limit(device)
    size = begun[-2]  # of the last window; its last micro-batch may be smaller
    known, _, _ = train(device, size, batches)
    difference = relative_error(found, known)
    print(json.dumps({"whole": whole, "error": error, "begun": begun, "size": size, "difference": difference}))


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_trains_a_batch_that_does_not_fit(device):
    done = subprocess.run(
        [sys.executable, __file__, device], capture_output=True, text=True, timeout=120, env=environment()
    )
    assert done.returncode == 0, done.stderr
    seen, samples = json.loads(done.stdout), SIZES[device][0]
    assert "allocate" in seen["error"], "the whole batch must not fit, or this shows nothing"
    assert seen["whole"] == [samples]
    assert seen["begun"][0] == samples
    assert seen["begun"].count(samples) == 1, "what did not fit is not tried again"
    assert 1 < seen["size"] < samples
    assert seen["difference"] <= 1e-9


if __name__ == "__main__":
    main(*sys.argv[1:])
