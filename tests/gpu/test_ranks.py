"""Recorded micro-steps on several ranks: over NCCL in a world of one, and two processes that share a GPU over gloo."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import macrobatch._cudagraph.cache as cuda_graph
from harness.gpu import difference, no_host_reads
from harness.ranks import Outcome, all_well, run
from harness.recorded import Decoder, autocast, batch_of, make, recordings, said, trained
from macrobatch import MacroStep, causal_lm_loss

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures")]
alone = pytest.mark.usefixtures("nccl")
quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of torch, about a world of one

# ------------------------------------------------------------------------------------------ a world of one


@alone
@quiet
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("bucket_view", [False, True])
def test_under_ddp(bucket_view, batch_norm):
    model = make(batch_norm=batch_norm)
    twin = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    _, train = trained(wrapped, cuda_graph=True)
    trained(twin, cuda_graph=False)
    assert len(recordings(train)) == 2
    assert difference(model, twin) < 1e-6
    batch = batch_of()
    with no_host_reads():
        train(batch)


@alone
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp_runs_eagerly_and_says_so():
    model = fully_shard(make())
    with pytest.warns(UserWarning, match="communicate inside micro-steps"):
        _, train = trained(model, cuda_graph=True, windows=2)
    assert train._graphs is None
    assert dist.get_world_size() == 1


@alone
@quiet
@pytest.mark.parametrize("case", ["wide gradients", "scaler", "autocast", "compiled inside"])
def test_what_ddp_goes_with(case):
    model = make(torch.bfloat16 if case == "wide gradients" else torch.float32)
    twin = copy.deepcopy(model)
    options = {
        "wide gradients": lambda: {"accumulate_dtype": torch.float32},
        "scaler": lambda: {"loss_fn": autocast(torch.float16), "scaler": torch.amp.GradScaler("cuda")},
        "autocast": lambda: {"loss_fn": autocast(torch.bfloat16)},
        "compiled inside": dict,
    }[case]
    inner = torch.compile(model, backend="aot_eager") if case == "compiled inside" else model
    _, train = trained(DistributedDataParallel(inner), cuda_graph=True, **options())
    trained(twin, cuda_graph=False, **options())
    assert len(recordings(train)) == 2
    assert difference(model, twin) < 1e-6


@alone
@quiet
def test_compiled_around_ddp_runs_eagerly_and_says_so():
    model = make()
    twin = copy.deepcopy(model)
    around = torch.compile(DistributedDataParallel(model, find_unused_parameters=True), backend="eager")
    with pytest.warns(UserWarning, match="compiled around DistributedDataParallel"):
        _, train = trained(around, cuda_graph=True, windows=3)
    trained(twin, cuda_graph=False, windows=3)
    assert train._graphs is None
    assert difference(model, twin) < 1e-6


class Recurrent(Decoder):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(32, 32, batch_first=True)

    def forward(self, input_ids):
        return self.head(self.recurrent(self.embedding(input_ids))[0])


class TiedByAList(Decoder):
    def __init__(self):
        super().__init__()
        self.again = [self.blocks[0][1].weight]

    def forward(self, input_ids):
        hidden = self.blocks[0](self.embedding(input_ids))
        return self.head(nn.functional.linear(hidden, self.again[0])[..., :32] + hidden)


@alone
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:RNN module weights")
@pytest.mark.parametrize(
    ("kind", "why"),
    [(Recurrent, "moves its weights|not taken from the model"), (TiedByAList, "not taken from the model")],
)
def test_what_gets_past_ddp_is_not_recorded(kind, why):
    torch.manual_seed(0)
    model = kind().cuda()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, train = trained(DistributedDataParallel(model, find_unused_parameters=True), cuda_graph=True, windows=4)
    trained(twin, cuda_graph=False, windows=4)
    assert len(said(caught)) == 1, said(caught)
    assert any(part in said(caught)[0] for part in why.split("|"))
    assert not recordings(train)
    assert difference(model, twin) < 1e-5


# ------------------------------------------------------------------------------------------ two processes

WINDOWS = [(13, 6), (13, 6), (4, 9), (8, 0), (0, 8), (13, 6), (5, 5), (13, 6)]  # samples of each rank
SCENARIOS = {}


def shares(window, sizes):
    whole = batch_of(sum(sizes), seed=window)
    own = [slice(0, sizes[0]), slice(sizes[0], None)]
    return whole, [{name: tensor[part] for name, tensor in whole.items()} for part in own]


def scenario(micro, **options) -> Outcome:
    """Two ranks, whose shapes differ, as one that has all samples."""
    cuda_graph.MAX_TIME_SHARE = 1e9
    torch.manual_seed(0)
    model = Decoder().to("cuda", torch.float64)
    whole_model = copy.deepcopy(model)
    train = MacroStep(
        DistributedDataParallel(model),
        torch.optim.SGD(model.parameters(), lr=0.1),
        causal_lm_loss,
        micro=micro,
        max_norm=1.0,
        cuda_graph=True,
        **options,
    )
    reference = torch.optim.SGD(whole_model.parameters(), lr=0.1)
    apart = 0.0
    for window, sizes in enumerate(WINDOWS):
        whole, parts = shares(window, sizes)
        train(parts[dist.get_rank()])
        causal_lm_loss(whole_model, whole)[0].backward()
        nn.utils.clip_grad_norm_(whole_model.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
        apart = max(apart, difference(model, whole_model))
    return {"apart": apart, "recorded": len(recordings(train))}


for _micro in (4, 1, "auto"):
    SCENARIOS[f"micro {_micro}"] = partial(scenario, _micro)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    return run(__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("recorded"), has_gpus=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_that_record_different_shapes(on_gpus, name):
    outcomes = all_well(on_gpus[name])
    assert all(outcome["recorded"] > 0 for outcome in outcomes)
    assert all(outcome["apart"] < 1e-12 for outcome in outcomes)
