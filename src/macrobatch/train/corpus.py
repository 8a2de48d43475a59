"""The samples to train on: documents as ids, cut to a length, compact in memory and kept on disk.

A long text becomes several samples, each of which begins with the last token of the one before it: every token but a
text's very first is then predicted exactly once.
"""

from __future__ import annotations

import hashlib
import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from macrobatch._cut.padding import IGNORED
from macrobatch._cut.plans import rounded_up
from macrobatch.errors import BatchError, UsageError, counted
from macrobatch.train.cache import digest, kept
from macrobatch.train.documents import Document, documents
from macrobatch.train.vocabulary import Vocabulary

__all__ = ["Corpus", "Document", "collated", "documents"]

logger = logging.getLogger("macrobatch")

Sample = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Samples of very different lengths.

    >>> vocabulary = Vocabulary.trained([Document("to be or not to be")], size=300)
    >>> corpus = Corpus.made([Document("to be"), Document("to be", " or not")], vocabulary, seq_len=64)
    >>> len(corpus), corpus.num_tokens == sum(corpus.lengths)
    (2, True)
    >>> corpus[1]["labels"].shape == corpus[1]["input_ids"].shape
    True

    Attributes:
        tokens: of all documents, one after the other, int32.
        starts: for each sample, where in `tokens` it begins.
        sizes: how many tokens it has.
        prompts: how many of them are a prompt, and not learnt.
        parents: the number of the document that it is a piece of.
        truncated: of how many documents a part was left out, since prompt and completion did not fit.
    """

    tokens: Tensor
    starts: Tensor
    sizes: Tensor
    prompts: Tensor
    parents: Tensor
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        """What a model is trained on: ids, and labels that are -100 on the prompt."""
        start, size = int(self.starts[index]), int(self.sizes[index])
        ids = self.tokens[start : start + size].long()
        labels = ids.clone()
        labels[: int(self.prompts[index])] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def lengths(self) -> list[int]:
        """How many tokens each sample has."""
        lengths: list[int] = self.sizes.tolist()
        return lengths

    @cached_property
    def num_tokens(self) -> int:
        """How many tokens an epoch has, without padding."""
        return int(self.sizes.sum())

    @cached_property
    def largest_id(self) -> int:
        """What a model's vocabulary must be larger than; -1 where there is no token."""
        return int(self.tokens.max()) if len(self.tokens) else -1

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same samples in the same order: whoever resumes a run must see them again."""
        total = hashlib.sha256()
        for part in (self.tokens, self.starts, self.sizes, self.prompts):
            total.update(b"%d:" % len(part))
            total.update(part.numpy().data)
        return total.hexdigest()

    def split(self, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
        """A part to train on, and one to measure on: whole documents, of which the seed says which.

        Where there are so few that one would be more than that part, it is the end of all the texts instead: pieces
        from all over would have their neighbours among those that are trained on.

        Args:
            fraction: how much to measure on; 0: nothing.
            seed: decides which.
        """
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise UsageError(f"the fraction to validate on must be at least 0 and less than 1: got {fraction!r}.")
        if fraction == 0:
            return self._some([True] * len(self)), self._some([False] * len(self))
        if len(self) < 2:
            raise UsageError(
                f"{counted(len(self), 'sample')} cannot be split into some to train on and some to validate on. Add "
                "data, take a smaller --seq-len, or validate on none: --validation 0."
            )
        parents: list[int] = self.parents.tolist()
        documents = sorted(set(parents))
        if fraction * len(documents) < 1:
            first = min(max(round((1 - fraction) * len(self)), 1), len(self) - 1)
            is_held = [index >= first for index in range(len(self))]
        else:
            count = min(round(fraction * len(documents)), len(documents) - 1)
            chosen = set(random.Random(f"split {seed}").sample(documents, count))
            is_held = [parent in chosen for parent in parents]
        return self._some([not held for held in is_held]), self._some(is_held)

    def _some(self, keep: list[bool]) -> Corpus:
        mask = torch.tensor(keep, dtype=torch.bool)
        return Corpus(
            self.tokens, self.starts[mask], self.sizes[mask], self.prompts[mask], self.parents[mask], self.truncated
        )

    # ------------------------------------------------------------------------------------------------------- making

    @classmethod
    def made(
        cls, documents: Sequence[Document], vocabulary: Vocabulary, *, seq_len: int, cache: Path | None = None
    ) -> Corpus:
        """The samples that these documents make.

        Args:
            documents: texts, cut into pieces; and prompts with completions, which stay one sample. Where such a pair
                is too long, the completion stays, and the end of the prompt that fits before it; `truncated` counts
                them.
            vocabulary: makes ids of them.
            seq_len: the most tokens that a sample may have.
            cache: a folder in which to keep the result.
        """
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
            raise UsageError(f"seq_len must be a whole number of tokens, at least 2 to predict one: got {seq_len!r}.")
        parts = (part for d in documents for part in (d.text, "text" if d.completion is None else f"+{d.completion}"))
        name = f"corpus-{seq_len}-{digest([vocabulary.fingerprint, digest(parts)])}"
        corpus = cls._from_bytes(kept(cache, name, lambda: _encoded(documents, vocabulary, seq_len)._to_bytes()))
        if not len(corpus):
            raise BatchError(f"there is nothing to train on: {len(documents)} documents made no token to predict.")
        if corpus.truncated:
            logger.warning(
                "%d of %d prompts and completions are longer than %d tokens: what did not fit of the prompt, and then "
                "of the completion, was left out.", corpus.truncated, len(documents), seq_len,
            )  # fmt: skip
        return corpus

    def _to_bytes(self) -> bytes:
        tensors = {name: getattr(self, name) for name in ("tokens", "starts", "sizes", "prompts", "parents")}
        content: bytes = save({**tensors, "truncated": torch.tensor(self.truncated)})
        return content

    @classmethod
    def _from_bytes(cls, content: bytes) -> Corpus:
        tensors = load(content)
        truncated = int(tensors.pop("truncated"))
        return cls(**tensors, truncated=truncated)


def _encoded(documents: Sequence[Document], vocabulary: Vocabulary, seq_len: int) -> Corpus:
    tokens, rows = array("i"), array("q")
    truncated = 0
    texts = (text for d in documents for text in ((d.text,) if d.completion is None else (d.text, d.completion)))
    encoded = vocabulary.encoded(texts)
    for parent, document in enumerate(documents):
        start = len(tokens)
        ids = [*vocabulary.start, *next(encoded)]
        if document.completion is None:
            if len(ids) == len(vocabulary.start):
                continue  # nothing but characters that the tokenizer drops
            ids.append(vocabulary.end)
            pieces, prompt = list(_pieces(len(ids), seq_len)), 0
        else:
            completion = [*next(encoded), vocabulary.end]
            truncated += len(ids) + len(completion) > seq_len
            ids = _fitted(ids, len(vocabulary.start), seq_len - len(completion))
            prompt = len(ids)
            ids = (ids + completion)[:seq_len]
            pieces = [(0, len(ids))] if len(ids) > 1 else []  # nothing before an end, nothing to predict it from
        tokens.extend(ids)
        for first, size in pieces:
            rows.extend((start + first, size, prompt, parent))
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    starts, sizes, prompts, parents = (column.contiguous() for column in table.unbind(1))
    return Corpus(torch.tensor(tokens, dtype=torch.int32), starts, sizes, prompts, parents, truncated)


def _pieces(length: int, seq_len: int) -> Iterator[tuple[int, int]]:
    """Where each piece of a text begins, and its size; the first token of each but the first is the last of another.

    >>> list(_pieces(10, 4))
    [(0, 4), (3, 4), (6, 4)]
    >>> list(_pieces(3, 4))
    [(0, 3)]
    """
    for first in range(0, max(length - 1, 1), seq_len - 1):
        yield first, min(seq_len, length - first)


def _fitted(prompt: list[int], num_fixed: int, room: int) -> list[int]:
    """The end of a prompt, and before it what begins every text; a token at least, to predict the completion from.

    >>> _fitted([1, 5, 6, 7], 1, room=3), _fitted([1, 5, 6, 7], 1, room=0)
    ([1, 6, 7], [7])
    """
    room = max(room, 1)
    if len(prompt) <= room:
        return prompt
    if room <= num_fixed:
        return prompt[-room:]
    return prompt[:num_fixed] + prompt[len(prompt) - room + num_fixed :]


def collated(samples: Sequence[Sample], *, few_widths: bool = False) -> Sample:
    """A micro-batch of some samples, filled up on the right: the ``collate=`` of `MacroStep`.

    With `few_widths` to one of few lengths, for what is recorded once a shape.

    >>> batch = collated([{"input_ids": torch.tensor([7, 8]), "labels": torch.tensor([7, 8])},
    ...                   {"input_ids": torch.tensor([9]), "labels": torch.tensor([9])}])
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["labels"].tolist()
    ([[7, 8], [9, 0]], [[1, 1], [1, 0]], [[7, 8], [9, -100]])
    """
    ids = [sample["input_ids"] for sample in samples]
    longest = max(len(part) for part in ids)
    more = rounded_up(longest) - longest if few_widths else 0

    def padded(parts: list[Tensor], value: int) -> Tensor:
        return F.pad(pad_sequence(parts, batch_first=True, padding_value=value), (0, more), value=value)

    return {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([torch.ones_like(part) for part in ids], 0),
        "labels": padded([sample["labels"] for sample in samples], IGNORED),
    }
