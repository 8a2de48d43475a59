"""The catalogue of checks: `docs/checks.md` is made from it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from macrobatch._checks.changes import ChangedBuffers, ChangedParameters
from macrobatch._checks.gradients import ChangedGradients, HooksOnSums, HooksThatChange, NoParameter
from macrobatch._checks.joint import BatchNormStatistics, PassesDiffer, RanksDiffer
from macrobatch._checks.ranks import Unsynchronised, WrappedLater
from macrobatch._checks.steps import OtherOptimizer, ScaledLoss, SchedulerTwice, StepInside, UnscaledInside
from macrobatch._checks.weights import EqualWeights, SampleWeights
from macrobatch._engine.events import Check
from macrobatch.errors import UsageError

SWITCH = "MACROBATCH_CHECKS"
OF_ENGINES: tuple[type[Check], ...] = (
    ChangedGradients,
    UnscaledInside,
    ScaledLoss,
    Unsynchronised,
    HooksThatChange,
    HooksOnSums,
    NoParameter,
    WrappedLater,
    StepInside,
    OtherOptimizer,
    SchedulerTwice,
    ChangedParameters,
    ChangedBuffers,
)
OF_JOINT_LOSSES: tuple[type[Check], ...] = (PassesDiffer, RanksDiffer, BatchNormStatistics)
CATALOGUE: tuple[type[Check], ...] = (*OF_ENGINES, *OF_JOINT_LOSSES, EqualWeights, SampleWeights)


def are_on() -> bool:
    """Whether checks run: yes, unless the environment variable MACROBATCH_CHECKS is "off", for measuring."""
    value = os.environ.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise UsageError(f"{SWITCH} must be on or off: got {value!r}.")
    return value == "on"


@contextlib.contextmanager
def turned_on() -> Iterator[None]:
    """Turn checks on for what is made inside the block, as `verify` does."""
    before = os.environ.get(SWITCH)
    if before is not None:
        os.environ[SWITCH] = "on"
    try:
        yield
    finally:
        if before is not None:
            os.environ[SWITCH] = before
