"""Tokens a second and memory on a GPU: Llama-shaped models, beside the peers and one big batch.

Three sections, all in one process:

- fixed: windows of equal samples, at three sizes of model and micro-batch;
- variable: windows of 128 samples with log-normal lengths, none above 2,048 tokens. The peers take two samples a
  micro-batch, at most 4,096 tokens with their padding; `by_tokens(4096)` may have as many;
- sweep: windows of 16,384 tokens in micro-batches of 1 to 32 samples, for the figure.

All get the same samples from the host's memory through a `DataLoader`, and do the same: bf16 autocast over float32
weights, gradients clipped at 1.0, fused AdamW. Each loop is what its library's documentation tells a user to write,
with tokens counted as one big batch counts them. Padding is at the end, where no real token sees it: nobody passes a
mask, and the attention is registered as one that needs none. (transformers' own looks at the positions in every eager
forward, whether samples were packed: the host waits for the device. Compiled or recorded it cannot look, and takes a
slower way with a mask of zeros.) Compiled loops share one compiled model.

A loop runs twice, each time with a model of its own. First it is judged: what it hands to its optimizer, without
clipping (which would hide a wrong scale), is compared with one big batch in float32 without TF32, for two different
windows (in the sweep, one) and, where graphs are replayed, for the first once more. The error is max |difference| /
max |gradient| of the whole model; it may be three times that of one big batch under the same autocast. Then it is
timed: windows from one optimizer step to the next, with an empty cache before; the memory is what torch has *reserved*
at most, for `max_memory_allocated` does not see what lives in the pools of graphs. `MacroStep` without graphs, which
waits for the host as much as others do, is timed once more in turns with another, window by window, so that slow spells
of the machine hit both: with the loop by hand where samples are equal, with Accelerate where lengths vary.

    python benchmarks/gpu.py                    # everything: prints rows as they come, writes results/gpu.json
    python benchmarks/gpu.py --only fixed       # one section
    python benchmarks/gpu.py --tiny             # tiny models, on a CPU too: does it run? Writes results/gpu_tiny.json
"""

# mypy: untyped-calls-exclude="torch,transformers,accelerate,lightning"
import argparse
import contextlib
import gc
import importlib
import logging
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from macrobatch import MacroStep, by_tokens, causal_lm_loss

IGNORED = -100
MAX_NORM = 1.0
ALLOWED = 3.0  # times the error that one big batch has itself
FLOOR = 1e-6  # an error below it is rounding, however exact the big batch was (Llama normalises in float32, always)
MEDIAN_LENGTH, SPREAD, SHORTEST = 256, 0.8, 16  # of the log-normal lengths; the spread is that of their logarithm
MOST_WINDOWS = 60  # timed, of one loop
ATTENTION = "sdpa_without_mask"

HAND, ACCELERATE, FABRIC, TRAINER = "hand-written", "Accelerate", "Lightning Fabric", "transformers Trainer"
BIG_BATCH, EAGER, GRAPHS = "one big batch", "Macrobatch", "Macrobatch, cuda_graph"
HAND_COMPILED, COMPILED = "hand-written, compiled", "Macrobatch, compiled"
COMPILED_GRAPHS = "Macrobatch, compiled, cuda_graph"

Batch = dict[str, Tensor]
Gradients = list[Tensor]
Run = Callable[[list[Tensor]], int]  # trains on these samples, window by window; returns how many micro-batches it made


# ---------------------------------------------------------------------------------------------------------------------
# What is run.


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a model."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 32_000


MODELS = {
    "110M": Shape(width=768, layers=12, heads=12),
    "41M": Shape(width=512, layers=8, heads=8),
    "1.1B": Shape(width=2048, layers=22, heads=32),
    "tiny": Shape(width=32, layers=2, heads=2, vocabulary=64),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One window's shape. `micro_batch` and `micro_batches` are those of the peers."""

    section: str
    model: str
    micro_batch: int  # samples
    length: int  # tokens of a sample; where lengths vary, of the longest
    micro_batches: int
    windows: int = 2  # different ones
    least: int = 4  # windows to time

    @property
    def name(self) -> str:
        if self.varies:
            return f"{self.model}, {self.samples} samples of up to {self.length}"
        return f"{self.model}, {self.micro_batch} x {self.length} x {self.micro_batches}"

    @property
    def varies(self) -> bool:
        return self.section == "variable"

    @property
    def samples(self) -> int:
        return self.micro_batch * self.micro_batches

    @property
    def budget(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        return self.micro_batch * self.length


def swept(model: str, sizes: Sequence[int], length: int) -> list[Case]:
    """The same window in micro-batches of these sizes, of which the last is all of it."""
    return [
        Case(section="sweep", model=model, micro_batch=n, length=length, micro_batches=sizes[-1] // n, least=2)
        for n in reversed(sizes)  # the slowest at the end
    ]


CASES = [
    Case(section="fixed", model="110M", micro_batch=1, length=512, micro_batches=16),
    Case(section="fixed", model="41M", micro_batch=2, length=256, micro_batches=16),
    Case(section="fixed", model="110M", micro_batch=4, length=1024, micro_batches=8),
    Case(section="variable", model="110M", micro_batch=2, length=2048, micro_batches=64, windows=4, least=2),
    *swept("110M", [1, 4, 16, 32], 512),
]
TINY = [
    Case(section="fixed", model="tiny", micro_batch=2, length=24, micro_batches=4),
    Case(section="variable", model="tiny", micro_batch=2, length=512, micro_batches=8, windows=4, least=2),
    *swept("tiny", [1, 2, 4], 24),
]

# Times Accelerate's tokens a second, eager where it says so. Of memory and of the hand-written loop's time: below.
TARGETS = {
    "110M, 1 x 512 x 16": {GRAPHS: 4.5, COMPILED_GRAPHS: 8.0},
    "41M, 2 x 256 x 16": {GRAPHS: 6.0, COMPILED_GRAPHS: 12.0},
    "110M, 4 x 1024 x 8": {GRAPHS: 1.6, COMPILED_GRAPHS: 2.8},
    "110M, 128 samples of up to 2048": {EAGER: 5.0, GRAPHS: 8.0, COMPILED_GRAPHS: 12.0},
}
TIME_OF_HAND_WRITTEN = 1.01  # at most, eager
MEMORY_OF_EAGER = 1.15  # at most, with graphs


class Problem:
    """The same weights and samples for every loop of a case."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.windows = [_samples(case, seed) for seed in range(case.windows)]
        self.precise = torch.float32 if device == "cuda" else torch.float64  # that of the reference

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(ATTENTION, sdpa_attention_forward)
        shape = MODELS[self.case.model]
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.width * 8 // 3 // 64 * 64,  # odd sizes are slow on a GPU
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            max_position_embeddings=self.case.length,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation=ATTENTION,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model: nn.Module = LlamaForCausalLM(config)
        return model.to(dtype)

    def compiled(self) -> nn.Module:
        """Compiled once for all lengths where they vary. Without CUDA nothing is gained: only that it runs."""
        backend = "inductor" if self.device == "cuda" else "eager"
        compiled: nn.Module = torch.compile(self.model(), dynamic=self.case.varies, backend=backend)  # type: ignore[assignment]
        return compiled

    def data(self, order: Iterable[int]) -> list[Tensor]:
        """The samples of these windows, one after the other."""
        return [sample for index in order for sample in self.windows[index % len(self.windows)]]

    def tokens(self, index: int) -> int:
        """Real ones of a window: padding costs time and counts for nothing."""
        return sum(map(len, self.windows[index % len(self.windows)]))


def _samples(case: Case, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [case.length] * case.samples
    if case.varies:
        drawn = torch.empty(case.samples).log_normal_(math.log(MEDIAN_LENGTH), SPREAD, generator=generator)
        lengths = [int(length) for length in drawn.clamp(SHORTEST, case.length)]
    vocabulary = MODELS[case.model].vocabulary
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def collate(samples: Sequence[Tensor]) -> Batch:
    """Padded at the end to the longest; labels are not shifted."""
    return {
        "input_ids": pad_sequence(list(samples), batch_first=True),
        "labels": pad_sequence(list(samples), batch_first=True, padding_value=IGNORED),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The loops. Each is what its library's documentation tells a user to write.


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a loop gets."""

    case: Case
    device: str
    model: nn.Module
    optimizer: Optimizer
    max_norm: float
    micro_batch: int  # samples
    steps: int  # micro-batches a window

    @property
    def is_bf16(self) -> bool:
        return self.device == "cuda"

    def loader(self, samples: list[Tensor]) -> Any:
        return DataLoader(samples, batch_size=self.micro_batch, collate_fn=collate)  # type: ignore[arg-type]

    def windows(self, loader: Iterable[Batch]) -> Iterator[tuple[list[Batch], Any]]:
        """The micro-batches of one optimizer step, with how many tokens they have to predict."""
        batches = iter(loader)
        while window := [batch for _, batch in zip(range(self.steps), batches, strict=False)]:
            if self.case.varies:
                yield window, sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in window)
            else:
                yield window, len(window) * self.micro_batch * (self.case.length - 1)

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.is_bf16 else contextlib.nullcontext()

    def moved(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


def logits_of(model: Any, batch: Batch) -> Tensor:
    # As causal_lm_loss calls it: a compiled model would be compiled once more for another way.
    logits: Tensor = model(input_ids=batch["input_ids"], use_cache=False).logits
    return logits


def loss_of(logits: Tensor, batch: Batch, reduction: str) -> Tensor:
    """The plain cross-entropy of the next token."""
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORED, reduction=reduction)


def hand_written(job: Job) -> Run:
    model, optimizer = job.model, job.optimizer

    def run(samples: list[Tensor]) -> int:
        done = 0
        for window, items in job.windows(job.loader(samples)):
            for batch in map(job.moved, window):
                with job.autocast():
                    loss = loss_of(logits_of(model, batch), batch, "sum")
                (loss / items).backward()
                done += 1
            nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return done

    return run


def one_big_batch(job: Job) -> Run:
    return hand_written(replace(job, micro_batch=job.case.samples, steps=1))


def accelerate(job: Job) -> Run:
    """Under `accumulate`; its recipe for "training samples of variable size" where lengths vary."""
    from accelerate import Accelerator

    precision = "bf16" if job.is_bf16 else "no"
    accelerator = Accelerator(cpu=job.device == "cpu", mixed_precision=precision, gradient_accumulation_steps=job.steps)
    model, optimizer = accelerator.prepare(job.model, job.optimizer)

    def run(samples: list[Tensor]) -> int:
        done = 0
        for batch in accelerator.prepare(job.loader(samples)):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(logits_of(model, batch), batch, "mean"))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
                optimizer.step()
                optimizer.zero_grad()
            done += 1
        return done

    def run_varying(samples: list[Tensor]) -> int:
        done = 0
        for window, counted in job.windows(accelerator.prepare(job.loader(samples))):
            items = accelerator.gather(counted).sum().item()
            for batch in window:
                loss = loss_of(logits_of(model, batch), batch, "sum")
                accelerator.backward(loss * job.steps / items)
                done += 1
            accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return done

    return run_varying if job.case.varies else run


def fabric(job: Job) -> Run:
    from lightning.fabric import Fabric

    precision = "bf16-mixed" if job.is_bf16 else "32-true"
    lightning = Fabric(accelerator=job.device, devices=1, precision=precision)
    model, optimizer = lightning.setup(job.model, job.optimizer)

    def run(samples: list[Tensor]) -> int:
        done = 0
        for window, items in job.windows(lightning.setup_dataloaders(job.loader(samples))):
            for index, batch in enumerate(window):
                with lightning.no_backward_sync(model, enabled=index + 1 < len(window)):
                    loss = loss_of(logits_of(model, batch), batch, "sum")
                    lightning.backward(loss / items)
                done += 1
            lightning.clip_gradients(model, optimizer, max_norm=job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return done

    return run


def trainer(job: Job) -> Run:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        """All loops see the same windows."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    def run(samples: list[Tensor]) -> int:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=job.micro_batch,
                gradient_accumulation_steps=job.steps,
                bf16=job.is_bf16,
                use_cpu=job.device == "cpu",
                max_grad_norm=job.max_norm,
                lr_scheduler_type="constant",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            theirs = InOrder(
                model=job.model,
                args=arguments,
                train_dataset=samples,
                data_collator=collate,
                optimizers=(job.optimizer, None),
            )
            theirs.remove_callback(PrinterCallback)
            theirs.train()
        return len(samples) // job.micro_batch

    return run


def lengths_of(batch: Batch) -> Tensor:
    """Of padded samples: nobody passes a mask here, which would tell."""
    return (batch["labels"] != IGNORED).sum(1)


def macro_step(job: Job, cuda_graph: bool = False) -> Run:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        with job.autocast():
            return causal_lm_loss(model, job.moved(batch), chunk=None)  # all logits at once, as the peers make them

    micro: Any = by_tokens(job.case.budget, lengths_of) if job.case.varies else job.micro_batch
    train = MacroStep(job.model, job.optimizer, loss_fn, micro=micro, max_norm=job.max_norm, cuda_graph=cuda_graph)

    def run(samples: list[Tensor]) -> int:
        loader = replace(job, micro_batch=job.case.samples).loader(samples)
        return sum(train(batch).micro_batches for batch in loader)

    return run


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One row."""

    name: str
    build: Callable[[Job], Run]
    is_compiled: bool = False
    has_graphs: bool = False


RIVALS = [
    Rival(name=ACCELERATE, build=accelerate),
    Rival(name=HAND, build=hand_written),
    Rival(name=FABRIC, build=fabric),
    Rival(name=TRAINER, build=trainer),
    Rival(name=BIG_BATCH, build=one_big_batch),
    Rival(name=EAGER, build=macro_step),
    Rival(name=GRAPHS, build=partial(macro_step, cuda_graph=True), has_graphs=True),
    Rival(name=HAND_COMPILED, build=hand_written, is_compiled=True),
    Rival(name=COMPILED, build=macro_step, is_compiled=True),
    Rival(name=COMPILED_GRAPHS, build=partial(macro_step, cuda_graph=True), is_compiled=True, has_graphs=True),
]


def rivals_of(case: Case) -> list[Rival]:
    def takes_part(rival: Rival) -> bool:
        if rival.name == BIG_BATCH:  # padded to the longest, a window of variable lengths fits no GPU
            return not case.varies and (case.section != "sweep" or case.micro_batches == 1)
        if rival.name == FABRIC and case.varies:  # the loop by hand, with another forward around the model
            return False
        return not (rival.is_compiled and case.section == "sweep")  # half a minute for each size

    return list(filter(takes_part, RIVALS))


# ---------------------------------------------------------------------------------------------------------------------
# The reference.


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The gradients of some windows, kept on the host, and how far a loop's may be from them."""

    gradients: dict[int, Gradients]
    allowed: float


@dataclass(frozen=True)
class Difference:
    """Between two gradients of a whole model."""

    error: float  # max |difference| / max |gradient|
    scale: float  # how long the one is along the other: rounding averages out here, so that a small wrong factor shows


def difference(found: Iterable[Tensor], expected: Gradients) -> Difference:
    differences, sizes, along, length = [], [], [], []
    for own, theirs in zip(found, expected, strict=True):
        there = theirs.to(own.device)
        differences.append((own - there).abs().max())
        sizes.append(there.abs().max())
        along.append((own * there).sum(dtype=torch.float64))
        length.append(there.square().sum(dtype=torch.float64))
    # Unlike Python's, torch's max keeps a NaN.
    error = torch.stack(differences).max() / torch.stack(sizes).max()
    return Difference(error.item(), (torch.stack(along).sum() / torch.stack(length).sum()).item())


def reference_for(problem: Problem, windows: Iterable[int]) -> Reference:
    exact = {index: big_batch(problem, index, problem.precise) for index in windows}
    own = max(difference(big_batch(problem, index, None), exact[index]).error for index in exact)
    return Reference(gradients=exact, allowed=max(ALLOWED * own, FLOOR))


def big_batch(problem: Problem, index: int, precise: torch.dtype | None) -> Gradients:
    """Of one window, in plain torch, at once; where lengths vary it would not fit: in parts of about one length."""
    samples = problem.windows[index]
    parts = [samples]
    if problem.case.varies:
        by_length = sorted(samples, key=len)
        part = math.ceil(len(samples) / 8)
        parts = [by_length[start : start + part] for start in range(0, len(samples), part)]
    model = problem.model(precise or torch.float32)
    items = sum(len(sample) - 1 for sample in samples)
    lowers = precise is None and problem.device == "cuda"
    for batch in map(collate, parts):
        moved = {name: tensor.to(problem.device) for name, tensor in batch.items()}
        with torch.autocast("cuda", torch.bfloat16) if lowers else contextlib.nullcontext():
            loss = loss_of(logits_of(model, moved), moved, "sum")
        (loss / items).backward()
    return [gradient.cpu() for gradient in gradients_of(model)]


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


# ---------------------------------------------------------------------------------------------------------------------
# Measuring.


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one loop did. `exact` is whether its gradient agreed with the reference; `error` is why there is nothing."""

    name: str
    tokens_per_second: float | None = None  # median over the windows
    quartiles: tuple[float, float] | None = None
    windows: int = 0  # timed
    over_accelerate: float | None = None
    in_turns_with: str = ""  # the loop beside which it was timed once more
    speed_in_turns: tuple[float, float, float] | None = None  # over that one's: median and quartiles
    reserved_gib: float | None = None  # at most
    reserved_before_gib: float | None = None  # what others had left behind
    micro_batches: float | None = None  # a window, on average
    first_window_seconds: float | None = None  # compiling and capturing included
    gradient_error: float | None = None
    gradient_scale: float | None = None  # that of the window where it is farthest from 1; nothing is judged by it
    exact: bool = False
    note: str = ""
    error: str = ""


class Watch:
    """Looks at every step of an optimizer: when it came, and, where there is a reference, with which gradients."""

    def __init__(self, optimizer: Optimizer, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []  # of each window, what is looked at left out
        self.differences: list[Difference] = []
        self._judge: Callable[[int], Difference] | None = None
        self._since = 0.0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def judge(self, model: nn.Module, optimizer: Optimizer, reference: Reference, order: Sequence[int]) -> None:
        def judged(number: int) -> Difference:
            divisor = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its own kernel
            found = (gradient if divisor is None else gradient / divisor for gradient in gradients_of(model))
            return difference(found, reference.gradients[order[number]])

        self._judge = judged

    def begin(self) -> None:
        self._since = self._now()

    def _before(self, *_: object) -> None:
        if self._judge is not None:
            now = self._now()
            self.differences.append(self._judge(len(self.differences)))
            self._since += self._now() - now

    def _after(self, *_: object) -> None:
        now = self._now()
        self.seconds.append(now - self._since)
        self._since = now

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass
class Bench:
    """One case: its problem and its reference, and the model that its compiled loops share."""

    problem: Problem
    reference: Reference
    seconds: float  # to time a loop for
    compiled: nn.Module | None = None

    def row(self, rival: Rival) -> Row:
        """Judge and time one loop. What it raises is its row: the others' are not to be lost."""
        fresh(self.problem.device)
        before = reserved(self.problem.device)
        try:
            row = self._measured(rival)
        except Exception as error:
            traceback.print_exc()
            row = Row(name=rival.name, error=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        fresh(self.problem.device)
        note = "eager: no CUDA" if rival.has_graphs and self.problem.device != "cuda" and not row.error else ""
        return replace(row, reserved_before_gib=before, note=note)

    def _measured(self, rival: Rival) -> Row:
        case = self.problem.case
        order = (0, 1, 0) if rival.has_graphs else (0,) if case.section == "sweep" else (0, 1)
        differences, judged = self._judged(rival, order)
        worst = torch.tensor([each.error for each in differences], dtype=torch.float64).max().item()
        warm = case.windows if rival.has_graphs else 1
        seconds = self.seconds / 2 if case.section == "sweep" else self.seconds
        windows = min(max(math.ceil(seconds / judged[-1]), case.least), MOST_WINDOWS)
        taken, made, memory = self._timed(rival, warm + windows)
        speeds = [self.problem.tokens(index) / s for index, s in enumerate(taken)][warm:]
        speed, lower, upper = record.quartiles(speeds)
        return Row(
            name=rival.name,
            tokens_per_second=round(speed, 1),
            quartiles=(round(lower, 1), round(upper, 1)),
            windows=windows,
            reserved_gib=memory,
            micro_batches=round(made / len(taken), 2),
            first_window_seconds=round(judged[0], 3),
            gradient_error=worst,
            gradient_scale=round(max(differences, key=lambda each: abs(each.scale - 1)).scale, 6),
            exact=worst <= self.reference.allowed,
        )

    def _judged(self, rival: Rival, order: Sequence[int]) -> tuple[list[Difference], list[float]]:
        """Each window's gradient beside the reference, and its seconds. Nothing is learned: weights stay the same."""
        job = self._job(rival, learning_rate=0.0, max_norm=math.inf)
        watch = Watch(job.optimizer, job.device)
        watch.judge(job.model, job.optimizer, self.reference, order)
        run = rival.build(job)
        watch.begin()
        run(self.problem.data(order))
        if (steps := len(watch.differences)) != len(order):
            raise RuntimeError(f"{len(order)} windows were handed over, and {steps} optimizer steps taken")
        return watch.differences, watch.seconds

    def _timed(self, rival: Rival, windows: int) -> tuple[list[float], int, float | None]:
        """Seconds of each window, micro-batches of all, and the most memory."""
        job = self._job(rival, learning_rate=1e-4, max_norm=MAX_NORM)
        fresh(job.device)
        if job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        watch = Watch(job.optimizer, job.device)
        run = rival.build(job)
        watch.begin()
        made = run(self.problem.data(range(windows)))
        return watch.seconds, made, most_reserved(self.problem.device)

    def _job(self, rival: Rival, learning_rate: float, max_norm: float) -> Job:
        case = self.problem.case
        model = self._compiled() if rival.is_compiled else self.problem.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=learning_rate, fused=True)
        return Job(
            case=case,
            device=self.problem.device,
            model=model,
            optimizer=optimizer,
            max_norm=max_norm,
            micro_batch=case.micro_batch,
            steps=case.micro_batches,
        )

    def _compiled(self) -> nn.Module:
        """The shared one, with its first weights again."""
        if self.compiled is None:
            self.compiled = self.problem.compiled()
            return self.compiled
        with torch.no_grad():
            for own, first in zip(self.compiled.parameters(), self.problem.model().parameters(), strict=True):
                own.copy_(first)
                own.grad = None
        return self.compiled

    def in_turns(self, own: Rival, other: Rival) -> tuple[float, float, float]:
        """The speed of one loop over that of another, window by window: median and quartiles."""
        fresh(self.problem.device)
        watches, runs = [], []
        for rival in (own, other):
            job = self._job(rival, learning_rate=1e-4, max_norm=MAX_NORM)
            watches.append(Watch(job.optimizer, job.device))
            runs.append(rival.build(job))

        def go(which: int, window: int) -> None:
            watches[which].begin()
            runs[which](self.problem.data([window]))

        rounds = 0
        began = time.perf_counter()
        while (
            rounds < self.problem.case.windows + 3 * self.problem.case.least
            or time.perf_counter() - began < 4 * self.seconds
        ):
            for which in (0, 1) if rounds % 2 else (1, 0):
                go(which, rounds)
            rounds += 1
        pairs = zip(watches[0].seconds, watches[1].seconds, strict=True)
        ratios = [theirs / mine for mine, theirs in pairs][self.problem.case.windows :]  # each is new once
        median, lower, upper = record.quartiles(ratios)
        return round(median, 4), round(lower, 4), round(upper, 4)


def fresh(device: str) -> None:
    """Nothing of a loop is left for the next one."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # small, but in the midst of large blocks, which could not be given back
        torch.cuda.empty_cache()


def reserved(device: str) -> float | None:
    return round(torch.cuda.memory_reserved() / 2**30, 3) if device == "cuda" else None


def most_reserved(device: str) -> float | None:
    return round(torch.cuda.max_memory_reserved() / 2**30, 3) if device == "cuda" else None


# ---------------------------------------------------------------------------------------------------------------------
# Reporting.

HEADINGS = ["loop", "tokens/s", "quartiles", "/ Accelerate", "reserved", "micro-batches", "gradient"]
WIDTHS = [32, 9, 19, 12, 10, 13, 14]


def line(cells: Sequence[str]) -> str:
    """Printed at once: how wide the later rows are is not known yet."""
    first, *others = zip(cells, WIDTHS, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def cells(row: Row) -> list[str]:
    if row.error:
        return [row.name, "failed", "", "", "", "", row.error]
    assert row.tokens_per_second is not None
    assert row.quartiles is not None
    return [
        row.name,
        f"{row.tokens_per_second:,.0f}",
        " - ".join(f"{quartile:,.0f}" for quartile in row.quartiles),
        "" if row.over_accelerate is None else f"{row.over_accelerate:.2f}x",
        "" if row.reserved_gib is None else f"{row.reserved_gib:.2f} GiB",
        f"{row.micro_batches:g}",
        f"{'ok' if row.exact else 'WRONG'}, {row.gradient_error:.1e}",
    ]


def targets_of(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, with what was found; only of loops that ran. With a wrong gradient nothing is reached."""
    found = []
    for case in cases:
        rows = {row["name"]: row for row in case["rows"] if not row["error"]}

        def add(row: dict[str, Any], what: str, bound: str, wanted: float, ratio: float | None) -> None:
            if ratio is None:
                return
            holds = ratio >= wanted if bound == "at_least" else ratio <= wanted
            name = f"{case['name']}: {row['name']}, {what}"  # noqa: B023
            found.append({"name": name, bound: wanted, "found": ratio, "reached": holds and row["exact"]})

        wanted_of = {} if case["section"] == "sweep" else TARGETS.get(case["name"], {})
        for name, row in rows.items():
            in_turns = {row["in_turns_with"]: row["speed_in_turns"][0]} if row["speed_in_turns"] else {}
            if name in wanted_of:
                found_of_it = in_turns.get(ACCELERATE, row["over_accelerate"])
                add(row, "speed over Accelerate's", "at_least", wanted_of[name], found_of_it)
            if HAND in in_turns:
                time_of_it = round(1 / in_turns[HAND], 4)
                add(row, "time over the hand-written loop's", "at_most", TIME_OF_HAND_WRITTEN, time_of_it)
            eager = rows.get({GRAPHS: EAGER, COMPILED_GRAPHS: COMPILED}.get(name, ""))
            if eager is not None and eager["reserved_gib"]:
                ratio = round(row["reserved_gib"] / eager["reserved_gib"], 3)
                add(row, f"memory over {eager['name']}'s", "at_most", MEMORY_OF_EAGER, ratio)
    return found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for."""

    sections: list[str]
    rivals: list[str]  # all of them where empty
    seconds: float
    is_tiny: bool
    device: str
    output: Path

    @property
    def cases(self) -> list[Case]:
        return [case for case in (TINY if self.is_tiny else CASES) if case.section in self.sections]

    def rivals_of(self, case: Case) -> list[Rival]:
        return [rival for rival in rivals_of(case) if not self.rivals or rival.name in self.rivals]


def measure(settings: Settings, result: dict[str, Any]) -> None:
    """Case by case, row by row: what has been found is on the screen and in the file."""
    began = time.perf_counter()
    for case in settings.cases:
        problem = Problem(case, settings.device)
        reference = reference_for(problem, (0, 1))
        bench = Bench(problem=problem, reference=reference, seconds=settings.seconds)
        described = describe(problem, reference)
        result["cases"].append(described)
        print(f"\n{case.name}: {described['tokens_a_window']:,} tokens a window, {case.section}", flush=True)
        print(line(HEADINGS), flush=True)
        rows: dict[str, Row] = {}
        for rival in settings.rivals_of(case):
            row = bench.row(rival)
            base = rows.get(ACCELERATE, row if rival.name == ACCELERATE else Row(name=""))
            if row.tokens_per_second and base.tokens_per_second:
                row = replace(row, over_accelerate=round(row.tokens_per_second / base.tokens_per_second, 3))
            other = {"fixed": HAND, "variable": ACCELERATE}.get(case.section)
            if rival.name == EAGER and other in rows and not row.error:
                in_turns = bench.in_turns(rival, next(each for each in RIVALS if each.name == other))
                row = replace(row, in_turns_with=other, speed_in_turns=in_turns)
            rows[rival.name] = row
            print(line(cells(row)), row.note, flush=True)
            described["rows"] = [asdict(each) for each in rows.values()]
            result["targets"] = [] if settings.is_tiny else targets_of(result["cases"])
            result["seconds"] = round(time.perf_counter() - began)
            record.save(result, settings.output)
        bench.compiled = None
        torch._dynamo.reset()


def describe(problem: Problem, reference: Reference) -> dict[str, Any]:
    case = problem.case
    tokens = [problem.tokens(index) for index in range(case.windows)]
    return {
        "name": case.name,
        "section": case.section,
        "model": case.model,
        "parameters": sum(parameter.numel() for parameter in problem.model().parameters()),
        "micro_batch": case.micro_batch,
        "length": case.length,
        "micro_batches": case.micro_batches,
        "samples": case.samples,
        "tokens_a_window": round(sum(tokens) / len(tokens)),
        "largest_micro_batch": case.budget,
        "gradient_error_allowed": reference.allowed,
        "rows": [],
    }


def parsed() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [rival.name for rival in RIVALS]
    parser.add_argument("--only", choices=("fixed", "variable", "sweep"), action="append", help="this section")
    parser.add_argument(
        "--rivals", nargs="+", choices=names, default=[], metavar="NAME", help=f"of: {'; '.join(names)}"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="to time a loop for, at least (default: 2)")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few windows: does it run?")
    record.add_output(parser, "gpu")
    arguments = parser.parse_args()
    output = arguments.output
    if arguments.tiny and output.name == "gpu.json":
        output = output.with_name("gpu_tiny.json")
    return Settings(
        sections=arguments.only or ["fixed", "variable", "sweep"],
        rivals=arguments.rivals,
        seconds=0.0 if arguments.tiny else arguments.seconds,
        is_tiny=arguments.tiny,
        device="cuda" if torch.cuda.is_available() else "cpu",
        output=output,
    )


def load_peers() -> None:
    """All of them before anything is timed: what imports leave behind makes every later collection of garbage slow."""
    for peer in ("accelerate", "lightning.fabric", "transformers.models.llama", "transformers.trainer"):
        importlib.import_module(peer)
    gc.collect()
    gc.freeze()


def main() -> int:
    settings = parsed()
    if settings.device == "cpu" and not settings.is_tiny:
        print("It needs a CUDA device; --tiny shows that it runs.", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")  # the peers' advice
    for peer in ("lightning", "transformers", "accelerate"):
        logging.getLogger(peer).setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("highest")  # no TF32 in the reference; under autocast nothing is float32
    try:
        load_peers()
        head = record.stamp(
            "tokens a second and memory, every loop with a model of its own, one after the other in one process",
            *("torch", "transformers", "accelerate", "lightning"),
        )
    except ImportError as missing:
        print(f"{missing}. The peers come with extras: pip install -e '.[bench,train]'", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        **head,
        "device": settings.device,
        "processor": record.machine(settings.device),
        "host": record.machine(),
        "threads": torch.get_num_threads(),
        "precision": "bf16 autocast, float32 weights" if settings.device == "cuda" else "float32",
        "attention": "torch's scaled_dot_product_attention, causal, without a mask",
        "optimizer": f"fused AdamW, gradients clipped at {MAX_NORM}",
        "settings": {
            "seconds": settings.seconds,
            "is_tiny": settings.is_tiny,
            "median_length": MEDIAN_LENGTH,
            "spread": SPREAD,
        },
        "seconds": 0,
        "cases": [],
        "targets": [],
    }
    print(f"{result['processor']}; {record.in_words(result['versions'])}")
    measure(settings, result)
    print()
    for each in result["targets"]:
        bound = f"at least {each['at_least']}" if "at_least" in each else f"at most {each['at_most']}"
        print(f"{'reached' if each['reached'] else 'MISSED '}  {each['name']}: {bound}, found {each['found']}")
    print(f"Written to {settings.output}, after {result['seconds']} s")
    return 0 if all(row["exact"] for case in result["cases"] for row in case["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
