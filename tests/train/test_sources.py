"""Packed files and tables hold the documents of plain ones, and are read piece by piece; damaged ones are named."""

import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from macrobatch.errors import BatchError, UsageError
from macrobatch.train import documents as reading
from macrobatch.train import sources
from macrobatch.train.corpus import Corpus
from macrobatch.train.documents import Document, Documents, documents
from macrobatch.train.vocabulary import Vocabulary

quickly = settings(max_examples=100, deadline=None, derandomize=True, database=None)

RECORDS = [
    {"prompt": 'a, "b"\nand c?', "completion": "d\te."},
    {"prompt": "é\u2028", "completion": "x" * 200_000},
    {"prompt": "p", "completion": ""},
]
CHATS = [
    {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b.", "weight": 0}]},
    {"messages": [{"role": "assistant", "content": "c."}]},
]


def json_lines(records: list[dict]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def separated(records: list[dict], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    rows = csv.DictWriter(text, list(records[0]), delimiter=delimiter)
    rows.writeheader()
    rows.writerows(records)
    return text.getvalue().encode()


def zstandard_of(content: bytes) -> bytes:
    """In two frames, as programs that work in parallel write it."""
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))


def parquet(records: list[dict]) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(arrow.Table.from_pylist(records), file, row_group_size=2)
    return file.getvalue()


def arrow_of(records: list[dict], kind: str) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    table, file = arrow.Table.from_pylist(records), io.BytesIO()
    with getattr(arrow.ipc, kind)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


MADE: dict[str, Callable[[list[dict]], bytes]] = {
    "a.jsonl": json_lines,
    "a.json": lambda records: json.dumps(records).encode(),
    "a.csv": separated,
    "a.TSV": lambda records: separated(records, "\t"),
    "a.jsonl.gz": lambda records: gzip.compress(json_lines(records)),
    "a.ndjson.bz2": lambda records: bz2.compress(json_lines(records)),
    "a.jsonl.xz": lambda records: lzma.compress(json_lines(records)),
    "a.jsonl.zst": lambda records: zstandard_of(json_lines(records)),
    "a.csv.zst": lambda records: zstandard_of(separated(records)),
    "a.json.gz": lambda records: gzip.compress(json.dumps(records).encode()),
    "a.parquet": parquet,
    "a.arrow": lambda records: arrow_of(records, "new_stream"),
    "a.feather": lambda records: arrow_of(records, "new_file"),
}


@pytest.mark.parametrize("name", MADE)
def test_every_format_holds_the_same_documents(tmp_path, name):
    (tmp_path / name).write_bytes(MADE[name](RECORDS))
    for source in (tmp_path / name, tmp_path):
        found = documents([source])
        for _ in range(2):
            assert [{"prompt": one.text, "completion": one.completion} for one in found] == RECORDS
        assert found.digest == Documents([Document(one["prompt"], one["completion"]) for one in RECORDS]).digest
        where = [document.where for document in found]
        assert [place.rpartition(" ")[2] for place in where] == ["1", "2", "3"]
        assert all(place.startswith(str(tmp_path / name)) for place in where)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.feather"])
def test_conversations_are_the_same_from_tables(tmp_path, name):
    """Though a table has every column in every row."""
    (tmp_path / name).write_bytes(MADE[name](CHATS))
    assert [list(document.messages) for document in documents([tmp_path / name])] == [one["messages"] for one in CHATS]


def test_a_packed_text_is_a_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo"))
    assert [document.text for document in documents([tmp_path])] == ["one\ntwo"]


CUT = {
    "a.jsonl.gz": "cannot be unpacked.*damaged",
    "a.ndjson.bz2": "cannot be unpacked.*damaged",
    "a.jsonl.xz": "cannot be unpacked.*damaged",
    "a.jsonl.zst": "cannot be unpacked: it ends in the middle.*damaged",
    "a.parquet": "cannot be read as a table",
    "a.feather": "cannot be read as a table",
}


@pytest.mark.parametrize(("name", "message"), CUT.items(), ids=CUT)
def test_a_file_that_is_cut_off_or_something_else_is_named(tmp_path, name, message):
    records = [{"text": os.urandom(3000).hex()} for _ in range(40)]
    for content in (MADE[name](records)[:-40], b"something else, which is longer than a footer"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BatchError, match=f"{name} {message if content[:4] != b'some' else ''}") as caught:
            documents([tmp_path / name])
        assert "\n" not in str(caught.value)


TABLES = {
    "more cells": ("text,id\na,1\nb,2,3\n", "row 2: 3 cells, and the header line names 2"),
    "no such column": ("body,id\na,1\n", "row 1: no field 'text'.*found 'body', 'id'"),
    "twice": ("text,text\na,1\n", "names a column twice"),
    "a quote": ('text\na\n"b', "after row 1: not a table"),
    "not UTF-8": (b"text\na\n\xff\n", "not UTF-8"),
    "nothing": ("", "nothing to train on"),
    "a header": ("text\n", "nothing to train on"),
}


@pytest.mark.parametrize(("content", "message"), TABLES.values(), ids=TABLES)
def test_bad_tables_are_named(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    limit = csv.field_size_limit()
    with pytest.raises(BatchError, match=message):
        documents([tmp_path / "a.csv"])
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("name", "library"), [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("a.zst", "zstandard")]
)
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, name, library):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf"{name} needs the library {library}.*pip install 'macrobatch\[data\]'"):
        documents([tmp_path / name])


# --------------------------------------------------------------------------------------------------------- long texts


@quickly
@given(text=st.text("ab\r\n é\U0001f339", max_size=120), block=st.integers(1, 30), at_once=st.integers(1, 30))
def test_a_long_text_is_read_in_parts_and_stays_one_document(tmp_path_factory, text, block, at_once):
    path = tmp_path_factory.getbasetemp() / "long.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        patch.setattr(sources, "_AT_ONCE", at_once)
        parts = list(sources.read(path, None))
        assert [part.text for part in parts] == sources.blocks(text.replace("\r\n", "\n"))
    assert [part.goes_on for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_text_in_parts_makes_the_samples_of_the_whole(tmp_path, monkeypatch):
    text = "the rose is red,\nthe violet's blue.\n" * 40
    path = tmp_path / "long.txt"
    path.write_text(text)
    monkeypatch.setattr(sources, "BLOCK", 100)
    vocabulary = Vocabulary.train([Document(text)], size=300)
    found = documents([path, path])
    assert len(found) == 2
    assert len(list(found)) > 20
    assert Vocabulary.train(documents([path]), size=300).fingerprint == vocabulary.fingerprint
    corpus = Corpus.from_documents(found, vocabulary, seq_len=32)
    whole = Corpus.from_documents([Document(text), Document(text)], vocabulary, seq_len=32)
    assert corpus.fingerprint == whole.fingerprint
    assert corpus.parents.tolist() == whole.parents.tolist()


def test_a_place_that_is_not_utf_8_is_found_in_a_long_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_AT_ONCE", 8)
    (tmp_path / "a.txt").write_bytes("é".encode() * 20 + b"\xe9 and more")
    with pytest.raises(BatchError, match="the byte 0xe9 at position 40"):
        documents([tmp_path / "a.txt"])


def test_data_that_changes_while_it_is_read_is_not_believed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": "the rose"}]))
    found = documents([tmp_path / "a.jsonl"])
    vocabulary = Vocabulary.train(found, 257)
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": "the nose"}]))
    with pytest.raises(BatchError, match="has changed while it was read"):
        Corpus.from_documents(found, vocabulary, seq_len=8, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_takes_long_says_how_far_it_is(tmp_path, monkeypatch):
    path: Path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines([{"text": "rose"}] * 4))
    said: list[str] = []
    vocabulary = Vocabulary.train([Document("rose")], 257)
    Corpus.from_documents(documents([path], say=said.append), vocabulary, seq_len=8)
    assert said == [], "it was quick"
    monkeypatch.setattr(reading, "_SILENT", 0.0)
    Corpus.from_documents(documents([path], say=said.append), vocabulary, seq_len=8)
    assert "read 3 documents" in said
    assert "encoded 3 documents, 75% of the text" in said


def test_what_cannot_be_read_in_a_folder_is_said_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.zip").write_bytes(b"PK")
    found = documents([tmp_path])
    assert len(list(found)) == len(list(found)) == 1
    assert caplog.text.count("left out 1 file") == 1
