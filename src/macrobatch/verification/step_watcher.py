"""Watches a training step from outside, through hooks: its model calls, gradients and optimizer steps.

`watch(step, model, batch, ...)` runs the step once. It restores the weights after every optimizer step, so that the
gradients of all windows are taken at the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from macrobatch._cut.trees import leaves, map_tensors
from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch.autograd import backward_under_way, is_mapped, queue_callback, watching_backwards
from macrobatch._torch.draws import Drawing, RandomOperations
from macrobatch._torch.graph import reach_of
from macrobatch._torch.modules import can_have_compiled, is_compiled, run_eagerly
from macrobatch.verification.copies import gradients_of_copies, is_same
from macrobatch.verification.draws import Draw
from macrobatch.verification.gradient import NamedGradients, as_dense
from macrobatch.verification.names import Names
from macrobatch.verification.observation import (
    Arrival,
    Call,
    LossTargets,
    NamedTensors,
    NormChange,
    Observation,
    ObservedWindow,
)
from macrobatch.verification.readings import Reading, read
from macrobatch.verification.saved_state import SavedState

Step = Callable[[nn.Module, Any], Any]


def watch(
    step: Step,
    model: nn.Module,
    batch: Any,
    saved_state: SavedState,
    names: Names,
    entries: Sequence[nn.Module],
    *,
    times: float = 1.0,
    has_draws: bool = False,
) -> Observation:
    """Run a step once, then restore everything except ``.grad``.

    Calls of `entries` count as calls of the model. Hooks multiply all gradients by `times` before they are accumulated.
    `has_draws`: note the random numbers that its forwards draw.
    """
    watcher = StepWatcher(model, names, saved_state, times)
    try:
        with (
            watcher.watch_calls(entries),
            watcher.watch_precision(),
            watcher.watch_steps(),
            watching_backwards(watcher.read_losses),
            RandomOperations(watcher.note_draw) if has_draws else contextlib.nullcontext(),
            torch.set_grad_enabled(torch.is_grad_enabled()),  # a step may leave gradients switched off
        ):
            step(model, map_tensors(batch, lambda tensor: tensor))  # a step may empty the containers of its batch
        return watcher.finish()
    finally:
        saved_state.restore_all_but_gradients()


def calls_during(run: Callable[[], object], model: nn.Module, names: Names, entries: Sequence[nn.Module]) -> list[Call]:
    """The calls of the model during `run()`."""
    watcher = StepWatcher(model, names, None)
    with watcher.watch_calls(entries):
        run()
    return watcher.calls


def names_of_entries(run: Callable[[], object], model: nn.Module) -> list[str]:
    """The names of the modules that `run()` calls directly: the model itself, or parts of it.

    Only these get hooks later, because hooks on other modules could change which path the loss takes.
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
    with temporary_hooks(hooks), run_eagerly():
        run()
    return found


class StepWatcher:
    """Holds hooks on a model and on all optimizers during one step."""

    def __init__(self, model: nn.Module, names: Names, saved_state: SavedState | None, times: float = 1.0) -> None:
        self._model, self._names, self._saved, self._times = model, names, saved_state, times
        self._named = names.parameters()
        self._names_by_id = {id(p): name for name, p in self._named.items()}
        self._hooks: list[RemovableHandle] = []  # on parameters
        self._hooked_ids: set[int] = set()
        self._depth = 0
        self._call: Call | None = None
        self._num_backwards = 0
        self._backward: int | None = None
        self._norms: dict[str, Tensor] = {}  # of the gradients at the end of the last backward
        self._raw: NamedGradients = {}  # these gradients
        self._readings: dict[int, Reading] = {}  # by the number of their backward
        self._own_backwards: set[int] = set()  # those whose graph has no leaves outside of the model
        # On several ranks, and in copies, weights and the gradients between backwards are not looked at.
        self._is_alone = saved_state is not None and not (dist.is_available() and dist.is_initialized())
        self._at_start = self._copy_weights()
        self._weights = dict(self._at_start)  # as the step was last seen to have them
        self._moved_weights: list[NamedTensors | None] = [None]  # after each change by hand; None: as at the start
        self._norm_changes: list[NormChange] = []
        self._window_starts = dict.fromkeys(self._named, 0)  # the first backward of each parameter's open window
        self._last_step: int | None = None  # how many backwards came before the last optimizer step
        self._last_foreign_step: int | None = None  # the same, for optimizers of other parameters
        self._active_optimizers: list[Optimizer] = []
        self._last_hooks: list[RemovableHandle] = []  # on optimizers that step, behind their own
        self._is_in_closure = False  # whether an optimizer is running its closure
        self._norms_after_step: list[tuple[int, dict[str, Tensor]]] = []  # at the first backward after a step
        self.calls: list[Call] = []
        self.observation = Observation(initial_gradients=copy_gradients(self._named))

    # ------------------------------------------------------------------------------------------ calls of the model

    @contextlib.contextmanager
    def watch_calls(self, entries: Sequence[nn.Module]) -> Iterator[None]:
        """Note the inputs of each call, and the gradients that arrive at its outputs."""
        before, after = exclude_from_compile(self._before_call), exclude_from_compile(self._after_call)
        hooks = [m.register_forward_pre_hook(before, with_kwargs=True) for m in entries]
        hooks += [m.register_forward_hook(after, always_call=True) for m in entries]
        self._watch_parameters()
        with temporary_hooks(hooks), temporary_hooks(self._hooks):
            yield

    @contextlib.contextmanager
    def watch_precision(self) -> Iterator[None]:
        """Note the precision of the first layer, which wrappers and libraries may choose inside the forward."""
        layers = (m for m in self._model.modules() if any(True for _ in m.parameters(recurse=False)))
        layer = None if is_compiled(self._model) else next(layers, None)
        hook = exclude_from_compile(self._note_precision)
        with temporary_hooks([] if layer is None else [layer.register_forward_pre_hook(hook)]):
            yield

    def _watch_parameters(self) -> None:
        """Put hooks on all trainable parameters: a step may have replaced or unfrozen some since the last time."""
        self._named = self._names.parameters()
        for parameter in self._named.values():
            if parameter.requires_grad and id(parameter) not in self._hooked_ids:
                self._hooked_ids.add(id(parameter))
                self._hooks.append(parameter.register_hook(self._parameter_hook))  # type: ignore[no-untyped-call]

    def _before_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or not self._is_training_call() or is_mapped():
            return
        self._backward = None  # the last one may have failed
        if not self._is_in_closure:
            self._active_optimizers = []  # a step may have failed
            self._note_changed_weights()
        self._watch_parameters()
        tensors = {path: leaf for path, leaf in leaves((args, kwargs), "inputs") if isinstance(leaf, Tensor)}
        self._call = Call(
            {path: tensor.detach().clone() for path, tensor in tensors.items() if tensor.ndim > 0},
            number=len(self.calls),
            backwards_before=self._num_backwards,
            moves_before=len(self._moved_weights) - 1,
            modes={module: module.training for module in self._model.modules()},
            trainable_names=frozenset(name for name, p in self._named.items() if p.requires_grad),
        )

    def _note_precision(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._call is None:  # the step may have compiled the model
            return
        for tensor in (*args, *layer.parameters(recurse=False)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._call.lowest_dtype = min(self._call.lowest_dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                self._call.autocast_dtype = torch.get_autocast_dtype(device)

    def _after_call(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or self._call is None:
            return
        call, self._call = self._call, None
        self._weights = self._copy_weights()  # a forward may normalise them
        for path, leaf in leaves(output, "output"):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._output_hook(call, path))  # type: ignore[no-untyped-call]
                if call not in self.calls[-1:]:  # a call without a trainable output is not listed
                    self.calls.append(call)

    def _is_training_call(self) -> bool:
        """Whether a call is neither an evaluation nor the recomputation of a checkpoint."""
        return torch.is_grad_enabled() and backward_under_way() == -1

    # ------------------------------------------------------------------------------------------ backwards

    def _output_hook(self, call: Call, path: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None:  # of an output that the loss does not use, under DDP that looks for such
                return
            gradient = as_dense(local_tensor(gradient).detach())
            arrival = Arrival(self._enter_backward(), _largest(gradient), path, _loss_targets(gradient))
            call.output_gradients.append(arrival)

        return hook

    def _parameter_hook(self, gradient: Tensor) -> Tensor | None:
        backward = self._enter_backward()
        largest = _largest(as_dense(local_tensor(gradient).detach()))
        for call in self.calls:
            if call.backwards_before == backward:
                call.parameter_gradients.append(Arrival(backward, largest))
        return None if self._times == 1.0 else gradient * self._times

    def _enter_backward(self) -> int:
        """Note that a backward runs, and return its number. Reentrant checkpoints run more backwards inside it."""
        if self._backward is None:
            self._backward = backward_under_way()
            began = self._measure()
            if self._num_backwards == self._last_foreign_step:
                self.observation.has_foreign_leftover |= any(bool(norm) for norm in began.values())
            if self._num_backwards in (self._last_step, self._last_foreign_step):
                self._norms_after_step.append((self._num_backwards, began))
            elif self._num_backwards:
                self._norm_changes.append(NormChange(self._num_backwards - 1, self._norms, began))
            self._num_backwards += 1
            queue_callback(self._leave_backward)
        return self._num_backwards - 1

    def _leave_backward(self) -> None:
        self._backward = None
        self._norms = self._measure()
        self._raw = copy_gradients(self._named) if self._is_alone else {}

    def read_losses(self, losses: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        """Note what the loss of a backward says, before it runs."""
        if self._num_backwards in self._readings:
            del self._readings[self._num_backwards]  # of a backward that reached no parameter
        self._own_backwards.discard(self._num_backwards)
        own = {id(parameter) for parameter in self._named.values()}
        if all(id(leaf) in own for loss in losses if loss.requires_grad for leaf in reach_of(loss).leaves):
            self._own_backwards.add(self._num_backwards)
        if (reading := read(self._num_backwards, losses, seeds)) is not None:
            self._readings[self._num_backwards] = reading

    def note_draw(self, drawing: Drawing) -> None:
        """Note random numbers that a forward draws."""
        if backward_under_way() == -1:
            value = None if drawing.result is None else drawing.result.clone()
            self.observation.draws.append(Draw(self._num_backwards, drawing.name, value))

    # ------------------------------------------------------------------------------------------ changes by hand

    def _copy_weights(self) -> NamedTensors:
        if not self._is_alone:
            return {}
        return {name: p.detach().clone() for name, p in self._named.items()}

    def _note_changed_weights(self) -> None:
        """Close a window where code of the step has changed the weights itself, after a backward."""
        if not self._is_alone or not self._num_backwards:
            return
        before, now = self._weights, self._copy_weights()
        moved = {name for name, weight in now.items() if name in before and not is_same(weight, before[name])}
        if not moved:
            return
        self._weights = now
        self._restart_cleared_windows()
        is_start = all(is_same(now[name], self._at_start[name]) for name in moved if name in self._at_start)
        received = {name for name in moved if self._raw.get(name) is not None}  # not a moving average of others
        received = {name for name in received if self._window_starts[name] < self._num_backwards}
        if received and not is_start:
            held = set().union(*(window.names for window in self.observation.windows if window.update is None))
            names = received | {name for name in now if name not in held and self._named[name].requires_grad}
            gradients = copy_gradients({name: self._named[name] for name in names})
            is_cleared = all(gradient is None or not gradient.any() for gradient in gradients.values())
            window = self._new_window(min(self._window_starts[name] for name in received), names, gradients)
            if window.calls:
                window.gradients = {name: self._raw.get(name) for name in names} if is_cleared else gradients
                window.update = {name: before[name] - now[name] for name in names}
                window.is_cleared = is_cleared
                self.observation.windows.append(window)
                self._begin_windows(names)
        if not is_start or self._moved_weights[-1] is not None:
            self._moved_weights.append(None if is_start else now)

    def _new_window(self, begin: int, names: set[str], gradients: NamedGradients) -> ObservedWindow:
        calls = Call.with_backward(self.calls, begin)
        moves = sorted({call.moves_before for call in calls})
        readings = [reading for backward, reading in self._readings.items() if backward >= begin]
        is_read = {call.first_backward for call in calls} <= {reading.backward for reading in readings}
        return ObservedWindow(
            calls,
            gradients,
            names,
            self._norms,
            [sizes for sizes in self._norm_changes if sizes.backward >= begin],
            raw={name: self._raw.get(name) for name in names} if self._raw else {},
            readings=[readings] if is_read else [],
            weights=self._moved_weights[moves[0]] if moves else None,
            has_mixed_weights=len(moves) > 1,
        )

    def _measure(self) -> dict[str, Tensor]:
        """The norms of the gradients, as tensors on their device: the host does not wait for them."""
        gradients = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        return {name: as_dense(local_tensor(gradient).detach()).double().norm() for name, gradient in gradients.items()}

    # ------------------------------------------------------------------------------------------ optimizer steps

    @contextlib.contextmanager
    def watch_steps(self) -> Iterator[None]:
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        with temporary_hooks([before(self._before_step), after(self._after_step)]):
            try:
                yield
            finally:
                self._drop_last_hooks()

    def _drop_last_hooks(self) -> None:
        while self._last_hooks:
            self._last_hooks.pop().remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        assert self._saved is not None, "optimizer steps are watched only where they can be undone"
        self._saved.include_optimizer(optimizer)
        self._watch_parameters()
        around = set().union(*(self._names_held_by(other) for other in self._active_optimizers))
        self._active_optimizers.append(optimizer)
        if around and self._names_held_by(optimizer) <= around:
            return None  # it runs inside the step of another optimizer that holds the same parameters
        own = {id(parameter) for parameter in self._named.values()}
        held = _parameter_ids(optimizer)
        self.observation.replaced_names += [self._names_by_id[i] for i in held - own if i in self._names_by_id]
        copies = {} if held & own or not self._is_alone else gradients_of_copies(optimizer, self._named)
        if copies:
            self._close_windows(optimizer, copies)
            return None
        if not held & own:
            self.observation.num_foreign_steps += 1
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            self.observation.has_foreign_gradients |= any(gradient is not None for gradient in gradients)
            self._last_foreign_step = self._num_backwards
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            # After the optimizer's own hooks: they may still change the gradients. Once: its step may call that of a
            # parent class, which runs all hooks again.
            once = [self._close_windows]

            def close(*_: object) -> None:
                while once:
                    once.pop()(optimizer)

            self._last_hooks.append(optimizer.register_step_pre_hook(close))
            return None
        evaluations = 0

        def watched_closure() -> Any:  # it runs the last backward of the window
            nonlocal evaluations
            self._is_in_closure = True
            try:
                loss = closure()
            finally:
                self._is_in_closure = False
            evaluations += 1
            if evaluations == 1:
                self._close_windows(optimizer)
            else:  # the same window at other weights
                self.observation.num_reevaluations += 1
                self._begin_windows(self._names_held_by(optimizer))
            return loss

        if len(args) > 1:
            return (args[0], watched_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched_closure}

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._active_optimizers = [other for other in self._active_optimizers if other is not optimizer]
        self._drop_last_hooks()
        if self._saved is not None:
            self._saved.restore_weights(_parameter_ids(optimizer))
            if self._is_alone:
                self._weights = self._copy_weights()
                if self._moved_weights[-1] is not None and all(
                    is_same(weight, self._at_start.get(name)) for name, weight in self._weights.items()
                ):
                    self._moved_weights.append(None)

    def _names_held_by(self, optimizer: Optimizer) -> set[str]:
        held = _parameter_ids(optimizer)
        return {name for name, parameter in self._named.items() if id(parameter) in held}

    def _close_windows(self, optimizer: Optimizer, copies: NamedGradients | None = None) -> None:
        """Close the windows of an optimizer's parameters: one for all parameters whose windows began together.

        `copies`: the gradients of an optimizer that holds copies of the parameters.
        """
        self.observation.has_stepped = True
        self._restart_cleared_windows()
        names = self._names_held_by(optimizer) if copies is None else set(copies)
        for window in self.observation.windows:
            window.is_probe |= window.update is not None and bool(window.names & names)
        for begin in sorted({self._window_starts[name] for name in names}):
            own = {name for name in names if self._window_starts[name] == begin}
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by this in its own kernel
            gradients = copy_gradients({name: self._named[name] for name in own}, scale)
            self._close_window(begin, own, gradients if copies is None else {name: copies[name] for name in own})
        self._begin_windows(names)

    def _restart_cleared_windows(self) -> None:
        """Begin a new window for all parameters whose gradients were cleared after an optimizer step."""
        for backward, sizes in self._norms_after_step:
            cleared = [name for name in self._named if name not in sizes or not sizes[name]]
            dropped = [self._own_backwards & set(range(self._window_starts[name], backward)) for name in cleared]
            if self._last_foreign_step is not None and len(cleared) == len(self._named):
                self.observation.num_dropped += len(min(dropped, key=len, default=set()))
            self._window_starts |= dict.fromkeys(cleared, backward)
        self._norms_after_step.clear()

    def _begin_windows(self, names: set[str]) -> None:
        self._last_step = self._num_backwards
        self._window_starts |= dict.fromkeys(names, self._num_backwards)

    def _close_window(self, begin: int, names: set[str], gradients: NamedGradients) -> None:
        """Add a window, or add to the last one: optimizers that step in turn on the same calls share a window."""
        windows, window = self.observation.windows, self._new_window(begin, names, gradients)
        before = next((window for window in reversed(windows) if window.names & names), None)
        if not window.calls and before is not None and _is_unchanged(gradients, before.gradients):
            before.num_repeated_steps += any(gradient is not None for gradient in gradients.values())
        elif windows and before is not windows[-1] and _are_same_calls(window.calls, windows[-1].calls):
            windows[-1].gradients |= gradients
            windows[-1].raw |= window.raw
            windows[-1].names |= names
        else:
            windows.append(window)

    def finish(self) -> Observation:
        """Return what was observed. Without any optimizer step, the final ``.grad`` is the only window."""
        observation, self._named = self.observation, self._names.parameters()
        self._note_changed_weights()
        observation.calls, observation.num_backwards = Call.with_backward(self.calls), self._num_backwards
        observation.num_calls = len(self.calls)
        observation.final_gradients = copy_gradients(self._named)
        observation.added_names = self._names.unknown_names()
        observation.changed_batch_paths = [] if self._saved is None else self._saved.changed_batch_paths()
        if observation.has_stepped:
            last = max(self._last_step or 0, self._last_foreign_step or 0)  # GAN: the other model's backward comes last
            observation.open_calls = Call.with_backward(self.calls, last)
        elif not observation.windows:
            observation.windows.append(self._new_window(0, set(self._named), observation.final_gradients))
            observation.has_moved_weights = self._saved is not None and self._saved.has_moved_weights()
        observation.has_moved_weights |= any(window.update is not None for window in observation.windows)
        names = set().union(*(window.names for window in observation.windows))
        observation.unoptimized_names = [n for n, p in self._named.items() if p.requires_grad and n not in names]
        return observation


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


@contextlib.contextmanager
def temporary_hooks(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove hooks when the block ends."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def exclude_from_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `torch.compile` out of a hook, which it would compile again for every state of the watcher."""
    if not can_have_compiled():
        return hook
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _largest(gradient: Tensor) -> Tensor:
    return gradient.abs().max() if gradient.numel() else gradient.new_zeros(())


def _loss_targets(gradient: Tensor) -> LossTargets | None:
    if gradient.ndim != 3 or not gradient.numel():
        return None
    return LossTargets(gradient.abs().amax(-1) > 0, gradient.argmin(-1), gradient.shape[-1])


def copy_gradients(named: dict[str, nn.Parameter], scale: Tensor | None = None) -> NamedGradients:
    """Copies of this rank's part of the gradients, divided by `scale`."""
    return {name: None if p.grad is None else _copy_gradient(p.grad, scale) for name, p in named.items()}


def _copy_gradient(gradient: Tensor, scale: Tensor | None) -> Tensor:
    gradient = as_dense(local_tensor(gradient).detach())
    return gradient.clone() if scale is None else gradient.double() / scale.to(gradient.device, torch.float64)


def _is_unchanged(gradients: NamedGradients, before: NamedGradients) -> bool:
    """Whether each gradient is the same as before, or cleared."""
    return all(
        gradient is None or not gradient.any() or ((old := before.get(name)) is not None and torch.equal(gradient, old))
        for name, gradient in gradients.items()
    )


def _are_same_calls(calls: list[Call], others: list[Call]) -> bool:
    return [call.number for call in calls] == [call.number for call in others]
