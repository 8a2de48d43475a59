"""`train()` inside another program: callbacks, an evaluation of one's own, and which number tells the best model."""

import dataclasses
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from harness.commands import arguments, losses, metrics, refused
from macrobatch.cli import main
from macrobatch.errors import UsageError
from macrobatch.train import Settings, StopTraining, train
from macrobatch.train.best import Best

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def settings(data, tmp_path) -> Settings:
    """A small run."""
    small = {"model": "tiny", "vocabulary_size": 300, "seq_len": 64, "steps": 6, "batch_size": 24, "sample_tokens": 0}
    often = {"validate_every": 2, "save_every": 0, "track": ("none",), "device": "cpu"}
    return Settings(data=(str(data),), out=str(tmp_path / "run"), **small, **often)


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory) -> Path:
    """The same run without anything hung into it."""
    out = tmp_path_factory.mktemp("plain") / "run"
    assert main(arguments(data, out, "--steps", 6, "--validate-every", 2)) == 0
    return out


def replaced(settings: Settings, **more: object) -> Settings:
    return dataclasses.replace(settings, **more)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def validations(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------- train()


def test_what_a_program_gets(settings, plain):
    outcome = train(settings)
    assert outcome == 0
    assert isinstance(outcome, int)
    assert outcome.run == Path(settings.out)
    assert outcome.steps == 6
    assert [row["loss"] for row in outcome.metrics] == losses(plain)
    assert [row["step"] for row in outcome.validations] == [2, 4, 6]
    assert (outcome.model / "model.safetensors").is_file()


def test_in_a_thread_of_its_own(settings):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(settings)))
    thread.start()
    thread.join(120)
    assert found == [0]


def test_importing_it_is_cheap():
    slow = {"torch", "transformers", "rich"}
    program = f"import sys, macrobatch.train as room; room.Settings; print(sorted({slow} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(ImportError):
        from macrobatch.train import nothing_of_that_name  # noqa: F401


def test_perplexity(plain):
    for row in validations(plain):
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert "perplexity" in (plain / "report.html").read_text()


# ---------------------------------------------------------------------------------------------------------- callbacks


def test_callbacks_hear_of_every_step_and_validation(settings, plain):
    heard = []
    assert train(settings, callbacks=[heard.append]) == 0
    steps = [event for event in heard if event.kind == "step"]
    assert [event.numbers["loss"] for event in steps] == losses(plain)
    assert [(event.kind, event.step) for event in heard[:4]] == [
        ("step", 1),
        ("step", 2),
        ("validation", 2),
        ("step", 3),
    ]
    assert heard[2].numbers == validations(Path(settings.out))[0]
    assert heard[0].run == Path(settings.out)


def test_a_callback_stops_the_run(settings, plain):
    """After the step, with a checkpoint; the others hear of that step too; and the run can go on."""
    heard = []

    def stop(event):
        if event.step == 3:
            raise StopTraining

    outcome = train(settings, callbacks=[stop, heard.append])
    assert outcome == 0
    assert outcome.steps == 3
    assert heard[-1].step == 3
    assert checkpoints(outcome.run) == ["step-00000003"]
    assert "stopped early, after 3 of 6 steps: by a callback" in (outcome.run / "report.html").read_text()
    again = train(replaced(settings, resume=True))
    assert again.steps == 6
    assert losses(again.run) == losses(plain)
    assert "stopped early" not in (outcome.run / "report.html").read_text()


def test_an_error_in_a_callback_is_raised_after_a_checkpoint(settings, plain, capsys):
    def wrong(event):
        if event.step == 3:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as raised:
        train(settings, callbacks=[wrong])
    assert raised.value.__notes__ == ["It was raised by a callback, after step 3."]
    run = Path(settings.out)
    assert checkpoints(run) == ["step-00000003"]
    assert "a callback or the evaluation failed: ended after step 3, with a checkpoint" in capsys.readouterr().err
    assert train(replaced(settings, resume=True)).steps == 6
    assert losses(run) == losses(plain)


def test_what_is_no_function_is_refused(settings):
    for wrong in ({"callbacks": ["print"]}, {"evaluate": "module:function"}):
        with pytest.raises(UsageError, match="must be functions"):
            train(settings, **wrong)
    assert not Path(settings.out).exists()


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_an_evaluation(settings, plain):
    """Sees the model as it is, in eval mode; its numbers are those of the validation; the training is the same."""
    seen = []

    def evaluate(model, tokenizer):
        ids = tokenizer("the quick", return_tensors="pt")["input_ids"]
        logits = model(ids).logits
        seen.append((model.training, logits.requires_grad, model.lm_head.weight.sum().item()))
        return {"spread": logits.std(), "calls": len(seen)}

    outcome = train(settings, evaluate=evaluate)
    assert [(training, grad) for training, grad, _ in seen] == [(False, False)] * 4
    assert len({weight for *_, weight in seen}) == 4
    assert losses(outcome.run) == losses(plain)
    baseline, *rest = outcome.validations
    assert baseline["step"] == 0
    assert baseline.keys() == {"step", "spread", "calls"}
    assert [(row["step"], row["calls"]) for row in rest] == [(2, 2), (4, 3), (6, 4)]
    assert [row["loss"] for row in rest] == [row["loss"] for row in validations(plain)]
    page = (outcome.run / "report.html").read_text()
    assert "spread" in page
    assert "of the validation at step 6" in page


@pytest.mark.filterwarnings("ignore:this model has dropout")
def test_random_numbers_of_an_evaluation_are_not_missing_in_the_training(settings, tmp_path):
    """A model with dropout draws the same masks without it."""
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dropping = replaced(settings, model=str(tmp_path / "config.json"))
    wanted = train(replaced(dropping, out=str(tmp_path / "without"))).metrics
    found = train(dropping, evaluate=lambda *_: {"drawn": torch.rand(3).sum()}).metrics
    assert [row["loss"] for row in found] == [row["loss"] for row in wanted]


def test_without_data_to_validate_on(settings):
    outcome = train(replaced(settings, validation=0.0), evaluate=lambda *_: {"a": 1.0})
    assert outcome.validations == [{"step": step, "a": 1.0} for step in (0, 2, 4, 6)]


EVALUATION = """
def score(model, tokenizer):
    return {"words": len(tokenizer), "layers": model.config.num_hidden_layers}

number = 3
def wrong(model, tokenizer):
    return 0.5
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """The name of a module in the current folder, which no other test has imported."""
    name = f"evaluation_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(EVALUATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_a_function_named_on_the_command_line(data, tmp_path, module, capsys):
    out = tmp_path / "run"
    assert main(arguments(data, out, "--evaluate", f"{module}:score", "--steps", 2)) == 0
    assert [row["step"] for row in validations(out)] == [0, 2]
    assert validations(out)[-1]["layers"] == 2
    assert f"perplexity {validations(out)[-1]['perplexity']:.6g}  words" in capsys.readouterr().out
    assert main(["train", "--resume", "--out", str(out), "--steps", "3"]) == 0
    assert [row["step"] for row in validations(out)] == [0, 2, 3]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:score", "there is no module 'nowhere'"),
        ("{}:nothing", "has no function 'nothing'"),
        ("{}:number", "is not a function: got int"),
        ("{}", "is not MODULE:FUNCTION"),
        ("{}:wrong", "must return a dict of numbers, as {'accuracy': 0.5}: got float"),
    ],
)
def test_a_name_of_no_use_is_refused_before_anything_is_written(data, tmp_path, module, capsys, name, said):
    refused(arguments(data, tmp_path / "run", "--evaluate", name.format(module)), capsys, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "must return a dict of numbers"),
        ({"a": "high"}, "'a' is str"),
        ({"a": torch.ones(2)}, "'a' is Tensor"),
        ({1: 1.0}, "must name its numbers by texts: got 1"),
        ({"loss": 1.0}, "returns 'loss', which a validation has anyway"),
    ],
)
def test_what_an_evaluation_must_not_return(settings, returned, said):
    with pytest.raises(UsageError, match=said):
        train(settings, evaluate=lambda *_: returned)
    assert not Path(settings.out).exists()


def test_an_evaluation_that_fails_later_loses_no_step(settings, plain):
    """Not the checkpoint either: the step it was called after is in it."""
    calls = []

    def fails(model, tokenizer):
        calls.append(model)
        if len(calls) == 3:
            raise LookupError("mine")
        return {"a": 1.0}

    with pytest.raises(LookupError, match="mine") as raised:
        train(settings, evaluate=fails)
    assert raised.value.__notes__ == ["It was raised by the evaluation fails."]
    assert checkpoints(Path(settings.out)) == ["step-00000004"]
    assert train(replaced(settings, resume=True), evaluate=lambda *_: {"a": 1.0}).steps == 6
    assert losses(Path(settings.out)) == losses(plain)


def test_two_evaluations_are_one_too_many(settings):
    with pytest.raises(UsageError, match="not both"):
        train(replaced(settings, evaluate="math:sqrt"), evaluate=lambda *_: {})


# ----------------------------------------------------------------------------------------------------------------- best


def scores(*values: float):
    """An evaluation that returns these, one after the other."""
    coming = iter(values)
    return lambda *_: {"score": next(coming)}


@pytest.mark.parametrize(("best", "step"), [("score", 2), ("score:min", 2), ("score:max", 4), ("loss", 6)])
def test_which_number_tells_the_best(settings, best, step):
    """The baseline before the first step is never it."""
    saving = replaced(settings, best=best, save_every=2, keep=1)
    outcome = train(saving, evaluate=scores(9.0, 1.0, 3.0, 2.0) if step == 4 else scores(0.0, 1.0, 3.0, 2.0))
    assert checkpoints(outcome.run) == sorted({f"step-{step:08d}", "step-00000006"})
    assert (outcome.run / "model-best").exists() == (step != 6)


def test_it_tells_when_to_stop_as_well(settings):
    stopping = replaced(settings, best="score:max", early_stop=1, validation=0.0)
    assert train(stopping, evaluate=scores(0.0, 2.0, 1.0, 3.0)).steps == 4


def test_a_number_that_is_not_there(settings):
    with pytest.raises(UsageError, match="--best score: validations have loss and perplexity only"):
        train(replaced(settings, best="score"))
    with pytest.raises(UsageError, match=r"--best other: the evaluation returns no such number\. It has score"):
        train(replaced(settings, best="other"), evaluate=scores(1.0))
    with pytest.raises(UsageError, match="--best must name a number"):
        replaced(settings, best=":max")
    assert not Path(settings.out).exists()


def test_the_best_of_another_number_is_forgotten():
    """And checkpoints written before there was a choice are read."""
    old = {"step": 4, "loss": 2.5, "since": 1}
    loss, score = Best(), Best("score", True)
    loss.load_state_dict(old)
    score.load_state_dict(old)
    assert (loss.step, loss.value, loss.since) == (4, 2.5, 1)
    assert (score.step, score.value) == (0, None)
    assert score.is_improved(1, 0.5)
    assert not score.is_improved(2, 0.4)
    again = Best("score", True)
    again.load_state_dict(json.loads(json.dumps(score.state_dict())))
    assert again == score


def test_metrics_are_as_without_hooks(settings, plain):
    """No column is missing, and none is new."""
    outcome = train(settings, callbacks=[lambda event: None])
    assert metrics(outcome.run)[0].keys() == metrics(plain)[0].keys()
