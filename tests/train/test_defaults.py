"""What a run chooses by itself, from the model and the data: the sequence length, the precision, the width of rows."""

import json
import tomllib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.commands import arguments, json_lines, losses, refused
from macrobatch.cli import main
from macrobatch.errors import UsageError
from macrobatch.train import adapters, models
from macrobatch.train.cutting import micro_of
from macrobatch.train.data import Data
from macrobatch.train.flags import load_config
from macrobatch.train.settings import Settings
from macrobatch.train.world import World

pytestmark = pytest.mark.usefixtures("own_cache")

CPU = torch.device("cpu")
LLAMA = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def talk(words: int) -> dict:
    return {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "la " * words}]}


def chats(folder, *words):
    return json_lines(folder / "chat.jsonl", [talk(count) for count in words])


def config(folder, **more):
    (folder / "config.json").write_text(json.dumps(LLAMA | more))
    return folder / "config.json"


def read(data, model="tiny", **more) -> Data:
    return Data.read(Settings(model=str(model), data=(str(data),), vocabulary_size=300, validation=0, **more))


# ------------------------------------------------------------------------------------------------ the sequence length


def test_conversations_set_the_length_of_a_new_model(tmp_path):
    short, long = read(chats(tmp_path, *[5] * 40)), read(chats(tmp_path, *[5] * 40, 600))
    assert short.seq_len == 256
    assert long.seq_len == max(long.train.lengths) > 600
    assert (long.train.truncated, long.train.num_whole) == (0, 41)


def test_the_positions_of_a_model_set_the_length(tmp_path):
    texts = json_lines(tmp_path / "texts.jsonl", [{"text": "word " * 9000}])
    for positions, expected in ((100, 100), (4096, 2048)):
        model = config(tmp_path, max_position_embeddings=positions)
        data = read(texts, model)
        assert data.seq_len == max(data.train.lengths) == expected
    gpt2 = {"model_type": "gpt2", "n_positions": 48, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    assert read(texts, tmp_path / "config.json").seq_len == 48


def test_conversations_set_the_length_up_to_the_positions(tmp_path):
    data = chats(tmp_path, *[5] * 40, 3000)
    longest = read(data, config(tmp_path, max_position_embeddings=9999)).seq_len
    assert 3000 < longest < 4096
    assert read(data, config(tmp_path, max_position_embeddings=100)).seq_len == 100  # one of 41 is cut


def test_texts_beside_conversations_are_cut_as_with_the_length_given(tmp_path):
    records = [*map(talk, [5] * 40), talk(600), {"text": "word " * 2000}]
    data = json_lines(tmp_path / "mixed.jsonl", records)
    chosen = read(data)
    given = read(data, seq_len=chosen.seq_len)
    assert chosen.train.fingerprint == given.train.fingerprint


def test_many_conversations_that_would_be_cut_are_an_error(tmp_path, caplog):
    data = chats(tmp_path, *[5] * 18, 2600, 2600)
    with pytest.raises(
        UsageError, match="2 of 20 conversations are longer than 2,048 tokens, and would be cut"
    ) as told:
        read(data)
    message = str(told.value)
    length = int(message.partition("--seq-len ")[2].split()[0])
    assert f"--seq-len {length} keeps all 20 conversations; --truncate cuts them" in message
    assert read(data, seq_len=length).train.truncated == 0
    assert length % 64 == 0
    assert read(data, truncate=True).train.truncated == 2
    assert "2 of 20 conversations are longer than 2048 tokens" in caplog.text


def test_a_length_that_was_asked_for_cuts_and_names_the_one_that_does_not(tmp_path, caplog):
    assert read(chats(tmp_path, *[5] * 18, 100, 100), seq_len=48).train.truncated == 2
    assert "2 of 20 conversations are longer than 48 tokens: their end was left out. The longest has" in caplog.text
    length = int(caplog.text.partition("; --seq-len ")[2].split()[0])
    assert read(chats(tmp_path, *[5] * 18, 100, 100), seq_len=length).train.truncated == 0


def test_one_in_twenty_may_be_cut(tmp_path):
    assert read(chats(tmp_path, *[5] * 19, 2600)).train.truncated == 1


def test_the_cure_is_one_that_the_model_takes(tmp_path):
    data, model = chats(tmp_path, *[5] * 8, 40), config(tmp_path, max_position_embeddings=32)
    with pytest.raises(
        UsageError, match="the model takes 32: --truncate cuts them, or leave them out of the data"
    ) as told:
        read(data, model)
    assert "keeps all" not in str(told.value)


def test_a_run_says_what_it_chose_and_shows_what_is_learnt(tmp_path, capsys):
    command = arguments(chats(tmp_path, *[5] * 20), tmp_path / "run", "--validation", 0, "--steps", 1)
    place = command.index("--seq-len")
    del command[place : place + 2]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "20 of 20 fit into 256" in " ".join(said.split())
    assert ">>>" + "la " * 5 + "<|im_end|><<<" in said
    assert "<|im_start|>user\ngo<|im_end|>\n" in said
    chosen = load_config(tmp_path / "run" / "config.toml")
    assert (chosen.seq_len, chosen.precision, chosen.steps) == (256, "float32", 1)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["seq_len"] == 256
    again = ["train", "--config", str(tmp_path / "run" / "config.toml"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


def test_a_run_that_was_cut_by_an_older_version_can_be_resumed(tmp_path):
    command = arguments(chats(tmp_path, *[5] * 8, 100, 100), tmp_path / "run", "--truncate", "--steps", 1)
    assert main(command) == 0
    description = json.loads((tmp_path / "run" / "run.json").read_text())
    del description["settings"]["truncate"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(description))
    assert main(["train", "--resume", "--out", str(tmp_path / "run"), "--steps", "2"]) == 0
    assert len(losses(tmp_path / "run")) == 2


# ---------------------------------------------------------------------------------- precision, frozen weights, rows


@pytest.mark.parametrize(("has_bf16", "kind", "chosen"), [(True, "cuda", "bf16"), (False, "cuda", "float32")])
def test_the_precision_is_what_the_gpu_has(monkeypatch, has_bf16, kind, chosen):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device(kind))
    assert models.precision_of(Settings(), world) == chosen
    assert models.precision_of(Settings(precision="fp16"), world) == "fp16"
    assert models.precision_of(Settings(), World(rank=0, size=1, local_rank=0, local_size=1, device=CPU)) == "float32"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_frozen_weights_in_bf16_compute_the_same_bits(kind, is_tied):
    named = {"tie_word_embeddings": is_tied, "n_layer": 1, "n_head": 2, "n_embd": 16, "attn_pdrop": 0}
    both = []
    for autocast in (None, torch.bfloat16):
        torch.manual_seed(0)
        full = AutoConfig.for_model(**LLAMA | {"model_type": kind} | (named if kind == "gpt2" else {}))
        full.tie_word_embeddings = is_tied
        model = AutoModelForCausalLM.from_config(full).eval()
        settings = Settings(lora=True, model="x", lora_rank=2)
        adapters.add(model, models.blocks_of(model), settings, models.Origin("x", "weights", None))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)  # it begins as zero
        adapters.move(model, CPU, torch.float32, autocast)
        ids = torch.arange(12).reshape(2, 6)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        both.append((loss, [p.grad for p in trained.values()]))
        dtypes = {p.dtype for name, p in model.named_parameters() if "base_layer.weight" in name}
        assert dtypes == {autocast or torch.float32}
        assert {p.dtype for p in trained.values()} == {torch.float32}
        embedding = model.get_input_embeddings().weight
        assert embedding.dtype == torch.float32
    (loss, gradients), (other_loss, others) = both
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


def test_a_run_with_frozen_weights_in_bf16(tmp_path):
    data = chats(tmp_path, *[5] * 20)
    assert main(arguments(data, tmp_path / "base", "--steps", 1)) == 0
    more = ("--model", tmp_path / "base", "--lora", "--precision", "bf16", "--save-every", 1)
    assert main(arguments(data, tmp_path / "run", *more, "--steps", 2)) == 0
    assert main(arguments(data, tmp_path / "packed", *more, "--steps", 2, "--pack")) == 0
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "run"), rel=2e-2)
    memory = json.loads((tmp_path / "run" / "run.json").read_text())["derived"]["memory"]
    plain = ("--model", tmp_path / "base", "--lora", "--steps", 2)
    assert main(arguments(data, tmp_path / "wide", *plain)) == 0
    wide = json.loads((tmp_path / "wide" / "run.json").read_text())["derived"]["memory"]
    assert float(memory.split()[0]) < float(wide.split()[0])


def test_packed_rows_fill_the_sequence_length(tmp_path):
    data = read(chats(tmp_path, *[5] * 40), seq_len=200)
    settings = Settings(pack=True, seq_len=data.seq_len)
    assert max(data.train.lengths) < 100
    assert micro_of(settings, max(data.train.lengths), CPU).width == 200
    run = arguments(chats(tmp_path, *[5] * 40), tmp_path / "run", "--pack", "--seq-len", 200, "--validation", 0)
    assert main(run) == 0
    derived = json.loads((tmp_path / "run" / "run.json").read_text())["derived"]
    assert "rows of at most 200 tokens" in derived["micro-batches"]


def test_packed_rows_are_not_longer_than_a_sliding_window(tmp_path):
    window = {"model_type": "mistral", "sliding_window": 96, "max_position_embeddings": 512}
    model = config(tmp_path, **window)
    assert models.lengths_of(Settings(model=str(model), pack=True)) == (96, 512)
    assert models.lengths_of(Settings(model=str(model))) == (512, 512)


def test_a_prompt_that_is_too_long_is_told_at_the_start(tmp_path, capsys):
    data = chats(tmp_path, *[5] * 20)
    command = arguments(data, tmp_path / "run", "--prompt", "word " * 90, "--sample-tokens", 3)
    refused(command, capsys, "--prompt has ", "and the model takes 64: shorten it")
    assert not (tmp_path / "run").exists()
