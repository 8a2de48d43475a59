"""What a run leaves behind: lines, events, a bar. Real files, a real kill -9, a real terminal."""

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console

from macrobatch.errors import UsageError
from macrobatch.train import record
from macrobatch.train.files import rows
from macrobatch.train.record import Recorder, Silent, peak_memory


def row(step, loss=5.0, **more):
    facts = {"items": 100, "grad_norm": 1.5, "lr": 1e-3, "seconds": 0.25, "tokens_per_second": 400.0}
    return {"step": step, "loss": loss, **facts, "micro_batches": 3, **more}


def recorded(folder, steps, *, total=10, resume=None):
    """What is printed into a log file."""
    log = io.StringIO()
    with Recorder(folder, total_steps=total, resume_step=resume, console=Console(file=log, width=120)) as recorder:
        for step in steps:
            recorder.step(row(step))
    return log.getvalue()


def steps_in(folder):
    return [found["step"] for found in rows(folder / "metrics.jsonl")]


# ---------------------------------------------------------------------------------------------------------- lines


def test_a_line_for_each_step(tmp_path):
    recorded(tmp_path, [1, 2, 3])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row(1), row(2), row(3)]


def test_lines_are_there_while_the_run_goes_on(tmp_path):
    recorder = Recorder(tmp_path, total_steps=10, resume_step=None, console=Console(quiet=True))
    recorder.step(row(1))
    assert steps_in(tmp_path) == [1]
    recorder.close()


def test_a_number_that_is_none_is_null(tmp_path):
    with Recorder(tmp_path, total_steps=1, resume_step=None, console=Console(quiet=True)) as recorder:
        recorder.step(row(1, grad_norm=math.nan, time={"data": math.inf}))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["grad_norm"] is None
    assert found["time"] == {"data": None}


def test_validation_has_its_own_file(tmp_path):
    with Recorder(tmp_path, total_steps=2, resume_step=None, console=Console(quiet=True)) as recorder:
        recorder.step(row(1))
        recorder.validation(1, {"loss": 4.5})
        recorder.step(row(2))
    assert steps_in(tmp_path) == [1, 2]
    assert rows(tmp_path / "validation.jsonl") == [{"step": 1, "loss": 4.5}]


def test_the_steps_of_another_run_are_not_overwritten(tmp_path):
    recorded(tmp_path, [1, 2])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="another run"):
        Recorder(tmp_path, total_steps=10, resume_step=None)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(("checkpoint", "kept"), [(0, []), (3, [1, 2, 3]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_a_resumed_run_takes_later_steps_anew(tmp_path, checkpoint, kept):
    recorded(tmp_path, [1, 2, 3, 4, 5])
    recorded(tmp_path, [checkpoint + 1], resume=checkpoint)
    assert steps_in(tmp_path) == [*kept, checkpoint + 1]


def test_a_resumed_run_drops_later_validations(tmp_path):
    with Recorder(tmp_path, total_steps=9, resume_step=None, console=Console(quiet=True)) as recorder:
        recorder.validation(2, {"loss": 4.0})
        recorder.validation(4, {"loss": 3.0})
    recorded(tmp_path, [], resume=3)
    assert rows(tmp_path / "validation.jsonl") == [{"step": 2, "loss": 4.0}]


def test_a_torn_last_line_is_passed_over(tmp_path, caplog):
    recorded(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 4.')
    assert steps_in(tmp_path) == [1, 2]
    assert "line 3" in caplog.text
    recorded(tmp_path, [3], resume=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


WRITER = """
import sys
from pathlib import Path
from rich.console import Console
from macrobatch.train.record import Recorder
recorder = Recorder(Path(sys.argv[1]), total_steps=10**6, resume_step=None, console=Console(quiet=True))
for step in range(1, 10**6):
    recorder.step({"step": step, "loss": 1.0, "padding": "x" * (step % 5000)})
    print(step, flush=True)
"""


def test_a_killed_run_has_a_line_for_every_step_it_told_of(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True) as writer:
        for told in writer.stdout:
            if int(told) >= 200:
                break
        writer.send_signal(signal.SIGKILL)
        told = int([told, *writer.stdout.read().split()][-1])
    found = steps_in(tmp_path)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= told


FULL = """
import resource, signal, sys
from pathlib import Path
from macrobatch.train.files import Lines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
lines = Lines(Path(sys.argv[1]), None)
try:
    for step in range(1, 100):
        lines.append({"step": step, "padding": "x" * 100})
except OSError as error:
    print(error.errno)
lines.append({"step": 1000})
"""


def test_a_full_disk_leaves_no_torn_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "lines"], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout.strip(), "the disk was not full"
    lines = (tmp_path / "lines").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, len(lines)), 1000]


# ---------------------------------------------------------------------------------------------------------- events


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_can_read_the_run(tmp_path):
    with Recorder(tmp_path, total_steps=2, resume_step=None, console=Console(quiet=True)) as recorder:
        recorder.step(row(1, loss=6.0, time={"forward": 0.5}))
        recorder.step(row(2, loss=5.0, grad_norm=math.nan))
        recorder.validation(2, {"loss": 4.0})
    found = scalars(tmp_path)
    assert found["train/loss"] == [(1, 6.0), (2, 5.0)]
    assert found["train/grad_norm"] == [(1, 1.5)]
    assert found["time/forward"] == [(1, 0.5)]
    assert found["validation/loss"] == [(2, 4.0)]


def test_events_of_steps_that_are_taken_anew_are_purged(tmp_path):
    recorded(tmp_path, [1, 2, 3])
    time.sleep(1.1)  # event files are read in the order of their names, which are seconds
    with Recorder(tmp_path, total_steps=3, resume_step=1, console=Console(quiet=True)) as recorder:
        recorder.step(row(2, loss=7.0))
    assert scalars(tmp_path)["train/loss"] == [(1, 5.0), (2, 7.0)]


FULL_EVENTS = """
import resource, signal, sys, time
from pathlib import Path
from macrobatch.train.record import Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Recorder(Path(sys.argv[1]), total_steps=2000, resume_step=None) as recorder:
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # events are larger than lines
    for step in range(1, 161):
        recorder.step({"step": step, **dict.fromkeys("abcdefgh", 1.0), "loss": 1.0})
        time.sleep(0.01)
"""


def test_tensorboard_on_a_full_disk_is_one_message(tmp_path):
    """The run goes on without it."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    done = subprocess.run([sys.executable, "-c", FULL_EVENTS, tmp_path], text=True, timeout=100, **pipes)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "TensorBoard" in done.stderr
    assert steps_in(tmp_path) == list(range(1, 161))


def test_without_tensorboard_there_are_lines(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    recorded(tmp_path, [1])
    assert steps_in(tmp_path) == [1]
    assert "tensorboard is not installed" in caplog.text
    assert not (tmp_path / "tensorboard").exists()


# ---------------------------------------------------------------------------------------------------------- screen


def test_a_log_file_gets_a_line_now_and_then(tmp_path):
    printed = recorded(tmp_path, range(1, 1001), total=1000).splitlines()
    assert record.LINES - 1 <= len(printed) <= record.LINES + 1
    assert printed[0].startswith("step 1/1000  loss 5.0000  400 tokens/s")
    assert printed[-1].startswith("step 950/1000")  # the line of the last step comes when the run has ended
    assert "left" in printed[1]


def test_what_was_derived_is_printed_as_it_is(tmp_path):
    log = io.StringIO()
    with Recorder(tmp_path, total_steps=1, resume_step=None, console=Console(file=log, width=100)) as recorder:
        recorder.show_derived({"parameters": "2,345,678", "data": "[/tmp/a folder]"})
        recorder.say("[bold] stays")
    assert "parameters  2,345,678" in log.getvalue()
    assert "[/tmp/a folder]" in log.getvalue()
    assert "[bold] stays" in log.getvalue()


def test_nothing_that_is_printed_commands_the_terminal(tmp_path):
    log = io.StringIO()
    with Recorder(tmp_path, total_steps=1, resume_step=None, console=Console(file=log, width=100)) as recorder:
        recorder.show_derived({"model": "a\x1b]0;title\x07b"})
        recorder.say("c\x1b[2Jd\te\nf")
    assert "\x1b" not in log.getvalue()
    assert "c\\x1b[2Jd" in log.getvalue()


ON_A_TERMINAL = """
import sys
from pathlib import Path
from macrobatch.train.record import Recorder
with Recorder(Path(sys.argv[1]), total_steps=3, resume_step=None) as recorder:
    for step in (1, 2, 3):
        recorder.step({"step": step, "loss": 5.0 - step, "tokens_per_second": 1234.0})
        recorder.say(f"said {step}")
"""


def test_a_terminal_gets_a_bar(tmp_path):
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "110", "LINES": "30"}
    command = [sys.executable, "-c", ON_A_TERMINAL, tmp_path]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.STDOUT, env=environment) as running:
        os.close(theirs)
        screen = b"".join(output_of(ours))
        assert running.wait(60) == 0, screen.decode()
    os.close(ours)
    text = screen.decode()
    assert "3/3" in text
    assert "loss 2.0000" in text
    assert "1,234 tokens/s" in text
    assert "said 2" in text
    assert "━" in text


def shown(written: str, width: int) -> list[str]:
    """The lines that a terminal of that width shows, with all that has scrolled by."""
    lines, row, column = [""], 0, 0
    for _, number, what, character in re.findall(r"(\x1b\[\??([0-9;]*)([A-Za-z]))|([^\x1b])", written, re.DOTALL):
        if what == "A":
            row = max(row - int(number or 1), 0)
        elif what == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif character == "\r":
            column = 0
        elif character and (character == "\n" or column == width):
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        if character and character not in "\r\n":
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


MANY_STEPS = """
import logging, sys
from pathlib import Path
from macrobatch.train.record import Recorder
with Recorder(Path(sys.argv[1]), total_steps=6, resume_step=None) as recorder:
    for step in range(1, 7):
        recorder.step({"step": step, "epoch": step / 4, "loss": 5.0 - step, "tokens_per_second": 1234.0})
        recorder.say(f"said {step}")
        logging.getLogger("macrobatch").warning("warned")
    recorder.validation(6, {"loss": 2.5})
    recorder.finish(["report: here"])
"""


@pytest.mark.parametrize("width", [40, 72, 200])
def test_there_is_one_bar_and_the_last_numbers_come_last(tmp_path, width):
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(width), "LINES": "30"}
    command = [sys.executable, "-c", MANY_STEPS, tmp_path]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.STDOUT, env=environment) as running:
        os.close(theirs)
        screen = shown(b"".join(output_of(ours)).decode(), width)
        assert running.wait(60) == 0, screen
    os.close(ours)
    assert not [line for line in screen if "━" in line], screen  # its place is taken by the last line
    assert [line for line in screen if line.startswith("said")] == [f"said {step}" for step in range(1, 7)]
    last = "".join(screen[screen.index("report: here") + 1 :])
    assert last == "step 6/6  epoch 1.50  loss -1.0000  validation 2.500  1,234 tokens/s"


def output_of(terminal):
    """What a program prints on a terminal, until it ends."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([terminal], [], [], 60)[0]:
        try:
            yield os.read(terminal, 65536)
        except OSError:  # how a terminal says that nobody is there any more
            return


def test_other_ranks_leave_nothing(tmp_path, capsys):
    with Silent() as recorder:
        recorder.show_derived({"a": "b"})
        recorder.step(row(1))
        recorder.validation(1, {"loss": 1.0})
        recorder.flush()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_the_peak_of_memory_never_falls():
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(before // 4 + 2**26)  # float32: more than was ever held
    after = peak_memory(torch.device("cpu"))
    assert after >= block.nbytes
    del block
    assert peak_memory(torch.device("cpu")) >= after
