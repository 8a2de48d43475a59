"""`macrobatch generate`: text from a model that was trained."""

# mypy: untyped-calls-exclude="torch,transformers"
from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from macrobatch.errors import UsageError
from macrobatch.train import models, suitable
from macrobatch.train.pretrained import in_folder
from macrobatch.train.vocabulary import Vocabulary


def text_from(
    run: Path, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """The prompt, and how the model goes on from it, of a run or in any folder with weights and a tokenizer."""
    origin = in_folder(run)
    if not origin.has_weights:
        raise UsageError(f"{run} holds the configuration of a model, and no weights.")
    model, vocabulary = models.merged(origin), Vocabulary.load(origin.tokenizer or origin.path)
    suitable.require_causal(model, origin)
    (ids,) = vocabulary.encode([prompt])
    ids = [*vocabulary.start, *ids] or [vocabulary.end]
    generator = torch.Generator().manual_seed(seed)
    return vocabulary.decode(_continued(model, ids, tokens, vocabulary.end, temperature, top_k, generator))


@torch.inference_mode()
def _continued(
    model: nn.Module, ids: list[int], tokens: int, end: int, temperature: float, top_k: int, generator: torch.Generator
) -> list[int]:
    """The ids, and new ones until `end`, until there are enough, or until the model can take no more."""
    model.eval()
    longest = getattr(model.config, "max_position_embeddings", None) or len(ids) + tokens
    if len(ids) > longest:
        raise UsageError(f"the prompt has {len(ids)} tokens, and the model takes {longest}: shorten it.")
    taken, cache = torch.tensor([ids]), None
    for _ in range(min(tokens, longest - len(ids))):
        output = model(input_ids=taken, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1].double()
        if temperature == 0:
            choice = int(logits.argmax())
        else:
            best = logits.topk(min(top_k, len(logits)))
            odds = (best.values / temperature).softmax(0)
            choice = int(best.indices[torch.multinomial(odds, 1, generator=generator)])
        if choice == end:
            break
        ids = [*ids, choice]
        taken = torch.tensor([[choice]])
    return ids
