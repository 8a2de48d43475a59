"""What `macrobatch.accelerate` relies on in Accelerate, on each version that is supported (`make accelerate`)."""

import inspect
import pickle

import accelerate
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import macrobatch.accelerate
from harness import programs

OVERRIDDEN = [
    *("accumulate", "backward", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients", "free_memory"),
    *("prepare", "prepare_model", "prepare_optimizer", "save_state", "load_state"),
]


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with programs.fresh():
        yield


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_is_overridden_takes_the_same_arguments(name):
    theirs = inspect.signature(getattr(accelerate.Accelerator, name)).parameters
    ours = inspect.signature(getattr(macrobatch.accelerate.Accelerator, name)).parameters
    takes_any = {parameter.kind for parameter in ours.values()} >= {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    assert takes_any or list(ours)[: len(theirs)] == list(theirs) or "items" in ours


def test_an_accelerator_has_what_is_asked_of_it():
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=3)
    assert accelerator.gradient_state is not None
    assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 3
    assert (accelerator.step, accelerator.scaler, accelerator.use_distributed) == (0, None, False)
    accelerator.sync_gradients = False
    assert not GradientState().sync_gradients
    assert accelerator.distributed_type == accelerate.DistributedType.NO
    assert {"DEEPSPEED", "MEGATRON_LM", "XLA"} <= set(accelerate.DistributedType.__members__)


def test_settings_keep_only_what_is_not_the_default():
    plugin = macrobatch.accelerate.GradientAccumulationPlugin(num_steps=2, exact_remainder=False)
    accelerator = accelerate.Accelerator(gradient_accumulation_plugin=plugin)
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": 2, "exact_remainder": False}


def test_a_prepared_optimizer_waits_for_the_flag():
    accelerator = accelerate.Accelerator()
    model = nn.Linear(1, 1, bias=False)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    assert type(optimizer) is AcceleratedOptimizer
    assert isinstance(optimizer.optimizer, torch.optim.SGD)
    assert optimizer.scaler is None
    assert not optimizer.step_was_skipped
    model.weight.grad, before = torch.ones(1, 1), model.weight.item()
    for flag in (False, True):
        accelerator.sync_gradients = flag
        optimizer.step()
        assert (model.weight.item() != before) == flag
    accelerator.sync_gradients = False
    optimizer.zero_grad()
    assert model.weight.grad is not None
    accelerator.sync_gradients = True
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert type(pickle.loads(pickle.dumps(optimizer))) is AcceleratedOptimizer


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans(), st.data())
def test_windows_close_where_theirs_do(steps, lengths, with_loader, data):
    """Loaders one after the other, each left early or not, and micro-batches without a loader in between."""
    left = [data.draw(st.integers(1, length)) for length in lengths]
    alone = [data.draw(st.integers(0, 3)) for _ in lengths]

    def pattern(library):
        with programs.fresh():
            plugin = library.GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=with_loader)
            accelerator = library.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
            model, seen = accelerator.prepare(nn.Linear(1, 1)), []

            def micro_batch():
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(1)).sum())
                    seen.append((accelerator.sync_gradients, accelerator.step))

            for length, end, more in zip(lengths, left, alone, strict=True):
                for index, _ in enumerate(accelerator.prepare(DataLoader(range(length), batch_size=1))):
                    micro_batch()
                    if index + 1 == end:
                        break
                for _ in range(more):
                    micro_batch()
            return seen

    assert pattern(programs.OURS) == pattern(programs.THEIRS)
