"""`macrobatch.audit` on two ranks: weights over all ranks, without a collective that the program does not make."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import macrobatch
from harness.audited import CLASSES, WIDTH, network, sgd
from harness.ranks import Outcome, run, torchrun

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
ANSWERS: dict[str, tuple[str, float | None, set[str]]] = {}
RANKS = 2
EQUAL, UNEQUAL = ([4] * 4, [4] * 4), ([4, 1, 3, 2], [2, 5, 1, 4])


def program(verdict: str, factor: float | None = None, *causes: str) -> Any:
    def add(body: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        SCENARIOS[body.__name__] = partial(audited, body)
        ANSWERS[body.__name__] = (verdict, factor, set(causes))
        return body

    return add


right = program("exact", 1.0)


def audited(body: Callable[[], nn.Module]) -> Outcome:
    """What the audit says, and the weights with and without it."""
    weights = []
    for is_audited in (False, True):
        torch.manual_seed(0)
        with macrobatch.audit() if is_audited else contextlib.nullcontext() as report:
            model = body()
        weights.append([p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()])
    return {
        "found": report.to_dict(),
        "text": str(report),
        "same": all(map(torch.equal, *weights)),
    }


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(network())


def loop(
    model: nn.Module, sizes: tuple[list[int], list[int]], loss_of: Callable[[Tensor, Tensor], Tensor],
    *, holds: bool = True, windows: int = 2, last_too: bool = False, before: Callable[[], object] | None = None,
) -> nn.Module:  # fmt: skip
    """Windows of one micro-batch for each size."""
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    own = sizes[dist.get_rank()]
    for _ in range(windows):
        for index, size in enumerate(own):
            is_last = index == len(own) - 1
            x, y = (
                torch.randn(size, WIDTH, generator=generator),
                torch.randint(0, CLASSES, (size,), generator=generator),
            )
            with model.no_sync() if holds and (not is_last or last_too) else contextlib.nullcontext():  # type: ignore[operator]
                loss_of(model(x), y).backward()
        if before is not None:
            before()
        optimizer.step()
        optimizer.zero_grad()
    return model


def mean_of_four(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) / 4


def all_items(sizes: tuple[list[int], list[int]]) -> int:
    return sum(map(sum, sizes))


def share_of(sizes: tuple[list[int], list[int]], times: float = RANKS) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, y: F.cross_entropy(out, y, reduction="sum") * times / all_items(sizes)


@right
def equal_micro_batches() -> nn.Module:
    return loop(wrapped(), EQUAL, mean_of_four)


@right
def without_no_sync() -> nn.Module:
    return loop(wrapped(), EQUAL, mean_of_four, holds=False)


@right
def tokens_of_all_ranks() -> nn.Module:
    return loop(wrapped(), UNEQUAL, share_of(UNEQUAL))


@right
def tokens_of_all_ranks_without_no_sync() -> nn.Module:
    return loop(wrapped(), UNEQUAL, share_of(UNEQUAL), holds=False)


@right
def no_accumulation() -> nn.Module:
    return loop(wrapped(), ([4], [4]), lambda out, y: F.cross_entropy(out, y), holds=False)


@program("wrong", 1.0, "mean of means")
def unequal_micro_batches() -> nn.Module:
    return loop(wrapped(), UNEQUAL, mean_of_four)


@program("wrong", 1.0, "mean of means")
def unequal_ranks_without_accumulation() -> nn.Module:
    return loop(wrapped(), ([4], [2]), lambda out, y: F.cross_entropy(out, y), holds=False)


@program("wrong", 2.0, "world size")
def world_size_once_too_often() -> nn.Module:
    return loop(wrapped(), UNEQUAL, share_of(UNEQUAL, 4))


@program("wrong", 0.5, "world size")
def world_size_forgotten() -> nn.Module:
    return loop(wrapped(), UNEQUAL, share_of(UNEQUAL, 1))


@program("wrong", 4.0, "not divided")
def not_divided() -> nn.Module:
    return loop(wrapped(), EQUAL, lambda out, y: F.cross_entropy(out, y))


@program("wrong", None, "gradients not synchronised")
def held_to_the_end() -> nn.Module:
    return loop(wrapped(), EQUAL, mean_of_four, last_too=True)


def reduce_by_hand(model: nn.Module, divisor: float) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(divisor)


@right
def reduced_by_hand() -> nn.Module:
    model = network()
    return loop(model, EQUAL, mean_of_four, holds=False, before=lambda: reduce_by_hand(model, RANKS))


@program("wrong", 2.0, "world size")
def summed_by_hand() -> nn.Module:
    model = network()
    return loop(model, EQUAL, mean_of_four, holds=False, before=lambda: reduce_by_hand(model, 1))


@program("unknown")
def half_of_the_squares() -> nn.Module:
    """0.5 belongs to the loss, or it is a division by two ranks."""
    return loop(wrapped(), ([4], [4]), lambda out, y: 0.5 * F.mse_loss(out, F.one_hot(y, CLASSES).float()), holds=False)


@right
def a_scaled_loss() -> nn.Module:
    scaler, model = torch.amp.GradScaler("cpu", init_scale=1024.0), wrapped()
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(2):
        for _ in range(2):
            x, y = torch.randn(4, WIDTH, generator=generator), torch.randint(0, CLASSES, (4,), generator=generator)
            scaler.scale(F.cross_entropy(model(x), y) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@program("wrong", 1.0, "samples left out")
def left_at_the_end() -> nn.Module:
    model = wrapped()
    optimizer = sgd(model)
    for index in range(3):
        (F.cross_entropy(model(torch.randn(4, WIDTH)), torch.zeros(4, dtype=torch.long)) / 2).backward()
        if index == 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


def adversaries(*, clears: bool) -> nn.Module:
    maker, judge = DistributedDataParallel(network(WIDTH)), DistributedDataParallel(network(1), broadcast_buffers=False)
    for_maker, for_judge = sgd(maker), sgd(judge)
    for _ in range(3):
        made = maker(torch.randn(4, WIDTH))
        for seen, wanted in ((torch.randn(4, WIDTH), 1.0), (made.detach(), 0.0)):
            F.binary_cross_entropy_with_logits(judge(seen), torch.full((4, 1), wanted)).backward()
        for_judge.step()
        for_judge.zero_grad()
        F.binary_cross_entropy_with_logits(judge(made), torch.ones(4, 1)).backward()
        for_maker.step()
        for_maker.zero_grad()
        if clears:
            for_judge.zero_grad()
    return judge


@program("unknown")
def a_gan_in_a_loop() -> nn.Module:
    return adversaries(clears=True)


@program("unknown")
def the_gradient_of_a_generator_in_the_judge() -> nn.Module:
    return adversaries(clears=False)


def library_loop(model: nn.Module) -> nn.Module:
    """The same windows by this library."""
    acc = macrobatch.Accumulator(model, sgd(model), steps=4)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    sizes = UNEQUAL[dist.get_rank()] * 2
    data = [
        (torch.randn(n, WIDTH, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator))
        for n in sizes
    ]
    for x, y in acc.batches(data):
        acc.backward(F.cross_entropy(model(x), y))
        acc.step()
    return model


@right
def windows_of_this_library() -> nn.Module:
    return library_loop(wrapped())


@right
def sharded_windows_of_this_library() -> nn.Module:
    return library_loop(sharded())


def sharded() -> nn.Module:
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def sharded_loop(sizes: tuple[list[int], list[int]], loss_of: Any, *, holds: bool = True, **more: Any) -> nn.Module:
    """The loop of `fully_shard`: gradients are exchanged in the last backward only, if it `holds` them."""
    model = sharded()
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    own = sizes[dist.get_rank()]
    for _ in range(2):
        for index, size in enumerate(own):
            model.set_requires_gradient_sync(not holds or index == len(own) - 1)
            x = torch.randn(size, WIDTH, generator=generator)
            y = torch.randint(0, CLASSES, (size,), generator=generator)
            loss_of(model(x), y).backward()
        if "max_norm" in more:
            nn.utils.clip_grad_norm_(model.parameters(), more["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return model


@right
def sharded_equal() -> nn.Module:
    return sharded_loop(EQUAL, mean_of_four)


@right
def sharded_and_exchanged_every_time() -> nn.Module:
    return sharded_loop(EQUAL, mean_of_four, holds=False)


@right
def sharded_tokens_of_all_ranks() -> nn.Module:
    return sharded_loop(UNEQUAL, share_of(UNEQUAL), max_norm=0.01)


@program("wrong", 1.0, "mean of means")
def sharded_unequal() -> nn.Module:
    return sharded_loop(UNEQUAL, mean_of_four)


@program("wrong", 0.5, "world size")
def sharded_world_size_forgotten() -> nn.Module:
    return sharded_loop(UNEQUAL, share_of(UNEQUAL, 1))


PROGRAM = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in range(100):
    for size in (2, 4 + rank):
        loss = cross_entropy(model(torch.randn(size, 3)), torch.randint(0, 2, (size,)))
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
print("the program has ended")
"""


def test_the_command_under_torchrun(tmp_path):
    """All ranks end at the same step, the first one reports, and no file is left behind."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "temporary").mkdir()
    code = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'temporary')!r}\n"
    (tmp_path / "audited.py").write_text(
        code + "from macrobatch.cli import leave, main\nif __name__ == '__main__': leave(main())\n"
    )
    command = (tmp_path / "audited.py", "audit", "--windows", "3", "--json", "found.json", tmp_path / "train.py")
    launch = torchrun(RANKS, *command, directory=tmp_path)
    assert "the program has ended" not in launch.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["verdict"], found["causes"], len(found["windows"])) == ("wrong", ["mean of means"], 3), launch.output
    assert found["windows"][0]["items"] == [2, 4, 2, 5]
    weights = found["windows"][0]["weights"]
    assert weights == pytest.approx([13 / 8, 13 / 16, 13 / 8, 13 / 20])
    assert launch.exit_code == 1
    assert not list((tmp_path / "temporary").glob("macrobatch-audit-*"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(__name__, "SCENARIOS", RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_two_ranks(outcomes, name):
    verdict, factor, causes = ANSWERS[name]
    for outcome in outcomes[name]:
        assert "found" in outcome, outcome
        found = outcome["found"]
        assert (found["verdict"], set(found["causes"])) == (verdict, causes), outcome["text"]
        if factor is not None:
            assert found["factor"] == pytest.approx(factor, rel=1e-3)
        assert outcome["same"], "the audit has changed the weights"
    assert outcomes[name][0]["found"]["windows"] == outcomes[name][1]["found"]["windows"]
