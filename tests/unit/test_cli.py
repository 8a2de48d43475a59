"""The command, as one types it: exit status and output of real processes."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import macrobatch
from harness import ROOT
from harness.ranks import torchrun
from macrobatch.cli import main

TRAINING = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(3, 1)
batch = torch.randn(10, 3), torch.randn(10, 1)
number = 3


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def loop(model, batch):
    for x, y in zip(*(tensor.split(4) for tensor in batch)):
        (loss_fn(model, (x, y)) / 3).backward()


def right():
    return model, loss_fn, batch


def impatient(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in zip(*(tensor.split(4) for tensor in batch)):
        loss_fn(model, (x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def several():
    return model, loss_fn, batch, impatient


def own_numbers(model, batch):
    loop(model, (batch[0] + 1, batch[1] + 1))


def unknown():
    return model, loss_fn, batch, own_numbers


def wrong():
    print("the wrong one")
    return model, loss_fn, batch, loop


def too_little():
    return model, loss_fn


def raises():
    raise ZeroDivisionError("of its own")


def leaves():
    print("said by the program")
    raise SystemExit(0)


def refused():
    return "model", loss_fn, batch


def on_ranks():
    dist.init_process_group("gloo")
    share = [tensor[dist.get_rank() * 4 :][: 4 + 2 * dist.get_rank()] for tensor in batch]
    return nn.parallel.DistributedDataParallel(model), loss_fn, share
"""


def a_directory(path: Path) -> Path:
    """With a module, to start from."""
    (path / "my_training.py").write_text(TRAINING)
    (path / "needs_more.py").write_text("import something_that_is_not_there")
    (path / "misspelt.py").write_text("def check(:")
    (path / "fails.py").write_text("raise ValueError('no data')")
    (path / "leaves.py").write_text("import sys; sys.exit(1)")
    return path


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(a_directory(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("my_training", "needs_more"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


# ---------------------------------------------------------------------------------------------------- real processes

COMMANDS = {
    "wrong": ["verify", "my_training:wrong", "--json"],
    "leaves": ["verify", "my_training:leaves", "--json"],
    "bad": ["verify", "no_such_module:check"],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Exit status and output of each command, all of them started at once."""
    directory = a_directory(tmp_path_factory.mktemp("command"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {
        name: subprocess.Popen([sys.executable, "-m", "macrobatch", *arguments], cwd=directory, **pipes)
        for name, arguments in COMMANDS.items()
    }
    try:
        outputs = {name: process.communicate(timeout=120) for name, process in started.items()}
        return {name: (process.returncode, *outputs[name]) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()


def test_a_wrong_step_as_json(done):
    status, out, err = done["wrong"]
    assert (status, err) == (1, "the wrong one\n")
    report = json.loads(out)
    assert report["ok"] is False
    assert report["causes"][0]["name"] == "mean of means"


def test_a_program_that_ends_itself_is_not_verified(done):
    status, out, err = done["leaves"]
    assert (status, out) == (2, "")
    assert err.startswith("said by the program\nTraceback ")
    told = "macrobatch: my_training:leaves could not be verified: it raised the error above."
    assert err.endswith(f"SystemExit: 0\n{told}\n")


def test_a_bad_name_is_one_line(done):
    status, out, err = done["bad"]
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("macrobatch: there is no module 'no_such_module' in ")


def test_under_torchrun(here):
    launch = torchrun(2, "-m", "macrobatch", "verify", "my_training:on_ranks", directory=here)
    assert launch.exit_code == 0, launch.output
    assert launch.output.count("EXACT: error ") == 1  # the first rank speaks for all


LATE = """
import atexit, os

class Late:
    def __del__(self, abort=os.abort):
        abort()

late = Late()
atexit.register(print, "at exit", flush=True)
"""


def test_a_rank_ends_before_the_interpreter_is_torn_down(here):
    """Threads of DDP's process group outlive it, and can abort a process that takes its interpreter apart."""
    with (here / "my_training.py").open("a") as file:
        file.write(LATE)
    launch = torchrun(2, "-m", "macrobatch", "verify", "my_training:on_ranks", directory=here)
    assert launch.exit_code == 0, launch.output
    assert launch.output.count("at exit") == 2


UNREAD = [["train", "--help"], ["bench", "--list"], ["--help"], ["train"], ["train", "--print-config"]]


@pytest.mark.parametrize("words", UNREAD, ids=" ".join)
def test_nobody_reads_what_is_printed(tmp_path, words):
    """As with `| head` that has seen enough: no traceback, and no complaint of Python's when it ends."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "macrobatch", *words]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, cwd=tmp_path)
    finally:
        os.close(writing)
    assert done.returncode in (0, 128 + signal.SIGPIPE)  # argparse does not tell
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


EARLY = [(signal.SIGINT, 0.6), (signal.SIGINT, 2.4), (signal.SIGTERM, 1.2), (signal.SIGHUP, 2.4)]


@pytest.mark.parametrize(("number", "seconds"), EARLY)
def test_interrupted_in_the_first_seconds(tmp_path, number, seconds):
    command = [sys.executable, "-m", "macrobatch", "train", "--out", str(tmp_path / "run")]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as started:
        time.sleep(seconds)
        started.send_signal(number)
        said = started.stderr.read()
    wanted = f"macrobatch: ended by {number.name}: no step was under way, nothing is lost."
    assert (started.returncode, said.strip()) == (128 + number, wanted)


def test_interrupted_while_python_imports(tmp_path):
    """At every moment after the program's own first line; before that, it is Python that answers."""
    (tmp_path / "argparse.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    for program in ("-m", "macrobatch"), ("-c", "from macrobatch.cli import main; raise SystemExit(main())"):
        done = subprocess.run([sys.executable, *program, "train"], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 128 + signal.SIGINT
        assert done.stderr == "macrobatch: interrupted.\n"


def test_something_is_said_before_the_large_packages_are_imported(tmp_path):
    """Seconds pass with them."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("print('imported'); raise SystemExit(7)")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "macrobatch", "train", "--out", tmp_path / "run"],
        capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert "starting" in first
    assert second == "imported"


def test_the_version(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")  # it is not needed for this
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "macrobatch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == f"macrobatch {macrobatch.__version__}\n"


# --------------------------------------------------------------------------------------------------- in this process


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_training", "is not MODULE:FUNCTION"),
        (":right", "is not MODULE:FUNCTION"),
        ("my_training.deeper:right", "there is no module 'my_training.deeper'"),
        ("my_training:left", "module 'my_training' has no function 'left'"),
        ("my_training:number", "my_training:number is not a function: got int"),
        ("my_training:too_little", "must return model, loss_fn, batch and, if need be, step: got 2 values"),
        ("my_training:refused", "model must be a torch.nn.Module: got str"),
        ("needs_more:check", "module 'needs_more' needs 'something_that_is_not_there', which is not installed"),
        ("./my_training:right", "'./my_training' is not the name of a module"),
        (".my_training:right", "'.my_training' is not the name of a module"),
        ("my_training.py:right", "Did you mean my_training:right?"),
        ("misspelt:check", "module 'misspelt' cannot be imported: SyntaxError"),
        ("fails:check", "module 'fails' cannot be imported: ValueError: no data"),
        ("leaves:check", "module 'leaves' cannot be imported: SystemExit"),
    ],
)
def test_what_cannot_be_verified_is_one_line(here, capsys, target, said):
    assert main(["verify", target]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


def test_ranks_that_have_not_met_are_not_verified_alone(here, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["verify", "my_training:right"]) == 2
    assert "my_training:right runs on 2 ranks, but they have not joined a group" in capsys.readouterr().err


def test_an_error_of_its_own_is_shown(here, capsys):
    assert main(["verify", "my_training:raises"]) == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError: of its own" in err
    assert err.splitlines()[-1].startswith("macrobatch: my_training:raises could not be verified")


def test_in_this_process(here, capsys):
    assert main(["verify", "my_training:right"]) == 0
    assert main(["verify", "my_training:wrong"]) == 1
    assert main(["verify", "my_training:unknown"]) == 2
    assert "cause 1: mean of means" in capsys.readouterr().out


def test_the_number_of_optimizer_steps(here, capsys):
    """Right for each alone; wrong where one is expected."""
    assert main(["verify", "my_training:several"]) == 0
    assert "3 optimizer steps, each compared with its own samples" in capsys.readouterr().out
    assert main(["verify", "my_training:several", "--windows", "3"]) == 0
    assert main(["verify", "my_training:several", "--windows", "1"]) == 1
    assert "the step took 3 optimizer steps where 1 was expected" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["verify", "my_training:several", "--windows", "0"])
    assert ended.value.code == 2


def test_no_command_and_help(capsys):
    assert main([]) == 0
    assert "usage: macrobatch" in capsys.readouterr().out
    for arguments, status in ((["--help"], 0), (["verify"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
    assert "MODULE:FUNCTION" in capsys.readouterr().err


def test_the_command_that_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"macrobatch": f"{main.__module__}:{main.__name__}"}
