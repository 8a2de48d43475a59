"""Published programs for language and speech, each reduced to its step and converted."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.converting import (
    PLAIN,
    SGD,
    STEPS,
    Batch,
    N,
    difference,
    draw,
    gradients,
    in_a_loop,
    joined,
    program,
    split,
    whole_numbers,
)
from macrobatch.accelerate import Accelerator

WORDS = 11


def words() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)).double()


def labels_of(tokens: Tensor, padding: int = -100) -> Tensor:
    lengths = 1 + torch.arange(len(tokens)) % 6
    return tokens.masked_fill(torch.arange(tokens.shape[1]) >= lengths[:, None], padding)


@program("nanoGPT", ("karpathy/nanoGPT", "3adf61e", "train.py"), "cross-entropy over all tokens; clipped", PLAIN, 3)
def nanogpt() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(m(b[0][:, :-1]).flatten(0, 1), b[0][:, 1:].flatten(), ignore_index=-1)

    return in_a_loop(words(), loss_of, (whole_numbers(WORDS, N, 7),), max_norm=0.1)


@program(
    "BERT, masked language model",
    ("huggingface/transformers", "d56c55b", "examples/pytorch/language-modeling/run_mlm_no_trainer.py"),
    "cross-entropy over the masked tokens, under Accelerate",
    "the import of `Accelerator`",
    1,
)
def bert() -> float:
    model, other, tokens, errors = words(), words(), whole_numbers(WORDS, N, 7), []
    batches = split((tokens, labels_of(tokens)))

    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())

    optimizer, plain, found = SGD(model.parameters()), SGD(other.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: found.append(gradients(list(model.parameters()))))
    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    prepared, steps, loader = accelerator.prepare(model, optimizer, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    for one in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, one))
            steps.step()
            steps.zero_grad()
    for index, now in enumerate(found):
        loss_of(other, joined(batches[index * STEPS : (index + 1) * STEPS])).backward()
        errors.append(difference(now, gradients(list(other.parameters()))))
        plain.step()
        plain.zero_grad()
    assert len(errors) == 2
    return max(errors)


@program(
    "fairseq, translation",
    ("facebookresearch/fairseq", "3d262bb", "fairseq/trainer.py"),
    "label-smoothed sums, divided by the tokens of all micro-batches and ranks; clipped",
    '`reduction="sum"`, `items=` its sample size; `multiply_grads` goes',
    4,
)
def fairseq() -> float:
    smoothing, padding = 0.1, 1

    def sums(m: nn.Module, b: Batch) -> Tensor:
        logs = m(b[0]).log_softmax(-1)
        is_word = b[1] != padding
        own = -logs.gather(-1, b[1][..., None])[..., 0][is_word].sum()
        other = smoothing / (WORDS - 1)
        return (1 - smoothing - other) * own + other * -logs.sum(-1)[is_word].sum()

    def count(b: Batch) -> int:
        return int((b[1] != padding).sum())

    tokens = 2 + whole_numbers(WORDS - 2, N, 7)
    batch = (tokens, labels_of(tokens, padding))
    return in_a_loop(words(), sums, batch, items=count, divisor=count, max_norm=0.1, reduction="sum")


class Recurrent(nn.Module):
    """An LSTM that returns what it hands over to the next part of its sequences."""

    def __init__(self, out: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, out)
        self.double()

    def forward(self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden, _ = self.rnn(x, None if h is None or c is None else (h[None], c[None]))
        return self.head(hidden), hidden


@program(
    "AWD-LSTM",
    ("salesforce/awd-lstm-lm", "1d466ec", "main.py"),
    "cross-entropy over words, and means of squared activations and of their differences; clipped",
    "and `items=len(targets)`; each micro-batch keeps its columns' hidden state",
    5,
)
def awd_lstm() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        x, y, h, c = b
        logits, hidden = m(x, h, c)
        entropies = -logits.flatten(0, 1).log_softmax(-1).gather(1, y.view(-1, 1))
        slowness = (hidden[:, 1:] - hidden[:, :-1]).pow(2).mean()
        return entropies.sum() / y.numel() + 2.0 * hidden.pow(2).mean() + 1.0 * slowness

    states = draw(N, 8, seed=8), draw(N, 8, seed=9)
    batch = (draw(N, 7, 3), whole_numbers(5, N, 7), *states)
    return in_a_loop(Recurrent(), loss_of, batch, items=lambda b: b[1].numel(), max_norm=0.25)


@program(
    "DeepSpeech 2",
    ("SeanNaren/deepspeech.pytorch", "b88a631", "deepspeech_pytorch/model.py"),
    "`ctc_loss`, an undivided sum over utterances",
    '`reduction="total"`',
    3,
)
def ctc() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        logits = m(b[0])[0].transpose(0, 1).log_softmax(-1)
        return F.ctc_loss(logits, b[1], torch.full((len(b[0]),), 9), b[2], reduction="sum", zero_infinity=True)

    batch = (draw(N, 9, 3), 1 + whole_numbers(4, N, 3), 1 + whole_numbers(3, N, seed=3))
    return in_a_loop(Recurrent(), loss_of, batch, reduction="total", make=partial(torch.optim.SGD, lr=1e-3))


@program(
    "word2vec, negative sampling",
    ("Andras7/word2vec-pytorch", "36b93a5", "word2vec/trainer.py"),
    "mean over pairs of clamped log-sigmoids; sparse gradients, SparseAdam",
    "loader, `backward`, `step`",
    3,
)
def word2vec() -> float:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(20, 4, sparse=True), nn.Embedding(20, 4, sparse=True)]).double()

    def loss_of(m: Any, b: Batch) -> Tensor:
        centre = m[0](b[0])
        near = -F.logsigmoid((centre * m[1](b[1])).sum(1).clamp(-10, 10))
        far = (m[1](b[2]) @ centre[:, :, None])[..., 0].clamp(-10, 10)
        return (near - F.logsigmoid(-far).sum(1)).mean()

    batch = (whole_numbers(20, N), whole_numbers(20, N, seed=3), whole_numbers(20, N, 4))
    return in_a_loop(model, loss_of, batch, make=partial(torch.optim.SparseAdam, lr=0.1))


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(0.1 * torch.randn(5, 2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@program(
    "LoRA, GPT-2",
    ("microsoft/LoRA", "c4593f0", "examples/NLG/src/gpt2_ft.py"),
    "smoothed entropies times a mask, over its sum; frozen base weights",
    "and `items=mask.sum()`; the 0.0001 in the divisor goes",
    5,
)
def lora() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        logs = m(b[0]).log_softmax(-1)
        losses = 0.9 * -logs.gather(-1, b[1][..., None])[..., 0] - 0.1 * logs.mean(-1)
        return (losses * b[2]).sum() / b[2].sum()

    masks = (torch.arange(4) <= torch.arange(N)[:, None] % 4).double()
    batch = (draw(N, 4, 6), whole_numbers(5, N, 4), masks)
    return in_a_loop(LowRank(), loss_of, batch, items=lambda b: b[2].sum())
