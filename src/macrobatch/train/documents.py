"""What to train on, as texts: files, folders, JSON and JSONL, folders of the library `datasets`, or nothing at all.

Nothing at all stands for the functions of the Python standard library, which is on every machine that runs this.
Every text knows where it came from, so that an error can name the line. The order is that of the sources, and inside a
folder that of the names: the same data makes the same list on every machine, wherever it lies.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from macrobatch.errors import BatchError, UsageError, counted
from macrobatch.train.cache import digest, kept

logger = logging.getLogger("macrobatch")

_PACKED = {".gz", ".zst", ".xz", ".bz2", ".zip", ".7z", ".tar", ".tgz"}
_TABLES = {".parquet", ".arrow", ".feather", ".csv", ".tsv", ".xls", ".xlsx"}
_WITH_TABLES = (
    "Write it as JSONL, for instance with pandas: read_csv(...).to_json(..., orient='records', lines=True); then name "
    "the column that holds the text with --text-field."
)
_TEXT = "text"


@dataclass(frozen=True, slots=True)
class Document:
    """One text to learn.

    Attributes:
        text: all of it; or, with a completion, the prompt, on which there is no loss.
        completion: what to answer to the prompt; None: there is no prompt, and the whole text is learnt.
        where: for errors: "file.jsonl, line 812".
    """

    text: str
    completion: str | None = None
    where: str = ""


def documents(
    sources: Sequence[str | Path] = (), *, text_field: str = _TEXT, cache: Path | None = None
) -> list[Document]:
    """All the texts of some sources, in order.

    Args:
        sources: files and folders. ``.jsonl`` holds a record a line, ``.json`` a list of records, a folder saved by the
            library `datasets` its rows; a record has the field "text", or else "prompt" and "completion", or is a
            string. Any other file is one text, in UTF-8. No source: the functions of the standard library.
        text_field: another name for "text".
        cache: a folder in which to keep what was made of the standard library.
    """
    if isinstance(sources, (str, os.PathLike)):
        raise UsageError(f"sources must be a list of files and folders: got one, {str(sources)!r}. Put it into a list.")
    if not sources:
        return _standard_library(cache)
    found = [document for source in sources for document in _read(Path(source), text_field)]
    texts = [document for document in found if document.text or document.completion is not None]
    if not texts:
        named = ", ".join(str(source) for source in sources)
        raise BatchError(f"there is nothing to train on in {named}: found {len(found)} texts, all of them empty.")
    if len(texts) < len(found):
        empty = counted(len(found) - len(texts), "empty text")
        logger.warning("left out %s of %d.", empty, len(found))
    return texts


# ------------------------------------------------------------------------------------------------ files and folders


def _read(source: Path, text_field: str) -> Iterator[Document]:
    """What the user named: here a file that cannot be used is an error."""
    if source.is_dir():
        yield from _folder(source, text_field)
        return
    if not source.exists():
        raise UsageError(f"there is no file or folder {str(source)!r}. Relative names start at {str(Path.cwd())!r}.")
    if not source.is_file():
        raise UsageError(f"{str(source)!r} is neither a file nor a folder.")
    if source.suffix.lower() in _PACKED:
        raise UsageError(f"{source} is packed, and read here only unpacked. Unpack it first.")
    if source.suffix.lower() in _TABLES:
        raise UsageError(f"{source} is a table in {source.suffix}, which is not read here. {_WITH_TABLES}")
    yield from _file(source, _bytes(source), text_field)


def _folder(folder: Path, text_field: str) -> Iterator[Document]:
    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        yield from _datasets(folder, text_field)
        return
    skipped: list[Path] = []
    used = 0
    for path in _files_below(folder):
        content = _bytes(path)
        if b"\0" in content or path.suffix.lower() in _PACKED | _TABLES:
            skipped.append(path)
            continue
        used += 1
        yield from _file(path, content, text_field)
    if not used:
        tables = f" {_WITH_TABLES}" if any(path.suffix.lower() in _TABLES for path in skipped) else ""
        raise BatchError(
            f"there is no text in the folder {folder}: found {counted(len(skipped), 'file')}, no text.{tables}"
            if skipped
            else f"the folder {folder} holds no file (hidden ones do not count)."
        )
    if skipped:
        named = f"{skipped[0]}, ..." if len(skipped) > 1 else str(skipped[0])
        logger.warning("left out %s in %s that cannot be read: %s", counted(len(skipped), "file"), folder, named)


def _files_below(folder: Path) -> list[Path]:
    """All files, but hidden ones, in an order that is the same on every machine."""
    found = []
    for place, folders, names in os.walk(folder, onerror=_complain):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())


def _complain(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _file(path: Path, content: bytes, text_field: str) -> Iterator[Document]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _json_lines(path, content, text_field)
        case ".json":
            return _json_list(path, content, text_field)
        case _:
            text = _decoded(content, str(path)).replace("\r\n", "\n")
            return iter([Document(text, None, str(path))])


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if _is_binary(content):
            raise BatchError(f"{where}: this is no text, but a binary file. Name files of text, or JSONL.") from None
        raise BatchError(
            f"{where}: not UTF-8; found the byte 0x{content[error.start]:02x} at position {error.start}. Convert it, "
            "for instance with iconv -f latin1 -t utf-8."
        ) from None


def _is_binary(content: bytes) -> bool:
    """Whether this is no text in any of the usual encodings: those have few control characters."""
    start = content[:8192]
    control = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in start)
    return b"\0" in content or control > 0.02 * len(start)


# ------------------------------------------------------------------------------------------------------------ records


def _json_lines(path: Path, content: bytes, text_field: str) -> Iterator[Document]:
    # Only a line feed ends a line: strings in JSON may hold the other characters that Python takes for ends.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _document(_parsed(_decoded(line, where), where), text_field, where)


def _json_list(path: Path, content: bytes, text_field: str) -> Iterator[Document]:
    try:
        records = _parsed(_decoded(content, str(path)), str(path))
    except _SeveralValuesError:
        yield from _json_lines(path, content, text_field)  # many call it .json all the same
        return
    if not isinstance(records, list):
        raise BatchError(
            f"{path}: a .json file must hold a list of records, or a record a line: found {_kind(records)}."
        )
    for number, record in enumerate(records, start=1):
        yield _document(record, text_field, f"{path}, record {number}")


class _SeveralValuesError(BatchError):
    """Where one JSON value was wanted, another one follows."""


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        kind = _SeveralValuesError if error.msg == "Extra data" and error.lineno > 1 else BatchError
        raise kind(f"{where}: not JSON: {error.msg} at {place}.") from None
    except (ValueError, RecursionError) as error:
        raise BatchError(f"{where}: JSON that cannot be read: {error}.") from None


def _document(record: Any, text_field: str, where: str) -> Document:
    if isinstance(record, str):
        record = {text_field: record}
    if not isinstance(record, Mapping):
        raise BatchError(f"{where}: a record must be an object with fields, or a string: found {_kind(record)}.")
    if text_field in record:
        return Document(_string(record, text_field, where), None, where)
    is_pair = text_field == _TEXT  # whoever names a field wants that one
    if is_pair and "prompt" in record and "completion" in record:
        return Document(_string(record, "prompt", where), _string(record, "completion", where), where)
    wanted = f"{text_field!r}, nor 'prompt' and 'completion'" if is_pair else repr(text_field)
    found = ", ".join(map(repr, record)) or "none at all"
    raise BatchError(
        f"{where}: no field {wanted}; found {found}. Repair the record, or name the field that holds the text "
        "(--text-field)."
    )


def _string(record: Mapping[str, Any], field: str, where: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise BatchError(f"{where}: the field {field!r} must be a string: found {_kind(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BatchError(
            f"{where}: the field {field!r} holds half of a character (a lone surrogate). Repair it."
        ) from None
    return value


def _kind(value: object) -> str:
    """As JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", type(None): "null"}
    return "true or false" if isinstance(value, bool) else names.get(type(value), type(value).__name__)


# ----------------------------------------------------------------------------------------------------------- datasets


def _datasets(folder: Path, text_field: str) -> Iterator[Document]:
    """A folder that ``save_to_disk`` of the library `datasets` wrote."""
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(
            f"{folder} was saved by the library datasets, which is needed to read it and not installed. "
            "Install it (pip install datasets), or write the data as JSONL: dataset.to_json('data.jsonl')."
        )
    import datasets  # type: ignore[import-not-found, unused-ignore]

    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever that library and those below it raise for a damaged folder
        raise BatchError(f"{folder} cannot be read by the library datasets: {error}") from error
    if isinstance(rows, Mapping):
        if "train" not in rows:
            raise UsageError(
                f"{folder} holds several splits, none of them 'train': found {', '.join(map(repr, rows))}. "
                f"Name the folder of one: {folder / next(iter(rows))}."
            )
        rows = rows["train"]
    for number, record in enumerate(rows, start=1):
        yield _document(record, text_field, f"{folder}, row {number}")


# ------------------------------------------------------------------------------------------------ the standard library


def _standard_library(cache: Path | None) -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = {path.relative_to(root).as_posix(): _bytes(path) for path in _modules(root)}
    if not sources:
        raise UsageError(
            f"this Python came without the sources of its standard library (looked in {root}). Name texts to train on: "
            "--data FILE."
        )
    # What the parser accepts depends on its version.
    key = digest([sys.version, *sources.keys(), *sources.values()])
    made = kept(cache, f"standard-library-{key}", lambda: json.dumps(_functions(sources)).encode())
    return [Document(text, None, where) for text, where in json.loads(made)]


def _modules(root: Path) -> Iterable[Path]:
    """The files of the standard library, without its tests, whatever else is installed beside them."""
    for name in sorted(sys.stdlib_module_names):
        if (root / f"{name}.py").is_file():
            yield root / f"{name}.py"
        elif (root / name).is_dir():
            inside = ((path.relative_to(root), path) for path in (root / name).rglob("*.py") if path.is_file())
            yield from (path for below, path in sorted(inside) if not {"test", "tests", "idle_test"} & set(below.parts))


def _functions(sources: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Every function and method, once, with where it stands; its inner functions are a part of it."""
    found: dict[str, str] = {}
    for name, content in sources.items():
        try:
            encoding, _ = tokenize.detect_encoding(iter(content.splitlines(keepends=True)).__next__)
            source = content.decode(encoding).replace("\r\n", "\n")
            with warnings.catch_warnings():  # of old escapes and the like
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
    """The functions in classes, branches and the like, but not those in functions."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, (ast.stmt, ast.ExceptHandler)):
            yield from _outermost(list(ast.iter_child_nodes(node)))
