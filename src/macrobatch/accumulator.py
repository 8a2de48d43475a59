"""`Accumulator`: gradient accumulation in your own loop over micro-batches, with exact optimizer steps.

The engine in `_engine` accumulates the gradients. `Accumulator` adds the iteration over a data loader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from macrobatch._assembly import engine_for
from macrobatch._border.arguments import checked_choice, checked_counts, checked_switch, refuse_total
from macrobatch._border.uncopied import Uncopied
from macrobatch._checks import catalogue
from macrobatch._checks.weights import EqualWeights
from macrobatch._engine.engine import Engine
from macrobatch._engine.totals import MicroPlan
from macrobatch._loop.epochs import Epochs
from macrobatch._terms.denominators import TermCounter
from macrobatch._terms.mean import Mean
from macrobatch._terms.objective import Terms as SeveralTerms
from macrobatch.errors import UsageError
from macrobatch.types import Counts, Gather, Items, NonFinite, Reduction, Remainder, StepResult, Terms, When

Batch = TypeVar("Batch")


class Accumulator(Uncopied):
    """Accumulates gradients in your own loop, and takes the optimizer step of the whole batch.

    Use it if your loop goes over micro-batches. The micro-batches of one optimizer step are a *window*. When a window
    is complete, `step` steps the optimizer with the gradient that all samples of the window would have in one big
    batch.

    >>> import torch
    >>> from torch import nn
    >>> from macrobatch import Accumulator
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> loader = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (5, 2, 7, 4, 1)]
    >>> acc = Accumulator(model, optimizer, steps=2, max_norm=1.0)
    >>> for x, y in acc.batches(loader):
    ...     loss = nn.functional.mse_loss(model(x), y)  # a mean over the micro-batch
    ...     acc.backward(loss)                          # over how many items is read from its graph
    ...     if result := acc.step():                    # None until the window closes
    ...         print(result.step, result.micro_batches, result.items.item())
    1 2 7
    2 2 11
    3 1 1

    In the middle of a window, ``.grad`` holds a sum that is not divided yet. Do not clip, unscale or clear it, and do
    not step the optimizer yourself: each of these raises an error.

    Args:
        model: the module to train, or a list of modules. They may be compiled, or wrapped in DDP or FSDP.
        optimizer: an optimizer, or a list of optimizers: of torch, or any object with ``step``, ``zero_grad`` and
            ``param_groups``. They may hold only parameters of the given models, and leaf tensors that are no
            parameters, such as a temperature.
        steps: the number of micro-batches in a window. To change it during training, pass a function
            ``f(optimizer_step) -> int``; its argument is the number of optimizer steps taken so far.
        scheduler: a learning-rate scheduler, or a list of schedulers. `step` steps them once for each optimizer step
            that it takes, so do not step them yourself. (Of timm's, it calls ``step_update``; ``step(epoch)`` stays
            yours.) Default: none.
        max_norm: clip the gradients to this norm, taken over all parameters of all given models together. ``math.inf``
            only measures the norm. Default: do not clip, and do not measure.
        scaler: a ``torch.amp.GradScaler`` for float16. Its scale stays constant inside a window. If the gradients
            overflow, the step is skipped. Default: none.
        reduction: whether the losses that you pass to `backward` are a "mean" over items, a "sum" over items, whose
            mean is the loss of the window, or a "total": then the loss of the window is their sum, divided by nothing.
        sync: when ranks exchange gradients: once per window ("window"), or in every micro-batch ("micro", which needs
            less memory under FSDP). It has no effect in a single process.
        gather: for FSDP2 only: gather the parameters for every micro-batch ("micro"), or keep them gathered until the
            window closes ("window", which communicates less but needs more memory). "auto" measures the free memory,
            keeps them where all ranks have enough, and writes to the log what it chose.
        remainder: what to do with a last window that has fewer than ``steps`` micro-batches: take its step, with the
            right divisor ("step"), drop its gradients ("drop"), or complete it in the next epoch ("carry").
        accumulate_dtype: the dtype in which the gradients of lower-precision parameters are summed, e.g.
            ``torch.float32`` for bfloat16 parameters. Default: gradients keep their own dtype.
        nonfinite: what to do if a gradient is infinite or NaN. "raise": raise a `NonFiniteError`. On a GPU, the error
            may come only when the next window closes, because the host does not wait for the device; it names the
            window, and a fused optimizer does not take the bad step. "skip": take no step, and report it in
            ``StepResult.skipped``. "keep": do not check. With a ``scaler``, it is always "skip".
        process_group: the ranks that have different data, whose gradients are averaged: a process group, or a
            dimension of a ``DeviceMesh``. Default: the ranks of the model's DDP or FSDP wrapper.
        counts: for a loss of several terms that have different numbers of items: ``counts(batch)`` returns the number
            of items of each term in a batch, as a dict by name. With it, `batches` reads all batches of a window
            before it yields the first one, and `backward` takes a dict. Default: the loss has one term.
        joint: not supported here, and an error: for a loss that compares samples with each other, use `MacroStep`.

    Raises:
        UsageError: an argument is invalid, or two arguments contradict each other.
        BackendError: the model, the optimizer or the installed torch does not support what you asked for.
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
        gather: Gather = "micro",
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
        if self._has_terms:
            refuse_total(reduction, "counts=")
        if self._has_terms and remainder == "carry":
            raise UsageError(
                'remainder="carry" cannot go with counts=: the denominators of a window must be known before its first '
                'backward, but the next epoch is not there yet. Use remainder="step", which is exact, or "drop".'
            )
        fixed_steps = steps if isinstance(steps, int) else None
        weights = EqualWeights() if reduction == "mean" and catalogue.are_on() else None
        self._engine = engine_for(
            Engine,
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
            objective=SeveralTerms if self._has_terms else partial(Mean, reads=True, steps=fixed_steps),
            checks=() if weights is None else (weights,),
        )
        counter = None if counts is None else TermCounter(counts, self._engine)
        self._epochs = Epochs(self._engine, remainder, counter, weights)

    # ------------------------------------------------------------------------------------------ the main path

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the micro-batches of a loader. Call `backward` and then `step` for each of them.

        If the loader has a length, nothing is read ahead. Any other iterable is read one batch ahead, to find out where
        it ends. With ``counts``, all batches of a window are read before the first one is yielded.

        Args:
            loader: any iterable of micro-batches. On several ranks, the loaders may have different lengths.

        Returns:
            An iterator over the micro-batches. It has a length if the loader has one.

        Raises:
            UsageError: a window is still open: its micro-batches have had no `step`.
            BatchError: while iterating: the loader is empty, or its length is not the number of batches it yields.
            BackendError: while iterating on several ranks: the loaders' lengths are unknown with
                ``remainder="carry"``, or they are not known to be equal and the model has ``SyncBatchNorm`` layers.
        """
        return self._epochs.begin(loader)

    def backward(self, loss: Tensor | Terms, items: Items = None) -> None:
        """Run the backward of a micro-batch and add its gradient to the window, instead of ``loss.backward()``.

        Args:
            loss: the loss of the micro-batch: a mean over its items, or with ``reduction="sum"`` their sum. With
                ``counts``, a dict of terms ``{name: (loss, items)}``; you may leave out terms that the micro-batch does
                not have.
            items: the number of items (tokens, samples, pixels) that the loss is a mean or a sum over: a number, or a
                tensor with one element, which stays on the device. None: it is read from the graph of the loss. If the
                graph does not say it, every micro-batch has the same weight, and you get a warning if their sizes
                differ. Given items must be in proportion to what the graph says; 1 in every micro-batch gives all the
                same weight.

        Raises:
            UsageError: there is no current micro-batch, it has already had its `backward`, or other code has changed
                the accumulated gradients.
            BatchError: the loss is not a scalar with a graph that reaches a parameter, it is a sum where a mean is
                expected, or ``items`` is not a count, or not in proportion to what the losses are means over.
            BackendError: a gradient would not be synchronised between ranks.
        """
        self._engine.backward(loss, items)

    def step(self, now: bool = False) -> StepResult | None:
        """Take the optimizer step if the window is complete. Call it after every `backward`.

        It divides the gradients, clips them, steps the optimizers and schedulers, and clears the gradients.

        Args:
            now: close the open window even if it is incomplete, e.g. after the last epoch with ``remainder="carry"``.

        Returns:
            The result of the window; None if the window is not complete yet.

        Raises:
            UsageError: there was no `backward` before it, or other code has changed the accumulated gradients.
            NonFiniteError: a gradient of this window, or of the one before, is infinite or NaN.
            BatchError: the items are negative or not finite, or the items of a term do not add up to what ``counts``
                returned.
        """
        if now is not False:
            checked_switch("now", now)
        if now and self._has_terms and self._engine.has_accumulated and not self._engine.is_last:
            raise UsageError(
                "step(now=True) in an unfinished window of terms: its gradients are divided by what counts= said of "
                "all its batches. Take the others too, or drop it with discard(): the batches already read begin the "
                "next."
            )
        return self._engine.close(now)

    def skip(self) -> None:
        """Leave the current batch out of its window, in place of its `backward`. Call `step` after it as usual.

        Use it for a bad sample, or after an exception in the forward, such as out of memory. The batch adds nothing,
        but its turn counts, and the window is exact over the others. A window in which every batch was skipped takes no
        step, and its result says so. On several ranks, each rank skips on its own.

        >>> model = nn.Linear(2, 1)
        >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        >>> for x in acc.batches([torch.ones(4, 2), torch.full((3, 2), torch.nan)]):
        ...     if x.isfinite().all():
        ...         acc.backward(model(x).square().mean())
        ...     else:
        ...         acc.skip()
        ...     result = acc.step()
        >>> result.micro_batches, result.items.item()
        (1, 4)

        Raises:
            UsageError: there is no current batch, it has had its `backward`, a `backward` failed half-way (then call
                `discard`), or the Accumulator has ``counts``.
            BackendError: under FSDP, where forwards are collective: call `discard` on all ranks.
        """
        self._engine.skip()

    def discard(self) -> None:
        """Drop the open window and its gradients.

        If the current micro-batch has had no `backward` yet, it becomes the first one of a new window: call `backward`
        for it (again), or go on with the next one, for example with ``continue``.
        """
        self._engine.discard()
        self._epochs.recount()

    @contextlib.contextmanager
    def micro_batch(self, last: bool | None = None) -> Iterator[None]:
        """A context manager for the forward and `backward` of one micro-batch, for loops without a loader.

        >>> model = nn.Linear(2, 1)
        >>> acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        >>> for _ in range(2):
        ...     with acc.micro_batch():
        ...         acc.backward(model(torch.ones(4, 2)).mean(), items=4)
        ...     result = acc.step()
        >>> result.items
        tensor(8)

        Args:
            last: whether this micro-batch completes the window. None: it does if it is number ``steps`` of the window.

        Yields:
            Nothing.

        Raises:
            UsageError: the block ended without a `backward`, or the Accumulator has ``counts``.
        """
        if self._has_terms:
            raise UsageError(
                "micro_batch() cannot go with counts=: the batches of a window are read before its first backward. "
                "Iterate over acc.batches(loader)."
            )
        if last is not None:
            checked_switch("last", last)
        with self._engine.micro_batch(MicroPlan(last, is_told=last is not None)):
            yield

    # ------------------------------------------------------------------------------------------ what one can ask

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch is the last one of its window."""
        return self._engine.is_last

    @property
    def is_repeat(self) -> bool:
        """Whether the current micro-batch is a repeat with weight 0.

        On several ranks, a rank whose loader has ended repeats a batch as long as other ranks still have batches.
        """
        return self._engine.is_repeat

    @property
    def optimizer_step(self) -> int:
        """The number of optimizer steps taken so far. Skipped steps do not count."""
        return self._engine.closing.taken

    def state_dict(self) -> dict[str, int | float]:
        """The state to put into a checkpoint, beside that of the model, optimizer, scheduler and scaler.

        Returns:
            A dict of plain numbers: the optimizer steps and windows so far and, with a scaler or float16 gradients, the
            typical number of items in a micro-batch, which keeps float16 sums from overflowing.

        Raises:
            UsageError: a window is open. Call it right after `step` has returned a result.
            NonFiniteError: a gradient of the last window is infinite or NaN.
        """
        return self._engine.state()

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Restore a state, to continue from a checkpoint.

        Args:
            state: what `state_dict` returned.

        Raises:
            UsageError: a window is open, or ``state`` is not such a state.
        """
        self._engine.load_state(state)
