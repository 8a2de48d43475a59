"""Training steps as people publish them: no wrong one is called exact, and no right one wrong."""

import pytest
import torch

from harness.published import Program
from judged.published import RIGHT, WRONG
from macrobatch import verify
from macrobatch.verify import Report


def report_of(program: Program) -> Report:
    torch.manual_seed(0)
    return verify(**program.make())


@pytest.mark.parametrize("name", RIGHT)
def test_right_steps(name):
    program = RIGHT[name]
    report = report_of(program)
    assert report.verdict == program.verdict, str(report)
    assert [cause.name for cause in report.causes][:1] == ([] if program.cause is None else [program.cause]), str(
        report
    )
    assert program.windows in (None, len(report.windows))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps(name):
    program = WRONG[name]
    report = report_of(program)
    assert report.verdict == program.verdict, str(report)
    assert report.causes[0].name == program.cause, str(report)
