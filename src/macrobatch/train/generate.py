"""`macrobatch generate`: generate text with a trained model."""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from macrobatch.errors import UsageError
from macrobatch.train import models, suitable
from macrobatch.train.chat import MarkedText
from macrobatch.train.formats import ASSISTANT, Message
from macrobatch.train.pretrained import in_folder
from macrobatch.train.vocabulary import Vocabulary


def text_from(
    run: Path, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """Continue a prompt with the model of a run, or of any folder with weights and a tokenizer."""
    model, vocabulary = _load(run)
    (ids,) = vocabulary.encode([prompt])
    ids = [*vocabulary.start, *ids] or [vocabulary.end]
    generator = torch.Generator().manual_seed(seed)
    added = _take_until_end(vocabulary, _continuation(model, ids, temperature, top_k, generator), tokens)
    return vocabulary.decode([*ids, *added])


def conversation(
    run: Path, questions: Iterable[str], *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> Iterator[str]:
    """Answer one question after the other, each with all earlier questions and answers before it.

    If the conversation no longer fits into the model, its oldest questions and answers are left out.

    The next question is read when the last answer has been returned.
    """
    model, vocabulary = _load(run)
    if vocabulary.chat is None:
        raise UsageError(
            f"{run}: --chat needs a chat template, and the tokenizer has none. Leave out --chat, or train the model on "
            "conversations with --chat-template."
        )
    longest = models.longest_of(model.config)
    generator, said = torch.Generator().manual_seed(seed), list[Message]()
    for question in questions:
        said.append({"role": "user", "content": question})
        while True:
            opening, closing = vocabulary.chat.question(said)
            (codes,) = vocabulary.encode_each([MarkedText(opening, ())])
            if longest is None or len(said) == 1 or len(codes) + min(tokens, longest // 2) <= longest:
                break
            del said[:2]
        ids = [~code for code in codes]  # `encoded` returns ~id for tokens without a loss
        added = _take_until_end(vocabulary, _continuation(model, ids, temperature, top_k, generator), tokens, closing)
        answer = vocabulary.decode(added)
        answer = (answer.partition(closing)[0] if closing else answer).strip()
        said.append({"role": ASSISTANT, "content": answer})
        yield answer


def _load(run: Path) -> tuple[nn.Module, Vocabulary]:
    origin = in_folder(run)
    if not origin.has_weights:
        raise UsageError(f"{run} has a configuration, but no weights.")
    model, vocabulary = models.load_merged(origin), Vocabulary.load(origin.tokenizer or origin.path)
    suitable.require_causal(model, origin)
    return model, vocabulary


def _take_until_end(vocabulary: Vocabulary, drawn: Iterator[int], most: int, closing: str = "") -> list[int]:
    """The first tokens of those that are drawn, until the end of the text or of the answer."""
    added: list[int] = []
    for token in itertools.islice(drawn, most):
        if token == vocabulary.end:
            break
        added.append(token)
        if closing and closing in vocabulary.decode(added, with_special=True):
            break
    return added


@torch.inference_mode()
def _continuation(
    model: nn.Module, ids: list[int], temperature: float, top_k: int, generator: torch.Generator
) -> Iterator[int]:
    """New token ids, one after the other, until the model's largest number of positions."""
    model.eval()
    longest = models.longest_of(model.config)
    if longest is not None and len(ids) > longest:
        raise UsageError(f"the prompt has {len(ids)} tokens, and the model takes {longest}: shorten it.")
    taken, cache = torch.tensor([ids]), None
    for _ in itertools.count() if longest is None else range(longest - len(ids)):
        output = model(input_ids=taken, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1].double()
        if temperature == 0:
            choice = int(logits.argmax())
        else:
            best = logits.topk(min(top_k, len(logits)))
            odds = (best.values / temperature).softmax(0)
            choice = int(best.indices[torch.multinomial(odds, 1, generator=generator)])
        yield choice
        taken = torch.tensor([[choice]])
