"""Facts about TRL's trainers: the layout of their samples, and what a loss of generated completions is a mean over."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from macrobatch.errors import UsageError
from macrobatch.transformers.meaning import Inputs, Meaning
from macrobatch.transformers.preferences import terms_of
from macrobatch.transformers.samples import Layout

PAIRS = {"DPOTrainer", "RewardTrainer"}
GENERATING = {"GRPOTrainer", "RLOOTrainer"}
OVER_SEQUENCES = {"grpo", "sapo", "dr_grpo", "luspo"}
OVER_TOKENS = {"bnpo"}
COUPLED = {"aot", "aot_unpaired"}  # losses that sort the pairs of a batch
SHARES = {"dapo", "cispo", "vespo"}  # losses divided by the items of all completions that were generated together


def layout_for(trainer: Any) -> Layout:
    """The layout of a trainer's samples. Preferences are pairs."""
    return Layout(has_pairs=is_one_of(trainer, PAIRS))


def declared(trainer: Any) -> Meaning | None:
    """What a loss of generated completions is a mean over, which cannot be tried before; None for other losses.

    Raises:
        UsageError: the loss type is not supported.
    """
    if is_one_of(trainer, {"DPOTrainer"}) and (found := COUPLED.intersection(getattr(trainer, "loss_types", ()))):
        raise UsageError(
            f"loss_type={sorted(found)} compares all pairs of a batch with each other: it is another loss for each "
            "way to cut the batch. Choose another one, or one batch for each step: gradient_accumulation_steps=1."
        )
    if is_one_of(trainer, {"DPOTrainer"}) and (terms := terms_of(trainer)) is not None and has_own_loss(trainer):
        layout = layout_for(trainer)
        return Meaning(layout.count, "pairs, and tokens", terms=terms, layout=layout)
    if not is_one_of(trainer, GENERATING):
        return None
    if (owner := _owner_of_loss(trainer)) is not None:
        raise UsageError(
            f"{owner} is not TRL's own, and what its loss is a mean over cannot be asked before completions are "
            "generated. Use exact() with TRL's own loss, or write the loop with Accumulator."
        )
    loss_type = getattr(trainer, "loss_type", "grpo")
    if loss_type in OVER_TOKENS:
        return Meaning(_tokens_of_completions, "tokens of completions")
    if loss_type in SHARES:
        return Meaning(lambda _: 1, "batches")
    if loss_type in OVER_SEQUENCES or is_one_of(trainer, {"RLOOTrainer"}):
        return Meaning(_completions, "completions")
    raise UsageError(
        f"loss_type={loss_type!r} is not known here: what it is a mean over decides how batches are weighed."
    )


def generates(trainer: Any) -> bool:
    """Whether the trainer generates its batches during the training."""
    return is_one_of(trainer, GENERATING)


def _owner_of_loss(trainer: Any) -> str | None:
    """The method that computes the loss, if it is not TRL's; None if it is."""
    for name in ("compute_loss", "_compute_loss"):
        owner = next((one for one in type(trainer).__mro__ if name in vars(one) and not _is_ours(one)), None)
        if owner is not None and not owner.__module__.startswith("trl."):
            return f"{owner.__name__}.{name}"
    return None


def has_own_loss(trainer: Any) -> bool:
    """Whether its loss is TRL's own, and not that of a subclass."""
    return _owner_of_loss(trainer) is None


def _completions(inputs: Inputs) -> int:
    return len(inputs["completion_ids"])


def _tokens_of_completions(inputs: Inputs) -> Tensor:
    mask = inputs["completion_mask"]
    found: Tensor = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).sum()
    return found


def is_one_of(trainer: Any, names: set[str]) -> bool:
    """Whether it is one of these trainers of TRL, or of a subclass."""
    return any(one.__name__ in names and one.__module__.startswith("trl.") for one in type(trainer).__mro__)


def _is_ours(one: type) -> bool:
    return one.__module__.startswith("macrobatch.")
