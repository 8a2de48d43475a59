"""Fine-tuning on chats of very different lengths: `macrobatch train`, TRL's SFTTrainer and transformers' Trainer.

All rows train a Llama on conversations: questions about functions of the Python standard library, with their source as
the answer. All get the same initial weights, the same tokens with the same labels (the answers), bfloat16 autocast,
fused AdamW, clipping and learning rates, and the same samples in the same order. The rows are:

- macrobatch: the command with its defaults; with ``--cuda-graph``; with ``--pack``; with both;
- Trainer, SFTTrainer: micro-batches of 8 samples, or 32, padded to the longest; these make the same batches;
- grouped: samples of similar lengths together (``train_sampling_strategy``), which makes other batches;
- packed: SFTTrainer's ``packing=True``, with micro-batches of some rows, which makes other batches too.

Each row has its own process. Peers train two epochs, and the second one is timed: by then they have seen all shapes,
for each of which cuDNN plans its attention. Ours run as many steps before the timed ones, or more with graphs, until
all shapes are recorded. Only tokens of samples count; padding costs time, but does not count.

    python benchmarks/tuning.py                 # on a GPU: prints a table, writes results/tuning.json
    python benchmarks/tuning.py --tiny          # a tiny model, on a CPU too: does it run?
    python benchmarks/tuning.py --only macrobatch "SFTTrainer, packed by 4"
"""

# mypy: untyped-calls-exclude="torch,transformers,trl,datasets"
import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import record
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from macrobatch.train.flags import parse_flags
from train import problem

OVER_SAME, OVER_ALL = 1.5, 1.0  # wanted speed relative to the fastest peer on the same batches, and of all peers
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}  # relative, of losses: bfloat16 on a GPU
SECONDS = 280  # time limit of a row
LONGER = 4  # rows that record run so many times the timed steps in all
Sample = dict[str, list[int]]


@dataclass(frozen=True)
class Size:
    """The model, the data and the steps."""

    width: int = 768
    layers: int = 12
    words: int = 32_000
    longest: int = 1_024
    batch: int = 128  # samples in an optimizer step
    at_a_time: int = 8  # samples in a micro-batch of the peers
    steps: int = 10  # number of timed steps

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


TINY = Size(width=32, layers=2, words=600, longest=128, batch=32, at_a_time=4, steps=4)


@dataclass
class Measured:
    """The measurements of a row, step by step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    padded: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    def tokens_per_second(self, steps: int) -> float:
        """The speed over the last steps."""
        return sum(self.tokens[-steps:]) / sum(self.seconds[-steps:])


# ------------------------------------------------------------------------------------------------------ what is trained


def write_problem(place: Path, size: Size) -> None:
    """Write a configuration and conversations."""
    from macrobatch.train.documents import documents

    config = {
        "model_type": "llama",
        "vocab_size": size.words,
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": max(size.width // 64, 2),
        "num_key_value_heads": max(size.width // 64, 2),
        "max_position_embeddings": size.longest,
        "tie_word_embeddings": True,
    }
    (place / "config.json").write_text(json.dumps(config))
    with (place / "chat.jsonl").open("w") as file:
        for number, document in enumerate(documents()):
            question = f"Write the function in {document.where}."
            answer = {"role": "assistant", "content": document.text}
            file.write(json.dumps({"messages": [{"role": "user", "content": question}, answer]}) + "\n")
            if number >= LONGER * size.batch * size.steps:
                break


def flags(place: Path, size: Size) -> list[str]:
    """The flags of `macrobatch train`. The peers are set up from them too."""
    options: dict[str, object] = {
        "model": place / "config.json",
        "data": place / "chat.jsonl",
        "vocabulary-size": min(size.words, 8_192),
        "seq-len": size.longest,
        "batch-size": size.batch,
        "steps": size.steps,
        "lr": 1e-4,
        "schedule": "constant",
        "warmup": 0,
        "precision": "bf16" if size.device == "cuda" else "float32",
        "device": size.device,
        "validate-every": 0,
        "save-every": 0,
        "sample-tokens": 0,
        "validation": 0,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


# ------------------------------------------------------------------------------------------------------------- the rows


def ours(*more: str) -> Callable[[Path, Size], Measured]:
    """Run the command, and read its metrics."""

    def run(place: Path, size: Size) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            steps = size.steps * (LONGER if "--cuda-graph" in more else 2)
            command = [sys.executable, "-m", "macrobatch", "train", *flags(place, size), "--out", str(out), *more]
            command += ["--steps", str(steps)]
            record.started(command, SECONDS)
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return Measured(
            seconds=[row["seconds"] for row in rows],
            losses=[row["loss"] for row in rows],
            tokens=[row["tokens"] for row in rows],
            padded=[row["padded_tokens"] for row in rows],
            peak_bytes=max(row["memory_bytes"] for row in rows),
        )

    return run


class Counting:
    """A collate function that counts tokens, before they are on a device."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, torch.Tensor]]) -> None:
        self.collate, self.tokens, self.padded = collate, list[int](), list[int]()

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = self.collate(samples)
        self.tokens.append(sum(len(sample["input_ids"]) for sample in samples))
        self.padded.append(batch["input_ids"].numel())
        return batch

    def in_steps(self, at_once: int) -> tuple[list[int], list[int]]:
        """The counts of each optimizer step, which has this number of micro-batches."""
        starts = range(0, len(self.tokens), at_once)
        return [sum(self.tokens[s : s + at_once]) for s in starts], [sum(self.padded[s : s + at_once]) for s in starts]


def padded(samples: list[Sample]) -> dict[str, torch.Tensor]:
    from macrobatch.train.corpus import collate

    return collate([{name: torch.tensor(sample[name]) for name in ("input_ids", "labels")} for sample in samples])


class Timing(TrainerCallback):  # type: ignore[misc]
    """The end of each step, and its loss."""

    def __init__(self) -> None:
        self.ends, self.losses = [time.perf_counter()], list[float]()

    def on_step_end(self, *_: object, **__: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def peer(kind: str, at_a_time: int | None = None, **options: Any) -> Callable[[Path, Size], Measured]:
    """A trainer, set up as its documentation recommends."""

    def run(place: Path, size: Size) -> Measured:
        given, timing = problem(parse_flags(flags(place, size))), Timing()
        samples = [{name: value.tolist() for name, value in sample.items()} for sample in given.samples]
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": at_a_time or size.at_a_time,
            "gradient_accumulation_steps": size.batch // (at_a_time or size.at_a_time),
            "num_train_epochs": 2,
            "max_grad_norm": given.max_norm,
            "bf16": size.device == "cuda",
            "use_cpu": size.device == "cpu",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "train_sampling_strategy": "sequential",
        } | options
        schedulers = given.optimizer, given.scheduler
        with tempfile.TemporaryDirectory() as folder:
            if kind == "Trainer":
                collate = Counting(padded)
                trainer: Any = Trainer(
                    model=given.model,
                    args=TrainingArguments(folder, remove_unused_columns=False, **arguments),
                    train_dataset=samples,
                    data_collator=collate,
                    optimizers=schedulers,
                    callbacks=[timing],
                )
            else:
                trainer, collate = sft(given.model, samples, size, folder, arguments, schedulers, timing)
            timing.ends = [time.perf_counter()]
            trainer.train()
        tokens, widths = collate.in_steps(trainer.args.gradient_accumulation_steps)
        seconds = [end - start for start, end in zip(timing.ends, timing.ends[1:], strict=False)]
        peak = torch.cuda.max_memory_reserved() if size.device == "cuda" else 0
        return Measured(seconds, timing.losses, tokens[: len(seconds)], widths[: len(seconds)], peak)

    return run


def sft(
    model: Any,
    samples: list[Sample],
    size: Size,
    folder: str,
    arguments: dict[str, Any],
    schedulers: Any,
    timing: Timing,
) -> Any:
    """SFTTrainer on data that are already tokens; packed, with about as many tokens in a step.

    It recomputes activations by default. This is turned off, because the others do not recompute.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    marks = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>")), **marks
    )
    if arguments.get("packing"):
        rows = sum(len(sample["input_ids"]) for sample in samples) / size.longest / size.steps
        arguments["gradient_accumulation_steps"] = max(round(rows / arguments["per_device_train_batch_size"]), 1)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(folder, max_length=size.longest, loss_type="nll", gradient_checkpointing=False, **arguments),
        train_dataset=Dataset.from_list(samples),
        processing_class=tokenizer,
        optimizers=schedulers,
        callbacks=[timing],
    )
    trainer.data_collator = collate = Counting(trainer.data_collator)
    return trainer, collate


ROWS: dict[str, Callable[[Path, Size], Measured]] = {
    "macrobatch": ours(),
    "macrobatch, graphs": ours("--cuda-graph"),
    "macrobatch, packed": ours("--pack"),
    "macrobatch, packed, graphs": ours("--pack", "--cuda-graph"),
    "Trainer": peer("Trainer"),
    "Trainer by 32": peer("Trainer", 32),
    "Trainer by 32, grouped": peer("Trainer", 32, train_sampling_strategy="group_by_length"),
    "SFTTrainer": peer("SFTTrainer"),
    "SFTTrainer by 32": peer("SFTTrainer", 32),
    "SFTTrainer by 32, grouped": peer("SFTTrainer", 32, train_sampling_strategy="group_by_length"),
    "SFTTrainer, packed by 4": peer("SFTTrainer", 4, packing=True),
    "SFTTrainer, packed by 16": peer("SFTTrainer", 16, packing=True),
}


SAME = [name for name in ROWS if name.startswith("macrobatch") or not name.endswith(("grouped", "by 4", "by 16"))]


def measured(name: str, place: Path, size: Size) -> Measured:
    """The measurements of a row, in its own process."""
    if name.startswith("macrobatch"):
        return ROWS[name](place, size)
    row = ["--row", name, "--place", str(place), "--size", json.dumps(asdict(size))]
    return Measured(**json.loads(record.started([sys.executable, __file__, *row], SECONDS).splitlines()[-1]))


# ------------------------------------------------------------------------------------------------------------ reporting


def report(found: dict[str, Measured], size: Size) -> dict[str, Any]:
    first = next(iter(found.values()))
    rows: list[dict[str, Any]] = []
    for name, one in found.items():
        off = None
        if name in SAME:
            pairs = zip(one.losses[: size.steps], first.losses, strict=False)  # the batches of the second epoch differ
            off = max(abs(a - b) / abs(b) for a, b in pairs)
        rows.append(
            {
                "name": name,
                "same_batches": name in SAME,
                "tokens_per_second": round(one.tokens_per_second(size.steps)),
                "padded_to_real": round(sum(one.padded) / sum(one.tokens), 3),
                "steps": len(one.seconds),
                "peak_gib": round(one.peak_bytes / 2**30, 2),
                "last_loss": one.losses[: size.steps][-1],
                "off_by": off,
                "agrees": None if off is None else off <= TOLERANCE[size.device],
            }
        )
    best = max((row["tokens_per_second"] for row in rows if row["name"].startswith("macrobatch")), default=0)
    theirs = [row for row in rows if not row["name"].startswith("macrobatch")]
    targets = []
    for what, bound, peers in (
        ("the fastest peer on the same batches", OVER_SAME, [row for row in theirs if row["same_batches"]]),
        ("the fastest peer of all", OVER_ALL, theirs),
    ):
        if peers and best:
            ratio = round(best / max(row["tokens_per_second"] for row in peers), 3)
            targets.append({"of": what, "at_least": bound, "found": ratio, "reached": ratio >= bound})
    stamp = record.stamp(
        "fine-tuning on chats, each row in a process of its own", "torch", "transformers", "trl", "accelerate"
    )
    sizes = {**asdict(size), "tokens_a_step": first.tokens[: size.steps]}
    return {**stamp, "device": record.machine(size.device), "sizes": sizes, "rows": rows, "targets": targets}


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    caption = (
        "padding: tokens computed / real; off by: the largest relative difference of any step's loss from the first "
        f"row's, - where batches are others. {result['device']}; {record.in_words(result['versions'])}"
    )
    table = Table(title="Fine-tuning on chats of very different lengths", caption=caption)
    table.add_column("row", no_wrap=True)
    for heading in ("tokens/s", "padding", "steps", "GiB", "last loss", "off by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        off = "-" if row["off_by"] is None else f"{'' if row['agrees'] else 'DIFFERS '}{row['off_by']:.0e}"
        numbers = f"{row['tokens_per_second']:,}", f"{row['padded_to_real']:.2f}", str(row["steps"])
        table.add_row(row["name"], *numbers, f"{row['peak_gib']:.1f}", f"{row['last_loss']:.4f}", off)
    console = Console()
    console.print(table)
    for target in result["targets"]:
        outcome = "reached" if target["reached"] else "missed"
        console.print(f"{target['at_least']} times {target['of']}: {outcome} ({target['found']:.2f}).")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", "--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--steps", type=int, help="optimizer steps that are timed")
    parser.add_argument("--out", type=Path, default=Path("results/tuning.json"))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # of the peers
    if arguments.row:
        print(json.dumps(asdict(ROWS[arguments.row](arguments.place, Size(**json.loads(arguments.size))))))
        return 0
    if not torch.cuda.is_available() and not arguments.tiny:
        print("This needs a GPU; --tiny runs anywhere.", file=sys.stderr)
        return 2
    from rich.progress import track

    size = TINY if arguments.tiny else Size()
    size = Size(**asdict(size) | ({"steps": arguments.steps} if arguments.steps else {}))
    found: dict[str, Measured] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_problem(place, size)
        for name in track(arguments.only or list(ROWS), description="measuring", auto_refresh=False):
            try:
                found[name] = measured(name, place, size)
            except (SystemExit, subprocess.TimeoutExpired) as error:  # the other rows still run
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr)
                continue
            result = report(found, size)
            record.save(result, arguments.out)  # after each row, in case the run is interrupted
    if not found:
        return 1
    print_table(result)
    print(f"Written to {arguments.out}")
    return 1 if failed or any(row["agrees"] is False for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
