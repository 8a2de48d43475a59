"""`causal_lm_loss` against the obvious version of itself, on models of transformers and on models of our own."""

import copy
import gc
import warnings
import weakref
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.host_reads import HostReads
from harness.reference import gradients_of, relative_error
from macrobatch import Accumulator
from macrobatch.errors import BackendError, BatchError, UsageError
from macrobatch.losses import causal_lm_loss

EXACT = 1e-12
VOCABULARY, WIDTH, LONGEST = 101, 8, 12
LENGTHS = (12, 5, 9, 1, 2)
TOKENS = len(LENGTHS) * LONGEST
CHUNKS = (1, 7, TOKENS - 1, TOKENS, None)


# ------------------------------------------------------------------------------------------- batches, and the obvious


def batch_of(lengths=LENGTHS, seed=0, longest=None) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    longest = max(lengths) if longest is None else longest
    tokens = torch.randint(1, VOCABULARY, (len(lengths), longest), generator=draw)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def obvious(logits: Tensor, tokens: Tensor, lengths=LENGTHS) -> tuple[Tensor, int]:
    """One token after the other: the mean of -log p, and how many there were."""
    losses = [
        -logits[sample, position].log_softmax(-1)[tokens[sample, position + 1]]
        for sample, length in enumerate(lengths)
        for position in range(length - 1)
    ]
    return torch.stack(losses).mean(), len(losses)


def gradients(model: nn.Module, loss: Tensor) -> Any:
    model.zero_grad()
    loss.backward()
    found = gradients_of(model)
    model.zero_grad()
    return found


def same(model: nn.Module, batch: Any, expected: tuple[Tensor, int], **options: Any) -> None:
    """Loss, items and gradients are those expected."""
    loss, items = causal_lm_loss(model, batch, **options)
    assert loss.shape == items.shape == ()
    assert not items.requires_grad
    assert items.item() == expected[1]
    torch.testing.assert_close(loss, expected[0], rtol=EXACT, atol=EXACT)
    assert relative_error(gradients(model, loss), gradients(model, expected[0])) <= EXACT


# ------------------------------------------------------------------------------------------------------------- models


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **options))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes))


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    capped = {"num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 0.5}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCABULARY, **sizes, **capped))


def in_float64(make) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


class Small(nn.Module):
    """Shaped like a model of transformers. `finish` is what happens to its logits before they are returned."""

    def __init__(self, bias=False, finish=lambda logits: logits, form="object") -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # makes float32 of what autocast has made narrow, as norms do
        self.finish, self.form, self.seen = finish, form, []

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        self.seen.append({"attention_mask": attention_mask, **others})
        hidden = self.scale * torch.tanh(self.mix(self.embedding(input_ids)).cumsum(1))
        logits = self.finish(self.head(hidden))
        return {
            "object": SimpleNamespace(loss=None, logits=logits),
            "tuple": (logits, hidden),
            "mapping": {"logits": logits},
            "tensor": logits,
        }[self.form]


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output.logits if hasattr(output, "logits") else output


class Logits(TorchDispatchMode):
    """The most rows of logits that any operation made, in a forward or a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        shapes = [leaf.shape for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.rows = max([self.rows, *(s.numel() // VOCABULARY for s in shapes if s and s[-1] == VOCABULARY)])
        return made


def rows_of_logits(model: nn.Module, batch: dict[str, Tensor], chunk: int | None) -> int:
    with Logits() as logits:
        causal_lm_loss(model, batch, chunk=chunk)[0].backward()
    return logits.rows


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# ---------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("make", [llama, gpt2, gemma2, partial(llama, tie_word_embeddings=True)])
def test_models_of_transformers(make, chunk):
    model, batch = in_float64(make), batch_of()
    same(model, batch, obvious(model(**batch).logits, batch["input_ids"]), chunk=chunk)
    assert hooks_on(model) == 0


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("form", ["object", "tuple", "mapping", "tensor"])
def test_whatever_form_the_output_has(form, chunk):
    model, batch = in_float64(partial(Small, bias=True, form=form)), batch_of()
    twin = copy.deepcopy(model)
    twin.form = "tensor"
    expected = obvious(twin(**batch), batch["input_ids"])
    loss, items = causal_lm_loss(model, batch, chunk=chunk)
    assert items.item() == expected[1]
    torch.testing.assert_close(loss, expected[0], rtol=EXACT, atol=EXACT)
    assert relative_error(gradients(model, loss), gradients(twin, expected[0])) <= EXACT


def test_a_plain_module_that_takes_tokens_only():
    model, batch = (
        in_float64(lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))),
        batch_of(),
    )
    same(model, batch, obvious(model(batch["input_ids"]), batch["input_ids"]), chunk=7)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 40), st.sampled_from(["mean", "sum"]))
def test_any_lengths_in_any_chunks(lengths, chunk, reduction):
    model, batch = in_float64(partial(Small, bias=True)), batch_of(lengths)
    if sum(lengths) == len(lengths):
        return  # nothing to predict: has its own test
    mean, items = obvious(model(**batch).logits, batch["input_ids"], lengths)
    expected = mean * items if reduction == "sum" else mean
    same(model, batch, (expected, items), chunk=chunk, reduction=reduction)


def test_micro_batches_add_up_to_the_whole_batch():
    model, batch = in_float64(gpt2), batch_of()  # Llama normalises in float32, whatever it is given
    expected = gradients(model, obvious(model(**batch).logits, batch["input_ids"])[0])
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: found.append(gradients_of(model)))
    acc = Accumulator(model, optimizer, steps=3)
    for part in acc.batches([slice(0, 2), slice(2, 4), slice(4, 5)]):
        acc.backward(*causal_lm_loss(model, {key: value[part] for key, value in batch.items()}, chunk=5))
        acc.step()
    assert relative_error(found[0], expected) <= EXACT


def test_parts_of_the_model_may_be_frozen():
    for frozen in ("head", "mix"):
        model, batch = in_float64(partial(Small, bias=True)), batch_of()
        getattr(model, frozen).requires_grad_(False)
        same(model, batch, obvious(model(**batch).logits, batch["input_ids"]), chunk=7)


@pytest.mark.parametrize("chunk", [7, None])
def test_second_derivatives(chunk):
    """In chunks there are none, and that is said: not zero."""
    model = llama()
    loss, _ = causal_lm_loss(model, batch_of(), chunk=chunk)
    weight = model.get_output_embeddings().weight
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    penalty = gradient.square().sum()
    if chunk is None:
        penalty.backward()
        assert weight.grad.any()
    else:
        with pytest.raises(UsageError, match="chunk=None"):
            penalty.backward()


def test_without_gradients():
    model, batch = in_float64(Small), batch_of()
    expected, _ = obvious(model(**batch).logits, batch["input_ids"])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss, _ = causal_lm_loss(model, batch, chunk=7)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach(), rtol=EXACT, atol=EXACT)


# ---------------------------------------------------------------------------------------------------- lower precision


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16 parameters"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_round_no_more_than_plain_logits(chunk, autocast):
    exact, batch = in_float64(partial(Small, bias=True)), batch_of([30] * 20)
    reference = gradients(exact, obvious(exact(**batch).logits, batch["input_ids"], [30] * 20)[0])

    def loss_and_error(size):
        model = copy.deepcopy(exact).to(torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = causal_lm_loss(model, batch, chunk=size)
        assert loss.dtype == torch.float32
        return loss.item(), relative_error(gradients(model, loss), reference)

    (chunked, chunked_error), (plain, plain_error) = loss_and_error(chunk), loss_and_error(None)
    assert chunked == pytest.approx(plain, rel=1e-6), "the logits have the same digits"
    assert chunked_error <= 1.25 * plain_error


def test_sums_in_float32():
    model = Small().to(torch.bfloat16)  # 8 bits of mantissa: a sum of 2000 losses in it would stand still at 512 or so
    batch = batch_of([100] * 20)
    expected, items = obvious(model(**batch).logits.double(), batch["input_ids"], [100] * 20)
    for chunk in (None, 64):
        loss, _ = causal_lm_loss(model, batch, chunk=chunk, reduction="sum")
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected * items, rtol=1e-5, atol=0)


# --------------------------------------------------------------------------------------------------- what is counted


def test_labels_count_after_the_shift():
    model, batch = in_float64(Small), batch_of()
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 0] = 3  # nothing predicts these five
    labels[1, 4], labels[2, 8] = 7, 9
    for chunk in CHUNKS:
        logits = model(**batch).logits.log_softmax(-1)
        expected = -(logits[1, 3, 7] + logits[2, 7, 9]) / 2
        same(model, {**batch, "labels": labels}, (expected, 2), chunk=chunk)
    assert all("labels" not in seen for seen in model.seen), "the model would compute a loss of its own"


def test_without_a_mask_every_token_counts():
    model, batch = in_float64(Small), batch_of([6, 6])
    del batch["attention_mask"]
    assert causal_lm_loss(model, batch)[1].item() == 10


def test_padding_counts_for_nothing_on_either_side():
    model = in_float64(Small)
    right = {key: value[1:2] for key, value in batch_of().items()}  # 5 tokens, then 7 of padding
    left = {key: value.roll(7, 1) for key, value in right.items()}
    cut = {key: value[:, :5] for key, value in right.items()}
    model.mix.weight.data.zero_(), model.mix.bias.data.fill_(0.0)  # a model that does not look at what comes before
    losses = [causal_lm_loss(model, batch, chunk=3) for batch in (right, left, cut)]
    assert [items.item() for _, items in losses] == [4, 4, 4]
    assert losses[0][0] == losses[1][0] == losses[2][0]


@pytest.mark.parametrize("batch", [batch_of([1, 1, 1], longest=4), batch_of([1, 1]), batch_of([0, 0], longest=3)])
@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_predict(batch, chunk, reduction):
    model = in_float64(partial(Small, bias=True))
    loss, items = causal_lm_loss(model, batch, chunk=chunk, reduction=reduction)
    assert (loss.item(), items.item()) == (0, 0)
    assert all(torch.count_nonzero(g) == 0 for g in gradients(model, loss).values())


def test_what_else_the_batch_holds_goes_to_the_model():
    model, batch = in_float64(Small), batch_of()
    causal_lm_loss(model, {**batch, "position_ids": 5})
    assert model.seen == [{"attention_mask": batch["attention_mask"], "position_ids": 5}]


def test_a_mask_goes_to_a_model_that_takes_it():
    class Masked(nn.Module):
        def forward(self, input_ids, attention_mask):
            return torch.zeros(*input_ids.shape, VOCABULARY) * attention_mask[..., None]

    assert causal_lm_loss(Masked(), batch_of())[1].item() == sum(LENGTHS) - len(LENGTHS)


def test_no_keys_and_values_are_kept_for_tokens_that_never_come():
    model, caches = in_float64(llama), []
    model.register_forward_hook(lambda module, args, output: caches.append(output.past_key_values))
    causal_lm_loss(model, batch_of())
    causal_lm_loss(model, {**batch_of(), "use_cache": True})
    assert caches[0] is None
    assert caches[1] is not None


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("make", [llama, gpt2, Small])
def test_the_whole_logits_never_exist(make):
    model, batch = in_float64(make), batch_of([12] * 30)
    assert rows_of_logits(model, batch, chunk=None) == 30 * 12
    assert rows_of_logits(model, batch, chunk=32) <= 32


def test_models_known_to_change_their_logits_run_once():
    model, batch = in_float64(gemma2), batch_of()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    causal_lm_loss(model, batch, chunk=7)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "finish",
    [lambda z: 0.5 * torch.tanh(z), lambda z: z.mul_(0.5), lambda z: z.float(), lambda z: torch.cat([z, z], -1)],
    ids=["capped", "in place", "narrowed", "doubled"],
)
def test_models_found_to_change_their_logits_say_so(finish):
    model, batch = in_float64(partial(Small, finish=finish)), batch_of()
    expected, _ = obvious(model(**batch).logits, batch["input_ids"])
    with pytest.warns(UserWarning, match="chunk=None"):
        loss, _ = causal_lm_loss(model, batch, chunk=7)
    assert loss == causal_lm_loss(model, batch, chunk=None)[0]
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
    assert hooks_on(model) == 0


def test_it_is_said_once():
    model, batch = in_float64(partial(Small, finish=torch.tanh)), batch_of()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            causal_lm_loss(model, batch, chunk=7)
    assert len(said) == 1
    assert said[0].filename == __file__


class Twice(Small):
    """Uses its head twice."""

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding(input_ids))
        first = self.head(hidden)
        return self.head(hidden + first.mean(-1, keepdim=True))


class Aside(Small):
    """Uses its head's weight, not its head."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.embedding(input_ids)), self.head.weight)


@pytest.mark.parametrize("make", [Twice, Aside])
@pytest.mark.filterwarnings("ignore:.*chunk=None")
def test_heads_that_are_used_otherwise(make):
    model, batch = in_float64(make), batch_of()
    expected = obvious(model(batch["input_ids"]), batch["input_ids"])
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    same(model, batch, expected, chunk=7)
    assert len(calls) == (2 if make is Twice else 1)


def hooked(model):
    model.head.register_forward_hook(lambda module, args, output: output * 2)
    return model


def hooked_before(model):
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.head)
    return model


def overridden(model):
    plain = model.forward
    model.forward = lambda **batch: SimpleNamespace(logits=plain(**batch).logits * 2)
    return model


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def subclassed(model):
    model.head = Doubling(WIDTH, VOCABULARY).double()
    return model


def other_head(model):
    model.head = nn.Sequential(model.head, nn.Tanh())
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "change", [hooked, hooked_before, parametrized, overridden, subclassed, other_head, compiled, compiled_in_place]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_models_that_are_not_what_they_seem(change):
    """All of them plainly: exact, and the forward runs once."""
    model, batch = change(in_float64(partial(Small, bias=True))), batch_of()
    same(model, batch, obvious(logits_of(model, batch), batch["input_ids"]), chunk=7)


def test_nothing_is_left_after_an_exception():
    def fail(logits):
        raise ZeroDivisionError

    model = in_float64(partial(Small, finish=fail))
    with pytest.raises(ZeroDivisionError):
        causal_lm_loss(model, batch_of(), chunk=7)
    assert hooks_on(model) == 0


# ---------------------------------------------------------------------------------------------------------- the host


class MaskedReads(HostReads):
    """Sees indexing by a mask as well: how long the result is, the host has to read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
        if masks and self.watching and "index" in func.overloadpacket.__name__:
            self.reads.append("a mask as an index")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("chunk", [7, None])
@pytest.mark.parametrize("labels", [False, True])
def test_the_host_reads_nothing(chunk, labels):
    model, batch = in_float64(partial(Small, bias=True)), batch_of()
    if labels:
        batch["labels"] = batch["input_ids"].clone()
    with MaskedReads() as reads:
        reads.watching = True
        loss, items = causal_lm_loss(model, batch, chunk=chunk)
        loss.backward()
        reads.watching = False
    assert reads.reads == []
    assert isinstance(items, Tensor)


# -------------------------------------------------------------------------------------------------------------- ranks


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_under_ddp(options):
    model, batch = in_float64(partial(llama, tie_word_embeddings=True)), batch_of()
    wrapped = DistributedDataParallel(copy.deepcopy(model), **options)
    expected, items = obvious(model(**batch).logits, batch["input_ids"])
    reference = gradients(model, expected)
    for _ in range(3):
        loss, found = causal_lm_loss(wrapped, batch, chunk=7)
        assert found.item() == items
        assert relative_error(gradients(wrapped.module, loss), reference) <= EXACT
    assert hooks_on(wrapped) == 0
    assert (rows_of_logits(wrapped, batch, chunk=20) <= 20) == ("static_graph" not in options)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("part", ["whole", "body"])
def test_under_fsdp2(part):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, batch = in_float64(llama), batch_of()
    expected, _ = obvious(model(**batch).logits, batch["input_ids"])
    reference = gradients(model, expected)
    mesh = init_device_mesh("cpu", (1,))  # also where there is a GPU
    fully_shard(model.model, mesh=mesh)
    if part == "whole":
        fully_shard(model, mesh=mesh)
        model.set_reshard_after_backward(False)  # between micro-steps its weights look like any others then
        model.set_requires_gradient_sync(False)
        rows = rows_of_logits(model, batch, chunk=20), rows_of_logits(model, batch, chunk=20)
        assert rows == (TOKENS, TOKENS)
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
    causal_lm_loss(model, batch, chunk=7)[0].backward()
    found = {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in model.named_parameters()}
    times = 3 if part == "whole" else 1
    assert relative_error({name: gradient / times for name, gradient in found.items()}, reference) <= EXACT


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([1, 2], "a mapping with 'input_ids'"),
        ({"labels": 1}, "no 'input_ids': found 'labels'"),
        ({}, "found nothing"),
        ({"input_ids": [[1, 2]]}, "must be a tensor: got list"),
        ({"input_ids": torch.tensor([1, 2])}, "samples, length"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1]])}, "(1, 2).*(1, 1)"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1.0, 2.0]])}, "float32"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": [[1, 2]]}, "must be a tensor: got list"),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 1, 2, 2)}, "Add labels"),
    ],
)
def test_batches_that_cannot_be_right(batch, says):
    with pytest.raises(BatchError, match=says.replace("(", r"\(").replace(")", r"\)")):
        causal_lm_loss(Small(), batch)


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True, "8"])
def test_chunks_that_cannot_be_right(chunk):
    with pytest.raises(UsageError, match="chunk"):
        causal_lm_loss(Small(), batch_of(), chunk=chunk)


def test_reductions_that_cannot_be_right():
    with pytest.raises(UsageError, match="reduction"):
        causal_lm_loss(Small(), batch_of(), reduction="none")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (lambda z: SimpleNamespace(), "no logits"),
        (lambda z: z[:, 1:], "must have the shape"),
        (lambda z: z[0], "shape"),
    ],
)
def test_models_that_return_no_logits_of_their_tokens(form, says):
    class Odd(nn.Module):
        def forward(self, x):
            return form(torch.zeros(*x.shape, VOCABULARY))

    with pytest.raises(BackendError, match=says):
        causal_lm_loss(Odd(), batch_of())


# ------------------------------------------------------------------------------------------------- forwards of any kind


class Named(nn.Module):
    """Takes its inputs by name alone, and calls itself otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))

    def forward(module, **inputs):  # noqa: N805
        return module.body(inputs["input_ids"])


class Odd:
    """Not hashable, and in the place of a forward."""

    __hash__ = None

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, input_ids):
        return self.forward(input_ids=input_ids)


def static():
    class Static(nn.Module):
        body = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))

        @staticmethod
        def forward(input_ids):
            return Static.body(input_ids)

    return Static()


def patched(patch):
    model = Named()
    model.forward = patch(model.forward)
    return model


FORWARDS = {
    "by name": Named,
    "a partial": lambda: patched(partial),
    "a lambda": lambda: patched(lambda forward: lambda input_ids: forward(input_ids=input_ids)),
    "an object": lambda: patched(Odd),
    "another method": lambda: patched(
        lambda forward: MethodType(lambda self, words: self.body(words), forward.__self__)
    ),
    "static": static,
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_forward_of_any_kind(kind):
    model = FORWARDS[kind]()
    ids = torch.arange(6).view(2, 3)
    loss, items = causal_lm_loss(model, {"input_ids": ids, "labels": ids})
    expected = F.cross_entropy(model.body(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    assert items == 4


@pytest.mark.parametrize("kind", ["by name", "a partial", "a lambda"])
def test_no_model_is_kept(kind):
    model = FORWARDS[kind]()
    ids = torch.arange(6).view(2, 3)
    causal_lm_loss(model, {"input_ids": ids, "labels": ids})
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
