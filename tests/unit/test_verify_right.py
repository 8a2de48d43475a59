"""Steps that are right: no false alarm, whatever the model, the precision, the optimizer or the library."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.loops import (
    UNEQUAL,
    Forgetful,
    Loop,
    Statistics,
    batch_of,
    by_items,
    loss_fn,
    sum_fn,
)
from harness.reference import (
    Attention,
    sum_loss,
)
from judged.right import FIFTY, STEPS
from judged.right_parts import (
    EVERY_MODEL,
    FLOATS,
)
from macrobatch import verify

torch.optim.SGD([nn.Parameter(torch.ones(1))])  # its step has hooks only after this


@pytest.mark.parametrize("name", STEPS)
def test_no_false_alarm(name):
    right = STEPS[name]
    report = right.verified()
    assert report.ok, str(report)
    assert report.causes == ()
    assert report.max_relative_error <= report.bound
    assert len(report.windows) == right.windows
    assert right.note is None or any(right.note in note for note in report.notes)


@pytest.mark.parametrize(
    "name", ["by hand", "checkpointing as a whole", "evaluations in between", "losses added first"]
)
def test_micro_batches_are_counted_once(name):
    """A forward that happens again in the backward, or that no backward follows, is none."""
    right = STEPS[name]
    counts = [window.micro_batches for window in right.verified().windows]
    assert counts == ([10] if right.windows == 1 else [4, 4, 2] * (right.windows // 3))


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    st.integers(2, 5), st.integers(2, 5), st.integers(4, 12), st.sampled_from(EVERY_MODEL), st.sampled_from(FLOATS[:2])
)
def test_every_cut_is_judged_rightly(size, steps, count, make, dtype):
    """Weighed by items it is right; by ones, wrong wherever a window has several micro-batches."""
    torch.manual_seed(count)
    model, batch = make().to(dtype).eval(), batch_of(size * count, items=UNEQUAL, seed=count)
    assert verify(model, loss_fn, batch, step=Loop(size=size, steps=steps, weight=by_items)).ok
    report = verify(model, loss_fn, batch, step=Loop(size=size, steps=steps))
    assert [cause.name for cause in report.causes] == ["mean of means"], str(report)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("micro", [None, 1, 7, 50])
def test_the_default_step(reduction, micro):
    fn = loss_fn if reduction == "mean" else sum_fn
    torch.manual_seed(0)
    report = verify(Attention().double(), fn, FIFTY, micro=micro, reduction=reduction)
    assert report.ok, str(report)
    assert report.windows[0].micro_batches == {None: 3, 1: 50, 7: 8, 50: 1}[micro]


@pytest.mark.parametrize(
    "step", [None, lambda model, batch: sum_loss(model, batch).backward()], ids=["default", "by hand"]
)
def test_a_sum_without_items(step):
    """By hand it is the sum itself; a MacroStep makes it a mean over samples."""
    torch.manual_seed(0)
    assert verify(Attention().double(), sum_loss, FIFTY, step=step, reduction="sum").ok


def test_the_same_draws_are_no_error():
    """Random numbers are repeated, in whatever order they come in another cut."""
    torch.manual_seed(0)
    once = nn.Module()
    once.forward = lambda x: F.dropout(x, 0.5)
    assert verify(Statistics(once).double(), loss_fn, FIFTY).ok
    assert verify(Statistics(Forgetful()).double(), loss_fn, FIFTY).ok
