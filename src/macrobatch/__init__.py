"""The batch you want, on the memory you have, with exactly the gradient you would have got."""

from macrobatch.accumulator import Accumulator
from macrobatch.errors import MacrobatchError
from macrobatch.update import StepResult

__all__ = ["Accumulator", "MacrobatchError", "StepResult"]
__version__ = "0.1.0"
