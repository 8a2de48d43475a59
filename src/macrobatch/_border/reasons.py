"""Why a window took no step: the errors of a closed window, by its number."""

from __future__ import annotations

from macrobatch._border.arguments import FEWEST_ITEMS
from macrobatch.errors import BatchError, NonFiniteError


def nonfinite_gradient(window: int) -> NonFiniteError:
    """A gradient that is infinite or NaN."""
    return NonFiniteError(
        f"window {window} has an infinite or NaN gradient. Look at its batches and its loss (a mean over "
        'no items is 0 / 0: pass sums with reduction="sum", or items as ints), lower the learning rate, '
        'or set max_norm; nonfinite="skip" drops such windows, nonfinite="keep" does not look.'
    )


def invalid_items(window: int) -> BatchError:
    """Items that were negative or not finite."""
    return BatchError(
        f"items passed in window {window} were negative or not finite; its step was not taken. "
        "They are what the loss is a mean over: count them, e.g. items=(labels != -100).sum(). Less than "
        f"{FEWEST_ITEMS:g} in all, or more than {1 / FEWEST_ITEMS:g}, is no count either."
    )
