"""`macrobatch train` compared with transformers' Trainer and a loop with Accelerate: tokens per second, memory, losses.

All train the default model of `macrobatch train` on its default data, functions of the Python standard library, with
the same optimizer steps: the same initial weights, the same samples in the same batches, the same AdamW, clipping and
learning rates.

- macrobatch: the command `macrobatch train` with its defaults; the numbers come from its metrics.jsonl;
- Trainer: transformers' own, with micro-batches of 8 samples, padded to the longest;
- Trainer, grouped: the same with samples of similar lengths together (train_sampling_strategy). This makes other
  batches of the same samples: it sorts 50 micro-batches of samples at a time, so a batch holds samples of one length
  only, and its losses are not comparable. It is only shown, and is not part of the target;
- Accelerate: its loop for samples of variable size, with the same micro-batches as the Trainer. Tokens are counted
  after the shift (the documented loop counts before it, and its gradient is wrong by several per cent).

`tuning.py` does the same on a GPU, for chats, and with SFTTrainer.

Each run has its own process, so that its peak memory can be measured. Each round runs all of them, in an order that
rotates. The time of a step is the median over all rounds, so that slow phases of the machine have no effect. Only
tokens of samples count; padding costs time, but does not count. The first step of each run is not timed.

The learning rate is lower than that of the command; this does not change any time. With the default, the first steps of
such a small model amplify the rounding of float32 ten thousand times, in all runs, so that losses could not be
compared.

    python benchmarks/train.py                  # prints a table, writes results/train.json
    python benchmarks/train.py --quick          # one round of a tiny model: does it run?
"""

# mypy: untyped-calls-exclude="torch,transformers,accelerate"
import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import macrobatch
from macrobatch.train import Settings

MACROBATCH, TRAINER, GROUPED, ACCELERATE = "macrobatch", "Trainer", "Trainer, grouped", "Accelerate"
IGNORED = -100
TARGET = 1.5  # wanted speed relative to the faster peer with the same batches
LEARNING_RATE = 1e-3
TOLERANCE = 1e-5  # relative, of losses: float32, and AdamW amplifies its rounding from step to step
WARM_UP = 1  # steps that are not timed
SECONDS = 1800  # time limit of a run

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The settings of the run."""

    model: str
    steps: int
    batch: int  # samples in an optimizer step
    micro_batch: int  # samples in a micro-batch of the peers
    rounds: int

    def __post_init__(self) -> None:
        if min(self.batch, self.micro_batch, self.rounds) < 1 or self.steps <= WARM_UP:
            raise SystemExit(f"sizes must be at least 1, --steps at least {WARM_UP + 1}.")
        if self.batch % self.micro_batch:
            raise SystemExit(f"--micro-batch {self.micro_batch} does not divide the batch of {self.batch} samples.")


@dataclass(kw_only=True)
class Measured:
    """The measurements of one run, one number per step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    padded: list[int] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens[WARM_UP:]) / sum(self.seconds[WARM_UP:])


# ---------------------------------------------------------------------------------------------------------------------
# The problem: what `macrobatch train` trains, in parts for the peers.


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The same weights, samples, optimizer and learning rates as those of the command."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    max_norm: float
    samples: list[Batch]  # in the order of the batches


def problem(settings: Settings) -> Problem:
    from macrobatch.train import models
    from macrobatch.train.data import Data
    from macrobatch.train.learner import Plan
    from macrobatch.train.optimizers import optimizers_of
    from macrobatch.train.world import World

    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device(settings.device))
    data = Data.read(settings)
    plan = Plan.make(settings, data, world)
    made, _ = models.build_model(settings, data.vocabulary.size, data.vocabulary.end)
    model = models.prepare(made, settings, world)
    model.config.use_cache = False  # type: ignore[union-attr]  # no later token needs the keys and values
    (optimizer,) = optimizers_of(model, settings, models.learning_rate(settings))
    stream, rate, base = plan.stream(), plan.rate, optimizer.param_groups[0]["lr"]
    return Problem(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, lambda step: rate(step) / base),
        max_norm=settings.max_norm,
        samples=[data.train[index] for step in range(plan.steps) for index in stream.next(step)],
    )


def settings_of(sizes: Sizes) -> Settings:
    return Settings(model=sizes.model, steps=sizes.steps, batch_size=sizes.batch, lr=LEARNING_RATE, device="cpu")


class Watch:
    """Counts the tokens that go through a model, and measures the time of each optimizer step."""

    def __init__(self, model: nn.Module) -> None:
        self.measured = Measured()
        self._tokens = self._padded = self._micro_batches = 0
        self._begin = time.perf_counter()
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _model: nn.Module, _args: object, kwargs: dict[str, Tensor]) -> None:
        self._tokens += int(kwargs["attention_mask"].sum())
        self._padded += kwargs["input_ids"].numel()
        self._micro_batches += 1

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def step(self) -> None:
        """End an optimizer step."""
        now, measured = time.perf_counter(), self.measured
        measured.seconds.append(now - self._begin)
        measured.tokens.append(self._tokens)
        measured.padded.append(self._padded)
        measured.micro_batches.append(self._micro_batches)
        self._tokens = self._padded = self._micro_batches = 0
        self._begin = now


# ---------------------------------------------------------------------------------------------------------------------
# The runs. Each peer is set up as its documentation recommends.


def macrobatch_train(sizes: Sizes, folder: Path) -> Measured:
    """Run the command, and read its metrics."""
    command = [sys.executable, "-m", "macrobatch", "train", "--out", str(folder / "run"), "--device", "cpu"]
    options: dict[str, object] = {"model": sizes.model, "steps": sizes.steps, "batch-size": sizes.batch}
    options |= {"lr": LEARNING_RATE}
    options |= {"validate-every": 0, "save-every": 0, "sample-tokens": 0}  # none of them before the last step has ended
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    record.started(command + flags, SECONDS, CUDA_VISIBLE_DEVICES="")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return Measured(
        seconds=[row["seconds"] for row in rows],
        losses=[row["loss"] for row in rows],
        tokens=[row["tokens"] for row in rows],
        padded=[row["padded_tokens"] for row in rows],
        micro_batches=[row["micro_batches"] for row in rows],
        peak_bytes=rows[-1]["memory_bytes"],
    )


def trainer(sizes: Sizes, strategy: str) -> Measured:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from macrobatch.train.corpus import collate

    given = problem(settings_of(sizes))
    watch = Watch(given.model)

    class Timing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            watch.step()

        def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
            if "loss" in logs:
                watch.measured.losses.append(logs["loss"])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=sizes.micro_batch,
            gradient_accumulation_steps=sizes.batch // sizes.micro_batch,
            num_train_epochs=1,
            train_sampling_strategy=strategy,
            max_grad_norm=given.max_norm,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        peer = Trainer(
            model=given.model,
            args=arguments,
            train_dataset=given.samples,
            data_collator=collate,
            optimizers=(given.optimizer, given.scheduler),
            callbacks=[Timing()],
        )
        watch.begin()
        peer.train()
    return watch.measured


def accelerate(sizes: Sizes) -> Measured:
    """Accelerate's accumulation "with training samples of variable size", with a correct count of tokens."""
    from accelerate import Accelerator

    from macrobatch.train.corpus import collate

    given, steps = problem(settings_of(sizes)), sizes.batch // sizes.micro_batch
    watch = Watch(given.model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    loader: Any = DataLoader(given.samples, batch_size=sizes.micro_batch, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(given.model, given.optimizer, loader, given.scheduler)
    batches: Iterator[Batch] = iter(loader)
    watch.begin()
    for _ in range(sizes.steps):
        window = [next(batches) for _ in range(steps)]
        counted = torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in window]).sum()
        items = accelerator.gather(counted).sum().item()
        total = torch.zeros(())
        for batch in window:
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            total += loss.detach()
            accelerator.backward(loss * steps / items)
        accelerator.clip_grad_norm_(model.parameters(), given.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        watch.measured.losses.append(total.item() / items)
        watch.step()
    return watch.measured


PEERS: dict[str, Callable[[Sizes], Measured]] = {
    TRAINER: lambda sizes: trainer(sizes, "sequential"),
    GROUPED: lambda sizes: trainer(sizes, "group_by_length"),
    ACCELERATE: accelerate,
}
RUNS = (MACROBATCH, *PEERS)
SAME_BATCHES = (MACROBATCH, TRAINER, ACCELERATE)


def be_a_peer(name: str, sizes: Sizes) -> None:
    """The program of a peer's process. The last line that it prints has its measurements."""
    from macrobatch.train.record import peak_memory

    warnings.filterwarnings("ignore")  # of the peer
    measured = PEERS[name](sizes)
    measured.peak_bytes = peak_memory(torch.device("cpu"))
    print(json.dumps(asdict(measured)))


def run(name: str, sizes: Sizes) -> Measured:
    """One run, in its own process."""
    if name == MACROBATCH:
        with tempfile.TemporaryDirectory() as folder:
            return macrobatch_train(sizes, Path(folder))
    command = [sys.executable, __file__, "--peer", name, "--sizes", json.dumps(asdict(sizes))]
    output = record.started(command, SECONDS, CUDA_VISIBLE_DEVICES="")
    return Measured(**json.loads(output.splitlines()[-1]))


# ---------------------------------------------------------------------------------------------------------------------
# Reporting.


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over the rounds. The range is from the slowest to the fastest whole round."""

    name: str
    same_batches: bool
    tokens_per_second: float
    range: tuple[float, float]
    macrobatch_over_this: float
    peak_mib: float
    micro_batches: float  # per step, on average
    padded_to_real: float  # computed tokens divided by those that count
    first_loss: float
    last_loss: float
    loss_difference: float | None  # the largest relative difference of a step to macrobatch; None for other batches

    @property
    def agrees(self) -> bool | None:
        return None if self.loss_difference is None else self.loss_difference <= TOLERANCE


def evaluate(measured: dict[str, list[Measured]]) -> list[Figures]:
    own = measured[MACROBATCH]
    rows = []
    for name, runs in measured.items():
        speed, speeds = typical_speed(runs), [one.tokens_per_second for one in runs]
        last, same = runs[-1], name in SAME_BATCHES
        if same and last.tokens != own[-1].tokens:
            raise SystemExit(
                f"{name} has not had the batches of macrobatch: {last.tokens} and {own[-1].tokens} tokens."
            )
        if sum(last.tokens) != sum(own[-1].tokens):
            raise SystemExit(f"{name} has had {sum(last.tokens)} tokens, macrobatch {sum(own[-1].tokens)}.")
        rows.append(
            Figures(
                name=name,
                same_batches=same,
                tokens_per_second=round(speed, 1),
                range=(round(min(speeds), 1), round(max(speeds), 1)),
                macrobatch_over_this=round(typical_speed(own) / speed, 3),
                peak_mib=round(statistics.median(one.peak_bytes for one in runs) / 2**20, 1),
                micro_batches=round(statistics.fmean(last.micro_batches), 2),
                padded_to_real=round(sum(last.padded) / sum(last.tokens), 3),
                first_loss=last.losses[0],
                last_loss=last.losses[-1],
                loss_difference=difference(last.losses, own[-1].losses) if same else None,
            )
        )
    return rows


def typical_speed(runs: Sequence[Measured]) -> float:
    """Tokens per second, with the median time of each step."""
    seconds = [statistics.median(times) for times in zip(*(one.seconds for one in runs), strict=True)]
    return float(sum(runs[0].tokens[WARM_UP:]) / sum(seconds[WARM_UP:]))


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def report(sizes: Sizes, measured: dict[str, list[Measured]], rows: Sequence[Figures]) -> dict[str, Any]:
    found = min(row.macrobatch_over_this for row in rows if row.same_batches and row.name != MACROBATCH)
    tokens = measured[MACROBATCH][-1].tokens
    packages = ("torch", "transformers", "tokenizers", "accelerate")
    return {
        "what": "macrobatch train and its peers on the same batches, each in a process of its own",
        "date": record.today(),
        "versions": {
            "python": platform.python_version(),
            "macrobatch": macrobatch.__version__,
            **{name: version(name) for name in packages},
        },
        "device": "cpu",
        "processor": record.machine(),
        "threads": torch.get_num_threads(),
        "sizes": asdict(sizes),
        "learning_rate": LEARNING_RATE,
        "tokens_a_step": [min(tokens), round(statistics.fmean(tokens)), max(tokens)],
        "rows": [{**asdict(row), "agrees": row.agrees} for row in rows],
        "losses": {name: runs[-1].losses for name, runs in measured.items()},
        "target": {"at_least_over_the_faster_peer": TARGET, "found": found, "reached": found >= TARGET},
    }


def cells(row: Figures) -> list[str]:
    """A row of the printed table."""
    agreement = "-" if row.loss_difference is None else f"{row.loss_difference:.0e}"
    return [
        row.name,
        f"{row.tokens_per_second:,.0f}",
        f"{row.macrobatch_over_this:.2f}",
        f"{row.peak_mib:,.0f}",
        f"{row.micro_batches:.1f}",
        f"{row.padded_to_real:.2f}",
        f"{'DIFFERS ' if row.agrees is False else ''}{agreement}",
    ]


def print_table(result: dict[str, Any], rows: Sequence[Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    sizes = result["sizes"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    columns = (
        "ratio: of macrobatch's tokens/s to the row's; MiB: peak of the process; micro: micro-batches a step; padding: "
        "tokens computed / real; off by: the largest relative difference of any step's loss from macrobatch's, - where "
        "batches are others"
    )
    title = f"macrobatch train beside its peers ({sizes['steps']} steps of {sizes['batch']} functions)"
    table = Table(title=title, caption=f"{columns}. {result['processor']}, {result['threads']} threads; {versions}")
    table.add_column("run", no_wrap=True)
    for heading in ("tokens/s", "ratio", "MiB", "micro", "padding", "off by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console, target = Console(), result["target"]
    console.print(table)
    outcome = "reached" if target["reached"] else "missed"
    console.print(
        f"Target, at least {TARGET} times the faster peer on the same batches: {outcome} ({target['found']:.2f})."
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="a built-in size (default: small)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run (default: 24)")
    parser.add_argument("--batch", type=int, help="samples in one (default: that of macrobatch train)")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples that the peers take at a time (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round of a few steps of a tiny model")
    parser.add_argument("--output", type=Path, default=Path("results/train.json"))
    parser.add_argument("--peer", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    if arguments.peer is not None:
        be_a_peer(arguments.peer, Sizes(**json.loads(arguments.sizes)))
        return 0
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401
        from rich.progress import track

        from macrobatch.train.settings import DEFAULT_BATCH
    except ImportError as missing:
        print(f"{missing}. It comes with an extra: pip install -e '.[bench,train]'", file=sys.stderr)
        return 2
    quick = arguments.quick
    sizes = Sizes(
        model="tiny" if quick else arguments.model,
        steps=4 if quick else arguments.steps,
        batch=arguments.batch or DEFAULT_BATCH,
        micro_batch=arguments.micro_batch,
        rounds=1 if quick else arguments.rounds,
    )
    measured: dict[str, list[Measured]] = {name: [] for name in RUNS}
    order = [RUNS[(turn + number) % len(RUNS)] for number in range(sizes.rounds) for turn in range(len(RUNS))]
    for name in track(order, description="measuring", auto_refresh=False):
        measured[name].append(run(name, sizes))
    rows = evaluate(measured)
    result = report(sizes, measured, rows)
    print_table(result, rows)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Written to {arguments.output}")
    return 0 if all(row.agrees is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
