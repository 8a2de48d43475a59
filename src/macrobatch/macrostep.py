"""`MacroStep`: one call takes the optimizer step of a whole batch, which it cuts into micro-batches.

The main path is `__call__`: cut the batch in a way that all ranks agree on, run the micro-batches on the engine, and
close the window. If memory runs out, repeat the window with smaller micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from macrobatch._assembly import MakeObjective, engine_for
from macrobatch._batch.attempts import Attempts
from macrobatch._batch.cutting import Cutter
from macrobatch._batch.engine import BatchEngine
from macrobatch._batch.feed import Feed
from macrobatch._batch.one_pass import OnePass
from macrobatch._batch.two_passes import JointChecks, TwoPasses
from macrobatch._border import arguments
from macrobatch._border.spans import Observer
from macrobatch._border.uncopied import Uncopied
from macrobatch._checks import catalogue
from macrobatch._checks.weights import SampleWeights
from macrobatch._cudagraph.cache import RecordingCache, capturer_or_warning
from macrobatch._cudagraph.eligibility import without_ddp
from macrobatch._cudagraph.two_passes import JointRecordings, joint_recordings
from macrobatch._cut.fitting import checked_micro
from macrobatch._cut.memory import FittingSizes
from macrobatch._cut.policies import Cut, Policy
from macrobatch._cut.samples import Collate
from macrobatch._engine.closing import LeaveMean
from macrobatch._joint.kept_graphs import kept_graphs_for
from macrobatch._joint.objective import Joint as WholeBatchLoss
from macrobatch._ranks.placements import sharing_ranks
from macrobatch._ranks.select import common_wrapper
from macrobatch._terms.denominators import BatchTerms
from macrobatch._terms.mean import Mean
from macrobatch._terms.objective import Terms as SeveralTerms
from macrobatch.errors import BackendError, UsageError
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
            in ``.grad``, for programs that clip and step themselves. On several ranks, such a program may use a model
            without a wrapper, and take the mean of ``.grad`` over the ranks itself, which is exact for unequal shares
            too. With a ``scaler``, that gradient is still scaled.
        loss_fn: a function ``loss_fn(model, micro_batch)`` that returns ``(loss, items)``. The loss is a mean over so
            many items, or with ``reduction="sum"`` their sum. ``items`` is a number, or a tensor with one element,
            which stays on the device. If it returns the loss alone, the items are read from its graph. If the graph
            does not say them, they are the samples; you get a warning if micro-batches then have uneven numbers of
            labels other than -100. For a loss of several terms, it returns a dict ``{name: (loss, items)}``: the loss
            is then the sum of the terms' means. With ``joint``, it returns an `Encoded`.
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
        fuse: let recorded micro-steps add the gradients of linear layers to the sums of the window inside the matrix
            product, and cast weights once a window instead of in every micro-batch. False turns it off. It has no
            effect without ``cuda_graph``.
        fit_file: a file in which "auto" keeps the sizes that did not fit, so that the next run starts with smaller
            ones. Default: sizes are forgotten when the program ends.
        options: ``scheduler``, ``max_norm``, ``scaler``, ``reduction``, ``sync``, ``gather``, ``accumulate_dtype``,
            ``nonfinite`` and ``process_group``, as described for `Accumulator`. With ``cuda_graph``, the default of
            ``gather`` is "auto", and "micro" is an error under FSDP2.

    Raises:
        UsageError: an argument is invalid, or two arguments contradict each other.
        BackendError: the model, the optimizer or the installed torch does not support what you asked for.
    """

    leaves_wide = True  # whether, without an optimizer, gradients are left in `accumulate_dtype`

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
        fuse: bool = True,
        fit_file: str | os.PathLike[str] | None = None,
        **options: Unpack[Options],
    ) -> None:
        _require_arguments(loss_fn, collate, options)
        has_terms = arguments.checked_counts(counts) is not None
        has_joint = arguments.checked_joint(joint, counts) is not None
        records, fuses = arguments.checked_switch("cuda_graph", cuda_graph), arguments.checked_switch("fuse", fuse)
        has_scaler = options.get("scaler") is not None
        checks = JointChecks.new() if has_joint and catalogue.are_on() else None
        if has_terms or has_joint:
            arguments.refuse_total(options.get("reduction"), "counts=" if has_terms else "joint=")
        objective: MakeObjective = SeveralTerms if has_terms else partial(Mean, reads=True)
        if has_joint:
            objective = partial(WholeBatchLoss, passes=None if checks is None else checks.passes)
        if records:
            options.setdefault("gather", "auto")
        engine = self._engine = engine_for(
            BatchEngine,
            model,
            optimizer,
            objective=objective,
            checks=checks or (),
            narrows=not self.leaves_wide,
            **options,
        )
        if records and options.get("gather") == "micro" and common_wrapper(engine.models) == "FSDPModule":
            raise UsageError(
                'gather="micro" gathers the parameters of fully_shard in every micro-batch, which no recording can '
                'contain. With cuda_graph=True, leave gather= out, or pass "window" or "auto".'
            )
        sharing = sharing_ranks((p for one in engine.models for p in one.parameters()), engine.backend.group)
        self._terms = None if counts is None else BatchTerms(counts, engine)
        watches = catalogue.are_on() and options.get("reduction", "mean") == "mean" and not (has_terms or has_joint)
        weights = SampleWeights() if watches else None
        self._one_pass = OnePass(engine, model, loss_fn, self._terms, weights, has_scaler=has_scaler)
        self._graphs: RecordingCache | JointRecordings | None = None
        bare = without_ddp(model)
        if records and (capturer := capturer_or_warning(engine, shares_model=bool(sharing))) is not None:
            if has_joint:
                encode = partial(loss_fn, bare)
                self._graphs = joint_recordings(engine, encode, capturer, has_scaler=has_scaler, fuses=fuses)
            else:
                self._graphs = self._one_pass.recordings(capturer, fuses=fuses)
        recorded = self._graphs is not None
        self._sizes = FittingSizes(fit_file)
        self._cutter = Cutter(
            engine, checked_micro(micro), collate, self._sizes, records=recorded, has_passes=has_joint
        )
        self._feed = Feed(engine, self._cutter.placeholder, collates=collate is not None)
        fitting = self._cutter.fitting
        if fit_file is not None and fitting is None:
            raise UsageError(
                'fit_file keeps the sizes that micro="auto" or by_tokens("auto") has found: leave it out otherwise.'
            )
        if fitting is not None and sharing:
            raise BackendError(
                '"auto" cuts by the memory of one rank, but '
                f"rank {dist.get_rank()} shares a model with the ranks {sharing}, which must cut alike. Say how: "
                "micro= a number, by_count or by_tokens with a budget."
            )
        self._attempts = Attempts(engine, fitting, self._sizes)
        keeps = has_joint and fitting is not None and not recorded and engine.backend.abilities.leaves_are_parameters
        self._kept = kept_graphs_for(engine.device) if keeps else None
        self._two_passes = None
        if joint is not None:
            self._two_passes = TwoPasses(
                engine,
                partial(loss_fn, model),
                partial(joint, bare),
                self._attempts.agree,
                recordings=self._graphs if isinstance(self._graphs, JointRecordings) else None,
                few_shapes=self._cutter.has_few_shapes,
                kept=self._kept,
                checks=checks,
            )

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
            cut = self._cutter.cut(batch, self._terms)
            if self._terms is not None:
                self._terms.expect(cut)
            if cut.is_empty:
                return self._engine.close_empty()
            if self._attempts.run(cut, partial(self._take_turns, cut), self._graphs, self._kept):
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
        """Run the forward and backward of every micro-batch."""
        if self._two_passes is not None:
            self._two_passes.run(cut, self._feed)
            return
        assert not isinstance(self._graphs, JointRecordings), "those are of two passes"
        copies = self._attempts.may_repeat(cut, self._graphs) or cut.turns > len(cut.parts)
        few_shapes = self._cutter.has_few_shapes
        self._one_pass.run(cut, self._feed, self._graphs, few_shapes=few_shapes, copies=copies)

    def _close(self, cut: Cut) -> StepResult:
        """Take the optimizer step, and remember the size that fitted into memory."""
        result = self._engine.close(now=cut.is_held)
        assert result is not None, "the window is complete"
        self._attempts.note_success(cut, self._kept)
        self._one_pass.warn_of_sizes()
        return result


def _require_arguments(loss_fn: object, collate: object, options: Options) -> None:
    for name in ("steps", "remainder"):
        if name in options:
            raise UsageError(f"{name} is not for MacroStep: every batch is one window. Say how to cut it: micro=.")
    own = ("micro", "collate", "counts", "joint", "cuda_graph", "fuse", "fit_file")
    arguments.require_options(options, [*own, *Options.__annotations__])
    if not callable(loss_fn):
        raise UsageError(f"loss_fn must be a function of the model and a batch: got {type(loss_fn).__name__}.")
    if collate is not None and not callable(collate):
        raise UsageError(f"collate must be a function that makes a micro-batch of a list of samples: got {collate!r}.")
