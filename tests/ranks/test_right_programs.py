"""On two ranks: programs that are right in plain torch, and forwards that change what they read."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from harness.ranks import Outcome, all_refused, all_well
from macrobatch import Accumulator, MacroStep

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
SIZES = (4, 2, 3, 5)
WORDS = [torch.tensor(words) for words in ([1, 2], [2, 3, 4], [7], [1, 1, 9])]


def micro_batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in SIZES]


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    SCENARIOS[function.__name__] = function
    return function


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own(batches: Sequence[Tensor]) -> Sequence[Tensor]:
    return batches[dist.get_rank() :: 2]


def largest(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


# ---------------------------------------------------------------------------------------- tensors that no model holds


def with_temperature(wrapper: Callable[[nn.Module], nn.Module], several: bool = False) -> Outcome:
    model, scale = wrapper(linear()), torch.ones((), dtype=torch.float64, requires_grad=True)
    models = [model, wrapper(linear())] if several else [model]
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend([whole(next(model.parameters()).grad).clone(), scale.grad.clone()])
    )
    acc = Accumulator(models, optimizer, steps=2)
    for x in acc.batches(own(micro_batches())):
        acc.backward((scale * model(x)).square().mean())
        acc.step()
    return {"weight": seen[0], "scale": seen[1]}


@scenario
def temperature_ddp() -> Outcome:
    return with_temperature(DistributedDataParallel)


@scenario
def temperature_fsdp() -> Outcome:
    return with_temperature(fully_shard)


@scenario
def temperature_several() -> Outcome:
    return with_temperature(DistributedDataParallel, several=True)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "several"])
def test_a_bare_tensor_is_summed_over_ranks(on_two_ranks, how):
    model, scale = linear(), torch.ones((), dtype=torch.float64, requires_grad=True)
    (scale * model(torch.cat(micro_batches()))).square().mean().backward()
    for outcome in all_well(on_two_ranks[f"temperature_{how}"]):
        assert largest(outcome["weight"], model.weight.grad) <= 1e-12
        assert largest(outcome["scale"], scale.grad) <= 1e-12


# ---------------------------------------------------------------------------------------------- sparse gradients


@scenario
def sparse() -> Outcome:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(20, 4, sparse=True).double())
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(next(model.parameters()).grad.to_dense()))
    acc = Accumulator(model, optimizer, steps=2)
    for words in acc.batches(own(WORDS)):
        acc.backward(model(words).square().mean())
        acc.step()
    return {"weight": seen[0]}


def test_sparse_gradients_under_ddp(on_two_ranks):
    torch.manual_seed(0)
    model = nn.Embedding(20, 4).double()
    model(torch.cat(WORDS)).square().mean().backward()
    for outcome in all_well(on_two_ranks["sparse"]):
        assert largest(outcome["weight"], model.weight.grad) <= 1e-12


# --------------------------------------------------------------------- two models in one graph, both in open windows


def through_a_frozen_one(syncs: bool) -> Outcome:
    """A critic with an open window, through which a forger is trained. `syncs`: the frozen critic still exchanges."""
    critic, forger = linear(), nn.Linear(3, 3).double()
    fully_shard(critic), fully_shard(forger)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, forger)]
    seen: list[Tensor] = []
    optimizers[0].register_step_pre_hook(lambda *_: seen.append(whole(next(critic.parameters()).grad)))
    acc = Accumulator(critic, optimizers[0], steps=2)
    other = Accumulator(forger, optimizers[1], steps=2)
    for x in acc.batches(own(micro_batches())):
        acc.backward(critic(x).square().mean())
        critic.requires_grad_(False)
        critic.set_requires_gradient_sync(syncs)
        with other.micro_batch(last=acc.is_last):
            other.backward(critic(forger(x)).square().mean())
        critic.set_requires_gradient_sync(True)
        critic.requires_grad_(True)
        acc.step()
        other.step()
    return {"weight": seen[0]}


@scenario
def frozen() -> Outcome:
    return through_a_frozen_one(syncs=False)


@scenario
def frozen_but_exchanging() -> Outcome:
    return through_a_frozen_one(syncs=True)


def test_a_model_is_trained_through_a_frozen_one_under_fully_shard(on_two_ranks):
    model = linear()
    model(torch.cat(micro_batches())).square().mean().backward()
    for outcome in all_well(on_two_ranks["frozen"]):
        assert largest(outcome["weight"], model.weight.grad) <= 1e-12
    all_refused(on_two_ranks["frozen_but_exchanging"], "set_requires_gradient_sync(False)")


# ------------------------------------------------------------------------------- a criterion that counts over ranks


def masks() -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.rand(n, generator=draw) < p for n, p in zip(SIZES, (0.9, 0.2, 0.6, 0.5), strict=True)]


def boxes(added: int = 0) -> Outcome:
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(next(model.parameters()).grad.clone()))
    acc = Accumulator(model, optimizer, steps=2, counts=lambda batch: {"box": batch[1].sum() + added})
    for x, mask in acc.batches(own(list(zip(micro_batches(), masks(), strict=True)))):
        number = mask.sum().double()
        dist.all_reduce(number)
        number = (number / dist.get_world_size()).clamp(min=1)
        loss = (model(x).abs().sum(-1) * mask).sum() / number
        acc.backward({"box": (loss, number)})
        acc.step()
    return {"weight": seen[0]}


@scenario
def mean_over_ranks() -> Outcome:
    return boxes()


@scenario
def wrong_total() -> Outcome:
    return boxes(added=dist.get_rank())


def test_counts_are_compared_over_all_ranks_together(on_two_ranks):
    model = linear()
    x, mask = torch.cat(micro_batches()), torch.cat(masks())
    ((model(x).abs().sum(-1) * mask).sum() / mask.sum()).backward()
    for outcome in all_well(on_two_ranks["mean_over_ranks"]):
        assert largest(outcome["weight"], model.weight.grad) <= 1e-12
    all_refused(on_two_ranks["wrong_total"], "the items of the term 'box'", "with those of the other ranks")


# ---------------------------------------------------------------------- programs that exchange gradients themselves


@scenario
def by_hand() -> Outcome:
    model = linear()
    train = MacroStep(model, None, lambda model, x: model(x).square().mean(), micro=2)
    train(micro_batches()[dist.get_rank()])  # four samples on one rank, two on the other
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return {"weight": model.weight.grad}


@scenario
def stepping_unwrapped() -> Outcome:
    model = linear()
    Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {}


def test_programs_that_exchange_gradients_themselves(on_two_ranks):
    model = linear()
    model(torch.cat(micro_batches()[:2])).square().mean().backward()
    for outcome in all_well(on_two_ranks["by_hand"]):
        assert largest(outcome["weight"], model.weight.grad) <= 1e-12
    all_refused(on_two_ranks["stepping_unwrapped"], "is not wrapped", "MacroStep(model, None, loss_fn)")


# ---------------------------------------------------------------------- forwards that change weights


class Follower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.slow = linear(), linear().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - 0.5 * self.slow(x)).square().mean()


def following(wrapper: Callable[[nn.Module], nn.Module], when: str, *, gathers: bool = False) -> Outcome:
    bare = Follower()
    model = wrapper(bare)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    acc = Accumulator(model, optimizer, steps=2)

    def follow() -> None:
        with FullyShardedDataParallel.summon_full_params(model) if gathers else contextlib.nullcontext():
            bare.slow.weight.data.mul_(0.9 if when != "as it was" else 1.0)

    for x in acc.batches(own(micro_batches())):
        acc.backward(model(x), items=len(x))
        if when != "after":
            follow()
        if acc.step() and when == "after":
            follow()
    return {"steps": acc.optimizer_step}


def flattened(model: nn.Module, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


WRAPPERS: dict[str, Any] = {
    "ddp": (DistributedDataParallel, False),
    "fsdp": (fully_shard, False),
    "fsdp1": (partial(flattened, use_orig_params=True), False),
    "fsdp1, gathered": (partial(flattened, use_orig_params=True), True),
    "fsdp1, flat": (flattened, True),
    "fsdp1, whole": (partial(flattened, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD), False),
    "fsdp1, kept": (partial(flattened, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), True),
}
for _name, (_wrapper, _gathers) in WRAPPERS.items():
    for _when in ("inside", "after", "as it was"):
        SCENARIOS[f"{_when}_{_name}"] = partial(following, _wrapper, _when, gathers=_gathers)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_parameter_that_changes_inside_a_window(on_two_ranks, wrapper):
    all_refused(
        on_two_ranks[f"inside_{wrapper}"], "slow.weight", "a parameter that is not trained, changed inside window 1"
    )
    for when in ("after", "as it was"):
        assert [outcome["steps"] for outcome in all_well(on_two_ranks[f"{when}_{wrapper}"])] == [1, 1]
