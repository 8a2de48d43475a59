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

This page shows how to convert the training steps of well-known programs, and how much each gradient then differs from
that of one big batch. We wrote each step anew (the loss, the optimizer, clipping, what else moves) on a tiny model in
float64, with micro-batches of unequal sizes, from the file and commit in the table, without weights, data or code of
these projects. The error is the largest difference of any gradient (of any weight, if a closure steps), divided by the
largest gradient of the model. "Lines" counts the lines that change. `tests/harness/converted.py` runs all programs and
writes this page; a test keeps each error below 1e-12.

| program | its step | what is changed | lines | error |
|---|---|---|---|---|
"""
TAIL = """
What these programs need besides the loader, `backward` and `step`:

- **Means that the program divides by hand** (MAE, LoRA, AWD-LSTM): pass the divisor as `items=`. No graph shows that it
  is a count.
- **A small constant in the divisor**, such as LoRA's 0.0001: remove it. It changes the gradient by about 0.0001 divided
  by the tokens of a micro-batch.
- **Weights or buffers that a forward moves** (MoCo, DINO): update them after the step, with what all micro-batches of
  the window have added up ([recipe](recipes.md#momentum-encoders-queues-and-codebooks)).
- **Losses that compare samples** (OpenCLIP, SimCLR), or that are no mean over them (the Dice loss, the balance loss of
  experts): `MacroStep(..., joint=)` ([losses of the whole batch](contrastive.md)).
- **Networks that step in turn** (DCGAN, SAC): a `MacroStep` for each ([recipe](recipes.md#gan)).
- **Gradients that are edited before the step** (DINO): an optimizer pre-hook, which sees the mean of the window.

Many of these programs use batch normalisation, which takes the statistics of each micro-batch in any loop that
accumulates. Our versions leave it out.
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
