"""Several terms in micro-steps that are recorded, and on a GPU: as eager ones, and the host reads nothing."""

import warnings

import pytest
import torch

from harness.gpu import difference, no_host_reads
from harness.recorded import DEVICE, batch_of, beside_eager, gpu, make, recordings, said
from macrobatch import Accumulator, MacroStep
from macrobatch.errors import BatchError

pytestmark = pytest.mark.usefixtures("captures")


def terms(model, batch):
    """Cross-entropy over the tokens, and a penalty over the samples."""
    logits = model(batch["input_ids"])
    labels = batch["labels"]
    items = (labels != -100).sum()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return {"tokens": (losses / items.clamp(min=1), items), "penalty": (logits.square().mean(), len(labels))}


def counts(batch):
    return {"tokens": (batch["labels"] != -100).sum(), "penalty": len(batch["labels"])}


def mask_counts(batch):
    return counts(batch) | {"penalty": torch.tensor(len(batch["labels"]))}


def train(model, cuda_graph, *, windows=4, counts=counts, loss_fn=terms, **options):
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, fused=True)
    step = MacroStep(model, optimizer, loss_fn, micro=4, max_norm=1.0, cuda_graph=cuda_graph, counts=counts, **options)
    return [step(batch_of(13, seed=seed)) for seed in range(windows)], step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [counts, mask_counts])
def test_bitwise_as_eager(dtype, counts):
    """Each window has other denominators: recordings read them where they were when the window began."""
    results = {}

    def run(model, cuda_graph):
        results[cuda_graph], step = train(model, cuda_graph, counts=counts)
        return step

    apart, step = beside_eager(make(dtype), run)
    assert apart == 0.0
    assert len(recordings(step)) == 2  # of 4 samples and of 1
    for ours, theirs in zip(results[True], results[False], strict=True):
        assert ours.losses.keys() == theirs.losses.keys()
        for name, loss in ours.losses.items():
            assert loss.item() == pytest.approx(theirs.losses[name].item(), rel=1e-6)
        assert ours.items.item() == theirs.items.item()
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)


def test_sums_and_a_term_that_is_absent():
    def loss_fn(model, batch):
        found = terms(model, batch)
        tokens, items = found["tokens"]
        penalty, samples = found["penalty"]
        sums = {"tokens": (tokens * items, items), "penalty": (penalty * samples, samples)}
        return sums if samples > 1 else {"tokens": sums["tokens"]}

    def counts_without_the_last(batch):
        return counts(batch) | {"penalty": 12}

    def run(model, cuda_graph):
        return train(model, cuda_graph, counts=counts_without_the_last, loss_fn=loss_fn, reduction="sum")[1]

    apart, step = beside_eager(make(), run)
    assert apart == 0.0
    assert len(recordings(step)) == 2


def test_items_that_do_not_add_up_in_recordings():
    """On a GPU the error may come one window later, but its step is not taken."""
    wrong, model = [False], make()

    def counts_of(batch):
        return counts(batch) | ({"tokens": counts(batch)["tokens"] + 1} if wrong[0] else {})

    _, step = train(model, True, windows=2, counts=counts_of)
    before = [p.detach().clone() for p in model.parameters()]
    wrong[0] = True
    with pytest.raises(BatchError, match=r"the items of the term 'tokens' add up to \d+, but counts= said \d+"):
        step(batch_of(13, seed=7))
        step.state_dict()
    assert all(map(torch.equal, before, model.parameters()))
    assert step.optimizer_step == 2


@gpu
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_with_a_scaler(kind):
    scales = []

    def loss_fn(model, batch):
        with torch.autocast(DEVICE, torch.float16):
            return terms(model, batch)

    def run(model, cuda_graph):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, **{kind: True})
        step = train(model, cuda_graph, loss_fn=loss_fn, optimizer=optimizer, scaler=scaler)[1]
        scales.append(scaler.get_scale())
        return step

    apart, step = beside_eager(make(), run)
    assert apart == 0.0
    assert len(recordings(step)) == 2
    assert scales[0] == scales[1]


@gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_the_host_reads_nothing(cuda_graph):
    """One count is an int, so that the host knows that there are items: not even the close reads anything."""
    model = make()
    _, step = train(model, cuda_graph, windows=3)
    batch = batch_of(13, seed=9)
    with no_host_reads():
        step(batch)


@gpu
def test_an_accumulator_reads_nothing_inside_its_window():
    model = make()
    acc = Accumulator(model, torch.optim.AdamW(model.parameters(), fused=True), steps=3, counts=counts)
    batches = [batch_of(4, seed=seed) for seed in range(6)]
    for index, batch in enumerate(acc.batches(batches)):
        if index < 3:
            acc.backward(terms(model, batch))
            acc.step()
            continue
        with no_host_reads():
            acc.backward(terms(model, batch))
            acc.step()
    assert acc.optimizer_step == 2


@gpu
@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("scaled", [False, True])
def test_items_that_do_not_add_up_on_a_device(kind, scaled):
    """Whatever the optimizer, the step is not taken; and it is no overflow."""
    model = make()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if scaled else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})
    step = MacroStep(
        model,
        optimizer,
        terms,
        micro=4,
        scaler=scaler,
        counts=lambda batch: counts(batch) | {"tokens": counts(batch)["tokens"] + 1},
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BatchError, match="the term 'tokens'"):
        step(batch_of(13, seed=0))
        step.state_dict()
    assert all(map(torch.equal, before, model.parameters()))
    assert step.optimizer_step == 0
    if scaler is not None:
        assert scaler.get_scale() == 1024.0


@gpu
def test_counts_on_the_host_for_a_model_on_a_device():
    """The batch stays in host memory, and so do its counts: tensors on a CPU."""
    model, twin = make(), make()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for one, optimizer, device in zip((model, twin), optimizers, ("cpu", DEVICE), strict=True):
        MacroStep(one, optimizer, terms, micro=4, counts=mask_counts)(batch_of(13, device=device))
    assert difference(model, twin) == 0.0


def test_no_recording_is_refused():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(make(), True, windows=2)
    assert said(caught) == []
