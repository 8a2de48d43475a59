"""Real tokens per second on samples of very different lengths: functions of the Python standard library.

A small Llama trains on windows of 128 functions, drawn at random from the sources of the running interpreter. Three
loops take the same optimizer steps on the same windows:

- by_count: `MacroStep` with micro-batches of some samples in their order, padded to the longest of each;
- by_tokens: `MacroStep` with micro-batches that are, with padding, at most as large as the largest of `by_count`;
- Accelerate: its loop for samples of variable size, with the same micro-batches as `by_count`. Tokens are counted after
  the shift (the documented loop counts before it, and its gradient is wrong by several per cent).

All run in one process. In every round each of them trains on one window, in an order that rotates from round to round.
Ratios are computed within a round, so that slow phases of the machine affect all. A real token is a token of a sample;
padding costs time, but does not count. The gradient that every loop passes to its optimizer for one window is compared,
in float64, with the gradient of its samples one by one, without any padding.

    python benchmarks/variable_length.py                  # prints a table, writes results/variable_length.json
    python benchmarks/variable_length.py --device cuda    # the same there
    python benchmarks/variable_length.py --quick          # two rounds of a smaller model: does it run?
"""

# mypy: untyped-calls-exclude="torch,transformers"
import argparse
import ast
import gc
import os
import random
import statistics
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from macrobatch import MacroStep, by_count, by_tokens
from macrobatch.losses import causal_lm_loss

IGNORED = -100
PADDING, BEGIN, END = range(3)  # the first tokens of the vocabulary
TOLERANCE = 1e-6  # of gradients in float64: Llama always normalises in float32
TARGET = 1.8  # wanted real tokens per second, relative to fixed micro-batches
FIXED, BY_TOKENS, ACCELERATE = "by_count", "by_tokens", "Accelerate"

Batch = dict[str, Tensor]
Gradients = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the run."""

    samples: int = 128  # per window
    micro_batch: int  # samples in a fixed micro-batch
    longest: int  # tokens; longer functions are cut off
    windows: int  # number of different windows, which the rounds use in turn
    rounds: int
    vocabulary: int
    width: int
    layers: int
    head_width: int = 32
    device: str

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.windows, self.layers, self.width) < 1 or min(self.rounds, self.longest) < 2:
            raise SystemExit("sizes must be at least 1, --rounds and --longest at least 2.")
        if self.samples % self.micro_batch:
            raise SystemExit(f"--micro-batch {self.micro_batch} does not divide the window of {self.samples} samples.")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One row: `run` trains on the window with this number."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians and quartiles over the rounds. Ratios are computed within a round."""

    name: str
    tokens_per_second: float
    quartiles: tuple[float, float]
    over_fixed: float  # speed relative to `by_count`
    over_fixed_quartiles: tuple[float, float]
    micro_batches: float  # per window, on average
    padded_to_real: float  # computed tokens divided by those that count
    largest: int  # tokens of the largest micro-batch, with its padding
    gradient_error: float

    @property
    def exact(self) -> bool:
        return self.gradient_error <= TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# The samples.


def library_sources() -> Iterator[str]:
    """Every module of the standard library, except for its tests and for installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {"test", "tests", "idle_test", "lib2to3", "site-packages", "__pycache__"})
        for name in sorted(files):
            if name.endswith(".py"):
                yield (Path(folder) / name).read_text(encoding="utf-8", errors="ignore")


def functions_in(source: str) -> Iterator[str]:
    """The functions and methods of a module, each with its nested functions, without indentation."""
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except SyntaxError:
        return
    lines = source.splitlines(keepends=True)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
        else:
            pending += ast.iter_child_nodes(node)


def tokenised(texts: Sequence[str], settings: Settings) -> list[Tensor]:
    """Each text as tokens of a byte-pair encoding that is trained on all of them."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=["<padding>", "<begin>", "<end>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    encodings = tokenizer.encode_batch(texts)
    return [torch.tensor([BEGIN, *encoding.ids, END])[: settings.longest] for encoding in encodings]


def make_windows(settings: Settings) -> tuple[list[list[Tensor]], int]:
    """The windows, and the number of functions that they are drawn from. Both depend only on the version of Python."""
    functions = [function for source in library_sources() for function in functions_in(source)]
    drawn = random.Random(0).sample(functions, settings.samples * settings.windows)
    samples = tokenised(drawn, settings)
    starts = range(0, len(samples), settings.samples)
    return [samples[start : start + settings.samples] for start in starts], len(functions)


def collate(samples: Sequence[Tensor], device: str | torch.device = "cpu") -> Batch:
    """A micro-batch, padded to the longest of its samples."""
    tokens = nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=PADDING)
    lengths = torch.tensor([len(sample) for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}


# ---------------------------------------------------------------------------------------------------------------------
# The loops. Each is written as its library's documentation recommends.


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The same weights, optimizer and windows for every loop."""

    settings: Settings
    windows: list[list[Tensor]]
    budget: int  # padded tokens of the largest fixed micro-batch of all windows
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = self.settings
        config = LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.width,
            intermediate_size=settings.width * 8 // 3,
            num_hidden_layers=settings.layers,
            num_attention_heads=max(settings.width // settings.head_width, 1),
            max_position_embeddings=settings.longest,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=BEGIN,
            eos_token_id=END,
            pad_token_id=PADDING,
        )
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
        return model.to(settings.device, self.dtype)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def macro_step(problem: Problem, name: str, micro: Any) -> Loop:
    model = problem.model()
    optimizer = problem.optimizer(model)
    device = problem.settings.device
    train = MacroStep(model, optimizer, causal_lm_loss, micro=micro, collate=lambda samples: collate(samples, device))
    return Loop(name=name, model=model, optimizer=optimizer, run=lambda index: void(train(problem.windows[index])))


def void(_result: object) -> None:
    """Ignore the loss, so that no loop reads any number from the device."""


def accelerate(problem: Problem) -> Loop:
    """Accelerate's accumulation "with training samples of variable size", with a correct count of tokens."""
    from accelerate import Accelerator

    settings = problem.settings
    steps = settings.samples // settings.micro_batch
    accelerator = Accelerator(cpu=settings.device == "cpu", gradient_accumulation_steps=steps)
    plain_model = problem.model()
    plain_optimizer = problem.optimizer(plain_model)
    model, optimizer = accelerator.prepare(plain_model, plain_optimizer)
    loaders = [
        accelerator.prepare(DataLoader(window, batch_size=settings.micro_batch, collate_fn=collate))  # type: ignore[arg-type]
        for window in problem.windows
    ]

    def labels_of(batch: Batch) -> Tensor:
        return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)[:, 1:]

    def run(index: int) -> None:
        batches = list(loaders[index])
        items = torch.stack([(labels_of(batch) != IGNORED).sum() for batch in batches]).sum()
        items = accelerator.gather(items).sum().item()
        for batch in batches:
            logits = model(**batch).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels_of(batch).flatten(), reduction="sum")
            accelerator.backward(loss * steps / items)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(name=ACCELERATE, model=plain_model, optimizer=plain_optimizer, run=run)


def all_loops(problem: Problem) -> list[Loop]:
    return [
        macro_step(problem, FIXED, by_count(problem.settings.micro_batch)),
        macro_step(problem, BY_TOKENS, by_tokens(problem.budget, length=len)),
        accelerate(problem),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring.


def fixed_shapes(window: Sequence[Tensor], size: int) -> list[tuple[int, int]]:
    """The number of samples and the longest length of each micro-batch."""
    parts = [window[start : start + size] for start in range(0, len(window), size)]
    return [(len(part), max(map(len, part))) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one loop."""

    seconds: list[float]  # one number per round
    padded: list[int]  # tokens with padding, one number per micro-batch


def measure(loops: Sequence[Loop], settings: Settings, tick: Callable[[], None]) -> dict[str, Measured]:
    """The measurements of each loop, after a warm-up on one window."""
    measured = {loop.name: Measured(seconds=[], padded=[]) for loop in loops}
    for loop in loops:
        loop.run(0)
        loop.model.register_forward_pre_hook(partial(note_size, measured[loop.name].padded), with_kwargs=True)
        tick()
    gc.collect()
    gc.freeze()  # objects of the peers' imports would slow down every later collection
    for round_number in range(settings.rounds):
        first = round_number % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            synchronise(settings.device)
            begin = time.perf_counter()
            loop.run(round_number % settings.windows)
            synchronise(settings.device)
            measured[loop.name].seconds.append(time.perf_counter() - begin)
            tick()
    return measured


def note_size(padded: list[int], _model: nn.Module, _args: object, kwargs: dict[str, Tensor]) -> None:
    padded.append(kwargs["input_ids"].numel())


def synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def reference_gradients(problem: Problem) -> Gradients:
    """The gradients of the first window: of the mean over its tokens, sample by sample, without padding."""
    model, items = problem.model(), 0
    for sample in problem.windows[0]:
        tokens = sample[None].to(problem.settings.device)
        logits = model(input_ids=tokens).logits[0, :-1]
        F.cross_entropy(logits, tokens[0, 1:], reduction="sum").backward()
        items += len(sample) - 1
    return [gradient / items for gradient in gradients_of(model)]


def gradients_of(model: nn.Module) -> Gradients:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def gradient_error(loop: Loop, expected: Gradients) -> float:
    """The error of the loop's gradients in the first window: max |difference| / max |expected|."""
    found: list[Gradients] = []
    hook = loop.optimizer.register_step_pre_hook(lambda *_: found.append(gradients_of(loop.model)))
    loop.run(0)
    hook.remove()
    (gradients,) = found
    difference = max(float((f - e).abs().max()) for f, e in zip(gradients, expected, strict=True))
    return difference / max(float(e.abs().max()) for e in expected)


def evaluate(problem: Problem, measured: dict[str, Measured], errors: dict[str, float]) -> list[Figures]:
    settings = problem.settings
    real = [sum(map(len, problem.windows[number % settings.windows])) for number in range(settings.rounds)]
    rows = []
    for name, own in measured.items():
        speed, *speeds = record.quartiles([tokens / taken for tokens, taken in zip(real, own.seconds, strict=True)])
        pairs = zip(measured[FIXED].seconds, own.seconds, strict=True)
        ratio, *ratios = record.quartiles([fixed / taken for fixed, taken in pairs])
        rows.append(
            Figures(
                name=name,
                tokens_per_second=round(speed, 1),
                quartiles=(round(speeds[0], 1), round(speeds[1], 1)),
                over_fixed=round(ratio, 3),
                over_fixed_quartiles=(round(ratios[0], 3), round(ratios[1], 3)),
                micro_batches=round(len(own.padded) / settings.rounds, 2),
                padded_to_real=round(sum(own.padded) / sum(real), 3),
                largest=max(own.padded),
                gradient_error=errors[name],
            )
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Reporting.


def report(problem: Problem, rows: Sequence[Figures], functions: int) -> dict[str, Any]:
    found = next(row.over_fixed for row in rows if row.name == BY_TOKENS)
    real = [sum(map(len, window)) for window in problem.windows]
    what = "real tokens a second on functions of the standard library, all loops interleaved in one process"
    return {
        **record.stamp(what, "torch", "transformers", "tokenizers", "accelerate"),
        "device": problem.settings.device,
        "processor": record.machine(problem.settings.device),
        "threads": torch.get_num_threads(),
        "model": f"Llama, {sum(p.numel() for p in problem.model().parameters()):,} parameters, float32, fused AdamW",
        "settings": asdict(problem.settings),
        "functions": functions,
        "real_tokens_a_window": [min(real), round(statistics.mean(real)), max(real)],
        "budget": problem.budget,
        "rows": [{**asdict(row), "exact": row.exact} for row in rows],
        "target": {"at_least_over_fixed": TARGET, "found": found, "reached": found >= TARGET},
    }


def cells(row: Figures) -> list[str]:
    """A row of the printed table."""
    lower, upper = row.quartiles
    return [
        row.name,
        f"{row.tokens_per_second:,.0f}",
        f"{lower:,.0f} - {upper:,.0f}",
        f"{row.over_fixed:.2f}",
        f"{row.micro_batches:.1f}",
        f"{row.padded_to_real:.2f}",
        f"{'' if row.exact else 'WRONG '}{row.gradient_error:.0e}",
    ]


def parsed_settings() -> tuple[Settings, Path]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a fixed micro-batch (default: 8)")
    parser.add_argument("--longest", type=int, default=512, help="tokens at which functions are cut (default: 512)")
    parser.add_argument("--rounds", type=int, default=8, help="windows that each loop trains on (default: 8)")
    parser.add_argument("--windows", type=int, default=4, help="different windows (default: 4)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    parser.add_argument("--quick", action="store_true", help="two rounds of a smaller model")
    record.add_output(parser, "variable_length")
    arguments = parser.parse_args()
    quick = arguments.quick
    settings = Settings(
        micro_batch=arguments.micro_batch,
        longest=256 if quick else arguments.longest,
        windows=2 if quick else arguments.windows,
        rounds=2 if quick else arguments.rounds,
        vocabulary=512 if quick else 4096,
        width=64 if quick else arguments.width,
        layers=2 if quick else arguments.layers,
        device=arguments.device,
    )
    return settings, arguments.output


def main() -> int:
    settings, output = parsed_settings()
    warnings.filterwarnings("ignore")  # of the peers
    torch.set_float32_matmul_precision("high")
    try:
        windows, functions = make_windows(settings)
        budget = max(n * longest for w in windows for n, longest in fixed_shapes(w, settings.micro_batch))
        problem = Problem(settings=settings, windows=windows, budget=budget)
        exact_problem = Problem(settings=settings, windows=windows[:1], budget=budget, dtype=torch.float64)
        loops = all_loops(problem)
    except ImportError as missing:
        print(f"{missing}. It comes with an extra: pip install -e '.[bench,train]'", file=sys.stderr)
        return 2

    with record.progress("measuring", 1 + (settings.rounds + 2) * len(loops)) as tick:
        expected = reference_gradients(exact_problem)
        tick()
        errors = {}
        for loop in all_loops(exact_problem):
            errors[loop.name] = gradient_error(loop, expected)
            tick()
        measured = measure(loops, settings, tick)
    rows = evaluate(problem, measured, errors)
    result = report(problem, rows, functions)

    title = f"Real tokens a second (windows of {settings.samples} functions, {settings.rounds} rounds)"
    where = f"{result['model']}; {result['processor']}; {record.in_words(result['versions'])}"
    columns = "ratio: to by_count; micro: micro-batches a window; padding: tokens computed / real; gradient: its error"
    caption = f"{columns}. No micro-batch above {budget:,} tokens with its padding. {where}"
    headings = ["loop", "tokens/s", "quartiles", "ratio", "micro", "padding", "gradient"]
    record.show(title, headings, list(map(cells, rows)), caption)
    outcome = "reached" if result["target"]["reached"] else "missed"
    print(f"Target, at least {TARGET} times the fixed micro-batches: {outcome} ({result['target']['found']:.2f}).")

    record.save(result, output)
    print(f"Written to {output}")
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
