"""The nodes of a loss's graph: their names, and what they have saved. Nothing is unpacked or recomputed here.

An accessor raises a RuntimeError if a value cannot be read: hooks have packed it (checkpointing, offloading), the
graph was freed, or the tensor was changed in place. The caller keeps the node alive: else torch reads freed memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from macrobatch._torch.autograd import python_function_of

Node = Any
Edge = tuple[Any, int]


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name[:-1]}Backward{name[-1]}" for name in names.split())


# Losses with their own nodes. They have saved their reduction.
WEIGHTED = _nodes("NllLoss0 NllLoss2D0")  # divided by the total weight of the targets
BY_ELEMENT = _nodes(
    "MseLoss0 HuberLoss0 SmoothL1Loss0 BinaryCrossEntropy0 BinaryCrossEntropyWithLogits0 SoftMarginLoss0"
)
BY_ROW = _nodes("MultilabelMarginLoss0 MultiMarginLoss0")  # their last dimension holds the classes of one sample
LOSSES = WEIGHTED | BY_ELEMENT | BY_ROW

MEANS, MEAN_ALONG = _nodes("Mean0 Mean1"), "MeanBackward1"
SUMS, SUM_ALONG, SUM_OF_ALL = _nodes("Sum0 Sum1"), "SumBackward1", "SumBackward0"

# These change neither a value nor the number of elements; the second set does not for a tensor of one element.
COPIES = _nodes("ToCopy0 View0 ReshapeAlias0 UnsafeView0 Squeeze0 Squeeze1 Squeeze2 Unsqueeze0 Clone0 Alias0")
EXPANSION = "ExpandBackward0"
COPIES_OF_ONE = COPIES | {EXPANSION}
SELECT, NEGATION = "SelectBackward0", "NegBackward0"
PRODUCTS, PRODUCT, PRODUCT_WITH_NUMBER = _nodes("Mul0 Mul1"), "MulBackward0", "MulBackward1"
QUOTIENTS, QUOTIENT, QUOTIENT_BY_NUMBER = _nodes("Div0 Div1"), "DivBackward0", "DivBackward1"
ADDITIONS, SUBTRACTIONS, REVERSED_SUBTRACTION = _nodes("Add0 Add1"), _nodes("Sub0 Sub1"), "RsubBackward1"
SINK = "_DDPSinkBackward"
LEAF = "torch::autograd::AccumulateGrad"

# Each element of the result depends on one element of every input.
ELEMENTWISE = COPIES_OF_ONE | PRODUCTS | QUOTIENTS | ADDITIONS | SUBTRACTIONS | _nodes(
    "Rsub1 Neg0 Abs0 Pow0 Pow1 Pow2 Exp0 Exp20 Expm10 Log0 Log1P0 Log20 Log100 Sqrt0 Rsqrt0 Reciprocal0 Sin0 Cos0"
    " Tanh0 Erf0 Sigmoid0 LogSigmoid0 Softplus0 Relu0 Gelu0 Silu0 Elu0 LeakyRelu0 Hardtanh0 Threshold0 Clamp0 Clamp1"
    " ClampMin0 ClampMin1 ClampMax0 ClampMax1 Maximum0 Minimum0 Where0 MaskedFill0 NanToNum0 Xlogy0 Select0 Slice0"
)  # fmt: skip
# Each element of the result depends on a whole row along the saved dimensions.
ALONG_DIMENSIONS = _nodes(
    "Sum1 Mean1 Nansum0 Prod1 Var0 Std0 Logsumexp0 LogSoftmax0 Softmax0 Max0 Min0 Amax0 Amin0 Median1 Cumsum0"
    " Logcumsumexp0 Norm1 LinalgVectorNorm0"
)
LOG_SOFTMAX = "LogSoftmaxBackward0"
OF_ALL_ELEMENTS = _nodes("Sum0 Mean0 Norm0 Prod0 Max1 Min1")
JOINTS, STACK = _nodes("Stack0 Cat0"), "StackBackward0"

# All data that these use is an input in the graph; for the second set, also where a slice begins and ends.
OF_INPUTS = (ELEMENTWISE | ALONG_DIMENSIONS | OF_ALL_ELEMENTS | JOINTS | _nodes(
    "MseLoss0 HuberLoss0 SmoothL1Loss0 Mm0 Bmm0 Mv0 Dot0 T0 Transpose0 Permute0 Diagonal0 Trace0 Tril0 Triu0 Flip0"
    " Roll0 Repeat0 Unbind0 Cdist0 Pdist0 LinalgSvd0 LinalgSlogdet0 WeightNormInterface0 ForeachNorm0"
)) - _nodes("Where0 MaskedFill0")  # fmt: skip
SLICES = _nodes("Select0 Slice0")

# Whether these mix samples can be told. All other nodes below a reduction are taken for the model's.
UNDERSTOOD = frozenset({LEAF}) | ELEMENTWISE | LOSSES | ALONG_DIMENSIONS | OF_ALL_ELEMENTS | JOINTS

REDUCTION_MEAN, REDUCTION_SUM = 1, 2


NAMES: dict[type, str] = {}  # of the types of nodes that torch implements in C++: a few hundred


def is_sum_of_losses(root: Node) -> bool:
    """Whether a loss is the sum of what a loss of torch gave for each element, and of nothing else."""
    return name_of(root) == SUM_OF_ALL and name_of(root.next_functions[0][0]) in LOSSES


def name_of(node: Node) -> str:
    """The name of a node. That of a type is looked up once."""
    name = NAMES.get(type(node))
    if name is None:
        name = str(node.name())
        if python_function_of(type(node)) is None:
            NAMES[type(node)] = name
    return name


# ---------------------------------------------------------------------------------------------- what they have saved


class _PackedError(RuntimeError):
    """A saved tensor is packed. To read it would run hooks, or the forward of a checkpoint again."""


def reduction_of(node: Node) -> int:
    """The reduction of one of `LOSSES`: 0 for none."""
    reduction: int = node._saved_reduction
    return reduction


def total_weight_of(node: Node) -> Tensor:
    """What one of `WEIGHTED` divides by, on its device."""
    if node._raw_saved_total_weight.unpack_hook is not None:
        raise _PackedError
    weight: Tensor = node._saved_total_weight  # it has no graph
    return weight


def has_class_weights(node: Node) -> bool:
    """Whether one of `WEIGHTED` weighs classes."""
    return node._raw_saved_weight.unpack_hook is not None or node._saved_weight is not None


def sizes_of_predictions(node: Node) -> tuple[int, ...]:
    """The sizes of the predictions of one of `LOSSES`."""
    if node._raw_saved_self.unpack_hook is not None:
        raise _PackedError
    sizes: tuple[int, ...] = node._saved_self.shape
    return sizes


def target_of(node: Node) -> Tensor | None:
    """The target of one of `LOSSES`; None if it cannot be read."""
    try:
        packed = node._raw_saved_target.unpack_hook is not None
        return None if packed else node._saved_target
    except (AttributeError, RuntimeError):
        return None


def sizes_of_plain_mean(root: Node) -> tuple[int, ...] | None:
    """The sizes of what one of `BY_ELEMENT` right above the model is a mean over; None for all other losses."""
    if NAMES.get(type(root)) not in BY_ELEMENT:
        return None
    for node, _ in root.next_functions:
        if node is not None and NAMES.get(type(node), LEAF) in UNDERSTOOD:
            return None
    try:
        if root._saved_reduction != REDUCTION_MEAN or root._raw_saved_self.unpack_hook is not None:
            return None
        sizes: tuple[int, ...] = root._saved_self.shape
    except RuntimeError:
        return None
    return sizes or None


def sizes_before(node: Node) -> tuple[int, ...]:
    """The sizes of what one of `MEANS`, `SUMS` or `SELECT` was made from."""
    sizes: tuple[int, ...] = node._saved_self_sym_sizes
    return sizes


def sizes_after(node: Node, number: int) -> tuple[int, ...]:
    """The sizes of an output of any node."""
    return tuple(node._input_metadata[number].shape)


def place_of(node: Node) -> tuple[int, ...]:
    """Where one of `SLICES` begins and ends."""
    if name_of(node) == SELECT:
        return node._saved_dim, node._saved_index
    return node._saved_dim, node._saved_start, node._saved_end, node._saved_step


def dimensions_of(node: Node) -> frozenset[int]:
    """The dimensions of one of `ALONG_DIMENSIONS`, counted from the front."""
    source, number = node.next_functions[0]
    return _counted_from_front(node._saved_dim, len(sizes_after(source, number)))


def is_along_samples(node: Node) -> bool:
    """Whether one of `ALONG_DIMENSIONS` goes along the first dimension, unless it is that of stacked tensors."""
    saved = node._saved_dim
    if type(saved) is int and 0 < saved < 2**63:
        return False
    dimensions = dimensions_of(node)
    source, number = node.next_functions[0]
    if dimensions == {0} and source.name() == STACK:
        return _counted_from_front(source._saved_dim, len(sizes_after(source, number))) != {0}
    return 0 in dimensions


def _counted_from_front(saved: Any, rank: int) -> frozenset[int]:
    if saved is None or saved == () or not rank:
        return frozenset(range(rank))
    # Negative ones may be saved as unsigned numbers of 64 bits.
    dimensions = saved if isinstance(saved, tuple) else (saved,)
    return frozenset(one if 0 <= one < rank else (one + rank) % 2**64 for one in dimensions)


def number_of(node: Node) -> float:
    """The number of a `PRODUCT_WITH_NUMBER` or a `QUOTIENT_BY_NUMBER`."""
    return float(node._saved_other)


def second_of(node: Node) -> Tensor:
    """The second operand of a product or a quotient, without its graph."""
    if node._raw_saved_other.unpack_hook is not None:
        raise _PackedError
    second: Tensor = node._saved_other
    return second.detach() if second.requires_grad else second  # of a number, a dispatch mode could make no view


def one_saved_as_second(node: Node, tensors: tuple[Tensor, ...]) -> Tensor | None:
    """Which of these tensors is itself the second operand of a product or a quotient."""
    if not tensors or node._raw_saved_other.unpack_hook is not None:
        return None
    second = node._saved_other
    return next((one for one in tensors if one is second), None)


def first_of(node: Node) -> Tensor:
    """The first operand of a product, without its graph."""
    if node._raw_saved_self.unpack_hook is not None:
        raise _PackedError
    first: Tensor = node._saved_self
    return first.detach()


def alpha_of(node: Node) -> float:
    """What an addition or a subtraction multiplies its second operand by."""
    return float(node._saved_alpha)


def is_parameter(node: Node) -> bool:
    """Whether a `LEAF` is a parameter, not an input that requires a gradient."""
    return isinstance(node.variable, nn.Parameter)


def is_sink(node: Node) -> bool:
    """Whether it is the function through which DistributedDataParallel passes the outputs of a model."""
    return str(getattr(python_function_of(type(node)), "__module__", "")).startswith("torch.nn.parallel.")


def nodes_added_up(loss: Tensor) -> list[Node]:
    """The nodes of the terms that a loss adds up, in the order of the expression; factors above them are left out."""
    found: list[Node] = []
    pending: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
    while pending:
        node = pending.pop()
        sources = [source for source, _ in node.next_functions if source is not None]
        name = name_of(node)
        if name in ADDITIONS | SUBTRACTIONS and sources:
            pending += reversed(sources)
        elif len(sources) == 1 and name in COPIES_OF_ONE | PRODUCTS | QUOTIENTS | {NEGATION, REVERSED_SUBTRACTION}:
            pending += sources
        elif node not in found:
            found.append(node)
    return found
