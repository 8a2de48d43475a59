"""Checkpoints on one rank: everything comes back, kills and full disks cost nothing, damage is never believed."""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from macrobatch.errors import BackendError, CheckpointError, UsageError
from macrobatch.train.checkpoint import MANIFEST, Checkpoints, restore, state


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def anew(checkpoints):
    """As another process sees the folder."""
    return Checkpoints(checkpoints.folder, keep=checkpoints.keep)


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


# ------------------------------------------------------------------------------------------ everything comes back

KINDS = {
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "float16": torch.randn(3).half(),
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "int64": torch.tensor([2**62, -1]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 3),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "part of another": torch.arange(12.0)[3:7],
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
}
KINDS["the same memory"] = KINDS["float64"]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_kind_of_tensor(checkpoints):
    path = checkpoints.save(7, {"nested": {"deep": KINDS}, "flat": torch.ones(2)}, {})
    back = {name: torch.zeros_like(tensor) for name, tensor in KINDS.items()}
    anew(checkpoints).load(path, {"nested": {"deep": back}, "flat": torch.zeros(2)})
    for name, tensor in KINDS.items():
        assert bits(back[name]) == bits(tensor), name
        assert back[name].dtype == tensor.dtype


def test_facts(checkpoints):
    facts = {"step": 7, "seen": [1, 2.5, None, True], "stream": {"epoch": 0, "name": "é"}, "loss": float("inf")}
    path = checkpoints.save(7, {"a": torch.ones(1)}, facts)
    assert anew(checkpoints).facts(path) == facts
    assert anew(checkpoints).load(path, {"a": torch.zeros(1)}) == facts


def test_other_programs_can_read_the_tensors(checkpoints):
    path = checkpoints.save(1, KINDS, {})
    read = safetensors.torch.load_file(path / "rank-00000.safetensors")
    assert {name: bits(tensor) for name, tensor in read.items()} == {name: bits(one) for name, one in KINDS.items()}


def test_nothing_is_unpickled(checkpoints):
    """Python itself tells of every class that an unpickler looks for."""
    path = checkpoints.save(1, KINDS, {"a": 1})
    sought, watching = [], [True]
    sys.addaudithook(lambda event, _: watching[0] and event == "pickle.find_class" and sought.append(event))
    try:
        again = anew(checkpoints)
        again.load(again.newest(), {name: torch.zeros_like(tensor) for name, tensor in KINDS.items()})
        assert sought == []
        torch.load(save_with_pickle(path.parent), weights_only=False)
        assert sought, "the watch sees nothing"
    finally:
        watching[0] = False


def save_with_pickle(folder):
    torch.save(nn.Linear(1, 1), folder / "pickled")
    return folder / "pickled"


class Noisy(nn.Module):
    """Tied weights, a buffer, dropout: all that a run goes on from."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(F.dropout(self.norm(self.embedding(x)), 0.3))


def made(seed, optimizer, device="cpu", **options):
    torch.manual_seed(seed)
    model = Noisy().to(device)
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)


def trained(model, optimizer, steps):
    for step in range(steps):
        x = torch.arange(step, step + 8, device=model.head.weight.device) % 11
        F.cross_entropy(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"capturable": True}),
        ("AdamW", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {}),
        ("Adagrad", {}),
        ("Adafactor", {}),
    ],
)
def test_a_run_goes_on_bitwise(checkpoints, optimizer, options, before, device):
    """Also where nothing had been stepped yet, and where the optimizer that is restored had stepped otherwise."""
    if options.get("capturable") and device == "cpu":
        pytest.skip("capturable is for CUDA")
    model, its_optimizer = made(0, optimizer, device, **options)
    trained(model, its_optimizer, before)
    path = checkpoints.save(before, state(model, its_optimizer), {"steps": before})
    trained(model, its_optimizer, 4)

    other, other_optimizer = made(1, optimizer, device, **options)
    trained(other, other_optimizer, 2)
    torch.manual_seed(99)
    assert restore(anew(checkpoints), path, other, other_optimizer) == {"steps": before}
    trained(other, other_optimizer, 4)
    expected, got = state(model, its_optimizer), state(other, other_optimizer)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


def test_tied_weights_are_saved_once(checkpoints):
    path = checkpoints.save(0, state(*made(0, "AdamW")), {})
    held = {name for name in checkpoints.specs(path) if name.startswith("model.")}
    assert held == {"model.embedding.weight", *(f"model.norm.{name}" for name in Noisy().norm.state_dict())}


def test_a_compiled_model_has_the_names_of_the_plain_one(checkpoints):
    model, optimizer = made(0, "AdamW")
    path = checkpoints.save(0, state(torch.compile(model, backend="eager"), optimizer), {})
    restore(anew(checkpoints), path, *made(1, "AdamW"))


def test_an_optimizer_made_before_wrapping(checkpoints):
    with pytest.raises(UsageError, match="create it after wrapping"):
        state(Noisy(), made(0, "AdamW")[1])


def test_an_optimizer_that_keeps_more_than_tensors():
    model, optimizer = made(0, "AdamW")
    trained(model, optimizer, 1)
    optimizer.state[model.embedding.weight]["history"] = [1, 2]
    with pytest.raises(BackendError, match=r"AdamW keeps a list as 'history' of embedding.weight"):
        state(model, optimizer)


# ------------------------------------------------------------------------------------------ folders come and go


def test_the_newest_ones_stay(checkpoints):
    (checkpoints.folder / "step-notes").mkdir(parents=True)
    for step in (1, 9, 10, 200_000_000):
        checkpoints.save(step, {"a": torch.tensor(step)}, {})
    assert names(checkpoints) == ["step-00000010", "step-200000000", "step-notes"]
    assert anew(checkpoints).newest().name == "step-200000000"


def test_none_yet(checkpoints):
    assert checkpoints.newest() is None
    checkpoints.folder.mkdir()
    assert checkpoints.newest() is None


def test_the_same_step_again_replaces_nothing(checkpoints):
    for value in range(12):
        checkpoints.save(5, {"a": torch.tensor(value)}, {})
    assert names(checkpoints) == ["step-00000005-10", "step-00000005-11"]
    back = torch.zeros((), dtype=torch.int64)
    anew(checkpoints).load(anew(checkpoints).newest(), {"a": back})
    assert back == 11


def test_the_same_name_again(checkpoints):
    """What was found out about one that is gone says nothing about the one that has its name now."""
    for value in (1, 2):
        path = checkpoints.save(5, {"a": torch.tensor(value)}, {"value": value})
        assert checkpoints.newest() == path
        assert checkpoints.facts(path) == {"value": value}
        shutil.rmtree(path)


def test_what_a_killed_process_left_behind_is_removed(checkpoints):
    left = checkpoints.folder / "step-00000003.partial-0a1b2c3d"
    left.mkdir(parents=True)
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert checkpoints.newest() is None
    checkpoints.save(4, {"a": torch.ones(1)}, {})
    assert names(checkpoints) == ["step-00000004"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none(tmp_path, keep):
    with pytest.raises(UsageError, match=f"at least 1.*got {keep}"):
        Checkpoints(tmp_path, keep=keep)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": {"b": 3}}, r"a\.b is a int, not a tensor: it belongs in the facts"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a cannot be saved: a tensor of torch.float32 and torch.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a cannot be saved: a tensor of torch.complex64"),
    ],
)
def test_what_is_no_tensor(checkpoints, tensors, message):
    with pytest.raises(UsageError, match=message):
        checkpoints.save(1, tensors, {})


def test_facts_that_json_cannot_hold(checkpoints):
    checkpoints.save(1, {"a": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match=r"step 2 was not written.*what JSON can hold.*Tensor.*last one, .*00001"):
        checkpoints.save(2, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    assert names(checkpoints) == ["step-00000001"]


# ---------------------------------------------------------------------------------------------------- damage


def two(checkpoints):
    """Two checkpoints, and the path of the newer."""
    checkpoints.save(1, {"a": torch.arange(100)}, {"step": 1})
    return checkpoints.save(2, {"a": torch.arange(100) + 1}, {"step": 2})


def cut(file, size):
    os.truncate(file, size)


def reworded(path, **changes):
    """A manifest that is well formed and says something else."""
    contents = json.loads((path / MANIFEST).read_text())["contents"] | changes
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps({"sha256": digest, "contents": contents}))


def rechunked(path, *chunks, **more):
    """A manifest that tells other chunks of the tensor."""
    reworded(path, tensors={"a": {"dtype": "I64", "shape": [100], "chunks": list(chunks), **more}})


def chunk(offset, size, file="rank-00000.safetensors"):
    return {"offsets": [offset], "sizes": [size], "file": file}


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def an_empty_pipe(path):
    """Of which the manifest says what is true: it holds nothing."""
    a_pipe(path / TENSORS)
    reworded(path, files={TENSORS: {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}})


def foreign(path):
    shutil.rmtree(path)
    path.mkdir()
    torch.save({"a": 1}, path / "pytorch_model.bin")


def a_file(path):
    shutil.rmtree(path)
    path.write_text("not a folder")


TENSORS = "rank-00000.safetensors"
DAMAGES = {
    "truncated": (lambda path: cut(path / TENSORS, 500), rf"{TENSORS} is damaged: it has 500 bytes where .* were"),
    "emptied": (lambda path: cut(path / TENSORS, 0), f"{TENSORS} is damaged: it has 0 bytes"),
    "missing": (lambda path: (path / TENSORS).unlink(), f"{TENSORS} is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "is not a checkpoint: it has no manifest.json"),
    "half a manifest": (lambda path: cut(path / MANIFEST, 200), "manifest.json is damaged"),
    "empty manifest": (lambda path: cut(path / MANIFEST, 0), "manifest.json is damaged"),
    "another manifest": (
        lambda path: (path / MANIFEST).write_text("[]"),
        "manifest.json is damaged, or was not written",
    ),
    "foreign": (foreign, "is not a checkpoint: it has no manifest.json"),
    "a file": (a_file, "is not a checkpoint: it is no folder"),
    "newer": (lambda path: reworded(path, version=2), "of version 2; this macrobatch reads"),
    "outside by a chunk": (lambda path: rechunked(path, chunk(0, 100, "../x")), "names files that no checkpoint has"),
    "absolute": (lambda path: rechunked(path, chunk(0, 100, "/etc/passwd")), "names files that no checkpoint has"),
    "no chunks": (lambda path: rechunked(path), "chunks of 'a' that are not the whole of it"),
    "empty chunks": (lambda path: rechunked(path, chunk(0, 0), chunk(100, 0)), "are not the whole of it"),
    "chunks twice": (lambda path: rechunked(path, chunk(0, 50), chunk(0, 50)), "are not the whole of it"),
    "chunks beyond": (lambda path: rechunked(path, chunk(50, 100)), "are not the whole of it"),
    "negative chunks": (lambda path: rechunked(path, chunk(-50, 100)), "are not the whole of it"),
    "of no dtype": (lambda path: rechunked(path, chunk(0, 100), dtype="PICKLE"), "tensor 'a' that no checkpoint has"),
    "of no shape": (lambda path: rechunked(path, chunk(0, 100), shape="100"), "that no checkpoint has"),
    "tensors that are none": (lambda path: reworded(path, tensors=[3]), "parts that no checkpoint has"),
    "facts that are none": (lambda path: reworded(path, facts=None), "parts that no checkpoint has"),
    "files that are none": (lambda path: reworded(path, files={TENSORS: 3}), "parts that no checkpoint has"),
    "a pipe": (lambda path: a_pipe(path / TENSORS), f"{TENSORS} cannot be read: .* is no file"),
    "an empty pipe": (an_empty_pipe, f"{TENSORS} cannot be read: .* is no file"),
    "a pipe for a manifest": (lambda path: a_pipe(path / MANIFEST), "manifest.json cannot be read: .* is no file"),
    "deep": (
        lambda path: (path / MANIFEST).write_text('{"contents":' * 100_000 + "1" + "}" * 100_000),
        "manifest.json is damaged, or was not written",
    ),
    "outside": (lambda path: reworded(path, files={"../../secret": {}}), "names files that no checkpoint has"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_passed_over(checkpoints, damage):
    path = two(checkpoints)
    spoil, message = DAMAGES[damage]
    spoil(path)
    untouched = torch.zeros(100, dtype=torch.int64)
    with pytest.raises(CheckpointError, match=message):
        anew(checkpoints).load(path, {"a": untouched})
    assert not untouched.any()
    again = anew(checkpoints)
    with pytest.warns(RuntimeWarning, match=f"skipped.*{message}"):
        older = again.newest()
    assert again.load(older, {"a": untouched}) == {"step": 1}
    assert untouched.tolist() == list(range(100))


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_bit_is_believed(checkpoints, data):
    """Wherever it is: in a number, a name, a size, a digest, white space."""
    shutil.rmtree(checkpoints.folder, ignore_errors=True)
    path = two(anew(checkpoints))
    file = path / data.draw(st.sampled_from([MANIFEST, TENSORS]))
    original = file.read_bytes()
    content = bytearray(original)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        newest = anew(checkpoints).newest()
    if newest == path:  # only where the bit meant nothing
        assert file.name == MANIFEST
        assert json.loads(content) == json.loads(original)
        assert anew(checkpoints).load(path, {"a": torch.zeros(100, dtype=torch.int64)}) == {"step": 2}
    else:
        assert len(told) == 1


def test_those_of_others_are_passed_over(checkpoints):
    """A checkpoint says whose it is."""
    ours = Checkpoints(checkpoints.folder, owners=["ours", "ours before"])
    path = ours.save(1, {"a": torch.arange(9)}, {})
    foreign = Checkpoints(checkpoints.folder, owners=["theirs"]).save(2, {"a": torch.arange(9)}, {})
    with pytest.warns(RuntimeWarning, match=f"skipped. {foreign} belongs to another run"):
        assert Checkpoints(checkpoints.folder, owners=["ours"]).newest() == path
    Checkpoints(checkpoints.folder, owners=["ours before"]).save(3, {"a": torch.arange(9)}, {})
    assert Checkpoints(checkpoints.folder, owners=["ours", "ours before"]).newest().name == "step-00000003"


def test_what_killed_processes_left_goes(checkpoints):
    two(checkpoints)
    for name in ("step-00000003.partial-0a1b2c3d", "step-00000001-1.partial-ff"):
        (checkpoints.folder / name).mkdir()
    (checkpoints.folder / "notes").mkdir()
    anew(checkpoints).sweep()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["notes", "step-00000001", "step-00000002"]


def test_all_are_damaged(checkpoints):
    two(checkpoints)
    for path in checkpoints.folder.iterdir():
        cut(path / TENSORS, 9)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(CheckpointError, match=r"None of the 2 checkpoints .* can be used"),
    ):
        anew(checkpoints).newest()


def test_a_damaged_one_does_not_cost_a_whole_one(checkpoints):
    """It is not one of those that are kept, though its number is the highest; and it is not removed at once."""
    cut(two(checkpoints) / TENSORS, 9)
    again = Checkpoints(checkpoints.folder, keep=2)
    with pytest.warns(RuntimeWarning):
        assert again.newest().name == "step-00000001"
    again.save(2, {"a": torch.zeros(100)}, {})
    assert names(again) == ["step-00000001", "step-00000002", "step-00000002-1"]
    assert anew(again).newest().name == "step-00000002-1"


# ---------------------------------------------------------------------------------------------- another model

HERE = {"model.a": torch.zeros(3, 4), "model.b": torch.zeros(5), "model.c": torch.zeros(1)}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (HERE | {"model.a": torch.ones(4, 4)}, r"model\.a is F32 \[4, 4\] there, F32 \[3, 4\] here\.$"),
        (HERE | {"model.b": torch.ones(5).double()}, r"model\.b is F64 \[5\] there, F32 \[5\] here\.$"),
        (HERE | {"model.d": torch.ones(1)}, r"only it has model\.d\.$"),
        ({"model.a": torch.ones(3, 4), "model.b": torch.ones(5)}, r"model\.c is missing in it\.$"),
        (
            {f"model.{i}": torch.ones(1) for i in range(9)},
            r"model\.a is missing in it; .*only it has model\.1.*; and 7 more\.$",
        ),
    ],
)
def test_a_checkpoint_of_another_model(checkpoints, saved, message):
    path = checkpoints.save(1, saved, {})
    with pytest.raises(CheckpointError, match="was saved from another model or optimizer: .*" + message):
        checkpoints.load(path, HERE)
    assert not any(tensor.any() for tensor in HERE.values())


def test_a_checkpoint_of_another_optimizer(checkpoints):
    model, optimizer = made(0, "AdamW")
    trained(model, optimizer, 1)
    path = checkpoints.save(1, state(model, optimizer), {})
    other = torch.optim.AdamW([model.embedding.weight], lr=0.1)
    with pytest.raises(CheckpointError, match=r"only it has optimizer\.norm\.weight\.step"):
        restore(anew(checkpoints), path, model, other)


# ---------------------------------------------------------------------------------------------- a full disk


@contextlib.contextmanager
def files_of_at_most(size):
    """The kernel refuses to write beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("room", "file"),
    [(4_000, "tensors of several writes"), (100, "the header"), (1_000, "the manifest")],
)
def test_a_file_that_cannot_grow(checkpoints, room, file):
    two(checkpoints)
    before = names(checkpoints)
    tensors = {f"a{i}": torch.ones(1 if file == "the manifest" else 1000) for i in range(9)}
    with (
        files_of_at_most(room),
        pytest.raises(CheckpointError, match=r"step 3 was not written.*File too large.*The last one, .*step-00000002"),
    ):
        checkpoints.save(3, tensors, {})
    assert names(checkpoints) == before
    assert anew(checkpoints).newest().name == "step-00000002"
    assert checkpoints.save(3, tensors, {}) == checkpoints.newest()


def test_a_full_disk(tmp_path):
    """A real one, of 200 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True, timeout=20
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        checkpoints = Checkpoints(disk / "checkpoints", keep=1)
        for step in (1, 2):
            checkpoints.save(step, {"a": torch.ones(20_000)}, {"step": step})
        with pytest.raises(CheckpointError, match=r"step 3 was not written.*No space left on device.*step-00000002"):
            checkpoints.save(3, {"a": torch.ones(50_000)}, {})
        back = torch.zeros(20_000)
        assert anew(checkpoints).load(anew(checkpoints).newest(), {"a": back}) == {"step": 2}
        assert back.all()
        assert names(checkpoints) == ["step-00000002"]
    finally:
        subprocess.run(["umount", disk], check=True, timeout=20)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"step 3 was not written.*File exists.*no earlier one"):
        Checkpoints(tmp_path / "checkpoints").save(3, {"a": torch.ones(1)}, {})


# ---------------------------------------------------------------------------------------------------- kill -9


def test_killed_at_every_moment_of_a_save(tmp_path):
    """At every call that touches the file system a process is killed; and a hundred more, at any time."""
    ran = subprocess.run(
        [sys.executable, __file__, tmp_path / "exact", tmp_path / "random"], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    report = json.loads(ran.stdout)
    assert report["at every call"] > 20
    assert report["left a partial"] > 5


def killed(folder: Path, step: int, after: int | None, seconds: float) -> bool:
    """Save from `step` on in a child, which is killed at its `after`-th call, or after some seconds. Was it in time?"""
    child = os.fork()
    if child == 0:
        calls = iter(range(10**9))

        def watch(event: str, _: object) -> None:
            if event.partition(".")[0] in ("open", "os", "shutil") and next(calls) == after:
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoints = Checkpoints(folder)
        if after is not None:
            sys.addaudithook(watch)
        for value in range(step, step + (1 if after is not None else 10**6)):
            save_step(checkpoints, value)
        os._exit(0)
    import time

    time.sleep(seconds)
    if after is None:
        os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def save_step(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, {f"a{i}": torch.full((300,), step) for i in range(10)}, {"step": step})


def step_of(folder: Path) -> int:
    """The step of the newest checkpoint, of which every number is what it must be, and no damage is seen."""
    checkpoints = Checkpoints(folder)
    newest = checkpoints.newest()
    if newest is None:
        return 0
    for path in folder.glob("step-*"):
        assert ".partial-" in path.name or checkpoints.facts(path), "one is there in part, under its full name"
    tensors = {f"a{i}": torch.zeros(300, dtype=torch.int64) for i in range(10)}
    step = checkpoints.load(newest, tensors)["step"]
    assert all((tensor == step).all() for tensor in tensors.values())
    return step


def partials(folder: Path) -> int:
    return sum(".partial-" in path.name for path in folder.iterdir())


def main(exact: Path, random_moments: Path) -> None:
    import random

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    save_step(Checkpoints(exact), 1)
    left, call = 0, 0
    while killed(exact, step := step_of(exact) + 1, call, 0):
        assert step_of(exact) in (step - 1, step), "the last good one is lost"
        left, call = left + bool(partials(exact)), call + 1
    assert step_of(exact) == step
    moments = random.Random(0)
    for _ in range(100):
        before = step_of(random_moments)
        assert killed(random_moments, before + 1, None, moments.uniform(0.001, 0.1))
        assert step_of(random_moments) >= before
        left += random_moments.exists() and bool(partials(random_moments))
    print(json.dumps({"at every call": call, "left a partial": left, "saved": step_of(random_moments)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
