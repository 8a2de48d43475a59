"""Training programs in files of their own, run under Accelerate, or under `macrobatch.accelerate` with other imports.

What a program does is noted from outside: gradients before and weights after every step of any optimizer, the numbers
that it leaves in all_results.json, the names of its files.

As a program, ``scripts.py FOLDER`` runs all that `run_on_ranks` has listed there, on every rank of a torchrun: what
takes longest, starting Python and its packages, happens once.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import harness
from harness import programs
from harness.ranks import COLLECTIVE_SECONDS, SCENARIO_SECONDS, Outcome, be_a_rank, connect, disconnect, meet, torchrun

FOLDER = harness.TESTS / "ranks" / "accelerate_programs"
IMPORTED = [
    "harness.scripts",
    "macrobatch.accelerate",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
]


def with_our_imports(source: str) -> str:
    """The same program, with `macrobatch.accelerate` in its import lines."""
    source = re.sub(r"^( *)from accelerate\b", r"\1from macrobatch.accelerate", source, flags=re.MULTILINE)
    return re.sub(
        r"^( *)import accelerate$", r"\1import macrobatch.accelerate as accelerate", source, flags=re.MULTILINE
    )


@dataclass(frozen=True)
class Run:
    """A program, started once for each list of arguments.

    Args:
        program: the name of its file, without suffix.
        arguments: OUT in them becomes the folder that the program writes to.
        library: "theirs", "ours", or "as theirs": ours, with short windows divided as Accelerate does.
        is_float64: whether that is the default dtype.
    """

    program: str
    arguments: list[list[str]] = field(default_factory=lambda: [[]])
    library: str = "theirs"
    is_float64: bool = False

    def outcome(
        self, folder: Path, start: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> Outcome:
        """Run it in this process, each time within a `start`; returns what was noted."""
        source, out = (FOLDER / f"{self.program}.py").read_text(), folder / "out"
        script = folder / f"{self.program}-{os.environ.get('RANK', 'alone')}.py"
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(source if self.library == "theirs" else with_our_imports(source))
        noted: Outcome = {"gradients": [], "weights": [], "logged": []}
        for arguments in self.arguments:
            words = [word.replace("OUT", str(out)) for word in arguments]
            command = mock.patch.object(sys, "argv", [str(script), "--output_dir", str(out), *words])
            with start(), self._environment(), noted_steps(noted), programs.fresh(), command:
                runpy.run_path(str(script), run_name="__main__")
            noted["logged"].append(json.loads((out / "all_results.json").read_text()))
        noted["files"] = sorted({re.sub(r"\d{5,}.*", "", str(file.relative_to(out))) for file in out.rglob("*.*")})
        return noted

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        exact = "0" if self.library == "as theirs" else "1"
        with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true", MACROBATCH_EXACT_REMAINDER=exact):
            torch.set_default_dtype(torch.float64 if self.is_float64 else torch.float32)
            try:
                yield
            finally:
                torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def noted_steps(noted: Outcome) -> Iterator[None]:
    """Notes every step that any optimizer takes."""

    def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        noted["gradients"].append([None if p.grad is None else p.grad.clone() for p in parameters(optimizer)])

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        noted["weights"].append([p.detach().clone() for p in parameters(optimizer)])

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_on_ranks(runs: dict[str, Run], ranks: int, folder: Path) -> dict[str, list[Outcome]]:
    """What each run came to, on each rank."""
    (folder / "runs.json").write_text(json.dumps({name: asdict(one) for name, one in runs.items()}))
    launch = torchrun(ranks, Path(__file__), folder, directory=folder, imported=IMPORTED)
    assert launch.exit_code == 0, launch.output[-4000:]
    return {name: [torch.load(folder / name / f"{rank}.pt") for rank in range(ranks)] for name in runs}


@contextlib.contextmanager
def connected(folder: Path, number: int) -> Iterator[None]:
    """A process group for one start; it ends when all ranks have done all that they do."""
    faulthandler.dump_traceback_later(SCENARIO_SECONDS, exit=True)
    connect(folder / f"store-{number}")
    group = dist.group.WORLD  # freed with a program's models, while its threads still work, it would wait for ever
    meet(folder, f"begins-{number}", COLLECTIVE_SECONDS)
    yield
    meet(folder, f"ends-{number}", SCENARIO_SECONDS)
    faulthandler.cancel_dump_traceback_later()
    del group
    disconnect()


def main() -> None:
    be_a_rank()
    folder, numbers = Path(sys.argv[1]), itertools.count()
    for name, options in json.loads((folder / "runs.json").read_text()).items():
        outcome = Run(**options).outcome(folder / name, lambda: connected(folder, next(numbers)))
        torch.save(outcome, folder / name / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
