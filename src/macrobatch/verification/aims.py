"""What a step trains the model for: which positions of a sequence, towards which targets.

Both are read off the gradients that come back through the model's outputs, of a step and of one big batch. So it does
not matter who shifts labels, or leaves out padding, and where.
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
from macrobatch.verification.comparison import Case, Compared
from macrobatch.verification.gradient import reduced
from macrobatch.verification.report import Cause
from macrobatch.verification.seen import Aim, Call

PADDED = "trained on padding"
MASK = "Give padding the label -100: labels = input_ids.masked_fill(attention_mask == 0, -100)"
SHIFT = "Shift once: cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())"
OFFSETS = (0, 1, -1)  # places that the step's positions lie behind those of one big batch with the same target
NOTHING = -1  # no token


def causes_of_aims(case: Case, wrong: list[Compared]) -> list[Cause]:
    """Where a step trains other positions than one big batch, or the same towards other targets."""
    tallies = _tallies(case, wrong)
    offset = next((offset for offset in OFFSETS if tallies[offset].agrees), None)
    if offset is None:
        return []
    causes, tally = [] if offset == 0 else [_of_the_shift(offset, tallies[offset])], tallies[offset]
    if 0 < tally.extra == tally.padding:
        causes.append(
            Cause(
                name=PADDED,
                evidence=f"the step trains {tally.extra:.0f} positions that one big batch leaves out, as padding or by "
                f"their label -100, and {tally.same:.0f} others.",
                cure=f"{MASK}, and count what is left.",
            )
        )
    return causes


def padding_in_the_loss(case: Case) -> Cause | None:
    """Where one big batch itself trains positions of padding: then every step that agrees with it does, too."""
    trained = case.big.ranks.sum(_trained_padding(case))
    if not trained:
        return None
    return Cause(
        name=PADDED,
        evidence=f"loss_fn trains {trained:.0f} positions of padding, whose attention_mask is 0.",
        cure=f"{MASK}.",
    )


def _of_the_shift(offset: int, tally: Tally) -> Cause:
    if offset == -1 and tally.whole_echoes < tally.same:
        return Cause(
            name="labels shifted twice",
            evidence="the step trains each position to give what the position after it gives in one big batch.",
            cure=f"{SHIFT}; not again for a model that shifts labels itself.",
        )
    who, other = ("the step", "one big batch") if offset == 1 else ("loss_fn", "the step")
    itself = offset == -1 or tally.echoes == tally.same
    what = "the token that it holds itself" if itself else "what the position before it should give"
    return Cause(
        name="labels not shifted",
        evidence=f"{who} trains each position to give {what}; {other} trains it to give the next one.",
        cure=f"{SHIFT}; a model that is given labels may do that itself.",
    )


# -------------------------------------------------------------------------------------------- a step, and one big batch


@dataclass
class Tally:
    """The positions of a step, beside those of one big batch that lie some places before them.

    Attributes:
        same, other: trained in both, towards the same target or another.
        extra: trained in the step alone; of these, `padding` are padding.
        echoes: of `same`, those whose token is their target in the step; `whole_echoes`, in one big batch.
    """

    same: float = 0.0
    other: float = 0.0
    extra: float = 0.0
    padding: float = 0.0
    echoes: float = 0.0
    whole_echoes: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.same > 1 and self.other == 0

    def add(self, pair: Pair, offset: int) -> None:
        width = pair.tokens.shape[1]
        here = slice(max(0, offset), width + min(0, offset))
        there = slice(max(0, -offset), width + min(0, -offset))
        step, whole = pair.step.trained[:, here], pair.whole.trained[:, there]
        equal = pair.step.targets[:, here] == pair.whole.targets[:, there]
        same, extra = step & whole & equal, step & ~whole
        self.same += int(same.sum())
        self.other += int((step & whole & ~equal).sum())
        self.extra += int(extra.sum())
        self.padding += int((extra & pair.padding[:, here]).sum())
        self.echoes += int((same & (pair.step.targets == pair.tokens)[:, here]).sum())
        self.whole_echoes += int((same & (pair.whole.targets == pair.tokens)[:, there]).sum())


def _tallies(case: Case, wrong: list[Compared]) -> dict[int, Tally]:
    """For each offset, over all calls of these windows, on all ranks."""
    tallies = {offset: Tally() for offset in OFFSETS}
    for pair in _pairs(case, wrong):
        for offset, tally in tallies.items():
            tally.add(pair, offset)
    numbers = [number for tally in tallies.values() for number in astuple(tally)]
    group = case.big.ranks.group
    numbers = reduced(numbers, group, None if group is None else dist.ReduceOp.SUM)
    size = len(numbers) // len(tallies)
    return {offset: Tally(*numbers[i * size : (i + 1) * size]) for i, offset in enumerate(tallies)}


# ---------------------------------------------------------------------------------------------- sequences


class Pair(NamedTuple):
    """Some samples in a step and in one big batch. All are (samples, positions)."""

    step: Aim
    whole: Aim
    tokens: Tensor  # NOTHING where they are not known
    padding: Tensor  # whether a position, or the one after it, is padding


def _pairs(case: Case, windows: list[Compared]) -> Iterator[Pair]:
    """One for each call in which samples are sequences."""
    wholes = _wholes(case)
    for window in windows:
        for call, samples in window.rows.calls if window.rows is not None else ():
            own = _aim(call, len(samples))
            if own is None or own.classes not in wholes:
                continue
            whole, tokens = wholes[own.classes]
            width = max(own.trained.shape[1], whole.trained.shape[1])
            yield Pair(
                _wide(own, width),
                _wide(Aim(whole.trained[samples], whole.targets[samples], whole.classes), width),
                _filled(tokens[samples], width, NOTHING),
                _padding(case, whole, width)[samples],
            )


def _wholes(case: Case) -> dict[int, tuple[Aim, Tensor]]:
    """What one big batch aims at, and the tokens that it is given; by the number of classes.

    Losses that never make all logits leave a model's outputs without them, but not where its modules have hooks.
    """
    count = case.big.samples.count if case.big.samples is not None else None
    found: dict[int, tuple[Aim, Tensor]] = {}
    for call in [*case.whole, *case.big.calls(hooks=True)]:
        if (aim := _aim(call, count)) is not None:
            given = [x for x in call.inputs.values() if x.shape == aim.trained.shape and not x.is_floating_point()]
            tokens = given[0].cpu() if given else torch.full_like(aim.targets, NOTHING)
            found.setdefault(aim.classes, (aim, tokens))
    return found


def _aim(call: Call, count: int | None) -> Aim | None:
    """That of the first output which has so many sequences, over all backwards through it."""
    aims = [arrival for arrival in call.arrived if arrival.aim is not None and len(arrival.aim.trained) == count]
    if not aims:
        return None
    first, *others = (arrival.aim for arrival in aims if arrival.path == aims[0].path and arrival.aim is not None)
    trained, targets = first.trained, first.targets
    for other in others:
        trained, targets = trained | other.trained, torch.where(other.trained, other.targets, targets)
    return Aim(trained.cpu(), targets.cpu(), first.classes)


def _padding(case: Case, whole: Aim, width: int) -> Tensor:
    """Where a position, or the one after it, is padding: by the labels and the masks of the batch.

    Labels may have another number than IGNORED there: one that stands wherever one big batch trains nothing, and that
    it never trains for.
    """
    count, length = whole.trained.shape
    padding = torch.zeros(count, width, dtype=torch.bool)
    wanted = set(whole.targets[whole.trained].tolist())
    for path, leaf in sequences(case):
        if "mask" in path:
            padding |= _filled(leaf == 0, width, True)
            continue
        padding |= _filled(leaf == IGNORED, width, True)
        for shift in (0, 1):
            labels = _filled(leaf, length + shift, NOTHING)[:, shift:]
            others = set(labels[~whole.trained].tolist()) - {NOTHING}
            if len(others) == 1 and not others & wanted:
                padding |= _filled(leaf == others.pop(), width, True)
    return padding | _filled(padding[:, 1:], width, True)


def _trained_padding(case: Case) -> int:
    """How many positions one big batch trains that are padding by its attention_mask, towards the tokens in there."""
    masks = [leaf for path, leaf in sequences(case) if path.endswith(("['attention_mask']", ".attention_mask"))]
    if not case.big.ranks.largest(len(masks)):
        return 0
    for aim, tokens in _wholes(case).values():
        if not masks or masks[0].shape != aim.trained.shape:
            continue
        shown = masks[0] != 0
        padding = ~shown & ~_filled(shown[:, 1:], shown.shape[1], False)
        following = _filled(tokens[:, 1:], tokens.shape[1], NOTHING)
        echoes = (aim.targets == tokens) | (aim.targets == following) | (following == NOTHING)
        trained = aim.trained & padding
        if not (trained & ~echoes).any() and (aim.trained & shown).any():  # else it may mean the opposite
            return int(trained.sum())
    return 0


def sequences(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The leaves of the batch that hold a whole number, or a truth, for each position of each sample."""
    count = None if case.big.samples is None else case.big.samples.count
    for path, leaf in leaves(case.big.part(None), "batch"):
        if isinstance(leaf, Tensor) and leaf.ndim == 2 and len(leaf) == count and not leaf.is_floating_point():
            yield path, leaf.cpu()


def _wide(aim: Aim, width: int) -> Aim:
    return Aim(_filled(aim.trained, width, False), _filled(aim.targets, width, NOTHING), aim.classes)


def _filled(rows: Tensor, width: int, value: float) -> Tensor:
    """Rows of that width: cut, or filled up."""
    return F.pad(rows[:, :width], (0, max(0, width - rows.shape[1])), value=value)
