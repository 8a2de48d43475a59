"""TRL's trainers of pairs under `exact` on two ranks that have different numbers of micro-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from harness.programs import run_on_cpu
from harness.ranks import Outcome, all_well
from harness.trainers import apart
from harness.trls import ROUNDING, float32_model, grpo, reference_model, reward_model, run_trainer
from macrobatch import by_tokens
from macrobatch.transformers import exact

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
FORKS = False  # some ranks that were forked after an import of transformers never began
SCENARIOS: dict[str, Callable[[], Outcome]] = {}
TRAINERS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
    "dpo and sft": (trl.DPOTrainer, trl.DPOConfig, {"loss_type": ["sigmoid", "sft"]}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
}
LOGGED = {
    "dpo": "logps/chosen",
    "dpo and sft": "logps/rejected",
    "reward": "mean_reward",
}  # means of means


def pairs() -> Any:
    """Every other batch of two has long texts: those of the second rank."""
    draw = torch.Generator().manual_seed(3)

    def text(length: int) -> str:
        return " ".join(f"w{int(word)}" for word in torch.randint(0, 20, (length,), generator=draw))

    lengths = [14 if index // 2 % 2 else 3 for index in range(24)]
    rows = [{"prompt": text(3), "chosen": text(n), "rejected": text(n - 1)} for n in lengths]
    return datasets.Dataset.from_list(rows)


def fit(name: str, trainer_class: Any, **sizes: Any) -> Any:
    datasets.disable_progress_bars()
    _, config, options = TRAINERS[name]
    given = {"model": reward_model} if name == "reward" else {"ref_model": reference_model()}
    made, _ = run_trainer(trainer_class, config, pairs(), options={"max_length": 40, **options}, **given, **sizes)
    return made


def by_tokens_on_ranks(name: str) -> Outcome:
    made = fit(name, exact(TRAINERS[name][0], micro=by_tokens(40)), steps=3)
    return {"weights": made.model.state_dict(), "logs": made.state.log_history}


for _name in TRAINERS:
    SCENARIOS[_name] = partial(run_on_cpu, partial(by_tokens_on_ranks, _name))


GROUPS = [(loss_type, bf16) for loss_type in ("grpo", "dapo", "") for bf16 in (False, True)]


def groups_on_ranks(loss_type: str, bf16: bool) -> Outcome:
    """GRPO, or RLOO, as it is and under `exact`."""
    datasets.disable_progress_bars()
    stock = trl.GRPOTrainer if loss_type else trl.RLOOTrainer
    options = {"model": float32_model, "bf16": bf16}
    theirs, ours = (grpo(kind, loss_type, **options)[0] for kind in (stock, exact(stock)))
    return {"theirs": theirs.model.state_dict(), "ours": ours.model.state_dict()}


for _case in GROUPS:
    SCENARIOS[str(_case)] = partial(run_on_cpu, partial(groups_on_ranks, *_case))


@pytest.mark.filterwarnings("ignore")  # of TRL and datasets, about themselves
@pytest.mark.parametrize("name", TRAINERS)
def test_pairs_by_tokens(on_two_ranks, name):
    big = fit(name, TRAINERS[name][0], big=True, steps=6)
    for outcome in all_well(on_two_ranks[name]):
        assert apart(outcome["weights"], big.model.state_dict()) <= 10 * ROUNDING
        for ours, theirs in zip(outcome["logs"][:2], big.state.log_history[:2], strict=True):
            assert ours["num_tokens"] == theirs["num_tokens"]
            assert ours[LOGGED[name]] == pytest.approx(theirs[LOGGED[name]], rel=0.5, abs=1e-3)


@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_grpo_and_rloo_are_bit_for_bit_the_trainer_as_it_is(on_two_ranks, case):
    first = float32_model().state_dict()
    for outcome in all_well(on_two_ranks[str(case)]):
        assert apart(outcome["ours"], outcome["theirs"]) == 0
        assert apart(outcome["ours"], first) > 1e-4
