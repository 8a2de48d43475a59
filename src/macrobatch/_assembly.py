"""Make an engine from the arguments of `Accumulator` or `MacroStep`: check them, and choose its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, Unpack

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from macrobatch._border import arguments
from macrobatch._checks import catalogue
from macrobatch._engine.closing import Closing, LeaveMean, TakeStep
from macrobatch._engine.engine import Engine
from macrobatch._engine.events import Check
from macrobatch._engine.objective import Objective
from macrobatch._ranks.backend import Local
from macrobatch._ranks.select import select_backend
from macrobatch._terms.mean import Mean
from macrobatch._torch.contract import warn_about_unknown_torch
from macrobatch.errors import UsageError
from macrobatch.types import NonFinite, Options, Reduction

E = TypeVar("E", bound=Engine)
MakeObjective = Callable[[Reduction, GradScaler | None, Local, Sequence[nn.Module]], Objective]


def checks_of_engines() -> list[Check]:
    """New checks for an engine, or none if they are turned off."""
    return [check() for check in catalogue.OF_ENGINES] if catalogue.are_on() else []


def engine_for(
    kind: type[E],
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None,
    *,
    steps: int | Callable[[int], int] = 1,
    drops_short: bool = False,
    objective: MakeObjective = Mean,
    checks: Sequence[Check] = (),
    narrows: bool = True,
    **options: Unpack[Options],
) -> E:
    """Check the arguments, and make an engine. Without an optimizer, it leaves the mean gradient in ``.grad``."""
    warn_about_unknown_torch()
    arguments.require_options(options, Options.__annotations__)
    models = arguments.checked_models(model)
    arguments.require_gradients_of_samples(models)
    optimizers = () if optimizer is None else arguments.checked_optimizers(optimizer)
    steps = steps if callable(steps) else arguments.checked_steps(steps, "steps")
    scaler = arguments.checked_scaler(options.get("scaler"))
    reduction = arguments.checked_choice("reduction", options.get("reduction", "mean"), Reduction)
    accumulate_dtype = arguments.checked_dtype(options.get("accumulate_dtype"))
    backend = select_backend(
        models,
        sync=options.get("sync", "window"),
        gather=options.get("gather", "micro"),
        process_group=options.get("process_group"),
        accumulate_dtype=accumulate_dtype,
        leaves_mean=optimizer is None,
    )
    closing: Closing
    if optimizer is None:
        _refuse_step_options(options)
        closing = LeaveMean([], scaler, narrows=narrows)
    else:
        closing = TakeStep(
            optimizers,
            arguments.checked_schedulers(options.get("scheduler"), optimizers),
            scaler=scaler,
            max_norm=arguments.checked_norm(options.get("max_norm")),
            nonfinite=arguments.checked_choice("nonfinite", options.get("nonfinite", "raise"), NonFinite),
            counts_on_host=callable(steps),
        )
    return kind(
        models,
        optimizers,
        backend,
        closing,
        objective(reduction, scaler, backend, models),
        steps=steps,
        checks=[*checks_of_engines(), *checks],
        accumulate_dtype=accumulate_dtype,
        drops_short=drops_short,
    )


def _refuse_step_options(options: Options) -> None:
    for name in ("scheduler", "max_norm", "nonfinite"):
        if options.get(name) is not None:
            raise UsageError(
                f"{name}= belongs to the optimizer step: without an optimizer, the program takes it itself."
            )
