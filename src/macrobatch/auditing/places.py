"""Which line of the program is running."""

from __future__ import annotations

import inspect
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

_OWN = str(Path(__file__).parent.parent)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SKIPPED = (str(Path(torch.__file__).parent), _OWN, "<frozen ")
_KINDS: dict[CodeType, int] = {}  # 0: torch's or our own; 1: an installed library's; 2: the program's
_TEXTS: dict[tuple[CodeType, int], str] = {}
_START = Path.cwd()


def place(depth: int = 2) -> str:
    """The line of the program, as "file:line"; if no code of a program is running, that of a library."""
    return places(depth + 1)[0]


def places(depth: int = 2) -> tuple[str, str]:
    """The line of the program, and the one that has called its function ("" if there is none)."""
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = None if frame is None else frame.f_back
    library: FrameType | None = None
    inner = ""
    while frame is not None:
        kind = _KINDS.get(frame.f_code)
        if kind is None:
            kind = _KINDS[frame.f_code] = _kind_of(frame.f_code)
        if kind == 2:
            if inner:
                return inner, _text(frame)
            inner = _text(frame)
        if kind == 1 and library is None:
            library = frame
        frame = frame.f_back
    return inner or ("an unknown line" if library is None else _text(library)), ""


def _kind_of(code: CodeType) -> int:
    if code.co_filename.startswith(_SKIPPED):
        return 0
    return 1 if code.co_filename.startswith(_INSTALLED) else 2


def _text(frame: FrameType) -> str:
    key = frame.f_code, frame.f_lineno
    text = _TEXTS.get(key)
    if text is None:
        path = Path(frame.f_code.co_filename)
        name = path.relative_to(_START) if path.is_relative_to(_START) else path
        text = _TEXTS[key] = f"{name}:{frame.f_lineno}"
    return text
