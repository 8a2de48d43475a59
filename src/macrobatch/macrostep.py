"""`MacroStep`: one call takes the optimizer step of a whole batch, which it cuts into micro-batches.

The main path is `__call__`: cut the batch in a way that all ranks agree on, run the micro-batches on the engine, and
close the window. If memory runs out, repeat the window with smaller micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch._assembly import MakeObjective, engine_for, mean_of
from macrobatch._batch.attempts import Attempts
from macrobatch._batch.cutting import Cutter
from macrobatch._batch.denominators import BatchTerms, with_items
from macrobatch._batch.terms import Terms as SeveralTerms
from macrobatch._border import arguments
from macrobatch._border.uncopied import Uncopied
from macrobatch._checks import catalogue
from macrobatch._checks.joint import BatchNormStatistics, FrozenChanged, PassesDiffer, RanksDiffer
from macrobatch._checks.weights import UnevenLabels
from macrobatch._cudagraph.cache import RecordingCache, eager_message
from macrobatch._cudagraph.capture import capturer_for
from macrobatch._cudagraph.eligibility import is_compiled_around_ddp, without_ddp
from macrobatch._cudagraph.two_passes import FirstPassCache, JointRecordings, SecondPassCache
from macrobatch._cut.fitting import checked_micro
from macrobatch._cut.memory import FittingSizes
from macrobatch._cut.plans import Part
from macrobatch._cut.policies import Cut, Policy
from macrobatch._cut.prefetch import Prefetcher
from macrobatch._cut.samples import Collate
from macrobatch._cut.trees import copy_shared
from macrobatch._engine.closing import LeaveMean
from macrobatch._engine.events import Observer
from macrobatch._engine.totals import MicroPlan
from macrobatch._joint.kept_graphs import kept_graphs_for
from macrobatch._joint.objective import Joint as WholeBatchLoss
from macrobatch._joint.two_passes import JointChecks, TwoPasses
from macrobatch._ranks.agreement import Agreement
from macrobatch._ranks.placements import sharing_ranks
from macrobatch.errors import BackendError, BatchError, UsageError, warn
from macrobatch.types import Counts, Encoded, Items, Joint, Options, StepResult, Terms

Model = nn.Module | Sequence[nn.Module]
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Items] | Terms | Encoded]


class MacroStep(Uncopied):
    """Takes the optimizer step of a whole batch, which it cuts into micro-batches that fit into memory.

    Use it if you have whole batches that are too large for one forward and backward. Create it once, then call it with
    each batch. The step has the gradient of one big batch, however the batch is cut.

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

    A loss of several terms, where each term is a mean over its own items:

    >>> def terms(model, batch):
    ...     errors, known = (model(batch["x"]) - batch["y"]).square()[:, 0], batch["known"]
    ...     right = (errors * known).sum() / known.sum().clamp(min=1)
    ...     return {"error": (right, known.sum()), "size": (0.1 * model(batch["x"]).square().mean(), len(known))}
    >>> def counts(batch):                         # of the whole batch, before it is cut
    ...     return {"error": batch["known"].sum(), "size": len(batch["known"])}
    >>> train = MacroStep(model, optimizer, terms, micro=4, counts=counts)
    >>> result = train({"x": torch.randn(10, 3), "y": torch.randn(10, 1), "known": torch.arange(10) < 7})
    >>> list(result.losses), result.items.item()
    (['error', 'size'], 7)

    Args:
        model: the module to train, or a list of modules. `loss_fn` gets the same object.
        optimizer: an optimizer, or a list of optimizers. None: take no step, and leave the mean gradient of the batch
            in ``.grad``, for programs that clip and step themselves. With a ``scaler``, that gradient is still scaled.
        loss_fn: a function ``loss_fn(model, micro_batch)`` that returns ``(loss, items)``. The loss is a mean over so
            many items, or with ``reduction="sum"`` their sum. ``items`` is a number, or a tensor with one element,
            which stays on the device. If it returns the loss alone, the items are the samples; you get a warning if
            micro-batches then have uneven numbers of labels other than -100. For a loss of several terms, it returns a
            dict ``{name: (loss, items)}``: the loss is then the sum of the terms' means. With ``joint``, it returns an
            `Encoded`.
        micro: how to cut the batch: a number of samples or `by_count`; a number of tokens with `by_tokens`; or "auto",
            the largest number of samples that fits into memory (``by_tokens("auto")``: the largest number of tokens).
            "auto" tries sizes: if memory runs out, it restores everything, halves the size, and repeats the window.
        collate: a function that makes a micro-batch from a list of samples, like ``collate_fn`` of a `DataLoader`.
            With it, each batch is a list of samples. Default: batches consist of tensors.
        counts: for a loss of several terms: ``counts(batch)`` returns the number of items of each term in the whole
            batch, as a dict by name. The numbers may be tensors, which stay on the device. Every call, on every rank,
            must return the same names in the same order. Default: the loss has one term.
        joint: for a loss that compares samples with each other, such as a contrastive loss: ``joint(model, encoded)``
            gets the encodings of all samples on all ranks, in the order of the batch, and returns the loss, a scalar.
            `loss_fn` runs twice for each micro-batch, with the same random numbers: first to encode the samples, then
            to compute their gradients. Default: the loss is a mean or sum over samples or other items.
        cuda_graph: record the forward and backward of a micro-batch as a CUDA graph, once for each shape, and replay
            it. This helps if micro-batches are so small that the GPU waits for Python. If recording is not possible,
            for example on a CPU, everything runs as without it, and you get a warning.
        fit_file: a file in which "auto" keeps the sizes that did not fit, so that the next run starts with smaller
            ones. Default: sizes are forgotten when the program ends.
        options: ``scheduler``, ``max_norm``, ``scaler``, ``reduction``, ``sync``, ``gather``, ``accumulate_dtype``,
            ``nonfinite`` and ``process_group``, as described for `Accumulator`.

    Raises:
        UsageError: an argument is invalid, or two arguments contradict each other.
        BackendError: the model, the optimizer or the installed torch does not support what you asked for.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        loss_fn: Loss,
        *,
        micro: int | Policy | Literal["auto"] = "auto",
        collate: Collate | None = None,
        counts: Counts | None = None,
        joint: Joint | None = None,
        cuda_graph: bool = False,
        fit_file: str | os.PathLike[str] | None = None,
        **options: Unpack[Options],
    ) -> None:
        for name in ("steps", "remainder"):
            if name in options:
                raise UsageError(f"{name} is not for MacroStep: every batch is one window. Say how to cut it: micro=.")
        own = ("micro", "collate", "counts", "joint", "cuda_graph", "fit_file")
        arguments.require_options(options, [*own, *Options.__annotations__])
        if not callable(loss_fn):
            raise UsageError(f"loss_fn must be a function of the model and a batch: got {type(loss_fn).__name__}.")
        if collate is not None and not callable(collate):
            raise UsageError(
                f"collate must be a function that makes a micro-batch of a list of samples: got {collate!r}."
            )
        self._model = model
        self._loss_fn = loss_fn
        self._collate = collate
        has_terms = arguments.checked_counts(counts) is not None
        has_joint = arguments.checked_joint(joint, counts) is not None
        records = arguments.checked_switch("cuda_graph", cuda_graph)
        is_checked = catalogue.are_on()
        passes = PassesDiffer() if is_checked else None
        checks = JointChecks(FrozenChanged(), RanksDiffer(), BatchNormStatistics()) if is_checked else None
        objective: MakeObjective = SeveralTerms if has_terms else mean_of
        if has_joint:
            objective = partial(WholeBatchLoss, passes=passes)
        more = (checks.frozen, passes, checks.ranks, checks.batch_norm) if has_joint and checks and passes else ()
        engine = self._engine = engine_for(model, optimizer, objective=objective, checks=more, **options)
        self._terms = None if counts is None else BatchTerms(counts, engine)
        parameters = (p for model in engine.models for p in model.parameters())
        self._sharing = sharing_ranks(parameters, engine.backend.group)
        self._feed = Prefetcher()
        self._has_scaler = options.get("scaler") is not None
        self._graphs = self._make_graphs(has_joint=has_joint) if records else None
        self._sizes = FittingSizes(fit_file)
        recorded = self._graphs is not None
        policy = checked_micro(micro)
        self._cutter = Cutter(engine, policy, collate, self._sizes, records=recorded, has_passes=has_joint)
        fitting = self._cutter.fitting
        if fit_file is not None and fitting is None:
            raise UsageError(
                'fit_file keeps the sizes that micro="auto" or by_tokens("auto") has found: leave it out otherwise.'
            )
        if fitting is not None and self._sharing:
            raise BackendError(
                '"auto" cuts by the memory of one rank, but '
                f"rank {dist.get_rank()} shares a model with the ranks {self._sharing}, which must cut alike. Say how: "
                "micro= a number, by_count or by_tokens with a budget."
            )
        self._attempts = Attempts(engine, Agreement(engine.backend), fitting, self._sizes)
        watches = is_checked and options.get("reduction", "mean") == "mean" and not (has_terms or has_joint)
        self._labels = UnevenLabels() if watches else None
        keeps = has_joint and fitting is not None and not recorded and engine.backend.abilities.leaves_are_parameters
        self._kept = kept_graphs_for(engine.device) if keeps else None
        self._passes = None if joint is None else self._make_passes(joint, checks)

    def __call__(self, batch: Any) -> StepResult:
        """Take the optimizer step of a batch: forward, backward, clipping, step, and clearing of the gradients.

        Args:
            batch: on several ranks, this rank's share of the batch. Dicts, lists, tuples or dataclasses of tensors,
                nested in any way, whose first dimension is the samples; with ``collate``, a list of samples. A rank
                without samples passes None or an empty batch. If no rank has samples, the step is skipped.

        Returns:
            The result of the step, over all ranks.

        Raises:
            BatchError: the batch cannot be cut, the loss is not a scalar, the items of a term do not add up to what
                ``counts`` returned, or the two passes of ``joint`` differ (on a GPU, the last two errors may come with
                the next batch). No step is taken, but random number generators and buffers may have changed.
            FitError: not even one sample fits into memory.
            NonFiniteError: a gradient of this batch, or of the one before, is infinite or NaN.
        """
        if self._engine.window is not None:  # an exception has left it
            self._engine.give_up()
            self._engine.discard()
        if self._terms is not None:
            self._terms.begin_window()
        while True:
            cut = self._cutter.cut(batch, self._count_terms)
            if self._terms is not None:
                self._terms.expect(cut)
            if cut.is_empty:
                return self._engine.close_empty()
            take_turns = self._take_turns if self._passes is None else self._take_turns_twice
            if self._attempts.run(cut, partial(take_turns, cut), self._graphs, self._kept):
                return self._close(cut)

    # ------------------------------------------------------------------------------------------ what one can ask

    @property
    def optimizer_step(self) -> int:
        """The number of optimizer steps taken so far. Without an optimizer, the number of batches."""
        return self._engine.closing.taken

    def is_void(self) -> bool:
        """Whether the last batch had no items. If so, take no step with its gradient.

        This is for ``optimizer=None``; with an optimizer, it is always False. The host waits for the device.

        Returns:
            True if the last batch had no items.

        Raises:
            BatchError: the items of the last batch were negative or not finite.
        """
        closing = self._engine.closing
        return isinstance(closing, LeaveMean) and closing.is_void()

    def state_dict(self) -> dict[str, int | float]:
        """The state to put into a checkpoint, beside that of the model, optimizer, scheduler and scaler.

        Returns:
            A dict of plain numbers.

        Raises:
            NonFiniteError: a gradient of the last batch is infinite or NaN.
        """
        return self._engine.state()

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Restore a state, to continue from a checkpoint.

        Args:
            state: what `state_dict` returned.

        Raises:
            UsageError: ``state`` is not such a state.
        """
        self._engine.load_state(state)

    def forget_sizes(self) -> None:
        """Forget which micro-batch sizes fit, also in the ``fit_file``: "auto" then starts with the largest size again.

        Call it, on all ranks, if samples now need more or less memory than before, for example after you have turned
        activation checkpointing on.
        """
        self._sizes.forget()

    def observe(self, observer: Observer) -> None:
        """Register a function that measures the phases of a step, such as a profiler.

        Args:
            observer: a function ``observer(span, loss)`` that returns a context manager. Each phase runs inside that
                context manager. ``span`` is the name of the phase: "data", "forward", "backward", "replay" (of a CUDA
                graph), "communication" or "update". ``loss`` is the loss for "backward", and None for the others.
        """
        spans = self._engine.spans
        if not spans.observers:  # its hooks tell all observers, so they are there once
            self._engine.backend.observe_communication(partial(spans.of, "communication"))
        spans.subscribe(observer)

    # ------------------------------------------------------------------------------------------ the window

    def _take_turns(self, cut: Cut) -> None:
        """Run the forward and backward of every micro-batch.

        If the window may be retried, or its last micro-batch repeated, `loss_fn` gets copies of the tensors that share
        memory with the batch. So `loss_fn` can change them in place without changing the batch.
        """
        engine, graphs = self._engine, self._graphs
        assert not isinstance(graphs, JointRecordings), "those are of two passes"
        copies = self._attempts.may_repeat(cut, graphs) or cut.turns > len(cut.parts)
        if not cut.turns:
            engine.join_empty()
        if graphs is not None:
            graphs.open(engine, self._coming(cut), few_shapes=self._cutter.has_few_shapes)
        if self._labels is not None:
            self._labels.begin()
        takes, counted = [partial(self._take, cut, part) for part in cut.part_per_turn()], set[bool]()
        for index, (micro_batch, samples) in enumerate(self._feed.each(takes, engine.device)):
            is_repeat, is_final = index >= len(cut.parts), index == cut.turns - 1
            if self._labels is not None and not is_repeat:
                self._labels.note(micro_batch, samples)
            with engine.micro_batch(MicroPlan(last=is_final and not cut.is_held, repeat=is_repeat)):
                recording = None
                if graphs is not None and not is_repeat and self._knows_scale():
                    recording = graphs.find(micro_batch, samples, cut.parts[index].key)
                if recording is not None:
                    engine.replay(recording, micro_batch)
                else:
                    own = copy_shared(micro_batch, cut.samples.shares_memory) if copies else micro_batch
                    self._run(own, samples, counted)
            if not is_final:
                engine.close()
        if graphs is not None:
            graphs.close(engine)

    def _knows_scale(self) -> bool:
        """Whether the factor of all losses of the window does not depend on the next micro-batch."""
        return not self._has_scaler or self._engine.open_window().multiplier is not None

    def _take_turns_twice(self, cut: Cut) -> None:
        """Run the two passes of a loss of the whole batch. `collate` is called once for each micro-batch."""
        assert self._passes is not None
        taken: dict[int, tuple[Any, int]] = {}

        def take(part: Part | None) -> tuple[Any, int]:
            if self._collate is None or part is None:
                return self._take(cut, part)
            if id(part) not in taken:
                taken[id(part)] = self._take(cut, part)
            return taken[id(part)]

        def shares_memory(tensor: Tensor) -> bool:  # with the batch, or with the other pass
            return self._collate is not None or cut.samples.shares_memory(tensor)

        def micro_batches(parts: Sequence[Part | None]) -> Iterator[tuple[Any, int]]:
            for micro_batch, samples in self._feed.each([partial(take, part) for part in parts], self._engine.device):
                yield copy_shared(micro_batch, shares_memory), samples

        self._passes.run(cut, micro_batches, self._coming(cut))

    def _make_passes(self, joint: Joint, checks: JointChecks | None) -> TwoPasses:
        bare, objective = without_ddp(self._model), self._engine.objective
        assert isinstance(objective, WholeBatchLoss)
        return TwoPasses(
            self._engine,
            objective,
            partial(self._loss_fn, self._model),
            partial(joint, bare),
            self._attempts.agree,
            recordings=self._graphs if isinstance(self._graphs, JointRecordings) else None,
            few_shapes=self._cutter.has_few_shapes,
            kept=self._kept,
            checks=checks,
        )

    def _run(self, micro_batch: Any, samples: int, counted: set[bool]) -> None:
        """Run a micro-batch without a CUDA graph. `counted` collects whether `loss_fn` returned items."""
        with self._engine.spans.of("forward"):
            loss, items = self._loss(self._model, micro_batch)
        if self._terms is not None:
            self._engine.backward(with_items(loss, lambda: samples))
            return
        counted.add(items is not None)
        if len(counted) > 1:
            raise BatchError("loss_fn must return items for every micro-batch of a batch, or for none.")
        self._engine.backward(loss, samples if items is None else items, are_samples=items is None)

    def _count_terms(self, batch: Any) -> None:
        if self._terms is not None:
            self._terms.count(batch)

    def _coming(self, cut: Cut) -> list[tuple[Hashable, Callable[[], tuple[Any, int]]]]:
        """For each micro-batch: the key that identifies its shape, and a function that returns it before its turn."""
        device = self._engine.device
        return [(part.key, partial(self._feed.one, partial(self._take, cut, part), device)) for part in cut.parts]

    def _take(self, cut: Cut, part: Part | None) -> tuple[Any, int]:
        """A micro-batch and its number of samples. If `part` is None, it is a copy of the placeholder."""
        with self._engine.spans.of("data"):
            if part is None:
                return self._cutter.placeholder.copy(), 1
            return cut.samples.take(part), len(part.samples)

    def _loss(self, model: Any, micro_batch: Any) -> tuple[Any, Items]:
        loss, items = self._loss_fn(model, micro_batch), None
        if self._terms is not None:
            return loss, None
        if isinstance(loss, tuple | list):
            if len(loss) != 2:
                raise BatchError(f"loss_fn must return the loss, or the loss and its items: got {len(loss)} values.")
            loss, items = loss
        if items is not None:
            self._labels = None  # nothing is weighed by samples
        return loss, items

    def _close(self, cut: Cut) -> StepResult:
        """Take the optimizer step, and remember the size that fitted into memory."""
        result = self._engine.close(now=cut.is_held)
        assert result is not None, "the window is complete"
        self._attempts.note_success(cut, self._kept)
        if self._labels is not None and (why := self._labels.uneven()) is not None:
            self._labels = None
            warn(why)
        return result

    # ------------------------------------------------------------------------------------------ recordings

    def _make_graphs(self, *, has_joint: bool) -> RecordingCache | JointRecordings | None:
        """The cache of CUDA graphs. If micro-batches cannot be recorded: None, and a warning that says why."""
        engine, bare = self._engine, without_ddp(self._model)

        def loss_of(micro_batch: Any, samples: Callable[[], int]) -> tuple[Any, Items, bool]:
            loss, items = self._loss(bare, micro_batch)
            if has_joint:
                return loss, None, False
            if self._terms is not None:
                return with_items(loss, samples), None, False
            return loss, samples() if items is None else items, items is None

        capturer = capturer_for(engine.device)
        why = f"the model is on {engine.device}" if capturer is None else self._why_eager()
        if capturer is None or why is not None:
            warn(eager_message(str(why)))
            return None
        parts: Any = (engine.models, loss_of, engine.objective)
        options: Any = {"has_scaler": self._has_scaler, "capturer": capturer}
        if has_joint:
            return JointRecordings(FirstPassCache(*parts, **options), SecondPassCache(*parts, **options))
        denominators = None if self._terms is None else self._terms.denominators
        return RecordingCache(*parts, denominators=denominators, **options)

    def _why_eager(self) -> str | None:
        """The reason why micro-batches cannot be recorded as CUDA graphs; None if they can."""
        engine = self._engine
        if self._sharing:
            return "ranks that share a model communicate inside micro-steps"
        if not engine.backend.abilities.can_record:
            return "ranks communicate inside micro-steps. DistributedDataParallel with sync='window' does not"
        if any(map(is_compiled_around_ddp, engine.models)):
            return (
                "the model is compiled around DistributedDataParallel, which cannot be left out then. "
                "DistributedDataParallel(torch.compile(model)) can be recorded"
            )
        return None
