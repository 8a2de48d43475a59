"""`MacroStep`: you hand over the whole batch. It is split + fit + `Accumulator`; the gradient is made by the latter.

The main path is `__call__`: cut the batch, accumulate its parts, close the window; where memory ran out, do all of it
again with smaller ones. What ranks must know of each other stands in `Row`, exchanged once before a window. A window
that may run out of memory on one rank and not on another is *held*: no micro-batch communicates, then all ranks vote,
and only then gradients travel.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal, NamedTuple, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch._cudagraph.cache import Graphs, eagerly
from macrobatch._cudagraph.recordable import is_compiled_around_ddp, unwrapped
from macrobatch._cut.label_watch import LabelWatch
from macrobatch._cut.memory import UNLIMITED, Pressure, Sizes, asked_for, is_out_of_memory, release, too_large
from macrobatch._cut.plans import Part
from macrobatch._cut.policies import ByCount, ByTokens
from macrobatch._cut.prefetch import Feed
from macrobatch._cut.samples import Collate, Samples, samples_of
from macrobatch._cut.trees import transformed, unshared
from macrobatch._ranks import collectives
from macrobatch._ranks.placements import sharing_ranks
from macrobatch._step import validation as arguments
from macrobatch._step.epochs import Turn
from macrobatch._step.snapshot import Snapshot
from macrobatch.accumulator import Accumulator, Options
from macrobatch.errors import BackendError, BatchError, FitError, UsageError
from macrobatch.types import Items, StepResult

Model = nn.Module | Sequence[nn.Module]
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Items]]

HOST = torch.device("cpu")

logger = logging.getLogger("macrobatch")

# What a rank says of its part of a held window.
DONE, RAN_OUT, TOO_LARGE, FAILED = range(4)

NO_ROOM = "memory ran out beside what had been recorded"


class Row(NamedTuple):
    """What the other ranks must know of one before a window."""

    samples: int = 0
    parts: int = 0  # micro-batches, where that does not depend on the size that ranks agree on
    proposed: int = UNLIMITED  # the size that it would take
    proven: int = 0  # the size that it knows to fit
    has_spare: int = 0  # whether it has any micro-batch to take part with
    failed: int = 0  # whether its batch cannot be cut at all


@dataclass(frozen=True)
class Cut:
    """How this rank does its part of one window.

    Attributes:
        samples: of its batch.
        parts: its micro-batches.
        turns: how many it takes, with those that only keep other ranks company.
        held: whether nothing may travel until all ranks have voted.
        is_empty: whether no rank has any sample.
    """

    samples: Samples
    parts: list[Part]
    turns: int
    held: bool
    is_empty: bool

    def in_turns(self) -> list[Part | None]:
        """A part for every turn: beyond the last, that once more; None where there is none at all."""
        return [self.parts[min(turn, len(self.parts) - 1)] if self.parts else None for turn in range(self.turns)]

    @property
    def size(self) -> int:
        """The largest number of samples in a micro-batch."""
        return max((len(part.samples) for part in self.parts), default=0)


class MacroStep:
    """Takes one exact optimizer step on a batch of any size, cut so that it fits.

    >>> import torch
    >>> from torch import nn
    >>> from macrobatch import MacroStep
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> def loss_fn(model, batch):                 # any loss; returns it with its items, or alone: samples then
    ...     return nn.functional.mse_loss(model(batch["x"]), batch["y"])
    >>> train = MacroStep(model, optimizer, loss_fn, micro=4, max_norm=1.0)
    >>> result = train({"x": torch.randn(10, 3), "y": torch.randn(10, 1)})
    >>> result.step, result.micro_batches, result.items.item()
    (1, 3, 10)

    Args:
        model: a module, or a list of modules; handed on to `loss_fn` as it is.
        optimizer: one or a list.
        loss_fn: ``loss_fn(model, micro_batch)`` returns the loss, a mean over its items (or their sum, by
            ``reduction``), and the items: an int, or a tensor that the host never reads. The loss alone: its items are
            the samples, with a warning where micro-batches have uneven numbers of labels that are not -100.
        micro: how to cut: an int or `by_count`, `by_tokens`, or "auto": the largest number of samples that fits. It is
            found by trying, halved where memory runs out, and the window is done again as if nothing had happened.
        collate: for batches that are lists of samples: makes a micro-batch of some.
        fit_file: "auto": where to keep sizes that did not fit, so that the next run begins with smaller ones.
        cuda_graph: forward and backward of a micro-step are recorded once for each shape, and replayed, for a GPU that
            waits for Python. Where that cannot be, as on a CPU, they run as they are, and a warning says so.
        options: every option of `Accumulator` but ``steps`` and ``remainder``.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: Loss,
        *,
        micro: int | ByCount | ByTokens | Literal["auto"] = "auto",
        collate: Collate | None = None,
        cuda_graph: bool = False,
        fit_file: str | os.PathLike[str] | None = None,
        **options: Unpack[Options],
    ) -> None:
        for name in ("steps", "remainder"):
            if name in options:
                raise UsageError(f"{name} is not for MacroStep: every batch is one window. Say how to cut it: micro=.")
        if not callable(loss_fn):
            raise UsageError(f"loss_fn must be a function of the model and a batch: got {type(loss_fn).__name__}.")
        if collate is not None and not callable(collate):
            raise UsageError(
                f"collate must be a function that makes a micro-batch of a list of samples: got {collate!r}."
            )
        self._model = model
        self._loss_fn = loss_fn
        self._collate = collate
        self._micro = _checked_micro(micro)
        if fit_file is not None and self._micro is not None:
            raise UsageError('fit_file keeps the sizes that micro="auto" has found: leave it out otherwise.')
        self._sizes = Sizes(fit_file)
        self._acc = Accumulator(model, optimizer, **options)
        self._sharing = sharing_ranks((p for m in self._acc._models for p in m.parameters()), self._acc._sync.group)
        if self._is_auto and self._sharing:
            raise BackendError(
                f'micro="auto" cuts by the memory of one rank, but rank {dist.get_rank()} shares a model with the '
                f"ranks {self._sharing}, which must cut alike. Say how: micro= a number, by_count or by_tokens."
            )
        self._feed = Feed()
        self._graphs = self._made_graphs() if cuda_graph else None
        self._ranks: Any = None  # to exchange what lives on the host
        self._pressure = Pressure(HOST)
        self._label_watch = LabelWatch() if self._acc._reduction == "mean" else None
        self._spare: Any = None  # a micro-batch to take part with in a window for which this rank has none

    def __call__(self, batch: Any) -> StepResult:
        """Take the optimizer step of `batch`. None, or a batch of no samples: others have some, or it is skipped."""
        while True:
            cut = self._cut(batch)
            if cut.is_empty:
                return self._acc._skip()
            if self._accumulate(cut):
                return self._close(cut)

    # ------------------------------------------------------------------------------------------ what one can ask

    @property
    def optimizer_step(self) -> int:
        """How many optimizer steps were taken."""
        return self._acc.optimizer_step

    def state_dict(self) -> dict[str, int | float]:
        """What to save beside model, optimizer, scheduler and scaler: plain numbers."""
        return self._acc.state_dict()

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from what `state_dict` gave."""
        self._acc.load_state_dict(state)

    @property
    def _is_auto(self) -> bool:
        return self._micro is None

    @property
    def _is_alone(self) -> bool:
        return self._acc._sync.group is None

    # ------------------------------------------------------------------------------------------ before a window

    def _cut(self, batch: Any) -> Cut:
        """How to do this window, as agreed with the other ranks."""
        try:
            samples = samples_of(batch, self._collate)
            parts = [] if self._micro is None else self._micro.parts(samples, few_shapes=self._graphs is not None)
            row = self._row(samples, parts)
        except Exception:
            self._exchanged(Row(failed=1))
            raise
        rows = self._exchanged(row)
        if any(row.failed for row in rows):
            ranks = [rank for rank, row in enumerate(rows) if row.failed]
            raise BatchError(f"the batch of rank {ranks[0]} cannot be cut; its own error says why. No step was taken.")
        counts, held = [row.parts for row in rows], False
        if self._is_auto:
            size = min(row.proposed for row in rows)
            parts = ByCount(size).parts(samples)
            counts = [-(-row.samples // size) for row in rows]
            held = any(min(size, row.samples) > row.proven for row in rows)
        sync, abilities = self._acc._sync, self._acc._sync.abilities
        held = held or self._graphs is not None or (0 in counts and not abilities.needs_every_rank)
        held = held and sync.group is not None and abilities.can_hold
        if held or counts.count(counts[0]) < len(counts):
            self._acc._require_own_statistics(
                f"{counts} micro-batches on the ranks: all would have to take turns together, and succeed together. "
                "Give every rank equally many samples, and micro= a number."
            )
        turns = max(counts) if abilities.lockstep and not held else max(len(parts), abilities.needs_every_rank)
        self._find_spare(rows, samples, parts)
        self._acc.expect_repeats(counts.count(counts[0]) < len(counts))
        return Cut(samples, parts, turns, held, is_empty=not any(counts))

    def _row(self, samples: Samples, parts: list[Part]) -> Row:
        has_spare = samples.count > 0 or self._spare is not None
        if self._micro is not None or not samples.count:
            return Row(samples.count, len(parts), has_spare=has_spare)
        shape = samples.shape
        return Row(samples.count, 0, self._sizes.proposed(shape), self._sizes.proven(shape), has_spare)

    def _exchanged(self, row: Row) -> list[Row]:
        """That row of every rank."""
        if self._is_alone:
            return [row]
        self._ranks = self._acc._sync.host_group()
        return [Row(*numbers) for numbers in collectives.gathered(row, self._ranks, HOST)]

    def _find_spare(self, rows: list[Row], samples: Samples, parts: list[Part]) -> None:
        """Where every rank must take a turn: have a micro-batch for it, if need be from another rank."""
        if not self._acc._sync.abilities.needs_every_rank or not any(row.samples for row in rows):
            return
        if self._spare is None and parts:
            part = parts[-1]._replace(samples=parts[-1].samples[: self._smallest])
            self._spare = unshared(samples.take(part), lambda _: True)  # not a view, which would keep the batch
        if all(row.has_spare for row in rows):
            return
        source = next(rank for rank, row in enumerate(rows) if row.samples)
        sent = collectives.sent(transformed(self._spare, Tensor.cpu), source, self._ranks)
        if self._spare is None:
            self._spare = transformed(sent, lambda tensor: tensor.to(self._acc._device))

    @property
    def _smallest(self) -> int:
        """How many samples a forward needs: normalisation over a batch has no variance with one."""
        modules = (module for model in self._acc._models for module in model.modules())
        return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in modules) else 1

    # ------------------------------------------------------------------------------------------ the window

    def _accumulate(self, cut: Cut) -> bool:
        """Do all turns, up to the last backward. False: memory ran out, and it is as if the window had not begun."""
        if cut.held:
            self._acc._sync.hold_window()
        mark = self._acc._mark()
        if self._is_auto:
            self._pressure = Pressure(self._acc._device)
        may_repeat = (self._is_auto or self._graphs is not None) and (cut.held or self._is_alone)
        before, asked = None, None
        try:
            if may_repeat:
                before = Snapshot(self._acc._models)
            self._take_turns(cut, may_repeat=may_repeat)
        except BaseException as error:
            could_fit = self._is_auto or self._has_recordings
            has_begun = before is not None or not may_repeat
            if not (is_out_of_memory(error) and could_fit and has_begun):
                self._give_up(cut, mark, error)
                raise
            asked = asked_for(error)
        # From here on outside of the except block: its traceback kept the failed micro-batch alive.
        if asked is not None and before is None:
            self._end_job(cut, asked)
        shrinks = asked is not None and self._is_auto and cut.size > 1
        makes_room = asked is not None and not shrinks and self._has_recordings
        status = DONE if asked is None else RAN_OUT if shrinks or makes_room else TOO_LARGE
        statuses = self._voted(status) if cut.held else [status]
        if not any(statuses):
            return True
        self._acc._rewind(mark)
        if before is not None:
            before.restore()
        if asked is not None and not makes_room:
            self._learn(cut, asked)
        if self._graphs is not None:
            self._graphs.forget()  # they hold memory
            if makes_room:
                self._graphs.refuse(NO_ROOM)
        release(self._acc._device)
        if FAILED in statuses:
            raise BackendError(f"rank {statuses.index(FAILED)} failed in this window: its own error says why.")
        if TOO_LARGE in statuses:
            raise too_large(asked or f"what rank {statuses.index(TOO_LARGE)} says")
        return False

    def _take_turns(self, cut: Cut, *, may_repeat: bool) -> None:
        """The forward and backward of every micro-batch.

        Where a window may be done again, or its last micro-batch comes again, `loss_fn` gets copies of what lies in the
        batch's own memory: whatever it changes in place is then changed once.
        """
        copies = may_repeat or cut.turns > len(cut.parts)
        if not cut.turns:
            self._acc._take_part()
        if self._graphs is not None:
            few_shapes = isinstance(self._micro, ByTokens)
            self._graphs.open(self._acc._open_gradients(), self._coming(cut), few_shapes=few_shapes)
        if self._label_watch is not None:
            self._label_watch.begin_window()
        takes, counted = [partial(self._taken, cut, part) for part in cut.in_turns()], set[bool]()
        for index, (micro_batch, samples) in enumerate(self._feed.each(takes, self._acc._device)):
            is_repeat, is_final = index >= len(cut.parts), index == cut.turns - 1
            if self._label_watch is not None and not is_repeat:
                self._label_watch.note(micro_batch, samples)
            with self._acc._micro_batch(Turn(last=is_final and not cut.held, repeat=is_repeat)):
                recording = None
                if self._graphs is not None and not is_repeat and self._acc._open_window().knows_multiplier:
                    recording = self._graphs.of(micro_batch, samples, cut.parts[index].key)
                if recording is not None:
                    self._acc._replay(recording, micro_batch)
                else:
                    own = unshared(micro_batch, cut.samples.shares_memory) if copies else micro_batch
                    self._run(own, samples, counted)
            if not is_final:
                self._acc.step()
        if self._graphs is not None and self._acc._window is not None:
            self._graphs.close(self._acc._open_gradients(), self._acc._window)

    @property
    def _has_recordings(self) -> bool:
        return self._graphs is not None and self._graphs.holds

    def _run(self, micro_batch: Any, samples: int, counted: set[bool]) -> None:
        """An eager micro-step. All of a window must agree on whether items were `counted`."""
        loss, items = self._loss(self._model, micro_batch)
        counted.add(items is not None)
        if len(counted) > 1:
            raise BatchError("loss_fn must return items for every micro-batch of a batch, or for none.")
        self._acc.backward(loss, samples if items is None else items)

    def _coming(self, cut: Cut) -> list[tuple[Hashable, Callable[[], tuple[Any, int]]]]:
        """What is known of each micro-batch, and how to get it before its turn."""
        device = self._acc._device
        return [(part.key, partial(self._feed.one, partial(self._taken, cut, part), device)) for part in cut.parts]

    def _taken(self, cut: Cut, part: Part | None) -> tuple[Any, int]:
        """A micro-batch with its number of samples; without a part, a copy of the spare one."""
        if part is None:
            return transformed(self._spare, Tensor.clone), 1
        return cut.samples.take(part), len(part.samples)

    def _loss(self, model: Any, micro_batch: Any) -> tuple[Tensor, Items]:
        loss = self._loss_fn(model, micro_batch)
        if not isinstance(loss, tuple | list):
            return loss, None
        if len(loss) != 2:
            raise BatchError(f"loss_fn must return the loss, or the loss and its items: got {len(loss)} values.")
        if loss[1] is not None:
            self._label_watch = None  # nothing is weighed by samples
        return loss[0], loss[1]

    def _made_graphs(self) -> Graphs | None:
        """Where micro-steps can be recorded; else a warning says why they run eagerly."""
        acc, bare = self._acc, unwrapped(self._model)

        def loss_of(micro_batch: Any, samples: int) -> tuple[Tensor, Items]:
            loss, items = self._loss(bare, micro_batch)
            return arguments.checked_loss(loss), arguments.checked_items(samples if items is None else items)

        if (why := self._why_eager()) is not None:
            warnings.warn(eagerly(why), stacklevel=3)
            return None
        return Graphs(
            acc._models,
            loss_of,
            reduction=acc._reduction,
            scaled=acc._scaler is not None,
        )

    def _why_eager(self) -> str | None:
        """What keeps micro-steps from being recorded, if anything does."""
        if self._acc._device.type != "cuda":
            return f"the model is on {self._acc._device}"
        if self._sharing:
            return "ranks that share a model communicate inside micro-steps"
        if not self._acc._sync.abilities.can_record:
            return "ranks communicate inside micro-steps. DistributedDataParallel with sync='window' does not"
        if any(map(is_compiled_around_ddp, self._acc._models)):
            return (
                "the model is compiled around DistributedDataParallel, which cannot be left out then. "
                "DistributedDataParallel(torch.compile(model)) can be recorded"
            )
        return None

    def _close(self, cut: Cut) -> StepResult:
        """Take the step, and remember that this size fits, or that it barely does."""
        result = self._acc.step(now=cut.held)
        assert result is not None, "the window is complete"
        if self._is_auto and cut.parts:
            barely = cut.size > 1 and self._pressure.rose()
            (self._sizes.ran_out if barely else self._sizes.fitted)(cut.samples.shape, cut.size)
        if self._label_watch is not None and (why := self._label_watch.uneven()) is not None:
            self._label_watch = None
            warnings.warn(why, stacklevel=3)
        return result

    # ------------------------------------------------------------------------------------------ where it failed

    def _learn(self, cut: Cut, asked: str) -> None:
        shape = cut.samples.shape
        self._sizes.ran_out(shape, cut.size)
        if cut.size > 1:
            message = "out of memory with %d samples in a micro-batch (%s more was asked for): going on with %d"
            logger.warning(message, cut.size, asked, self._sizes.proposed(shape))

    def _give_up(self, cut: Cut, mark: Any, error: BaseException) -> None:
        """Leave nothing of the window behind, and no rank waiting for this one."""
        if cut.held and isinstance(error, Exception):
            self._voted(FAILED)
        elif not self._is_alone and (note := collectives.note_left()) is not None:
            raise FitError(note) from error
        self._acc._rewind(mark)

    def _voted(self, status: int) -> list[int]:
        """What every rank says of its part of the window."""
        if status != DONE:
            self._acc._catch_up()
        return [other for (other,) in collectives.gathered([status], self._ranks, HOST)]

    def _end_job(self, cut: Cut, asked: str) -> NoReturn:
        """Other ranks wait for this one where it cannot come any more: the job ends, and the next one knows better."""
        self._learn(cut, asked)
        rank = dist.get_rank()
        why = (
            f"rank {rank} ran out of memory: {asked} more was asked for in a micro-batch of {cut.size} samples. Other "
            "ranks were waiting for it in a collective, so this window cannot be done again. Start the job anew "
            "(torchrun --max-restarts does)"
            + (
                ": it will begin with smaller ones."
                if self._sizes.file is not None
                else ', with a smaller micro=, or with fit_file="...", which remembers sizes that did not fit.'
            )
        )
        collectives.leave(why)
        raise FitError(why)


def _checked_micro(micro: object) -> ByCount | ByTokens | None:
    """How to cut; None: whatever fits."""
    if isinstance(micro, ByCount | ByTokens):
        return micro
    if micro == "auto":
        return None
    if isinstance(micro, Integral) and not isinstance(micro, bool):
        return ByCount(int(micro))
    raise UsageError(f'micro must be a number of samples, by_count(n), by_tokens(budget) or "auto": got {micro!r}.')
