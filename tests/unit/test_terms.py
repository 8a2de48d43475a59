"""Several terms, each with its own denominator: the gradient is the sum of the terms' means over the whole window."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.host_reads import HostReads
from harness.terms import NAMES, Losses, batch_of, heads, step_error, weights, whole_loss
from macrobatch import Accumulator, MacroStep, by_tokens
from macrobatch.errors import BatchError, NonFiniteError, UsageError


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=1.0, **options)


def train_on(model, losses, micro=3, optimizer=None, **options):
    options = {"counts": losses.counts, "reduction": losses.reduction} | options
    return MacroStep(model, optimizer or sgd(model), losses, micro=micro, **options)


# ------------------------------------------------------------------------------------------------------ exact

LOSSES = st.builds(
    Losses,
    names=st.permutations(NAMES).flatmap(lambda names: st.integers(2, 4).map(lambda n: tuple(names[:n]))),
    items=st.sampled_from(["int", "tensor", "mixed"]),
    reduction=st.sampled_from(["mean", "sum"]),
    without=st.sampled_from(["absent", "nan"]),
)


@settings(max_examples=60, deadline=None)
@given(
    losses=LOSSES,
    samples=st.integers(1, 12),
    micro=st.integers(1, 12),
    seed=st.integers(0, 99),
    chosen=st.sampled_from([0, 0.3, 1]),
)
def test_any_cut_gives_the_gradient_of_the_whole_batch(losses, samples, micro, seed, chosen):
    model, batch = heads(), batch_of(samples, seed=seed, chosen=chosen)
    train, found = train_on(model, losses, micro), []
    expected, means = whole_loss(model, [batch], losses.names)
    error = step_error(model, [batch], losses.names, lambda: found.append(train(batch)))
    (result,) = found
    assert error <= 1e-12
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert list(result.losses) == list(losses.names)
    for name, loss in result.losses.items():
        assert loss.item() == pytest.approx(means[name], rel=1e-12, nan_ok=True)
    assert result.items.item() == pytest.approx(float(losses.counts(batch)[losses.names[0]]), rel=1e-12)


def test_one_name_is_as_good_as_one_loss():
    """Within rounding: the denominators are applied before, not after."""
    model, twin, batch = heads(), heads(), batch_of(10)
    losses = Losses(("tokens",))
    train_on(model, losses)(batch)
    MacroStep(twin, sgd(twin), lambda model, micro: losses(model, micro)["tokens"], micro=3)(batch)
    for name, found in weights(model).items():
        torch.testing.assert_close(found, weights(twin)[name], rtol=0, atol=1e-14)


def test_a_loss_alone_is_a_mean_over_samples():
    model, batch = heads(), batch_of(10)

    def loss_fn(model, micro):
        return {"samples": Losses(("samples",))(model, micro)["samples"][0]}

    step = MacroStep(model, sgd(model), loss_fn, micro=3, counts=lambda batch: {"samples": len(batch["x"])})
    assert step_error(model, [batch], ["samples"], lambda: step(batch)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_low_precision_are_widened(dtype):
    """What is reported is added up in float64, and weights are not rounded before they multiply."""
    model, batch = heads(torch.float32), batch_of(9, dtype=torch.float32)

    def loss_fn(model, micro):
        return {name: (loss.to(dtype), n) for name, (loss, n) in Losses()(model, micro).items()}

    _, means = whole_loss(model, [batch], Losses().names)
    result = MacroStep(model, sgd(model), loss_fn, micro=1, counts=Losses().counts)(batch)
    assert result.losses["tokens"].dtype is torch.float64
    assert result.losses["tokens"].item() == pytest.approx(means["tokens"], rel=3 * torch.finfo(dtype).eps)


def test_clipping_uses_the_norm_of_the_whole():
    model, batch, losses = heads(), batch_of(8), Losses(NAMES)
    loss, _ = whole_loss(model, [batch], NAMES)
    norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    result = train_on(model, losses, max_norm=0.01)(batch)
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)


def test_by_tokens_and_collate():
    """`counts` gets the batch as it was passed: a list of samples here, in its order."""
    model, batch, losses, seen = heads(), batch_of(9), Losses(NAMES), []
    samples = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]

    def collate(rows):
        return {key: torch.stack([row[key] for row in rows]) for key in batch}

    def counts(rows):
        seen.append(rows)
        return losses.counts(collate(rows))

    policy = by_tokens(12, lambda sample: int(sample["mask"].sum()))
    step = train_on(model, losses, policy, counts=counts, collate=collate)
    assert step_error(model, [batch], NAMES, lambda: step(samples)) <= 1e-12
    assert len(seen) == 1
    assert seen[0] is samples


def test_one_loss_is_bitwise_as_before():
    """What a plain loss costs and computes has nothing to do with terms."""
    model, batch = heads(), batch_of(10)

    def loss_fn(model, micro):
        return Losses(("tokens",))(model, micro)["tokens"]

    result = MacroStep(model, sgd(model), loss_fn, micro=3)(batch)
    assert result.losses is None


# ------------------------------------------------------------------------------------------------------ no items


def test_a_term_without_items_in_the_window_counts_for_nothing():
    model, batch, losses = heads(), batch_of(7, chosen=0), Losses(("chosen", "tokens"), items="int")
    found = []
    step = train_on(model, losses)
    assert step_error(model, [batch], ["tokens"], lambda: found.append(step(batch))) <= 1e-12
    assert math.isnan(found[0].losses["chosen"].item())
    assert found[0].loss.item() == found[0].losses["tokens"].item()
    assert found[0].items.item() == 0
    assert not found[0].skipped


@pytest.mark.parametrize("without", ["absent", "nan"])
def test_micro_batches_without_any_term(without):
    model, batch, losses = heads(), batch_of(8), Losses(("chosen",), items="int", without=without)
    batch["chosen"] = torch.arange(8) % 3 == 1  # neither the first nor the last
    step = train_on(model, losses, micro=1)
    assert step_error(model, [batch], ["chosen"], lambda: step(batch)) <= 1e-12


@pytest.mark.parametrize("items", ["int", "tensor"])
def test_a_window_is_empty_only_if_all_terms_are(items):
    model, batch = heads(), batch_of(7, chosen=0)
    before = weights(model)
    result = train_on(model, Losses(("chosen",), items=items))(batch)
    assert result.skipped
    assert math.isnan(result.loss.item())
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())


def test_a_batch_of_no_samples_is_skipped_with_all_names():
    model, losses = heads(), Losses(NAMES)
    step = train_on(model, losses)
    assert step(None).losses == {}  # no name was ever seen
    step(batch_of(5))
    result = step(None)
    assert result.skipped
    assert list(result.losses) == list(NAMES)
    assert all(math.isnan(loss.item()) for loss in result.losses.values())


# ------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("items", ["int", "tensor", "mixed"])
@pytest.mark.parametrize("wrong", [{"chosen": 1}, {"samples": -1}, {"weights": 0.01}])
@pytest.mark.parametrize("nonfinite", ["raise", "skip", "keep"])
def test_items_that_do_not_add_up(items, wrong, nonfinite):
    model, batch, losses = heads(), batch_of(10), Losses(NAMES, items=items, wrong=wrong)
    (name,) = wrong
    before, step = weights(model), train_on(model, losses, nonfinite=nonfinite)
    with pytest.raises(BatchError) as raised:
        step(batch)
    right = Losses(NAMES).counts(batch)[name]
    assert (
        f"the term {name!r} add up to {float(right):.12g}, but counts= said {float(right + wrong[name]):.12g}"
        in str(raised.value)
    )
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    assert step.optimizer_step == 0
    assert all(p.grad is None for p in model.parameters())


LABELS = torch.tensor([[1, 2, -100, -100], [0, -100, -100, -100], [3, 1, 2, 0], [1, 1, -100, -100]])
TOKENS = {"x": torch.arange(16.0, dtype=torch.float64).view(4, 4, 1).cos(), "labels": LABELS}


def num_labels(batch):
    return (batch["labels"] != -100).sum()


def entropy(model, batch, reduction="mean"):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def one_step(loss_fn, counts, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 4, dtype=torch.float64)
    whole = torch.autograd.grad(entropy(model, TOKENS), model.weight)[0]
    result = MacroStep(model, None, loss_fn, micro=2, counts=counts, **options)(TOKENS)
    return (model.weight.grad - whole).abs().max() / whole.abs().max(), result


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda m, b: {"a": entropy(m, b)},
        lambda m, b: {"a": (entropy(m, b), num_labels(b))},
        lambda m, b: {"a": (entropy(m, b), num_labels(b).to(torch.int16))},  # as on a device
        lambda m, b: {"a": (entropy(m, b, "sum") / num_labels(b), int(num_labels(b)))},
    ],
)
def test_what_a_term_is_a_mean_over_is_read(loss_fn):
    error, result = one_step(loss_fn, lambda batch: {"a": num_labels(batch)})
    assert error <= 1e-12
    assert result.items.item() == 9


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda m, b: {"a": (entropy(m, b), len(b["x"]))},
            r"term 'a': the items given are not in proportion .*2 for a mean over 3",
        ),
        (lambda m, b: {"a": (entropy(m, b), torch.tensor(2, dtype=torch.int16))}, "term 'a': .* not in proportion"),
        (lambda m, b: {"a": entropy(m, b)}, "term 'a' add up to 9, but counts= said 4"),
        (lambda m, b: {"a": (entropy(m, b, "sum"), len(b["x"]))}, "term 'a': this loss is a sum"),
        (lambda m, b: {"a": entropy(m, b, "sum")}, "term 'a': this loss is a sum"),
    ],
)
def test_items_of_a_term_that_its_loss_contradicts(loss_fn, message):
    with pytest.raises(BatchError, match=message):
        one_step(loss_fn, lambda batch: {"a": len(batch["x"])})


def test_floats_of_the_host_agree_to_the_rounding_of_float32():
    weights = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    batch, model = {"x": torch.ones(1000, 2), "w": weights}, torch.nn.Linear(2, 1)

    def loss_fn(model, batch):
        each = model(batch["x"])[:, 0].square() * batch["w"]
        return {"a": (each.sum() / batch["w"].sum(), float(batch["w"].sum()))}

    def train(extra):
        return MacroStep(model, None, loss_fn, counts=lambda b: {"a": float(b["w"].sum()) + extra}, micro=7)(batch)

    assert train(0).items.item() == pytest.approx(weights.double().sum().item(), rel=1e-6)
    with pytest.raises(BatchError, match="add up to"):
        train(0.05)


def test_a_miscount_is_no_overflow():
    model, batch = heads(torch.float32), batch_of(10, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = train_on(model, Losses(wrong={"tokens": 1}), scaler=scaler)
    with pytest.raises(BatchError, match="'tokens' add up to"):
        step(batch)
    assert scaler.get_scale() == 1024.0
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_floats_need_to_agree_to_rounding_only():
    model, batch = heads(), batch_of(10)
    batch["weight"] = torch.full((10,), 0.1)  # float32: three of them are not 0.3
    train_on(model, Losses(("weights", "tokens")))(batch)
    large = torch.full((10,), 1e5)
    with pytest.raises(BatchError, match="add up to 1000000, but counts= said 1000001"):
        train_on(model, Losses(("weights",), wrong={"weights": 1}))(batch | {"weight": large})


NO_TENSOR = {"tokens": (1.0, 3)}


@pytest.mark.parametrize(
    ("loss_fn", "counts", "message"),
    [
        (Losses(), None, "needs counts="),
        (Losses(), {"tokens": 1}, "counts must be a function"),
        (Losses(), lambda batch: 3, "must return the number of items of each term, by name: got int"),
        (Losses(), lambda batch: {}, "got an empty dict"),
        (Losses(), lambda batch: {"tokens": None, "samples": 1}, "'tokens' is None"),
        (Losses(), lambda batch: {"tokens": -1, "samples": 1}, "'tokens': items must be finite and not negative"),
        (Losses(), lambda batch: {1: 1}, "got 1 as a name"),
        (Losses(), lambda batch: {"tokens": batch["mask"].sum()}, "'samples' is none of those that counts"),
        (lambda model, batch: NO_TENSOR, Losses().counts, "the term 'tokens': the loss must be a tensor: got float"),
        (
            lambda model, batch: model(batch["x"])[0].mean(),
            Losses().counts,
            "with counts= every loss is a dict of terms",
        ),
        (
            lambda model, batch: {"tokens": (torch.zeros(()), 3)},
            Losses().counts,
            "the term 'tokens': the loss has no graph",
        ),
        (lambda model, batch: {"tokens": (model(batch["x"])[0], 3)}, Losses().counts, "must be a scalar"),
    ],
)
def test_errors_name_what_is_wrong(loss_fn, counts, message):
    model = heads()
    with pytest.raises((BatchError, UsageError), match=message):
        MacroStep(model, sgd(model), loss_fn, micro=4, counts=counts)(batch_of(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counts_that_cannot_tell_numbers_apart(dtype):
    train = train_on(heads(), Losses(NAMES[:1]), counts=lambda batch: {NAMES[0]: torch.tensor(257.0, dtype=dtype)})
    with pytest.raises(BatchError, match=f"{NAMES[0]!r}: .* has dtype {dtype}"):
        train(batch_of(3))


def test_names_stay_the_same():
    model, names = (
        heads(),
        iter([("tokens", "samples"), ("samples", "tokens"), ("tokens",), ("tokens", "samples", "x")]),
    )

    def counts(batch):
        found = Losses(NAMES).counts(batch)
        return {name: found.get(name, 1) for name in next(names)}

    step = MacroStep(model, sgd(model), Losses(), micro=4, counts=counts)
    step(batch_of(8))
    with pytest.raises(BatchError, match="the term 'samples' came at another place"):
        step(batch_of(8))
    with pytest.raises(BatchError, match="the term 'samples' came before only"):
        step(batch_of(8))
    with pytest.raises(BatchError, match="the term 'x' came now only"):
        step(batch_of(8))


def test_items_of_a_bad_sign_are_found_on_the_device():
    model = heads()

    def loss_fn(model, batch):
        return {"tokens": (model(batch["x"])[0].mean(), batch["n"].sum())}

    step = MacroStep(model, sgd(model), loss_fn, micro=1, counts=lambda batch: {"tokens": batch["n"].sum()})
    with pytest.raises(BatchError, match="negative or not finite"):
        step(batch_of(2) | {"n": torch.tensor([3, -1])})


def test_zero_items_on_the_device_want_a_finite_loss():
    model, batch = heads(), batch_of(6, chosen=0)

    def loss_fn(model, micro):
        terms = Losses(("chosen", "tokens"))(model, micro)
        return terms | {"chosen": (terms["chosen"][0] * torch.nan, terms["chosen"][1])}

    with pytest.raises(NonFiniteError):
        MacroStep(model, sgd(model), loss_fn, micro=3, counts=Losses(("chosen", "tokens")).counts)(batch)


# ------------------------------------------------------------------------------------------------------ scalers


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_scaler_is_not_shrunk(fused):
    model, batch = heads(torch.float32), batch_of(10, dtype=torch.float32)
    seen = []
    model.trunk.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    step = train_on(model, Losses(NAMES), scaler=scaler, optimizer=sgd(model, fused=fused))
    found = []
    assert step_error(model, [batch], NAMES, lambda: found.append(step(batch))) <= 1e-6
    assert not found[0].skipped
    unscaled = torch.stack(seen[:-1]).sum(0) / 2.0**14
    assert unscaled.abs().max() < 10  # means, not sums


def test_an_overflow_backs_off():
    model, batch = heads(torch.float32), batch_of(10, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = train_on(model, Losses(), scaler=scaler)
    result = step(batch | {"x": batch["x"] * torch.inf})
    assert result.skipped
    assert scaler.get_scale() == 2.0**9


# ------------------------------------------------------------------------------------------------------ the host


def test_nothing_is_read_inside_the_window():
    """Items and counts are tensors: the host never asks for their values before the step is decided."""
    model, batch, losses = heads(), batch_of(10), Losses(("tokens", "chosen"))
    watch = HostReads()

    def loss_fn(model, micro):
        watch.watching = False
        terms = losses(model, micro)
        watch.watching = True
        return terms

    step = MacroStep(model, sgd(model, fused=True), loss_fn, micro=3, counts=losses.counts)
    with watch:
        step(batch)
    assert watch.reads in ([], ["cpu", "data_ptr"])  # the verdict on a CPU, after the step was queued


# ------------------------------------------------------------------------------------------------------ Accumulator


def windows_of(batches, steps):
    return [batches[i : i + steps] for i in range(0, len(batches), steps)]


def accumulate(model, losses, loader, windows, **options):
    """Train over a loader, and compare each step with one big batch of its window; returns the results."""
    acc = Accumulator(model, sgd(model), counts=losses.counts, reduction=losses.reduction, **options)
    results, expected = [], iter(windows)
    for batch in acc.batches(loader):
        acc.backward(losses(model, batch))
        done = []
        if acc.is_last:
            error = step_error(model, next(expected), losses.names, lambda done=done: done.append(acc.step()))
            assert error <= 1e-12
            results += done
        else:
            assert acc.step() is None
    assert next(expected, None) is None
    return results


@settings(max_examples=30, deadline=None)
@given(
    losses=LOSSES,
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7),
    steps=st.integers(1, 4),
    sized=st.booleans(),
)
def test_windows_of_any_loader(losses, sizes, steps, sized):
    batches = [batch_of(size, seed=seed) for seed, size in enumerate(sizes)]
    results = accumulate(heads(), losses, batches if sized else iter(batches), windows_of(batches, steps), steps=steps)
    assert [result.step for result in results] == list(range(1, len(results) + 1))


def test_windows_are_read_before_their_first_batch_is_handed_out():
    model, losses, events = heads(), Losses(), []
    loader = [batch_of(2, seed=seed) for seed in range(5)]

    class Noted:
        def __len__(self):
            return len(loader)

        def __iter__(self):
            for index, batch in enumerate(loader):
                events.append(f"read {index}")
                yield batch

    def counts(batch):
        events.append(f"count {next(i for i, one in enumerate(loader) if one is batch)}")
        return losses.counts(batch)

    acc = Accumulator(model, sgd(model), steps=lambda step: 2 + step, counts=counts)  # a ramp: 2, then 3
    for batch in acc.batches(Noted()):
        events.append("batch")
        acc.backward(losses(model, batch))
        acc.step()
    assert events == [
        *["read 0", "count 0", "read 1", "count 1", "batch", "batch"],
        *["read 2", "count 2", "read 3", "count 3", "read 4", "count 4", "batch", "batch", "batch"],
    ]
    assert acc.optimizer_step == 2


def test_short_windows_may_be_dropped():
    batches = [batch_of(2, seed=seed) for seed in range(5)]
    for loader in (batches, iter(batches)):
        model, losses = heads(), Losses(NAMES)
        acc = Accumulator(model, sgd(model), steps=2, counts=losses.counts, remainder="drop")
        for batch in acc.batches(loader):
            acc.backward(losses(model, batch))
            acc.step()
        assert acc.optimizer_step == 2


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("done", [0, 1])
def test_after_discard_the_batches_already_read_begin_the_next_window(sized, done):
    """`done` batches of the window had their backward when it is dropped, and one more was handed out."""
    model, losses = heads(), Losses(NAMES)
    batches = [batch_of(2 + seed, seed=seed) for seed in range(6)]
    seen = []

    def counts(batch):
        seen.append(next(i for i, one in enumerate(batches) if one is batch))
        return losses.counts(batch)

    acc = Accumulator(model, sgd(model), steps=3, counts=counts)
    window, was_dropped = [], False
    for index, batch in enumerate(acc.batches(batches if sized else iter(batches))):
        if index == done and not was_dropped:
            acc.discard()
            window, was_dropped = [], True
        acc.backward(losses(model, batch))
        window.append(batch)
        if acc.is_last:
            assert step_error(model, window, NAMES, acc.step) <= 1e-12
            assert len(window) == 3 or index == 5
            window = []
        else:
            acc.step()
    assert seen == list(range(6))  # each was counted once


def test_discard_between_batches():
    model, losses = heads(), Losses(NAMES)
    batches = [batch_of(2 + seed, seed=seed) for seed in range(4)]
    stream = iter(batches)
    acc = Accumulator(model, sgd(model), steps=3, counts=losses.counts)
    for batch in acc.batches(stream):
        acc.backward(losses(model, batch))
        assert acc.step() is None
        break
    acc.discard()
    seen = []
    for batch in acc.batches(stream):
        seen.append(batch)
        acc.backward(losses(model, batch))
        if acc.is_last:
            assert step_error(model, batches[1:], NAMES, acc.step) <= 1e-12
        else:
            acc.step()
    assert all(map(lambda one, other: one is other, seen, batches[1:]))


def test_a_backward_that_fails_first_can_be_done_again():
    model, losses, batches = heads(), Losses(NAMES), [batch_of(3, seed=seed) for seed in range(2)]
    acc, has_failed = Accumulator(model, sgd(model), steps=2, counts=losses.counts), False

    def fail(_):
        raise RuntimeError("planted")

    for batch in acc.batches(batches):
        if not has_failed:
            hook, has_failed = model.trunk.weight.register_hook(fail), True
            with pytest.raises(RuntimeError, match="planted"):
                acc.backward(losses(model, batch))
            hook.remove()
        acc.backward(losses(model, batch))
        if acc.is_last:
            assert step_error(model, batches, NAMES, acc.step) <= 1e-12


def test_a_loader_that_refills_its_batch_is_noticed():
    model, losses, buffer = heads(), Losses(), batch_of(2)

    class Refilling:
        def __len__(self):
            return 4

        def __iter__(self):
            for seed in range(4):
                for key, value in batch_of(2, seed=seed).items():
                    buffer[key].copy_(value)
                yield buffer

    acc = Accumulator(model, sgd(model), steps=2, counts=losses.counts)
    with pytest.raises(BatchError, match="writes every batch to the same memory"):
        next(iter(acc.batches(Refilling())))


def test_accumulators_refuse_what_cannot_be_counted():
    model, losses = heads(), Losses()
    with pytest.raises(UsageError, match="carry"):
        Accumulator(model, sgd(model), counts=losses.counts, remainder="carry")
    acc = Accumulator(model, sgd(model), steps=3, counts=losses.counts)
    with pytest.raises(UsageError, match=r"micro_batch\(\) cannot go with counts="), acc.micro_batch():
        pass
    batches = [batch_of(2, seed=seed) for seed in range(3)]
    for batch in acc.batches(batches):
        with pytest.raises(UsageError, match="items= is for one loss"):
            acc.backward(losses(model, batch), items=3)
        acc.backward(losses(model, batch))
        if not acc.is_last:
            with pytest.raises(UsageError, match=r"step\(now=True\) in an unfinished window"):
                acc.step(now=True)
            acc.step()
        else:
            assert acc.step(now=True).step == 1
    plain = Accumulator(model, sgd(model))
    with pytest.raises(BatchError, match="needs counts="), plain.micro_batch():
        plain.backward(losses(model, batches[0]))


def test_a_window_that_does_not_add_up_takes_no_step():
    model, losses = heads(), Losses(wrong={"samples": 1})
    acc = Accumulator(model, sgd(model), steps=2, counts=losses.counts)
    batches, before = [batch_of(2, seed=seed) for seed in range(2)], weights(model)
    for batch in acc.batches(batches):
        acc.backward(losses(model, batch))
        if acc.is_last:
            with pytest.raises(BatchError, match="'samples' add up to 4, but counts= said 6"):
                acc.step()
        else:
            acc.step()
    assert acc.optimizer_step == 0
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())


# ------------------------------------------------------------------------------------------------------ memory


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_counts_are_asked_once_where_a_window_is_done_again(where):
    """Memory runs out with more than 3 samples, and half-way in the window with the last of them."""
    model, batch, losses, asked, sizes = heads(), batch_of(9), Losses(NAMES), [], []

    def loss_fn(model, micro):
        sizes.append(len(micro["x"]))
        terms = losses(model, micro)
        if sizes[-1] > 3 or sizes == [9, 4, 2, 2]:
            out_of_memory() if where == "forward" else terms["tokens"][0].register_hook(out_of_memory)
        return terms

    def counts(batch):
        asked.append(len(batch["x"]))
        return losses.counts(batch)

    step, found = MacroStep(model, sgd(model), loss_fn, micro="auto", counts=counts), []
    assert step_error(model, [batch], NAMES, lambda: found.append(step(batch))) <= 1e-12
    assert asked == [9]
    assert sizes == [9, 4, 2, 2, *[1] * 9]
    assert found[0].micro_batches == 9


# ------------------------------------------------------------------------------------------------------ experts

AUX = 0.1


def mixtral(coefficient):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=16,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        pad_token_id=None,
    )
    return MixtralForCausalLM(config)


def balance_terms(model, batch):
    output = model(input_ids=batch["input_ids"])
    labels = batch["labels"][:, 1:]
    tokens = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels.flatten())
    return {
        "tokens": (tokens, labels.numel()),
        "balance": (model.config.router_aux_loss_coef * output.aux_loss, len(labels)),
    }


def balance_counts(batch):
    return {"tokens": batch["labels"][:, 1:].numel(), "balance": len(batch["labels"])}


def gradient_of_one_batch(coefficient, batch):
    model = mixtral(coefficient)
    sum(loss for loss, _ in balance_terms(model, batch).values()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def moved(model, train):
    """What a step of SGD with a learning rate of 1 subtracts."""
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    train()
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient_here(coefficient, batch):
    model = mixtral(coefficient)
    step = MacroStep(model, sgd(model), balance_terms, micro=2, counts=balance_counts)
    return moved(model, lambda: step(batch))


def gradient_of_trainer(coefficient, batch, folder, steps):
    from transformers import Trainer, TrainingArguments

    model = mixtral(coefficient)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=steps,
        max_steps=1,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    optimizer = sgd(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = [{name: column[i] for name, column in batch.items()} for i in range(len(batch["labels"]))]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, constant))
    return moved(model, trainer.train)


@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.filterwarnings("ignore")
def test_the_balance_loss_of_experts_counts_once(tmp_path, steps):
    """All samples are alike, so that the balance of each micro-batch is that of the whole batch, in any order."""
    ids = torch.randint(0, 32, (1, 10), generator=torch.Generator().manual_seed(0)).repeat(2 * steps, 1)
    batch = {"input_ids": ids, "labels": ids}

    def share(gradient):
        """Of the gradient of the balance loss, in that of one big batch."""
        whole = gradient_of_one_batch(AUX, batch) - gradient_of_one_batch(0.0, batch)
        found = gradient(AUX) - gradient(0.0)
        return round((found @ whole / (whole @ whole)).item(), 3)

    assert share(lambda coefficient: gradient_here(coefficient, batch)) == 1.0
    assert share(lambda coefficient: gradient_of_trainer(coefficient, batch, tmp_path, steps)) == steps


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_items_in_a_tensor_weigh_in_float64(dtype):
    """A tensor of whole numbers divided by a Python number would be rounded to float32."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    batches = [torch.randn(n, 3).double() for n in (3, 4)]
    expected = torch.autograd.grad(model(torch.cat(batches)).exp().mean(), model.weight)[0]
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), steps=2, counts=lambda x: {"a": len(x)})
    before = model.weight.detach().clone()
    for x in acc.batches(batches):
        acc.backward({"a": (model(x).exp().mean(), torch.tensor(len(x), dtype=dtype))})
        acc.step()
    torch.testing.assert_close(before - model.weight.detach(), expected, rtol=1e-13, atol=0)
