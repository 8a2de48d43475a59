"""`macrobatch train` and `generate`, through the command, from files to files. Many ranks: `ranks/test_train.py`."""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from harness.commands import arguments, json_lines, losses, metrics, refused, sentences
from macrobatch.cli import main

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    """One run that has ended, for tests that only look at it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(arguments(data, folder, "--steps", 6, "--save-every", 2, "--validate-every", 3)) == 0
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


# --------------------------------------------------------------------------------------------------- what a run leaves


def test_the_run_folder(run):
    assert {path.name for path in run.iterdir()} == {
        "run.json",
        "metrics.jsonl",
        "validation.jsonl",
        "tensorboard",
        "checkpoints",
        "model",
        "report.html",
        "config.toml",
    }
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_no_argument_needs_no_folder(data, tmp_path, monkeypatch):
    """Runs get the next number that is free."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny-1", "tiny-2"):
        command = arguments(data, tmp_path / "run", "--steps", 1)
        place = command.index("--out")
        del command[place : place + 2]
        assert main(command) == 0
        assert (tmp_path / "runs" / name / "report.html").exists()


def test_the_metrics(run):
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    wanted = {"loss", "items", "grad_norm", "lr", "seconds", "tokens_per_second", "micro_batches", "memory_bytes"}
    for row in rows:
        assert wanted <= row.keys()
        assert row["samples"] == 24
        assert row["items"] == row["tokens"] - row["samples"]  # nothing predicts a first token
        assert row["tokens"] <= row["padded_tokens"] <= row["padded_in_order"]
        assert math.isclose(row["tokens_per_second"], row["tokens"] / row["seconds"])
    assert rows[-1]["loss"] < rows[0]["loss"]
    validations = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in validations] == [3, 6]


def test_what_was_derived_is_printed_first(data, tmp_path, capsys):
    assert main(arguments(data, tmp_path / "run", "--steps", 1, "--sample-tokens", 5, "--prompt", "the quick")) == 0
    out = capsys.readouterr().out
    for name in ("model", "data", "vocabulary", "batch", "ranks", "micro-batches", "memory", "steps", "learning rate"):
        assert name in out.partition("loss")[0]
    assert "\nthe quick" in out  # and a text last


def test_a_batch_that_is_larger_than_the_data_is_said_to_be(tmp_path):
    data = json_lines(tmp_path / "few.jsonl", [{"text": text} for text in sentences(6)])
    assert main(arguments(data, tmp_path / "run", "--steps", 1, "--batch-size", 64)) == 0
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "more than the data has" in described["derived"]["batch"]


def test_a_run_describes_itself(run):
    described = json.loads((run / "run.json").read_text())
    assert described["settings"]["batch_size"] == 24
    assert described["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "parameters" in described["derived"]["model"]


def test_transformers_reads_the_model(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "model")
    ids = AutoTokenizer.from_pretrained(run / "model")("the quick", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape[-1] == model.config.vocab_size
    assert model.dtype == torch.float32


def test_the_same_again_is_the_same_bit_by_bit(run, data, tmp_path):
    assert main(arguments(data, tmp_path / "run", "--steps", 6)) == 0
    assert losses(tmp_path / "run") == losses(run)
    again, before = weights(tmp_path / "run"), weights(run)
    assert all(torch.equal(again[name], before[name]) for name in before)


# ------------------------------------------------------------------------------------------------------------ generate


def test_generate(run, capsys):
    command = ["generate", str(run), "--prompt", "the lazy", "--tokens", "8"]
    texts = []
    for more in ([], [], ["--seed", "3"], ["--temperature", "0"], ["--temperature", "0", "--seed", "3"]):
        assert main([*command, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("the lazy") and len(text) > len("the lazy\n") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]
    assert main(["generate", str(run)]) == 0  # from nothing


def test_generate_speaks_of_the_folder_that_was_named(run, tmp_path, capsys):
    folder = Path(shutil.copytree(run / "model", tmp_path / "model"))
    wrongs = {"model.safetensors": b"no weights", "tokenizer.json": b"{", "tokenizer_config.json": b"["}
    for name, content in wrongs.items():
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        assert "--model" not in refused(["generate", str(folder)], capsys, str(folder))
        (folder / name).write_bytes(kept)
    refused(["generate", str(tmp_path / "nowhere")], capsys, "there is no folder", "nowhere")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "--model" not in refused(["generate", str(folder)], capsys, "pytorch_model.bin")
    (folder / "adapter_config.json").write_text("{}")
    assert "--model" not in refused(["generate", str(folder)], capsys, "adapter")


def test_generate_without_a_model(tmp_path, run, capsys):
    assert main(["generate", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err
    assert main(["generate", str(run), "--prompt", "the " * 200]) == 2
    assert "shorten it" in capsys.readouterr().err


def test_the_report_again(copy, capsys):
    (copy / "report.html").unlink()
    assert main(["report", str(copy)]) == 0
    assert capsys.readouterr().out.strip() == str(copy / "report.html")
    assert (copy / "report.html").stat().st_size > 1000


# ----------------------------------------------------------------------------------------------------------- real use


def test_fine_tuning_on_prompts_from_a_folder_with_weights(run, tmp_path):
    """Only completions are learnt; the model's own tokenizer is used; its weights are where it begins."""
    pairs = [{"prompt": text, "completion": " amen"} for text in sentences(60, seed=1)]
    file = json_lines(tmp_path / "pairs.jsonl", pairs)
    flags = ("--model", run / "model", "--lr", 1e-3, "--steps", 8, "--validation", 0)
    assert main(arguments(file, tmp_path / "tuned", *flags)) == 0
    rows = metrics(tmp_path / "tuned")
    assert rows[0]["items"] < rows[0]["tokens"] - rows[0]["samples"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert not (tmp_path / "tuned" / "validation.jsonl").read_text()
    vocabulary = [(folder / "model" / "tokenizer.json").read_text() for folder in (run, tmp_path / "tuned")]
    assert vocabulary[0] == vocabulary[1]
    # As far from where it began as the steps could take it, and no farther: not from other weights.
    assert (weights(tmp_path / "tuned")["model.norm.weight"] - weights(run)["model.norm.weight"]).abs().max() < 0.02


def test_a_configuration_of_transformers(data, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(arguments(data, tmp_path / "run", "--model", tmp_path / "config.json", "--steps", 2)) == 0
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


@pytest.mark.filterwarnings("default")
def test_a_model_with_dropout_is_told_so(data, tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 300}
        )
    )
    assert main(arguments(data, tmp_path / "run", "--model", tmp_path, "--steps", 1)) == 0
    assert "macrobatch: this model has dropout" in capsys.readouterr().err


def test_text_files_and_epochs(tmp_path):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(sentences(30)):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    flags = ("--epochs", 2, "--batch-size", 8, "--validation", 0)
    command = arguments(tmp_path / "texts", tmp_path / "run", *flags)
    command = [word for word in command if word != "--steps"]
    command.remove("4")
    assert main(command) == 0
    rows = metrics(tmp_path / "run")
    assert [row["samples"] for row in rows] == [8] * (sum(row["samples"] for row in rows) // 8) + [4]


def test_the_table_has_the_epochs_that_run(tmp_path, capsys):
    data = json_lines(tmp_path / "data.jsonl", [{"text": text} for text in sentences(30)])
    flags = ("--epochs", 1, "--batch-size", 8, "--validation", 0, "--seq-len", 256)
    command = arguments(data, tmp_path / "run", *flags)
    place = command.index("--steps")
    assert main(command[:place] + command[place + 2 :]) == 0
    assert "4, 1 epoch; the last batch has 6 samples, all that are left" in capsys.readouterr().out


def test_batches_by_tokens_that_grow(data, tmp_path):
    flags = ("--batch-tokens", 600, "--batch-ramp", 3, "--batch-ramp-start", 0.2, "--steps", 5)
    command = arguments(data, tmp_path / "run", *flags)
    place = command.index("--batch-size")
    del command[place : place + 2]
    assert main(command) == 0
    tokens = [row["tokens"] for row in metrics(tmp_path / "run")]
    for found, most in zip(tokens, (120, 280, 440, 600, 600), strict=True):
        assert most - 65 < found <= most


def test_the_learning_rate_follows_schedule_and_batch(data, tmp_path):
    flags = ("--lr", 0.01, "--lr-scale", "sqrt", "--reference-batch", 6, "--schedule", "linear", "--warmup", 2)
    assert main(arguments(data, tmp_path / "run", *flags, "--final-lr", 0)) == 0
    assert [row["lr"] for row in metrics(tmp_path / "run")] == pytest.approx([0.01, 0.02, 0.02, 0.01])


@pytest.mark.parametrize("precision", ["bf16", "pure-bf16", "fp16"])
def test_lower_precision(run, data, tmp_path, precision):
    assert main(arguments(data, tmp_path / "run", "--steps", 6, "--precision", precision)) == 0
    assert losses(tmp_path / "run")[-1] == pytest.approx(losses(run)[-1], rel=0.03)
    dtype = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    assert {tensor.dtype for tensor in weights(tmp_path / "run").values()} == {dtype}


def test_print_config_and_config(data, tmp_path, capsys):
    command = arguments(data, tmp_path / "run", "--steps", 2, "--micro", "5")
    assert main([*command, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert tomllib.loads(printed)["micro"] == "5"
    (tmp_path / "config.toml").write_text(printed)
    assert main(["train", "--config", str(tmp_path / "config.toml")]) == 0
    assert len(losses(tmp_path / "run")) == 2


# ------------------------------------------------------------------------------------------------------------- resumed


def test_resuming_ends_where_the_run_would_have(run, copy, capsys):
    """From the checkpoint of step 4, as if the process had died soon after."""
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    shutil.rmtree(copy / "model")
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    said = capsys.readouterr().out
    assert "in float32, resumed from step 4" in said
    assert "new weights" not in said
    assert losses(copy) == losses(run)
    again, before = weights(copy), weights(run)
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_resuming_a_run_that_is_complete(copy, capsys):
    before = files(copy / "checkpoints") | files(copy / "model")
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert files(copy / "checkpoints") | files(copy / "model") == before


@pytest.mark.parametrize("exists", [False, True])
def test_resuming_where_there_is_no_run(data, tmp_path, capsys, exists):
    """A mistyped name does not begin another run."""
    if exists:
        (tmp_path / "typo").mkdir()
    refused(["train", "--resume", "--out", str(tmp_path / "typo")], capsys, "there is no run in", "leave out --resume")
    refused([*arguments(data, tmp_path / "typo"), "--resume"], capsys, "there is no run in")
    assert not exists or not list((tmp_path / "typo").iterdir())
    assert exists or not (tmp_path / "typo").exists()


# ---------------------------------------------------------------------------------------------------------- validation


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def validations(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture
def overfitting(tmp_path) -> list[str]:
    """A run that soon gets worse on what it does not see."""
    few = json_lines(tmp_path / "few.jsonl", [{"text": text} for text in sentences(12)])
    held = json_lines(tmp_path / "held.jsonl", [{"text": text[::-1]} for text in sentences(20, seed=2)])
    flags = ("--validation-data", held, "--lr", 0.03, "--warmup", 0, "--steps", 40, "--validate-every", 2)
    return arguments(few, tmp_path / "run", *flags, "--save-every", 10, "--batch-size", 12)


def test_other_data_to_validate_on(overfitting, tmp_path, capsys):
    """All of the data is trained on; the best checkpoint stays beside the last ones, and its model is exported."""
    assert main(overfitting) == 0
    found = validations(tmp_path / "run")
    best = min(found, key=found.get)
    assert best < 30, found
    assert checkpoints(tmp_path / "run") == [best, 30, 40]
    assert metrics(tmp_path / "run")[0]["samples"] == 12
    assert f"best validation, after step {best}: {tmp_path / 'run' / 'model-best'}" in capsys.readouterr().out
    again = arguments(tmp_path / "held.jsonl", tmp_path / "again", "--model", tmp_path / "run" / "model-best")
    assert main([*again, "--lr", "0", "--validation-data", str(tmp_path / "held.jsonl"), "--steps", "1"]) == 0
    assert validations(tmp_path / "again")[1] == pytest.approx(found[best], rel=1e-5)


def test_the_run_stops_when_validations_get_no_better(overfitting, tmp_path, capsys):
    """And is complete then; a killed one stops where it would have."""
    assert main([*overfitting, "--early-stop", "3"]) == 0
    run = tmp_path / "run"
    found = validations(run)
    best = min(found, key=found.get)
    assert max(found) == best + 6 < 40
    assert f"stopped after step {best + 6}" in capsys.readouterr().out
    assert checkpoints(run)[-1] == best + 6
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert validations(run) == found
    shutil.rmtree(run / "checkpoints" / f"step-{best + 6:08d}")
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert validations(run) == found


def test_few_samples_to_validate_on_are_told(data, tmp_path, caplog):
    assert main(arguments(data, tmp_path / "run", "--steps", 1)) == 0
    assert "the validation has only 4 samples: its loss is unreliable" in caplog.text


def test_the_last_line_has_the_last_numbers(data, tmp_path, capsys):
    assert main(arguments(data, tmp_path / "run", "--steps", 3)) == 0
    printed = capsys.readouterr().out.splitlines()
    (validation,) = validations(tmp_path / "run").values()
    loss = metrics(tmp_path / "run")[-1]["loss"]
    assert printed[-1].startswith("step 3/3  epoch 0.")
    assert sum(line.startswith("step 3/3") for line in printed) == 1
    assert f"loss {loss:.4f}  validation {validation:.3f}" in printed[-1]


# ------------------------------------------------------------------------------------------------------------ extended


def test_a_finished_run_goes_on(run, copy, data, tmp_path, capsys):
    """With the data where it was; and the longer run can be killed and resumed as any other."""
    before = losses(run)
    assert main(["train", "--resume", "--out", str(copy), "--steps", "10"]) == 0
    assert "extended from 6 to 10 steps" in capsys.readouterr().out
    assert [row["step"] for row in metrics(copy)] == list(range(1, 11))
    assert losses(copy)[:6] == before
    wanted = losses(copy)
    again = Path(shutil.copytree(copy, tmp_path / "again"))
    shutil.rmtree(again / "checkpoints" / "step-00000010")
    assert main(["train", "--resume", "--out", str(again)]) == 0
    assert losses(again) == wanted
    stream = [row["items"] for row in metrics(again)]
    assert main(arguments(data, tmp_path / "longer", "--steps", 10)) == 0
    assert stream == [row["items"] for row in metrics(tmp_path / "longer")]  # the same batches as of a run of ten


def test_an_extension_killed_before_its_first_checkpoint(copy, tmp_path):
    """The checkpoint to go on from was written by the run as it was before."""
    longer = Path(shutil.copytree(copy, tmp_path / "longer"))
    assert main(["train", "--resume", "--out", str(longer), "--steps", "10"]) == 0
    wanted = losses(longer)
    for step in (8, 10):
        shutil.rmtree(longer / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    shutil.copytree(copy / "checkpoints" / "step-00000006", longer / "checkpoints" / "step-00000006")
    assert main(["train", "--resume", "--out", str(longer)]) == 0
    assert losses(longer) == wanted


def test_epochs_instead_of_steps_extend_too(data, tmp_path):
    assert main(arguments(data, tmp_path / "run", "--steps", 2, "--batch-size", 200)) == 0
    assert main(["train", "--resume", "--out", str(tmp_path / "run"), "--epochs", "2"]) == 0
    assert len(losses(tmp_path / "run")) == 5


def test_a_run_that_is_not_finished_is_not_extended(copy, capsys):
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    before = files(copy)
    refused(["train", "--resume", "--out", str(copy), "--steps", "10"], capsys, "has taken 4 of its 6 steps")
    assert files(copy) == before


@pytest.mark.parametrize("taken", [6, 4])
def test_a_run_does_not_get_shorter(copy, capsys, taken):
    """Neither a finished nor an interrupted one; nor to fewer steps than it has taken."""
    if taken < 6:
        shutil.rmtree(copy / "checkpoints" / "step-00000006")
    for steps in (5, 3):
        said = refused(["train", "--resume", "--out", str(copy), "--steps", str(steps)], capsys, f"--steps {steps}")
        assert "has 6 steps and cannot be shortened" in said
        assert "extended" not in said


# ---------------------------------------------------------------------------------------- checkpoints that are gone


@pytest.mark.parametrize("is_empty", [False, True])
def test_checkpoints_that_are_gone(copy, capsys, is_empty):
    """As on a volume that is not mounted: it does not begin again, and nothing is lost."""
    shutil.rmtree(copy / "checkpoints")
    if is_empty:
        (copy / "checkpoints").mkdir()
    before = files(copy)
    refused(["train", "--resume", "--out", str(copy)], capsys, "has lost its checkpoints", "mounted")
    assert files(copy) == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(data, run, tmp_path):
    command = arguments(data, tmp_path / "run", "--steps", 6)
    assert main(command) == 0
    description = json.loads((tmp_path / "run" / "run.json").read_text())
    del description["saved"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(description))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert losses(tmp_path / "run") == losses(run)


@pytest.mark.filterwarnings("default")
def test_a_checkpoint_of_another_run_is_passed_over(data, run, copy, tmp_path, capsys):
    """Of the same shapes, and in order by itself."""
    other = tmp_path / "other"
    assert main(arguments(data, other, "--steps", 9, "--seed", 3, "--validate-every", 3)) == 0
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    foreign = shutil.copytree(other / "checkpoints" / "step-00000009", copy / "checkpoints" / "step-00000009")
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    assert f"skipped. {foreign} belongs to another run" in capsys.readouterr().err
    assert losses(copy) == losses(run)


def test_resuming_in_fp16_ends_where_the_run_would_have(data, tmp_path):
    """Bit by bit, with items that differ much from window to window."""
    flags = ("--precision", "fp16", "--steps", 8, "--save-every", 2, "--batch-tokens", 300, "--batch-ramp", 6)
    command = arguments(data, tmp_path / "run", *flags)
    place = command.index("--batch-size")
    del command[place : place + 2]
    assert main(command) == 0
    resumed = Path(shutil.copytree(tmp_path / "run", tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoints" / "step-00000008")
    assert main(["train", "--resume", "--out", str(resumed)]) == 0
    assert losses(resumed) == losses(tmp_path / "run")
    again, before = weights(resumed), weights(tmp_path / "run")
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_other_micro_batches_are_the_same_run(copy):
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    wanted = losses(copy)
    assert main(["train", "--resume", "--out", str(copy), "--micro", "1"]) == 0
    assert losses(copy) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "differs"),
    [
        (["--seed", "1"], "settings: seed was 0, now 1. "),
        (["--batch-size", "25"], "batch-size was 24, now 25"),
        (["--lr", "1"], "settings: lr was 0.005, now 1. "),
        (["--schedule", "linear"], "settings: schedule was cosine, now linear. "),
        (["--beta2", "0.5", "--lr", "2"], "settings: lr was 0.005, now 2; beta2 was 0.95, now 0.5. "),
        (["--batch-ramp", "3"], "settings: batch-ramp was 0, now 3. "),
        (["--seq-len", "32"], "data is not the same"),
        (["--precision", "bf16"], "precision was float32, now bf16"),
        (["--vocabulary-size", "290"], "vocabulary is not the same"),
        (["--max-norm", "2"], "max-norm was 1.0, now 2.0"),
    ],
)
def test_resuming_another_run_is_refused(copy, capsys, flags, differs):
    before = files(copy)
    assert main(["train", "--resume", "--out", str(copy), *flags]) == 2
    said = capsys.readouterr().err
    assert f"{copy} was run with other settings: " in said
    assert differs in said
    assert files(copy) == before


def test_other_data_is_another_run(copy, tmp_path, capsys):
    other = json_lines(tmp_path / "other.jsonl", [{"text": text} for text in sentences(seed=5)])
    assert main(["train", "--resume", "--out", str(copy), "--data", str(other)]) == 2
    assert "the data is not the same" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- bad input


def lines(count: int, number: int, line: str) -> str:
    good = [json.dumps({"text": text}) for text in sentences(count)]
    good[number - 1] = line
    return "\n".join(good)


BAD_DATA = {
    "empty": ("", "text"),
    "field": (lines(900, 812, '{"txet": "a b"}'), "line 812"),
    "json": (lines(20, 7, '{"text": '), "line 7"),
    "type": (lines(20, 3, '{"text": 3}'), "line 3"),
    "blank": ('{"text": ""}\n', ""),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data(tmp_path, capsys, name):
    content, said = BAD_DATA[name]
    (tmp_path / "data.jsonl").write_text(content)
    refused(arguments(tmp_path / "data.jsonl", tmp_path / "run"), capsys, said, "data.jsonl" if said else "")
    assert not (tmp_path / "run").exists()


def test_no_such_data(tmp_path, capsys):
    refused(arguments(tmp_path / "nowhere", tmp_path / "run"), capsys, "nowhere")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "gigantic.json"), "there is no configuration of a model there"),
        (("--model", "./nowhere"), "there is no configuration of a model there"),
        (("--model", "nobody/nothing"), "--model nobody/nothing: "),
        (("--tokenizer", "./nowhere.json"), "nowhere.json"),
        (("--out", "data.jsonl"), "is a file"),
        (("--parallel", "fsdp"), "there is only one"),
        (("--micro", "many"), "--micro must be"),
        (("--steps", "0"), "--steps must be at least 1"),
        (("--warmup", "5", "--data", "nowhere"), "--warmup 5 is longer than the run of 4 steps"),
    ],
)
def test_bad_flags(data, tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_bytes(data.read_bytes())
    refused(arguments(tmp_path / "data.jsonl", tmp_path / "run", *flags), capsys, said)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(data, tmp_path, capsys):
    refused(arguments(data, tmp_path / "run", "--device", "cuda"), capsys, "torch finds no GPU")


def test_a_token_above_the_vocabulary(data, run, tmp_path, capsys):
    config = json.loads((run / "model" / "config.json").read_text()) | {"vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = arguments(data, tmp_path / "run", "--model", tmp_path / "config.json", "--tokenizer", run / "model")
    refused([*command], capsys, "the model's vocabulary ends at 99")


def test_samples_longer_than_the_model_takes(data, run, tmp_path, capsys):
    refused(arguments(data, tmp_path / "run", "--model", run / "model", "--seq-len", 65), capsys, "--seq-len 64")


def test_weights_that_are_none(data, tmp_path, run, capsys):
    shutil.copytree(run / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights at all")
    refused(arguments(data, tmp_path / "run", "--model", tmp_path / "model"), capsys, "no model could be loaded")


def test_a_folder_that_holds_another_run(data, copy, capsys):
    before = files(copy)
    refused(arguments(data, copy), capsys, "holds another run. Add --resume")
    assert files(copy) == before


def test_a_folder_that_holds_something_else(data, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for more in ([], ["--resume"]):
        refused([*arguments(data, tmp_path / "run"), *more], capsys, "it contains thesis.tex")
    assert files(tmp_path / "run") == {"thesis.tex": b"years of work"}


def test_a_loss_that_is_nan(data, tmp_path, run, capsys):
    """The checkpoint before it stays, and the run can be told from a good one."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(run / "model", tmp_path / "model")
    bad = load_file(tmp_path / "model" / "model.safetensors")
    bad["model.norm.weight"][0] = math.nan
    save_file(bad, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    command = arguments(data, tmp_path / "run", "--model", tmp_path / "model", "--validation", 0)
    refused(command, capsys, "NaN")
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_that_blows_up_keeps_its_last_checkpoint(data, tmp_path, capsys):
    flags = (
        "--lr",
        1e6,
        "--warmup",
        0,
        "--max-norm",
        "inf",
        "--precision",
        "float32",
        "--save-every",
        1,
        "--steps",
        60,
    )
    status = main(arguments(data, tmp_path / "run", *flags, "--weight-decay", 1e6))
    assert status == 2
    assert "Traceback" not in capsys.readouterr().err
    rows = metrics(tmp_path / "run")
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1].name == f"step-{rows[-1]['step']:08d}"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_memory_that_runs_out_is_one_message(data, tmp_path, capsys, monkeypatch, error):
    """Without --micro auto, too."""

    def runs_out(*_: object) -> None:
        raise error

    monkeypatch.setattr("macrobatch.train.learner.causal_lm_loss", runs_out)
    command = arguments(data, tmp_path / "run", "--micro", 4, "--validation", 0)
    refused(command, capsys, "memory ran out", "--micro auto", "--seq-len")


def test_a_prompt_does_not_command_the_terminal(data, tmp_path, capsys):
    prompt = ("--sample-tokens", 3, "--prompt", "the\x1b[2J")
    assert main(arguments(data, tmp_path / "run", "--steps", 1, *prompt)) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_not_installed_is_named(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)  # as if it were not there
    (tmp_path / "config.yaml").write_text("steps: 3")
    command = arguments(data, tmp_path / "run", "--config", tmp_path / "config.yaml")
    refused(command, capsys, "needs PyYAML: pip install 'macrobatch[train]'")


def test_the_command_alone_shows_its_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "train" in shown
    assert "generate" in shown


@pytest.mark.parametrize(("redirection", "status"), [(">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 2)])
def test_an_output_that_is_closed_or_full(data, tmp_path, redirection, status):
    words = [sys.executable, "-m", "macrobatch", *arguments(data, tmp_path / "run", "--steps", 1)]
    done = subprocess.run(
        f"{shlex.join(words)} {redirection}", shell=True, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert status == 0 or "No space left on device" in done.stderr
    assert (tmp_path / "run" / "model").exists() == (status == 0)


def test_a_report_where_nothing_can_be_written(run, capsys):
    refused(["report", str(run), "--out", "/proc/report.html"], capsys, "/proc/report.html")


def test_files_have_the_permissions_that_the_user_wants(data, tmp_path):
    before = os.umask(0o027)
    try:
        assert main(arguments(data, tmp_path / "run", "--steps", 1)) == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run" / "model").iterdir()}
    assert set(modes.values()) == {0o640}, modes


def test_validations_stay_on_the_screen(data, tmp_path, capsys):
    assert main(arguments(data, tmp_path / "run", "--validate-every", 2)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "validation loss" in line] == ["step 2", "step 4"]


def test_sources_are_mixed_in_their_shares(data, tmp_path, capsys):
    other = json_lines(tmp_path / "other.jsonl", [{"text": "zzz"}] * 8)
    command = arguments(f"{data}:3", tmp_path / "run", "--validation", 0)
    place = command.index("--data") + 2
    command[place:place] = [f"{other}:1"]
    assert main(command) == 0
    derived = json.loads((tmp_path / "run" / "run.json").read_text())["derived"]
    shares = [int(part.split()[0]) for part in derived["mixture"].split("; ")]
    assert shares[0] == pytest.approx(3 * shares[1], abs=3)
    whole = losses(tmp_path / "run")
    command[command.index("--out") + 1] = str(tmp_path / "two")
    assert main([*command, "--save-every", "1"]) == 0
    assert losses(tmp_path / "two") == whole
    refused(["train", "--resume", "--out", str(tmp_path / "two"), "--data", str(data)], capsys, "mixture was")


def test_weights_are_for_all_sources_or_none(data, tmp_path, capsys):
    other = json_lines(tmp_path / "other.jsonl", [{"text": "zzz"}] * 8)
    for sources, said in (
        ([f"{data}:3", str(other)], "has no weight, and others have"),
        ([f"{data}:0", f"{other}:1"], "weights must be above 0"),
    ):
        command = arguments(sources[0], tmp_path / "run")
        place = command.index("--data") + 2
        command[place:place] = [sources[1]]
        refused(command, capsys, said)


def test_debug_shows_where(data, tmp_path, capsys):
    assert main([*arguments(tmp_path / "nowhere", tmp_path / "run"), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
