"""What torch keeps private: for each name of the contract, that it is there, and that it does what is relied on.

A probe says with `@probes` which names it looks at; a test makes sure that none is left out. Those that need several
ranks are scenarios, of which every rank must come to its end.
"""

import importlib
import itertools
import math
import operator
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel.ddp  # loads the modules that the contract names
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import macrobatch._torch.contract as contract
from harness.ranks import Outcome, all_well, run
from macrobatch import Accumulator
from macrobatch._torch import (
    autograd,
    cuda,
    ddp,
    distributed,
    draws,
    fsdp1,
    fsdp2,
    loss_nodes,
    modules,
    optimizers,
    tensors,
    watching,
)
from macrobatch._torch.autograd import run_backward
from macrobatch._torch.contract import CONTRACT, PrivateName, is_there, warn_about_unknown_torch

PROBED: list[str] = []
SCENARIOS: dict[str, Callable[[], Outcome]] = {}


def probes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Says which names a test looks at: class and name, or the name of a module's function."""
    PROBED.extend(names)
    return lambda probe: probe


def on_two_ranks(scenario: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[scenario.__name__] = lambda: scenario() or {}
    return scenario


def short(private: PrivateName) -> str:
    """As in `@probes`."""
    *_, owner, name = private.path.split(".")
    return f"{owner}.{name}" if owner[:1].isupper() or owner.startswith("_FSDP") else name


def test_every_name_is_probed():
    assert sorted(map(short, CONTRACT)) == sorted(PROBED)


loads_dynamo = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # by torch itself


@loads_dynamo
@pytest.mark.parametrize("private", CONTRACT, ids=operator.attrgetter("path"))
def test_versions_of_torch_that_have_it(private):
    torch.compile(nn.Identity())  # loads it
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert is_there(private) is ((private.since or version) <= version)


# ------------------------------------------------------------------------------------------------ a newer torch


@pytest.fixture
def newer_torch(monkeypatch):
    """This torch, with all that it has."""
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(contract, "CONTRACT", tuple(filter(is_there, CONTRACT)))
    monkeypatch.setattr(contract, "_reported", set())


@pytest.mark.usefixtures("newer_torch")
def test_a_newer_torch_that_keeps_the_contract_works_without_a_warning():
    warn_about_unknown_torch()


@pytest.mark.usefixtures("newer_torch")
@pytest.mark.parametrize(
    "path", ["torch._gone", "torch.Tensor._gone", "torch.nn.Gone._name", "torch.distributed._gone.Gone._name"]
)
def test_a_newer_torch_without_a_name_warns_once(monkeypatch, path):
    gone = PrivateName(path=path, without="all goes slower")
    monkeypatch.setattr(contract, "CONTRACT", (*contract.CONTRACT, gone))
    with pytest.warns(UserWarning, match=rf"torch 2\.99\.0 is newer .* {path} \(without it: all goes slower\)"):
        warn_about_unknown_torch()
    warn_about_unknown_torch()


@pytest.mark.usefixtures("newer_torch")
def test_who_makes_an_accumulator_is_warned(monkeypatch):
    gone = PrivateName(path="torch._gone_too", without="all goes slower")
    monkeypatch.setattr(contract, "CONTRACT", (*contract.CONTRACT, gone))
    model = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="_gone_too"):
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_nothing_is_looked_for_on_a_torch_that_was_tested(monkeypatch):
    monkeypatch.setattr(contract, "missing_names", lambda: pytest.fail("this takes milliseconds"))
    warn_about_unknown_torch()


def test_a_module_that_nobody_has_loaded_is_not_loaded_for_the_question(monkeypatch, tmp_path):
    (tmp_path / "a_package").mkdir()
    for name in ("__init__.py", "unloaded.py"):
        (tmp_path / "a_package" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("a_package")
    assert is_there(PrivateName(path="a_package.unloaded.Some._name", without="")) is None
    assert is_there(PrivateName(path="a_package.gone.Some._name", without="")) is False
    assert "a_package.unloaded" not in sys.modules


# ------------------------------------------------------------------------------------------------------ tensors


@probes("Tensor._version")
def test_every_write_counts():
    x = torch.ones(2)
    versions = [tensors.version_of(x)]
    for write in (lambda: x.mul_(2), lambda: tensors.multiply_all([x], 2.0), lambda: x[:1].zero_()):
        write()
        versions.append(tensors.version_of(x))
    assert versions == sorted(set(versions))
    _ = x + x
    assert tensors.version_of(x) == versions[-1]


@probes("_foreach_mul_", "_foreach_copy_", "_foreach_zero_", "_foreach_norm")
def test_arithmetic_on_many_is_that_on_each():
    some = [torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)]
    before = [x.clone() for x in some]
    norms = tensors.norms_of_all(some, math.inf)
    assert [n.item() for n in norms] == [x.abs().max().item() for x in before]
    tensors.multiply_all(some, torch.tensor(3.0, dtype=torch.float64))
    assert all(torch.equal(x, 3 * old) for x, old in zip(some, before, strict=True))
    tensors.copy_all(some, before)
    assert all(torch.equal(x, old) for x, old in zip(some, before, strict=True))
    tensors.zero_all(some)
    assert not any(x.any() for x in some)


@probes("flatten_dense_tensors")
def test_many_tensors_become_one_vector():
    some = [torch.randn(3, 2).T, torch.randn(()), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    assert torch.equal(tensors.flat(some), torch.cat([x.reshape(-1) for x in some]))


@probes("_amp_foreach_non_finite_check_and_unscale_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unscaling_keeps_the_digits_of_its_factor_and_sees_infinity(dtype):
    x, found, factor = torch.tensor([257.0], dtype=dtype), torch.zeros(()), torch.tensor(1 / 257)
    expected = (x.float() * factor).to(dtype)
    tensors.unscale_all([x], found, factor)
    assert torch.equal(x, expected)
    assert not found
    tensors.unscale_all([torch.tensor([math.inf], dtype=dtype)], found, factor)
    assert found


@probes("DisableTorchFunction", "_is_torch_function_mode_enabled")
def test_unobserved_functions_pass_by_modes():
    class Watching(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    x = torch.ones(())
    assert not tensors.is_observed()
    with Watching() as watching:
        assert tensors.is_observed()
        with tensors.unobserved():
            x.data_ptr()
        assert watching.seen == 0
        x.data_ptr()
        assert watching.seen == 1


@probes("Tensor._post_accumulate_grad_hooks", "Tensor._backward_hooks")
def test_hooks_of_tensors_run_in_the_order_of_their_dictionary():
    x, ran = nn.Parameter(torch.ones(())), []
    assert not tensors.hooks_after_accumulation(x)
    assert not tensors.hooks_on_gradient(x)
    first = x.register_post_accumulate_grad_hook(lambda _: ran.append("first"))
    x.register_post_accumulate_grad_hook(lambda _: ran.append("second"))
    hooks = tensors.hooks_after_accumulation(x)
    hooks[first.id] = hooks.pop(first.id)  # to the end
    doubles = x.register_hook(lambda gradient: 2 * gradient)
    assert list(tensors.hooks_on_gradient(x)) == [doubles.id]
    x.backward()
    assert ran == ["second", "first"]
    assert x.grad == 2


# ------------------------------------------------------------------------------------------------------ modules


@probes("Module._parameters", "Module._buffers", "Module._modules")
def test_a_module_uses_what_its_dictionaries_hold():
    outer = nn.Sequential(nn.BatchNorm1d(2, affine=True))
    inner = modules.children_of(outer)["0"]
    assert inner is outer[0]
    modules.parameters_of(inner)["weight"] = nn.Parameter(torch.full((2,), 5.0))
    modules.buffers_of(inner)["running_mean"] = torch.full((2,), 7.0)
    assert outer.eval()(torch.full((1, 2), 8.0)).detach().round().tolist() == [[5.0, 5.0]]


@probes("Module._forward_hooks", "Module._forward_pre_hooks", "Module._backward_hooks", "Module._backward_pre_hooks")
def test_hooks_of_modules_are_seen():
    forward = ("register_forward_hook", "register_forward_pre_hook")
    backward = ("register_full_backward_hook", "register_full_backward_pre_hook")
    for name in (*forward, *backward):
        module = nn.Linear(1, 1)
        assert not modules.has_forward_hooks(module)
        assert not modules.has_backward_hooks(module)
        getattr(module, name)(lambda *_: None)
        assert modules.has_forward_hooks(module) == (name in forward)
        assert modules.has_backward_hooks(module) == (name in backward)


@probes("_BatchNorm")
def test_every_batch_norm_is_one():
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d)
    assert all(issubclass(kind, modules.BatchNorm) for kind in kinds)
    assert not issubclass(nn.LayerNorm, modules.BatchNorm)


class Misleading(nn.Module):
    """A module of a user's own whose children are called as those of torch's wrappers are."""

    def __init__(self) -> None:
        super().__init__()
        for name in modules.CHILD_OF.values():
            self.add_module(name, nn.Linear(1, 1))


@probes("Module._compiled_call_impl", "OptimizedModule._orig_mod", "ActivationWrapper._checkpoint_wrapped_module")
@loads_dynamo
def test_wrappers_are_known_by_their_classes():
    plain = nn.Linear(1, 1)
    wrapped = torch.compile(checkpoint_wrapper(plain), backend="eager")
    layers = list(map(modules.wrapper_of, modules.layers_around(wrapped)))
    assert layers == ["OptimizedModule", "ActivationWrapper", None]
    assert modules.unwrapped(wrapped) is plain
    assert [modules.plain_name(wrapped, name) for name in wrapped.state_dict()] == ["weight", "bias"]
    assert [modules.plain_name(wrapped, name) for name, _ in wrapped.named_parameters()] == ["weight", "bias"]


@loads_dynamo
def test_wrappers_are_not_known_by_the_names_of_their_children():
    plain = Misleading()
    wrapped = torch.compile(plain, backend="eager")
    assert modules.unwrapped(wrapped) is plain
    assert modules.unwrapped(plain) is modules.without_compile(plain) is plain
    assert [modules.plain_name(wrapped, name) for name in wrapped.state_dict()] == list(plain.state_dict())
    assert modules.is_compiled(wrapped)
    assert not modules.is_compiled(plain)
    plain._orig_mod.compile(backend="eager")
    assert modules.has_compiled_call(plain._orig_mod)
    assert modules.is_compiled(plain)


# ------------------------------------------------------------------------------------------------------ autograd


@probes("AccumulateGrad")
def test_graphs_end_in_nodes_that_know_their_leaf():
    x = nn.Parameter(torch.ones(()))
    ((end, _),) = x.exp().grad_fn.next_functions
    assert type(end) is autograd.AccumulateGrad
    assert end.variable is x


@probes("_clip_grads_with_norm_")
def test_functions_of_torch_are_watched_and_put_back():
    """`clip_grad_norm_` and `Tensor.backward` go through the functions that `audit` replaces."""
    seen = []

    def around(name):
        def run(original, *args, **kwargs):
            seen.append(name)
            return original(*args, **kwargs)

        return run

    before = torch.autograd._engine_run_backward, nn.utils.clip_grad_value_
    names = ("backward", "clip", "clip_values", "scaler_step", "scheduler_step")
    with watching.watched(**{name: around(name) for name in names}):
        x = nn.Parameter(torch.ones(2))
        x.sum().backward()
        nn.utils.clip_grad_norm_([x], 0.1)
    assert seen == ["backward", "clip"]
    assert before == (torch.autograd._engine_run_backward, nn.utils.clip_grad_value_)


@probes("_engine_run_backward")
@pytest.mark.parametrize("has_engine", [True, False])
def test_a_backward_by_its_last_line_is_a_backward(monkeypatch, has_engine):
    if has_engine:
        assert autograd.engine_run_backward is not None
    else:
        monkeypatch.setattr("macrobatch._torch.autograd.engine_run_backward", None)
    x, y = (nn.Parameter(torch.tensor(value)) for value in (2.0, 3.0))
    for inputs, expected in ((None, (6.0, 4.0)), ([x], (12.0, 4.0))):
        run_backward(x * y, torch.tensor(2.0), inputs)
        assert (x.grad.item(), y.grad.item()) == expected


@probes("_engine_run_backward")
def test_backwards_of_a_program_are_seen_before_they_run():
    x, seen = torch.tensor(2.0, requires_grad=True), []

    def see(losses, seeds):
        seen.append((losses[0].grad_fn.name(), seeds[0].item(), x.grad))

    with autograd.watching_backwards(see):
        (x * x).backward()
        torch.autograd.backward([3 * x], [torch.tensor(5.0)])
        torch.autograd.grad(x * x, x)
        run_backward(x * x, torch.tensor(1.0))
    (x * x).backward()
    assert [(name, seed) for name, seed, _ in seen] == [("MulBackward0", 1.0), ("MulBackward0", 5.0)]
    assert [None if grad is None else grad.item() for *_, grad in seen] == [None, x.grad.item()]  # the same tensor


@probes("TorchDispatchMode")
def test_random_operations_are_seen_and_replaced():
    seen, ones = [], torch.ones(3)

    def draw(drawing):
        seen.append(drawing.name)
        return ones

    with draws.RandomOperations(draw):
        results = [torch.rand(3), torch.empty(3).normal_(), F.dropout(ones, 0.5), torch.randn_like(ones) + 0 * ones]
        assert F.dropout(ones, 0.0) is ones
    assert seen == ["rand", "normal_", "bernoulli_", "randn_like"]
    assert [result.tolist() for result in results] == [[1.0] * 3, [1.0] * 3, [2.0] * 3, [1.0] * 3]


@probes("Variable._execution_engine", "_current_graph_task_id")
def test_callbacks_run_at_the_end_of_the_backward_that_is_under_way():
    x, y, ran = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True), []

    def hook(_: Tensor) -> None:
        assert autograd.backward_under_way() >= 0
        autograd.queue_callback(lambda: ran.append("first") or autograd.queue_callback(lambda: ran.append("last")))
        autograd.queue_callback(lambda: ran.append("second"))

    x.register_hook(hook)
    y.register_hook(lambda _: ran.append("y"))
    assert autograd.backward_under_way() == -1
    (x * y).backward()
    assert ran[-3:] == ["first", "second", "last"]
    assert "y" in ran[:-3]


@probes("BackwardCFunction._forward_cls")
def test_nodes_of_python_know_their_function():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    x = torch.ones((), requires_grad=True)
    assert autograd.python_function_of(type(Twice.apply(x).grad_fn)) is Twice
    assert autograd.python_function_of(type((2 * x).grad_fn)) is None


@probes("MulBackward0._saved_other")
def test_a_product_knows_its_factor():
    x, factor = torch.ones((), requires_grad=True), torch.tensor(3.0)
    assert autograd.factor_of(x * factor).data_ptr() == factor.data_ptr()
    assert autograd.factor_of(x + factor) is None
    assert autograd.factor_of(factor) is None


# What the nodes of losses have saved. tests/unit/test_loss_anatomy.py relies on all of it.

X = torch.ones(4, 3, requires_grad=True)
LABELS = torch.tensor([0, 2, 1, -100])


@probes("NllLossBackward0._saved_reduction", "MseLossBackward0._saved_reduction")
@pytest.mark.parametrize(
    "loss",
    [
        lambda **options: F.mse_loss(X, X.detach(), **options),
        lambda **options: F.huber_loss(X, X.detach(), **options),
        lambda **options: F.smooth_l1_loss(X, X.detach(), **options),
        lambda **options: F.binary_cross_entropy(X, X.detach(), **options),
        lambda **options: F.binary_cross_entropy_with_logits(X, X.detach(), **options),
        lambda **options: F.soft_margin_loss(X, X.detach(), **options),
        lambda **options: F.multilabel_margin_loss(X, torch.zeros(4, 3, dtype=torch.long), **options),
        lambda **options: F.multi_margin_loss(X, LABELS.clamp(min=0), **options),
        lambda **options: F.nll_loss(X, LABELS, **options),
        lambda **options: F.cross_entropy(X.view(1, 3, 2, 2), LABELS.view(1, 2, 2), **options),
    ],
)
def test_losses_know_their_reduction(loss):
    nodes = [loss(reduction=reduction).grad_fn for reduction in ("none", "mean", "sum")]
    assert {node.name() for node in nodes} <= loss_nodes.LOSSES
    assert [loss_nodes.reduction_of(node) for node in nodes] == [0, 1, 2]


@probes("NllLossBackward0._saved_total_weight", "NllLossBackward0._raw_saved_total_weight")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_knows_its_total_weight(reduction):
    weights = torch.tensor([1.0, 2.0, 4.0])
    for x, labels in ((X, LABELS), (X.view(2, 3, 2), LABELS.view(2, 2))):
        for weight, expected in ((None, 3.0), (weights, 7.0)):
            loss = F.cross_entropy(x, labels, weight=weight, reduction=reduction)
            total = loss_nodes.total_weight_of(loss.grad_fn)
            assert (total.item(), total.requires_grad) == (expected, False)


@probes("MseLossBackward0._saved_target", "MseLossBackward0._raw_saved_target")
def test_losses_know_their_target():
    wanted = torch.zeros(4, 3)
    for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
        assert loss_nodes.target_of(loss(X, wanted).grad_fn) is wanted
    assert loss_nodes.target_of(F.cross_entropy(X, LABELS).grad_fn) is LABELS
    assert loss_nodes.target_of(X.mean().grad_fn) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda _: pytest.fail("it was unpacked")):
        assert loss_nodes.target_of(F.mse_loss(X, wanted).grad_fn) is None


@probes("NllLossBackward0._saved_weight", "NllLossBackward0._raw_saved_weight")
def test_cross_entropy_knows_its_class_weights():
    for x, labels in ((X, LABELS), (X.view(2, 3, 2), LABELS.view(2, 2))):
        for weight in (None, torch.ones(3)):
            loss = F.cross_entropy(x, labels, weight=weight, reduction="sum")
            assert loss_nodes.has_class_weights(loss.grad_fn) is (weight is not None)


@probes("SavedTensor.unpack_hook", "MseLossBackward0._saved_self", "MseLossBackward0._raw_saved_self")
def test_what_hooks_have_packed_is_not_unpacked():
    loss = F.mse_loss(X, X.detach())
    assert loss_nodes.sizes_of_predictions(loss.grad_fn) == (4, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda _: pytest.fail("it was unpacked")):
        loss, number, tensor = F.mse_loss(X, X.detach()), X * 2, X * torch.ones(3)
    for accessor, node in ((loss_nodes.sizes_of_predictions, loss), (loss_nodes.second_of, tensor)):
        with pytest.raises(RuntimeError):
            accessor(node.grad_fn)
    assert loss_nodes.second_of(number.grad_fn) == 2, "hooks do not see Python's numbers"


@probes("MeanBackward1._saved_dim", "MeanBackward1._saved_self_sym_sizes", "MeanBackward1._input_metadata")
def test_reductions_know_sizes_and_dimensions():
    x = torch.ones(2, 3, 4, requires_grad=True)
    for saved, expected in (((0, 1), {0, 1}), (-1, {2}), ((-3, -2), {0, 1}), (1, {1})):
        node = x.mean(saved).grad_fn
        assert (loss_nodes.sizes_before(node), loss_nodes.dimensions_of(node)) == ((2, 3, 4), expected)
    assert loss_nodes.dimensions_of(x.mean(()).grad_fn) == {0, 1, 2}
    assert loss_nodes.sizes_before(x.sum().grad_fn) == loss_nodes.sizes_before(x.mean().grad_fn) == (2, 3, 4)
    assert loss_nodes.sizes_after(x.mean(0).grad_fn, 0) == (3, 4)
    assert loss_nodes.sizes_after(x.sum().grad_fn, 0) == ()
    forms = [torch.logsumexp, torch.softmax, torch.log_softmax, torch.var, torch.std, torch.amax, torch.cumsum]
    forms += [torch.sum, torch.nansum, torch.prod, torch.linalg.vector_norm]
    for form in forms:
        for dim, is_first in ((0, True), (-3, True), (1, False), (-1, False)):
            node = form(x, dim=dim).grad_fn
            assert node.name() in loss_nodes.ALONG_DIMENSIONS
            assert loss_nodes.is_along_samples(node) is is_first, (form, dim)


@probes(
    "SelectBackward0._saved_dim",
    "SelectBackward0._saved_index",
    "SliceBackward0._saved_dim",
    "SliceBackward0._saved_start",
    "SliceBackward0._saved_end",
    "SliceBackward0._saved_step",
)
def test_slices_have_saved_their_place():
    x = torch.ones(5, 4, requires_grad=True)
    node = x[:, 2].grad_fn
    assert (node._saved_dim, node._saved_index) == (1, 2)
    node = x[1:4:2].grad_fn
    assert (node._saved_dim, node._saved_start, node._saved_end, node._saved_step) == (0, 1, 4, 2)


@probes("StackBackward0._saved_dim")
def test_stacked_tensors_are_no_samples():
    x = torch.ones(2, 3, requires_grad=True)
    for dim, reduced, expected in ((0, 0, False), (-3, 0, False), (0, (0, 1), True), (1, 0, True), (2, 1, False)):
        assert loss_nodes.is_along_samples(torch.stack([x, x], dim).mean(reduced).grad_fn) is expected


@probes("MulBackward0._raw_saved_other", "MulBackward0._saved_self", "MulBackward0._raw_saved_self")
@probes("AddBackward0._saved_alpha")
def test_constants_are_saved():
    x, constant = torch.ones((), requires_grad=True), torch.tensor(3.0)
    assert loss_nodes.first_of((constant * x).grad_fn) == loss_nodes.second_of((x * constant).grad_fn) == 3
    assert loss_nodes.second_of((x / 4).grad_fn) == 4
    assert (x * 3).grad_fn.name() == (3 * x).grad_fn.name() == loss_nodes.PRODUCT
    assert (x / 3).grad_fn.name() == loss_nodes.QUOTIENT
    assert loss_nodes.number_of(torch.ops.aten.mul.Scalar(x, 5).grad_fn) == 5
    assert loss_nodes.number_of(torch.ops.aten.div.Scalar(x, 5).grad_fn) == 5
    assert loss_nodes.alpha_of(torch.add(x, x, alpha=2).grad_fn) == loss_nodes.alpha_of(
        torch.sub(x, x, alpha=2).grad_fn
    ) == loss_nodes.alpha_of(torch.rsub(x, 1, alpha=2).grad_fn) == 2  # fmt: skip


def test_the_nodes_of_losses_exist():
    existing = set(dir(torch._C._functions))
    known = [value for value in vars(loss_nodes).values() if isinstance(value, frozenset)]
    assert frozenset().union(*known) - existing == {loss_nodes.LEAF}, "the class of leaves has another name"


@probes("get_interpreter_stack", "TransformType")
def test_vmap_is_noticed_and_other_transforms_are_not():
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(autograd.is_mapped())
        return x.sum()

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.grad(lambda x: torch.func.vmap(look)(x).sum())(torch.ones(2, 2))
    assert seen == [False, True, False, True]


# ---------------------------------------------------------------------------------------------------- optimizers


def an_optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(()))
    parameter.grad = torch.ones(())
    return torch.optim.SGD([parameter], lr=1.0)


@probes("Optimizer._optimizer_step_pre_hooks", "Optimizer._optimizer_step_post_hooks")
def test_hooks_of_one_optimizer_are_seen():
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = an_optimizer()
        assert not optimizers.has_hooks(optimizer)
        getattr(optimizer, register)(lambda *_: None)
        assert optimizers.has_hooks(optimizer)


@probes("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
def test_hooks_of_all_optimizers_are_seen():
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        try:
            assert optimizers.has_hooks(an_optimizer())
        finally:
            handle.remove()
        assert not optimizers.has_hooks(an_optimizer())


@probes("GradScaler._scale", "GradScaler._per_optimizer_states")
def test_a_scaler_believes_what_is_noted_in_it():
    optimizer, scaler = an_optimizer(), torch.amp.GradScaler("cpu", init_scale=8.0)
    assert optimizers.scale_of(scaler) is None
    loss = scaler.scale(torch.ones((), requires_grad=True))
    assert autograd.factor_of(loss).data_ptr() == optimizers.scale_of(scaler).data_ptr()
    assert not optimizers.has_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert optimizers.has_unscaled(scaler, optimizer)
    optimizers.forget_unscaling(scaler, optimizer)
    assert not optimizers.has_unscaled(scaler, optimizer)
    optimizers.note_overflow(scaler, optimizer, torch.ones(()))
    scaler.update()
    assert optimizers.scale_of(scaler) == 4.0
    optimizers.note_overflow(scaler, optimizer, torch.zeros(()))
    scaler.update()
    assert optimizers.scale_of(scaler) == 4.0


# ---------------------------------------------------------------------------------------------------------- CUDA


@probes("_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
@pytest.mark.gpu
def test_all_threads_allocate_from_a_pool_while_it_is_claimed():
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()

    class Allocates(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # on another thread
            made.append(torch.empty(2**22, device="cuda"))
            return gradient

    made, x = [], torch.ones((), device="cuda", requires_grad=True)
    Allocates.apply(x).backward()
    cuda.begin_allocating(device, pool)
    Allocates.apply(x).backward()
    cuda.end_allocating(device, pool)
    Allocates.apply(x).backward()
    of_pool = [s["address"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    assert [tensor.data_ptr() in of_pool for tensor in made] == [False, True, False]
    cuda.release_pool(device, pool)
    with pytest.raises(RuntimeError):
        cuda.end_allocating(device, torch.cuda.graph_pool_handle())  # nobody had begun


# ------------------------------------------------------------------------------------------------ scenarios: groups


@probes("ProcessGroup._get_backend")
@on_two_ranks
def groups_know_whether_tensors_on_the_host_can_travel() -> None:
    assert distributed.has_cpu_backend(dist.group.WORLD)
    assert not distributed.has_cpu_backend(dist.new_group(backend="cuda:gloo"))


@probes("DeviceMesh._flatten")
@on_two_ranks
def meshes_are_flattened() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("flattened-a", "flattened-b"))
    flat = distributed.flattened(mesh)
    assert flat.ndim == 1
    assert dist.get_process_group_ranks(flat.get_group()) == [0, 1]
    assert distributed.flattened(flat) is flat


@probes("_get_default_store", "_abort_process_group")
@on_two_ranks
def ranks_that_wait_learn_of_one_that_aborts() -> None:
    if dist.get_rank() == 0:
        distributed.default_store().set("why", "because")
        distributed.abort_process_groups()
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    assert time.monotonic() - began < 5, "it has waited for its time-out"
    assert distributed.default_store().get("why") == b"because"


# --------------------------------------------------------------------------------------------------- scenarios: DDP


class Counted(nn.Module):
    """Two parameters, one of them frozen, and a buffer that differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("rank", torch.tensor(float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.frozen * x).sum()


@probes("DistributedDataParallel._module_parameters", "Reducer._get_zeros_like_grad_buckets")
@on_two_ranks
def ddp_knows_what_it_reduces() -> None:
    plain = Counted()
    model = DistributedDataParallel(plain)
    assert list(ddp.parameters_in_care(model)) == [plain.weight, plain.frozen]
    plain.frozen.requires_grad_(True)
    assert ddp.reduced_parameters([model]) == {id(plain.weight)}
    assert ddp.ignored_parameters([model]) == {}
    assert modules.unwrapped(model) is plain
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["frozen"])
    assert ddp.ignored_parameters([DistributedDataParallel(plain)]) == {"frozen": plain.frozen}


@probes("DistributedDataParallel._sync_buffers", "Reducer._rebuild_buckets")
@on_two_ranks
def ddp_does_beforehand_what_a_forward_does_with_other_ranks() -> None:
    plain = Counted()
    model = DistributedDataParallel(plain)
    x = torch.full((2,), 1.0 + dist.get_rank())
    model(x).backward()  # synchronised: the buckets are laid out after it
    plain.rank.fill_(dist.get_rank())
    plain.weight.grad = None
    ddp.prepare_forward(model)
    assert plain.rank == 0, "the buffer of the first rank"
    plain.rank.fill_(dist.get_rank())
    if dist.get_rank() == 0:  # so this rank alone may do a forward
        with model.no_sync():
            model(x)
    assert plain.rank == dist.get_rank(), "no forward has sent it again"
    model.require_forward_param_sync = True
    model(x).backward()
    assert plain.weight.grad.tolist() == [1.5, 1.5]


@probes("DistributedDataParallel._join_config")
@on_two_ranks
def ddp_knows_that_it_joins() -> None:
    model = DistributedDataParallel(Counted())
    assert not ddp.is_joining(model)
    with model.join():
        assert ddp.is_joining(model)
        model(torch.ones(2)).backward()


@probes("DistributedDataParallel._static_graph_delay_allreduce_enqueued")
@on_two_ranks
def ddp_knows_whether_it_has_seen_a_static_graph() -> None:
    model = DistributedDataParallel(Counted(), static_graph=True)
    assert not ddp.knows_static_graph(model)
    model(torch.ones(2)).backward()
    assert ddp.knows_static_graph(model)


@probes("DistributedDataParallel._comm_hooks", "DistributedDataParallel._get_ddp_logging_data")
@on_two_ranks
def ddp_tells_its_communication_hooks() -> None:
    def model_with(register: Callable[[Any], object]) -> Any:
        model = DistributedDataParallel(Counted())
        register(model)
        return model

    for register, expected in (
        (lambda model: None, False),
        (lambda model: model._comm_hooks.append((bf16_compress_hook, None)), False),  # no CPU lets it be registered
        (lambda model: model.register_comm_hook(None, fp16_compress_hook), True),
        (lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS), True),
        (lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE), False),
    ):
        model = model_with(register)
        model(torch.ones(2)).backward()
        assert ddp.may_compress_to_half(model) == expected


@probes("_st_info")
@on_two_ranks
def ddp_hides_the_layout_of_dtensors() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("hidden-data", "hidden-tensor"))
    plain = parallelize_module(nn.Linear(2, 2), mesh["hidden-tensor"], ColwiseParallel())
    placements = plain.weight.placements
    DistributedDataParallel(plain, device_mesh=mesh["hidden-data"])
    assert not isinstance(plain.weight, DTensor)
    layout = tensors.layout_before_ddp(plain.weight)
    assert layout.placements == placements
    assert layout.mesh.size() == 2
    assert tensors.layout_before_ddp(torch.ones(1)) is None


# ------------------------------------------------------------------------------------------------- scenarios: FSDP1


def fsdp1_model(**options: Any) -> Any:
    options = {"use_orig_params": True, "device_id": torch.device("cpu")} | options
    return FullyShardedDataParallel(nn.Linear(2, 2, bias=False), **options)


@probes(
    "FullyShardedDataParallel._fsdp_wrapped_module",
    "_FSDPState._handle",
    "_FSDPState._gradient_predivide_factor",
    "_FSDPState._gradient_postdivide_factor",
    "FlatParameter._saved_grad_shard",
)
@on_two_ranks
def fsdp1_drops_what_it_holds() -> None:
    torch.manual_seed(0)
    model, x = fsdp1_model(), torch.full((1, 2), 1.0 + dist.get_rank())
    assert type(modules.unwrapped(model)) is nn.Linear
    assert fsdp1.divisor_of(model) == 2
    (flat,) = fsdp1.flat_parameters([model])
    assert not any(gradient is not None for gradient in fsdp1.held_gradients([model]))

    def window() -> list[float]:
        model(x).sum().backward()
        return flat.grad.tolist()

    expected = window()
    with model.no_sync():  # beside a shard that was reduced, whole gradients
        model(x).sum().backward()
    assert [gradient is not None for gradient in fsdp1.held_gradients([model])] == [True, True]
    model.zero_grad()
    assert any(gradient is not None for gradient in fsdp1.held_gradients([model]))
    fsdp1.drop_held_gradients([model])
    assert not any(gradient is not None for gradient in fsdp1.held_gradients([model]))
    assert window() == expected


@probes(
    "FlatParameter._local_shard",
    "FlatParameter._params",
    "FlatParameter._param_infos",
    "FlatParameter._shard_param_infos",
)
@on_two_ranks
def fsdp1_shows_what_it_keeps_of_parameters() -> None:
    for options in ({}, {"use_orig_params": False}):
        torch.manual_seed(0)
        model, sums = fsdp1_model(**options), []
        for _ in range(2):  # before the first forward, and after it
            with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
                model.module.weight.add_(1)
            stored = fsdp1.stored_parameters([model])
            assert {one.name for one in stored} <= {"weight", "bias"}
            sums.append(sum((one.values.sum() for one in stored if one.name == "weight"), torch.zeros(())))
            model(torch.ones(1, 2)).sum().backward()
        added = sums[1] - sums[0]
        dist.all_reduce(added)
        assert added == 4, added


@probes("FlatParamHandle._fwd_bwd_param_dtype", "FlatParamHandle._reduce_dtype", "_FSDPState._comm_hook")
@on_two_ranks
def fsdp1_tells_its_precision() -> None:
    half = torch.float16
    for options, expected in (
        ({}, False),
        ({"mixed_precision": MixedPrecision(param_dtype=half, reduce_dtype=torch.float32)}, True),
        ({"mixed_precision": MixedPrecision(reduce_dtype=half)}, True),
        ({"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}, False),
    ):
        assert fsdp1.may_use_float16([fsdp1_model(**options)]) == expected
    hooked = fsdp1_model(sharding_strategy=torch.distributed.fsdp.ShardingStrategy.NO_SHARD)
    hooked.register_comm_hook(None, lambda state, gradient: None)
    assert fsdp1.may_use_float16([hooked])


@probes("FlatParameter._param_extensions")
@on_two_ranks
def fsdp1_knows_that_it_has_flattened_dtensors() -> None:
    assert not fsdp1.flattens_dtensors(fsdp1_model())
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("flat-data", "flat-tensor"))
    plain = parallelize_module(nn.Linear(2, 2), mesh["flat-tensor"], ColwiseParallel())
    model = FullyShardedDataParallel(plain, device_mesh=mesh["flat-data"], use_orig_params=True, device_id="cpu")
    assert fsdp1.flattens_dtensors(model)


# ------------------------------------------------------------------------------------------------- scenarios: FSDP2


def fsdp2_model(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def own_input() -> Tensor:
    return torch.full((1, 2), 1.0 + dist.get_rank(), dtype=torch.float64)


def whole_gradient(times: int = 1) -> list[Tensor]:
    """Of the mean over both ranks, in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    for rank in (0, 1):
        (times * model(torch.full((1, 2), 1.0 + rank, dtype=torch.float64)).square().sum() / 2).backward()
    return [parameter.grad for parameter in model.parameters()]


def hold(model: Any) -> None:
    """A backward whose gradients stay where they are."""
    model.set_requires_gradient_sync(False)
    model(own_input()).square().sum().backward()
    model.set_requires_gradient_sync(True)


def is_held(model: Any) -> bool:
    return any(gradient is not None for gradient in fsdp2.held_gradients(fsdp2.Topology([model])))


def require_gradients(model: Any, expected: list[Tensor], tolerance: float = 1e-12) -> None:
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@probes(
    "FSDPModule._get_fsdp_state",
    "FSDPState._fsdp_param_groups",
    "FSDPState._fsdp_param_group",
    "FSDPState._is_root",
    "FSDPParamGroup.fsdp_params",
    "FSDPParam._unsharded_param",
    "FSDPParam.unsharded_accumulated_grad",
)
@on_two_ranks
def fsdp2_drops_what_it_holds() -> None:
    wider = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for policy, tolerance in ((MixedPrecisionPolicy(), 1e-12), (wider, 1e-6)):
        model = fsdp2_model(mp_policy=policy)
        hold(model)
        model.zero_grad()
        assert is_held(model), "what zero_grad() reaches needs no private name"
        fsdp2.drop_held_gradients(fsdp2.Topology([model]))
        assert not is_held(model)
        model(own_input()).square().sum().backward()
        require_gradients(model, whole_gradient(), tolerance)


@probes("FSDPState._root_post_backward_final_callback", "FSDPState._modules", "FSDPStateContext.all_states")
@on_two_ranks
def fsdp2_reduces_what_it_holds() -> None:
    model = fsdp2_model()
    hold(model)
    hold(model)
    assert is_held(model)
    topology = fsdp2.Topology([model, model])
    topology.initialize()
    fsdp2.reduce_held_gradients(topology)
    assert not is_held(model)
    require_gradients(model, whole_gradient(2))
    model.zero_grad()
    model(own_input()).square().sum().backward()  # torch ends this backward itself, as before
    require_gradients(model, whole_gradient())


class Either(nn.Module):
    """Two layers of one shape, of which each rank uses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[dist.get_rank()](x)


@probes("FSDPParamGroup.reduce_scatter_unused_params", "FSDPParamGroup.post_backward")
@on_two_ranks
def fsdp2_reduces_what_a_rank_has_not_used() -> None:
    expected = [torch.full((2, 2), (1.0 + rank) / 2, dtype=torch.float64) for rank in (0, 1)]
    wider = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    for policy, is_held_first in ((MixedPrecisionPolicy(), False), (MixedPrecisionPolicy(), True), (wider, True)):
        model = fully_shard(Either().double(), mp_policy=policy)
        if is_held_first:
            model.set_requires_gradient_sync(False)
            model(own_input()).sum().backward()
            model.set_requires_gradient_sync(True)
        with fsdp2.reducing_unused([model]):
            fsdp2.fill_unused(fsdp2.Topology([model]))
            model(own_input()).sum().backward()
        found = [parameter.grad.full_tensor() for parameter in model.parameters()]
        torch.testing.assert_close(found, [each * (1 + is_held_first) for each in expected])
        model.zero_grad()
        assert not any(getattr(group, fsdp2._REDUCES_UNUSED) for group in fsdp2.Topology([model]).groups)


@probes("FSDPParamGroup._partial_reduce_output", "FSDPParamGroup.mesh_info")
@on_two_ranks
def fsdp2_drops_what_only_its_shards_have_added_up() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("partial-replicate", "partial-shard"))
    model = fsdp2_model(mesh=mesh)
    assert fsdp2.has_replicas(fsdp2.Topology([model]))
    assert not fsdp2.has_replicas(fsdp2.Topology([fsdp2_model()]))
    assert fsdp2.mesh_of(model).size() == 2
    model.set_requires_all_reduce(False)
    model(own_input()).square().sum().backward()
    model.set_requires_all_reduce(True)
    assert is_held(model)
    fsdp2.drop_held_gradients(fsdp2.Topology([model]))
    assert not is_held(model)
    model(own_input()).square().sum().backward()
    require_gradients(model, whole_gradient())


@probes("FSDPParam.sharded_param", "FSDPState._lazy_init", "FSDPState._state_ctx")
@on_two_ranks
def fsdp2_knows_its_parameters() -> None:
    model = fsdp2_model()
    topology = fsdp2.Topology([model])
    topology.initialize()
    assert not any(leaf is not None for leaf in fsdp2.leaves_of(topology))
    assert fsdp2.trained_shards(topology).keys() == {id(p) for p in model.parameters()}
    assert not topology.strangers
    hold(model)
    gathered = [leaf for leaf in fsdp2.leaves_of(topology) if leaf is not None]
    assert len(gathered) == 4
    hooks = [leaf.register_hook(torch.zeros_like) for leaf in gathered]  # a backward that adds nothing
    model(own_input()).square().sum().backward()
    for hook in hooks:
        hook.remove()
    require_gradients(model, whole_gradient())
    assert all(shard.grad is not None for shard in fsdp2.trained_shards(topology).values())
    for module in topology.modules:
        module.unshard()
    assert {id(p) for p in model.parameters()} == set(map(id, gathered))
    assert fsdp2.Topology([model]).has_parts_of(topology)
    assert not fsdp2.Topology([model]).strangers


@on_two_ranks
def fsdp2_notices_changes() -> None:
    """A topology differs if any of its parts is another one than before."""
    model = fsdp2_model()
    topologies = [fsdp2.Topology([model])]
    model[1] = nn.Linear(2, 2).double()
    unsharded = fsdp2.Topology([model])
    assert unsharded.has_parts_of(topologies[0])
    assert unsharded.strangers == list(model[1].parameters())
    fully_shard(model[1])
    for _ in range(2):
        topologies.append(fsdp2.Topology([model]))
        assert not topologies[-1].strangers
        assert topologies[-1].modules == [model, model[0], model[1]]
        assert [p.sharded_param for p in topologies[-1].parameters[-2:]] == list(model[1].parameters())
        model[1] = fully_shard(nn.Linear(2, 2).double())
    del model[1]
    topologies.append(fsdp2.Topology([model]))
    assert topologies[-1].modules == [model, model[0]]
    for first, second in itertools.pairwise(topologies):
        assert not first.has_parts_of(second)


def parameters_sharded_over_fewer_ranks() -> Outcome:
    """After a forward, modules show parameters of a third kind."""
    model = fsdp2_model(reshard_after_forward=2)
    with torch.no_grad():
        model(own_input())
    topology = fsdp2.Topology([model])
    gathered, shards = fsdp2.leaves_of(topology), fsdp2.trained_shards(topology)
    shown = {id(parameter) for parameter in model[0].parameters()} - shards.keys() - set(map(id, gathered))
    return {"shown": len(shown), "strangers": len(topology.strangers)}


ON_FOUR = {"fewer": parameters_sharded_over_fewer_ranks}


@probes("FSDPParam._sharded_post_forward_param")
def test_parameters_sharded_over_fewer_ranks_are_known(tmp_path):
    for outcome in all_well(run(__name__, "ON_FOUR", 4, tmp_path)["fewer"]):
        assert (outcome["shown"], outcome["strangers"]) == (2, 0)


@probes("FSDPParamGroup.gradient_divide_factor", "FSDPState._mp_policy")
@on_two_ranks
def fsdp2_tells_how_it_divides_and_in_which_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fsdp2_model(mp_policy=policy)
    assert fsdp2.divisors_of(fsdp2.Topology([model])) == {2}
    model.set_gradient_divide_factor(3.0)
    assert fsdp2.divisors_of(fsdp2.Topology([model])) == {2, 3.0}
    assert [(p.param_dtype, p.reduce_dtype) for p in fsdp2.precisions_of(fsdp2.Topology([model]))] == 2 * [
        (torch.bfloat16, torch.float32)
    ]


@probes(
    "FSDPParamGroup.reduce_grads",
    "FSDPParamGroup.all_reduce_grads",
    "FSDPParamGroup.reshard_after_backward",
    "FSDPParamGroup.post_forward_mesh_info",
    "FSDPState._auto_reshard_after_forward",
    "FSDPStateContext.is_last_backward",
    "FSDPStateContext.manual_backward_finalization",
)
@on_two_ranks
def fsdp2_gets_its_flags_back() -> None:
    for has_set in (False, True):
        model = fsdp2_model()
        topology = fsdp2.Topology([model])
        topology.initialize()
        if has_set:
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            model.set_is_last_backward(False)
            if hasattr(model, "set_manual_backward_finalization"):
                model.set_manual_backward_finalization(True)
        before = [vars(group).copy() for group in topology.groups]
        context = [vars(root._state_ctx).copy() for root in topology.states]
        auto = [state._auto_reshard_after_forward for state in topology.states]
        flags = fsdp2.Flags(topology)
        fsdp2.finish_every_backward(topology)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)
        model.set_reshard_after_forward(False)
        assert before != [vars(group) for group in topology.groups]
        model(own_input()).square().sum().backward()
        require_gradients(model, whole_gradient())
        flags.restore()
        for group, values in zip(topology.groups, before, strict=True):
            assert {name: vars(group).get(name) for name in fsdp2._GROUP_FLAGS} == {
                name: values.get(name) for name in fsdp2._GROUP_FLAGS
            }
        assert [state._auto_reshard_after_forward for state in topology.states] == auto
        for state, values in zip(topology.states, context, strict=True):
            for name in fsdp2._ROOT_FLAGS:
                assert vars(state._state_ctx).get(name) == values.get(name)


def set_both_reductions(topology: fsdp2.Topology, value: bool) -> None:
    fsdp2.set_reductions(topology, reduces=value, all_reduces=value)


def set_second_reduction(topology: fsdp2.Topology, value: bool) -> None:
    fsdp2.set_reductions(topology, reduces=True, all_reduces=value)


SETTERS: dict[str, tuple[Callable[[fsdp2.Topology, bool], None], tuple[bool, ...]]] = {
    "set_requires_gradient_sync": (set_both_reductions, (True, False)),
    "set_requires_all_reduce": (set_second_reduction, (True, False)),
    "set_reshard_after_backward": (fsdp2.set_reshard_after_backward, (True, False)),
    "set_reshard_after_forward": (lambda topology, _: fsdp2.keep_after_forward(topology), (False,)),
    "set_reduce_scatter_unused_params": (lambda topology, _: fsdp2.reduce_unused_too(topology), (True,)),
    "set_is_last_backward": (lambda topology, _: fsdp2.finish_every_backward(topology), (True,)),
    "set_manual_backward_finalization": (lambda topology, _: fsdp2.finish_every_backward(topology), (False,)),
}


@on_two_ranks
def fsdp2_flags_are_those_of_the_public_setters() -> None:
    """Each of our functions writes exactly what torch's public method writes, to all modules."""
    for name, (write, values) in SETTERS.items():
        for value in values if hasattr(FSDPModule, name) else ():
            written = []
            for is_public in (True, False):
                model = fsdp2_model()
                topology = fsdp2.Topology([model])
                topology.initialize()
                getattr(model, name)(not value)
                owners = [*topology.modules, *topology.states, *topology.contexts, *topology.groups]
                before = [vars(owner).copy() for owner in owners]
                getattr(model, name)(value) if is_public else write(topology, value)
                now = [vars(owner) for owner in owners]
                changed = [
                    {key for key in new if new[key] is not old.get(key)} for old, new in zip(before, now, strict=True)
                ]
                written.append([{key: new[key] for key in keys} for keys, new in zip(changed, now, strict=True)])
            assert written[0] == written[1]
            assert any(written[0]), "this setter has changed nothing that is known here"


@on_two_ranks
def windows_are_exact_whatever_a_program_has_set() -> None:
    for manual in (False, True):
        model = fsdp2_model()
        model.set_is_last_backward(False)
        if manual and hasattr(model, "set_manual_backward_finalization"):
            model.set_manual_backward_finalization(True)
        acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), steps=2, reduction="sum")
        before = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
        for _ in acc.batches(range(2)):
            acc.backward(model(own_input()).square().sum(), items=1)
            acc.step()
        moved = [old - now.full_tensor() for old, now in zip(before, model.parameters(), strict=True)]
        torch.testing.assert_close(moved, whole_gradient(), rtol=1e-12, atol=0)
        context = vars(model._get_fsdp_state()._state_ctx)
        assert not context["is_last_backward"]
        assert context.get("manual_backward_finalization", manual) == manual


# ---------------------------------------------------------------------------------------------------- and their ends


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[Outcome]]:
    return run(__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_two_ranks(outcomes, scenario):
    all_well(outcomes[scenario])
