"""The command `macrobatch`: it runs a subcommand, and turns errors and signals into messages and an exit status.

Only a few modules are imported at the top, so that `main` can soon react to Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from macrobatch.errors import MacrobatchError, pip_install, printable

UNUSABLE = 2  # exit status
UNREAD = 128 + signal.SIGPIPE  # nobody reads what is printed, as with `| head`
EXTRA = ("tyro", "transformers", "tokenizers", "safetensors", "rich")  # what [train] installs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(given)
        sys.stdout.flush()
        return status
    except MacrobatchError as error:
        return _unusable(error, "--debug" in given)
    except BrokenPipeError:
        return UNREAD
    except SystemExit:  # of whoever printed help
        if not _can_print():
            return UNREAD
        raise
    except KeyboardInterrupt:
        print("macrobatch: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        return _unusable(f"this needs {error.name}, which is not installed: {pip_install('train')}.", False)
    finally:
        _leave_ranks()
        if not _can_print():  # or Python would try once more when it ends, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(given: list[str]) -> int:
    from macrobatch import subcommands

    if given[:1] == ["train"]:
        return subcommands.train(given[1:])
    parsed = subcommands.parser().parse_args(given)
    status: int = parsed.run(parsed)
    return status


def _can_print() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _leave_ranks() -> None:
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End the process. On a rank, end it without the interpreter's own shutdown.

    With gloo, threads of a process group that DDP has used outlive `destroy_process_group()`. If such a thread releases
    a tensor while the interpreter shuts down, the process aborts: a rank that has done all its work would seem to have
    failed.
    """
    if "torch.distributed" in sys.modules and "RANK" in os.environ:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _unusable(why: object, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"macrobatch: {printable(str(why))}", file=sys.stderr)
    return UNUSABLE
