"""The pytest fixture `macrobatch_audit`. pytest imports this module at every start, so it imports nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from macrobatch.auditing.report import AuditReport


@pytest.fixture
def macrobatch_audit() -> Iterator[AuditReport]:
    """The report of an audit of this test: ``assert macrobatch_audit.verdict == "exact"`` after some steps."""
    from macrobatch.auditing.main import audit

    with audit() as report:
        yield report
