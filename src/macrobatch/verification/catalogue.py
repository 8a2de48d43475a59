"""The causes that `verify` knows: the table in `docs/verify.md` is made from this one.

A finder calls ``cause(name, evidence)``. The name must be in the table, which has the cure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from macrobatch.verification.report import Cause, Certainty


class Kind(NamedTuple):
    """What happened, and what to change, for everyone with this mistake."""

    happened: str
    cure: str


def cause(name: str, evidence: str, cure: str = "", certainty: Certainty = "inferred") -> Cause:
    """A cause of the table with its evidence. `cure`: one for this case, instead of that of the table."""
    return Cause(name=name, evidence=evidence, cure=cure or CAUSES[name].cure, certainty=certainty)


ONCE = "DDP and FSDP divide by the number of ranks. Multiply by it where you divide by the items of all ranks, once."
OWN_ITEMS = "Give each term its own items: `{name: (loss, items)}`, with `counts=` of `MacroStep` or `Accumulator`."
CLIP_ONCE = "Clip once per window, after its last backward, as `Accumulator(..., max_norm=1.0)` does."
MASK = "Give padding the label -100, `labels = input_ids.masked_fill(attention_mask == 0, -100)`, and count the labels "
MASK += "that are left: `(labels != -100).sum()`, after any shift."
RETURN_ITEMS = (
    "Let loss_fn return what it divides by: `return loss, (labels != -100).sum()`, after any shift. A sum needs "
    '`reduction="sum"`. A loss that is neither, such as a maximum, needs `joint=`.'
)
SHIFT = "Shift once: `cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())`. A model that gets labels "
SHIFT += "may shift them itself."
EVERY_WINDOW = "`if (index + 1) % steps == 0 or index + 1 == len(loader): optimizer.step()`"
NO_STATISTICS = (
    "No cut can agree in training mode. Freeze the statistics (`module.eval()`), or use GroupNorm or LayerNorm, which "
    "use one sample only."
)
JOINT = "Use `MacroStep(..., joint=)` and `verify(..., joint=)`: loss_fn returns the encodings of each sample, and "
JOINT += "`joint` makes the loss of all of them. `exact()` of a trainer does that."

CAUSES = {
    "mean of means": Kind(
        "all micro-batches, or all ranks, have the same weight, but different numbers of items",
        "Divide once by all items of the window: `Accumulator.backward(loss)`, or `backward(loss, items=n)` where the "
        "loss does not say what it is a mean over.",
    ),
    "short window": Kind(
        "the loss is divided by the configured number of micro-batches, but this window has fewer",
        "Divide by the real number, as `Accumulator.batches(loader)` does: the last window of an epoch may be short.",
    ),
    "not divided": Kind(
        "the gradient is too large by the number of micro-batches, or of items",
        "Divide once: `(loss / number_of_micro_batches).backward()`, or better by the items of the window.",
    ),
    "divided twice": Kind(
        "the gradient is too small by that number, or by its square",
        "Divide once: the `backward()` of a library, or a mean loss, already divides.",
    ),
    "world size": Kind("the gradient is wrong by the number of ranks, which DDP and FSDP divide by", ONCE),
    "loss scale": Kind(
        "the gradient still contains the scale of a `GradScaler`",
        "Call `scaler.unscale_(optimizer)` before reading gradients, and `scaler.step(optimizer)` to step.",
    ),
    "constant factor": Kind(
        "any other factor, the same for all parameters",
        "Check the divisions of the loss, in each micro-batch and at the end of the window.",
    ),
    "number of optimizer steps": Kind(
        "the step took another number of optimizer steps than `windows=`",
        "Step at the end of every window, or pass a batch for as many optimizer steps as you expect.",
    ),
    "clip per micro-batch": Kind(
        "gradients are clipped after each backward, so that early micro-batches have less weight", CLIP_ONCE
    ),
    "clipped while scaled": Kind(
        "gradients are clipped before they are divided by the scale of a `GradScaler`, so that the limit is much "
        "smaller than it seems",
        "Divide first: call `scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
    ),
    "divided inside the window": Kind(
        "`.grad` is divided after each backward, so that early micro-batches are divided several times",
        "Divide once: either the loss of each micro-batch, or `.grad` after the last backward of the window.",
    ),
    "labels not shifted": Kind("the step or `loss_fn` trains each position to predict its own token", SHIFT),
    "labels shifted twice": Kind(
        "the step trains each position to predict the token after the next: both the loop and the model shift labels",
        SHIFT,
    ),
    "trained on padding": Kind(
        "the step trains on padding or on labels of -100, or counts them as items; or `loss_fn` trains on positions "
        "where `attention_mask` is 0",
        MASK,
    ),
    "labels counted before the shift": Kind(
        "items count the first label of each sequence, which nothing predicts",
        "Count labels after the shift: `(labels[..., 1:] != -100).sum()`.",
    ),
    "items that do not fit the loss": Kind(
        "the loss is not a mean over the items that `loss_fn` returns, or the samples that the loop counts",
        RETURN_ITEMS,
    ),
    "terms with different items": Kind(
        "the loss is one number, but its terms are means over different things, such as boxes and cells: a micro-batch "
        "has no weight that fits all of them",
        f"{OWN_ITEMS} Then every cut is exact.",
    ),
    "term not divided": Kind(
        "one of several terms is added to the loss of each micro-batch after the others were divided: it counts as "
        "often as there are micro-batches",
        f"Divide it as the rest of the loss: by the number of micro-batches, if they are equal. {OWN_ITEMS}",
    ),
    "term divided by the micro-batch's own count": Kind(
        "one of several terms is a mean of means, and the others are right", OWN_ITEMS
    ),
    "one count for two terms": Kind("a term is divided, or weighted, by the items of another", OWN_ITEMS),
    "term and world size": Kind("one term is divided, or multiplied, by the number of ranks once too often", ONCE),
    "gradients left over": Kind(
        "`.grad` was not empty when the window began",
        "Call `optimizer.zero_grad()` after every `optimizer.step()`, or before the first backward of a window.",
    ),
    "gradients cleared inside the window": Kind(
        "only the last micro-batch counts",
        "Call `zero_grad()` once a window, after `optimizer.step()`, not before every backward.",
    ),
    "window never closed": Kind(
        "there are micro-batches after the last optimizer step", f"Step at the end of the epoch too: {EVERY_WINDOW}"
    ),
    "window closed twice": Kind(
        "an optimizer steps without a backward since its last step",
        "Call `optimizer.step()` once per window, and `zero_grad()` right after it.",
    ),
    "samples left out": Kind(
        "the loop skips samples; with several optimizer steps a note, and a cause only if you pass `windows=`",
        "Look for `drop_last=True`, a loop that ends too early, or a last micro-batch that is skipped.",
    ),
    "samples used twice": Kind(
        "the loop repeats samples; with several optimizer steps a note, and a cause only if you pass `windows=`",
        "Look for a sampler or a loader that fills up the last micro-batch, or windows that overlap.",
    ),
    "statistics over the batch": Kind(
        "the output of a layer for a sample depends on the other samples, as with BatchNorm in training mode",
        NO_STATISTICS,
    ),
    "loss that couples samples": Kind(
        "the loss compares samples, as contrastive losses do, or a part of it is not a mean over samples, such as a "
        "loss that balances experts: computed for each micro-batch, it has another gradient",
        JOINT,
    ),
    "parameters counted several times": Kind(
        "a parameter that a loss of the whole batch uses directly, such as a logit scale, got a gradient in every "
        "micro-batch or on every rank",
        "What the loss of the whole batch uses itself gets its gradient once, not in the backward of every "
        "micro-batch. `MacroStep(..., joint=)` does that.",
    ),
    "sums in too low a precision": Kind(
        "the rounding error is larger than that of one big batch",
        "Sum in float32: `Accumulator(..., accumulate_dtype=torch.float32)`, or keep gradients in float32.",
    ),
    "parameters that received nothing": Kind(
        "parameters have no gradient, but one big batch gives one; or the optimizer holds other or old parameters",
        "Look for `detach()`, `no_grad()`, `zero_grad()` before `step()`, or a frozen, copied or replaced module; "
        "train the model that is passed to step.",
    ),
    "not finite": Kind(
        "gradients are infinite or NaN, in the step only or in one big batch too",
        "Look for a micro-batch without items, whose mean is 0 / 0. Back-propagate sums, and divide once.",
    ),
    "gradients not synchronised": Kind(
        "ranks step with different gradients",
        "Run the forward and backward of the window's last micro-batch outside of `no_sync()`, through the wrapped "
        "model.",
    ),
    "ranks out of step": Kind(
        "ranks took different numbers of optimizer steps",
        "Give all ranks equally many micro-batches, or use `Accumulator.batches(loader)`.",
    ),
    "unexplained": Kind(
        "no known mistake gives this gradient. Unknown, if the gradient is right after the last backward and then "
        "changed in a way that `verify` does not know",
        "Check that step and loss_fn compute the same loss on the same samples: compare them on one micro-batch.",
    ),
    # ------------------------------------------------------------------------------------------ it cannot be told
    "random numbers that differ": Kind(
        "the loss draws random numbers that one big batch cannot repeat: from numpy or `random`, one number for a "
        "whole micro-batch, or in another order than `loss_fn`",
        "Draw them with torch inside of `loss_fn`, a row for each sample; or put them into the batch, and verify that.",
    ),
    "loss that keeps state": Kind(
        "the loss depends on state that its own forward changes, such as a queue of keys or a running centre: each "
        "micro-batch sees another one",
        "Update the state once per window, after the optimizer step; or verify with the update switched off.",
    ),
    "step that does not use the batch": Kind(
        "the inputs of the model are none of the batch's samples: the step has a loader or numbers of its own",
        "Let the step train on the batch that it is given: `for micro_batch in batch.split(4): ...`",
    ),
    "samples that look alike": Kind(
        "samples have the same inputs and other labels, so that it is unknown which of them went into which optimizer "
        "step",
        "Verify one window (`windows=1`), or with a batch whose samples have different inputs.",
    ),
    "weights changed by hand": Kind(
        "no torch optimizer steps, and what the step subtracts from the weights is no multiple of `.grad`, or "
        "contains a division",
        "Keep `.grad` until the step returns: leave the last `zero_grad()` out while you verify.",
    ),
    "optimizer of other tensors": Kind(
        "the optimizer holds tensors that are neither parameters of the model nor copies of them",
        "Verify the model whose parameters the optimizer trains; or let the step return before `optimizer.step()`.",
    ),
}
UNKNOWN = tuple(CAUSES)[tuple(CAUSES).index("random numbers that differ") :]  # reasons why it cannot be told


def doubtful_update(why: str) -> Cause:
    """The reason why an update by hand cannot be judged."""
    evidence = f"no torch optimizer steps, so the gradients were compared: {why}."
    return cause("weights changed by hand", evidence, certainty="unknown")


def name_list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def number_list(numbers: Sequence[float], form: str = "g") -> str:
    return " ".join(f"{number:{form}}" for number in numbers[:8]) + (" ..." if len(numbers) > 8 else "")
