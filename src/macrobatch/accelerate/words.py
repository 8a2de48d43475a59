"""What to do about errors of the engine in a program of Accelerate, which does not call it itself."""

from __future__ import annotations

from functools import partial

from macrobatch.errors import rewording

UNTIL = "In a window with items they are undivided sums until the last backward"
CURES = {
    "changed gradients": f"{UNTIL}: edit or clip them under `if accelerator.sync_gradients:`.",
    "another backward": (
        f"{UNTIL}, so nothing else may add to them: call accelerator.backward(loss, items=...) instead of "
        "loss.backward(), add several losses up and pass the sum, and freeze this model where another one is trained "
        "through it. Under fully_shard, a gradient penalty (autograd.grad inside of the loss) adds to gradients as "
        "well, and is not supported."
    ),
    "another model": (
        "Clear those with zero_grad(), and let all micro-batches of a window reach the other model, or none: detach() "
        "it, or freeze it."
    ),
    "no scalar": "Reduce it with mean().",
    "loss of another model": "Pass accumulate() the models that the loss trains.",
    "items out of proportion": (
        "Count what the loss averages, after any shift of labels and without ignored ones; or leave items= out, and it "
        "is read from the loss. items=1 in every micro-batch gives all the same weight."
    ),
    "another expression": ("Pass items= with each loss. (A mean times its number of items is a sum, not a mean.)"),
    "several means": "Give them one backward(loss, items=...), or leave items out.",
}

in_words_of_accelerate = partial(rewording, CURES)  # a context in which errors speak of the accelerator
