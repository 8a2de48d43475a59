"""Losses of the whole batch on real ranks: unequal and empty shares, one exchange of encodings, one of gradients."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from harness.joint import CASES, CONTRAST, TOKENS, WIDTH, Case, batch_of, concatenate, gradient_of, towers
from harness.joint_loops import gradcache
from harness.ranks import (
    Collectives,
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
    run,
    same_on_all,
)
from harness.reference import relative_error
from macrobatch import Encoded, MacroStep, by_tokens, contrastive_loss, verify

MODES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "ddp": (ddp, {}),
    "ddp-micro": (ddp, {"sync": "micro"}),
    "fsdp2-resharded": (partial(fsdp2, reshard_after_forward=True), {}),
    "fsdp2": (fsdp2, {}),
    "fsdp2-gathered": (fsdp2, {"gather": "window"}),
    "fsdp2-micro": (fsdp2, {"sync": "micro"}),
}
# For each window, how many samples every rank has: the first has a rank that never had any.
FILLED = [(0, 3), (5, 3), (8, 0), (0, 0), (2, 7), (4, 4)]
ON_FOUR = [(0, 3, 1, 0), (5, 3, 0, 2), (0, 0, 7, 0), (2, 2, 2, 2)]
SCENARIOS: dict[str, Callable[[], Outcome]] = {}
SCENARIOS_ON_FOUR: dict[str, Callable[[], Outcome]] = {}
SCENARIOS_ON_ONE: dict[str, Callable[[], Outcome]] = {}


@pytest.fixture(scope="module")
def ran_on_one(tmp_path_factory) -> dict[str, list[Outcome]]:
    return run(__name__, "SCENARIOS_ON_ONE", 1, tmp_path_factory.mktemp("joint-on-one"))


def own_batch(window: int, samples: int, rank: int) -> Any:
    return batch_of(samples, seed=100 * rank + window) if samples else None


def train(filled: Sequence[Sequence[int]], case: Case, wrap: Any, micro: Any = 2, **options: Any) -> Outcome:
    model = wrap(towers())
    step = MacroStep(model, optimizer_for(model), case.loss_fn, joint=case.joint, micro=micro, **options)
    found, results = [full_weights(model)], []
    for window, samples in enumerate(filled):
        results.append(step(own_batch(window, samples[dist.get_rank()], dist.get_rank())))
        found.append(full_weights(model))
    return {
        "weights": found,
        "loss": [result.loss for result in results],
        "items": [result.items for result in results],
        "skipped": [bool(result.skipped) for result in results],
        "gradients left": any(p.grad is not None for p in model.parameters()),
    }


for _mode, (_wrap, _options) in MODES.items():
    for _name, _case in CASES.items():
        SCENARIOS[f"{_name}-{_mode}"] = partial(train, FILLED, _case, _wrap, **_options)
    SCENARIOS[f"contrast-by-tokens-{_mode}"] = partial(
        train, FILLED, CONTRAST, _wrap, by_tokens(2 * TOKENS), **_options
    )
    SCENARIOS[f"contrast-auto-{_mode}"] = partial(train, FILLED, CONTRAST, _wrap, "auto", **_options)
SCENARIOS_ON_FOUR["contrast-hsdp"] = partial(train, ON_FOUR, CONTRAST, hsdp)
SCENARIOS_ON_FOUR["nested-hsdp"] = partial(train, ON_FOUR, CASES["nested"], hsdp, gather="window")
SCENARIOS_ON_FOUR["contrast-ddp"] = partial(train, ON_FOUR, CONTRAST, ddp)
SCENARIOS_ON_FOUR["balance-fsdp2"] = partial(train, ON_FOUR, CASES["balance"], fsdp2)
SCENARIOS_ON_ONE["contrast-ddp"] = partial(train, [(5,), (8,)], CONTRAST, ddp)
SCENARIOS_ON_ONE["nested-fsdp2"] = partial(train, [(5,), (8,)], CASES["nested"], fsdp2)


def exact(outcomes: list[Outcome], windows: Sequence[Sequence[Any]], case: Case) -> None:
    """Every window did what one process does with all its samples at once; one without any did nothing."""
    all_well(outcomes)
    same_on_all(outcomes, "weights", "loss", "items", "skipped")
    model, found = towers(), outcomes[0]
    assert not found["gradients left"]
    for window, batches in enumerate(windows):
        taken = difference(found["weights"][window], found["weights"][window + 1])
        assert found["skipped"][window] == (not batches)
        if not batches:
            assert all(not moved.any() for moved in taken.values())
            continue
        model.load_state_dict(found["weights"][window])
        loss = case.whole(model, concatenate(batches))
        assert relative_error(taken, gradient_of(model, loss)) <= 1e-12, f"window {window}"
        assert found["loss"][window].item() == pytest.approx(loss.item(), rel=1e-12)


def batches_of(filled: Sequence[Sequence[int]]) -> list[list[Any]]:
    return [[own_batch(w, n, rank) for rank, n in enumerate(samples) if n] for w, samples in enumerate(filled)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*CASES, "contrast-by-tokens", "contrast-auto"])
def test_shares_of_all_sizes(on_two_ranks, kind, mode):
    exact(on_two_ranks[f"{kind}-{mode}"], batches_of(FILLED), CASES[kind.partition("-")[0]])


@pytest.mark.parametrize("name", SCENARIOS_ON_FOUR)
def test_four_ranks(on_four_ranks, name):
    exact(on_four_ranks[name], batches_of(ON_FOUR), CASES[name.partition("-")[0]])


@pytest.mark.parametrize("name", SCENARIOS_ON_ONE)
def test_a_group_of_one(ran_on_one, name):
    exact(ran_on_one[name], batches_of([(5,), (8,)]), CASES[name.partition("-")[0]])


# ------------------------------------------------------------------------------------------------- what travels


def counted(wrap: Any, micro: int, **options: Any) -> Outcome:
    """The collectives of the second window: in the first, ranks get to know each other."""
    model = wrap(towers())
    step = MacroStep(model, optimizer_for(model), CONTRAST.loss_fn, joint=CONTRAST.joint, micro=micro, **options)
    step(own_batch(0, 6, dist.get_rank()))
    with Collectives() as collectives:
        step(own_batch(1, 6, dist.get_rank()))
    return {"counts": dict(collectives.counts)}


for _micro in (1, 3, 6):
    SCENARIOS[f"counted-{_micro}"] = partial(counted, ddp, _micro)
    SCENARIOS[f"counted-sharded-{_micro}"] = partial(counted, fsdp2, _micro, gather="window")


def test_encodings_and_gradients_travel_once(on_two_ranks):
    """However many micro-batches there are: under DDP one gather of encodings, one flat sum of gradients.

    Beside them, small numbers on the host: how the batch is cut, two votes, what encodings look like (two), which
    parameters were used; and whether the passes agreed.
    """
    counts = [all_well(on_two_ranks[f"counted-{micro}"])[0]["counts"] for micro in (1, 3, 6)]
    assert counts[0] == counts[1] == counts[2]
    gathers = counts[0]["allgather"] + counts[0]["allgather_base"]  # versions of torch send objects by either
    assert (gathers, counts[0]["allreduce"]) == (6, 3)


def test_sharded_gradients_travel_once(on_two_ranks):
    counts = [all_well(on_two_ranks[f"counted-sharded-{micro}"])[0]["counts"] for micro in (1, 3, 6)]
    assert counts[0] == counts[1] == counts[2]


# ------------------------------------------------------------------------------------------------- twice the same


def noisy(wrap: Any, dropout: float = 0.3, **options: Any) -> Outcome:
    """Each rank draws its own random numbers in the towers, and all draw the same in the loss."""
    model = wrap(towers(dropout=dropout))
    drawn = []

    def joint(model: Any, encoded: Encoded) -> Any:
        drawn.append([torch.rand((), dtype=torch.float64), random.random(), np.random.rand()])
        return CONTRAST.joint(model, encoded) * drawn[-1][0]

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(10 + dist.get_rank())
    step = MacroStep(model, optimizer_for(model), CONTRAST.loss_fn, joint=joint, micro=2, **options)
    before = full_weights(model)
    step(own_batch(0, (5, 3)[dist.get_rank()], dist.get_rank()))
    after, states = full_weights(model), (torch.get_rng_state(), random.getstate(), np.random.get_state())
    next_ones = [torch.rand(()), random.random(), np.random.rand()]
    for restore, state in zip((torch.set_rng_state, random.setstate, np.random.set_state), states, strict=True):
        restore(state)
    step(own_batch(0, (5, 3)[dist.get_rank()], dist.get_rank()))
    return {"before": before, "after": after, "drawn": drawn, "next": next_ones}


SCENARIOS["noisy-ddp"] = partial(noisy, ddp)
SCENARIOS["noisy-fsdp2"] = partial(noisy, fsdp2)
SCENARIOS["noisy-joint-ddp"] = partial(noisy, ddp, 0.0)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_random_numbers(on_two_ranks, mode):
    outcomes = all_well(on_two_ranks[f"noisy-{mode}"])
    model = towers(dropout=0.3)
    images, texts = [], []
    for rank, samples in enumerate((5, 3)):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(10 + rank)
        for start in range(0, samples, 2):
            part = {key: rows[start : start + 2] for key, rows in own_batch(0, samples, rank).items()}
            image, text, _ = model(part)
            images.append(image)
            texts.append(text)
        assert outcomes[rank]["next"] == [torch.rand(()), random.random(), np.random.rand()]
    drawn = outcomes[0]["drawn"][0][0]
    loss = contrastive_loss(torch.cat(images), torch.cat(texts), scale=model.scale.exp()) * drawn
    taken = difference(outcomes[0]["before"], outcomes[0]["after"])
    assert relative_error(taken, gradient_of(model, loss)) <= 1e-12


@pytest.mark.parametrize("name", ["noisy-ddp", "noisy-fsdp2", "noisy-joint-ddp"])
def test_random_numbers_of_joint_are_the_same_on_all_ranks_and_others_in_every_step(on_two_ranks, name):
    outcomes = all_well(on_two_ranks[name])
    same_on_all(outcomes, "drawn")
    first, second = outcomes[0]["drawn"]
    assert all(one != other for one, other in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------------- parts of the model


def headed(wrap: Any) -> Outcome:
    """A part that only the loss of the whole batch calls: under fully_shard it has a group of its own."""
    model = wrap(towers())

    def joint(model: Any, encoded: Encoded) -> Any:
        return CONTRAST.joint(model, encoded) + model.head(encoded.image).var() + model.router.weight.square().sum()

    step = MacroStep(model, optimizer_for(model), CONTRAST.loss_fn, joint=joint, micro=2)
    found = [full_weights(model)]
    for window in range(2):
        step(own_batch(window, (5, 3)[dist.get_rank()], dist.get_rank()))
        found.append(full_weights(model))
    return {"weights": found}


def sharded_head(model: nn.Module) -> nn.Module:
    for part in (model.image, model.text, model.head):
        fully_shard(part)
    return fully_shard(model)


SCENARIOS["headed-ddp"] = partial(headed, ddp)
SCENARIOS["headed-fsdp2"] = partial(headed, sharded_head)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_parts_that_only_joint_uses(on_two_ranks, mode):
    outcomes = all_well(on_two_ranks[f"headed-{mode}"])
    same_on_all(outcomes, "weights")
    model, found = towers(), outcomes[0]["weights"]
    for window in range(2):
        model.load_state_dict(found[window])
        batch = concatenate([own_batch(window, samples, rank) for rank, samples in enumerate((5, 3))])
        image, text, _ = model(batch)
        loss = contrastive_loss(image, text, scale=model.scale.exp()) + model.head(image).var()
        expected = gradient_of(model, loss + model.router.weight.square().sum())
        assert relative_error(difference(found[window], found[window + 1]), expected) <= 1e-12


# ------------------------------------------------------------------------------------------------- verify, others


def verified(wrap: Any, name: str) -> Outcome:
    """The default step, MacroStep; on shares of unequal size."""
    case, batch = CASES[name], own_batch(0, (5, 3)[dist.get_rank()], dist.get_rank())
    report = verify(wrap(towers()), case.loss_fn, batch, joint=case.joint)
    return {"ok": report.ok, "error": report.max_relative_error, "text": str(report)}


def verified_gradcache() -> Outcome:
    """As its `DistributedContrastiveLoss` has it under DDP, which takes the mean over ranks."""

    def joint(model: Any, encoded: Encoded) -> Any:
        return contrastive_loss(encoded.image, encoded.text, scale=3.0)

    def step(model: Any, batch: Any) -> None:
        gradcache(model, batch, micro=2, joint=joint, gathers=True)

    bare, batch = towers(), own_batch(0, 4, dist.get_rank())
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_(name.startswith(("image", "text")))
    report = verify(ddp(bare), CONTRAST.loss_fn, batch, joint=joint, step=step)
    return {"ok": report.ok, "cause": report.causes[0].name, "evidence": report.causes[0].evidence}


for _name in CASES:
    SCENARIOS[f"verified-{_name}-ddp"] = partial(verified, ddp, _name)
    SCENARIOS[f"verified-{_name}-fsdp2"] = partial(verified, fsdp2, _name)
SCENARIOS["verified-gradcache"] = verified_gradcache


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", CASES)
def test_verify(on_two_ranks, name, mode):
    for outcome in all_well(on_two_ranks[f"verified-{name}-{mode}"]):
        assert outcome["ok"], outcome["text"]
        assert outcome["error"] <= 1e-12


def test_gradcache_on_two_ranks_has_half_the_gradient(on_two_ranks):
    for outcome in all_well(on_two_ranks["verified-gradcache"]):
        assert not outcome["ok"]
        assert outcome["cause"] == "world size"
        assert "0.5 times the right one" in outcome["evidence"]


# ------------------------------------------------------------------------------------------------- memory, mistakes


def out_of_memory(wrap: Any, in_pass: int, **options: Any) -> Outcome:
    """On the second rank, with more than two samples."""
    model, sizes = wrap(towers()), []

    def loss_fn(model: Any, micro: Any) -> Encoded:
        sizes.append(len(micro["x"]))
        is_second = step._engine.window is not None and not step._engine.window.is_empty
        if dist.get_rank() == 1 and sizes[-1] > 2 and is_second == (in_pass == 2):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return CONTRAST.loss_fn(model, micro)

    step = MacroStep(model, optimizer_for(model), loss_fn, joint=CONTRAST.joint, micro="auto", **options)
    before = full_weights(model)
    step(own_batch(0, 5, dist.get_rank()))
    return {"before": before, "after": full_weights(model), "last": sizes[-1], "most": max(sizes)}


for _pass in (1, 2):
    SCENARIOS[f"memory-{_pass}-ddp"] = partial(out_of_memory, ddp, _pass)
    SCENARIOS[f"memory-{_pass}-fsdp2"] = partial(out_of_memory, fsdp2, _pass, gather="window")


@pytest.mark.parametrize("in_pass", [1, 2])
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_memory_that_runs_out_on_one_rank(on_two_ranks, mode, in_pass):
    if mode == "fsdp2" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this torch cannot clear away an aborted backward")
    outcomes = all_well(on_two_ranks[f"memory-{in_pass}-{mode}"])
    same_on_all(outcomes, "after")
    model = towers()
    loss = CONTRAST.whole(model, concatenate([own_batch(0, 5, rank) for rank in range(2)]))
    taken = difference(outcomes[0]["before"], outcomes[0]["after"])
    assert relative_error(taken, gradient_of(model, loss)) <= 1e-12
    assert [(o["most"], o["last"] <= 2) for o in outcomes] == [(5, True)] * 2


def mistaken(kind: str, wrap: Any = ddp) -> Outcome:
    model, is_second = wrap(towers()), dist.get_rank() == 1
    own, seeded = torch.Generator().manual_seed(0), torch.Generator().manual_seed(dist.get_rank())

    def loss_fn(model: Any, micro: Any) -> Encoded:
        image, text, _ = model(micro)
        if kind == "fields" and is_second:
            return Encoded(image=image)
        if kind == "fails" and is_second:
            raise ValueError("planted")
        if kind == "differs" and is_second:
            image = image * torch.rand(1, generator=own)
        return Encoded(image=image, text=text)

    def joint(model: Any, encoded: Encoded) -> Any:
        if kind == "joint" and is_second:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        loss = CONTRAST.joint(model, encoded)
        return loss * (1 + 0.1 * torch.rand((), generator=seeded)) if kind == "unlike" else loss

    before = full_weights(model)
    step = MacroStep(model, optimizer_for(model), loss_fn, joint=joint, micro=2)
    try:
        step(own_batch(0, 4, dist.get_rank()))
    except Exception as error:
        after = full_weights(model)
        moved = any(difference(before, after)[name].any() for name in after)
        return {"message": str(error), "kind": type(error).__name__, "moved": moved}
    return {"message": "", "kind": "", "moved": True}


def synchronised(model: nn.Module) -> nn.Module:
    wrapped: Any = ddp(model)
    wrapped.module.image[1] = nn.SyncBatchNorm(WIDTH).double()  # on a CPU, DDP would refuse it
    return wrapped


MISTAKES = {
    "fields": ("BatchError", "BatchError", "encoded.text came on rank 0 only"),
    "fails": ("BackendError", "ValueError", "rank 1 failed in this window"),
    "differs": ("BatchError", "BatchError", "not the same in the two passes"),
    "joint": ("BackendError", "FitError", "rank 1 failed in this window"),
    "unlike": ("BatchError", "BatchError", "joint did not return the same loss on all ranks"),
}
for _kind in MISTAKES:
    SCENARIOS[f"mistaken-{_kind}"] = partial(mistaken, _kind)
SCENARIOS["mistaken-differs-fsdp2"] = partial(mistaken, "differs", fsdp2)
SCENARIOS["mistaken-unlike-fsdp2"] = partial(mistaken, "unlike", fsdp2)


def unknown(shares: Sequence[int]) -> Outcome:
    """A field in a class that other processes cannot import."""

    @dataclass
    class Local:
        image: torch.Tensor

    model = ddp(towers())
    step = MacroStep(
        model,
        optimizer_for(model),
        lambda model, micro: Encoded(local=Local(model(micro)[0])),
        joint=lambda model, encoded: encoded.local.image.std(),
        micro=2,
    )
    step(own_batch(0, shares[dist.get_rank()], dist.get_rank()))
    return {}


SCENARIOS["unknown"] = partial(unknown, (4, 3))
SCENARIOS["unknown-empty"] = partial(unknown, (4, 0))
SCENARIOS["synced"] = partial(train, [(2, 2)], CONTRAST, synchronised)
SCENARIOS["fsdp1"] = partial(train, [(2, 2)], CONTRAST, fsdp1)


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_on_one_rank_stop_all(on_two_ranks, kind):
    outcomes = all_well(on_two_ranks[f"mistaken-{kind}"])
    assert [outcome["kind"] for outcome in outcomes] == list(MISTAKES[kind][:2])
    assert MISTAKES[kind][2] in outcomes[0]["message"]
    assert not any(outcome["moved"] for outcome in outcomes)


def test_passes_that_differ_on_one_rank_of_a_sharded_model(on_two_ranks):
    for outcome in all_well(on_two_ranks["mistaken-differs-fsdp2"]):
        assert "not the same in the two passes" in outcome["message"]
        assert not outcome["moved"]


def test_losses_that_differ_between_the_ranks_of_a_sharded_model(on_two_ranks):
    for outcome in all_well(on_two_ranks["mistaken-unlike-fsdp2"]):
        assert "joint did not return the same loss on all ranks" in outcome["message"]
        assert not outcome["moved"]


def test_layers_that_communicate_are_refused(on_two_ranks):
    all_refused(on_two_ranks["synced"], "SyncBatchNorm with joint=")


def test_classes_that_cannot_travel_to_a_rank_without_samples(on_two_ranks):
    all_well(on_two_ranks["unknown"])
    all_refused(on_two_ranks["unknown-empty"], "Local", "outside of functions")


def test_the_first_fsdp_is_refused(on_two_ranks):
    all_refused(on_two_ranks["fsdp1"], "joint= needs DistributedDataParallel or fully_shard")
