"""The state that such programs expect the process to have: what it is one of, and where accumulation stands.

This is the only place in the library where anything belongs to the process and not to an object.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from macrobatch.accelerate.settings import GradientAccumulationPlugin


class DistributedType(StrEnum):
    """How processes work together: in one of the first four ways. Programs compare with the others, too."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"

    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"
    XLA = "XLA"


class AcceleratorState:
    """Which process this is, of how many, and its device. There is one, whatever the number of calls.

    Args:
        cpu: stay on the CPU where there is a GPU.
        mixed_precision: see `Accelerator`.
        sharded: whether models are sharded.
    """

    _only: ClassVar[AcceleratorState | None] = None

    device: torch.device
    num_processes: int
    process_index: int
    local_process_index: int
    mixed_precision: str
    sharded: bool
    owns_group: bool

    def __new__(cls, **given: Any) -> AcceleratorState:
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only._set_up(**given)
        return cls._only

    def _set_up(self, cpu: bool = False, mixed_precision: str = "no", sharded: bool = False) -> None:
        on_gpu = torch.cuda.is_available() and not cpu
        self.local_process_index = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", self.local_process_index) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.owns_group = not _connected() and int(os.environ.get("WORLD_SIZE", 1)) > 1
        if self.owns_group:
            dist.init_process_group(None if on_gpu else "gloo")  # None: one backend for each kind of device
        self.num_processes = dist.get_world_size() if _connected() else 1
        self.process_index = dist.get_rank() if _connected() else 0
        self.mixed_precision = mixed_precision
        self.sharded = sharded

    @classmethod
    def _reset_state(cls) -> None:
        """Forget it all: the next call looks around anew."""
        cls._only = None

    @property
    def distributed_type(self) -> DistributedType:
        if self.num_processes == 1:
            return DistributedType.NO
        if self.sharded:
            return DistributedType.FSDP
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Until all processes are here."""
        if self.num_processes > 1:
            dist.barrier()

    def destroy_process_group(self) -> None:
        """Leave the group of processes."""
        if _connected():
            dist.destroy_process_group()
        self.owns_group = False

    def __repr__(self) -> str:
        return (
            f"{self.distributed_type}, process {self.process_index} of {self.num_processes} on {self.device}, "
            f"mixed precision: {self.mixed_precision}"
        )


PartialState = AcceleratorState


def _connected() -> bool:
    return dist.is_available() and dist.is_initialized()


class Loader(Protocol):
    """What `GradientState` knows of a prepared loader."""

    end_of_dataloader: bool
    remainder: int


class GradientState:
    """Where accumulation stands. There is one, whatever the number of calls.

    Attributes:
        sync_gradients: whether the current micro-batch closes the window.
        plugin_kwargs: the settings of the plugin, as they are now.
    """

    _only: ClassVar[GradientState | None] = None

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    _iterations: list[tuple[object, Loader]]  # what is being iterated over, the innermost last

    def __new__(cls, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> GradientState:
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._reset_state()
        if gradient_accumulation_plugin is not None:
            cls._only.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
        return cls._only

    @classmethod
    def _reset_state(cls) -> None:
        """As at the start of the process."""
        if cls._only is not None:
            cls._only.sync_gradients = True
            cls._only.plugin_kwargs = GradientAccumulationPlugin().to_kwargs()
            cls._only._iterations = []

    @property
    def num_steps(self) -> int:
        """How many micro-batches close a window."""
        steps: int = self.plugin_kwargs["num_steps"]
        return steps

    @property
    def adjust_scheduler(self) -> bool:
        return bool(self.plugin_kwargs["adjust_scheduler"])

    @property
    def sync_with_dataloader(self) -> bool:
        return bool(self.plugin_kwargs["sync_with_dataloader"])

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated over, or None."""
        return self._iterations[-1][1] if self._iterations else None

    @property
    def dataloader_references(self) -> list[Any]:
        """None, and the loaders that are being iterated over."""
        return [None, *(loader for _, loader in self._iterations)]

    @property
    def in_dataloader(self) -> bool:
        return bool(self._iterations)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has handed out its last batch."""
        return bool(self._iterations) and self._iterations[-1][1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """How many samples of the active loader's last batches are no repetitions; -1 where it is not known."""
        return self._iterations[-1][1].remainder if self._iterations else -1

    def _begin(self, loader: Loader) -> object:
        """An iteration over `loader` begins; what is returned names it. One before it, left alive, is over."""
        iteration = object()
        self._iterations = [entry for entry in self._iterations if entry[1] is not loader]
        self._iterations.append((iteration, loader))
        return iteration

    def _end(self, iteration: object) -> None:
        self._iterations = [entry for entry in self._iterations if entry[0] is not iteration]

    def __repr__(self) -> str:
        return (
            f"sync_gradients: {self.sync_gradients}, end_of_dataloader: {self.end_of_dataloader}, "
            f"remainder: {self.remainder}, {self.plugin_kwargs}"
        )
