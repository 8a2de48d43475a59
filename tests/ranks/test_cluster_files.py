"""The files in docs/scaling.md, as they are there: two real torchruns on this machine stand for two hosts.

Only names change: `/shared` is a folder of the test, and the settings are those of a small run. `srun` and `scontrol`
are stand-ins, as there is no Slurm here.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from harness import ROOT
from harness.commands import arguments, farthest, json_lines, losses, sentences
from harness.killing import checkpoints, environment, free_port, lines, taken
from harness.pages import blocks_of
from harness.processes import end_family, started
from macrobatch.cli import main
from macrobatch.train.folder import description

BLOCKS = blocks_of((ROOT / "docs" / "scaling.md").read_text())
STEPS = 60
SECONDS = 120  # for what is waited for: most of it is importing

pytestmark = pytest.mark.usefixtures("own_cache")


def the_block(language: str, having: str = "") -> str:
    """The text of the only block of that language with these words in it."""
    (found,) = [block.text for block in BLOCKS if block.language == language and having in block.text]
    return found


SETTINGS = the_block("toml")
TRAIN, LAUNCH = the_block("bash", "macrobatch train"), the_block("bash", "exec torchrun")
HOSTS, SBATCH, MANIFEST = the_block("bash", "ssh"), the_block("bash", "#SBATCH"), the_block("yaml")


# --------------------------------------------------------------------------------------------------- what can be read


@pytest.mark.parametrize("script", [TRAIN, LAUNCH, HOSTS, SBATCH], ids=["train", "launch", "hosts", "sbatch"])
def test_bash_reads_it(script):
    assert script.startswith("#!/bin/bash\n")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=20)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_settings_are_settings(tmp_path, capsys):
    (tmp_path / "settings.toml").write_text(SETTINGS)
    assert main(["train", "--config", str(tmp_path / "settings.toml"), "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in tomllib.loads(SETTINGS)} == tomllib.loads(SETTINGS)
    assert f"run={printed['out']}\n" in TRAIN
    assert f"run={printed['out']}\n" in SBATCH


def test_what_a_pytorchjob_needs():
    job = yaml.safe_load(MANIFEST)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    (kind,) = job["spec"]["pytorchReplicaSpecs"]  # no Master: torchrun's hosts are equal
    worker = job["spec"]["pytorchReplicaSpecs"][kind]
    pod, policy = worker["template"]["spec"], job["spec"]["elasticPolicy"]
    (container,) = pod["containers"]
    assert (kind, container["name"], worker["restartPolicy"]) == ("Worker", "pytorch", "OnFailure")
    given = {one["name"]: one["value"] for one in container["env"]}
    (port,) = container["ports"]
    assert port["name"] == "pytorchjob-port"
    assert given["HEAD"] == f"{job['metadata']['name']}-worker-0:{port['containerPort']}"
    assert int(given["HOSTS"]) == worker["replicas"] == policy["minReplicas"] == policy["maxReplicas"]
    assert int(given["RANKS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounted["/shared"]]
    assert container["command"] == ["bash", "/shared/launch.sh"]
    seconds = int(LAUNCH.partition("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=")[2].split()[0])
    assert 30 < seconds < pod["terminationGracePeriodSeconds"]


# --------------------------------------------------------------------------------------------------------- what runs


class Cluster:
    """A shared folder with the files, and what was started there."""

    def __init__(self, shared: Path) -> None:
        self.shared, self.run, self.screen = shared, shared / "runs" / "first", shared / "screen"
        self.started: list[subprocess.Popen[bytes]] = []
        for name, text in {"train.sh": TRAIN, "launch.sh": LAUNCH, "first.sbatch": SBATCH}.items():
            (shared / name).write_text(text.replace("/shared", str(shared)))
        json_lines(shared / "data.jsonl", [{"text": text} for text in sentences()])
        small = ["--precision", "float64", "--parallel", "fsdp", "--steps", str(STEPS), "--save-every", "0"]
        command = arguments(shared / "data.jsonl", self.run, *small, "--print-config")
        printed = subprocess.run(
            [sys.executable, "-m", "macrobatch", *command], capture_output=True, text=True, check=True, timeout=SECONDS
        )
        (shared / "settings.toml").write_text(printed.stdout)

    def start(self, *command: object, **variables: str) -> subprocess.Popen[bytes]:
        paths = f"{self.shared / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.started.append(started(command, self.screen, environment(self.shared) | variables | {"PATH": paths}))
        return self.started[-1]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.screen.read_text()[-6000:]
            time.sleep(0.01)

    def check_complete(self) -> None:
        """Every step is told of, once; its losses are those of one process that nothing disturbed."""
        assert [row["step"] for row in lines(self.run)] == list(range(1, STEPS + 1)), self.screen.read_text()[-6000:]
        assert description(self.run)["status"] == 0
        alone = [
            "train",
            "--config",
            self.shared / "settings.toml",
            "--out",
            self.shared / "alone",
            "--parallel",
            "ddp",
        ]
        assert main([*map(str, alone)]) == 0
        assert farthest(losses(self.run), losses(self.shared / "alone")) <= 1e-10


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for one in cluster.started:
        end_family(one)


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for host in 0 1; do
  "$@" &
  echo $! >> "$SHARED/hosts"
done
status=0
for host in $(jobs -p); do wait "$host" || status=$?; done
exit "$status"
"""
SCONTROL = """#!/bin/bash
case "$1" in
  show) echo localhost ;;
  requeue) echo "$2" >> "$SHARED/requeued" ;;
esac
"""


def test_slurm(cluster):
    """Time runs out, and the job goes back into the queue. One that fails does not, nor one that ends."""
    (bin_ := cluster.shared / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    job = free_job()
    slurm = {
        "SHARED": str(cluster.shared), "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip
    hosts, requeued = cluster.shared / "hosts", cluster.shared / "requeued"

    first = cluster.start("bash", cluster.shared / "first.sbatch", **slurm)
    cluster.wait(lambda: taken(cluster.run) >= 3)
    for pid in map(int, hosts.read_text().split()):
        os.kill(pid, signal.SIGTERM)
    cluster.wait(lambda: first.poll() is not None)
    assert first.returncode != 0
    assert requeued.read_text() == f"{job}\n", cluster.screen.read_text()[-6000:]
    assert checkpoints(cluster.run) == [f"step-{taken(cluster.run):08d}"]
    assert taken(cluster.run) < STEPS

    (bin_ / "srun").write_text("#!/bin/bash\nexit 2\n")  # an error, not a signal: the job would come back for ever
    failed = cluster.start("bash", cluster.shared / "first.sbatch", **slurm)
    assert failed.wait(SECONDS) == 2
    assert requeued.read_text() == f"{job}\n"

    (bin_ / "srun").write_text(SRUN)
    again = cluster.start("bash", cluster.shared / "first.sbatch", **slurm)
    cluster.wait(lambda: again.poll() is not None)
    assert again.returncode == 0, cluster.screen.read_text()[-6000:]
    assert requeued.read_text() == f"{job}\n"
    cluster.check_complete()


@pytest.mark.parametrize("drained", [0, 1])
def test_a_pod_is_drained_and_created_again(cluster, drained):
    """All ranks save when one pod gets a signal. The other waits for the new one; without the first pod, it fails."""
    (worker,) = yaml.safe_load(MANIFEST)["spec"]["pytorchReplicaSpecs"].values()
    (container,) = worker["template"]["spec"]["containers"]
    command = [word.replace("/shared", str(cluster.shared)) for word in container["command"]]
    given = {one["name"]: one["value"] for one in container["env"]}
    given |= {"HEAD": f"localhost:{free_port()}", "RANKS": "1", "OMP_NUM_THREADS": "1"}

    pods = [cluster.start(*command, **given)]
    cluster.wait(lambda: is_listening(given["HEAD"]))  # so that the first one is the head
    pods.append(cluster.start(*command, **given))
    cluster.wait(lambda: taken(cluster.run) >= 3)
    pods[drained].terminate()
    ended = pods if drained == 0 else pods[1:]
    cluster.wait(lambda: all(pod.poll() is not None for pod in ended))
    assert all(pod.returncode != 0 for pod in ended)  # so that they are started again
    assert taken(cluster.run) < STEPS
    pods[-len(ended) :] = [cluster.start(*command, **given) for _ in ended]
    cluster.wait(lambda: all(pod.poll() is not None for pod in pods))
    assert [pod.returncode for pod in pods] == [0, 0], cluster.screen.read_text()[-6000:]
    cluster.check_complete()


def free_job() -> int:
    """A number of a job whose port nobody uses."""
    for job in itertools.count(os.getpid()):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("localhost", 20000 + job % 10000))
            return job
    raise AssertionError("unreachable")


def is_listening(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) == 0
