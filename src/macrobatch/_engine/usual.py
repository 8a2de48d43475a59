"""The usual micro-step, written flat: what `Engine.backward` does for most micro-batches on a CPU, in one function.

In a training, each piece of Python code runs from a cold cache, so pieces cost more than what they do. But most
micro-batches are alike: a plain loss in one process, which is weighed like an earlier one, and reaches the parameters
of the window only. Whatever is out of the ordinary is left to `Engine.backward`, which can do everything: `run` returns
False, and has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from macrobatch._engine.store import GradientStore
from macrobatch._engine.window import Window
from macrobatch._loss.steady import Steady
from macrobatch._ranks.backend import Local
from macrobatch._torch.autograd import run_on_host
from macrobatch._torch.graph import ends_in
from macrobatch._torch.tensors import has_accelerator, value_of

if TYPE_CHECKING:
    from macrobatch._engine.engine import Engine


class UsualStep:
    """Runs the usual micro-batches of an engine."""

    def __init__(self) -> None:
        self._steady: Steady | None = None  # of an earlier window

    @staticmethod
    def may_serve(engine: Engine) -> bool:
        """Whether an engine can have usual micro-batches: one process on a CPU, and nothing that replaces a part."""
        is_plain = type(engine.backend) is Local and type(engine.store) is GradientStore and not has_accelerator()
        return is_plain and engine.objective.ties is None

    def run(self, engine: Engine, window: Window, loss: Any, items: Any, *, are_samples: bool) -> bool:
        """Run the backward of a micro-batch, add it to the window, and end it; or return False."""
        if (steady := window.steady) is None:
            steady = self._steady
            if steady is None or window.num_backwards:
                return False
        number = steady.items_of(loss, items, window.sizes, window.batch, are_samples=are_samples)
        if not number or engine.spans.observers or (value := value_of(loss)) is None:
            return False
        for observe in engine.on.before_backward:
            observe(engine, None)
        store = engine.store
        if not ends_in(loss, store.trained):
            return False
        seed = torch.full_like(loss, number)
        window.begin_usual(value, number, steady)
        run_on_host((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        store.absorb()
        for observe in engine.on.after_backward:
            observe(engine, None)
        if window.num_backwards == 1:
            for look in engine.on.after_first:
                look(engine)
        window.end_backward()
        return True

    def remember(self, window: Window) -> None:
        """Remember how the micro-batches of a closed window were weighed, for the next one."""
        self._steady = window.steady
