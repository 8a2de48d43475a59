"""The learning rate and the batch size as pure functions of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from macrobatch.train.settings import DEFAULT_BATCH, Schedule, Settings


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate of each step, counted from 0: a linear warm-up, then the schedule.

    >>> rate = Rate(peak=1.0, steps=10, warmup=2, schedule="linear", final=0.0)
    >>> [round(rate(step), 3) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """

    peak: float
    steps: int
    warmup: int
    schedule: Schedule
    final: float  # the learning rate at the end, as a fraction of the peak

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.peak
        done = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.peak * (self.final + (1 - self.final) * left)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The fraction of the batch size at each step: it grows linearly over the first steps.

    >>> [Ramp(steps=4, start=0.5)(step) for step in range(6)]
    [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
    """

    steps: int
    start: float

    def __call__(self, step: int) -> float:
        return 1.0 if step >= self.steps else self.start + (1 - self.start) * step / self.steps


def rate_of(settings: Settings, steps: int, lr: float) -> Rate:
    """The learning rate of a run with `steps` steps; `lr` is its peak at the reference batch."""
    settings.check_warmup(steps)
    return Rate(
        peak=lr * scale_of(settings),
        steps=steps,
        warmup=steps // 10 if settings.warmup is None else settings.warmup,
        schedule=settings.schedule,
        final=settings.final_lr,
    )


def scale_of(settings: Settings) -> float:
    """The factor of the learning rate for a batch size that differs from the reference.

    >>> scale_of(Settings(batch_size=256, lr_scale="sqrt", reference_batch=64))
    2.0
    """
    if settings.reference_batch is None:
        return 1.0
    batch = settings.batch_tokens or settings.batch_size or DEFAULT_BATCH
    ratio = batch / settings.reference_batch
    return math.sqrt(ratio) if settings.lr_scale == "sqrt" else ratio
