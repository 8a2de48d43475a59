"""Rewrites errors of the engine for programs that have no loop of their own."""

from __future__ import annotations

from functools import partial

from macrobatch._checks.gradients import UNDIVIDED
from macrobatch.errors import rewording

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
    'make the Accumulator or MacroStep with reduction="sum" and pass items=, the number that the loss sums over. If it '
    'is the sum of these losses, divided by nothing: reduction="total".': (
        'return the mean over the items of the batch, with their number: {"loss": loss / n, "items": n}.'
    ),
    ', but reduction="mean" takes it for a mean': ", not a mean over its items",
    "If it was divided by the count of the whole window, the losses of a window only have to be added up: use "
    'reduction="total", which divides by nothing. If it is a mean over something else, such as samples, pass their '
    "number as items=.": (
        "Divide by the count of the batch itself. If it is a mean over something else, such as samples, return their "
        'number: {"loss": loss, "items": n}.'
    ),
    "or leave items= out, and it is read from the loss. items=1 in every micro-batch gives all the same weight.": (
        'or leave "items" out, and it is read from the loss. "items": 1 in every batch gives all the same weight.'
    ),
    "Pass items= with each loss, or several terms by name with counts=.": (
        'Return what the loss is a mean over: {"loss": loss, "items": n}.'
    ),
    "Pass several terms by name, with counts=, which gives each its own denominator. For a sum divided by the count of "
    'the whole window, use reduction="total".': (
        "Terms with their own denominators need automatic_optimization=False, a loader of whole batches, and "
        "macrobatch.MacroStep(..., counts=...). For a sum, divide by the count of the batch itself."
    ),
    "Pass items= with every loss.": 'Return "items" with every loss.',
    "Pass the number of items with each loss, items=.": 'Return it with each loss: {"loss": loss, "items": n}.',
    "Wrap it in DistributedDataParallel or fully_shard and make the Accumulator after that; for ranks that train on "
    "their own, pass a process_group of one.": 'Use ExactStrategy("ddp") or ExactStrategy("fsdp2").',
}


in_words_of_lightning = partial(rewording, WORDS)  # a context in which errors speak of hooks and of the Trainer
