"""An engine of what users hand over: the arguments are checked, the backend is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from torch import nn
from torch.optim import Optimizer

from macrobatch._ranks.select import select_backend
from macrobatch._step import validation
from macrobatch._step.closing import TakeStep
from macrobatch._step.engine import Engine
from macrobatch._torch.contract import warn_about_unknown_torch
from macrobatch.types import NonFinite, Options, Reduction


def engine_for(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    steps: int | Callable[[int], int] = 1,
    drops_short: bool = False,
    has_terms: bool = False,
    **options: Unpack[Options],
) -> Engine:
    """The engine for these models, which takes a step at each close; the arguments are checked."""
    warn_about_unknown_torch()
    validation.require_options(options, Options.__annotations__)
    models = validation.all_of(nn.Module, model, "model")
    optimizers = validation.all_of(Optimizer, optimizer, "optimizer")
    steps = steps if callable(steps) else validation.checked_steps(steps, "steps")
    scaler = validation.checked_scaler(options.get("scaler"))
    reduction = validation.checked_choice("reduction", options.get("reduction", "mean"), Reduction)
    accumulate_dtype = validation.checked_dtype(options.get("accumulate_dtype"))
    backend = select_backend(
        models,
        sync=options.get("sync", "window"),
        gather=options.get("gather", "micro"),
        process_group=options.get("process_group"),
        accumulate_dtype=accumulate_dtype,
    )
    closing = TakeStep(
        validation.checked_optimizers(optimizers),
        validation.checked_schedulers(options.get("scheduler"), optimizers),
        scaler=scaler,
        max_norm=validation.checked_norm(options.get("max_norm")),
        nonfinite=validation.checked_choice("nonfinite", options.get("nonfinite", "raise"), NonFinite),
        counts_on_host=callable(steps),
    )
    return Engine(
        models,
        optimizers,
        backend,
        closing,
        steps=steps,
        reduction=reduction,
        scaler=scaler,
        accumulate_dtype=accumulate_dtype,
        drops_short=drops_short,
        has_terms=has_terms,
    )
