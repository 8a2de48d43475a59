"""`macrobatch train`: the training loop. Take a batch, step with `MacroStep`, record, validate, save.

The losses of a run depend only on its data, seed and batch. `Stream` makes the batches of all ranks together, each rank
takes its share, and `MacroStep` takes the exact step of the whole batch, however it is cut.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from macrobatch._joint.balance import Balance
from macrobatch._torch.modules import without_ddp
from macrobatch.errors import MacrobatchError, UsageError
from macrobatch.train import adapters, cutting, folder, generate, models, optimizers, report, trackers
from macrobatch.train.charts import in_bytes
from macrobatch.train.checkpoint import Checkpoints
from macrobatch.train.data import Data
from macrobatch.train.documents import Say
from macrobatch.train.export import export_model
from macrobatch.train.files import replace_whole
from macrobatch.train.hooks import Callback, Evaluate, Event, Hooks, perplexity_of
from macrobatch.train.learner import Learner, Plan
from macrobatch.train.outcome import Outcome
from macrobatch.train.record import Recorder, Silent
from macrobatch.train.settings import Settings
from macrobatch.train.signals import Signals
from macrobatch.train.stream import Mixture, share
from macrobatch.train.world import World, join_ranks


def train(settings: Settings, *, callbacks: Sequence[Callback] = (), evaluate: Evaluate | None = None) -> Outcome:
    """Train a language model from a program, as the command ``macrobatch train`` does.

    It prints progress and writes a run folder. Under torchrun, call it on every rank. docs/train.md has more examples.

    ```python
    from macrobatch.train import Settings, train

    outcome = train(Settings(model="tiny", data=("texts/",), steps=100))
    print(outcome.metrics[-1]["loss"], outcome.model)
    ```

    Args:
        settings: the settings of the run, which have the same names as the flags of ``macrobatch train``.
        callbacks: functions that get an `Event`. The first rank calls them after every step and every validation. A
            callback that raises `StopTraining` ends the run after this step, with a checkpoint. If it raises any other
            error, the run writes a checkpoint, and `train` raises that error.
        evaluate: a function that gets the model and a tokenizer of transformers, and returns a dict of numbers to
            record. Every rank calls it in each validation. Default: the function that ``settings.evaluate`` names, if
            any.

    Returns:
        The exit status as a number, with the run folder and its contents as attributes. The status is 0, or 128 plus
        the number of the signal that ended the run.

    Raises:
        MacrobatchError: an error that the command would print, such as an invalid setting or a damaged file.
    """
    with join_ranks(settings) as world, ExitStack() as stack:
        settings = replace(settings, precision=models.precision_of(settings, world))
        world.on_all_ranks(lambda: optimizers.check(settings))
        world.on_all_ranks(lambda: models.check(settings, world))
        world.on_all_ranks(lambda: trackers.require_installed(settings.trackers or ()) if world.is_first else None)
        hooks = world.on_all_ranks(lambda: Hooks(settings, world, callbacks, evaluate))
        hooks.agree()
        found = world.broadcast(str(world.on_all_ranks(lambda: folder.run_to_resume(settings)) or ""))
        data = world.on_all_ranks(lambda: Data.read(settings, _say_of(world), is_new=not found), alone_first=True)
        asked, settings = settings, replace(settings, seq_len=data.seq_len)
        plan = world.on_all_ranks(lambda: Plan.make(settings, data, world))
        model, balance = world.on_all_ranks(lambda: _model(settings, data))
        identity = _identity(settings, plan, data, model) | _identity_of_adapter(model, world)
        world.on_all_ranks(lambda: cutting.drop_damaged_sizes(cutting.fit_file(settings, plan.micro), world))
        learner = world.on_all_ranks(lambda: Learner(model, plan, settings, world, balance))
        baseline = {} if found else hooks.check(learner.model, data.vocabulary)
        run = Path(found or world.broadcast(str(world.on_all_ranks(lambda: _create_folder(settings, world)))))
        world.on_all_ranks(lambda: stack.enter_context(folder.lock(run)) if world.is_first else None)
        past = world.on_all_ranks(lambda: _past(found, run, identity, settings))  # after the lock
        owners = (folder.digest_of(identity), *(past.owners if past else ()))
        checkpoints = Checkpoints(run / "checkpoints", keep=settings.keep, owners=owners)
        first = learner.resume(checkpoints) if past else 0
        if past:
            world.on_all_ranks(lambda: past.require_whole(first, plan.steps))
        derived = _derived_facts(settings, plan, data, learner, run)
        if first:
            derived["model"] = f"{_model_summary(settings, learner)}, resumed from step {first:,}"
        if past and plan.steps != past.steps:
            derived["steps"] += f", extended from {past.steps:,} to {plan.steps:,} steps"
        if world.is_first:
            checkpoints.sweep()
            if past is None:
                data.warn_of_few()
            else:
                folder.note(run, status=None, stopped=None)  # the run is no longer ended
            if past is None or plan.steps != past.steps:
                unused = ["vocabulary_size"] if settings.tokenizer or learner.origin.tokenizer else []
                folder.write_run_json(run, settings=asked, derived=derived, identity=identity, past=past, unused=unused)
            replace_whole(run / folder.CONFIG, settings.toml())
        recorder: Recorder | Silent = Silent()
        with Signals(say=lambda text: recorder.say(text)) as signals:
            resume_step = first if past else None
            try:
                recorder = world.on_all_ranks(lambda: _recorder(run, plan.steps, resume_step, settings, world, signals))
            except MacrobatchError:  # a tracker that cannot be opened
                if past is None and world.is_first:
                    shutil.rmtree(run, ignore_errors=True)  # no step was taken
                raise
            stack.enter_context(recorder)
            recorder.show_derived(derived)
            if past is None:
                recorder.say(data.example)
            if baseline:
                recorder.validation(0, baseline)
            if first == plan.steps:  # a killed process may not have written model and report
                recorder.say(f"{run} is complete: it has taken its {first} steps.")
            status = _loop(learner, data, first, checkpoints, recorder, signals, hooks)
            finish_run(learner, data, run, recorder, checkpoints, status, hooks.is_stopped)
            return Outcome(status, run=run, steps=learner.taken)


def _loop(
    learner: Learner,
    data: Data,
    first: int,
    checkpoints: Checkpoints,
    recorder: Recorder | Silent,
    signals: Signals,
    hooks: Hooks,
) -> int:
    settings, steps, run = learner.settings, learner.plan.steps, checkpoints.folder.parent
    best = learner.best
    for done in range(first + 1, steps + 1):
        if best.is_over(settings.early_stop):
            recorder.say(f"stopped after step {done - 1}: no validation was better than that of step {best.step}.")
            return 0
        row, received = learner.step(done - 1, data.train, signals)
        recorder.step(row)
        hooks.tell(Event(kind="step", step=done, numbers=row, run=run))
        is_best = False
        if (len(data.validation) or hooks.evaluates) and _is_due(done, settings.validate_every, done == steps):
            with learner.clock.aside("validation"):
                numbers = _validate(learner, data, hooks)
                if numbers:
                    recorder.validation(done, numbers)
                    hooks.tell(Event(kind="validation", step=done, numbers={"step": done, **numbers}, run=run))
                if best.name in numbers:
                    is_best = best.is_improved(done, numbers[best.name]) and settings.save_every > 0
        is_last = done == steps or received > 0 or hooks.is_over or best.is_over(settings.early_stop)
        if is_best or _is_due(done, settings.save_every, is_last):
            with learner.clock.aside("checkpoint"):
                recorder.flush()
                learner.save(checkpoints, done)
                if learner.world.is_first:
                    folder.note_saved(run)
        if hooks.failure is not None:
            recorder.warn(f"a callback or the evaluation failed: {_resume_hint(done, run)}")
            raise hooks.failure
        if received:
            _say_ended(recorder, received, done, run)
            return 128 + received
        if hooks.is_stopped:
            recorder.say(f"a callback asked to stop: {_resume_hint(done, run)}")
            return 0
    return 0


def _validate(learner: Learner, data: Data, hooks: Hooks) -> Mapping[str, float]:
    """The numbers of a validation: loss and perplexity if there is data for it, and those of the user's function."""
    numbers: dict[str, float] = {}
    if len(data.validation):
        loss = learner.validate(data.validation)
        numbers = {"loss": loss, "perplexity": perplexity_of(loss)}
    return numbers | hooks.run_evaluation(learner.model, data.vocabulary)


def _resume_hint(step: int, run: Path) -> str:
    again = f"macrobatch train --resume --out {shlex.quote(str(run))}"
    return f"ended after step {step}, with a checkpoint. To resume: {again}"


def _say_ended(recorder: Recorder | Silent, received: int, step: int, run: Path) -> None:
    """Print why the run ended, and how to resume it; on stderr if the output is closed."""
    text = _resume_hint(step, run)
    if received == signal.SIGPIPE:
        recorder.warn(f"the output was closed: {text}")
    else:
        recorder.say(f"{signal.Signals(received).name}: {text}")


def _is_due(step: int, every: int, is_last: bool) -> bool:
    return is_last or (every > 0 and step % every == 0)


def finish_run(
    learner: Learner,
    data: Data,
    run: Path,
    recorder: Recorder | Silent,
    checkpoints: Checkpoints,
    status: int,
    is_stopped: bool,
) -> None:
    """Write the model, the best model too if it is another one, the report, and a text by the model."""
    export = partial(export_model, has_balance=learner.balance is not None)
    written, *adapter = export(learner.model, run, data.vocabulary, learner.kept, learner.world)
    said = [f"model: {written}", *(f"adapter: {folder}" for folder in adapter)]
    if learner.best.step == learner.taken and learner.world.is_first:
        for name in ("model-best", "adapter-best"):
            shutil.rmtree(run / name, ignore_errors=True)  # from before the run was extended
    if status == 0 and learner.load_best(checkpoints):
        best, *_ = export(learner.model, run, data.vocabulary, learner.kept, learner.world, which="-best")
        said.append(f"model of the best validation, after step {learner.best.step}: {best}")
    if learner.world.is_first:
        sample = _sample(learner, data, written) if status == 0 else None
        folder.note(run, status=status, sample=sample, stopped="by a callback" if is_stopped else None)
        said.append(f"report: {report.write_report(run)}")
        state: trackers.State = "interrupted" if status else "finished"
        recorder.finish([*said, *([f"\n{sample}\n"] if sample else [])], state)


def _sample(learner: Learner, data: Data, exported: Path) -> str | None:
    """A text by the model; None if the settings want none."""
    settings = learner.settings
    if not settings.sample_tokens:
        return None
    prompt = settings.prompt or data.opening
    return generate.text_from(exported, prompt, tokens=settings.sample_tokens, seed=settings.seed)


# --------------------------------------------------------------------------------------------------- before the run


def _model(settings: Settings, data: Data) -> tuple[nn.Module, Balance | None]:
    model, balance = models.build_model(settings, data.vocabulary.size, data.vocabulary.end)
    config: Any = model.config
    positions = models.longest_of(config)
    data.check_fit(models.vocabulary_size_of(model), positions, packs=settings.pack)
    if settings.prompt is not None and settings.sample_tokens:
        size = len(data.vocabulary.start) + len(data.vocabulary.encode([settings.prompt])[0])
        if positions is not None and size > positions:
            raise UsageError(f"--prompt has {size:,} tokens, and the model takes {positions:,}: shorten it.")
    data.warn_of_tokenizer(settings, models.vocabulary_size_of(model), getattr(config, "eos_token_id", None))
    return model, balance


def _say_of(world: World) -> Say | None:
    """A function that prints the progress on stderr, before there is a recorder; None except on the first rank."""
    return (lambda text: print(f"macrobatch: {text}", file=sys.stderr, flush=True)) if world.is_first else None


def _create_folder(settings: Settings, world: World) -> Path | None:
    return folder.create_run_folder(settings) if world.is_first else None


def _past(found: str, run: Path, identity: dict[str, Any], settings: Settings) -> folder.Past | None:
    """The history of the run to resume; None for a new run."""
    if found:
        return folder.Past.of(run, identity, own_warmup=settings.warmup is not None)
    folder.require_unused(run)
    return None


def _identity(settings: Settings, plan: Plan, data: Data, model: nn.Module) -> dict[str, Any]:
    """Everything that the losses of a run depend on. Ranks, micro-batches and the backend are not part of it."""
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
        "optimizer": _identity_of_optimizer(settings),
        "adamw": [settings.beta1, settings.beta2, settings.eps, settings.weight_decay],
        "max_norm": str(settings.max_norm),
        "precision": settings.precision,
        "mixture": None if plan.mixture is None else [*plan.mixture.weights],
    }


def _identity_of_adapter(model: nn.Module, world: World) -> dict[str, Any]:
    """The identity of an adapter. It includes the frozen weights, because checkpoints do not hold them."""
    adapter = adapters.adapter_summary(model)
    frozen = adapters.frozen_fingerprint(model) if adapter and world.is_first else ""
    return {"lora": adapter, "frozen": world.broadcast(frozen) or None}


def _identity_of_optimizer(settings: Settings) -> dict[str, Any] | None:
    """Name and options of the optimizer; None for AdamW without options, as in runs of older versions."""
    options = optimizers.options_of(settings)
    return None if settings.optimizer == "adamw" and not options else {"name": settings.optimizer, **options}


def _recorder(
    run: Path, steps: int, resume_step: int | None, settings: Settings, world: World, signals: Signals
) -> Recorder | Silent:
    if not world.is_first:
        return Silent()
    unread = partial(signals.receive, signal.SIGPIPE)
    told = trackers.TrackedRun(
        folder=run, project=settings.track_project, config=settings.lasting, resume_step=resume_step
    )
    named = settings.trackers
    tracker = trackers.Trackers({}) if named is None else trackers.open_trackers(named, told)
    return Recorder(run, total_steps=steps, resume_step=resume_step, tracker=tracker, unread=unread)


def _derived_facts(settings: Settings, plan: Plan, data: Data, learner: Learner, run: Path) -> dict[str, str]:
    """What was derived from settings and data, to print before the run begins."""
    world, corpus = learner.world, data.train
    batch = plan.stream().next(plan.steps)
    repeated = "; more than the data has, so samples come several times" if len(batch) > len(corpus) else ""
    mine = [plan.lengths[index] for index in share(batch, plan.lengths, 0, world.size)]
    shards = world.size if settings.parallel == "fsdp" else settings.shard_ranks or world.local_size
    shards = 1 if settings.parallel == "ddp" else shards
    tokenizer = settings.tokenizer or learner.origin.tokenizer
    of = f"of {tokenizer}" if tokenizer else "trained on the data"
    rows = models.vocabulary_size_of(without_ddp(learner.model))
    room = f"; the model has {rows:,}" if rows != data.vocabulary.size else ""
    fixed, counted = optimizers.fixed_bytes(learner.model, settings, shards)
    return {
        "model": f"{_model_summary(settings, learner)}, {'loaded' if learner.origin.has_weights else 'new weights'}",
        **_adapter_summary(learner),
        **(
            {"experts": f"with their balance loss, {balance.coefficient:g} of it"}
            if (balance := learner.balance)
            else {}
        ),
        "data": f"{len(corpus):,} samples, {corpus.num_tokens:,} tokens; {len(data.validation):,} for validation",
        **({"mixture": _mixture_summary(plan.mixture, settings.data)} if plan.mixture else {}),
        "lengths": data.length_summary,
        "vocabulary": f"{data.vocabulary.size:,} words, {of}{room}",
        "batch": f"{len(batch):,} samples, about {sum(plan.lengths[i] for i in batch):,} tokens{repeated}",
        "ranks": f"{world.size} on {world.device.type}" + (f", {settings.parallel}" if world.size > 1 else ""),
        "micro-batches": cutting.cut_summary(plan.micro, mine),
        "memory": f"{in_bytes(fixed)} a rank for {counted}",
        "steps": plan.extent,
        "learning rate": f"{plan.rate.peak:g}, {plan.rate.schedule}, {plan.rate.warmup} steps of warm-up",
        "run": str(run),
    }


def _mixture_summary(mixture: Mixture, names: Sequence[str]) -> str:
    """What an epoch has of each source."""
    parts = zip(names, mixture.members, mixture.counts, strict=True)
    return "; ".join(
        f"{count:,} samples of {name} an epoch, each {count / len(members):.2g} times" for name, members, count in parts
    )


def _adapter_summary(learner: Learner) -> dict[str, str]:
    """How many parameters are trained, if an adapter is trained."""
    adapter = adapters.adapter_summary(without_ddp(learner.model))
    if adapter is None:
        return {}
    part = f"{learner.num_trained:,} of {learner.num_parameters:,} parameters"
    return {"trained": f"LoRA of rank {adapter['rank']}: {part} ({learner.num_trained / learner.num_parameters:.2%})"}


def _model_summary(settings: Settings, learner: Learner) -> str:
    return f"{settings.model}: {learner.num_parameters:,} parameters in {settings.precision}"
