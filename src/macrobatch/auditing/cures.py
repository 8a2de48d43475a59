"""What to do about each cause: with this library, and by hand."""

from __future__ import annotations

from collections.abc import Collection

_LIBRARY = """\
acc = macrobatch.Accumulator(model, optimizer, steps=STEPS)
for batch in acc.batches(loader):
    acc.backward(loss_of(model, batch))   # a mean: what it is a mean over is read from it
    acc.step()"""

LIBRARIES = {  # by a module that the program has imported; those that use others come first
    "transformers.trainer": (
        "from macrobatch.transformers import exact\ntrainer = exact(Trainer)(...)   # in place of: Trainer(...)"
    ),
    "lightning.pytorch": (
        "from macrobatch.lightning import ExactStrategy\n"
        "trainer = Trainer(strategy=ExactStrategy(steps=STEPS))   # in place of: accumulate_grad_batches=STEPS"
    ),
    "accelerate": "from macrobatch.accelerate import Accelerator   # in place of: from accelerate import Accelerator",
}

CURES = {
    "mean of means": (
        "Back-propagate sums, and divide once by all items of the window: (loss * items / items_of_window).backward()."
    ),
    "short window": "Divide by the micro-batches that the window really has, or by its items.",
    "not divided": "Divide each loss by the number of micro-batches of the window: (loss / steps).backward().",
    "divided twice": "Remove one of the two divisions by the number of micro-batches: a library may divide already.",
    "clip per micro-batch": "Clip once, after the last backward and before optimizer.step().",
    "clipped while scaled": "Call scaler.unscale_(optimizer) before clipping.",
    "gradients cleared inside the window": "Call optimizer.zero_grad() once, right after optimizer.step().",
    "samples left out": "Step with what is left at the end of an epoch, or do not run these backwards.",
    "samples used twice": "Run one backward for each loss.",
    "gradients left over": "Call optimizer.zero_grad() after each optimizer.step().",
    "window closed twice": "Call optimizer.step() once for each window.",
    "world size": (
        "DDP and FSDP divide by the number of ranks. If you divide by the items of all ranks, undo that once "
        "(loss * world_size); for means of equal size, leave it."
    ),
    "scheduler per micro-batch": "Call scheduler.step() once, after optimizer.step().",
    "gradients not synchronised": "Run the last backward of a window outside of no_sync(), its forward included.",
    "items that do not fit the loss": (
        "Divide by the number of items that the loss really has: after any shift of labels, without ignored ones."
    ),
    "divided inside the window": "Divide gradients only after the last backward.",
    "constant factor": "Look for a factor on the loss or the gradients that does not belong there.",
}


def library_cure(modules: Collection[str], causes: Collection[str], steps: int) -> str:
    """The lines of this library that replace the loop of a program, which has imported these modules.

    `steps`: the micro-batches of its windows. Empty if the library cures none of its causes.
    """
    if set(causes) <= {"constant factor"}:
        return ""
    code = next((code for name, code in LIBRARIES.items() if name in modules), _LIBRARY)
    return code.replace("STEPS", str(steps))
