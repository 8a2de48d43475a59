"""Checkpoints of a run: sharded, without pickle, and either complete or absent.

A checkpoint is a folder::

    step-00000100/
        manifest.json             the file of each tensor, size and SHA-256 of every file, the caller's facts
        rank-00000.safetensors
        rank-00001.safetensors

A checkpoint is first written under a name with `.partial-`. It gets its final name when every byte is on the disk, and
older ones are removed after that. So a kill at any moment, or a full disk, leaves complete checkpoints only. Loading
verifies the checksum of every file, and executes no code.

All ranks call each method together, with a folder that all of them see. An error on one rank is raised on all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from macrobatch._torch.modules import REPLICATED, plain_name, unwrapped
from macrobatch.errors import BackendError, CheckpointError, UsageError
from macrobatch.train import manifest
from macrobatch.train.manifest import MANIFEST
from macrobatch.train.storage import (
    DTYPES,
    NAMED,
    Json,
    agree,
    flat,
    flush,
    on_first_rank,
    rank,
    read,
    world_size,
    write,
)

FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # the second number: another checkpoint of a step that already has one
PARTIAL = re.compile(r"step-\d{8,}(?:-\d+)?\.partial-[0-9a-f]+")
RANDOM = "random."  # prefix of the tensors that differ per rank
NUMBER = "#"  # suffix of an optimizer state that is a number, not a tensor
WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64}


class Checkpoints:
    """The checkpoints of one run in one folder. The newest `keep` of them are kept.

    >>> import tempfile
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), keep=2)
    >>> checkpoints.save(100, {"weight": torch.ones(2)}, {"seen": 6400}).name
    'step-00000100'
    >>> weight = torch.zeros(2)
    >>> checkpoints.load(checkpoints.newest(), {"weight": weight})
    {'seen': 6400}
    >>> weight
    tensor([1., 1.])

    New checkpoints have the first of `owners` as owner; those of any other owner are not used. Without owners,
    nothing is checked.
    """

    def __init__(self, folder: Path, *, keep: int = 2, owners: Sequence[str] = ()) -> None:
        if keep < 1:
            raise UsageError(f"keep must be at least 1, or nothing would be left to resume from: got {keep}.")
        self.folder, self.keep, self.owners = Path(folder), keep, tuple(owners)
        self._verified: dict[Path, Json] = {}  # manifests of the checkpoints whose checksums were verified
        self._damaged: set[Path] = set()

    def save(self, step: int, tensors: Mapping[str, Any], facts: Json, *, spared: int | None = None) -> Path:
        """Write a checkpoint, and return its folder when it is complete on the disk. Keep the one of step `spared` too.

        `tensors` is a dict of tensors and DTensors, or of such dicts. `facts` is anything that JSON can hold; only
        those of the first rank are saved.
        """
        named = flat(tensors)
        owner = self.owners[0] if self.owners else ""
        partial: Path | None = None
        try:
            partial = begun = on_first_rank(lambda: self._begin(step))
            held, files = write(partial, named)
            path = on_first_rank(lambda: self._finish(begun, manifest.contents(step, owner, facts, held, files)))
        except CheckpointError as error:
            if partial is not None and rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint of step {step} was not written. {error} {self._what_is_left()}"
            ) from None
        self._verified.pop(path, None)  # the entry of an earlier checkpoint with this name
        if rank() == 0:
            self._prune(path, spared)
        return path

    def of_step(self, step: int) -> Path | None:
        """The newest checkpoint of a step, without a check of its files; None if there is none."""
        return next((path for path in on_first_rank(self._folders) if _numbers(path)[0] == step), None)

    def newest(self) -> Path | None:
        """The newest checkpoint that is complete; None if there has never been one.

        A warning names each damaged checkpoint, and the next older one is tried. If all are damaged, that is an error:
        somebody who resumes a run does not want to start again from the first step.
        """
        candidates = on_first_rank(self._folders)
        for path in candidates:
            if path in self._damaged:
                continue
            try:
                self._verify(path)
            except CheckpointError as error:
                self.pass_over(path, error)
            else:
                return path
        if candidates:
            raise CheckpointError(
                f"None of the {len(candidates)} checkpoints in {self.folder} can be used. "
                "Restore one from a copy, or start another run in a new folder."
            )
        return None

    def pass_over(self, path: Path, why: object) -> None:
        """Treat a checkpoint as damaged: it is not used, and not removed either. `why` goes into a warning."""
        self._damaged.add(path)
        if rank() == 0:
            warnings.warn(f"A checkpoint is skipped. {why}", RuntimeWarning, stacklevel=3)

    def sweep(self) -> None:
        """Remove incomplete checkpoints of killed processes. Call it only if no other process writes to the folder."""
        with contextlib.suppress(OSError):
            for stale in self.folder.iterdir():
                if PARTIAL.fullmatch(stale.name):
                    shutil.rmtree(stale, ignore_errors=True)

    def load(self, path: Path, tensors: Mapping[str, Any]) -> Json:
        """Fill the tensors in place, on as many ranks as there are now, and return the facts.

        The checkpoint must have exactly these tensors, with the same shapes and dtypes.
        """
        named = flat(tensors)
        held = self._verify(path)["tensors"]
        agree(_misfit(path, held, named))
        read(path, held, named)
        return self.facts(path)

    def facts(self, path: Path) -> Json:
        """The facts that were saved with the tensors. No tensor is loaded."""
        facts: Json = self._verify(path)["facts"]
        return facts

    def specs(self, path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """The tensors in a checkpoint: dtype and global shape by name."""
        tensors = self._verify(path)["tensors"]
        return {name: (NAMED[one["dtype"]], torch.Size(one["shape"])) for name, one in tensors.items()}

    # ------------------------------------------------------------------------------------------ folders, on one rank

    def _begin(self, step: int) -> Path:
        """A new folder to write into. Removes incomplete checkpoints of killed processes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        partial = self.folder / f"step-{step:08d}.partial-{secrets.token_hex(4)}"
        partial.mkdir()
        return partial

    def _finish(self, partial: Path, contents: Json) -> Path:
        """Write the manifest, after all other files, and give the folder the name of a checkpoint."""
        with (partial / MANIFEST).open("wb") as opened:
            opened.write(manifest.to_bytes(contents))
            flush(opened)
        _flush_folder(partial)
        path = self._new_name(contents["step"])
        partial.rename(path)
        _flush_folder(self.folder)
        return path

    def _new_name(self, step: int) -> Path:
        """A new name for a checkpoint of this step. Replacing an old one would leave none for a moment."""
        times = [time for number, time in map(_numbers, self._folders()) if number == step]
        return self.folder / (f"step-{step:08d}-{max(times) + 1}" if times else f"step-{step:08d}")

    def _prune(self, newest: Path, spared: int | None) -> None:
        """Remove all but the newest checkpoints. A failure to remove one is ignored."""
        others = [path for path in self._folders() if path not in self._damaged and path != newest]
        others = [path for path in others if _numbers(path)[0] != spared]
        with contextlib.suppress(OSError):
            for path in others[self.keep - 1 :]:
                going = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
                path.rename(going)  # so that a half removed checkpoint does not look like a damaged one
                shutil.rmtree(going)

    def _folders(self) -> list[Path]:
        """All folders with the name of a checkpoint, the newest first."""
        if not self.folder.is_dir():
            return []
        return sorted(filter(_numbers, self.folder.iterdir()), key=_numbers, reverse=True)

    def _what_is_left(self) -> str:
        """A sentence for the message of a failed save."""
        found = self._folders()
        return f"The last one, {found[0]}, is unchanged." if found else "There is no earlier one."

    # ---------------------------------------------------------------------------------------------- verifying files

    def _verify(self, path: Path) -> Json:
        """The manifest of a checkpoint, after its files were verified. Each rank verifies some of the files."""
        path = Path(path)
        if path not in self._verified:
            said = on_first_rank(lambda: self._read(path))
            own = sorted(said["files"])[rank() :: world_size()]
            problems = [problem for name in own if (problem := manifest.damage(path / name, said["files"][name]))]
            agree(" ".join(problems) or None)
            self._verified[path] = said
        return self._verified[path]

    def _read(self, path: Path) -> Json:
        """The manifest of a checkpoint. Refuses a checkpoint of another owner."""
        said = manifest.read(path)
        if self.owners and said.get("owner") not in self.owners:
            raise CheckpointError(f"{path} belongs to another run.")
        return said


def _numbers(path: Path) -> tuple[int, ...]:
    """The step in the name of a checkpoint, and its number among those of this step; empty for other names."""
    match = FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def _misfit(path: Path, held: Json, wanted: Mapping[str, Tensor]) -> str | None:
    """Why these tensors cannot be filled from that checkpoint: the first differences by name; None if they can."""
    differences = [f"{name} is missing in it" for name in wanted if name not in held]
    differences += [f"only it has {name}" for name in held if name not in wanted and not name.startswith(RANDOM)]
    for name, tensor in wanted.items():
        here = [DTYPES[tensor.dtype], list(tensor.shape)]
        there = [held[name]["dtype"], held[name]["shape"]] if name in held else here
        if here != there:
            differences.append(f"{name} is {there[0]} {there[1]} there, {here[0]} {here[1]} here")
    if not differences:
        return None
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"{path} was saved from another model or optimizer: {'; '.join(differences[:5])}{more}."


def _flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that the names in it are there. Some file systems do this themselves."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------ a model and its optimizer


def state(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> dict[str, Tensor]:
    """All tensors that a run needs to resume: weights, buffers, the optimizers' state, and this rank's random states.

    The model may be plain, DDP, FSDP2 or HSDP, compiled or not: names and global shapes are those of the plain model.
    Frozen parameters are left out, because nothing changes them. An optimizer without a step has no state. Save the
    options of its groups (learning rate, betas) in the facts.
    """
    tensors = _model_tensors(model)
    for name, optimizer, _, parameter in _optimized_parameters(model, optimizers):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                _require_known_sharding(key, value.shape, parameter)
                tensors[f"optimizer.{name}.{key}"] = value
            elif isinstance(value, bool | int | float):
                tensors[f"optimizer.{name}.{key}{NUMBER}"] = torch.tensor(value, dtype=WIDEST[type(value)])
            elif value is not None:
                raise BackendError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of {name}, which is not "
                    "saved: only tensors and numbers are. Use another optimizer."
                )
    return tensors | _random_states()


def restore(
    checkpoints: Checkpoints, path: Path, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> Json:
    """Restore what `state` returned, on as many ranks as there are now, and return the facts.

    On the same number of ranks the run continues bitwise identically. A rank that did not exist before gets random
    states of its own.
    """
    held = checkpoints.specs(path)
    of_parameter: dict[str, dict[str, tuple[torch.dtype, torch.Size]]] = defaultdict(dict)
    for name, like in held.items():
        of_parameter[name.rpartition(".")[0]][name.rpartition(".")[2]] = like
    tensors = _model_tensors(model)
    states: list[tuple[Optimizer, nn.Parameter, dict[str, Tensor]]] = []
    for name, optimizer, group, parameter in _optimized_parameters(model, optimizers):
        prefix = f"optimizer.{name}"
        room = {key: _empty_state(key, *like, parameter, group) for key, like in of_parameter[prefix].items()}
        tensors |= {f"{prefix}.{key}": value for key, value in room.items()}
        if room:
            states.append((optimizer, parameter, room))
    own = [name for name in _random_states() if name in held] or [name for name in held if name == f"{RANDOM}0.cpu"]
    random = {name: torch.empty(held[name][1], dtype=held[name][0]) for name in own}
    facts = checkpoints.load(path, tensors | random)
    for optimizer in _as_list(optimizers):
        optimizer.state.clear()
    for optimizer, parameter, room in states:
        optimizer.state[parameter] = {
            key.removesuffix(NUMBER): value.item() if key.endswith(NUMBER) else value for key, value in room.items()
        }
    _set_random(random)
    return facts


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trained weights and buffers by the names of the plain model. Tied weights are saved once, frozen ones never."""
    plain = unwrapped(model, REPLICATED)
    everything = plain.state_dict()  # call it first: here FSDP reshards what a forward left gathered
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    others = {name for name, _ in plain.named_parameters(remove_duplicate=False)} - trained
    return {f"model.{plain_name(plain, name)}": value for name, value in everything.items() if name not in others}


def _as_list(optimizers: Optimizer | Sequence[Optimizer]) -> Sequence[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else optimizers


def _optimized_parameters(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> Iterator[tuple[str, Optimizer, dict[str, Any], nn.Parameter]]:
    """Name, optimizer, group and parameter of all parameters that an optimizer updates."""
    plain = unwrapped(model, REPLICATED)
    names = {parameter: plain_name(plain, name) for name, parameter in plain.named_parameters()}
    for optimizer in _as_list(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise UsageError(
                        "The optimizer has a parameter that the model does not have: create it after wrapping."
                    )
                yield names[parameter], optimizer, group, parameter
        if others := [key for key in optimizer.state if key not in names]:
            raise BackendError(
                f"{type(optimizer).__name__} keeps a state of its own ({others[0]!r}) besides that of each parameter, "
                "which is not saved. Use another optimizer."
            )


def _empty_state(
    key: str, dtype: torch.dtype, shape: torch.Size, parameter: nn.Parameter, group: dict[str, Any]
) -> Tensor:
    """An empty tensor for a part of the optimizer's state, on the device where the optimizer expects it."""
    if key == "step":  # on the host, except for optimizers that read it on the device
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    if key.endswith(NUMBER):
        return torch.empty(shape, dtype=dtype)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    _require_known_sharding(key, shape, parameter)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _require_known_sharding(key: str, shape: torch.Size, parameter: nn.Parameter) -> None:
    if key != "step" and shape != parameter.shape and isinstance(parameter, DTensor):
        raise BackendError(
            f"The optimizer's {key!r} has shape {tuple(shape)}, its parameter {tuple(parameter.shape)}: "
            "how the former is sharded is not known here. Use AdamW, Muon or SGD, or replicas (DDP)."
        )


def _random_states() -> dict[str, Tensor]:
    """The states of this rank's random generators. The names contain the rank, because the states differ per rank."""
    states = {f"{RANDOM}{rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RANDOM}{rank()}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random(states: dict[str, Tensor]) -> None:
    for name, value in states.items():
        _, owner, device = name.split(".")
        if int(owner) != rank():  # this rank is new: its own seed, the same at every resume from this checkpoint
            digest = hashlib.sha256(bytes(value.tolist()) + str(rank()).encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
        elif device == "cuda":
            torch.cuda.set_rng_state(value)
        else:
            torch.set_rng_state(value)
