"""Where a model comes from, and what becomes of it: nothing is trained wrong in silence, nothing in a folder is run."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from harness.commands import arguments, json_lines, refused, sentences
from macrobatch.cli import main
from macrobatch.train.suitable import padding_effect

pytestmark = pytest.mark.usefixtures("own_cache")

BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 400}
BERT |= {"intermediate_size": 32, "max_position_embeddings": 64}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


SENTENCES = 100


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(arguments(data, folder, "--steps", 2)) == 0
    return folder


@pytest.fixture
def model(run, tmp_path) -> Path:
    """A copy of its model, to be changed."""
    return Path(shutil.copytree(run / "model", tmp_path / "model"))


@pytest.fixture
def begins(data, tmp_path):
    """The arguments of a run from that model."""
    return lambda model, *more: arguments(data, tmp_path / "out", "--model", model, "--steps", 1, *more)


# ----------------------------------------------------------------------------------------- not what it seems to be


def test_pickled_weights_are_not_replaced_by_new_ones(model, begins, capsys, tmp_path):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(begins(model), capsys, "pytorch_model.bin", "safe_serialization=True", "--model", "config.json")
    assert not (tmp_path / "out").exists()
    assert main(begins(model / "config.json", "--tokenizer", model)) == 0  # said like this, new ones are wanted


@pytest.mark.parametrize("name", ["weights.safetensors", "model.gguf", "consolidated.00.pth"])
def test_weights_of_another_name_or_format(model, begins, capsys, name):
    (model / "model.safetensors").rename(model / name)
    refused(begins(model), capsys, name)


def test_a_file_of_weights_is_in_a_folder(model, begins, capsys):
    refused(begins(model / "model.safetensors"), capsys, f"name its folder: --model {model}")


def test_an_adapter_without_a_base_is_not_a_model(model, begins, capsys):
    (model / "adapter_config.json").write_text("{}")
    refused(begins(model), capsys, "adapter", "does not name its base")


def test_weights_without_a_tokenizer(model, begins, capsys, tmp_path):
    kept = Path(shutil.copytree(model, tmp_path / "kept"))
    for file in model.glob("tokenizer*"):
        file.unlink()
    refused(begins(model), capsys, "no tokenizer", "--tokenizer")
    assert main(begins(model, "--tokenizer", kept)) == 0


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory) -> Path:
    """As many tokens, and other ones."""
    folder = tmp_path_factory.mktemp("other")
    data = json_lines(folder / "data.jsonl", [{"text": text[::-1]} for text in sentences(100)])
    assert main(arguments(data, folder / "run", "--steps", 1)) == 0
    return folder / "run" / "model"


def test_a_tokenizer_of_another_model_is_noticed(model, begins, capsys, other_tokenizer, tmp_path):
    assert main(begins(model, "--tokenizer", other_tokenizer)) == 0
    said = capsys.readouterr().err
    assert "seems to be that of another model" in said
    assert "of its 300 tokens differ there" in said
    same = shutil.copytree(model, tmp_path / "same")
    assert main(begins(model, "--tokenizer", same, "--out", tmp_path / "again")) == 0
    assert "seems to be" not in capsys.readouterr().err


def test_a_tokenizer_far_smaller_than_the_model_is_noticed(model, begins, capsys, tmp_path):
    weights = load_file(model / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([rows, rows])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 2 * len(rows)}
    (model / "config.json").write_text(json.dumps(config))
    assert main(begins(model)) == 0
    assert "tokens, and the model has" in capsys.readouterr().err
    derived = json.loads((tmp_path / "out" / "run.json").read_text())["derived"]
    assert derived["vocabulary"].endswith(f"; the model has {2 * len(rows)}")


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.filterwarnings("default")
def test_an_encoder_is_not_causal(begins, capsys, tmp_path, run, has_weights):
    from transformers import BertConfig, BertLMHeadModel

    folder = tmp_path / "bert"
    shutil.copytree(run / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    if has_weights:
        BertLMHeadModel(BertConfig(**BERT)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(BERT))
    refused(begins(folder), capsys, "BertLMHeadModel is not causal as configured", "is_decoder")
    if has_weights:
        said = refused(["generate", str(folder)], capsys, "BertLMHeadModel is not causal as configured")
        assert "--model" not in said
    (folder / "config.json").write_text(json.dumps(BERT | {"is_decoder": True}))
    assert main(begins(folder)) == 0


def test_weights_that_are_not_all_there(model, begins, capsys):
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    refused(begins(model), capsys, "lack 1 of the weights", "model.layers.1.mlp.up_proj.weight")


def test_the_table_says_where_the_weights_are_from(model, begins, capsys, tmp_path):
    assert main(begins(model)) == 0
    assert "in float32, loaded" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "out")
    assert main(begins("tiny")) == 0
    assert "in float32, new weights" in capsys.readouterr().out


def test_a_model_that_is_not_on_the_hub_is_not_a_missing_tokenizer(begins, capsys):
    refused(
        begins("nobody/nothing"), capsys, "--model nobody/nothing: this is neither a size", "nor a model on the hub"
    )


# --------------------------------------------------------------------------------------------------- a run is a model


def test_a_run_as_the_model(run, begins, tmp_path):
    assert main(begins(run, "--lr", 0)) == 0
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "out", run))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_without_a_model_yet(run, begins, capsys, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "early"))
    shutil.rmtree(folder / "model")
    refused(begins(folder), capsys, "holds no model yet", "--resume --out")


# ----------------------------------------------------------------------------------------------------------- exported


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_came_with_the_weights_stays_with_them(model, begins, tmp_path, dtype):
    weights = {name: value.to(dtype) for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "do_sample": True}))
    assert main(begins(model, "--lr", 0)) == 0
    exported = tmp_path / "out" / "model"
    found = load_file(exported / "model.safetensors")
    assert {value.dtype for value in found.values()} == {dtype}
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert json.loads((exported / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert (exported / "chat_template.jinja").read_text() == "{{ messages[0].content }}!"
    assert (exported / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert json.loads((exported / "generation_config.json").read_text())["temperature"] == 0.3


def test_a_folder_that_goes_while_its_weights_are_trained(model, begins, tmp_path, monkeypatch):
    """Hours later nothing is asked of it any more."""
    from macrobatch.train import trainer

    (model / "generation_config.json").write_text("{}")
    loop = trainer._loop
    monkeypatch.setattr(trainer, "_loop", lambda *words: (shutil.rmtree(model), loop(*words))[1])
    assert main(begins(model)) == 0
    assert (tmp_path / "out" / "model" / "generation_config.json").read_text() == "{}"


def test_the_chat_template_of_another_tokenizer(model, begins, tmp_path):
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "inside"}))
    assert main(begins("tiny", "--tokenizer", model)) == 0
    exported = tmp_path / "out" / "model"
    assert json.loads((exported / "tokenizer_config.json").read_text())["chat_template"] == "inside"


# ------------------------------------------------------------------------------------ nothing is executed or unpickled


class _Bomb:
    """Pickled code that leaves a file when it runs."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> object:
        return open, (str(self.trace), "w")


INDEXES = {
    "a pickle": "pytorch_model.bin",
    "a pickle outside": "../bomb.safetensors",
    "an absolute path": "/etc/passwd",
    "a number": 3,
    "nothing there": "missing.safetensors",
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_names_something_else(model, begins, capsys, tmp_path, name):
    trace = tmp_path / "trace"
    for place in (model / "pytorch_model.bin", tmp_path / "bomb.safetensors"):
        torch.save({"model.norm.weight": _Bomb(trace)}, place)
    names = dict.fromkeys(load_file(model / "model.safetensors"), INDEXES[name])
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    refused(begins(model), capsys, "missing.safetensors" if "missing" in str(INDEXES[name]) else "names")
    assert not trace.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"a":' * 100_000 + "1" + "}" * 100_000, "\xff"])
def test_a_damaged_index(model, begins, capsys, content):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(content, encoding="latin1")
    refused(begins(model), capsys, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang(model, begins, capsys, name):
    (model / name).unlink()
    os.mkfifo(model / name)
    refused(begins(model), capsys)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_deep_json(model, begins, capsys, name):
    (model / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(begins(model), capsys)


CODE = "open({trace!r}, 'w').close()\nclass Mine: pass\n"


def test_code_beside_a_tokenizer_is_not_asked_about(model, begins, capsys, tmp_path, monkeypatch):
    """Though somebody would answer yes."""
    trace = tmp_path / "trace"
    (model / "tokenizer.json").unlink()
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "mine.py").write_text(CODE.format(trace=str(trace)))
    answers = tmp_path / "answers"
    answers.write_text("y\n" * 50)
    with answers.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        for command in (begins("tiny", "--tokenizer", model), begins(model)):
            said = refused(command, capsys, "nothing in a folder is executed", "tokenizer.json")
            assert "trust_remote_code" not in said
    assert not trace.exists()


def test_code_beside_a_model_is_not_asked_about(model, begins, capsys, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "mine.py").write_text(CODE.format(trace=str(trace)))
    answers = tmp_path / "answers"
    answers.write_text("y\n" * 50)
    with answers.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        for name in (model, model / "config.json"):
            said = refused(begins(name), capsys, "'mine'", "nothing in a folder is executed", "transformers")
            assert "trust_remote_code" not in said
    assert not trace.exists()


@pytest.mark.filterwarnings("default")
def test_code_that_is_not_needed_is_told_once_and_not_exported(model, begins, capsys, tmp_path):
    """What transformers has of its own is used instead; what names the code would fail with the next who loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trace = tmp_path / "trace"
    (model / "mine.py").write_text(CODE.format(trace=str(trace)))
    maps = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    config = json.loads((model / "config.json").read_text()) | {"auto_map": maps, "custom_pipelines": {"x": {}}}
    (model / "config.json").write_text(json.dumps(config))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.MyTokenizer", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(begins(model)) == 0
    said = capsys.readouterr().err
    assert said.count("is not executed") == 1
    assert f"{model} contains code (mine.py)" in said
    exported = tmp_path / "out" / "model"
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((exported / name).read_text())
    assert "custom_pipelines" not in json.loads((exported / "config.json").read_text())
    assert json.loads((exported / "tokenizer_config.json").read_text())["tokenizer_class"] != "MyTokenizer"
    AutoTokenizer.from_pretrained(exported)
    AutoModelForCausalLM.from_pretrained(exported)
    assert not trace.exists()


def test_a_tokenizer_class_of_transformers_stays(model, begins, tmp_path):
    config = json.loads((model / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(begins(model)) == 0
    exported = tmp_path / "out" / "model" / "tokenizer_config.json"
    assert json.loads(exported.read_text())["tokenizer_class"] == "GPT2Tokenizer"


def test_a_type_that_transformers_does_not_know(model, begins, capsys):
    config = json.loads((model / "config.json").read_text()) | {"model_type": "novel"}
    (model / "config.json").write_text(json.dumps(config))
    for name in (model, model / "config.json"):
        said = refused(begins(name), capsys, "'novel'", "transformers")
        assert "executed" not in said  # there is no code


# ----------------------------------------------------------------------------------------------- without a mask


class Scaled(nn.Module):
    """Sees earlier tokens only, but takes samples of more than so many tokens otherwise, if that shows in the mask."""

    def __init__(self, *, by: str, above: int = 0, in_training: bool = False) -> None:
        super().__init__()
        self.embedding, self.by, self.above, self.in_training = nn.Embedding(12, 12), by, above, in_training

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None):
        seen = torch.ones_like(input_ids) if attention_mask is None or self.by == "width" else attention_mask
        size = seen.sum(1)[:, None, None]
        is_scaled = (size > self.above) & (self.by != "nothing") & (self.training or not self.in_training)
        return SimpleNamespace(logits=self.embedding(input_ids).cumsum(1) * torch.where(is_scaled, 2.0, 1.0))


@pytest.mark.parametrize(
    ("options", "effect"),
    [
        ({"by": "nothing"}, (True, True)),
        ({"by": "mask", "above": 20}, (False, True)),
        ({"by": "mask", "above": 20, "in_training": True}, (False, True)),
        ({"by": "width", "above": 20}, (False, False)),
    ],
)
def test_what_padding_does_is_found_by_trying(options, effect):
    """The mask is left out only where it changes nothing; where it does not help either, that is said."""
    model = Scaled(**options).eval()
    assert padding_effect(model, 48, torch.device("cpu")) == effect
    assert not model.training


@pytest.mark.filterwarnings("default")
def test_a_model_that_depends_on_the_width_of_its_batch_is_said_to(data, tmp_path, capsys):
    rope = {"rope_type": "longrope", "short_factor": [1] * 4, "long_factor": [4] * 4, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 16
    config = {
        "model_type": "phi3",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 400,
    }
    config |= {"num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}
    config |= {"original_max_position_embeddings": 16, "rope_parameters": rope, "initializer_range": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--model", tmp_path / "config.json", "--steps", 1, "--seq-len", 48)
    for micro, is_said in ((8, True), (1, False)):
        assert main(arguments(data, tmp_path / f"run{micro}", *flags, "--micro", micro)) == 0
        assert ("depends on the padding beside it" in capsys.readouterr().err) is is_said
