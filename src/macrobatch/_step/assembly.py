"""Make an engine from the arguments of `Accumulator` or `MacroStep`: check them, and choose the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from macrobatch._ranks.select import select_backend
from macrobatch._step import validation
from macrobatch._step.closing import Closing, TakeStep
from macrobatch._step.engine import Engine
from macrobatch._step.leaving import LeaveMean
from macrobatch._torch.contract import warn_about_unknown_torch
from macrobatch.errors import UsageError
from macrobatch.types import NonFinite, Options, Reduction


def engine_for(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    *,
    steps: int | Callable[[int], int] = 1,
    drops_short: bool = False,
    has_terms: bool = False,
    has_joint: bool = False,
    **options: Unpack[Options],
) -> Engine:
    """Check the arguments, and make an engine that takes an optimizer step when a window closes.

    Without an optimizer, the engine leaves the mean gradient in ``.grad``, for programs that clip and step themselves.
    """
    warn_about_unknown_torch()
    validation.require_options(options, Options.__annotations__)
    models = validation.all_of(nn.Module, model, "model")
    validation.require_gradients_of_samples(models)
    optimizers = () if optimizer is None else validation.all_of(Optimizer, optimizer, "optimizer")
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
    if optimizer is None:
        closing = _leaving(options, scaler)
    else:
        closing = _stepping(optimizers, options, scaler, counts_on_host=callable(steps))
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
        has_joint=has_joint,
    )


def _stepping(
    optimizers: Sequence[Optimizer], options: Options, scaler: GradScaler | None, *, counts_on_host: bool
) -> Closing:
    return TakeStep(
        validation.checked_optimizers(optimizers),
        validation.checked_schedulers(options.get("scheduler"), optimizers),
        scaler=scaler,
        max_norm=validation.checked_norm(options.get("max_norm")),
        nonfinite=validation.checked_choice("nonfinite", options.get("nonfinite", "raise"), NonFinite),
        counts_on_host=counts_on_host,
    )


def _leaving(options: Options, scaler: GradScaler | None) -> Closing:
    for name in ("scheduler", "max_norm", "nonfinite"):
        if options.get(name) is not None:
            raise UsageError(
                f"{name}= belongs to the optimizer step: without an optimizer, the program takes it itself."
            )
    return LeaveMean([], scaler)
