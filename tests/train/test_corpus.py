"""Every text is read, cut without losing a token, and cached, but checked; bad data is named by its line."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from macrobatch import MacroStep, by_tokens
from macrobatch._cut.padding import IGNORED
from macrobatch.errors import BatchError, UsageError
from macrobatch.losses import causal_lm_loss
from macrobatch.train import documents as reading
from macrobatch.train.cache import cache_folder, cached
from macrobatch.train.corpus import Corpus, Document, collate, documents
from macrobatch.train.vocabulary import Vocabulary

quickly = settings(max_examples=100, deadline=None, derandomize=True, database=None)

POEM = "the rose is red,\nthe violet's blue,\nthe honey's sweet,\nand so are you.\n"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.train([Document(POEM)], size=270)


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(*sources: Path, **options: str) -> list[str]:
    return [document.text for document in documents(sources, **options)]


# ------------------------------------------------------------------------------------------------------------- reading


def test_a_file_is_a_text(tmp_path):
    (document,) = documents([written(tmp_path / "poem.txt", POEM)])
    assert document == Document(POEM, None, str(tmp_path / "poem.txt"))


def test_marks_of_other_systems_are_no_text(tmp_path):
    assert texts(written(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\n")) == ["one\ntwo\n"]
    assert texts(written(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')) == ["one", "two"]


def test_a_folder_is_its_files_by_name_at_any_depth(tmp_path):
    for name in ("b.md", "a/z.py", "a.txt", "a/b/c"):
        written(tmp_path / name, name)
    written(tmp_path / "d.jsonl", '{"text": "d.jsonl"}\n')
    written(tmp_path / ".git/config", "hidden")
    written(tmp_path / ".hidden", "hidden")
    written(tmp_path / "__pycache__/x.pyc", "hidden")
    assert texts(tmp_path) == ["a.txt", "a/b/c", "a/z.py", "b.md", "d.jsonl"]


def test_a_folder_may_hold_what_is_no_text(tmp_path, caplog):
    written(tmp_path / "a.txt", "text")
    written(tmp_path / "picture", b"\x89PNG\0\0")
    written(tmp_path / "old.zip", b"PK")
    assert texts(tmp_path) == ["text"]
    assert "2 files" in caplog.text
    assert "left out" in caplog.text


def test_sources_keep_their_order_and_may_come_twice(tmp_path):
    a, b = written(tmp_path / "a.txt", "a"), written(tmp_path / "b.txt", "b")
    assert texts(b, a, b) == ["b", "a", "b"]


def test_lines_of_json(tmp_path):
    lines = ['{"text": "one", "id": 1}', "", '"two"', '{"prompt": "three", "completion": "four"}']
    path = written(tmp_path / "data.jsonl", "\n".join(lines))
    assert list(documents([path])) == [
        Document("one", None, f"{path}, line 1"),
        Document("two", None, f"{path}, line 3"),
        Document("three", "four", f"{path}, line 4"),
    ]


def test_only_line_feeds_end_a_line_of_json(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0ce"
    path = written(tmp_path / "data.jsonl", json.dumps({"text": text}, ensure_ascii=False) + "\n")
    assert texts(path) == [json.loads(json.dumps(text))]


def test_a_list_of_json(tmp_path):
    path = written(tmp_path / "data.json", json.dumps([{"text": "one"}, "two", {"prompt": "p", "completion": "c"}]))
    assert list(documents([path]))[1:] == [
        Document("two", None, f"{path}, record 2"),
        Document("p", "c", f"{path}, record 3"),
    ]


def test_lines_of_json_under_the_name_of_a_list(tmp_path):
    path = written(tmp_path / "data.json", '{"text": "one"}\n{"text": "two"}\n')
    assert list(documents([path]))[1] == Document("two", None, f"{path}, line 2")


def test_another_field(tmp_path):
    path = written(tmp_path / "data.jsonl", '{"text": "no", "body": "yes"}\n')
    assert texts(path, text_field="body") == ["yes"]


def test_a_record_that_can_be_read_in_two_ways_is_refused_until_one_is_named(tmp_path):
    path = written(tmp_path / "data.jsonl", '{"prompt": "p", "completion": "c", "text": "pc"}\n')
    with pytest.raises(BatchError, match=r"line 1: .* 'text' or as 'prompt' and 'completion'; found.*--fields prompt"):
        documents([path])
    (pair,) = documents([path], fields=["prompt=prompt", "completion=completion"])
    (text,) = documents([path], fields=["text=text"])
    assert (pair.text, pair.completion, text.text) == ("p", "c", "pc")


def test_empty_texts_are_left_out_with_a_word(tmp_path, caplog):
    path = written(tmp_path / "data.jsonl", '{"text": ""}\n{"text": "a"}\n{"prompt": "p", "completion": ""}\n')
    assert [document.text for document in documents([path])] == ["a", "p"]
    assert "left out 1 empty text of 3" in caplog.text


def test_a_json_file_with_one_object_is_one_record(tmp_path):
    path = written(tmp_path / "data.json", '{"text": "x"}')
    assert [document.text for document in documents([path])] == ["x"]


def lines_until(number: int, bad: str) -> str:
    return '{"text": "good"}\n' * (number - 1) + bad + "\n"


BAD_FILES = [
    ("a.jsonl", lines_until(812, '{"content": "x", "id": 1}'), "a.jsonl, line 812: no field 'text'.*'content', 'id'"),
    ("a.jsonl", lines_until(3, '{"prompt": "x"}'), "line 3: no field 'text', nor 'prompt' and 'completion'.*'prompt'"),
    ("a.jsonl", lines_until(2, "{}"), "line 2: .*found none at all"),
    ("a.jsonl", lines_until(812, '{"text": "x"'), "line 812: not JSON: .* column 13"),
    ("a.jsonl", lines_until(2, '{"text": "x"} {"text": "y"}'), "line 2: not JSON: Extra data at column 15"),
    ("a.jsonl", lines_until(2, '{"text": 5}'), "line 2: the field 'text' must be a string: found a number"),
    ("a.jsonl", lines_until(2, '{"text": null}'), "line 2: .*found null"),
    ("a.jsonl", lines_until(2, '{"text": true}'), "line 2: .*found true or false"),
    ("a.jsonl", lines_until(2, '{"text": ["x"]}'), "line 2: .*found a list"),
    ("a.jsonl", lines_until(2, '{"prompt": "x", "completion": {}}'), "line 2: the field 'completion'.*an object"),
    ("a.jsonl", lines_until(2, "[1]"), "line 2: a record must be an object.*found a list"),
    ("a.jsonl", lines_until(2, '{"text": "\\ud800"}'), "line 2: .*half of a character"),
    ("a.jsonl", lines_until(2, "[" * 100_000), "line 2: JSON that cannot be read"),
    ("a.jsonl", lines_until(2, '{"text": ' + "9" * 5000 + "}"), "line 2: JSON that cannot be read"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: not UTF-8; found the byte 0xff at position 10"),
    ("a.jsonl", "\n\n", "nothing to train on in .*a.jsonl: found no texts"),
    ("a.jsonl", '{"text": ""}', "nothing to train on .* found 1 empty text"),
    ("a.json", '[{"text": "x"}, {"body": "y"}]', "record 2: no field 'text'.*found 'body'"),
    ("a.json", '[{"text": "x"},\n', "a.json: not JSON: .* line 2"),
    ("a.json", "", "a.json: not JSON: Expecting value at column 1"),
    ("a.txt", b"caf\xe9", "a.txt: not UTF-8; found the byte 0xe9 at position 3. Convert it"),
    ("a.txt", "", "nothing to train on in .*a.txt"),
    ("folder/a.txt", b"caf\xe9", "a.txt: not UTF-8"),
    ("folder/a.bin", b"\0", "the folder .* has no text, only 1 file of other formats"),
    ("folder/.hidden", "x", "the folder .* holds no file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_data_is_named(tmp_path, name, content, message):
    path = written(tmp_path / name, content)
    with pytest.raises(BatchError, match=message) as caught:
        documents([path.parent if "/" in name else path])
    assert "\n" not in str(caught.value)


def test_a_field_that_was_asked_for_is_not_replaced(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"prompt": "p", "completion": "c"}\n')
    with pytest.raises(BatchError, match="line 1: no field 'body'; found 'prompt', 'completion'"):
        documents([path], text_field="body")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "there is no file or folder '.*missing.txt'"),
        ("pipe", "neither a file nor a folder"),
        ("a.zip", "a.zip has a format that is not supported. Unpack"),
        ("a.tar.gz", "a format that is not supported"),
        ("a.parquet.gz", "a format that is not supported"),
        ("a.xlsx", "a format that is not supported.* to_json"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(tmp_path, name, message):
    for packed in ("a.zip", "a.tar.gz", "a.parquet.gz", "a.xlsx"):
        written(tmp_path / packed, b"x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=message):
        documents([tmp_path / name])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    path = written(tmp_path / "a.txt", "x")
    path.chmod(0)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        documents([path])


def test_one_name_instead_of_a_list_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Put it into a list"):
        documents(str(tmp_path))


def test_a_folder_of_datasets_wants_its_library(tmp_path, monkeypatch):
    written(tmp_path / "state.json", "{}")
    written(tmp_path / "data-00000-of-00001.arrow", b"x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"needs the library datasets.*pip install.*JSONL"):
        documents([tmp_path])


def test_a_folder_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "splits")
    assert texts(tmp_path / "rows") == texts(tmp_path / "splits") == ["one", "two"]
    with pytest.raises(BatchError, match="row 1: no field 'body'; found 'text'"):
        documents([tmp_path / "rows"], text_field="body")


# ------------------------------------------------------------------------------------------------ the standard library


@pytest.fixture(scope="module")
def library() -> list[Document]:
    return list(documents())


def test_the_standard_library_is_enough_to_train_on(library):
    assert len(library) > 5_000
    assert len({document.text for document in library}) == len(library)
    assert not [document.where for document in library if {"test", "tests"} & set(document.where.split("/"))]


def test_its_functions_are_whole(library):
    import ast
    import inspect
    import textwrap

    for document in library[::50]:
        (node,) = ast.parse(document.text).body
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), document.where
    found = {document.text for document in library}
    for function in (textwrap.dedent, json.JSONEncoder.encode, inspect.Signature.from_callable.__func__):
        assert textwrap.dedent(inspect.getsource(function)) in found


def test_functions_once_each_without_their_indentation_inner_ones_inside():
    source = b"""\
import os
if os.name:
    def branch(): pass
class A:
    class B:
        @property
        # why
        def method(self):
            '''Text
at the margin.'''
            def inner(): pass
            return inner
try: pass
except OSError:
    async def handled(): pass
def twice(): return 1
"""
    found = reading._functions({"a.py": source, "b.py": b"def twice(): return 1", "c.py": b"this is a template"})
    assert [where for _, where in found] == ["a.py, line 3", "a.py, line 6", "a.py, line 15", "a.py, line 16"]
    assert [text for text, _ in found] == [
        "def branch(): pass\n",
        "@property\n# why\ndef method(self):\n    '''Text\nat the margin.'''\n"
        "    def inner(): pass\n    return inner\n",
        "async def handled(): pass\n",
        "def twice(): return 1\n",
    ]


def test_sources_say_their_own_encoding():
    source = "# -*- coding: latin-1 -*-\ndef café(): return 'é'\n".encode("latin-1")
    assert reading._functions({"a.py": source}) == [("def café(): return 'é'\n", "a.py, line 2")]


def test_what_is_installed_beside_the_standard_library_does_not_count(tmp_path, monkeypatch):
    for name in ("json/decoder.py", "json/tests/test_json.py", "site-packages/torch.py", "abc.py", "mine.py"):
        written(tmp_path / name, f"def f(): return {name!r}\n")
    monkeypatch.setattr(reading.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [document.where for document in documents()] == ["abc.py, line 1", "json/decoder.py, line 1"]


def test_it_does_not_matter_where_it_is_installed(tmp_path, monkeypatch):
    found = []
    for place in ("here", "there/below"):
        written(tmp_path / place / "json/decoder.py", "def f(): pass\n")
        written(tmp_path / place / "abc.py", "def g(): pass\n")
        monkeypatch.setattr(reading.sysconfig, "get_path", lambda name, place=place: str(tmp_path / place))
        found.append(list(documents(cache=tmp_path / "cache")))
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(reading.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match=r"without the sources of its standard library.*--data"):
        documents()


# ------------------------------------------------------------------------------------------------------------- samples

words = st.text(st.sampled_from("the rose\n,violet's"), min_size=1, max_size=60)
pairs = st.builds(Document, words | st.just(""), words | st.just(""))
mixed = st.lists(st.builds(Document, words) | pairs, min_size=1, max_size=6)


@quickly
@given(texts=st.lists(words, min_size=1, max_size=5), seq_len=st.integers(2, 20))
def test_every_token_but_the_first_is_predicted_once(vocabulary, texts, seq_len):
    corpus = Corpus.from_documents([Document(text) for text in texts], vocabulary, seq_len=seq_len)
    predicted = [token for sample in corpus for token in sample["labels"][1:].tolist()]
    whole = [[*vocabulary.start, *ids, vocabulary.end] for ids in vocabulary.encode(texts)]
    assert predicted == [token for ids in whole for token in ids[1:]]
    assert all(2 <= length <= seq_len for length in corpus.lengths)


@quickly
@given(drawn=mixed, seq_len=st.integers(2, 40))
def test_samples_have_the_lengths_they_say(vocabulary, drawn, seq_len):
    try:
        corpus = Corpus.from_documents(drawn, vocabulary, seq_len=seq_len)
    except BatchError:
        assert all(document.text + (document.completion or "") == "" for document in drawn)
        return
    assert corpus.lengths == [len(sample["input_ids"]) for sample in corpus]
    assert corpus.num_tokens == sum(corpus.lengths)
    assert corpus.largest_id < vocabulary.size
    assert all((sample["labels"][1:] != IGNORED).any() for sample in corpus), "nothing to learn"


@quickly
@given(document=pairs, seq_len=st.integers(2, 60))
def test_only_completions_are_learnt_and_as_much_of_them_as_fits(vocabulary, document, seq_len):
    prompt, completion = vocabulary.encode([document.text, document.completion])
    completion.append(vocabulary.end)
    if not prompt and len(completion) == 1:
        return
    corpus = Corpus.from_documents([document], vocabulary, seq_len=seq_len)
    (sample,) = corpus
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    learnt = [label for label in labels if label != IGNORED]
    room = seq_len - (1 if prompt else 0)
    assert learnt == completion[:room]
    assert ids[len(ids) - len(learnt) :] == learnt
    before = ids[: len(ids) - len(learnt)]
    assert before == (prompt[-len(before) :] if before else [])
    is_whole = len(prompt) + len(completion) <= seq_len
    assert (before == prompt and learnt == completion) == is_whole
    assert len(ids) == min(len(prompt) + len(completion), seq_len)
    assert corpus.truncated == (not is_whole)


def test_what_begins_every_text_stays_before_a_prompt_that_is_cut(vocabulary, monkeypatch):
    monkeypatch.setattr(vocabulary, "start", [vocabulary.end])
    prompt, completion = vocabulary.encode(["rose red blue", "sweet"])
    corpus = Corpus.from_documents([Document("rose red blue", "sweet")], vocabulary, seq_len=len(completion) + 4)
    assert corpus[0]["input_ids"].tolist() == [vocabulary.end, *prompt[-2:], *completion, vocabulary.end]


def test_truncated_pairs_are_told(vocabulary, caplog):
    Corpus.from_documents([Document("the rose is red", "the violet"), Document("a", "b")], vocabulary, seq_len=6)
    assert "1 of 2 prompts and completions are longer than 6 tokens" in caplog.text


def test_documents_without_a_token_are_an_error(vocabulary):
    with pytest.raises(BatchError, match="1 documents contain no token to predict"):
        Corpus.from_documents([Document("", "")], vocabulary, seq_len=8)


@pytest.mark.parametrize("seq_len", [1, 0, True, 8.0])
def test_a_length_that_makes_no_sense_is_refused(vocabulary, seq_len):
    with pytest.raises(UsageError, match="seq_len must be"):
        Corpus.from_documents([Document("a")], vocabulary, seq_len=seq_len)


def test_the_fingerprint_changes_with_the_samples_only(vocabulary):
    def fingerprint(*documents: Document, seq_len: int = 16) -> str:
        return Corpus.from_documents(documents, vocabulary, seq_len=seq_len).fingerprint

    a, b = Document("the rose"), Document("is red")
    assert fingerprint(a, b) == fingerprint(Document("the rose", None, "elsewhere"), b)
    others = [
        fingerprint(b, a),
        fingerprint(a),
        fingerprint(a, b, seq_len=4),
        fingerprint(Document("the rose", ""), b),
        fingerprint(Document("the", " rose"), b),
        fingerprint(Document("the rosE"), b),
    ]
    assert len({fingerprint(a, b), *others}) == 7


@quickly
@given(count=st.integers(2, 60), fraction=st.floats(0, 0.99), seed=st.integers(0, 99), pieces=st.integers(1, 3))
def test_a_split_loses_nothing_and_keeps_documents_whole(vocabulary, count, fraction, seed, pieces):
    corpus = Corpus.from_documents(
        [Document(chr(97 + i % 26) * 9 * pieces) for i in range(count)], vocabulary, seq_len=12
    )
    train, validation = corpus.split(fraction, seed)
    assert len(train) + len(validation) == len(corpus)
    kept_together = sorted(train.starts.tolist() + validation.starts.tolist())
    assert kept_together == corpus.starts.tolist()
    assert len(train) > 0
    assert (len(validation) > 0) == (fraction > 0)
    if fraction * count >= 1:
        assert not set(train.parents.tolist()) & set(validation.parents.tolist())
        assert len(set(validation.parents.tolist())) == min(max(round(fraction * count), 1), count - 1)
    again = corpus.split(fraction, seed)
    assert (again[0].fingerprint, again[1].fingerprint) == (train.fingerprint, validation.fingerprint)


@pytest.mark.parametrize("count", [1, 3])
def test_of_few_long_texts_the_end_is_kept_aside(vocabulary, count):
    """Pieces from all over would stand between pieces that are trained on."""
    corpus = Corpus.from_documents([Document(POEM * 20)] * count, vocabulary, seq_len=16)
    train, validation = corpus.split(0.1, seed=0)
    assert len(validation) == round(0.1 * len(corpus))
    assert train.starts.tolist() + validation.starts.tolist() == corpus.starts.tolist()


def test_splits_follow_the_seed(vocabulary):
    corpus = Corpus.from_documents([Document(f"{i}") for i in range(50)], vocabulary, seq_len=16)
    assert len({corpus.split(0.2, seed)[1].fingerprint for seed in range(5)}) == 5


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan"), "0.1", True])
def test_a_fraction_that_makes_no_sense_is_refused(vocabulary, fraction):
    corpus = Corpus.from_documents([Document("a"), Document("b")], vocabulary, seq_len=8)
    with pytest.raises(UsageError, match="fraction to validate on"):
        corpus.split(fraction, 0)


def test_one_sample_cannot_be_split(vocabulary):
    corpus = Corpus.from_documents([Document("a")], vocabulary, seq_len=8)
    with pytest.raises(UsageError, match="1 sample cannot be split"):
        corpus.split(0.5, 0)


# ------------------------------------------------------------------------------------------------------- micro-batches


def test_collated_samples_are_filled_up_where_nothing_is_learnt(vocabulary):
    corpus = Corpus.from_documents([Document("the rose is red"), Document("the", " rose")], vocabulary, seq_len=32)
    batch = collate([corpus[0], corpus[1]])
    width = max(corpus.lengths)
    for row, (sample, length) in enumerate(zip(corpus, corpus.lengths, strict=True)):
        assert batch["input_ids"][row, :length].tolist() == sample["input_ids"].tolist()
        assert batch["labels"][row].tolist() == sample["labels"].tolist() + [IGNORED] * (width - length)
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (width - length)
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == batch["labels"].dtype == torch.int64


def test_macrostep_learns_them(vocabulary):
    documents = [Document(text) for text in ("the rose is red", "the", "violet's blue")] + [Document("the", " rose")]
    corpus = Corpus.from_documents(documents, vocabulary, seq_len=8)
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary.size, 8), torch.nn.Linear(8, vocabulary.size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = MacroStep(model, optimizer, causal_lm_loss, micro=by_tokens(16), collate=collate)
    result = step([corpus[i] for i in range(len(corpus))])
    assert result.items.item() == sum(int((sample["labels"][1:] != IGNORED).sum()) for sample in corpus)


# --------------------------------------------------------------------------------------------------------------- cache


def never() -> bytes:
    raise AssertionError("it was there")


def test_what_is_kept_is_not_made_again(tmp_path):
    assert cached(tmp_path / "new", "a", lambda: b"content") == b"content"
    assert cached(tmp_path / "new", "a", never) == b"content"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]


DAMAGES = {
    "empty": lambda whole: b"",
    "shorter": lambda whole: whole[:-1],
    "half": lambda whole: whole[: len(whole) // 2],
    "longer": lambda whole: whole + b"x",
    "a bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "a bit of the checksum": lambda whole: whole[:30] + bytes([whole[30] ^ 1]) + whole[31:],
    "foreign": lambda whole: b"something else",
    "only content": lambda whole: b"content",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_made_again(tmp_path, damage, caplog):
    cached(tmp_path, "a", lambda: b"content")
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(damage(whole))
    assert cached(tmp_path, "a", lambda: b"content") == b"content"
    assert "computed again" in caplog.text
    assert (tmp_path / "a").read_bytes() == whole


def test_a_file_under_another_name_is_not_believed(tmp_path):
    cached(tmp_path, "a", lambda: b"of a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert cached(tmp_path, "b", lambda: b"of b") == b"of b"


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    written(tmp_path / "file", "not a folder")
    assert cached(tmp_path / "file", "a", lambda: b"content") == b"content"
    assert "cannot be written" in caplog.text


def test_a_full_disk_costs_only_time_and_leaves_nothing(tmp_path):
    program = (
        "import resource, signal, sys, pathlib; from macrobatch.train.cache import cached\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "assert len(cached(pathlib.Path(sys.argv[1]), 'a', lambda: bytes(5000))) == 5000"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_what_failed_is_not_kept(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cached(tmp_path, "a", lambda: bytes(1 // 0))
    assert list(tmp_path.iterdir()) == []


def test_others_left_overs_are_swept_when_they_are_old(tmp_path):
    old, new = written(tmp_path / "a.1.partial", "x"), written(tmp_path / "a.2.partial", "x")
    os.utime(old, (1, 1))
    cached(tmp_path, "b", lambda: b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, "b"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("MACROBATCH_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/macrobatch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/macrobatch"
    monkeypatch.setenv("MACROBATCH_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_a_kept_corpus_is_the_made_one(vocabulary, tmp_path, caplog):
    drawn = [Document(POEM), Document("the rose is red", "the violet is blue"), Document("x", "")]
    made = Corpus.from_documents(drawn, vocabulary, seq_len=9)
    for _ in range(2):
        again = Corpus.from_documents(drawn, vocabulary, seq_len=9, cache=tmp_path)
        assert again.fingerprint == made.fingerprint
        assert again.truncated == made.truncated == 1
        assert again.parents.tolist() == made.parents.tolist()
    assert caplog.text.count("1 of 2 prompts") == 3, "said also where it was kept"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_corpus_is_kept_for_what_it_was_made_of(vocabulary, tmp_path):
    only_bytes = Vocabulary.train([Document(POEM)], size=257)
    Corpus.from_documents([Document("the rose")], vocabulary, seq_len=9, cache=tmp_path)
    for texts_in, words_in, seq_len in (
        ([Document("the rose")], vocabulary, 3),
        ([Document("the rose")], only_bytes, 9),
        ([Document("the rose", "text")], vocabulary, 9),
        ([Document("the", " rose")], vocabulary, 9),
        ([Document("the rose", "")], vocabulary, 9),
        ([Document("the"), Document(" rose")], vocabulary, 9),
    ):
        kept_one = Corpus.from_documents(texts_in, words_in, seq_len=seq_len, cache=tmp_path)
        assert kept_one.fingerprint == Corpus.from_documents(texts_in, words_in, seq_len=seq_len).fingerprint


PREPARE = """
import os, sys
from pathlib import Path
from macrobatch.train.corpus import Corpus, documents
from macrobatch.train.vocabulary import Vocabulary
data, cache = map(Path, sys.argv[1:])
waiting, ready = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.close(ready)
        os.read(waiting, 1)  # until all are
        texts = documents([data], cache=cache)
        vocabulary = Vocabulary.train(texts, 300, cache)
        print(Corpus.from_documents(texts, vocabulary, seq_len=32, cache=cache).fingerprint)
        sys.exit()
os.close(ready)
sys.exit(sum(os.wait()[1] for _ in range(3)) != 0)
"""


def test_several_processes_prepare_at_once(tmp_path):
    data, cache = written(tmp_path / "poem.txt", POEM * 50), tmp_path / "cache"
    vocabulary = Vocabulary.train(documents([data]), 300, cache)
    (damaged,) = cache.iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-7])
    command = [sys.executable, "-c", PREPARE, str(data), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = Corpus.from_documents(documents([data]), vocabulary, seq_len=32).fingerprint
    assert done.stdout.replace("\n", "") == expected * 3  # lines of several processes may run together
    assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == ["corpus", "vocabulary"]


def test_nothing_is_said_where_nothing_is_wrong(vocabulary, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        Corpus.from_documents([Document(POEM)], vocabulary, seq_len=9, cache=tmp_path)
    assert caplog.text == ""


def test_few_widths_pad_further_with_what_counts_for_nothing():
    samples = [{"input_ids": torch.arange(1, n + 1), "labels": torch.arange(1, n + 1)} for n in (17, 5)]
    tight, wide = collate(samples), collate(samples, few_widths=True)
    assert wide["input_ids"].shape == (2, 20)
    assert all(torch.equal(wide[name][:, :17], tight[name]) for name in tight)
    assert wide["attention_mask"].sum() == 22
    assert (wide["labels"] != -100).sum() == 22


# ------------------------------------------------------------------------------------------------- what cannot be read


def test_a_binary_file_is_not_to_be_converted(tmp_path):
    picture = bytes(range(256)) * 20
    for content in (picture, picture.replace(b"\0", b"")):
        path = tmp_path / "picture.dat"
        path.write_bytes(content)
        with pytest.raises(BatchError, match="a binary file, not text") as raised:
            documents([path])
        assert "iconv" not in str(raised.value)
    path.write_bytes("für Elise\n".encode("latin1") * 20)
    with pytest.raises(BatchError, match="iconv"):
        documents([path])


def test_one_file_is_one_file(tmp_path, caplog):
    written(tmp_path / "a.txt", "text")
    (tmp_path / "b.bin").write_bytes(b"\0\1")
    documents([tmp_path])
    assert "left out 1 file in" in caplog.text
    assert ", ..." not in caplog.text


def test_what_an_earlier_version_kept_is_made_anew_without_a_word(tmp_path, caplog):
    (tmp_path / "thing").write_bytes(b"macrobatch cache 1\n" + b"0" * 64 + b"old")
    assert bytes(cached(tmp_path, "thing", lambda: b"new")) == b"new"
    assert not caplog.text
    (tmp_path / "thing").write_bytes(b"something else")
    assert bytes(cached(tmp_path, "thing", lambda: b"new")) == b"new"
    assert "damaged or foreign" in caplog.text
