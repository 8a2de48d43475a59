"""Seconds per window between two hosts on a slow link: the cost of how a library synchronises gradients.

Two network namespaces simulate the hosts. A veth pair connects them, limited by `tc` to 1 Gbit/s, then to 200 Mbit/s.
torchrun starts one process in each, and the processes can only communicate through this link. All loops run in these
processes. In every round each loop trains one window, in an order that rotates from round to round. Ratios are computed
within a round, so that slow phases of the machine affect both. The numbers of bytes come from the link's own counter.

It also checks the gradient of the first window against one big batch of all samples of both ranks, in plain torch; and
the weights after the last window against those of the loop that synchronises at every backward.

    sudo python benchmarks/network.py            # prints tables, writes results/network.json
    sudo python benchmarks/network.py --quick    # two rounds at 1 Gbit/s

It needs root, for the namespaces, and Linux with iproute2. It removes the namespaces again, also after Ctrl-C.
"""

# mypy: untyped-calls-exclude=torch
import argparse
import contextlib
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import record
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from macrobatch import Accumulator

WIDTH, LAYERS = 2048, 5  # 21 million parameters
LEARNING_RATE = 5.0  # weights then change by about their own norm: a wrong gradient is visible, rounding is not
TOLERANCE = 1e-4  # on gradients and weights, float32
AT_LEAST, AT_MOST = 3.0, 1.03  # targets: speed over sync at every backward at 1 Gbit/s; part of the best peer's time
EVERY, MACROBATCH = "sync every backward", "Macrobatch"

INTERFACE, ADDRESSES, PORT = "link0", ("10.77.0.1", "10.77.0.2"), 29511  # only inside the namespaces
BURST, LATENCY = "256kb", "50ms"  # of the shaper: bytes that may be sent at once, the longest delay of a packet
PRIORITY = -15  # niceness, because other work of the machine would affect some loops more than others
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the run. `samples`: those of one micro-batch on one rank."""

    micro_batches: int
    samples: int
    rounds: int

    def __post_init__(self) -> None:
        if min(self.micro_batches, self.samples, self.rounds) < 1:
            raise SystemExit("--micro-batches, --samples and --rounds must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One row: `run` trains one window."""

    name: str
    model: nn.Module
    run: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of the two processes on one link."""

    seconds: dict[str, list[float]]  # of each loop, one number per round, of the slower rank
    bytes_sent: dict[str, list[int]]  # by rank 0
    gradient_errors: dict[str, float]
    weight_errors: dict[str, float]
    all_reduce: float  # median seconds of an all-reduce of the gradients alone


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Seconds per window: median and quartiles. Ratios are medians of the ratios within a round."""

    name: str
    seconds: float
    quartiles: tuple[float, float]
    megabytes_sent: float
    speedup: float  # over sync at every backward
    macrobatch_to_this: float  # Macrobatch's time divided by this one's
    gradient_error: float
    weight_error: float

    @property
    def exact(self) -> bool:
        return max(self.gradient_error, self.weight_error) <= TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# The loops. Each is written as its library's documentation recommends; all use DDP with its defaults.


def data(settings: Settings, rank: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of every window on this rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (settings.micro_batches, settings.samples, WIDTH)
    return list(zip(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), strict=True))


def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same weights and optimizer for every loop."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def at_every_backward(settings: Settings) -> Loop:
    plain, optimizer = problem()
    model = DistributedDataParallel(plain)
    batches = data(settings, dist.get_rank())

    def run() -> None:
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(name=EVERY, model=plain, run=run)


def no_sync_by_hand(settings: Settings) -> Loop:
    plain, optimizer = problem()
    model = DistributedDataParallel(plain)
    batches = data(settings, dist.get_rank())

    def run() -> None:
        for index, (x, y) in enumerate(batches):
            is_last = index + 1 == len(batches)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.mse_loss(model(x), y)
                (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(name="no_sync by hand", model=plain, run=run)


def accelerate(settings: Settings) -> Loop:
    from accelerate import Accelerator

    plain, plain_optimizer = problem()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings.micro_batches)
    model, optimizer = accelerator.prepare(plain, plain_optimizer)
    batches = data(settings, dist.get_rank())

    def run() -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(name="Accelerate", model=plain, run=run)


def fabric(settings: Settings) -> Loop:
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator="cpu", strategy="ddp", devices=1, num_nodes=2)
    lightning.launch()
    plain, plain_optimizer = problem()
    model, optimizer = lightning.setup(plain, plain_optimizer)
    batches = data(settings, dist.get_rank())

    def run() -> None:
        for index, (x, y) in enumerate(batches):
            is_accumulating = index + 1 < len(batches)
            with lightning.no_backward_sync(model, enabled=is_accumulating):
                loss = F.mse_loss(model(x), y)
                lightning.backward(loss / len(batches))
        optimizer.step()
        optimizer.zero_grad()

    return Loop(name="Lightning Fabric", model=plain, run=run)


def accumulator(settings: Settings) -> Loop:
    plain, optimizer = problem()
    model = DistributedDataParallel(plain)
    acc = Accumulator(model, optimizer, steps=settings.micro_batches)
    batches = data(settings, dist.get_rank())

    def run() -> None:
        for x, y in acc.batches(batches):
            loss = F.mse_loss(model(x), y)
            acc.backward(loss, items=len(y))
            acc.step()

    return Loop(name=MACROBATCH, model=plain, run=run)


LOOPS = (at_every_backward, accelerate, fabric, no_sync_by_hand, accumulator)


# ---------------------------------------------------------------------------------------------------------------------
# In each of the two processes: measuring.


def work(settings: Settings, folder: Path) -> None:
    """The program that torchrun starts. Rank 0 writes the progress into `folder`, and at the end the measurements."""
    go_first()
    warnings.filterwarnings("ignore")  # the peers' advice about workers and loggers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if dist.get_rank() == 0:
            (folder / "progress").write_text(str(done))

    try:
        measured = measure([loop(settings) for loop in LOOPS], settings, tick)
        if dist.get_rank() == 0:
            (folder / "measured.json").write_text(json.dumps(asdict(measured)))
    finally:
        dist.destroy_process_group()


def go_first() -> None:
    os.nice(PRIORITY)
    with contextlib.suppress(OSError):  # if Linux schedules by session, only the priority of the session counts
        Path("/proc/self/autogroup").write_text(str(PRIORITY))


def measure(loops: Sequence[Loop], settings: Settings, tick: Callable[[], None]) -> Measured:
    start = weights(problem()[0])
    expected = after_one_big_batch(settings) - start
    gradient_errors = {}
    for loop in loops:  # a warm-up, whose gradient is checked
        loop.run()
        gradient_errors[loop.name] = worst((weights(loop.model) - start - expected).abs().max() / expected.abs().max())
        tick()
    all_reduce = gradients_alone(start)
    gc.collect()
    gc.freeze()  # objects of the peers' imports would slow down every later collection

    seconds: dict[str, list[float]] = {loop.name: [] for loop in loops}
    bytes_sent: dict[str, list[int]] = {loop.name: [] for loop in loops}
    for round_number in range(settings.rounds):
        first = round_number % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            dist.barrier()
            sent, begin = sent_so_far(), time.perf_counter()
            loop.run()
            seconds[loop.name].append(worst(torch.tensor(time.perf_counter() - begin)))
            bytes_sent[loop.name].append(sent_so_far() - sent)
            tick()

    reference = weights(loops[0].model)
    way = (reference - start).abs().max()
    weight_errors = {loop.name: worst((weights(loop.model) - reference).abs().max() / way) for loop in loops}
    return Measured(
        seconds=seconds,
        bytes_sent=bytes_sent,
        gradient_errors=gradient_errors,
        weight_errors=weight_errors,
        all_reduce=all_reduce,
    )


def after_one_big_batch(settings: Settings) -> Tensor:
    """The weights after one step on all samples of both ranks at once, in plain torch."""
    model, optimizer = problem()
    micro_batches = [pair for rank in range(dist.get_world_size()) for pair in data(settings, rank)]
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return weights(model)


def gradients_alone(like: Tensor) -> float:
    """Seconds of an all-reduce of as many numbers as there are gradients: the limit of the link."""
    seconds = []
    buffer = torch.zeros_like(like)
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(buffer)
        seconds.append(worst(torch.tensor(time.perf_counter() - begin)))
    return statistics.median(seconds)


def worst(value: Tensor) -> float:
    """The larger of the two ranks' numbers."""
    value = value.double()
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def sent_so_far() -> int:
    """The bytes that this host has sent."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Two hosts and the link between them.


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces that a veth pair connects. The pair exists in no other namespace."""
    names = (f"macrobatch-{os.getpid()}-a", f"macrobatch-{os.getpid()}-b")
    try:
        for name in names:
            command("ip", "netns", "add", name)
        peers = ("type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        command("ip", "link", "add", INTERFACE, "netns", names[0], *peers)
        for name, address in zip(names, ADDRESSES, strict=True):
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            command("ip", "-n", name, "link", "set", INTERFACE, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        there = {line.split()[0] for line in command("ip", "netns", "list").splitlines()}
        for name in there.intersection(names):  # the first deletion also removes the veth pair
            command("ip", "netns", "delete", name)


def shape(names: Sequence[str], rate: str) -> None:
    for name in names:
        shaper = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
        command("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", *shaper)


def run_on(names: Sequence[str], settings: Settings, tick: Callable[[], None]) -> Measured:
    """Start `work` on both hosts with torchrun, and wait for the measurements."""
    with tempfile.TemporaryDirectory(prefix="macrobatch-network-") as temporary:
        folder = Path(temporary)
        (folder / "settings.json").write_text(json.dumps(asdict(settings)))
        agents: list[subprocess.Popen[bytes]] = []
        shown = 0
        try:
            for node, name in enumerate(names):
                agents.append(torchrun(name, node, folder))
            while any(agent.poll() is None for agent in agents):
                if any(agent.poll() for agent in agents):
                    break  # one has failed, and the other would wait for it
                with contextlib.suppress(FileNotFoundError, ValueError):  # not written yet, or only half
                    done = int((folder / "progress").read_text())
                    for _ in range(done - shown):
                        tick()
                    shown = done
                time.sleep(0.2)
            failed = [node for node, agent in enumerate(agents) if agent.poll()]
        finally:
            for agent in agents:
                end(agent)
            end_all_in(names)
        if failed:
            logs = "".join((folder / f"{node}.log").read_text(errors="replace")[-6000:] for node in failed)
            raise SystemExit(f"{logs}\nA process failed; what it said is above.")
        return Measured(**json.loads((folder / "measured.json").read_text()))


def torchrun(name: str, node: int, folder: Path) -> subprocess.Popen[bytes]:
    where = ("--nnodes=2", f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}")
    agent = (sys.executable, "-m", "torch.distributed.run", *where, f"--local-addr={ADDRESSES[node]}")
    with (folder / f"{node}.log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, *agent, "--nproc-per-node=1", __file__, "--worker", str(folder)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends them
        )


def end(agent: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end. It then ends its worker."""
    if agent.poll() is None:
        agent.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=10)


def end_all_in(names: Sequence[str]) -> None:
    """End all processes in our own namespaces. They were started here, and would keep the namespaces alive."""
    for name in names:
        for process in command("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


def command(*words: str) -> str:
    # In a new session, because Ctrl-C must not stop the cleanup.
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Reporting.


def evaluate(measured: Measured) -> list[Figures]:
    def ratio(above: str, below: str) -> float:
        pairs = zip(measured.seconds[above], measured.seconds[below], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    rows = []
    for name, seconds in measured.seconds.items():
        median, lower, upper = record.quartiles(seconds)
        rows.append(
            Figures(
                name=name,
                seconds=round(median, 3),
                quartiles=(round(lower, 3), round(upper, 3)),
                megabytes_sent=round(statistics.median(measured.bytes_sent[name]) / 1e6, 1),
                speedup=ratio(EVERY, name),
                macrobatch_to_this=ratio(MACROBATCH, name),
                gradient_error=measured.gradient_errors[name],
                weight_error=measured.weight_errors[name],
            )
        )
    return rows


def targets(rate: str, rows: Sequence[Figures]) -> dict[str, Any]:
    """The ratios of Macrobatch to the loop that synchronises at every backward, and to the best other loop."""
    own = next(row for row in rows if row.name == MACROBATCH)
    best = max((row for row in rows if row.name not in (EVERY, MACROBATCH)), key=lambda row: row.macrobatch_to_this)
    found: dict[str, Any] = {
        "best_peer": best.name,
        "to_best_peer": best.macrobatch_to_this,
        "to_best_peer_at_most": AT_MOST,
        "speedup": own.speedup,
        "reached": best.macrobatch_to_this <= AT_MOST,
    }
    if rate == "1gbit":
        found["speedup_at_least"] = AT_LEAST
        found["reached"] = found["reached"] and own.speedup >= AT_LEAST
    return found


def stamp() -> dict[str, Any]:
    what = "seconds a window between two network namespaces on a shaped link, all loops in one run"
    return record.stamp(what, "torch", "accelerate", "lightning")


def cells(row: Figures) -> list[str]:
    """A row of the printed table."""
    return [
        row.name,
        f"{row.seconds:.2f}",
        "-".join(f"{quartile:.3g}" for quartile in row.quartiles),
        f"{row.megabytes_sent:.0f}",
        f"{row.speedup:.2f}x",
        f"{row.macrobatch_to_this:.3f}",
        f"{'ok' if row.exact else 'WRONG'}, {max(row.gradient_error, row.weight_error):.0e}",
    ]


def obstacle() -> str | None:
    """The reason why it cannot run here; None if it can."""
    if sys.platform != "linux" or not (shutil.which("ip") and shutil.which("tc")):
        return "It needs Linux with iproute2 (the commands ip and tc)."
    if os.geteuid() != 0:
        return "It needs root, to make network namespaces: sudo python benchmarks/network.py"
    for package in ("accelerate", "lightning"):
        try:
            version(package)
        except ImportError:
            return f"{package} is missing. The peers come with an extra: pip install -e '.[bench]'"
    return None


def interrupted(number: int, _: object) -> NoReturn:
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleanup
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8, help="in a window (default: 8)")
    parser.add_argument("--samples", type=int, default=32, help="in a micro-batch, on each rank (default: 32)")
    parser.add_argument("--rounds", type=int, default=10, help="windows of each loop on each link (default: 10)")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="as tc writes them")
    parser.add_argument("--quick", action="store_true", help="two rounds at 1 Gbit/s; writes nothing")
    record.add_output(parser, "network")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Settings(**json.loads((arguments.worker / "settings.json").read_text())), arguments.worker)
        return 0
    if missing := obstacle():
        print(missing, file=sys.stderr)
        return 2
    rounds, rates = (2, ["1gbit"]) if arguments.quick else (arguments.rounds, arguments.rates)
    settings = Settings(micro_batches=arguments.micro_batches, samples=arguments.samples, rounds=rounds)
    links = measure_links(settings, rates)
    if not arguments.quick:
        result = {
            **stamp(),
            "processor": record.machine(),
            "ranks": 2,
            "threads_per_rank": 1,
            "model": f"{LAYERS} x Linear({WIDTH}, {WIDTH}), {LAYERS * WIDTH * (WIDTH + 1):,} parameters, float32, SGD",
            "shaper": f"tbf, burst {BURST}, latency {LATENCY}",
            "settings": asdict(settings),
            "links": links,
        }
        record.save(result, arguments.output)
        print(f"Written to {arguments.output}")
    return 0 if all(row["exact"] for link in links.values() for row in link["rows"]) else 1


def measure_links(settings: Settings, rates: Sequence[str]) -> dict[str, Any]:
    for stop in STOPS:
        signal.signal(stop, interrupted)
    links: dict[str, Any] = {}
    with two_hosts() as names:
        for rate in rates:
            shape(names, rate)
            with record.progress(rate, (settings.rounds + 1) * len(LOOPS)) as tick:
                measured = run_on(names, settings, tick)
            rows = evaluate(measured)
            links[rate] = {
                "all_reduce_of_the_gradients": round(measured.all_reduce, 3),
                "rows": [{**asdict(row), "exact": row.exact} for row in rows],
                "target": targets(rate, rows),
            }
            show(settings, rate, links[rate], rows)
    return links


def show(settings: Settings, rate: str, link: dict[str, Any], rows: Sequence[Figures]) -> None:
    title = f"{rate}: seconds a window of {settings.micro_batches} micro-batches, {settings.rounds} rounds"
    alone = f"An all-reduce of the gradients alone: {link['all_reduce_of_the_gradients']:.2f} s"
    where = f"{record.machine()}; {record.in_words(stamp()['versions'])}"
    caption = f"MB: sent by a rank. ours: Macrobatch's time over this one's. {alone}. {where}"
    headings = ["loop", "median", "quartiles", "MB", "faster", "ours", "gradient"]
    record.show(title, headings, list(map(cells, rows)), caption)
    target = link["target"]
    outcome = "reached" if target["reached"] else "missed"
    speed = f"at least {AT_LEAST:.0f}x over sync at every backward ({target['speedup']:.2f}x), " * (rate == "1gbit")
    peer = f"at most {AT_MOST:.2f} of the best peer's time ({target['to_best_peer']:.3f} of {target['best_peer']})"
    print(f"Target, {speed}{peer}: {outcome}.")


if __name__ == "__main__":
    sys.exit(main())
