"""Published training programs, each reduced to its step, converted as the docs say, and compared with one big batch.

cd tests && ../.venv/bin/python -m harness.converted      # writes results/converted.json and docs/converted.md
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

import macrobatch
from harness import ROOT, converted_images, converted_models, converted_others, converted_text
from harness.converting import PROGRAMS, SIZES, STEPS

PARTS = converted_text, converted_images, converted_models, converted_others  # each adds its programs
RESULTS, PAGE = ROOT / "results" / "converted.json", ROOT / "docs" / "converted.md"
HEAD = """\
# Published programs, converted

How the training steps of well-known public programs are converted, and how far each gradient is then from that of one
big batch. Each program is reduced to what its step computes (the loss, the optimizer, clipping, what else moves), read
in the file and the commit that the table names, and written anew on a tiny model in float64, with micro-batches of
unequal sizes; no weights, data or code of these projects are used. The error is the largest difference of any gradient
(of any weight, where a closure steps), divided by the largest gradient of the model. "Lines" counts the lines that
change. The page is made by `tests/harness/converted.py`, which runs all of them; the test
`tests/unit/test_converted.py` keeps each below 1e-12.

| program | its step | what is changed | lines | error |
|---|---|---|---|---|
"""
TAIL = """
What these programs need besides the loader, `backward` and `step`:

- **Means over something else than samples**, divided by hand (MAE, LoRA, AWD-LSTM): `items=` of what they are divided
  by. No graph shows that such a divisor is a count.
- **A number for safety in the divisor**, such as LoRA's 0.0001, goes. With it, the gradient is off by about 0.0001
  divided by the number of tokens of a micro-batch.
- **Weights or buffers that a forward moves** (MoCo, DINO): the update goes behind the step, and uses what all
  micro-batches of the window have added up ([recipe](recipes.md#momentum-encoders-queues-and-codebooks)).
- **Losses that compare samples** (OpenCLIP, SimCLR), or that are no mean over them (the Dice loss, the balance loss of
  experts): `MacroStep(..., joint=)` ([losses of the whole batch](contrastive.md)).
- **Networks that step in turn** (DCGAN, SAC), each against the last after its step: a `MacroStep` for each
  ([recipe](recipes.md#gan)).
- **Gradients that are edited before the step** (DINO): an optimizer pre-hook, which sees the mean of the window.

Batch normalisation, which many of them use, takes the statistics of each micro-batch, in any loop that accumulates. The
reductions do without it.
"""


def measured() -> list[dict[str, Any]]:
    """All rows, with their errors."""
    return [asdict(one) | {"error": float(f"{one.error():.1g}")} for one in PROGRAMS]


def page(rows: Sequence[dict[str, Any]]) -> str:
    return HEAD + "\n".join(map(_row, rows)) + "\n" + TAIL


def _row(row: dict[str, Any]) -> str:
    source = f"{row['repository']} {row['commit']}, `{row['file']}`"
    return f"| **{row['name']}**<br>{source} | {row['step']} | {row['changed']} | {row['lines']} | {row['error']:.0e} |"


def write() -> None:
    """Run all programs, and write the figures and the page."""
    rows = measured()
    record = {
        "what": "published programs, reduced to their steps and converted, beside one big batch",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"macrobatch": macrobatch.__version__, "torch": torch.__version__},
        "samples": SIZES,
        "steps": STEPS,
        "programs": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    write()
