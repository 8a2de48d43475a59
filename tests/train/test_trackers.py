"""Where the numbers of a run go: the real libraries, offline, and what they have on disk afterwards."""

import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.commands import arguments, losses, metrics, refused
from macrobatch.cli import main
from macrobatch.train import Settings, trackers, train
from macrobatch.train.trackers import KINDS, TrackedRun, Trackers, open_trackers

pytestmark = pytest.mark.usefixtures("own_cache", "_offline")
LIBRARIES = ("wandb", "mlflow", "trackio")
ALL = ("tensorboard", *LIBRARIES)


@pytest.fixture(scope="module")
def _offline(tmp_path_factory):
    """Nothing leaves this machine. Trackio reads its folder once, when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("MLFLOW_TRACKING_URI", tmp_path_factory.mktemp("mlflow").as_uri())
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        for name in LIBRARIES:
            pytest.importorskip(name)
        yield


# -------------------------------------------------------------------------------------------- what is in their files


def ids_of(run: Path) -> dict[str, str]:
    return json.loads((run / "trackers.json").read_text())


def in_wandb(run: Path) -> tuple[list[tuple[str, int, float]], dict[str, object], list[int]]:
    """Names, steps and values; the settings; exit codes."""
    from wandb.proto import wandb_internal_pb2

    numbers, config, codes = [], {}, []
    for file in sorted((run / "wandb").glob(f"offline-run-*/run-{ids_of(run)['wandb']}.wandb")):
        for content in records_in(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                row = {name: json.loads(value) for name, value in row.items()}
                numbers += [(name, row["_step"], value) for name, value in row.items() if not name.startswith("_")]
            if record.HasField("run"):
                assert record.run.display_name == run.name
                assert record.run.project == "macrobatch"
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
    return numbers, config, codes


def records_in(content: bytes) -> list[bytes]:
    """The records of a log of LevelDB: blocks of 32 KiB, in which each part has a checksum, a length and a type."""
    found, place = [], 7
    while place + 7 <= len(content):
        room = 2**15 - place % 2**15
        _, length, kind = struct.unpack_from("<IHB", content, place) if room >= 7 else (0, 0, 0)
        if kind == 0:
            place += room
            continue
        part = content[place + 7 : place + 7 + length]
        found += [part] if kind in (1, 2) else []
        if kind in (3, 4):
            found[-1] += part
        place += 7 + length
    return found


def in_mlflow(run: Path) -> tuple[list[tuple[str, int, float]], dict[str, str], str]:
    from mlflow import MlflowClient

    client = MlflowClient()
    found = client.get_run(ids_of(run)["mlflow"])
    assert found.info.run_name == run.name
    assert client.get_experiment(found.info.experiment_id).name == "macrobatch"
    history = [point for name in found.data.metrics for point in client.get_metric_history(found.info.run_id, name)]
    return [(point.key, point.step, point.value) for point in history], found.data.params, found.info.status


def in_trackio(run: Path) -> tuple[list[tuple[str, int, float]], dict[str, object], list[str]]:
    from trackio.utils import TRACKIO_DIR

    with sqlite3.connect(TRACKIO_DIR / "macrobatch.db") as base:
        asked = (ids_of(run)["trackio"],)
        rows = base.execute(
            "select run_name, step, metrics from metrics where run_id = ? order by id", asked
        ).fetchall()
        ((config,),) = base.execute("select config from configs where run_id = ?", asked).fetchall()
    assert {name for name, _, _ in rows} == {run.name}
    found = [(name, step, value) for _, step, row in rows for name, value in json.loads(row).items()]
    states = [value for name, _, value in found if name == "state"]
    return [one for one in found if one[0] != "state"], json.loads(config), states


def of(name: str, numbers: list[tuple[str, int, float]]) -> list[tuple[int, float]]:
    return [(step, value) for one, step, value in numbers if one == name]


# --------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tracked-7"
    flags = ("--steps", 6, "--save-every", 2, "--validate-every", 3, "--track", *ALL)
    assert main(arguments(data, folder, *flags)) == 0
    return folder


def test_every_tracker_has_every_number(run):
    rows = metrics(run)
    validations = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    for found, *_ in (in_wandb(run), in_mlflow(run), in_trackio(run)):
        assert of("train/loss", found) == [(row["step"], pytest.approx(row["loss"])) for row in rows]
        assert of("time/forward", found) == [(row["step"], pytest.approx(row["time"]["forward"])) for row in rows]
        for name in ("loss", "perplexity"):
            wanted = [(row["step"], pytest.approx(row[name])) for row in validations]
            assert of(f"validation/{name}", found) == wanted
    assert (run / "tensorboard").is_dir()


def test_every_tracker_has_the_settings_and_the_end(run):
    _, config, codes = in_wandb(run)
    assert config["batch_size"] == 24
    assert codes == [0]
    _, parameters, status = in_mlflow(run)
    assert parameters["batch_size"] == "24"
    assert status == "FINISHED"
    _, config, states = in_trackio(run)
    assert config["batch_size"] == 24
    assert states == ["finished"]


def test_tensorboard_has_the_settings_and_the_end(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "batch_size = 24" in texts["settings/text_summary"]
    assert texts["state/text_summary"] == "finished"


def test_a_resumed_run_goes_on_where_it_was(run, tmp_path):
    """Also where another run of that name began elsewhere."""
    copy = Path(shutil.copytree(run, tmp_path / run.name))
    open_trackers(["trackio"], TrackedRun(folder=made(tmp_path / "elsewhere" / run.name))).close("finished")
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    assert ids_of(copy) == ids_of(run)
    loss = dict(enumerate(losses(copy), 1))
    wanted = [(step, pytest.approx(loss[step])) for step in (1, 2, 3, 4, 5, 6, 5, 6)]
    for found, *_ in (in_wandb(copy), in_mlflow(copy), in_trackio(copy)):
        assert sorted(of("train/loss", found)) == sorted(wanted)
    assert in_wandb(copy)[2] == [0, 0]
    assert in_mlflow(copy)[2] == "FINISHED"
    assert in_trackio(copy)[2] == ["finished", "finished"]


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


# ---------------------------------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize(("state", "code", "status"), [("interrupted", 130, "KILLED"), ("failed", 1, "FAILED")])
def test_how_a_run_has_ended(tmp_path, state, code, status):
    folder = made(tmp_path / "ended")
    open_trackers(LIBRARIES, TrackedRun(folder=folder, config={"lr": 1.0})).close(state)
    assert in_wandb(folder)[2] == [code]
    assert in_mlflow(folder)[2] == status
    assert in_trackio(folder)[2] == [state]


class Ended:
    """A tracker that notes how it was closed, and fails at a step."""

    id = None

    def __init__(self, failing: int | None = None) -> None:
        self.failing, self.steps, self.states = failing, [], []

    def add(self, step, numbers):
        if step == self.failing:
            raise ConnectionError("the network\nis gone")
        self.steps.append((step, numbers))

    def close(self, state):
        self.states.append(state)


def test_one_that_fails_is_warned_of_once_and_left_out(caplog):
    good, bad = Ended(), Ended(failing=2)
    both = Trackers({"Bad": bad, "Good": good})
    for step in (1, 2, 3):
        both.add(step, {"train/loss": 1.0})
    both.close("finished")
    assert [step for step, _ in good.steps] == [1, 2, 3]
    assert [step for step, _ in bad.steps] == [1]
    assert (good.states, bad.states) == (["finished"], ["failed"])
    assert [record.getMessage() for record in caplog.records] == [
        "Bad no longer gets the numbers of this run: the network"
    ]


def as_kind(monkeypatch, tracker_or_error) -> None:
    """Let "wandb" be that."""

    def opened(told):
        if isinstance(tracker_or_error, Exception):
            raise tracker_or_error
        return tracker_or_error

    monkeypatch.setitem(KINDS, "wandb", trackers.Kind("W", "json", "json", opened, "Log in."))


def test_one_that_fails_does_not_end_the_run(data, tmp_path, monkeypatch, caplog):
    as_kind(monkeypatch, bad := Ended(failing=2))
    assert main(arguments(data, tmp_path / "run", "--track", "wandb")) == 0
    assert len(losses(tmp_path / "run")) == 4
    assert [step for step, _ in bad.steps] == [1]
    assert caplog.text.count("W no longer gets the numbers") == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_run_that_is_thrown_out_says_so(data, tmp_path, monkeypatch, kind):
    as_kind(monkeypatch, noted := Ended())

    def thrown(*_: object) -> None:
        raise kind("thrown")

    monkeypatch.setattr("macrobatch.train.learner.causal_lm_loss", thrown)
    with pytest.raises(kind, match="thrown"):
        train(Settings(model="tiny", data=(str(data),), out=str(tmp_path / "run"), track=("wandb",)))
    assert noted.states == ["failed" if kind is ValueError else "interrupted"]


def test_a_run_that_is_interrupted_says_so(data, tmp_path, monkeypatch):
    as_kind(monkeypatch, noted := Ended())

    def interrupt(event):
        if event.step == 2:
            signal.raise_signal(signal.SIGTERM)

    settings = Settings(model="tiny", data=(str(data),), out=str(tmp_path / "run"), track=("wandb",))
    outcome = train(settings, callbacks=[interrupt])
    assert outcome == 128 + signal.SIGTERM
    assert outcome.steps == 3
    assert noted.states == ["interrupted"]


def test_one_that_cannot_be_opened(data, tmp_path, monkeypatch, capsys, caplog):
    """Is an error before the first step, which leaves nothing behind; and a warning where steps were taken."""
    as_kind(monkeypatch, ConnectionError("no route"))
    out = tmp_path / "run"
    command = arguments(data, out, "--track", "wandb", "--steps", 2, "--validation", 0)
    refused(command, capsys, "--track wandb: W could not be opened: no route. Log in.", "No run was started")
    assert not out.exists()
    assert main(arguments(data, out, "--steps", 2, "--validation", 0, "--track", "none")) == 0
    assert main(["train", "--resume", "--out", str(out), "--steps", "3", "--track", "wandb"]) == 0
    assert "W gets no numbers of this run: no route" in caplog.text
    assert len(losses(out)) == 3


@pytest.mark.parametrize("name", ALL)
def test_one_that_is_not_installed(data, tmp_path, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    command = arguments(data, tmp_path / "run", "--track", name)
    refused(command, capsys, f"--track {name} needs {name}, which is not installed: pip install {name}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("uri", ["http://me:se@cret@127.0.0.1:9", "http://me:se@cret@127.0.0.1:9/x"])
def test_a_password_is_not_printed(data, tmp_path, capfd, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert main([*arguments(data, tmp_path / "run", "--track", "mlflow"), "--debug"]) == 2
    said = "".join(capfd.readouterr())
    assert "MLflow could not be opened: " in said
    assert "cret" not in said


def test_mlflow_without_a_database(data, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)  # as if it were not there
    command = arguments(data, tmp_path / "run", "--track", "mlflow")
    refused(command, capsys, "mlflow-skinny cannot keep runs on this machine", "pip install mlflow")


def test_none_at_all(data, tmp_path, capsys):
    assert main(arguments(data, tmp_path / "run", "--track", "none", "--steps", 1)) == 0
    assert not (tmp_path / "run" / "tensorboard").exists()
    refused(
        arguments(data, tmp_path / "both", "--track", "none", "wandb"), capsys, "--track none excludes other trackers"
    )


def test_a_server_of_mlflow_that_is_gone_holds_nothing_up(tmp_path, monkeypatch, caplog):
    """The run takes its steps while the library tries again; then there is one warning."""
    tracker = open_trackers(["mlflow"], TrackedRun(folder=made(tmp_path / "run")))
    released = threading.Event()

    def unreachable(*_: object, **__: object) -> None:
        released.wait(60)
        raise ConnectionError("nobody there")

    monkeypatch.setattr("mlflow.MlflowClient.log_batch", unreachable)
    for step in range(1, 100):
        tracker.add(step, {"train/loss": 1.0})
    assert not caplog.records
    released.set()
    tracker.close("finished")
    assert [record.getMessage() for record in caplog.records] == [
        "MLflow no longer gets the numbers of this run: nobody there"
    ]


def test_wandb_is_not_asked_for_steps_that_it_has(tmp_path):
    """Online, a run that goes on begins after its last step, and earlier ones would be refused with a warning each."""
    told = []

    class Run:
        step = 5

        def log(self, numbers, step):
            told.append(step)

    tracker = trackers.WeightsAndBiases.__new__(trackers.WeightsAndBiases)
    tracker._run, tracker._next = Run(), Run.step
    for step in (3, 4, 5, 6):
        tracker.add(step, {"train/loss": 1.0})
    assert told == [5, 6]


WITHOUT_A_LOGIN = """
import sys
import threading
from pathlib import Path
from macrobatch.train.trackers import TrackedRun, open_trackers
open_trackers(["wandb"], TrackedRun(folder=Path(sys.argv[1])))
"""


def test_wandb_without_a_login(tmp_path):
    """Is told how to go without; nobody is asked, where nobody is there."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ours |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_A_LOGIN, tmp_path]
    done = subprocess.run(command, env=ours, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "--track wandb: Weights & Biases could not be opened" in done.stderr
    assert "WANDB_MODE=offline keeps all in the run folder" in done.stderr
