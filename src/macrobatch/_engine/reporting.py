"""Windows report themselves to whoever audits a program: the kernel's backwards cannot be seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from macrobatch._loss.proportions import Number

if TYPE_CHECKING:
    from macrobatch._engine.engine import Engine
    from macrobatch._engine.window import Window


class Auditor(Protocol):
    """Sees the windows of all engines. It changes nothing."""

    def micro_batch(self, window: Window, losses: Sequence[Tensor | None], items: Sequence[Number]) -> None:
        """A window has counted a micro-batch, with these losses and items of its columns. Usual losses are left out."""

    def closing(self, engine: Engine, window: Window) -> AbstractContextManager[None]:
        """Entered around the close of a window, which divides its gradients, and may step the optimizers."""


auditors: list[Auditor] = []  # empty unless a program is audited
NOBODY: AbstractContextManager[None] = nullcontext()
