"""The errors that Macrobatch raises, as a tree of classes.

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

import contextlib
import inspect
import sysconfig
import warnings
from collections.abc import Iterator, Mapping


class MacrobatchError(Exception):
    """The base class of all errors of this library: ``except MacrobatchError`` catches all of them.

    Args:
        found: what was wrong, and what was found.
        cure: what to do.
        code: a name for the mistake, if programs that do not call the library themselves have to cure it in another
            way. Their packages word that (`rewording`).
    """

    def __init__(self, found: str = "", cure: str = "", *, code: str = "") -> None:
        super().__init__(f"{found} {cure}".strip())
        self.found, self.code = found, code


class UsageError(MacrobatchError):
    """A function was called with wrong arguments, or at the wrong moment, such as `step` before `backward`."""


class BatchError(MacrobatchError):
    """The data is wrong: a loader, a batch, a loss, or a number of items that cannot be right."""


class BackendError(MacrobatchError):
    """The model, the optimizer or the version of torch does not support what you asked for."""


class NonFiniteError(MacrobatchError):
    """A gradient is infinite or NaN, and the option ``nonfinite`` is "raise"."""


class FitError(MacrobatchError):
    """A batch does not fit into memory, and smaller micro-batches do not help or are not possible."""


class CheckpointError(MacrobatchError):
    """A checkpoint cannot be written, is damaged, or belongs to another model."""


def counted(number: int, what: str) -> str:
    """A number of things, in words: "1 sample", "2,000 samples"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def printable(text: str) -> str:
    r"""The text with control characters written as escapes, which cannot control a terminal. Lines and tabs stay.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def pip_install(extra: str) -> str:
    """The command that installs one of the package's extras."""
    return f"pip install 'macrobatch[{extra}]' (in a checkout '.[{extra}]')"


@contextlib.contextmanager
def rewording(cures: Mapping[str, str]) -> Iterator[None]:
    """A context in which errors say what to do in programs that do not call the library themselves.

    >>> with rewording({"no items": "Return them."}):
    ...     raise BatchError("there are no items.", "Pass items=.", code="no items")
    Traceback (most recent call last):
    macrobatch.errors.BatchError: there are no items. Return them.
    """
    try:
        yield
    except MacrobatchError as error:
        if error.code in cures:
            error.args = (f"{error.found} {cures[error.code]}".strip(),)
        raise


_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def warn(message: str) -> None:
    """Give a warning that points to the line of the user's program that called the library."""
    # Installed packages between the two, such as a progress bar around `batches`, are skipped if there is a program.
    level, frame, calls_library = 0, inspect.currentframe(), 0
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != __package__:
            calls_library = calls_library or level
            if not frame.f_code.co_filename.startswith((*_INSTALLED, "<frozen ")):
                break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=(calls_library if frame is None else level) + 1)
