"""`macrobatch train`: the main path. What was derived -> batches -> `MacroStep` -> record -> validate -> save.

The losses of a run depend on its data, seed and batch only. Batches are those of all ranks (`Stream`), each rank takes
its share, and `MacroStep` makes the exact step of the whole, however it is cut.
"""

from __future__ import annotations

import math
import shlex
import shutil
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from macrobatch._cut.plans import plan_by_count, plan_by_tokens
from macrobatch.train import folder, generate, models, report
from macrobatch.train.checkpoint import Checkpoints
from macrobatch.train.data import Data
from macrobatch.train.documents import Say
from macrobatch.train.learner import Learner, Plan, drop_damaged_sizes
from macrobatch.train.record import Recorder, Silent
from macrobatch.train.settings import Settings
from macrobatch.train.signals import Signals
from macrobatch.train.stream import share
from macrobatch.train.world import World, joined


def train(settings: Settings) -> int:
    """Train as the settings say. Returns the exit status: 0, or 128 and the number of the signal that ended it."""
    with joined(settings) as world, ExitStack() as stack:
        world.together(lambda: models.check(settings, world))
        found = world.told(str(world.together(lambda: folder.chosen(settings)) or ""))
        data = world.together(lambda: Data.read(settings, _say_of(world)), alone_first=True)
        plan = world.together(lambda: Plan.made(settings, data, world))
        model = world.together(lambda: _model(settings, data))
        identity = _identity(settings, plan, data, model)
        world.together(lambda: drop_damaged_sizes(settings, world))
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
        if first:
            derived["model"] = f"{_named(settings, learner)}, resumed from step {first:,}"
        if past and plan.steps != past.steps:
            derived["steps"] += f", extended from {past.steps:,} to {plan.steps:,} steps"
        if world.is_first:
            checkpoints.sweep()
            if past is None:
                data.warn_of_few()
            else:
                folder.note(run, status=None)  # it goes on
            if past is None or plan.steps != past.steps:
                unused = ["vocabulary_size"] if settings.tokenizer or learner.origin.tokenizer else []
                folder.described(run, settings=settings, derived=derived, identity=identity, past=past, unused=unused)
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
            _say_ended(recorder, received, done, checkpoints.folder.parent)
            return 128 + received
    return 0


def _say_ended(recorder: Silent, received: int, step: int, run: Path) -> None:
    """What happened, and how to go on; beside the screen, where nobody reads that any more."""
    again = f"macrobatch train --resume --out {shlex.quote(str(run))}"
    text = f"ended after step {step}, with a checkpoint. To go on from there: {again}"
    if received == signal.SIGPIPE:
        recorder.warn(f"nobody reads the output any more, as a pipe or terminal was closed: {text}")
    else:
        recorder.say(f"{signal.Signals(received).name}: {text}")


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
    return generate.text_from(exported, prompt, tokens=settings.sample_tokens, seed=settings.seed)


# --------------------------------------------------------------------------------------------------- before the run


def _model(settings: Settings, data: Data) -> nn.Module:
    model = models.model_of(settings, data.vocabulary.size, data.vocabulary.end)
    data.fits(models.vocabulary_size_of(model), getattr(model.config, "max_position_embeddings", None))
    return model


def _say_of(world: World) -> Say | None:
    """Where to say how far it is, before there is a record: beside the screen of the run, on the first rank only."""
    return (lambda text: print(f"macrobatch: {text}", file=sys.stderr, flush=True)) if world.is_first else None


def _begun(settings: Settings, world: World) -> Path | None:
    return folder.made(settings) if world.is_first else None


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
    batch = plan.stream().next(plan.steps)
    mine = [plan.lengths[index] for index in share(batch, plan.lengths, 0, world.size)]
    kind, size = settings.cut[0], learner.micro_size
    parts = plan_by_tokens(mine, size) if kind == "tokens" else plan_by_count(len(mine), size or len(mine))
    how = {"tokens": f"by tokens, {size:,} at most", "count": f"of {size} samples", "auto": "the largest that fit"}
    shards = world.size if settings.parallel == "fsdp" else settings.shard_ranks or world.local_size
    shards = 1 if settings.parallel == "ddp" else shards
    tokenizer = settings.tokenizer or learner.origin.tokenizer
    width = torch.finfo(next(learner.model.parameters()).dtype).bits // 8
    return {
        "model": f"{_named(settings, learner)}, {'loaded' if learner.origin.has_weights else 'new weights'}",
        "data": f"{len(corpus):,} samples, {corpus.num_tokens:,} tokens; {len(data.validation):,} for validation",
        "vocabulary": f"{data.vocabulary.size:,} words, {f'of {tokenizer}' if tokenizer else 'trained on the data'}",
        "batch": f"{len(batch):,} samples, about {sum(plan.lengths[i] for i in batch):,} tokens",
        "ranks": f"{world.size} on {world.device.type}" + (f", {settings.parallel}" if world.size > 1 else ""),
        "micro-batches": f"about {len(parts)} on each rank, {how[kind]}",
        "memory": f"{_bytes(4 * width * learner.num_parameters / shards)} a rank for weights, gradients and AdamW",
        "steps": f"{plan.steps:,}, {plan.steps * len(batch) / len(corpus):.2f} epochs",
        "learning rate": f"{plan.rate.peak:g}, {plan.rate.schedule}, {plan.rate.warmup} steps of warm-up",
        "run": str(run),
    }


def _named(settings: Settings, learner: Learner) -> str:
    return f"{settings.model}: {learner.num_parameters:,} parameters in {settings.precision}"


def _bytes(number: float) -> str:
    power = min(int(math.log(max(number, 1), 1024)), 4)
    return f"{number / 1024**power:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
