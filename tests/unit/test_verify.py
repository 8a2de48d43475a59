"""`verify` itself: what it puts back, what it refuses, what it reports."""

import copy
import dataclasses
import json
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.loops import UNEQUAL, Loop, Statistics, batch_of, by_items, loss_fn, pieces
from harness.peers import accelerate_loop, accelerator, lightning_loop, loader_of
from harness.reference import WIDTH, Attention, Batch, mean_loss
from macrobatch import MacrobatchError, MacroStep, verify
from macrobatch.errors import BatchError, FitError, UsageError
from macrobatch.verification import Report
from macrobatch.verification.catalogue import cause
from macrobatch.verification.observation import Arrival, Call
from macrobatch.verification.report import WindowReport, verdict_of
from macrobatch.verification.sample_matching import match_samples

BATCH = batch_of(items=UNEQUAL)


class Everything(Statistics):
    """Has all that a step can change: buffers, dropout, statistics, a part in another mode, a frozen part."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)))
        self.norm[2].eval().requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1  # another tensor each time
        return super().forward(x)


Training = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def trained() -> Training:
    """A model in the middle of a training, with momentum, and with gradients."""
    torch.manual_seed(0)
    model = Everything().double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        mean_loss(model, batch_of(6, seed=3)).backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def state_of(training: Training) -> dict:
    model, optimizer, scheduler = training
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "learns": [p.requires_grad for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "schedule": scheduler.state_dict(),
        "dropout": model.norm[1].p,
        "random": (torch.get_rng_state(), random.getstate()),
        "hooks": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        + sum(len(p._backward_hooks or ()) for p in model.parameters()),
        "forward": "forward" in vars(model),
    }


def everything(training: Training, *, then: Exception | None = None):
    """A step that leaves nothing as it was."""
    _, optimizer, scheduler = training

    def step(model, batch):
        model.eval().train()
        for micro in pieces(batch, 5):
            mean_loss(model, micro).backward()
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        model.embedding.weight.requires_grad_(False)
        mean_loss(model, batch).backward()
        torch.rand(3), random.random()
        if then is not None:
            raise then

    return step


@pytest.mark.parametrize("then", [None, KeyError("in the step")], ids=["returns", "raises"])
def test_all_is_put_back(then):
    training = trained()
    model = training[0]
    before, tensors = state_of(training), [p.grad for p in model.parameters()]
    if then is None:
        verify(model, loss_fn, BATCH, step=everything(training))
    else:
        with pytest.raises(KeyError, match="in the step"):
            verify(model, loss_fn, BATCH, step=everything(training, then=then))
    torch.testing.assert_close(state_of(training), before, rtol=0, atol=0)
    assert all(p.grad is tensor for p, tensor in zip(model.parameters(), tensors, strict=True))


def test_the_check_sees_what_is_not_put_back():
    training = trained()
    before = state_of(training)
    everything(training)(training[0], BATCH)
    for key in before.keys() - {"hooks", "forward", "dropout"}:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(state_of(training)[key], before[key], rtol=0, atol=0)


def test_a_new_optimizer_has_no_state_afterwards():
    model = Attention().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert verify(model, loss_fn, BATCH, step=Loop(weight=by_items, make_optimizer=lambda _: optimizer)).ok
    assert not optimizer.state


@pytest.mark.parametrize("theirs", [accelerate_loop, lightning_loop])
def test_other_libraries_leave_no_trace(theirs, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = Attention()
    before = copy.deepcopy(model.state_dict())
    verify(model, loss_fn, BATCH, step=theirs(mean_loss))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


def test_a_patched_forward_is_put_back():
    def step(model, batch):
        with accelerator(mixed_precision="bf16") as theirs:
            model, *_ = theirs.prepare(model, torch.optim.SGD(model.parameters()), loader_of(batch))
            theirs.backward(mean_loss(model, batch))

    model = Attention()
    verify(model, loss_fn, BATCH, step=step)
    assert "forward" not in vars(model)


# ----------------------------------------------------------------------------------------------------- what is refused


def raises(kind: type[Exception], *words: str):
    assert issubclass(kind, MacrobatchError)
    return pytest.raises(kind, match=".*".join(words))


def test_wrong_arguments():
    model = Attention()
    with raises(UsageError, "model must be a torch.nn.Module", "list"):
        verify([model], loss_fn, BATCH)
    with raises(UsageError, "loss_fn must be a function", "int"):
        verify(model, 3, BATCH)
    with raises(UsageError, "step must be a function", "str"):
        verify(model, loss_fn, BATCH, step="train")
    with raises(UsageError, "reduction must be one of", "median"):
        verify(model, loss_fn, BATCH, reduction="median")
    with raises(UsageError, "nothing to verify"):
        verify(model.requires_grad_(False), loss_fn, BATCH)


@pytest.mark.parametrize("step", [None, Loop(weight=by_items)])
def test_a_batch_without_samples(step):
    with raises(UsageError, "no samples"):
        verify(Attention(), loss_fn, Batch(BATCH.x[:0], BATCH.y[:0]), step=step)


def test_losses_that_are_none():
    with raises(BatchError, "must be a scalar"):
        verify(Attention(), lambda model, batch: model(batch.x), BATCH, step=Loop())
    with raises(BatchError, "has no graph"):
        verify(Attention(), lambda model, batch: mean_loss(model, batch).detach(), BATCH, step=Loop())


def test_a_batch_that_cannot_be_cut():
    """One optimizer step can be compared all the same; several cannot."""

    class Opaque:
        batch = batch_of(50, items=UNEQUAL)

    def loss_of(model, batch):
        return mean_loss(model, batch.batch)

    def once(model, batch):
        loss_of(model, batch).backward()

    def twice(model, batch):
        Loop(weight=by_items)(model, batch.batch)

    assert verify(Attention(), loss_of, Opaque(), step=once).ok
    with raises(BatchError, "3 optimizer steps", "Pass a batch for one optimizer step"):
        verify(Attention(), loss_of, Opaque(), step=twice)


def test_steps_whose_backwards_nobody_saw():
    """Gradients that come from elsewhere, as from a replayed graph: not an old one once more."""

    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in (1.0, 2.0):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, number)
            optimizer.step()

    with raises(BatchError, "2 optimizer steps", "cannot tell which samples"):
        verify(Attention(), loss_fn, BATCH, step=step)


def test_a_whole_batch_that_does_not_fit():
    def loss_of(model, batch):
        if len(batch.x) > 10:
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")
        return mean_loss(model, batch)

    with raises(FitError, "whole batch does not fit", "Pass fewer samples"):
        verify(Attention(), loss_of, BATCH)


def test_the_own_error_of_a_loss_comes_through():
    def loss_of(model, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        verify(Attention(), loss_of, BATCH, step=Loop())


def test_a_model_that_was_converted_is_put_back():
    """As Lightning does with precision="bf16-true"."""

    def step(model, batch):
        mean_loss(model.bfloat16(), batch).backward()

    model = Attention()
    before = copy.deepcopy(model.state_dict())
    verify(model, loss_fn, BATCH, step=step)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------- precision


def test_a_model_that_cannot_be_copied_is_compared_in_its_own_precision():
    class Uncopyable(Attention):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    right = verify(Uncopyable(), loss_fn, BATCH)
    assert right.ok
    assert "no copies" in right.notes[0]
    assert right.reference == "one big batch in float32"
    wrong = verify(Uncopyable(), loss_fn, BATCH, step=Loop())
    assert [cause.name for cause in wrong.causes] == ["mean of means"]


def test_a_loss_that_does_not_run_in_float64():
    def loss_of(model, batch):
        return F.mse_loss(model(batch.x), torch.zeros(len(batch.x), 10, 11)), batch.items  # float64 - float32

    def loss_of_globals(_, batch):
        return mean_loss(fixed, batch), batch.items

    fixed = Attention()
    assert verify(fixed, loss_of_globals, BATCH).ok
    assert "does not use the model" in verify(fixed, loss_of_globals, BATCH).notes[0]
    assert verify(Attention(), loss_of, BATCH, step=None).max_relative_error > 0


def test_what_is_allowed():
    bounds = {dtype: verify(Attention().to(dtype), loss_fn, BATCH).bound for dtype in (torch.float64, torch.float32)}
    assert bounds[torch.float64] == 1e-12
    assert bounds[torch.float32] < 1e-5


# ------------------------------------------------------------------------------------------------------- the report


@pytest.fixture(scope="module")
def wrong() -> Report:
    torch.manual_seed(0)
    return verify(Attention().double(), loss_fn, batch_of(50, items=UNEQUAL), step=Loop(weight=lambda window, _: 1 / 4))


def test_it_prints_at_a_glance(wrong):
    text = str(wrong)
    assert text.startswith("WRONG: error 0.5")
    for word in ("window", "micro-batches", "head.weight", "cause 1: mean of means", "found:", "cure:", "cause 2"):
        assert word in text
    assert max(map(len, text.splitlines())) < 160
    assert str(verify(Attention().double(), loss_fn, BATCH)).startswith("EXACT: error ")


def test_it_is_plain_data(wrong):
    plain = json.loads(json.dumps(wrong.to_dict(), allow_nan=False))
    assert plain["ok"] is False
    assert plain["max_relative_error"] == wrong.max_relative_error
    assert plain["worst"][0] == {"name": wrong.worst[0].name, "error": wrong.worst[0].error}
    assert plain["causes"][0] == dataclasses.asdict(wrong.causes[0])
    assert [window["samples"] for window in plain["windows"]] == [20, 20, 10]


def test_the_worst_come_first(wrong):
    errors = [error for _, error in wrong.worst]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == wrong.max_relative_error
    assert len(errors) == 5


def test_it_cannot_be_changed(wrong):
    with pytest.raises(dataclasses.FrozenInstanceError):
        wrong.ok = True


def test_it_says_where_every_gradient_is_right_and_the_step_is_not():
    step = Loop(weight=by_items, step_times=2)
    assert str(verify(Attention().double(), loss_fn, BATCH, step=step)).startswith(
        "WRONG, though not by its size: error "
    )


def test_what_is_not_finite_is_null():
    def step(model, batch):
        (mean_loss(model, batch) * torch.inf).backward()

    report = verify(Attention(), loss_fn, BATCH, step=step)
    assert report.causes[0].name == "not finite"
    assert report.max_relative_error == float("inf")
    assert report.to_dict()["max_relative_error"] is None


# ------------------------------------------------------------------------------------------------------- which samples


def calls(*rows: list[list[int]], micro: list[int] | None = None) -> list[Call]:
    """One in each backward, or in the backwards `micro`."""
    backwards = micro or range(len(rows))
    return [
        Call({"x": torch.tensor(each)}, output_gradients=[Arrival(backward, torch.ones(()))])
        for each, backward in zip(rows, backwards, strict=True)
    ]


def parts(found: list[Call], whole: list[Call], used: set[int] | None = None) -> list[list[int]] | None:
    rows = match_samples(found, whole, 4, set() if used is None else used)
    return None if rows is None else rows.parts


def test_rows_are_found_by_their_values():
    whole = calls([[1, 2, 0], [3, 4, 5], [6, 0, 0], [1, 2, 0]])
    assert parts(calls([[3, 4, 5]], [[6, 0, 0], [1, 2, 0]]), whole) == [[1], [2, 0]]
    assert parts(calls([[1, 2, 0]], [[1, 2, 0]]), whole) == [[0], [3]]  # twins, each once
    assert parts(calls([[1, 2]], [[6, 0, 0, 0]]), whole) == [[0], [2]]  # trimmed, padded
    assert parts(calls([[1, 9, 9]]), whole) is None
    assert parts(calls([[1, 2]], [[3]]), whole) is None  # what was trimmed was no padding
    assert parts(calls([[1, 2, 0]], [[3, 4, 5]], [[1, 2, 0]], micro=[0, 0, 0]), whole) == [[0], [1]]


def test_twins_are_each_used_once_in_several_windows():
    whole, used = calls([[1, 2, 0], [3, 4, 5], [6, 0, 0], [1, 2, 0]]), set()
    assert parts(calls([[1, 2, 0]]), whole, used) == [[0]]
    assert parts(calls([[1, 2, 0]]), whole, used) == [[3]]


def test_batches_of_every_shape():
    x, y = torch.rand(9, 3), torch.rand(9, 1)

    @dataclasses.dataclass
    class Sample:
        x: torch.Tensor
        y: torch.Tensor

    def loss_of(pick):
        return lambda model, batch: F.mse_loss(model(pick(batch)[0]), pick(batch)[1])

    for batch, pick in (
        ((x, y), lambda b: b),
        ([x, y], lambda b: b),
        ({"x": x, "rest": {"y": y}}, lambda b: (b["x"], b["rest"]["y"])),
        (Sample(x, y), lambda b: (b.x, b.y)),
    ):
        assert verify(nn.Linear(3, 1), loss_of(pick), batch).ok


def test_samples_that_no_window_has_are_mentioned():
    """Dropping the last micro-batch is a policy; each window is right for its own samples."""

    def all_but_the_last(batch, size):
        return list(pieces(batch, size))[:-1]

    report = verify(
        Attention().double(), loss_fn, batch_of(43, items=UNEQUAL), step=Loop(weight=by_items, cut=all_but_the_last)
    )
    assert report.ok
    left_out = "3 of 43 samples of the batch reached no backward"
    assert report.notes == (f"{left_out}: a mistake, if each should be used once",)
    told = verify(
        Attention().double(),
        loss_fn,
        batch_of(43, items=UNEQUAL),
        step=Loop(weight=by_items, cut=all_but_the_last),
        windows=len(report.windows),
    )
    assert [(cause.name, cause.evidence) for cause in told.causes] == [("samples left out", f"{left_out}.")]


@pytest.mark.parametrize("windows", [[range(7), range(5, 12)], [range(6), range(6)], [range(12), range(12)]])
def test_samples_of_several_windows_are_mentioned(windows):
    """Two epochs are right, too; but not if the batch is meant for so many steps."""

    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for samples in windows:
            for sample in samples:
                (F.mse_loss(model(batch[0][[sample]]), batch[1][[sample]]) / len(samples)).backward()
            optimizer.step()
            optimizer.zero_grad()

    case = nn.Linear(4, 2).double(), lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
    batch = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    twice = f"{len(set(windows[0]) & set(windows[1]))} samples of the batch reached more than one optimizer step"
    report = verify(*case, batch, step=step)
    assert report.ok
    assert report.notes[-1] == f"{twice}: a mistake, if each should be used once"
    report = verify(*case, batch, step=step, windows=2)
    assert not report.ok
    assert report.causes[-1].name == "samples used twice"
    assert report.causes[-1].evidence == f"{twice}."


def test_a_sum_with_items_and_no_shift():
    """It is weighted by labels, but they are not counted before any shift."""
    tokens = torch.randint(30, (12, 9))
    labels = tokens.masked_fill(torch.arange(9) >= torch.randint(2, 9, (12, 1)), -100)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30)).double()

    def summed(model, batch):
        logits, labels = model(batch["tokens"]), batch["labels"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()

    report = verify(model, summed, {"tokens": tokens, "labels": labels})
    assert [cause.name for cause in report.causes][:1] == ["items that do not fit the loss"]
    assert verify(model, summed, {"tokens": tokens, "labels": labels}, reduction="sum").ok


def test_two_optimizers_may_use_the_same_samples():
    """As those of a GAN do."""

    def step(model, batch):
        for part in model:
            optimizer = torch.optim.SGD(part.parameters(), 0.1)
            optimizer.zero_grad()
            model.requires_grad_(False)
            part.requires_grad_(True)
            F.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
            model.requires_grad_(True)

    batch = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    report = verify(model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), batch, step=step)
    assert report.ok, report
    assert not any("more than one" in note for note in report.notes)


def test_parameters_that_no_optimizer_holds_are_mentioned():
    step = Loop(weight=by_items, make_optimizer=lambda model: torch.optim.SGD(model.head.parameters(), 0.1))
    report = verify(Attention().double(), loss_fn, BATCH, step=step)
    assert report.ok
    assert "embedding.weight" in report.notes[0]


def test_one_sample():
    report = verify(Attention(), loss_fn, Batch(BATCH.x[:1], BATCH.y[:1]))
    assert report.ok
    assert "nothing was accumulated" in report.notes[0]


# --------------------------------------------------------------------------------------------- arguments that are off


def test_a_macro_step_as_it_is():
    model = nn.Linear(3, 1)

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro=4)
    assert verify(model, loss_fn, (torch.randn(10, 3), torch.randn(10, 1)), step=train).ok
    for nothing in ({}, [], ()):
        with pytest.raises(UsageError, match=r"an empty one \(.*whose first dimension is the samples"):
            verify(nn.Linear(3, 1), lambda model, batch: model(batch["x"]).mean(), nothing)
    with pytest.raises(UsageError, match="no batch was given"):
        verify(model, loss_fn)
    with pytest.raises(UsageError, match="micro"):
        verify(model, loss_fn, (torch.randn(10, 3), torch.randn(10, 1)), micro=0)


def test_a_list_of_samples_without_collate():
    model, samples = nn.Linear(3, 1), [{"x": torch.randn(3)} for _ in range(5)]
    for step, message in (
        (None, "a list of 5 .*collate="),
        (lambda model, batch: None, r"which is a list \(TypeError: .*collate="),
    ):
        with pytest.raises(BatchError, match=message):
            verify(model, lambda model, batch: model(batch["x"]).mean(), samples, step=step)


def regression(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("step", [None, lambda model, batch: None])
def test_leaves_of_different_lengths(step):
    with pytest.raises(BatchError, match=r"batch\[0\] has 12, but batch\[1\] has 3"):
        verify(nn.Linear(5, 2), regression, (torch.randn(12, 5), torch.randn(3, 2)), step=step)


def test_a_dict_of_one_term():
    model, batch = nn.Linear(5, 2), (torch.randn(12, 5), torch.randn(12, 2))

    def one_term(model, batch):
        return {"only": (regression(model, batch), len(batch[0]))}

    assert verify(model, one_term, batch, counts=lambda batch: {"only": len(batch[0])}, micro=5).ok
    with pytest.raises(BatchError, match=r"A dict of terms \(only\) needs counts="):
        verify(model, one_term, batch, micro=5)


def test_several_windows_of_data_of_its_own():
    def step(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            regression(model, (torch.randn(4, 5), torch.randn(4, 2))).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = verify(nn.Linear(5, 2), regression, (torch.randn(12, 5), torch.randn(12, 2)), step=step)
    assert (report.verdict, report.windows) == ("unknown", ())
    assert str(report).startswith("UNKNOWN: no gradient was compared: step that does not use the batch\n")
    assert "micro-batches" not in str(report)
    assert str(
        dataclasses.replace(
            report, windows=(WindowReport(samples=4, micro_batches=1, relative_error=math.inf, factor=math.inf),)
        )
    ).startswith("UNKNOWN: the error is infinite or NaN")


# ------------------------------------------------------------------------------------------- calls that cannot work


def generating(model, batch):
    yield loss_fn(model, batch)[0].backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": torch.utils.data.DataLoader(torch.zeros(4, 3))}, "must be one batch: got DataLoader"),
        ({"batch": (x for x in torch.zeros(4, 3))}, "must be one batch: got generator"),
        ({"batch": torch.utils.data.TensorDataset(torch.zeros(4, 3))}, "must be one batch: got TensorDataset"),
        ({"step": lambda: None}, r"step must take the model and a batch, step\(model, batch\): got step\(\)"),
        ({"step": lambda model: None}, r"got step\(model\)"),
        ({"step": generating}, "Remove yield and async"),
        ({"loss_fn": lambda batch: None}, r"loss_fn must take the model and a batch.*got loss_fn\(batch\)"),
        ({"loss_fn": nn.MSELoss()}, "must be a function of the model and a batch: got MSELoss"),
    ],
)
def test_calls_that_cannot_work(changes, message):
    arguments = {"model": Attention(), "loss_fn": loss_fn, "batch": BATCH} | changes
    with pytest.raises(UsageError, match=message):
        verify(**arguments)


def test_a_step_that_returns_before_its_backward():
    report = verify(Attention(), loss_fn, BATCH, step=lambda model, batch: loss_fn(model, batch))
    assert report.causes[0].evidence.startswith("the step called the model 1 times, but no backward reached")


# ------------------------------------------------------------------------------------------------------ the verdict


@pytest.mark.parametrize(
    ("certainties", "verdict", "ok"),
    [
        ([], "exact", True),
        (["read"], "wrong", False),
        (["inferred", "unknown"], "wrong", False),
        (["unknown", "unknown"], "unknown", False),
    ],
)
def test_the_verdict_of_causes(certainties, verdict, ok):
    causes = tuple(cause("unexplained", "evidence", certainty=certainty) for certainty in certainties)
    report = Report(
        verdict=verdict_of(causes), max_relative_error=1.0, bound=0.1, reference="", worst=(), windows=(), causes=causes
    )
    assert (report.verdict, report.ok, report.to_dict()["verdict"]) == (verdict, ok, verdict)
    assert str(report).startswith(f"{verdict.upper()}: error 1 of the largest gradient")


def test_what_losses_say_is_read(wrong):
    assert [each.certainty for each in wrong.causes] == ["read", "read"]
    assert "cause 1: mean of means (read from the loss)" in str(wrong)
