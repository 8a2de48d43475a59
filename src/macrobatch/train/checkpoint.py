"""Checkpoints of a run: sharded, without pickle, there whole or not at all.

A checkpoint is a folder: a safetensors file for each rank that had something to write, and a manifest::

    step-00000100/
        manifest.json             which tensor lies where, size and SHA-256 of every file, the caller's facts
        rank-00000.safetensors
        rank-00001.safetensors

torch.distributed.checkpoint plans who writes and reads which part of which tensor, so that a run saved on some ranks
goes on with more or fewer. Its own storages do not serve: one is pickle, the other takes the files that it finds for
all there were, and refuses tied weights. So what is written, and read, is done here.

A folder is written aside, under a name with `.partial-`. Only when every byte of it is on the disk does it get its
name; only after that are older ones removed. So a process may be killed at any moment, and the disk may be full.
Reading compares every byte with the manifest, and executes nothing.

Every method is called by all ranks together, with a folder that all of them see; what fails on one raises on all.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from macrobatch.errors import BackendError, CheckpointError, MacrobatchError, UsageError

Json = dict[str, Any]
T = TypeVar("T")

MANIFEST = "manifest.json"
KIND, VERSION = "macrobatch checkpoint", 1
FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # the second number: written again, beside one that was there
PARTIAL = re.compile(r"step-\d{8,}(?:-\d+)?\.partial-[0-9a-f]+")
FILE = re.compile(r"rank-\d{5,}\.safetensors")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMED = {name: dtype for dtype, name in DTYPES.items()}


class Checkpoints:
    """The checkpoints of one run, in one folder, of which the newest `keep` stay.

    >>> import tempfile
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), keep=2)
    >>> checkpoints.save(100, {"weight": torch.ones(2)}, {"seen": 6400}).name
    'step-00000100'
    >>> weight = torch.zeros(2)
    >>> checkpoints.load(checkpoints.newest(), {"weight": weight})
    {'seen': 6400}
    >>> weight
    tensor([1., 1.])
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"keep must be at least 1, or nothing would be left to resume from: got {keep}.")
        self.folder, self.keep = Path(folder), keep
        self._verified: dict[Path, Json] = {}  # those whose every byte was compared, with their manifests
        self._damaged: set[Path] = set()

    def save(self, step: int, tensors: Mapping[str, Any], facts: Json) -> Path:
        """Write a checkpoint; when this returns, it is on the disk, whole.

        `tensors` is a dict of tensors and DTensors, or of such dicts; `facts`, of which the first rank's count, what
        JSON can hold.
        """
        flat = _flat(tensors)
        partial: Path | None = None
        try:
            partial = _first_rank(lambda: self._begun(step))
            writer = _Writer(partial)
            with _quiet():
                metadata = save(flat, storage_writer=writer, no_dist=not dist.is_initialized())
            _agreed(writer.problem)
            path = _first_rank(lambda: self._finished(partial, _contents(step, facts, metadata, writer.results)))
        except (CheckpointError, CheckpointException) as error:
            if partial is not None and _rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint of step {step} was not written. {_reason(error)} {self._what_is_left()}"
            ) from None
        if _rank() == 0:
            self._prune(path)
        return path

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole; None where there has never been one.

        Damaged ones are passed over with a warning. Where all are, that is an error: starting again from nothing is not
        what somebody who resumes wants.
        """
        candidates = _first_rank(self._found)
        for path in candidates:
            try:
                self._verify(path)
            except CheckpointError as error:
                self._damaged.add(path)
                if _rank() == 0:
                    warnings.warn(f"passed over: {error}", RuntimeWarning, stacklevel=2)
            else:
                return path
        if candidates:
            raise CheckpointError(
                f"None of the {len(candidates)} checkpoints in {self.folder} is whole. "
                "Bring one back from a copy, or begin another run in a new folder."
            )
        return None

    def load(self, path: Path, tensors: Mapping[str, Any]) -> Json:
        """Fill the tensors in place, on as many ranks as there are now, and return the facts.

        The checkpoint must have all of them, of the same shape and dtype, and no other.
        """
        flat = _flat(tensors)
        manifest = self._verify(path)
        _agreed(_misfit(path, manifest, flat))
        reader = _Reader(path, manifest)
        try:
            with _quiet():
                load(flat, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise CheckpointError(f"{path} cannot be read. {_reason(error)}") from None
        _agreed(reader.problem)
        facts: Json = manifest["facts"]
        return facts

    def facts(self, path: Path) -> Json:
        """What was saved beside the tensors; nothing is loaded."""
        facts: Json = self._verify(path)["facts"]
        return facts

    def held(self, path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """The tensors in a checkpoint: dtype and whole shape by name."""
        tensors = self._verify(path)["tensors"]
        return {name: (NAMED[one["dtype"]], torch.Size(one["shape"])) for name, one in tensors.items()}

    # ------------------------------------------------------------------------------------------ folders, on one rank

    def _begun(self, step: int) -> Path:
        """A new folder to write into. What a killed process left behind goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.iterdir():
            if PARTIAL.fullmatch(stale.name):
                shutil.rmtree(stale, ignore_errors=True)
        partial = self.folder / f"step-{step:08d}.partial-{secrets.token_hex(4)}"
        partial.mkdir()
        return partial

    def _finished(self, partial: Path, contents: Json) -> Path:
        """All files are on the disk: the manifest, and then the name that makes it a checkpoint."""
        for name, file in contents["files"].items():
            if not _is_size(partial / name, file["bytes"]):
                raise CheckpointError(f"{partial / name} is not what a rank wrote. All ranks must see the same folder.")
        with (partial / MANIFEST).open("wb") as file:
            file.write(json.dumps({"sha256": _digest(contents), "contents": contents}, indent=1).encode())
            _flush(file)
        _flush_folder(partial)
        path = self.folder / partial.name.partition(".")[0]
        names = itertools.chain([path], (path.with_name(f"{path.name}-{again}") for again in itertools.count(1)))
        path = next(name for name in names if not name.exists())  # replacing one would leave none for a moment
        partial.rename(path)
        _flush_folder(self.folder)
        self._verified[path] = contents
        return path

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest ones. What cannot be removed is no reason to stop."""
        others = [path for path in self._found() if path not in self._damaged and path != newest]
        with contextlib.suppress(OSError):
            for path in others[self.keep - 1 :]:
                going = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
                path.rename(going)  # so that a half removed one is never taken for a damaged one
                shutil.rmtree(going)
                self._verified.pop(path, None)

    def _found(self) -> list[Path]:
        """Everything that has the name of a checkpoint, the newest first."""
        if not self.folder.is_dir():
            return []
        found = [(match, path) for path in self.folder.iterdir() if (match := FOLDER.fullmatch(path.name))]
        order = sorted(found, key=lambda one: (int(one[0][1]), int(one[0][2] or 0)), reverse=True)
        return [path for _, path in order]

    def _what_is_left(self) -> str:
        """For the message of a save that failed."""
        found = self._found()
        return f"The last one is {found[0]}: it is as it was." if found else "There is none before it."

    # ---------------------------------------------------------------------------------------------- comparing bytes

    def _verify(self, path: Path) -> Json:
        """The manifest of a checkpoint that is whole. Ranks share the reading."""
        path = Path(path)
        if path not in self._verified:
            manifest = _first_rank(lambda: _manifest(path))
            own = sorted(manifest["files"])[_rank() :: _world_size()]
            problems = [problem for name in own if (problem := _damage(path / name, manifest["files"][name]))]
            _agreed(" ".join(problems) or None)
            self._verified[path] = manifest
        return self._verified[path]


def _manifest(path: Path) -> Json:
    """What a checkpoint says of itself, if it is one and says so undamaged."""
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        what = f"has no {MANIFEST}" if path.is_dir() else "is no folder"
        raise CheckpointError(f"{path} is not a checkpoint: it {what}.") from None
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror}.") from None
    try:
        outer = json.loads(content)
        contents: Json = outer["contents"]
        intact = outer["sha256"] == _digest(contents)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path / MANIFEST} is damaged, or was not written by macrobatch.")
    if contents["kind"] != KIND or contents["version"] > VERSION:
        raise CheckpointError(
            f"{path} is a {contents['kind']} of version {contents['version']}; "
            f"this macrobatch reads version {VERSION}. Use a newer one."
        )
    if not all(FILE.fullmatch(name) for name in contents["files"]):
        raise CheckpointError(f"{path / MANIFEST} names files that no checkpoint has.")
    return contents


def _damage(file: Path, expected: Json) -> str | None:
    """What is wrong with a file, if anything is."""
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{file} is damaged: it has {size:,} bytes where {expected['bytes']:,} were written."
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != expected["sha256"]:
                return f"{file} is damaged: its content is not what was written."
    except FileNotFoundError:
        return f"{file} is missing."
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}."
    return None


def _misfit(path: Path, manifest: Json, wanted: Mapping[str, Tensor]) -> str | None:
    """Why these tensors cannot be filled from that checkpoint, if they cannot: the first few differences by name."""
    held = manifest["tensors"]
    differences = [f"it has no {name}" for name in wanted if name not in held]
    differences += [f"{name} is only there" for name in held if name not in wanted and not name.startswith("random.")]
    for name, tensor in wanted.items():
        here = [DTYPES.get(tensor.dtype), list(tensor.shape)]
        there = [held[name]["dtype"], held[name]["shape"]] if name in held else here
        if here != there:
            differences.append(f"{name} is {there[0]} {there[1]} there, {here[0]} {here[1]} here")
    if not differences:
        return None
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"{path} was saved from another model or optimizer: {'; '.join(differences[:5])}{more}."


def _is_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _digest(contents: Json) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Names are on the disk only when their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------- what ranks agree on


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _first_rank(act: Callable[[], T]) -> T:
    """What the first rank makes of it, on all; or its error, on all."""
    made: T | None = None
    problem: str | None = None
    if _rank() == 0:
        try:
            made = act()
        except (MacrobatchError, OSError) as error:
            problem = str(error)
    if dist.is_initialized():
        box = [made, problem]
        dist.broadcast_object_list(box)
        made, problem = box  # type: ignore[assignment]
    if problem is not None:
        raise CheckpointError(problem)
    return made  # type: ignore[return-value]


def _agreed(problem: str | None) -> None:
    """An error on every rank where one of them has a problem."""
    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    several = dict.fromkeys(one for one in problems if one is not None)
    if several:
        raise CheckpointError(" ".join(several))


def _reason(error: BaseException) -> str:
    """The errors of all ranks without their tracebacks."""
    if isinstance(error, CheckpointException):
        return " ".join(dict.fromkeys(f"{type(one[0]).__name__}: {one[0]}" for one in error.failures.values()))
    return str(error)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a process group torch warns that it takes itself to be alone; it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# ---------------------------------------------------------------------------- the storage that torch's plans work on


def _contents(step: int, facts: Json, metadata: Metadata, results: list[list[WriteResult]]) -> Json:
    """What the manifest says."""
    stored = {result.index: result.storage_data for rank in results for result in rank}
    tensors: Json = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = [
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                "file": stored[MetadataIndex(name, chunk.offsets)]["file"],
            }
            for chunk in tensor.chunks
        ]
        tensors[name] = {
            "dtype": DTYPES[tensor.properties.dtype],
            "shape": list(tensor.size),
            "chunks": chunks,
        }
    files = {file["file"]: {"bytes": file["bytes"], "sha256": file["sha256"]} for file in stored.values()}
    about = {"kind": KIND, "version": VERSION, "step": step, "ranks": _world_size()}
    try:
        contents: Json = json.loads(json.dumps({**about, "facts": facts, "files": files, "tensors": tensors}))
    except (TypeError, ValueError) as error:
        raise UsageError(f"facts must be what JSON can hold: {error}.") from None
    return contents


class _Writer(StorageWriter):
    """Writes what torch planned for this rank into one safetensors file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem: str | None = None  # raised later, when all ranks are done: torch's way sends tracebacks around
        self.results: list[list[WriteResult]] = []  # of all ranks, on the first

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        name = f"rank-{_rank():05d}.safetensors"
        try:
            written.set_result(self._written(name, plan, planner))
        except Exception as error:
            self.problem = f"{self.folder / name} on rank {_rank()}: {error}."
            written.set_result([])
        return written

    def _written(self, name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        pieces = []
        for item in plan.items:
            assert item.tensor_data is not None
            pieces.append((item.index.fqn, item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype))
        with (self.folder / name).open("wb") as file:
            digest = hashlib.sha256()
            for content in _safetensors(pieces, (planner.resolve_data(item) for item in plan.items)):
                digest.update(content)
                file.write(content)
            _flush(file)
            stored = {"file": name, "bytes": file.tell(), "sha256": digest.hexdigest()}
        return [WriteResult(item.index, 0, stored) for item in plan.items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        self.results = results

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return True


def _safetensors(
    pieces: list[tuple[str, torch.Size, torch.dtype]], tensors: Iterator[Any]
) -> Iterator[bytes | ctypes.Array[ctypes.c_char]]:
    """The bytes of a safetensors file, a tensor at a time: no second copy of them all is made."""
    header: Json = {}
    begin = 0
    for name, shape, dtype in pieces:
        end = begin + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    assert len(header) == len(pieces), "a rank has one piece of a tensor"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        if flat.numel():
            yield (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())


class _Reader(StorageReader):
    """Reads what torch planned for this rank."""

    def __init__(self, folder: Path, manifest: Json) -> None:
        self.folder, self.manifest = folder, manifest
        self.problem: str | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        tensors = {}
        for name, tensor in self.manifest["tensors"].items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
                for chunk in tensor["chunks"]
            ]
            properties = TensorProperties(dtype=NAMED[tensor["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        return Metadata(tensors)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._read(plan, planner)
        except Exception as error:
            self.problem = f"{self.folder} cannot be read on rank {_rank()}: {error}."
        read: Future[None] = Future()
        read.set_result(None)
        return read

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        from safetensors import safe_open

        places = {
            (name, tuple(chunk["offsets"])): chunk["file"]
            for name, tensor in self.manifest["tensors"].items()
            for chunk in tensor["chunks"]
        }
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}
            for item in plan.items:
                name, offset = item.storage_index.fqn, item.storage_index.offset
                file = places[name, tuple(offset or ())]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(self.folder / file, framework="pt"))
                piece = opened[file].get_tensor(name)
                for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    piece = piece.narrow(dimension, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return True


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Dicts of dicts as one, with dotted names."""
    flat: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif not isinstance(value, Tensor):
            raise UsageError(f"{name} is a {type(value).__name__}, not a tensor: it belongs in the facts.")
        elif value.dtype not in DTYPES or value.layout != torch.strided:
            raise UsageError(f"{name} cannot be saved: a tensor of {value.dtype} and {value.layout}.")
        else:
            flat[name] = value
    return flat


# ------------------------------------------------------------------------------------ a model and its optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that a run goes on from: weights, buffers, the optimizer's state, this rank's random numbers.

    The model may be plain, DDP, FSDP2 or HSDP, compiled or not: names and whole shapes are those of the plain one. An
    optimizer that has not stepped yet has no state.
    """
    tensors = _of_model(model)
    for name, _, parameter in _optimized(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            elif value is not None:
                raise BackendError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {name}, which is not "
                    "saved: only tensors are. Use another optimizer."
                )
    return tensors | _random()


def restore(checkpoints: Checkpoints, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Json:
    """Put back what `state` gave, on as many ranks as there are now; return the facts.

    On the same number of ranks the run goes on bitwise. A rank that was not there before draws random numbers of its
    own.
    """
    held = checkpoints.held(path)
    tensors = _of_model(model)
    states: dict[Tensor, dict[str, Tensor]] = {}
    for name, group, parameter in _optimized(model, optimizer):
        prefix = f"optimizer.{name}."
        own = {entry.removeprefix(prefix): held[entry] for entry in held if entry.rpartition(".")[0] + "." == prefix}
        states[parameter] = {key: _room(key, *like, parameter, group) for key, like in own.items()}
        tensors |= {f"{prefix}{key}": value for key, value in states[parameter].items()}
    random = {name: torch.empty(held[name][1], dtype=held[name][0]) for name in _random() if name in held}
    first = {} if random else {"random.0.cpu": torch.empty(held["random.0.cpu"][1], dtype=torch.uint8)}
    facts = checkpoints.load(path, tensors | random | first)
    optimizer.state.clear()
    optimizer.state.update({parameter: values for parameter, values in states.items() if values})
    _set_random(random, first)
    return facts


def _of_model(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by the names of the plain model. Tied weights are one."""
    plain = _plain(model)
    everything = plain.state_dict()  # first: FSDP takes back here what a forward left gathered
    names = {name for name, _ in plain.named_parameters()}
    twice = {name for name, _ in plain.named_parameters(remove_duplicate=False)} - names
    return {f"model.{_bare(name)}": value for name, value in everything.items() if name not in twice}


def _optimized(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any], nn.Parameter]]:
    """Name, group and parameter of everything that the optimizer steps."""
    names = {parameter: _bare(name) for name, parameter in _plain(model).named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise UsageError("The optimizer holds a parameter that the model has not: make it after wrapping.")
            yield names[parameter], group, parameter


def _room(key: str, dtype: torch.dtype, shape: torch.Size, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
    """A tensor to be filled with a piece of the optimizer's state, where the optimizer wants it to be."""
    if key == "step":  # on the host, but for optimizers that read it on the device
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor):
        raise BackendError(
            f"The optimizer's {key!r} of a sharded parameter of shape {tuple(parameter.shape)} has shape {tuple(shape)}: "
            "how it is sharded is not known here. Use AdamW or SGD."
        )
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _plain(model: nn.Module) -> nn.Module:
    wrapped = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return _plain(wrapped) if isinstance(wrapped, nn.Module) else model


def _bare(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _random() -> dict[str, Tensor]:
    """The states of this rank's generators. Names differ from rank to rank, as the states do."""
    states = {f"random.{_rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"random.{_rank()}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random(own: dict[str, Tensor], first: dict[str, Tensor]) -> None:
    for name, value in own.items():
        torch.cuda.set_rng_state(value) if name.endswith(".cuda") else torch.set_rng_state(value)
    for value in first.values():  # this rank is new: numbers of its own, the same at every resume from here
        digest = hashlib.sha256(bytes(value.tolist()) + str(_rank()).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
