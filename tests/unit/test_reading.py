"""Items that are read from losses, through the Accumulator and the MacroStep."""

import contextlib
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.losses import CUTS, LOSSES, gradient, new_batch, new_model
from harness.reference import relative_error
from macrobatch import Accumulator, MacroStep
from macrobatch._terms import mean
from macrobatch.errors import BatchError, MacrobatchError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # of kl_div

EXACT = 1e-12


class Window:
    """One window: what the optimizer gets, the result, and the warnings."""

    def __init__(self, loss, cut, items=None, **options):
        self.model, batch = new_model(), new_batch()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen = {}
        optimizer.register_step_pre_hook(lambda *_: self.note())
        acc = Accumulator(self.model, optimizer, **{"steps": len(cut)} | options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, micro in enumerate(acc.batches(pieces(batch, cut))):
                acc.backward(loss(self.model, micro), None if items is None else items[number])
                self.result = acc.step()
        self.told = [str(one.message) for one in caught if "weigh the same" in str(one.message)]

    def note(self):
        named = self.model.named_parameters()
        self.seen = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def pieces(batch, cut):
    return [dict(zip(batch, part, strict=True)) for part in zip(*(t.split(cut) for t in batch.values()), strict=True)]


def whole(loss, times=1.0):
    model = new_model()
    return gradient(model, loss(model, new_batch()) * times)


def mse(model, batch):
    return F.mse_loss(model.rows(batch), batch["wanted_rows"])


def entropy(model, batch, reduction="mean"):
    return F.cross_entropy(model.tokens(batch).flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


# ---------------------------------------------------------------------------------------------- every loss


@pytest.mark.parametrize("row", LOSSES, ids=lambda row: row.name)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_loss_is_exact_or_refused_or_told(row, cut):
    torchs_own = RuntimeError if "checkpoint" in row.name else MacrobatchError  # of a batch that is used again
    found = None
    with contextlib.suppress(MacrobatchError, torchs_own):
        found = Window(row.loss, cut, steps=lambda _: len(cut))  # no number that a loss may be divided by
    if row.verdict == "known":
        assert found is not None
        assert relative_error(found.seen, whole(row.loss)) <= EXACT
        assert not found.told
    elif row.verdict != "coupled":
        assert found is None or found.told, "it weighs all the same, and says nothing"


def test_a_planted_bug_is_seen(monkeypatch):
    """Equal weights, as if nothing were read."""
    real = mean.weigh
    monkeypatch.setattr(mean, "weigh", lambda *a, **k: real(*a, **k)._replace(items=1, pairs=()))
    assert relative_error(Window(entropy, CUTS[0]).seen, whole(entropy)) > 1e-3


@pytest.mark.parametrize("loss", [entropy, mse, lambda m, b: mse(m, b) + 0.01 * m.trunk.weight.square().sum()])
@pytest.mark.parametrize("micro", [3, 2])
def test_a_loss_fn_that_returns_the_loss_alone(loss, micro):
    model = new_model()
    train = MacroStep(model, None, loss, micro=micro)
    result = train(new_batch())
    assert relative_error({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, {
        n: g for n, g in whole(loss).items() if g.abs().max() > 0
    }) <= EXACT  # fmt: skip
    assert result.items.item() == (new_batch()["mask"].sum() if loss is entropy else 7 * 5)


# ---------------------------------------------------------------------------------------------- items that are given


def labels(cut, as_given=int):
    return [as_given(part["mask"].sum()) for part in pieces(new_batch(), cut)]


def as_on_a_device(number):
    return number.to(torch.int16)  # which the host does not read, even on a CPU


@pytest.mark.parametrize("as_given", [int, float, lambda n: n.double(), as_on_a_device, lambda n: int(n) * 3])
def test_items_in_proportion(as_given):
    found = Window(entropy, CUTS[1], labels(CUTS[1], as_given))
    assert relative_error(found.seen, whole(entropy)) <= EXACT


@pytest.mark.parametrize("as_given", [int, float, as_on_a_device])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_items_out_of_proportion(as_given, number):
    items = [as_given(n + (index == number)) for index, n in enumerate(labels(CUTS[1], torch.Tensor.clone))]
    with pytest.raises(BatchError, match=r"not in proportion to what the losses are means over.*leave items= out"):
        Window(entropy, CUTS[1], items)


@pytest.mark.parametrize("as_given", [int, as_on_a_device])
def test_equal_weights_by_choice(as_given):
    found = Window(entropy, CUTS[1], [as_given(torch.tensor(1))] * 3)
    model = new_model()
    means = sum(entropy(model, part) for part in pieces(new_batch(), CUTS[1])) / 3
    assert relative_error(found.seen, gradient(model, means)) <= EXACT


def test_no_items_leave_a_micro_batch_out():
    items = labels(CUTS[1])
    found = Window(entropy, CUTS[1], [items[0], 0, items[2]])
    assert found.result.items.item() == items[0] + items[2]


def masked(model, batch):
    return (model.rows(batch).square().mean(1) * batch["mask"][:, 1]).mean() / batch["mask"][:, 1].double().mean()


def by_sample(model, batch):
    rows = zip(model.rows(batch), batch["wanted_rows"], strict=True)
    return sum(F.mse_loss(found, wanted) for found, wanted in rows) / len(batch["x"])


@pytest.mark.parametrize(
    ("loss", "count"),
    [(masked, lambda b: int(b["mask"][:, 1].sum())), (by_sample, lambda b: len(b["x"]))],
    ids=["masked", "by sample"],
)
def test_items_of_a_loss_whose_constants_change(loss, count):
    """Only the program knows them."""
    cut = (3, 4)
    with pytest.raises(BatchError, match="items="):
        Window(loss, cut)
    found = Window(loss, cut, [count(part) for part in pieces(new_batch(), cut)])
    assert relative_error(found.seen, whole(loss)) <= EXACT


def test_a_micro_batch_without_labels_divided_by_one():
    model = nn.Linear(3, 4).double()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    for labels in acc.batches([torch.tensor([1, 2]), torch.tensor([-100, -100])]):
        loss = F.cross_entropy(model(torch.ones(2, 3).double()), labels, reduction="sum")
        acc.backward(loss / (labels != -100).sum().clamp(min=1))
        result = acc.step()
    assert result.items.item() == 2


@pytest.mark.parametrize("items", [None, CUTS[1]])
def test_a_penalty_whose_factor_changes(items):
    with pytest.raises(BatchError, match="not the same expression"):
        Window(lambda m, b: mse(m, b) + m.trunk.weight.square().sum() / len(b["x"]), CUTS[1], items)


def test_a_mean_and_a_sum():
    with pytest.raises(BatchError, match=r"adds a sum \(SumBackward0\) to a mean"):
        Window(lambda m, b: mse(m, b) + m.rows(b).square().sum(), CUTS[1])


def test_a_mean_is_no_sum():
    with pytest.raises(BatchError, match=r"MseLossBackward0\) is a mean: leave reduction= out"):
        Window(mse, CUTS[1], reduction="sum")
    with pytest.raises(
        BatchError, match=r"MseLossBackward0\) is a mean over the \d+ items given: leave reduction= out"
    ):
        Window(mse, CUTS[1], elements(CUTS[1]), reduction="sum")
    Window(lambda m, b: 3 * mse(m, b), CUTS[1], elements(CUTS[1]), reduction="sum")  # which may be meant


def elements(cut):
    """What `mse` is a mean over."""
    return [part["wanted_rows"].numel() for part in pieces(new_batch(), cut)]


def test_items_for_some_only():
    with pytest.raises(BatchError, match="items must be given for every micro-batch of a window, or for none"):
        Window(entropy, CUTS[1], [labels(CUTS[1])[0], None, None])


# ---------------------------------------------------------------------------------------------- leftovers and sums


def test_a_division_by_steps_is_left_over():
    with pytest.raises(UsageError, match=r"divided by 3, as in a loop.*leave the division out"):
        Window(lambda m, b: entropy(m, b) / 3, CUTS[0])
    for right in (lambda m, b: entropy(m, b) / 2, lambda m, b: (1 / 3) * entropy(m, b)):
        assert relative_error(Window(right, CUTS[0]).seen, whole(right)) <= EXACT


def counted(batch):
    return batch["mask"].sum()


def half_and_penalty(model, batch):
    return mse(model, batch) / 2 + 0.1 * model.trunk.weight.square().sum()


RIGHT_DIVISIONS = {
    "not at the root": half_and_penalty,
    "two means": lambda m, b: (mse(m, b) + F.l1_loss(m.rows(b), b["wanted_rows"])) / 2,
    "two smoothed heads": lambda m, b: (smoothed(m, b) + smoothed(m, b)) / 2,
}
WRONG_DIVISIONS = {
    "label smoothing": lambda m, b: smoothed(m, b) / 2,
    "a mean and a penalty": lambda m, b: (mse(m, b) + 0.1 * m.trunk.weight.square().sum()) / 2,
    "a sum over its count": lambda m, b: entropy(m, b, "sum") / counted(b) / 2,
    "the same, the other way round": lambda m, b: entropy(m, b, "sum") / 2 / counted(b),
}
HALVES = [3, 4]


def smoothed(model, batch):
    return F.cross_entropy(model.tokens(batch).flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("name", RIGHT_DIVISIONS)
def test_a_division_that_belongs_to_the_loss(name):
    found = Window(RIGHT_DIVISIONS[name], HALVES)
    assert relative_error(found.seen, whole(RIGHT_DIVISIONS[name])) <= EXACT


@pytest.mark.parametrize("name", WRONG_DIVISIONS)
def test_a_division_by_steps_at_the_root(name):
    with pytest.raises(UsageError, match=r"divided by 2, as in a loop.*0\.5 \* loss"):
        Window(WRONG_DIVISIONS[name], HALVES)
    Window(WRONG_DIVISIONS[name], [7])


def two_means(factor):
    return lambda m, b: (factor * mse(m, b) + F.l1_loss(m.rows(b), b["wanted_rows"])) / 3


def test_several_means_divided_by_steps():
    with pytest.raises(UsageError, match=r"divided by 3, as in a loop"):
        Window(two_means(1), CUTS[0])
    found = Window(two_means(2), CUTS[0])  # a weighted mean of both
    assert relative_error(found.seen, whole(two_means(2))) <= EXACT


# The same expression of all samples, with a sum of cross-entropies that is divided by its own count.
QUOTIENTS = {
    "a third": lambda m, b: entropy(m, b, "sum") / counted(b) / 3,
    "a third, before": lambda m, b: entropy(m, b, "sum") / 3 / counted(b),
    "beside a mean": lambda m, b: entropy(m, b, "sum") / counted(b) + 0.3 * entropy(m, b),
    "two of them": lambda m, b: entropy(m, b, "sum") / counted(b) + 0.1 * entropy(m, b, "sum") / counted(b),
    "with a penalty": lambda m, b: entropy(m, b, "sum") / counted(b) + 0.1 * m.trunk.weight.square().sum(),
}


@pytest.mark.parametrize("given", [False, True], ids=["read", "given"])
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_by_their_own_count(name, given):
    found = Window(QUOTIENTS[name], CUTS[1], labels(CUTS[1]) if given else None, steps=lambda _: len(CUTS[1]))
    assert relative_error(found.seen, whole(QUOTIENTS[name])) <= EXACT
    assert not found.told


def test_a_sum_over_its_own_weights_is_a_mean_to_rounding():
    weight = torch.rand(6) + 0.1
    model = nn.Linear(4, 6)
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=3)
    for number in acc.batches([50, 20, 70]):
        y = torch.randint(6, (number,))
        total = F.cross_entropy(model(torch.randn(number, 4)), y, weight=weight, reduction="sum")
        acc.backward(total / weight[y].flip(0).cumsum(0)[-1])  # added up in another order
        result = acc.step()
    assert result.micro_batches == 3


PENALTIES = {
    "variation": lambda w: (w[1:] - w[:-1]).abs().mean(),
    "gram": lambda w: (w @ w.t()).square().mean(),
    "distances": lambda w: torch.pdist(w).mean(),
    "cosines": lambda w: F.cosine_similarity(w, w.flip(0)).mean(),
    "two slices": lambda w: F.mse_loss(w[:2], w[2:4]),
    "singular values": lambda w: torch.linalg.svdvals(w).sum(),
    "einsum": lambda w: torch.einsum("ij,ij->", w, w),
}


@pytest.mark.parametrize("given", [False, True], ids=["read", "given"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_term_of_parameters_rides_along(name, given):
    def loss(model, batch):
        return entropy(model, batch) + 0.1 * PENALTIES[name](model.trunk.weight)

    found = Window(loss, CUTS[1], labels(CUTS[1]) if given else None)
    assert relative_error(found.seen, whole(loss)) <= EXACT
    assert not found.told


def test_a_penalty_beside_a_sum_is_told():
    model = new_model()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2, reduction="sum")
    batches = acc.batches(pieces(new_batch(), HALVES))
    with pytest.warns(UserWarning, match="a term of parameters alone .* to a sum over items"):
        acc.backward(entropy(model, next(batches), "sum") + model.trunk.weight.square().sum())


def test_slices_of_parameters_that_differ():
    def loss(model, batch):
        return entropy(model, batch) + model.trunk.weight[len(batch["x"]) % 2].square().sum()

    with pytest.raises(BatchError, match="not the same expression"):
        Window(loss, [3, 4])


@pytest.mark.parametrize("loss", [lambda m, b: m.rows(b).square().sum(), lambda m, b: entropy(m, b, "sum")])
def test_a_sum_is_no_mean(loss):
    with pytest.raises(BatchError, match=r'is a sum.*reduction="sum".*items=.*reduction="total"'):
        Window(loss, CUTS[0])


def test_a_sum_that_states_its_items():
    found = Window(lambda m, b: entropy(m, b, "sum"), CUTS[1], reduction="sum")
    assert relative_error(found.seen, whole(entropy)) <= EXACT
    assert found.result.items.item() == new_batch()["mask"].sum()


def test_a_sum_that_does_not():
    with pytest.raises(BatchError, match=r'reduction="sum" without items.*items=.*reduction="total"'):
        Window(lambda m, b: m.rows(b).square().sum(), CUTS[0], reduction="sum")


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_total_is_divided_by_nothing(cut):
    def bound(model, batch):
        return model.rows(batch).square().sum()

    found = Window(bound, cut, reduction="total", max_norm=math.inf)
    expected = whole(bound)
    assert relative_error(found.seen, expected) <= EXACT
    assert found.result.loss.item() == pytest.approx(bound(new_model(), new_batch()).item(), rel=EXACT)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    assert found.result.grad_norm.item() == pytest.approx(norm.item(), rel=EXACT)


def over_the_window(model, batch):
    """As transformers divides by num_items_in_batch."""
    return entropy(model, batch, "sum") / new_batch()["mask"].sum()


def test_a_quotient_by_the_count_of_the_window():
    with pytest.raises(BatchError, match='reduction="total"'):
        Window(over_the_window, CUTS[1])
    found = Window(over_the_window, CUTS[1], reduction="total")
    assert relative_error(found.seen, whole(entropy)) <= EXACT


@pytest.mark.parametrize("option", [{"counts": lambda batch: {"a": 1}}])
def test_a_total_of_terms(option):
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match='reduction="total" cannot go with counts='):
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), reduction="total", **option)


# ---------------------------------------------------------------------------------------------- several means


def test_means_out_of_proportion():
    with pytest.raises(BatchError, match=r"adds up several means.*counts="):
        Window(lambda m, b: entropy(m, b) + mse(m, b), CUTS[1])


def test_a_factor_that_changes():
    with pytest.raises(BatchError, match=r"not the same expression.*items="):
        Window(lambda m, b: mse(m, b) * len(b["x"]), CUTS[1])


def test_a_shape_that_does_not_change_with_the_samples():
    with pytest.raises(BatchError, match=r"mean over 25 elements in each micro-batch, but one has 1 samples.* items="):
        Window(lambda m, b: (m.rows(b).T @ m.rows(b)).pow(2).mean(), CUTS[1])


def test_equal_counts_of_other_shapes_are_right():
    """Two samples of 6 tokens and three of 4: 12 each."""
    model = nn.Linear(3, 1).double()
    parts = [torch.randn(2, 6, 3).double(), torch.randn(3, 4, 3).double(), torch.randn(1, 5, 3).double()]
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), steps=3)
    for part in acc.batches(parts):
        acc.backward(model(part).square().mean())
        result = acc.step()
    assert result.items.item() == 12 + 12 + 5


def test_the_warning_names_the_node():
    (told,) = Window(lambda m, b: mse(m, b).sqrt(), CUTS[1]).told
    assert "SqrtBackward0 was not understood" in told
    assert "items=" in told


# ------------------------------------------------------------------------------- items beside several means


def test_factors_drawn_for_each_batch_with_items():
    """Mixup: each micro-batch has factors of its own, and both means are over its tokens."""
    shares = iter([0.3, 0.9, 0.5, 0.1] * 4)

    def mixed(model, batch):
        share = next(shares)
        one, other = (F.mse_loss(model.rows(batch), batch["wanted_rows"] + shift) for shift in (0.0, 1.0))
        return share * one + (1 - share) * other

    cut = CUTS[1]
    with pytest.raises(BatchError, match="not the same expression"):
        Window(mixed, cut)
    shares = iter([0.3, 0.9, 0.5, 0.1] * 4)
    window = Window(mixed, cut, elements(cut))
    shares, model, batch, counts = iter([0.3, 0.9, 0.5, 0.1] * 4), new_model(), new_batch(), elements(cut)
    for part, count in zip(pieces(batch, cut), counts, strict=True):
        (mixed(model, part) * count / sum(counts)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(window.seen[name], parameter.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("terms", [2, 3])
def test_wrong_items_of_several_means_alike(terms):
    def loss(model, batch):
        return sum(F.mse_loss(model.rows(batch), batch["wanted_rows"] + shift) for shift in range(terms))

    cut = CUTS[1]
    Window(loss, cut, elements(cut))
    with pytest.raises(BatchError, match="not in proportion"):
        Window(loss, cut, [9] * len(elements(cut)))


def test_a_loop_over_samples_with_their_number():
    def loss(model, batch):
        pairs = list(zip(model.rows(batch), batch["wanted_rows"], strict=True))
        return sum(F.mse_loss(row, wanted) for row, wanted in pairs) / len(pairs)

    cut = CUTS[1]
    Window(loss, cut, [len(part["wanted_rows"]) for part in pieces(new_batch(), cut)])
