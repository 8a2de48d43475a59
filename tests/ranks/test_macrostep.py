"""MacroStep on real ranks: plans of different lengths, ranks without a sample, and memory that runs out on one of them.

Run as a program by torchrun, this file is a training on which memory runs out where it cannot be done again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from harness import reference
from harness.ranks import (
    Collectives,
    Outcome,
    Tower,
    all_refused,
    all_well,
    be_a_rank,
    ddp,
    fsdp1,
    fsdp2,
    full_weights,
    hsdp,
    made,
    optimizer_for,
    refused,
    same_on_all,
    torchrun,
)
from harness.reference import VOCABULARY, WIDTH, Batch, Hoard, mean_loss, relative_error, sum_loss
from harness.whole_batches import counted_loss, exact, own_batch, train
from macrobatch import MacroStep, by_tokens
from macrobatch.errors import BackendError, BatchError

MODES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "ddp-window": (ddp, {}),
    "ddp-micro": (ddp, {"sync": "micro"}),
    "fsdp1-window": (fsdp1, {}),
    "fsdp1-micro": (fsdp1, {"sync": "micro"}),
    "fsdp2-window-micro": (fsdp2, {}),
    "fsdp2-window-window": (fsdp2, {"gather": "window"}),
    "fsdp2-micro-micro": (fsdp2, {"sync": "micro"}),
    "fsdp2-micro-window": (fsdp2, {"sync": "micro", "gather": "window"}),
}
# Where a window can be done again; under FSDP2, if torch can clear away an aborted backward.
HELD = ["ddp-window", "ddp-micro"]
if RESETS := hasattr(FSDPModule, "reset_iter_state"):
    HELD += ["fsdp2-window-window", "fsdp2-micro-window"]
resets = pytest.mark.skipif(not RESETS, reason="this torch cannot clear away an aborted backward")
SCENARIOS: dict[str, Callable[[], Outcome]] = {}
SCENARIOS_ON_FOUR: dict[str, Callable[[], Outcome]] = {}


def scenario(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
    SCENARIOS[function.__name__] = function
    return function


# --------------------------------------------------------------------------------- exact, however ranks are filled

# For each window, how many samples every rank has: the first has a rank that never had any.
FILLED = [(0, 3), (5, 3), (4, 0), (0, 0), (2, 7), (1, 6), (0, 5), (4, 4)]
ON_FOUR = [(0, 3, 1, 0), (5, 3, 0, 2), (0, 0, 7, 0), (2, 2, 2, 2)]


def lengths(batch: Batch) -> list[int]:
    """Up to the last item of each sample: what follows has no part in the loss, nor in what comes before it."""
    return [max([0, *(row != reference.IGNORED).nonzero().flatten().add(1).tolist()]) for row in batch.y]


for _mode, (_wrap, _options) in MODES.items():
    SCENARIOS[f"by-count-{_mode}"] = partial(train, FILLED, _wrap, 2, **_options)
    SCENARIOS[f"by-tokens-{_mode}"] = partial(train, FILLED, _wrap, by_tokens(7, lengths), **_options)
    SCENARIOS[f"auto-{_mode}"] = partial(train, FILLED, _wrap, "auto", **_options)
    SCENARIOS[f"tokens-that-fit-{_mode}"] = partial(train, FILLED, _wrap, by_tokens("auto", lengths), **_options)
SCENARIOS_ON_FOUR["by-count-hsdp"] = partial(train, ON_FOUR, hsdp, 2)
SCENARIOS_ON_FOUR["auto-hsdp"] = partial(train, ON_FOUR, hsdp, "auto", gather="window")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", ["by-count", "by-tokens", "auto", "tokens-that-fit"])
def test_every_window_is_the_one_big_batch(on_two_ranks, micro, mode):
    exact(on_two_ranks[f"{micro}-{mode}"], FILLED)


def test_ranks_take_as_many_micro_batches_as_they_have_samples_for(on_two_ranks):
    for rank, outcome in enumerate(all_well(on_two_ranks["by-count-ddp-window"])):
        assert outcome["micro_batches"] == [-(-samples[rank] // 2) for samples in FILLED]


def test_four_ranks_in_two_dimensions(on_four_ranks):
    exact(on_four_ranks["by-count-hsdp"], ON_FOUR)
    exact(on_four_ranks["auto-hsdp"], ON_FOUR)


# --------------------------------------------------------------------------------- memory that runs out on one rank


class Fault:
    """Memory runs out `where` in the micro-steps that `strikes(turn, samples)`, a turn being any since it was made."""

    def __init__(self, strikes: Callable[[int, int], bool], where: str) -> None:
        self.strikes, self.where = strikes, where
        self.sizes: list[int] = []  # of all micro-batches that came by
        self.met = 0

    def meets(self, samples: int) -> bool:
        self.sizes.append(samples)
        struck = self.strikes(len(self.sizes) - 1, samples)
        self.met += struck
        return struck


def nothing() -> Fault:
    return Fault(lambda turn, samples: False, "nowhere")


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@scenario
def recordings_on_one_rank() -> Outcome:
    """Memory runs out beside those of rank 0: all do the window again, and only it goes on without them."""
    hoard, calls = Hoard(), 0

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 0 and calls == 2:
            run_out()
        return counted_loss(model, batch)

    return train(FILLED, ddp, loss_fn=loss_fn, hoard=hoard) | {"refused": len(hoard.refused), "calls": calls}


def test_recordings_are_given_up_by_the_rank_that_needs_their_memory(on_two_ranks):
    outcomes = on_two_ranks["recordings_on_one_rank"]
    exact(outcomes, FILLED)
    assert [outcome["refused"] for outcome in outcomes] == [1, 0]
    needed = [sum(-(-samples[rank] // 2) for samples in FILLED) for rank in range(2)]
    assert [outcome["calls"] for outcome in outcomes] == [needed[0] + 2, needed[1] + 2]  # of the second window, twice


class Tripwire(torch.autograd.Function):
    """The identity, which runs out of memory on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str | None) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fault:
            run_out()
        return gradient, None


class Fragile(nn.Module):
    """A BatchNorm and a dropout in training mode, and a place in the middle where memory can run out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.below, self.above = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.trip: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.below(self.embedding(x))
        h = self.norm(h.flatten(0, 1)).view_as(h)
        if self.trip == "in the middle of the forward":
            run_out()
        h = Tripwire.apply(h, self.trip == "in the middle of the backward")
        return self.head(self.dropout(torch.tanh(self.above(h))))


class FragileLoss:
    """A loss that meets the fault it was given."""

    def __init__(self) -> None:
        self.fault = nothing()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        where = self.fault.where if self.fault.meets(len(batch.x)) else None
        if where == "before the forward":
            run_out()
        inner = getattr(model, "module", model)
        inner.trip = where
        try:
            loss = sum_loss(model, batch)
        finally:
            inner.trip = None
        return Tripwire.apply(loss, where == "at the start of the backward"), batch.items


PLACES = [
    "before the forward",
    "in the middle of the forward",
    "at the start of the backward",
    "in the middle of the backward",
]


class Twins:
    """The same model twice: one whose memory runs out, and one that uses the final sizes from the start."""

    def __init__(self, wrap: Any, **options: Any) -> None:
        self.options = options | {"reduction": "sum", "max_norm": 1.0}
        self.models = [wrap(made(Fragile).train()) for _ in range(2)]
        self.optimizers = [optimizer_for(model, "AdamW") for model in self.models]
        self.loss, self.worst, self.windows, self.met = FragileLoss(), 0.0, 0, 0
        self.anew()

    def anew(self) -> None:
        """Nothing is known about sizes any more."""
        self.step = MacroStep(self.models[0], self.optimizers[0], self.loss, micro="auto", **self.options)

    def window(self, samples: int, fault: Fault) -> int:
        """Both do the same window; returns the size that the first one came to."""
        batch = own_batch(self.windows, samples, dist.get_rank())
        result, state = self.done(self.step, batch, fault)
        final = torch.tensor(max(fault.sizes[-result.micro_batches :]))
        dist.all_reduce(final, dist.ReduceOp.MAX)
        twin = MacroStep(self.models[1], self.optimizers[1], self.loss, micro=int(final), **self.options)
        expected, expected_state = self.done(twin, batch, nothing())
        assert torch.equal(state, expected_state)
        assert result.micro_batches == expected.micro_batches
        found, wanted = map(full_weights, self.models)
        if "sync" not in self.options:  # else DDP broadcasts them before every micro-batch that is not held
            found |= dict(self.models[0].named_buffers())
            wanted |= dict(self.models[1].named_buffers())
        found |= {"loss": result.loss, "norm": result.grad_norm}
        wanted |= {"loss": expected.loss, "norm": expected.grad_norm}
        self.worst = max(self.worst, relative_error(found, wanted))
        self.windows, self.met = self.windows + 1, self.met + fault.met
        return int(final)

    def done(self, step: MacroStep, batch: Batch, fault: Fault) -> tuple[Any, Tensor]:
        torch.manual_seed(1000 * self.windows + dist.get_rank())
        self.loss.fault = fault
        return step(batch), torch.get_rng_state()

    def outcome(self) -> Outcome:
        return {"worst": self.worst, "windows": self.windows, "met": self.met}


def one_fault(where: str, turn: int, wrap: Any, **options: Any) -> Outcome:
    """On rank 1 a size of 8 does not fit; 4 does, but later runs out once. Then all is quiet, and proven."""
    twins, fails = Twins(wrap, **options), dist.get_rank() == 1
    sizes = [twins.window(8, Fault(lambda _, samples: fails and samples > 4, where))]
    sizes.append(twins.window(8, Fault(lambda now, _: fails and now == turn, where)))
    sizes += [twins.window(7, nothing()) for _ in range(3)]
    return twins.outcome() | {"sizes": sizes}


def random_faults(seed: int, windows: int, wrap: Any, **options: Any) -> Outcome:
    """Any rank, or both, at any turn and place; ranks have different numbers of samples."""
    twins, draw = Twins(wrap, **options), torch.Generator().manual_seed(seed)
    pick = lambda n: int(torch.randint(0, n, (), generator=draw))  # noqa: E731
    for _ in range(windows // 2):
        twins.anew()
        for turns in (1, 2):  # a window of one micro-batch, then one of two, of the size that the first came to
            who, turn, where, samples = pick(3), pick(turns), PLACES[pick(4)], [(8, 8), (8, 6), (5, 8)][pick(3)]
            struck = who in (2, dist.get_rank())
            twins.window(samples[dist.get_rank()], Fault(lambda now, _, s=struck, t=turn: s and now == t, where))
    return twins.outcome()


FAULTS = [
    (mode, place, turn) for mode in HELD for place in PLACES for turn in (0, 1) if turn or "sync" not in MODES[mode][1]
]
for _mode, _place, _turn in FAULTS:
    _wrap, _options = MODES[_mode]
    SCENARIOS[f"{_place}-{_turn}-{_mode}"] = partial(one_fault, _place, _turn, _wrap, **_options)
SCENARIOS["random-ddp"] = partial(random_faults, 1, 140, ddp)
SCENARIOS["random-fsdp2"] = partial(random_faults, 2, 40, fsdp2, gather="window")


@pytest.mark.parametrize(("mode", "place", "turn"), FAULTS)
def test_a_rank_runs_out_and_the_window_is_done_again_by_all(on_two_ranks, mode, place, turn):
    outcomes = all_well(on_two_ranks[f"{place}-{turn}-{mode}"])
    assert [(outcome["sizes"], outcome["met"]) for outcome in outcomes] == [([4, 2, 2, 2, 2], met) for met in (0, 2)]
    # Held gradients travel once, also where they are to travel after every micro-batch: then sums round otherwise.
    assert max(outcome["worst"] for outcome in outcomes) <= (1e-12 if "sync" in MODES[mode][1] else 0)


@resets
def test_two_hundred_faults(on_two_ranks):
    outcomes = [outcome for name in ("random-ddp", "random-fsdp2") for outcome in all_well(on_two_ranks[name])]
    assert {outcome["worst"] for outcome in outcomes} == {0.0}
    assert sum(outcome["met"] for outcome in outcomes) >= 200


def tokens_on_little_memory(room: Sequence[int], wrap: Any, **options: Any) -> Outcome:
    """Ranks with room for different numbers of tokens."""
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        sizes.append(batch.x.numel())
        if batch.x.numel() > room[dist.get_rank()] and len(batch.x) > 1:
            run_out()
        return counted_loss(model, batch)

    return train(FILLED, wrap, by_tokens("auto", lengths), loss, **options) | {"sizes": sizes}


for _mode in HELD:
    SCENARIOS[f"little-{_mode}"] = partial(tokens_on_little_memory, (25, 9), MODES[_mode][0], **MODES[_mode][1])


@pytest.mark.parametrize("mode", HELD)
def test_all_ranks_cut_by_the_tokens_that_fit_on_each(on_two_ranks, mode):
    outcomes = on_two_ranks[f"little-{mode}"]
    exact(outcomes, FILLED)
    assert max(outcomes[1]["sizes"]) > 9 >= outcomes[1]["sizes"][-1]


# --------------------------------------------------------------------------------------- sizes, proven and unproven


@scenario
def collectives_by_window() -> Outcome:
    """What DDP does in each of four windows: two are held, then the size is proven."""
    model = ddp(made(Tower))
    step = MacroStep(model, optimizer_for(model), counted_loss, micro="auto")
    counts = []
    for window in range(4):
        with Collectives() as collectives:
            step(own_batch(window, 4, dist.get_rank()))
        counts.append(dict(collectives.counts))
    return {"counts": counts}


def test_a_proven_size_uses_the_overlapped_reducer(on_two_ranks):
    held, again, proven, later = all_well(on_two_ranks["collectives_by_window"])[0]["counts"]
    # The row and the vote; the totals, which parameters have gradients, and the gradients.
    assert held == again == {"allgather": 2, "allreduce": 3}
    assert proven == {"allgather": 1, "allreduce": 2}  # no vote any more; the totals, and the reducer's bucket
    assert later["allgather"] == 1
    assert later["allreduce"] >= 2  # DDP has rebuilt its buckets


def cut_at(limit: int, wrap: Any, windows: Sequence[int], **options: Any) -> Outcome:
    """On rank 1 no more than `limit` samples fit."""
    model = wrap(made(Fragile).train())
    loss, sizes = FragileLoss(), []
    step = MacroStep(model, optimizer_for(model), loss, reduction="sum", **options)
    for window, samples in enumerate(windows):
        loss.fault = Fault(lambda _, size: dist.get_rank() == 1 and size > limit, PLACES[window % 4])
        result = step(own_batch(window, samples, dist.get_rank()))
        sizes.append(max(loss.fault.sizes[-result.micro_batches :]))
    return {"sizes": sizes}


SCENARIOS["too-large"] = lambda: cut_at(0, ddp, [4])
SCENARIOS["too-large-fsdp2"] = lambda: cut_at(0, fsdp2, [4], gather="window")
SCENARIOS["agreed"] = lambda: cut_at(3, ddp, [4, 6, 2, 7])
SCENARIOS["fixed"] = lambda: cut_at(2, ddp, [2, 4], micro=4)


@scenario
def ended_though_proven() -> Outcome:
    """A size that was proven to fit runs out all the same, where the reducer has begun."""
    model, loss = ddp(made(Fragile).train()), FragileLoss()
    step = MacroStep(model, optimizer_for(model), loss, reduction="sum")
    for window in range(4):
        strikes = window == 3 and dist.get_rank() == 1
        loss.fault = Fault(lambda *_, s=strikes: s, "in the middle of the backward")
        step(own_batch(window, 4, dist.get_rank()))
    return {}


@pytest.mark.parametrize("name", ["too-large", pytest.param("too-large-fsdp2", marks=resets)])
def test_not_even_one_sample_fits_on_one_rank(on_two_ranks, name):
    all_refused(on_two_ranks[name], "not even one sample fits")
    refused(on_two_ranks[name], 1, "2.00 GiB", "checkpoint")
    assert all("FitError" in outcome["raised"] for outcome in on_two_ranks[name])


def test_ranks_agree_on_the_smallest_size(on_two_ranks):
    assert [outcome["sizes"] for outcome in all_well(on_two_ranks["agreed"])] == [[2, 2, 2, 2]] * 2


def test_where_others_wait_in_a_collective_the_job_ends_at_once(on_two_ranks):
    outcomes = on_two_ranks["ended_though_proven"]
    all_refused(outcomes, "rank 1 ran out of memory", "2.00 GiB", "4 samples", "fit_file")
    assert all("FitError" in outcome["raised"] and outcome["seconds"] < 8 for outcome in outcomes)


def test_a_size_that_was_asked_for_is_not_changed(on_two_ranks):
    assert "OutOfMemoryError" in on_two_ranks["fixed"][1]["raised"]


# -------------------------------------------------------------------------------------------- the file of sizes


def restarted() -> None:
    """Memory holds 4 samples; 8 are tried first. Every attempt notes the sizes of its micro-batches."""
    be_a_rank()
    dist.init_process_group("gloo")
    model, loss = fsdp2(made(Fragile).train()), FragileLoss()
    step = MacroStep(model, optimizer_for(model), loss, reduction="sum", fit_file="sizes.json")
    loss.fault = Fault(lambda _, size: dist.get_rank() == 1 and size > 4, "in the middle of the backward")
    for window in range(3):
        step(own_batch(window, 8, dist.get_rank()))
    Path(f"done.{dist.get_rank()}").write_text(str(loss.fault.sizes))
    dist.destroy_process_group()


def test_a_restarted_job_begins_with_the_size_that_the_first_one_learnt(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # a restart on a store of its own
    launch = torchrun(2, __file__, directory=tmp_path, seconds=90, restarts=1, imported=[__name__])
    assert launch.exit_code == 0, launch.output
    assert "FitError: rank 1 ran out of memory" in launch.output
    assert [(tmp_path / f"done.{rank}").read_text() for rank in range(2)] == [str([4] * 6)] * 2
    assert launch.seconds < 60  # with all that starting twice takes


# ------------------------------------------------------------------------------- a rank that only keeps others company


def in_company(**options: Any) -> Outcome:
    """Two samples fit, and ranks without any take part. The loss takes its targets away, and changes its tokens."""
    sizes: list[list[int]] = []

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        sizes[-1].append(len(batch["x"]))
        y, x = batch.pop("y"), batch["x"].add_(1)  # done twice, there would be no such token
        if len(x) > 2:
            run_out()
        return counted_loss(model, Batch(x, y))

    model = fsdp2(made(Tower))
    step = MacroStep(model, optimizer_for(model), loss_fn, **options)
    for window, samples in enumerate(FILLED):
        sizes.append([])
        own = own_batch(window, samples[dist.get_rank()], dist.get_rank())
        step({"x": torch.full_like(own.x, VOCABULARY - 2), "y": own.y})
    kept = [tensor.untyped_storage().nbytes() for tensor in step._cutter.placeholder._micro_batch.values()]
    return {"sizes": sizes, "kept": kept, "steps": step.optimizer_step}


SCENARIOS["company-auto"] = lambda: in_company(gather="window")
SCENARIOS["company-2"] = lambda: in_company(micro=2)


@scenario
def company_where_one_sample_has_no_variance() -> Outcome:
    model = fsdp2(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    step = MacroStep(model, optimizer_for(model), lambda model, x: model(x).square().mean(), micro=3)
    results = [step(torch.randn(6 if dist.get_rank() else 0, 3)) for _ in range(2)]
    return {"steps": [result.step for result in results]}


def test_a_rank_without_samples_takes_part_where_one_has_no_variance(on_two_ranks):
    assert [o["steps"] for o in all_well(on_two_ranks["company_where_one_sample_has_no_variance"])] == [[1, 2]] * 2


@pytest.mark.parametrize("name", [pytest.param("company-auto", marks=resets), "company-2"])
def test_a_rank_without_samples_takes_part_with_a_single_one(on_two_ranks, name):
    for rank, outcome in enumerate(all_well(on_two_ranks[name])):
        assert outcome["steps"] == sum(1 for samples in FILLED if any(samples))
        assert all(bytes <= 8 * reference.LENGTH + 256 for bytes in outcome["kept"]), "one row, and where it begins"
        for samples, sizes in zip(FILLED, outcome["sizes"], strict=True):
            if not samples[rank] and any(samples):
                assert set(sizes) == {1}


# ------------------------------------------------------------------------------------------------- other failures


@scenario
def a_batch_that_cannot_be_cut() -> Outcome:
    model = ddp(made(Tower))
    step = MacroStep(model, optimizer_for(model), counted_loss, micro=2)
    bad = Batch(torch.ones(3, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(BatchError) as raised:
        step(bad if dist.get_rank() == 1 else own_batch(0, 3, 0))
    result = step(own_batch(0, 3, dist.get_rank()))
    return {"error": f"{raised.typename}: {raised.value}", "step": result.step, "weights": [full_weights(model)]}


@scenario
def a_held_window_that_fails_otherwise() -> Outcome:
    model = ddp(made(Tower))

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        if dist.get_rank() == 1 and len(batch.x) == 3:
            raise ZeroDivisionError("a bug of the user's")
        return counted_loss(model, batch)

    step = MacroStep(model, optimizer_for(model), loss_fn)
    with pytest.raises((ZeroDivisionError, BackendError)) as raised:
        step(own_batch(0, 3, dist.get_rank()))
    result = step(own_batch(1, 4, dist.get_rank()))
    return {"error": f"{raised.typename}: {raised.value}", "step": result.step, "weights": [full_weights(model)]}


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        ("a_batch_that_cannot_be_cut", ("BatchError: the batch of rank 1", "BatchError: the tensors of a batch")),
        ("a_held_window_that_fails_otherwise", ("BackendError: rank 1 failed", "ZeroDivisionError: a bug")),
    ],
)
def test_one_rank_fails_and_all_can_go_on(on_two_ranks, name, errors):
    outcomes = all_well(on_two_ranks[name])
    same_on_all(outcomes, "weights", "step")
    for outcome, error in zip(outcomes, errors, strict=True):
        assert outcome["error"].startswith(error)
        assert outcome["step"] == 1


@scenario
def shared_statistics() -> Outcome:
    model = fsdp2(nn.SyncBatchNorm.convert_sync_batchnorm(made(Fragile)))
    MacroStep(model, optimizer_for(model), counted_loss, gather="window")(own_batch(0, 3, dist.get_rank()))
    return {}


@resets
def test_statistics_over_all_ranks_cannot_be_done_again(on_two_ranks):
    all_refused(on_two_ranks["shared_statistics"], "SyncBatchNorm", "micro=")


@scenario
def items_on_one_rank() -> Outcome:
    """On the other, those of a loss alone: its samples."""
    model, rank = ddp(made(Tower)), dist.get_rank()
    loss_fn = (counted_loss, mean_loss)[rank]
    MacroStep(model, optimizer_for(model), loss_fn, micro=2)(own_batch(0, 4, rank))
    return {}


def test_items_on_one_rank_only(on_two_ranks):
    all_refused(
        on_two_ranks["items_on_one_rank"], "items must be given on every rank, or on none", "window 1", "samples"
    )


# ---------------------------------------------------------------------------------------------------- with a scaler


def scaled(wrap: Any, micro: Any, **options: Any) -> Outcome:
    """Ranks multiply alike, also one that has nothing in the very first window."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return train(FILLED, wrap, micro, scaler=scaler, **options)


SCENARIOS["scaled-ddp"] = partial(scaled, ddp, 2)
SCENARIOS["scaled-auto"] = partial(scaled, ddp, "auto")
SCENARIOS["scaled-fsdp2"] = partial(scaled, fsdp2, 2)


SCENARIOS["scaled-fault"] = lambda: cut_at(3, ddp, [4, 6, 4], scaler=torch.amp.GradScaler("cpu"))


def test_a_scaler_and_a_rank_that_runs_out_before_its_first_loss(on_two_ranks):
    assert [outcome["sizes"] for outcome in all_well(on_two_ranks["scaled-fault"])] == [[2, 2, 2]] * 2


@pytest.mark.parametrize("name", ["scaled-ddp", "scaled-auto", "scaled-fsdp2"])
def test_a_scaler_and_ranks_that_have_nothing(on_two_ranks, name):
    exact(on_two_ranks[name], FILLED)


if __name__ == "__main__":
    restarted()
