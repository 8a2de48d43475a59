"""`Accumulator`: you drive the micro-batches, it makes one exact optimizer step of each window.

It is epochs and their order on the engine of `_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._step.assembly import engine_for
from macrobatch._step.denominators import TermCounter
from macrobatch._step.epochs import Epochs
from macrobatch._step.turns import Turn
from macrobatch._step.validation import checked_choice, checked_counts, checked_switch
from macrobatch.errors import UsageError
from macrobatch.types import Counts, Items, NonFinite, Reduction, Remainder, StepResult, Terms, When

Batch = TypeVar("Batch")


class Accumulator:
    """Accumulates gradients over micro-batches and takes exactly the step of the one big batch.

    >>> import torch
    >>> from torch import nn
    >>> from macrobatch import Accumulator
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> loader = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (5, 2, 7, 4, 1)]
    >>> acc = Accumulator(model, optimizer, steps=2, max_norm=1.0)
    >>> for x, y in acc.batches(loader):
    ...     loss = nn.functional.mse_loss(model(x), y)  # a mean over the micro-batch
    ...     acc.backward(loss, items=len(x))
    ...     if result := acc.step():                    # None until the window closes
    ...         print(result.step, result.micro_batches, result.items.item())
    1 2 7
    2 2 11
    3 1 1

    Until `step`, ``.grad`` holds an undivided sum: clipping, unscaling or clearing it by hand is an error.

    Args:
        model: a module, or a list of modules, compiled or not.
        optimizer: one or a list. They may hold parameters of the given models only.
        steps: micro-batches in a window: an int, or ``f(optimizer_step) -> int`` for a ramp.
        scheduler: one or a list, stepped once for each optimizer step that is taken.
        max_norm: clips the norm of all parameters of all given models together.
        scaler: a ``torch.amp.GradScaler``. Its scale stays constant inside a window; an overflow skips the step.
        reduction: "mean" or "sum": what the losses handed to `backward` are.
        sync: "window" or "micro": when gradients travel between ranks. In one process they never do.
        gather: "window" or "micro": how long FSDP2 keeps parameters gathered.
        remainder: what becomes of a short last window: "step" (exactly scaled), "drop", "carry" into the next epoch.
        accumulate_dtype: sums the gradients of lower-precision parameters in this dtype, e.g. ``torch.float32``.
        nonfinite: what an infinite or NaN gradient does. "raise": noticed on the device without stalling it, so there
            the error may come when the next window closes; it names the window, and a fused optimizer does not take
            the poisoned step. "skip": nothing changes, and the result says so. "keep": no check.
        process_group: the ranks to average over.
        counts: for losses of several terms: ``counts(batch)`` returns the items of each, by name. `batches` then reads
            the batches of a window before it hands out the first, and `backward` takes a dict.
        joint: a loss of the whole batch is for `MacroStep`; here it is an error.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        steps: int | Callable[[int], int] = 1,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        max_norm: float | None = None,
        scaler: GradScaler | None = None,
        reduction: Reduction = "mean",
        sync: When = "window",
        gather: When = "micro",
        remainder: Remainder = "step",
        accumulate_dtype: torch.dtype | None = None,
        nonfinite: NonFinite = "raise",
        process_group: object = None,
        counts: Counts | None = None,
        joint: None = None,
    ) -> None:
        if joint is not None:
            raise UsageError(
                "joint= is for MacroStep, which gets the whole batch: a loss of all samples needs two passes over "
                "them. Use MacroStep(model, optimizer, loss_fn, joint=joint)."
            )
        if optimizer is None:
            raise UsageError(
                "Accumulator needs the optimizer that it steps with: got None. To step by yourself, use "
                "MacroStep(model, None, loss_fn), which leaves the mean gradient in .grad."
            )
        remainder = checked_choice("remainder", remainder, Remainder)
        self._has_terms = checked_counts(counts) is not None
        if self._has_terms and remainder == "carry":
            raise UsageError(
                'remainder="carry" cannot go with counts=: the denominators of a window must be known before its first '
                'backward, but the next epoch is not there yet. Use remainder="step", which is exact, or "drop".'
            )
        self._engine = engine_for(
            model,
            optimizer,
            steps=steps,
            drops_short=remainder == "drop",
            scheduler=scheduler,
            max_norm=max_norm,
            scaler=scaler,
            reduction=reduction,
            sync=sync,
            gather=gather,
            accumulate_dtype=accumulate_dtype,
            nonfinite=nonfinite,
            process_group=process_group,
            has_terms=self._has_terms,
        )
        counter = None if counts is None else TermCounter(counts, self._engine.backend, lambda: self._engine.device)
        self._epochs = Epochs(self._engine, remainder, counter)

    # ------------------------------------------------------------------------------------------ the main path

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of `loader`, each to be followed by its `backward` and by `step`.

        A loader with a length is not read ahead; any other iterable is, by one batch, to know where it ends. With
        ``counts``, the batches of a window are all read before the first is handed out.

        Args:
            loader: any iterable of batches. Ranks may have loaders of different lengths.

        Returns:
            An iterator over the batches, with a length where the loader has one.

        Raises:
            UsageError: if a window is open that has had no `step`.
            BatchError: while iterating, if the loader is empty or yields another number of batches than its length.
        """
        return self._epochs.begin(loader)

    def backward(self, loss: Tensor | Terms, items: Items = None) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: of the micro-batch: a mean over its items, or their sum (``reduction``). With ``counts``, a dict of
                terms, ``{name: (loss, items)}``; terms that the micro-batch does not have may be left out.
            items: what the loss is a mean over: an int, or a tensor with one number, which the host does not wait for.
                None weighs every micro-batch the same; sums are then divided by the number of micro-batches.

        Raises:
            UsageError: if no micro-batch is under way, or if somebody has changed the accumulated gradients.
            BatchError: if the loss is no scalar with a graph that reaches a parameter, or the items are no count.
            BackendError: if a gradient would stay unsynchronised between ranks.
        """
        self._engine.backward(loss, items)

    def step(self, now: bool = False) -> StepResult | None:
        """Take the optimizer step if the window is complete, else return None.

        Args:
            now: close the open window as it stands, e.g. after the last epoch under ``remainder="carry"``.

        Returns:
            What became of the window; None until it is complete.

        Raises:
            UsageError: if it is called before `backward`, or if somebody has changed the accumulated gradients.
            NonFiniteError: if a gradient of the window, or of the one before, is infinite or NaN.
            BatchError: if the items of a term do not add up to what ``counts`` said.
        """
        checked_switch("now", now)
        if now and self._has_terms and self._engine.has_accumulated and not self._engine.is_last:
            raise UsageError(
                "step(now=True) in an unfinished window of terms: its gradients are divided by what counts= said of "
                "all its batches. Take the others too, or drop it with discard(): the batches already read begin the "
                "next."
            )
        return self._engine.close(now)

    def discard(self) -> None:
        """Drop the open window and its gradients. A batch that has had no `backward` yet begins a new one."""
        self._engine.discard()
        self._epochs.recount()

    @contextlib.contextmanager
    def micro_batch(self, last: bool | None = None) -> Iterator[None]:
        """The forward and `backward` of one micro-batch, for loops without a loader.

        >>> model = nn.Linear(2, 1)
        >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        >>> for _ in range(2):
        ...     with acc.micro_batch():
        ...         acc.backward(model(torch.ones(4, 2)).mean(), items=4)
        ...     result = acc.step()
        >>> result.items
        tensor(8)

        Args:
            last: whether this one closes the window; None: ``steps`` decides.
        """
        if self._has_terms:
            raise UsageError(
                "micro_batch() cannot go with counts=: the batches of a window are read before its first backward. "
                "Iterate over acc.batches(loader)."
            )
        if last is not None:
            checked_switch("last", last)
        with self._engine.micro_batch(Turn(last, is_told=last is not None)):
            yield

    # ------------------------------------------------------------------------------------------ what one can ask

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch closes the window."""
        return self._engine.is_last

    @property
    def is_repeat(self) -> bool:
        """Whether the current batch is one that this rank has had before, as it ran out and others did not."""
        return self._engine.is_repeat

    @property
    def optimizer_step(self) -> int:
        """How many optimizer steps were taken."""
        return self._engine.closing.taken

    def state_dict(self) -> dict[str, int | float]:
        """What to save beside model, optimizer, scheduler and scaler: plain numbers. Only between windows.

        Under a scaler that includes the typical number of items of a micro-batch, by which sums are pre-scaled.
        """
        return self._engine.state()

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from what `state_dict` gave. Only between windows."""
        self._engine.load_state(state)
