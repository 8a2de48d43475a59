"""States on disk, without pickle: what is a tensor in a safetensors file, everything else in a JSON file beside it.

Reading one executes nothing. The format of safetensors is a JSON header and then the bytes of the tensors, so its
library is not needed here; it reads these files, and these functions read its.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from macrobatch.errors import UsageError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
KIND = "!"  # in the JSON file: a dict with this key stands for something that JSON has not


# ---------------------------------------------------------------------------------------------- any state


def save(state: Any, path: Path) -> None:
    """Write `path` + ".json", and ".safetensors" where there are tensors.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp(), "state")
    >>> save({"step": 3, 0: (torch.ones(2), None)}, place)
    >>> load(place)
    {'step': 3, 0: (tensor([1., 1.]), None)}
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encoded(state, tensors, "state")
    if tensors:
        save_tensors(tensors, path.with_name(f"{path.name}.safetensors"))
    path.with_name(f"{path.name}.json").write_text(json.dumps(encoded, indent=1))


def load(path: Path) -> Any:
    """What `save` wrote."""
    encoded = json.loads(path.with_name(f"{path.name}.json").read_text())
    beside = path.with_name(f"{path.name}.safetensors")
    return _decoded(encoded, load_tensors(beside) if beside.exists() else {})


def _encoded(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value
        return {KIND: "tensor", "name": path}
    if type(value).__module__ == "numpy":
        return {KIND: "array", "of": _encoded(torch.as_tensor(value), tensors, path)}
    if isinstance(value, Mapping):
        items = {key: _encoded(one, tensors, f"{path}.{key}") for key, one in value.items()}
        kind = type(value).__name__
        if kind == "dict" and KIND not in items and all(isinstance(key, str) for key in items):
            return items
        pairs = [[_encoded(key, tensors, path), one] for key, one in items.items()]
        return {KIND: kind if kind in MAPPINGS else "dict", "items": pairs}
    if isinstance(value, list | tuple):
        several = [_encoded(one, tensors, f"{path}.{index}") for index, one in enumerate(value)]
        return {KIND: "tuple", "items": several} if isinstance(value, tuple) else several
    raise UsageError(
        f"{path} is a {type(value).__name__}, which cannot be saved without pickle. A state_dict() may hold tensors, "
        "numbers, strings, and dicts, lists and tuples of them."
    )


MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: _decoded(one, tensors) for key, one in value.items()}
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "array":
        return _decoded(value["of"], tensors).numpy()
    if kind == "tuple":
        return tuple(_decoded(one, tensors) for one in value["items"])
    decoded = {_decoded(key, tensors): _decoded(one, tensors) for key, one in value["items"]}
    return MAPPINGS[kind](decoded)


# ---------------------------------------------------------------------------------------------- tensors


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise UsageError(f"{name} cannot be saved: a tensor of {tensor.dtype} and {tensor.layout}.")
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous()
            file.write((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))
    part.replace(path)  # a file is there whole, or not at all


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. What it says about itself is checked before anything is made of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if length > size - 8:
            raise UsageError(f"{path} is not a safetensors file, or only a part of one.")
        header = json.loads(file.read(length))
        content = bytearray(size - 8 - length)
        file.readinto(content)
    return {
        name: _tensor(entry, content, f"{path}: {name}") for name, entry in header.items() if name != "__metadata__"
    }


def _tensor(entry: dict[str, Any], content: bytearray, where: str) -> Tensor:
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not 0 <= begin <= end <= len(content) or math.prod(shape) * dtype.itemsize != end - begin:
        raise UsageError(f"{where} does not have the size that its shape {shape} says: the file is damaged.")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return (
        torch.frombuffer(content, dtype=torch.uint8, count=end - begin, offset=begin).clone().view(dtype).reshape(shape)
    )
