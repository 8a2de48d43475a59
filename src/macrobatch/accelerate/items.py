"""Windows with items: one engine per set of models. Clipping and stepping is left to the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from macrobatch._assembly import checks_of_engines
from macrobatch._engine.closing import LeaveMean
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import IN_BETWEEN, LAST_OF_ALL
from macrobatch._ranks.select import select_backend
from macrobatch._terms.mean import Mean
from macrobatch._torch.modules import data_parallel_of
from macrobatch.accelerate.ranks import Sharing, sharing_of
from macrobatch.accelerate.words import in_words_of_accelerate
from macrobatch.errors import UsageError
from macrobatch.types import Items


class ItemCounter:
    """Adds losses with items to the windows of their models.

    Args:
        state: Accelerate's ``GradientState``.
        scaler: returns the GradScaler, or None.
    """

    def __init__(self, state: Any, scaler: Callable[[], Any]) -> None:
        self._state = state
        self._scaler = scaler
        self._engines: dict[frozenset[int], tuple[Engine, LeaveMean]] = {}
        self._before: dict[int, list[tuple[Tensor, Tensor]]] = {}  # gradients from before a window, by its `LeaveMean`

    @in_words_of_accelerate()
    def add(self, loss: Tensor, items: Items, models: Sequence[Any], *, closes: bool, keeps: bool) -> LeaveMean:
        """Add the backward of a micro-batch. In the last one, which `closes` the window, gradients become the mean over
        items.

        `keeps`: there were gradients before the window, which are to be added to its mean.

        Returns the object that knows whether the window had any items.
        """
        engine, closing = self._engine_of(models)
        if keeps and not engine.has_accumulated:
            self._before[id(closing)] = _taken_aside(models)
        engine.begin(LAST_OF_ALL if closes else IN_BETWEEN, after_forward=True)
        try:
            engine.backward(loss, items)
            engine.close()
        except BaseException:
            engine.give_up()
            if engine.window is not None and engine.window.is_broken:
                engine.discard()
            raise
        for parameter, gradient in self._before.pop(id(closing), ()) if closes else ():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return closing

    def discard(self, dropped: LeaveMean) -> None:
        """Drop the gradients of the window that `dropped` would close."""
        for engine, closing in self._engines.values():
            if closing is dropped:
                self._before.pop(id(closing), None)
                engine.discard()

    def expect(self, model: nn.Module) -> None:
        """Register a prepared model. The parameters of a sharded model must be known before its first forward."""
        if is_sharded(model) and any(p.requires_grad for p in model.parameters()):
            self._engine_of([model])

    def _engine_of(self, models: Sequence[Any]) -> tuple[Engine, LeaveMean]:
        """The engine of the models with these parameters, whatever they are wrapped in."""
        if not models or not all(isinstance(model, nn.Module) for model in models):
            raise UsageError(
                "backward(loss, items=...) needs to know the modules whose gradients it divides: pass them to "
                "accumulate(), as prepare() returned them. A bare tensor must become a parameter of an nn.Module."
            )
        key = frozenset().union(*map(_ids_of, models))
        open_keys = (other for other, (engine, _) in self._engines.items() if engine.has_accumulated)
        if any(other != key and not other.isdisjoint(key) for other in open_keys):
            raise UsageError(
                "accumulate() was given other models earlier in this window. Pass the same models to every "
                "accumulate() of a window that counts items."
            )
        if key not in self._engines:
            self._engines[key] = self._make_engine(models)
        return self._engines[key]

    def _make_engine(self, models: Sequence[Any]) -> tuple[Engine, LeaveMean]:
        if any(is_sharded(model) and not all(isinstance(p, DTensor) for p in model.parameters()) for model in models):
            raise UsageError(
                "accumulate() was given another model than prepare() returned, and fully_shard has gathered its "
                "parameters by now. Pass the prepared model itself."
            )
        if sharing_of(models, sends=False) is Sharing.APART:
            raise UsageError(
                f"there are {dist.get_world_size()} ranks, but the model is not wrapped: nothing exchanges its "
                "gradients. Pass it through accelerator.prepare(), and give accumulate() what that returns."
            )
        each = self._state.plugin_kwargs.get("sync_each_batch", False)
        backend = select_backend(
            models, sync="micro" if each else "window", gather="micro", process_group=None, accumulate_dtype=None
        )
        scaler = self._scaler()
        closing = LeaveMean([], scaler)
        objective = Mean("mean", scaler, backend, models, reads=True)
        return Engine(models, [], backend, closing, objective, checks=checks_of_engines()), closing


def is_sharded(model: nn.Module) -> bool:
    """Whether the model uses `fully_shard`, which shows other parameters between a forward and its backward."""
    return data_parallel_of(model) == "FSDPModule"


def _taken_aside(models: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """The parameters that have gradients, and copies of these, which are taken away."""
    taken = []
    for parameter in (p for model in models for p in model.parameters()):
        if parameter.grad is not None:
            taken.append((parameter, parameter.grad.clone()))
            parameter.grad = None
    return taken


def _ids_of(model: nn.Module) -> set[int]:
    return {id(model)} if is_sharded(model) else set(map(id, model.parameters()))
