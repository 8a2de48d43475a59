"""What ``training_step`` logs while a window is cut again or recorded: one value per name for the whole window."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch._cut.trees import has_samples, leaves
from macrobatch._torch.tensors import wide
from macrobatch.errors import UsageError
from macrobatch.macrostep import MacroStep
from macrobatch.types import Items

MAX_NAMES = 256
REDUCTIONS = ("mean", "sum", "max", "min")


class MicroBatch:
    """What one micro-batch has logged: names, values and the given batch_size; and its items."""

    def __init__(self) -> None:
        self.values: list[tuple[str, Tensor, int | None]] = []
        self.items: Items = None


class Logged(nn.Module):
    """Replaces ``self.log`` of a module while a window runs, and logs the values of the window at its end.

    The sums are a buffer. So recordings can add to it, and retried windows and warm-ups leave no trace in it.

    Args:
        module: the module whose ``log`` is replaced.
        device: the device of its parameters.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that it is not a child of this module
        own = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
        self._signature = inspect.signature(own.log)  # type: ignore[attr-defined]  # a module may override it
        self._rows: dict[str, int] = {}
        self._arguments: dict[str, dict[str, Any]] = {}  # arguments of the last call with each name
        self._dtypes: dict[str, torch.dtype] = {}
        self._seen: dict[str, None] = {}  # names in this window
        self._recorded: dict[str, None] = {}  # names in recordings
        self._others: dict[str, Any] = {}  # the last value of each name that has no mean
        self._is_eager = True
        self._current = MicroBatch()
        self._sums: Tensor = nn.Buffer(torch.zeros(MAX_NAMES, 2, device=device, dtype=wide(device)), persistent=False)

    def watch(self, train: MacroStep) -> None:
        """Observe whether a micro-batch runs eagerly, is recorded, or is replayed."""
        self._is_eager = False

        @contextlib.contextmanager
        def observe(span: str, _: Tensor | None) -> Iterator[None]:
            if span == "replay":
                self._seen |= self._recorded
            self._is_eager = span == "forward"
            try:
                yield
            finally:
                self._is_eager = False

        train.observe(observe)

    # ---------------------------------------------------------------------------------------- during a window

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """A context in which ``module.log`` collects values. At its end they are logged."""
        (module,) = self._module
        self._sums.zero_()
        self._seen, self._others = {}, {}
        module.log = self._note
        try:
            yield
        finally:
            del module.log
        for name in self._seen:
            total, weight = self._sums[self._rows[name]].clone()
            arguments = dict(self._arguments[name])
            if self._reduction(name) == "mean":
                total, arguments["batch_size"] = total / weight, weight
            module.log(name, total.to(self._dtypes[name]), **arguments)
        for name, value in self._others.items():
            module.log(name, value, **self._arguments[name])

    @contextlib.contextmanager
    def micro_batch(self, batch: Any) -> Iterator[MicroBatch]:
        """A context for a micro-batch. At its end, the values that it has logged are added to the sums."""
        self._current = current = MicroBatch()
        with contextlib.nullcontext() if self._is_eager else self._metrics_refused():
            yield current
        samples = next((len(leaf) for _, leaf in leaves(batch, "") if has_samples(leaf)), 1)
        for name, value, batch_size in current.values:
            self._add(name, value, next(n for n in (batch_size, current.items, samples) if n is not None))
        self._current = MicroBatch()

    def _note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Replacement of ``module.log``."""
        (module,) = self._module
        bound = self._signature.bind(module, name, value, *args, **kwargs)
        arguments = {key: given for key, given in bound.arguments.items() if key not in ("self", "name", "value")}
        batch_size = arguments.pop("batch_size", None)
        self._arguments[name] = arguments
        if not self._is_eager and not (isinstance(value, Tensor) and value.device == self._sums.device):
            raise UsageError(
                f"self.log({name!r}, ...) logs a value of the host, which a recording would freeze: log it in "
                "on_train_batch_end, or log a tensor on the device"
            )
        if not isinstance(value, Tensor | Real) or (isinstance(value, Tensor) and value.numel() != 1):
            self._others[name] = value  # a metric; for anything else Lightning raises its own error
            return
        if not isinstance(value, Tensor):
            value = torch.full((), float(value), dtype=torch.get_default_dtype(), device=self._sums.device)
        if self._rows.setdefault(name, len(self._rows)) >= MAX_NAMES:
            raise UsageError(f"training_step logs more than {MAX_NAMES} names: {name!r} is one too many.")
        self._dtypes[name] = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        (self._seen if self._is_eager else self._recorded)[name] = None
        self._current.values.append((name, value.detach().reshape(()), batch_size))

    @torch.no_grad()
    def _add(self, name: str, value: Tensor, weight: Tensor | float) -> None:
        (total, count), reduction = self._sums[self._rows[name]], self._reduction(name)
        value = value.to(total)
        if reduction == "mean":
            weight = weight.to(total) if isinstance(weight, Tensor) else total.new_full((), weight)
            total += (value * weight).masked_fill(weight == 0, 0)  # the mean of no items may be NaN
            count += weight
            return
        combine: Any = {"max": torch.maximum, "min": torch.minimum, "sum": torch.add}[reduction]
        total.copy_(torch.where(count > 0, combine(total, value), value))
        count += 1

    def _reduction(self, name: str) -> str:
        given = self._arguments[name].get("reduce_fx", "mean")
        found = given if isinstance(given, str) else getattr(given, "__name__", "")
        return found if found in REDUCTIONS else "mean"  # Lightning raises an error for others

    @contextlib.contextmanager
    def _metrics_refused(self) -> Iterator[None]:
        """A context for recordings, in which a metric raises an error, because a replay would not update it."""
        (module,) = self._module
        kind = importlib.import_module("torchmetrics").Metric
        metrics = [part for part in module.modules() if isinstance(part, kind)]

        def refuse(*_: Any, **__: Any) -> None:
            raise UsageError("training_step updates a metric of torchmetrics, which counts on the host")

        before = [{name: vars(metric).get(name) for name in ("update", "forward")} for metric in metrics]
        for metric in metrics:
            vars(metric).update(update=refuse, forward=refuse)
        try:
            yield
        finally:
            for metric, methods in zip(metrics, before, strict=True):
                for name, method in methods.items():
                    vars(metric)[name] = method
                    if method is None:
                        del vars(metric)[name]
