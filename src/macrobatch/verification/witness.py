"""Watches a training step that nobody looks into: which inputs, which gradients, which optimizer steps.

`watch(step, model, batch, ...)` runs it once under hooks. The weights are put back after every optimizer step, so that
all windows of a step are gradients at the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from macrobatch._cut.trees import leaves, map_tensors
from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch.autograd import backward_under_way, is_mapped, queue_callback
from macrobatch._torch.modules import can_have_compiled, is_compiled
from macrobatch.verification.gradient import Named, dense
from macrobatch.verification.keep import Keep
from macrobatch.verification.names import Names
from macrobatch.verification.seen import Aim, Arrival, Call, Seen, Sizes, Window, trained

Step = Callable[[nn.Module, Any], Any]


def watch(
    step: Step,
    model: nn.Module,
    batch: Any,
    keep: Keep,
    names: Names,
    entries: Sequence[nn.Module],
    *,
    times: float = 1.0,
) -> Seen:
    """Run a step once, and put everything back but the gradients that it left.

    The calls of `entries` are taken for the calls of the model. All gradients are made so many times as large, on
    their way to the parameters.
    """
    witness = Witness(model, names, keep, times)
    try:
        with (
            witness.recording_calls(entries),
            witness.recording_precision(),
            witness.recording_steps(),
            torch.set_grad_enabled(torch.is_grad_enabled()),  # a step may leave it switched off
        ):
            step(model, map_tensors(batch, lambda tensor: tensor))  # and may take its batch apart
        return witness.finish()
    finally:
        keep.restore_all_but_gradients()


def recorded_calls(
    run: Callable[[], object], model: nn.Module, names: Names, entries: Sequence[nn.Module]
) -> list[Call]:
    """The calls of the model that happen in `run`."""
    witness = Witness(model, names, None)
    with witness.recording_calls(entries):
        run()
    return witness.calls


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
    with removed(hooks), eager():
        run()
    return found


class Witness:
    """Hooks on a model and on all optimizers, for the length of one step."""

    def __init__(self, model: nn.Module, names: Names, keep: Keep | None, times: float = 1.0) -> None:
        self._model, self._names, self._keep, self._times = model, names, keep, times
        self._named = names.parameters()
        self._before = {id(p): name for name, p in self._named.items()}
        self._hooks: list[RemovableHandle] = []  # on parameters
        self._watched: set[int] = set()
        self._depth = 0
        self._call: Call | None = None  # that is under way
        self._backwards = 0
        self._graph: int | None = None  # the backward that is under way
        self._sizes: dict[str, Tensor] = {}  # norms of gradients when the last backward ended
        self._between: list[Sizes] = []
        self._begins = dict.fromkeys(self._named, 0)  # the first backward of each parameter's open window
        self._stepped_at: int | None = None  # the last optimizer step, by the number of backwards before it
        self._stepping: list[Optimizer] = []  # those whose step is under way
        self._evaluating = False  # whether one of them has called its closure
        self._cleared: list[tuple[int, dict[str, Tensor]]] = []  # norms at the first backward after a step
        self.calls: list[Call] = []
        self.seen = Seen(before=gradients_of(self._named))

    # ------------------------------------------------------------------------------------------ calls of the model

    @contextlib.contextmanager
    def recording_calls(self, entries: Sequence[nn.Module]) -> Iterator[None]:
        """What goes into the model, and whether a backward comes back through it."""
        before, after = outside_graphs(self._before_call), outside_graphs(self._after_call)
        hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in entries]
        hooks += [m.register_forward_hook(after, always_call=True) for m in entries]
        self._watch_parameters()
        with removed(hooks), removed(self._hooks):
            yield

    @contextlib.contextmanager
    def recording_precision(self) -> Iterator[None]:
        """In which precision the first layer computes; wrappers and libraries may decide that inside the forward."""
        layers = (m for m in self._model.modules() if any(True for _ in m.parameters(recurse=False)))
        layer = None if is_compiled(self._model) else next(layers, None)
        with removed([] if layer is None else [layer.register_forward_pre_hook(outside_graphs(self._note_precision))]):
            yield

    def _watch_parameters(self) -> None:
        """Hooks on those that the model has now, and that learn now: a step may replace, freeze and thaw them."""
        self._named = self._names.parameters()
        for parameter in self._named.values():
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                self._hooks.append(parameter.register_hook(self._reached_parameter))  # type: ignore[no-untyped-call]

    def _before_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or not self._is_training_call() or is_mapped():
            return
        self._graph = None  # whatever became of the last one
        if not self._evaluating:
            self._stepping = []  # one may have failed
        self._watch_parameters()
        tensors = {path: leaf for path, leaf in leaves((args, kwargs), "inputs") if isinstance(leaf, Tensor)}
        self._call = Call(
            {path: tensor.detach().clone() for path, tensor in tensors.items() if tensor.ndim > 0},
            number=len(self.calls),
            after=self._backwards,
            modes={module: module.training for module in self._model.modules()},
            learning=frozenset(name for name, p in self._named.items() if p.requires_grad),
        )

    def _note_precision(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._call is None:  # the step may have compiled the model
            return
        for tensor in (*args, *layer.parameters(recurse=False)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._call.lowest = min(self._call.lowest, tensor.dtype, key=lambda dtype: dtype.itemsize)
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                self._call.autocast = torch.get_autocast_dtype(device)

    def _after_call(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or self._call is None:
            return
        call, self._call = self._call, None
        for path, leaf in leaves(output, "output"):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._came_back(call, path))  # type: ignore[no-untyped-call]
                if call not in self.calls[-1:]:  # else there is nothing to train
                    self.calls.append(call)

    def _is_training_call(self) -> bool:
        """Not an evaluation, and not checkpointing's second forward."""
        return torch.is_grad_enabled() and backward_under_way() == -1

    # ------------------------------------------------------------------------------------------ backwards

    def _came_back(self, call: Call, path: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            gradient = dense(local_tensor(gradient).detach())
            call.arrived.append(Arrival(self._enter_backward(), _largest(gradient), path, _aim(gradient)))

        return hook

    def _reached_parameter(self, gradient: Tensor) -> Tensor | None:
        backward = self._enter_backward()
        largest = _largest(dense(local_tensor(gradient).detach()))
        for call in self.calls:
            if call.after == backward:
                call.nearby.append(Arrival(backward, largest))
        return None if self._times == 1.0 else gradient * self._times

    def _enter_backward(self) -> int:
        """The number of the backward that is under way. Reentrant checkpointing has others inside of it."""
        if self._graph is None:
            self._graph = backward_under_way()
            began = self._measure()
            if self._stepped_at == self._backwards:
                self._cleared.append((self._backwards, began))
            elif self._backwards:
                self._between.append(Sizes(self._backwards - 1, self._sizes, began))
            self._backwards += 1
            queue_callback(self._leave_backward)
        return self._backwards - 1

    def _leave_backward(self) -> None:
        self._graph = None
        self._sizes = self._measure()

    def _measure(self) -> dict[str, Tensor]:
        """The norms of the gradients, left where they are: the host does not look at them here."""
        gradients = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        return {name: dense(local_tensor(gradient).detach()).double().norm() for name, gradient in gradients.items()}

    # ------------------------------------------------------------------------------------------ optimizer steps

    @contextlib.contextmanager
    def recording_steps(self) -> Iterator[None]:
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        with removed([before(self._before_step), after(self._after_step)]):
            yield

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        assert self._keep is not None, "steps are recorded where they can be undone"
        self._keep.include(optimizer)
        self._watch_parameters()
        around = set().union(*(self._held_by(other) for other in self._stepping))
        self._stepping.append(optimizer)
        if around and self._held_by(optimizer) <= around:
            return None  # inside the step of another that holds the same, which has been seen
        own = {id(parameter) for parameter in self._named.values()}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.seen.replaced += [self._before[each] for each in held - own if each in self._before]
        if not held & own:
            self.seen.strangers += 1
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._close(optimizer)
            return None
        evaluations = 0

        def closed() -> Any:  # the last backward of the window is in there: the gradients are known after it
            nonlocal evaluations
            self._evaluating = True
            try:
                loss = closure()
            finally:
                self._evaluating = False
            evaluations += 1
            if evaluations == 1:
                self._close(optimizer)
            else:  # of the same window, but at other weights
                self.seen.evaluations += 1
                self._begin_windows(self._held_by(optimizer))
            return loss

        return ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closed})

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._stepping = [other for other in self._stepping if other is not optimizer]
        if self._keep is not None:
            self._keep.restore_weights({id(p) for group in optimizer.param_groups for p in group["params"]})

    def _held_by(self, optimizer: Optimizer) -> set[str]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name for name, parameter in self._named.items() if id(parameter) in held}

    def _close(self, optimizer: Optimizer) -> None:
        """Take the gradients of a window: of those parameters of an optimizer whose window began at the same time."""
        self.seen.stepped = True
        self._note_cleared()
        held = self._held_by(optimizer)
        for begin in sorted({self._begins[name] for name in held}):
            self._close_since(begin, {name for name in held if self._begins[name] == begin}, optimizer)
        self._begin_windows(held)

    def _note_cleared(self) -> None:
        """Whoever clears all gradients after one optimizer's step begins a new window for the other optimizers too."""
        for backward, sizes in self._cleared:
            for name in self._named:
                if name not in sizes or not sizes[name]:
                    self._begins[name] = backward
        self._cleared.clear()

    def _begin_windows(self, held: set[str]) -> None:
        self._stepped_at = self._backwards
        self._begins |= dict.fromkeys(held, self._backwards)

    def _close_since(self, begin: int, held: set[str], optimizer: Optimizer) -> None:
        """Several optimizers may step one after the other on the same calls: that is one window."""
        windows, calls = self.seen.windows, trained(self.calls, begin)
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its own kernel
        gradients = gradients_of({name: self._named[name] for name in held}, scale)
        before = next((window for window in reversed(windows) if window.held & held), None)
        if not calls and before is not None and _is_old(gradients, before.gradients):
            before.repeats += any(gradient is not None for gradient in gradients.values())
        elif windows and before is not windows[-1] and _same(calls, windows[-1].calls):
            windows[-1].gradients |= gradients
            windows[-1].held |= held
        else:
            between = [sizes for sizes in self._between if sizes.backward >= begin]
            windows.append(Window(calls, gradients, held, self._sizes, between))

    def finish(self) -> Seen:
        """What was seen. Without any optimizer step, what the step left in ``.grad`` is its one window."""
        seen, self._named = self.seen, self._names.parameters()
        seen.calls, seen.backwards = trained(self.calls), self._backwards
        seen.left = gradients_of(self._named)
        seen.added = self._names.strange()
        seen.changed = [] if self._keep is None else self._keep.changed()
        if seen.stepped:
            seen.open = trained(self.calls, self._stepped_at or 0)
        else:
            seen.windows.append(Window(seen.calls, seen.left, set(self._named), self._sizes, self._between))
            seen.moved = self._keep is not None and self._keep.has_moved()
        held = set().union(*(window.held for window in seen.windows))
        seen.unheld = [name for name, p in self._named.items() if p.requires_grad and name not in held]
        return seen


@contextlib.contextmanager
def removed(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """Hooks that are gone afterwards."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that `torch.compile` does not look into: it would compile it again for every state that it sees."""
    if not can_have_compiled():
        return hook
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def eager() -> contextlib.AbstractContextManager[object]:
    """Nothing runs compiled in here, so that no hook breaks a graph."""
    return torch.compiler.set_stance("force_eager") if can_have_compiled() else contextlib.nullcontext()


def _largest(gradient: Tensor) -> Tensor:
    return gradient.abs().max() if gradient.numel() else gradient.new_zeros(())


def _aim(gradient: Tensor) -> Aim | None:
    if gradient.ndim != 3 or not gradient.numel():
        return None
    return Aim(gradient.abs().amax(-1) > 0, gradient.argmin(-1), gradient.shape[-1])


def gradients_of(named: dict[str, nn.Parameter], scale: Tensor | None = None) -> Named:
    """A copy of the gradients, this rank's part of them, divided by `scale`."""
    return {name: None if p.grad is None else _copied(p.grad, scale) for name, p in named.items()}


def _copied(gradient: Tensor, scale: Tensor | None) -> Tensor:
    gradient = dense(local_tensor(gradient).detach())
    return gradient.clone() if scale is None else gradient.double() / scale.to(gradient.device, torch.float64)


def _is_old(gradients: Named, before: Named) -> bool:
    """Whether nothing was added since: they are the same still, or cleared."""
    return all(
        gradient is None or not gradient.any() or ((old := before.get(name)) is not None and torch.equal(gradient, old))
        for name, gradient in gradients.items()
    )


def _same(calls: list[Call], others: list[Call]) -> bool:
    return [call.number for call in calls] == [call.number for call in others]
