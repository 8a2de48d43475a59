"""What to do about errors of the engine in a program of Lightning, which does not call it itself."""

from __future__ import annotations

from functools import partial

from macrobatch.errors import rewording

UNTIL = "Until the window's last backward they are undivided sums"
ITEMS = 'Return what the loss is a mean over: {"loss": loss, "items": n}.'
CURES = {
    "changed gradients": (
        f"{UNTIL}: leave clearing and clipping to Lightning, once a window (gradient_clip_val=). Hooks may change them "
        "in on_before_optimizer_step()."
    ),
    "another backward": (
        f"{UNTIL}, so nothing else may add to them: leave loss.backward() out of training_step and hooks, return the "
        "sum of several losses, and freeze this model where another one is trained through it. Under fully_shard, a "
        "gradient penalty (autograd.grad inside of the loss) adds to gradients as well, and is not supported."
    ),
    "another model": (
        "Clear those with zero_grad(), and let all micro-batches of a window reach the other model, or none: detach() "
        "it, or freeze it."
    ),
    "step before backward": (
        "The optimizer was stepped in training_step, before the backward of its batch. Leave the step to Lightning, or "
        "set automatic_optimization=False and leave ExactStrategy out."
    ),
    "no scalar": "Reduce it with mean().",
    "loss of another model": "Return the loss of the module itself.",
    "static graph": "Leave static_graph out, or take one micro-batch a step in the first epoch: steps={0: 1, 1: 8}.",
    "not wrapped": 'Use ExactStrategy("ddp") or ExactStrategy("fsdp2").',
    "sum": 'Return the mean over the items of the batch, with their number: {"loss": loss / n, "items": n}.',
    "sum beside mean": (
        'If the sum is a penalty on parameters, the same in each batch, return {"loss": loss, "items": n}. If it is '
        "over samples, divide it by their number."
    ),
    "another divisor": (
        "Divide by the count of the batch itself. If it is a mean over something else, such as samples, return their "
        'number: {"loss": loss, "items": n}.'
    ),
    "items out of proportion": (
        "Count what the loss averages, after any shift of labels and without ignored ones; or leave "
        '"items" out, and it is read from the loss. "items": 1 in every batch gives all the same weight.'
    ),
    "another expression": f"{ITEMS} (A mean times its number of items is a sum, not a mean.)",
    "several means": (
        "Terms with their own denominators need automatic_optimization=False, a loader of whole batches, and "
        "macrobatch.MacroStep(..., counts=...). For a sum, divide by the count of the batch itself."
    ),
    "mixed items": 'Return "items" with every loss.',
    "steady count": 'Return it with each loss: {"loss": loss, "items": n}.',
}

in_words_of_lightning = partial(rewording, CURES)  # a context in which errors speak of hooks and of the Trainer
