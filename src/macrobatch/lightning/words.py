"""Rewrites errors of the engine for programs that have no loop of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from macrobatch._checks.gradients import UNDIVIDED
from macrobatch.errors import MacrobatchError

UNTIL = "Until the window's last backward they are undivided sums"
WORDS = {
    UNDIVIDED: (
        f"{UNTIL}: leave clearing and clipping to Lightning, once a window (gradient_clip_val=). Hooks may change them "
        "in on_before_optimizer_step()."
    ),
    "Until step() they are undivided sums": UNTIL,
    "call acc.backward(loss) instead of loss.backward(), add several losses up and pass the sum": (
        "leave loss.backward() out of training_step and hooks, return the sum of several losses"
    ),
    " discard() drops what was accumulated.": "",
    "drop this window with discard(), and let": "and let",
    "step() before backward(): the micro-batch under way has not been accumulated yet. Call acc.backward(loss, items) "
    "for it; loss.backward() does not count it.": (
        "the optimizer was stepped in training_step, before the backward of its batch. Leave the step to Lightning, or "
        "set automatic_optimization=False and leave ExactStrategy out."
    ),
    ', or with sum() and reduction="sum"': "",
    "Pass the loss of the model that this Accumulator was made for.": "Return the loss of the module itself.",
    "(with Accumulator: steps=lambda step: 1 if step == 0 else 8; not with joint=, which has two passes)": (
        "in the first epoch, steps={0: 1, 1: 8}"
    ),
    "Wrap it in DistributedDataParallel or fully_shard and make the Accumulator after that; for ranks that train on "
    "their own, pass a process_group of one.": 'Use ExactStrategy("ddp") or ExactStrategy("fsdp2").',
}


@contextlib.contextmanager
def in_words_of_lightning() -> Iterator[None]:
    """A context in which errors speak of hooks and of the Trainer."""
    try:
        yield
    except MacrobatchError as error:
        message = str(error)
        for ours, theirs in WORDS.items():
            message = message.replace(ours, theirs)
        error.args = (message, *error.args[1:])
        raise
