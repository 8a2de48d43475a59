"""`macrobatch train --optimizer`: each steps as torch's own does in a plain loop, and resumes bit-identically."""

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import by_hand
from harness.commands import arguments, farthest, json_lines, losses, refused, sentences
from macrobatch.cli import main
from macrobatch.train.optimizers import fixed_bytes
from macrobatch.train.settings import Settings

pytestmark = pytest.mark.usefixtures("own_cache")

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
LR = 0.01

# An optimizer of somebody's own: it counts in plain numbers, in its groups too.
OWN = """
import torch

class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, weight_decay=0.0, power=1.0, betas=(0.5, 0.5)):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, power=power, betas=betas, seen=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                average = state.setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, group["betas"][0])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = group["lr"] / (state["step"] + group["seen"]) ** group["power"]
                p.add_(average.sign(), alpha=-scale)

class Bare(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)

def function(params):
    return None
"""


def decayed(model, rate=0.1):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": rate}, {"params": vectors, "weight_decay": 0.0}]


def muon(model, ratio=1.0, **options):
    blocks = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not block for block in blocks)]
    groups = [{"params": [p for p in others if (p.dim() >= 2) == wide], "weight_decay": 0.1 * wide} for wide in (1, 0)]
    return [
        torch.optim.Muon(blocks, LR, weight_decay=0.1, **{"adjust_lr_fn": "match_rms_adamw", **options}),
        torch.optim.AdamW(groups, LR * ratio, (0.9, 0.95)),
    ]


def own(model):
    import my_optimizers

    return [my_optimizers.Sign(decayed(model), lr=LR, power=0.5)]


# Flags of the command -> optimizers of the plain loop.
OPTIMIZERS = {
    "adamw": (("adamw",), lambda model: [torch.optim.AdamW(decayed(model), LR, (0.9, 0.95))]),
    "amsgrad": (
        ("adamw", "--optimizer-options", "amsgrad=true"),
        lambda model: [torch.optim.AdamW(decayed(model), LR, (0.9, 0.95), amsgrad=True)],
    ),
    "muon": (("muon",), muon),
    "muon's own way": (
        ("muon", "--optimizer-options", "adjust_lr_fn=original", "momentum=0.9", f"adamw_lr={LR / 4}"),
        lambda model: muon(model, 0.25, adjust_lr_fn="original", momentum=0.9),
    ),
    "adafactor": (("adafactor",), lambda model: [torch.optim.Adafactor(decayed(model), LR)]),
    "adafactor's d": (
        ("adafactor", "--optimizer-options", "d=2", "eps=none,0.01", "--weight-decay", 0),
        lambda model: [torch.optim.Adafactor(decayed(model, 0), LR, d=2, eps=(None, 0.01))],
    ),
    "sgd": (
        ("sgd", "--optimizer-options", "momentum=0.9", "nesterov=true"),
        lambda model: [torch.optim.SGD(decayed(model), LR, momentum=0.9, nesterov=True)],
    ),
    "one's own": (("my_optimizers:Sign", "--optimizer-options", "power=0.5"), own),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    records = [{"text": text[:100]} for text in sentences(by_hand.BATCH)]
    return json_lines(tmp_path_factory.mktemp("data") / "data.jsonl", records)


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(GPT2))
    assert main(arguments(data, folder / "run", "--model", folder / "config.json", "--steps", 1)) == 0
    return folder / "run" / "model"


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    """A module in the current folder, which is not on Python's path."""
    (tmp_path / "my_optimizers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_optimizers", None)


@pytest.fixture
def begins(data, base, tmp_path):
    def command(name, *more, out="run"):
        flags = ("--model", base, "--lr", LR, *by_hand.FLAGS, "--optimizer", name, *more)
        return arguments(data, tmp_path / out, *flags)

    return command


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_a_plain_loop(name, begins, base, data, tmp_path):
    from transformers import AutoModelForCausalLM

    flags, made = OPTIMIZERS[name]
    path = list(sys.path)
    assert main(begins(*flags, "--precision", "float64", "--micro", "5")) == 0
    assert sys.path == path
    model = AutoModelForCausalLM.from_pretrained(base).double()
    wanted = by_hand.losses(model, made(model), by_hand.samples(data, base))
    assert farthest(losses(tmp_path / "run"), wanted) <= 1e-10
    assert wanted[-1] < wanted[0]


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "float32") for name in OPTIMIZERS), ("muon", "fp16"), ("one's own", "fp16")]
)
def test_resuming_is_bitwise(name, begins, tmp_path, precision):
    flags = (*OPTIMIZERS[name][0], "--precision", precision)
    assert main(begins(*flags, "--save-every", 2, "--keep", 9)) == 0
    run = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert losses(run) == losses(tmp_path / "run")
    again, before = ((one / "model" / "model.safetensors").read_bytes() for one in (run, tmp_path / "run"))
    assert again == before


def test_optimizers_are_told_apart(begins, tmp_path, capsys):
    """The comparisons above can fail, and a run goes on with its own optimizer only."""
    assert main(begins("sgd")) == 0
    assert main(begins("muon", out="other")) == 0
    assert farthest(losses(tmp_path / "run"), losses(tmp_path / "other")) > 1e-4
    resumed = ["train", "--resume", "--out", str(tmp_path / "run")]
    refused([*resumed, "--optimizer", "adafactor"], capsys, "optimizer-name was sgd, now adafactor")
    refused([*resumed, "--optimizer-options", "momentum=0.9"], capsys, "optimizer-momentum was not set, now 0.9")
    refused([*resumed, "--optimizer", "adamw"], capsys, "optimizer was", "now not set")


def test_adapters_with_muon(begins, tmp_path):
    assert main(begins("muon", "--lora", "--lora-rank", 2)) == 0
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


def test_the_table_names_the_optimizer(begins, capsys):
    assert main(begins("muon")) == 0
    assert "for weights, gradients and Muon" in " ".join(capsys.readouterr().out.split())
    assert main(begins("my_optimizers:Sign", out="own")) == 0
    assert "a rank for weights and gradients" in " ".join(capsys.readouterr().out.split())


def test_memory_of_a_rank_holds_whole_gradients_and_a_share_of_the_rest():
    model = nn.Linear(10, 9)  # 99 parameters
    frozen = nn.Linear(10, 9).requires_grad_(False)
    for shards, wanted in ((1, 16 * 99), (4, 3 * 99 + 4 * 99)):
        assert fixed_bytes(model, Settings(), shards) == (wanted, "weights, gradients and AdamW")
        assert fixed_bytes(frozen, Settings(), shards)[0] == 4 * 99 / shards


# --------------------------------------------------------------------------------------------------- eight bits


def test_eight_bits_need_bitsandbytes(begins, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    refused(begins("adamw-8bit"), capsys, "pip install bitsandbytes")
    assert not (tmp_path / "run").exists()


def test_eight_bits_are_made_of_the_same_settings(begins, monkeypatch, tmp_path):
    given = []

    class AdamW8bit(torch.optim.AdamW):
        """Takes what that of bitsandbytes takes."""

        def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, min_8bit_size=4096):
            given.append((lr, betas, eps, min_8bit_size))
            super().__init__(params, lr, betas, eps, weight_decay)

    package, inner = types.ModuleType("bitsandbytes"), types.ModuleType("bitsandbytes.optim")
    inner.AdamW8bit = AdamW8bit
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", inner)
    assert main(begins("adamw-8bit", "--beta2", 0.99, "--optimizer-options", "min_8bit_size=128")) == 0
    assert given == [(LR, (0.9, 0.99), 1e-8, 128)]
    assert main(begins("adamw", "--beta2", 0.99, out="other")) == 0
    assert farthest(losses(tmp_path / "run"), losses(tmp_path / "other")) <= 1e-5


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("adam",), "Did you mean adamw?"),
        (("nothing",), "There are adamw, muon"),
        (("nowhere:Class",), "cannot be imported: there is no module 'nowhere'"),
        (("my_optimizers:Missing",), "module 'my_optimizers' has no function 'Missing'"),
        (("my_optimizers:function",), "not an optimizer class"),
        ((":",), "cannot be imported"),
        (("my_optimizers:Bare",), "--lr has no effect on --optimizer my_optimizers:Bare"),
        (("adafactor", "--parallel", "fsdp"), "adafactor does not support sharded models (--parallel fsdp)"),
        (("sgd", "--optimizer-options", "momentun=0.9"), "sgd takes no 'momentun'. It takes momentum"),
        (("sgd", "--optimizer-options", "momentum"), "must be NAME=VALUE"),
        (("sgd", "--optimizer-options", "momentum=1", "momentum=2"), "given twice"),
        (("sgd", "--optimizer-options", "momentum=-1"), "--optimizer sgd cannot be made: Invalid momentum"),
        (("sgd", "--optimizer-options", "lr=1"), "it has its own flag"),
        (("adamw", "--optimizer-options", "betas=0.9,0.9"), "it has its own flag"),
        (("muon", "--optimizer-options", "adamw_lr=much"), "adamw_lr must be a number"),
        (("sgd", "--beta1", 0.5), "--beta1 is AdamW's"),
    ],
)
def test_wrong_flags(begins, capsys, tmp_path, flags, said):
    refused(begins(*flags), capsys, said)
    assert not (tmp_path / "run").exists()
