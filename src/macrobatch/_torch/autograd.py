"""Autograd: run a backward without its checks, and find out which backward is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd
import torch.autograd.graph
from torch import Tensor

from macrobatch._torch.tensors import has_accelerator
from macrobatch.errors import UsageError

# The type of node that adds to the gradient of a leaf, at the end of a graph.
AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

# The last line of `torch.autograd.backward`; None if torch has no such function any more. It saves the context of the
# program for the threads of devices. Without a device, the engine itself is enough, and saves 5 us.
_RUN = "_engine_run_backward"
engine_run_backward: Callable[..., Any] | None = getattr(torch.autograd.graph, _RUN, None)

run_on_host = torch.autograd.Variable._execution_engine.run_backward

# The number of the backward that runs this code; -1 outside of any backward.
backward_under_way: Callable[[], int] = torch._C._current_graph_task_id


def run_backward(loss: Tensor, seed: Tensor, inputs: Sequence[Tensor] | None = None) -> None:
    """Run ``torch.autograd.backward`` without its checks, which take as long as the backward of a small layer."""
    if type(loss) is Tensor and engine_run_backward is not None:
        run = engine_run_backward if has_accelerator() else run_on_host
        run((loss,), (seed,), False, False, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(loss, seed, inputs=inputs)


@contextlib.contextmanager
def watching_backwards(see: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]) -> Iterator[None]:
    """Inside this context, `see` gets the losses and their seeds before each backward of the program, however called.

    Not those of `run_backward`, those inside of another, or `torch.autograd.grad`.
    """
    original = getattr(torch.autograd, _RUN, None)
    if original is None:
        yield
        return

    def seeing(losses: Sequence[Tensor], seeds: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad") and backward_under_way() == -1:
            see(losses, seeds)
        return original(losses, seeds, *args, **kwargs)

    setattr(torch.autograd, _RUN, seeing)
    try:
        yield
    finally:
        setattr(torch.autograd, _RUN, original)


def queue_callback(callback: Callable[[], None]) -> None:
    """Run this when the current backward ends. Callbacks run in the order in which they were queued."""
    queue = getattr(torch.autograd.graph, "queue_callback", None)  # public since torch 2.15
    (queue or torch.autograd.Variable._execution_engine.queue_callback)(callback)


def python_function_of(node: type) -> Any:
    """The `torch.autograd.Function` of a type of backward nodes; None for other nodes."""
    return getattr(node, "_forward_cls", None)


def factor_of(product: Tensor) -> Tensor | None:
    """The second factor of a product, if its graph has saved it."""
    factor = getattr(product.grad_fn, "_saved_other", None)
    return factor if isinstance(factor, Tensor) else None


def is_mapped() -> bool:
    """Whether this code runs inside `torch.func.vmap`. Then no tensor has values."""
    vmap = torch._C._functorch.TransformType.Vmap
    return any(transform.key() == vmap for transform in torch._C._functorch.get_interpreter_stack() or ())


def only_first(
    gradients: Iterable[Tensor | None], inputs: Sequence[Tensor | None], message: str
) -> list[Tensor | None]:
    """First derivatives that depend on these inputs. Differentiating them again is an error with this message."""
    # With torch's `once_differentiable`, they would count as constants if the seed of the backward is a constant.
    if not torch.is_grad_enabled():  # without create_graph=True
        return list(gradients)
    return [
        gradient if gradient is None else _OnlyFirst.apply(gradient, message, *inputs)  # type: ignore[no-untyped-call]
        for gradient in gradients
    ]


class _OnlyFirst(torch.autograd.Function):
    """A gradient that depends on the inputs of a loss, but cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, message: str, *_inputs: Tensor | None) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_seeds: Tensor) -> None:
        raise UsageError(ctx.message)
