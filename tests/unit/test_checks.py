"""Each check of the catalogue notices the wrong program that it has, and only it does."""

import os

import pytest
import torch
from torch import nn

from harness.checks import PAGE, START, outcome_of, page, source_of
from harness.ranks import torchrun
from macrobatch import Accumulator, MacroStep, verify
from macrobatch._checks.catalogue import CATALOGUE, SWITCH
from macrobatch._engine.events import Check
from macrobatch.errors import UsageError

ALONE = [check for check in CATALOGUE if check.num_ranks == 1]
ON_RANKS = [check for check in CATALOGUE if check.num_ranks > 1]


def name_of(check):
    return check.name


@pytest.mark.parametrize("check", ALONE, ids=name_of)
def test_the_wrong_program_is_noticed(check):
    assert check.shows in outcome_of(check)


@pytest.mark.parametrize("check", ALONE, ids=name_of)
def test_without_the_check_it_is_not(check, monkeypatch):
    """A planted bug: the check notices nothing."""
    monkeypatch.setattr(f"{check.__module__}.warn", lambda message: None, raising=False)
    for name in vars(check):
        if callable(getattr(check, name)) and not name.startswith("_"):
            blind = {"flags": lambda *_, **__: {}, "compare": lambda *_, **__: {}, "watch": lambda *_: False}
            monkeypatch.setattr(check, name, blind.get(name, lambda *_, **__: None))
    assert check.shows not in outcome_of(check)


def said_on_ranks(check, tmp_path, **variables):
    program = tmp_path / "program.py"
    start = START.replace("\nmodel =", '\ntorch.distributed.init_process_group("gloo")\ntorch.manual_seed(0)\nmodel =')
    start = start.replace("\nacc = Accumulator(model, optimizer, steps=2)", "")
    program.write_text(start + "\n" + source_of(check))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TORCH_DISTRIBUTED_DEBUG": "OFF", **variables}.items():
            patch.setenv(name, value)
        return torchrun(
            check.num_ranks, program, directory=tmp_path, imported=["torch.nn.parallel", "macrobatch"]
        ).output


@pytest.mark.parametrize("check", ON_RANKS, ids=name_of)
def test_the_wrong_program_is_noticed_on_ranks(check, tmp_path):
    assert check.shows in said_on_ranks(check, tmp_path)


def test_without_the_check_it_is_not_on_ranks(tmp_path):
    ranks_differ = next(check for check in ON_RANKS if check.name == "ranks that differ")
    assert ranks_differ.shows not in said_on_ranks(ranks_differ, tmp_path, **{SWITCH: "off"})


def test_the_page_is_made_from_the_catalogue():
    assert PAGE.read_text() == page(), "cd tests && python -m harness.checks"


def test_every_check_is_in_the_catalogue():
    def subclasses(kind):
        return {one for child in kind.__subclasses__() for one in (child, *subclasses(child))}

    assert {one for one in subclasses(Check) if one.__module__.startswith("macrobatch.")} == set(CATALOGUE)


# -------------------------------------------------------------------------------------------------------- turned off


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2, max_norm=1.0)
    for x in acc.batches([torch.randn(n, 3).double() for n in (5, 2, 7)]):
        acc.backward(model(x).square().mean(), items=len(x))
        acc.step()
    return [p.detach().clone() for p in model.parameters()], acc


def test_turned_off_nothing_observes_and_results_are_the_same(monkeypatch):
    expected, _ = trained()
    monkeypatch.setenv(SWITCH, "off")
    found, acc = trained()
    assert all(map(torch.equal, found, expected))
    assert not any(vars(acc._engine.on).values())


@pytest.mark.parametrize("value", ["", "0", "OFF"])
def test_another_value_is_an_error(monkeypatch, value):
    monkeypatch.setenv(SWITCH, value)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for make in (lambda: Accumulator(model, optimizer), lambda: MacroStep(model, optimizer, lambda model, x: x)):
        with pytest.raises(UsageError, match="must be on or off"):
            make()


def test_verify_ignores_it(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    model = nn.Linear(2, 1)

    def step(model, batch):
        acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        for x in acc.batches(batch.split(2)):
            acc.backward(model(x).square().mean(), items=len(x))
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            acc.step()

    with pytest.raises(UsageError, match="were changed since the last backward"):
        verify(model, lambda model, x: model(x).square().mean(), torch.randn(4, 2), step=step)
    assert os.environ[SWITCH] == "off"
