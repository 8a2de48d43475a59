"""`ExactStrategy` reads what a loss is a mean over: modules as people write them, against one big batch in float64."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import reference
from harness.lightnings import OURS, Given, Task, fit, quiet
from harness.reference import Counting, relative_error, weights_of
from macrobatch import Accumulator
from macrobatch.errors import BatchError, MacrobatchError
from macrobatch.lightning import ExactStrategy

FEATURES, TOKENS, CLASSES = 3, 4, 5
SIZES = (3, 1, 4, 2, 5)
STEPS = 3

Batch = dict[str, Tensor]


def batch_of(samples: int, seed: int) -> Batch:
    """Tokens of which some are padding, targets for regression, and a constant for mixing."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (samples, TOKENS), generator=draw)
    lengths = torch.randint(1, TOKENS + 1, (samples, 1), generator=draw)
    return {
        "x": torch.randn(samples, TOKENS, FEATURES, generator=draw, dtype=torch.float64),
        "y": y.masked_fill(torch.arange(TOKENS) >= lengths, -100),
        "label": torch.randint(0, CLASSES, (samples,), generator=draw),
        "other": torch.randint(0, CLASSES, (samples,), generator=draw),
        "z": torch.randn(samples, CLASSES, generator=draw, dtype=torch.float64),
    }


BATCHES = [batch_of(size, seed) for seed, size in enumerate(SIZES)]


def together(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(FEATURES, 6).double(), nn.Linear(6, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)))


class Doubled(torch.autograd.Function):
    """A mean over all elements that is computed by code of the program's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x / x.numel()


def tokens(net: Net, b: Batch, **options: Any) -> Tensor:
    return F.cross_entropy(net(b["x"]).flatten(0, 1), b["y"].flatten(), **options)


def rows(net: Net, b: Batch) -> Tensor:
    return net(b["x"].mean(1))


def masked(net: Net, b: Batch) -> Tensor:
    mask = b["y"] != -100
    losses = F.cross_entropy(net(b["x"]).transpose(1, 2), b["y"].clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def num_tokens(b: Batch) -> Tensor:
    return (b["y"] != -100).sum()


def mixed_up(net: Net, b: Batch) -> Tensor:
    logits = rows(net, b)
    return 0.3 * F.cross_entropy(logits, b["label"]) + 0.7 * F.cross_entropy(logits, b["other"])


def distilled(net: Net, b: Batch) -> Tensor:
    logits = rows(net, b)
    kl = F.kl_div(logits.log_softmax(-1), b["z"].softmax(-1), reduction="none").sum(-1).mean()
    return F.cross_entropy(logits, b["label"]) + 0.5 * kl


def penalised(net: Net, b: Batch) -> Tensor:
    return F.mse_loss(rows(net, b), b["z"]) + 0.01 * net.head.weight.square().sum()


def focal(net: Net, b: Batch) -> Tensor:
    losses = F.cross_entropy(rows(net, b), b["label"], reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def compiled(net: Net, b: Batch) -> Tensor:
    run = torch.compile(lambda x, z: F.mse_loss(net(x.mean(1)), z), backend="aot_eager", dynamic=True)
    return run(b["x"], b["z"])


class Row(NamedTuple):
    """A loss, and what training_step returns besides it."""

    name: str
    loss: Callable[[Net, Batch], Tensor]
    items: Callable[[Batch], Any] | None = None


READ = [
    Row("cross-entropy with padding", tokens),
    Row("with class weights", lambda net, b: tokens(net, b, weight=torch.arange(1.0, 6.0, dtype=torch.float64))),
    Row("label smoothing", lambda net, b: tokens(net, b, label_smoothing=0.1)),
    Row("a sum by its own count", lambda net, b: tokens(net, b, reduction="sum") / num_tokens(b)),
    Row("mse", lambda net, b: F.mse_loss(rows(net, b), b["z"])),
    Row("mse of tokens", lambda net, b: net(b["x"]).square().mean()),
    Row("huber, scaled", lambda net, b: 0.5 * F.huber_loss(rows(net, b), b["z"])),
    Row("binary", lambda net, b: F.binary_cross_entropy_with_logits(rows(net, b), b["z"].sigmoid())),
    Row("mixup", mixed_up),
    Row("distillation", distilled),
    Row("a penalty on parameters", penalised),
    Row("focal", focal),
    Row("probabilities as targets", lambda net, b: F.cross_entropy(rows(net, b), b["z"].softmax(-1))),
    Row("two terms", lambda net, b: F.mse_loss(rows(net, b), b["z"]) + 0.1 * rows(net, b).abs().mean()),
    Row("of one element", lambda net, b: tokens(net, b).reshape(1)),
]
STATED = [
    Row("a masked mean", masked, num_tokens),
    Row("a custom function", lambda net, b: Doubled.apply(rows(net, b)), lambda b: len(b["x"])),
    Row("a compiled loss", compiled, lambda b: len(b["x"])),
    Row("a checkpointed one", lambda net, b: checkpoint(tokens, net, b, use_reentrant=False), num_tokens),
    Row("in proportion", lambda net, b: F.mse_loss(rows(net, b), b["z"]), lambda b: len(b["x"])),
    Row("batchmean", lambda net, b: rows(net, b).square().sum() / len(b["x"]), lambda b: len(b["x"])),
]


class Module(LightningModule):
    """A net that learns with a loss; it keeps the gradient of each step."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.net, self.row = Net(), row
        self.seen: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.row.loss(self.net, batch)
        return loss if self.row.items is None else {"loss": loss, "items": self.row.items(batch), "extra": "kept"}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: p.grad.clone() for name, p in self.net.named_parameters() if p.grad is not None})
        if isinstance(self.trainer.strategy, ExactStrategy):
            self.losses.append(float(self.trainer.strategy.result.loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def whole_batches(row: Row, windows: Sequence[Sequence[Batch]]) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The gradients and losses of steps on one big batch each."""
    net, gradients, losses = Net(), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for window in windows:
        optimizer.zero_grad()
        loss = row.loss(net, together(window))
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in net.named_parameters()})
        losses.append(loss.item())
        optimizer.step()
    return gradients, losses


@pytest.mark.parametrize("row", READ + STATED, ids=lambda row: row.name)
@pytest.mark.parametrize("options", [{}, {"micro": 2}], ids=str)
def test_each_step_is_that_of_one_big_batch(row, options):
    module = Module(row)
    fit(module, BATCHES, load=Given, strategy=ExactStrategy(steps=STEPS, **options))
    expected, losses = whole_batches(row, [BATCHES[:3], BATCHES[3:]])
    assert len(module.seen) == len(expected)
    for ours, theirs in zip(module.seen, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-12
    assert module.losses == pytest.approx(losses, rel=1e-12)


UNREAD = [
    Row("a masked mean", masked),
    Row("a custom function", lambda net, b: Doubled.apply(rows(net, b))),
    Row("a compiled loss", compiled),
    Row("a checkpointed one", lambda net, b: checkpoint(tokens, net, b, use_reentrant=False)),
    Row("a mean of squared means", lambda net, b: rows(net, b).mean(0).square().mean()),
    Row("a norm", lambda net, b: rows(net, b).norm()),
]
NODES = ["DivBackward0", "DoubledBackward", "CompiledFunctionBackward", "Backward0", "MeanBackward1", "Norm"]


@pytest.mark.parametrize("options", [{}, {"micro": 2}], ids=str)
@pytest.mark.parametrize(("row", "node"), list(zip(UNREAD, NODES, strict=True)), ids=lambda one: str(one)[:30])
def test_what_cannot_be_read_is_an_error_in_the_first_window(row, node, options):
    module = Module(row)
    before = weights_of(module)
    with pytest.raises(BatchError, match=rf'{node}.* was not understood.*Return \{{"loss": loss, "items": n\}}'):
        fit(module, BATCHES, load=Given, strategy=ExactStrategy(steps=STEPS, **options))
    assert not module.seen
    assert relative_error(weights_of(module), before) == 0
    assert all(p.grad is None for p in module.parameters())


def two_counts(net: Net, b: Batch) -> Tensor:
    return tokens(net, b) + F.cross_entropy(rows(net, b), b["label"])


REFUSED = [
    (Row("divided by steps", lambda net, b: tokens(net, b) / STEPS), "divided by 3, .* leave the division out"),
    (Row("a sum", lambda net, b: rows(net, b).square().sum()), r'this loss is a sum .*"loss": loss / n, "items": n'),
    (Row("two counts", two_counts), r"several means.*MacroStep\(\.\.\., counts="),
    (Row("another count", lambda net, b: tokens(net, b, reduction="sum") / 40), "Divide by the count of the batch"),
    (Row("out of proportion", tokens, lambda b: b["y"].numel()), 'not in proportion.*"items": 1 in every batch'),
    (Row("factors that change", lambda net, b: tokens(net, b) * len(b["x"])), "not the same expression.*Return what"),
    (Row("a count that stays", lambda net, b: rows(net, b).T[0, :1].square().mean()), "cannot be read. Return it"),
]


@pytest.mark.parametrize(("row", "match"), REFUSED, ids=lambda one: one.name if isinstance(one, Row) else "")
def test_what_is_refused_says_what_to_return(row, match):
    module = Module(row)
    with pytest.raises(MacrobatchError, match=match) as raised:
        fit(module, BATCHES, load=Given, strategy=ExactStrategy(steps=STEPS))
    assert not module.seen
    for word in ("acc.", "reduction=", "Accumulator", "items=", "discard"):
        assert word not in str(raised.value)


def test_a_division_by_the_length_of_a_windows_epoch():
    """With a schedule, the length that hooks read is that of the epoch."""
    row = Row("divided", lambda net, b: tokens(net, b) / 3)
    with pytest.raises(MacrobatchError, match="divided by 3"):
        fit(Module(row), BATCHES, load=Given, strategy=ExactStrategy(steps={0: 2, 1: 3}), max_epochs=2)
    with pytest.raises(MacrobatchError, match="divided by 3"):
        fit(Module(row), BATCHES, load=Given, strategy=ExactStrategy(steps=3, micro=2))


ALL = [*READ, *STATED, *UNREAD, *(row for row, _ in REFUSED)]


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_one_batch_a_step_in_one_process_is_lightning_bit_for_bit(row):
    theirs, ours = Module(row), Module(row)
    fit(theirs, BATCHES, load=Given, max_epochs=2)
    trainer = fit(ours, BATCHES, load=Given, max_epochs=2, strategy=ExactStrategy())
    for name, weight in weights_of(theirs.net).items():
        assert torch.equal(weight, weights_of(ours.net)[name]), name
    assert trainer.strategy.result.step == trainer.global_step == 2 * len(BATCHES)
    assert ours.losses[-1] == pytest.approx(row.loss(net_before(ours), BATCHES[-1]).item(), rel=1e-9)


def in_precision(precision: str) -> dict[str, Any]:
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("steps", [2, 4])
def test_equal_batches_train_as_with_lightning_bit_for_bit(steps, precision):
    """Where counts and steps are powers of two."""
    data = [reference.batch(4, seed=seed, items=8) for seed in range(8)]
    found = []
    for how in ({"accumulate_grad_batches": steps}, {"strategy": ExactStrategy(steps=steps)}):
        task = Task(name="AdamW", counting=Counting("read"), dtype=torch.float32)
        fit(task, data, precision=precision, gradient_clip_val=0.05, **how)
        found.append(weights_of(task.net))
    assert relative_error(*found) == 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions(precision):
    """What is read is what a program would count; and one batch a step is Lightning's own."""
    row, found = READ[0], []
    for items, how in (
        (None, {"strategy": ExactStrategy(steps=STEPS)}),
        (num_tokens, {"strategy": ExactStrategy(steps=STEPS)}),
        (None, {"strategy": ExactStrategy()}),
        (None, {}),
    ):
        module = Module(Row(row.name, row.loss, items))
        module.float()
        data = [{name: x.float() if x.is_floating_point() else x for name, x in b.items()} for b in BATCHES]
        fit(module, data, load=Given, max_epochs=2, **in_precision(precision), **how)
        found.append(weights_of(module.net))
    read, given, ours, theirs = found
    assert relative_error(ours, theirs) == 0
    # A count that is saved in bfloat16 stays a tensor, so the division rounds in another way.
    assert relative_error(read, given) <= (0.004 if precision == "bf16-true" else 0)
    assert relative_error(found[0], found[2]) > 0


def net_before(module: Module) -> Net:
    """The net before its last step."""
    net = Net()
    net.load_state_dict({n: w + 0.1 * module.seen[-1].get(n, 0) for n, w in module.net.state_dict().items()})
    return net


@pytest.mark.parametrize("row", [READ[0], UNREAD[0], REFUSED[1][0]], ids=lambda row: row.name)
def test_a_window_of_one_batch_is_exact_whatever_its_loss_is(row):
    """The only batch of an epoch, in a fit whose windows may be longer."""
    module = Module(row)
    trainer = fit(module, BATCHES[:1], load=Given, strategy=ExactStrategy(steps=STEPS))
    ((expected,), _) = whole_batches(row, [BATCHES[:1]])
    assert relative_error(module.seen[0], expected) <= 1e-15
    assert trainer.strategy.result.items == (num_tokens(BATCHES[0]) if row is READ[0] else 1)


def test_what_a_result_says_of_one_batch():
    trainer = fit(Module(READ[0]), BATCHES[:1], load=Given, strategy=ExactStrategy())
    result = trainer.strategy.result
    assert (result.step, result.micro_batches, result.skipped) == (1, 1, False)
    assert result.items == num_tokens(BATCHES[0])
    trainer = fit(Module(STATED[4]), BATCHES[:1], load=Given, strategy=ExactStrategy())
    assert trainer.strategy.result.items == len(BATCHES[0]["x"])


def test_one_batch_a_step_that_has_no_items_takes_no_step():
    for zero in (0, torch.tensor(0)):
        module = Module(Row("none", lambda net, b: net(b["x"]).mean() * torch.nan, lambda b, zero=zero: zero))
        before = weights_of(module)
        fit(module, BATCHES[:2], load=Given, strategy=ExactStrategy())
        assert relative_error(weights_of(module), before) == 0


def test_items_that_are_no_count_are_the_programs_own():
    module = Module(Row("names", tokens, lambda b: ["a", "b"]))
    fit(module, BATCHES, load=Given, strategy=ExactStrategy())
    assert len(module.seen) == len(BATCHES)
    with pytest.raises(BatchError, match="items must be"):
        fit(Module(module.row), BATCHES, load=Given, strategy=ExactStrategy(steps=2))


def test_batches_without_a_loss_are_left_out():
    class Leaving(Module):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return None if batch_idx in (0, 2) else super().training_step(batch, batch_idx)

    module = Leaving(READ[0])
    fit(module, BATCHES, load=Given, strategy=ExactStrategy(steps=STEPS))
    expected, _ = whole_batches(READ[0], [BATCHES[1:2], BATCHES[3:]])
    assert [relative_error(*pair) <= 1e-12 for pair in zip(module.seen, expected, strict=True)] == [True, True]


def test_no_forward_is_added():
    class Counted(Module):
        calls = 0

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            self.calls += 1
            return super().training_step(batch, batch_idx)

    for steps in (1, 3):
        module = Counted(READ[0])
        fit(module, BATCHES, load=Given, strategy=ExactStrategy(steps=steps))
        assert module.calls == len(BATCHES)


class Adversaries(LightningModule):
    """A generator and a discriminator that step in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(CLASSES, CLASSES).double(), nn.Linear(CLASSES, 1).double()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.critic, self.generator)]

    def critic_loss(self, b: Batch) -> Tensor:
        scores = torch.cat([self.critic(b["z"]), self.critic(self.generator(b["z"]).detach())])
        real = torch.cat([torch.ones(len(b["z"]), 1), torch.zeros(len(b["z"]), 1)]).to(scores)
        return F.binary_cross_entropy_with_logits(scores, real)

    def generator_loss(self, b: Batch) -> Tensor:
        scores = self.critic(self.generator(b["z"]))
        return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))

    def on_train_start(self) -> None:
        parts = (self.critic, self.generator)
        optimizers = [optimizer.optimizer for optimizer in self.optimizers()]
        self.accumulators = [Accumulator(*pair, steps=STEPS) for pair in zip(parts, optimizers, strict=True)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        is_last = self.trainer.is_last_batch or None
        for acc, loss_of in zip(self.accumulators, (self.critic_loss, self.generator_loss), strict=True):
            with acc.micro_batch(last=is_last):
                acc.backward(loss_of(batch))
            acc.step()


@pytest.mark.parametrize("strategy", ["auto", ExactStrategy()], ids=["stock", "ours"])
def test_adversaries_with_manual_optimization(strategy):
    module, whole = Adversaries(), Adversaries()
    with quiet():
        Trainer(**OURS, max_epochs=1, strategy=strategy).fit(module, Given(BATCHES[:3]))
    window = together(BATCHES[:3])
    critic, generator = whole.configure_optimizers()
    critic_before = {name: p.clone() for name, p in whole.critic.state_dict().items()}
    whole.critic_loss(window).backward()
    critic.step()
    stepped = {name: p.clone() for name, p in whole.critic.state_dict().items()}
    # The generator's window saw the critic before its step in its first batches, and after it in the last.
    for batch, weights in zip(BATCHES[:3], (critic_before, critic_before, stepped), strict=True):
        whole.critic.load_state_dict(weights)
        (whole.generator_loss(batch) * len(batch["z"]) / len(window["z"])).backward()
    generator.step()
    whole.critic.load_state_dict(stepped)
    assert relative_error(weights_of(module), weights_of(whole)) <= 1e-12
