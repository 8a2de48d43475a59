"""Files of strangers: nothing in them is executed or fetched, and none takes all time or all memory."""

import bz2
import gzip
import json
import lzma
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers

from harness.commands import arguments, json_lines, refused
from macrobatch.cli import main
from macrobatch.errors import BatchError, UsageError
from macrobatch.train import limits
from macrobatch.train.documents import documents
from macrobatch.train.limits import run_within_limits
from macrobatch.train.pretrained import check_code

pytestmark = pytest.mark.usefixtures("own_cache")


SENTENCES = 100


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(arguments(data, folder, "--steps", 1)) == 0
    return folder


@pytest.fixture
def model(run, tmp_path) -> Path:
    """A copy of its model, to be changed."""
    return Path(shutil.copytree(run / "model", tmp_path / "model"))


def changed(model: Path, **entries) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | entries))


# ------------------------------------------------------------------------------------------------- code by its name


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": "some/kernel"},
        {"_attn_implementation": "some/kernel@v1:function"},
        {"_attn_implementation_internal": "some/kernel"},
        {"attn_implementation": {"": "eager", "text_config": "some/kernel"}},
        {"attn_implementation": "flash_attention_2"},  # transformers fetches it where it is not installed
        {"attn_implementation": ["some/kernel"]},
        {"experts_implementation": "some/kernel"},
        {"text_config": {"attn_implementation": "some/kernel"}},
        {"parts": [{"attn_implementation": "some/kernel"}]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"use_kernels": True},
        {"transformers_weights": "../other.bin"},
    ],
)
@pytest.mark.parametrize("place", ["weights", "config", "generate"])
def test_a_configuration_that_names_code_is_refused(data, model, tmp_path, capsys, entries, place):
    changed(model, **entries)
    if place == "generate":
        command = ["generate", str(model), "--prompt", "a"]
    else:
        named = model if place == "weights" else model / "config.json"
        command = arguments(data, tmp_path / "out", "--model", named, "--tokenizer", model)
    refused(
        command, capsys, "attn_implementation" if {"parts", "text_config"} & entries.keys() else next(iter(entries))
    )


@pytest.mark.parametrize("entry", [None, "eager", "sdpa", {"": "sdpa"}, "flex_attention"])
def test_attention_of_torch_may_be_named(entry):
    check_code({"model_type": "llama", "attn_implementation": entry, "_experts_implementation": "grouped_mm"}, "x")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"num_hidden_layers": 10**9}, "1,000,000,000 layers"),
        ({"num_attention_heads": 0}, "cannot be made from this configuration"),
        ({"max_position_embeddings": "many"}, "cannot be made from this configuration"),
    ],
)
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_configuration_that_cannot_be(data, model, tmp_path, capsys, entries, said, has_weights):
    changed(model, **entries)
    named = model if has_weights else model / "config.json"
    before = time.monotonic()
    refused(arguments(data, tmp_path / "out", "--model", named, "--tokenizer", model), capsys, said)
    assert time.monotonic() - before < 30


# ---------------------------------------------------------------------------------------------------- time and memory


# What does not end is left to a process of its own, which ends with it.
ALONE = """
import os, resource, sys
from macrobatch.errors import MacrobatchError
from macrobatch.train import limits
limits.SECONDS, limits.MEMORY = 1.0, 200 << 20
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
from macrobatch.train.documents import documents
from macrobatch.train.vocabulary import Vocabulary
from macrobatch.train.chat import named_template
file, template = sys.argv[1:]
try:
    if template:
        chat = Vocabulary.train(documents([file]), 300, template=named_template(template)).chat
        [chat.render(document) for document in documents([file])]
    else:
        list(Vocabulary.load(file).encode_each(["a" * 20_000]))
except MacrobatchError as error:
    print(error, flush=True)
os._exit(0)
"""


def alone(*words) -> str:
    command = [sys.executable, "-c", ALONE, *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TURNS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOP + TURNS, "the chat template did not end within 1 seconds"),
        ("{{ 'x' * 999999999 }}" + TURNS, "the chat template takes more than 0.2 GiB of memory"),
        ("{{ 'x' * 99999999999999 }}" + TURNS, "the chat template takes more than 0.2 GiB of memory"),
        ("{% generation %}{{ 'x' * 999999999 }}{% endgeneration %}", "takes more than 0.2 GiB of memory"),
    ],
)
def test_a_template_without_an_end(tmp_path, template, said):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = json_lines(tmp_path / "chat.jsonl", [{"messages": messages}] * 20)
    (tmp_path / "hostile.jinja").write_text(template)
    told = alone(chat, tmp_path / "hostile.jinja")
    assert told.startswith(f"{chat}, line 1: the chat template ")
    assert said in told


def grows() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "x": 1, "<eos>": 2}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 3)
    return tokenizer


def loops() -> Tokenizer:
    """It tries every part of a word of any length."""
    words = {"a": 0, "##a": 1, "[UNK]": 2, "<eos>": 3}
    return Tokenizer(models.WordPiece(words, unk_token="[UNK]", max_input_chars_per_word=10**9))


@pytest.mark.parametrize("made", [grows, loops])
def test_a_tokenizer_without_an_end(tmp_path, made):
    tokenizer = made()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    told = alone(tmp_path / "tokenizer.json", "")
    assert "tokenizer" in told
    assert "did not end within" in told or "takes more than" in told


def test_what_ends_in_time_is_returned_and_its_error_raised():
    assert run_within_limits(lambda: "text", "it") == "text"
    with pytest.raises(ZeroDivisionError):
        run_within_limits(lambda: 1 // 0, "it", is_python=True)
    assert len(run_within_limits(lambda: "x" * 10**8, "it", is_python=True)) == 10**8


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def zstandard(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)


@pytest.mark.parametrize("suffix", [*PACKERS, ".zst"])
@pytest.mark.parametrize("name", ["bomb.txt", "bomb.jsonl", "bomb.json"])
def test_a_bomb(tmp_path, monkeypatch, name, suffix):
    monkeypatch.setattr(limits, "UNPACKED", 4 << 20)
    pack = PACKERS.get(suffix, zstandard)
    file = tmp_path / f"{name}{suffix}"
    file.write_bytes(pack(b'{"text": "' + b"a" * (64 << 20)))
    with pytest.raises(BatchError, match=r"unpacks to more than [0-9,]+ bytes.*unpack it yourself"):
        documents([file])


@pytest.mark.parametrize("suffix", [*PACKERS, ".zst"])
def test_a_text_that_says_the_same_over_and_over_is_no_bomb(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(limits, "UNPACKED", 1 << 20)
    lines = [
        json.dumps({"text": f"{number} " + "the same words as in all other lines " * 3}) for number in range(20_000)
    ]
    file = tmp_path / f"texts.jsonl{suffix}"
    file.write_bytes(PACKERS.get(suffix, zstandard)("\n".join(lines).encode()))
    assert len(documents([file])) == 20_000


def test_deep_json_in_a_run(tmp_path, run, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    deep = "[" * 100_000
    (copy / "metrics.jsonl").write_text((copy / "metrics.jsonl").read_text() + deep + "\n")
    (copy / "trackers.json").write_text(deep)
    assert main(["report", str(copy)]) == 0
    (copy / "run.json").write_text(deep)
    assert main(["report", str(copy)]) == 0  # of what there is
    refused(["train", "--resume", "--out", str(copy)], capsys, "has no settings of a run")


def test_one_record_in_a_json_file(tmp_path):
    (tmp_path / "one.json").write_text('{"text": "to be"}')
    assert [document.text for document in documents([tmp_path / "one.json"])] == ["to be"]
    (tmp_path / "one.json").write_text('{"data": [{"text": "to be"}]}')
    with pytest.raises(BatchError, match=r"record 1: no field 'text'.*found 'data'"):
        documents([tmp_path / "one.json"])
    (tmp_path / "one.json").write_text("3")
    with pytest.raises((BatchError, UsageError), match="must hold a list of records"):
        documents([tmp_path / "one.json"])
