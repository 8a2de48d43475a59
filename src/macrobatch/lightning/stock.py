"""Windows of one batch in one process, which are exact as Lightning runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from macrobatch._torch.tensors import wide
from macrobatch.lightning.outputs import countable, items_stated_by, loss_and_items, on_device
from macrobatch.lightning.schedule import wants_forwards_alone
from macrobatch.types import StepResult


class AsStock:
    """One batch a step in one process is exact, whatever its loss is: Lightning does everything, bit for bit.

    Args:
        trainer: the Trainer, which counts the steps.
        package: the package of Lightning that it comes from.
    """

    is_stock, is_broken, num_open = True, False, 0

    def __init__(self, trainer: Any, package: str) -> None:
        self._trainer = trainer
        self._package = package
        self._result: StepResult | None = None  # of the current batch

    def forward(self, run: Callable[[], Any], arguments: Sequence[Any], *, last: bool, alone: bool) -> Any:  # noqa: ARG002
        self._result = None
        output = run()
        if wants_forwards_alone(self._trainer, self._package):
            self._trainer.lightning_module.zero_grad()  # because Lightning steps anyway
            return output
        loss, given = loss_and_items(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return output  # Lightning raises the error, if it is one
        items = countable(given)
        self._result = StepResult(
            step=self._trainer.global_step + 1,
            micro_batches=1,
            loss=loss.detach().reshape(()).to(wide(loss.device), copy=True),
            items=items_stated_by(loss) if items is None else on_device(items, loss.device),
            grad_norm=None,
            lr=(),
            skipped=False if items is None else items == 0,
        )
        return output

    def backward(self) -> StepResult | None:
        return self._result

    def close(self) -> StepResult | None:
        return None

    def drop(self) -> None:
        self._result = None

    def is_void(self) -> bool:
        return self._result is not None and bool(self._result.skipped)

    @property
    def has_loss(self) -> bool:
        return self._result is not None

    def state_dict(self) -> dict[str, int | float]:
        return {"optimizer_step": self._trainer.global_step, "windows": self._trainer.global_step}

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Do nothing: the Trainer has restored its count."""
