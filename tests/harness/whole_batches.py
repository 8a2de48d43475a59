"""A MacroStep on real ranks that have different numbers of samples, compared with one process that has them all."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import reference
from harness.ranks import (
    Outcome,
    Tower,
    all_well,
    difference,
    full_weights,
    made,
    optimizer_for,
    same_on_all,
)
from harness.reference import Batch, Trainee, mean_loss, relative_error, sum_loss
from macrobatch import MacroStep


def counted_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    if not batch.items:
        return sum_loss(model, batch), 0
    return mean_loss(model, batch), batch.items


def own_batch(window: int, samples: int, rank: int) -> Batch:
    return reference.batch(samples, seed=100 * rank + window, items=None if samples else 0)


def train(
    filled: Sequence[Sequence[int]],
    wrap: Any,
    micro: Any = 2,
    loss_fn: Any = counted_loss,
    hoard: Any = None,
    **options: Any,
) -> Outcome:
    model = wrap(made(Tower))
    step = MacroStep(model, optimizer_for(model), loss_fn, micro=micro, max_norm=10.0, **options)
    step._graphs = hoard
    step._cutter._holds = step._cutter._holds or hoard is not None
    weights, results = [full_weights(model)], []
    for window, samples in enumerate(filled):
        results.append(step(own_batch(window, samples[dist.get_rank()], dist.get_rank())))
        weights.append(full_weights(model))
    return {
        "weights": weights,
        "loss": [result.loss for result in results],
        "items": [result.items for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "skipped": [bool(result.skipped) for result in results],
        "micro_batches": [result.micro_batches for result in results],
    }


def exact(outcomes: list[Outcome], filled: Sequence[Sequence[int]]) -> None:
    """Every window did what one process does with all its samples at once; one without any did nothing."""
    all_well(outcomes)
    same_on_all(outcomes, "weights", "loss", "items", "grad_norm", "skipped")
    model, found = made(Tower), outcomes[0]
    whole = Trainee(model, [optimizer_for(model)], [])
    for window, samples in enumerate(filled):
        batches = [own_batch(window, n, rank) for rank, n in enumerate(samples) if n]
        before = reference.weights_of(model)
        step = reference.whole_step(whole, batches, 10.0, reference.BY_COUNT) if batches else None
        taken = difference(found["weights"][window], found["weights"][window + 1])
        assert relative_error(taken, difference(before, reference.weights_of(model))) <= 1e-12, f"window {window}"
        assert found["skipped"][window] == (step is None)
        assert found["items"][window].item() == (step.items if step else 0)
        if step is not None:
            torch.testing.assert_close(found["loss"][window], step.loss, rtol=1e-12, atol=0)
            torch.testing.assert_close(found["grad_norm"][window], step.grad_norm, rtol=1e-12, atol=0)
