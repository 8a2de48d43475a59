"""Real processes for the tests of many ranks, and what such a test says: its vocabulary.

A test module keeps its scenarios in a dict, name -> function without arguments. `run` starts them all in one torchrun,
one after the other, and every rank leaves what a scenario returned, or raised, in a file. The tests look at those:

    SCENARIOS = {"sums": lambda: {"world": dist.get_world_size()}}
    outcomes = run(__name__, "SCENARIOS", 2, tmp_path)
    assert [o["world"] for o in outcomes["sums"]] == [2, 2]     # one outcome a rank

Every scenario has a process group of its own, and seconds to end in. One that hangs, or takes its process with it, is
reported as such, and those after it run in a new torchrun.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import harness
from harness import forking, reference
from harness.reference import VOCABULARY, WIDTH, Attention, Batch, Counting, Trainee, mean_loss, relative_error
from macrobatch import Accumulator

COLLECTIVE_SECONDS = 10  # how long a collective may wait for the other ranks
SCENARIO_SECONDS = 25  # how long a scenario may take: a hang beyond the collectives
LAUNCH_SECONDS = 240  # how long one torchrun may take

Outcome = dict[str, Any]


# ---------------------------------------------------------------------------------------------- starting the ranks


def run(
    module: str, scenarios: str, ranks: int, directory: Path, *, forks: bool = True, has_gpus: bool = False
) -> dict[str, list[Outcome]]:
    """What each scenario came to, on each rank. One whose process died has "died" in it: the end of the output.

    Forked ranks start sooner; others differ more, as they do elsewhere: in the order of a set of strings, say.
    """
    pending, outcomes = list(getattr(importlib.import_module(module), scenarios)), {}
    while pending:
        program = (Path(__file__), module, scenarios, directory, *pending)
        imported = (
            ["harness.ranks", module] if forks and not has_gpus else []
        )  # a fork of what knows CUDA cannot use it
        output = torchrun(ranks, *program, directory=directory, imported=imported, has_gpus=has_gpus).output
        while pending and all(outcome_file(directory, pending[0], rank).exists() for rank in range(ranks)):
            name = pending.pop(0)
            outcomes[name] = [torch.load(outcome_file(directory, name, r), weights_only=True) for r in range(ranks)]
        if pending:
            outcomes[pending.pop(0)] = [{"died": output[-4000:]}] * ranks
    return outcomes


@dataclass(frozen=True)
class Launch:
    output: str
    seconds: float
    exit_code: int


def torchrun(
    ranks: int,
    *program: object,
    directory: Path,
    seconds: float = LAUNCH_SECONDS,
    restarts: int = 0,
    imported: Sequence[str] = (),
    has_gpus: bool = False,
) -> Launch:
    """Run a program of some ranks to its end. After `seconds` all that was started is killed, and that is an error.

    Its ranks are started as users start them; or, where modules are named that they import, forked from a torchrun
    that has imported those once for all.
    """
    launcher = [forking.__file__, ",".join(imported)] if imported else ["-m", "torch.distributed.run"]
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command = [sys.executable, *launcher, *options]
    screen, started = directory / f"screen-{time.monotonic_ns()}", time.monotonic()
    environment = harness.environment(OMP_NUM_THREADS="1", RANKS_PIDS=str(directory), PYTHONUNBUFFERED="1")
    if not has_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # gloo on CPUs, also where there is a GPU
    with screen.open("wb") as file:
        launched = subprocess.Popen(
            [*command, *map(str, program)], stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=directory
        )
        try:
            launched.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{screen.read_text()[-4000:]}") from None
        finally:
            end(launched, directory)
    return Launch(screen.read_text(errors="replace"), time.monotonic() - started, launched.returncode)


def end(launched: subprocess.Popen[bytes], directory: Path) -> None:
    """Leave nothing behind: torchrun first, which takes its ranks along, then any rank that is left, by its id."""
    if launched.poll() is None:
        launched.send_signal(signal.SIGTERM)
        try:
            launched.wait(5)
        except subprocess.TimeoutExpired:
            launched.kill()
            launched.wait()
    for file in directory.glob("*.pid"):
        pid, started = map(int, file.read_text().split())
        with contextlib.suppress(OSError):
            if start_time(pid) == started:  # not another process that got the number since
                os.kill(pid, signal.SIGKILL)
        file.unlink()


def start_time(pid: int) -> int:
    """When a process was started, in ticks since the machine was: with its id, that tells it from all others."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


# --------------------------------------------------------------------------------------------------- being a rank


def be_a_rank() -> None:
    """What every rank does first: few threads, and its id where `end` finds it."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a fork of torchrun would handle them as it does
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    pid = os.getpid()
    Path(os.environ["RANKS_PIDS"], f"{pid}.pid").write_text(f"{pid} {start_time(pid)}")


def main() -> None:
    module, group, folder, *names = sys.argv[1:]
    be_a_rank()
    directory, scenarios = Path(folder), getattr(importlib.import_module(module), group)
    gc.freeze()  # what was imported stays: collecting after every scenario need not look at it
    for name in names:
        meet(directory, f"{name}-begins", 60)
        faulthandler.dump_traceback_later(SCENARIO_SECONDS, exit=True)
        outcome = outcome_of(scenarios[name], directory / f"{name}-store")
        file = outcome_file(directory, name, int(os.environ["RANK"]))
        torch.save(outcome, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        meet(directory, f"{name}-ends", 0 if "raised" in outcome else SCENARIO_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        disconnect()


def outcome_of(scenario: Callable[[], Outcome], store: Path) -> Outcome:
    started = time.monotonic()
    try:
        connect(store)
        meet(store.parent, f"{store.name}-connected", COLLECTIVE_SECONDS)  # one that raises at once leaves at once
        outcome = scenario()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        outcome = {"raised": kinds, "message": str(error), "traceback": traceback.format_exc()}
    return outcome | {"seconds": time.monotonic() - started}


def outcome_file(directory: Path, name: str, rank: int) -> Path:
    return directory / f"{name}.{rank}.pt"


def connect(store: Path) -> None:
    """A process group whose collectives give up soon, those of its subgroups too."""
    soon = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.distributed_c10d.default_pg_timeout = soon
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=soon)


def disconnect() -> None:
    """Close the connections.

    Threads of gloo let go of the tensors of the last collective after it has ended, and need Python's lock for that.
    The destructor of a group holds the lock and waits for those threads: let them have it first, or a rank stands.
    """
    time.sleep(0.05)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # connections are closed when nothing holds the group any more
    gc.freeze()  # what a scenario has imported stays, too


def meet(directory: Path, tag: str, seconds: float) -> None:
    """Say that this rank is here, and wait so long for the others; without a collective."""
    attempt = os.environ["TORCHELASTIC_RUN_ID"]
    places = [directory / f"{tag}.{attempt}.{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    places[int(os.environ["RANK"])].touch()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(place.exists() for place in places):
        time.sleep(0.002)


# ------------------------------------------------------------------------------------------------ data and models


Numbered = tuple[int, Batch]


def share(
    rank: int, count: int, *, routed: Collection[tuple[int, int]] = (), empty: Collection[tuple[int, int]] = ()
) -> list[Numbered]:
    """A rank's own micro-batches, of different sizes and items, each with its number.

    `routed` are those (rank, number) that reach the expert of a model that has one, `empty` those without items.
    """
    return [
        (
            i,
            reference.batch(
                1 + (rank + 3 * i) % 4,
                seed=100 * rank + i,
                routed=(rank, i) in routed,
                items=0 if (rank, i) in empty else None,
            ),
        )
        for i in range(count)
    ]


class Tower(nn.Module):
    """Three blocks and what is around them: four groups under FSDP, two buckets under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(self.norm(h))


class Noisy(nn.Module):
    """A BatchNorm and a dropout, both in training mode: every forward changes the running statistics and the RNG."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(self.dropout(self.norm(h.flatten(0, 1)).view_as(h)))


class Spike(torch.autograd.Function):
    """The identity; but backwards the last element is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[-1] = torch.inf
        return gradient


class Spiked(Attention):
    """Attention whose gradient is infinite in the last element of one parameter, while `spiked`."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.spiked = nn.Parameter(torch.zeros(VOCABULARY)), False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (Spike.apply(self.bias) if self.spiked else self.bias)


def made(make: Callable[[], nn.Module] = Attention, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights on every rank and in the reference."""
    torch.manual_seed(0)
    return make().eval().to(dtype)


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"), **options
    )


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    """One group for each block of a Tower (each of the three first Linears of Attention), and the rest."""
    linears = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "head"]
    for linear in linears:
        fully_shard(linear, **options)
    fully_shard(model, **options)
    return model


def hsdp(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2(model, mesh=mesh, **options)


def optimizer_for(model: nn.Module, name: str = "SGD") -> torch.optim.Optimizer:
    """SGD whose steps are the gradients themselves, or AdamW that does not magnify rounding: "AdamW-fused", say."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name, _, how = name.partition("-")
    flags: Any = {how: True} if how else {}
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=1.0, **flags)
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-5, weight_decay=0.1, **flags)


# ------------------------------------------------------------------------------------------ the loop, and its record


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights on every rank, by the names of the bare model. All ranks must call it."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {bare(name): p.detach().clone() for name, p in model.named_parameters()}
    if isinstance(model, FSDPModule):
        assert all(isinstance(p, DTensor) for p in model.parameters()), "parameters were left gathered"
    return {
        bare(name): p.full_tensor().detach().clone() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


def bare(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")


def flags(model: nn.Module) -> list[Any]:
    """Every flag that says when a model communicates."""
    if isinstance(model, DistributedDataParallel):
        return [model.require_backward_grad_sync]
    if isinstance(model, FullyShardedDataParallel):
        return [part._sync_gradients for part in FullyShardedDataParallel.fsdp_modules(model)]
    parts = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [
        group
        for part in parts
        for group in getattr(part, "_fsdp_param_groups", None) or [getattr(part, "_fsdp_param_group", None)]
        if group is not None
    ]
    return [
        (g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward, g.post_forward_mesh_info is None) for g in groups
    ] + [part._state_ctx.is_last_backward for part in parts]


@functools.cache
def flags_in_use(wrap: Callable[[nn.Module], nn.Module], make: Callable[[], nn.Module]) -> list[Any]:
    """The flags that belong to a model: those of its twin, which is trained plainly for a step.

    FSDP2 decides some of them in the first forward, so a model that has had none yet does not show them.
    """
    twin = wrap(made(make))
    twin(share(0, 1)[0][1].x).sum().backward()
    return flags(twin)


class Record:
    """A user's loop over some epochs, noting what was fed, what came out, and what the model was left like."""

    def __init__(
        self,
        acc: Accumulator,
        model: nn.Module,
        counting: Counting = reference.BY_COUNT,
        flags_before: list[Any] | None = None,
    ) -> None:
        self.acc, self.model, self.counting = acc, model, counting
        self.before, self.undisturbed = flags(model) if flags_before is None else flags_before, True
        self.fed: list[list[tuple[int, bool]]] = [[]]  # by window: number and is_repeat of every batch
        self.weights = [self.weights_now()]
        self.results: list[Any] = []
        self.kept: object = None  # what a loop of the user's keeps alive

    def epoch(self, loader: Iterable[tuple[int, Batch]]) -> None:
        for turn, (number, micro) in enumerate(self.acc.batches(loader)):
            self.micro_step(number, micro, turn)

    def micro_step(self, number: int, micro: Batch, turn: int = 0) -> None:
        """The body of the loop."""
        self.fed[-1].append((number, self.acc.is_repeat))
        loss = self.counting.loss(self.model, micro, turn)
        self.acc.backward(loss, items=self.counting.given(micro, turn))
        self.undisturbed &= flags(self.model) == self.before
        self.note(self.acc.step())

    def note(self, result: Any) -> None:
        if result is not None:
            self.fed.append([])
            self.results.append(result)
            self.weights.append(self.weights_now())

    def weights_now(self) -> dict[str, Tensor]:
        return full_weights(self.model)

    def outcome(self) -> Outcome:
        return {
            "fed": self.fed,
            "weights": self.weights,
            "loss": [result.loss for result in self.results],
            "items": [result.items for result in self.results],
            "grad_norm": [result.grad_norm for result in self.results],
            "skipped": [bool(result.skipped) for result in self.results],
            "step": [int(result.step) for result in self.results],
            "flags kept": self.undisturbed and flags(self.model) == self.before,
        }


class Collectives(TorchDispatchMode):
    """Counts the collectives by name, also those that DDP's reducer starts from C++."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function._schema.name.partition("::")[2].strip("_")] += 1
        return function(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------- a plan: run, then checked


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training that all ranks do together, and that one process does with the whole batches.

    `counts`: for each epoch, how many micro-batches every rank has in it, or each of them.
    """

    first_rank: int = 0  # of the group of ranks that train together
    counts: Sequence[int | Sequence[int]] = (12,)
    steps: int = 4
    remainder: str = "step"
    sized: bool = True
    now: bool = False  # close what is open in the end
    make: Callable[[], nn.Module] = Attention
    dtype: torch.dtype = torch.float64  # of the ranks' models
    optimizer: str = "SGD"
    counting: Counting = reference.BY_COUNT
    max_norm: float | None = None
    routed: Collection[tuple[int, int]] = ()
    empty: Collection[tuple[int, int]] = ()

    # -------------------------------------------------------------------------------------------- on the ranks

    def start(self, wrap: Callable[..., nn.Module], wrapping: dict[str, Any] | None = None, **options: Any) -> Record:
        model = wrap(made(self.make, self.dtype), **(wrapping or {}))
        flags_before = flags_in_use(wrap, self.make) if isinstance(model, FSDPModule) else flags(model)
        chosen: dict[str, Any] = {"steps": self.steps, "remainder": self.remainder, "max_norm": self.max_norm}
        acc = Accumulator(
            model,
            optimizer_for(model, self.optimizer),
            reduction=self.counting.reduction,
            **chosen | options,
        )
        return Record(acc, model, self.counting, flags_before)

    def loaders(self, rank: int) -> Iterator[Sequence[Numbered]]:
        own, begin = self.share(rank), 0
        for count in self.counts_of(rank):
            yield own[begin : begin + count]
            begin += count

    def run(
        self,
        wrap: Callable[..., nn.Module],
        wrapping: dict[str, Any] | None = None,
        rank: int | None = None,  # among those that have data of their own
        **options: Any,
    ) -> Outcome:
        record = self.start(wrap, wrapping, **options)
        for loader in self.loaders(dist.get_rank() - self.first_rank if rank is None else rank):
            record.epoch(loader if self.sized else reference.unsized(loader))
            if self.remainder == "drop":
                record.fed[-1].clear()
        if self.now:
            record.note(record.acc.step(now=True))
        return record.outcome()

    # -------------------------------------------------------------------------------------------- in the test

    def counts_of(self, rank: int) -> list[int]:
        return [count if isinstance(count, int) else count[rank] for count in self.counts]

    def share(self, rank: int) -> list[Numbered]:
        return share(self.first_rank + rank, sum(self.counts_of(rank)), routed=self.routed, empty=self.empty)

    def windows(self, ranks: int) -> list[list[list[int]]]:
        """The numbers of the micro-batches in each window, by rank: as if all had as many as the one with the most."""
        counts, windows, window = [self.counts_of(rank) for rank in range(ranks)], [], []
        for epoch, longest in enumerate(map(max, zip(*counts, strict=True))):
            for position in range(longest):
                window.append((epoch, position))
                if len(window) == self.steps or (position == longest - 1 and self.remainder == "step"):
                    windows.append(window)
                    window = []
            if self.remainder == "drop":
                window = []
        return [
            [[sum(own[:e]) + i for e, i in window if i < own[e]] for own in counts]
            for window in (*windows, *([window] if self.now and window else []))
        ]

    def check(self, outcomes: list[Outcome], tolerance: float = 1e-12) -> None:
        """The windows were cut as planned, and each did what one process does with all its batches at once."""
        all_well(outcomes)
        planned = self.windows(len(outcomes))
        for rank, outcome in enumerate(outcomes):
            assert fresh(outcome) == [window[rank] for window in planned], f"rank {rank}: {outcome['fed']}"
        self.check_numbers(outcomes, tolerance)

    def check_roughly(self, outcomes: list[Outcome], tolerance: float) -> None:
        """As far as a lower precision allows, the last weights are those of one process with the whole batches."""
        all_well(outcomes)
        model = made(self.make)
        whole = Trainee(model, [optimizer_for(model, self.optimizer)], [])
        for window in self.windows(len(outcomes)):
            batches = [self.share(rank)[number][1] for rank, numbers in enumerate(window) for number in numbers]
            reference.whole_step(whole, batches, self.max_norm, self.counting)
        moved = [difference(outcome["weights"][0], outcome["weights"][-1]) for outcome in outcomes]
        expected = difference(outcomes[0]["weights"][0], reference.weights_of(model))
        assert all(relative_error(found, expected) <= tolerance for found in moved)

    def check_numbers(self, outcomes: list[Outcome], tolerance: float = 1e-12) -> None:
        """However the windows were cut, each did what one process does with all its batches at once."""
        all_well(outcomes)
        same_on_all(outcomes, "loss", "items", "grad_norm", "weights", "skipped", "step")
        shares, found, model = [self.share(rank) for rank in range(len(outcomes))], outcomes[0], made(self.make)
        whole, weights = Trainee(model, [optimizer_for(model, self.optimizer)], []), reference.weights_of(model)
        assert relative_error(found["weights"][0], weights) == 0
        by_rank = [fresh(outcome) for outcome in outcomes]
        for index, window in enumerate(zip(*by_rank, strict=True)):
            batches = [shares[rank][number][1] for rank, numbers in enumerate(window) for number in numbers]
            before, step = weights, reference.whole_step(whole, batches, self.max_norm, self.counting)
            assert step is not None, "a plan has items in every window"
            weights = reference.weights_of(model)
            if self.optimizer.startswith("SGD"):  # with a learning rate of 1 the difference is the gradient
                taken = difference(found["weights"][index], found["weights"][index + 1])
                error = relative_error(taken, difference(before, weights))
                assert error <= tolerance, f"the gradient of window {index}"
            error = relative_error(found["weights"][index + 1], weights)
            assert error <= tolerance, f"the weights after window {index}"
            assert found["items"][index].item() == step.items
            assert found["step"][index] == index + 1
            close: Any = {"rtol": max(tolerance, 1e-12), "atol": 0.0}
            torch.testing.assert_close(found["loss"][index].double(), step.loss, **close)
            if self.max_norm is not None:
                torch.testing.assert_close(found["grad_norm"][index].double(), step.grad_norm, **close)


PLANS = {
    "ints": Plan(),
    "tensors": Plan(counting=Counting("tensor")),
    "mixed": Plan(counting=Counting("mixed", "sum")),
    "uncounted": Plan(counting=Counting("read")),
    "short": Plan(counts=(6, 7, 5)),
    "clipped": Plan(counts=(10,), max_norm=0.05),
    "adamw": Plan(counts=(7, 7), optimizer="AdamW", max_norm=0.05),
    "empty": Plan(empty=[(1, 4), (1, 5), (1, 6), (1, 7), (0, 11)]),
    "carried": Plan(counts=(6, 5, 3), remainder="carry", now=True),
    "dropped": Plan(counts=(6, 4, 9), remainder="drop"),
    "unsized": Plan(counts=(6, 4, 9), sized=False),
}


def fresh(outcome: Outcome) -> list[list[int]]:
    """The numbers of the micro-batches in each closed window, but for repeated ones."""
    closed = outcome["fed"][: len(outcome["loss"])]
    return [[number for number, is_repeat in window if not is_repeat] for window in closed]


# ------------------------------------------------------------------------------- what the tests say about outcomes


def all_well(outcomes: list[Outcome]) -> list[Outcome]:
    """No rank raised, died, or hung."""
    for rank, outcome in enumerate(outcomes):
        assert "died" not in outcome, outcome["died"]
        assert "raised" not in outcome, f"rank {rank}: {outcome['traceback']}"
    return outcomes


def flags_are_kept(outcomes: dict[str, list[Outcome]], mode: str = "") -> None:
    """In no scenario of a mode did a rank leave flags on its model, neither after a backward nor in the end."""
    kept = {
        (name, rank): outcome["flags kept"]
        for name in outcomes
        if mode in name
        for rank, outcome in enumerate(outcomes[name])
        if "loss" in outcome
    }
    assert kept
    assert [where for where in kept if not kept[where]] == []


def all_refused(outcomes: list[Outcome], *words: str) -> None:
    """Every rank raised a MacrobatchError that has these words in it."""
    for rank in range(len(outcomes)):
        refused(outcomes, rank, *words)


def refused(outcomes: list[Outcome], rank: int, *words: str) -> None:
    outcome = outcomes[rank]
    assert "died" not in outcome, outcome["died"]
    assert "raised" in outcome, f"rank {rank} raised nothing"
    assert "MacrobatchError" in outcome["raised"], f"rank {rank}: {outcome['traceback']}"
    for word in words:
        assert word.lower() in outcome["message"].lower(), outcome["message"]


def same_on_all(outcomes: list[Outcome], *keys: str) -> None:
    for key in keys:
        for other in outcomes[1:]:
            torch.testing.assert_close(other[key], outcomes[0][key], rtol=0, atol=0, equal_nan=True)


def difference(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: before[name] - after[name] for name in before}


if __name__ == "__main__":
    from harness import ranks  # the module that the tests import, not this copy of it

    ranks.main()


# --------------------------------------------------------------------------------------- leaving in the middle


def other_batches() -> Iterator[Batch]:
    yield from (micro for _, micro in share(10 + dist.get_rank(), 4))


def breaks(record: Record) -> None:
    """A progress bar keeps the generator alive."""
    bar = record.acc.batches(other_batches())
    record.kept = bar
    for turn, micro in enumerate(bar):
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        record.acc.step()
        if turn == 1:
            break
    record.undisturbed &= flags(record.model) == record.before
    record.acc.discard()


def breaks_before_the_backward(record: Record) -> None:
    for turn, micro in enumerate(record.acc.batches(other_batches())):
        if turn == 2:
            break
        record.acc.backward(mean_loss(record.model, micro), items=micro.items)
        record.acc.step()
    record.acc.discard()
