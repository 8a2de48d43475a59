"""Mixtures of experts are trained with their balance loss, which is that of the whole batch however it is cut."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness.commands import arguments, json_lines, refused, sentences
from macrobatch.cli import main
from macrobatch.losses import causal_lm_loss
from macrobatch.train.corpus import collate
from macrobatch.train.data import Data
from macrobatch.train.flags import parse_flags
from macrobatch.train.models import make_model

pytestmark = pytest.mark.usefixtures("own_cache")

MIXTURE = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "head_dim": 8}
MIXTURE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
MIXTURE |= {"num_local_experts": 4, "num_experts": 4, "output_router_logits": True}
ONE_STEP = ("--steps", 1, "--batch-size", 24, "--validation", 0, "--precision", "float64", "--max-norm", "inf")
ONE_STEP += ("--optimizer", "sgd", "--lr", 1, "--weight-decay", 0, "--schedule", "constant", "--warmup", 0)


@pytest.fixture
def data(tmp_path) -> Path:
    short = [text for text in sentences(80) if len(text) < 100][:24]
    return json_lines(tmp_path / "data.jsonl", [{"text": text} for text in short])


@pytest.fixture
def config(tmp_path):
    """The path of a configuration."""

    def write(**entries):
        (tmp_path / "config.json").write_text(json.dumps(MIXTURE | entries))
        return tmp_path / "config.json"

    return write


# The coefficient is small, as by default in transformers: the gradient of the routers is another one without it.
@pytest.mark.parametrize(
    "cut", [("--micro", 3), ("--micro", "tokens:90"), ("--pack",)], ids=["samples", "tokens", "packed"]
)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_one_step_has_the_gradient_of_the_whole_batch(data, config, tmp_path, kind, cut):
    path = config(model_type=kind, router_aux_loss_coef=0.001)
    flags = arguments(data, tmp_path / "out", "--model", path, *ONE_STEP, *map(str, cut))
    assert main(flags) == 0
    before, gradients = _of_one_batch(flags, path)
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert any("gate.weight" in name for name in gradients)
    for name, gradient in gradients.items():
        assert (before[name] - after[name] - gradient).norm() <= 2e-6 * gradient.norm(), name


def _of_one_batch(flags, path):
    """The weights before, and the gradient of one forward over all samples, as transformers computes the balance."""
    samples = Data.read(parse_flags(flags[1:])).train
    model = make_model(json.loads(path.read_text()), 0).double()
    model.set_experts_implementation("eager")
    batch = collate(list(samples))
    rest, _ = causal_lm_loss(model, batch)
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    (rest + 0.001 * outputs.aux_loss).backward()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return weights, {name: p.grad for name, p in model.named_parameters()}


def test_the_export_has_the_switch_again(data, config, tmp_path, capsys):
    path = config(model_type="mixtral", router_aux_loss_coef=0.001)
    assert main(arguments(data, tmp_path / "out", "--model", path, "--steps", 1)) == 0
    assert "with their balance loss, 0.001 of it" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["output_router_logits"] is True


@pytest.mark.filterwarnings("default")
def test_a_mixture_without_its_balance_loss_is_said_to_be(data, config, tmp_path, capsys):
    path = config(model_type="mixtral", router_aux_loss_coef=0.5, output_router_logits=False)
    assert main(arguments(data, tmp_path / "out", "--model", path, "--steps", 1)) == 0
    assert "trains without its balance loss" in capsys.readouterr().err


def test_another_term_is_refused(data, config, tmp_path, capsys, monkeypatch):
    from transformers import MixtralForCausalLM

    forward = MixtralForCausalLM.forward

    def with_more(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 1e-3
        return output

    monkeypatch.setattr(MixtralForCausalLM, "forward", with_more)
    command = arguments(data, tmp_path / "out", "--model", config(model_type="mixtral"), "--steps", 1)
    refused(command, capsys, "not only that of predicting the next token", "exact(Trainer)")
