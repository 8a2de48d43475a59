"""Ray Train with two workers: one has 22 samples of each batch, the other 10, and the weights are those of one process.

python examples/ray_train.py     # starts Ray on this machine; with RAY_ADDRESS it uses that cluster, and a --storage
                                 # that all its hosts see
"""

# mypy: untyped-calls-exclude=torch
import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer, get_device
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from macrobatch import MacroStep

WORKERS = 2
BATCH, MICRO_BATCH, FEATURES = 32, 4, 8  # samples in a batch of all workers; samples in memory at a time
STEPS, SAVE_EVERY = 6, 3
TOLERANCE = 1e-12  # on weights in float64
CHECKPOINT = "state.pt"
# A Ray that we start sends no statistics, and polls often: its default of two seconds is long for six small steps.
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}

Batch = tuple[Tensor, Tensor]


# --- What is trained -------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-5)


def make_batch(step: int) -> Batch:
    """The batch of all workers for one optimizer step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def share_of(batch: Batch, rank: int, workers: int) -> Batch:
    """One worker's samples. The first worker gets about twice as many as each of the others."""
    first = 2 * BATCH // (workers + 1) + 1
    indices = torch.arange(BATCH)
    mine = indices[:first] if rank == 0 else indices[first:][rank - 1 :: workers - 1]
    return batch[0][mine], batch[1][mine]


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    x, y = batch
    return mse_loss(model(x), y), len(y)


# --- On every worker -------------------------------------------------------------------------------------------------


def train_on_worker(settings: dict[str, Any]) -> None:
    """The program of a worker. Ray has connected the workers: with NCCL if each has a GPU, otherwise with gloo."""
    rank, device = dist.get_rank(), get_device()
    bare = make_model().to(device)
    model = DistributedDataParallel(bare)
    optimizer = make_optimizer(bare)
    step = MacroStep(model, optimizer, loss_fn, micro=MICRO_BATCH, max_norm=1.0)
    if (
        checkpoint := ray.train.get_checkpoint()
    ):  # the last checkpoint of this run; Ray starts the workers again after a failure
        load(checkpoint, bare, optimizer, step)
    resumed_from = step.optimizer_step

    while step.optimizer_step < settings["steps"]:
        x, y = share_of(make_batch(step.optimizer_step), rank, dist.get_world_size())
        result = step((x.to(device), y.to(device)))  # its numbers are over all workers
        done = step.optimizer_step
        metrics = {"step": done, "loss": result.loss.item(), "items": result.items.item()}
        metrics |= {"own_samples": len(y), "resumed_from": resumed_from}
        is_due = done % SAVE_EVERY == 0 or done == settings["steps"]
        report(metrics, bare, optimizer, step, saves=rank == 0 and is_due)


def report(
    metrics: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, step: MacroStep, *, saves: bool
) -> None:
    """Report to Ray, on every worker: Ray waits for all of them. The first worker passes the checkpoint."""
    if not saves:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step.state_dict()}
        torch.save(state, Path(folder, CHECKPOINT))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def load(checkpoint: ray.train.Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, step: MacroStep) -> None:
    """Restore a checkpoint: weights, optimizer, and the number of steps, which determines the next batch."""
    state = read(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step.load_state_dict(state["step"])


def read(checkpoint: ray.train.Checkpoint) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        state: dict[str, Any] = torch.load(Path(folder, CHECKPOINT), map_location="cpu", weights_only=True)
    return state


# --- The program that starts them ------------------------------------------------------------------------------------


def start_ray() -> None:
    """Join the cluster of RAY_ADDRESS; without it, start a small one on this machine."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
        return
    os.environ.update({name: value for name, value in LOCAL.items() if name not in os.environ})
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)


def train(storage: str, steps: int) -> ray.train.Result:
    """Train up to this step. With the same name and storage, Ray passes the last checkpoint to the workers."""
    has_gpus = ray.cluster_resources().get("GPU", 0) >= WORKERS
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, use_gpu=has_gpus),
        run_config=ray.train.RunConfig(
            name="macrobatch",
            storage_path=storage,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    return trainer.fit()


def weights_of_one_process() -> Tensor:
    """The weights of plain torch in one process, with each batch in one piece."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        loss, _ = loss_fn(model, make_batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="a new folder, or s3://, for checkpoints; default: a temporary one")
    start_ray()
    try:
        with tempfile.TemporaryDirectory() as folder:
            storage = parser.parse_args().storage or folder
            return compare(storage)
    finally:
        ray.shutdown()


def compare(storage: str) -> int:
    """Train in two halves, the second one from the checkpoint of the first; then compare with one process."""
    for steps in (STEPS // 2, STEPS):
        result = train(storage, steps)
        metrics = result.metrics
        print(
            f"steps {metrics['resumed_from'] + 1} to {metrics['step']}: loss {metrics['loss']:.4f} over "
            f"{metrics['items']:.0f} samples, {metrics['own_samples']} of them on the first of {WORKERS} workers"
        )
    state = read(result.checkpoint)
    ours = torch.cat([tensor.flatten() for tensor in state["model"].values()])
    difference = (ours - weights_of_one_process()).abs().max().item()
    print(f"largest difference from the weights of one process on whole batches: {difference:.1e}")
    if difference > TOLERANCE:
        print(f"That is more than {TOLERANCE:.0e}: this is a bug in Macrobatch.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
