"""Files and folders as documents, one after the other. Only a `.json` file is read into memory as a whole.

The files of a folder are sorted by name, so that the same data makes the same documents on every machine.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from macrobatch.errors import BatchError, UsageError, counted
from macrobatch.train import compressed
from macrobatch.train.formats import Columns, Document, kind_of

logger = logging.getLogger("macrobatch")

BLOCK = 250_000  # characters of a text that are tokenized together
_AT_ONCE = 1 << 20  # bytes
_ROWS = 256  # rows of a table that are converted together
_LARGEST_CELL = 2**31 - 1  # characters; the default of the csv library is 131,072
_UNREAD = {".zip", ".7z", ".tar", ".tgz", ".rar", ".xls", ".xlsx"}
_TABLES = {".parquet", ".arrow", ".feather"}
_INSTEAD = (
    "Unpack archives, and write tables as .csv, .parquet or JSONL, for instance with pandas: "
    "to_json(..., orient='records', lines=True)."
)


def read(source: Path, columns: Columns, *, warn: bool = True) -> Iterator[Document]:
    """The documents of a file or folder. Files of unsupported kinds are an error, or inside a folder a warning."""
    if source.is_dir():
        yield from _folder(source, columns, warn)
        return
    if not source.exists():
        raise UsageError(f"there is no file or folder {str(source)!r}. Relative names start at {str(Path.cwd())!r}.")
    if not source.is_file():
        raise UsageError(f"{str(source)!r} is neither a file nor a folder.")
    if not _is_readable(source):
        raise UsageError(f"{source} has a format that is not supported. {_INSTEAD}")
    yield from _file(source, columns)


def _folder(folder: Path, columns: Columns, warn: bool) -> Iterator[Document]:
    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        yield from _datasets(folder, columns)
        return
    skipped: list[Path] = []
    used = 0
    for path in _files_below(folder):
        if not _is_readable(path) or (_kind(path) not in _TABLES and _has_nul(path)):
            skipped.append(path)
            continue
        used += 1
        yield from _file(path, columns)
    if not used:
        raise BatchError(
            f"the folder {folder} has no text, only {counted(len(skipped), 'file')} of other formats. {_INSTEAD}"
            if skipped
            else f"the folder {folder} holds no file (hidden ones do not count)."
        )
    if skipped and warn:
        named = f"{skipped[0]}, ..." if len(skipped) > 1 else str(skipped[0])
        logger.warning("left out %s in %s that cannot be read: %s", counted(len(skipped), "file"), folder, named)


def _files_below(folder: Path) -> list[Path]:
    """All files except hidden ones, in an order that is the same on every machine."""
    found = []
    for place, folders, names in os.walk(folder, onerror=_complain):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())


def _complain(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _kind(path: Path) -> str:
    """The suffix that names the format, without the suffix of the compression."""
    return (Path(path.stem) if compressed.is_packed(path) else path).suffix.lower()


def _is_readable(path: Path) -> bool:
    return _kind(path) not in _UNREAD and not (_kind(path) in _TABLES and compressed.is_packed(path))


def _file(path: Path, columns: Columns) -> Iterator[Document]:
    readers: dict[str, Callable[[Path, Columns], Iterator[Document]]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_list,
        ".csv": _csv,
        ".tsv": _csv,
        ".parquet": _parquet,
        ".arrow": _arrow,
        ".feather": _arrow,
    }
    return readers.get(_kind(path), _text)(path, columns)


# -------------------------------------------------------------------------------------------------------------- texts


def _text(path: Path, columns: Columns) -> Iterator[Document]:  # noqa: ARG001  # a text has no fields
    """One text. A long one is split into several documents: see `blocks`."""
    waiting = ""
    for decoded in _decoded_text(path):
        *whole, waiting = blocks(waiting + decoded)
        for part in whole:
            yield Document(part, None, str(path), goes_on=True)
    yield Document(waiting, None, str(path))


def blocks(text: str) -> list[str]:
    """Split a text into parts that can be tokenized at once. They end at line ends, if there are any."""
    found = []
    start = 0
    while len(text) - start > BLOCK:
        end = text.rfind("\n", start, start + BLOCK) + 1 or start + BLOCK
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


def _decoded_text(path: Path) -> Iterator[str]:
    """The text in a file, in parts, with line feeds as line ends."""
    decoder, size, carry, is_first = codecs.getincrementaldecoder("utf-8")(), 0, "", True
    with compressed.open_file(path) as file:
        while True:
            content = file.read(_AT_ONCE)
            position = size - len(decoder.getstate()[0])  # of the first byte that is not decoded yet
            try:
                text = carry + decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                raise _decoding_error(error, str(path), position) from None
            carry = "\r" if content and text.endswith("\r") else ""  # perhaps half of a line end
            text = text[: len(text) - len(carry)]
            yield (text.removeprefix("\ufeff") if is_first else text).replace("\r\n", "\n")
            if not content:
                return
            size, is_first = size + len(content), is_first and not text


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _decoding_error(error, where) from None


def _decoding_error(error: UnicodeDecodeError, where: str, position: int = 0) -> BatchError:
    if _is_binary(error.object):
        return BatchError(f"{where}: this is a binary file, not text.")
    return BatchError(
        f"{where}: not UTF-8; found the byte 0x{error.object[error.start]:02x} at position {position + error.start}. "
        "Convert it, for instance with iconv -f latin1 -t utf-8."
    )


def _is_binary(content: bytes) -> bool:
    """Whether this is no text in any usual encoding: texts have few control characters."""
    start = content[:8192]
    control = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in start)
    return b"\0" in content or control > 0.02 * len(start)


def _has_nul(path: Path) -> bool:
    """Whether a file is binary: texts have no NUL."""
    with compressed.open_file(path) as file:
        return b"\0" in file.read(_AT_ONCE)


# ------------------------------------------------------------------------------------------------------------- records


def _json_lines(path: Path, columns: Columns) -> Iterator[Document]:
    with compressed.open_file(path) as file:
        # Only a line feed ends a line: strings in JSON may hold the other characters that Python treats as line ends.
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                text = _decode(line.removesuffix(b"\n"), where).removeprefix("\ufeff")
                yield columns.document(_parse_json(text, where), where)


def _json_list(path: Path, columns: Columns) -> Iterator[Document]:
    with compressed.open_file(path) as file:
        content = file.read()
    try:
        records = _parse_json(_decode(content, str(path)).removeprefix("\ufeff"), str(path))
    except _SeveralValuesError:
        yield from _json_lines(path, columns)  # JSON lines are often in files named .json
        return
    if isinstance(records, dict):
        records = [records]
    if not isinstance(records, list):
        raise BatchError(
            f"{path}: a .json file must hold a list of records, or a record a line: found {kind_of(records)}."
        )
    for number, record in enumerate(records, start=1):
        yield columns.document(record, f"{path}, record {number}")


class _SeveralValuesError(BatchError):
    """The text has a second JSON value after the first one."""


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        kind = _SeveralValuesError if error.msg == "Extra data" and error.lineno > 1 else BatchError
        raise kind(f"{where}: not JSON: {error.msg} at {place}.") from None
    except (ValueError, RecursionError) as error:
        raise BatchError(f"{where}: JSON that cannot be read: {error}.") from None


# -------------------------------------------------------------------------------------------------------------- tables


def _csv(path: Path, columns: Columns) -> Iterator[Document]:
    """A table in CSV or TSV, whose first line names the columns."""
    separator = "\t" if _kind(path) == ".tsv" else ","
    number = 0
    limit = csv.field_size_limit(_LARGEST_CELL)
    try:
        with compressed.open_file(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            rows = csv.reader(text, delimiter=separator, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names):
                raise BatchError(f"{path}: the header line names a column twice: found {', '.join(map(repr, names))}.")
            for row in rows:
                number += 1
                if row and len(row) != len(names):
                    raise BatchError(
                        f"{path}, row {number}: {counted(len(row), 'cell')}, and the header line names {len(names)}. "
                        "Cells that hold separators, quotes or ends of lines must be quoted."
                    )
                if row:
                    yield columns.document(dict(zip(names, row, strict=True)), f"{path}, row {number}")
    except csv.Error as error:
        raise BatchError(f"{path}, after row {number}: not a table with a header line: {error}.") from None
    except UnicodeDecodeError:
        raise BatchError(f"{path}, after row {number}: not UTF-8. Convert it, for instance with iconv.") from None
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path, columns: Columns) -> Iterator[Document]:
    compressed.library("pyarrow", path)
    parquet = compressed.library("pyarrow.parquet", path)
    yield from _rows(path, columns, lambda: parquet.ParquetFile(path, pre_buffer=False).iter_batches(_ROWS))


def _arrow(path: Path, columns: Columns) -> Iterator[Document]:
    """A table in the file format of Arrow, which has an index at its end, or in its streaming format."""
    arrow = compressed.library("pyarrow", path)

    def batches() -> Iterator[Any]:
        with arrow.memory_map(str(path)) as file:
            is_indexed = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_indexed:
                opened = arrow.ipc.open_file(file)
                yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
            else:
                yield from arrow.ipc.open_stream(file)

    yield from _rows(path, columns, batches)


def _rows(path: Path, columns: Columns, batches: Callable[[], Iterator[Any]]) -> Iterator[Document]:
    arrow, number, found = compressed.library("pyarrow", path), 0, iter(())
    try:
        found = iter(batches())
    except (OSError, arrow.ArrowException) as error:
        raise _table_error(path, error) from error
    while True:
        try:
            batch = next(found, None)
        except (OSError, arrow.ArrowException) as error:
            raise _table_error(path, error) from error
        if batch is None:
            return
        for start in range(0, len(batch), _ROWS):
            for record in batch.slice(start, _ROWS).to_pylist():
                number += 1
                yield columns.document(record, f"{path}, row {number}")


def _table_error(path: Path, error: Exception) -> BatchError:
    return BatchError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}")


def _datasets(folder: Path, columns: Columns) -> Iterator[Document]:
    """A folder that ``save_to_disk`` of the library `datasets` wrote."""
    datasets = compressed.library("datasets", folder)
    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises many types for a damaged folder
        raise BatchError(f"{folder} cannot be read by the library datasets: {error}") from error
    if isinstance(rows, Mapping):
        if "train" not in rows:
            raise UsageError(
                f"{folder} holds several splits, none of them 'train': found {', '.join(map(repr, rows))}. "
                f"Name the folder of one: {folder / next(iter(rows))}."
            )
        rows = rows["train"]
    for number, record in enumerate(rows, start=1):
        yield columns.document(record, f"{folder}, row {number}")
