"""`macrobatch train --lora`: adapters are trained as peft and torch would train them, and the rest stays as it is."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import by_hand
from harness.commands import arguments, farthest, json_lines, losses, refused, sentences
from harness.recorded import PretendedCapturer
from macrobatch._cudagraph.capture import CAPTURERS
from macrobatch.cli import main

pytestmark = pytest.mark.usefixtures("own_cache")

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
MIXTURE = {"model_type": "deepseek_v2", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
MIXTURE |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8}
MIXTURE |= {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}
MIXTURE |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
LORA = ("--lora", "--lora-rank", 4)


SENTENCES = 100


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Path:
    """A model that has learnt a little."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    assert main(arguments(data, folder, "--steps", 2)) == 0
    return folder / "model"


@pytest.fixture(scope="module")
def run(data, base, tmp_path_factory) -> Path:
    """One run that has ended, for tests that only look at it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = ("--model", base, *LORA, "--steps", 6, "--save-every", 2, "--lr", 0.01)
    assert main(arguments(data, folder, *flags)) == 0
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def begins(data, base, tmp_path):
    """The arguments of a run from that model."""

    def command(*more, model=base, out="out"):
        return arguments(data, tmp_path / out, "--model", model, "--steps", 1, *more)

    return command


@pytest.fixture
def gpt2(data, tmp_path) -> Path:
    """A model whose layers are transposed."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert main(arguments(data, tmp_path / "gpt2", "--model", tmp_path / "config.json", "--steps", 1)) == 0
    return tmp_path / "gpt2" / "model"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*.safetensors")))


def logits(base: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.arange(40).unsqueeze(0)).logits


# ------------------------------------------------------------------------------------------- what a run leaves


def test_the_merged_model_is_the_base_with_the_adapter(run, base):
    ours = logits(run / "model")
    assert torch.allclose(ours, logits(base, run / "adapter"), atol=1e-6, rtol=0)
    assert not torch.allclose(ours, logits(base), atol=1e-3)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert sorted(config["target_modules"]) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_layers_that_are_transposed(gpt2, begins, tmp_path):
    assert main(begins(*LORA, "--steps", 3, "--lr", 0.01, model=gpt2)) == 0
    ours = logits(tmp_path / "out" / "model")
    assert torch.allclose(ours, logits(gpt2, tmp_path / "out" / "adapter"), atol=1e-6, rtol=0)
    assert not torch.allclose(ours, logits(gpt2), atol=1e-3)


def test_frozen_weights_do_not_change(run, base):
    before, after = tensors(base), tensors(run / "model")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        is_adapted = name.startswith("model.layers") and "norm" not in name
        assert torch.equal(weight, after[name]) != is_adapted, name


def test_checkpoints_hold_adapters_only(run, base):
    path = run / "checkpoints" / "step-00000006"
    names = json.loads((path / "manifest.json").read_text())["contents"]["tensors"]
    assert all("lora_" in name or name.startswith("random.") for name in names)
    adapted = sum(one.numel() for one in tensors(run / "adapter").values())
    random = torch.get_rng_state().numel()
    assert (path / "rank-00000.safetensors").stat().st_size < 3 * 4 * adapted + random + 20_000


def test_the_table_says_how_many_parameters_are_trained(begins, run, capsys):
    assert main(begins(*LORA)) == 0
    number = sum(one.numel() for one in tensors(run / "adapter").values())
    out = " ".join(capsys.readouterr().out.split())
    assert f"LoRA of rank 4: {number:,} of " in out
    assert "0.0002, cosine" in out


# ---------------------------------------------------------------------------------------- the same as by hand


def with_peft(base: Path) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", fan_in_fan_out=True)
    return get_peft_model(model, config)


@pytest.mark.parametrize("micro", ["1", "5", "tokens:128"])
@pytest.mark.parametrize(("precision", "close"), [("float32", 1e-5), ("float64", 1e-10)])
def test_losses_are_those_of_a_plain_loop(gpt2, tmp_path, precision, close, micro):
    few = json_lines(tmp_path / "few.jsonl", [{"text": text[:100]} for text in sentences(12)])
    flags = ("--model", gpt2, *LORA, "--precision", precision, "--lr", 0.01, "--micro", micro)
    assert main(arguments(few, tmp_path / "run", *flags, *by_hand.FLAGS)) == 0
    model = with_peft(gpt2).to(getattr(torch, precision))
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, 0.01, (0.9, 0.95), weight_decay=0.1)
    wanted = by_hand.losses(model, [adamw], by_hand.samples(few, gpt2))
    assert farthest(losses(tmp_path / "run"), wanted) <= close


@pytest.mark.parametrize("flags", [("--checkpoint-activations",), ("--precision", "bf16")])
def test_every_way_to_compute_learns_the_same(run, begins, tmp_path, flags):
    close = 0.02 if "bf16" in flags else 1e-5
    assert main(begins(*LORA, "--lr", 0.01, *flags, "--steps", 6)) == 0
    assert farthest(losses(tmp_path / "out"), losses(run)) <= close


@pytest.mark.filterwarnings("default")
def test_compiled_layers_learn_the_same(run, begins, tmp_path, monkeypatch):
    """Graphs are broken as any compiler's would be; the compiler itself would take longer than all of these tests."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled(self, backend="eager", **options))
    assert main(begins(*LORA, "--lr", 0.01, "--compile", "--steps", 6)) == 0
    assert farthest(losses(tmp_path / "out"), losses(run)) <= 1e-5


def test_recorded_micro_steps_learn_the_same(run, begins, tmp_path, monkeypatch):
    made = []

    class Counted(PretendedCapturer):
        def capture(self, run, pool):
            made.append(super().capture(run, pool))
            return made[-1]

    monkeypatch.setattr("macrobatch._cudagraph.cache.MAX_TIME_SHARE", 1e9)
    monkeypatch.setitem(CAPTURERS, "cpu", Counted)
    assert main(begins(*LORA, "--lr", 0.01, "--cuda-graph", "--steps", 6)) == 0
    assert farthest(losses(tmp_path / "out"), losses(run)) <= 1e-5
    assert made


@pytest.mark.parametrize("precision", ["pure-bf16", "fp16", "float64"])
def test_adapters_are_never_narrower_than_float32(run, begins, tmp_path, precision):
    assert main(begins(*LORA, "--lr", 0.01, "--precision", precision, "--steps", 6)) == 0
    assert losses(tmp_path / "out")[-1] == pytest.approx(losses(run)[-1], rel=0.03)
    wide = torch.float64 if precision == "float64" else torch.float32
    manifest = tmp_path / "out" / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    held = {name: one.dtype for name, one in load_file(manifest).items() if name.startswith("model.")}
    assert set(held.values()) == {wide}
    assert {one.dtype for one in tensors(tmp_path / "out" / "adapter").values()} == {wide}
    assert {one.dtype for one in tensors(tmp_path / "out" / "model").values()} == {torch.float32}  # as the base


@pytest.mark.filterwarnings("default")
def test_dropout_of_adapters_and_validation(begins, tmp_path, capsys):
    flags = (*LORA, "--lora-dropout", 0.5, "--lr", 0, "--validate-every", 1, "--steps", 2)
    assert main(begins(*flags)) == 0
    assert "macrobatch: this model has dropout" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "out" / "validation.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == rows[1]["loss"]


# ------------------------------------------------------------------------------------------------------- resumed


def test_resuming_ends_where_the_run_would_have(run, copy):
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    shutil.rmtree(copy / "model")
    shutil.rmtree(copy / "adapter")
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    assert losses(copy) == losses(run)
    for folder in ("model", "adapter"):
        again, before = tensors(copy / folder), tensors(run / folder)
        assert all(torch.equal(again[name], before[name]) for name in before)


def test_another_base_is_another_run(copy, base, data, capsys, tmp_path):
    """Checkpoints do not hold the frozen weights, so these must be the same."""
    kept = {path: path.read_bytes() for path in base.iterdir()}
    weights = tensors(base)
    weights["model.embed_tokens.weight"][3, 3] += 1e-3
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    try:
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
        refused(
            ["train", "--resume", "--out", str(copy)], capsys, "other settings", "the frozen weights are not the same"
        )
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_another_rank_is_another_run(copy, capsys):
    refused(["train", "--resume", "--out", str(copy), "--lora-rank", "8"], capsys, "lora-rank was 4, now 8")


def test_the_best_adapter_is_kept(base, tmp_path):
    few = json_lines(tmp_path / "few.jsonl", [{"text": text} for text in sentences(12)])
    held = json_lines(tmp_path / "held.jsonl", [{"text": text[::-1]} for text in sentences(20, seed=2)])
    flags = ("--validation-data", held, "--lr", 0.5, "--warmup", 0, "--steps", 16, "--validate-every", 2)
    command = arguments(few, tmp_path / "run", "--model", base, *LORA, *flags, "--save-every", 8, "--batch-size", 12)
    assert main(command) == 0
    run = tmp_path / "run"
    best = logits(run / "model-best")
    assert torch.allclose(best, logits(base, run / "adapter-best"), atol=1e-5, rtol=0)
    assert not torch.allclose(best, logits(run / "model"), atol=1e-3)


# ----------------------------------------------------------------------------------------- from an adapter folder


def test_an_adapter_is_trained_on(run, begins, base, tmp_path):
    assert main(begins("--lora", "--lr", 0, model=run / "adapter")) == 0
    again, before = tensors(tmp_path / "out" / "adapter"), tensors(run / "adapter")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert main(begins("--lora", "--lr", 0.01, model=run / "adapter", out="more")) == 0
    assert not torch.allclose(logits(tmp_path / "more" / "model"), logits(run / "model"), atol=1e-5)


def test_an_adapter_is_merged_without_lora(run, begins, tmp_path):
    assert main(begins("--lr", 0, model=run / "adapter")) == 0
    assert torch.allclose(logits(tmp_path / "out" / "model"), logits(run / "model"), atol=1e-6, rtol=0)
    assert not (tmp_path / "out" / "adapter").exists()
    assert main(begins("--lr", 0.01, model=run / "adapter", out="more")) == 0
    changed, before = tensors(tmp_path / "more" / "model"), tensors(run / "model")
    assert all(not torch.equal(changed[name], before[name]) for name in before)  # all are trained


def test_an_adapter_that_peft_wrote(gpt2, begins, tmp_path):
    """With another scaling of some layers, and another rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(
        r=4, lora_alpha=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_rslora=True,
        rank_pattern={"c_fc": 2}, alpha_pattern={"c_fc": 5}, init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    get_peft_model(AutoModelForCausalLM.from_pretrained(gpt2), config).save_pretrained(tmp_path / "peft")
    for name, more in (("merged", ()), ("adapted", ("--lora",))):
        assert main(begins("--lr", 0, *more, model=tmp_path / "peft", out=name)) == 0
        ours = logits(tmp_path / name / "model")
        assert torch.allclose(ours, logits(gpt2, tmp_path / "peft"), atol=1e-6, rtol=0)
    assert torch.allclose(ours, logits(gpt2, tmp_path / "adapted" / "adapter"), atol=1e-6, rtol=0)


def test_generate_from_an_adapter(run, capsys):
    texts = []
    for folder in (run, run / "adapter"):
        assert main(["generate", str(folder), "--prompt", "the lazy", "--tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.fixture
def adapter(run, tmp_path) -> Path:
    """A copy of the adapter, to be changed."""
    return Path(shutil.copytree(run / "adapter", tmp_path / "adapter"))


def changed(adapter: Path, **entries) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return adapter


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"base_model_name_or_path": None}, "does not name its base"),
        ({"base_model_name_or_path": "nobody/nothing"}, "its base model nobody/nothing was not found"),
        ({"peft_type": "IA3"}, "an adapter of the type IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "megatron_config"),
        ({"bias": "all"}, "bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"something_new": True}, "something_new"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": "x"}, "cannot be added"),
        ({"r": 8}, "has another shape"),
        ({"target_modules": ["q_proj"]}, "not in the model"),
        ({"target_modules": ["nothing"]}, "cannot be added"),
    ],
)
def test_adapters_that_cannot_be_read(adapter, begins, capsys, tmp_path, entries, said):
    changed(adapter, **entries)
    for more in ((), ("--lora",)):
        refused(begins(*more, model=adapter), capsys, f"--model {adapter}", said)
    assert "--model" not in refused(["generate", str(adapter)], capsys, str(adapter), said)
    assert not (tmp_path / "out").exists()


def test_files_of_adapters_that_are_not_read(adapter, begins, capsys, run):
    weights = tensors(adapter)
    lacking = dict(list(weights.items())[1:])
    save_file(lacking, adapter / "adapter_model.safetensors")
    refused(begins(model=adapter), capsys, "lack")
    (adapter / "adapter_model.safetensors").write_bytes(b"no weights")
    refused(begins(model=adapter), capsys, "damaged")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused(begins(model=adapter), capsys, "adapter_model.bin", "only adapter_model.safetensors is")
    (adapter / "adapter_config.json").write_text("[]")
    refused(begins(model=adapter), capsys, "adapter_config.json")
    shutil.copytree(run / "adapter", adapter, dirs_exist_ok=True)
    changed(adapter, base_model_name_or_path=str(run / "adapter"))
    refused(begins(model=adapter), capsys, "is an adapter itself")


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--lora-rank", 4), "--lora-rank needs --lora"),
        (("--lora-alpha", 4), "--lora-alpha needs --lora"),
        (("--lora-dropout", 0), "--lora-dropout needs --lora"),
        (("--lora-targets", "q_proj"), "--lora-targets needs --lora"),
        (("--lora", "--lora-rank", 0), "--lora-rank must be at least 1"),
        (("--lora", "--lora-dropout", 1), "--lora-dropout must be between 0 and"),
        (
            ("--lora", "--lora-targets", "q_proj", "nothing"),
            "no linear layer 'nothing'. There are down_proj",
        ),
        (("--lora", "--lora-targets", "embed_tokens"), "no linear layer 'embed_tokens'"),
        (("--lora", "--lora-targets", "lm_head"), "'lm_head' shares its weights with embed_tokens"),
    ],
)
def test_wrong_flags(begins, capsys, tmp_path, flags, said):
    refused(begins(*flags), capsys, said)
    assert not (tmp_path / "out").exists()


def test_new_weights_have_nothing_to_adapt(begins, capsys):
    refused(begins("--lora", model="tiny"), capsys, "--lora", "existing weights", "tiny")


def test_experts_are_no_linear_layers(begins, data, capsys, tmp_path):
    """Layers of these names are experts to peft, which are one tensor."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    assert main(arguments(data, tmp_path / "mixture", "--model", tmp_path / "config.json", "--steps", 1)) == 0
    refused(begins("--lora", model=tmp_path / "mixture"), capsys, "mlp.experts", "--lora-targets")
    assert main(begins(*LORA, "--lora-targets", "q_b_proj", "o_proj", "--lr", 0.1, model=tmp_path / "mixture")) == 0
    ours = logits(tmp_path / "out" / "model")
    wanted = logits(tmp_path / "mixture" / "model", tmp_path / "out" / "adapter")
    assert torch.allclose(ours, wanted, atol=1e-6, rtol=0)


def test_an_adapter_has_its_rank(begins, run, capsys):
    refused(begins(*LORA, model=run / "adapter"), capsys, "--lora-rank", "with its own configuration")


def test_named_layers_only(begins, tmp_path):
    assert main(begins(*LORA, "--lora-targets", "q_proj", "layers.1.mlp.up_proj")) == 0
    names = {name.partition(".lora_")[0] for name in tensors(tmp_path / "out" / "adapter")}
    layers = "base_model.model.model.layers"
    assert names == {f"{layers}.{name}" for name in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")}


def test_without_peft(begins, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(begins("--lora"), capsys, "peft", "pip install 'macrobatch[train]'")
