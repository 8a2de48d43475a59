"""Checkpoints on real ranks: saved on two or four, loaded on one, two or four; what fails on one rank fails on all."""

import os
import resource
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness.ranks import Outcome, all_refused, all_well, ddp, fsdp2, full_weights, hsdp, made, run
from macrobatch.train.checkpoint import Checkpoints, restore, state

WIDTH, STEPS = 6, 3


class Odd(nn.Module):
    """Shapes that do not divide by the ranks: shards of some are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, WIDTH), nn.BatchNorm1d(WIDTH)
        self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 11)
        self.three, self.one = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.middle(self.embedding(x))))) * self.one * self.three.square().mean()


def plain(model: nn.Module) -> nn.Module:
    return model


WRAPS = {"plain": plain, "ddp": ddp, "fsdp": fsdp2, "hsdp": hsdp}


def start(wrap: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WRAPS[wrap](made(Odd).train())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-5, fused=True)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    """Every rank does the same batch, so that their mean does not depend on how many there are."""
    for step in range(first, first + STEPS):
        x = torch.arange(step, step + 8) % 11
        F.cross_entropy(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpoints(name: str) -> Checkpoints:
    return Checkpoints(Path(os.environ["CHECKPOINTS"]) / name)


def everything(model: nn.Module) -> Outcome:
    """All weights whole, the running statistics, and the numbers that this rank draws next."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"weights": full_weights(model), "buffers": list(buffers.values()), "drawn": torch.rand(3)}


def saves(wrap: str, name: str) -> Outcome:
    model, optimizer = start(wrap)
    trained(model, optimizer, 0)
    model.eval()
    with torch.no_grad():
        model(torch.arange(8))  # FSDP leaves what a forward gathered at the root until the next backward
    torch.manual_seed(100 + dist.get_rank())
    path = checkpoints(name).save(STEPS, state(model, optimizer), {"ranks": dist.get_world_size()})
    own = set(checkpoints(name).specs(path))
    torch.manual_seed(100 + dist.get_rank())
    model.train()
    trained(model, optimizer, STEPS)
    return everything(model) | {"path": path.name, "held": sorted(own), "files": sorted(os.listdir(path))}


def goes_on(wrap: str, name: str) -> Outcome:
    model, optimizer = start(wrap)
    trained(model, optimizer, 5)  # so that all there is has to be put back
    again = checkpoints(name)
    facts = restore(again, again.newest(), model, optimizer)
    trained(model, optimizer, STEPS)
    return everything(model) | {"facts": facts}


SAVED = {"ddp-2": ("ddp", 2), "fsdp-2": ("fsdp", 2), "ddp-4": ("ddp", 4), "fsdp-4": ("fsdp", 4), "hsdp-4": ("hsdp", 4)}
LOADED = {1: ["plain", "fsdp"], 2: ["ddp", "fsdp"], 4: ["ddp", "fsdp", "hsdp"]}
SAVES = {
    ranks: {name: partial(saves, wrap, name) for name, (wrap, n) in SAVED.items() if n == ranks} for ranks in (2, 4)
}
LOADS = {
    ranks: {f"{name}-on-{wrap}": partial(goes_on, wrap, name) for name in SAVED for wrap in wraps}
    for ranks, wraps in LOADED.items()
}


# ------------------------------------------------------------------------------------- what fails on one rank only


def only_on_the_second(act) -> None:
    if dist.get_rank() == 1:
        act()
    dist.barrier()


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def full_disk() -> Outcome:
    """The second rank cannot write; afterwards it can, and nothing is left of the attempt."""
    its = checkpoints("full")
    model, optimizer = start("fsdp")
    its.save(1, state(model, optimizer), {})
    only_on_the_second(lambda: limit(500))
    try:
        its.save(2, state(model, optimizer), {})
    except Exception as error:
        dist.barrier()  # the first rank has tidied up
        outcome = {"message": str(error), "kind": type(error).__name__, "left": sorted(os.listdir(its.folder))}
    only_on_the_second(lambda: limit(resource.RLIM_INFINITY))
    return outcome | {"then": its.save(2, state(model, optimizer), {}).name}


def damaged() -> Outcome:
    """A file of the second rank is cut, under the newer of two."""
    its = checkpoints("damaged")
    model, optimizer = start("fsdp")
    for step in (1, 2):
        path = its.save(step, state(model, optimizer), {"step": step})
    only_on_the_second(lambda: os.truncate(path / "rank-00001.safetensors", 600))
    again = checkpoints("damaged")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        newest = again.newest()
    return {"newest": newest.name, "told": [str(one.message) for one in told], "facts": again.facts(newest)}


def misfit() -> Outcome:
    """The second rank wants a tensor that was not saved."""
    its = checkpoints("misfit")
    path = its.save(1, {"a": torch.ones(2)}, {})
    return {"facts": its.load(path, {"a": torch.ones(2)} | ({"b": torch.ones(1)} if dist.get_rank() else {}))}


def folders_of_their_own() -> Outcome:
    """Two hosts without a common file system: the same path is another folder on each."""
    host = Path(os.environ["CHECKPOINTS"], f"host-{dist.get_rank()}")
    host.mkdir()
    os.chdir(host)
    return {"path": Checkpoints(Path("own")).save(1, {f"a{dist.get_rank()}": torch.ones(9)}, {}).name}


FAILURES = {"full_disk": full_disk, "damaged": damaged, "misfit": misfit, "own": folders_of_their_own}
SCENARIOS = {"SAVES4": SAVES[4], "SAVES2": SAVES[2] | FAILURES | LOADS[2], "LOADS4": LOADS[4], "LOADS1": LOADS[1]}
globals().update(SCENARIOS)


@pytest.fixture(scope="module")
def saves_and_loads(tmp_path_factory):
    """In an order in which everything is saved before it is loaded."""
    folder = tmp_path_factory.mktemp("ranks")
    os.environ["CHECKPOINTS"] = str(folder / "checkpoints")
    outcomes = {}
    for name in SCENARIOS:
        (folder / name).mkdir()
        outcomes[name] = run(__name__, name, int(name[-1]), folder / name)
    del os.environ["CHECKPOINTS"]
    outcomes["LOADS2"] = outcomes["SAVES2"]  # one torchrun less
    return outcomes


# ------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", SAVED)
def test_files_and_names(saves_and_loads, name):
    """Every rank writes a part; and whatever the ranks and the wrapper, tensors have the names of the plain model."""
    ranks = SAVED[name][1]
    plain_names = {f"model.{one}" for one in Odd().state_dict()}
    for outcome in all_well(saves_and_loads[f"SAVES{ranks}"][name]):
        assert outcome["path"] == f"step-0000000{STEPS}"
        assert outcome["files"] == ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(ranks))]
        held = outcome["held"]
        assert {one for one in held if one.startswith("model.")} == plain_names
        assert {one for one in held if one.startswith("random.")} == {f"random.{rank}.cpu" for rank in range(ranks)}
        assert "optimizer.three.exp_avg_sq" in held


@pytest.mark.parametrize(("ranks", "scenario"), [(ranks, scenario) for ranks in LOADS for scenario in LOADS[ranks]])
def test_going_on(saves_and_loads, ranks, scenario):
    """Bitwise on the same ranks in the same way; to rounding on others, in other ways."""
    name, _, wrap = scenario.partition("-on-")
    saved = all_well(saves_and_loads[f"SAVES{SAVED[name][1]}"][name])
    for rank, outcome in enumerate(all_well(saves_and_loads[f"LOADS{ranks}"][scenario])):
        assert outcome["facts"] == {"ranks": SAVED[name][1]}
        alike = (wrap, ranks) == SAVED[name]
        for one, other in zip(flat(saved[0]), flat(outcome), strict=True):
            torch.testing.assert_close(one, other, rtol=0 if alike else 1e-9, atol=0 if alike else 1e-12)
        if rank < len(saved):
            assert torch.equal(outcome["drawn"], saved[rank]["drawn"])


def flat(outcome: Outcome) -> list[Tensor]:
    return [outcome["weights"][name] for name in sorted(outcome["weights"])] + outcome["buffers"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_draw_numbers_of_their_own(saves_and_loads, ranks):
    """Also those that were not there when the checkpoint was saved."""
    drawn = [tuple(outcome["drawn"].tolist()) for outcome in all_well(saves_and_loads[f"LOADS{ranks}"]["ddp-2-on-ddp"])]
    assert len(set(drawn)) == ranks


def test_a_full_disk_of_one_rank(saves_and_loads):
    for outcome in all_well(saves_and_loads["SAVES2"]["full_disk"]):
        assert outcome["kind"] == "CheckpointError"
        assert "rank-00001.safetensors on rank 1: [Errno 27] File too large" in outcome["message"]
        assert outcome["left"] == ["step-00000001"]
        assert outcome["then"] == "step-00000002"


def test_a_damaged_file_of_one_rank(saves_and_loads):
    first, second = all_well(saves_and_loads["SAVES2"]["damaged"])
    for outcome in (first, second):
        assert (outcome["newest"], outcome["facts"]) == ("step-00000001", {"step": 1})
    assert len(first["told"]) == 1
    assert "rank-00001.safetensors is damaged: it has 600 bytes" in first["told"][0]
    assert second["told"] == []


def test_a_misfit_on_one_rank(saves_and_loads):
    all_refused(saves_and_loads["SAVES2"]["misfit"], "b is missing in it")


def test_ranks_that_do_not_see_the_same_folder(saves_and_loads):
    all_refused(
        saves_and_loads["SAVES2"]["own"], "step 1 was not written", "on rank 1", "all ranks must see the same folder"
    )
