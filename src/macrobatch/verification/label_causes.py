"""Mistakes with labels: positions of a sequence that are trained but should not be, or towards the wrong token.

Both show in the gradients of the model's outputs, in the step and in one big batch. So it does not matter which code
shifts labels or leaves out padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from macrobatch._cut.padding import IGNORED
from macrobatch._cut.trees import leaves
from macrobatch.verification.catalogue import cause
from macrobatch.verification.comparison import Case, Comparison
from macrobatch.verification.gradient import reduce_numbers
from macrobatch.verification.observation import Call, LossTargets
from macrobatch.verification.report import Cause

OFFSETS = (0, 1, -1)  # from a position in one big batch to the position in the step with the same target
NO_TOKEN = -1
EVERY = slice(None)


def label_causes(case: Case, wrong: list[Comparison]) -> list[Cause]:
    """The causes, if a step trains other positions than one big batch, or the same towards other targets."""
    tallies = _tallies(case, wrong)
    offset = next((offset for offset in OFFSETS if tallies[offset].is_match), None)
    if offset is None:
        return []
    causes, tally = [] if offset == 0 else [_shift_cause(offset, tallies[offset])], tallies[offset]
    if 0 < tally.extra == tally.padding:
        causes.append(
            cause(
                "trained on padding",
                f"the step trains {tally.extra:.0f} positions that one big batch leaves out, because they are "
                f"padding or have the label -100; it also trains {tally.same:.0f} right ones.",
            )
        )
    return causes


def loss_padding_cause(case: Case) -> Cause | None:
    """The cause, if one big batch itself trains padding: then so does every step that agrees with it."""
    trained = case.big.ranks.sum(_num_trained_padding(case))
    if not trained:
        return None
    return cause(
        "trained on padding",
        f"loss_fn trains {trained:.0f} positions of padding, where attention_mask is 0.",
    )


def _shift_cause(offset: int, tally: Tally) -> Cause:
    if offset == -1 and tally.big_copies < tally.same:
        return cause(
            "labels shifted twice",
            "the step trains each position to predict what the next position predicts in one big batch.",
        )
    who, other = ("the step", "one big batch") if offset == 1 else ("loss_fn", "the step")
    itself = offset == -1 or tally.step_copies == tally.same
    what = "its own token" if itself else "what the position before it should predict"
    return cause(
        "labels not shifted",
        f"{who} trains each position to predict {what}; {other} trains it to predict the next token.",
    )


# -------------------------------------------------------------------------------------------- a step, and one big batch


@dataclass
class Tally:
    """Counts positions of a step, compared with the positions of one big batch at some offset.

    Attributes:
        same, other: positions trained in both, towards the same target or another.
        extra: positions trained in the step only; `padding` of them are padding.
        step_copies, big_copies: positions in `same` that the step, or one big batch, trains to predict their own token.
    """

    same: float = 0.0
    other: float = 0.0
    extra: float = 0.0
    padding: float = 0.0
    step_copies: float = 0.0
    big_copies: float = 0.0

    @property
    def is_match(self) -> bool:
        return self.same > 1 and self.other == 0

    def add(self, pair: TargetPair, offset: int) -> None:
        width = pair.tokens.shape[1]
        here = slice(max(0, offset), width + min(0, offset))
        there = slice(max(0, -offset), width + min(0, -offset))
        step, whole = pair.step.is_trained[:, here], pair.whole.is_trained[:, there]
        equal = pair.step.targets[:, here] == pair.whole.targets[:, there]
        same, extra = step & whole & equal, step & ~whole
        self.same += int(same.sum())
        self.other += int((step & whole & ~equal).sum())
        self.extra += int(extra.sum())
        self.padding += int((extra & pair.padding[:, here]).sum())
        self.step_copies += int((same & (pair.step.targets == pair.tokens)[:, here]).sum())
        self.big_copies += int((same & (pair.whole.targets == pair.tokens)[:, there]).sum())


def _tallies(case: Case, wrong: list[Comparison]) -> dict[int, Tally]:
    """The tally of each offset, over all calls of these windows on all ranks."""
    tallies = {offset: Tally() for offset in OFFSETS}
    for pair in _target_pairs(case, wrong):
        for offset, tally in tallies.items():
            tally.add(pair, offset)
    numbers = [number for tally in tallies.values() for number in astuple(tally)]
    group = case.big.ranks.group
    numbers = reduce_numbers(numbers, group, None if group is None else dist.ReduceOp.SUM)
    size = len(numbers) // len(tallies)
    return {offset: Tally(*numbers[i * size : (i + 1) * size]) for i, offset in enumerate(tallies)}


# ---------------------------------------------------------------------------------------------- sequences


class TargetPair(NamedTuple):
    """The targets of some samples in a step and in one big batch. All tensors are (samples, positions)."""

    step: LossTargets
    whole: LossTargets
    tokens: Tensor  # NO_TOKEN where unknown
    padding: Tensor  # True if a position, or the one after it, is padding


def _target_pairs(case: Case, windows: list[Comparison]) -> Iterator[TargetPair]:
    """A pair for each call whose samples are sequences."""
    wholes = _big_batch_targets(case)
    for window in windows:
        for call, samples in window.matches.calls if window.matches is not None else ():
            own = _targets_of_call(call, len(samples))
            if own is None or own.num_classes not in wholes:
                continue
            whole, tokens = wholes[own.num_classes]
            width = max(own.is_trained.shape[1], whole.is_trained.shape[1])
            yield TargetPair(
                _resize_targets(own, width),
                _resize_targets(whole, width, samples),
                _resize_rows(tokens[samples], width, NO_TOKEN),
                _is_padding(case, whole, width)[samples],
            )


def _big_batch_targets(case: Case) -> dict[int, tuple[LossTargets, Tensor]]:
    """The targets and the tokens of one big batch, by the number of classes.

    Hooks on all modules make losses that work in chunks compute the whole logits.
    """
    count = case.big.samples.count if case.big.samples is not None else None
    found: dict[int, tuple[LossTargets, Tensor]] = {}
    for call in [*case.big_batch_calls, *case.big.calls(hooks=True)]:
        if (aim := _targets_of_call(call, count)) is not None:
            given = [x for x in call.inputs.values() if x.shape == aim.is_trained.shape and not x.is_floating_point()]
            tokens = given[0].cpu() if given else torch.full_like(aim.targets, NO_TOKEN)
            found.setdefault(aim.num_classes, (aim, tokens))
    return found


def _targets_of_call(call: Call, count: int | None) -> LossTargets | None:
    """The targets of the first output with `count` sequences, over all backwards through it."""
    found = [(arrival.path, arrival.targets) for arrival in call.output_gradients if arrival.targets is not None]
    found = [(path, targets) for path, targets in found if len(targets.is_trained) == count]
    if not found:
        return None
    first, *others = (targets for path, targets in found if path == found[0][0])
    trained, targets = first.is_trained, first.targets
    for other in others:
        trained, targets = trained | other.is_trained, torch.where(other.is_trained, other.targets, targets)
    return LossTargets(trained.cpu(), targets.cpu(), first.num_classes)


def _is_padding(case: Case, whole: LossTargets, width: int) -> Tensor:
    """Whether a position, or the one after it, is padding, according to the labels and masks of the batch.

    Labels may use another number than IGNORED for padding: the only number where one big batch trains nothing, if it is
    never a target.
    """
    count, length = whole.is_trained.shape
    padding = torch.zeros(count, width, dtype=torch.bool)
    wanted = set(whole.targets[whole.is_trained].tolist())
    for path, leaf in sequence_leaves(case):
        if "mask" in path:
            padding |= _resize_rows(leaf == 0, width, True)
            continue
        padding |= _resize_rows(leaf == IGNORED, width, True)
        for shift in (0, 1):
            labels = _resize_rows(leaf, length + shift, NO_TOKEN)[:, shift:]
            others = set(labels[~whole.is_trained].tolist()) - {NO_TOKEN}
            if len(others) == 1 and not others & wanted:
                padding |= _resize_rows(leaf == others.pop(), width, True)
    return padding | _resize_rows(padding[:, 1:], width, True)


def _num_trained_padding(case: Case) -> int:
    """The number of padding positions, by attention_mask, that one big batch trains towards the padding token."""
    masks = [leaf for path, leaf in sequence_leaves(case) if path.endswith(("['attention_mask']", ".attention_mask"))]
    if not case.big.ranks.largest(len(masks)):
        return 0
    for aim, tokens in _big_batch_targets(case).values():
        if not masks or masks[0].shape != aim.is_trained.shape:
            continue
        shown = masks[0] != 0
        padding = ~shown & ~_resize_rows(shown[:, 1:], shown.shape[1], False)
        following = _resize_rows(tokens[:, 1:], tokens.shape[1], NO_TOKEN)
        echoes = (aim.targets == tokens) | (aim.targets == following) | (following == NO_TOKEN)
        trained = aim.is_trained & padding
        if not (trained & ~echoes).any() and (aim.is_trained & shown).any():  # otherwise the mask may mean the opposite
            return int(trained.sum())
    return 0


def sequence_leaves_of_ranks(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The leaves that may hold labels or a mask. All ranks get the same paths: a rank that has less, empty leaves."""
    own = {path: leaf for path, leaf in sequence_leaves(case) if leaf.dtype != torch.bool or "mask" in path}
    count = 0 if case.big.samples is None else case.big.samples.count
    for path in sorted(set().union(*case.big.ranks.gather(set(own)))):
        yield path, own.get(path, torch.zeros(count, 0, dtype=torch.long))


def sequence_leaves(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The leaves of the batch with an integer or a bool for each position of each sample."""
    count = None if case.big.samples is None else case.big.samples.count
    for path, leaf in leaves(case.big.part(None), "batch"):
        if isinstance(leaf, Tensor) and leaf.ndim == 2 and len(leaf) == count and not leaf.is_floating_point():
            yield path, leaf.cpu()


def _resize_targets(targets: LossTargets, width: int, rows: list[int] | slice = EVERY) -> LossTargets:
    """Cut or pad the targets of some rows to a width."""
    is_trained = _resize_rows(targets.is_trained[rows], width, False)
    return LossTargets(is_trained, _resize_rows(targets.targets[rows], width, NO_TOKEN), targets.num_classes)


def _resize_rows(rows: Tensor, width: int, value: float) -> Tensor:
    """Cut or pad rows to a width."""
    return F.pad(rows[:, :width], (0, max(0, width - rows.shape[1])), value=value)
