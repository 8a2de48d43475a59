"""Where checks look into a window. Whoever measures looks at its spans (`_border/spans.py`).

Where each event fires::

    begin:     [window_begin]  forward of the program
    backward:  combine, [before_backward]  run, [after_backward]  and [after_first], in the first of a window
    close:     [before_close]  exchange, [flags]  divide, clip, step      [window_end], also if the window is dropped

An event that nobody observes costs nothing: only the methods that a check really has are called. A check may raise an
error, or return reasons against the step (`flags`), which the device computes. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from macrobatch._engine.verdict import Flags

if TYPE_CHECKING:
    from macrobatch._engine.engine import Engine
    from macrobatch._engine.totals import Micro


class Check:
    """Notices one mistake. It observes the events of an engine; what the gradient needs is never in a check."""

    name: ClassVar[str]
    sentence: ClassVar[str]
    cost: ClassVar[str]
    program: ClassVar[str]
    shows: ClassVar[str]
    num_ranks: ClassVar[int] = 1

    def watch(self, engine: Engine) -> bool:
        """Called once, when the engine is made. Returns False if there is nothing to notice with this engine."""
        return True

    def window_begin(self, engine: Engine) -> None:
        """Before the first forward of a window."""

    def before_backward(self, engine: Engine, micro: Micro) -> None:
        """After the forward of a micro-batch. Nothing is counted yet."""

    def after_backward(self, engine: Engine, micro: Micro | None) -> None:
        """After a backward has added its gradients. `micro` is None if recordings have set or cleared gradients."""

    def after_first(self, engine: Engine) -> None:
        """After the first backward of a window, which has had `after_backward`."""

    def before_close(self, engine: Engine) -> None:
        """After the last backward, before gradients are divided."""

    def flags(self, engine: Engine) -> Flags:
        """Reasons against the step that only the device knows."""
        return {}

    def window_end(self, engine: Engine) -> None:
        """When a window is closed or dropped."""


class Events:
    """The methods of all checks, by event: only those that a check overrides."""

    def __init__(self, checks: Sequence[Check]) -> None:
        def having(event: str) -> tuple[Callable[..., None], ...]:
            return tuple(getattr(c, event) for c in checks if getattr(type(c), event) is not getattr(Check, event))

        self.window_begin = having("window_begin")
        self.before_backward = having("before_backward")
        self.after_backward = having("after_backward")
        self.after_first = having("after_first")
        self.before_close = having("before_close")
        self.flags = tuple(check.flags for check in checks if type(check).flags is not Check.flags)
        self.window_end = having("window_end")
