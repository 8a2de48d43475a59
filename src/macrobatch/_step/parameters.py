"""The parameters of the given models and optimizers, and the gradients of each window."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch._ranks.backend import Local
from macrobatch._step.gradients import Gradients
from macrobatch.errors import BackendError

logger = logging.getLogger("macrobatch")


class Parameters:
    """The parameters of some models and optimizers, by name. It searches the models again only after a change."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._seen: object = None
        self.shared = False  # whether optimizers hold a parameter twice
        if not any(parameter.requires_grad for parameter in self.named().values()):
            raise BackendError("no parameter of the given models requires a gradient: there is nothing to train.")

    def named(self, *, anew: bool = False) -> dict[str, nn.Parameter]:
        """All parameters, including frozen ones, each once. They may be frozen, unfrozen or replaced at any time.

        `anew`: search the models again, even if the optimizers hold the same parameters as before.
        """
        held = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        seen = [(id(p), p.requires_grad) for p in held]
        if anew or seen != self._seen:
            self._all = self._look_through(held)
            self._seen = seen
            self.shared = len(set(map(id, held))) < len(held)
        return self._all

    def _look_through(self, held: Sequence[Tensor]) -> dict[str, nn.Parameter]:
        known: set[int] = set()
        named: dict[str, nn.Parameter] = {}
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            for name, parameter in model.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    named[prefix + name] = parameter
        for stray in (p for p in held if id(p) not in known):
            raise BackendError(
                f"an optimizer holds a parameter of shape {tuple(stray.shape)} that belongs to no given model. Hand "
                "over all its models as a list, and make the optimizer after anything that replaces parameters."
            )
        return named


class GradientSource:
    """Makes the gradients of each window, before its first forward.

    Args:
        parameters: the parameters of the models.
        backend: the backend, which may hold gradients outside of ``.grad``.
        accumulate_dtype: gradients of narrower parameters are summed in this dtype.
    """

    def __init__(self, parameters: Parameters, backend: Local, accumulate_dtype: torch.dtype | None) -> None:
        self._parameters = parameters
        self._backend = backend
        self._accumulate_dtype = accumulate_dtype if backend.abilities.confines else None
        self._last: Gradients | None = None
        self._has_warned = False

    def begin_window(self) -> Gradients:
        """The gradients of a new window. The object of the last window is used again if the parameters are the same."""
        self._backend.drop_stale_gradients()
        named = self._parameters.named()
        if self._last is not None and self._last.are_of(named):
            self._last.begin()
        else:
            self._last = self._make(named)
        if self._last.had_stale and not self._has_warned:
            self._has_warned = True
            logger.warning("gradients that a backward() outside of any window had left were cleared (told once)")
        return self._last

    def _make(self, named: dict[str, nn.Parameter]) -> Gradients:
        backend = self._backend
        return Gradients(
            named,
            self._accumulate_dtype,
            backend.shards,
            held=None if backend.held_gradients() is None else backend.held_gradients,  # type: ignore[arg-type]
            may_move=backend.abilities.moves_gradients,
            are_views=backend.abilities.shows_views,
        )
