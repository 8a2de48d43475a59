"""What to do about errors of the engine in a Trainer, whose program does not call it itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from macrobatch.errors import BatchError, rewording

ADVICE = (
    "Let compute_loss return (loss, items), where the loss is a mean over so many items, and all its terms have that "
    "denominator."
)
UNTIL = "Until the window's last batch they are undivided sums"
ABOUT_ITEMS = (
    "sum",
    "sum beside mean",
    "another divisor",
    "items out of proportion",
    "another expression",
    "several means",
    "mixed items",
    "steady count",
)
CURES = {
    **dict.fromkeys(ABOUT_ITEMS, ADVICE),
    "no scalar": "Let compute_loss return its mean().",
    "loss of another model": "Let compute_loss use the model that it gets.",
    "changed gradients": (
        f"{UNTIL}: leave clearing and clipping to the Trainer, once a window (max_grad_norm=). Callbacks may change "
        "them in on_pre_optimizer_step()."
    ),
    "another backward": (
        f"{UNTIL}, so nothing else may add to them: leave loss.backward() out of compute_loss and callbacks, and "
        "return the sum of several losses."
    ),
}

in_words_of_trainers = partial(rewording, CURES)  # a context in which errors speak of compute_loss and callbacks


@contextlib.contextmanager
def advised(trainer: Any) -> Iterator[None]:
    """A context in which errors say what to do in a trainer, and those about losses whose loss it is."""
    try:
        with in_words_of_trainers():
            yield
    except BatchError as error:
        raise BatchError(f"{type(trainer).__name__}.compute_loss: {error}") from error
