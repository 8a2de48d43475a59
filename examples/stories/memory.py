"""How much memory tensors take, at most: for the stories.

A machine has many programs, and torch keeps memory that it no longer needs. So this counts tensors: the bytes of all
that were made while it watches, and were alive at the same time. What a kernel uses for itself is not seen.
"""

# mypy: untyped-calls-exclude=torch
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the way to see every operation, the backward's too

MIB = 2**20


class PeakMemory(TorchDispatchMode):
    """Watches the tensors that are made inside a ``with`` block.

    >>> import torch
    >>> with PeakMemory() as peak:
    ...     x = torch.zeros(2**20, dtype=torch.float64)
    ...     y = x + 1
    ...     del x
    ...     z = y.view(2, -1)  # no memory of its own
    >>> peak.mib
    16.0
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mib = 0.0
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, tuple((kwargs or {}).values()))):
            self._note(tensor, is_new=False)  # if it is not known, it was there before
        result = operation(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, is_new=True)
        return result

    def _note(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if is_new else 0
        if key in self._known:
            return
        self._known.add(key)
        self._now += size
        self.mib = max(self.mib, self._now / MIB)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []
