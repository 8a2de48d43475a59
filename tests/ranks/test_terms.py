"""Several terms on real ranks: denominators of all ranks, ranks without samples, terms that some lack."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.ranks import (
    Outcome,
    all_refused,
    all_well,
    ddp,
    difference,
    fsdp1,
    fsdp2,
    full_weights,
    hsdp,
    optimizer_for,
    same_on_all,
)
from harness.reference import relative_error, unsized
from harness.terms import NAMES, TOKENS, Losses, batch_of, counts_of, heads, weights, whole_gradient, whole_loss
from macrobatch import Accumulator, MacroStep, by_tokens
from macrobatch.errors import BatchError

MODES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "ddp-window": (ddp, {}),
    "ddp-micro": (ddp, {"sync": "micro"}),
    "ddp-unused": (partial(ddp, find_unused_parameters=True), {}),
    "fsdp1-window": (fsdp1, {}),
    "fsdp2-window-micro": (fsdp2, {}),
    "fsdp2-window-window": (fsdp2, {"gather": "window"}),
    "fsdp2-micro-micro": (fsdp2, {"sync": "micro"}),
}
KINDS = {
    "tensors": Losses(NAMES),
    "absent": Losses(NAMES, items="int"),
    "nan": Losses(NAMES, items="int", without="nan"),
    "mixed": Losses(("chosen", "tokens", "weights", "samples"), items="mixed"),
    "sums": Losses(("chosen", "tokens", "samples", "weights"), reduction="sum"),
}
# One term, which some micro-batches and ranks do not have; other outputs of the model are used by none.
ONLY = Losses(("chosen",), items="int")
# For each window, how many samples every rank has: the first has a rank that never had any.
FILLED = [(0, 3), (5, 3), (4, 0), (0, 0), (2, 7), (4, 4)]
ON_FOUR = [(0, 3, 1, 0), (5, 3, 0, 2), (0, 0, 7, 0), (2, 2, 2, 2)]
SCENARIOS: dict[str, Callable[[], Outcome]] = {}
SCENARIOS_ON_FOUR: dict[str, Callable[[], Outcome]] = {}


def own_batch(window: int, samples: int, rank: int) -> Any:
    """Nothing is chosen in some windows on some ranks; in the fifth, on none."""
    chosen = 0.0 if window == 4 or (window + rank) % 2 else 0.6
    return batch_of(samples, seed=100 * rank + window, chosen=chosen) if samples else None


def outcome_of(model: nn.Module, before: list[Any], results: list[Any]) -> Outcome:
    return {
        "weights": before,
        "loss": [result.loss for result in results],
        "losses": [result.losses for result in results],
        "items": [result.items for result in results],
        "skipped": [bool(result.skipped) for result in results],
        "gradients left": any(p.grad is not None for p in model.parameters()),
    }


def train(filled: Sequence[Sequence[int]], losses: Losses, wrap: Any, micro: Any = 2, **options: Any) -> Outcome:
    model = wrap(heads())
    options = {"counts": losses.counts, "reduction": losses.reduction} | options
    step = MacroStep(model, optimizer_for(model), losses, micro=micro, **options)
    found, results = [full_weights(model)], []
    for window, samples in enumerate(filled):
        results.append(step(own_batch(window, samples[dist.get_rank()], dist.get_rank())))
        found.append(full_weights(model))
    return outcome_of(model, found, results)


def lengths(batch: Any) -> list[int]:
    """Nothing is padding: each term looks at all tokens."""
    return [TOKENS] * len(batch["mask"])


for _mode, (_wrap, _options) in MODES.items():
    for _kind, _losses in KINDS.items():
        SCENARIOS[f"{_kind}-{_mode}"] = partial(train, FILLED, _losses, _wrap, **_options)
    if _mode not in ("ddp-window", "ddp-micro"):  # which refuse parameters that nothing uses
        SCENARIOS[f"only-{_mode}"] = partial(train, FILLED, ONLY, _wrap, **_options)
    SCENARIOS[f"by-tokens-{_mode}"] = partial(
        train, FILLED, KINDS["absent"], _wrap, by_tokens(2 * TOKENS, lengths), **_options
    )
    SCENARIOS[f"auto-{_mode}"] = partial(train, FILLED, KINDS["tensors"], _wrap, "auto", **_options)
SCENARIOS_ON_FOUR["tensors-hsdp"] = partial(train, ON_FOUR, KINDS["tensors"], hsdp)
SCENARIOS_ON_FOUR["absent-hsdp"] = partial(train, ON_FOUR, KINDS["absent"], hsdp, gather="window")
SCENARIOS_ON_FOUR["nan-ddp"] = partial(train, ON_FOUR, KINDS["nan"], ddp)
SCENARIOS_ON_FOUR["mixed-fsdp2"] = partial(train, ON_FOUR, KINDS["mixed"], fsdp2)


def exact(outcomes: list[Outcome], windows: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
    """Every window did what one process does with all its samples at once; one without any did nothing."""
    all_well(outcomes)
    same_on_all(outcomes, "weights", "loss", "losses", "items", "skipped")
    model, found = heads(), outcomes[0]
    assert not found["gradients left"]
    for window, batches in enumerate(windows):
        taken = difference(found["weights"][window], found["weights"][window + 1])
        is_empty = not any(n for batch in batches for name, n in counts_of(batch).items() if name in names)
        assert found["skipped"][window] == is_empty
        if is_empty:
            assert all(not moved.any() for moved in taken.values())
            continue
        model.load_state_dict(found["weights"][window])
        expected = whole_gradient(model, batches, names)
        assert relative_error(taken, expected) <= 1e-12, f"window {window}"
        loss, means = whole_loss(model, batches, names)
        assert found["loss"][window].item() == pytest.approx(loss.item(), rel=1e-12)
        assert list(found["losses"][window]) == list(names)
        for name, mean in found["losses"][window].items():
            assert mean.item() == pytest.approx(means[name], rel=1e-12, nan_ok=True)


def batches_of(filled: Sequence[Sequence[int]]) -> list[list[Any]]:
    return [[own_batch(w, n, rank) for rank, n in enumerate(samples) if n] for w, samples in enumerate(filled)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_batches(on_two_ranks, kind, mode):
    exact(on_two_ranks[f"{kind}-{mode}"], batches_of(FILLED), KINDS[kind].names)


@pytest.mark.parametrize("mode", [name.removeprefix("only-") for name in SCENARIOS if name.startswith("only-")])
def test_micro_batches_without_any_term(on_two_ranks, mode):
    exact(on_two_ranks[f"only-{mode}"], batches_of(FILLED), ONLY.names)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", ["by-tokens", "auto"])
def test_other_cuts(on_two_ranks, cut, mode):
    exact(on_two_ranks[f"{cut}-{mode}"], batches_of(FILLED), NAMES)


@pytest.mark.parametrize("name", SCENARIOS_ON_FOUR)
def test_four_ranks(on_four_ranks, name):
    exact(on_four_ranks[name], batches_of(ON_FOUR), KINDS[name.partition("-")[0]].names)


# ------------------------------------------------------------------------------------------------- Accumulator

COUNTS = (7, 4)  # micro-batches of each rank, in windows of 3


def loader_of(rank: int) -> list[Any]:
    return [own_batch(i, 1 + (rank + i) % 3, rank) for i in range(COUNTS[rank])]


def accumulate(losses: Losses, wrap: Any, sized: bool, **options: Any) -> Outcome:
    model = wrap(heads())
    acc = Accumulator(model, optimizer_for(model), steps=3, counts=losses.counts, reduction=losses.reduction, **options)
    found, results, loader = [full_weights(model)], [], loader_of(dist.get_rank())
    for batch in acc.batches(loader if sized else unsized(loader)):
        acc.backward(losses(model, batch))
        if result := acc.step():
            results.append(result)
            found.append(full_weights(model))
    return outcome_of(model, found, results)


for _mode, (_wrap, _options) in MODES.items():
    for _sized in (True, False):
        SCENARIOS[f"loop-{_sized}-{_mode}"] = partial(accumulate, KINDS["absent"], _wrap, _sized, **_options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sized", [True, False])
def test_loaders_of_different_lengths(on_two_ranks, sized, mode):
    """A batch that is handed out again is not counted."""
    windows = [[*loader_of(0)[i : i + 3], *loader_of(1)[i : i + 3]] for i in range(0, 7, 3)]
    exact(on_two_ranks[f"loop-{sized}-{mode}"], windows, NAMES)


# ------------------------------------------------------------------------------------------------- mistakes


def on_one(rank: int, one: Any, other: Any) -> Any:
    return one if dist.get_rank() == rank else other


def miscounted(wrap: Any, rank: int) -> Outcome:
    losses = on_one(rank, Losses(NAMES, wrong={"chosen": 1}), Losses(NAMES))
    model = wrap(heads())
    step = MacroStep(model, optimizer_for(model), losses, micro=2, counts=losses.counts)
    before = full_weights(model)
    try:
        step(batch_of(5, seed=dist.get_rank()))
    except Exception as error:
        after = full_weights(model)
        return {"message": str(error), "moved": any(difference(before, after)[name].any() for name in after)}
    return {"message": "", "moved": True}


def other_names(rank: int) -> Outcome:
    losses = Losses(on_one(rank, ("tokens", "chosen"), ("tokens", "samples")))
    return train([(3, 3)], losses, ddp)


def other_names_later() -> Outcome:
    names = iter([("tokens", "samples"), on_one(1, ("samples", "tokens"), ("tokens", "samples"))])

    def counts(batch: Any) -> Any:
        found = Losses().counts(batch)
        return {name: found[name] for name in next(names)}

    return train([(3, 3), (3, 3)], Losses(), partial(ddp, find_unused_parameters=True), counts=counts)


def fails_before_names_are_known() -> Outcome:
    """One rank cannot be cut in the first window; in the second nobody has a sample; the third is an ordinary one."""
    losses, model = Losses(NAMES), ddp(heads())
    step = MacroStep(model, optimizer_for(model), losses, micro=2, counts=losses.counts)
    batch = batch_of(4, seed=dist.get_rank())
    try:
        step(on_one(1, batch | {"weight": batch["weight"][:1]}, batch))
    except BatchError as error:
        message = str(error)
    return {"message": message, "skipped": bool(step(None).skipped), "step": int(step(batch).step)}


SCENARIOS["fails-first"] = fails_before_names_are_known
SCENARIOS["miscounted-ddp-0"] = partial(miscounted, ddp, 0)
SCENARIOS["miscounted-ddp-1"] = partial(miscounted, ddp, 1)
SCENARIOS["miscounted-fsdp2-1"] = partial(miscounted, fsdp2, 1)
SCENARIOS["other-names"] = partial(other_names, 1)
SCENARIOS["other-names-later"] = other_names_later


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("miscounted")])
def test_what_does_not_add_up_on_one_rank_stops_all(on_two_ranks, name):
    for outcome in all_well(on_two_ranks[name]):
        assert "the items of the term 'chosen'" in outcome["message"]
        assert "but counts= said" in outcome["message"]
        assert not outcome["moved"]


def test_a_failure_before_names_are_known_leaves_nobody_waiting(on_two_ranks):
    for outcome in all_well(on_two_ranks["fails-first"]):
        assert outcome["message"]
        assert outcome["skipped"]
        assert outcome["step"] == 1


def test_names_that_differ_between_ranks(on_two_ranks):
    all_refused(on_two_ranks["other-names"], "the term 'samples' came on rank 0 only")


def test_names_that_change_on_one_rank(on_two_ranks):
    first, second = on_two_ranks["other-names-later"]
    assert "the batch of rank 1 cannot be cut" in first["message"]
    assert "the term 'samples' came at another place" in second["message"]


def test_the_reference_sees_a_wrong_denominator():
    """Each rank divides by its own items: what these tests would say to that."""
    model, batches = heads(), [batch_of(3, seed=1), batch_of(5, seed=2)]
    parts = [whole_gradient(model, [batch], NAMES) for batch in batches]
    wrong = {name: (parts[0][name] + parts[1][name]) / 2 for name in weights(model)}
    assert relative_error(wrong, whole_gradient(model, batches, NAMES)) > 1e-3
    assert torch.isfinite(whole_loss(model, batches, NAMES)[0])
