"""What a recording depends on, and what cannot be one: as far as it shows without a GPU."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from macrobatch._cudagraph.eligibility import (
    NotRecordableError,
    gradient_leaves,
    is_compiled_around_ddp,
    model_state,
    owner_of_hook,
    reached_parameters,
    require_leaves,
    require_no_side_effects,
    signature,
    without_ddp,
)
from macrobatch._torch.modules import modules_of


def make() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), frozen, nn.Sequential(nn.Dropout(), nn.Linear(3, 1)))


# ------------------------------------------------------------------------------------------------ what it depends on


def test_modules_in_their_order():
    model = make()
    model.append(model[0])  # twice in it
    assert modules_of([model, model[3]]) == list(model.modules())
    model.register_module("none", None)
    assert modules_of([model]) == list(model.modules())


def replaces_a_frozen_weight(model):
    model[2].weight.data = model[2].weight.detach().clone()


def replaces_a_buffer(model):
    model[1].running_mean = torch.zeros(3)


def replaces_a_module(model):
    model[3][0] = nn.Dropout()


CHANGES = {
    "frozen weight": replaces_a_frozen_weight,
    "buffer": replaces_a_buffer,
    "module": replaces_a_module,
    "module twice": lambda model: (replaces_a_module(model), replaces_a_module(model)),
    "parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(3, 3))),
    "thaw": lambda model: model[2].requires_grad_(True),
    "mode": lambda model: model[3].eval(),
    "dtype": nn.Module.double,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    model = make()
    before = model_state(modules_of([model]))
    model[0].weight.data.add_(1)  # what training does
    assert model_state(modules_of([model])) == before
    CHANGES[change](model)
    assert model_state(modules_of([model])) != before


def test_settings_of_torch_are_seen():
    model = make()
    before = model_state(modules_of([model]))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert model_state(modules_of([model])) != before
    finally:
        torch.set_float32_matmul_precision(precision)
    assert model_state(modules_of([model])) == before


HOOKS = {
    "forward": lambda model: model[3][1].register_forward_hook(print),
    "forward pre": lambda model: model[0].register_forward_pre_hook(print),
    "backward": lambda model: model[0].register_full_backward_hook(print),
    "backward pre": lambda model: model[0].register_full_backward_pre_hook(print),
    "gradient": lambda model: model[0].weight.register_hook(print),
    "accumulated": lambda model: model[0].weight.register_post_accumulate_grad_hook(print),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_found(kind):
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert owner_of_hook(modules_of([model]), parameters) is None
    hook = HOOKS[kind](model)
    assert owner_of_hook(modules_of([model]), parameters) is not None
    hook.remove()
    assert owner_of_hook(modules_of([model]), parameters) is None


# ------------------------------------------------------------------------------------------------ what cannot be one


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": torch.ones(2)}, r"batch\['x'\] is a torch.strided tensor on cpu"),
        ({"x": torch.ones(2, requires_grad=True)}, "requires a gradient of its own"),
        ([object()], "of type object, whose value a recording would freeze"),
    ],
)
def test_batches_that_cannot_be_recorded(batch, why):
    with pytest.raises(NotRecordableError, match=why):
        signature(batch)


def test_values_make_another_shape():
    shapes = [signature({"a": value}) for value in (1, 1.0, True, "1", None, 2)]
    assert len(set(shapes)) == len(shapes)
    assert signature({"a": 1}) == signature({"a": 1})


def test_traces_count_where_they_are_left_every_time():
    require_no_side_effects([{"a", "b"}, set()])
    require_no_side_effects([{"a"}, {"b"}])
    with pytest.raises(NotRecordableError, match=r"a micro-step does that; it does this$"):
        require_no_side_effects([{"does that", "does this"}, {"does this", "does that", "once"}])


# ------------------------------------------------------------------------------------------------ under DDP


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tied(nn.Module):
    """Its weight is found twice, once past the module's own parameters."""

    def __init__(self, past: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = [self.first.weight]
        self.past = past

    def forward(self, x):
        weight = self.again[0] if self.past else self.first.weight
        return nn.functional.linear(self.first(x), weight)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("past", [False, True])
def test_a_parameter_that_gets_past_its_twin(past):
    model = DistributedDataParallel(Tied(past))
    parameters = list(model.parameters())
    x = torch.randn(4, 3)
    with gradient_leaves([model], parameters) as leaves_of:
        assert all(leaf is not parameter for parameter, leaf in leaves_of.items())
        loss = without_ddp(model)(x).square().sum()
        if past:
            with pytest.raises(NotRecordableError, match="not taken from the model"):
                require_leaves(loss, leaves_of)
        else:
            require_leaves(loss, leaves_of)
            assert reached_parameters(lambda: loss.backward(), leaves_of) == set(parameters)
            twin = copy.deepcopy(model.module)
            twin(x).square().sum().backward()
            assert all(
                torch.equal(leaf.grad, p.grad) for leaf, p in zip(leaves_of.values(), twin.parameters(), strict=True)
            )
    assert list(model.parameters()) == parameters
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.usefixtures("alone")
def test_weights_that_a_forward_moves():
    model = DistributedDataParallel(nn.Linear(3, 3))
    with gradient_leaves([model], list(model.parameters())) as leaves_of:
        loss = without_ddp(model)(torch.ones(1, 3)).sum()
        model.module.weight.data = model.module.weight.detach().clone()  # as cuDNN does for nn.LSTM
        with pytest.raises(NotRecordableError, match="moves its weights"):
            require_leaves(loss, leaves_of)


@pytest.mark.usefixtures("alone")
def test_wrapped_in_which_order():
    model = DistributedDataParallel(nn.Linear(3, 3))
    assert is_compiled_around_ddp(torch.compile(model, backend="eager"))
    assert not is_compiled_around_ddp(model)
    inside = DistributedDataParallel(torch.compile(nn.Linear(3, 3), backend="eager"))
    assert not is_compiled_around_ddp(inside)
    assert without_ddp([inside, model.module]) == [inside.module, model.module]
