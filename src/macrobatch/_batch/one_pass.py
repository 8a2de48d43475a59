"""Runs the forward and backward of every micro-batch of a window, eagerly or by replaying a recording."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from macrobatch._batch.engine import BatchEngine
from macrobatch._batch.feed import Feed
from macrobatch._checks.weights import SampleWeights
from macrobatch._cudagraph.cache import RecordingCache
from macrobatch._cudagraph.capture import Capturer
from macrobatch._cudagraph.eligibility import without_ddp
from macrobatch._cudagraph.recorded_step import StaticWindow
from macrobatch._cudagraph.recorder import MicroStepRecorder
from macrobatch._cut.policies import Cut
from macrobatch._cut.trees import copy_shared
from macrobatch._engine.totals import PROPORTIONS, Micro, MicroPlan
from macrobatch._engine.window import Window
from macrobatch._loss.proportions import nothing_on
from macrobatch._terms.denominators import BatchTerms
from macrobatch.errors import BatchError, UsageError
from macrobatch.types import Items


class OnePass:
    """Runs windows whose loss is a mean or a sum over items, or has several terms."""

    def __init__(
        self,
        engine: BatchEngine,
        model: Any,
        loss_fn: Callable[[Any, Any], Any],
        terms: BatchTerms | None,
        weights: SampleWeights | None,
        *,
        has_scaler: bool,
    ) -> None:
        self._engine = engine
        self._model = model
        self._loss_fn = loss_fn
        self._terms = terms
        self._weights = weights  # None if nothing is weighed by samples, or if checks are off
        self._unread: str | None = None  # the node that keeps the items of losses from being read
        self._has_scaler = has_scaler

    def run(self, cut: Cut, feed: Feed, graphs: RecordingCache | None, *, few_shapes: bool, copies: bool) -> None:
        """Run all micro-batches of a window.

        With `copies`, `loss_fn` gets copies of the tensors that share memory with the batch. So `loss_fn` can change
        them in place without changing the batch.
        """
        engine, counted = self._engine, set[bool]()
        if not cut.turns:
            engine.join_empty()
        if graphs is not None:
            graphs.open(engine, feed.coming(cut), few_shapes=few_shapes)
        if self._weights is not None:
            self._weights.begin()
        for index, (micro_batch, samples) in enumerate(feed.one_pass(cut)):
            is_repeat, is_final = index >= len(cut.parts), index == cut.turns - 1
            if self._weights is not None and not is_repeat:
                self._weights.note(micro_batch, samples)
            with engine.micro_batch(MicroPlan(last=is_final and not cut.is_held, repeat=is_repeat)):
                recording = None
                if graphs is not None and not is_repeat and self._knows_scale():
                    recording = graphs.find(micro_batch, samples, cut.parts[index].key)
                if recording is not None:
                    engine.replay(recording, micro_batch)
                else:
                    own = copy_shared(micro_batch, cut.samples.shares_memory) if copies else micro_batch
                    self._run_eagerly(own, samples, counted)
                    if not is_repeat:
                        self._note_reading()
            if not is_final:
                engine.close()
        if graphs is not None:
            graphs.close(engine)

    def _note_reading(self) -> None:
        """Note whether the items of the last loss were read. Then nothing is weighed by samples."""
        self._unread = self._engine.unread
        if self._unread is None:
            self._weights = None

    def warn_of_sizes(self) -> None:
        """After a window: warn once if its losses are weighed by samples, but its micro-batches differ."""
        if self._weights is not None and self._unread is not None and self._weights.warn(self._unread):
            self._weights = None

    def recordings(self, capturer: Capturer, *, fuses: bool) -> RecordingCache:
        """An empty cache for recordings of these micro-batches."""
        combine, models = partial(self._combine, without_ddp(self._model)), self._engine.models
        recorder = MicroStepRecorder(
            models, capturer, combine, self._new_static_window, has_scaler=self._has_scaler, fuses=fuses
        )
        return RecordingCache(recorder)

    def _new_static_window(self, device: torch.device) -> StaticWindow:
        denominators = None if self._terms is None else self._terms.denominators()
        weighs = self._engine.objective.is_mean
        notes = {PROPORTIONS: nothing_on(device, 1 if denominators is None else len(denominators.names))}
        return StaticWindow(device, denominators, weighs=weighs, has_scaler=self._has_scaler, notes=notes)

    def _combine(self, model: Any, micro_batch: Any, samples: Callable[[], int], window: Window) -> Micro:
        """What a recording differentiates."""
        loss, items = self._loss(model, micro_batch)
        if self._terms is not None:
            return self._engine.objective.combine(loss, samples, window, repeats=False, are_samples=True)
        number = samples() if items is None else items
        return self._engine.objective.combine(loss, number, window, repeats=False, are_samples=items is None)

    def _run_eagerly(self, micro_batch: Any, samples: int, counted: set[bool]) -> None:
        """Run a micro-batch without a CUDA graph. `counted` collects whether `loss_fn` returned items."""
        with self._engine.spans.of("forward"):
            loss, items = self._loss(self._model, micro_batch)
        if self._terms is not None:
            self._engine.backward(loss, samples, are_samples=True)
            return
        counted.add(items is not None)
        if len(counted) > 1:
            raise BatchError("loss_fn must return items for every micro-batch of a batch, or for none.")
        self._engine.backward(loss, samples if items is None else items, are_samples=items is None)

    def _loss(self, model: Any, micro_batch: Any) -> tuple[Any, Items]:
        try:
            loss, items = self._loss_fn(model, micro_batch), None
        except TypeError as error:
            _require_order(error, model, micro_batch)
            raise
        if self._terms is not None:
            return loss, None
        if isinstance(loss, tuple | list):
            if len(loss) != 2:
                raise BatchError(f"loss_fn must return the loss, or the loss and its items: got {len(loss)} values.")
            loss, items = loss
        if items is not None:
            self._weights = None  # nothing is weighed by samples
        return loss, items

    def _knows_scale(self) -> bool:
        """Whether the factor of all losses of the window does not depend on the next micro-batch."""
        return not self._has_scaler or self._engine.open_window().multiplier is not None


def _require_order(error: TypeError, model: Any, micro_batch: Any) -> None:
    """Raise a clearer error if a batch was used like a model, or a model like a batch."""
    swapped = f"'{type(micro_batch).__name__}' object is not callable", f"'{type(model).__name__}' object is not"
    unpacked = f"cannot unpack non-iterable {type(model).__name__} object"
    if any(part in str(error) for part in (*swapped, unpacked)) and "takes" not in str(error):
        raise UsageError(
            "loss_fn is called as loss_fn(model, batch), in this order: it seems to take the batch first. What Python "
            f"said: {error}."
        ) from error
