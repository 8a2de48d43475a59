"""Makes a backward reach all outputs of a forward, even if the loss does not use some of them.

If a rank's micro-batch lacks a term, its backward would not reach the modules that only this term uses. But DDP and
FSDP wait for the gradients of these modules from all ranks. So the outputs of the model that the loss does not reach
are added to it, with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._cut.trees import leaves
from macrobatch._ranks.collectives import local_tensor


class Output(NamedTuple):
    """An output of a forward: its node and output number in the graph, and a zero computed from it without memory."""

    node: Any
    number: int
    zero: Tensor


class OutputTies:
    """The outputs of the forwards of a micro-batch."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._hooks: list[RemovableHandle] = []
        self._outputs: list[Output] = []

    def begin(self) -> None:
        """Start to note outputs, before a forward."""
        self.end()
        self._hooks = [model.register_forward_hook(self._note) for model in self._models]

    def end(self) -> None:
        """Stop, and forget the outputs."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._outputs.clear()

    def tie(self, loss: Tensor | None) -> Tensor | None:
        """The same loss, but its backward reaches all outputs; None if there is neither a loss nor an output."""
        if not self._outputs:
            return loss
        reached = set() if loss is None else self._reached_by(loss)
        for node, number, zero in self._outputs:
            if (node, number) not in reached:
                loss = zero if loss is None else loss + zero.to(loss.device, loss.dtype)
        return loss

    def _reached_by(self, loss: Tensor) -> set[tuple[Any, int]]:
        """The edges of the graph behind a loss. The walk stops at the outputs."""
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
                zero = local_tensor(leaf).reshape(-1)[:0].sum()  # of no elements: its gradient is exactly zero
                self._outputs.append(Output(leaf.grad_fn, leaf.output_nr, zero))
