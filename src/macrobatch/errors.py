"""What can go wrong, as a tree.

::

    MacrobatchError
    ├── UsageError       a call with wrong arguments, or at the wrong moment
    ├── BatchError       a loader, a loss or a count of items that cannot be right
    ├── BackendError     a model, an optimizer or a torch that cannot do what was asked
    ├── NonFiniteError   an infinite or NaN gradient
    ├── FitError         a batch that does not fit into memory, however it is cut
    └── CheckpointError  a checkpoint that cannot be written, or is damaged, or belongs to another model

Every message says what was wrong, what was found, and what to do.

>>> from macrobatch.errors import BatchError, MacrobatchError
>>> issubclass(BatchError, MacrobatchError)
True
"""

from __future__ import annotations

import inspect
import sysconfig
import warnings


class MacrobatchError(Exception):
    """The root: ``except MacrobatchError`` catches whatever this library raises on purpose."""


class UsageError(MacrobatchError):
    """A call with wrong arguments, or at the wrong moment."""


class BatchError(MacrobatchError):
    """A loader, a loss or a count of items that cannot be right."""


class BackendError(MacrobatchError):
    """A model, an optimizer or a version of torch that cannot do what was asked."""


class NonFiniteError(MacrobatchError):
    """An infinite or NaN gradient under ``nonfinite="raise"``."""


class FitError(MacrobatchError):
    """A batch that does not fit into memory, however it is cut."""


class CheckpointError(MacrobatchError):
    """A checkpoint that cannot be written, or is damaged, or belongs to another model."""


def counted(number: int, what: str) -> str:
    """A number of things, in words.

    >>> counted(1, "sample"), counted(2_000, "sample")
    ('1 sample', '2,000 samples')
    """
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def printable(text: str) -> str:
    r"""The text, with whatever could command a terminal written out. Lines and tabs stay.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(c if c in "\n\t" or c.isprintable() or c == " " else _written_out(c) for c in text)


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode()


def pip_install(extra: str) -> str:
    """The command that installs one of the package's extras.

    >>> pip_install("train")
    "pip install 'macrobatch[train]' (in a checkout '.[train]')"
    """
    return f"pip install 'macrobatch[{extra}]' (in a checkout '.[{extra}]')"


_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def warn(message: str) -> None:
    """Warn at the line of the program that has called the library, however deep in it this is.

    Between the two may be code that is installed, such as a progress bar around `batches`. Where all is installed, it
    is the line that called the library.
    """
    level, frame, calls_library = 0, inspect.currentframe(), 0
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != __package__:
            calls_library = calls_library or level
            if not frame.f_code.co_filename.startswith((*_INSTALLED, "<frozen ")):
                break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=(calls_library if frame is None else level) + 1)
