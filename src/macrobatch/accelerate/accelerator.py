"""`Accelerator`: the object that programs written for Accelerate hold on to."""

from __future__ import annotations

import builtins
import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from macrobatch._ranks.select import select_backend
from macrobatch.accelerate import gathering, loaders, models, resuming
from macrobatch.accelerate.accumulation import Accumulation, Windows
from macrobatch.accelerate.missing import missing_argument, missing_attribute
from macrobatch.accelerate.settings import (
    PRECISIONS,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    checked_precision,
    handlers_of,
)
from macrobatch.accelerate.sharding import Share
from macrobatch.accelerate.state import AcceleratorState, DistributedType, GradientState
from macrobatch.accelerate.wrappers import AcceleratedOptimizer, AcceleratedScheduler, Scaling
from macrobatch.errors import UsageError
from macrobatch.types import Items


class Accelerator:
    """Runs the loops of Accelerate's gradient accumulation.

    >>> from macrobatch.accelerate import Accelerator
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = DataLoader(torch.ones(6, 2), batch_size=1)
    >>> accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> closed = []
    >>> for x in loader:
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(x).mean())
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     closed.append(accelerator.sync_gradients)
    >>> closed
    [False, False, False, True, False, True]

    Args:
        device_placement: move models and batches to the device.
        split_batches: see `DataLoaderConfiguration`.
        mixed_precision: "no", "bf16" or "fp16"; None: what ACCELERATE_MIXED_PRECISION says, or "no".
        gradient_accumulation_steps: micro-batches in a window.
        cpu: stay on the CPU where there is a GPU.
        dataloader_config: how batches are shared out among processes.
        fsdp_plugin: shard models instead of replicating them.
        gradient_accumulation_plugin: instead of ``gradient_accumulation_steps``, with more to choose.
        step_scheduler_with_optimizer: whether a prepared scheduler waits for the optimizer.
        kwargs_handlers: `DistributedDataParallelKwargs`, `GradScalerKwargs`.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[object] | None = None,
        **others: object,
    ) -> None:
        missing_argument(others)
        _require_ours(gradient_accumulation_plugin, GradientAccumulationPlugin)
        _require_ours(dataloader_config, DataLoaderConfiguration)
        _require_ours(fsdp_plugin, FullyShardedDataParallelPlugin)
        if split_batches and dataloader_config is not None:
            raise UsageError("split_batches and a dataloader_config were both given: say it in the latter alone.")
        plugin = _plugin(gradient_accumulation_plugin, gradient_accumulation_steps)
        if mixed_precision is None:
            mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        self._ddp_options, scaler_options = handlers_of(kwargs_handlers)
        cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        self.state = AcceleratorState(cpu=cpu)
        if cpu:  # also where a logger has asked for the state before
            self.state.device = torch.device("cpu")
        self.state.mixed_precision = checked_precision(mixed_precision)
        self.state.sharded = fsdp_plugin is not None
        self.gradient_state = GradientState(plugin)
        self.gradient_state.sync_gradients = True  # another one may have been left inside a window
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._fsdp_plugin = fsdp_plugin if self.state.num_processes > 1 else None
        self.scaler: GradScaler | None = None
        scaling = None
        if self.mixed_precision == "fp16":
            self.scaler = GradScaler(self.device.type, **asdict(scaler_options))
            scaling = Scaling(self.scaler)
        self._windows = Windows(scaling)
        self._models: list[nn.Module] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[loaders.PreparedLoader] = []
        self._custom_objects: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        missing_attribute(name)

    # ------------------------------------------------------------------------------------------ accumulating

    def accumulate(self, *models: nn.Module | Tensor) -> Accumulation:
        """A context manager for the forward, backward and optimizer step of one micro-batch.

        Args:
            models: those that are trained in it, as `prepare` returned them. Between processes, their gradients travel
                only in the micro-batch that closes the window.
        """
        return self._windows.of(models)

    def backward(self, loss: Tensor, items: Items = None, **options: Any) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: it is divided by ``gradient_accumulation_steps`` (for a shorter window by what that holds).
            items: what the loss is a mean over, e.g. its tokens: the step is then that of the mean over all items of
                the window on all processes. A number, or a tensor with one.
            options: of `torch.Tensor.backward`, e.g. ``retain_graph=True``.
        """
        self._windows.backward(loss, items, options)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch closes the window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, closes: bool) -> None:
        self.gradient_state.sync_gradients = closes

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many micro-batches close a window."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = GradientAccumulationPlugin(steps).num_steps

    @property
    def step(self) -> int:
        """How many micro-batches there were since the last loader ended."""
        return self._windows.step

    @step.setter
    def step(self, number: int) -> None:
        self._windows.step = number

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Let no gradient of the model travel in what is done inside."""
        if not any(p.requires_grad for p in model.parameters()) or not self.use_distributed:
            yield
            return
        sync = select_backend([model], sync="window", gather="micro", process_group=None, accumulate_dtype=None)
        sync.begin(last=False)
        try:
            yield
        finally:
            sync.end()

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Let the gradients travel in the backward done inside, though its forward was done under `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        saved = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = saved

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the norm of all given gradients together, over all shards; returns it as it was before."""
        found = self._unscaled(parameters, "clip_grad_norm_()")
        norm: Tensor = nn.utils.clip_grad_norm_(found, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every number of the given gradients."""
        nn.utils.clip_grad_value_(self._unscaled(parameters, "clip_grad_value_()"), clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale of fp16, once a window."""
        chosen = self._optimizers if optimizer is None else optimizer
        if (scaling := self._windows.scaling) is not None:
            self._windows.require_means("unscale_gradients()")
            for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
                scaling.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def _unscaled(self, parameters: Any, call: str) -> list[Tensor]:
        self._windows.require_means(call)
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if (scaling := self._windows.scaling) is not None:
            wanted = set(map(id, found))
            for optimizer in self._optimizers:
                if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                    scaling.unscale(optimizer.optimizer)
        return found

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether some optimizer's last step was left out."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # ------------------------------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Models, optimizers, loaders and schedulers, made ready for this process. Anything else comes back as it is.

        Args:
            objects: in any order; they are returned in that order.
            device_placement: for each object, whether it is moved to the device.
        """
        if device_placement is not None and len(device_placement) != len(objects):
            raise UsageError(
                f"device_placement has {len(device_placement)} entries for {len(objects)} objects: give one each."
            )
        places = [self.device_placement] * len(objects) if device_placement is None else device_placement
        before = models.places_of(given for given in objects if isinstance(given, nn.Module))
        made = list(objects)
        kinds: tuple[tuple[Any, Callable[[Any, bool], Any]], ...] = (
            (nn.Module, self.prepare_model),
            (DataLoader, self.prepare_data_loader),
            (Optimizer, lambda given, _: self._prepare_optimizer(given, before)),
            ((LRScheduler, ReduceLROnPlateau), lambda given, _: self.prepare_scheduler(given)),
        )
        for kind, prepare in kinds:  # in this order: a scheduler looks for its optimizer, an optimizer for its model
            for index, (given, place) in enumerate(zip(objects, places, strict=True)):
                if isinstance(given, kind):
                    made[index] = prepare(given, place)
        return tuple(made) if len(made) != 1 else made[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model on its device, in its precision, and wrapped or sharded where there are several processes."""
        if any(model is known for known in self._models):
            return model
        if self.mixed_precision != "no":
            models.compute_in(self.autocast, model)
        if self.device_placement if device_placement is None else device_placement:
            model = model.to(self.device)
        if self.use_distributed and not evaluation_mode and any(p.requires_grad for p in model.parameters()):
            if self._fsdp_plugin is None:
                model = models.replicated(model, self._ddp_options, self.state)
            else:
                model = models.sharded(model, self._fsdp_plugin, self.state)
        self._models.append(model)
        self._windows.forget()
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:  # noqa: ARG002
        """The optimizer, waiting for the end of each window."""
        return self._prepare_optimizer(optimizer, {})

    def _prepare_optimizer(self, optimizer: Optimizer, before: models.Places) -> AcceleratedOptimizer:
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        if self._fsdp_plugin is not None:
            models.point_to_shards(optimizer, before)
        windows = self._windows
        if windows.scaling is not None:
            windows.scaling.optimizers.append(optimizer)
        made = AcceleratedOptimizer(
            optimizer, scaling=windows.scaling, is_void=windows.is_void, before_clear=windows.require_stepped
        )
        windows.optimizers.append(made)
        return made

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """The scheduler, following its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        own = getattr(scheduler, "optimizer", None)
        optimizers = [one for one in self._optimizers if own is one or own is one.optimizer] or self._optimizers
        made = AcceleratedScheduler(
            scheduler, optimizers, follows=self.step_scheduler_with_optimizer, once=self.split_batches
        )
        self._schedulers.append(made)
        return made

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> loaders.PreparedLoader:
        """The loader, handing out this process's batches."""
        place = self.device_placement if device_placement is None else device_placement
        settings = self.dataloader_config
        share = Share(
            rank=self.process_index,
            world=self.num_processes,
            split=settings.split_batches,
            even=settings.even_batches,
        )
        made = loaders.prepared(data_loader, share, settings, self.device if place else None)
        if not any(made is known for known in self._dataloaders):
            self._dataloaders.append(made)
        return made

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """The loader without its first batches, for the epoch in which a run goes on."""
        return loaders.skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model as it was before `prepare`. (A sharded one stays sharded.)"""
        return models.unwrapped(model, keep_precision=keep_fp32_wrapper, keep_compiled=keep_torch_compile)

    # ------------------------------------------------------------------------------------------ this process

    @property
    def distributed_type(self) -> DistributedType:
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        return self.state.use_distributed

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def mixed_precision(self) -> str:
        return self.state.mixed_precision

    @property
    def split_batches(self) -> bool:
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.dataloader_config.even_batches = even

    @property
    def is_fsdp2(self) -> bool:
        return self._fsdp_plugin is not None

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._windows.optimizers

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute what is inside in the mixed precision that was asked for."""
        if (dtype := PRECISIONS[self.mixed_precision]) is None:
            yield
            return
        with torch.autocast(self.device.type, dtype):
            yield

    def print(self, *values: object, **options: Any) -> None:
        """Print, on one process of each machine."""
        if self.is_local_main_process:
            builtins.print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Until all processes are here."""
        self.state.wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        """The tensors of all processes, one after the other along the first dimension, in any nesting."""
        return gathering.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same, without the samples that were repeated to make the last batches even."""
        return gathering.gather_for_metrics(input_data, as_objects=use_gather_object)

    # ------------------------------------------------------------------------------------------ going on later

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too: whatever has a `state_dict` and a `load_state_dict`."""
        for one in objects:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise UsageError(f"{type(one).__name__} has no state_dict() and load_state_dict(): it cannot be saved.")
            self._custom_objects.append(one)

    def save_state(self, output_dir: str | os.PathLike[str]) -> str:
        """Save all that was prepared, and the random number generators, in a directory: without pickle.

        All processes must call it. Gradients are not saved: between two windows nothing is lost.
        """
        if self._windows.num_open:
            warnings.warn(
                f"save_state() inside a window: the gradients of {self._windows.num_open} micro-batches are not saved, "
                "and a run that goes on from here lacks them. Save where sync_gradients is True.",
                RuntimeWarning,
                stacklevel=2,
            )
        resuming.save(self._training(), Path(output_dir))
        return str(output_dir)

    def load_state(self, input_dir: str | os.PathLike[str]) -> None:
        """Go on from what `save_state` has saved, with the same objects prepared. Nothing that is read is executed."""
        training = self._training()
        resuming.load(training, Path(input_dir))
        self._windows.restart(training.step)

    def _training(self) -> resuming.Training:
        return resuming.Training(
            state=self.state,
            models=[self.unwrap_model(model, keep_torch_compile=False) for model in self._models],
            optimizers=[one.optimizer for one in self._optimizers],
            others={
                "scheduler": [one.scheduler for one in self._schedulers],
                "scaler": [] if self.scaler is None else [self.scaler],
                "loader": self._dataloaders,
                "custom": self._custom_objects,
            },
            step=self._windows.step,
        )

    def end_training(self) -> None:
        """Leave the group of processes, if it was this object that joined it."""
        if self.state.owns_group:
            self.wait_for_everyone()
            self.state.destroy_process_group()


def _require_ours(given: object, kind: type) -> None:
    """Settings of Accelerate, from an import line that was not changed, lack what is new here."""
    if given is not None and not isinstance(given, kind):
        raise UsageError(
            f"a {type(given).__name__} of {type(given).__module__} was given: import {kind.__name__} from "
            "macrobatch.accelerate."
        )


def _plugin(given: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    if given is None:
        return GradientAccumulationPlugin(int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)))
    if steps != 1:
        raise UsageError(
            f"gradient_accumulation_steps={steps} and a gradient_accumulation_plugin were both given: say it in the "
            f"plugin alone, GradientAccumulationPlugin(num_steps={steps})."
        )
    return given
