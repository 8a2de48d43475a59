"""`exact(Trainer)` in one process: against one big batch in plain torch, and beside the trainer as it is."""

import copy
import inspect
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM, Trainer, TrainerCallback

from harness.trainers import (
    MeanOverPositions,
    Noting,
    apart,
    arguments,
    collate,
    make,
    one_big_batch,
    samples,
    train,
    trainer,
)
from macrobatch import MacrobatchError, by_tokens, verify
from macrobatch.errors import BackendError, UsageError
from macrobatch.transformers import exact

KINDS = ("llama", "gpt2", "mixtral", "bert", "t5")
WAYS = {"batches": {}, "tokens": {"micro": by_tokens(40)}, "three": {"micro": 3}, "auto": {"micro": "auto"}}
WAYS["tokens that fit"] = {"micro": by_tokens("auto")}
# The losses of these models are computed in float32, whatever their weights are.
ROUNDING = {"bert": 1e-14, "llama": 3e-8, "gpt2": 3e-8, "mixtral": 3e-8, "t5": 3e-8}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_one_big_batch(kind, steps, way):
    data = samples(kind, 13)  # the last window has one batch of two, and one of one, or less
    expected, losses = one_big_batch(kind, data, 2 * steps)
    made = trainer(kind, exact(Trainer, **WAYS[way]), data, steps=steps)
    assert train(made) == pytest.approx(losses, abs=2e-6)
    assert apart(made, expected) <= ROUNDING[kind]


@pytest.mark.parametrize(("kind", "least"), [("gpt2", 1e-4), ("mixtral", 1e-3), ("bert", 1e-2), ("t5", 1e-2)])
def test_the_trainer_as_it_is_differs(kind, least):
    """Otherwise the test above would show nothing: these are the mistakes that docs/from-trainer.md names."""
    data = samples(kind, 8)
    made = trainer(kind, Trainer, data)
    train(made)
    assert apart(made, one_big_batch(kind, data, 8)[0]) > least


def test_clipping_and_gradient_norms_are_those_of_one_big_batch():
    data = samples("bert", 16)
    expected, _ = one_big_batch("bert", data, 8, max_norm=0.3)
    noting = Noting()
    made = trainer("bert", exact(Trainer), data, max_grad_norm=0.3, callbacks=[noting])
    train(made)
    assert apart(made, expected) <= 1e-14
    assert noting.logs[0]["grad_norm"] > 0.3


def test_beside_the_trainer_as_it_is():
    """Where that is right: the same losses, norms and rates are logged, and callbacks see the same."""
    data, seen = samples("llama", 24), {}
    for name, trainer_class in (("theirs", Trainer), ("ours", exact(Trainer))):
        noting = Noting()
        made = trainer("llama", trainer_class, data, callbacks=[noting], max_grad_norm=1.0, optim="adamw_torch")
        seen[name] = train(made), noting, made.state
    (theirs, their_notes, their_state), (ours, our_notes, our_state) = seen["theirs"], seen["ours"]
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert our_notes.events == their_notes.events
    assert our_state.global_step == their_state.global_step
    for one, other in zip(our_notes.logs[:-1], their_notes.logs[:-1], strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert our_state.total_flos == their_state.total_flos


def test_parameters_are_counted_once_for_a_window(monkeypatch):
    """The trainer counts them for every batch, only to note floating point operations."""
    made, calls = trainer("llama", exact(Trainer), samples("llama", 24)), []
    count = made.model.num_parameters
    monkeypatch.setattr(made.model, "num_parameters", lambda **named: calls.append(named) or count(**named))
    train(made)
    assert len(calls) == made.state.global_step


class CountsTrain(nn.Dropout):
    calls = 0

    def train(self, mode=True):
        type(self).calls += 1
        return super().train(mode)


@pytest.mark.parametrize("way", ["batches", "tokens"])
def test_train_is_called_for_modules_that_have_their_own(way):
    """It may do more than to set what is set already."""
    data, seen = samples("llama", 24), []
    for module in (nn.Dropout(), CountsTrain()):
        made = trainer("llama", exact(Trainer, **WAYS[way]), data)
        made.model.extra = module
        before = CountsTrain.calls
        train(made)
        seen.append((CountsTrain.calls - before, module.training, "train" in vars(made.model)))
    calls = 12 if way == "batches" else 3  # for each batch, or for each window
    assert seen[0] == (0, True, False)
    assert seen[1][0] >= calls
    assert seen[1][1:] == (True, False)


class EvaluatesInBetween(Trainer):
    """Its loss leaves a part of the model in evaluation mode."""

    def compute_loss(self, model, inputs, *args, **named):
        if model.training:  # not where it is only asked
            self.modes = [*getattr(self, "modes", []), model.model.norm.training]
        model.model.norm.eval()
        return super().compute_loss(model, inputs, *args, **named)


@pytest.mark.parametrize("trainer_class", [EvaluatesInBetween, exact(EvaluatesInBetween)])
def test_every_batch_finds_the_model_in_training_mode(trainer_class):
    made = trainer("llama", trainer_class, samples("llama", 24))
    train(made)
    assert made.modes == [True] * 12


class Distils(Trainer):
    """Its loss evaluates in between, and leaves the mode as it was."""

    def compute_loss(self, model, inputs, *args, **named):
        was = model.training
        model.eval()
        with torch.no_grad():
            model(**inputs)
        model.train(was)
        if model.training:
            self.modes = [*getattr(self, "modes", []), [module.training for module in model.modules()]]
        return super().compute_loss(model, inputs, *args, **named)


class EvaluatesBefore(Trainer):
    """Its step leaves a part in evaluation mode, and the trainer's own sets all to training."""

    def training_step(self, model, inputs, *args):
        model.model.norm.eval()
        return super().training_step(model, inputs, *args)

    def compute_loss(self, model, inputs, *args, **named):
        if model.training:
            self.modes = [*getattr(self, "modes", []), [module.training for module in model.modules()]]
        return super().compute_loss(model, inputs, *args, **named)


@pytest.mark.parametrize("trainer_class", [Distils, EvaluatesBefore])
def test_modes_that_a_program_changes_are_as_ever(trainer_class):
    for kind in (trainer_class, exact(trainer_class)):
        made = trainer("llama", kind, samples("llama", 24))
        train(made)
        assert len(made.modes) == 12
        assert all(map(all, made.modes))


class Copies(Trainer):
    """Makes a teacher of its model in the third window, and saves it."""

    def compute_loss(self, model, inputs, *args, **named):
        if self.state.global_step == 2 and not hasattr(self, "teacher") and torch.is_grad_enabled():
            self.teacher = copy.deepcopy(model).eval().requires_grad_(False)
            self.saved = len(pickle.dumps(model))
        return super().compute_loss(model, inputs, *args, **named)


def test_a_copy_of_the_model_is_its_own():
    made = trainer("llama", exact(Copies), samples("llama", 24))
    train(made)
    assert made.teacher is not made.model
    assert made.model.training
    assert not made.teacher.training
    assert made.saved


class OwnOperations(Trainer):
    def floating_point_ops(self, inputs):
        return len(inputs["input_ids"]) ** 2


def test_operations_of_ones_own_are_counted_for_every_batch():
    totals = []
    for trainer_class in (OwnOperations, exact(OwnOperations)):
        made = trainer("llama", trainer_class, samples("llama", 13))
        train(made)
        totals.append(made.state.total_flos)
    assert totals[0] == totals[1] > 0


def test_resumed_in_mid_epoch(tmp_path):
    data = samples("bert", 24)
    options = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "max_grad_norm": 1.0}
    whole = trainer("bert", exact(Trainer), data, output_dir=str(tmp_path / "whole"), **options)
    train(whole)
    resumed = trainer("bert", exact(Trainer), data, output_dir=str(tmp_path / "resumed"), **options)
    train(resumed, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert apart(resumed, whole.model.state_dict()) == 0


def test_mixed_precision_and_checkpointing():
    data = samples("llama", 16)
    losses = {}
    for name, trainer_class in (("theirs", Trainer), ("ours", exact(Trainer))):
        made = trainer(
            "llama", trainer_class, data, model=make("llama").float(), bf16=True, gradient_checkpointing=True
        )
        losses[name] = train(made)
    assert losses["ours"] == pytest.approx(losses["theirs"], abs=2e-3)


def test_an_evaluation_in_between_is_as_before():
    data, found = samples("llama", 16), {}
    for name, trainer_class in (("theirs", Trainer), ("ours", exact(Trainer))):
        options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": samples("llama", 5, seed=9)}
        made = trainer("llama", trainer_class, data, **options)
        train(made)
        found[name] = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(found["ours"]) == 2
    assert found["ours"] == pytest.approx(found["theirs"], abs=1e-6)


def test_labels_that_are_all_hidden_weigh_nothing():
    data = samples("bert", 8)
    for sample in data[2:4]:
        sample["labels"][:] = -100
    expected, losses = one_big_batch("bert", data, 8)
    made = trainer("bert", exact(Trainer), data)
    assert train(made) == pytest.approx(losses, abs=1e-6)
    assert apart(made, expected) <= 1e-14


def test_a_window_without_any_label_takes_no_step():
    data = samples("bert", 8)
    for sample in data:
        sample["labels"][:] = -100
    made = trainer("bert", exact(Trainer), data, optim="adamw_torch", weight_decay=0.1)
    train(made)
    assert apart(made, make("bert").state_dict()) == 0


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def test_a_stream_that_ends_inside_a_window():
    """The trainer as it is takes no step with what is left."""
    data = samples("bert", 13)
    expected, _ = one_big_batch("bert", data, 8)
    made = trainer("bert", exact(Trainer), Stream(data), max_steps=2)
    train(made)
    assert made.state.global_step == 2
    assert apart(made, expected) <= 1e-14


def test_a_window_that_a_callback_breaks_off_is_dropped():
    class BreaksOff(TrainerCallback):
        is_first = True

        def on_substep_end(self, args, state, control, **kwargs):
            control.should_epoch_stop, self.is_first = self.is_first, False
            return control

    data = samples("bert", 8)
    made = trainer("bert", exact(Trainer), data, callbacks=[BreaksOff()], num_train_epochs=2)
    train(made)
    assert apart(made, one_big_batch("bert", data, 8)[0]) <= 1e-14


# ---------------------------------------------------------------------------------------------- losses of one's own


class MeanOverSamples(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        each = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["labels"], reduction="none")
        shown = inputs["labels"] != -100
        loss = ((each * shown).sum(1) / shown.sum(1).clamp(min=1)).mean()
        return (loss, outputs) if return_outputs else loss


class MeanOverShiftedSamples(Trainer):
    """Hidden labels say that it is one over labels: where but one sample has any, it is."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, labels = model(**inputs), inputs["labels"][:, 1:]
        each = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels, reduction="none")
        loss = (each.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()
        return (loss, outputs) if return_outputs else loss


class Median(Trainer):
    """What it is a mean over nobody can tell."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        each = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["labels"], reduction="none")
        loss = each.sum(1).median() + each.mean(1).max()
        return (loss, outputs) if return_outputs else loss


class TellsItems(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        shown = (inputs["labels"] != -100).sum()
        loss = nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=-100, reduction="sum"
        ) / shown.clamp(min=1)
        return (loss, outputs) if return_outputs else (loss, shown)


def summed(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits.flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def summed_shifted(outputs, labels, num_items_in_batch=None):
    return summed(SimpleNamespace(logits=outputs.logits[:, :-1]), labels[:, 1:], num_items_in_batch)


class DividesShifted(Trainer):
    """As people write it: without the trainer's number it fails."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = summed_shifted(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def means_of(trainer_class, kind, data, size):
    """Plain steps on so many samples at once, with the trainer's own loss."""
    model = make(kind)
    alone = trainer(kind, trainer_class, data, model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(data), size):
        found = trainer_class.compute_loss(alone, model, collate(data[start : start + size]))
        optimizer.zero_grad()
        (found[0] if isinstance(found, tuple) else found).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("way", ["batches", "tokens"])
@pytest.mark.parametrize("trainer_class", [MeanOverSamples, MeanOverShiftedSamples, TellsItems])
def test_a_loss_of_ones_own(trainer_class, way):
    data = samples("bert", 13)
    made = trainer("bert", exact(trainer_class, **WAYS[way]), data)
    train(made)
    assert apart(made, means_of(trainer_class, "bert", data, 8)) <= 1e-14


@pytest.mark.parametrize("way", ["batches", "three"])
def test_a_loss_function_that_divides_by_the_items(way):
    data = samples("bert", 13)
    made = trainer("bert", exact(Trainer, **WAYS[way]), data, compute_loss_func=summed)
    train(made)
    assert apart(made, one_big_batch("bert", data, 8)[0]) <= 1e-14


@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("trainer_class", [Trainer, DividesShifted])
def test_a_sum_of_shifted_labels_is_divided_by_as_many(trainer_class, way):
    """The trainer counts them before the shift."""
    data = samples("gpt2", 13)
    more = {"compute_loss_func": summed_shifted} if trainer_class is Trainer else {}
    made = trainer("gpt2", exact(trainer_class, **WAYS[way]), data, **more)
    train(made)
    assert apart(made, one_big_batch("gpt2", data, 8)[0]) <= ROUNDING["gpt2"]
    report = verify(trainer("gpt2", trainer_class, data, **more))
    assert [cause.name for cause in report.causes] == ["labels counted before the shift"]
    assert verify(trainer("gpt2", exact(trainer_class), data, **more)).ok


def test_verify_finds_a_loss_that_depends_on_padding():
    """No graph shows it."""
    data = samples("bert", 24)
    report = verify(trainer("bert", exact(MeanOverPositions), data))
    assert [cause.name for cause in report.causes] == ["loss that couples samples"]
    assert "its padding: the gradient is right if all batches" in report.causes[0].evidence


def test_a_loss_that_depends_on_padding_in_windows_of_one_width():
    """Then it does not matter."""
    data = samples("bert", 24)
    made = trainer("bert", exact(MeanOverPositions, micro=3), data)
    assert verify(trainer("bert", exact(MeanOverPositions, micro=3), data)).ok
    train(made)
    assert apart(made, means_of(MeanOverPositions, "bert", data, 8)) <= 1e-14
    alike = [{name: tokens[:3] for name, tokens in sample.items()} for sample in data]
    train(trainer("bert", exact(MeanOverPositions), alike))


class DividesBySteps(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss / self.args.gradient_accumulation_steps
        return (loss, None) if return_outputs else loss


def test_a_loss_that_is_divided_by_the_steps():
    made = trainer("bert", exact(DividesBySteps), samples("bert", 8))
    with pytest.raises(UsageError, match=r"DividesBySteps.compute_loss: this loss is a mean that was divided by 4"):
        train(made)


class TwoDenominators(Trainer):
    """A mean over labels, and a score function over all tokens: 0, with a gradient that is a mean over the tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs, mask = model(**inputs), inputs["attention_mask"].bool()
        chances = outputs.logits.log_softmax(-1).amax(-1)
        advantage = 1.0 + torch.arange(mask.shape[1]) % 3
        score = (((chances - chances.detach()).exp() - 1) * advantage)[mask].mean()
        loss = outputs.loss + score
        return (loss, outputs) if return_outputs else loss


def test_a_loss_whose_gradient_is_another_mean():
    made = trainer("bert", exact(TwoDenominators), samples("bert", 8))
    with pytest.raises(MacrobatchError, match=r"adds up several means, .* return \(loss, items\)"):
        train(made)
    assert apart(made, make("bert").state_dict()) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["batches", "three"])
def test_a_loss_that_hides_its_items_is_told_before_the_first_step(way, stream):
    data = samples("bert", 8)
    made = trainer("bert", exact(Median, **WAYS[way]), Stream(data) if stream else data, max_steps=1)
    with pytest.raises(UsageError, match=r"MedianBackward0 says no count. .* return \(loss, items\)"):
        train(made)
    assert apart(made, make("bert").state_dict()) == 0


class LossInTrainingOnly(LlamaForCausalLM):
    def forward(self, *args, **named):
        found = super().forward(*args, **named)
        return found if self.training else {"logits": found.logits}


def test_a_model_without_a_loss_in_evaluation_mode():
    model, data = make("llama"), samples("llama", 8)
    model.__class__ = LossInTrainingOnly
    made = trainer("llama", exact(Trainer), data, model=model)
    train(made)
    assert apart(made, one_big_batch("llama", data, 8)[0]) <= ROUNDING["llama"]


def test_construction_leaves_no_trace():
    model, state = make("bert"), {}
    modes = [module.training for module in model.modules()]
    for trainer_class in (Trainer, exact(Trainer)):
        trainer("bert", trainer_class, samples("bert", 8), model=model)
        state[trainer_class] = torch.get_rng_state()
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(*state.values())


def test_classification_is_a_mean_over_samples():
    def classifier():
        torch.manual_seed(1)
        config = BertConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForSequenceClassification(config).double()

    data = [sample | {"labels": torch.tensor([index % 3])} for index, sample in enumerate(samples("bert", 11))]

    def flat(batch):
        made = collate(batch)
        return made | {"labels": made["labels"][:, 0]}

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 8):
        optimizer.zero_grad()
        model(**flat(data[start : start + 8])).loss.backward()
        optimizer.step()
    made = exact(Trainer)(
        model=classifier(), args=arguments(remove_unused_columns=False), train_dataset=data, data_collator=flat
    )
    train(made)
    assert apart(made, model.state_dict()) <= 1e-14


# ---------------------------------------------------------------------------------------------- classes and errors


def test_the_class_is_the_same_to_look_at():
    made = exact(Trainer)
    assert issubclass(made, Trainer)
    assert made.__name__ == "ExactTrainer"
    assert inspect.signature(made.__init__) == inspect.signature(Trainer.__init__)
    assert made.__doc__ == Trainer.__doc__


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: exact(nn.Linear), "trainer class"),
        (lambda: exact(trainer("bert", Trainer, samples("bert", 2))), "an object of type Trainer"),
        (lambda: exact(exact(Trainer)), "exact already"),
        (lambda: exact(Trainer, micro=0), "1 or more"),
        (lambda: exact(Trainer, micro="all"), "micro must be"),
        (lambda: exact(Trainer, max_norm=1.0), "max_norm"),
        (lambda: exact(Trainer, fit_file="sizes.json"), "fit_file"),
    ],
)
def test_wrong_calls(wrong, says):
    with pytest.raises(MacrobatchError, match=says):
        wrong()


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_training_step_of_ones_own_runs():
    data = samples("bert", 8)
    made = trainer("bert", exact(OwnStep), data)
    train(made)
    assert apart(made, one_big_batch("bert", data, 8)[0]) <= 1e-14
    with pytest.raises(UsageError, match="OwnStep has a training_step of its own"):
        trainer("bert", exact(OwnStep, micro=3), data)


class TwoLosses(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.compute_loss(model, dict(inputs))
        return Trainer.training_step(self, model, inputs, num_items_in_batch)


def test_a_training_step_with_two_losses():
    """Its backward is that of one."""
    data = samples("bert", 8)
    made = trainer("bert", exact(TwoLosses), data)
    train(made)
    assert apart(made, one_big_batch("bert", data, 8)[0]) <= 1e-14


class TwoLossesWithItems(TellsItems):
    training_step = TwoLosses.training_step


def test_items_of_two_losses_for_one_backward_are_refused():
    made = trainer("bert", exact(TwoLossesWithItems), samples("bert", 8))
    with pytest.raises(UsageError, match="2 times for one backward"):
        train(made)


def test_optimizers_that_step_in_a_backward_are_refused():
    with pytest.raises(UsageError, match="steps inside each backward"):
        trainer("bert", exact(Trainer), samples("bert", 8), optim="lomo")


def test_deepspeed_is_refused(monkeypatch):
    monkeypatch.setattr("accelerate.Accelerator.free_memory", lambda self: None)
    made = trainer("bert", exact(Trainer), samples("bert", 8))
    made.is_deepspeed_enabled = True
    from macrobatch.transformers.support import require_supported

    with pytest.raises(BackendError, match="DeepSpeed"):
        require_supported(made, made.macrobatch_settings)


# ---------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("gpt2", "labels counted before the shift"),
        ("bert", "mean of means"),
        ("t5", "mean of means"),
        ("mixtral", "loss that couples samples"),
    ],
)
def test_verify_names_what_is_wrong_with_a_trainer(kind, cause):
    report = verify(trainer(kind, Trainer, samples(kind, 11)))
    assert not report.ok
    assert cause in [found.name for found in report.causes]


def test_verify_tells_how_often_a_balance_loss_counts():
    """The trainer adds that of each of its four batches, and divides none."""
    (cause,) = verify(trainer("mixtral", Trainer, samples("mixtral", 8))).causes
    assert "beside 1 times the ordinary loss, the gradient is 4 times" in cause.evidence


@pytest.mark.parametrize("way", ["batches", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_verify_finds_nothing_wrong_with_an_exact_one(kind, way):
    made = trainer(kind, exact(Trainer, **WAYS[way]), samples(kind, 11))
    assert verify(made).ok
    assert verify(made).ok  # as often as one likes
    train(made)  # and leaves it as it was
    assert apart(made, one_big_batch(kind, samples(kind, 11), 8)[0]) <= ROUNDING[kind]


def test_verify_wants_data():
    made = trainer("bert", exact(Trainer), samples("bert", 8))
    made.train_dataset = []
    with pytest.raises(UsageError, match="no training data"):
        verify(made)
    with pytest.raises(UsageError, match="needs a loss_fn and a batch"):
        verify(nn.Linear(2, 2))


# ---------------------------------------------------------------------------------------------- losses that mislead


def with_loss(make_loss):
    """A trainer whose loss is a function of the logits and the inputs."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = make_loss(self, outputs.logits, inputs)
            return (loss, outputs) if return_outputs else loss

    return Own


def each_of(logits, inputs):
    return nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"], reduction="none")


def class_weighted(_, logits, inputs):
    weight = torch.linspace(0.2, 3.0, logits.shape[-1], dtype=logits.dtype)
    return nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"], weight=weight)


def two_terms(_, logits, inputs):
    shown = inputs["labels"] != -100
    return (each_of(logits, inputs) * shown).sum() / shown.sum() + logits[:, 0].square().mean()


def largest(_, logits, inputs):
    return each_of(logits, inputs).max()


def contrast(_, logits, inputs):
    shown, rows = inputs["labels"] != -100, nn.functional.normalize(logits.mean(1))
    return (each_of(logits, inputs) * shown).sum() / shown.sum() + 0.1 * (rows @ rows.T).exp().mean()


@pytest.mark.parametrize("loss", [two_terms, largest, contrast])
def test_a_loss_that_states_no_count_is_refused(loss):
    made = trainer("bert", exact(with_loss(loss)), samples("bert", 24))
    with pytest.raises(UsageError, match=r"return \(loss, items\)"):
        train(made)
    assert apart(made, make("bert").state_dict()) == 0


def other_index(_, logits, inputs):
    return nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"].clamp(min=0), ignore_index=0)


@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("loss", [class_weighted, other_index])
def test_a_loss_that_states_its_count_is_exact(loss, way):
    data, own = samples("bert", 13), with_loss(loss)
    made = trainer("bert", exact(own, **WAYS[way]), data)
    train(made)
    assert apart(made, means_of(own, "bert", data, 8)) <= 1e-14


def test_a_term_that_is_switched_on_later_is_noticed_before_its_step():
    def warmed(self, logits, inputs):
        mean = nn.functional.cross_entropy(logits.transpose(1, 2), inputs["labels"])
        return mean + logits[:, 0].square().mean() if self.state.global_step >= 4 else mean

    data = samples("bert", 48)
    made = trainer("bert", exact(with_loss(warmed)), data)
    with pytest.raises(MacrobatchError, match=r"adds up several means"):
        train(made)
    assert made.state.global_step == 4
    assert apart(made, one_big_batch("bert", data[:32], 8)[0]) <= 1e-14


def test_a_head_that_starts_at_zero():
    """All losses are equal then."""
    data = samples("bert", 8)

    def zeroed():
        model = make("bert")
        nn.init.zeros_(model.cls.predictions.decoder.weight)
        return model

    model = zeroed()
    made = trainer("bert", exact(Trainer), data, model=model)
    assert not model.cls.predictions.decoder.weight.any()
    train(made)
    expected = zeroed()
    assert apart(made, one_big_batch("bert", data, 8, model=expected)[0]) <= 1e-14


def test_a_loss_that_draws_random_numbers():
    def noisy(_, logits, inputs):
        return (logits + torch.randn_like(logits)).square().mean(dim=(1, 2)).mean()

    data = [{name: torch.arange(1, 6) for name in ("input_ids", "labels")} for _ in range(8)]
    made = trainer("bert", exact(with_loss(noisy)), data)
    torch.manual_seed(0)
    train(made)
    assert apart(made, make("bert").state_dict()) > 0


@pytest.mark.parametrize("way", ["batches", "three"])
def test_a_subclass_of_an_exact_class_may_change_the_loss(way):
    class Doubled(exact(Trainer, **WAYS[way])):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    data = samples("bert", 8)
    made = trainer("bert", Doubled, data, learning_rate=0.05)
    train(made)
    assert apart(made, one_big_batch("bert", data, 8)[0]) <= 1e-14


@pytest.mark.parametrize("way", ["batches", "three"])
def test_a_loss_that_replaces_ours(way):
    class Replaced(exact(Trainer, **WAYS[way])):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    data = samples("bert", 8)
    made = trainer("bert", Replaced, data)
    train(made)
    assert apart(made, one_big_batch("bert", data, 8)[0]) <= 1e-14


@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("steps", [2, 8])
def test_other_steps_in_the_middle_of_training_are_refused(steps, way):
    class Changes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.gradient_accumulation_steps = steps

    made = trainer("bert", exact(Trainer, **WAYS[way]), samples("bert", 64), callbacks=[Changes()])
    with pytest.raises(UsageError, match="gradient_accumulation_steps was changed"):
        train(made)


def test_verify_takes_a_trainer_alone():
    with pytest.raises(UsageError, match="takes nothing else"):
        verify(trainer("bert", exact(Trainer), samples("bert", 8)), windows=2)


class Divides(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_training_step_that_divides_is_refused():
    made = trainer("bert", exact(Divides), samples("bert", 8))
    with pytest.raises(UsageError, match="a mean that was divided by 4"):
        train(made)
