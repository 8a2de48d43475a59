"""`macrobatch generate`: generate text with a trained model."""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from macrobatch.errors import UsageError
from macrobatch.train import models, suitable
from macrobatch.train.chat import Marked
from macrobatch.train.pretrained import in_folder
from macrobatch.train.vocabulary import Vocabulary


def text_from(
    run: Path,
    prompt: str,
    *,
    chat: bool = False,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Generate text with the model of a run, or of any folder with weights and a tokenizer.

    Args:
        run: the folder of the run or of the model.
        prompt: the beginning of the text; with `chat`, the message of a user.
        chat: write the prompt with the model's chat template, and return only the answer. Otherwise return prompt and
            text.
        tokens: the largest number of tokens to generate.
        temperature: the sampling temperature; 0 always takes the most likely token.
        top_k: sample among this number of the most likely tokens.
        seed: the seed of the sampling.
    """
    origin = in_folder(run)
    if not origin.has_weights:
        raise UsageError(f"{run} holds the configuration of a model, and no weights.")
    model, vocabulary = models.merged(origin), Vocabulary.load(origin.tokenizer or origin.path)
    suitable.require_causal(model, origin)
    closing = ""
    if chat:
        ids, closing = _asked(vocabulary, prompt, run)
    else:
        (ids,) = vocabulary.encode([prompt])
        ids = [*vocabulary.start, *ids] or [vocabulary.end]
    generator = torch.Generator().manual_seed(seed)
    added: list[int] = []
    for token in itertools.islice(_continuation(model, ids, temperature, top_k, generator), tokens):
        if token == vocabulary.end:
            break
        added.append(token)
        if closing and closing in vocabulary.decode(added, with_special=True):
            break
    if chat:
        answer = vocabulary.decode(added)
        return (answer.partition(closing)[0] if closing else answer).strip()
    return vocabulary.decode([*ids, *added])


def _asked(vocabulary: Vocabulary, prompt: str, run: Path) -> tuple[list[int], str]:
    """The token ids of a user's message with the prompt for an answer; and the text that ends an answer."""
    if not prompt:
        raise UsageError("--chat answers a --prompt, and there is none.")
    if vocabulary.chat is None:
        raise UsageError(
            f"{run}: --chat needs a chat template, and its tokenizer has none. Leave --chat out, or train the model on "
            "conversations with --chat-template."
        )
    opening, closing = vocabulary.chat.question(prompt)
    (ids,) = vocabulary.encoded([Marked(opening, ())])
    return [~one for one in ids], closing  # `encoded` returns ~id for tokens without a loss


@torch.inference_mode()
def _continuation(
    model: nn.Module, ids: list[int], temperature: float, top_k: int, generator: torch.Generator
) -> Iterator[int]:
    """New token ids, one after the other, until the model's largest number of positions."""
    model.eval()
    longest = getattr(model.config, "max_position_embeddings", None)
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
