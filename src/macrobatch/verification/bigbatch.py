"""One big batch: the gradient that a step should have, and the gradients that known mistakes would give.

`BigBatch` computes the gradient of any weighted sum of losses over parts of a batch and over all ranks. It computes in
float64 if the model can be copied.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from macrobatch._border.arguments import checked_items, checked_loss, checked_terms
from macrobatch._cut.plans import Part
from macrobatch._cut.samples import Collate, Samples, samples_of
from macrobatch._cut.trees import map_tensors
from macrobatch._loss.weighing import items_read
from macrobatch._ranks.collectives import local_tensor
from macrobatch._torch import fsdp2
from macrobatch._torch.autograd import backward_under_way
from macrobatch._torch.draws import Drawing, RandomOperations
from macrobatch._torch.graph import reach_of
from macrobatch._torch.loss_nodes import nodes_added_up
from macrobatch._torch.modules import REPLICATED, run_eagerly, unwrapped
from macrobatch._torch.snapshot import HostRandom, Snapshot
from macrobatch.errors import BatchError, FitError, UsageError
from macrobatch.types import Reduction
from macrobatch.verification.draws import Draw, Repetition
from macrobatch.verification.gradient import Gradient, NamedGradients, Ranks, as_dense, is_finite, sum_over_ranks
from macrobatch.verification.names import Names
from macrobatch.verification.observation import Call, NamedTensors
from macrobatch.verification.saved_state import SavedAttributes, copy_hooks, without_gradients, without_post_hooks
from macrobatch.verification.step_watcher import calls_during, names_of_entries, temporary_hooks

WHOLE = ""  # the name of a loss that has no terms
WIDE = (torch.float64, torch.complex128)
LossFunction = Callable[[Any, Any], Any]


Weight = float | Mapping[str, float]  # the weight of a loss, or of each of its terms by name


class Weighted(NamedTuple):
    """A part of the batch (None: all of it), and the weight of its loss."""

    samples: Sequence[int] | None
    weight: Weight


class BigBatch:
    """Computes gradients of the user's loss over parts of a batch, summed over all ranks.

    Args:
        model: the model that the step trains.
        loss_fn: the user's function, which returns a loss for the model and a part of the batch.
        batch: the batch, or this rank's share of it.
        ranks: the ranks that train the model together.
        collate: turns a list of samples into a batch, if `batch` is a list of samples.
        reduction: whether the terms of a loss with several terms are a "mean" or a "sum" over their items.

    Attributes:
        names: the parameters of the model, by name.
        foreign_leaves: leaves outside of the model that the loss trains too; set by `entries`.
        is_float64_copy: whether the gradients are computed on a float64 copy of the model.
        has_items: whether loss_fn returns items.
        draws: the random numbers that one big batch draws.
        draws_elsewhere: whether it also draws random numbers with numpy, or Python's `random`.
        repetition: the random numbers to draw instead: those of the step.
        weights: the values of parameters to compute at, by name; None: the trained model's.
        loss: the loss of the whole batch, as last computed.
        terms: the names of the terms that loss_fn returns; () for one loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        ranks: Ranks,
        collate: Collate | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        self.ranks = ranks
        self._reduction = reduction
        self._loss_fn = loss_fn
        self._outermost = model
        self._trained_model = model if ranks.is_sharded else unwrapped(model, REPLICATED)
        self._model = self._trained_model
        self._autocast: torch.dtype | None = None
        self._items: dict[tuple[int, ...] | None, dict[str, float]] = {}  # of each part whose loss was computed
        self.names = Names(self._trained_model, fixed=ranks.is_sharded)
        self.foreign_leaves: list[Tensor] = []
        self._last_foreign_leaves: list[Tensor] = []  # those of the last loss
        self.is_float64_copy = False
        self.has_items = False
        self.draws: list[Draw] = []
        self.draws_elsewhere = False
        self.repetition: Repetition | None = None
        self.weights: NamedTensors | None = None
        self.loss = 0.0
        self._host: HostRandom | None = None
        self._only_term: int | None = None
        self._num_added = 0
        self.terms: tuple[str, ...] = ()
        self._batch = batch if collate is None else collate(list(batch))
        self.why_uncut: str | None = None
        try:
            self.samples: Samples | None = samples_of(batch, collate)
        except BatchError as error:
            self.samples, self.why_uncut = None, str(error)
        if ranks.largest(float(self.samples is None)):
            self.samples = None

    def copy(self) -> str | None:
        """Compute in float64 from now on. If that is impossible, return the reason."""
        if self.ranks.is_sharded:
            return "a sharded model cannot be copied"
        problem, failed = None, "the model cannot be copied"
        try:
            twin = copy.deepcopy(self._trained_model).double()
            for parameter in twin.parameters():
                parameter.data = _to_double(parameter.data)  # double() leaves complex parameters as they are
            twin.zero_grad()
            copy_hooks(self.names.parameters(), self.names.parameters_of(twin))
            self._model, self.is_float64_copy, failed = twin, True, "it does not run in float64"
            gradient = self._rank_gradient([Weighted(None, 1.0)])
            if all(part is None for part in gradient.values()):
                problem = "loss_fn does not use the model that it is given"
            elif not is_finite(gradient) and self._trained_model_is_finite():
                problem = "its gradient is not finite in float64"
        except Exception as error:
            problem = f"{failed} ({_first_line(error)})"
        if self.ranks.largest(float(problem is not None)):
            self._model, self.is_float64_copy = self._trained_model, False
            return problem or "it does not run in float64 on another rank"
        return None

    def _trained_model_is_finite(self) -> bool:
        with self.in_own_precision(None):
            return is_finite(self._rank_gradient([Weighted(None, 1.0)]))

    @contextlib.contextmanager
    def in_own_precision(self, autocast: torch.dtype | None) -> Iterator[None]:
        """Compute on the trained model inside the block, under autocast with this dtype if there is one."""
        saved = self._model, self.is_float64_copy
        self._model, self.is_float64_copy, self._autocast = self._trained_model, False, autocast
        try:
            yield
        finally:
            self._model, self.is_float64_copy = saved
            self._autocast = None

    @property
    def model(self) -> nn.Module:
        """The module that is passed to `loss_fn`: a copy, or the trained model."""
        return self._model

    @property
    def trained_model(self) -> nn.Module:
        """The plain module that is trained."""
        return self._trained_model

    def calls(self, *, hooks: bool = False) -> list[Call]:
        """The calls of the model for the whole batch; with `hooks`, all its modules get a hook."""
        entries = [self._model.get_submodule(name) for name in self._entries]
        modules = self._model.modules() if hooks else ()
        with temporary_hooks([module.register_forward_hook(lambda *_: None) for module in modules]), run_eagerly():
            return calls_during(lambda: self.gradient([Weighted(None, 1.0)]), self._model, self.names, entries)

    def entries(self) -> list[nn.Module]:
        """The modules that `loss_fn` calls directly: the wrapped model, or parts of it."""
        self._host = HostRandom()
        with RandomOperations(self._note_draw):
            self._entries = names_of_entries(lambda: self.gradient([Weighted(None, 0.0)]), self._model)
        self._host = None
        self.draws_elsewhere = self.ranks.largest(float(self.draws_elsewhere)) > 0
        self.terms = self.ranks.broadcast(tuple(name for name in self._items[None] if name != WHOLE))
        if self.ranks.largest(len(self._last_foreign_leaves)):  # a loss may create some of them again in each call
            first = self._last_foreign_leaves
            self.gradient([Weighted(None, 0.0)])
            self.foreign_leaves = [leaf for leaf in first if any(leaf is other for other in self._last_foreign_leaves)]
        return [self._trained_model.get_submodule(name) if name else self._outermost for name in self._entries]

    def _note_draw(self, drawing: Drawing) -> None:
        if backward_under_way() == -1:
            self.draws.append(Draw(0, drawing.name, drawing.result))

    def items(self, parts: Sequence[Sequence[int] | None]) -> list[float]:
        """The number of items of each part (None: of the whole batch).

        `loss_fn` returns them, or its loss states them; else they are samples. If there are several terms, it is the
        number of the first. Ranks may pass different numbers of parts.
        """
        return [next(iter(items.values()), 0.0) for items in self.items_of_terms(parts)]

    def items_of_terms(self, parts: Sequence[Sequence[int] | None], *, anew: bool = False) -> list[dict[str, float]]:
        """The number of items of each part, for each term by name. `anew`: count again, as the loss has changed."""
        keys = [None if part is None else tuple(part) for part in parts]
        if self.ranks.largest(float(anew or any(key not in self._items for key in keys))):
            self.gradient([Weighted(part, 0.0) for part in parts])
        return [{name: self._items[key].get(name, 0.0) for name in self.terms or (WHOLE,)} for key in keys]

    def part(self, samples: Sequence[int] | None) -> Any:
        """The part of the batch with these samples."""
        if samples is None:
            part = self._batch
        else:
            assert self.samples is not None, "called only where the batch can be cut into samples"
            part = self.samples.take(Part(sorted(samples)))
        return map_tensors(part, _to_double if self.is_float64_copy else lambda x: x)  # loss_fn may empty containers

    def gradient(self, terms: Sequence[Weighted]) -> Gradient:
        """The weighted sum of the terms' gradients over all ranks."""
        found = self._rank_gradient(terms)
        if self.ranks.group is not None and not self.ranks.is_sharded:
            found = sum_over_ranks(found, self._parameters(), self.ranks.group)
        return Gradient(found, self.ranks.group)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.names.parameters_of(self._model).items() if p.requires_grad}

    def _rank_gradient(self, terms: Sequence[Weighted]) -> NamedGradients:
        """The gradient of this rank's terms; of all ranks' terms if every backward communicates."""
        parameters = self._parameters()
        own_weights = self._enter_weights()
        snapshot = Snapshot([self._model]), SavedAttributes(self._model, is_sharded=self.ranks.is_sharded)
        hooked = [] if self.ranks.is_sharded else list(parameters.values())
        unused = fsdp2.reducing_unused([self._model])  # other ranks may use what this one does not
        with without_gradients(parameters.values()), without_post_hooks(hooked), unused:
            try:
                for samples, weight in self._pad_terms(terms):
                    with self._repeating(samples):
                        self._backward(samples, weight)
                    _restore(snapshot)
                return {
                    name: None if p.grad is None else as_dense(local_tensor(p.grad)) for name, p in parameters.items()
                }
            finally:
                _restore(snapshot)
                for parameter, data in own_weights:
                    parameter.data = data

    def _enter_weights(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Give the parameters the values of `weights`. Returns what they had before."""
        if self.weights is None:
            return []
        own = [(p, p.data, self.weights.get(name)) for name, p in self.names.parameters_of(self._model).items()]
        for parameter, data, value in own:
            if value is not None:
                parameter.data = value.to(data.dtype, copy=True)
        return [(parameter, data) for parameter, data, _ in own]

    def _repeating(self, samples: Sequence[int] | None) -> contextlib.AbstractContextManager[object]:
        if self.repetition is None or self.samples is None:
            return contextlib.nullcontext()
        return self.repetition.during(range(self.samples.count) if samples is None else sorted(samples))

    def state_error(self) -> float:
        """How much the gradient of one big batch changes if a forward came before it; 0 if that is rounding."""
        first = self.gradient([Weighted(None, 1.0)])
        before = Snapshot([self._model]), SavedAttributes(self._model, is_sharded=self.ranks.is_sharded)
        with self._repeating(None):
            self._losses(None)
        before[0].restore_random()
        again = self.gradient([Weighted(None, 1.0)])
        _restore(before)
        apart = again.distance(first) / (first.largest or 1.0)
        return 0.0 if apart <= 1e-5 else apart

    def has_another_loss(self, before: float) -> bool:
        """Whether the loss of the whole batch is another one than before."""
        with self.in_own_precision(None):
            self.gradient([Weighted(None, 0.0)])
        is_another = math.isfinite(before) and not abs(self.loss - before) <= 1e-4 * abs(before)
        return self.ranks.largest(float(is_another)) > 0

    def _pad_terms(self, terms: Sequence[Weighted]) -> Sequence[Weighted]:
        """Pad the terms with weights of 0 if every backward communicates, so that all ranks have equally many."""
        if not self.ranks.is_sharded:
            return terms
        longest = int(self.ranks.largest(len(terms)))
        return [*terms, *[Weighted(None, 0.0)] * (longest - len(terms))]

    def _backward(self, samples: Sequence[int] | None, weight: Weight) -> None:
        try:
            losses = self._losses(samples)
            if not losses and not self.ranks.is_sharded:
                return  # no term has items
            loss = self._weigh(losses, weight) * self.ranks.average
            if samples is None:
                self.loss = float(sum(part.detach().double().sum() for part in losses.values()))
            self._require_no_new_parameters()
            self._drop_other_terms(losses)
            self._last_foreign_leaves = self._leaves_outside_model(loss)
            with without_gradients(self._last_foreign_leaves):
                loss.backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError as error:
            message = _first_line(error)
        else:
            return
        raise FitError(
            f"the whole batch does not fit into memory at once ({message}), and verify compares the step with it. Pass "
            "fewer samples: a few in each micro-batch are enough."
        )

    def num_added(self) -> int:
        """The number of terms that the loss of the whole batch adds up."""
        self._num_added = 0
        self.gradient([Weighted(None, 0.0)])
        return self._num_added

    @contextlib.contextmanager
    def only_term(self, number: int) -> Iterator[None]:
        """A context in which the gradients are those of one of the terms that the loss adds up."""
        self._only_term = number
        try:
            yield
        finally:
            self._only_term = None

    def _drop_other_terms(self, losses: dict[str, Tensor]) -> None:
        """Let no gradient reach the other terms."""
        if WHOLE not in losses:
            return
        terms = nodes_added_up(losses[WHOLE])
        self._num_added = len(terms)
        for number, node in enumerate(terms if self._only_term is not None and len(terms) > 1 else ()):
            if number != self._only_term:
                node.register_prehook(lambda seeds: tuple(None if s is None else torch.zeros_like(s) for s in seeds))

    def _losses(self, samples: Sequence[int] | None) -> dict[str, Tensor]:
        """Compute the loss of a part, or the means of its terms, and note the items."""
        with self._autocasting():
            returned = self._loss_fn(self._model, self.part(samples))
        if self._host is not None:
            self.draws_elsewhere = self._host.has_moved_outside_torch()
        key = None if samples is None else tuple(samples)
        if isinstance(returned, Mapping):
            return self._means(returned, key)
        loss, items = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
        items, loss = checked_items(items), checked_loss(loss)
        self.has_items = items is not None
        if items is None:
            items = items_read(loss, is_mean=self._reduction == "mean")
        if items is None and (samples is not None or self.samples is not None):
            items = len(samples) if samples is not None else self.samples.count  # type: ignore[union-attr]
        self._items[key] = {WHOLE: 1.0 if items is None else float(items)}
        return {WHOLE: loss}

    def _means(self, returned: Mapping[str, Any], key: tuple[int, ...] | None) -> dict[str, Tensor]:
        """The mean of each term that has items."""
        self.has_items = True
        terms = checked_terms(returned, None, list(returned))
        samples = 1 if self.samples is None else self.samples.count
        counts = {
            name: float((len(key) if key is not None else samples) if items is None else items)
            for name, (_, items) in terms.items()
        }
        self._items[key] = counts
        is_sum = self._reduction == "sum"
        return {name: loss / counts[name] if is_sum else loss for name, (loss, _) in terms.items() if counts[name]}

    def _weigh(self, losses: dict[str, Tensor], weight: Weight) -> Tensor:
        """The weighted sum of the losses."""
        weights = weight if isinstance(weight, Mapping) else dict.fromkeys(losses, weight)
        weighed = [loss.reshape(()) * weights.get(name, 0.0) for name, loss in losses.items()]
        if not weighed:
            raise BatchError("a part of the batch has no term with items, but under FSDP every rank needs a backward.")
        return sum(weighed[1:], start=weighed[0])

    def _require_no_new_parameters(self) -> None:
        """Raise if calling the model created parameters: no optimizer could hold them."""
        created = self.names.unknown_names() if self._model is self._trained_model and not self.ranks.is_sharded else []
        if created:
            raise UsageError(
                f"calling the model created new parameters: {', '.join(created[:3])}. Call it once before verify."
            )

    def _leaves_outside_model(self, loss: Tensor) -> list[Tensor]:
        """The leaves of a loss's graph that are outside of the model."""
        if self.ranks.is_sharded:
            return []
        own = {id(parameter) for parameter in self._model.parameters()}
        return [leaf for leaf in reach_of(loss).leaves if id(leaf) not in own]

    def _autocasting(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(next(self._model.parameters()).device.type, dtype=self._autocast)


def _restore(snapshot: tuple[Snapshot, SavedAttributes]) -> None:
    for part in snapshot:
        part.restore()


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.to(WIDE[tensor.is_complex()]) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]
