"""What the micro-batches of a window weigh, if their losses say what they are means over.

Accelerate gives every micro-batch the weight 1 / D, where D is the number of micro-batches that a window should have. A
micro-batch with n items gets n / R times that, where R, the reference, is the number of items of the first one. So as
long as all micro-batches have the same number of items, each gradient is Accelerate's, to the last bit, and a window
can return to Accelerate's arithmetic. When the window closes, its gradient is multiplied by D * R / N, where N is the
number of all items.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from macrobatch._loss.proportions import Number, Proportions, nothing_on
from macrobatch._torch.tensors import wide
from macrobatch.accelerate.reading import Reading


class Weights:
    """The items of the micro-batches of a window on this process.

    >>> weights = Weights()
    >>> for count in (3, 0, 3):
    ...     weights.add(Reading(count), torch.device("cpu"))
    >>> weights.items, weights.common_count()
    (6, 3.0)
    >>> weights.add(Reading(5), torch.device("cpu"))
    >>> weights.common_count()
    """

    def __init__(self) -> None:
        self.items: Number = 0
        self.proportions = Proportions()
        self._folded: Tensor | None = None  # the sums of numbers on the device so far
        self._counts: list[Number] = []  # without repetitions of numbers that the host knows, and without 0

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch was added."""
        return not self._counts

    @property
    def is_on_device(self) -> bool:
        """Whether only the device may know some of the numbers."""
        return isinstance(self.items, Tensor) or self.proportions.on_device

    def fits(self, reading: Reading) -> bool:
        """Whether a loss is the same expression as the earlier ones, as far as the host knows."""
        return all(map(self.proportions.fits, reading.pairs))

    def add(self, reading: Reading, device: torch.device) -> None:
        """Add a micro-batch."""
        count = reading.items
        assert count is not None
        if isinstance(count, Tensor):
            count = count.detach().reshape(()).to(device, wide(device))
            self._counts.append(count)
        elif count and count not in self._counts:
            self._counts.append(count)
        self.items = self.items + count
        for pair in reading.pairs:
            self.proportions.add(pair, device)

    def common_count(self) -> float | None:
        """The number of items of each micro-batch, if it is the same in all. The host may wait for the device."""
        known = {float(count) for count in self._counts} - {0.0}
        return next(iter(known), 1) if len(known) < 2 else None

    def sums(self, device: torch.device) -> Tensor:
        """The sums that tell whether numbers have kept their proportions, on the device."""
        if (pending := self.proportions.fold()) is not None:
            self._folded = pending if self._folded is None else self._folded + pending
        sums = self.proportions.of_host(device) if self.proportions else nothing_on(device)
        return sums if self._folded is None else sums + self._folded

    def sums_with(self, reading: Reading, device: torch.device) -> Tensor:
        """The same sums, with a micro-batch that is not added yet."""
        more = Weights()
        more.add(reading, device)
        return self.sums(device) + more.sums(device)


def factor_of(steps: int, reference: Number, items: Number, world: int = 1) -> float | Tensor:
    """The factor of a gradient at the close of a window. It is 1 without items, when there is nothing to divide."""
    if isinstance(reference, Tensor) or isinstance(items, Tensor):
        total = torch.as_tensor(items)
        factor: Tensor = steps * world * reference / total
        return factor.masked_fill(total == 0, 1)
    return steps * world * reference / items if items else 1.0


def seed_of(root: Tensor, weight: Number, divisor: int) -> Tensor:
    """What a backward begins with: the weight, divided by the length of a window."""
    if not isinstance(weight, Tensor):
        return torch.full_like(root, weight / divisor)
    return (weight / divisor).to(root.device, root.dtype).reshape(root.shape)


def reference_of(counts: Sequence[Number]) -> Number:
    """A number of items to compare others with: the largest of these. Never 0."""
    if any(isinstance(count, Tensor) for count in counts):
        device = next(count.device for count in counts if isinstance(count, Tensor))
        largest = torch.stack([torch.as_tensor(c, dtype=wide(device)).to(device).reshape(()) for c in counts]).max()
        return largest.masked_fill(largest == 0, 1)
    return max(counts) or 1
