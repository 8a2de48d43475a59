"""The batch you want, on the memory you have, with exactly the gradient you would have got."""

import macrobatch.verify as _verify  # noqa: F401 (before the function: importing the module later would replace it)
from macrobatch.accumulator import Accumulator
from macrobatch.errors import MacrobatchError
from macrobatch.losses import causal_lm_loss
from macrobatch.macrostep import MacroStep
from macrobatch.split import by_count, by_tokens
from macrobatch.update import StepResult
from macrobatch.verification import verify

__all__ = [
    "Accumulator",
    "MacroStep",
    "MacrobatchError",
    "StepResult",
    "by_count",
    "by_tokens",
    "causal_lm_loss",
    "verify",
]
__version__ = "0.1.0"
