"""Facts about TRL 1.16: what losses are means over if no graph says it, and which trainers cannot be exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from macrobatch._cut.padding import IGNORED
from macrobatch.errors import UsageError
from macrobatch.transformers.preferences import terms_of
from macrobatch.transformers.samples import Inputs, Layout
from macrobatch.types import Items

Counter = Callable[[Inputs], Items]
PAIRS = {"DPOTrainer", "RewardTrainer"}
GENERATING = {"GRPOTrainer", "RLOOTrainer", "DistillationTrainer", "SDFTTrainer", "SDPOTrainer", "OnlineDPOTrainer"}
OVER_SEQUENCES = {"grpo", "sapo", "dr_grpo", "luspo"}
OVER_TOKENS = {"bnpo"}
COUPLED = {"aot", "aot_unpaired"}  # losses that sort the pairs of a batch
SHARES = {"dapo", "cispo", "vespo"}  # losses divided by the items of all completions that were generated together


def layout_for(trainer: Any) -> Layout:
    """The layout of a trainer's samples. Preferences are pairs."""
    return Layout(has_pairs=is_one_of(trainer, PAIRS))


def counter_of(trainer: Any) -> Counter | None:
    """What counts the items of a batch, for a loss of TRL whose graph does not say them; None for all others."""
    return next((choose(trainer) for name, choose in _COUNTERS if _computes(trainer, name)), None)


def is_total(trainer: Any) -> bool:
    """Whether the losses of a window only have to be added up: TRL has divided them by the tokens of all of them."""
    return _computes(trainer, "DistillationTrainer")


def _of_sft(trainer: Any) -> Counter | None:
    is_smoothed = trainer.label_smoother is not None and trainer.args.loss_type == "nll"
    return None if trainer.compute_loss_func is not None or is_smoothed else predicted_labels


def _of_dpo(trainer: Any) -> Counter | None:
    return _tokens_of_chosen if set(trainer.loss_types) == {"sft"} else None


def _of_completions(trainer: Any) -> Counter | None:
    loss_type = getattr(trainer, "loss_type", "grpo")
    if loss_type in OVER_TOKENS:
        return _tokens_of_completions
    return _one_batch if loss_type in SHARES else _completions


# By the class that defines `_compute_loss` or `compute_loss`.
_COUNTERS: tuple[tuple[str, Callable[[Any], Counter | None]], ...] = (
    ("SFTTrainer", _of_sft),
    ("DPOTrainer", _of_dpo),
    ("KTOTrainer", lambda _: _answers),
    ("GRPOTrainer", _of_completions),
    ("RLOOTrainer", lambda _: _completions),
    ("DistillationTrainer", lambda _: _one_batch),
)


def require_possible(trainer: Any, *, cuts: bool) -> None:
    """Raise an error for a trainer of TRL that cannot be exact, if a step has several batches, or is cut again."""
    name = type(trainer).__name__
    if generates(trainer) and cuts:
        raise UsageError(f"{name} generates its batches while it trains: they cannot be cut again. Leave out micro=.")
    if trainer.args.gradient_accumulation_steps == trainer.args.world_size == 1 and not cuts:
        return
    for names, reason in _REASONS:
        if is_one_of(trainer, names) and (found := reason(trainer)):
            raise UsageError(
                f"{name} cannot be exact: {found}. Use one batch for each step in one process "
                "(gradient_accumulation_steps=1), or the trainer as it is."
            )
    if cuts and is_one_of(trainer, {"TPOTrainer"}):
        raise UsageError(f"{name}: its samples have three rows, which micro= would cut apart. Leave out micro=.")


def _against_dpo(trainer: Any) -> str | None:
    types = set(trainer.loss_types)
    if found := COUPLED & types:
        return f"loss_type={sorted(found)} compares all pairs of a batch with each other"
    is_mixed = "sft" in types and (trainer.use_weighting or trainer.aux_loss_enabled) and has_own_loss(trainer)
    return "loss_type 'sft' is a mean over tokens, beside weights or a balance loss that are not" if is_mixed else None


def _against_kto(trainer: Any) -> str | None:
    is_coupled = trainer.loss_type == "kto"
    return 'its loss compares the samples of a batch ("apo_zero_unpaired" does not)' if is_coupled else None


def _against_grpo(trainer: Any) -> str | None:
    if (owner := _owner_of_loss(trainer)) is not None:
        return f"{owner} is not TRL's own, and its batches are generated, so that verify() could not check it"
    loss_type = getattr(trainer, "loss_type", "grpo")
    is_known = loss_type in OVER_TOKENS | SHARES | OVER_SEQUENCES
    return None if is_known else f"what loss_type={loss_type!r} is a mean over is not known here"


def _adds(weight: str, samples: str) -> Callable[[Any], str | None]:
    def reason(trainer: Any) -> str | None:
        has_both = getattr(trainer, weight)
        return f"its loss adds a mean over tokens to a mean over {samples}: two denominators" if has_both else None

    return reason


_REASONS: tuple[tuple[set[str], Callable[[Any], str | None]], ...] = (
    ({"OnlineDPOTrainer"}, lambda _: "its own training_step computes its loss, and divides it"),
    (
        {"IWOPDTrainer"},
        lambda _: "its own training_step reads the loss of every batch, maybe over sequences",
    ),
    ({"KTOTrainer"}, _against_kto),
    ({"DPOTrainer"}, _against_dpo),
    ({"ORPOTrainer"}, _adds("beta", "pairs")),
    ({"CPOTrainer"}, _adds("cpo_alpha", "pairs")),
    ({"TPOTrainer"}, _adds("tpo_alpha", "triples")),
    ({"GRPOTrainer"}, _against_grpo),
    ({"RLOOTrainer"}, lambda trainer: None if has_own_loss(trainer) else _against_grpo(trainer)),
)


def generates(trainer: Any) -> bool:
    """Whether the trainer generates its batches during the training."""
    return is_one_of(trainer, GENERATING)


def has_terms(trainer: Any) -> bool:
    """Whether a trainer's loss is of several terms that are known."""
    return is_one_of(trainer, {"DPOTrainer"}) and terms_of(trainer) is not None and has_own_loss(trainer)


def _owner_of_loss(trainer: Any) -> str | None:
    """The method that computes the loss, if it is not TRL's; None if it is."""
    for name in ("compute_loss", "_compute_loss"):
        owner = _definer(trainer, name)
        if owner is not None and not owner.__module__.startswith("trl."):
            return f"{owner.__name__}.{name}"
    return None


def has_own_loss(trainer: Any) -> bool:
    """Whether its loss is TRL's own, and not that of a subclass."""
    return _owner_of_loss(trainer) is None


def _computes(trainer: Any, name: str) -> bool:
    """Whether the loss of a trainer is computed by this class of TRL itself."""
    owners = [owner for method in ("compute_loss", "_compute_loss") if (owner := _definer(trainer, method)) is not None]
    return all(one.__name__ == name and one.__module__.startswith("trl.") for one in owners)


def _definer(trainer: Any, method: str) -> type | None:
    """The class that defines a method, apart from ours."""
    return next(
        (one for one in type(trainer).__mro__ if method in vars(one) and not one.__module__.startswith("macrobatch.")),
        None,
    )


def predicted_labels(inputs: Inputs) -> Tensor:
    """The labels that a causal language model predicts."""
    labels: Tensor = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][..., 1:]
    return (labels != IGNORED).sum()


def _tokens_of_chosen(inputs: Inputs) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return (mask[: len(mask) // 2, 1:] != 0).sum()


def _one_batch(_: Inputs) -> int:
    return 1


def _answers(inputs: Inputs) -> int:
    return len(inputs["label"])


def _completions(inputs: Inputs) -> int:
    return len(inputs["completion_ids"])


def _tokens_of_completions(inputs: Inputs) -> Tensor:
    mask = inputs["completion_mask"]
    found: Tensor = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).sum()
    return found


def is_one_of(trainer: Any, names: set[str]) -> bool:
    """Whether it is one of these trainers of TRL, or of a subclass."""
    return any(one.__name__ in names and one.__module__.startswith("trl.") for one in type(trainer).__mro__)
