"""`macrobatch.audit`, as users call it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from macrobatch.auditing.judging import FAILED, judge
from macrobatch.auditing.meeting import Meeting
from macrobatch.auditing.report import AuditReport
from macrobatch.auditing.watcher import Watcher


@contextlib.contextmanager
def audit() -> Iterator[AuditReport]:
    """Watch the training code inside this context, as it is, and tell how often each item counted.

    It sees backwards and optimizer steps, and what happens to gradients in between. It changes nothing: the results of
    the program stay bitwise the same.

    >>> import torch, macrobatch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with macrobatch.audit() as report:
    ...     for size in (2, 6):                                   # a mean of means
    ...         loss = torch.nn.functional.mse_loss(model(torch.ones(size, 3)), torch.ones(size, 1))
    ...         (loss / 2).backward()
    ...     optimizer.step()
    >>> report.verdict, report.causes, [round(weight, 3) for weight in report.windows[0].weights]
    ('wrong', ['mean of means'], [2.0, 0.667])

    Returns:
        A context manager, which gives an `AuditReport`. On several ranks, all of them must enter and leave it: at its
        end the ranks read what the others have seen, from files.
    """
    watcher, meeting = Watcher(), Meeting()
    report = AuditReport(watcher)
    try:
        with watcher.watching():
            yield report
            watcher.finish()
    except BaseException as error:
        watcher.failures.append(f"{FAILED}: {type(error).__name__}: {error}")
        if watcher.world_size > 1:
            meeting.tell(watcher.rank, watcher.windows, watcher.failures)
        raise
    if watcher.world_size > 1:
        meet(watcher, meeting, report)


def meet(watcher: Watcher, meeting: Meeting, report: AuditReport) -> None:
    """Finish the report of this rank with what all ranks have seen."""
    world = watcher.world_size
    meeting.tell(watcher.rank, watcher.windows, watcher.failures)
    told = [one for one in meeting.listen(world) if one is not None]
    failures = [failure for one in told for failure in one.failures]
    report.finish(judge([one.windows for one in told], failures, world=world))
    meeting.leave(watcher.rank, world, all_listen=True)
