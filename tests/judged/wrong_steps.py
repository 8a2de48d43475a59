"""The steps of the planted mistakes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import reference
from harness.loops import (
    UNEQUAL,
    Loop,
    batch_of,
    by_items,
    cross_entropy,
    cut,
    loss_fn,
    next_token_loss,
    pieces,
)
from harness.peers import accelerator, loader_of
from harness.reference import IGNORED, VOCABULARY, WIDTH, Attention, Batch, mean_loss
from macrobatch import Accumulator, verify
from macrobatch.verify import Report


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


TRAINING = nn.Module.train


TEN = batch_of(50)  # micro-batches of 5, all with as many items; in windows of 4 the last has 2


TEN_UNEQUAL = batch_of(50, items=UNEQUAL)


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
