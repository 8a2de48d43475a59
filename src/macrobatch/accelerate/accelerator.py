"""`Accelerator`: Accelerate's own, but for accumulation."""

from __future__ import annotations

import logging
import math
import os
import warnings
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import accelerate.accelerator
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from macrobatch.accelerate.utils import GradientAccumulationPlugin as GradientAccumulationPlugin
from macrobatch.accelerate.windows import MicroBatch, Windows
from macrobatch.errors import UsageError
from macrobatch.types import Items

logger = logging.getLogger("macrobatch")

# Engines that accumulate by themselves: what they do is left to Accelerate.
THEIR_OWN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator` with exact windows.

    >>> import torch
    >>> from macrobatch.accelerate import Accelerator
    >>> model = nn.Linear(2, 1)
    >>> accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    >>> for x in accelerator.prepare(torch.utils.data.DataLoader(torch.ones(6, 2))):
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(x).mean())
    ...         if accelerator.sync_gradients:
    ...             print(model.bias.grad.item())  # of four micro-batches, and of the two that are left
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    1.0
    1.0

    Args:
        arguments: all of Accelerate's.
        exact_remainder: divide a short window by the micro-batches that it holds. False divides by
            ``gradient_accumulation_steps``, as Accelerate does: bitwise its results, where they are wrong too. None:
            what `GradientAccumulationPlugin` says, else the environment variable MACROBATCH_EXACT_REMAINDER, else True.
    """

    def __init__(self, *arguments: Any, exact_remainder: bool | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._exact_remainder = exact_remainder
        self._default = os.environ.get("MACROBATCH_EXACT_REMAINDER", "1").lower() not in ("0", "false", "no")
        self._windows = Windows(self.gradient_state, self._current_scaler, self._is_exact)
        self._accumulates_itself = self.distributed_type in THEIR_OWN
        self._has_warned = False

    # ------------------------------------------------------------------------------------------ accumulating

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """A context manager for the forward, backward and optimizer step of one micro-batch.

        Args:
            models: those that are trained in it. Their gradients travel in the micro-batch that closes the window.
        """
        if self._accumulates_itself:
            return super().accumulate(*models)  # type: ignore[no-any-return]
        return MicroBatch(self._windows, models, self._advance, self._hold)

    def backward(self, loss: Tensor, items: Items = None, **kwargs: Any) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: it is divided by ``gradient_accumulation_steps`` (for a shorter window by what that holds).
            items: what the loss is a mean over, e.g. its tokens: the step is then that of the mean over all items of
                the window on all processes. A number, or a tensor with one.
            kwargs: of `torch.Tensor.backward`, e.g. ``retain_graph=True``.

        Raises:
            BatchError: the loss is no scalar with a graph, or items are given for some micro-batches of a window only.
            UsageError: items are given outside of `accumulate()`, or twice inside one.
        """
        if items is not None and kwargs:
            raise UsageError(f"backward(loss, items=...) takes no other options: got {', '.join(kwargs)}.")
        if self._accumulates_itself:
            super().backward(loss if items is None else self._weighed(loss, items), **kwargs)
        elif kwargs.keys() <= {"retain_graph", "create_graph", "inputs"}:
            self._windows.backward(loss, items, kwargs)
        else:  # an optimizer that steps in the backward, or a gradient of the program's own
            super().backward(loss, **kwargs)

    def _advance(self) -> bool:
        """Move the counter on; returns whether the micro-batch that begins closes its window."""
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step, closes = 0, True
        else:
            self.step += 1
            closes = self.step % state.num_steps == 0
        self.sync_gradients = closes
        return closes

    def _hold(self, micro_batch: MicroBatch) -> AbstractContextManager[object] | None:
        """Keep gradients from travelling before the window closes, unless every micro-batch is to send them."""
        if micro_batch.closes or not self.use_distributed or self.gradient_state.plugin_kwargs.get("sync_each_batch"):
            return None
        held = ExitStack()
        for model in (
            micro_batch.models if self._is_exact() else micro_batch.given
        ):  # Accelerate does not look into lists
            if isinstance(model, nn.Module):
                held.enter_context(self.no_sync(model))
        return held

    def _current_scaler(self) -> Any:
        return self.scaler

    def _is_exact(self) -> bool:
        """Whether windows of any length are brought to their mean."""
        if self._exact_remainder is not None:
            return self._exact_remainder
        said: bool | None = self.gradient_state.plugin_kwargs.get("exact_remainder")
        return self._default if said is None else said

    def _weighed(self, loss: Tensor, items: Items) -> Tensor:
        """Where gradients are out of reach until the step: exact only if they need no scale that comes later."""
        if self.distributed_type is not DistributedType.DEEPSPEED or self.gradient_accumulation_steps > 1:
            raise UsageError(
                f"backward(loss, items=...) under {self.distributed_type.value}, with windows of "
                f"{self.gradient_accumulation_steps}: it holds gradients back, so they cannot be divided by items that "
                "are known when the window closes. Leave items out, or use DDP or FSDP."
            )
        count = torch.as_tensor(items, dtype=torch.float64, device=self.device).detach().reshape(())
        total, processes = self.reduce(torch.stack([count, torch.ones_like(count)]), reduction="sum")
        return loss.mul((count * processes / total.clamp(min=1)).to(loss))  # DeepSpeed averages over the processes

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of all given gradients together; returns it as it was before.

        Inside a window, where no optimizer steps, it only measures: clipped parts do not add up to a clipped whole.
        """
        clipped = _listed(parameters)
        may_clip = self._may_clip("clip_grad_norm_()", clipped)
        return super().clip_grad_norm_(clipped, max_norm if may_clip else math.inf, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every number of the given gradients; inside a window, where the optimizer does not step, nothing."""
        clipped = _listed(parameters)
        if self._may_clip("clip_grad_value_()", clipped):
            super().clip_grad_value_(clipped, clip_value)

    def _may_clip(self, call: str, parameters: list[Tensor]) -> bool:
        if self._accumulates_itself or not self._is_exact():
            return True
        self._windows.require_means(call)
        if not (self.sync_gradients or self._has_warned):
            self._has_warned = True
            logger.warning("%s clips nothing inside a window: put it under `if accelerator.sync_gradients:`", call)
        if self.sync_gradients:
            self._windows.complete(parameters)
        return bool(self.sync_gradients)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale of fp16, once a window."""
        if not self._accumulates_itself and self._is_exact():
            self._windows.require_means("unscale_gradients()")
        super().unscale_gradients(optimizer)

    # ------------------------------------------------------------------------------------------ preparing and saving

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Accelerate's; the windows get to know what was prepared."""
        return self._adopt(super().prepare(*args, **options))

    def prepare_model(self, *args: Any, **options: Any) -> Any:
        """Accelerate's; the windows get to know it."""
        return self._adopt(super().prepare_model(*args, **options))

    def prepare_optimizer(self, *args: Any, **options: Any) -> Any:
        """Accelerate's; its `step` and `zero_grad` ask the windows."""
        return self._adopt(super().prepare_optimizer(*args, **options))

    def _adopt(self, prepared: Any) -> Any:
        if not self._accumulates_itself:
            self._windows.adopt(prepared if isinstance(prepared, tuple | list) else [prepared])
        return prepared

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Accelerate's; warns if a window is open, for gradients are not saved."""
        if num_open := self._windows.num_open:
            warnings.warn(
                f"save_state() inside a window: the gradients of its {num_open} micro-batches are not saved.",
                stacklevel=2,
            )
        return super().save_state(*args, **options)

    def load_state(self, *args: Any, **options: Any) -> Any:
        """Accelerate's; what is accumulated belongs to the state before, and is dropped."""
        loaded = super().load_state(*args, **options)
        self._windows.restart()
        return loaded

    def free_memory(self, *objects: Any) -> Any:
        """Accelerate's; the windows forget everything, too."""
        self._windows.forget()
        return super().free_memory(*objects)


def __getattr__(name: str) -> Any:
    return getattr(accelerate.accelerator, name)


def _listed(parameters: Any) -> list[Tensor]:
    """As torch's clipping takes them: one, or several."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
