"""Backwards that reach what a forward has used, even where its loss leaves a part of it out.

Where a term is absent from a rank's micro-batch, its backward would not reach the modules that only that term uses. But
DDP and FSDP wait for all ranks' gradients of them. So the outputs of the model are tied to the loss with a gradient of
zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from macrobatch._cut.trees import leaves
from macrobatch._ranks.collectives import local_tensor


class OutputTies:
    """The outputs of a micro-batch's forwards, as scalars that are zero and hold no memory."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._hooks: list[RemovableHandle] = []
        self._ties: list[Tensor] = []

    def begin(self) -> None:
        """A forward comes."""
        self.end()
        self._hooks = [model.register_forward_hook(self._note) for model in self._models]

    def end(self) -> None:
        """Forget it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ties.clear()

    def tie(self, loss: Tensor | None) -> Tensor | None:
        """The same loss, whose backward reaches the outputs too; None where there is neither."""
        for tie in self._ties:
            loss = tie if loss is None else loss + tie.to(loss.device, loss.dtype)
        return loss

    def _note(self, _module: nn.Module, _args: Any, output: Any) -> None:
        for _, leaf in leaves(output, "output"):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point():
                self._ties.append(
                    local_tensor(leaf).reshape(-1)[:0].sum()
                )  # of nothing, so that its gradient is exactly zero
