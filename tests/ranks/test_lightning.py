"""`macrobatch.lightning` on two real processes, against one process with the whole batches, and beside Lightning."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from harness import reference
from harness.lightnings import Task, fit
from harness.ranks import Outcome, all_well, full_weights, run, same_on_all, share
from harness.reference import Counting, relative_error
from macrobatch.lightning import ExactStrategy

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
COUNT = 7  # batches a rank: the last window of 4 is short
WHOLE = {"max_epochs": 2, "steps": 4}


class Sharded(Task):
    """The same with `fully_shard`, as a program does it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.options = args, options

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.net.query, self.net.key, self.net.value):
            fully_shard(part, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> Any:
        name = self.options[0][1] if len(self.options[0]) > 1 else self.options[1].get("name", "SGD")
        optimizer = reference.make_optimizer(self.net.parameters(), name)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


KINDS: dict[str, tuple[Callable[[], Any], type[Task]]] = {
    "ddp": (lambda: "ddp", Task),
    "auto": (lambda: "auto", Task),
    "unused": (lambda: DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True), Task),
    "fsdp2": (lambda: "fsdp2", Sharded),
    "sharded": (lambda: ModelParallelStrategy(2, 1), Sharded),
}


class Noting(Callback):
    """The weights after each step, and what was communicated for it."""

    def __init__(self) -> None:
        self.weights: list[Any] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step > len(self.weights):
            self.weights.append(trainer.global_step)


def train(
    kind: str, *, steps: int, items: str = "int", name: str = "SGD", count: int = COUNT, **options: Any
) -> Outcome:
    wrap, make = KINDS[kind]
    task = make(name=name, counting=Counting(items))
    batches = [micro for _, micro in share(dist.get_rank(), count)]
    noting = Noting()
    callbacks = [noting, *options.pop("callbacks", [])]
    strategy = ExactStrategy(wrap(), steps=steps) if options.pop("exact", True) else wrap()
    trainer = fit(task, batches, devices=2, strategy=strategy, callbacks=callbacks, **options)
    result = getattr(trainer.strategy, "result", None)
    return {
        "weights": full_weights(task.net),
        "steps": trainer.global_step,
        "losses": noting.losses,
        "loss": None if result is None else result.loss,
        "items": None if result is None else result.items,
    }


def whole(steps: int, items: str, name: str, max_norm: float | None, epochs: int, count: int = COUNT) -> Any:
    """One process with the batches of both ranks at once."""
    own = reference.trainee(name=name)
    shares = [[micro for _, micro in share(rank, count)] for rank in (0, 1)]
    windows = [
        [micro for mine in shares for micro in mine[begin : begin + steps]]
        for _ in range(epochs)
        for begin in range(0, count, steps)
    ]
    taken = reference.train_whole(own, windows, max_norm=max_norm, counting=Counting(items))
    return reference.weights_of(own.model), taken


PLANS = [
    (kind, steps, items, name, max_norm)
    for kind in ("ddp", "fsdp2")
    for steps in (1, 4)
    for items, name, max_norm in (("int", "SGD", None), ("tensor", "AdamW", 0.05), ("none", "SGD", 0.05))
] + [("auto", 4, "int", "SGD", None), ("unused", 4, "int", "SGD", None), ("sharded", 4, "int", "SGD", None)]
for plan in PLANS:
    kind, steps, items, name, max_norm = plan
    SCENARIOS["-".join(map(str, plan))] = partial(
        train, kind, steps=steps, items=items, name=name, gradient_clip_val=max_norm, max_epochs=2
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: Any) -> dict[str, list[Outcome]]:
    return run(__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan)))
def test_steps_are_those_of_one_big_batch(ran, plan):
    outcomes = all_well(ran["-".join(map(str, plan))])
    same_on_all(outcomes, "weights", "steps", "loss", "items")
    weights, taken = whole(*plan[1:], epochs=2)
    assert relative_error(outcomes[0]["weights"], weights) <= 1e-12
    assert outcomes[0]["steps"] == len(taken)
    torch.testing.assert_close(outcomes[0]["loss"], taken[-1].loss, rtol=1e-12, atol=0)
