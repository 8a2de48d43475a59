"""Tensors of all ranks in one folder: one safetensors file for each rank that has something to write.

torch.distributed.checkpoint plans which rank writes and reads which part of which tensor, so that more or fewer ranks
can read what some ranks have saved. Its own storage classes are not suitable: one uses pickle; the other refuses tied
weights, and does not notice missing files. So this module writes and reads according to torch's plans.

All ranks call `write` and `read` together, with a folder that all of them see. An error on one rank is raised on all.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from macrobatch.errors import CheckpointError, MacrobatchError, UsageError

Json = dict[str, Any]
T = TypeVar("T")

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


def write(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[Json, Json]:
    """Write the tensors to the disk. Returns the descriptions of tensors and of files, on the first rank only."""
    writer = _Writer(folder)
    with _translate_errors():
        metadata = state_dict_saver.save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    agree(writer.problem)
    stored = {result.index: result.storage_data for of_rank in writer.results for result in of_rank}
    if rank() != 0:
        return {}, {}
    files = {file["name"]: {"bytes": file["bytes"], "sha256": file["sha256"]} for file in stored.values()}
    return {name: _tensor_entry(name, one, stored) for name, one in metadata.state_dict_metadata.items()}, files


def read(folder: Path, held: Json, tensors: Mapping[str, Tensor]) -> None:
    """Fill these tensors in place, on as many ranks as there are now. `held` is the first result of `write`."""
    reader = _Reader(folder, held)
    with _translate_errors():
        state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    agree(reader.problem)


def flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts as one dict with dotted names. Refuses values that cannot be written."""
    named: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            named |= flat(value, f"{name}.")
        elif not isinstance(value, Tensor):
            raise UsageError(f"{name} is a {type(value).__name__}, not a tensor: it belongs in the facts.")
        elif value.dtype not in DTYPES or value.layout != torch.strided:
            raise UsageError(f"{name} cannot be saved: a tensor of {value.dtype} and {value.layout}.")
        else:
            named[name] = value
    return named


def flush(file: BinaryIO) -> None:
    """Wait until everything written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------- agreement between ranks


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def on_first_rank(act: Callable[[], T]) -> T:
    """Run a function on the first rank, and return its result, or raise its error, on all ranks."""
    made: T | None = None
    problem: str | None = None
    if rank() == 0:
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


def agree(problem: str | None) -> None:
    """Raise an error on every rank if one of them has a problem."""
    problems = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    several = dict.fromkeys(one for one in problems if one is not None)
    if several:
        raise CheckpointError(" ".join(several))


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """A context that turns torch's errors into ours, and hides its warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            reasons = dict.fromkeys(f"{type(one).__name__}: {one}." for one, _ in error.failures.values())
            raise CheckpointError(" ".join(reasons)) from None


# ----------------------------------------------------------------------------------------- storage for torch's plans


class _Writer(StorageWriter):
    """Writes the parts that torch planned for this rank into one safetensors file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem: str | None = None  # raised later: torch would send a traceback to all ranks
        self.results: list[list[WriteResult]] = []  # of all ranks; filled on the first rank only

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        name = f"rank-{rank():05d}.safetensors"
        try:
            stored = self._write(name, plan, planner)
            results = [WriteResult(item.index, 0, stored) for item in plan.items]
        except Exception as error:
            self.problem = f"{self.folder / name} on rank {rank()}: {error}."
            if not self.folder.is_dir():
                self.problem += " All ranks must see the same folder."
        return _future(results)

    def _write(self, name: str, plan: SavePlan, planner: SavePlanner) -> Json:
        if not plan.items:
            return {}
        pieces = []
        for item in plan.items:
            assert item.tensor_data is not None
            pieces.append((item.index.fqn, item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype))
        with (self.folder / name).open("wb") as file:
            digest = hashlib.sha256()
            for content in _safetensors(pieces, (planner.resolve_data(item) for item in plan.items)):
                digest.update(content)
                file.write(content)
            flush(file)
            return {"name": name, "bytes": file.tell(), "sha256": digest.hexdigest()}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        self.results = results

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return True


def _safetensors(
    pieces: list[tuple[str, torch.Size, torch.dtype]], tensors: Iterator[Any]
) -> Iterator[bytes | ctypes.Array[ctypes.c_char]]:
    """The bytes of a safetensors file, one tensor at a time, so that there is no second copy of all tensors."""
    header: Json = {}
    begin = 0
    for name, shape, dtype in pieces:
        end = begin + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    assert len(header) == len(pieces), "a rank has one piece of a tensor"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # to align the tensors
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous()
        if content.numel():
            yield (ctypes.c_char * content.nbytes).from_address(content.data_ptr())


def _tensor_entry(name: str, tensor: Any, stored: dict[MetadataIndex, Json]) -> Json:
    """The dtype and shape of a tensor, and the file of each of its chunks."""
    chunks = [
        {
            "offsets": list(chunk.offsets),
            "sizes": list(chunk.sizes),
            "file": stored[MetadataIndex(name, chunk.offsets)]["name"],
        }
        for chunk in tensor.chunks
    ]
    return {"dtype": DTYPES[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}


class _Reader(StorageReader):
    """Reads the parts that torch planned for this rank."""

    def __init__(self, folder: Path, held: Json) -> None:
        self.folder, self.held = folder, held
        self.problem: str | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        tensors = {}
        for name, tensor in self.held.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
                for chunk in tensor["chunks"]
            ]
            properties = TensorProperties(dtype=NAMED[tensor["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        return Metadata(tensors)  # type: ignore[arg-type]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._read(plan, planner)
        except Exception as error:
            self.problem = f"{self.folder} cannot be read on rank {rank()}: {error}."
        return _future(None)

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        from safetensors import safe_open

        for file, items in self._by_file(plan).items():
            with safe_open(self.folder / file, framework="pt") as opened:
                for item in items:
                    piece = opened.get_tensor(item.storage_index.fqn)
                    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        piece = piece.narrow(dimension, start, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(piece)
                    planner.commit_tensor(item, target)

    def _by_file(self, plan: LoadPlan) -> dict[str, list[ReadItem]]:
        """The parts to read, grouped by file, so that only one file is open at a time."""
        files = {
            (name, tuple(chunk["offsets"])): chunk["file"]
            for name, tensor in self.held.items()
            for chunk in tensor["chunks"]
        }
        sorted_out: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            sorted_out[files[item.storage_index.fqn, tuple(item.storage_index.offset or ())]].append(item)
        return sorted_out

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return True


def _future(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
