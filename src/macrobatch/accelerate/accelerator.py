"""`Accelerator`: a subclass of Accelerate's own that accumulates gradients exactly."""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import accelerate.accelerator
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from macrobatch.accelerate.exactness import Exactness
from macrobatch.accelerate.micro_batch import MicroBatch
from macrobatch.accelerate.utils import GradientAccumulationPlugin as GradientAccumulationPlugin
from macrobatch.accelerate.windows import Windows
from macrobatch.errors import UsageError
from macrobatch.types import Items

logger = logging.getLogger("macrobatch")

# Engines that accumulate gradients themselves. Accelerate handles them.
THEIR_OWN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator`, with exact gradient accumulation.

    Use it in a program that is written for Accelerate: only the import changes. A *window* is the micro-batches of one
    optimizer step. Accelerate gives every micro-batch the same weight, and divides every window by
    ``gradient_accumulation_steps``. This class reads from each loss how many items it is a mean over, and gives every
    item of a window the same weight.

    >>> import torch
    >>> from macrobatch.accelerate import Accelerator
    >>> model = nn.Linear(2, 1)
    >>> accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    >>> batches = [torch.ones(3, 2), torch.full((1, 2), 5.0), torch.ones(2, 2)]
    >>> for x in accelerator.prepare(torch.utils.data.DataLoader(batches, batch_size=None)):
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(x).mean())
    ...         if accelerator.sync_gradients:
    ...             print(model.weight.grad.tolist())  # the mean over four samples, then over the two that are left
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    [[2.0, 2.0]]
    [[1.0, 1.0]]

    Args:
        arguments: the arguments of Accelerate's `Accelerator`, with the same meaning.
        exact: whether windows are exact: micro-batches are weighed by their items, and a short window is divided by the
            number of those that it has. False is Accelerate's arithmetic bit for bit, also where it is wrong. Default:
            the value in `GradientAccumulationPlugin`; if it has none, the environment variable MACROBATCH_EXACT (0 or
            1), then MACROBATCH_EXACT_REMAINDER; if neither is set, True.
        exact_remainder: the older name of ``exact``.
        options: the keyword arguments of Accelerate's `Accelerator`, with the same meaning.
    """

    def __init__(
        self, *arguments: Any, exact: bool | None = None, exact_remainder: bool | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._is_exact = Exactness(self.gradient_state, {"exact": exact, "exact_remainder": exact_remainder})
        self._begin_windows()
        self._accumulates_itself = self.distributed_type in THEIR_OWN
        self._has_warned = False

    def _begin_windows(self) -> None:
        self._windows = Windows(self.gradient_state, _ScalerOf(self), self._is_exact)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_windows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_windows()

    # ------------------------------------------------------------------------------------------ accumulating

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """A context manager for the forward, backward and optimizer step of one micro-batch.

        Args:
            models: the models that this micro-batch trains. Processes exchange their gradients only in the last
                micro-batch of the window.

        Returns:
            The context manager. Enter it once; call `accumulate` again for the next micro-batch.
        """
        if self._accumulates_itself:
            return super().accumulate(*models)  # type: ignore[no-any-return]
        return MicroBatch(self._windows, models, self._advance, self._hold)

    def backward(self, loss: Tensor, items: Items = None, **kwargs: Any) -> None:
        """Run the backward of a micro-batch, and add its gradient to the window.

        Args:
            loss: the loss of the micro-batch, a mean. The window divides it, so do not divide it yourself.
            items: the number of items, such as tokens, that the loss is a mean over: a number, or a tensor with one
                element. The step then uses the mean over all items of the window on all processes. Pass it for every
                micro-batch of a window or for none. Default: it is read from the graph of the loss. If that does not
                say it, every micro-batch has the same weight, and a warning says why.
            kwargs: arguments of `torch.Tensor.backward`, e.g. ``retain_graph=True``. They cannot be combined with
                ``items``.

        Raises:
            BatchError: the loss is not a scalar with a graph, only some micro-batches of a window have ``items``, these
                are not in proportion to what the losses are means over, or the items of a loss cannot be read after
                those of other, different ones were.
            UsageError: ``items`` is given outside of `accumulate`, or twice inside one `accumulate`.
        """
        if items is not None and kwargs:
            raise UsageError(f"backward(loss, items=...) takes no other options: got {', '.join(kwargs)}.")
        if self._accumulates_itself:
            super().backward(loss if items is None else self._weighed(loss, items), **kwargs)
        elif kwargs.keys() <= {"retain_graph", "create_graph", "inputs"}:
            self._windows.backward(loss, items, kwargs)
        else:  # an optimizer that steps in the backward, or a gradient that the program passes
            super().backward(loss, **kwargs)

    def _advance(self) -> bool:
        """Count a micro-batch that begins. Returns whether it is the last one of its window."""
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step, closes = 0, True
        else:
            self.step += 1
            closes = self.step % state.num_steps == 0
        self.sync_gradients = closes
        return closes

    def _hold(self, micro_batch: MicroBatch) -> AbstractContextManager[object] | None:
        """A context in which processes exchange no gradients; None if this micro-batch is to exchange them."""
        if micro_batch.closes or not self.use_distributed or self.gradient_state.plugin_kwargs.get("sync_each_batch"):
            return None
        held = ExitStack()
        for model in (
            micro_batch.models if self._is_exact() else micro_batch.given
        ):  # Accelerate does not look into lists
            if isinstance(model, nn.Module):
                held.enter_context(self.no_sync(model))
        return held

    def _weighed(self, loss: Tensor, items: Items) -> Tensor:
        """Weight a loss for DeepSpeed, which hides its gradients: possible only if a window is one micro-batch."""
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
        """Clip the gradients of the given parameters, by their common norm.

        In the last micro-batch of a window it clips. In the others it only measures, because the gradient of the window
        is not complete yet; the log says so once.

        Args:
            parameters: a tensor, or an iterable of tensors, whose gradients are clipped.
            max_norm: the largest norm that the gradients may have.
            norm_type: the type of the norm.

        Returns:
            The norm before clipping.

        Raises:
            UsageError: it is called in the middle of a window whose gradients are not means yet: with ``items``, or
                under fp16.
        """
        clipped = _listed(parameters)
        may_clip = self._may_clip("clip_grad_norm_()", clipped)
        return super().clip_grad_norm_(clipped, max_norm if may_clip else math.inf, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the given gradients. It has an effect only in the last micro-batch of a window.

        Args:
            parameters: a tensor, or an iterable of tensors, whose gradients are clipped.
            clip_value: the largest absolute value that an element may have.

        Raises:
            UsageError: it is called in the middle of a window whose gradients are not means yet: with ``items``, or
                under fp16.
        """
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
        """Divide the gradients by the loss scale of fp16. Call it only in the last micro-batch of a window.

        Args:
            optimizer: the prepared optimizer, or a list of them, whose gradients are divided. Default: all of them.

        Raises:
            UsageError: it is called in the middle of a window, with ``items`` or under fp16.
        """
        if not self._accumulates_itself and self._is_exact():
            self._windows.require_means("unscale_gradients()")
        super().unscale_gradients(optimizer)

    # ------------------------------------------------------------------------------------------ preparing and saving

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Accelerate's `prepare`. It also registers the prepared objects for exact accumulation."""
        return self._adopt(super().prepare(*args, **options))

    def prepare_model(self, *args: Any, **options: Any) -> Any:
        """Accelerate's `prepare_model`. It also registers the model for exact accumulation."""
        return self._adopt(super().prepare_model(*args, **options))

    def prepare_optimizer(self, *args: Any, **options: Any) -> Any:
        """Accelerate's `prepare_optimizer`. The optimizer's `step` and `zero_grad` then work once per window."""
        return self._adopt(super().prepare_optimizer(*args, **options))

    def _adopt(self, prepared: Any) -> Any:
        if not self._accumulates_itself:
            self._windows.adopt(prepared if isinstance(prepared, tuple | list) else [prepared])
        return prepared

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Accelerate's `save_state`. It warns in the middle of a window, because gradients are not saved."""
        if num_open := self._windows.num_open:
            warnings.warn(
                f"save_state() inside a window: the gradients of its {num_open} micro-batches are not saved.",
                stacklevel=2,
            )
        return super().save_state(*args, **options)

    def load_state(self, *args: Any, **options: Any) -> Any:
        """Accelerate's `load_state`. It also drops the gradients that were accumulated before."""
        loaded = super().load_state(*args, **options)
        self._windows.restart()
        return loaded

    def free_memory(self, *objects: Any) -> Any:
        """Accelerate's `free_memory`. It also drops the open window and the registered objects."""
        self._windows.forget()
        return super().free_memory(*objects)


class _ScalerOf:
    """Returns the GradScaler of an `Accelerator`, which it does not keep alive. A program may replace the scaler."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)

    def __call__(self) -> Any:
        accelerator = self._accelerator()
        return None if accelerator is None else accelerator.scaler


def __getattr__(name: str) -> Any:
    return getattr(accelerate.accelerator, name)


def _listed(parameters: Any) -> list[Tensor]:
    """One parameter or several, as a list."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
