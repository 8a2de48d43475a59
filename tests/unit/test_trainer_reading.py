"""What `exact` reads of a trainer's losses: in any precision, in every batch, and without one more forward."""

import contextlib
import copy
import io
import math

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Trainer,
)

from harness.trainers import (
    SMALL,
    WORDS,
    apart,
    arguments,
    bert,
    collate,
    llama,
    make,
    one_big_batch,
    samples,
    train,
    trainer,
)
from macrobatch import MacrobatchError, by_tokens, verify
from macrobatch.errors import UsageError
from macrobatch.transformers import exact

WAYS = {"batches": {}, "three": {"micro": 3}, "tokens": {"micro": by_tokens(40)}}


def bart():
    sizes = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    wide = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "max_position_embeddings": 64}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(BartConfig(vocab_size=WORDS, dropout=0.0, **sizes, **wide, **ends))


def modern_bert():
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertConfig(**SMALL, num_attention_heads=2, max_position_embeddings=64, **ends)
    config._attn_implementation = "eager"
    return ModernBertForMaskedLM(config)


MODELS = {"bert": bert, "bart": bart, "modern bert": modern_bert, "llama": llama}


def uneven(kind):
    """Most samples have one label, at another place than the first; two have many."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for index in range(8):
        ids = torch.randint(3, WORDS, (9,), generator=draw)
        labels = ids.clone() if index > 5 else torch.full_like(ids, -100)
        labels[4] = ids[4]
        if kind == "bart":
            labels = torch.randint(3, WORDS, (9 if index > 5 else 1,), generator=draw)
        found.append({"input_ids": ids, "labels": labels})
    return found


def new(kind):
    torch.manual_seed(1)
    return MODELS[kind]()


def step_of(model, before):
    return {name: (before[name] - weight).double() for name, weight in model.state_dict().items()}


def far(step, right):
    largest = max(tensor.abs().max() for tensor in right.values())
    return max((step[name] - right[name]).abs().max() / largest for name in right).item()


def big_step(kind, *, bf16):
    """One step with a learning rate of 1 on all samples, by the model's own mean."""
    model, before = new(kind), new(kind).state_dict()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model.train()(**collate(uneven(kind))).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return step_of(model, before)


@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("kind", MODELS)
def test_bfloat16_changes_nothing_but_the_rounding(kind, way):
    right = big_step(kind, bf16=False)
    rounding = far(big_step(kind, bf16=True), right)
    assert 1e-4 < rounding < 0.03
    for bf16, bound in ((False, 2e-6), (True, 3 * rounding)):
        made = trainer(kind, exact(Trainer, **WAYS[way]), uneven(kind), model=new(kind), bf16=bf16, learning_rate=1.0)
        train(made)
        assert far(step_of(made.model, new(kind).state_dict()), right) <= bound
    as_it_is = trainer(kind, Trainer, uneven(kind), model=new(kind), learning_rate=1.0)
    train(as_it_is)
    assert kind in ("llama", "modern bert") or far(step_of(as_it_is.model, new(kind).state_dict()), right) > 0.1


# ---------------------------------------------------------------------------------------------- no more forwards


@contextlib.contextmanager
def counted(model):
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    yield calls
    handle.remove()


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"bf16": True}])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_no_forward_is_added(kind, options):
    data = samples(kind, 40)
    model = make(kind)
    with counted(model) as calls:
        made = trainer(kind, exact(Trainer), data, model=model, **options)
        assert calls == []
        train(made)
    assert calls == [True] * 20  # in five windows


def test_cut_windows_have_one_forward_for_each_micro_batch():
    model = make("bert")
    with counted(model) as calls:
        train(trainer("bert", exact(Trainer, micro=3), samples("bert", 16), model=model))
    assert calls == [True] * 6


def test_a_balance_loss_costs_one_more_forward_for_each_batch():
    model = make("mixtral")
    with counted(model) as calls:
        made = trainer("mixtral", exact(Trainer), samples("mixtral", 8), model=model)
        assert calls == []
        train(made)
    assert len(calls) == 8


# ---------------------------------------------------------------------------------------------- several terms


def with_term(term):
    class WithTerm(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            more = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            loss = loss + term(model, outputs, inputs)
            return (loss, outputs) if return_outputs else loss

    return WithTerm


def small_rows(_model, outputs, _inputs):
    return 1e-4 * outputs.logits[:, 0].square().mean()


def regulariser(model, _outputs, _inputs):
    return 0.01 * sum(parameter.square().sum() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("way", ["batches", "three"])
def test_a_small_second_term_over_other_items_is_refused(kind, bf16, way):
    made = trainer(kind, exact(with_term(small_rows), **WAYS[way]), samples(kind, 8), bf16=bf16)
    with pytest.raises(MacrobatchError, match=r"adds up several means, .* return \(loss, items\)"):
        train(made)
    assert apart(made, make(kind).state_dict()) == 0


@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_regulariser_counts_once(kind, way):
    data, model = samples(kind, 8), make(kind)
    loss = model.train()(**collate(data)).loss + regulariser(model, None, None)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    made = trainer(kind, exact(with_term(regulariser), **WAYS[way]), data)
    if kind == "gpt2":  # the trainer divides by labels before their shift, so the two terms have no common count
        with pytest.raises(MacrobatchError):
            train(made)
        return
    train(made)
    assert apart(made, model.state_dict()) <= 3e-8


def verdict(trainer_class):
    return verify(trainer("bert", trainer_class, samples("bert", 8)))


def test_verify_compares_with_the_losses_own_expression():
    """Whatever the trainer takes its loss for: small batches of it are not one big batch."""
    wrong = with_term(lambda _model, outputs, _inputs: outputs.logits[:, 0].square().mean())
    assert not verdict(wrong).ok
    with pytest.raises(MacrobatchError, match="adds up several means"):
        verdict(exact(wrong))
    assert verdict(exact(with_term(regulariser))).ok


# ---------------------------------------------------------------------------------------------- one batch a step


class Largest(Trainer):
    """Its loss is no mean over anything."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        each = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["labels"], reduction="none")
        loss = each.max() + each.sum(1).logsumexp(0)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("kind", "trainer_class"), [("llama", Trainer), ("bert", Trainer), ("mixtral", Trainer), ("bert", Largest)]
)
def test_one_batch_a_step_is_the_trainer_as_it_is(kind, trainer_class, bf16):
    found = []
    for one in (trainer_class, exact(trainer_class)):
        model = make(kind) if kind == "mixtral" else make(kind).float()
        options = {"steps": 1, "per_device": 3, "optim": "adamw_torch", "max_grad_norm": 0.7}
        made = trainer(kind, one, samples(kind, 8), model=model, bf16=bf16 and kind != "mixtral", **options)
        found.append((train(made), made.model.state_dict(), made.state.log_history[0]["grad_norm"]))
    (losses, weights, norm), (ours, our_weights, our_norm) = found
    assert (ours, our_norm) == (losses, norm)
    assert apart(our_weights, weights) == 0


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_step_alone_is_the_trainers_own(kind):
    inputs, found = collate(samples(kind, 3)), []
    for trainer_class in (Trainer, exact(Trainer)):
        made = trainer(kind, trainer_class, samples(kind, 8))
        made.current_gradient_accumulation_steps = 4
        losses = [made.training_step(made.model, dict(inputs)), made.training_step(made.model, dict(inputs), 7)]
        found.append((losses, [parameter.grad for parameter in made.model.parameters()]))
    assert found[0][0] == found[1][0]
    for theirs, ours in zip(found[0][1], found[1][1], strict=True):
        assert theirs is ours is None or torch.equal(theirs, ours)


def test_a_step_alone_after_training():
    made = trainer("bert", exact(Trainer), samples("bert", 13))
    train(made)
    before = copy.deepcopy(made.model).train()
    loss = made.training_step(made.model, collate(samples("bert", 3)))
    right = before(**collate(samples("bert", 3))).loss / made.current_gradient_accumulation_steps
    assert loss.item() == pytest.approx(right.item())


class OneSample(nn.Module):
    """A model that takes one sample at a time."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x, labels):
        if len(x) != 1:
            raise ValueError("one sample")
        return {"loss": (self.line(x) - labels).square().mean()}


def test_a_model_that_takes_one_sample():
    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(3, generator=draw).double(), "labels": torch.ones(1).double()} for _ in range(8)]
    torch.manual_seed(0)
    made = exact(Trainer)(model=OneSample(), args=arguments(per_device=1), train_dataset=data)
    right = copy.deepcopy(made.model).line
    x, optimizer = torch.stack([sample["x"] for sample in data]), torch.optim.SGD(right.parameters(), lr=0.1)
    for rows in x.split(4):
        optimizer.zero_grad()
        (right(rows) - 1).square().mean().backward()
        optimizer.step()
    train(made)
    assert apart({"weight": made.model.line.weight}, {"weight": right.weight}) <= 1e-14


def test_evaluation_alone():
    losses, data = [], samples("bert", 5)
    for trainer_class in (Trainer, exact(Trainer)):
        model = make("bert")
        with counted(model) as calls, contextlib.redirect_stdout(io.StringIO()):
            made = trainer("bert", trainer_class, None, model=model, eval_dataset=data)
            losses.append(made.evaluate()["eval_loss"])
        assert calls == [False]
    assert losses[0] == losses[1]


# ---------------------------------------------------------------------------------------------- no finite loss


class Infinite(Trainer):
    """Its loss is no number in the second window."""

    value = math.nan

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return loss * self.value if model.training and self.state.global_step == 1 else loss


@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("is_filtered", [True, False])
def test_a_loss_that_is_no_number_is_as_in_the_trainer_as_it_is(is_filtered, value, steps, way):
    logged, weights = [], []
    for trainer_class in (Infinite, exact(Infinite, **WAYS[way])):
        made = trainer("bert", trainer_class, samples("bert", 12), steps=steps, logging_nan_inf_filter=is_filtered)
        made.value = value
        losses = train(made)
        logged.append([math.isfinite(loss) for loss in losses])
        weights.append([bool(weight.isfinite().all()) for weight in made.model.state_dict().values()])
    assert logged[0] == logged[1]
    assert weights[0] == weights[1]
    assert not all(weights[0])


# ---------------------------------------------------------------------------------------------- compiled


class NotesNodes(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.nodes = [*getattr(self, "nodes", []), loss.grad_fn.name()]
        return loss


@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_compiled_loss(kind, way):
    """Its first batch runs eagerly. Then it is known which of the labels are counted."""
    torch._dynamo.reset()
    data = samples(kind, 13)
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    made = trainer(kind, exact(NotesNodes, **WAYS[way]), data, **options)
    train(made)
    assert apart(made, one_big_batch(kind, data, 8)[0]) <= 3e-8
    assert made.nodes[0] != "CompiledFunctionBackward"
    assert made.nodes[-1] == "CompiledFunctionBackward"


def test_a_compiled_loss_whose_items_are_no_labels():
    torch._dynamo.reset()

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = make("bert")

        def forward(self, input_ids, attention_mask, labels):
            logits = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
            weight = torch.linspace(0.2, 3.0, logits.shape[-1], dtype=logits.dtype)
            return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels, weight=weight)}

    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    made = trainer("bert", exact(Trainer), samples("bert", 8), model=Weighted(), **options)
    with pytest.raises(UsageError, match=r"CompiledFunctionBackward says no count. .* return \(loss, items\)"):
        train(made)


# -------------------------------------------------------------------------------- a program that divides by itself


def weighed_sum(outputs, labels, num_items_in_batch=None):
    """Class weights, divided by the number of labels: not by the sum of the weights."""
    weights = torch.linspace(0.5, 3.0, WORDS)
    scores = outputs.logits.flatten(0, 1)
    summed = nn.functional.cross_entropy(scores, labels.flatten(), weight=weights.to(scores.dtype), reduction="sum")
    return summed / num_items_in_batch


@pytest.mark.parametrize("way", ["batches", "three"])
def test_class_weights_and_a_sum_that_is_divided_by_the_number_of_labels(way):
    stock = trainer(
        "bert", Trainer, uneven("bert"), model=new("bert"), compute_loss_func=weighed_sum, steps=1, per_device=8
    )
    whole = train(stock)
    for steps, per_device in ((4, 2), (1, 8)):
        options = WAYS[way] if steps > 1 else {}
        made = trainer(
            "bert", exact(Trainer, **options), uneven("bert"), model=new("bert"), compute_loss_func=weighed_sum,
            steps=steps, per_device=per_device,
        )  # fmt: skip
        assert train(made) == pytest.approx(whole, rel=1e-5)
        assert apart(made, stock.model.state_dict()) < 1e-6
