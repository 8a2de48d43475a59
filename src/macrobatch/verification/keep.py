"""A model, the optimizers that step it, and the random numbers: as they were, to be put back.

`Snapshot` is the small version of this, for what one forward and backward change besides gradients.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._cut.trees import leaves
from macrobatch._ranks.collectives import local_tensor
from macrobatch._step.snapshot import Snapshot
from macrobatch._torch.modules import buffers_of, wrapper_of


class Saved(NamedTuple):
    """A tensor and what was in it: both are put back, the one into its place, the other into the one."""

    tensor: Tensor
    value: Tensor

    @staticmethod
    def of(tensor: Tensor) -> Saved:
        return Saved(tensor, local_tensor(tensor).detach().clone())

    def has_changed(self) -> bool:
        return self._is_another() or not torch.equal(local_tensor(self.tensor).detach(), self.value)

    def _is_another(self) -> bool:
        own = local_tensor(self.tensor)
        return (own.dtype, own.device, own.shape) != (self.value.dtype, self.value.device, self.value.shape)

    def restored(self) -> Tensor:
        """The tensor, with its old value."""
        own = local_tensor(self.tensor)
        if self._is_another():
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

    Args:
        batch: whose tensors are kept too.
        shards: whether the parameters of the model come and go, so that they are not to be put back into their places.
    """

    def __init__(self, model: nn.Module, batch: Any = None, *, shards: bool = False) -> None:
        self._batch = {path: Saved.of(leaf) for path, leaf in leaves(batch, "batch") if _is_writable(leaf)}
        self._attributes = Attributes(model, shards=shards)
        self._parameters: dict[int, tuple[Tensor, Saved, bool]] = {}
        self._gradients: list[tuple[Tensor, Saved | None]] = []
        self.include_leaves(model.parameters())
        self._optimizers = [OptimizerState(optimizer) for optimizer in _optimizers_of(self._parameters.keys())]
        self._schedulers = _schedulers_of([state.optimizer for state in self._optimizers])
        self._snapshot = Snapshot([model])

    def include_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Keep tensors outside of the model too, which its loss trains."""
        for leaf in tensors:
            if id(leaf) not in self._parameters:
                self._parameters[id(leaf)] = leaf, Saved.of(leaf), leaf.requires_grad
                self._gradients.append((leaf, None if leaf.grad is None else Saved.of(leaf.grad)))

    def include(self, optimizer: Optimizer) -> None:
        """Keep an optimizer that is about to step, and what it holds, if they are not known yet."""
        if all(state.optimizer is not optimizer for state in self._optimizers):
            self._optimizers.append(OptimizerState(optimizer))
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = parameter, Saved.of(parameter), parameter.requires_grad

    def has_moved(self) -> bool:
        """Whether any value of a parameter has changed."""
        return any(saved.has_changed() for _, saved, _ in self._parameters.values())

    def changed(self) -> list[str]:
        """The tensors of the batch that have changed, by their paths."""
        return [path for path, saved in self._batch.items() if saved.has_changed()]

    def restore(self) -> None:
        """Put everything back."""
        self.restore_all_but_gradients()
        self.restore_gradients()

    def restore_all_but_gradients(self) -> None:
        """Put back the model, the optimizers and the random numbers."""
        self._attributes.restore()
        for saved in self._batch.values():
            if saved.has_changed():
                saved.restored()
        self._snapshot.restore()
        self.restore_weights(None)
        for parameter, _, requires_grad in self._parameters.values():
            parameter.requires_grad_(requires_grad)
        for state in self._optimizers:
            state.restore()
        for scheduler, state_dict in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state_dict))

    def restore_weights(self, only: set[int] | None) -> None:
        """Put back the values of the parameters with these ids (None: of all)."""
        for identity, (_, saved, _) in self._parameters.items():
            if only is None or identity in only:
                saved.restored()

    def restore_gradients(self) -> None:
        """Put back ``.grad``: the tensors themselves, and what was in them."""
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.restored()


CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class Attributes:
    """What the modules of a model hold, as it is now: parameters, children, hooks, counters, generators, caches.

    Only the mode, the buffers and a patched forward of a wrapper, whose other attributes are torch's own business.

    >>> model = nn.Linear(2, 1)
    >>> model.calls, model.losses = 0, []
    >>> before = Attributes(model)
    >>> model.calls += 1
    >>> model.losses.append(0.5)
    >>> before.restore()
    >>> model.calls, model.losses
    (0, [])
    """

    def __init__(self, model: nn.Module, *, shards: bool = False) -> None:
        self._saved = []
        for module in model.modules():
            values = dict(vars(module))
            is_whole, buffers = not shards and wrapper_of(module) is None, buffers_of(module)
            if not is_whole:
                values = {k: v for k, v in values.items() if k in ("training", "forward") or v is buffers}
            contents = [(value, copy.copy(value)) for value in values.values() if type(value) in CONTAINERS]
            tensors = [Saved.of(value) for value in values.values() if _is_writable(value)]
            generators = [(v, v.get_state()) for v in values.values() if isinstance(v, torch.Generator)]
            self._saved.append((module, is_whole, values, contents, tensors, generators))

    def restore(self) -> None:
        for module, is_whole, values, contents, tensors, generators in self._saved:
            now = vars(module)
            for name in [name for name in now if name not in values and (is_whole or name == "forward")]:
                del now[name]
            now.update(values)
            for container, content in contents:
                _refill(container, content)
            for saved in tensors:
                saved.restored()
            for generator, state in generators:
                generator.set_state(state)


def _refill(container: Any, content: Any) -> None:
    """Make a dict, list or set hold again what it held."""
    if _identities(container) == _identities(content):
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


def _identities(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]


def _is_writable(value: object) -> bool:
    """Whether it is a plain tensor of numbers, each in a place of its own."""
    return type(value) is Tensor and value.is_leaf and value.layout == torch.strided and 0 not in value.stride()


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


def _optimizers_of(own: Collection[int]) -> list[Optimizer]:
    """Those that hold a parameter with one of these ids: which of them will step is not known yet."""
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
