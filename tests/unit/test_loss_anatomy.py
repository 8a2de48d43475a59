"""What the graph of a loss tells about itself, against the gradient of the whole batch."""

import gc
import math
import operator
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel.distributed import _DDPSink
from torch.utils.checkpoint import checkpoint

from harness.host_reads import HostReads
from harness.losses import CLASSES, CUTS, LOSSES, Row, measure, new_batch, new_model
from macrobatch._loss import below
from macrobatch._loss.anatomy import MOST_NODES, anatomy_of
from macrobatch._loss.below import MOST_NODES_BELOW
from macrobatch._loss.proportions import Kind
from macrobatch._loss.reading import Known, Part
from macrobatch._loss.weighing import weigh

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # of kl_div

EXACT = 1e-12


# ---------------------------------------------------------------------------------------------- every loss


@pytest.mark.parametrize("row", LOSSES, ids=lambda row: row.name)
def test_what_is_known_is_exact(row):
    found = [measure(row, cut) for cut in CUTS]
    looks = "known" if row.verdict == "coupled" else row.verdict
    assert [one.judged.verdict for one in found] == [looks] * len(CUTS)
    errors = [one.error for one in found if not math.isnan(one.error)]
    if row.verdict == "coupled":
        assert max(errors) > 1e-6, "it is exact: call it known"
    else:
        assert max(errors, default=0.0) < EXACT
        assert errors or row.verdict != "known"


def test_the_names_of_losses_are_unique():
    assert len({row.name for row in LOSSES}) == len(LOSSES)


# Each planted bug makes a loss known that is not exact, so the test above would fail.
PLANTED = {
    "counts of the outer mean": ("reductions._through_linear", lambda node, sums: (node, []), "mean of columns, sum"),
    "nothing is looked for below": ("reductions.mixing_below", lambda edges, has_sizes: None, "variance by hand"),
    "products are by one": ("anatomy._on_host", lambda constant: 1.0, "mean times samples"),
    "divisors are factors": (
        "reading.Reading.add_sum", lambda self, step, count: self.add_mean(step, 1), "masked mean"),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_seen(monkeypatch, bug):
    where, wrong, name = PLANTED[bug]
    monkeypatch.setattr(f"macrobatch._loss.{where}", wrong)
    (row,) = (row for row in LOSSES if row.name == name)
    with pytest.raises(AssertionError):
        test_what_is_known_is_exact(row)


# ---------------------------------------------------------------------------------------------- random expressions

# Expressions of x. The first keep one row a sample, the others may not.
ALONG_ROWS = [
    "x.pow(2)",
    "x.exp()",
    "-x",
    "0.5 * x",
    "x / 3",
    "x[..., None]",
    "x.flatten(1) if x.ndim > 1 else x",
    "x.sum(-1) if x.ndim > 1 else x",
    "x.mean(-1) if x.ndim > 1 else x",
    "x.logsumexp(-1) if x.ndim > 1 else x",
    "x.log_softmax(-1) if x.ndim > 1 else x",
    "torch.stack([x, 2 * x], -1)",
    "torch.stack([x, x.exp()]).mean(0)",
]
ACROSS_ROWS = [
    "x.mean(0) if x.ndim else x",
    "x.sum(0) if x.ndim else x",
    "x.logsumexp(0)",
    "x.var(0, correction=0) if x.ndim else x",
    "x.amax(0)",
    "x - x.mean(0) if x.ndim else x",
    "x / x.exp().sum()",
    "x.softmax(0)",
    "torch.stack([x.mean(), x.pow(2).mean()])",
    "torch.cat([x.mean()[None], x.exp().mean()[None]])",
]
REDUCTIONS = [
    "x.mean()",
    "x.sum()",
    "x.mean(tuple(range(x.ndim)))",
    "x.flatten().sum(0)",
    "F.mse_loss(x, torch.zeros_like(x))",
    "F.huber_loss(x, torch.zeros_like(x), reduction='sum')",
    "F.cross_entropy(x.reshape(len(x), -1), torch.zeros(len(x), dtype=torch.long)) if x.ndim else x.mean()",
    "x.norm()",
]
OF_SCALARS = [
    "2 * x",
    "x / 4",
    "-x",
    "1 - x",
    "x.view(1).mean()",
    "x.sum()",
    "x.exp()",
    "x * x.detach()",
    "x * x",
    "torch.stack([x, x]).mean()",
    "x.clone()[None]",
    "x + model.trunk.weight.pow(2).sum()",
]
TERMS = st.tuples(
    st.sampled_from(["tokens", "rows", "score"]).map("model.{}(batch).clamp(-3, 3)".format),
    st.lists(st.sampled_from(ALONG_ROWS * 2 + ACROSS_ROWS), max_size=4),
    st.sampled_from(REDUCTIONS),
    st.lists(st.sampled_from(OF_SCALARS), max_size=3),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(TERMS, min_size=1, max_size=3), st.sampled_from(CUTS))
def test_no_random_expression_is_known_and_wrong(expression, cut):
    assert error_of(expression, cut) < 1e-9


def test_a_wrong_random_expression_is_seen(monkeypatch):
    monkeypatch.setattr("macrobatch._loss.reductions.mixing_below", lambda edges, has_sizes: None)
    expression = [("model.rows(batch)", ["x - x.mean(0) if x.ndim else x", "x.pow(2)"], "x.mean()", ["2 * x"])]
    assert error_of(expression, CUTS[0]) > 1e-3


def error_of(expression, cut):
    """Of the gradient, if the expression is known."""

    def loss(model, batch):
        total = 0
        for head, inner, reduction, outer in expression:
            x = eval(head, {"model": model, "batch": batch})
            for step in (*inner, reduction, *outer):
                x = eval(step, {"torch": torch, "F": F, "model": model, "x": x})
            total = total + x.reshape(())
        return total

    return measured_error(Row("random", loss, "unknown"), cut)


def measured_error(row, cut):
    try:
        found = measure(row, cut)
    except AssertionError:  # not finite
        return 0.0
    is_zero = found.size < 1e-9  # as of the mean of probabilities: nothing but rounding
    return found.error if found.judged.verdict == "known" and not is_zero else 0.0


# ---------------------------------------------------------------------------------------------- real models

TINY = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2}
REAL = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA, "shifted"),
    "Qwen3ForCausalLM": ("Qwen3Config", {**LLAMA, "num_key_value_heads": 2, "head_dim": 8}, "shifted"),
    "GPT2LMHeadModel": ("GPT2Config", GPT2, "shifted"),
    "BertForMaskedLM": ("BertConfig", LLAMA, "tokens"),
    "BertForTokenClassification": ("BertConfig", {**LLAMA, "num_labels": 32}, "tokens"),
    "BertForSequenceClassification": ("BertConfig", {**LLAMA, "num_labels": 32}, "samples"),
    "BartForConditionalGeneration": ("BartConfig", BART, "tokens"),
    "T5ForConditionalGeneration": ("T5Config", T5, "tokens"),
}


@pytest.mark.parametrize("name", REAL)
def test_models_of_transformers_tell_the_number_of_learnt_tokens(name):
    config, options, learnt = REAL[name]
    torch.manual_seed(0)
    real = getattr(transformers, name)(getattr(transformers, config)(**TINY, **options))
    tokens = torch.randint(3, 32, (3, 6))
    labels = tokens.masked_fill(torch.arange(6) < torch.tensor([[2], [0], [5]]), -100)
    counts = {"shifted": (labels[:, 1:] != -100).sum(), "tokens": (labels != -100).sum(), "samples": 3}
    if learnt == "samples":
        labels = labels[:, -1]
    part = only(real(input_ids=tokens, labels=labels).loss)
    assert (part.node, part.kind, part.count) == ("NllLossBackward0", "mean", counts[learnt])
    if learnt == "shifted":
        found = anatomy_of(real(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(40)).loss)
        assert (found.parts[0].kind, found.parts[0].count, found.quotient) == ("sum", counts[learnt], 40.0)


# ---------------------------------------------------------------------------------------------- what it returns


@pytest.fixture
def model():
    return new_model()


@pytest.fixture
def batch():
    return new_batch()


def only(loss) -> Part:
    found = anatomy_of(loss)
    assert found.unknown is None
    (part,) = found.parts
    return part


def entropy(model, batch, **options):
    return F.cross_entropy(model.tokens(batch).flatten(0, 1), batch["labels"].flatten(), **options)


def test_constants_are_factors_and_divisors(model, batch):
    mean = model.tokens(batch).mean()
    device = torch.tensor(3.0, dtype=torch.bfloat16)  # as on a device: the host cannot read it
    part = only(-(0.5 * mean / 4 * 2) / 5)
    assert part == ("MeanBackward0", "mean", 140, True, -0.05, (5.0, 4.0), False, (7, 4, 5), None, False, ())
    part = only(mean * device / 2)
    assert isinstance(part.factor, torch.Tensor)
    assert (float(part.factor), part.divisors, part.factor.requires_grad) == (1.5, (2.0,), False)
    assert only(mean / device).divisors == ()
    assert [p.factor for p in anatomy_of(1 - (mean - torch.add(mean, mean, alpha=3)) * 2).parts] == [-2.0, 2.0, 6.0]


def test_counts_of_cross_entropy_are_its_total_weight(model, batch):
    part = only(entropy(model, batch))
    assert (part.node, part.from_shape, part.count) == ("NllLossBackward0", False, batch["mask"].sum())
    nll, smooth = anatomy_of(entropy(model, batch, label_smoothing=0.1)).parts
    assert (nll.node, nll.factor, smooth.node, smooth.factor) == ("NllLossBackward0", 0.9, "SumBackward0", 0.02)
    assert nll.count == smooth.count == batch["mask"].sum()


def test_a_sum_of_cross_entropy_has_its_count_and_its_quotient(model, batch):
    total = entropy(model, batch, reduction="sum")
    found = anatomy_of(total)
    assert (found.parts[0].kind, found.quotient) == ("sum", None)
    found = anatomy_of(2 * total / 100)
    assert (found.parts[0].count, found.parts[0].factor, found.quotient) == (batch["mask"].sum(), 2.0, 100.0)
    items = torch.tensor(100, dtype=torch.int16)  # as on a device
    found = anatomy_of(total / items + 0.1 * model.trunk.weight.norm())
    assert (found.quotient, [part.leaf_only for part in found.parts]) == (items, [False, True])


@pytest.mark.parametrize(
    ("form", "is_leaf_only"),
    [
        (lambda w, x: w.pow(2).sum(), True),
        (lambda w, x: w.pow(2).mean(), True),
        (lambda w, x: w.norm() / 3, True),
        (lambda w, x: w.mean(0).exp().sum(), True),
        (lambda w, x: (w * x[0, 0]).sum(), False),
        (lambda w, x: (w - 1).pow(2).sum(), False),  # it may be data
        (lambda w, x: w[int(x[0, 0, 0] > 0)].pow(2).sum(), True),  # which one, is a part of the expression
        (lambda w, x: (w[1:] - w[:-1]).abs().mean(), True),
        (lambda w, x: (w @ w.t()).square().mean(), True),
        (lambda w, x: torch.linalg.svdvals(w).sum(), True),
        (lambda w, x: F.embedding(x[0, 0].argmax(), w).sum(), False),
        (lambda w, x: (w @ x[0, 0, :3]).sum(), False),
        (lambda w, x: torch.where(x[0, 0] > 0, w, w * w).sum(), False),
        (lambda w, x: w[x[0, 0].argmax(), None].pow(2).sum(), True),
        (lambda w, x: F.soft_margin_loss(w, x[0, 0].sign().expand_as(w)), False),
        (lambda w, x: x.clone().requires_grad_().pow(2).sum(), False),
    ],
)
def test_a_regulariser_is_certain(form, is_leaf_only):
    weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    assert only(form(weight, new_batch()["x"])).leaf_only is is_leaf_only


def test_slices_of_a_regulariser_are_a_part_of_the_expression():
    weight = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    places = [only(weight[index:, 1].pow(2).sum()).slices for index in (0, 1, 1)]
    assert places[0] != places[1] == places[2]


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda x: torch.stack([x.mean(), x.mean()]).mean(), "StackBackward0"),
        (lambda x: x.sum() / 3, "DivBackward0"),
        (lambda x: x.mean().sqrt(), "SqrtBackward0"),
        (lambda x: (x - x.mean(0)).pow(2).mean(), "MeanBackward1"),
        (lambda x: x.mean() * 0, "MulBackward0"),
        (lambda x: x.mean() / 0, "DivBackward0"),
        (lambda x: x.mean(1), "MeanBackward1"),  # no scalar
        (lambda x: nn.Parameter(torch.ones(())), "AccumulateGrad"),
        (lambda x: torch.ones(()), "AccumulateGrad"),
    ],
)
def test_the_node_that_was_not_understood_has_a_name(model, batch, loss, name):
    assert anatomy_of(loss(model.rows(batch))) == ((), name, ())


def test_rows_are_the_items_of_margin_losses(model, batch):
    assert only(F.multi_margin_loss(model.rows(batch), batch["other_label"])).count == 7
    assert only(F.multilabel_margin_loss(model.rows(batch), batch["label"][:, None].expand(7, CLASSES))).count == 7


def test_wrappers_of_ddp_are_looked_through(model, batch):
    ddp = SimpleNamespace(_ddp_sink_clone=True)
    rows = model.rows(batch)
    loss, _ = _DDPSink.apply(lambda: ddp, rows.mean(), rows)
    assert only(loss).count == 35
    _, loss = _DDPSink.apply(lambda: ddp, rows, rows.mean())
    assert only(2 * loss).count == 35


def test_a_function_of_the_same_name_is_not_a_wrapper_of_ddp(model, batch):
    class _DDPSink(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    assert anatomy_of(_DDPSink.apply(model.rows(batch).mean())).unknown == "_DDPSinkBackward"


def test_autocast_changes_no_count(batch):
    model = new_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model.rows({"x": batch["x"].float()}), batch["wanted_rows"].float())
        assert only(loss).count == 35
        part = only(F.cross_entropy(model.rows({"x": batch["x"].float()}), batch["label"]).bfloat16())
    assert part.count == 7


# ---------------------------------------------------------------------------------------------- what it leaves alone


def test_nothing_is_recomputed(model, batch):
    runs = []

    def loss(x):
        runs.append(1)
        return entropy(model, {**batch, "x": x})

    assert anatomy_of(checkpoint(loss, batch["x"], use_reentrant=False)).unknown == "NllLossBackward0"
    assert anatomy_of(0.5 * checkpoint(loss, batch["x"], use_reentrant=False)).unknown == "NllLossBackward0"
    assert len(runs) == 2
    _ = checkpoint(loss, batch["x"], use_reentrant=False).grad_fn._saved_total_weight
    assert len(runs) == 4, "what is guarded against does not happen"


@pytest.mark.parametrize("form", ["mse_loss", "factor", "mean"])
def test_nothing_is_unpacked(model, batch, form):
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(1) or x):
        rows = model.rows(batch)
        loss = {
            "mse_loss": lambda: F.mse_loss(rows, batch["wanted_rows"]),
            "factor": lambda: rows.mean() * torch.tensor(2.0),
            "mean": lambda: 0.5 * rows.mean(),  # it has saved sizes, and a Python number
        }[form]()
    found = anatomy_of(loss)
    assert (found.unknown is None) is (form == "mean")
    assert not unpacked


def test_a_freed_graph_and_a_changed_factor_are_unknown(model, batch):
    loss = F.mse_loss(model.rows(batch), batch["wanted_rows"])
    loss.backward()
    assert anatomy_of(loss).unknown == "MseLossBackward0"
    factor = torch.tensor(2.0)
    loss = model.rows(batch).mean() * factor
    factor.add_(1)
    assert anatomy_of(loss).unknown == "MulBackward0"


def test_a_torch_that_saves_other_things_makes_a_loss_unknown(model, batch, monkeypatch):
    monkeypatch.setattr("macrobatch._loss.reductions.total_weight_of", operator.attrgetter("_gone"))
    assert anatomy_of(entropy(model, batch)).unknown == "NllLossBackward0"


def test_the_host_reads_nothing_from_a_device(model, batch):
    loss = 0.5 * entropy(model, batch, label_smoothing=0.1) * torch.tensor(2.0) / 3
    total = entropy(model, batch, reduction="sum") / batch["mask"].sum()
    with HostReads() as watch:
        watch.watching = True
        anatomy_of(loss)
        anatomy_of(total)
        assert watch.reads == []
        torch.tensor(2.0).item()
        assert watch.reads


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_no_operation_runs_for_what_the_host_knows(model, batch):
    loss = 0.5 * entropy(model, batch) / 4 + model.rows(batch).mean()
    with torch.profiler.profile() as profile:
        anatomy_of(loss)
    assert not {event.name for event in profile.events()} - {"aten::detach", "detach", "aten::is_pinned"}


def test_the_graph_is_not_kept_alive(model, batch):
    class Mark:
        pass

    seen = []
    hidden = model.rows(batch)
    loss = entropy(model, batch) + hidden.mean() * torch.tensor(2.0, dtype=torch.bfloat16)
    for node in (loss.grad_fn.next_functions[0][0], loss.grad_fn.next_functions[1][0]):
        node.metadata["marked"] = mark = Mark()
        seen.append(weakref.ref(mark))
    del mark, node
    found = anatomy_of(loss)
    del loss, hidden
    gc.collect()
    assert found.parts
    assert [reference() for reference in seen] == [None, None]


def test_the_number_of_nodes_is_bounded(model, batch, monkeypatch):
    mean = model.rows(batch).mean()
    assert len(anatomy_of(sum([mean] * 100)).parts) == 100
    assert anatomy_of(sum([mean] * MOST_NODES)).unknown == "AddBackward0"
    x, names = model.rows(batch), []
    for _ in range(100):
        x = x.exp().clamp(max=1)
    monkeypatch.setitem(below._MIXES, "ExpBackward0", lambda node, output: bool(names.append(node)))
    assert only(x.mean()).count == 35
    assert 0 < len(names) <= MOST_NODES_BELOW


# ---------------------------------------------------------------------------------------------- what a caller knows


def weight_of(loss, **known):
    return weigh(loss, None, is_mean=True, steps=None, on_host=True, known=Known(**known))


def test_a_sum_divided_by_the_number_that_the_program_was_given(model, batch):
    given, other = torch.tensor(4), torch.tensor(4)
    summed = entropy(model, batch, reduction="sum")
    own = entropy(model, batch).grad_fn._saved_total_weight.item()
    found = weight_of(summed / given, divisors=(given,))
    assert (found.items, found.scale) == (own, pytest.approx(4 / own))
    opaque = (model.tokens(batch).square() * 0.5).sum()
    assert weight_of(opaque / given / 1, divisors=(given,)).items == 4
    assert weight_of(opaque / other, divisors=(given,)).unread == "DivBackward0"  # equal, but not the same
    assert weight_of(model.rows(batch).mean() / given, divisors=(given,)).unread == "DivBackward0"  # no sum


def test_a_sum_so_divided_beside_another_mean(model, batch):
    given = torch.tensor(4)
    found = weight_of(entropy(model, batch, reduction="sum") / given + model.rows(batch).mean(), divisors=(given,))
    assert found.items == 4
    assert Kind.PARTS in [kind for kind, *_ in found.pairs]


def test_a_mean_that_was_computed_for_the_program(model, batch):
    mean = model.tokens(batch).square().sum() / 3
    assert weight_of(mean).unread == "DivBackward0"
    assert weight_of(mean / 1, means=((mean, 3),)).items == 3
    assert weight_of(mean.float() + 0.5 * model.rows(batch).square().mean(), means=((mean, 3),)).items == 3


def test_a_term_that_the_caller_computes(model, batch):
    other = model.rows(batch).square().sum().sqrt()
    loss = entropy(model, batch) + 0.01 * other.float().double()
    assert weight_of(loss).unread == "SqrtBackward0"
    assert weight_of(loss, other=other).items == entropy(model, batch).grad_fn._saved_total_weight.item()
