"""Micro-steps as CUDA graphs: forward, loss and backward are recorded once for each shape, and replayed.

A replay takes the host microseconds where Python takes milliseconds. Everything a recording reads or writes beyond its
own scratch memory has a fixed place: inputs, gradients (`Graphs.buffers`), totals of loss and items (`Ledger`); the
rest lies in one pool that all recordings share, as no two run at once.

Shapes are recorded before a window begins, where no gradient exists yet: warming up then leaves traces in the random
numbers and the buffers alone, and those are put back. The first few, and those of a plan that makes few, are recorded
at once; any other when it comes for the second time. What cannot be recorded runs eagerly, and one warning says why.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from macrobatch.capture import Claim, captured, milliseconds, uncached_autocast, without_collecting
from macrobatch.errors import BatchError
from macrobatch.fit import is_out_of_memory, release
from macrobatch.gradients import Gradients, run_backward
from macrobatch.snapshot import Snapshot
from macrobatch.split import leaves, transformed
from macrobatch.window import UNSCALED, Items, Reduction, Totals, Window, wide

LIMIT = 64  # recordings kept: each holds the launch parameters of thousands of kernels
AT_ONCE = 8  # of them are recorded when they are first seen
FORGOTTEN = 1000  # shapes seen once are too many to remember
WARM_UPS = 3
FASTER = 0.9  # of the eager time: what a recording may take to be kept. It costs memory, and a host ahead hides more

Micro = tuple[Any, int]  # a micro-batch on the device, with its number of samples
Loss = Callable[[Any, int], tuple[Tensor, Items]]


class NotRecordableError(Exception):
    """Why something has to run eagerly."""


class Ledger:
    """The totals that recordings add to, in one place for all of them, and what they read from the window."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device, dtype=wide(device))
        self.multiplier = torch.ones((), device=device)  # of losses, by the window's scaler
        kinds = (torch.int64, wide(device))
        self._counts = {dtype: torch.zeros(2, device=device, dtype=dtype) for dtype in kinds}  # of items: sum, lowest
        self._used: set[torch.dtype] = set()
        self.replayed: set[Recording] = set()

    def add(self, totals: Totals) -> None:
        """Those of one micro-batch; this is recorded."""
        self.loss += totals.loss
        if totals.items is not None and totals.lowest is not None:
            self._used.add(totals.items.dtype)
            items, lowest = self._counts[totals.items.dtype]
            items += totals.items
            torch.minimum(lowest, totals.lowest, out=lowest)

    def clear(self) -> None:
        """A window begins."""
        self.replayed.clear()
        for total in (self.loss, *self._counts.values()):
            total.zero_()

    def settle(self, window: Window) -> None:
        """Hand the totals over to the window."""
        window.absorb(Totals(self.loss, None, None))
        for dtype in self._used:
            items, lowest = self._counts[dtype]
            window.absorb(Totals(torch.zeros_like(self.loss), items, lowest))


class Recording:
    """The micro-step of one shape.

    Args:
        inputs: where it reads the tensors of a micro-batch.
        reached: the parameters to whose gradients it adds.
        host_items: of a micro-batch of this shape, where the host knows them.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[Tensor],
        ledger: Ledger,
        reached: set[nn.Parameter],
        host_items: int | float,
    ) -> None:
        self.reached = reached
        self._graph = graph
        self._inputs = inputs
        self._ledger = ledger
        self._host_items = host_items

    def replay(self, micro_batch: object, window: Window) -> None:
        """Compute a micro-batch, and add it to the window."""
        window.add_recorded(self._host_items, self._ledger.loss)
        if not self._ledger.replayed and isinstance(multiplier := window.multiplier, Tensor):
            self._ledger.multiplier.copy_(multiplier)
        self._ledger.replayed.add(self)
        self.run(micro_batch)

    def run(self, micro_batch: object) -> None:
        """Compute it alone."""
        torch._foreach_copy_(self._inputs, [leaf for _, leaf in _tensors(micro_batch)])
        self._graph.replay()


class Graphs:
    """The recordings of one model's micro-steps.

    Args:
        models: whose parameters are trained.
        loss_of: ``loss_of(micro_batch, samples)`` returns the loss and its items. It must call the models without
            their wrappers (`unwrapped`), which do things in Python that a replay would leave out.
        reduction: what those losses are.
        scaled: whether a scaler multiplies them.
        backward_inputs: what a backward may be confined to.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss_of: Loss,
        *,
        reduction: Reduction,
        scaled: bool,
        backward_inputs: Callable[[Tensor, Sequence[nn.Parameter]], Sequence[nn.Parameter] | None],
    ) -> None:
        self._models = models
        self._loss_of = loss_of
        self._reduction: Reduction = reduction
        self._scaled = scaled
        self._backward_inputs = backward_inputs
        self._situation: object = None
        self._refused: str | None = None  # why nothing is recorded any more
        self._warned: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Drop all recordings, and the memory they hold."""
        self._recordings: dict[Hashable, Recording | None] = {}  # None: this shape stays eager
        self._seen: dict[Hashable, set[Hashable]] = {}  # shapes that wait, by what is known before they are taken
        self._taken: set[Hashable] = set()  # what was known of those that were looked at already
        self._buffers: dict[int, Tensor] = {}  # the gradients, by the parameter's id
        self._versions: dict[int, int] = {}
        self._ledger: Ledger | None = None
        self._pool: Any = None  # lives as long as a recording in it
        self._stream: torch.cuda.Stream | None = None

    # ------------------------------------------------------------------------------------------ a window

    def open(
        self, gradients: Gradients, coming: Sequence[tuple[Hashable, Callable[[], Micro]]], *, few_shapes: bool
    ) -> None:
        """Before a window: record what comes, if it is worth it; then lay out the gradients.

        Args:
            gradients: of the window, none of which exists yet.
            coming: for each micro-batch what is known of it beforehand, and how to take it.
            few_shapes: whether the plan of the window makes few different ones.
        """
        self._notice_changes(gradients.parameters)
        if self._refused is None and len(self._recordings) < LIMIT:
            self._record_coming(gradients.parameters, coming, few_shapes)
        if self._ledger is not None:
            self._ledger.clear()
        self._lay_out(gradients.parameters)

    def of(self, micro_batch: Any, samples: int, known_before: Hashable) -> Recording | None:
        """The recording for a micro-batch; None: it is to run eagerly."""
        if self._refused is not None:
            return None
        try:
            signature = _signature(micro_batch, samples)
        except NotRecordableError as why:
            self._refuse(str(why))
            return None
        if signature not in self._recordings:
            if len(self._recordings) < LIMIT:
                if len(self._seen) >= FORGOTTEN:
                    self._seen.clear()
                self._seen.setdefault(known_before, set()).add(signature)
            else:
                self._warn(
                    f"cuda_graph=True: {LIMIT} shapes of micro-batches are recorded already, and others run eagerly. "
                    "Let fewer arise: by_tokens rounds the lengths of a batch of tensors; a collate= of your own can "
                    "pad to one of a few lengths."
                )
            return None
        return self._recordings[signature]

    def close(self, gradients: Gradients, window: Window | None) -> None:
        """After the last micro-batch of a window: its totals, and gradients as eager micro-steps would leave them."""
        if self._ledger is None or window is None:
            return
        reached = {id(p) for recording in self._ledger.replayed for p in recording.reached}
        if reached:
            self._ledger.settle(window)
        for parameter in gradients.parameters:
            buffer = self._buffers.get(id(parameter))
            if buffer is None or parameter.grad is not buffer or id(parameter) in reached:
                continue
            if buffer._version == self._versions[id(parameter)]:  # no eager one wrote to it either
                parameter.grad = None
        gradients.mark()

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give all parameters that recordings reach their gradients, so that eager micro-steps add to the same."""
        laid_out = [p for p in parameters if id(p) in self._buffers]
        if not laid_out:
            return
        torch._foreach_zero_([self._buffers[id(p)] for p in laid_out])
        for parameter in laid_out:
            parameter.grad = self._buffers[id(parameter)]
            self._versions[id(parameter)] = self._buffers[id(parameter)]._version

    def _notice_changes(self, parameters: Sequence[nn.Parameter]) -> None:
        """A recording holds for the model as it was: other tensors, frozen ones, another mode make it worthless."""
        modules = [module for model in self._models for module in model.modules()]
        held = [*parameters, *(buffer for model in self._models for buffer in model.buffers())]
        situation = (
            [(id(tensor), tensor.data_ptr()) for tensor in held],
            [module.training for module in modules],
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        )
        if situation != self._situation:
            self.forget()
            self._situation = situation
        if self._refused is None and (hooked := _hooked(modules, parameters)) is not None:
            self._refuse(f"{hooked} has a hook, which a replay would leave out")

    # ------------------------------------------------------------------------------------------ recording

    def _record_coming(
        self,
        parameters: Sequence[nn.Parameter],
        coming: Sequence[tuple[Hashable, Callable[[], Micro]]],
        few_shapes: bool,
    ) -> None:
        found: dict[Hashable, Micro] = {}
        for known_before, take in coming:
            waiting = self._seen.get(known_before, set())
            at_once = known_before not in self._taken and (few_shapes or len(self._recordings) + len(found) < AT_ONCE)
            if not (waiting or at_once):
                continue
            with _undone(self._models):  # to take a micro-batch may draw random numbers
                micro_batch, samples = take()
            try:
                signature = _signature(micro_batch, samples)
            except NotRecordableError as why:
                self._refuse(str(why))
                return
            if signature not in self._recordings and (at_once or signature in waiting):
                found.setdefault(signature, (micro_batch, samples))
        self._taken.update(known_before for known_before, _ in coming)
        if not found:
            return
        device = parameters[0].device
        release(device)
        for signature, (micro_batch, samples) in sorted(found.items(), key=lambda item: -_numel(item[1][0])):
            if self._refused is None and len(self._recordings) < LIMIT:
                self._recordings[signature] = self._recorded(parameters, micro_batch, samples)
        for waiting in self._seen.values():
            waiting -= found.keys()
        release(device)

    def _recorded(self, parameters: Sequence[nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        """The recording of a shape, or None where there is none, or where it does not pay."""
        recording, why = None, None
        try:
            with _undone(self._models), uncached_autocast(), self._leaves_of(parameters) as leaves_of:
                recording = self._record(leaves_of, micro_batch, samples)
        except Exception as error:
            if is_out_of_memory(error):
                why = "cuda_graph=True: there is not enough memory to record a shape beside the rest: it stays eager."
            else:
                reason = (
                    str(error) if isinstance(error, NotRecordableError) else f"recording failed: {_first_line(error)}"
                )
                self.forget()  # others, recorded before, may share what failed
                self._refused, why = reason, eagerly(reason)
        # Outside of the except block, whose traceback kept what was computed alive.
        for parameter in parameters:
            parameter.grad = None
        if why is not None:
            self._warn(why)
        if recording is None and not any(self._recordings.values()):
            self._pool = None
        return recording

    def _record(self, leaves_of: dict[nn.Parameter, nn.Parameter], micro_batch: Any, samples: int) -> Recording | None:
        device = next(iter(leaves_of)).device
        ledger = self._ledger = self._ledger or Ledger(device)
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream = self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        static = _copied(micro_batch)
        buffers_before = _buffers_of(self._models)

        def micro_step() -> Window:
            return self._micro_step(static, samples, ledger, leaves_of)

        with without_collecting(), Claim(pool, device) as claim:
            for parameter, leaf in leaves_of.items():
                leaf.grad = self._buffer_of(parameter)
            stream.wait_stream(torch.cuda.current_stream(device))
            # The first leaves nothing in the pool, for what is recorded need not have the same sizes: it may differ.
            is_first = not any(self._recordings.values())
            with torch.cuda.stream(stream), contextlib.nullcontext() if is_first else claim.allocating():
                reached = _reached(micro_step, leaves_of)
                eager = min(milliseconds(micro_step) for _ in range(WARM_UPS - 1))
            if not all(map(operator.is_, buffers_before, _buffers_of(self._models))):
                raise NotRecordableError("a forward replaces a buffer of the model by another tensor")
            for parameter in leaves_of.keys() - reached:  # a gradient of zero is not the same as none
                leaves_of[parameter].grad = None
                if not self._is_reached(parameter):
                    del self._buffers[id(parameter)]
            graph, window = captured(micro_step, pool, stream, device)
        torch.cuda.current_stream(device).wait_stream(stream)
        inputs = [leaf for _, leaf in _tensors(static)]
        recording = Recording(graph, inputs, ledger, reached, window.host_items)
        replayed = min(milliseconds(lambda: recording.run(micro_batch)) for _ in range(2))
        return recording if replayed < FASTER * eager else None

    def _buffer_of(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self._buffers:
            dtype = parameter.grad_dtype or parameter.dtype
            self._buffers[id(parameter)] = torch.zeros_like(parameter, dtype=dtype)
        return self._buffers[id(parameter)]

    def _is_reached(self, parameter: nn.Parameter) -> bool:
        return any(parameter in recording.reached for recording in self._recordings.values() if recording is not None)

    def _micro_step(
        self, micro_batch: Any, samples: int, ledger: Ledger, leaves_of: dict[nn.Parameter, nn.Parameter]
    ) -> Window:
        """What is recorded: the same as an eager micro-step, with its totals in the ledger."""
        loss, items = self._loss_of(micro_batch, samples)
        if loss.dtype == torch.float16 and not self._scaled:
            raise NotRecordableError(
                "the loss is in float16, whose sums need a factor of their own; return it in float32"
            )
        multiplier = ledger.multiplier if self._scaled else UNSCALED
        window = Window(number=0, length=1, reduction=self._reduction, multiplier=multiplier)
        if window.counts_for_nothing(items):
            raise BatchError("a micro-batch without items cannot be recorded.")
        seed = window.weigh(loss, items)
        run_backward(loss, seed, self._backward_inputs(loss, list(leaves_of.values())))
        window.add(loss, items)
        ledger.add(window.totals())
        return window

    @contextlib.contextmanager
    def _leaves_of(self, parameters: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """The leaves that a recorded backward adds gradients to: the parameters, or, under DDP, twins of theirs.

        DDP keeps the end nodes of its parameters' graphs, which belong to the stream that it was made on: a backward
        could not be recorded on another. Twins share the memory of the parameters, and are in their places meanwhile.
        """
        if not any(isinstance(model, DistributedDataParallel) for model in self._models):
            yield {parameter: parameter for parameter in parameters}
            return
        twins = {parameter: nn.Parameter(parameter.detach()) for parameter in parameters}
        for parameter, twin in twins.items():
            twin.grad_dtype = parameter.grad_dtype
        places = [
            (module, name, parameter)
            for model in self._models
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in twins
        ]
        try:
            for module, name, parameter in places:
                module._parameters[name] = twins[parameter]
            yield twins
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter

    # ------------------------------------------------------------------------------------------ saying why not

    def _refuse(self, why: str) -> None:
        self._refused = why
        self._warn(eagerly(why))

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=8)


def eagerly(why: str) -> str:
    """What a user is told."""
    return f"cuda_graph=True: micro-steps run eagerly, as without it: {why}."


def unwrapped(model: Any) -> Any:
    """The same model, or models, without DDP around them."""
    if isinstance(model, list | tuple):
        return type(model)(unwrapped(one) for one in model)
    return model.module if isinstance(model, DistributedDataParallel) else model


# ---------------------------------------------------------------------------------------------- of micro-batches


def _tensors(micro_batch: Any) -> list[tuple[str, Tensor]]:
    return [(path, leaf) for path, leaf in leaves(micro_batch, "batch") if isinstance(leaf, Tensor)]


def _signature(micro_batch: Any, samples: int) -> Hashable:
    """All that a recording of it depends on, but for the numbers in its tensors."""
    parts: list[Hashable] = [samples]
    for path, leaf in leaves(micro_batch, "batch"):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                raise NotRecordableError(f"{path} requires a gradient of its own")
            if leaf.device.type != "cuda" or leaf.layout != torch.strided:
                raise NotRecordableError(f"{path} is a {leaf.layout} tensor on {leaf.device}")
            parts.append((path, leaf.shape, leaf.dtype))
        elif isinstance(leaf, bool | int | float | str | bytes | None):
            parts.append((path, type(leaf), leaf))
        else:
            raise NotRecordableError(f"{path} is of type {type(leaf).__name__}, whose value a recording would keep")
    return tuple(parts)


def _numel(micro_batch: Any) -> int:
    return sum(leaf.numel() for _, leaf in _tensors(micro_batch))


def _copied(micro_batch: Any) -> Any:
    """With tensors of its own, for recordings to read from."""
    return transformed(micro_batch, lambda leaf: leaf.clone(memory_format=torch.contiguous_format))


# ---------------------------------------------------------------------------------------------- of models


@contextlib.contextmanager
def _undone(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put back the random numbers and the buffers afterwards."""
    before = Snapshot(models)
    try:
        yield
    finally:
        before.restore()


def _hooked(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> str | None:
    """What has a hook of its user's, if anything."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for module in modules:
        if any(getattr(module, kind, None) for kind in kinds):
            return f"a module of type {type(module).__name__}"
    for parameter in parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"a parameter of shape {tuple(parameter.shape)}"
    return None


def _buffers_of(models: Sequence[nn.Module]) -> list[Tensor | None]:
    return [buffer for model in models for module in model.modules() for buffer in module._buffers.values()]


def _reached(micro_step: Callable[[], object], leaves_of: dict[nn.Parameter, nn.Parameter]) -> set[nn.Parameter]:
    """The parameters to whose gradients it adds."""
    reached: set[nn.Parameter] = set()
    hooks = [
        leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, parameter=parameter: reached.add(parameter)
        )
        for parameter, leaf in leaves_of.items()
    ]
    try:
        micro_step()
    finally:
        for hook in hooks:
            hook.remove()
    return reached


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
