"""The command `macrobatch`: it runs a subcommand, and turns errors and signals into messages and an exit status.

Only small modules are imported at the top, so that `main` can soon react to Ctrl-C. torch and all that needs it are
imported where they are used: that takes seconds, and the command speaks before.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import macrobatch
from macrobatch.errors import FitError, MacrobatchError, UsageError, pip_install, printable

if TYPE_CHECKING:
    import argparse

    from macrobatch.train.settings import Settings
    from macrobatch.verify import Report

RIGHT, WRONG, UNUSABLE = 0, 1, 2  # exit status
UNREAD = 128 + signal.SIGPIPE  # nobody reads what is printed, as with `| head`
EXTRA = ("transformers", "tokenizers", "safetensors", "rich", "jinja2", "psutil")  # what [train] installs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    try:
        status = _run(given)
        sys.stdout.flush()
        return status
    except MacrobatchError as error:
        if "--debug" in given:
            traceback.print_exc()
        _print_error(error)
        return UNUSABLE
    except BrokenPipeError:
        return UNREAD
    except OSError as error:
        if "--debug" in given:
            traceback.print_exc()
        named = f": {error.filename}" if error.filename else ""
        _print_error(f"{error.strerror or error}{named}.")
        return UNUSABLE
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
        _print_error(f"this needs {error.name}, which is not installed: {pip_install('train')}.")
        return UNUSABLE
    finally:
        if _has_group():
            sys.modules["torch.distributed"].destroy_process_group()
        if not _can_print():  # or Python would try once more when it ends, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(status: int) -> NoReturn:
    """End the process. On a rank, end it without the interpreter's own shutdown."""
    # With gloo, threads of a process group that DDP has used outlive `destroy_process_group()`. If such a thread
    # releases a tensor in the shutdown, the process aborts: a rank that has done its work would seem to have failed.
    if "torch.distributed" in sys.modules and "RANK" in os.environ:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _run(given: list[str]) -> int:
    if given[:1] == ["train"]:
        return _train(given[1:])
    if given[:1] == ["bench"]:
        return _bench(given[1:])
    if not given:
        _parser().print_help()
        return RIGHT
    parsed = _parser().parse_args(given)
    status: int = parsed.run(parsed)
    return status


def _can_print() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _open_closed_streams() -> None:
    """Connect standard streams that are closed, as with `>&-`, to the null device, before a file takes their place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the smallest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _has_group() -> bool:
    """Whether this process has joined a group of ranks. It does not import torch, which takes seconds."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _print_error(message: object) -> None:
    with contextlib.suppress(OSError):
        print(f"macrobatch: {printable(str(message))}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    """The parser for all subcommands except `train` and `bench`, which parse their own arguments."""
    import argparse

    parser = argparse.ArgumentParser(prog="macrobatch", description="Exact gradient accumulation for PyTorch.")
    parser.add_argument("--version", action="version", version=f"macrobatch {macrobatch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a causal language model")

    text = commands.add_parser("generate", help="write text with a trained model")
    text.add_argument(
        "folder", metavar="RUN", type=Path, help="a run folder, or any folder with a model and its tokenizer"
    )
    text.add_argument("--prompt", help="the beginning of the text; with --chat, the question")
    text.add_argument(
        "--chat",
        action="store_true",
        help="answer with the model's chat template: the prompt, or without one a conversation, line by line",
    )
    text.add_argument("--tokens", type=_count, default=200, help="the largest number of tokens to add; default: 200")
    text.add_argument(
        "--temperature",
        type=_not_negative,
        default=0.8,
        help="how random the choice of tokens is: 0 always takes the likeliest token; default: 0.8",
    )
    text.add_argument("--top-k", type=_count, default=50, help="choose among the K likeliest tokens; default: 50")
    text.add_argument("--seed", type=int, default=0, help="the seed of the random choices; default: 0")
    text.set_defaults(run=_generate)

    page = commands.add_parser("report", help="write the report of a run again, or one that compares several")
    page.add_argument("folders", metavar="RUN", type=Path, nargs="+", help="the folder of a run; several are compared")
    page.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the file to write; default: report.html in the folder of the run, or beside the first of several runs",
    )
    page.set_defaults(run=_report)

    check = commands.add_parser(
        "verify",
        help="compare a training step with one big batch",
        description="Compares the gradient that a training step accumulates with the gradient of one big batch. If "
        "they differ, it names the cause. The exit status is 0 if the step is exact, 1 if it is wrong, and 2 if that "
        "is unknown or the program failed. Under torchrun, FUNCTION runs on every rank and returns that "
        "rank's share of the batch.",
    )
    check.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="a function without arguments, in a module that Python can import from the current folder. It returns "
        "model, loss_fn, batch and optionally step, the arguments of macrobatch.verify (default for step: a MacroStep)",
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument(
        "--windows", type=_count, metavar="N", help="the number of optimizer steps that step must take; default: any"
    )
    check.set_defaults(run=_verify)

    watch = commands.add_parser(
        "audit",
        help="run a training program as it is, and say how often each item counted",
        description="Runs a program as it is, and watches its backwards and optimizer steps: how often did each item "
        "of a window count, beside how often it should have? The exit status is 0 if the program is exact, 1 if it is "
        "wrong, and 2 if that cannot be told. On ranks: torchrun ... -m macrobatch audit PROGRAM.",
    )
    watch.add_argument(
        "--windows", type=_count_or_none, default=20, metavar="N",
        help="end the program after so many optimizer steps; 0: let it run to its end; default: 20",
    )  # fmt: skip
    watch.add_argument("--json", metavar="FILE", help="write the report as JSON; -: to standard output, alone")
    watch.add_argument("--html", metavar="FILE", type=Path, help="write the report as a page with a plot")
    watch.add_argument(
        "--no-compile", action="store_true", help="run without torch.compile, whose losses cannot be read"
    )
    module_help = "a module to run, and its own arguments"
    watch.add_argument("-m", dest="run_module", metavar="MODULE", nargs=argparse.REMAINDER, help=module_help)
    watch.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a file, and its own arguments")
    watch.set_defaults(run=_audit)

    show = commands.add_parser("demo", help="see the mistake, the cure and the memory, in a few seconds")
    show.set_defaults(run=_demo)
    commands.add_parser("bench", help="run the benchmarks, which compare Macrobatch with other libraries")
    return parser


def _count(text: str) -> int:
    import argparse

    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more: got {text}")
    return int(text)


def _count_or_none(text: str) -> int:
    import argparse

    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more: got {text}")
    return int(text)


def _not_negative(text: str) -> float:
    import argparse

    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0: got {text}")
    return number


# ----------------------------------------------------------------------------------- macrobatch train, generate, report


def _train(arguments: Sequence[str]) -> int:
    from macrobatch.train import flags
    from macrobatch.train.signals import interruptible

    with interruptible(is_first=_is_first()):
        chosen = flags.parse_flags(arguments)
        if chosen.print_config:
            print(chosen.toml(), end="")
            return RIGHT
        if _is_first():
            print("starting: loading torch and transformers, then the data", flush=True)
        with _short_messages():
            return _trained(chosen)


def _trained(chosen: Settings) -> int:
    from macrobatch._cut.memory import is_out_of_memory, requested_memory
    from macrobatch.train import trainer
    from macrobatch.train.world import OtherRankError

    try:
        return trainer.train(chosen)
    except OtherRankError:
        return UNUSABLE  # that rank says why
    except (RuntimeError, MemoryError) as error:
        if chosen.debug or not is_out_of_memory(error):
            raise
        raise FitError(
            f"memory ran out: {requested_memory(error)} more was asked for, with --micro {chosen.micro}. Say --micro "
            "auto or a smaller --micro, keep fewer activations (--checkpoint-activations yes), or take a smaller "
            "--seq-len or --model. The last checkpoint, if there is one, is as it was."
        ) from error
    except OSError as error:
        if chosen.debug or isinstance(error, BrokenPipeError):
            raise
        raise UsageError(f"{error.strerror or error}: {error.filename or 'the run could not go on'}.") from error


@contextlib.contextmanager
def _short_messages() -> Iterator[None]:
    """Inside this context, warnings and log messages are short lines on stderr, and only the first rank prints them."""
    import logging

    logger, handler = logging.getLogger("macrobatch"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("macrobatch: %(message)s"))
    handler.addFilter(lambda _: _is_first())
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _print_error(message) if _is_first() else None
            yield
    finally:
        logger.removeHandler(handler)


def _is_first() -> bool:
    """Whether this is the first rank of a launcher, or no rank."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def _generate(parsed: argparse.Namespace) -> int:
    from macrobatch.train import generate

    options = {name: getattr(parsed, name) for name in ("tokens", "temperature", "top_k", "seed")}
    if parsed.chat:
        questions = _questions() if parsed.prompt is None else [parsed.prompt]
        texts = generate.conversation(parsed.folder, questions, **options)
    else:
        texts = iter([generate.text_from(parsed.folder, parsed.prompt or "", **options)])
    for text in texts:
        print(printable(text) if sys.stdout.isatty() else text, flush=True)
    return RIGHT


def _questions() -> Iterator[str]:
    """What the user says: the lines of the input, until it ends."""
    if sys.stdin.isatty():
        print("Say something; an empty line or Ctrl-D ends the conversation.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
        elif sys.stdin.isatty():
            return


def _report(parsed: argparse.Namespace) -> int:
    from macrobatch.train import report

    print(report.write_report(*parsed.folders, out=parsed.out))
    return RIGHT


# -------------------------------------------------------------------------------------- macrobatch demo and bench


def _demo(_: argparse.Namespace) -> int:
    from macrobatch import demo

    demo.run()
    return RIGHT


def _bench(arguments: Sequence[str]) -> int:
    import runpy

    status: int = runpy.run_path(str(_benchmarks_folder() / "runner.py"))["main"](arguments)
    return status


def _benchmarks_folder() -> Path:
    """The folder of the benchmarks, in the checkout that this package is imported from."""
    package = Path(__file__).parent
    folder = package.parent.parent / "benchmarks"
    if (folder / "runner.py").is_file():
        return folder
    raise UsageError(
        f"the benchmarks are in the project's repository, not in the installed package ({package}). Run `make bench` "
        'in a checkout of the repository, or `make bench BENCHMARKS="overhead gpu"` for some of them.'
    )


# ---------------------------------------------------------------------------------------------- macrobatch verify


def _verify(parsed: argparse.Namespace) -> int:
    import json

    import torch.distributed as dist

    # What the program prints is not part of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext():
        report = _report_of(parsed.target, parsed.windows)
    if report is None:
        return UNUSABLE
    if not _has_group() or dist.get_rank() == 0:
        print(json.dumps(report.to_dict(), indent=2) if parsed.json else report)
    return {"exact": RIGHT, "wrong": WRONG, "unknown": UNUSABLE}[report.verdict]


def _report_of(target: str, windows: int | None) -> Report | None:
    """None, with a traceback, if the program fails."""
    from macrobatch import verify
    from macrobatch._io.functions import function_named

    function = function_named(target)
    try:
        model, loss_fn, batch, step = _returned(function(), target)
        _require_one_group(target)
        return verify(model, loss_fn, batch, step=step, windows=windows)
    except MacrobatchError:
        raise
    except (Exception, SystemExit):  # a program that ends itself has not been verified
        traceback.print_exc()
        _print_error(f"{target} could not be verified: it raised the error above.")
        return None


def _require_one_group(target: str) -> None:
    """Raise an error if there are several ranks without a process group: each would be verified alone."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1" and not _has_group():
        raise UsageError(
            f"{target} runs on {ranks} ranks, but they have not joined a group: call "
            "torch.distributed.init_process_group() in it, and return this rank's own share of the batch."
        )


def _returned(returned: object, target: str) -> tuple[Any, Any, Any, Any]:
    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        found = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise UsageError(f"{target} must return model, loss_fn, batch and, if need be, step: got {found}.")
    model, loss_fn, batch, *step = returned
    return model, loss_fn, batch, step[0] if step else None


# ----------------------------------------------------------------------------------------------- macrobatch audit


def _audit(parsed: argparse.Namespace) -> int:
    program = parsed.run_module or parsed.program
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        raise UsageError("macrobatch audit needs a program: macrobatch audit train.py, or macrobatch audit -m module.")
    if parsed.no_compile:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch reads it when it is imported
    from macrobatch.auditing.running import audit_program

    return audit_program(
        program,
        is_module=bool(parsed.run_module),
        windows=parsed.windows,
        json_file=parsed.json,
        html_file=parsed.html,
    )
