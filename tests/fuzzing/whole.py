"""Programs that pass whole batches: `MacroStep`, many kinds of batches, memory that runs out, and mistakes."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzzing.mistakes import BAD, SPOILS
from fuzzing.model import HOST_KNOWS, LENGTH, Batch, PlannedError, make_batch
from fuzzing.run import MismatchError, Run, SpoiledError
from macrobatch import MacrobatchError, MacroStep, by_count, by_tokens
from macrobatch.errors import NonFiniteError


class Whole(Run):
    def run(self) -> None:
        torch.set_default_dtype(getattr(torch, self.p.default_dtype))
        try:
            self.train = self.macro_step()
        except MacrobatchError:
            if self.p.shared:
                raise SpoiledError from None
            raise
        for window, (samples,) in enumerate(self.p.epochs):
            self.events = self.p.events_at(window, 0)
            self.batch = make_batch(self.p, window, 0, samples)
            self.watch(*self.batch.tensors())
            self.handed_over = pack(self.p.container, self.batch)
            if "nothing" in self.events:
                self.nothing()
            if "other length" in self.events:
                self.other_length()
            self.window()
            self.between(self.events)
            if "restart" in self.events:
                state = self.train.state_dict()
                self.train = self.macro_step()
                self.train.load_state_dict(state)
        self.finish()

    def macro_step(self) -> MacroStep:
        p = self.p
        micro: Any = {"int": p.size, "by_count": by_count(p.size), "auto": "auto"}.get(p.cut)
        if p.cut == "by_tokens":
            micro = by_tokens(self.budget, LENGTHS.get(p.container))
        collate = stack if p.container == "samples" else None
        return MacroStep(self.models(), self.optimizers(), self.loss_fn, micro=micro, collate=collate, **self.options())

    @property
    def budget(self) -> int:
        return 1 + self.p.size * LENGTH // 2

    def nothing(self) -> None:
        """An empty batch: an error, or a result that says that no step was taken."""
        try:
            result = self.train([] if self.p.container == "samples" else pack(self.p.container, self.batch.first(0)))
        except MacrobatchError:
            pass
        else:
            if not bool(result.skipped):
                raise MismatchError("silent", "a step without samples")
        self.same_state()

    def other_length(self) -> None:
        """One tensor has fewer samples than the others."""
        if self.p.container in ("samples", "numpy", "language") or len(self.batch.ids) < 2:
            return
        x, y, w, ids = self.batch.tensors()
        try:
            self.train(pack(self.p.container, Batch(x, y[:-1], w, ids)))
        except MacrobatchError:
            return
        raise MismatchError("silent", "a tensor with fewer samples than others")

    def window(self) -> None:
        """One call; and another one, without the mistake, where it was noticed."""
        mistake = next((event for event in self.events if event in BAD or event in SPOILS or "plain" in event), None)
        self.parts: list[tuple[Batch, bool]] = []  # that went through, and whether their gradients were not finite
        self.calls, fails = 0, "forward fails, again" in self.events
        try:
            result = self.train(self.handed_over)
        except PlannedError:
            pass
        except NonFiniteError:
            self.account()
            if not self.reference.is_poisoned or self.p.nonfinite != "raise" or self.own.scaler is not None:
                raise
            self.reference.discard()
            self.same_state()
            return
        except MacrobatchError:
            if mistake is None:
                raise
            if mistake == "optimizer.step":
                raise SpoiledError from None
        else:
            if fails and self.calls:
                raise MismatchError("silent", "an exception in the loss was lost")
            self.compare_window(result)
            return
        self.same_state()
        self.events = []
        self.window()

    def compare_window(self, result: Any) -> None:
        self.same_samples()
        self.account()
        if self.reference.is_poisoned and self.p.nonfinite == "raise" and self.own.scaler is None:
            raise MismatchError("silent", "a gradient that is not finite")
        expected = self.reference.close()
        expected.micro_batches = len(self.parts)
        self.compare(result, expected)

    def same_samples(self) -> None:
        found = sorted(number for part, _ in self.parts for number in part.ids.tolist())
        if found != self.batch.ids.tolist():
            raise MismatchError("silent", f"samples {found} were trained on, not {self.batch.ids.tolist()}")

    def account(self) -> None:
        """Hand the reference what went through: as a whole, or in parts where these differ from it."""
        is_poisoned = any(is_poisoned for _, is_poisoned in self.parts)
        whole = self.batch
        if "changes its batch" in self.events:
            whole = Batch(whole.x + 1, whole.y, whole.w, whole.ids)
        for part in [part for part, _ in self.parts] if self.reference.in_parts else [whole]:
            self.reference.add(part, self.reference.forward(part), is_poisoned=is_poisoned)

    # ---------------------------------------------------------------------------------------------------- the loss

    def loss_fn(self, model: Any, handed_over: Any) -> Any:
        if model is not self.models() and not self.p.split:
            raise MismatchError("silent", "loss_fn got another model")
        part = unpack(self.p.container, handed_over)
        self.calls += 1
        is_bounded = self.p.container == "language" and self.p.is_sequence and len(part.x) > 1
        if is_bounded and part.y.numel() > self.budget:
            raise MismatchError("silent", f"a micro-batch of {tuple(part.y.shape)} is above {self.budget} tokens")
        is_first, is_last = (bool(torch.isin(end, part.ids).any()) for end in (self.batch.ids[:1], self.batch.ids[-1:]))
        if self.p.cut == "auto" and len(part.ids) > self.p.size and (is_last or self.p.seed % 3):
            return self.run_out_of_memory(part)
        events = self.events if is_first else []
        counts = part.items or (self.p.items in HOST_KNOWS and self.p.reduction == "mean")
        if not counts:  # 0 x NaN is NaN where the host does not see the zero
            events = [event for event in events if event not in ("nan", "inf")]
        if "changes its batch" in self.events:
            part.x.add_(1)
        self.change(events, part)
        for event in self.events if is_last else []:
            self.disturb(event, part)
        loss, items = self.loss(part, events), self.items(part)
        self.parts.append((part, bool({"nan", "inf"} & set(events)) and part.items > 0))
        mistake = next((event for event in events if event in BAD), None)
        if mistake is not None:
            loss, items = BAD[mistake](loss, items)
        return loss if items is None else (loss, items)

    def run_out_of_memory(self, part: Batch) -> Any:
        """Memory runs out in the forward, or in the backward; perhaps not in the first micro-batch."""
        self.parts = []
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.p.seed % 2 or self.p.stem == "frozen":
            self.loss(part)  # random numbers and buffers have moved
            raise error
        self.net.fails = error
        try:
            loss, items = self.loss(part), self.items(part)
            return loss if items is None else (loss, items)
        finally:
            self.net.fails = None

    def disturb(self, event: str, part: Batch) -> None:
        if event == "forward fails, again":
            raise PlannedError
        if event in SPOILS and any(q.grad is not None for q in self.net.parameters()):
            SPOILS[event](self)
        if event == "plain backward before":
            self.loss(part).backward()
            for other in self.net.others:
                other.zero_grad()


# ------------------------------------------------------------------------------------------------- kinds of batches

Named = namedtuple("Named", ["x", "y", "w", "ids"])
LENGTHS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda batch: (batch[2] > 0).sum(1),
    "named tuple": lambda batch: (batch.w > 0).sum(1),
    "dataclass": lambda batch: (batch.w > 0).sum(1),
    "numpy": lambda batch: (batch["w"] > 0).sum(1),
    "nested": lambda batch: (batch["targets"][1][0] > 0).sum(1),
    "samples": lambda sample: int((sample["w"] > 0).sum()),
}


@dataclass
class Record:
    x: Tensor
    y: Tensor
    w: Tensor
    ids: Tensor
    note: str = "one note for all"


def names(ids: Tensor) -> list[str]:
    return [f"sample {number}" for number in ids.tolist()]


def wide(ids: Tensor) -> Tensor:
    """As wide as a sequence is long, but no sequence: so many numbers for each sample."""
    return ids[:, None] + torch.arange(1, LENGTH + 1)


def pack(container: str, batch: Batch) -> Any:
    x, y, w, ids = batch.tensors()
    match container:
        case "dict":
            mask = {"attention_mask": w > 0, "width": wide(ids)} if w.dim() == 2 else {}
            return {"x": x, "y": y, "w": w, "ids": ids, "names": names(ids), "rate": 0.5, "note": "all", **mask}
        case "labels":
            labels = {"labels": torch.where(w > 0, 1, -100)} if w.dim() == 2 else {}
            return {"x": x, "y": y, "w": w, "ids": ids, **labels}
        case "language":
            return language(batch)
        case "tuple":
            return (x, y, w, ids)
        case "numpy":
            return {"x": x.numpy(), "y": y.numpy(), "w": w.numpy(), "ids": ids.numpy()}
        case "named tuple":
            return Named(x, y, w, ids)
        case "dataclass":
            return Record(x, y, w, ids)
        case "nested":
            return {"inputs": {"x": x, "none": None}, "targets": [y, (w, ids)], "number": torch.tensor(3.0)}
        case "samples":
            return [{"x": x[i], "y": y[i], "w": w[i], "ids": ids[i]} for i in range(len(x))]
    raise AssertionError(container)


def unpack(container: str, part: Any) -> Batch:
    match container:
        case "dict":
            if part["names"] != names(part["ids"]):
                raise MismatchError("silent", "the names of a micro-batch belong to other samples")
            if "width" in part and not torch.equal(part["width"], wide(part["ids"])):
                raise MismatchError("silent", "columns were cut off from a tensor without padding")
            if part["rate"] != 0.5 or part["note"] != "all":
                raise MismatchError("silent", "a number or a text was changed")
            return Batch(part["x"], part["y"], part["w"], part["ids"])
        case "language":
            return of_language(part)
        case "labels":
            return Batch(part["x"], part["y"], part["w"], part["ids"])
        case "tuple":
            return Batch(*part)
        case "numpy":
            return Batch(*(torch.as_tensor(part[key]) for key in ("x", "y", "w", "ids")))
        case "named tuple" | "dataclass":
            return Batch(part.x, part.y, part.w, part.ids)
        case "nested":
            y, (w, ids) = part["targets"]
            if part["number"].item() != 3.0 or part["inputs"]["none"] is not None:
                raise MismatchError("silent", "a number, or None, was changed")
            return Batch(part["inputs"]["x"], y, w, ids)
    return part


def language(batch: Batch) -> dict[str, Any]:
    """As a language model gets it: inputs and mask; labels of which the last may be beyond the mask."""
    x, y, w, ids = batch.tensors()
    if w.dim() == 1:
        return {"x": x, "y": y, "w": w, "ids": ids}
    embeds = torch.cat([x, y[..., None], w[..., None]], -1)
    return {"inputs_embeds": embeds, "attention_mask": (w > 0).long(), "labels": labels(ids), "ids": ids}


def labels(ids: Tensor) -> Tensor:
    """Some more or less for each sample."""
    return torch.where(torch.arange(LENGTH) < 1 + ids[:, None] % LENGTH, ids[:, None], -100)


def of_language(part: dict[str, Any]) -> Batch:
    if "x" in part:
        return Batch(part["x"], part["y"], part["w"], part["ids"])
    whole, width = labels(part["ids"]), part["labels"].shape[1]
    if not torch.equal(part["labels"], whole[:, :width]) or bool((whole[:, width:] != -100).any()):
        raise MismatchError("silent", "labels were cut off")
    embeds = part["inputs_embeds"]
    return Batch(embeds[..., :-2], embeds[..., -2], embeds[..., -1], part["ids"])


def stack(samples: list[dict[str, Tensor]]) -> Batch:
    return Batch(*(torch.stack([sample[key] for sample in samples]) for key in ("x", "y", "w", "ids")))
