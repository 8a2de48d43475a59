"""The settings of `macrobatch train`: as flags, as a file, and what is refused."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from macrobatch.errors import UsageError
from macrobatch.train.flags import ADVICE, NAMES, SYNONYMS, load_config, parse_flags
from macrobatch.train.models import learning_rate
from macrobatch.train.schedule import Ramp, Rate, rate_of, scale_of
from macrobatch.train.settings import GROUPS, ONCE, RANGES, Settings


def test_no_argument_is_the_default():
    assert parse_flags([]) == Settings()


def test_every_setting_has_its_flag_and_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')} " in shown.replace(",", " ")


def test_flags():
    found = parse_flags(
        ["--data", "a", "b", "--lr", "1e-4", "--compile", "--batch-tokens", "4096", "--precision", "bf16"]
    )
    wanted = Settings(data=("a", "b"), lr=1e-4, compile=True, batch_tokens=4096, precision="bf16")
    assert found == wanted


def test_trackers():
    assert parse_flags(["--track", "wandb", "mlflow", "--lr", "1"]).trackers == ("wandb", "mlflow")
    assert parse_flags([]).trackers == ()
    assert parse_flags(["--track", "none"]).trackers is None


@pytest.mark.parametrize(
    ("best", "found"),
    [
        ("loss", ("loss", False)),
        ("accuracy:max", ("accuracy", True)),
        ("wer:min", ("wer", False)),
        ("a:b", ("a:b", False)),
        ("a:b:max", ("a:b", True)),
    ],
)
def test_which_number_tells_the_best(best, found):
    assert Settings(best=best).best_number == found


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "many"], "--steps must be a whole number: got 'many'"),
        (["--batch-size", "abc"], "--batch-size must be a whole number: got 'abc'"),
        (["--lr", "1e-"], "--lr must be a number: got '1e-'"),
        (["--precision", "int4"], "--precision must be one of auto, float32, bf16, fp16, pure-bf16, float64: got"),
        (["free"], "unexpected argument 'free'"),
        (["--steps"], "--steps: expected one argument"),
        (["--resume", "runs/x"], "--resume takes no folder: say --resume --out runs/x"),
        (["--learning_rate", "1", "--load-in-4bit"], "--lr?\nthere is no --load-in-4bit: quantized weights are not"),
    ],
)
def test_flags_that_are_refused(flags, said):
    with pytest.raises(UsageError) as raised:
        parse_flags(flags)
    assert said in str(raised.value)


@pytest.mark.parametrize("name", [*SYNONYMS, *ADVICE])
def test_names_of_other_trainers_have_a_hint_that_holds(name):
    with pytest.raises(UsageError) as raised:
        parse_flags([f"--{name}", "1"])
    flags = re.findall(r"--[a-z][a-z0-9-]*", str(raised.value))[1:]
    assert all(flag.removeprefix("--").replace("-", "_") in NAMES for flag in flags)
    assert "did you mean" in str(raised.value) or name in ADVICE


def test_help_is_in_groups_and_every_flag_is_explained(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    lines = capsys.readouterr().out.splitlines()
    groups = [line.removesuffix(":") for line in lines if re.fullmatch(r"\w+:", line)]
    assert groups == ["options", *GROUPS]
    assert any("--batch-size N " in line and "number of samples" in line for line in lines)
    assert any(line.endswith("Default: 1e-08.") for line in lines)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--learning_rate=3", "--lr"),
        ("--stepz", "--steps"),
        ("--gradient_clip", "--max-norm"),
        ("--batchsize", "--batch-size"),
        ("--output_dir", "--out"),
        ("--no-compiel", None),
        ("--xyzzy", None),
    ],
)
def test_the_flag_that_was_meant(flag, meant):
    with pytest.raises(UsageError, match=f"there is no {flag.partition('=')[0]}: ") as raised:
        parse_flags(["--lr", "1", flag])
    assert meant is None or f"did you mean {meant}?" in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "a", "--data", "b"], "--data is given twice"),
        (["--lora-targets", "q", "--steps", "3", "--lora-targets", "v"], "--lora-targets is given twice"),
        (["--data"], "--data needs a value"),
        (["--data", "--steps", "3"], "--data needs a value"),
    ],
)
def test_no_part_of_a_list_is_lost(flags, said):
    with pytest.raises(UsageError, match=said):
        parse_flags(flags)


def test_programs_may_give_paths_and_lists():
    settings = Settings(data=[Path("a"), "b"], out=Path("runs/x"))
    assert (settings.data, settings.out) == (("a", "b"), "runs/x")


def test_flags_are_not_mistaken():
    assert parse_flags(["--no-compile", "--batch_size", "3", "--prompt", "-- x"]).batch_size == 3


def test_one_text_in_a_file_where_several_may_stand(tmp_path):
    (tmp_path / "config.toml").write_text('data = "texts"\nvalidation-data = "held"\n')
    found = load_config(tmp_path / "config.toml")
    assert (found.data, found.validation_data) == (("texts",), ("held",))


def test_flags_count_more_than_the_file_that_says_it_in_another_way(tmp_path):
    (tmp_path / "config.toml").write_text("steps = 7\nbatch-tokens = 100\nwarmup = 400\n")
    found = parse_flags(["--config", str(tmp_path / "config.toml"), "--epochs", "3", "--batch-size", "5"])
    assert (found.steps, found.epochs, found.batch_tokens, found.batch_size) == (None, 3, None, 5)
    assert parse_flags(["--config", str(tmp_path / "config.toml"), "--steps=400"]).warmup == 400


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(UsageError, match="--warmup 321 is longer than the run of 320 steps"):
        parse_flags(["--warmup", "321"])
    assert parse_flags(["--warmup", "321", "--epochs", "1"]).warmup == 321  # whose steps only the data tells
    with pytest.raises(UsageError, match="--warmup 101 is longer than the run of 100 steps"):
        rate_of(Settings(warmup=101), 100, 0.5)
    assert rate_of(Settings(warmup=100), 100, 0.5).warmup == 100


def test_large_numbers_are_told_with_their_digits():
    with pytest.raises(UsageError, match="--seq-len must be between 2 and 2,147,483,648: got 1"):
        Settings(seq_len=1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"validation": 0.1, "validation_data": ("a",)}, "pass --validation or --validation-data"),
        ({"validation": 0, "early_stop": 1}, "--early-stop needs"),
        ({"batch_size": 8, "batch_tokens": 80}, "pass --batch-size or --batch-tokens"),
        ({"steps": 1, "epochs": 1}, "pass --steps or --epochs"),
        ({"lr_scale": "sqrt"}, "and --reference-batch, or neither"),
        ({"reference_batch": 8}, "and --reference-batch, or neither"),
        ({"shard_ranks": 2}, "--shard-ranks needs --parallel hsdp"),
        ({"model": ""}, "--model"),
        ({"out": "runs/\0x"}, "--out must not hold a NUL"),
        ({"data": ("a", "b\0")}, "--data must not hold a NUL"),
        ({"micro": "tokens:"}, "--micro must be"),
        ({"micro": "tokens:0"}, "--micro must be"),
        ({"micro": "0"}, "--micro must be"),
        ({"micro": "-3"}, "--micro must be"),
        ({"micro": "bytes:3"}, "--micro must be"),
        ({"micro": "auto:3"}, "--micro must be"),
        ({"steps": 2.5}, "--steps must be a whole number: got 2.5"),
        ({"steps": True}, "--steps must be a whole number: got True"),
        ({"lr": float("nan")}, "--lr must be a number"),
        ({"lr": "fast"}, "--lr must be a number"),
        ({"compile": 1}, "--compile must be true or false"),
        ({"precision": "int4"}, "--precision must be one of auto, float32"),
        ({"data": "text.txt"}, "--data must be a list"),
        ({"data": (3,)}, "--data must be a list"),
        ({"track": ("wandb", "excel")}, "--track must be some of tensorboard, wandb, mlflow, trackio, none: got"),
        ({"track": ("wandb", "none")}, "--track none excludes other trackers"),
        ({"best": ":max"}, "--best must name a number"),
        ({"early_stop": 2, "validate_every": 0}, "--early-stop compares several validations"),
        ({"batch_ramp_start": 0.5}, "--batch-ramp-start needs --batch-ramp"),
        ({"prompt": "a", "sample_tokens": 0}, "--prompt has no effect"),
    ],
)
def test_refused(values, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        Settings(**values)


@pytest.mark.parametrize("name", RANGES)
def test_numbers_out_of_range_are_refused(name):
    low, high = RANGES[name]
    for value in (-1, 0 if low > 0 else -1, *([high * 2] if high < 2**40 else [])):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} must be "):
            Settings(**{name: value})


@pytest.mark.parametrize(
    ("micro", "cut"),
    [("16", ("count", 16)), ("auto", ("auto", None)), ("tokens", ("tokens", None)), ("tokens:512", ("tokens", 512))],
)
def test_how_a_batch_is_cut(micro, cut):
    assert Settings(micro=micro).cut == cut


# -------------------------------------------------------------------------------------------------------------- files


def test_the_file_that_is_printed_says_the_same(tmp_path):
    chosen = parse_flags(
        ["--lr", "0.25", "--data", 'with "quotes" and \\', "ümlaut\x7f\n", "--max-norm", "inf", "--compile"]
    )
    (tmp_path / "config.toml").write_text(chosen.toml(), encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == chosen
    again = parse_flags(["--config", str(tmp_path / "config.toml")])
    assert dataclasses.replace(again, config=None) == chosen


WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))).map(tuple)


@given(st.builds(Settings, lr=st.floats(0, 1e6), data=WORDS, seed=st.integers(0, 2**63 - 1)))
@hypothesis.settings(deadline=None)
def test_any_settings_survive_a_file(chosen):
    values = tomllib.loads(chosen.toml())
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    assert Settings(**values) == chosen


def test_flags_count_more_than_the_file(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('batch-size = 8\nlr = 1\nmicro = "auto"\n')
    found = parse_flags(["--config", str(file), "--micro", "2"])
    assert (found.batch_size, found.lr, found.micro) == (8, 1, "2")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("lr = ", "is not TOML"),
        ("xyzzy = 3", "has no setting 'xyzzy'. There are model, tokenizer"),
        ("learning_rate = 3", "has no setting 'learning_rate': did you mean 'lr'?"),
        ("lerning_rate = 3", "has no setting 'lerning_rate': did you mean 'lr'?"),
        ("stepz = 3", "has no setting 'stepz': did you mean 'steps'?"),
        ("lr = 'high'", "config.toml: --lr must be a number: got 'high'"),
        ("steps = 0", "config.toml: --steps must be at least 1"),
        ("resume = true", "has no setting 'resume': only the command line has it, as --resume"),
        (b"\xff", "is not TOML"),
    ],
)
def test_a_bad_file(tmp_path, content, said):
    file = tmp_path / "config.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as raised:
        parse_flags(["--config", str(file)])
    assert said in str(raised.value)


YAML = """
# a comment
data: [a.jsonl, b.jsonl]
model: runs/base
lr: 1e-4
epochs: 2
micro: 4
lora: true
checkpoint-activations: yes
"""


def test_a_file_in_yaml_says_the_same_as_flags(tmp_path):
    (tmp_path / "config.yaml").write_text(YAML)
    flags = "--data a.jsonl b.jsonl --model runs/base --lr 1e-4 --epochs 2 --micro 4 --lora --checkpoint-activations"
    assert load_config(tmp_path / "config.yaml") == parse_flags(flags.split())
    found = parse_flags(["--config", str(tmp_path / "config.yaml"), "--lr", "3", "--steps", "8"])
    assert (found.lr, found.steps, found.epochs, found.micro) == (3, 8, None, "4")


def test_an_empty_yaml_is_the_default(tmp_path):
    (tmp_path / "config.yml").write_text("# nothing\n")
    assert load_config(tmp_path / "config.yml") == Settings()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("lr: [", "is not YAML"),
        ("lr: 1\nsteps: 3\nlr: 2", "'lr' is given twice"),
        ("a: &a [x, x]\ndata: *a", "aliases such as *a are not supported"),
        ("- lr", "must have one setting per line"),
        ("lr: fast", "--lr must be a number: got 'fast'"),
        ("out: 2026-01-01", "--out must be a text"),
        ("data: {a: 1}", "--data must be a list of texts"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("base_model: x\nload_in_4bit: true\nsequence_len: 9", "'base_model': did you mean 'model'?"),
        ("base_model: x\nload_in_4bit: true\nsequence_len: 9", "'load_in_4bit': quantized weights are not supported"),
        ("base_model: x\nload_in_4bit: true\nsequence_len: 9", "'sequence_len': did you mean 'seq_len'?"),
        ("a: " + "[" * 5000, "is not YAML"),
    ],
)
def test_a_bad_file_in_yaml(tmp_path, content, said):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UsageError) as raised:
        load_config(tmp_path / "config.yaml")
    assert said in str(raised.value)


def test_no_such_file():
    with pytest.raises(UsageError, match=r"nowhere\.toml cannot be read: No such file"):
        parse_flags(["--config", "nowhere.toml"])


def test_resuming_begins_with_the_settings_of_the_run(tmp_path):
    run = Settings(steps=7, micro="3")
    (tmp_path / "run.json").write_text(json.dumps({"settings": run.lasting}))
    found = parse_flags(["--resume", "--out", str(tmp_path), "--micro", "5"])
    assert (found.steps, found.micro, found.resume) == (7, "5", True)
    assert parse_flags(["--resume", f"--out={tmp_path}"]).steps == 7
    assert parse_flags(["--resume", "--out", str(tmp_path), "--epochs", "2"]).steps is None  # instead of them


def test_resuming_nothing():
    for flags, said in ((["--resume"], "--resume needs"), (["--resume", "auto"], "--resume auto needs")):
        with pytest.raises(UsageError, match=f"{said} --out RUN"):
            parse_flags(flags)


def test_resuming_a_run_if_it_exists(tmp_path):
    flags = ["--resume", "auto", "--out", str(tmp_path), "--micro", "5"]
    assert (parse_flags([*flags, "--steps", "9"]).steps, parse_flags(flags).resume) == (9, "auto")
    (tmp_path / "run.json").write_text(json.dumps({"settings": Settings(steps=7).lasting}))
    assert (parse_flags(flags).steps, parse_flags(flags).micro) == (7, "5")


def test_a_run_that_does_not_tell_its_settings(tmp_path):
    for content in ("{", "[]", "{}", '{"settings": 3}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(UsageError, match="has no settings of a run"):
            parse_flags(["--resume", "--out", str(tmp_path)])


def test_what_belongs_to_one_call_is_not_kept():
    assert not set(ONCE) & set(Settings(debug=True).lasting)


# ----------------------------------------------------------------------------------------------------- pure functions


@given(st.integers(1, 60), st.integers(0, 70), st.sampled_from(["cosine", "linear", "constant"]), st.floats(0, 1))
def test_the_rate_rises_and_then_falls(steps, warmup, schedule, final):
    rate = Rate(peak=2.0, steps=steps, warmup=warmup, schedule=schedule, final=final)
    rates = [rate(step) for step in range(steps + 5)]
    top = min(warmup, len(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0 <= one <= 2.0 for one in rates)
    if warmup < steps and schedule != "constant":
        assert rates[-1] == pytest.approx(2.0 * final, abs=1e-12)


def test_the_rate_in_numbers():
    rate = Rate(peak=1.0, steps=12, warmup=2, schedule="cosine", final=0.1)
    assert [rate(step) for step in (0, 1, 2, 7)] == pytest.approx([0.5, 1.0, 1.0, 0.55])
    assert Rate(peak=1.0, steps=12, warmup=0, schedule="constant", final=0.1)(11) == 1.0


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        (Settings(), 1.0),
        (Settings(batch_size=256, lr_scale="linear", reference_batch=64), 4.0),
        (Settings(batch_size=256, lr_scale="sqrt", reference_batch=64), 2.0),
        (Settings(batch_tokens=1000, lr_scale="linear", reference_batch=4000), 0.25),
        (Settings(lr_scale="linear", reference_batch=8), 2.0),
    ],
)
def test_the_rate_follows_the_batch(settings, scale):
    assert scale_of(settings) == scale
    assert rate_of(settings, 100, 0.5).peak == pytest.approx(0.5 * scale)


def test_the_rate_follows_the_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    rates = [learning_rate(Settings(model=str(model))) for model in ("small", "large", tmp_path, "some/weights")]
    assert rates == [5e-3, 6e-4, 1e-3, 5e-5]
    assert learning_rate(Settings(model="large", lr=0.25)) == 0.25


def test_the_ramp():
    ramp = Ramp(steps=4, start=0.2)
    assert [ramp(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
