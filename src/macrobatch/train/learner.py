"""`Plan`, which follows from settings and data; and `Learner`: model, optimizer and position in the data."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from macrobatch._cut.plans import plan_by_tokens
from macrobatch._joint.balance import Balance
from macrobatch.errors import CheckpointError, FitError, NonFiniteError, UsageError, counted
from macrobatch.losses import causal_lm_loss
from macrobatch.macrostep import MacroStep
from macrobatch.train import checkpoint, cutting, experts, models, optimizers, suitable
from macrobatch.train.best import Best
from macrobatch.train.checkpoint import Checkpoints
from macrobatch.train.clock import Clock
from macrobatch.train.corpus import Corpus, Sample, collate
from macrobatch.train.cutting import Micro, packed_width
from macrobatch.train.data import Data
from macrobatch.train.packing import SEGMENTS, Inputs, Packer, inputs_for, mask_for
from macrobatch.train.record import padded_tokens_in_order, peak_memory
from macrobatch.train.schedule import Ramp, Rate, rate_of
from macrobatch.train.settings import DEFAULT_BATCH, DEFAULT_STEPS, Settings
from macrobatch.train.signals import Signals
from macrobatch.train.stream import Mixture, Stream, share
from macrobatch.train.world import World
from macrobatch.types import Encoded, StepResult

logger = logging.getLogger("macrobatch")

VALIDATION_TOKENS = {"cpu": 1024, "cuda": 16384}  # per micro-batch
KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]  # kernels of attention, in the order of preference if shapes change from batch to batch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run, from settings and data: number of steps, batches, how they are cut, learning rate."""

    lengths: list[int]
    batch_size: int | None
    batch_tokens: int | None
    ramp: Ramp | None
    steps: int
    epochs: int | None
    last: int | None  # samples in the last batch of the epochs
    rate: Rate
    micro: Micro
    mixture: Mixture | None
    stream: Callable[[], Stream]  # makes the batches of the run, from the first one on

    @classmethod
    def make(cls, settings: Settings, data: Data, world: World) -> Plan:
        """Make the plan. Refuses a batch that is smaller than the number of ranks."""
        batch_size = None if settings.batch_tokens else settings.batch_size or DEFAULT_BATCH
        ramp = Ramp(steps=settings.batch_ramp, start=settings.batch_ramp_start) if settings.batch_ramp else None
        smallest = 0 if batch_size is None else max(round(batch_size * (ramp(0) if ramp else 1)), 1)
        if batch_size is not None and smallest < world.size:
            raise UsageError(
                f"a batch of {smallest} samples is smaller than the {world.size} ranks: each needs one at least. Raise "
                f"--batch-size{' or --batch-ramp-start' if ramp else ''}, or start fewer ranks."
            )
        lengths, steps, last = data.train.lengths, settings.steps or DEFAULT_STEPS, None
        stream = partial(
            Stream, lengths, seed=settings.seed, batch_size=batch_size, batch_tokens=settings.batch_tokens, ramp=ramp,
            mixture=data.mixture,
        )  # fmt: skip
        if settings.epochs is not None:
            steps, last = stream().extent(settings.epochs)
        return cls(
            lengths=lengths,
            batch_size=batch_size,
            batch_tokens=settings.batch_tokens,
            ramp=ramp,
            steps=steps,
            epochs=settings.epochs,
            last=last,
            rate=rate_of(settings, steps, models.learning_rate(settings)),
            micro=cutting.micro_of(settings, max(lengths), world.device),
            mixture=data.mixture,
            stream=partial(stream, epochs=settings.epochs),
        )

    @property
    def extent(self) -> str:
        """A text that says how many steps and epochs the run takes."""
        if self.epochs is not None:
            smaller = self.batch_size is not None and self.last is not None and self.last < self.batch_size
            end = f"; the last batch has {self.last:,} samples, all that are left" if smaller else ""
            return f"{self.steps:,}, {counted(self.epochs, 'epoch')}{end}"
        batches = sum(map(self.ramp, range(self.steps))) if self.ramp else self.steps
        share = self.batch_size / len(self.lengths) if self.batch_size else (self.batch_tokens or 0) / sum(self.lengths)
        about = "about " if self.ramp or self.batch_tokens else ""
        return f"{self.steps:,}, {about}{batches * share:.2f} epochs"


class Learner:
    """Model, optimizer and position in the data: everything that a step changes and a checkpoint holds."""

    def __init__(
        self, model: nn.Module, plan: Plan, settings: Settings, world: World, balance: Balance | None = None
    ) -> None:
        self.settings, self.plan, self.world, self.balance = settings, plan, world, balance
        self.origin = models.origin_of(settings)
        self.kept = self.origin.export_info()
        torch.manual_seed((settings.seed + world.rank) % 2**63)  # for dropout: each rank has its own random numbers
        self.stream = plan.stream()
        self._packer = Packer(packed_width(settings), whole=self._has_few_shapes) if settings.pack else None
        self._autocast = models.AUTOCAST.get(settings.precision)
        has_half = settings.lora and self._autocast is not None  # the frozen weights
        mask = None
        if self._packer is not None and (has_half or settings.precision == "pure-bf16"):
            mask = mask_for(model, self._packer, torch.device("cpu"))  # while the model is still in float32
        self.model = models.prepare(model, settings, world)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.num_trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.optimizers = optimizers.optimizers_of(self.model, settings, models.learning_rate(settings))
        self.scaler = torch.amp.GradScaler(world.device.type) if settings.precision == "fp16" else None
        self.clock = Clock(world.device)
        self.best = Best(*settings.best_number)
        self.taken = 0  # steps
        self._widths: dict[int, float] = {}  # padded tokens per sample, by id of the sample, in its last micro-batch
        trial_dtype = self._autocast if has_half else None
        self._padding = suitable.padding_effect(self.model, max(plan.lengths), world.device, trial_dtype)
        if not self._padding.is_masked and self._packer is None and plan.micro != 1:
            warnings.warn(
                "what this model computes for a sample depends on the padding beside it, so that losses depend on how "
                "batches are cut. With --micro 1 no sample is padded.",
                stacklevel=2,
            )
        self._inputs: Inputs | None = None
        if self._packer is not None:
            self._inputs = inputs_for(self.model, self._packer, world.device, self._autocast, mask)
        self._recomputes = settings.checkpoint_activations == "yes"
        self._train = MacroStep(
            self.model,
            self.optimizers,
            self._loss if balance is None else partial(self._encode, balance),
            micro=plan.micro,
            joint=None if balance is None else balance.joint,
            collate=self._collate,
            max_norm=settings.max_norm,
            scaler=self.scaler,
            accumulate_dtype=torch.float32 if settings.precision == "pure-bf16" else None,
            cuda_graph=settings.cuda_graph,
            fuse=False,  # a resumed run records shapes later: recorded and eager micro-steps must have the same bits
            fit_file=cutting.fit_file(settings, plan.micro),
        )
        self.clock.watch(self._train)

    def step(self, step: int, corpus: Corpus, signals: Signals) -> tuple[dict[str, Any], int]:
        """Take one step, after `step` earlier ones. Returns its row of metrics, and a signal that any rank received."""
        with self.clock.part("data"):
            batch = self.stream.next(step)
            mine = share(batch, self.plan.lengths, self.world.rank, self.world.size)
            samples = [corpus[index] for index in mine]
        optimizers.set_rates(self.optimizers, self.plan.rate(step))
        self._widths.clear()
        try:
            result = self._window(samples)
            loss = result.loss.item()
        except NonFiniteError as error:
            raise _divergence_error(step) from error
        if not math.isfinite(loss):
            raise _divergence_error(step)
        with self.clock.part("communication"):
            numbers = [
                signals.received,
                round(sum(self._widths.values())),
                result.micro_batches,
                peak_memory(self.world.device),
            ]
            received, padded, parts, memory = zip(*self.world.gather(numbers), strict=True)
        lap = self.clock.lap()
        self.taken = step + 1
        lengths = [self.plan.lengths[index] for index in batch]
        row = {
            "step": step + 1,
            "loss": loss,
            "items": int(result.items),
            "grad_norm": None if result.grad_norm is None else result.grad_norm.item(),
            "lr": self.plan.rate(step),
            "seconds": lap.seconds,
            "tokens_per_second": sum(lengths) / lap.seconds,
            "micro_batches": sum(parts),
            "samples": len(batch),
            "tokens": sum(lengths),
            "epoch": round(self.stream.progress, 4),
            "padded_tokens": sum(padded),
            "padded_in_order": padded_tokens_in_order(lengths, sum(parts)),
            "memory_bytes": max(memory),
            "time": lap.parts(),
        }
        if result.losses is not None:
            row["losses"] = {name: term.item() for name, term in result.losses.items()}
        return row, max(received)

    def _window(self, samples: list[Sample]) -> StepResult:
        try:
            return self._train(samples)
        except FitError as error:
            if self._recomputes or self.settings.checkpoint_activations != "auto":
                raise
            logger.warning("activations are recomputed in the backward from now on, because otherwise %s", error)
        self._recomputes = True
        models.checkpoint_activations(self.model)
        self._train.forget_sizes()
        self._widths.clear()
        return self._train(samples)

    @torch.no_grad()
    def validate(self, corpus: Corpus) -> float:
        """The mean loss over these samples, computed by all ranks together."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self.model.eval()
        for micro_batch, weight in self._validation_batches(corpus):
            loss, items = self._loss(self.model, micro_batch)
            totals += weight * torch.stack([loss.double() * items, items.double()])
        self.model.train()
        if self.world.size > 1:
            torch.distributed.all_reduce(totals)
        return float(totals[0] / totals[1].clamp(min=1))

    def _validation_batches(self, corpus: Corpus) -> Iterator[tuple[Sample, int]]:
        """This rank's micro-batches with their weights: 0 for one that only makes ranks run equally many forwards."""
        plan = plan_by_tokens(corpus.lengths, max(VALIDATION_TOKENS[self.world.device.type], max(corpus.lengths)))
        for start in range(0, len(plan), self.world.size):
            number = start + self.world.rank
            part = plan[min(number, len(plan) - 1)]
            yield collate([corpus[index] for index in part]), int(number < len(plan))

    def _loss(self, model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        device, dtype = self.world.device, self._autocast
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        if self._inputs is not None and SEGMENTS in batch:
            batch = self._inputs(batch)
        elif self._padding.is_none:
            del batch["attention_mask"]
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None), self._attention():
            return causal_lm_loss(model, batch)

    def _encode(self, balance: Balance, model: nn.Module, batch: Sample) -> Encoded:
        shown = batch["attention_mask"] if SEGMENTS not in batch else batch[SEGMENTS] >= 0
        shown = shown.to(self.world.device, non_blocking=True)
        return experts.encode(balance, model, lambda: self._loss(model, batch), shown)

    def _attention(self) -> AbstractContextManager[object]:
        """The kernels of attention in order of preference. torch prefers cuDNN's, which plan each new shape for a long
        time.

        If there are few shapes, or if the device is no CUDA device, this leaves the choice to torch.
        """
        if self._has_few_shapes or self.world.device.type != "cuda":
            return contextlib.nullcontext()
        return sdpa_kernel(KERNELS, set_priority=True)

    def _collate(self, samples: list[Sample]) -> Sample:
        batch = collate(samples, few_widths=self._has_few_shapes) if self._packer is None else self._packer(samples)
        share = batch["input_ids"].numel() / len(samples)
        self._widths |= dict.fromkeys(map(id, samples), share)  # not added: a window may be retried
        return batch

    @property
    def _has_few_shapes(self) -> bool:
        return self.settings.cuda_graph and self.world.device.type == "cuda"

    # -------------------------------------------------------------------------------------------------- checkpoints

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        """Write a checkpoint. First raise the error of an infinite or NaN gradient, if none was raised yet."""
        facts = {
            "step": step,
            "accumulator": self._train.state_dict(),
            "stream": self.stream.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "best": self.best.state_dict(),
            "groups": optimizers.numbers_of(self.optimizers, self.settings),
        }
        checkpoints.save(step, checkpoint.state(self.model, self.optimizers), facts, spared=self.best.step)

    def resume(self, checkpoints: Checkpoints) -> int:
        """Resume from the newest checkpoint, and return its step; 0 if there is none."""
        while (path := checkpoints.newest()) is not None:
            try:
                return self._restore(checkpoints, path)
            except CheckpointError as error:
                checkpoints.pass_over(path, error)
        return 0

    def _restore(self, checkpoints: Checkpoints, path: Path) -> int:
        facts = checkpoint.restore(checkpoints, path, self.model, self.optimizers)
        try:
            self._train.load_state_dict(facts["accumulator"])
            self.stream.load_state_dict(facts["stream"])
            if self.scaler is not None:
                self.scaler.load_state_dict(facts["scaler"])
            self.taken = int(facts["step"])
            optimizers.put_back(self.optimizers, facts.get("groups", ()))
            if "best" in facts:
                self.best.load_state_dict(facts["best"])
            return self.taken
        except (UsageError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{path} has no valid position of the run: {error}") from error

    def load_best(self, checkpoints: Checkpoints) -> bool:
        """Load the weights of the best validation, and return whether they differ from the last ones."""
        path = checkpoints.of_step(self.best.step)
        if path is None or self.best.step in (0, self.taken):
            return False
        try:
            checkpoint.restore(checkpoints, path, self.model, self.optimizers)
        except CheckpointError as error:
            checkpoints.pass_over(path, error)
            return False
        return True


def _divergence_error(step: int) -> NonFiniteError:
    return NonFiniteError(
        f"the loss or its gradient is infinite or NaN after {step} steps, so the run has stopped. Its last checkpoint, "
        "if there is one, is unchanged. Look at the data, or start again with a lower --lr or a longer --warmup."
    )
