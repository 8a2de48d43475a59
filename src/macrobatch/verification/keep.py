"""A model, the optimizers that step it, and the random numbers: as they were, to be put back.

`Snapshot` is the small version of this, for what one forward and backward change besides gradients.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch.collectives import local
from macrobatch.snapshot import Snapshot


class Saved(NamedTuple):
    """A tensor and what was in it: both are put back, the one into its place, the other into the one."""

    tensor: Tensor
    value: Tensor

    @staticmethod
    def of(tensor: Tensor) -> Saved:
        return Saved(tensor, local(tensor).detach().clone())

    def restored(self) -> Tensor:
        """The tensor, with its old value."""
        own = local(self.tensor)
        if (own.dtype, own.device, own.shape) != (self.value.dtype, self.value.device, self.value.shape):
            self.tensor.data = self.value.clone()  # e.g. a library has made the whole model bf16
            return self.tensor
        with torch.no_grad():
            own.detach().copy_(self.value)
        return self.tensor


class Keep:
    """What a step may change, in parts that can be put back alone.

    >>> model = nn.Linear(2, 1)
    >>> before, weight = Keep(model), model.weight.tolist()
    >>> _ = nn.init.zeros_(model.weight)
    >>> before.restore()
    >>> model.weight.tolist() == weight
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, module.training, vars(module).get("forward")) for module in model.modules()]
        self._parameters = [(p, Saved.of(p), p.requires_grad) for p in model.parameters()]
        self._gradients = [(p, None if p.grad is None else Saved.of(p.grad)) for p in model.parameters()]
        self._buffers = [(module, dict(module._buffers)) for module in model.modules()]
        self._optimizers = [OptimizerState(optimizer) for optimizer in _optimizers_of(model)]
        self._schedulers = _schedulers_of([state.optimizer for state in self._optimizers])
        self._snapshot = Snapshot([model])

    def restore(self) -> None:
        """Put everything back."""
        self.restore_all_but_gradients()
        self.restore_gradients()

    def restore_all_but_gradients(self) -> None:
        """Put back the model, the optimizers and the random numbers."""
        for module, training, forward in self._modules:
            module.training = training
            if vars(module).get("forward") is not forward:  # patched by a library
                vars(module).pop("forward", None)
                if forward is not None:
                    vars(module)["forward"] = forward
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        self._snapshot.restore()
        self.restore_weights(None)
        for parameter, _, requires_grad in self._parameters:
            parameter.requires_grad_(requires_grad)
        for state in self._optimizers:
            state.restore()
        for scheduler, state_dict in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state_dict))

    def restore_weights(self, only: set[int] | None) -> None:
        """Put back the values of the parameters with these ids (None: of all)."""
        for parameter, saved, _ in self._parameters:
            if only is None or id(parameter) in only:
                saved.restored()

    def restore_gradients(self) -> None:
        """Put back ``.grad``: the tensors themselves, and what was in them."""
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.restored()


class OptimizerState:
    """The state and the settings of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._state = {parameter: _saved(state) for parameter, state in optimizer.state.items()}
        self._groups = [
            (group, _saved({key: value for key, value in group.items() if key != "params"}))
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        state = self.optimizer.state
        for parameter in [p for p in state if p not in self._state]:
            del state[parameter]
        for parameter, saved in self._state.items():
            state[parameter] = _restored(saved)
        for group, saved in self._groups:
            group.update(_restored(saved))


def _optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Those that hold a parameter of the model: which of them will step is not known yet."""
    own = {id(parameter) for parameter in model.parameters()}
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return [
        optimizer
        for optimizer in optimizers
        if any(id(p) in own for group in getattr(optimizer, "param_groups", ()) for p in group["params"])
    ]


def _schedulers_of(optimizers: list[Optimizer]) -> list[tuple[LRScheduler, dict[str, Any]]]:
    """With what they remember."""
    if not optimizers:
        return []
    schedulers = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    own = [each for each in schedulers if any(getattr(each, "optimizer", None) is one for one in optimizers)]
    return [(scheduler, copy.deepcopy(scheduler.state_dict())) for scheduler in own]


def _saved(tree: Any) -> Any:
    """A copy that remembers which tensors stood where."""
    if isinstance(tree, Tensor):
        return Saved.of(tree)
    if isinstance(tree, dict):
        return {key: _saved(value) for key, value in tree.items()}
    return copy.deepcopy(tree)


def _restored(tree: Any) -> Any:
    if isinstance(tree, Saved):
        return tree.restored()
    if isinstance(tree, dict):
        return {key: _restored(value) for key, value in tree.items()}
    return copy.deepcopy(tree)


# ---------------------------------------------------------------------------------------------- randomness, off


class Quiet:
    """Switches off the dropout of a model, by the probabilities that its modules hold, and on again.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> quiet = Quiet(model)
    >>> quiet.names, model[1].p
    (['1.p'], 0.0)
    >>> quiet.restore()
    >>> model[1].p
    0.5
    """

    def __init__(self, model: nn.Module) -> None:
        self._changed: list[tuple[nn.Module, str, float]] = []
        self.names: list[str] = []
        for path, module in model.named_modules():
            for attribute in _probabilities(module):
                self._changed.append((module, attribute, getattr(module, attribute)))
                self.names.append(f"{path}.{attribute}".lstrip("."))
                setattr(module, attribute, 0.0)

    def restore(self) -> None:
        for module, attribute, value in self._changed:
            setattr(module, attribute, value)


def _probabilities(module: nn.Module) -> Iterable[str]:
    """The names of a module's attributes that are probabilities of dropping something."""
    drops = "drop" in type(module).__name__.lower() or "stochasticdepth" in type(module).__name__.lower()
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and 0 < value <= 1 and ("drop" in name.lower() or (drops and name in ("p", "prob")))
    ]
