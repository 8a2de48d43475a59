"""The usual trainers, and the same ones under `exact`, on data of different lengths.

All trainers get the same model, data, batches and arguments. A trainer as it is and the same one under `exact` train at
the same time, one window each in turns, so that slow phases of the machine affect both. Ratios are computed window by
window. In the windows 1, 2, 4, 8, ... `exact` checks again what the loss is a mean over; these windows do not count,
and their times are written separately. cuDNN plans its attention for each shape that is new in a thread, which takes
longer than the attention itself: so both train on two windows of data again and again, and the first round does not
count.

The other rows run alone, on data that do not repeat. Before, each of them runs on the same data once, so that all
shapes are known, and one window is not timed; rows that record run four times as many windows before. Only tokens that
are not padding count. The rows are: transformers' Trainer and TRL's SFTTrainer as they are, under `exact`, with
``micro=by_tokens``, and with recorded micro-batches; Lightning's Trainer with ``accumulate_grad_batches``, and with
`ExactStrategy`. The losses of windows, over their tokens, are compared with those of the trainer as it is.

    python benchmarks/trainers.py            # prints a table, and writes results/trainers.json
    python benchmarks/trainers.py --tiny     # a tiny model, on a CPU too: does it run?
    python benchmarks/trainers.py --only Trainer --steps 12
"""

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import record
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from macrobatch import by_tokens
from macrobatch.lightning import ExactStrategy
from macrobatch.transformers import exact

PADDED = 4_096  # tokens in a micro-batch, with padding
LONGER = 4
DIFFERENT = 2  # different windows of the trainers that run in turns
IN_TURNS = ("as it is", "exact")
BRING_SHAPES = ("as it is", "exact", "by tokens")
TARGETS = {"by tokens": 3.0, "by tokens, graphs": 8.0, "exact": 0.98}
Sample = dict[str, list[int]]
Train = Callable[["Size", int, "Stopwatch"], None]  # trains for this number of windows


@dataclass(frozen=True)
class Size:
    width: int = 768
    layers: int = 12
    words: int = 32_000
    longest: int = 512
    budget: int = PADDED
    per_device: int = 2
    accumulate: int = 16
    different: int | None = None  # number of windows after which the data repeat

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        heads = max(self.width // 64, 2)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.words,
                hidden_size=self.width,
                intermediate_size=4 * self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                max_position_embeddings=self.longest,
                pad_token_id=0,
            )
        )

    def samples(self, windows: int) -> list[Sample]:
        """The samples of these windows, or of all different ones: many short ones and few long ones, as in chats."""
        draw, samples = torch.Generator().manual_seed(0), list[Sample]()
        windows = min(windows, self.different or windows)
        for _ in range(windows * self.per_device * self.accumulate):  # one by one, so that longer runs begin equally
            length = torch.randn((), generator=draw).mul(0.8).add(4.6).exp().clamp(8, self.longest).int().item()
            ids = torch.randint(1, self.words, (int(length),), generator=draw).tolist()
            samples.append({"input_ids": ids, "labels": ids})
        return samples


TINY = Size(width=32, layers=2, words=64, longest=32, budget=64, accumulate=4)


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)

    def padded(key: str, value: int) -> Tensor:
        return torch.tensor([sample[key] + [value] * (width - len(sample[key])) for sample in samples])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


class Turns:
    """Runs several trainings in threads, one window each in turns."""

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = threading.Condition()
        self._waiting = list(names)  # it is the turn of the first one

    def await_own(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == name)

    def hand_on(self, name: str, *, ends: bool = False) -> None:
        with self._changed:
            self._waiting.remove(name)
            if not ends:
                self._waiting.append(name)
            self._changed.notify_all()


@dataclass
class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """The time of each window, and its loss."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    between: Callable[[], None] = lambda: None  # is called between windows, and not timed
    begin: float = field(default_factory=time.perf_counter)

    def note(self) -> None:
        """End a window."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.begin)
        self.between()
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.note()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def arguments_for(size: Size, steps: int, kind: type = TrainingArguments, **more: Any) -> Any:
    on_gpu = torch.cuda.is_available()
    return kind(
        tempfile.mkdtemp(),
        per_device_train_batch_size=size.per_device,
        gradient_accumulation_steps=size.accumulate,
        max_steps=steps,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        train_sampling_strategy="sequential",
        **more,
    )


def with_trainer(wrap: Callable[[type], type]) -> Train:
    def run(size: Size, steps: int, watch: Stopwatch) -> None:
        data = size.samples(steps)
        arguments = arguments_for(size, steps, remove_unused_columns=False)
        trainer: Any = wrap(Trainer)
        trainer(
            model=size.model(), args=arguments, train_dataset=data, data_collator=collate, callbacks=[watch]
        ).train()

    return run


def with_sft(wrap: Callable[[type], type]) -> Train:
    def run(size: Size, steps: int, watch: Stopwatch) -> None:
        import trl
        from datasets import Dataset

        data = Dataset.from_list(size.samples(steps))
        arguments = arguments_for(size, steps, trl.SFTConfig, max_length=size.longest, gradient_checkpointing=False)
        trainer: Any = wrap(trl.SFTTrainer)
        trainer(
            model=size.model(),
            args=arguments,
            train_dataset=data,
            processing_class=words_tokenizer(size.words),
            callbacks=[watch],
        ).train()

    return run


def words_tokenizer(words: int) -> Any:
    """A tokenizer, which SFTTrainer requires, though the data are already tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, words)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<eos>")), pad_token="<pad>", eos_token="<eos>"
    )


def with_lightning(**options: Any) -> Train:
    """Lightning's Trainer with `ExactStrategy`; without options, with its own accumulation."""

    def run(size: Size, steps: int, watch: Stopwatch) -> None:
        import lightning.pytorch as lightning

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = size.model()

            def training_step(self, batch: dict[str, Tensor], _: int) -> Any:
                loss, items = self.model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()
                if options:
                    return {"loss": loss, "items": items}
                summed.append(torch.stack([loss.detach() * items, items]))
                return loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)  # not fused, because Lightning does not clip then

            def on_train_batch_end(self, _: Any, __: Any, index: int) -> None:
                if (index + 1) % size.accumulate:
                    return
                loss, items = torch.stack(summed).sum(0) if summed else (self.trainer.strategy.result.loss, 1)
                watch.losses.append(float(loss / items))
                summed.clear()
                watch.note()

        summed: list[Tensor] = []  # losses and items of a window with Lightning's own accumulation
        data = size.samples(steps)
        loader: Any = torch.utils.data.DataLoader(data, size.per_device, collate_fn=collate)  # type: ignore[arg-type]
        choices: dict[str, Any] = {"accumulate_grad_batches": size.accumulate}
        if options:
            choices = {"strategy": ExactStrategy("auto", steps=size.accumulate, **options)}
        on_gpu = torch.cuda.is_available()
        lightning.Trainer(
            max_steps=steps,
            precision="bf16-mixed" if on_gpu else "32-true",
            accelerator="gpu" if on_gpu else "cpu",
            devices=1,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **choices,
        ).fit(Module(), loader)

    return run


def same(trainer: type) -> type:
    return trainer


def families(budget: int) -> dict[str, dict[str, Train]]:
    policy = by_tokens(budget)
    wraps: dict[str, Callable[[type], type]] = {
        "as it is": same,
        "exact": exact,
        "by tokens": lambda trainer: exact(trainer, micro=policy),
        "by tokens, graphs": lambda trainer: exact(trainer, micro=policy, cuda_graph=True),
    }
    return {
        "Trainer": {name: with_trainer(wrap) for name, wrap in wraps.items()},
        "SFTTrainer": {name: with_sft(wrap) for name, wrap in wraps.items()},
        "Lightning": {
            "as it is": with_lightning(),
            "exact": with_lightning(micro=None),
            "by tokens": with_lightning(micro=policy),
            "by tokens, graphs": with_lightning(micro=policy, cuda_graph=True),
        },
    }


@dataclass
class Row:
    """The measurements of a row."""

    rates: list[float] = field(default_factory=list)  # tokens per second of each timed window
    looked_at: list[float] = field(default_factory=list)  # the same for windows in which `exact` checked the loss
    losses: list[float] = field(default_factory=list)
    reserved: int = 0
    error: str = ""


def is_looked_at(window: int) -> bool:
    """Whether `exact` checks the loss in this window, counted from 1."""
    return window & (window - 1) == 0


def watched(train: Train, size: Size, windows: int, watch: Stopwatch) -> tuple[list[float], int]:
    """Train, and return the tokens per second of every window, and the peak of reserved memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train(size, windows, watch)
    step = size.per_device * size.accumulate
    tokens = [len(sample["input_ids"]) for sample in size.samples(windows)]
    each = itertools.cycle([sum(tokens[start : start + step]) for start in range(0, len(tokens), step)])
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return [count / took for count, took in zip(each, watch.seconds, strict=False)], reserved


def in_turns(ways: dict[str, Train], size: Size, timed: int, rows: dict[str, Row]) -> None:
    """Measure a trainer under `exact` and the same one as it is, in turns."""
    ordinary = [number for number in range(DIFFERENT + 1, 2 * (timed + DIFFERENT) + 4) if not is_looked_at(number)]
    windows, size, turns = ordinary[timed - 1], replace(size, different=DIFFERENT), Turns(IN_TURNS)

    def train(way: str) -> None:
        def between() -> None:
            turns.hand_on(way)
            turns.await_own(way)

        turns.await_own(way)
        try:
            rates, _ = watched(ways[way], size, windows, watch := Stopwatch(between=between))
            rows[way].losses = watch.losses
            for number, rate in list(enumerate(rates, 1))[DIFFERENT:]:
                (rows[way].looked_at if is_looked_at(number) else rows[way].rates).append(rate)
        except Exception as error:
            tell(way, error, rows[way])
        finally:
            turns.hand_on(way, ends=True)

    threads = [threading.Thread(target=train, args=(way,)) for way in IN_TURNS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tell(way: str, error: Exception, row: Row) -> None:
    """Report an error in its row, so that the other rows can still run."""
    print(f"{way}: {type(error).__name__}: {error}", file=sys.stderr)
    row.error = str(error)[:200]


def rows_of(ways: dict[str, Train], size: Size, timed: int) -> dict[str, Row]:
    rows = {way: Row() for way in ways}
    alone = [(way, min(timed, 2) if way in IN_TURNS else timed) for way in BRING_SHAPES]
    for way, windows in alone if torch.cuda.is_available() else ():
        with contextlib.suppress(Exception):  # the error is reported below
            _, rows[way].reserved = watched(ways[way], size, windows, Stopwatch())
    in_turns(ways, size, timed, rows)
    for way, row in rows.items():
        if way in IN_TURNS:
            continue
        before = 1 + LONGER * timed if "graphs" in way else 1
        try:
            rates, reserved = watched(ways[way], size, before + timed, watch := Stopwatch())
            row.rates, row.losses, row.reserved = rates[before:], watch.losses, max(row.reserved, reserved)
        except Exception as error:
            tell(way, error, row)
    return rows


def table_of(name: str, ways: dict[str, Train], size: Size, timed: int) -> dict[str, Any]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = rows_of(ways, size, timed)
    usual = found["as it is"]
    rows: list[dict[str, Any]] = []
    for way, one in found.items():
        rate = statistics.median(one.rates) if one.rates else None
        pairs = list(zip(one.losses, usual.losses, strict=False))[:DIFFERENT]  # later data repeat
        apart = max((abs(a - b) for a, b in pairs), default=None)
        row: dict[str, Any] = {
            "trainer": name,
            "way": way,
            "tokens_per_second": rate,
            "windows": len(one.rates),
            "reserved_gib": one.reserved / 2**30 if one.reserved else None,
            "times": times(one.rates, usual.rates, is_paired=way in IN_TURNS),
            "losses": one.losses[:3],
            "apart": apart,
            "agrees": None if apart is None else apart <= 0.02,  # accumulated rounding of bfloat16
        }
        if way == "exact":
            row["quartiles"] = record.quartiles(pairs_of)[1:] if (pairs_of := ratios(one.rates, usual.rates)) else None
            row["times_looked_at"] = times(one.looked_at, usual.looked_at, is_paired=True)
        if one.error:
            row["error"] = one.error
        if way in TARGETS and row["times"] is not None:
            bound = TARGETS[way]
            row["target"] = {"found": row["times"], "at_least": bound, "reached": row["times"] >= bound}
        rows.append(row)
    return {"rows": rows}


def times(rates: list[float], usual: list[float], *, is_paired: bool) -> float | None:
    if not rates or not usual:
        return None
    if is_paired:
        return record.quartiles(ratios(rates, usual))[0]
    return statistics.median(rates) / statistics.median(usual)


def ratios(rates: list[float], usual: list[float]) -> list[float]:
    """The ratio of each window."""
    return [ours / theirs for ours, theirs in zip(rates, usual, strict=False)]


def cells_of(row: dict[str, Any]) -> list[str]:
    def written(key: str, form: str) -> str:
        return "-" if row[key] is None else format(row[key], form)

    figures = (("tokens_per_second", ",.0f"), ("times", ".2f"), ("reserved_gib", ".1f"), ("apart", ".1e"))
    return [f"{row['trainer']}, {row['way']}", *(written(key, form) for key, form in figures)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too")
    parser.add_argument("--steps", type=int, default=10, help="windows of each row that are timed (default: 10)")
    parser.add_argument("--only", choices=["Trainer", "SFTTrainer", "Lightning"], action="append")
    record.add_output(parser, "trainers")
    arguments = parser.parse_args()
    if not (torch.cuda.is_available() or arguments.tiny):
        print("this needs a GPU; --tiny runs on a CPU, and says nothing about speed.", file=sys.stderr)
        return 2
    size = TINY if arguments.tiny else Size()
    chosen = {name: ways for name, ways in families(size.budget).items() if name in (arguments.only or [name])}
    tables: dict[str, Any] = {}
    packages = [name for name in ("torch", "transformers", "accelerate", "lightning", "trl") if find_spec(name)]
    output = arguments.output if not arguments.tiny else Path(arguments.output).with_name("trainers_tiny.json")
    for name, ways in chosen.items():
        tables[name] = table_of(name, ways, size, arguments.steps)
        result = record.stamp("trainers", *packages) | {
            "machine": record.machine("cuda" if torch.cuda.is_available() else "cpu"),
            "size": asdict(size),
            "steps": arguments.steps,
            "trainers": tables,
        }
        record.save(result, output)  # after each table, in case the run is interrupted
    rows = [row for table in tables.values() for row in table["rows"]]
    where = f"{result['machine']}; {record.in_words(result['versions'])}"
    headings = ["trainer", "tokens/s", "times", "GiB", "losses apart"]
    record.show("Trainers, as they are and exact", headings, [cells_of(row) for row in rows], where)
    print(f"Written to {output}")
    return int(any(row["agrees"] is False or "error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
