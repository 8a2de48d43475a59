"""Watches a program: its backwards, its steps, and what happens to gradients in between. It changes nothing."""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from macrobatch._engine.reporting import auditors
from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch.autograd import backward_under_way
from macrobatch._torch.fsdp2 import shards_by_leaf
from macrobatch._torch.graph import reach_of
from macrobatch._torch.tensors import hooks_after_accumulation, hooks_on_gradient, version_of
from macrobatch._torch.watching import noting_losses, watched
from macrobatch.auditing.ledger import FAILED_BACKWARD, Backward, Kind, Ledger
from macrobatch.auditing.library import Library
from macrobatch.auditing.meeting import world_of_environment
from macrobatch.auditing.places import place, places
from macrobatch.auditing.reading import micro_of
from macrobatch.auditing.records import Micro, Window
from macrobatch.auditing.samples import Leaves, zeros

MOST_FAILURES = 8
MOST_SEEN = 1024
UNSEEN_BACKWARD = "gradients that no backward was seen to add: of a model inside of reentrant checkpointing, or by hand"


class Watcher:
    """Notes windows until it is stopped."""

    def __init__(self, after_window: Callable[[int], None] | None = None) -> None:
        self.windows: list[Window] = []
        self.failures: list[str] = []  # of the watcher itself
        self.num_backwards = 0
        self.has_ended = self.has_stopped = False
        self.world_size, self.rank = 1, 0
        self._after_window = after_window
        self._leaves = Leaves()
        self._ledger = Ledger(self._leaves)
        self._optimizers: dict[int, tuple[str, int]] = {}  # their names, and how many windows they had
        self._stepping: list[int] = []
        self._closers: list[Any] = []  # the hooks of a step that is under way
        self._has_stepped: set[int] = set()  # during a step of a scaler
        self._shards: dict[int, tuple[Tensor, Tensor]] = {}  # of `fully_shard`: gathered parameters, and their shards
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # losses and targets since the last step
        self._plain: set[int] = set()  # the ids of leaves that it does not manage
        self._look = _Looking(self.failures)
        self._library = Library(self._begin_close, self._end_close)
        self._num_closing = 0  # windows of this library that are closing: its own steps and clippings

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch everything that runs inside this context."""
        self._pre_step.__func__.only_checks = True  # type: ignore[attr-defined]
        self._post_step.__func__.only_checks = True  # type: ignore[attr-defined]
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                watched(
                    backward=self._around_backward,
                    clip=partial(self._around_clip, "clip"),
                    clip_values=partial(self._around_clip, "clip value"),
                    scaler_step=self._around_scaler_step,
                    scheduler_step=self._around_scheduler_step,
                )
            )
            stack.callback(self._remove_closers)
            stack.enter_context(noting_losses(lambda: place(4)))
            stack.callback(register_optimizer_step_pre_hook(self._pre_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._post_step).remove)
            auditors.append(self._library)
            stack.callback(auditors.remove, self._library)
            yield

    def finish(self) -> None:
        """The program has ended by itself, without `stop`: what has reached no step so far will not."""
        self.has_ended = True
        for optimizer, (name, number) in self._optimizers.items():
            windows = [window for window in self.windows if window.optimizer == name]
            places = {micro.place for window in windows for micro in window.micros if not micro.as_counted}
            if number and places:
                windows[-1].num_after = self._ledger.num_after(optimizer, places)

    def stop(self) -> None:
        """Look at nothing any more. It can be called inside of a hook."""
        self.has_stopped = True

    @property
    def _is_idle(self) -> bool:
        return self.has_stopped or self._num_closing > 0

    def _looking(self) -> _Looking:
        return self._look

    # ------------------------------------------------------------------------------------------ backwards

    def _around_backward(self, run: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if self._look.depth or self._is_idle or backward_under_way() != -1 or torch.compiler.is_compiling():
            return run(outputs, *args, **kwargs)
        seeds, _, creates_graph, inputs = args[:4]
        accumulates = kwargs.get("accumulate_grad", False)
        backward = None
        with self._looking():
            backward = self._begin(outputs, seeds, inputs, creates_graph=creates_graph, accumulates=accumulates)
        if backward is None:
            return run(outputs, *args, **kwargs)
        hooks = self._hooks_for(backward) if self._ledger.has_ranks and accumulates else []
        try:
            result = run(outputs, *args, **kwargs)
        except BaseException:
            backward.micro.unknown = FAILED_BACKWARD
            raise
        else:
            if backward.is_loose:
                with self._looking():
                    found = zip(inputs, result, strict=True)
                    pairs = [(n, g) for leaf, g in found for n in self._leaves.known([leaf])]
                    backward.local = self._leaves.sample_of(pairs)
            return result
        finally:
            for hook in hooks:
                hook.remove()
            with self._looking():
                self._ledger.add(backward)

    def _begin(
        self, outputs: Sequence[Any], seeds: Any, inputs: Sequence[Any], *, creates_graph: bool, accumulates: bool
    ) -> Backward | None:
        """What can be said of a backward before it runs: it frees the graph."""
        self._stepping = [] if not self._has_closure else self._stepping
        leaves = self._reached(outputs, inputs)
        if not accumulates:
            leaves = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
            if creates_graph or not leaves:
                return None
        self.num_backwards += 1
        self._notice_ranks()
        numbers = [self._leaves.number_of(self._shard_of(leaf)) for leaf in leaves]
        self._ledger.look()
        micro, target = micro_of(outputs, seeds)
        plain = [leaf for leaf in leaves if id(leaf) not in self._shards]
        hooked = next((leaf for leaf in plain if hooks_on_gradient(leaf) or hooks_after_accumulation(leaf)), None)
        if hooked is not None and micro.unknown is None:
            micro.unknown = f"a hook on a parameter of shape {tuple(hooked.shape)}, which may change its gradient"
        micro.place, micro.caller = places(4)
        micro.is_again = max(map(self._times_seen, outputs)) > 0 and not inputs
        micro.repeats = 0 if target is None else self._times_seen(target)
        trained = [number for leaf, number in zip(leaves, numbers, strict=True) if isinstance(leaf, nn.Parameter)]
        micro.reach = f"{zlib.crc32(repr(sorted(trained)).encode()):08x}"
        return Backward(
            micro=micro,
            local=zeros(len(self._leaves)) if self._ledger.has_ranks else None,
            leaves=frozenset(numbers),
            is_loose=not accumulates,
            is_training=all(isinstance(leaf, nn.Parameter) for leaf in leaves),
            version=sum(version_of(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)),
        )

    def _times_seen(self, loss_or_target: Tensor) -> int:
        """How often a tensor was in a backward since the last step."""
        reference, times = self._seen.get(id(loss_or_target), (None, 0))
        times = times if reference is not None and reference() is loss_or_target else 0
        if len(self._seen) > MOST_SEEN:
            self._seen.clear()
        self._seen[id(loss_or_target)] = weakref.ref(loss_or_target), times + 1
        return times

    def _reached(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor]:
        if inputs:
            return [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.is_leaf]
        found: dict[int, Tensor] = {}
        for output in outputs:
            if isinstance(output, Tensor):
                found |= {id(leaf): leaf for leaf in reach_of(output).leaves}
        return list(found.values())

    def _hooks_for(self, backward: Backward) -> list[Any]:
        """Hooks that see what this rank adds, before ranks exchange it. They change nothing."""
        hooks: list[Any] = []
        local = backward.local
        if local is None:
            return hooks
        with self._looking():
            gathered = {self._leaves.number_of(shard): leaf for leaf, shard in self._shards.values()}
            for shown, number in self._leaves.items(backward.leaves):
                leaf = gathered.get(number, shown)

                def note(gradient: Tensor, number: int = number) -> None:
                    with self._looking():
                        local[number] += self._leaves.sample_of([(number, gradient)])[number]

                hooks.append(leaf.register_hook(note))  # type: ignore[no-untyped-call]
        return hooks

    def _shard_of(self, leaf: Tensor) -> Tensor:
        """The parameter that optimizers hold, for a leaf that `fully_shard` has gathered; else the leaf itself."""
        if not self._ledger.has_ranks or "torch.distributed.fsdp" not in sys.modules:
            return leaf
        if id(leaf) not in self._shards and not isinstance(leaf, DTensor) and id(leaf) not in self._plain:
            self._shards = shards_by_leaf()
            self._plain.add(id(leaf))
            self._leaves.sharded.update(self._leaves.number_of(shard) for _, shard in self._shards.values())
        return self._shards[id(leaf)][1] if id(leaf) in self._shards else leaf

    def _notice_ranks(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        else:
            self.world_size, self.rank = world_of_environment()
        self._ledger.has_ranks = self.world_size > 1

    # ------------------------------------------------------------------------------------------ this library

    def _begin_close(self) -> None:
        self._num_closing += 1

    def _end_close(self, engine: Any, micros: list[Micro]) -> None:
        self._num_closing -= 1
        if self.has_stopped:
            return
        with self._looking():
            self._notice_ranks()
            leaves = [p for p in engine.parameters.named().values() if p.requires_grad]
            if engine.closing.leaves_gradients and micros:
                self._ledger.take(micros, self._leaves.numbers_of(leaves))
                return
            for optimizer in engine.optimizers:
                self._skip(optimizer)
                if micros:
                    name, windows = self._optimizers.get(id(optimizer)) or (self._name_of(optimizer), 0)
                    self._optimizers[id(optimizer)] = name, windows + 1
                    self.windows.append(Window(optimizer=name, number=windows, micros=micros))
        if self._after_window is not None:
            self._after_window(len(self.windows))

    # ------------------------------------------------------------------------------------------ clipping, schedulers

    def _around_clip(self, kind: Kind, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_idle:
            return run(*args, **kwargs)
        with self._looking():
            self._ledger.look()
        result = run(*args, **kwargs)
        with self._looking():
            self._ledger.look(kind)
        return result

    def _around_scheduler_step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_idle:
            self._ledger.note_scheduler()
        return run(*args, **kwargs)

    # ------------------------------------------------------------------------------------------ steps

    _has_closure = False

    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._is_idle:
            return None
        if self._stepping:  # a step inside of a step, as of a parent class
            self._stepping.append(id(optimizer))
            return None
        self._remove_closers()
        self._stepping.append(id(optimizer))
        self._has_stepped.add(id(optimizer))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            once = [True]

            def close(*_: object) -> None:  # after the optimizer's own hooks, which may change gradients
                if once and once.pop():
                    self._close(optimizer)

            self._closers.append(optimizer.register_step_pre_hook(close))
            return None
        evaluations = 0

        def watched_closure() -> Any:
            nonlocal evaluations
            self._has_closure = True
            loss = closure()
            self._has_closure = False
            evaluations += 1
            if evaluations == 1:
                self._close(optimizer)
            else:  # the same window at other weights
                self._skip(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], watched_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched_closure}

    def _remove_closers(self) -> None:
        """Remove the hooks of the last step: not in that hook itself, since others may come after it."""
        while self._closers:
            self._closers.pop().remove()

    def _post_step(self, *_: object) -> None:
        if self._stepping:
            self._stepping.pop()
        if not self._stepping:
            self._remove_closers()
        if not self._stepping and not self._is_idle and self._after_window is not None:
            self._after_window(len(self.windows))

    def _around_scaler_step(
        self, run: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inner = getattr(optimizer, "optimizer", optimizer)  # libraries hand over their wrappers
        self._has_stepped.discard(id(inner))
        result = run(scaler, optimizer, *args, **kwargs)
        if not self._is_idle and id(inner) not in self._has_stepped and isinstance(inner, Optimizer):
            self._skip(inner)
        return result

    def _skip(self, optimizer: Optimizer) -> None:
        with self._looking():
            self._ledger.skip(id(optimizer), self._leaves.known(_parameters(optimizer)))

    def _close(self, optimizer: Optimizer) -> None:
        with self._looking():
            self._seen.clear()
            parameters = _parameters(optimizer)
            numbers = self._leaves.known(parameters)
            name, windows = self._optimizers.get(id(optimizer)) or (self._name_of(optimizer), 0)
            if not numbers:
                if any(p.grad is not None for p in parameters):
                    self._optimizers[id(optimizer)] = name, windows + 1
                    self.windows.append(Window(optimizer=name, number=windows, problems=[UNSEEN_BACKWARD]))
                return
            scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
            if overflow is not None and float(overflow):
                self._skip(optimizer)
                return
            rounding = max(torch.finfo(p.dtype).eps for p in parameters)
            window = self._ledger.close(id(optimizer), name, windows, numbers, rounding)
            if not (window.micros or window.left_out or window.problems or window.is_repeated):
                return
            if scale is not None:
                for micro in window.micros:
                    micro.factor = None if micro.factor is None else micro.factor / float(scale)
            if self._ledger.has_ranks:
                window.parameters = self._leaves.elements(numbers, of_gradients=False)
                window.gradient = self._leaves.elements(numbers, of_gradients=True)
            if window.divided is not None:
                gradients = [local_tensor(p.grad.detach()) for p in parameters if p.grad is not None]
                window.norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients))
            self._optimizers[id(optimizer)] = name, windows + 1
            self.windows.append(window)

    def _name_of(self, optimizer: Optimizer) -> str:
        kind = type(optimizer).__name__
        taken = [name for name, _ in self._optimizers.values() if name.split(" ")[0] == kind]
        return f"{kind} {len(taken) + 1}" if taken else kind


class _Looking:
    """The context in which the watcher calls torch. An error in it is one of the audit, not of the program."""

    def __init__(self, failures: list[str]) -> None:
        self.depth = 0
        self._failures = failures
        self._had_gradients = True

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self._had_gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self.depth -= 1
        if self.depth == 0:
            torch.set_grad_enabled(self._had_gradients)
        if not isinstance(error, Exception):
            return False
        if len(self._failures) < MOST_FAILURES:
            self._failures.append(f"the audit itself failed: {type(error).__name__}: {error}")
        return True


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
