"""Backwards that reach all that a forward has used, even where the loss leaves a part of it out.

Where a term is absent from a rank's micro-batch, its backward would not reach the modules that only that term uses. But
DDP and FSDP wait for all ranks' gradients of them. So outputs of the model that the loss does not reach are tied to it
with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._cut.trees import leaves
from macrobatch._ranks.collectives import local_tensor


class Output(NamedTuple):
    """An output of a forward: where it is in the graph, and a scalar made of it that is zero and holds no memory."""

    node: Any
    number: int
    zero: Tensor


class OutputTies:
    """The outputs of a micro-batch's forwards."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._hooks: list[RemovableHandle] = []
        self._outputs: list[Output] = []

    def begin(self) -> None:
        """A forward comes."""
        self.end()
        self._hooks = [model.register_forward_hook(self._note) for model in self._models]

    def end(self) -> None:
        """Forget it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._outputs.clear()

    def tie(self, loss: Tensor | None) -> Tensor | None:
        """The same loss, whose backward reaches all outputs; None where there is neither."""
        if not self._outputs:
            return loss
        reached = set() if loss is None else self._reached_by(loss)
        for node, number, zero in self._outputs:
            if (node, number) not in reached:
                loss = zero if loss is None else loss + zero.to(loss.device, loss.dtype)
        return loss

    def _reached_by(self, loss: Tensor) -> set[tuple[Any, int]]:
        """The edges of the graph behind a loss, up to the outputs: what lies behind those is not walked."""
        ends, seen = {output.node for output in self._outputs}, {(loss.grad_fn, 0)}
        pending, expanded = [loss.grad_fn], set(ends)
        while pending:
            node = pending.pop()
            if node is None or node in expanded:
                continue
            expanded.add(node)
            for edge in node.next_functions:
                seen.add(edge)
                pending.append(edge[0])
        return seen

    def _note(self, _module: nn.Module, _args: Any, output: Any) -> None:
        for _, leaf in leaves(output, "output"):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None and leaf.is_floating_point():
                zero = local_tensor(leaf).reshape(-1)[:0].sum()  # of nothing, so that its gradient is exactly zero
                self._outputs.append(Output(leaf.grad_fn, leaf.output_nr, zero))
