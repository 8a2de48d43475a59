"""`macrobatch.lightning` on two real processes, against one process with the whole batches, and beside Lightning."""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from harness import reference
from harness.lightnings import Task, Unsized, fit
from harness.ranks import Collectives, Outcome, all_refused, all_well, full_weights, same_on_all, share
from harness.recorded import TwinsCapturer, is_capturing
from harness.reference import Batch, Counting, Experts, relative_error
from macrobatch._cudagraph.capture import CAPTURERS
from macrobatch.lightning import ExactStrategy

SCENARIOS: dict[str, Callable[[], Outcome]] = {}
COUNT = 7  # batches a rank: the last window of 4 is short


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Run this on the ranks, under its name."""
    SCENARIOS[function.__name__] = function
    return function


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
    """The losses that callbacks see."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def train(
    kind: str,
    *,
    steps: int,
    items: str = "int",
    name: str = "SGD",
    batches: Sequence[Batch] | None = None,
    micro: Any = None,
    cuda_graph: bool = False,
    **options: Any,
) -> Outcome:
    wrap, make = KINDS[kind]
    task = make(name=name, counting=Counting(items))
    batches = [micro for _, micro in share(dist.get_rank(), COUNT)] if batches is None else batches
    noting = Noting()
    callbacks = [noting, *options.pop("callbacks", [])]
    strategy = wrap()
    if options.pop("exact", True):
        strategy = ExactStrategy(strategy, steps=steps, micro=micro, cuda_graph=cuda_graph)
    trainer = fit(task, batches, devices=2, strategy=strategy, callbacks=callbacks, **options)
    result = getattr(trainer.strategy, "result", None)
    if isinstance(task.net, FSDPModule):
        task.net.reshard()  # what a validation has gathered
    return {
        "weights": full_weights(task.net),
        "steps": trainer.global_step,
        "losses": noting.losses,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "loss": None if result is None else result.loss,
        "items": None if result is None else result.items,
    }


def whole(steps: int, items: str = "int", name: str = "SGD", max_norm: float | None = None, epochs: int = 1) -> Any:
    """One process with the batches of both ranks at once."""
    own = reference.trainee(name=name)
    shares = [[micro for _, micro in share(rank, COUNT)] for rank in (0, 1)]
    windows = [
        [micro for mine in shares for micro in mine[begin : begin + steps]]
        for _ in range(epochs)
        for begin in range(0, COUNT, steps)
    ]
    taken = reference.train_whole(own, windows, max_norm=max_norm, counting=Counting(items))
    return reference.weights_of(own.model), taken


PLANS = [
    (kind, steps, items, name, max_norm)
    for kind in ("ddp", "fsdp2")
    for steps in (1, 4)
    for items, name, max_norm in (("int", "SGD", None), ("tensor", "AdamW", 0.05), ("read", "SGD", 0.05))
] + [("auto", 4, "int", "SGD", None), ("unused", 4, "int", "SGD", None), ("sharded", 4, "int", "SGD", None)]
for plan in PLANS:
    kind, steps, items, name, max_norm = plan
    SCENARIOS["-".join(map(str, plan))] = partial(
        train, kind, steps=steps, items=items, name=name, gradient_clip_val=max_norm, max_epochs=2
    )


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan)))
def test_steps_are_those_of_one_big_batch(on_two_ranks, plan):
    outcomes = all_well(on_two_ranks["-".join(map(str, plan))])
    same_on_all(outcomes, "weights", "steps", "loss", "items")
    weights, taken = whole(*plan[1:], epochs=2)
    assert relative_error(outcomes[0]["weights"], weights) <= 1e-12
    assert outcomes[0]["steps"] == len(taken)
    torch.testing.assert_close(outcomes[0]["loss"], taken[-1].loss, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------- whole windows


CUTS = [
    (kind, steps, micro, max_norm)
    for kind in ("ddp", "fsdp2")
    for steps, micro, max_norm in ((1, 2, None), (4, 3, 0.05), (4, "auto", None))
] + [("unused", 4, 3, None)]
for plan in CUTS:
    kind, steps, micro, max_norm = plan
    SCENARIOS["cut " + "-".join(map(str, plan))] = partial(
        train, kind, steps=steps, micro=micro, items="tensor", name="AdamW", gradient_clip_val=max_norm, max_epochs=2
    )


@pytest.mark.parametrize("plan", CUTS, ids=lambda plan: "-".join(map(str, plan)))
def test_windows_that_are_cut_anew(on_two_ranks, plan):
    outcomes = all_well(on_two_ranks["cut " + "-".join(map(str, plan))])
    same_on_all(outcomes, "weights", "steps", "loss", "items")
    weights, taken = whole(plan[1], "tensor", "AdamW", plan[3], epochs=2)
    assert relative_error(outcomes[0]["weights"], weights) <= 1e-10
    assert outcomes[0]["steps"] == len(taken)
    torch.testing.assert_close(outcomes[0]["loss"], taken[-1].loss, rtol=1e-12, atol=0)
    # Each rank logs its own mean; what callbacks see of the last batch is the window's, on all ranks.
    assert outcomes[0]["losses"][-1] == pytest.approx(taken[-1].loss.item())


class Recorded(Task):
    """How often its training_step was captured."""

    captured = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        TwinsCapturer.model = self

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Recorded.captured += is_capturing()
        return super().training_step(batch, batch_idx)


KINDS["recorded"] = (lambda: "ddp", Recorded)


@scenario
def recorded_cut() -> Outcome:
    forward, through_ddp = DistributedDataParallel.forward, []

    def note(self: Any, *args: Any) -> Any:
        through_ddp.append(is_capturing())
        return forward(self, *args)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(CAPTURERS, "cpu", TwinsCapturer)
        patch.setattr(DistributedDataParallel, "forward", note)
        patch.setattr("macrobatch._cudagraph.cache.MAX_TIME_SHARE", 1e9)
        warnings.filterwarnings("error", message="cuda_graph=True")
        outcome = train("recorded", steps=4, micro=3, cuda_graph=True, items="tensor", max_epochs=2)
    return outcome | {"captured": Recorded.captured, "through_ddp": any(through_ddp)}


def test_recorded_windows(on_two_ranks):
    outcomes = all_well(on_two_ranks["recorded_cut"])
    assert all(outcome["captured"] and not outcome["through_ddp"] for outcome in outcomes)
    assert relative_error(outcomes[0]["weights"], whole(4, "tensor", epochs=2)[0]) <= 1e-10


# ------------------------------------------------------------------------------------------- beside Lightning


EQUAL = [[reference.batch(3, seed=10 * rank + i, items=8) for i in range(8)] for rank in (0, 1)]
BOTH = [(kind, is_exact) for kind in ("ddp", "sharded") for is_exact in (False, True)]


def parity(kind: str, is_exact: bool) -> Outcome:
    steps = {"steps": 4} if is_exact else {"steps": 1, "accumulate_grad_batches": 4}
    own = EQUAL[dist.get_rank()]
    return train(kind, exact=is_exact, items="none", batches=own, val=own[:2], max_epochs=2, **steps)


for kind, is_exact in BOTH:
    SCENARIOS[f"parity {kind} {is_exact}"] = partial(parity, kind, is_exact)


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_equal_batches_train_as_with_lightning(on_two_ranks, kind):
    for theirs, ours in zip(
        all_well(on_two_ranks[f"parity {kind} False"]), all_well(on_two_ranks[f"parity {kind} True"]), strict=True
    ):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], abs=1e-6)
        assert ours["steps"] == theirs["steps"]
        # Counts and steps are powers of two. Sharded, Lightning adds up the gradients in another order.
        assert relative_error(ours["weights"], theirs["weights"]) <= (0 if kind == "ddp" else 1e-12)


class Counted(Callback):
    """What ranks do together in each batch, from its forward to the end of its step."""

    def __init__(self) -> None:
        self.batches: list[dict[str, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode = Collectives()
        self.mode.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.batches.append(dict(self.mode.counts))


def communicate(kind: str) -> Outcome:
    counted = Counted()
    train(kind, steps=4, callbacks=[counted])
    return {"batches": counted.batches}


for kind in ("ddp", "fsdp2"):
    SCENARIOS[f"communication {kind}"] = partial(communicate, kind)


def test_gradients_travel_once_a_window(on_two_ranks):
    for outcome in all_well(on_two_ranks["communication ddp"]):
        sums = [sum(n for name, n in batch.items() if "allreduce" in name) for batch in outcome["batches"]]
        assert [bool(n) for n in sums] == [False, False, False, True, False, False, True]
    for outcome in all_well(on_two_ranks["communication fsdp2"]):
        sums = [sum(n for name, n in batch.items() if "reduce_scatter" in name) for batch in outcome["batches"]]
        assert [bool(n) for n in sums] == [False, False, False, True, False, False, True]


# ------------------------------------------------------------------------------------------- in between


def validated(kind: str) -> Outcome:
    own = [micro for _, micro in share(dist.get_rank(), COUNT)]
    return train(kind, steps=4, val=own[:2], val_check_interval=3, num_sanity_val_steps=2)


for kind in ("ddp", "fsdp2"):
    SCENARIOS[f"validated {kind}"] = partial(validated, kind)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_validation_inside_a_window(on_two_ranks, kind):
    outcomes = all_well(on_two_ranks[f"validated {kind}"])
    assert relative_error(outcomes[0]["weights"], whole(4)[0]) <= 1e-12


def resumed(kind: str, **cut: Any) -> Outcome:
    """A run, and one that goes on from a checkpoint inside its second epoch."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    saving = ModelCheckpoint(folder[0], filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"steps": 3, "name": "AdamW", "max_epochs": 2, **cut}
    once = train(kind, **options, callbacks=[saving], enable_checkpointing=True)
    again = train(kind, **options, ckpt_path=f"{folder[0]}/step=4.ckpt")
    return {"once": once["weights"], "again": again["weights"], "steps": (once["steps"], again["steps"])}


for kind in ("ddp", "fsdp2"):
    SCENARIOS[f"resumed {kind}"] = partial(resumed, kind)
    SCENARIOS[f"resumed {kind} cut"] = partial(resumed, kind, micro=2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "ddp cut", "fsdp2 cut"])
def test_resumes_inside_an_epoch_bitwise(on_two_ranks, kind):
    for outcome in all_well(on_two_ranks[f"resumed {kind}"]):
        assert outcome["steps"] == (6, 6)
        assert all(torch.equal(weight, outcome["again"][name]) for name, weight in outcome["once"].items())


# ------------------------------------------------------------------------------------------- what goes wrong


@scenario
def uneven() -> Outcome:
    return train("ddp", steps=2, batches=[micro for _, micro in share(dist.get_rank(), 5 + dist.get_rank())])


def test_ranks_with_different_numbers_of_batches(on_two_ranks):
    for outcome in on_two_ranks["uneven"]:
        assert "UsageError" in outcome["raised"]
        assert "[5, 6]" in outcome["message"]
        assert "limit_train_batches=5" in outcome["message"]


@scenario
def counted_on_one_rank() -> Outcome:
    return train("ddp", steps=4, items="int" if dist.get_rank() == 0 else "none")


def test_items_on_one_rank_only(on_two_ranks):
    all_refused(on_two_ranks["counted_on_one_rank"], "items must be given on every rank, or on none", "window 1")


def uneven_unsized(**options: Any) -> Outcome:
    count = (7, 5)[dist.get_rank()]
    return train("ddp", batches=[micro for _, micro in share(dist.get_rank(), count)], load=Unsized, **options)


UNSIZED: dict[str, Any] = {"windows of 2": {"steps": 2}, "of 4": {"steps": 4}, "cut anew": {"steps": 4, "micro": 2}}
UNSIZED["limited"] = {"steps": 4, "limit_train_batches": 6}
SCENARIOS |= {f"unsized, {name}": partial(uneven_unsized, **options) for name, options in UNSIZED.items()}
SCENARIOS["unsized, limited to the shorter"] = partial(uneven_unsized, steps=4, limit_train_batches=5)


def test_ranks_whose_loaders_end_before_others(on_two_ranks):
    for name in UNSIZED:
        for outcome in on_two_ranks[f"unsized, {name}"]:
            assert "UsageError" in outcome["raised"]
            assert "no batch is left after 5 on the ranks [1], while the others go on" in outcome["message"]
            assert "limit_train_batches=5" in outcome["message"]
    same_on_all(all_well(on_two_ranks["unsized, limited to the shorter"]), "weights")


class Thawing(Callback):
    """A part that learns from the second window on, as a fine-tuning callback has it."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.net.query.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            module.net.query.requires_grad_(True)


@scenario
def thawed() -> Outcome:
    return train("ddp", steps=4, callbacks=[Thawing()])


def test_a_part_that_is_thawed_after_wrapping(on_two_ranks):
    own = reference.trainee()
    shares = [[micro for _, micro in share(rank, COUNT)] for rank in (0, 1)]
    own.model.query.requires_grad_(False)
    reference.whole_step(own, [m for mine in shares for m in mine[:4]], None, reference.BY_COUNT)
    own.model.query.requires_grad_(True)
    reference.whole_step(own, [m for mine in shares for m in mine[4:]], None, reference.BY_COUNT)
    outcomes = all_well(on_two_ranks["thawed"])
    same_on_all(outcomes, "weights")
    assert relative_error(outcomes[0]["weights"], reference.weights_of(own.model)) <= 1e-12


def routed(**options: Any) -> Outcome:
    """An expert that rank 1 uses, but not in its last batch."""
    task = Task(Experts)
    batches = [micro for _, micro in share(dist.get_rank(), 4, routed=[(1, 1)])]
    fit(task, batches, devices=2, strategy=ExactStrategy(DDPStrategy(**options), steps=4))
    return {"weights": full_weights(task.net)}


SCENARIOS["unused"] = routed
SCENARIOS["unused found"] = partial(routed, find_unused_parameters=True)


def test_a_parameter_that_the_last_batch_does_not_use(on_two_ranks):
    for outcome in on_two_ranks["unused"]:
        assert "BackendError" in outcome["raised"]
        assert "find_unused_parameters=True" in outcome["message"]
    own = reference.trainee(Experts)
    shares = [[micro for _, micro in share(rank, 4, routed=[(1, 1)])] for rank in (0, 1)]
    reference.whole_step(own, [micro for mine in shares for micro in mine], None, reference.BY_COUNT)
    found = all_well(on_two_ranks["unused found"])[0]["weights"]
    assert relative_error(found, reference.weights_of(own.model)) <= 1e-12


class Halfway(Sharded):
    def configure_model(self) -> None:
        fully_shard(self.net.query, mesh=self.device_mesh["data_parallel"])


@scenario
def halfway() -> Outcome:
    fit(Halfway(), [micro for _, micro in share(0, 2)], devices=2, strategy=ExactStrategy("fsdp2", steps=2))
    return {}


def test_a_parameter_that_nobody_shards(on_two_ranks):
    for outcome in on_two_ranks["halfway"]:
        assert "BackendError" in outcome["raised"]
        assert "in no module that configure_model() shards" in outcome["message"]


class Parallel(Task):
    """A part is split between the ranks, which get the same data."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.net, mesh, {"value": ColwiseParallel(output_layouts=Replicate())})


class Right(Parallel):
    configure_optimizers = Sharded.configure_optimizers
    options = (), {}


def shared(make: type[Task]) -> Outcome:
    strategy = ExactStrategy(ModelParallelStrategy(1, 2), steps=4)
    task = make()
    fit(task, [micro for _, micro in share(0, 4)], devices=2, strategy=strategy)
    return {"weights": full_weights(task.net)}


SCENARIOS["shared"] = partial(shared, Right)
SCENARIOS["stale"] = partial(shared, Parallel)


def test_tensor_parallelism_alone(on_two_ranks):
    own = reference.trainee()
    reference.whole_step(own, [micro for _, micro in share(0, 4)], None, reference.BY_COUNT)
    found = all_well(on_two_ranks["shared"])[0]["weights"]
    assert relative_error(found, reference.weights_of(own.model)) <= 1e-12


def test_an_optimizer_of_parameters_that_are_gone(on_two_ranks):
    for outcome in on_two_ranks["stale"]:
        assert "BackendError" in outcome["raised"]
        assert "that is not in the module" in outcome["message"]
