"""The parameters of the given models and optimizers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch.errors import BackendError

REQUIRES_GRADIENT = operator.attrgetter("requires_grad")


class Parameters:
    """The parameters of some models and optimizers, by name. It searches the models again only after a change.

    Attributes:
        shared: whether optimizers hold a parameter twice.
        strays: leaf tensors that optimizers hold and no model. Backends do not know of them.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._seen: object = None
        self.shared = False
        self.strays: dict[str, Any] = {}  # that only optimizers hold, such as a temperature
        if not any(parameter.requires_grad for parameter in self.named().values()):
            raise BackendError("no parameter of the given models requires a gradient: there is nothing to train.")

    def named(self, *, anew: bool = False) -> dict[str, nn.Parameter]:
        """All parameters, including frozen ones, each once. They may be frozen, unfrozen or replaced at any time.

        `anew`: search the models again, even if the optimizers hold the same parameters as before.
        """
        held = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        seen = list(map(id, held)), list(map(REQUIRES_GRADIENT, held))
        if anew or seen != self._seen:
            self._all = self._search(held)
            self._seen = seen
            self.shared = len(set(map(id, held))) < len(held)
        return self._all

    def _search(self, held: Sequence[Tensor]) -> dict[str, nn.Parameter]:
        self.strays = {}
        known: set[int] = set()
        named: dict[str, nn.Parameter] = {}
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            for name, parameter in model.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    named[prefix + name] = parameter
        for stray in (p for p in held if id(p) not in known):
            if isinstance(stray, nn.Parameter):
                raise BackendError(
                    f"an optimizer holds a parameter of shape {tuple(stray.shape)} that belongs to no given model. "
                    "Hand over all its models as a list, and make the optimizer after anything that replaces "
                    "parameters."
                )
            known.add(id(stray))
            self.strays[f"optimizer tensor {len(self.strays)}"] = stray
        return named | self.strays
