"""One call, one exact step: whatever the batch, however it is cut, the optimizer gets the whole batch's gradient."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.reference import (
    HOWS,
    IGNORED,
    LENGTH,
    OPTIMIZERS,
    Accumulation,
    Attention,
    Batch,
    Convolution,
    Counting,
    Experts,
    Hoard,
    PartlyFrozen,
    Tied,
    Trainee,
    batch,
    gradients_of,
    make_optimizer,
    relative_error,
    same_snapshot,
    same_training,
    snapshot,
    token_loss,
    train_whole,
    trainee,
    weights_of,
)
from macrobatch import MacroStep, StepResult, by_count, by_tokens, verify
from macrobatch.errors import BackendError, BatchError, FitError, MacrobatchError, NonFiniteError, UsageError
from macrobatch.losses import causal_lm_loss

EXACT = 1e-12
quickly = settings(max_examples=40, deadline=None, derandomize=True, database=None)
at_length = settings(quickly, max_examples=150)

POSITIONWISE = (Tied, Experts, PartlyFrozen)  # what padding cannot reach, so that it may be trimmed


def named(given: object) -> str:
    """The name of a case, the same in every process: kinds instead of addresses."""
    if isinstance(given, dict):
        return " ".join(given)
    return str(given) if isinstance(given, int | str) else type(given).__name__


# --------------------------------------------------------------------------------------------------------- vocabulary


def extents(batch: Batch) -> Tensor:
    """How long each sample is: up to its last target."""
    return ((batch.y != IGNORED) * torch.arange(1, batch.y.shape[1] + 1)).amax(1)


def with_lengths(lengths: Iterable[int], *, seed: int = 0) -> Batch:
    """Samples with targets up to their lengths."""
    lengths = torch.tensor(list(lengths))
    whole = batch(len(lengths), seed=seed, items=len(lengths) * LENGTH)
    return Batch(whole.x, whole.y.where(torch.arange(LENGTH) < lengths[:, None], IGNORED))


def planted(limit: int, loss_fn: Callable) -> Callable:
    """A loss that runs out of memory above so many tokens; a single sample always fits."""

    def limited(model: nn.Module, micro: Batch) -> Any:
        if micro.y.numel() > limit and len(micro.y) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_fn(model, micro)

    return limited


def loss_with(counting: Counting) -> Callable:
    return lambda model, micro: (counting.loss(model, micro), counting.given(micro, 0))


MICROS: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n,
    "by_count": by_count,
    "by_tokens": lambda n: by_tokens(max(n, LENGTH), length=extents),
    "auto": lambda n: "auto",
}


@dataclass
class Training:
    """MacroStep over some batches; notes results and the gradients that the optimizer was handed."""

    own: Trainee
    train: MacroStep
    results: list[StepResult] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        note = lambda *_: self.gradients.append(gradients_of(self.own.model))  # noqa: E731
        self.own.optimizers[-1].register_step_pre_hook(note)

    def over(self, batches: Iterable[Any]) -> "Training":
        self.results += [self.train(batch) for batch in batches]
        return self


def training(own: Trainee, loss_fn: Callable, **options: Any) -> Training:
    return Training(own, MacroStep(own.model, own.optimizers, loss_fn, scheduler=own.schedulers, **options))


def count_loss(model: nn.Module, micro: Batch) -> tuple[Tensor, int]:
    return token_loss(model, micro), micro.items


def no_gradients(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


def compare(run: Training, whole: Trainee, batches: list[Batch], counting: Counting, max_norm: float | None) -> None:
    """Each result and gradient, and all that was learnt, against the big batches."""
    steps = train_whole(whole, [[b] for b in batches], max_norm=max_norm, counting=counting)
    assert [result.skipped for result in run.results] == [step is None for step in steps]
    taken = [(r, s) for r, s in zip(run.results, steps, strict=True) if s is not None]
    assert [r.step for r, _ in taken] == list(range(1, len(taken) + 1))
    for result, step in taken:
        assert result.items.item() == step.items
        assert result.loss.item() == pytest.approx(step.loss.item(), rel=EXACT)
        assert (result.grad_norm is None) == (max_norm is None)
        assert max_norm is None or result.grad_norm.item() == pytest.approx(step.grad_norm.item(), rel=EXACT)
    if not run.own.optimizers[-1].defaults["fused"]:
        for found, (_, step) in zip(run.gradients, taken, strict=True):
            assert relative_error(found, step.gradients) <= EXACT
    assert no_gradients(run.own.model)
    assert run.train.optimizer_step == len(taken)
    same_training(run.own, whole, EXACT)


# ------------------------------------------------------------------------------------------------------- for every cut


any_batch = st.builds(with_lengths, st.lists(st.integers(0, LENGTH), min_size=1, max_size=12), seed=st.integers(0, 99))
countings = st.builds(Counting, st.sampled_from(["int", "tensor", "host tensor"]), st.sampled_from(["mean", "sum"]))
setups = st.tuples(st.sampled_from(POSITIONWISE), st.sampled_from(OPTIMIZERS), st.sampled_from(HOWS))
clips = st.sampled_from([None, 0.05, 1e3])


@at_length
@given(
    st.lists(any_batch, min_size=1, max_size=3),
    st.sampled_from(sorted(MICROS)),
    st.integers(1, 50),
    setups,
    countings,
    clips,
)
@example([batch(12, seed=0)], "auto", 1, (Tied, "SGD", "plain"), Counting(), None)
@example([with_lengths([0, 0])], "by_tokens", 9, (Tied, "SGD", "plain"), Counting("int", "sum"), 0.05)
def test_any_batch_and_any_cut_train_as_the_whole(batches, micro, size, setup, counting, max_norm):
    loss_fn, how = loss_with(counting), MICROS[micro](size)
    if micro == "auto":
        loss_fn = planted(size, loss_fn)
    run = training(trainee(*setup), loss_fn, micro=how, max_norm=max_norm, reduction=counting.reduction)
    compare(run.over(batches), trainee(*setup), batches, counting, max_norm)


@quickly
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 50), st.sampled_from(["int", "auto"]))
def test_attention_and_convolutions_cut_by_samples(sizes, size, micro):
    batches = [batch(n, seed=i) for i, n in enumerate(sizes)]
    for make in (Attention, Convolution):
        run = training(
            trainee(make), planted(size, count_loss) if micro == "auto" else count_loss, micro=MICROS[micro](size)
        )
        compare(run.over(batches), trainee(make), batches, Counting(), None)


@pytest.mark.filterwarnings("ignore:loss_fn returned a loss without its items")  # it cannot know that this is right
@quickly
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(["read", "unread", "total"]))
def test_items_are_samples_where_nobody_counts(samples, size, kind):
    def loss_fn(model: nn.Module, micro: Batch) -> Tensor:
        each = F.cross_entropy(model(micro.x).flatten(0, 1), micro.y.flatten(), reduction="none")
        each = each.view(micro.y.shape).sum(1)
        return each.mean() if kind == "read" else each.sum() / (1 if kind == "total" else len(each))

    own, whole = trainee(Tied), trainee(Tied)
    given = batch(samples, seed=samples, items=samples * LENGTH)
    run = training(own, loss_fn, micro=size, reduction="total" if kind == "total" else "mean").over([given])
    loss_fn(whole.model, given).backward()
    assert relative_error(run.gradients[0], gradients_of(whole.model)) <= EXACT
    assert run.results[0].items.item() == samples


@pytest.mark.parametrize(
    "items",
    [
        lambda m: m.items,
        lambda m: torch.tensor(m.items),
        lambda m: torch.tensor(m.items, dtype=torch.int16),  # which the host does not read
        lambda m: float(m.items),
        None,
    ],
)
def test_items_in_every_form(items):
    given = with_lengths([4, 1, 2, 3, 4], seed=1)
    run = training(trainee(Tied), lambda m, b: (token_loss(m, b, "sum"), items and items(b)), micro=2, reduction="sum")
    run.over([given])
    assert run.results[0].items.item() == given.items  # the loss says them, too


@quickly
@given(st.lists(st.integers(0, LENGTH), min_size=1, max_size=9), st.integers(LENGTH, 20))
def test_lists_of_samples(lengths, budget):
    whole = with_lengths(lengths, seed=3)
    samples = [Batch(whole.x[i, :n], whole.y[i, :n]) for i, n in enumerate(lengths)]

    def collate(some: list[Batch]) -> Batch:
        pad = nn.utils.rnn.pad_sequence
        return Batch(pad([s.x for s in some], True), pad([s.y for s in some], True, padding_value=IGNORED))

    for micro in (by_tokens(budget, length=lambda sample: len(sample.y)), 2, "auto"):
        loss_fn = planted(budget, loss_with(Counting("int", "sum")))
        if micro == 2:
            loss_fn = loss_with(Counting("int", "sum"))
        run = training(trainee(Tied), loss_fn, micro=micro, collate=collate, reduction="sum").over([samples])
        compare(run, trainee(Tied), [whole], Counting("int", "sum"), None)


@pytest.mark.parametrize("micro", [2, by_tokens(24), "auto"], ids=named)
def test_a_language_model_of_transformers(micro):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, **sizes)).double().eval()
    mask = torch.arange(12) < torch.tensor([12, 3, 9, 1, 5, 2, 7])[:, None]
    given = {"input_ids": torch.randint(1, 31, mask.shape) * mask, "attention_mask": mask.long()}
    results = []

    def limited(model: nn.Module, micro_batch: Any) -> Any:
        if micro == "auto" and len(micro_batch["input_ids"]) > 3:
            raise torch.OutOfMemoryError("planted")
        return causal_lm_loss(model, micro_batch)

    def step(model: nn.Module, given: Any) -> None:
        results.append(MacroStep(model, make_optimizer(model.parameters()), limited, micro=micro)(given))

    report = verify(model, causal_lm_loss, given, step=step)
    assert report.ok, str(report)
    assert results[0].micro_batches > 1
    assert results[0].items.item() == int(mask[:, 1:].sum())


# ----------------------------------------------------------------------------------------------- batches of many kinds


class Bags(nn.Module):
    """Texts as bags of words: all tokens that a mask shows reach all that is computed of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(50, 8), nn.Embedding(16, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return (self.words(input_ids) * shown[..., None]).sum(1) / shown.sum(1, keepdim=True)


def bags(lengths: Iterable[int]) -> dict[str, Tensor]:
    mask = torch.arange(16) < torch.tensor(list(lengths))[:, None]
    return {"input_ids": torch.randint(1, 50, mask.shape), "attention_mask": mask.long()}


def targets(model: Bags, batch: Any) -> tuple[Tensor, Tensor]:
    """Every position has to be told from all tokens: of another text, or of the same with blanks."""
    bag = model(batch["input_ids"], batch.get("attention_mask"))
    logits = model.head(torch.tanh(bag[:, None] + model.places(torch.arange(batch["labels"].shape[1]))))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), (batch["labels"] != IGNORED).sum()


def preference(model: Bags, batch: Any) -> tuple[Tensor, int]:
    good, bad = (model(**batch[name]).pow(3).sum(1) for name in ("chosen", "rejected"))
    return -F.logsigmoid(good - bad).mean(), len(good)


def featured(model: Bags, batch: Any) -> Tensor:
    return (model(batch["input_ids"], batch["attention_mask"]) - batch["features"] @ model.places.weight).pow(2).mean()


def described(model: Bags, batch: Any) -> Tensor:
    bag = model(batch["input_ids"], batch["attention_mask"])
    return (bag.sum(1) * torch.tensor([len(text) for text in batch["text"]])).pow(2).mean()


def many_kinds() -> dict[str, tuple[Callable, Any]]:
    torch.manual_seed(3)
    short, long = [3, 4, 5, 3, 12, 13, 5, 9], [10, 9, 16, 12, 3, 2, 14, 15]
    ids, reach = torch.randint(1, 50, (8, 16)), bags(long)["attention_mask"] != 0
    return {
        "encoder and decoder": (targets, {**bags(short), "labels": ids.where(reach, IGNORED)}),
        "labels of another width": (targets, {**bags(short), "labels": ids.where(reach, IGNORED)[:, :13]}),
        "blanks": (targets, {"input_ids": ids, "labels": ids.where(torch.rand(8, 16) < 0.2, IGNORED)}),
        "pairs": (preference, {"chosen": bags(short), "rejected": bags(long)}),
        "features": (featured, {**bags(short), "features": torch.randn(8, 16, dtype=torch.float64)}),
        "texts": (described, {**bags(short), "text": ["word" * n for n in long]}),
    }


@pytest.mark.parametrize(
    "micro", [by_tokens(40), by_tokens(80), 3, "auto"], ids=["40 tokens", "80 tokens", "3", "auto"]
)
@pytest.mark.parametrize("kind", many_kinds())
def test_batches_of_many_kinds_train_as_a_whole(kind, micro):
    loss_fn, given = many_kinds()[kind]
    run, whole = training(trainee(Bags), loss_fn, micro=micro).over([given]), trainee(Bags)
    loss = loss_fn(whole.model, given)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    assert relative_error(run.gradients[0], gradients_of(whole.model)) <= EXACT
    assert run.results[0].micro_batches > 1 or micro == "auto"


# ---------------------------------------------------------------------------------------------------- a mean of means


def mean_over(model: nn.Module, batch: Any) -> Tensor:
    """Without its items, by a division that may be anything."""
    losses = model(batch["x"]).square()
    return losses.sum() / losses.numel()


def watched(labels: Tensor, *, loss_fn: Callable = mean_over, micro: Any = 2, **options: Any) -> list[str]:
    """What is warned of in three windows with these labels."""
    model = nn.Linear(3, 1)
    train = MacroStep(model, make_optimizer(model.parameters()), loss_fn, micro=micro, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.ones(len(labels), 3)
            collate = "collate" in options
            samples = [{"x": x[i], "labels": labels[i]} for i in range(len(labels))]
            train(samples if collate else {"x": x, "deeper": [{"labels": labels}]})
    return [str(one.message) for one in caught]


FULL = torch.ones(5, 4).long()
UNEVEN = FULL.where(torch.arange(4) < torch.tensor([4, 4, 2, 3, 1])[:, None], IGNORED)


@pytest.mark.parametrize("collate", [None, torch.utils.data.default_collate], ids=["", "collated"])
def test_a_mean_of_means_is_warned_of_once(collate):
    found = watched(UNEVEN, **({} if collate is None else {"collate": collate}))
    assert len(found) == 1
    assert "8 labels other than -100 in one micro-batch of 2 samples, and 5 in another of 2" in found[0]
    assert "return loss, (labels[:, 1:] != -100).sum()" in found[0]


@pytest.mark.parametrize("widths", [(3, 3, 3, 3, 3), (3, 3, 5, 5)], ids=["samples", "columns"])
def test_sizes_that_differ_are_warned_of_once(widths):
    samples = [torch.ones(width) for width in widths]
    model = nn.Linear(1, 1)
    train = MacroStep(
        model,
        make_optimizer(model.parameters()),
        lambda model, x: mean_over(model, {"x": x.view(-1, 1)}),
        micro=2,
        collate=torch.stack,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            train(samples)
    (message,) = [str(one.message) for one in caught]
    assert "weighed by their samples" in message
    assert "DivBackward0 was not understood" in message


def test_a_mean_of_means_is_seen_where_the_loss_takes_its_labels_away():
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        batch["deeper"][0].pop("labels")
        return mean_over(model, batch)

    assert len(watched(UNEVEN, loss_fn=loss_fn)) == 1


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (FULL, {}),  # of 2, 2 and 1 samples
        (torch.tensor([0, 1, 2, 1, 0]), {}),
        (UNEVEN[:4].float(), {}),
        (UNEVEN, {"micro": 5}),
        (UNEVEN, {"reduction": "total"}),
        (UNEVEN, {"loss_fn": lambda model, batch: (mean_over(model, batch), len(batch["x"]))}),
        (FULL.index_fill(1, torch.tensor(3), IGNORED), {}),
        (torch.where(torch.eye(4) > 0, IGNORED, FULL[:4]), {}),  # as many in each micro-batch
        (torch.where(torch.arange(20).view(5, 4) == 0, IGNORED, FULL), {}),  # the first is predicted by nothing
    ],
    ids=["full", "classes", "numbers", "whole", "sums", "items", "all alike", "as many", "first"],
)
def test_no_mean_of_means(labels, options):
    assert watched(labels, **options) == []


def test_labels_without_any_in_some_samples():
    assert len(watched(torch.tensor([0, IGNORED, 2, 1, 0]))) == 1


# ----------------------------------------------------------------------------------------------- all of an Accumulator


def scaled(own: Trainee) -> Any:
    return {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)}


OPTIONS: dict[str, Callable[[Trainee], dict[str, Any]]] = {
    "none": lambda own: {},
    "max_norm": lambda own: {"max_norm": 0.05},
    "scaler": scaled,
    "accumulate_dtype": lambda own: {"accumulate_dtype": torch.float32},
    "skip": lambda own: {"nonfinite": "skip"},
    "keep": lambda own: {"nonfinite": "keep"},
    "sync": lambda own: {"sync": "micro"},
    "all": lambda own: {"max_norm": 0.05, "accumulate_dtype": torch.float32, "nonfinite": "skip", **scaled(own)},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("option", OPTIONS)
def test_bitwise_the_accumulator_over_the_same_micro_batches(option, how):
    kind = {"dtype": torch.bfloat16 if option in ("accumulate_dtype", "all") else torch.float32}
    own, hand = trainee(Attention, "AdamW", how, **kind), trainee(Attention, "AdamW", how, **kind)
    batches = [batch(n, seed=n) for n in (7, 4, 1, 6)]
    options, same_options = OPTIONS[option](own), OPTIONS[option](hand)
    run = training(own, count_loss, micro=3, **options).over(batches)
    loop = Accumulation(hand, hand.accumulator(steps=99, **same_options))
    for b in batches:
        cut = zip(b.x.split(3), b.y.split(3), strict=True)
        loop.epoch([Batch(x, y) for x, y in cut])
    torch.testing.assert_close(list(map(vars, run.results)), list(map(vars, loop.results)), rtol=0, atol=0)
    assert same_snapshot(snapshot(own), snapshot(hand))
    if "scaler" in options:
        assert options["scaler"].state_dict() == same_options["scaler"].state_dict()
    assert run.train.state_dict() == loop.acc.state_dict()


def test_several_models_and_optimizers():
    def parts() -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        models = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 1)]).double()
        return models, [
            make_optimizer(model.parameters(), name) for model, name in zip(models, OPTIMIZERS, strict=True)
        ]

    def loss_fn(models: Any, x: Tensor) -> Tensor:
        return models[1](torch.tanh(models[0](x))).square().mean()

    (models, optimizers), (whole, others), x = parts(), parts(), torch.randn(9, 3, dtype=torch.float64)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    train = MacroStep(list(models), optimizers, loss_fn, micro=2, scheduler=schedulers, max_norm=0.1)
    result = train(x)
    loss_fn(whole, x).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    for optimizer in others:
        optimizer.step()
    assert relative_error(weights_of(models), weights_of(whole)) <= EXACT
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=EXACT)
    assert result.lr == (0.02, 0.02)
    assert [scheduler.last_epoch for scheduler in schedulers] == [1, 1]


@pytest.mark.parametrize("micro", [3, by_tokens(12, length=extents), "auto"], ids=named)
def test_the_result(micro):
    own = trainee(Tied)
    run = training(own, planted(12, count_loss), micro=micro, max_norm=1e3)
    given = [with_lengths([4] * 6), with_lengths([4] * 5)]
    first, second = run.over(given).results
    assert (first.step, second.step, first.micro_batches, second.micro_batches) == (1, 2, 2, 2)
    assert (first.items.item(), second.items.item()) == (24, 20)
    assert first.loss.item() == pytest.approx(token_loss(trainee(Tied).model, given[0]).item(), rel=EXACT)
    assert (first.lr, second.lr) == ((0.02,), pytest.approx((0.018,)))
    assert first.grad_norm > 0
    assert first.skipped is False


@pytest.mark.parametrize("micro", [2, "auto"])
def test_an_infinite_gradient_is_skipped_or_raised(micro):
    factor = torch.inf
    loss_fn = lambda model, b: (token_loss(model, b) * factor, b.items)  # noqa: E731
    own, given = trainee(Tied), batch(5, seed=0)
    before = snapshot(own)
    assert training(own, loss_fn, micro=micro, nonfinite="skip").train(given).skipped is True
    assert same_snapshot(snapshot(own), before)
    train = MacroStep(own.model, own.optimizers, loss_fn, micro=micro)
    with pytest.raises(NonFiniteError, match="window 1 "):
        train(given)
    assert no_gradients(own.model)
    factor = 1.0
    assert train(given).step == 1


# ------------------------------------------------------------------------------------------------------ going on later


def test_state_goes_on_where_it_was():
    own, batches = trainee(Tied), [batch(5, seed=i) for i in range(4)]
    first = training(own, count_loss, micro=2).over([*batches[:2], None])
    state = first.train.state_dict()
    assert state["optimizer_step"] == 2
    assert all(type(value) is int for value in state.values())
    second = MacroStep(own.model, own.optimizers, count_loss, micro=3)
    second.load_state_dict(state)
    assert second.optimizer_step == 2
    assert second(batches[2]).step == 3
    assert second.state_dict() == {name: value + 1 for name, value in state.items()}


@pytest.mark.parametrize("state", [{}, {"optimizer_step": -1, "windows": 0}, {"optimizer_step": 1.0, "windows": 1}])
def test_a_state_that_is_none(state):
    with pytest.raises(UsageError, match="state"):
        training(trainee(), count_loss, micro=2).train.load_state_dict(state)


# ---------------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("micro", [2, by_tokens(8, length=extents), "auto"], ids=named)
@pytest.mark.parametrize("turn", [1, 2, 3])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["before", "after", "in backward"])
def test_an_exception_leaves_nothing_behind(micro, turn, error, where):
    turns, fails = 0, True
    loss_of = planted(8, count_loss) if micro == "auto" else count_loss

    def fail(*_: Any) -> None:
        if fails and turns == turn:
            raise error("not of ours")

    def loss_fn(model: nn.Module, micro_batch: Batch) -> Any:
        nonlocal turns
        loss, items = loss_of(model, micro_batch)
        turns += 1
        if where == "before":
            fail()
        if where == "in backward":
            loss.register_hook(fail)
        return (loss, items) if where != "after" else (fail() or loss, items)

    own, given = trainee(Tied), with_lengths([4, 3, 4, 2, 1, 4], seed=1)
    run = training(own, loss_fn, micro=micro)
    before = snapshot(own)
    with pytest.raises(error, match="not of ours"):
        run.train(given)
    assert turns == turn
    assert no_gradients(own.model)
    assert same_snapshot(snapshot(own), before)
    assert run.train.state_dict() == {"optimizer_step": 0, "windows": 0}
    fails = False
    compare(run.over([given, given]), trainee(Tied), [given, given], Counting(), None)


@pytest.mark.parametrize("micro", [2, "auto"])
@pytest.mark.parametrize("holds", [True, False])
def test_memory_that_recordings_hold_is_given_up_first(micro, holds):
    """A micro-batch that cannot be made smaller does not fit: once without them, then it is an error."""
    own, given, hoard = trainee(Tied), batch(1 if micro == "auto" else 5, seed=1), Hoard()
    hoard.has_recordings, failed = holds, []

    def loss_fn(model: nn.Module, micro_batch: Batch) -> Any:
        loss, items = count_loss(model, micro_batch)
        if not failed and len(micro_batch.x) == 1:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss, items

    run = training(own, loss_fn, micro=micro)
    run.train._graphs = hoard
    if not holds:
        with pytest.raises(FitError if micro == "auto" else torch.OutOfMemoryError):
            run.train(given)
        assert not hoard.refused
        return
    compare(run.over([given, given]), trainee(Tied), [given, given], Counting(), None)
    assert failed
    assert not hoard.has_recordings
    assert hoard.refused == ["memory ran out beside what had been recorded"]


def test_gradients_from_before_belong_to_no_window():
    own, given = trainee(Tied), batch(5, seed=1)
    token_loss(own.model, given).backward()
    compare(training(own, count_loss, micro=2).over([given]), trainee(Tied), [given], Counting(), None)


# ------------------------------------------------------------------------------------------------------------- nothing


EMPTY = {"None": None, "no rows": Batch(torch.ones(0, LENGTH).long(), torch.ones(0, LENGTH).long())}


@pytest.mark.parametrize("micro", [2, by_tokens(8, length=extents), "auto"], ids=named)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}], ids=named)
def test_an_empty_batch_is_skipped(micro, empty, options):
    own, given = trainee(Tied), with_lengths([4, 2, 3])
    run = training(own, count_loss, micro=micro, **options)
    scaler = options.get("scaler")
    before, scale = snapshot(own), scaler and scaler.state_dict()
    result = run.train(EMPTY[empty])
    assert (result.step, result.micro_batches, result.items.item(), result.skipped) == (0, 0, 0, True)
    assert result.loss.isnan()
    assert same_snapshot(snapshot(own), before)
    assert scale == (scaler and scaler.state_dict())
    assert no_gradients(own.model)
    compare(run.over([given]), trainee(Tied), [given], Counting(), options.get("max_norm"))


def test_an_empty_list_is_skipped():
    run = training(trainee(Tied), count_loss, micro=2, collate=lambda samples: samples)
    assert run.train([]).skipped is True


def test_a_batch_without_items_is_skipped():
    own = trainee(Tied, "AdamW")
    run = training(own, loss_with(Counting("tensor", "sum")), micro=2, reduction="sum")
    before = snapshot(own)
    result = run.train(with_lengths([0, 0, 0]))
    assert result.skipped is True
    assert result.micro_batches == 2
    assert same_snapshot(snapshot(own), before)


# ---------------------------------------------------------------------------------------------------------- wrong uses


def made(**options: Any) -> MacroStep:
    own = trainee(Tied)
    return MacroStep(own.model, own.optimizers, **{"loss_fn": count_loss, "micro": 2} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 4}, "steps is not for MacroStep.*micro="),
        ({"remainder": "drop"}, "remainder is not for MacroStep.*micro="),
        ({"loss_fn": None}, "loss_fn must be a function.*got NoneType"),
        ({"micro": 0}, "whole number of samples.*got 0"),
        ({"micro": -1}, "whole number of samples.*got -1"),
        ({"micro": 2.0}, "micro must be.*by_tokens.*got 2.0"),
        ({"micro": True}, "micro must be.*got True"),
        ({"micro": None}, "micro must be.*got None"),
        ({"micro": "largest"}, "micro must be.*got 'largest'"),
        ({"collate": 5}, "collate must be.*got"),
        ({"fit_file": "sizes.json"}, 'fit_file.*micro="auto"'),
        ({"reduction": "max"}, "reduction must be one of"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of"),
        ({"max_norm": -1.0}, "max_norm must be positive"),
        ({"scaler": 5}, "scaler must be"),
    ],
    ids=str,
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        made(**options)


def test_an_option_that_does_not_exist():
    with pytest.raises((TypeError, UsageError), match="max_nrom"):
        made(max_nrom=1.0)


def test_an_optimizer_of_another_model():
    with pytest.raises(BackendError, match="belongs to no given model"):
        MacroStep(nn.Linear(3, 1), make_optimizer(nn.Linear(3, 1).parameters()), count_loss)


@pytest.mark.parametrize("micro", [2, "auto"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda loss: (loss, 1, 2), "the loss, or the loss and its items: got 3 values"),
        (lambda loss: (loss,), "the loss, or the loss and its items: got 1 values"),
        (lambda loss: {"loss": loss}, "loss must be a tensor: got dict"),
        (lambda loss: None, "loss must be a tensor: got NoneType"),
        (lambda loss: loss * torch.ones(3), "loss must be a scalar"),
        (lambda loss: loss.detach(), "loss has no graph"),
        (lambda loss: (loss, -1), "items must be finite and not negative: got -1"),
        (lambda loss: (loss, "many"), "items must be a number"),
        (lambda loss: (loss, torch.ones(2)), "items must be one number"),
        (lambda loss: (loss, torch.tensor(-1)), "items passed in window 1 were negative"),
    ],
)
def test_what_a_loss_function_must_not_return(micro, spoil, message):
    right, given = False, batch(5, seed=0)
    own = trainee(Tied)
    loss_fn = lambda model, b: count_loss(model, b) if right else spoil(token_loss(model, b))  # noqa: E731
    run = training(own, loss_fn, micro=micro)
    with pytest.raises(BatchError, match=message):
        run.train(given)
    assert no_gradients(own.model)
    right = True
    run.gradients.clear()
    compare(run.over([given]), trainee(Tied), [given], Counting(), None)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"x": torch.ones(3), "y": torch.ones(4)}, {}, r"batch\['x'\] has 3.*batch\['y'\] has 4"),
        ([], {}, "no tensor that could be cut"),
        ({"x": torch.ones(3)}, {"collate": list}, "list of samples: got dict"),
        ({"x": torch.ones(3)}, {"micro": by_tokens(4)}, "cannot find the lengths"),
    ],
)
def test_batches_that_cannot_be_cut(given, options, message):
    train = made(**options)
    with pytest.raises(BatchError, match=message):
        train(given)
    assert train.state_dict() == {"optimizer_step": 0, "windows": 0}


def test_a_sample_above_the_budget():
    with pytest.warns(UserWarning, match=r"sample 1 has 4 tokens.*budget of 3"):
        result = made(micro=by_tokens(3, length=extents))(with_lengths([1, 4, 1]))
    assert result.micro_batches == 2
    with pytest.raises(BatchError, match=r"sample 1 has 4 tokens.*budget of 3"):
        made(micro=by_tokens(3, length=extents, oversize="raise"))(with_lengths([1, 4, 1]))


def test_sizes_may_be_numbers_of_numpy():
    assert made(micro=np.int64(2))(batch(4, seed=0)).micro_batches == 2
    assert made(micro=by_tokens(np.int64(8), length=extents))(with_lengths([4, 4, 4])).micro_batches == 2


def deep() -> nn.Sequential:
    """More parameters than are looked at."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))


TOUCHES: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": nn.Module.zero_grad,
    "zero_grad in place": lambda model: model.zero_grad(set_to_none=False),
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "zero_grad of a part": lambda model: model[4:8].zero_grad(),  # type: ignore[index]
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_loss_that_touches_gradients(touch):
    model = deep()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        TOUCHES[touch](model)
        return model(x).square().mean()

    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro=2)
    weights = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UsageError, match="gradients of the open window were"):
        train(torch.ones(6, 3))
    assert all(map(torch.equal, weights, model.parameters()))


def test_a_loss_that_comes_to_use_another_model():
    """Whose gradients are its own business; in this window and in later ones."""
    model, other = deep(), deep()
    uses = [False, False, True, True, False, True]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        return (other(hidden) if uses[step] else hidden).square().mean()

    train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro=2)
    for step in range(len(uses)):  # noqa: B007
        train(torch.ones(6, 3))
        assert all(parameter.grad is None for parameter in other.parameters())


def critic() -> nn.Module:
    """Whose graph has as many nodes where it is frozen."""
    return nn.Sequential(nn.Conv1d(1, 2, 1), nn.ReLU(), nn.Conv1d(2, 1, 1))


@pytest.mark.parametrize("made", [critic, lambda: nn.LayerNorm(3)])
def test_another_model_is_thawed(made):
    other = made().requires_grad_(False)
    model = nn.Conv1d(1, 1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = MacroStep(model, optimizer, lambda model, x: other(model(x)).square().mean(), micro=2)
    train(torch.ones(4, 1, 3))
    other.requires_grad_(True)
    train(torch.ones(4, 1, 3))
    assert all(parameter.grad is None for parameter in other.parameters())


def test_a_thaw_beside_another_model():
    """What backwards are confined to is found anew."""
    model, other = deep(), deep()
    bias = model[5].bias.requires_grad_(False)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(bias.grad is not None))
    train = MacroStep(model, optimizer, lambda model, x: other(model(x)).square().mean(), micro=2)
    for _ in range(2):
        train(torch.ones(6, 3))
    bias.requires_grad_(True)
    train(torch.ones(6, 3))
    assert seen == [False, False, True]


@pytest.mark.parametrize("items", [0, torch.tensor(0), 3])
def test_whoever_steps_by_himself_asks_whether_there_were_items(items):
    model = nn.Linear(2, 1)
    train = MacroStep(model, None, lambda model, x: (model(x).mean(), items), micro=2)
    train(torch.ones(4, 2))
    assert train.is_void() == (not items)


@pytest.mark.parametrize("items", [-1.0, float("nan")])
def test_whoever_steps_by_himself_is_told_of_wrong_items(items):
    model = nn.Linear(2, 1)
    train = MacroStep(model, None, lambda model, x: (model(x).mean(), torch.tensor(items)), micro=2)
    train(torch.ones(4, 2))
    with pytest.raises(BatchError, match="negative or not finite"):
        train.is_void()


def test_all_of_them_are_errors_of_ours():
    assert all(issubclass(kind, MacrobatchError) for kind in (UsageError, BatchError, BackendError, FitError))


def test_cuda_graph_on_a_cpu_is_accepted_and_says_once_that_it_is_eager():
    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        train = MacroStep(model, torch.optim.SGD(model.parameters(), lr=0.1), squares, micro=4, **options)
        for _ in range(3):
            train({"x": torch.arange(30.0).view(10, 3) / 30, "y": torch.ones(10, 1)})
        return [parameter.detach() for parameter in model.parameters()]

    def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return F.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorded = trained(cuda_graph=True)
    assert ["run eagerly, because the model is on cpu" in str(one.message) for one in caught] == [True]
    assert all(map(torch.equal, recorded, trained()))
