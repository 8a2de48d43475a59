"""Losses of the whole batch with recorded passes, and on a GPU: as eager ones."""

import copy
import warnings

import pytest
import torch
from torch import nn

from harness.gpu import no_host_reads
from harness.joint import CASES, CONTRAST, Untouched, batch_of, checkpointed_gradient, towers
from harness.recorded import DEVICE, gpu, said
from harness.reference import relative_error
from macrobatch import Encoded, MacroStep, by_tokens, contrastive_loss
from macrobatch.errors import BatchError

pytestmark = pytest.mark.usefixtures("captures")
DROPOUT = 0.3 if DEVICE == "cuda" else 0.0  # on a CPU, the host draws for it


def make(**options):
    return towers(torch.float32, **options).to(DEVICE)


def batch(samples=13, seed=0):
    return {key: rows.to(DEVICE) for key, rows in batch_of(samples, seed=seed, dtype=torch.float32).items()}


def trained(model, case, *, cuda_graph, windows=4, micro=4, joint=None, loss_fn=None, samples=13, **options):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, fused=True)
    options = {"max_norm": 1.0} | options
    joint, loss_fn = joint or case.joint, loss_fn or case.loss_fn
    train = MacroStep(model, optimizer, loss_fn, joint=joint, micro=micro, cuda_graph=cuda_graph, **options)
    return [train(batch(samples, seed=seed)) for seed in range(windows)], train


def recorded(train):
    """How many shapes of the first and of the second pass."""
    caches = train._graphs.first, train._graphs.second
    return [sum(one is not None for one in cache._recordings.values()) for cache in caches]


def agree(model, case, windows=4, same_cut=True, **options):
    """Train a model and its twin; returns the recorded one's MacroStep."""
    twin = copy.deepcopy(model)
    results, train = trained(model, case, cuda_graph=True, windows=windows, **options)
    expected, _ = trained(twin, case, cuda_graph=False, windows=windows, **options)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
        assert ours.items.item() == theirs.items.item()
        assert ours.micro_batches == theirs.micro_batches or not same_cut
        assert ours.grad_norm.item() == pytest.approx(theirs.grad_norm.item(), rel=1e-4)
    own, other = dict(model.named_parameters()), dict(twin.named_parameters())
    assert relative_error(own, other) <= 1e-5
    assert all(p.grad is None for p in model.parameters())
    for (name, found), buffer in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(found, buffer, rtol=1e-5, atol=1e-6, msg=name)
    return train


@pytest.mark.parametrize("name", CASES)
def test_as_eager(name):
    train = agree(make(dropout=DROPOUT), CASES[name])
    assert recorded(train) == [2, 2]  # of 4 samples and of 1


def test_by_tokens():
    train = agree(make(), CONTRAST, micro=by_tokens(24), same_cut=False)
    assert min(recorded(train)) > 0


def test_a_field_that_joint_does_not_use_gets_no_gradient():
    """What only leads to it stays without one, as in an eager step."""

    def loss_fn(model, micro):
        image, text, gates = model(micro)
        return Encoded(image=image, text=text, gates=gates)

    model = make()
    train = agree(model, CONTRAST, loss_fn=loss_fn)
    assert recorded(train) == [2, 2]
    optimizer = train._engine.closing._optimizers[0]
    assert model.router.weight not in optimizer.state


def test_running_statistics_move_once():
    model = make(norm=nn.BatchNorm1d)
    with pytest.warns(UserWarning, match="BatchNorm"):
        train = agree(model, CONTRAST, samples=12)
    assert recorded(train) == [1, 1]
    assert int(model.image[1].num_batches_tracked) == 4 * 3


def test_a_scaler():
    model = make()
    train = agree(model, CASES["nested"], scaler=torch.amp.GradScaler(DEVICE, init_scale=2.0**10))
    assert recorded(train) == [2, 2]


def test_encodings_that_differ_between_recorded_passes():
    model, factor = make(), torch.ones((), device=DEVICE)

    def loss_fn(model, micro):
        image, text, _ = model(micro)
        if torch.is_grad_enabled():
            image = image * factor
        return Encoded(image=image, text=text)

    _, train = trained(model, CONTRAST, cuda_graph=True, loss_fn=loss_fn, windows=3)
    assert recorded(train) == [2, 2]
    before = [p.detach().clone() for p in model.parameters()]
    factor.fill_(1.5)
    with pytest.raises(BatchError, match="not the same in the two passes"):
        train(batch(seed=7))
        train.state_dict()
    assert all(map(torch.equal, before, model.parameters()))


def test_why_it_runs_eagerly():
    def loss_fn(model, micro):
        torch.rand(())  # the host draws
        return CONTRAST.loss_fn(model, micro)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agree(make(), CONTRAST, loss_fn=loss_fn)
    assert any("draws random numbers on the host" in message for message in said(caught))


@gpu
def test_with_dropout_bitwise_as_checkpointing():
    model = make(dropout=0.3)
    whole = batch(12)
    torch.manual_seed(5)
    expected = checkpointed_gradient(model, CONTRAST, whole, 4)
    for cuda_graph in (False, True):
        optimizer = Untouched(model)
        train = MacroStep(model, optimizer, CONTRAST.loss_fn, joint=CONTRAST.joint, micro=4, cuda_graph=cuda_graph)
        for _ in range(3):
            torch.manual_seed(5)
            train(whole)
        for name, gradient in optimizer.seen.items():
            assert torch.equal(gradient, expected[name]), (name, cuda_graph)


@gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_the_host_reads_nothing(cuda_graph):
    model = make()
    _, train = trained(model, CONTRAST, cuda_graph=cuda_graph, windows=3)
    whole = batch(seed=5)
    with no_host_reads():
        train(whole)


@gpu
def test_memory_of_a_larger_batch_is_its_encodings():
    """65 times the pairs: what is kept of each sample, and its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def loss_fn(model, micro):
        return Encoded(a=model(micro[0]), b=model(micro[1]))

    def joint(model, encoded):
        return contrastive_loss(encoded.a, encoded.b, scale=20.0, tile=1024)

    train = MacroStep(model, optimizer, loss_fn, joint=joint, micro=256)
    peaks = []
    for samples in (1024, 65536):
        pairs = torch.randn(samples, 64), torch.randn(samples, 64)
        train(pairs)
        torch.cuda.reset_peak_memory_stats()
        train(pairs)
        peaks.append(torch.cuda.max_memory_allocated())
    encodings = 65536 * 64 * 4 * 2
    assert peaks[1] <= 1.3 * peaks[0] + 8 * encodings
