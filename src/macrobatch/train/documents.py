"""The documents to train on, from files and folders of any format in `sources.py`.

Without any source, the documents are the functions of the Python standard library, which exists on every machine. Every
document knows its source, so that an error can name the line. Documents are read again each time they are needed, and
never all of them are in memory.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import math
import os
import re
import sys
import sysconfig
import time
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from macrobatch.errors import BatchError, UsageError, counted
from macrobatch.train import sources as files
from macrobatch.train.cache import cached, digest
from macrobatch.train.formats import TEXT, Columns, Document

__all__ = ["Document", "Documents", "documents"]

logger = logging.getLogger("macrobatch")

Say = Callable[[str], None]
_WEIGHTED = re.compile(r"(?P<path>.+):(?P<weight>\d+\.?\d*|\.\d+)", re.DOTALL)
_SILENT = 5.0  # seconds between two messages about the progress


class Documents:
    """Documents that can be iterated any number of times, with counts from the first iteration.

    >>> found = Documents([Document("to be"), Document("or not", " to be"), Document("")])
    >>> len(found), found.num_empty, found.num_characters, [document.text for document in found]
    (2, 1, 17, ['to be', 'or not'])

    `digest` is a hash of the documents in their order; `ends` the number of documents up to the end of each source;
    `weights` the share of each source.
    """

    weights: Sequence[float] | None = None

    def __init__(self, source: Iterable[Document], say: Say | None = None) -> None:
        self._source, self._say = source, say
        self._count = self.num_empty = self.num_characters = 0
        self.has_conversations = False
        total = hashlib.sha256()
        for document in self._progress("read", self._all()):
            _add(total, document)
            self._count += not document.goes_on
            self.num_characters += sum(map(len, document.texts))
            self.has_conversations |= document.messages is not None
        self.digest = total.hexdigest()
        self.ends: Sequence[int] = source.ends if isinstance(source, _Sources) else [self._count]

    @classmethod
    def of(cls, source: Iterable[Document]) -> Documents:
        """The documents of `source`, or `source` itself if it is a `Documents`."""
        return source if isinstance(source, cls) else cls(source)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self._source if not document.is_empty)

    def encoding(self) -> Iterator[Document]:
        """The documents, while they are tokenized. Reports the progress, and raises an error if they have changed."""
        total = hashlib.sha256()
        for document in self._progress("encoded", iter(self)):
            _add(total, document)
            yield document
        if total.hexdigest() != self.digest:
            raise BatchError("the data has changed while it was read. Start again when nothing writes to it.")

    def _all(self) -> Iterator[Document]:
        """The first iteration, which counts the empty documents."""
        for document in self._source:
            if document.is_empty:
                self.num_empty += 1
            else:
                yield document

    def _progress(self, done: str, documents: Iterator[Document]) -> Iterator[Document]:
        due, characters = time.monotonic() + _SILENT, 0
        for number, document in enumerate(documents):
            if self._say is not None and time.monotonic() > due:
                part = f", {characters / self.num_characters:.0%} of the text" if done == "encoded" else ""
                self._say(f"{done} {number:,} documents{part}")
                due = time.monotonic() + _SILENT
            characters += sum(map(len, document.texts))
            yield document


def _add(total: Any, document: Document) -> None:
    for part in document.identity:
        content = part.encode("utf-8", "surrogatepass")
        total.update(b"%d:" % len(content))
        total.update(content)


class _Sources:
    """The documents in files and folders, read again at each iteration."""

    def __init__(self, sources: Sequence[str | Path], columns: Columns) -> None:
        self._sources, self._columns = [Path(source) for source in sources], columns
        self._warn = True
        self.ends: list[int] = []

    def __iter__(self) -> Iterator[Document]:
        warn, self._warn = self._warn, False  # only the first iteration warns
        ends, count = [], 0
        for source in self._sources:
            for document in files.read(source, self._columns, warn=warn):
                count += not document.goes_on and not document.is_empty
                yield document
            ends.append(count)
        self.ends = ends


def documents(
    sources: Sequence[str | Path] = (),
    *,
    text_field: str = TEXT,
    fields: Sequence[str] = (),
    cache: Path | None = None,
    say: Say | None = None,
) -> Documents:
    """All the documents of some sources, in order.

    Sources may have weights for mixing: ``a.jsonl:0.7``. ``.jsonl`` has one record per line, ``.json`` a list of
    records or one record; ``.csv``, ``.tsv``, ``.parquet``, ``.arrow`` and folders saved by `datasets` have rows;
    any other file is one text in UTF-8. All except tables of Arrow may be compressed. Without a source: the
    functions of the standard library.
    """
    if isinstance(sources, (str, os.PathLike)):
        raise UsageError(f"sources must be a list of files and folders: got one, {str(sources)!r}. Put it into a list.")
    columns = Columns.of(fields, text_field)
    if not sources:
        return Documents(_standard_library(cache))
    paths, weights = _split_weights(sources)
    found = Documents(_Sources(paths, columns), say)
    found.weights = weights
    count = len(found) + found.num_empty
    if not len(found):
        named = ", ".join(str(source) for source in sources)
        texts = counted(count, "empty text") if count else "no texts"
        raise BatchError(f"there is nothing to train on in {named}: found {texts}.")
    if found.num_empty:
        logger.warning("left out %s of %d.", counted(found.num_empty, "empty text"), count)
    return found


def _split_weights(sources: Sequence[str | Path]) -> tuple[list[str], list[float] | None]:
    """The paths of sources, and their weights; None: they have no weights.

    >>> _split_weights(["a.jsonl:3", "b.jsonl:1"])
    (['a.jsonl', 'b.jsonl'], [3.0, 1.0])
    """
    found = [_WEIGHTED.fullmatch(str(source)) if not Path(source).exists() else None for source in sources]
    if not any(found):
        return [str(source) for source in sources], None
    if unweighted := [source for source, match in zip(sources, found, strict=True) if match is None]:
        raise UsageError(f"--data: {str(unweighted[0])!r} has no weight, and others have. Add one, as in NAME:0.5.")
    weights = [float(match["weight"]) for match in found if match is not None]
    if not all(0 < weight < math.inf for weight in weights):
        raise UsageError(f"--data: weights must be above 0: got {', '.join(map(str, sources))}.")
    return [match["path"] for match in found if match is not None], weights


# ------------------------------------------------------------------------------------------------ the standard library


def _standard_library(cache: Path | None) -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = {path.relative_to(root).as_posix(): _bytes(path) for path in _modules(root)}
    if not sources:
        raise UsageError(
            f"this Python came without the sources of its standard library (looked in {root}). Name texts to train on: "
            "--data FILE."
        )
    # The Python version is part of the key, because the parser accepts other sources in another version.
    key = digest([sys.version, *sources.keys(), *sources.values()])
    made = cached(cache, f"standard-library-{key}", lambda: json.dumps(_functions(sources)).encode())
    return [Document(text, None, where) for text, where in json.loads(made)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _modules(root: Path) -> Iterable[Path]:
    """The files of the standard library, without its tests, and without packages that are installed beside it."""
    for name in sorted(sys.stdlib_module_names):
        if (root / f"{name}.py").is_file():
            yield root / f"{name}.py"
        elif (root / name).is_dir():
            inside = ((path.relative_to(root), path) for path in (root / name).rglob("*.py") if path.is_file())
            yield from (path for below, path in sorted(inside) if not {"test", "tests", "idle_test"} & set(below.parts))


def _functions(sources: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Every function and method, once, with its location. Inner functions are a part of the outer one."""
    found: dict[str, str] = {}
    for name, content in sources.items():
        try:
            encoding, _ = tokenize.detect_encoding(iter(content.splitlines(keepends=True)).__next__)
            source = content.decode(encoding).replace("\r\n", "\n")
            with warnings.catch_warnings():  # about invalid escapes and the like
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # templates, and files for other versions
        lines = source.split("\n")
        for node in _outermost(tree.body):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            indent = " " * node.col_offset
            text = "\n".join(line.removeprefix(indent) for line in lines[first - 1 : node.end_lineno])
            found.setdefault(f"{text}\n", f"{name}, line {first}")
    return list(found.items())


def _outermost(body: Sequence[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions in modules, classes and branches, but not those inside of functions."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, (ast.stmt, ast.ExceptHandler)):
            yield from _outermost(list(ast.iter_child_nodes(node)))
