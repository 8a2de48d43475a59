"""`macrobatch train`: the main path. What was derived -> batches -> `MacroStep` -> record -> validate -> save.

The losses of a run depend on its data, seed and batch only. Batches are those of all ranks (`Stream`), each rank takes
its share, and `MacroStep` makes the exact step of the whole, however it is cut.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch.errors import CheckpointError, NonFiniteError, UsageError
from macrobatch.fit import Sizes
from macrobatch.losses import causal_lm_loss
from macrobatch.macrostep import MacroStep
from macrobatch.plan import plan_by_count, plan_by_tokens
from macrobatch.split import by_tokens
from macrobatch.train import checkpoint, folder, generate, models, report
from macrobatch.train.best import Best
from macrobatch.train.checkpoint import Checkpoints
from macrobatch.train.clock import Clock
from macrobatch.train.corpus import Corpus, Sample, collated
from macrobatch.train.data import Data
from macrobatch.train.record import Recorder, Silent, padded_in_order, peak_memory
from macrobatch.train.schedule import Ramp, Rate, rate_of
from macrobatch.train.settings import DEFAULT_BATCH, DEFAULT_STEPS, Settings
from macrobatch.train.signals import Signals
from macrobatch.train.stream import Stream, share
from macrobatch.train.world import World, joined

logger = logging.getLogger("macrobatch")

MICRO_TOKENS = {"cpu": 1024, "cuda": 16384}  # in a micro-batch, where nothing is said


def train(settings: Settings) -> int:
    """Train as the settings say. Returns the exit status: 0, or 128 and the number of the signal that ended it."""
    with joined(settings) as world, ExitStack() as stack:
        world.together(lambda: models.check(settings, world))
        found = world.told(str(world.together(lambda: folder.chosen(settings)) or ""))
        data = world.together(lambda: Data.read(settings), alone_first=True)
        plan = world.together(lambda: Plan.made(settings, data, world))
        model = world.together(lambda: _model(settings, data))
        identity = _identity(settings, plan, data, model)
        world.together(lambda: _drop_damaged_sizes(settings, world))
        learner = world.together(lambda: Learner(model, plan, settings, world))
        run = Path(found or world.told(str(world.together(lambda: _begun(settings, world)))))
        world.together(lambda: stack.enter_context(folder.locked(run)) if world.is_first else None)
        past = world.together(lambda: _past(found, run, identity, settings))  # only now: nobody else writes there
        owners = (folder.digest_of(identity), *(past.owners if past else ()))
        checkpoints = Checkpoints(run / "checkpoints", keep=settings.keep, owners=owners)
        first = learner.resumed(checkpoints) if past else 0
        if past:
            world.together(lambda: past.require_whole(first, plan.steps))
        derived = _derived(settings, plan, data, learner, run)
        if past and plan.steps != past.steps:
            derived["steps"] += f", extended from {past.steps:,} to {plan.steps:,} steps"
        if world.is_first:
            checkpoints.sweep()
            if past is not None:
                folder.note(run, status=None)  # it goes on
            if past is None or plan.steps != past.steps:
                folder.described(run, settings=settings, derived=derived, identity=identity, past=past)
        recorder: Silent = Silent()
        with Signals(say=lambda text: recorder.say(text)) as signals:
            recorder = stack.enter_context(_recorder(run, plan.steps, first if past else None, world, signals))
            recorder.derived(derived)
            if first == plan.steps:  # what a killed process may not have finished is made again
                recorder.say(f"{run} is complete: it has taken its {first} steps.")
            status = _loop(learner, data, first, checkpoints, recorder, signals)
            return _ended(learner, data, run, recorder, checkpoints, status)


def _loop(
    learner: Learner, data: Data, first: int, checkpoints: Checkpoints, recorder: Silent, signals: Signals
) -> int:
    settings, steps = learner.settings, learner.plan.steps
    best = learner.best
    for done in range(first + 1, steps + 1):
        if best.is_over(settings.early_stop):
            recorder.say(f"stopped after step {done - 1}: no validation was better than that of step {best.step}.")
            return 0
        row, received = learner.step(done - 1, data.train, signals)
        recorder.step(row)
        is_best = False
        if len(data.validation) and _is_due(done, settings.validate_every, done == steps):
            with learner.clock.aside("validation"):
                loss = learner.validated(data.validation)
                recorder.validation(done, loss)
                is_best = best.is_improved(done, loss) and settings.save_every > 0
        is_last = done == steps or received > 0 or best.is_over(settings.early_stop)
        if is_best or _is_due(done, settings.save_every, is_last):
            with learner.clock.aside("checkpoint"):
                recorder.flush()
                learner.save(checkpoints, done)
                if learner.world.is_first:
                    folder.note_saved(checkpoints.folder.parent)
        if received:
            recorder.say(f"ended by signal {received} after step {done}; --resume goes on from there.")
            return 128 + received
    return 0


def _is_due(step: int, every: int, is_last: bool) -> bool:
    return is_last or (every > 0 and step % every == 0)


def _ended(learner: Learner, data: Data, run: Path, recorder: Silent, checkpoints: Checkpoints, status: int) -> int:
    """What a run leaves for people: the model, the best one too where that is another, a report, a text."""
    exported = models.exported(learner.model, run / "model", data.vocabulary, learner.kept, learner.world)
    said = [f"model: {exported}"]
    if learner.best.step == learner.taken and learner.world.is_first:
        shutil.rmtree(run / "model-best", ignore_errors=True)  # of before it was extended
    if status == 0 and learner.restored_best(checkpoints):
        best = models.exported(learner.model, run / "model-best", data.vocabulary, learner.kept, learner.world)
        said.append(f"model of the best validation, after step {learner.best.step}: {best}")
    if learner.world.is_first:
        sample = _sample(learner, data, exported) if status == 0 else None
        folder.note(run, status=status, sample=sample)
        said.append(f"report: {report.written(run)}")
        recorder.finish([*said, *([f"\n{sample}\n"] if sample else [])])
    return status


def _sample(learner: Learner, data: Data, exported: Path) -> str | None:
    """A text by the model."""
    settings = learner.settings
    if not settings.sample_tokens:
        return None
    prompt = settings.prompt or data.opening
    return generate.from_folder(exported, prompt, tokens=settings.sample_tokens, seed=settings.seed)


# --------------------------------------------------------------------------------------------------- before the run


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What follows from settings and data: how many steps, of which batches, at which learning rate."""

    lengths: list[int]
    seed: int
    batch_size: int | None
    batch_tokens: int | None
    ramp: Ramp | None
    steps: int
    epochs: int | None
    rate: Rate

    @classmethod
    def made(cls, settings: Settings, data: Data, world: World) -> Plan:
        """The plan; refuses a batch that cannot be."""
        batch_size = None if settings.batch_tokens else settings.batch_size or DEFAULT_BATCH
        ramp = Ramp(steps=settings.batch_ramp, start=settings.batch_ramp_start) if settings.batch_ramp else None
        smallest = 0 if batch_size is None else max(round(batch_size * (ramp(0) if ramp else 1)), 1)
        if batch_size is not None and smallest < world.size:
            raise UsageError(
                f"a batch of {smallest} samples is smaller than the {world.size} ranks: each needs one at least. Raise "
                f"--batch-size{' or --batch-ramp-start' if ramp else ''}, or start fewer ranks."
            )
        lengths, steps = data.train.lengths, settings.steps or DEFAULT_STEPS
        if settings.epochs is not None:
            batches = Stream(
                lengths, seed=settings.seed, batch_size=batch_size, batch_tokens=settings.batch_tokens, ramp=ramp
            )
            steps = batches.num_steps(settings.epochs)
        return cls(
            lengths=lengths,
            seed=settings.seed,
            batch_size=batch_size,
            batch_tokens=settings.batch_tokens,
            ramp=ramp,
            steps=steps,
            epochs=settings.epochs,
            rate=rate_of(settings, steps, models.learning_rate(settings)),
        )

    def stream(self) -> Stream:
        """The batches, from the first."""
        return Stream(
            self.lengths,
            seed=self.seed,
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
            ramp=self.ramp,
            epochs=self.epochs,
        )


def _model(settings: Settings, data: Data) -> nn.Module:
    model = models.model_of(settings, data.vocabulary.size, data.vocabulary.end)
    data.fits(models.vocabulary_size_of(model), getattr(model.config, "max_position_embeddings", None))
    return model


def _begun(settings: Settings, world: World) -> Path | None:
    return folder.made(settings) if world.is_first else None


def _fit_file(settings: Settings) -> Path | None:
    """Where the sizes that fit into memory are remembered."""
    return Path(settings.out, "fit.json") if settings.cut[0] == "auto" and settings.out else None


def _drop_damaged_sizes(settings: Settings, world: World) -> None:
    """Remove a file of sizes that cannot be read: they are found anew, which costs a few steps some time."""
    file = _fit_file(settings)
    if file is None or not world.is_first or not file.exists():
        return
    try:
        if file.is_file():
            Sizes(file)
            return
    except (UsageError, RecursionError):
        pass
    logger.warning("%s is damaged, and removed: the sizes that fit are found anew.", file)
    file.unlink()


def _past(found: str, run: Path, identity: dict[str, Any], settings: Settings) -> folder.Past | None:
    """What a run to go on with has behind it; None: this is a new one."""
    if found:
        return folder.Past.of(run, identity, own_warmup=settings.warmup is not None)
    folder.require_unused(run)
    return None


def _identity(settings: Settings, plan: Plan, data: Data, model: nn.Module) -> dict[str, Any]:
    """What the losses of a run depend on. Ranks, micro-batches and the backend are not in it."""
    return {
        "model": models.summary(model),
        "weights": None if settings.model in models.SIZES else settings.model,
        "data": data.train.fingerprint,
        "vocabulary": data.vocabulary.fingerprint,
        "seed": settings.seed,
        "batch": {"samples": plan.batch_size, "tokens": plan.batch_tokens},
        "batch_ramp": [settings.batch_ramp, settings.batch_ramp_start],
        "steps": plan.steps,
        "learning_rate": [plan.rate.peak, plan.rate.warmup, plan.rate.schedule, plan.rate.final],
        "adamw": [settings.beta1, settings.beta2, settings.eps, settings.weight_decay],
        "max_norm": str(settings.max_norm),
        "precision": settings.precision,
    }


def _recorder(run: Path, steps: int, resume_step: int | None, world: World, signals: Signals) -> Silent:
    if not world.is_first:
        return Silent()
    unread = partial(signals.receive, signal.SIGPIPE)
    return Recorder(run, total_steps=steps, resume_step=resume_step, unread=unread)


def _derived(settings: Settings, plan: Plan, data: Data, learner: Learner, run: Path) -> dict[str, str]:
    """What is printed first."""
    world, corpus = learner.world, data.train
    parameters = sum(p.numel() for p in learner.model.parameters())
    batch = plan.stream().next(plan.steps)
    mine = [plan.lengths[index] for index in share(batch, plan.lengths, 0, world.size)]
    kind, size = settings.cut[0], learner.micro_size
    parts = plan_by_tokens(mine, size) if kind == "tokens" else plan_by_count(len(mine), size or len(mine))
    how = {"tokens": f"by tokens, {size:,} at most", "count": f"of {size} samples", "auto": "the largest that fit"}
    shards = world.size if settings.parallel == "fsdp" else settings.shard_ranks or world.local_size
    shards = 1 if settings.parallel == "ddp" else shards
    width = torch.finfo(next(learner.model.parameters()).dtype).bits // 8
    return {
        "model": f"{settings.model}: {parameters:,} parameters in {settings.precision}, "
        + ("loaded" if learner.origin.has_weights else "new weights"),
        "data": f"{len(corpus):,} samples, {corpus.num_tokens:,} tokens; {len(data.validation):,} for validation",
        "vocabulary": f"{data.vocabulary.size:,} words",
        "batch": f"{len(batch):,} samples, about {sum(plan.lengths[i] for i in batch):,} tokens",
        "ranks": f"{world.size} on {world.device.type}" + (f", {settings.parallel}" if world.size > 1 else ""),
        "micro-batches": f"about {len(parts)} on each rank, {how[kind]}",
        "memory": f"{_bytes(4 * width * parameters / shards)} a rank for weights, gradients and AdamW",
        "steps": f"{plan.steps:,}, {plan.steps * len(batch) / len(corpus):.2f} epochs",
        "learning rate": f"{plan.rate.peak:g}, {plan.rate.schedule}, {plan.rate.warmup} steps of warm-up",
        "run": str(run),
    }


def _bytes(number: float) -> str:
    power = min(int(math.log(max(number, 1), 1024)), 4)
    return f"{number / 1024**power:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


# ------------------------------------------------------------------------------------------------------ what learns


class Learner:
    """Model, optimizer and position in the data: what a step changes, and a checkpoint holds."""

    def __init__(self, model: nn.Module, plan: Plan, settings: Settings, world: World) -> None:
        self.settings, self.plan, self.world = settings, plan, world
        self.origin = models.origin_of(settings)
        self.kept = self.origin.kept()
        torch.manual_seed((settings.seed + world.rank) % 2**63)  # for dropout: every rank draws numbers of its own
        self.stream = plan.stream()
        self.model = models.prepared(model, settings, world)
        self.optimizer = _adamw(self.model, settings)
        self.scaler = torch.amp.GradScaler(world.device.type) if settings.precision == "fp16" else None
        self.clock = Clock(world.device)
        self.best = Best()
        self.taken = 0  # steps
        self._widths: dict[int, int] = {}  # of the micro-batch that each sample of this window was last put into
        kind, size = settings.cut
        longest = max(plan.lengths)
        self.micro_size = (
            max(MICRO_TOKENS[world.device.type], longest) if (kind, size) == ("tokens", None) else size or 0
        )
        self._train = MacroStep(
            self.model,
            self.optimizer,
            self._loss,
            micro=by_tokens(self.micro_size) if kind == "tokens" else "auto" if kind == "auto" else self.micro_size,
            collate=self._collated,
            max_norm=settings.max_norm,
            scaler=self.scaler,
            accumulate_dtype=torch.float32 if settings.precision == "pure-bf16" else None,
            cuda_graph=settings.cuda_graph,
            fit_file=_fit_file(settings),
        )
        self.clock.watch(self._train)

    def step(self, step: int, corpus: Corpus, signals: Signals) -> tuple[dict[str, Any], int]:
        """Take the step that comes after `step` others. Returns its line for the metrics, and a signal any rank got."""
        with self.clock.part("data"):
            batch = self.stream.next(step)
            mine = share(batch, self.plan.lengths, self.world.rank, self.world.size)
            samples = [corpus[index] for index in mine]
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(step)
        self._widths.clear()
        try:
            result = self._train(samples)
            loss = result.loss.item()
        except NonFiniteError as error:
            raise _blown_up(step) from error
        if not math.isfinite(loss):
            raise _blown_up(step)
        with self.clock.part("communication"):
            numbers = [
                signals.received,
                sum(self._widths.values()),
                result.micro_batches,
                peak_memory(self.world.device),
            ]
            received, padded, parts, memory = zip(*self.world.gathered(numbers), strict=True)
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
            "padded_in_order": padded_in_order(lengths, sum(parts)),
            "memory_bytes": max(memory),
            "time": lap.parts(),
        }
        return row, max(received)

    @torch.no_grad()
    def validated(self, corpus: Corpus) -> float:
        """The mean loss over these samples, on all ranks."""
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
        """This rank's micro-batches, each with 1, or with 0 where it only keeps other ranks company."""
        plan = plan_by_tokens(corpus.lengths, max(MICRO_TOKENS[self.world.device.type], max(corpus.lengths)))
        for start in range(0, len(plan), self.world.size):
            number = start + self.world.rank
            part = plan[min(number, len(plan) - 1)]
            yield collated([corpus[index] for index in part]), int(number < len(plan))

    def _loss(self, model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
        device, dtype = self.world.device, models.AUTOCAST.get(self.settings.precision)
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            return causal_lm_loss(model, batch)

    def _collated(self, samples: list[Sample]) -> Sample:
        batch = collated(samples, few_widths=self.settings.cuda_graph and self.world.device.type == "cuda")
        self._widths |= dict.fromkeys(map(id, samples), batch["input_ids"].shape[1])  # not added up: some come twice
        return batch

    # -------------------------------------------------------------------------------------------------- checkpoints

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        """Write a checkpoint. An infinite or NaN gradient that nobody has seen yet is raised first."""
        facts = {
            "step": step,
            "accumulator": self._train.state_dict(),
            "stream": self.stream.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "best": self.best.state_dict(),
        }
        checkpoints.save(step, checkpoint.state(self.model, self.optimizer), facts, spared=self.best.step)

    def resumed(self, checkpoints: Checkpoints) -> int:
        """Go on from the newest checkpoint. Returns its step; 0 where there is none."""
        while (path := checkpoints.newest()) is not None:
            try:
                return self._restored(checkpoints, path)
            except CheckpointError as error:
                checkpoints.pass_over(path, error)
        return 0

    def _restored(self, checkpoints: Checkpoints, path: Path) -> int:
        facts = checkpoint.restore(checkpoints, path, self.model, self.optimizer)
        try:
            self._train.load_state_dict(facts["accumulator"])
            self.stream.load_state_dict(facts["stream"])
            if self.scaler is not None:
                self.scaler.load_state_dict(facts["scaler"])
            self.taken = int(facts["step"])
            if "best" in facts:
                self.best.load_state_dict(facts["best"])
            return self.taken
        except (UsageError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{path} does not say where the run was: {error}") from error

    def restored_best(self, checkpoints: Checkpoints) -> bool:
        """Put back the weights of the best validation, where they are others than those of the end."""
        path = checkpoints.of_step(self.best.step)
        if path is None or self.best.step in (0, self.taken):
            return False
        try:
            checkpoint.restore(checkpoints, path, self.model, self.optimizer)
        except CheckpointError as error:
            checkpoints.pass_over(path, error)
            return False
        return True


def _blown_up(step: int) -> NonFiniteError:
    return NonFiniteError(
        f"the loss or its gradient is infinite or NaN after {step} steps, and the run has ended. Its last checkpoint, "
        "if it has one, is as it was. Look at the data, or begin again with a lower --lr or a longer --warmup."
    )


def _adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Decay is for matrices. The fused kernel cannot divide gradients in float64, so it is not used there."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=models.learning_rate(settings),
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=settings.precision != "float64",
    )
