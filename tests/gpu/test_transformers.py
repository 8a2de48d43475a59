"""`exact(Trainer)` on a GPU: recorded micro-steps, half precision, and fully sharded ranks."""

import json
import os
import socket
import subprocess
import sys
import warnings

import pytest
from transformers import Trainer

from harness import ROOT
from harness.trainers import apart, arguments, collate, make, one_big_batch, samples, train
from macrobatch import by_tokens
from macrobatch.transformers import exact

pytestmark = pytest.mark.gpu


def train_with(kind, trainer_class, data, **more):
    made = trainer_class(
        model=make(kind),
        args=arguments(use_cpu=False, remove_unused_columns=False, **more),
        train_dataset=data,
        data_collator=collate,
    )
    return made, train(made)


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("micro", [None, by_tokens(64)])
def test_recorded_micro_steps(kind, micro):
    data = samples(kind, 8) * 6  # the same shapes again and again
    expected, losses = one_big_batch(kind, data, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="cuda_graph")
        made, ours = train_with(kind, exact(Trainer, micro=micro, cuda_graph=True), data)
    weights = {name: weight.cpu() for name, weight in made.model.state_dict().items()}
    assert ours == pytest.approx(losses, abs=1e-5)
    assert apart(weights, expected) <= (1e-12 if kind == "bert" else 1e-6)


def test_half_precision_with_its_scaler():
    """Beside the trainer as it is, which is right for this model: the same losses, and the same scale in the end."""
    data, found = samples("llama", 32), {}
    for name, trainer_class in (("theirs", Trainer), ("ours", exact(Trainer)), ("cut", exact(Trainer, micro=3))):
        model = make("llama").float()
        made = trainer_class(
            model=model,
            args=arguments(use_cpu=False, remove_unused_columns=False, fp16=True, max_grad_norm=1.0),
            train_dataset=data,
            data_collator=collate,
        )
        found[name] = train(made), made.accelerator.scaler.get_scale()
    for name in ("ours", "cut"):
        assert found[name][0] == pytest.approx(found["theirs"][0], abs=5e-3)
        assert found[name][1] == found["theirs"][1]


PROGRAM = """
import json, os, sys
import torch
from transformers import Trainer
from harness.trainers import apart, arguments, collate, make, one_big_batch, samples, train
from macrobatch import by_tokens
from macrobatch.transformers import exact

kind, way = sys.argv[1:3]
data = samples(kind, 20)
options = {"tokens": {"micro": by_tokens(40)}, "batches": {}}[way]
config = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
sharding = {"fsdp": True, "fsdp_config": config}
args = arguments(use_cpu=False, remove_unused_columns=False, max_grad_norm=0.5, **sharding)
made = exact(Trainer, **options)(model=make(kind), args=args, train_dataset=data, data_collator=collate)
losses = train(made)
from torch.distributed.fsdp import FSDPModule
weights = {name: weight.full_tensor().cpu() for name, weight in made.model_wrapped.state_dict().items()}
expected, wanted = one_big_batch(kind, data, 8, max_norm=0.5)
names = [name for name in expected if name in weights]
result = {
    "sharded": isinstance(made.model_wrapped, FSDPModule),
    "apart": max((weights[name] - expected[name]).abs().max().item() for name in names),
    "names": len(names),
    "losses": max(abs(one - other) for one, other in zip(losses, wanted, strict=True)),
}
print("RESULT", json.dumps(result))
"""


@pytest.mark.parametrize("way", ["batches", "tokens"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_sharded_model(kind, way, tmp_path):
    """As Accelerate shards it, on the one rank that one GPU allows; ranks/test_fsdp.py has the engine on several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", str(program), kind, way]
    environment = os.environ | ranks | place | paths
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-3000:])
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    result = json.loads(line.removeprefix("RESULT"))
    assert result["sharded"]
    assert result["names"] > 10
    assert result["losses"] <= 1e-5
    assert result["apart"] <= 1e-6
