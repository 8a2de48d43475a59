"""Steps on real ranks: right ones, and wrong ones with the cause that `verify` must name."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from harness.loops import Loop, by_items, loss_fn, next_token_fn, pieces, two_counts, two_terms
from harness.ranks import Outcome, ddp, fsdp1, fsdp2, full_weights, made
from harness.reference import IGNORED, VOCABULARY, WIDTH, Attention, Batch, batch, mean_loss, sum_loss
from macrobatch import Accumulator, MacroStep, verify


def own_share(samples: int = 12) -> Batch:
    """Ranks have different numbers of samples, and of items."""
    return batch(samples + 3 * dist.get_rank(), seed=dist.get_rank())


def verified(
    model: nn.Module,
    step: Any = None,
    share: Callable[[], Batch] = own_share,
    loss: Callable[[nn.Module, Batch], Any] = loss_fn,
    **options: Any,
) -> Outcome:
    """The report, whether the weights are as before, and the lines of `verify` that asked the other ranks."""
    before = full_weights(model)
    with noting_questions() as questions:
        report = verify(model, loss, share(), step=step, **options)
    after = full_weights(model)
    return {
        "ok": report.ok,
        "error": report.max_relative_error,
        "causes": [cause.name for cause in report.causes],
        "windows": [window.samples for window in report.windows],
        "text": str(report),
        "questions": questions,
        "kept": all(torch.equal(before[name], after[name]) for name in before)
        and all(parameter.grad is None for parameter in model.parameters()),
    }


@contextlib.contextmanager
def noting_questions() -> Iterator[list[str]]:
    """Where ranks ask different questions at the same time, they hang, or get an answer to another question."""
    questions: list[str] = []

    def noted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **options: Any) -> Any:
            lines, frame = [], sys._getframe(1)
            while frame is not None:
                if "/verification/" in frame.f_code.co_filename:
                    lines.append(f"{frame.f_code.co_name} {frame.f_lineno}")
                frame = frame.f_back
            questions.append(" < ".join(lines))
            return collective(*args, **options)

        return ask

    with contextlib.ExitStack() as patches:
        for name in ("all_reduce", "all_gather_object", "broadcast_object_list"):
            patches.enter_context(mock.patch.object(dist, name, noted(getattr(dist, name))))
        yield questions


def everyone(number: float) -> float:
    """The sum over the ranks."""
    total = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


class Inner(nn.Module):
    """A weight of its own, and a child that is called as DDP calls its."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.module = (
            nn.Parameter(torch.randn(VOCABULARY, WIDTH)),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.module(torch.tanh(F.embedding(x, self.weight)))


def spoil(model: Any) -> None:
    """Of the first parameter, which both ranks have the same gradient of."""
    next(iter(model.parameters())).grad.mul_(3)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        clip(model)


def as_many_samples() -> Batch:
    """But not as many items."""
    return batch(12, seed=dist.get_rank())


def each_its_mean(model: nn.Module, share: Batch) -> None:
    mean_loss(model, share).backward()


def next_tokens() -> Batch:
    """Whose labels are the tokens themselves."""
    share = own_share()
    return Batch(share.x, share.x.clone())


def not_shifted(model: nn.Module, share: Batch) -> None:
    by_hand(lambda share: everyone(share.x.numel()) / 2)(model, share)


def by_hand(
    divisor: Callable[[Batch], float],
    *,
    syncs: bool = True,
    each: Callable[[nn.Module], None] | None = None,
    last: Callable[[nn.Module], None] | None = None,
) -> Callable[[nn.Module, Batch], None]:
    """Sums, divided by something, in 3 micro-batches on every rank; gradients travel with the last.

    Something may be done after each backward, and before the optimizer's step.
    """

    def step(model: Any, share: Batch) -> None:
        optimizer, number = torch.optim.AdamW(model.parameters(), 0.1), divisor(share)
        micro_batches = list(pieces(share, -(-len(share.x) // 3)))
        for index, micro in enumerate(micro_batches):
            is_last = syncs and index == 2
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = is_last
            (sum_loss(model, micro) / number).backward()
            if each is not None:
                each(model)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = True
        elif syncs and type(model) is Attention:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if last is not None:
            last(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def all_items(share: Batch) -> float:
    """Right: DDP and FSDP divide by the world once more."""
    return everyone(share.items) / dist.get_world_size()


def accumulated(model: nn.Module, share: Batch) -> None:
    acc = Accumulator(model, torch.optim.AdamW(model.parameters(), 0.1), steps=2, max_norm=0.02)
    for micro in acc.batches(list(pieces(share, 4))):
        acc.backward(*loss_fn(model, micro))
        acc.step()


def in_bf16() -> nn.Module:
    """Weights in float32, gathered in bf16: the model cannot be copied, and its own dtype does not tell."""
    return fsdp2(made(dtype=torch.float32), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def labels_of(seed: int) -> Batch:
    """12 samples on the first rank and 8 on the second; some without a label."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(20, 5, generator=draw), torch.randint(3, (20,), generator=draw)
    y[torch.rand(20, generator=draw) < 0.4] = IGNORED
    own = slice(12) if dist.get_rank() == 0 else slice(12, 20)
    return Batch(x[own].double(), y[own])


def class_loss(model: nn.Module, share: Batch) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(share.x), share.y), (share.y != IGNORED).sum()


def means_of_micro_batches(model: Any, share: Batch, divided: bool = True) -> None:
    """3 on the first rank and 2 on the second; gradients travel with the last."""
    optimizer, micro_batches = torch.optim.SGD(model.parameters(), 0.1), list(pieces(share, 4))
    for micro in micro_batches:
        model.require_backward_grad_sync = micro is micro_batches[-1]
        (class_loss(model, micro)[0] / (len(micro_batches) if divided else 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def classified(seed: int, **options: bool) -> Outcome:
    torch.manual_seed(seed)
    step = partial(means_of_micro_batches, **options)
    return verified(ddp(nn.Linear(5, 3).double()), step, partial(labels_of, seed), class_loss)


def noisy_loss(model: nn.Module, share: Batch) -> Tensor:
    """Numbers in float64 are others than in float32, so they say nothing about rounding."""
    return F.cross_entropy(model(share.x + torch.randn_like(share.x)), share.y.clamp(min=0))


def noisy() -> Outcome:
    share = labels_of(0)
    return verified(ddp(nn.Linear(5, 3)), None, lambda: Batch(share.x.float(), share.y), noisy_loss)


def different_lengths(model: nn.Module, share: Batch) -> None:
    Loop(size=4, steps=1, weight=by_items)(model, share)


def whole_batches(**options: Any) -> Callable[[nn.Module, Batch], None]:
    """A MacroStep, with options; the first rank has nothing to do in its last turns."""

    def step(model: nn.Module, share: Batch) -> None:
        MacroStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, micro=2, **options)(share)

    return step


def terms_by_hand(**factors: float) -> Callable[[nn.Module, Batch], None]:
    """Both terms in 3 micro-batches on every rank, each divided by its items on all ranks; times a factor."""

    def step(model: Any, share: Batch) -> None:
        optimizer, world = torch.optim.AdamW(model.parameters(), 0.1), dist.get_world_size()
        totals = {name: everyone(count) for name, count in two_counts(share).items()}
        for index, micro in enumerate(pieces(share, -(-len(share.x) // 3))):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = index == 2
            loss = sum(
                loss * n * world / totals[name] * factors.get(name, 1.0)
                for name, (loss, n) in two_terms(model, micro).items()
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


MODES = {
    "ddp": (ddp, {"sync": "window"}),
    "ddp-micro": (ddp, {"sync": "micro"}),
    "fsdp1": (fsdp1, {"sync": "window"}),
    "fsdp1-micro": (fsdp1, {"sync": "micro"}),
    "fsdp2": (fsdp2, {"gather": "micro"}),
    "fsdp2-gathered": (fsdp2, {"gather": "window"}),
    "fsdp2-micro": (fsdp2, {"sync": "micro"}),
    "fsdp2-micro-gathered": (fsdp2, {"sync": "micro", "gather": "window"}),
}


RIGHT = {
    f"MacroStep-{mode}": partial(lambda wrap, options: verified(wrap(made()), whole_batches(**options)), wrap, options)
    for mode, (wrap, options) in MODES.items()
} | {
    "ddp-default": lambda: verified(ddp(made())),
    "ddp-micro": lambda: verified(ddp(made()), micro=2),
    "ddp-by-hand": lambda: verified(ddp(made()), by_hand(all_items)),
    "ddp-accumulator": lambda: verified(ddp(made()), accumulated),
    "ddp-float32": lambda: verified(ddp(made(dtype=torch.float32)), by_hand(all_items)),
    "ddp-inner": lambda: verified(ddp(made(Inner)), by_hand(all_items)),
    "ddp-of-compiled": lambda: verified(ddp(torch.compile(made(Inner), backend="eager")), by_hand(all_items)),
    "plain-by-hand": lambda: verified(made(), by_hand(all_items)),
    "fsdp1-by-hand": lambda: verified(fsdp1(made()), by_hand(all_items)),
    "fsdp2-default": lambda: verified(fsdp2(made())),
    "fsdp2-by-hand": lambda: verified(fsdp2(made()), by_hand(all_items)),
    "fsdp2-accumulator": lambda: verified(fsdp2(made()), accumulated),
    "fsdp2-bf16": lambda: verified(in_bf16(), by_hand(all_items)),
    "ddp-terms": lambda: verified(ddp(made()), loss=two_terms, counts=two_counts),
    "ddp-terms-by-hand": lambda: verified(ddp(made()), terms_by_hand(), loss=two_terms),
    "fsdp2-terms": lambda: verified(fsdp2(made()), loss=two_terms, counts=two_counts),
    "fsdp2-float32": lambda: verified(fsdp2(made(dtype=torch.float32))),
}


WRONG = {
    "ddp-unsynchronised": (
        lambda: verified(ddp(made()), by_hand(all_items, syncs=False)),
        "gradients not synchronised",
    ),
    "plain-unsynchronised": (lambda: verified(made(), by_hand(all_items, syncs=False)), "gradients not synchronised"),
    "ddp-world": (lambda: verified(ddp(made()), by_hand(lambda b: everyone(b.items))), "world size"),
    "ddp-ranks": (lambda: verified(ddp(made()), by_hand(lambda b: b.items)), "mean of means"),
    "ddp-micro-batches": (
        lambda: verified(ddp(made()), Loop(size=4, steps=100), lambda: batch(12, seed=dist.get_rank())),
        "mean of means",
    ),
    "ddp-inner-spoiled": (lambda: verified(ddp(made(Inner)), by_hand(all_items, last=spoil)), "unexplained"),
    "ddp-clipped-each": (lambda: verified(ddp(made()), by_hand(all_items, each=clip)), "clip per micro-batch"),
    "ddp-clipped-on-one": (
        lambda: verified(ddp(made()), by_hand(all_items, last=clip_on_one_rank)),
        "gradients not synchronised",
    ),
    "ddp-no-items": (
        lambda: verified(ddp(made()), each_its_mean, as_many_samples, mean_loss),
        "mean of means",
    ),
    "ddp-same-items": (
        lambda: verified(ddp(made()), None, as_many_samples, lambda model, batch: (mean_loss(model, batch), 1)),
        "items that do not fit the loss",
    ),
    "ddp-items-by-rank": (  # the same in all micro-batches of a rank, but not on all ranks
        lambda: verified(
            ddp(made()), None, as_many_samples, lambda model, batch: (mean_loss(model, batch), 1 + dist.get_rank())
        ),
        "items that do not fit the loss",
    ),
    "ddp-not-shifted": (
        lambda: verified(ddp(made()), not_shifted, next_tokens, next_token_fn),
        "labels not shifted",
    ),
    "ddp-too-many": (lambda: verified(ddp(made()), accumulated, windows=1), "number of optimizer steps"),
    "fsdp2-world": (lambda: verified(fsdp2(made()), by_hand(lambda b: everyone(b.items))), "world size"),
    "fsdp2-ranks": (lambda: verified(fsdp2(made()), by_hand(lambda b: b.items)), "mean of means"),
    "ddp-term-world": (
        lambda: verified(ddp(made()), terms_by_hand(samples=0.5), loss=two_terms),
        "term and world size",
    ),
    "fsdp2-term-world": (
        lambda: verified(fsdp2(made()), terms_by_hand(tokens=2.0), loss=two_terms),
        "term and world size",
    ),
    **{f"ddp-means-{seed}": (partial(classified, seed), "mean of means") for seed in range(4)},
    **{f"ddp-sums-{seed}": (partial(classified, seed, divided=False), "mean of means") for seed in range(2)},
    "out-of-step": (lambda: verified(made(), different_lengths), "ranks out of step"),
}
