"""What transformers' own tests ask of gradient accumulation, asked of `exact(Trainer)`, and more strictly.

They train with a large batch and with small ones that make it up, and allow losses to differ by 1e-3 and gradient norms
by a tenth. Here both agree to rounding, also where a loss is no mean over `num_items_in_batch`.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForTokenClassification, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from harness.trainers import HEADS, SMALL, WORDS, apart, arguments, samples, train, trainer
from macrobatch import by_tokens
from macrobatch.transformers import exact

WAYS = {"batches": {}, "tokens": {"micro": by_tokens(40)}}


class Line(nn.Module):
    """a x + b, and the mean of the squared errors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a * x + self.b
        return nn.functional.mse_loss(y, labels), y


def points(count: int) -> list[dict[str, Tensor]]:
    x = torch.randn(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [{"x": value, "labels": 2 * value + 3} for value in x]


def fitting(count: int, **options) -> Trainer:
    given = {"per_device": 4, "steps": 5, "train_sampling_strategy": "random", **options}
    return exact(Trainer)(model=Line(), args=arguments(**given), train_dataset=points(count))


def summed(outputs, labels: Tensor, num_items_in_batch=None) -> Tensor:
    """A loss function of one's own, as their test has it."""
    return ForCausalLMLoss(outputs["logits"], labels, WORDS, num_items_in_batch)


def test_steps_are_not_given_to_the_accelerator():
    assert fitting(40).accelerator.gradient_accumulation_steps == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [{}, {"accepts": False}, {"compute_loss_func": summed}, {"label_smoothing_factor": 0.1}],
    ids=["items", "no items", "loss function", "label smoothing"],
)
@pytest.mark.parametrize(("per_device", "steps"), [(1, 8), (4, 2)])
def test_small_batches_make_up_a_large_one(per_device, steps, options, way):
    runs = {}
    for name, sizes in {"large": (8, 1), "small": (per_device, steps)}.items():
        given = dict(options)
        accepts = given.pop("accepts", True)
        made = trainer(
            "llama", exact(Trainer, **WAYS[way]), samples("llama", 24), per_device=sizes[0], steps=sizes[1], **given
        )
        made.model_accepts_loss_kwargs = made.model_accepts_loss_kwargs and accepts
        losses = train(made)
        norms = [entry["grad_norm"] for entry in made.state.log_history if "grad_norm" in entry]
        runs[name] = losses, norms, made.model.state_dict()
    losses, norms, weights = runs["large"]
    assert len(losses) == 3
    assert runs["small"][0] == pytest.approx(losses, abs=1e-6)
    assert runs["small"][1] == pytest.approx(norms, rel=1e-6)
    assert apart(runs["small"][2], weights) <= 3e-8


def test_what_is_counted_for_a_loss_that_shifts_its_labels():
    made = trainer("llama", exact(Trainer), samples("llama", 8))
    rows = [[1, 2, 3, 4, 5, -100, -100, -100], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert (
        int(made._get_num_items_in_batch([{"labels": torch.tensor([row])} for row in rows], torch.device("cpu"))) == 11
    )
    shifted = {"labels": torch.tensor([[1, 2, 3, 4, 5]]), "shift_labels": torch.tensor([[2, 3, 4, 5, -100]])}
    assert int(made._get_num_items_in_batch([shifted, shifted], torch.device("cpu"))) == 8


BART = {"d_model": 16, "max_position_embeddings": 32} | {
    f"{side}_{name}": 1 if name != "ffn_dim" else 16
    for side in ("encoder", "decoder")
    for name in ("layers", "attention_heads", "ffn_dim")
}
UNSHIFTED = {
    "token classification": lambda: LlamaForTokenClassification(LlamaConfig(**SMALL, **HEADS)),
    "encoder and decoder": lambda: BartForConditionalGeneration(BartConfig(vocab_size=WORDS, **BART)),
}


@pytest.mark.parametrize("kind", UNSHIFTED)
def test_what_is_counted_for_a_loss_that_does_not(kind):
    made = exact(Trainer)(model=UNSHIFTED[kind](), args=arguments())
    rows = [[1, 2, 3, 4, 5, -100, -100, -100], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert (
        int(made._get_num_items_in_batch([{"labels": torch.tensor([row])} for row in rows], torch.device("cpu"))) == 13
    )


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("count", [123, 120])
def test_every_batch_is_taken_once_an_epoch(count, epochs):
    made, taken = fitting(count, num_train_epochs=epochs), []
    fetch = made.get_batch_samples

    def counting(iterator, num_batches, device):
        found, items = fetch(iterator, num_batches, device)
        taken.append(len(found))
        return found, items

    made.get_batch_samples = counting
    train(made)
    assert sum(taken) == epochs * len(made.get_train_dataloader())
    assert made.state.global_step == epochs * math.ceil(count / 20)


@pytest.mark.parametrize("options", [{"max_steps": 3}, {"num_train_epochs": 3}])
def test_an_epoch_shorter_than_a_window_is_a_window(options):
    made = fitting(64, per_device=16, **options)
    train(made)
    assert made.state.global_step == 3


def test_resumed_with_accumulation(tmp_path):
    options = {"steps": 2, "save_strategy": "steps", "save_steps": 5, "num_train_epochs": 3}
    whole = fitting(128, output_dir=str(tmp_path), **options)
    train(whole)
    resumed = fitting(128, output_dir=str(tmp_path), **options)
    train(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert (resumed.model.a.item(), resumed.model.b.item()) == (whole.model.a.item(), whole.model.b.item())
    one, other = (_without_times(dataclasses.asdict(made.state)) for made in (whole, resumed))
    assert one == other


def test_resumed_inside_an_epoch_to_its_end(tmp_path):
    options = {"per_device": 2, "steps": 3, "save_strategy": "steps", "save_steps": 1}
    train(fitting(100, output_dir=str(tmp_path / "first"), max_steps=2, **options))
    resumed = fitting(100, output_dir=str(tmp_path / "second"), **options)
    train(resumed, resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert resumed.state.global_step == math.ceil(100 / 6)


def test_steps_for_the_accelerator_besides_are_refused():
    config = {"gradient_accumulation_kwargs": {"num_steps": 10}}
    with pytest.raises(Exception, match="num_steps"):
        fitting(40, steps=2, accelerator_config=config)
    assert fitting(40, steps=1, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 1}})


@pytest.mark.parametrize("each", [True, False])
def test_synchronising_each_batch_changes_no_result(each):
    weights = []
    for config in ({}, {"gradient_accumulation_kwargs": {"sync_each_batch": each}}):
        made = fitting(40, accelerator_config=config)
        train(made)
        weights.append(made.model.state_dict())
    assert apart(*weights) == 0


def _without_times(state: dict) -> dict:
    """What a trainer remembers, but for how long things took."""
    lines = [
        {k: v for k, v in line.items() if "runtime" not in k and "per_second" not in k} for line in state["log_history"]
    ]
    return state | {"log_history": [line for line in lines if "train_loss" not in line]}
