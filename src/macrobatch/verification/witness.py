"""What happens inside a training step that nobody looks into: which inputs, which gradients, which optimizer steps.

`watch(step, model, batch, keep)` runs it once under hooks. The weights are put back after every optimizer step, so that
all windows of a step are gradients at the same weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from macrobatch.collectives import local
from macrobatch.split import leaves
from macrobatch.verification.gradient import Named
from macrobatch.verification.keep import Keep

Step = Callable[[nn.Module, Any], Any]


@dataclass(eq=False)
class Call:
    """One call of the model, with a graph.

    Attributes:
        inputs: the tensors that went in, by their path in the arguments.
        micro: calls with the same number had their backward at the same time.
        arrived: the largest gradients that came back through what it returned.
        nearby: those that reached a parameter in its backward, perhaps through something else.
    """

    inputs: dict[str, Tensor]
    micro: int
    arrived: list[Tensor] = field(default_factory=list)
    nearby: list[Tensor] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Whether a backward went through it that was not weighed with zero."""
        return any(float(largest) != 0 for largest in self.arrived or self.nearby)


@dataclass(eq=False)
class Window:
    """What led to one optimizer step: the calls of the model, and the gradients that the optimizer was handed.

    Attributes:
        held: the parameters that the optimizer holds, by name; of a step without an optimizer, all.
        sizes: for each parameter, the norm of its gradient when the last backward ended.
        repeats: how often the optimizer stepped again without a backward in between.
    """

    calls: list[Call]
    gradients: Named
    held: set[str]
    optimizers: list[Optimizer] = field(default_factory=list)
    sizes: dict[str, Tensor] = field(default_factory=dict)
    repeats: int = 0

    @property
    def size_before(self) -> float:
        """The norm of the gradient before anybody clipped or divided it."""
        return math.sqrt(sum(float(size) ** 2 for name, size in self.sizes.items() if name in self.held))

    @property
    def micro_batches(self) -> int:
        return len({call.micro for call in self.calls})


@dataclass(eq=False)
class Seen:
    """What a step did.

    Attributes:
        open: the calls after the last optimizer step, whose gradients no optimizer has seen.
        before, left: the gradients that it found when it began, and left when it returned.
        strangers: how often an optimizer stepped that holds no parameter of the model.
        unheld: parameters that require a gradient, and that no optimizer holds which stepped.
        modes: for each module, whether it was in training mode when the model was called.
        autocast: the dtype that autocast had on then.
        lowest: the dtype of the lowest precision that the first layer computed in.
    """

    windows: list[Window] = field(default_factory=list)
    open: list[Call] = field(default_factory=list)
    before: Named = field(default_factory=dict)
    left: Named = field(default_factory=dict)
    strangers: int = 0
    unheld: list[str] = field(default_factory=list)
    modes: list[bool] | None = None
    autocast: torch.dtype | None = None
    lowest: torch.dtype = torch.float64

    @property
    def stepped(self) -> bool:
        return any(window.optimizers for window in self.windows)


def watch(step: Step, model: nn.Module, batch: Any, keep: Keep, entries: Sequence[nn.Module]) -> Seen:
    """Run a step once, and put everything back but the gradients that it left.

    The calls of `entries` are taken for the calls of the model.
    """
    witness = Witness(model, keep)
    try:
        with witness.recording_calls(entries), witness.recording_precision(), witness.recording_steps():
            step(model, batch)
    finally:
        keep.restore_all_but_gradients()
    return witness.finish()


def recorded_calls(run: Callable[[], object], model: nn.Module, entries: Sequence[nn.Module]) -> list[Call]:
    """The calls of the model that happen in `run`."""
    witness = Witness(model, None)
    with witness.recording_calls(entries):
        run()
    return witness.seen.open


def entries_of(run: Callable[[], object], model: nn.Module) -> list[str]:
    """The names of the modules that `run` calls from outside: the model itself, or parts of it.

    Only those get hooks later: others may have been left without any for a reason.
    """
    found, depth = [], 0

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            nonlocal depth
            if depth == 0 and name not in found:
                found.append(name)
            depth += 1

        return hook

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    named = dict(model.named_modules())
    hooks = [module.register_forward_pre_hook(enter(name)) for name, module in named.items()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in named.values()]
    with removed(hooks):
        run()
    return found


class Witness:
    """Hooks on a model and on all optimizers, for the length of one step."""

    def __init__(self, model: nn.Module, keep: Keep | None) -> None:
        self._named = {bare(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self._named.items()}
        self._keep = keep
        self._micro = 0
        self._backward_came = False
        self._depth = 0
        self._backward = -1  # the last one that was seen
        self._sizes: dict[str, Tensor] = {}
        self._model = model
        self.seen = Seen(before=gradients_of(self._named))

    # ------------------------------------------------------------------------------------------ calls of the model

    @contextlib.contextmanager
    def recording_calls(self, entries: Sequence[nn.Module]) -> Iterator[None]:
        """What goes into the model, and whether a backward comes back through it."""
        hooks = [m.register_forward_pre_hook(self._before_call, with_kwargs=True) for m in entries]
        hooks += [m.register_forward_hook(self._after_call, always_call=True) for m in entries]
        hooks += [p.register_hook(self._reached_parameter) for p in self._named.values()]  # type: ignore[no-untyped-call]
        with removed(hooks):
            yield

    @contextlib.contextmanager
    def recording_precision(self) -> Iterator[None]:
        """In which precision the first layer computes; wrappers and libraries may decide that inside the forward."""
        layers = (m for m in self._model.modules() if any(True for _ in m.parameters(recurse=False)))
        layer = None if hasattr(self._model, "_orig_mod") else next(layers, None)  # a hook inside would break its graph
        with removed([] if layer is None else [layer.register_forward_pre_hook(self._note_precision)]):
            yield

    def _before_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1 and self._is_training_call():
            if self._backward_came:
                self._micro, self._backward_came = self._micro + 1, False
            tensors = {
                path: leaf.detach().clone()
                for path, leaf in leaves((args, kwargs), "inputs")
                if isinstance(leaf, Tensor) and leaf.ndim > 0
            }
            self.seen.open.append(Call(tensors, self._micro))
            if self.seen.modes is None:
                self.seen.modes = [module.training for module in self._model.modules()]

    def _note_precision(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_training_call():
            return
        for tensor in (*args, *layer.parameters(recurse=False)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.seen.lowest = min(self.seen.lowest, tensor.dtype, key=lambda dtype: dtype.itemsize)
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                self.seen.autocast = torch.get_autocast_dtype(device)

    def _after_call(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or not self._is_training_call():
            return
        call, reached = self.seen.open[-1], False
        for _, leaf in leaves(output, "output"):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                reached = True
                leaf.register_hook(lambda gradient: self._came_back(call.arrived, gradient))  # type: ignore[no-untyped-call]
        if not reached:
            self.seen.open.remove(call)  # nothing to train here

    def _came_back(self, sizes: list[Tensor], gradient: Tensor) -> None:
        self._backward_came = True
        gradient = dense(local(gradient).detach())
        sizes.append(gradient.abs().max() if gradient.numel() else gradient.new_zeros(()))

    def _reached_parameter(self, gradient: Tensor) -> None:
        for call in self.seen.open:
            if call.micro == self._micro:
                self._came_back(call.nearby, gradient)
        if self._backward != (backward := torch._C._current_graph_task_id()):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._note_sizes)

    def _note_sizes(self) -> None:
        gradients = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        self._sizes = {name: dense(local(grad).detach()).double().norm() for name, grad in gradients.items()}

    def _trained(self) -> list[Call]:
        """The open calls that a backward went through. Losses may use what a model computes without returning it."""
        direct = {call.micro for call in self.seen.open if call.arrived}
        return [call for call in self.seen.open if call.arrived or (call.nearby and call.micro not in direct)]

    def _is_training_call(self) -> bool:
        """Not an evaluation, and not checkpointing's second forward."""
        return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    # ------------------------------------------------------------------------------------------ optimizer steps

    @contextlib.contextmanager
    def recording_steps(self) -> Iterator[None]:
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        with removed([before(self._before_step), after(self._after_step)]):
            yield

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        assert self._keep is not None, "steps are recorded where they can be undone"
        if not self._held_by(optimizer):
            self.seen.strangers += 1
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._close(optimizer)
            return None

        def closed() -> Any:  # the last backward of the window is in there: the gradients are known after it
            loss = closure()
            self._close(optimizer)
            return loss

        return ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closed})

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._keep is not None:
            self._keep.restore_weights({id(p) for group in optimizer.param_groups for p in group["params"]})

    def _held_by(self, optimizer: Optimizer) -> set[str]:
        held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        return {self._names[each] for each in held if each in self._names}

    def _close(self, optimizer: Optimizer) -> None:
        """Take the gradients of a window. Several optimizers may step one after the other: that is one window."""
        held, windows = self._held_by(optimizer), self.seen.windows
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its own kernel
        gradients = gradients_of({name: p for name, p in self._named.items() if name in held}, scale)
        calls = self._trained()
        again = bool(windows) and any(own is optimizer for own in windows[-1].optimizers)
        if calls or not windows or (again and not _is_old(gradients, windows[-1].gradients)):
            self.seen.open = []
            windows.append(Window(calls, gradients, held, [optimizer], self._sizes))
        elif again:
            windows[-1].repeats += any(gradient is not None for gradient in gradients.values())
        else:
            windows[-1].gradients |= gradients
            windows[-1].held |= held
            windows[-1].optimizers.append(optimizer)

    def finish(self) -> Seen:
        """What was seen. Without any optimizer step, what the step left in ``.grad`` is its one window."""
        seen = self.seen
        seen.open = self._trained()
        seen.left = gradients_of(self._named)
        if not seen.windows:
            seen.windows.append(Window(seen.open, seen.left, set(self._named), sizes=self._sizes))
            seen.open = []
        held = set().union(*(window.held for window in seen.windows))
        seen.unheld = [name for name in self._named if name not in held]
        return seen


@contextlib.contextmanager
def removed(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """Hooks that are gone afterwards."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gradients_of(named: dict[str, nn.Parameter], scale: Tensor | None = None) -> Named:
    """A copy of the gradients, this rank's part of them, divided by `scale`."""
    return {name: None if p.grad is None else _copied(p.grad, scale) for name, p in named.items()}


def _copied(gradient: Tensor, scale: Tensor | None) -> Tensor:
    gradient = dense(local(gradient).detach())
    return gradient.clone() if scale is None else gradient.double() / scale.to(gradient.device, torch.float64)


def dense(gradient: Tensor) -> Tensor:
    """Embeddings may have sparse gradients."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _is_old(gradients: Named, before: Named) -> bool:
    """Whether nothing was added since: they are the same still, or cleared."""
    return all(
        gradient is None or not gradient.any() or ((old := before.get(name)) is not None and torch.equal(gradient, old))
        for name, gradient in gradients.items()
    )


def bare(name: str) -> str:
    """The name of a parameter without what wrappers put before it."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")
