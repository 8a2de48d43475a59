"""Saves and restores a model, its optimizers and the random number generators.

`Snapshot` in `_step` is the small version: it covers what one forward and backward change besides gradients.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._cut.trees import leaves
from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch.modules import buffers_of, wrapper_of
from macrobatch._torch.snapshot import Snapshot
from macrobatch._torch.tensors import hooks_after_accumulation, hooks_on_gradient


class SavedTensor(NamedTuple):
    """A tensor, and a copy of its values."""

    tensor: Tensor
    value: Tensor

    @staticmethod
    def of(tensor: Tensor) -> SavedTensor:
        return SavedTensor(tensor, local_tensor(tensor).detach().clone())

    def has_changed(self) -> bool:
        return self._has_other_layout() or not torch.equal(local_tensor(self.tensor).detach(), self.value)

    def _has_other_layout(self) -> bool:
        own = local_tensor(self.tensor)
        return (own.dtype, own.device, own.shape) != (self.value.dtype, self.value.device, self.value.shape)

    def restore(self) -> Tensor:
        """Copy the old values back into the tensor, and return it."""
        own = local_tensor(self.tensor)
        if self._has_other_layout():
            self.tensor.data = self.value.clone()  # e.g. a library has converted the model to bf16
            return self.tensor
        with torch.no_grad():
            own.detach().copy_(self.value)
        return self.tensor


class SavedState:
    """Saves everything that a step may change. Its parts can be restored separately.

    >>> model = nn.Linear(2, 1)
    >>> before, weight = SavedState(model), model.weight.tolist()
    >>> _ = nn.init.zeros_(model.weight)
    >>> before.restore()
    >>> model.weight.tolist() == weight
    True

    Args:
        batch: its tensors are saved too.
        is_sharded: whether modules swap their parameters during a forward, so that only their values are restored.
    """

    def __init__(self, model: nn.Module, batch: Any = None, *, is_sharded: bool = False) -> None:
        self._batch = {path: SavedTensor.of(leaf) for path, leaf in leaves(batch, "batch") if _is_writable(leaf)}
        self._attributes = SavedAttributes(model, is_sharded=is_sharded)
        self._parameters: dict[int, tuple[Tensor, SavedTensor, bool]] = {}
        self._gradients: list[tuple[Tensor, SavedTensor | None]] = []
        self.include_leaves(model.parameters())
        self._optimizers = [SavedOptimizer(optimizer) for optimizer in _optimizers_of(self._parameters.keys())]
        self._schedulers = _schedulers_of([state.optimizer for state in self._optimizers])
        self._snapshot = Snapshot([model])
        self._modules = [model]
        self._outer: list[SavedTensor] = []
        self.has_changed_outer = False

    def include_leaves(self, tensors: Iterable[Tensor]) -> None:
        """Save tensors outside of the model that the loss trains too."""
        for leaf in tensors:
            if id(leaf) not in self._parameters:
                self._parameters[id(leaf)] = leaf, SavedTensor.of(leaf), leaf.requires_grad
                self._gradients.append((leaf, None if leaf.grad is None else SavedTensor.of(leaf.grad)))

    def include_outer(self, tensors: Iterable[Tensor]) -> None:
        """Save tensors outside of the model that a step may change, such as those of another model."""
        own = set(self._parameters) | {id(buffer) for module in self._modules for buffer in module.buffers()}
        own |= {id(saved.tensor) for saved in self._batch.values()}
        self._outer += [SavedTensor.of(t) for t in tensors if id(t) not in own and t.is_leaf and type(t) in PLAIN]

    def include_optimizer(self, optimizer: Optimizer) -> None:
        """Save an optimizer that is about to step, and its parameters, unless they are saved already."""
        if all(state.optimizer is not optimizer for state in self._optimizers):
            self._optimizers.append(SavedOptimizer(optimizer))
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = parameter, SavedTensor.of(parameter), parameter.requires_grad

    def has_moved_weights(self) -> bool:
        """Whether any parameter has changed its value."""
        return any(saved.has_changed() for _, saved, _ in self._parameters.values())

    def changed_batch_paths(self) -> list[str]:
        """The paths of the tensors in the batch that have changed."""
        return [path for path, saved in self._batch.items() if saved.has_changed()]

    def restore(self) -> None:
        """Restore everything."""
        self.restore_all_but_gradients()
        self.restore_gradients()

    def restore_all_but_gradients(self) -> None:
        """Restore the model, the batch, the optimizers, the schedulers and the random number generators."""
        for saved in self._outer:
            if saved.has_changed():
                self.has_changed_outer = True
                saved.restore()
        self._attributes.restore()
        for saved in self._batch.values():
            if saved.has_changed():
                saved.restore()
        self._snapshot.restore()
        self.restore_weights(None)
        for parameter, _, requires_grad in self._parameters.values():
            parameter.requires_grad_(requires_grad)
        for state in self._optimizers:
            state.restore()
        for scheduler, state_dict in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state_dict))

    def restore_weights(self, only: set[int] | None) -> None:
        """Restore the values of the parameters with these ids (None: of all)."""
        for identity, (_, saved, _) in self._parameters.items():
            if only is None or identity in only:
                saved.restore()

    def restore_gradients(self) -> None:
        """Restore ``.grad``: the tensors and their values."""
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.restore()


PLAIN = (Tensor, nn.Parameter)
CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class SavedAttributes:
    """Saves the attributes of all modules: parameters, children, hooks, counters, generators, caches.

    Of a wrapper it saves only the mode, the buffers and a patched forward: torch manages the rest.

    >>> model = nn.Linear(2, 1)
    >>> model.calls, model.losses = 0, []
    >>> before = SavedAttributes(model)
    >>> model.calls += 1
    >>> model.losses.append(0.5)
    >>> before.restore()
    >>> model.calls, model.losses
    (0, [])
    """

    def __init__(self, model: nn.Module, *, is_sharded: bool = False) -> None:
        self._saved = []
        for module in model.modules():
            values = dict(vars(module))
            is_whole, buffers = not is_sharded and wrapper_of(module) is None, buffers_of(module)
            if not is_whole:
                values = {k: v for k, v in values.items() if k in ("training", "forward") or v is buffers}
            contents = [(value, copy.copy(value)) for value in values.values() if type(value) in CONTAINERS]
            tensors = [SavedTensor.of(value) for value in values.values() if _is_writable(value)]
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
                saved.restore()
            for generator, state in generators:
                generator.set_state(state)


def _refill(container: Any, content: Any) -> None:
    """Give a dict, list or set its old content back."""
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
    """Whether a value is a plain tensor whose elements do not share memory."""
    return type(value) is Tensor and value.is_leaf and value.layout == torch.strided and 0 not in value.stride()


class SavedOptimizer:
    """Saves the state and the settings of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._state = {parameter: _save_tree(state) for parameter, state in optimizer.state.items()}
        self._groups = [
            (group, _save_tree({key: value for key, value in group.items() if key != "params"}))
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        state = self.optimizer.state
        for parameter in [p for p in state if p not in self._state]:
            del state[parameter]
        for parameter, saved in self._state.items():
            state[parameter] = _restore_tree(saved)
        for group, saved in self._groups:
            group.update(_restore_tree(saved))


def _optimizers_of(own: Collection[int]) -> list[Optimizer]:
    """All optimizers in the process that hold a parameter with one of these ids."""
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return [
        optimizer
        for optimizer in optimizers
        if any(id(p) in own for group in getattr(optimizer, "param_groups", ()) for p in group["params"])
    ]


def _schedulers_of(optimizers: list[Optimizer]) -> list[tuple[LRScheduler, dict[str, Any]]]:
    """All schedulers of these optimizers, with copies of their states."""
    if not optimizers:
        return []
    schedulers = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    own = [each for each in schedulers if any(getattr(each, "optimizer", None) is one for one in optimizers)]
    return [(scheduler, copy.deepcopy(scheduler.state_dict())) for scheduler in own]


def _save_tree(tree: Any) -> Any:
    """Copy a tree, and remember which tensors it held."""
    if isinstance(tree, Tensor):
        return SavedTensor.of(tree)
    if isinstance(tree, dict):
        return {key: _save_tree(value) for key, value in tree.items()}
    return copy.deepcopy(tree)


def _restore_tree(tree: Any) -> Any:
    if isinstance(tree, SavedTensor):
        return tree.restore()
    if isinstance(tree, dict):
        return {key: _restore_tree(value) for key, value in tree.items()}
    return copy.deepcopy(tree)


# ---------------------------------------------------------------------------------------------- dropout


class DropoutSwitch:
    """Switches off the dropout of a model: it sets the probabilities in its modules to 0 until `restore`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> switch = DropoutSwitch(model)
    >>> switch.names, model[1].p
    (['1.p'], 0.0)
    >>> switch.restore()
    >>> model[1].p
    0.5
    """

    def __init__(self, model: nn.Module) -> None:
        self._changed: list[tuple[nn.Module, str, float]] = []
        self.names: list[str] = []
        for path, module in model.named_modules():
            for attribute in _dropout_attributes(module):
                self._changed.append((module, attribute, getattr(module, attribute)))
                self.names.append(f"{path}.{attribute}".lstrip("."))
                setattr(module, attribute, 0.0)

    def restore(self) -> None:
        for module, attribute, value in self._changed:
            setattr(module, attribute, value)


def _dropout_attributes(module: nn.Module) -> Iterable[str]:
    """The names of a module's attributes that hold dropout probabilities."""
    drops = "drop" in type(module).__name__.lower() or "stochasticdepth" in type(module).__name__.lower()
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and 0 < value <= 1 and ("drop" in name.lower() or (drops and name in ("p", "prob")))
    ]


@contextlib.contextmanager
def without_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Set ``.grad`` of these leaves to None inside the block, and restore it afterwards."""
    saved = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in saved:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in saved:
            leaf.grad = gradient


@contextlib.contextmanager
def without_post_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Remove post-accumulate hooks inside the block: an optimizer may step in one."""
    hooks = [hooks for p in parameters if (hooks := hooks_after_accumulation(p))]
    saved = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, content in zip(hooks, saved, strict=True):
            each.update(content)


def copy_hooks(own: dict[str, nn.Parameter], copied: dict[str, nn.Parameter]) -> None:
    """Copy the gradient hooks of parameters to those of a copied model: deepcopy leaves them out."""
    for name, parameter in own.items():
        for hook in hooks_on_gradient(parameter).values() if parameter.requires_grad else ():
            copied[name].register_hook(hook)  # type: ignore[no-untyped-call]
