"""The command `macrobatch`. Every subcommand is a function of its parsed arguments that returns the exit status."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from macrobatch import bench
from macrobatch.errors import MacrobatchError, UsageError
from macrobatch.verify import verify

RIGHT, WRONG, UNUSABLE = 0, 1, 2  # exit status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand."""
    parsed = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except MacrobatchError as error:
        print(f"macrobatch: {error}", file=sys.stderr)
        return UNUSABLE
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="macrobatch", description="Exact gradient accumulation for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser(
        "verify",
        help="compare a training step with one big batch",
        description="Compares the gradient that a training step accumulates with that of one big batch, and names the "
        "cause where they differ. Exit status: 0 exact, 1 wrong, 2 could not be verified. Under torchrun, FUNCTION "
        "runs on every rank and returns that rank's own share of the batch.",
    )
    check.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="a function without arguments, in a module that is found from here: it returns model, loss_fn, batch and, "
        "if it is not to be a MacroStep, step",
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.set_defaults(run=_verify)

    measure = commands.add_parser(
        "bench",
        help="measure against the peers",
        description="Runs the benchmarks one after the other, and shows what was found against what targets. Exit "
        "status: 0 all ran and every gradient agreed with its reference, 1 not so, 2 could not be run.",
    )
    measure.add_argument("names", nargs="*", metavar="NAME", help="which; all, without a name")
    measure.add_argument("--list", action="store_true", help="only say which there are")
    measure.add_argument("--out", type=Path, default=Path("results"), help="a folder for the results")
    measure.add_argument(
        "--figures",
        type=Path,
        nargs="?",
        const=Path("docs/figures"),
        help="draw them, into docs/figures or this folder",
    )
    measure.add_argument("--options", default="", metavar="WORDS", help="handed on to each, e.g. --options='--tiny'")
    measure.set_defaults(run=_bench)
    return parser


# ----------------------------------------------------------------------------------------------- macrobatch bench


def _bench(parsed: argparse.Namespace) -> int:
    if parsed.list:
        for benchmark in bench.benchmarks(bench.folder()).values():
            print(f"{benchmark.name}: {benchmark.what}")
        return RIGHT
    return bench.bench(parsed.names, parsed.out, parsed.figures, shlex.split(parsed.options))


# ---------------------------------------------------------------------------------------------- macrobatch verify


def _verify(parsed: argparse.Namespace) -> int:
    function = _function(parsed.target)
    try:
        model, loss_fn, batch, step = _returned(function(), parsed.target)
        report = verify(model, loss_fn, batch, step=step)
    except MacrobatchError:
        raise
    except Exception:
        traceback.print_exc()
        print(f"macrobatch: {parsed.target} could not be verified: it raised the error above.", file=sys.stderr)
        return UNUSABLE
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        print(json.dumps(report.to_dict(), indent=2) if parsed.json else report)
    return RIGHT if report.ok else WRONG


def _function(target: str) -> Callable[[], Any]:
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name:
        raise UsageError(f"{target!r} is not MODULE:FUNCTION. For check() in training.py, say training:check.")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (module_name + ".").startswith(f"{error.name}."):
            raise UsageError(f"module {module_name!r} needs {error.name!r}, which is not installed.") from None
        raise UsageError(f"there is no module {module_name!r} in {os.getcwd()} or among what is installed.") from None
    function = getattr(module, name, None)
    if function is None:
        raise UsageError(f"module {module_name!r} has no function {name!r}.")
    if not callable(function):
        raise UsageError(f"{target} is not a function: got {type(function).__name__}.")
    called: Callable[[], Any] = function
    return called


def _returned(returned: object, target: str) -> tuple[Any, Any, Any, Any]:
    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        found = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise UsageError(f"{target} must return model, loss_fn, batch and, if need be, step: got {found}.")
    model, loss_fn, batch, *step = returned
    return model, loss_fn, batch, step[0] if step else None
