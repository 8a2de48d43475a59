"""`contrastive_loss` against the obvious version of itself, which holds the matrix of all pairs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from harness.contrastive import (
    EXACT,
    difference,
    error,
    float64,
    largest,
    number,
    obvious,
    random_rows,
    similar_rows,
    with_gradients,
)
from harness.host_reads import HostReads
from macrobatch import contrastive_loss
from macrobatch.contrastive import EPSILON, Block, LogSumExp, Rows, add_gradients, log_sum_exps
from macrobatch.errors import BatchError, UsageError

# ---------------------------------------------------------------------------------------------------- exact


@st.composite
def problems(draw):
    dimension, seed = draw(st.integers(1, 6)), draw(st.integers(0, 1000))
    pairs, negatives = draw(st.integers(1, 9)), draw(st.none() | st.integers(0, 7))
    scale = draw(st.sampled_from([0.0, 1.0, -3.0, 20.0, 100.0]))
    inputs = [random_rows(pairs, dimension, seed=3 * seed + i) for i in range(2)]
    inputs.append(number(scale))
    if negatives is not None:
        inputs.append(random_rows(negatives, dimension, seed=3 * seed + 2))
    return inputs, {"symmetric": draw(st.booleans())}, draw(st.integers(1, 10))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_equals_the_obvious(problem):
    inputs, options, tile = problem
    found = with_gradients(contrastive_loss, inputs, **options, tile=tile)
    wanted = with_gradients(obvious, inputs, **options)
    # One pair has no gradient but rounding, which is `scale` times as large as that of the rows.
    assert difference(found, wanted) <= EXACT * max(largest(wanted), largest(inputs))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("negatives", [0, 3])
def test_gradients_are_those_of_the_loss(symmetric, negatives):
    inputs = [random_rows(n, 3, seed=i).requires_grad_() for i, n in enumerate((4, 4, negatives))]
    scale = torch.tensor([2.5], dtype=float64, requires_grad=True)

    def loss(a, b, rows, scale):
        return contrastive_loss(a, b, scale=scale, symmetric=symmetric, negatives=rows, tile=3)

    assert torch.autograd.gradcheck(loss, (*inputs, scale))


FLOAT32 = [(scale, closeness) for scale in (1.0, 20.0, 100.0) for closeness in (0.0, 0.3, 1.0)]


@pytest.mark.parametrize(("scale", "closeness"), FLOAT32)
def test_float32_is_as_accurate_as_the_obvious(scale, closeness):
    inputs = [*similar_rows(200, 32, closeness=closeness, dtype=torch.float32), torch.tensor(scale)]
    wanted = with_gradients(obvious, inputs, dtype=float64)
    ours = error(with_gradients(contrastive_loss, inputs, tile=64), wanted)
    assert ours <= 3 * max(error(with_gradients(obvious, inputs), wanted), torch.finfo(torch.float32).eps)


def loss_of_right_answers(a, b, *, scale, negatives=None):
    """From a to b, for pairs that are almost always right."""
    logits = scale * F.normalize(a) @ F.normalize(b).T
    wrong = torch.exp(logits - logits.diagonal()[:, None]) * (1 - torch.eye(len(a)))
    return wrong.sum(1).log1p().mean()


def test_small_losses_keep_their_digits():
    """With their gradients; -log(softmax) rounds to 0 or 1e-7 there."""
    inputs = [*similar_rows(50, 16, closeness=9.0, dtype=torch.float32), torch.tensor(60.0)]
    wanted = with_gradients(loss_of_right_answers, inputs, dtype=float64)
    assert wanted[0] < 1e-7
    found = with_gradients(contrastive_loss, inputs, symmetric=False, tile=7)
    assert max(error([f], [w]) for f, w in zip(found, wanted, strict=True)) <= 1e-4  # what float32 logits allow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None)
@given(problem=problems())
def test_low_precision_is_computed_in_float32(dtype, problem):
    """Bit for bit: gradients are rounded once, at the end."""
    inputs, options, tile = problem
    low = [rows.to(dtype) for rows in inputs]
    found = with_gradients(contrastive_loss, low, **options, tile=tile)
    wanted = with_gradients(contrastive_loss, low, dtype=torch.float32, **options, tile=tile)
    assert found[0].dtype == torch.float32
    assert [f.dtype for f in found[1:]] == [dtype] * len(low)
    assert all(torch.equal(f, w.to(f.dtype)) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    inputs = [*similar_rows(9, 4, closeness=1.0, dtype=torch.float32), torch.tensor(20.0)]
    inputs.append(random_rows(3, 4, seed=5, dtype=torch.float32))
    wanted = with_gradients(contrastive_loss, inputs, tile=4)
    with torch.autocast("cpu", dtype=dtype):  # around the backward, too
        found = with_gradients(contrastive_loss, inputs, tile=4)
    assert difference(found, wanted) == 0


def test_rows_of_several_dtypes_are_computed_in_the_widest():
    a, b = random_rows(4, seed=0, dtype=torch.bfloat16), random_rows(4, seed=1)
    assert contrastive_loss(a, b, scale=1.0).dtype == float64
    assert contrastive_loss(a, a, scale=number(1.0)).dtype == torch.float32


# ---------------------------------------------------------------------------------------------------- corners


@pytest.mark.parametrize("scale", [0.0, 1e4, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_scale_is_finite(scale, dtype):
    found = with_gradients(contrastive_loss, [*similar_rows(8, 4, closeness=1.0, dtype=dtype), torch.tensor(scale)])
    assert all(one.isfinite().all() for one in found)


@pytest.mark.parametrize("norm", [0.0, EPSILON / 10])
def test_rows_without_a_norm(norm):
    """They are divided by EPSILON, as by `F.normalize`, and get a gradient accordingly."""
    a, b = random_rows(5, seed=0), random_rows(5, seed=1)
    a[2] *= norm / a[2].norm()
    b[0] = 0
    inputs = [a, b, number(3.0), torch.zeros(2, 5, dtype=float64)]
    assert error(with_gradients(contrastive_loss, inputs, tile=2), with_gradients(obvious, inputs)) <= EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_zeros_make_no_nan(dtype):
    a, b = random_rows(5, seed=0, dtype=dtype), random_rows(5, seed=1, dtype=dtype)
    a[2] = 0
    assert not any(one.isnan().any() for one in with_gradients(contrastive_loss, [a, b, torch.tensor(3.0)]))


def test_one_pair_has_nothing_to_learn():
    found = with_gradients(contrastive_loss, [random_rows(1, seed=0), random_rows(1, seed=1), number(7.0)])
    assert largest(found) == 0


def test_the_scale_may_be_a_number():
    a, b = random_rows(6, seed=0), random_rows(6, seed=1)
    wanted = contrastive_loss(a, b, scale=torch.tensor(4.0))
    assert contrastive_loss(a, b, scale=4) == contrastive_loss(a, b, scale=4.0) == wanted


def test_strided_rows():
    inputs = [
        random_rows(5, 7, seed=0).T,
        random_rows(14, 5, seed=1)[::2],
        number(9.0),
        random_rows(2, 10, seed=2),
    ]
    inputs[3] = inputs[3][:, ::2]
    assert error(with_gradients(contrastive_loss, inputs, tile=3), with_gradients(obvious, inputs)) <= EXACT


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("only", ["a", "b", "scale", "negatives"])
def test_only_one_input_needs_a_gradient(only, symmetric):
    inputs = {"a": random_rows(5, seed=0), "b": random_rows(5, seed=1), "negatives": random_rows(3, seed=2)}
    inputs["scale"] = torch.tensor([6.0], dtype=float64)
    inputs[only].requires_grad_()
    found = torch.autograd.grad(contrastive_loss(**inputs, symmetric=symmetric, tile=2), inputs[only])
    assert found[0].shape == inputs[only].shape
    assert error(found, torch.autograd.grad(obvious(**inputs, symmetric=symmetric).sum(), inputs[only])) <= EXACT


def test_no_input_needs_a_gradient():
    assert not contrastive_loss(random_rows(5, seed=0), random_rows(5, seed=1), scale=1.0).requires_grad


def test_a_tensor_on_both_sides():
    rows = random_rows(5, seed=0).requires_grad_()
    found, wanted = (torch.autograd.grad(f(rows, rows, scale=5.0), rows) for f in (contrastive_loss, obvious))
    assert error(found, wanted) <= EXACT


def test_the_seed_of_the_backward_multiplies():
    inputs = [random_rows(5, seed=0), random_rows(5, seed=1), number(5.0)]
    once = with_gradients(contrastive_loss, inputs)
    scaled = with_gradients(lambda *args, **kwargs: 1024 * contrastive_loss(*args, **kwargs), inputs)
    assert difference(scaled, [1024 * one for one in once]) == 0


def test_inputs_stay_as_they_are_and_the_graph_can_be_used_again():
    inputs = [random_rows(5, seed=i).requires_grad_() for i in range(3)]
    before = [one.detach().clone() for one in inputs]
    loss = contrastive_loss(inputs[0], inputs[1], scale=5.0, negatives=inputs[2])
    first, second = torch.autograd.grad(loss, inputs, retain_graph=True), torch.autograd.grad(loss, inputs)
    assert difference(first, second) == difference(inputs, before) == 0


def test_the_loss_is_checkpointed():
    """Which lets every saved tensor be read once."""
    inputs = [random_rows(7, seed=0), random_rows(7, seed=1), number(5.0), random_rows(3, seed=2)]

    def checkpointed(*args, **kwargs):
        return checkpoint(contrastive_loss, *args, use_reentrant=False, **kwargs)

    assert error(with_gradients(checkpointed, inputs, tile=4), with_gradients(obvious, inputs)) <= EXACT


@pytest.mark.parametrize("weight", [1.0, torch.ones((), requires_grad=True)], ids=["number", "parameter"])
def test_a_second_derivative_is_an_error(weight):
    """And not zero; a first one with `create_graph`, of which nobody asks the second, is none."""
    rows = random_rows(5, seed=0).requires_grad_()
    loss = weight * contrastive_loss(rows, random_rows(5, seed=1), scale=5.0)
    (plain,) = torch.autograd.grad(loss, rows, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    assert torch.equal(gradient, plain)
    with pytest.raises(UsageError, match="differentiated twice"):
        gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:.torch.jit.script")  # by torch itself
def test_the_loss_is_compiled():
    inputs = [random_rows(7, seed=0), random_rows(7, seed=1), number(5.0), random_rows(3, seed=2)]
    compiled = torch.compile(contrastive_loss, backend="aot_eager")
    assert error(with_gradients(compiled, inputs, tile=4), with_gradients(obvious, inputs)) <= EXACT


# ---------------------------------------------------------------------------------------------------- memory


class Sizes(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


PAIRS, DIMENSION, SMALL_TILE = 130, 8, 16


def largest_tensor(loss_of, **options) -> int:
    inputs = [random_rows(PAIRS, DIMENSION, seed=0), random_rows(PAIRS, DIMENSION, seed=1), number(5.0)]
    with Sizes() as sizes:
        with_gradients(loss_of, [*inputs, random_rows(PAIRS, DIMENSION, seed=2)], **options)
    return sizes.largest


def test_no_tensor_is_larger_than_the_rows_or_a_tile():
    assert largest_tensor(contrastive_loss, tile=SMALL_TILE) == PAIRS * DIMENSION
    assert largest_tensor(contrastive_loss, tile=65) == 65 * 65  # 130 rows are two parts
    assert largest_tensor(obvious) == 2 * PAIRS * PAIRS  # with negatives


def test_little_is_saved_for_the_backward():
    saved = []
    inputs = [random_rows(PAIRS, DIMENSION, seed=i).requires_grad_() for i in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        contrastive_loss(inputs[0], inputs[1], scale=5.0, negatives=inputs[2], tile=SMALL_TILE)
    own = {one.untyped_storage().data_ptr() for one in inputs}
    assert sum(one.numel() for one in saved if one.untyped_storage().data_ptr() not in own) <= 6 * PAIRS + 1


def test_the_host_reads_nothing():
    inputs = [random_rows(9, seed=0), random_rows(9, seed=1), number(5.0), random_rows(4, seed=2)]
    with HostReads() as reads:
        reads.watching = True
        with_gradients(contrastive_loss, inputs, tile=4)
        reads.watching = False
    assert reads.reads == []


# ---------------------------------------------------------------------------------------------------- blocks


def make_block(a, b, *, tile, first=0, scale=8.0) -> Block:
    return Block(a=Rows.of(a, float64), b=Rows.of(b, float64), scale=number(scale), tile=tile, first=first)


shares = st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum)


def spans_of(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def merged_sums(a, b, lengths, tile):
    """The log-sum-exps of all rows and columns, from the blocks of the rows of each rank."""
    blocks = [make_block(a[start:end], b, tile=tile, first=start) for start, end in spans_of(lengths)]
    rows, columns = zip(*(log_sum_exps(block) for block in blocks), strict=True)
    all_columns = columns[0]
    for more in columns[1:]:
        all_columns = all_columns.merge(more)
    return LogSumExp(*map(torch.cat, zip(*rows, strict=True))), all_columns


@settings(max_examples=60, deadline=None)
@given(lengths=shares, tile=st.integers(1, 6), seed=st.integers(0, 100))
def test_the_blocks_of_ranks_make_the_whole(lengths, tile, seed):
    a, b = random_rows(sum(lengths), seed=2 * seed), random_rows(sum(lengths), seed=2 * seed + 1)
    logits = 8.0 * F.normalize(a) @ F.normalize(b).T
    answers = torch.arange(len(a))
    rows, columns = merged_sums(a, b, lengths, tile)
    wanted = [F.cross_entropy(z, answers, reduction="none") for z in (logits, logits.T)]
    assert difference([rows.cross_entropies(), columns.cross_entropies()], wanted) <= EXACT * 8
    assert difference([rows.right, columns.right], [logits.diagonal()] * 2) <= EXACT * 8


@settings(max_examples=60, deadline=None)
@given(lengths=shares, tile=st.integers(1, 6), seed=st.integers(0, 100), symmetric=st.booleans())
def test_each_rank_has_the_gradients_of_its_rows(lengths, tile, seed, symmetric):
    """Of its own rows of a from one block, of its own rows of b from another; nothing has to be added up."""
    a, b = (random_rows(sum(lengths), seed=2 * seed + i).requires_grad_() for i in range(2))
    wanted = torch.autograd.grad(obvious(a, b, scale=8.0, symmetric=symmetric), (a, b))
    rows, columns = merged_sums(a.detach(), b.detach(), lengths, tile)
    columns = columns if symmetric else None
    found = []
    for own, other, along, across in ((a, b, rows, columns), (b, a, columns, rows)):
        parts = []
        for start, end in spans_of(lengths):
            block = make_block(own.detach()[start:end], other.detach(), tile=tile, first=start)
            sums = block.a.empty_sums()
            own_along = None if along is None else along.at(slice(start, end))
            add_gradients(block, rows=own_along, columns=across, sum_a=sums, sum_b=None)
            parts.append(block.a.gradient(sums, block.scale / len(a) / (2 if symmetric else 1)))
        found.append(torch.cat(parts))
    assert difference(found, wanted) <= EXACT * max(8.0, largest(wanted))


# ---------------------------------------------------------------------------------------------------- errors


def rows_of(*shape, **options):
    return torch.ones(*shape, **options)


WRONG_ROWS = {
    "unequal": ({"a": rows_of(4, 3), "b": rows_of(5, 3)}, r"a \(4, 3\) and b \(5, 3\)"),
    "dimensions": ({"a": rows_of(4, 3), "b": rows_of(4, 2)}, r"same dimension.*a \(4, 3\) and b \(4, 2\)"),
    "dimension of negatives": ({"negatives": rows_of(2, 5)}, r"same dimension.*negatives \(2, 5\)"),
    "empty": ({"a": rows_of(0, 3), "b": rows_of(0, 3)}, "at least one pair"),
    "one dimension": ({"a": rows_of(4)}, r"a must be .*\(samples, dimension\).*\(4,\)"),
    "negatives of each row": ({"negatives": rows_of(4, 2, 3)}, r"negatives must be .*\(4, 2, 3\)"),
    "integers": ({"b": rows_of(4, 3, dtype=torch.long)}, "b must be floating-point rows.*int64"),
    "complex": ({"a": rows_of(4, 3, dtype=torch.cfloat)}, "a must be floating-point rows.*complex64"),
    "a list": ({"b": [[1.0]]}, "b must be a tensor .*list"),
    "devices": ({"b": rows_of(4, 3, device="meta")}, "a on cpu, b on meta"),
    "device of negatives": ({"negatives": rows_of(4, 3, device="meta")}, "negatives on meta"),
}
WRONG_OPTIONS = {
    "tile 0": ({"tile": 0}, "tile must be .*got 0"),
    "tile True": ({"tile": True}, "tile must be .*got True"),
    "tile 1.5": ({"tile": 1.5}, "tile must be .*got 1.5"),
    "no tile": ({"tile": None}, "tile must be .*got None"),
    "several scales": ({"scale": rows_of(4)}, r"scale must be .*one element.*\(4,\)"),
    "integer scale": ({"scale": torch.tensor(3)}, "scale must be .*int64"),
    "infinite scale": ({"scale": float("inf")}, "scale must be a finite number.*got inf"),
    "scale True": ({"scale": True}, "scale must be a finite number.*got True"),
    "a word": ({"scale": "20"}, "scale must be a finite number.*got '20'"),
    "scale elsewhere": ({"scale": torch.ones((), device="meta")}, "scale is on meta, but a on cpu"),
    "symmetric 1": ({"symmetric": 1}, "symmetric must be True or False: got 1"),
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_wrong_rows(case):
    changed, message = WRONG_ROWS[case]
    with pytest.raises(BatchError, match=message):
        contrastive_loss(**{"a": rows_of(4, 3), "b": rows_of(4, 3), "scale": 1.0} | changed)


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_options(case):
    changed, message = WRONG_OPTIONS[case]
    with pytest.raises(UsageError, match=message):
        contrastive_loss(rows_of(4, 3), rows_of(4, 3), **{"scale": 1.0} | changed)
