"""Planted mistakes: each is found, and the first cause that is named is the right one."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import loops, reference
from harness.joint import CONTRAST, Towers
from harness.joint import batch_of as pairs_of
from harness.joint_loops import openclip
from harness.loops import (
    UNEQUAL,
    Centred,
    Forgetful,
    Loop,
    Perceptron,
    Statistics,
    TermLoop,
    batch_of,
    by_items,
    cross_entropy,
    cut,
    loss_fn,
    multiplied_by_a_hook,
    next_token_fn,
    next_token_loss,
    on_sequences,
    pieces,
    regression,
    sequences,
    squared_error,
    term_shares,
    two_terms,
)
from harness.peers import accelerate_loop, accelerate_tokens, accelerator, all_labels, lightning_loop, loader_of
from harness.reference import IGNORED, VOCABULARY, WIDTH, Attention, Batch, mean_loss, sum_loss
from macrobatch import Accumulator, causal_lm_loss, verify
from macrobatch.errors import BatchError
from macrobatch.verify import Report

TWENTY_UNEQUAL = batch_of(items=UNEQUAL)  # in micro-batches of 5, one window of 4


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A step that is wrong, and its causes, the first of which must be named first."""

    causes: tuple[str, ...]
    step: Callable[[nn.Module, Any], None] | None = None  # None: a MacroStep, which cannot help what the others do
    batch: Any = TWENTY_UNEQUAL
    loss_fn: Callable[[nn.Module, Any], Any] = loss_fn
    make: Callable[[], nn.Module] = Attention
    dtype: torch.dtype = torch.float64
    before: Callable[[nn.Module], object] = lambda model: model.eval()
    windows: int | None = None
    joint: Callable[[Any, Any], Any] | None = None

    def verified(self) -> Report:
        options: Any = {"step": self.step, "windows": self.windows, "joint": self.joint}
        return verify(self.model(), self.loss_fn, self.batch, **options)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().to(self.dtype)
        self.before(model)
        return model


# --------------------------------------------------------------------------------------------- loops that are wrong


def always(number: float) -> Callable[[list[Batch], Batch], float]:
    return lambda window, micro: number


def by_labels(window: list[Batch], micro: Batch) -> float:
    """For summed losses: divided by all labels of the window, before any shift."""
    return 1 / sum(other.items for other in window)


def by_samples(window: list[Batch], micro: Batch) -> float:
    return len(micro.x) / sum(len(other.x) for other in window)


def counted_before_the_shift(model: nn.Module, batch: Batch) -> None:
    """The right library, told the wrong items: it refuses them itself."""
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=4)
    for micro in acc.batches(list(pieces(batch, 5))):
        acc.backward(next_token_loss(model, micro), items=micro.items)
        acc.step()


def losses_added_first(model: nn.Module, batch: Batch) -> None:
    """No loop over backwards at all, and yet a mean of means."""
    sum(mean_loss(model, micro) / 4 for micro in pieces(batch, 5)).backward()


def in_bf16_buffers(model: nn.Module, batch: Batch) -> None:
    buffers = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()}
    for micro in pieces(batch, 5):
        model.zero_grad()
        (mean_loss(model, micro) * by_items([batch], micro)).backward()
        for parameter, buffer in buffers.items():
            buffer += parameter.grad
    for parameter, buffer in buffers.items():
        parameter.grad = buffer.to(parameter.dtype)


def with_a_detached_embedding(model: nn.Module, batch: Batch) -> None:
    for micro in pieces(batch, 5):
        h = model.embedding(micro.x).detach()
        scores = model.query(h) @ model.key(h).transpose(-1, -2) / WIDTH**0.5
        logits = model.head(model.norm(h + scores.softmax(-1) @ model.value(h)))
        loss = F.cross_entropy(logits.flatten(0, 1), micro.y.flatten(), ignore_index=IGNORED)
        (loss * by_items([batch], micro)).backward()


def of_a_copy(model: nn.Module, batch: Batch) -> None:
    """The optimizer was made of what the model was before."""
    old = copy.deepcopy(model)
    Loop(weight=by_items, make_optimizer=lambda _: torch.optim.SGD(old.parameters(), 0.1))(model, batch)


def cleared_before_the_step(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for micro in pieces(batch, 5):
        (mean_loss(model, micro) * by_items([batch], micro)).backward()
    optimizer.zero_grad()
    optimizer.step()


def scaled_gradients(model: nn.Module, batch: Batch) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler]:
    """One window of them, with what is to step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for micro in pieces(batch, 5):
        scaler.scale(mean_loss(model, micro) * by_items([batch], micro)).backward()
    return torch.optim.SGD(model.parameters(), 0.1), scaler


def never_unscaled(model: nn.Module, batch: Batch) -> None:
    optimizer, _ = scaled_gradients(model, batch)
    optimizer.step()
    optimizer.zero_grad()


def clipped_while_scaled(model: nn.Module, batch: Batch) -> None:
    """Its own norm is far below 1, so that clipping should do nothing."""
    optimizer, scaler = scaled_gradients(model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def scaled_and_clipped_but_never_cleared(model: nn.Module, batch: Batch) -> None:
    """What it leaves is 100,000 times smaller than what it is added to."""
    optimizer, scaler = scaled_gradients(model, batch)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()


def with_a_norm_of_five_hundredths(model: nn.Module, batch: Batch) -> None:
    """But nobody made it smaller: it came out of the backward like that."""
    mean_loss(model, batch).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    model.zero_grad()
    (mean_loss(model, batch) * 0.05 / norm).backward()


def smoothed(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(batch.x).flatten(0, 1), batch.y.flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=0.01)


def masked_mean(model: nn.Module, batch: Batch) -> Tensor:
    """NaN where there are no items, and so is its gradient."""
    return reference.masked_mean(model, batch, batch.items)


def interleaved(batch: Batch, size: int) -> list[Batch]:
    """Every fourth sample: all have items."""
    return [Batch(batch.x[start::4], batch.y[start::4]) for start in range(4)]


def without_items_in_its_first_half() -> Batch:
    batch = batch_of(items=UNEQUAL)
    batch.y[:10] = IGNORED
    return batch


def mean_over_nothing(model: nn.Module, batch: Batch) -> None:
    """One micro-batch has no items, and a mean of its own making."""
    for micro in pieces(batch, 5):
        (masked_mean(model, micro) / 4).backward()


def with_an_empty_micro_batch() -> Batch:
    batch = batch_of(items=UNEQUAL)
    batch.y[5:10] = IGNORED
    return batch


def twice_the_last(batch: Batch, size: int) -> list[Batch]:
    """A sampler that fills up the last micro-batch from the first."""
    micro_batches = list(pieces(batch, size))
    missing = size - len(micro_batches[-1].x)
    last, first = micro_batches[-1], micro_batches[0]
    return [*micro_batches[:-1], Batch(torch.cat([last.x, first.x[:missing]]), torch.cat([last.y, first.y[:missing]]))]


def all_but_the_last(batch: Batch, size: int) -> list[Batch]:
    return [micro for micro in pieces(batch, size) if len(micro.x) == size]


def divided_below_the_limit(model: nn.Module, batch: Batch) -> None:
    """Nothing is clipped, but would be if the gradient were twice as large."""
    micro_batches = list(pieces(batch, 5))
    for micro in micro_batches:
        (loss_fn(model, micro)[0] * by_items(micro_batches, micro)).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(4 / 5)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    nn.utils.clip_grad_norm_(model.parameters(), LIMITS.setdefault("below", 1.1 * norm.item()))
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


LIMITS: dict[str, float] = {}  # of the first run: the step is run again, with doubled gradients


def one_halved(model: nn.Module, batch: Batch) -> None:
    """It is smaller than expected, and all others are as they should be: but nothing has clipped it."""
    micro_batches = list(pieces(batch, 5))
    for micro in micro_batches:
        (loss_fn(model, micro)[0] * by_items(micro_batches, micro)).backward()
    next(model.parameters()).grad.mul_(0.5)
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


# ------------------------------------------------------------------------------------------------- clipped too early


def clipped_each_time(
    clip: Callable[[nn.Module], object], weight: Any = by_items
) -> Callable[[nn.Module, Batch], None]:
    """In windows of 4, with something done after every backward that belongs before the optimizer's step."""

    def step(model: nn.Module, batch: Batch) -> None:
        optimizer, micro_batches = torch.optim.SGD(model.parameters(), 0.1), list(pieces(batch, 5))
        for index, micro in enumerate(micro_batches):
            window = micro_batches[index - index % 4 :][:4]
            (mean_loss(model, micro) * weight(window, micro)).backward()
            clip(model)
            if micro is window[-1]:
                optimizer.step()
                optimizer.zero_grad()

    return step


def by_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.003)


def by_four(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad /= 4


def now_and_then(model: nn.Module) -> None:
    """Only gradients that are large, as those of later micro-batches are here."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def with_clamping_hooks(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))


def accelerate_clipping(model: nn.Module, batch: Batch) -> None:
    """Without `if accelerator.sync_gradients`."""
    with accelerator() as theirs:
        model, optimizer, loader = theirs.prepare(model, torch.optim.AdamW(model.parameters()), loader_of(batch))
        for x, y in loader:
            with theirs.accumulate(model):
                theirs.backward(mean_loss(model, Batch(x, y)))
                theirs.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------- labels and padding


def summed_without_labels(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    return cross_entropy(reduction="sum")(model, batch | {"labels": labels})


def counting_positions(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Sorted by length and trimmed; every position that is left counts as an item."""
    order = batch["attention_mask"].sum(1).argsort()
    micro_batches = cut({key: tensor[order] for key, tensor in batch.items()}, 5)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), steps=4)
    for micro in acc.batches(micro_batches):
        longest = int(micro["attention_mask"].sum(1).max())
        micro = {key: tensor[:, :longest] for key, tensor in micro.items()}
        acc.backward(cross_entropy()(model, micro)[0], items=micro["labels"].numel())
        acc.step()


def per_position() -> nn.Module:
    """Padding may be trimmed: no position sees another."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))


def backward_before(model: nn.Module) -> None:
    mean_loss(model, batch_of(3, seed=7)).backward()


# ------------------------------------------------------------------------------------------------------ the catalogue

TRAINING = nn.Module.train
TEN = batch_of(50)  # micro-batches of 5, all with as many items; in windows of 4 the last has 2
TEN_UNEQUAL = batch_of(50, items=UNEQUAL)


def term_mistake(cause, weights):
    """A loop over two terms, one of which has other weights."""
    step = TermLoop(weights=lambda window, micro: term_shares(window, micro) | weights(window, micro))
    return Mistake(causes=(cause,), loss_fn=two_terms, step=step)


MISTAKES = {
    # a constant factor
    "undivided": Mistake(causes=("not divided",), step=Loop(weight=always(1.0)), batch=batch_of()),
    "divided twice": Mistake(causes=("divided twice",), step=Loop(weight=always(1 / 16)), batch=batch_of()),
    "sums undivided": Mistake(causes=("not divided",), step=Loop(loss=sum_loss, weight=always(1.0))),
    "short last window": Mistake(causes=("short window",), step=Loop(weight=always(1 / 4)), batch=TEN),
    "one short window": Mistake(causes=("short window",), step=Loop(weight=always(1 / 4)), batch=batch_of(15)),
    "a step each micro-batch": Mistake(
        causes=("short window",), step=Loop(weight=always(1 / 4), closes=lambda *_: True), batch=batch_of()
    ),
    "scaler forgotten": Mistake(causes=("loss scale",), step=never_unscaled, dtype=torch.float32),
    "a hook of the optimizer": Mistake(
        causes=("constant factor",), step=Loop(weight=by_items, make_optimizer=multiplied_by_a_hook(0.7135))
    ),
    "clipped while scaled": Mistake(
        causes=("clipped while scaled",), step=clipped_while_scaled, dtype=torch.float32, batch=batch_of()
    ),
    "a factor that looks like clipping": Mistake(
        causes=("constant factor",), step=with_a_norm_of_five_hundredths, batch=batch_of()
    ),
    "some other factor": Mistake(causes=("constant factor",), step=Loop(weight=always(0.7135)), batch=batch_of()),
    # weights
    "mean of means": Mistake(causes=("mean of means",), step=Loop()),
    "mean of means, clipped": Mistake(causes=("mean of means",), step=Loop(max_norm=0.05)),
    "mean of means, too small": Mistake(causes=("mean of means", "divided twice"), step=Loop(weight=always(1 / 16))),
    "mean of means, loss alone": Mistake(causes=("mean of means",), step=Loop(), loss_fn=mean_loss),
    "mean of means, float32": Mistake(causes=("mean of means",), step=Loop(), dtype=torch.float32),
    "mean of means, bf16": Mistake(
        causes=("mean of means",),
        step=Loop(size=4, steps=5),
        dtype=torch.bfloat16,
        batch=batch_of(items=UNEQUAL, seed=5),
    ),
    "mean of means and a short window": Mistake(
        causes=("mean of means", "short window"), step=Loop(weight=always(1 / 4)), batch=TEN_UNEQUAL
    ),
    "mean of means, and a half of the batch without items": Mistake(
        causes=("mean of means",),
        step=Loop(loss=masked_mean, cut=interleaved),
        loss_fn=masked_mean,
        batch=without_items_in_its_first_half(),
    ),
    "losses added first": Mistake(causes=("mean of means",), step=losses_added_first),
    "labels before the shift, sums": Mistake(
        causes=("labels counted before the shift",),
        step=Loop(loss=lambda model, batch: next_token_loss(model, batch, "sum"), weight=by_labels),
        loss_fn=next_token_fn,
    ),
    "labels before the shift, in loss_fn": Mistake(
        causes=("labels counted before the shift",),
        loss_fn=lambda model, batch: (next_token_loss(model, batch), batch.items),
    ),
    "items that are none": Mistake(
        causes=("items that do not fit the loss",),
        loss_fn=lambda model, batch: (mean_loss(model, batch), int(batch.x.sum())),
    ),
    "items that are the same for all": Mistake(
        causes=("items that do not fit the loss",), loss_fn=lambda model, batch: (mean_loss(model, batch), 1)
    ),
    "cleared inside": Mistake(
        causes=("gradients cleared inside the window",), step=Loop(weight=by_items, zero_each=True)
    ),
    "left out": Mistake(
        causes=("samples left out",),
        step=Loop(steps=9, weight=by_items, cut=all_but_the_last),
        batch=batch_of(22, items=UNEQUAL),
    ),
    "used twice": Mistake(
        causes=("samples used twice",),
        step=Loop(steps=9, weight=by_items, cut=twice_the_last),
        batch=batch_of(22, items=UNEQUAL),
    ),
    "weighed by samples": Mistake(
        causes=("items that do not fit the loss",),
        step=Loop(steps=9, weight=by_samples),
        batch=batch_of(22, items=UNEQUAL),
    ),
    # clipped between micro-batches
    "left over, scaled and clipped": Mistake(
        causes=("gradients left over",), step=scaled_and_clipped_but_never_cleared, dtype=torch.float32
    ),
    "clipped each time": Mistake(causes=("clip per micro-batch",), step=clipped_each_time(by_norm)),
    "clipped each time, float32": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(by_norm), dtype=torch.float32
    ),
    "clipped each time, several windows": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(by_norm), batch=TEN_UNEQUAL
    ),
    "clipped each time, a mean of means": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(by_norm, always(1 / 4))
    ),
    "clipped now and then": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(now_and_then, always(1.0))
    ),
    "clipped each time, by value": Mistake(causes=("clip per micro-batch",), step=clipped_each_time(by_value)),
    "clipped by hooks": Mistake(causes=("clip per micro-batch",), before=with_clamping_hooks),
    "clipped by hooks, float32": Mistake(
        causes=("clip per micro-batch",), before=with_clamping_hooks, step=Loop(weight=by_items), dtype=torch.float32
    ),
    "divided each time": Mistake(causes=("divided inside the window",), step=clipped_each_time(by_four, always(1.0))),
    "divided each time, float32": Mistake(
        causes=("divided inside the window",), step=clipped_each_time(by_four), dtype=torch.float32
    ),
    "Accelerate, clipped each time": Mistake(
        causes=("clip per micro-batch",), step=accelerate_clipping, batch=batch_of(40), dtype=torch.float32
    ),
    # labels
    "not shifted": Mistake(
        causes=("labels not shifted",), step=Loop(weight=by_items), loss_fn=next_token_fn, batch=batch_of()
    ),
    "not shifted, a mean of means": Mistake(causes=("labels not shifted",), step=Loop(), loss_fn=next_token_fn),
    "not shifted, sequences": Mistake(
        causes=("labels not shifted",),
        step=on_sequences(cross_entropy(shift=0)),
        loss_fn=cross_entropy(),
        batch=sequences(),
        dtype=torch.float32,
    ),
    "not shifted in loss_fn": Mistake(
        causes=("labels not shifted",),
        step=on_sequences(cross_entropy()),
        loss_fn=cross_entropy(shift=0),
        batch=sequences(),
    ),
    "shifted twice": Mistake(
        causes=("labels shifted twice",),
        step=on_sequences(cross_entropy(shift=2)),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "not shifted, and trained on padding": Mistake(
        causes=("labels not shifted", "trained on padding"),
        step=on_sequences(cross_entropy(shift=0, key="input_ids")),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    # padding
    "trained on padding": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(key="input_ids")),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "trained on padding, not shifted by anybody": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(shift=0, key="input_ids")),
        loss_fn=cross_entropy(shift=0),
        batch=sequences(),
        dtype=torch.float32,
    ),
    "trained on padding, a mean of means": Mistake(
        causes=("trained on padding",),
        step=Loop(loss=lambda model, batch: F.cross_entropy(model(batch.x).flatten(0, 1), batch.x.flatten())),
    ),
    "trained on padding that has a label of its own": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy()),
        loss_fn=cross_entropy(ignored=0),
        batch={key: tensor for key, tensor in sequences(masked=False).items() if key != "attention_mask"},
    ),
    "trained on padding by everybody": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy()),
        loss_fn=cross_entropy(),
        batch=sequences(masked=False),
    ),
    "trained on padding by everybody, by MacroStep": Mistake(
        causes=("trained on padding",), loss_fn=cross_entropy(), batch=sequences(masked=False), dtype=torch.float32
    ),
    "padding counted": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(reduction="sum"), divisor=lambda batch: batch["labels"].numel()),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "padding counted, after the shift": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(reduction="sum"), divisor=lambda batch: batch["labels"][:, 1:].numel()),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "the mask counted before the shift": Mistake(
        causes=("labels counted before the shift",),
        step=on_sequences(summed_without_labels, divisor=lambda batch: batch["attention_mask"].sum()),
        loss_fn=causal_lm_loss,
        batch={key: sequences()[key] for key in ("input_ids", "attention_mask")},
    ),
    # gradients that stay
    "left over, windows": Mistake(
        causes=("gradients left over",), step=Loop(weight=by_items, zero_after=False), batch=TEN_UNEQUAL
    ),
    "left over, calls": Mistake(causes=("gradients left over",), step=Loop(weight=by_items, zero_after=False)),
    "left over, from before": Mistake(
        causes=("gradients left over",), step=Loop(weight=by_items), before=backward_before
    ),
    # windows
    "never closed": Mistake(
        causes=("window never closed",),
        step=Loop(weight=by_items, closes=lambda index, count, steps: (index + 1) % steps == 0),
        batch=TEN_UNEQUAL,
    ),
    "closed twice": Mistake(
        causes=("window closed twice",), step=Loop(weight=by_items, step_times=2), batch=TEN_UNEQUAL
    ),
    "a step after every micro-batch": Mistake(
        causes=("number of optimizer steps",), step=Loop(weight=by_items, steps=1), windows=1
    ),
    "a step after every micro-batch, and a wrong weight": Mistake(
        causes=("number of optimizer steps", "short window"),
        step=Loop(weight=always(1 / 4), closes=lambda *_: True),
        batch=batch_of(),
        windows=1,
    ),
    "too few windows": Mistake(
        causes=("number of optimizer steps",), step=Loop(weight=by_items), batch=TEN_UNEQUAL, windows=4
    ),
    # samples that see each other
    "BatchNorm": Mistake(
        causes=("statistics over the batch",), make=lambda: Statistics(nn.BatchNorm1d(WIDTH)), before=TRAINING
    ),
    "BatchNorm by hand": Mistake(
        causes=("statistics over the batch",),
        make=lambda: Statistics(nn.BatchNorm1d(WIDTH)),
        before=TRAINING,
        step=Loop(weight=by_items),
        dtype=torch.float32,
    ),
    "a statistic without a name": Mistake(
        causes=("statistics over the batch",), make=lambda: Statistics(Centred()), step=Loop(weight=by_items)
    ),
    "contrastive": Mistake(causes=("loss that couples samples",), loss_fn=loops.contrastive),
    "logit scale in every micro-batch": Mistake(
        causes=("parameters counted several times",),
        loss_fn=CONTRAST.loss_fn,
        joint=CONTRAST.joint,
        make=Towers,
        batch=pairs_of(16),
        step=lambda model, batch: openclip(model, batch, micro=4, joint=CONTRAST.joint),
    ),
    # randomness, precision
    "dropout that cannot be switched off": Mistake(
        causes=("mean of means",), make=lambda: Statistics(Forgetful()), step=Loop()
    ),
    "bf16 buffers": Mistake(causes=("sums in too low a precision",), step=in_bf16_buffers, dtype=torch.float32),
    "bf16 gradients of many": Mistake(
        causes=("sums in too low a precision",),
        make=Perceptron,
        dtype=torch.bfloat16,
        batch=regression(256),
        loss_fn=squared_error,
        step=Loop(size=1, steps=256, loss=squared_error),
    ),
    # nothing
    "detached": Mistake(causes=("parameters that received nothing",), step=with_a_detached_embedding),
    "an optimizer of a copy": Mistake(causes=("parameters that received nothing",), step=of_a_copy),
    "cleared before the step": Mistake(causes=("parameters that received nothing",), step=cleared_before_the_step),
    "nothing at all": Mistake(causes=("parameters that received nothing",), step=lambda model, batch: None),
    "0 / 0": Mistake(
        causes=("not finite",), step=mean_over_nothing, loss_fn=mean_loss, batch=with_an_empty_micro_batch()
    ),
    "another loss": Mistake(
        causes=("unexplained",), step=Loop(loss=lambda model, batch: model(batch.x).square().mean())
    ),
    "divided by too much, just below the limit": Mistake(causes=("short window",), step=divided_below_the_limit),
    "one parameter halved": Mistake(causes=("unexplained",), step=one_halved),
    "almost the same loss": Mistake(causes=("unexplained",), step=Loop(loss=smoothed, weight=by_items)),
    # other libraries' loops
    "Accelerate, mean of means": Mistake(
        causes=("mean of means", "short window"),
        step=accelerate_loop(mean_loss),
        loss_fn=mean_loss,
        batch=TEN_UNEQUAL,
        dtype=torch.float32,
    ),
    "Accelerate, short last window": Mistake(causes=("short window",), step=accelerate_loop(mean_loss), batch=TEN),
    "Accelerate, its token recipe": Mistake(
        causes=("labels counted before the shift",),
        step=accelerate_tokens(all_labels),
        loss_fn=next_token_fn,
        batch=TEN_UNEQUAL,
        dtype=torch.float32,
    ),
    "Lightning, mean of means": Mistake(
        causes=("mean of means", "short window"),
        step=lightning_loop(mean_loss),
        loss_fn=mean_loss,
        batch=TEN_UNEQUAL,
    ),
    "Lightning, short last window": Mistake(
        causes=("short window",), step=lightning_loop(mean_loss), batch=TEN, dtype=torch.float32
    ),
    # several terms: tokens and samples, in micro-batches of 6, 6, 6 and 2 samples
    "term not divided": term_mistake("term not divided", lambda window, micro: {"samples": 1.0}),
    "tokens not divided": term_mistake("term not divided", lambda window, micro: {"tokens": 1.0}),
    "term as a mean of means": term_mistake(
        "term divided by the micro-batch's own count", lambda window, micro: {"samples": 1 / len(window)}
    ),
    "term weighted by the other's items": term_mistake(
        "one count for two terms", lambda window, micro: {"samples": by_items(window, micro)}
    ),
    "term divided by the other's items": term_mistake(
        "one count for two terms",
        lambda window, micro: {"samples": len(micro.x) / sum(other.items for other in window)},
    ),
    "both terms as means of means": Mistake(
        causes=("mean of means",),
        loss_fn=two_terms,
        step=TermLoop(weights=lambda window, micro: dict.fromkeys(("tokens", "samples"), 1 / len(window))),
    ),
}


@pytest.mark.filterwarnings("ignore:a hook of the parameter")  # the library's own check tells of it too
@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_found_and_named(name):
    mistake = MISTAKES[name]
    report = mistake.verified()
    assert not report.ok
    assert tuple(cause.name for cause in report.causes) == mistake.causes, str(report)
    assert all(cause.evidence and cause.cure for cause in report.causes)


@pytest.mark.parametrize(
    ("step", "batch", "make"),
    [(counted_before_the_shift, TWENTY_UNEQUAL, Attention), (counting_positions, sequences(), per_position)],
)
def test_items_that_the_library_refuses_itself(step, batch, make):
    with pytest.raises(BatchError, match="not in proportion to what the losses are means over"):
        step(make().double(), batch)


def test_evidence_has_the_numbers():
    evidence = {
        name: MISTAKES[name].verified().causes[0].evidence
        for name in ("mean of means", "mean of means, loss alone", "short last window", "BatchNorm", "never closed")
    }
    assert "38 24 30 26" in evidence["mean of means"]  # its items
    assert "0.322 0.203 0.254 0.220" in evidence["mean of means, loss alone"]  # 38 / 118 and so on, without being told
    assert "The losses of the window are means over 38 24 30 26 items" in evidence["mean of means, loss alone"]
    assert "divided by 4, but the window has 2" in evidence["short last window"]
    assert "norm (BatchNorm1d)" in evidence["BatchNorm"]
    assert evidence["never closed"].startswith("2 micro-batches")


def test_a_model_of_one_number_is_told_apart_by_its_factor():
    """Every gradient fits every other up to a factor there."""
    model, batch = nn.Linear(1, 1, bias=False).double(), (torch.rand(10, 1).double(), torch.rand(10, 1).double())

    def loss_of(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def step(model, batch):
        for x, y in zip(*(tensor.split(4) for tensor in batch), strict=True):
            (loss_of(model, (x, y)) / 3).backward()

    assert verify(model, loss_of, batch, step=step).causes[0].name == "mean of means"


def test_the_windows_are_told_apart():
    """Only the last one is wrong."""
    mistake = MISTAKES["short last window"]
    windows = verify(mistake.model(), loss_fn, mistake.batch, step=mistake.step).windows
    assert [window.samples for window in windows] == [20, 20, 10]
    assert [window.micro_batches for window in windows] == [4, 4, 2]
    assert [window.relative_error > 1e-12 for window in windows] == [False, False, True]
    assert windows[2].factor == pytest.approx(0.5)


def test_reference_is_that_of_the_test_vocabulary():
    """What verify takes for right is what the tests take for right."""
    found = {}

    def step(model, batch):
        model.zero_grad()
        mean_loss(model, batch).backward()
        found.update(reference.gradients_of(model))

    model = MISTAKES["mean of means"].model()
    assert verify(model, loss_fn, batch_of(items=UNEQUAL), step=step).max_relative_error == 0
    expected = reference.whole_batch_gradient(model, [batch_of(items=UNEQUAL)])
    assert reference.relative_error(found, expected) <= 1e-15
