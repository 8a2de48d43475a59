"""Losses of the whole batch, in two passes: the gradient is that of one big batch."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.host_reads import HostReads
from harness.joint import (
    CASES,
    CONTRAST,
    NESTED,
    Untouched,
    batch_of,
    checkpointed_gradient,
    gradient_of,
    plain_contrast,
    sgd,
    step_error,
    step_of,
    towers,
    train_on,
    weights,
)
from harness.reference import relative_error
from macrobatch import Encoded, MacroStep, by_tokens, contrastive_loss
from macrobatch._joint.kept_graphs import ROOMS, SHARE, SPARE
from macrobatch.errors import BatchError, FitError

# ------------------------------------------------------------------------------------------------------ exact


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    samples=st.integers(2, 12),
    micro=st.one_of(st.integers(1, 12), st.integers(4, 20).map(by_tokens)),
    seed=st.integers(0, 99),
)
def test_any_cut_gives_the_gradient_of_the_whole_batch(name, samples, micro, seed):
    model, batch, case, found = towers(), batch_of(samples, seed=seed), CASES[name], []
    expected = case.whole(model, batch).item()
    train = train_on(model, case, micro)
    assert step_error(model, case, batch, lambda: found.append(train(batch))) <= 1e-12
    (result,) = found
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)
    assert result.items.item() == (batch["attention_mask"].sum() if case is NESTED else samples)
    assert result.losses is None
    assert all(p.grad is None for p in model.parameters())


WORDS = {"x": torch.arange(16.0, dtype=torch.float64).view(4, 4, 1).cos(), "labels": torch.tensor(
    [[1, 2, -100, -100], [0, -100, -100, -100], [3, 1, 2, 0], [1, 1, -100, -100]]
)}  # fmt: skip


def entropy(model, batch, reduction="mean"):
    logits = model(batch["x"]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction=reduction)


@pytest.mark.parametrize(
    ("ordinary", "message"),
    [
        (lambda m, b: {"loss": entropy(m, b), "items": (b["labels"] != -100).sum()}, None),
        (lambda m, b: {"loss": m(b["x"]).square().mean()}, None),  # as many numbers in each sample
        (lambda m, b: {"loss": entropy(m, b)}, r"not in proportion.*Encoded\(loss, items, \.\.\.\). Without items"),
        (lambda m, b: {"loss": entropy(m, b), "items": len(b["x"])}, "not in proportion"),
        (lambda m, b: {"loss": entropy(m, b), "items": torch.tensor(2, dtype=torch.int16)}, "not in proportion"),
        (lambda m, b: {"loss": entropy(m, b, "sum"), "items": (b["labels"] != -100).sum()}, "is a sum"),
        (lambda m, b: {"loss": entropy(m, b, "sum")}, "is a sum"),
    ],
)
def test_the_ordinary_loss_is_compared_with_its_items(ordinary, message):
    model = nn.Linear(1, 4, dtype=torch.float64)

    def encode(model, batch):
        return Encoded(**ordinary(model, batch), hidden=model(batch["x"]))

    train = MacroStep(model, None, encode, joint=lambda model, encoded: encoded.hidden.sum() * 0, micro=2)
    if message is not None:
        with pytest.raises(BatchError, match=message):
            train(WORDS)
        return
    train(WORDS)
    found = model.weight.grad
    whole = torch.autograd.grad(ordinary(model, WORDS)["loss"], model.weight)[0]
    assert (found - whole).abs().max() <= 1e-12 * whole.abs().max()


def test_joint_sees_the_batch_in_its_order_whatever_the_cut():
    model, batch, seen = towers(), batch_of(9), []
    numbered = batch | {"number": torch.arange(9)}

    def loss_fn(model, micro):
        return Encoded(image=model(micro)[0], number=micro["number"])

    def joint(given, encoded):
        assert given is model
        seen.append(encoded.number.tolist())
        return encoded.image.square().sum()

    MacroStep(model, sgd(model), loss_fn, joint=joint, micro=by_tokens(6))(numbered)
    assert seen == [list(range(9))]


@pytest.mark.parametrize("micro", [1, 3, 4, 7])
def test_with_dropout_bitwise_as_checkpointing(micro):
    """Masks are those of the micro-batches one after the other, and gradients add up in the same order."""
    model, batch = towers(dropout=0.3), batch_of(7)
    torch.manual_seed(5)
    expected = checkpointed_gradient(model, CONTRAST, batch, micro)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    train = train_on(model, micro=micro, nonfinite="keep", optimizer=Untouched(model))
    train(batch)
    assert torch.equal(torch.get_rng_state(), after)
    for name, gradient in train._engine.closing._optimizers[0].seen.items():
        assert torch.equal(gradient, expected[name]), name


def test_the_scale_counts_once():
    model, batch = towers(), batch_of(12)
    expected = gradient_of(model, CONTRAST.whole(model, batch))["scale"]
    found = step_of(model, lambda: train_on(model, micro=1)(batch))["scale"]
    assert (found / expected).item() == pytest.approx(1.000, abs=1e-12)


def test_ordinary_losses_of_unequal_items():
    """One micro-batch has none at all: 0 / 0, which an int excuses."""
    model, batch = towers(), batch_of(6)

    def loss_fn(model, micro):
        image, text, _ = model(micro)
        chosen = micro["label"] == 1
        return Encoded(image[chosen].square().mean(), int(chosen.sum()), image=image, text=text)

    batch["label"] = torch.tensor([1, 1, 0, 0, 2, 1])
    image, text, _ = model(batch)
    whole = image[batch["label"] == 1].square().mean() + plain_contrast(image, text, model.scale.exp())
    expected, found = gradient_of(model, whole), []
    train = MacroStep(model, sgd(model), loss_fn, joint=CONTRAST.joint, micro=2)
    taken = step_of(model, lambda: found.append(train(batch)))
    for name, gradient in expected.items():
        torch.testing.assert_close(taken[name], gradient, rtol=0, atol=1e-13)
    assert found[0].items.item() == 3
    assert found[0].loss.item() == pytest.approx(whole.item(), rel=1e-12)


def test_a_loss_without_items_needs_no_graph():
    model, batch = towers(), batch_of(6)

    def loss_fn(model, micro):
        image = model(micro)[0]
        return Encoded(*(image.square().mean(), 4) if len(image) == 4 else (torch.zeros(()), 0), image=image)

    def joint(model, encoded):
        return encoded.image.std()

    image = model(batch)[0]
    expected = gradient_of(model, image.std() + image[:4].square().mean())
    train = MacroStep(model, sgd(model), loss_fn, joint=joint, micro=4)
    assert relative_error(step_of(model, lambda: train(batch)), expected) <= 1e-12


def test_reduction_sum():
    model, batch = towers(), batch_of(7)

    def loss_fn(model, micro):
        encoded = NESTED.loss_fn(model, micro)
        return Encoded(
            encoded.loss * encoded.items, encoded.items, rows=encoded.rows, label=encoded.label, length=encoded.length
        )

    train = MacroStep(model, sgd(model), loss_fn, joint=NESTED.joint, micro=3, reduction="sum")
    assert step_error(model, NESTED, batch, lambda: train(batch)) <= 1e-12


def test_several_models_clipping_and_frozen_towers():
    image, text, head = nn.Linear(3, 4).double(), nn.Linear(3, 4).double(), nn.Linear(1, 1).double()
    image.requires_grad_(False)
    models, batch = [image, text, head], batch_of(8)

    def loss_fn(models, micro):
        return Encoded(image=models[0](micro["image"]), text=models[1](micro["x"][:, 0]))

    def joint(models, encoded):
        return contrastive_loss(encoded.image, encoded.text, scale=models[2].weight.exp())

    parameters = [*text.parameters(), head.weight]
    expected = torch.autograd.grad(joint(models, loss_fn(models, batch)), parameters)
    norm = torch.stack([g.norm() for g in expected]).norm()
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD([*text.parameters(), *head.parameters()], lr=1.0)
    result = MacroStep(models, optimizer, loss_fn, joint=joint, micro=3, max_norm=0.01)(batch)
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    for p, old, gradient in zip(parameters, before, expected, strict=True):
        torch.testing.assert_close(old - p, gradient * 0.01 / (norm + 1e-6), rtol=1e-10, atol=0)


def test_only_what_joint_uses_is_trained():
    model, batch = towers(), batch_of(6)
    for name, p in model.named_parameters():
        p.requires_grad_(name == "scale")
    expected = torch.autograd.grad(CONTRAST.whole(model, batch), model.scale)[0]
    before = model.scale.detach().clone()
    train_on(model)(batch)
    torch.testing.assert_close(before - model.scale, expected, rtol=1e-12, atol=0)


def test_float16_under_a_scaler():
    """The loss is scaled once: encodings in float16 keep gradients that would vanish."""
    model, batch = towers(torch.float32), batch_of(8, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def loss_fn(model, micro):
        image, text, _ = model(micro)
        return Encoded(image.mean() * 1e-3, 1, image=image.half(), text=text.half())

    def joint(model, encoded):
        return CONTRAST.joint(model, encoded) * 1e-5

    encoded = loss_fn(model, batch)
    expected = gradient_of(model, joint(model, Encoded(image=encoded.image.float(), text=encoded.text.float())))
    for name, gradient in gradient_of(model, loss_fn(model, batch).loss).items():
        expected[name] = expected[name] + gradient
    train = MacroStep(model, sgd(model), lambda m, b: loss_fn(m, b), joint=joint, micro=8, scaler=scaler)
    found = step_of(model, lambda: train(batch))
    largest = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name] / largest, gradient / largest, rtol=0, atol=2e-3)
    assert scaler.get_scale() == 2.0**16


def test_an_overflow_skips_the_step_and_backs_off():
    model, batch = towers(torch.float32), batch_of(6, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = weights(model)
    result = train_on(model, scaler=scaler, joint=lambda m, e: CONTRAST.joint(m, e) * torch.inf)(batch)
    assert bool(result.skipped)
    assert scaler.get_scale() == 2.0**7
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())


@pytest.mark.parametrize("micro", [8, 3])
def test_autocast_around_the_step(micro):
    """Weights that the first pass has cast, without a graph, are not those of the second."""
    model, batch = towers(torch.float32), batch_of(8, dtype=torch.float32)
    inside, outside = Untouched(model), Untouched(model)

    def loss_fn(model, micro):
        with torch.autocast("cpu", torch.bfloat16):
            return CONTRAST.loss_fn(model, micro)

    MacroStep(model, inside, loss_fn, joint=CONTRAST.joint, micro=micro)(batch)
    with torch.autocast("cpu", torch.bfloat16):
        train_on(model, micro=micro, optimizer=outside)(batch)
    assert inside.seen["image.0.weight"].any()
    assert relative_error(outside.seen, inside.seen) <= 1e-6


def test_autocast_around_several_steps():
    """What a step before has cast are the weights of then."""
    batch, losses = batch_of(8, dtype=torch.float32), []
    for around_all in (True, False):
        model = towers(torch.float32)
        train = train_on(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=around_all):
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(train(batch).loss.item())
    assert losses[:3] == losses[3:]


def test_gradients_of_bfloat16_are_added_in_float32():
    model, batch = towers(torch.bfloat16), batch_of(64, dtype=torch.bfloat16)
    once, wide, narrow = (Untouched(model) for _ in range(3))
    train_on(model, micro=64, optimizer=once)(batch)
    train_on(model, micro=1, optimizer=wide, accumulate_dtype=torch.float32)(batch)
    train_on(model, micro=1, optimizer=narrow)(batch)
    assert relative_error(wide.seen, once.seen) < relative_error(narrow.seen, once.seen) / 2


def test_rows_of_all_dtypes():
    """Complex ones have gradients, too."""
    model, batch, seen = towers(), batch_of(6), []
    dtypes = (torch.bool, torch.int8, torch.float16, torch.complex64)

    def loss_fn(model, micro):
        image, text, _ = model(micro)
        others = {str(dtype): text.detach().to(dtype) for dtype in dtypes}
        return Encoded(rows=torch.complex(image, text), empty=image[:, :0], others=others)

    def joint(model, encoded):
        seen.append([rows.dtype for rows in encoded.others.values()])
        return (encoded.rows * encoded.rows.roll(1, 0)).abs().sum()

    expected = gradient_of(model, joint(model, loss_fn(model, batch)))
    train = MacroStep(model, sgd(model), loss_fn, joint=joint, micro=4)
    assert relative_error(step_of(model, lambda: train(batch)), expected) <= 1e-12
    assert seen == [list(dtypes)] * 2


# ------------------------------------------------------------------------------------------------------ twice the same


def test_random_numbers_and_buffers_are_replayed_and_move_once():
    """Those of torch and of Python; BatchNorm's statistics; a buffer that a forward replaces."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("large", torch.zeros(1000))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.norm(self.linear(x)) * (1 + self.calls) * random.random() + torch.randn(4, dtype=x.dtype)

    torch.manual_seed(0)
    model, batch = Noisy().double(), batch_of(10)
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    random.seed(3)
    outputs = [twin(part) for part in batch["image"].split(4)]
    expected = gradient_of(twin, torch.cat(outputs).cov().square().sum())
    ends = torch.rand(()), random.random()

    def loss_fn(model, micro):
        return Encoded(rows=model(micro["image"]))

    train = MacroStep(model, sgd(model), loss_fn, joint=lambda _, e: e.rows.cov().square().sum(), micro=4)
    torch.manual_seed(3)
    random.seed(3)
    with pytest.warns(UserWarning, match="BatchNorm in training mode takes its statistics from each micro-batch"):
        taken = step_of(model, lambda: train(batch))
    assert (torch.rand(()), random.random()) == ends
    for name, gradient in expected.items():
        torch.testing.assert_close(taken[name], gradient, rtol=1e-12, atol=1e-12)
    for (name, found), buffer in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(found, buffer), name


def test_random_numbers_of_joint_follow_those_of_the_micro_batches():
    """As in one big batch: each step draws on from where the last has ended, and has other numbers."""
    model, batch, drawn = towers(), batch_of(5), []

    def draws():
        return torch.rand(()).item(), random.random(), np.random.rand()

    def seed():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def loss_fn(model, micro):
        image = model(micro)[0]
        return Encoded(image=image * torch.rand((), dtype=image.dtype) if noisy else image)

    def joint(model, encoded):
        drawn.append(draws())
        return encoded.image.square().sum()

    for noisy in (False, True):
        drawn.clear()
        train = MacroStep(model, sgd(model), loss_fn, joint=joint, micro=3)
        seed()
        for _ in range(2):
            train(batch)
        after = draws()
        seed()
        expected = []
        for _ in range(2):
            for _ in range(2 * noisy):
                torch.rand((), dtype=torch.float64)
            expected.append(draws())
        assert [*drawn, after] == [*expected, draws()]


def test_a_buffer_that_joint_changes_stays_changed():
    model, batch = towers(), batch_of(5)
    model.register_buffer("queue", torch.zeros(5, dtype=torch.float64))

    def joint(model, encoded):
        model.queue.copy_(encoded.image.detach()[:, 0])
        return encoded.image.square().sum()

    expected = model(batch)[0][:, 0]
    train_on(model, joint=joint)(batch)
    torch.testing.assert_close(model.queue, expected)


@pytest.mark.parametrize("collates", [False, True])
def test_what_loss_fn_does_to_its_batch_is_not_seen_again(collates):
    model, batch = towers(), batch_of(6)
    expected = gradient_of(model, CONTRAST.whole(model, batch | {"image": batch["image"] * 2}))
    calls = []

    def loss_fn(model, micro):
        micro["image"].mul_(2)
        return CONTRAST.loss_fn(model, micro)

    def collate(rows):
        calls.append(len(rows))
        return {key: torch.stack([row[key] for row in rows]) for key in batch}

    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    train = MacroStep(model, sgd(model), loss_fn, joint=CONTRAST.joint, micro=4, collate=collate if collates else None)
    given = rows if collates else batch
    taken = step_of(model, lambda: train(given))
    for name, gradient in expected.items():
        torch.testing.assert_close(taken[name], gradient, rtol=0, atol=1e-13)
    assert calls == [4, 2] * collates


def test_encodings_that_differ_between_the_passes():
    model, batch, own = towers(), batch_of(6), torch.Generator().manual_seed(0)

    def loss_fn(model, micro):
        image, text, _ = model(micro)
        return Encoded(image=image * (1 + 1e-3 * torch.rand(len(image), 1, generator=own)), text=text)

    before = weights(model)
    train = MacroStep(model, sgd(model), loss_fn, joint=CONTRAST.joint, micro=4)
    with pytest.raises(BatchError, match="not the same in the two passes of window 1; its step was not taken"):
        train(batch)
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_inside_the_window(name):
    """But the state of generators on the host, to see whether anybody drew from them, and addresses of the batch."""
    model, batch, case, watch = towers(), batch_of(8), CASES[name], HostReads()

    def unwatched(function):
        def call(*arguments):
            watch.watching = False
            try:
                return function(*arguments)
            finally:
                watch.watching = True

        return call

    optimizer = sgd(model, fused=True)
    train = MacroStep(model, optimizer, unwatched(case.loss_fn), joint=unwatched(case.joint), micro=by_tokens(8))
    with watch:
        train(batch)
    reads = [read for read in watch.reads if read not in ("equal", "untyped_storage", "data_ptr")]
    assert reads in ([], ["cpu"])  # the verdict on a CPU, after the step was queued


# ------------------------------------------------------------------------------------------------------ memory


class Memory:
    """Runs out with more than so many samples in a micro-batch, in one of the passes, or in both (None).

    It notes how many samples each forward has, and whether it has a graph: the first of the first pass does.
    """

    def __init__(self, fits, in_pass):
        self.fits, self.in_pass, self.sizes, self.engine = fits, in_pass, [], None

    def train(self, model, optimizer, joint=CONTRAST.joint):
        step = MacroStep(model, optimizer, self, joint=joint, micro="auto")
        self.engine = step._engine
        return step

    def __call__(self, model, micro):
        is_second = self.engine.window is not None and not self.engine.window.is_empty
        self.sizes.append((len(micro["x"]), torch.is_grad_enabled()))
        if len(micro["x"]) > self.fits and self.in_pass in (None, 1 + is_second):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return CONTRAST.loss_fn(model, micro)


@pytest.mark.parametrize("in_pass", [1, 2])
def test_a_smaller_micro_batch_where_memory_runs_out(in_pass):
    model, batch, memory = towers(dropout=0.2), batch_of(8), Memory(2, in_pass)
    torch.manual_seed(5)
    expected = checkpointed_gradient(model, CONTRAST, batch, 2)
    optimizer = Untouched(model)
    train = memory.train(model, optimizer)
    torch.manual_seed(5)
    result = train(batch)
    assert result.micro_batches == 4
    for name, gradient in optimizer.seen.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)
    assert memory.sizes.count((8, True)) == in_pass
    assert memory.sizes[-8:] == [(2, True)] + [(2, False)] * 3 + [(2, True)] * 4


class Roomy:
    """Memory of a pretended device, in which graphs of three micro-batches fit beside what a backward needs."""

    def __init__(self, device):
        self.bytes = 0

    def free(self):
        return round(100 * (SPARE + 2) / SHARE) + 1

    def allocated(self):
        self.bytes += 100
        return self.bytes


@pytest.mark.parametrize("fits", [8, 2])
def test_graphs_that_fit_are_kept(monkeypatch, fits):
    """Those of the last micro-batches: they have no second forward, and the gradient has the same bits."""
    monkeypatch.setitem(ROOMS, "cpu", Roomy)
    model, batch, memory = towers(dropout=0.2), batch_of(8), Memory(fits, None)
    torch.manual_seed(5)
    expected = checkpointed_gradient(model, CONTRAST, batch, fits)
    optimizer = Untouched(model)
    train = memory.train(model, optimizer)
    for window in range(2):
        memory.sizes.clear()
        torch.manual_seed(5)
        train(batch)
        after = torch.get_rng_state()
        for name, gradient in optimizer.seen.items():
            assert torch.equal(gradient, expected[name]), (name, window)
    # How large graphs are is known by the second window: three are kept.
    assert memory.sizes == ([(8, True)] if fits == 8 else [(2, True)] * 5)
    torch.manual_seed(5)
    checkpointed_gradient(model, CONTRAST, batch, fits)
    assert torch.equal(torch.get_rng_state(), after)


def test_no_graph_is_kept_where_memory_runs_out_beside_it(monkeypatch):
    """In joint here: no smaller micro-batch is tried for it, and no later window keeps one."""
    monkeypatch.setitem(ROOMS, "cpu", Roomy)
    model, batch, memory, tried = towers(), batch_of(8), Memory(8, 1), []

    def joint(model, encoded):
        tried.append(train._kept._graphs)
        if train._kept._graphs:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return CONTRAST.joint(model, encoded)

    train = memory.train(model, sgd(model), joint)
    assert step_error(model, CONTRAST, batch, lambda: train(batch)) <= 1e-12
    train(batch)
    assert memory.sizes == [(8, True)] * 5
    assert len(tried) == 3


def test_memory_that_runs_out_in_joint_is_no_matter_of_micro_batches():
    model, batch = towers(), batch_of(8)
    before = weights(model)

    def joint(model, encoded):
        raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")

    with pytest.raises(FitError, match=r"inside joint, which has the encodings of all 8 samples.*9.00 GiB"):
        train_on(model, joint=joint, micro="auto")(batch)
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())


def test_a_row_does_not_keep_what_it_is_a_part_of():
    model, batch, kept = towers(), batch_of(6), []

    def loss_fn(model, micro):
        large = model(micro)[0][:, None].expand(-1, 50, -1).contiguous()
        return Encoded(row=large[:, 0])

    def joint(model, encoded):
        kept.append(encoded.row.untyped_storage().nbytes())
        return encoded.row.square().sum()

    MacroStep(model, sgd(model), loss_fn, joint=joint, micro=2)(batch)
    assert kept == [6 * 6 * 8]
