"""Encodings: split the `Encoded` that `loss_fn` returns into tensors, and build the `Encoded` of the whole batch.

Rows come in the order of the micro-batches of the cut. They are put into the order of the batch, and then the rows of
all ranks are concatenated. One exchange of bytes serves all dtypes and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from macrobatch._border.arguments import checked_items, checked_ordinary
from macrobatch._cut.policies import Cut
from macrobatch._cut.trees import leaves, rebuild
from macrobatch._joint.objective import Pull
from macrobatch._ranks.collectives import Group, all_gather_bytes, full_tensor
from macrobatch._torch.tensors import wide
from macrobatch.errors import BatchError
from macrobatch.types import Encoded, Items, Sum, fields_of


class Field(NamedTuple):
    """One tensor of the encodings."""

    path: str  # its name in error messages, as a user would write it
    is_sum: bool  # whether it is a statistic of the micro-batch (`Sum`), without rows
    shape: tuple[int, ...]  # of one row, or of a whole statistic
    dtype: torch.dtype  # of the rows, or of the total of a statistic

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


class Layout(NamedTuple):
    """The structure of encodings, without their values and their number of samples."""

    tree: dict[str, Any]  # the fields by name, with a number in place of each tensor
    fields: tuple[Field, ...]  # the description of each of those tensors
    has_loss: bool  # whether there is also an ordinary loss

    def encoded(self, tensors: Sequence[Tensor | Sum]) -> Encoded:
        """An `Encoded` of this layout, with these tensors."""
        return Encoded(**rebuild(self.tree, lambda index: tensors[index]))


def take_apart(encoded: object, samples: int) -> tuple[Layout, list[Tensor]]:
    """The layout and the tensors of the `Encoded` that `loss_fn` returned for a micro-batch of `samples` samples."""
    if not isinstance(encoded, Encoded):
        raise BatchError(
            f"with joint= loss_fn must return an Encoded, which holds what joint needs of each sample: got "
            f"{type(encoded).__name__}. For example Encoded(image=images, text=texts); Encoded(loss, items, ...) adds "
            "an ordinary loss."
        )
    if isinstance(encoded.loss, dict):
        raise BatchError(
            "Encoded holds one ordinary loss with its items: got a dict of terms. Add them up, each divided by "
            "its own total, or compute them in joint from Sum(...) fields."
        )
    if encoded.loss is None and encoded.items is not None:
        raise BatchError("Encoded got items, but no loss that they belong to: Encoded(loss, items, ...).")
    found, fields, tensors = fields_of(encoded), [], []
    for name, value_of in found.items():
        for path, leaf in leaves(value_of, f"encoded.{name}"):
            value = _tensor_of(leaf, path, samples)
            is_sum = isinstance(leaf, Sum)
            dtype = _total_dtype(value.dtype) if is_sum else value.dtype
            fields.append(Field(path, is_sum, tuple(value.shape if is_sum else value.shape[1:]), dtype))
            tensors.append(value)
    if not fields:
        raise BatchError(
            "Encoded has no field: joint would get nothing. For example Encoded(image=images, text=texts)."
        )
    numbers = iter(range(len(fields)))
    return Layout(rebuild(found, lambda _: next(numbers)), tuple(fields), encoded.loss is not None), tensors


def _tensor_of(leaf: Any, path: str, samples: int) -> Tensor:
    if isinstance(leaf, Sum):
        value = torch.as_tensor(leaf.value) if isinstance(leaf.value, Number) else leaf.value
        if not isinstance(value, Tensor):
            raise BatchError(f"{path} must be the Sum of a tensor or a number: got {type(value).__name__}.")
        return full_tensor(_dense(value, path))
    if not isinstance(leaf, Tensor):
        raise BatchError(
            f"{path} must be a tensor with one row a sample: got {type(leaf).__name__}. Statistics of the micro-batch "
            "go into Sum(...)."
        )
    _dense(leaf, path)
    if leaf.dim() == 0 or len(leaf) != samples:
        raise BatchError(
            f"{path} must have one row for each of the {samples} samples of its micro-batch: found the shape "
            f"{tuple(leaf.shape)}. Put the samples first; what adds up over the batch instead goes into Sum(...)."
        )
    return full_tensor(leaf)


def _dense(tensor: Tensor, path: str) -> Tensor:
    kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else "sparse"
    if kind == "sparse" and tensor.layout == torch.strided:
        return tensor
    raise BatchError(
        f"{path} must be a dense tensor, whose numbers can be put together with those of other micro-batches: got a "
        f"{kind} one. Use to_dense(), or pad it."
    )


def _total_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum, as `torch.sum` chooses it."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def require_same_layout(expected: Layout, found: Layout, there: str, here: str) -> None:
    """Raise an error that names the first field that differs between the encodings `there` and `here`."""
    if expected.fields == found.fields and expected.has_loss == found.has_loss:
        return
    if expected.has_loss != found.has_loss:
        with_loss, without = (there, here) if expected.has_loss else (here, there)
        raise BatchError(
            f"Encoded must hold an ordinary loss for every micro-batch, or for none: it has one {with_loss}, and none "
            f"{without}. Where there is nothing to add, return a loss of 0 with 0 items."
        )
    one, other = ({field.path: field for field in layout.fields} for layout in (expected, found))
    for path in (*one, *other):
        if (path in one) != (path in other):
            raise BatchError(
                f"Encoded must have the same fields for every micro-batch: {path} came {there if path in one else here}"
                f" only."
            )
    if one == other:
        raise BatchError(
            f"Encoded must have its fields in the same order for every micro-batch: it has {', '.join(one)} {there}, "
            f"and {', '.join(other)} {here}."
        )
    path = next(p for p in one if one[p] != other[p])
    raise BatchError(
        f"Encoded must look the same for every micro-batch but for the number of samples: {path} has "
        f"{_words(one[path])} {there}, and {_words(other[path])} {here}. Bring it to one shape and dtype, e.g. by "
        "pooling or padding."
    )


def _words(field: Field) -> str:
    kind = "a Sum of shape" if field.is_sum else "rows of shape"
    return f"{kind} {field.shape} in {field.dtype}"


# ---------------------------------------------------------------------------------------------- of one rank


@dataclass
class OwnEncodings:
    """The encodings of one rank."""

    cut: Cut
    device: torch.device
    layout: Layout | None = None  # None before the first micro-batch; after `join`, that of all ranks
    fields: list[Any] = field(default_factory=list)  # each: a tensor per micro-batch; after `join`, all rows in one
    losses: list[Tensor] = field(default_factory=list)  # the ordinary losses, if there are any
    items: list[int | float | Tensor] = field(default_factory=list)  # of those losses
    numbers: Tensor | None = None  # losses and items on the device, shape (micro-batches, 2), after `ordinary`
    _are_samples: bool | None = None  # whether no items were passed, so that samples are counted

    def add(self, encoded: object, samples: int) -> None:
        """Add the encodings of the next micro-batch."""
        layout, tensors = take_apart(encoded, samples)
        assert isinstance(encoded, Encoded)
        if self.layout is None:
            self.layout, self.fields = layout, [[] for _ in tensors]
        count = len(self.fields[0])
        require_same_layout(self.layout, layout, "in the first", f"in micro-batch {count + 1}")
        for parts, tensor in zip(self.fields, tensors, strict=True):
            # A copy: a row would keep the whole tensor that it is a view of.
            parts.append(tensor.detach().clone(memory_format=torch.contiguous_format))
        if encoded.loss is not None:
            self._add_loss(encoded.loss, encoded.items, samples)

    def _add_loss(self, loss: Tensor, items: Items, samples: int) -> None:
        if self._are_samples not in (None, items is None):
            raise BatchError("Encoded must hold items for every micro-batch of a batch, or for none.")
        self._are_samples = items is None
        count = checked_items(items)
        # Copies: the caller may reuse the same buffers for the next micro-batch.
        self.losses.append(checked_ordinary(loss, needs_graph=False).detach().reshape(()).clone())
        self.items.append(samples if count is None else count.detach().clone() if isinstance(count, Tensor) else count)

    @property
    def has_whole_items(self) -> bool:
        """Whether all counts of items are whole numbers by their type."""
        return all(isinstance(n, int) or (isinstance(n, Tensor) and not n.is_floating_point()) for n in self.items)

    def join(self, layout: Layout) -> list[Tensor]:
        """The rows in the order of the batch, and the totals of statistics."""
        self.layout = layout
        self.fields = self.fields or [[] for _ in layout.fields]
        order = [sample for part in self.cut.parts for sample in part.samples]
        joined = []
        for index, one in enumerate(layout.fields):
            parts = self.fields[index]
            if one.is_sum:
                joined.append(total_of(parts, one, self.device))
                continue
            nothing = torch.empty(0, *one.shape, dtype=one.dtype, device=self.device)
            self.fields[index] = _in_batch_order(parts, order) if parts else nothing  # frees the parts
            joined.append(self.fields[index])
        return joined

    def pull(self, index: int, micro_batch: Any, gradients: Sequence[Tensor | None]) -> Pull:
        """After `join`: the input of a micro-batch in the second pass, from the gradients of all rows and totals."""
        assert self.layout is not None
        places, first, own = _places_of(self.cut.parts[index].samples, self.device), [], []
        for one, values, gradient in zip(self.layout.fields, self.fields, gradients, strict=True):
            value = values[index] if one.is_sum else _rows_at(values, places)
            first.append(value if value.dim() else value.to(self.device, non_blocking=True))
            # The gradient of a total is the same for the statistic of every micro-batch.
            own.append(gradient if gradient is None or one.is_sum else _rows_at(gradient, places))
        return Pull(micro_batch, first, own, None if self.numbers is None else self.numbers[index])

    def zeros(self, used: Sequence[bool]) -> list[Tensor | None]:
        """After `join`: gradients of 0, for the fields that have one."""
        assert self.layout is not None
        zeros: list[Tensor | None] = []
        for one, is_used in zip(self.layout.fields, used, strict=True):
            shape = one.shape if one.is_sum else (self.cut.samples.count, *one.shape)
            zeros.append(torch.zeros(shape, dtype=one.dtype, device=self.device) if is_used else None)
        return zeros

    def ordinary(self, *, is_mean: bool) -> Tensor:
        """The sum of the ordinary losses, the sum of their items, and the number of invalid counts."""
        device, dtype = self.device, wide(self.device)
        if not self.losses:
            return torch.zeros(3, device=device, dtype=dtype)
        losses = torch.stack([loss.to(device, dtype, non_blocking=True) for loss in self.losses])
        if any(isinstance(count, Tensor) for count in self.items):
            numbers = torch.stack([_number(count, device, dtype) for count in self.items])
        else:
            numbers = torch.tensor(self.items, dtype=dtype, device="cpu").to(device, non_blocking=True)
        self.numbers = torch.stack([losses, numbers], 1)
        if is_mean:  # a mean over no items is NaN, and must add nothing
            losses = losses.masked_fill(numbers == 0, 0) * numbers
        bad = ~(torch.isfinite(numbers) & (numbers >= 0))
        return torch.stack([losses.sum(), numbers.sum(), bad.to(dtype).sum()])


def _number(count: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(count, Tensor):
        return count.reshape(()).to(device, dtype, non_blocking=True)
    return torch.full((), count, device=device, dtype=dtype)


# ---------------------------------------------------------------------------------------------- the whole batch


def _in_batch_order(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """The rows of a rank in the order of the batch. Row i of all `parts` together belongs to sample ``order[i]``."""
    rows = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if list(order) == list(range(len(order))):
        return rows
    places = [0] * len(order)
    for row, sample in enumerate(order):
        places[sample] = row
    return _rows_at(rows, _places_of(places, rows.device))


def _places_of(samples: Sequence[int], device: torch.device) -> slice | Tensor:
    """The positions of the rows of these samples, for `_rows_at`."""
    if isinstance(samples, range) and samples.step == 1:
        return slice(samples.start, samples.stop)
    index = torch.tensor(list(samples), device="cpu")
    if device.type == "cuda":
        index = index.pin_memory()  # otherwise the host would wait for the copy
    return index.to(device, non_blocking=True)


def _rows_at(rows: Tensor, places: slice | Tensor) -> Tensor:
    """The rows at these positions; a view if the positions are a slice."""
    return rows[places] if isinstance(places, slice) else rows.index_select(0, places)


def total_of(parts: Sequence[Tensor], field: Field, device: torch.device) -> Tensor:
    """The sum of a statistic over the micro-batches of a rank, in a dtype wide enough to lose nothing."""
    dtype = _wide_dtype(field.dtype, device)
    total = torch.zeros(field.shape, dtype=dtype, device=device)
    for part in parts:
        total += part.to(device, dtype, non_blocking=True)
    return total


def _wide_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return wide(device) if dtype.is_floating_point else torch.int64


class Exchange:
    """Exchanges the tensors of all ranks at once: concatenates rows and adds up totals, in the order of the ranks."""

    def __init__(self, layout: Layout, samples: Sequence[int], device: torch.device, group: Group) -> None:
        self._fields = [*layout.fields, *(Field("", True, (3,), wide(device)),) * layout.has_loss]
        self._samples = samples
        self._device = device
        self._group = group

    def gather(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all ranks. `own`: the fields of this rank, then the totals of its ordinary losses, if any."""
        # The widest dtypes come first, so that each tensor is aligned to its item size.
        order = sorted(range(len(own)), key=lambda index: -self._dtype(index).itemsize)
        sizes = [sum(self._nbytes(index, count) for index in order) for count in self._samples]
        packed = torch.cat([own[index].contiguous().reshape(-1).view(torch.uint8) for index in order])
        everyone = all_gather_bytes(packed, sizes, self._group)
        found: list[list[Tensor]] = [[] for _ in own]
        for received, count in zip(everyone, self._samples, strict=True):
            start = 0
            for index in order:
                end = start + self._nbytes(index, count)
                found[index].append(received[start:end].view(self._dtype(index)).view(self._shape(index, count)))
                start = end
        return [
            torch.stack(parts).sum(0) if field.is_sum else torch.cat(parts)
            for field, parts in zip(self._fields, found, strict=True)
        ]

    def _dtype(self, index: int) -> torch.dtype:
        field = self._fields[index]
        return _wide_dtype(field.dtype, self._device) if field.is_sum else field.dtype

    def _shape(self, index: int, count: int) -> tuple[int, ...]:
        field = self._fields[index]
        return field.shape if field.is_sum else (count, *field.shape)

    def _nbytes(self, index: int, count: int) -> int:
        return math.prod(self._shape(index, count)) * self._dtype(index).itemsize
