"""`exact(Trainer)` on two real processes, against one process with the whole batches."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

import harness
from harness.processes import end_family, started
from harness.programs import run_on_cpu
from harness.ranks import Collectives, Outcome, all_well
from harness.trainers import Sample, apart, one_big_batch, samples, train, trainer
from macrobatch import by_tokens, verify
from macrobatch.errors import UsageError
from macrobatch.transformers import exact

FORKS = False  # some ranks that were forked after an import of transformers never began
SCENARIOS: dict[str, Callable[[], Outcome]] = {}
WAYS = {"batches": {}, "tokens": {"micro": by_tokens(40)}, "auto": {"micro": "auto"}}
COUNT = 20  # samples: windows of 16 and 4


def fit(kind: str, steps: int, way: str) -> Outcome:
    made = trainer(kind, exact(Trainer, **WAYS[way]), samples(kind, COUNT), steps=steps, max_grad_norm=0.5)
    losses = train(made)
    return {"weights": made.model.state_dict(), "losses": losses, "step": made.state.global_step}


for _kind in ("llama", "gpt2", "mixtral", "bert", "t5"):
    for _steps in (1, 4):
        for _way in WAYS:
            SCENARIOS[f"{_kind} {_steps} {_way}"] = partial(run_on_cpu, partial(fit, _kind, _steps, _way))


def as_it_is() -> Outcome:
    made = trainer("bert", Trainer, samples("bert", COUNT), max_grad_norm=0.5)
    train(made)
    return {"apart": apart(made, one_big_batch("bert", samples("bert", COUNT), 16, max_norm=0.5)[0])}


def all_reduces() -> Outcome:
    """How many a run of five windows has, and one of seven."""
    counts = {}
    for windows in (5, 7):
        made = trainer("bert", exact(Trainer), samples("bert", 16 * windows), logging_strategy="no")
        with Collectives() as counted:
            train(made)
        counts[windows] = counted.counts["allreduce"]
    return counts


def verified() -> Outcome:
    wrong = verify(trainer("bert", Trainer, samples("bert", COUNT)))
    right = verify(trainer("bert", exact(Trainer), samples("bert", COUNT)))
    return {"wrong": wrong.ok, "right": right.ok}


class Stream(IterableDataset):
    def __init__(self, data: list[Sample]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.data)


def stream_that_ends() -> Outcome:
    """Inside a window: of 24 samples, 16 are in the first one."""
    config = {"dispatch_batches": False}
    made = trainer("bert", exact(Trainer), Stream(samples("bert", 24)), max_steps=2, accelerator_config=config)
    train(made)
    return {"weights": made.model.state_dict(), "step": made.state.global_step}


def tokens_of_each_rank() -> Outcome:
    """Stock trainers then divide by the labels of their own rank."""
    made = trainer("llama", exact(Trainer), samples("llama", COUNT), average_tokens_across_devices=False)
    return {"losses": train(made), "weights": made.model.state_dict()}


class TimesRanks(Trainer):
    """As `Trainer.compute_loss` does, which its own caller has to know of."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        loss = loss * self.accelerator.num_processes if model.training else loss
        return (loss, None) if return_outputs else loss


def times_ranks() -> Outcome:
    try:
        train(trainer("bert", exact(TimesRanks), samples("bert", COUNT)))
    except UsageError as error:
        return {"told": str(error)}
    return {"told": "nothing"}


class Doubled(Trainer):
    """A factor of its own, which happens to be the number of processes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = 2 * model(**inputs).loss
        return (loss, None) if return_outputs else loss


def doubled() -> Outcome:
    made = trainer("bert", exact(Doubled), samples("bert", COUNT), learning_rate=0.05)
    train(made)
    return {"weights": made.model.state_dict()}


SCENARIOS["times ranks"] = partial(run_on_cpu, times_ranks)
SCENARIOS["doubled"] = partial(run_on_cpu, doubled)
SCENARIOS["tokens of each rank"] = partial(run_on_cpu, tokens_of_each_rank)
SCENARIOS["stream"] = partial(run_on_cpu, stream_that_ends)
SCENARIOS["as it is"] = partial(run_on_cpu, as_it_is)
SCENARIOS["all_reduces"] = partial(run_on_cpu, all_reduces)
SCENARIOS["verified"] = partial(run_on_cpu, verified)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "bert", "t5"])
def test_weights_are_those_of_one_big_batch(on_two_ranks, kind, steps, way):
    outcomes = all_well(on_two_ranks[f"{kind} {steps} {way}"])
    expected, losses = one_big_batch(kind, samples(kind, COUNT), 4 * steps, max_norm=0.5)
    for outcome in outcomes:
        assert outcome["losses"] == pytest.approx(losses, abs=2e-6)
        assert apart(outcome["weights"], expected) <= (1e-14 if kind == "bert" else 3e-8)


def test_a_stream_that_ends_inside_a_window(on_two_ranks):
    expected, _ = one_big_batch("bert", samples("bert", 24), 16)
    for outcome in all_well(on_two_ranks["stream"]):
        assert outcome["step"] == 2
        assert apart(outcome["weights"], expected) <= 1e-14


def test_labels_count_on_all_ranks_whatever_a_trainer_would_average(on_two_ranks):
    expected, losses = one_big_batch("llama", samples("llama", COUNT), 16)
    for outcome in all_well(on_two_ranks["tokens of each rank"]):
        assert outcome["losses"] == pytest.approx(losses, abs=2e-6)
        assert apart(outcome["weights"], expected) <= 3e-8


def test_the_trainer_as_it_is_differs(on_two_ranks):
    assert all(outcome["apart"] > 1e-4 for outcome in all_well(on_two_ranks["as it is"]))


def test_gradients_travel_once_a_window(on_two_ranks):
    """Per window one all-reduce of all gradients, one of the totals, one of which parameters DDP has found unused."""
    for outcome in all_well(on_two_ranks["all_reduces"]):
        assert outcome[7] - outcome[5] == 3 * 2


PROGRAM = """
import torch
from transformers import Trainer

from harness.trainers import samples, train, trainer
from macrobatch.transformers import exact

torch.set_num_threads(1)
made = trainer("bert", exact(Trainer), samples("bert", 20), max_grad_norm=0.5, save_strategy="no")
train(made)
torch.save(made.model.state_dict(), f"weights-{made.args.process_index}.pt")
"""


def test_under_accelerate_launch(tmp_path):
    """As on GPUs: on a CPU the launcher starts several processes under that name alone."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1"]
    options = ["--num_processes=2", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    environment = harness.environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    leader = started([*launcher, *options, "program.py"], tmp_path / "screen", environment)
    try:
        assert leader.wait(120) == 0, (tmp_path / "screen").read_text()[-4000:]
    finally:
        end_family(leader)
    expected, _ = one_big_batch("bert", samples("bert", COUNT), 16, max_norm=0.5)
    for rank in range(2):
        assert apart(torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True), expected) <= 1e-14


def test_a_loss_that_is_multiplied_by_the_ranks(on_two_ranks):
    for outcome in all_well(on_two_ranks["times ranks"]):
        assert "the loss is multiplied by 2, the number of processes" in outcome["told"]


def test_a_factor_of_ones_own(on_two_ranks):
    expected, _ = one_big_batch("bert", samples("bert", COUNT), 16)
    for outcome in all_well(on_two_ranks["doubled"]):
        assert apart(outcome["weights"], expected) <= 1e-14


def test_verify_on_ranks(on_two_ranks):
    for outcome in all_well(on_two_ranks["verified"]):
        assert (outcome["wrong"], outcome["right"]) == (False, True)
