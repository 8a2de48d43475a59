"""Makes backwards reach all outputs of the models, where ranks wait for gradients of modules that one does not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._cut.trees import leaves
from macrobatch._ranks.backend import Local
from macrobatch._ranks.collectives import local_tensor
from macrobatch.errors import BatchError


class OutputTies:
    """Adds the outputs of a forward that a loss does not reach to it, with a gradient of zero.

    A micro-batch that lacks a term does not reach the modules of that term, but DDP and FSDP wait for their gradients.
    """

    def __init__(self, models: Sequence[nn.Module], backend: Local) -> None:
        self._models = models
        self._backend = backend
        self._hooks: list[RemovableHandle] = []
        # By the node and output number of each output in the graph: a zero computed from it without memory.
        self._outputs: dict[tuple[Any, int], Tensor] = {}

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

    def tie(self, loss: Tensor | None, *, lacks: bool) -> Tensor | None:
        """The same loss, but its backward reaches all outputs that other ranks wait for. `lacks`: a term is absent."""
        # Under FSDP all ranks must reach the same modules, in every micro-batch; under DDP all that its reducer awaits.
        is_awaited = lacks and self._backend.will_check
        if self._backend.abilities.leaves_are_parameters and not is_awaited:
            return loss
        reached = set() if loss is None else self._reached_by(loss)
        for edge, zero in self._outputs.items():
            if edge not in reached:
                loss = zero if loss is None else loss + zero.to(loss.device, loss.dtype)
        if loss is None:
            raise BatchError(
                "a micro-batch has no term at all, and has not called the model, but all ranks must run the same "
                "backward. Call the model, or return a term with its loss and 0 items."
            )
        return loss

    def _reached_by(self, loss: Tensor) -> set[tuple[Any, int]]:
        """The edges of the graph behind a loss. The walk stops at the outputs."""
        seen, pending = {(loss.grad_fn, 0)}, [loss.grad_fn]
        expanded = {node for node, _ in self._outputs}
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
                self._outputs[leaf.grad_fn, leaf.output_nr] = zero
