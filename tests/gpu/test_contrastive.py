"""`contrastive_loss` on a GPU: equal to the obvious version, in a fraction of its memory, without host reads."""

import gc

import pytest
import torch

from harness.contrastive import (
    EXACT,
    error,
    number,
    obvious,
    random_rows,
    similar_rows,
    with_gradients,
)
from harness.gpu import no_host_reads
from macrobatch import contrastive_loss
from macrobatch.errors import BatchError, UsageError

pytestmark = pytest.mark.gpu
PAIRS, DIMENSION = 16_384, 256
MATRIX = PAIRS * PAIRS * 4  # bytes, in float32


def on_gpu(*inputs):
    return [one.cuda() for one in inputs]


def reserved_by(loss_of, inputs) -> int:
    """Bytes, beyond the inputs: the forward, the backward and the gradients."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with_gradients(loss_of, inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("negatives", [0, 700])
def test_equals_the_obvious(symmetric, negatives):
    rows = [random_rows(count, 64, seed=seed) for seed, count in enumerate((3000, 3000, negatives))]
    inputs = on_gpu(rows[0], rows[1], number(20.0), rows[2])
    found = with_gradients(contrastive_loss, inputs, symmetric=symmetric)
    assert error(found, with_gradients(obvious, inputs, symmetric=symmetric)) <= EXACT


@pytest.mark.parametrize("closeness", [0.0, 1.0])
def test_float32_is_as_accurate_as_the_obvious(closeness):
    inputs = on_gpu(*similar_rows(3000, 64, closeness=closeness, dtype=torch.float32), torch.tensor(50.0))
    wanted = with_gradients(obvious, inputs, dtype=torch.float64)
    ours = error(with_gradients(contrastive_loss, inputs), wanted)
    assert ours <= 3 * max(error(with_gradients(obvious, inputs), wanted), torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_autocast_compute_in_float32(dtype):
    inputs = on_gpu(*similar_rows(3000, 64, closeness=1.0, dtype=dtype), torch.tensor(50.0))
    wanted = with_gradients(contrastive_loss, inputs, dtype=torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        found = with_gradients(contrastive_loss, inputs)
    assert [one.dtype for one in found] == [torch.float32, dtype, dtype, torch.float32]
    assert error(found[:1], wanted[:1]) <= 1e-5  # a logit of 50 in bfloat16 has an error of 0.1
    assert error(found, wanted) <= torch.finfo(dtype).eps


def test_memory_is_a_fraction_of_the_matrix():
    """The obvious version takes several times the matrix: the measurement sees it."""
    inputs = on_gpu(*similar_rows(PAIRS, DIMENSION, closeness=1.0, dtype=torch.float32), torch.tensor(20.0))
    assert reserved_by(contrastive_loss, inputs) < MATRIX / 4
    assert reserved_by(obvious, inputs) > 2 * MATRIX


def test_the_host_reads_nothing():
    inputs = on_gpu(*similar_rows(3000, 64, closeness=1.0, dtype=torch.float32), torch.tensor(20.0))
    with no_host_reads():
        with_gradients(contrastive_loss, inputs)


def test_rows_on_several_devices_are_an_error():
    a, b = (random_rows(4, seed=i) for i in range(2))
    with pytest.raises(BatchError, match="a on cpu, b on cuda:0"):
        contrastive_loss(a, b.cuda(), scale=1.0)
    with pytest.raises(UsageError, match="scale is on cpu, but a on cuda:0"):
        contrastive_loss(a.cuda(), b.cuda(), scale=torch.tensor(1.0))
