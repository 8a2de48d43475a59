"""The catalogue of checks: the page that is made of it, and its wrong programs.

cd tests && ../.venv/bin/python -m harness.checks       # writes docs/checks.md
"""

import textwrap
import warnings

from harness import ROOT
from macrobatch._checks.catalogue import CATALOGUE
from macrobatch._engine.events import Check

PAGE = ROOT / "docs" / "checks.md"
START = """\
import torch
from torch import nn

from macrobatch import Accumulator, Encoded, MacroStep

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
acc = Accumulator(model, optimizer, steps=2)
loader = [torch.ones(4, 2), torch.ones(4, 2)]


def loss_fn(batch):
    return model(batch).square().mean()
"""
HEAD = """\
# Checks

Macrobatch notices mistakes that would silently give a wrong gradient. A check never changes a gradient. This page is
made from the classes in `src/macrobatch/_checks`: the smallest wrong program, a part of the message, and the cost.

To turn the checks off, for example to measure their cost, set `MACROBATCH_CHECKS=off` before you make an `Accumulator`
or a `MacroStep`. Results and communication stay the same, and so do `nonfinite=` and the comparison of items
with `counts=` and with what a loss says.
`verify` always checks. Wrong arguments, and calls in the wrong order, are always errors.

Programs begin with these lines. Those for two ranks call
`torch.distributed.init_process_group()` instead of making `acc`, and run under `torchrun`.

"""


def source_of(check: type[Check]) -> str:
    """The wrong program, after `START`."""
    return textwrap.dedent(check.program).strip() + "\n"


def page() -> str:
    """The page of the catalogue."""
    parts = [HEAD + block(START)]
    for check in CATALOGUE:
        ranks = "" if check.num_ranks == 1 else f" It takes {check.num_ranks} ranks."
        parts.append(
            f"## {check.name[0].upper()}{check.name[1:]}\n\n{check.sentence}{ranks}\n\n"
            f"{block(source_of(check))}\nMessage: *{check.shows}*. Cost: {check.cost}.\n"
        )
    return "\n".join(parts)


def block(source: str) -> str:
    """A block of code that no test runs as it stands."""
    return f"```py\n{source}```\n"


def outcome_of(check: type[Check]) -> str:
    """What the wrong program of a check for one process says: its error, or else its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(START + "\n" + source_of(check), f"<{check.name}>", "exec"), {"__name__": "__main__"})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(str(one.message) for one in caught)


if __name__ == "__main__":
    PAGE.write_text(page())
