"""Rewrites errors of the engine for programs of Accelerate, which do not call it themselves."""

from __future__ import annotations

from functools import partial

from macrobatch._checks.gradients import UNDIVIDED
from macrobatch.errors import rewording

UNTIL = "In a window with items they are undivided sums until the last backward"
WORDS = {
    UNDIVIDED: f"{UNTIL}: edit or clip them under `if accelerator.sync_gradients:`.",
    "Until step() they are undivided sums": UNTIL,
    "call acc.backward(loss) instead of loss.backward()": (
        "call accelerator.backward(loss, items=...) instead of loss.backward()"
    ),
    " discard() drops what was accumulated.": "",
    "drop this window with discard(), and let": "and let",
    "Pass the loss of the model that this Accumulator was made for.": (
        "Pass accumulate() the models that the loss trains."
    ),
    ", or several terms by name with counts=": "",
    "Pass several terms by name, with counts=, which gives each its own denominator. For a sum divided by the count of "
    'the whole window, use reduction="total".': "Give them one backward(loss, items=...), or leave items out.",
}


in_words_of_accelerate = partial(rewording, WORDS)  # a context in which errors speak of the accelerator
