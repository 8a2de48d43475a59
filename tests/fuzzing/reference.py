"""What plain torch makes of a program: one big batch for each window."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fuzzing.model import Batch, Trainee, concatenate, errors, gradients, rates
from fuzzing.program import Program
from fuzzing.several_model import joined, joint_loss, ordinary_loss, plain_encoded, term_sums


@dataclass
class Expected:
    """What a window comes to."""

    micro_batches: int
    items: float
    loss: float
    grad_norm: float | None
    lr: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    skipped: bool = False
    is_poisoned: bool = False  # by an infinite or NaN gradient
    losses: dict[str, float] | None = None  # of each term


class Reference:
    """The obvious program: the loss of the whole window, divided by its items; backward, clip, step.

    Where micro-batches differ from parts of the big batch (dropout, parameters that were frozen in between), their
    gradients are taken one by one, when the library's are, and added up.
    """

    def __init__(self, p: Program, trainee: Trainee, is_alone: bool = True) -> None:
        self.p, self.trainee, self.net = p, trainee, trainee.net
        self.in_parts = p.in_parts or not is_alone
        self.random = torch.get_rng_state() if "dropout" in p.pieces else None
        self.taken = 0
        self.discard()

    def discard(self) -> None:
        self.window: list[tuple[Batch, float, dict[str, Tensor | None]]] = []  # batch, its share, its gradient
        self.items, self.sum, self.is_poisoned = 0.0, 0.0, False

    # ------------------------------------------------------------------------------------------------ micro-batches

    def forward(self, batch: Batch, x: Tensor | None = None) -> Tensor | None:
        """The losses; where they are not needed now, None. To be called whenever the library's model has a forward."""
        if not self.in_parts:
            return None
        if self.random is None:
            return errors(self.net, batch, x)
        outside = torch.get_rng_state()
        torch.set_rng_state(self.random)
        losses = errors(self.net, batch, x)
        self.random = torch.get_rng_state()
        torch.set_rng_state(outside)
        return losses

    def add(self, batch: Batch, losses: Tensor | None, *, is_poisoned: bool = False, addend: float = 0.0) -> None:
        """A micro-batch, with what `forward` gave for it. `addend`: a number that was added to its loss."""
        is_alike = self.p.items == "none" and self.p.driver != "macrostep" and not self.p.is_read
        weight = 1.0 if is_alike else batch.items
        share = 1.0  # of every loss in the sum over the window
        if self.p.reduction == "mean" and batch.items:
            share = weight / batch.items
        self.is_poisoned |= is_poisoned and weight > 0
        self.items += weight
        if weight and addend:
            self.sum += addend * (weight if self.p.reduction == "mean" else 1.0)
        own: dict[str, Tensor | None] = {}
        if self.in_parts:
            total = self.total(batch, losses, share)
            self.sum += total.item()
            self.net.clear()
            total.backward()
            own = gradients(self.net)
        self.window.append((batch, share, own))

    def total(self, batch: Batch, losses: Tensor, share: Tensor | float) -> Tensor:
        """The sum over all positions of their losses, each as often as it counts."""
        total, shift = (batch.w * share * losses).sum(), self.net.shift()
        return total if shift is None else total + (batch.w * share).sum() * shift

    # --------------------------------------------------------------------------------------------------- the window

    def close(self) -> Expected:
        window, items, loss_sum, is_poisoned = self.window, self.items, self.sum, self.is_poisoned
        self.discard()
        self.net.clear()
        if items and not is_poisoned:
            loss_sum += self.backward(window, items if self.p.reduction != "total" else 1.0)
        loss = loss_sum / (items if self.p.reduction != "total" else 1.0) if items else math.nan
        expected = Expected(len(window), items, loss, None, rates(self.trainee), gradients(self.net))
        if not items:
            return replace(expected, skipped=True)
        if is_poisoned:
            self.overflow()
            skips = self.trainee.scaler is not None or self.p.nonfinite == "skip"
            return replace(expected, skipped=skips, is_poisoned=True)
        expected.grad_norm = self.step()
        self.taken += 1
        return expected

    def backward(self, window: list[Any], items: float) -> float:
        """Leave the gradient of the whole window's mean loss in `.grad`; return the sum that is not known yet."""
        if self.in_parts:
            for name, parameter in self.net.named.items():
                parts = [own[name] for *_, own in window if own[name] is not None]
                parameter.grad = sum(parts) / items if parts else None
            return 0.0
        whole = concatenate(batch for batch, *_ in window)
        share = torch.cat([torch.full_like(batch.w, share) for batch, share, *_ in window])
        total = self.total(whole, errors(self.net, whole), share)
        (total / items).backward()
        return total.item()

    def step(self) -> float | None:
        trainee, scaler, norm = self.trainee, self.trainee.scaler, None
        if scaler is not None:
            self.scale()
        if self.p.max_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(self.net.named.values(), self.p.max_norm))
        scaled = list(self.with_gradients()) if scaler is not None else []
        for optimizer in trainee.optimizers:
            scaler.step(optimizer) if optimizer in scaled else optimizer.step()
        if scaler is not None:
            scaler.update()
        for scheduler in trainee.schedulers:
            scheduler.step()
        return norm

    def with_gradients(self) -> Iterator[torch.optim.Optimizer]:
        """A scaler asks for that."""
        for optimizer in self.trainee.optimizers:
            if any(q.grad is not None for group in optimizer.param_groups for q in group["params"]):
                yield optimizer

    def scale(self) -> None:
        """Scale and unscale: that leaves the gradients as they are (scales are powers of two), but not the scaler."""
        scaler, unscaled = self.trainee.scaler, set()
        factor = scaler.scale(torch.ones((), dtype=torch.float32)).item()
        for parameter in self.net.named.values():
            if parameter.grad is not None:
                parameter.grad *= factor
        for optimizer in self.with_gradients():
            scaler.unscale_(optimizer)
            unscaled |= {q for group in optimizer.param_groups for q in group["params"]}
        for parameter in self.net.named.values():
            if parameter.grad is not None and parameter not in unscaled:
                parameter.grad /= factor

    def overflow(self) -> None:
        """What a scaler makes of an infinite gradient."""
        if self.trainee.scaler is None:
            return
        for parameter in self.net.named.values():
            parameter.grad = torch.full_like(parameter, math.inf)
        self.trainee.scaler.scale(torch.ones((), dtype=torch.float32))
        for optimizer in self.trainee.optimizers:
            self.trainee.scaler.unscale_(optimizer)
        self.trainee.scaler.update()
        self.net.clear()


class SeveralReference(Reference):
    """The same for a loss of several terms, each divided by its own items, and for a loss of the whole batch."""

    def __init__(self, p: Any, trainee: Trainee) -> None:
        super().__init__(p, trainee)
        self.random = torch.get_rng_state() if p.dropout else None

    def discard(self) -> None:
        self.window: list[Any] = []
        self.is_poisoned = False

    def append(self, batch: Any) -> None:
        self.window.append(batch)

    def close(self) -> Expected:
        parts = self.window
        self.discard()
        self.net.clear()
        loss, items, losses = self.joint(parts) if self.p.is_joint else self.terms(parts)
        if loss is not None:
            loss.backward()
        value = math.nan if loss is None else loss.item()
        expected = Expected(len(parts), items, value, None, rates(self.trainee), gradients(self.net), losses=losses)
        if loss is None:
            return replace(expected, skipped=True)
        expected.grad_norm = self.step()
        self.taken += 1
        return expected

    def terms(self, parts: list[Any]) -> tuple[Tensor | None, float, dict[str, float]]:
        """The sum of the terms' means, without those of terms that have no items; the first one's items; the means."""
        whole = joined(parts)
        found = term_sums(self.net(whole), whole)
        means = {name: total / count for name, (total, count) in found.items() if count}
        losses = {name: means[name].item() if name in means else math.nan for name in found}
        return sum(means.values()) if means else None, next(iter(found.values()))[1], losses

    def joint(self, parts: list[Any]) -> tuple[Tensor, float, None]:
        """The loss of all samples, and the mean of the ordinary one where there is one."""
        outside = torch.get_rng_state()
        if self.random is not None:
            torch.set_rng_state(self.random)
        encoded = plain_encoded(self.p, self.net, parts if self.random is not None else [joined(parts)])
        if self.random is not None:
            self.random = torch.get_rng_state()
        torch.set_rng_state(outside)
        loss, whole = joint_loss(self.p, self.net, encoded), joined(parts)
        whole = {key: rows[whole["ids"].argsort()] for key, rows in whole.items()}
        if not self.p.ordinary:
            return loss, len(whole["ids"]), None
        total, count = ordinary_loss(encoded.rows, whole)
        return loss + total / count, count, None
