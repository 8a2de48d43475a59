"""Losses of the whole batch, in two passes over its micro-batches.

The first pass computes the encodings of each micro-batch without a graph. From the encodings of all ranks, `joint`
computes the loss, and its backward the gradient of every encoding. The second pass runs the forward of each micro-batch
again, with the same random numbers and buffers as before, and its backward from the gradients of its encodings.
`TwoPasses.run` is the main path.

The second pass goes from the last micro-batch to the first. The backward of one graph of the whole batch would have the
same order, so the gradients add up to the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from macrobatch._batch.engine import BatchEngine
from macrobatch._batch.feed import Feed, MicroBatch
from macrobatch._border.arguments import checked_joint_loss
from macrobatch._checks.joint import BatchNormStatistics, PassesDiffer, RanksDiffer
from macrobatch._cudagraph.two_passes import JointRecordings
from macrobatch._cut.memory import is_out_of_memory, requested_memory
from macrobatch._cut.policies import Cut
from macrobatch._engine.totals import MicroPlan
from macrobatch._joint.encodings import Layout, OwnEncodings, require_same_layout, take_apart
from macrobatch._joint.kept_graphs import KeptGraphs
from macrobatch._joint.objective import Encodings, FirstPass, Joint, Pull, is_zero
from macrobatch._joint.whole_batch import WholeBatch, gather
from macrobatch._ranks.fsdp1 import FSDP1
from macrobatch._ranks.select import require_own_statistics
from macrobatch._torch.snapshot import History, Random, gpus_of, reseed
from macrobatch._torch.tensors import version_of, wide
from macrobatch.errors import BackendError, BatchError, FitError, UsageError, counted
from macrobatch.types import Encoded, Items

# Parts of torch's error messages about gradients under no_grad, and about changes in place to leaves with gradients.
NO_GRAPH, IN_PLACE = "does not require grad", "leaf Variable that requires grad"
CHANGED = "joint changes {} in place: the second pass would not find it again. Make a copy first, with clone()."


class JointChecks(NamedTuple):
    """The checks of losses of the whole batch, which look at more than the events of the engine."""

    passes: PassesDiffer
    ranks: RanksDiffer
    batch_norm: BatchNormStatistics

    @classmethod
    def new(cls) -> JointChecks:
        return cls(PassesDiffer(), RanksDiffer(), BatchNormStatistics())


class TwoPasses:
    """Runs windows whose loss is one of the whole batch.

    Recording begins with the second window, because the first one shows what encodings look like, and which of them
    have gradients.
    """

    def __init__(
        self,
        engine: BatchEngine,
        encode: Callable[[Any], object],  # returns an `Encoded`
        joint: Callable[[Encoded], object],  # returns the loss of the whole batch
        agree: Callable[[], None],  # ranks of a held window call it before they exchange anything. Raises if one failed
        *,
        recordings: JointRecordings | None,
        few_shapes: bool,  # whether batches are cut into few different shapes
        kept: KeptGraphs | None,  # graphs of first passes that are kept for the second pass, if memory allows
        checks: JointChecks | None,
    ) -> None:
        if isinstance(engine.backend, FSDP1):
            raise BackendError(
                "joint= needs DistributedDataParallel or fully_shard: under FullyShardedDataParallel nobody can use "
                "parameters outside of a forward."
            )
        if any(is_lazy(parameter) for model in engine.models for parameter in model.parameters()):
            raise UsageError(
                "some parameters of the model have no shape yet (lazy modules). Call the model once with a batch first."
            )
        if engine.backend.group is not None:
            require_own_statistics(
                engine.models,
                "joint=: ranks may have different numbers of micro-batches, and none communicates. Use BatchNorm, "
                "whose statistics are the micro-batch's, or better LayerNorm or GroupNorm.",
            )
        assert isinstance(engine.objective, Joint)
        self._engine = engine
        self._objective = engine.objective
        self._encode_one = encode
        self._joint = joint
        self._agree = agree
        self._recordings = recordings
        self._few_shapes = few_shapes
        self._kept = kept
        self._checks = checks
        self._changing: set[tuple[int, str]] = set()  # buffers that forwards write to
        self._layout: Layout | None = None  # the layout of the last window's encodings
        self._used: list[bool] = []  # whether each field got a gradient in the last window

    def run(self, cut: Cut, feed: Feed) -> None:
        """Run both passes over a batch, up to the last backward."""
        turns, micro_batches = cut.part_per_turn(), feed.two_passes(cut)
        history, checks = History(self._engine.models, self._changing), self._checks
        if checks is not None:
            checks.batch_norm.begin()
        own = self._encode(cut, feed, micro_batches(turns), history)
        if checks is not None:
            checks.batch_norm.end()
        if cut.is_held:
            self._agree()
        whole = gather(self._engine, own, is_mean=self._objective.is_mean)
        self._open_second(own, feed)
        gradients = self._differentiate(whole)
        self._layout, self._used = whole.layout, [gradient is not None for gradient in gradients]
        history.note()  # what the loss changed in buffers stays, and in one process also the random numbers it drew
        turns[: len(cut.parts)] = reversed(cut.parts)
        try:
            self._pull(own, micro_batches(turns), history, gradients)
        finally:
            history.restore(len(cut.parts))

    # ------------------------------------------------------------------------------------------ the first pass

    def _encode(self, cut: Cut, feed: Feed, micro_batches: Iterable[MicroBatch], history: History) -> OwnEncodings:
        """The encodings of this rank's micro-batches."""
        torch.clear_autocast_cache()  # it may hold casts of the weights before the last step
        engine, own = self._engine, OwnEncodings(cut, self._engine.device)
        recordings = None
        if self._recordings is not None and self._layout is not None:
            recordings = self._recordings.first
            self._recordings.expect(self._layout)
            recordings.open(engine, feed.coming(cut), few_shapes=self._few_shapes)
        if self._kept is not None:
            self._kept.begin_window(cut)
        for index, (micro_batch, samples) in enumerate(micro_batches):
            repeats = index >= len(cut.parts)
            with engine.forward_only(restores=repeats):
                if not repeats:
                    history.note()
                recording, encoded = None, None
                if recordings is not None and not repeats:
                    recording = recordings.find(micro_batch, samples, cut.parts[index].key)
                kept = self._kept if not repeats and self._kept is not None and self._kept.keeps(index) else None
                if recording is not None:  # then no graph is kept
                    with engine.spans.of("replay"):
                        recording.run(micro_batch)
                    encoded = recording.output and recording.output()
                else:
                    # What the model keeps from its first call of a window, such as a cache of parametrisations,
                    # needs a graph in the second pass.
                    has_graph = kept is not None or (index == 0 and engine.backend.abilities.leaves_are_parameters)
                    with kept.measuring(samples) if kept is not None else contextlib.nullcontext():
                        encoded = self._forward(micro_batch, has_graph=has_graph)
                if not repeats:
                    own.add(encoded, samples)
                if kept is not None and isinstance(encoded, Encoded):
                    kept.keep(index, encoded)
                del encoded  # frees its graph, if it has one
        torch.clear_autocast_cache()  # casts of weights without a graph would get no gradient
        return own

    def _forward(self, micro_batch: Any, *, has_graph: bool) -> object:
        """The encodings of a micro-batch. Casts of weights with a graph are not used without one, and vice versa."""
        if has_graph:
            torch.clear_autocast_cache()
        try:
            with self._engine.spans.of("forward"), torch.set_grad_enabled(has_graph):
                return self._encode_one(micro_batch)
        except RuntimeError as error:
            if has_graph or NO_GRAPH not in str(error):
                raise
            raise BatchError(
                "loss_fn asks for a gradient, but the first pass has no graph. Compute it inside of `with "
                f"torch.enable_grad():`, in loss_fn. What torch said: {error}"
            ) from error
        finally:
            if has_graph:
                torch.clear_autocast_cache()

    # ------------------------------------------------------------------------------------------ the whole batch

    def _differentiate(self, whole: WholeBatch) -> list[Tensor | None]:
        """The gradients of this rank's rows and of totals. Those of parameters are added to the window's."""
        engine = self._engine
        engine.expect(whole.counted.denominators(engine.device))
        leaves = [
            tensor.detach().requires_grad_(one.has_gradient)
            for tensor, one in zip(whole.tensors, whole.layout.fields, strict=True)
        ]
        whole.tensors.clear()
        gpus = gpus_of(engine.models)
        before = None if whole.seed is None else Random(gpus)
        asked = None
        try:
            with engine.forward_only():
                engine.backend.gather_roots()
                if whole.seed is not None:
                    reseed(whole.seed, gpus)
                with engine.spans.of("forward"):
                    loss = self._joint_loss(whole.layout, leaves)
                self._note_loss(loss, whole.counted)
                if any(leaf.grad is not None for leaf in leaves):
                    raise UsageError(
                        "a backward() ran inside joint: its gradients would count twice. Return only the loss; "
                        "MacroStep runs its backward. torch.autograd.grad() may be used inside."
                    )
                engine.add_joint(loss, [leaf for leaf in leaves if leaf.requires_grad])
        except Exception as error:
            if not is_out_of_memory(error) or (self._kept is not None and self._kept.has_kept):
                raise
            asked = requested_memory(error)
        finally:
            if before is not None:
                before.restore()
        if asked is not None:
            samples = counted(whole.counted.samples, "sample")
            raise FitError(
                f"memory ran out inside joint, which has the encodings of all {samples} at once: {asked} more was "
                "asked for. Smaller micro-batches do not help there. Compute the loss in parts (contrastive_loss "
                "does), make encodings smaller, or the batch."
            )
        if all(leaf.grad is None for leaf in leaves):
            names = ", ".join(one.path for one in whole.layout.fields)
            raise BatchError(
                f"the gradient of joint reaches no encoding, of {names}: nothing would be learnt from them. Compute "
                "its loss from the fields of the Encoded that it gets, without detach()."
            )
        gradients = [leaf.grad for leaf in leaves]
        if whole.own is None:
            return gradients
        pairs = zip(gradients, whole.layout.fields, strict=True)
        return [g if g is None or one.is_sum else g[whole.own].clone() for g, one in pairs]

    def _note_loss(self, loss: Tensor, counted: FirstPass) -> None:
        """Note the loss of the whole batch, which is the same on every rank; and for a check, that of each."""
        engine, group = self._engine, self._engine.backend.group
        engine.open_window().know(counted.sums(loss, engine.device))
        if group is not None:
            losses = torch.zeros(dist.get_world_size(group), device=engine.device, dtype=wide(engine.device))
            losses[dist.get_rank(group)] = loss.detach().reshape(())
            self._note({RanksDiffer.NOTE: losses})
            if self._checks is not None:
                self._checks.ranks.note(loss, is_double=self._objective.is_double)

    def _note(self, notes: dict[str, Tensor]) -> None:
        for name, number in notes.items():
            self._engine.open_window().totals.note(name, number)

    def _joint_loss(self, layout: Layout, leaves: list[Tensor]) -> Tensor:
        """The loss that `joint` computes from all encodings. An error if it changes them in place."""
        versions = list(map(version_of, leaves))
        try:
            found = self._joint(layout.encoded(leaves))
        except RuntimeError as error:
            if IN_PLACE not in str(error):
                raise
            raise BatchError(f"{CHANGED.format('an encoding')} What torch said: {error}") from error
        for leaf, version, field in zip(leaves, versions, layout.fields, strict=True):
            if version_of(leaf) != version:
                raise BatchError(CHANGED.format(field.path))
        return checked_joint_loss(found)

    # ------------------------------------------------------------------------------------------ the second pass

    def _open_second(self, own: OwnEncodings, feed: Feed) -> None:
        """Record second passes, before any gradient exists."""
        if self._recordings is None or self._layout != own.layout:
            return

        def bundled(take: Callable[[], MicroBatch], index: int) -> MicroBatch:
            micro_batch, samples = take()
            return own.pull(index, micro_batch, own.zeros(self._used)), samples

        upcoming = [(key, partial(bundled, take, index)) for index, (key, take) in enumerate(feed.coming(own.cut))]
        self._recordings.second.open(self._engine, upcoming, few_shapes=self._few_shapes)

    def _pull(
        self, own: OwnEncodings, micro_batches: Iterable[MicroBatch], history: History, gradients: list[Tensor | None]
    ) -> None:
        """Run the forward and backward of every micro-batch, from the gradients of its encodings."""
        engine, cut, layout = self._engine, own.cut, own.layout
        assert layout is not None
        recordings = None if self._recordings is None else self._recordings.second
        if not cut.turns:
            engine.join_empty()
        for turn, (micro_batch, samples) in enumerate(micro_batches):
            index, repeats, is_final = len(cut.parts) - 1 - turn, turn >= len(cut.parts), turn == cut.turns - 1
            with engine.micro_batch(MicroPlan(last=is_final and not cut.is_held, repeat=repeats)):
                if repeats:
                    engine.backward(self._encoded(Pull(micro_batch, None, gradients, None), samples, layout, 0))
                else:
                    graph = None if self._kept is None else self._kept.take(index)
                    if graph is None:
                        history.restore(index)
                    items, recording = own.items[index] if own.items else None, None
                    pull = own.pull(index, micro_batch, gradients)
                    if recordings is not None and not is_zero(items):
                        recording = recordings.find(pull, samples, cut.parts[index].key)
                    if recording is not None:
                        engine.replay(recording, pull)
                    else:
                        encodings = self._encoded(pull, samples, layout, items, graph)
                        graph = None  # the backward frees it
                        engine.backward(encodings)
            if not is_final:
                engine.close()
        if recordings is not None:
            recordings.close(engine)
        if cut.parts and engine.backend.abilities.leaves_are_parameters and not engine.store.exist():
            raise BatchError(
                "no parameter got a gradient: the encodings have no graph (they were detached, or come from frozen "
                "models), and joint uses no parameter that is trained."
            )

    def _encoded(self, pull: Pull, samples: int, layout: Layout, items: Items, encoded: object = None) -> Encodings:
        """The encodings of a micro-batch with a graph, and their gradients. If `encoded` is None, run the forward."""
        if encoded is None:
            with self._engine.spans.of("forward"):
                encoded = self._encode_one(pull.micro_batch)
        found, tensors = take_apart(encoded, samples)
        require_same_layout(layout, found, "in the first pass", "in the second")
        assert isinstance(encoded, Encoded)
        return Encodings.of(pull, tensors, encoded, items, samples)
