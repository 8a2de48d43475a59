"""Ids and back: any text survives, the same texts make the same vocabulary, and others can read what is saved."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from macrobatch.errors import UsageError
from macrobatch.train import sources
from macrobatch.train import vocabulary as module
from macrobatch.train.documents import Document, Documents, documents
from macrobatch.train.vocabulary import END, Vocabulary

quickly = settings(max_examples=200, deadline=None, derandomize=True, database=None)

POEM = "the rose is red,\nthe violet's blue,\n\tthe honey's sweet,\nand so are you.\n"
TEXTS = [Document(POEM * 3), Document("roses", " are red")]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train(TEXTS, size=300)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """Somebody else's tokenizer: words, something before and after each text, and the ends where its files say."""
    folder = tmp_path_factory.mktemp("words")
    names = ["[UNK]", "<s>", "the", "rose", "is", "red", "</s>", "<stop>"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<stop>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 6)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def copied(folder: Path, to: Path, config: str | None = None) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    if config is not None:
        (to / "tokenizer_config.json").write_text(config)
    return to


# ------------------------------------------------------------------------------------------------------------- trained


@quickly
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(vocabulary, text):
    (ids,) = vocabulary.encode([text])
    assert vocabulary.decode(ids) == text.replace(END, "")
    assert all(0 <= token < vocabulary.size for token in ids)


@quickly
@given(texts=st.lists(st.text("the rose\n", max_size=30), max_size=8), at_once=st.integers(0, 40))
def test_texts_are_encoded_alike_alone_and_together(vocabulary, texts, at_once):
    alone = [vocabulary.encode([text])[0] for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", at_once)
        assert list(vocabulary.encode_each(iter(texts))) == alone


def test_the_same_text_whatever_else_was_asked_for(vocabulary):
    assert vocabulary.start == []
    assert vocabulary.decode([vocabulary.end]) == ""
    assert vocabulary.end == vocabulary.pad == 0
    assert len(vocabulary) == vocabulary.size <= 300


def test_words_of_the_data_are_short(vocabulary):
    (ids,) = vocabulary.encode([" violet's the rose is red"])
    assert len(ids) < len(" violet's the rose is red") / 2


@quickly
@given(text=st.text("ab \n", max_size=80), block=st.integers(1, 20))
def test_a_long_text_is_encoded_in_blocks_that_end_with_lines(text, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        blocks = sources.blocks(text)
    assert "".join(blocks) == text
    assert all(1 <= len(part) <= block for part in blocks[:-1])
    for part in blocks[:-1]:
        assert part.endswith("\n") or ("\n" not in part and len(part) == block)


def test_blocks_make_one_list_of_ids(vocabulary, monkeypatch):
    long = POEM * 5
    monkeypatch.setattr(sources, "BLOCK", 50)
    ids, short = vocabulary.encode([long, "red"])
    assert vocabulary.decode(ids) == long
    assert vocabulary.decode(short) == "red"


def test_prompts_and_completions_are_trained_on_too():
    assert Vocabulary.train([Document("", "zyzzyva " * 9)], 300).encode([" zyzzyva"])[0].__len__() == 1


def test_of_very_much_text_some_is_enough(monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH", 10)
    texts = module._some(Documents([Document("abcde"), Document("fghij", "klmno"), Document("pqrst")]))
    assert texts == ["abcde", "klmno"]


TRAIN = """
import os, sys
from macrobatch.train.documents import documents
from macrobatch.train.vocabulary import Vocabulary
for threads in ("1", "4"):
    if os.fork() == 0:
        os.environ["RAYON_NUM_THREADS"] = threads
        print(Vocabulary.train(documents(sys.argv[1:]), 400).fingerprint)
        sys.exit()
    os.wait()
"""


def test_the_same_texts_make_the_same_vocabulary_in_every_process(tmp_path):
    # Many words that are equally frequent: which of them are merged first must not follow from a table's order.
    (tmp_path / "a.txt").write_text(" ".join(f"{a}{b}{c}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr") * 2)
    here = Vocabulary.train(documents([tmp_path / "a.txt"]), 400)
    assert here.size == 400
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "a.txt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == [here.fingerprint] * 2, result.stderr


def test_a_kept_vocabulary_is_the_trained_one(vocabulary, tmp_path):
    for _ in range(2):
        assert Vocabulary.train(TEXTS, 300, tmp_path).fingerprint == vocabulary.fingerprint
    assert len(list(tmp_path.iterdir())) == 1
    assert Vocabulary.train(TEXTS, 280, tmp_path).size == 280
    assert Vocabulary.train(TEXTS[:1], 300, tmp_path).fingerprint != vocabulary.fingerprint


def test_a_kept_vocabulary_that_was_damaged_is_trained_again(vocabulary, tmp_path, caplog):
    Vocabulary.train(TEXTS, 300, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"rose"', b'"nose"').replace(b"the", b"teh"))
    assert Vocabulary.train(TEXTS, 300, tmp_path).fingerprint == vocabulary.fingerprint
    assert "computed again" in caplog.text


@pytest.mark.parametrize("size", [256, 0, -1, True, 300.0])
def test_a_size_that_makes_no_sense_is_refused(size):
    with pytest.raises(UsageError, match="at least 257 ids"):
        Vocabulary.train([Document(POEM)], size)


def test_half_a_character_is_refused(vocabulary):
    with pytest.raises(UsageError, match="half of a character"):
        vocabulary.encode(["rose", "\ud800"])


# ----------------------------------------------------------------------------------------------------- saved and loaded


def test_what_is_saved_is_loaded(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "new")
    for path in (tmp_path / "new", tmp_path / "new" / "tokenizer.json", str(tmp_path / "new")):
        loaded = Vocabulary.load(path)
        assert loaded.fingerprint == vocabulary.fingerprint
        assert (loaded.size, loaded.end, loaded.pad) == (vocabulary.size, vocabulary.end, vocabulary.pad)


def test_transformers_reads_it_too(vocabulary, tmp_path):
    from transformers import AutoTokenizer

    vocabulary.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(POEM)["input_ids"] == vocabulary.encode([POEM])[0]
    assert theirs.decode(theirs(POEM)["input_ids"]) == POEM
    assert (theirs.eos_token_id, theirs.pad_token_id) == (vocabulary.end, vocabulary.pad)


def test_a_tokenizer_of_others(words):
    loaded = Vocabulary.load(words)
    assert loaded.encode(["the rose is red"]) == [[2, 3, 4, 5]], "neither cut, nor filled up, nor dressed"
    assert loaded.start == [1]
    assert (loaded.end, loaded.pad, loaded.size) == (6, 6, 8)


@pytest.mark.parametrize("token", ['"<stop>"', '{"content": "<stop>", "special": true}'])
def test_the_files_say_which_token_ends_a_text(words, tmp_path, token):
    loaded = Vocabulary.load(copied(words, tmp_path, f'{{"eos_token": {token}, "pad_token": "[UNK]", "mine": 1}}'))
    assert (loaded.end, loaded.pad) == (7, 0)
    loaded.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/tokenizer_config.json").read_text())["mine"] == 1
    assert Vocabulary.load(tmp_path / "again").fingerprint == loaded.fingerprint


def test_ids_may_have_holes(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "rose": 70, "</s>": 5}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary.load(tmp_path).size == 71


def test_a_folder_that_only_transformers_can_read(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    loaded = Vocabulary.load(tmp_path)
    assert loaded.encode(["abb"]) == [[2, 1]]
    assert loaded.end == 3
    loaded.save(tmp_path / "again")
    assert Vocabulary.load(tmp_path / "again").encode(["abb"]) == [[2, 1]]


BAD = {
    "not JSON": ("tokenizer.json", "{", "is not a tokenizer.json"),
    "something else": ("tokenizer.json", '{"text": 1}', "is not a tokenizer.json"),
    "not text": ("tokenizer.json", b"\xff\xfe", "is not a tokenizer.json: not UTF-8"),
    "bad settings": ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
    "no settings": ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object: found list"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_damaged_files_are_named(words, tmp_path, name, content, message):
    copied(words, tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        Vocabulary.load(tmp_path)


def test_a_tokenizer_that_does_not_say_its_end_is_refused(tmp_path):
    Tokenizer(models.WordLevel({"rose": 0}, unk_token="rose")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"does not say which token ends a text.*eos_token"):
        Vocabulary.load(tmp_path)


@pytest.mark.parametrize("name", ["./missing", "missing.json", "a/b/c", "/missing", "../x", "", "a b"])
def test_a_file_that_is_not_there_is_not_looked_for_elsewhere(name):
    with pytest.raises(UsageError, match="there is no tokenizer"):
        Vocabulary.load(name)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no tokenizer") as caught:
        Vocabulary.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_name_on_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert module.hub_is_out_of_reach()
    with pytest.raises(UsageError, match="there is no tokenizer 'nobody/nothing'"):
        Vocabulary.load("nobody/nothing")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert not module.hub_is_out_of_reach()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("alphabet", ["ACGT", " ", "0123456789", "-=", "\u4e2d\u56fd"])
def test_a_word_without_an_end_does_not_stall(alphabet):
    """Its merges would take time by the square of its length."""
    draw = random.Random(0)
    endless = "".join(draw.choice(alphabet) for _ in range(250_000))
    vocabulary = Vocabulary.train([Document(endless), Document("to be or not to be " * 50)], size=400)
    (ids,) = vocabulary.encode([endless])
    assert vocabulary.decode(ids) == endless


def test_long_words_change_nothing_for_others():
    """A tokenizer that is trained on words of usual lengths is the one that the library makes by itself."""
    texts = ["def function(argument): return argument " * 20, "x" * 200]
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"vocab_size": 300, "min_frequency": 2, "special_tokens": [END], "show_progress": False}
    plain.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    vocabulary = Vocabulary.train([Document(text) for text in texts], size=300)
    assert vocabulary.encode(texts) == [plain.encode(text).ids for text in texts]
