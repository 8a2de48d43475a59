"""`Recorder` records a run in its folder, and shows its progress.

It writes ``metrics.jsonl`` with one line per optimizer step, and ``validation.jsonl`` with one line per validation.
Trackers, by default TensorBoard, get all numbers too. A terminal shows the derived settings, then a progress bar; a log
file gets a line now and then.

A line is written completely or not at all. A run that is resumed from a checkpoint drops the lines of later steps, and
takes these steps again.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from macrobatch.errors import printable
from macrobatch.train.files import Lines
from macrobatch.train.trackers import State, TrackedRun, Tracker, open_trackers

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"

LINES = 20  # per run in a log file, or one line in
SECONDS = 30.0  # if that is sooner
RECENT = 50  # steps from which the remaining time is estimated


class Silent:
    """A recorder that records nothing, for all ranks except the first one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Screen(Console):
    """A console that raises an error for a closed pipe, so that the recorder handles it."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled. rich would end the process."""
        raise


class Recorder:
    """Records a run in its folder, and shows its progress.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Recorder(folder, total_steps=2, resume_step=None, console=Console(quiet=True)) as recorder:
    ...     recorder.step({"step": 1, "loss": 8.25, "seconds": 0.5, "tokens_per_second": 1000.0})
    >>> from macrobatch.train.files import rows
    >>> rows(folder / METRICS)
    [{'step': 1, 'loss': 8.25, 'seconds': 0.5, 'tokens_per_second': 1000.0}]

    `resume_step` is the step of the checkpoint that the run resumes from, 0 if it had none; None for a new run.
    `unread` is called once, if the output is closed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        resume_step: int | None,
        tracker: Tracker | None = None,
        console: Console | None = None,
        unread: Callable[[], None] = lambda: None,
    ) -> None:
        self.console = Screen() if console is None else console
        self._unread = unread
        self._total = total_steps
        self._metrics = Lines(folder / METRICS, resume_step)
        self._validation = Lines(folder / VALIDATION, resume_step)
        self._tracker = tracker or open_trackers((), TrackedRun(folder=folder, resume_step=resume_step))
        self._state: State = "finished"
        self._pace = Pace(total_steps)
        self._bar: Progress | None = None
        self._logged = (0.0, -math.inf)  # time of the last line, and number of lines due by then
        self._last_validation = ""
        self._row: Mapping[str, Any] = {}  # the row of the last step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        failed: State = "failed" if kind is not None and issubclass(kind, Exception) else "interrupted"
        self.close(None if kind is None else failed)

    def show_derived(self, facts: Mapping[str, str]) -> None:
        """Print what was derived from the settings, before the run begins."""
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(f"[bold]{escape(name)}[/bold]", escape(printable(str(value))))
        self._print(table)

    def say(self, text: str) -> None:
        """Print a line, without disturbing the progress bar."""
        self._print(printable(text), markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Print a line on stderr, which somebody may read even if nobody reads stdout."""
        with contextlib.suppress(OSError):
            print(f"macrobatch: {printable(text)}", file=sys.stderr, flush=True)

    def step(self, row: Mapping[str, Any]) -> None:
        """Record an optimizer step: a dict with step, loss, and the numbers that `Learner.step` measures."""
        self._metrics.append(row)
        step = int(row["step"])
        self._tracker.add(step, dict(numbers_in(row)))
        self._show(step, row)

    def validation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record a validation: loss, perplexity, and the numbers of the user's own function."""
        self._validation.append({"step": step, **numbers})
        self._tracker.add(step, dict(numbers_in(numbers, "validation/")))
        if "loss" in numbers:
            more = f" (perplexity {numbers['perplexity']:.4g})" if "perplexity" in numbers else ""
            self._last_validation = f"validation {numbers['loss']:.3f}{more}  "
        said = [f"validation loss {numbers['loss']:.4f}"] if "loss" in numbers else []
        said += [f"{name} {value:.6g}" for name, value in numbers.items() if name != "loss"]
        self.say(f"step {step}  {'  '.join(said)}")

    def finish(self, lines: Sequence[str], state: State = "finished") -> None:
        """Print these lines and the last numbers, at the regular end or the interruption of a run."""
        self._state = state
        self._stop_bar()
        for line in lines:
            self.say(line)
        if self._row:
            self.say(self._line())

    def flush(self) -> None:
        """Flush all lines to the disk. Call it before a checkpoint is written, because resuming needs them."""
        self._metrics.sync()
        self._validation.sync()

    def close(self, state: State | None = None) -> None:
        """Close the files at the end of the run. `state` None: the state that `finish` got."""
        if self._bar is not None:
            self._stop_bar()
            self.say(self._line())
        self._metrics.close()
        self._validation.close()
        self._tracker.close(state or self._state)

    # ------------------------------------------------------------------------------------------------- output

    def _stop_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._screen():
                bar.stop()

    def _print(self, what: Any, **options: Any) -> None:
        with self._screen():
            self.console.print(what, soft_wrap=True, **options)

    @contextmanager
    def _screen(self) -> Iterator[None]:
        """A context for printing. If the output is closed, it turns off all further output."""
        try:
            yield
        except OSError:
            self.console, self._bar = Console(quiet=True), None
            self._unread()

    def _show(self, step: int, row: Mapping[str, Any]) -> None:
        left = clock_time(self._pace.remaining(step))
        self._row = row
        facts = self._facts()
        if self.console.is_terminal:
            with self._screen():
                self._draw(step, f"{facts}  {left} left")
        elif self._is_due(step):
            self.say(f"step {step}/{self._total}  {facts}  {left} left")

    def _line(self) -> str:
        return f"step {self._row['step']}/{self._total}  {self._facts()}"

    def _facts(self) -> str:
        """The numbers of the last step, as text."""
        row = self._row
        epoch = f"epoch {row['epoch']:.2f}  " if "epoch" in row else ""
        speed = f"{row.get('tokens_per_second', math.nan):,.0f} tokens/s"
        return f"{epoch}loss {row['loss']:.4f}  {self._last_validation}{speed}"

    def _draw(self, step: int, text: str) -> None:
        if self._bar is None:
            numbers = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), numbers)
            # Drawn after each step, without a thread: a thread would go on drawing to an output that is closed.
            self._bar = Progress(*columns, console=self.console, expand=True, auto_refresh=False, transient=True)
            self._bar.add_task("", total=self._total, text="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=step, text=text)
        self._bar.refresh()

    def _is_due(self, step: int) -> bool:
        """Whether a log file should get another line. That of the last step comes at the end of the run."""
        now, share = time.monotonic(), step * LINES // max(self._total, 1)
        before, last_share = self._logged
        if step == self._total or (share <= last_share and now - before < SECONDS):
            return False
        self._logged = now, share
        return True


class Pace:
    """Estimates the remaining time from the last steps only, because batches may grow during a run."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._moments: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)

    def remaining(self, step: int, now: float | None = None) -> float:
        """The remaining seconds after a step has ended; NaN if there is only one step to judge from.

        >>> pace = Pace(10)
        >>> pace.remaining(1, now=100.0), pace.remaining(2, now=103.0), pace.remaining(4, now=105.0)
        (nan, 24.0, 10.0)
        """
        self._moments.append((step, time.monotonic() if now is None else now))
        (first, begin), (last, end) = self._moments[0], self._moments[-1]
        return (end - begin) / (last - first) * (self._total - last) if last > first else math.nan


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock_time(75), clock_time(3675.2), clock_time(math.nan)
    ('1:15', '1:01:15', '-:--')
    """
    if not math.isfinite(seconds):
        return "-:--"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# ---------------------------------------------------------------------------------------------- padding, memory


def padded_tokens_in_order(lengths: Sequence[int], micro_batches: int) -> int:
    """The number of tokens, with padding, if samples are cut in their order into equal micro-batches.

    Most training loops cut batches in this way. It is the baseline for a plan by tokens.

    >>> padded_tokens_in_order([5, 1, 1, 5], 2)        # 2 x 5 and 2 x 5, where sorting makes 2 x 1 and 2 x 5
    20
    """
    size = max(-(-len(lengths) // max(micro_batches, 1)), 1)
    parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return sum(len(part) * max(part) for part in parts)


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process so far, in bytes: reserved on a CUDA device, resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def numbers_in(row: Mapping[str, Any], prefix: str = "train/") -> list[tuple[str, float]]:
    """The finite numbers of a row, with their names for trackers.

    >>> numbers_in({"step": 3, "loss": 2.5, "grad_norm": math.nan, "time": {"data": 0.5}})
    [('train/loss', 2.5), ('time/data', 0.5)]
    """
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += numbers_in(value, f"{name}/")
        elif isinstance(value, int | float) and name != "step" and math.isfinite(value):
            found.append((prefix + name, value))
    return found
