"""The samples to train on: tokenized documents, cut to a length, in a memory-mapped file.

A long text becomes several samples. Each of them begins with the last token of the one before it, so that every token
except the first one of a text is predicted exactly once. Only a table of the samples is in memory, not their tokens.
"""

from __future__ import annotations

import hashlib
import logging
import random
import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from macrobatch._cut.padding import IGNORED
from macrobatch._cut.plans import rounded_up
from macrobatch.errors import BatchError, UsageError, counted
from macrobatch.train.cache import Put, cached_view, digest
from macrobatch.train.chat import MarkedText
from macrobatch.train.documents import Document, Documents, documents
from macrobatch.train.vocabulary import Vocabulary

__all__ = ["Corpus", "Document", "collate", "documents"]

logger = logging.getLogger("macrobatch")

_BLOCK = 1 << 18  # tokens that are read or written together

Sample = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Samples of very different lengths.

    >>> vocabulary = Vocabulary.train([Document("to be or not to be")], size=300)
    >>> corpus = Corpus.from_documents([Document("to be"), Document("to be", " or not")], vocabulary, seq_len=64)
    >>> len(corpus), corpus.num_tokens == sum(corpus.lengths)
    (2, True)
    >>> corpus[1]["labels"].shape == corpus[1]["input_ids"].shape
    True
    """

    # the tokens of all documents, one after the other, int32: the id of a token with a loss, and ``~id``, which
    # is negative, of a token without a loss
    codes: Tensor
    starts: Tensor  # the index in `codes` at which each sample begins
    sizes: Tensor  # the number of tokens of each sample
    parents: Tensor  # the number of the document that each sample is a piece of
    truncated: int = 0  # the number of documents that did not fit completely
    unlearnt: int = 0  # the number of conversations that were left out, because no token of them has a loss
    num_whole: int = 0  # the number of conversations and of prompts with completions, which are not cut into pieces
    longest: int = 0  # the number of tokens of the longest of these, before the rest was cut off

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Sample:
        """A sample for a model: token ids, and labels that are -100 for tokens without a loss."""
        start, size = int(self.starts[index]), int(self.sizes[index])
        codes = self.codes[start : start + size].long()
        return {"input_ids": _ids(codes), "labels": codes.masked_fill(codes < 0, IGNORED)}

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each sample."""
        lengths: list[int] = self.sizes.tolist()
        return lengths

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens in an epoch, without padding."""
        return int(self.sizes.sum())

    @cached_property
    def largest_id(self) -> int:
        """The largest token id; -1 if there is no token. A model's vocabulary must be larger."""
        return max((int(_ids(block).max()) for block in torch.split(self.codes, _BLOCK) if len(block)), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the samples in their order. A run can only be resumed with the same samples."""
        total = hashlib.sha256()
        for part in (self.codes, self.starts, self.sizes):
            total.update(b"%d:" % len(part))
            total.update(part.numpy().data)
        return total.hexdigest()

    def split(self, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
        """A part to train on, and a part to validate on. Each has whole documents, which the seed selects.

        If a single document would be more than the validation part, that part is the end of all samples instead: pieces
        from everywhere would have their neighbours in the training part.
        """
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise UsageError(f"the fraction to validate on must be at least 0 and less than 1: got {fraction!r}.")
        if fraction == 0:
            return self._subset([True] * len(self)), self._subset([False] * len(self))
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
        return self._subset([not held for held in is_held]), self._subset(is_held)

    def _subset(self, keep: list[bool]) -> Corpus:
        mask = torch.tensor(keep, dtype=torch.bool)
        return replace(self, starts=self.starts[mask], sizes=self.sizes[mask], parents=self.parents[mask])

    # ------------------------------------------------------------------------------------------------------- making

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Document],
        vocabulary: Vocabulary,
        *,
        seq_len: int,
        whole_len: int | None = None,
        most_cut: float = 1.0,
        positions: int | None = None,
        cache: Path | None = None,
    ) -> Corpus:
        """Make the samples of these documents.

        A text is cut into pieces of `seq_len` tokens. A conversation, or a prompt with its completion, stays
        one sample of at most `whole_len`: of a pair the beginning of the prompt is cut off, then the end of the
        completion; of a conversation the end. If more than the part `most_cut` of them would be cut, that is an
        error. A conversation without a token to learn is left out.
        """
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
            raise UsageError(f"seq_len must be a whole number of tokens, at least 2 to predict one: got {seq_len!r}.")
        found = Documents.of(documents)
        template = vocabulary.chat.fingerprint if vocabulary.chat and found.has_conversations else ""
        whole_len = max(seq_len, whole_len or 0)
        name = f"corpus-{seq_len}-{whole_len}-{digest([vocabulary.fingerprint, template, found.digest])}"
        corpus = cls._from_file(cached_view(cache, name, partial(_write, found, vocabulary, seq_len, whole_len)))
        if template and vocabulary.chat and vocabulary.chat.writes_the_date:
            logger.warning(
                "the chat template writes the date of the day on which the data was prepared. On another day, without "
                "what was kept of it, it is other data, and the run cannot be resumed."
            )
        kind = "conversations" if template else "prompts and completions"
        if corpus.truncated > most_cut * corpus.num_whole:
            raise UsageError(
                f"{corpus.truncated:,} of {corpus.num_whole:,} {kind} are longer than {whole_len:,} tokens, and would "
                f"be cut. {_cure_of_cutting(corpus, kind, positions)}"
            )
        if corpus.unlearnt:
            logger.warning(
                "left out %d of %d documents: conversations in which the assistant says nothing to learn within their "
                "first %d tokens.", corpus.unlearnt, len(found), whole_len,
            )  # fmt: skip
        if not len(corpus):
            raise BatchError(f"there is nothing to train on: {len(found)} documents contain no token to predict.")
        if corpus.truncated:
            logger.warning(
                "%d of %d %s are longer than %d tokens: %s was left out. The longest has %d tokens%s.",
                corpus.truncated, corpus.num_whole, kind, whole_len,
                "their end" if template else "what did not fit of the prompt, and then of the completion,",
                corpus.longest, "" if (needed := _length_for_all(corpus, positions)) is None else
                f"; --seq-len {needed} keeps all",
            )  # fmt: skip
        return corpus

    @classmethod
    def _from_file(cls, content: memoryview) -> Corpus:
        """The corpus in a file that `_write` wrote."""
        *counts, num_tokens, num_samples = _tensor(content[-48:], torch.int64, 6).tolist()
        table = content[-(-num_tokens // 2) * 8 :]
        starts, sizes, parents = _tensor(table, torch.int64, 3 * num_samples).view(3, -1)
        return cls(_tensor(content, torch.int32, num_tokens), starts, sizes, parents, *counts)


def _length_for_all(corpus: Corpus, positions: int | None) -> int | None:
    """The length that cuts nothing, a multiple of 64 if the model takes that; None if it takes no such length."""
    rounded = -(-corpus.longest // 64) * 64
    return next((one for one in (rounded, corpus.longest) if positions is None or one <= positions), None)


def _cure_of_cutting(corpus: Corpus, kind: str, positions: int | None) -> str:
    """What to do about conversations and the like that are too long."""
    if (needed := _length_for_all(corpus, positions)) is not None:
        return f"--seq-len {needed} keeps all {corpus.num_whole:,} {kind}; --truncate cuts them."
    return (
        f"The longest has {corpus.longest:,}, and the model takes {positions:,}: --truncate cuts them, or leave them "
        "out of the data."
    )


def _tensor(content: memoryview, dtype: torch.dtype, count: int) -> Tensor:
    """A tensor that shares memory with the first `count` numbers of a file."""
    if not count:
        return torch.empty(0, dtype=dtype)
    with warnings.catch_warnings():  # torch warns that the memory is read-only; nobody writes to it
        warnings.simplefilter("ignore")
        return torch.frombuffer(content, dtype=dtype, count=count)


def _ids(codes: Tensor) -> Tensor:
    return torch.where(codes < 0, ~codes, codes)


def _write(documents: Documents, vocabulary: Vocabulary, seq_len: int, whole_len: int, put: Put) -> None:
    """Write all codes; then starts, sizes and parents of the samples; then six counts."""
    codes, starts, sizes, parents = array("i"), array("q"), array("q"), array("q")
    written = first = parent = truncated = unlearnt = num_whole = longest = 0
    for document, ids, completion in _encode(documents, vocabulary):
        if len(codes) > _BLOCK:
            put(codes.tobytes())
            written, codes = written + len(codes), array("i")
        is_new, is_sample = first == written + len(codes), True
        if completion is not None:
            prompt = [*vocabulary.start, *ids]
            length = len(prompt) + len(completion)
            num_whole, truncated, longest = num_whole + 1, truncated + (length > whole_len), max(longest, length)
            prompt = _fit_prompt(prompt, len(vocabulary.start), whole_len - len(completion))
            codes.extend([*(~token for token in prompt), *completion][:whole_len])
        elif document.messages is not None:
            num_whole, truncated, longest = num_whole + 1, truncated + (len(ids) > whole_len), max(longest, len(ids))
            is_sample = any(code >= 0 for code in ids[1:whole_len])
            unlearnt += not is_sample
            codes.extend(ids[:whole_len] * is_sample)
        else:
            codes.extend([*vocabulary.start, *ids] if is_new else ids)
            if document.goes_on:
                continue
            is_sample = written + len(codes) - first > len(vocabulary.start)  # else the tokenizer has no id for it
            codes.extend([vocabulary.end] * is_sample)
        length = written + len(codes) - first
        if is_sample and length > 1:  # the first token cannot be predicted
            is_text = completion is None and document.messages is None
            for start, size in _pieces(length, seq_len if is_text else whole_len):
                starts.append(first + start)
                sizes.append(size)
                parents.append(parent)
        first, parent = first + length, parent + 1
    put(codes.tobytes())
    written += len(codes)
    put(bytes(4 * (written % 2)))  # to align the table to 8 bytes
    counts = [truncated, unlearnt, num_whole, longest, written, len(starts)]
    for column in (starts, sizes, parents, array("q", counts)):
        put(column.tobytes())


def _encode(documents: Documents, vocabulary: Vocabulary) -> Iterator[tuple[Document, list[int], list[int] | None]]:
    """Each document with the token ids of its text or conversation, and those of a completion with its end token."""
    waiting: deque[tuple[Document, bool]] = deque()

    def texts() -> Iterator[str | MarkedText]:
        for document in documents.encoding():
            is_chat = document.messages is not None and vocabulary.chat is not None
            if document.messages is not None and not is_chat and document.completion is None:
                raise BatchError(
                    f"{document.where}: a conversation needs a chat template, and the tokenizer has none. Name "
                    "one: --chat-template FILE, or --chat-template chatml."
                )
            waiting.append((document, document.completion is not None and not is_chat))
            if is_chat:
                assert vocabulary.chat is not None
                yield vocabulary.chat.render(document)
            else:
                yield document.text
                if document.completion is not None:
                    yield document.completion

    encoded = vocabulary.encode_each(texts())
    for ids in encoded:
        document, is_pair = waiting.popleft()
        yield document, ids, [*next(encoded), vocabulary.end] if is_pair else None


def _pieces(length: int, seq_len: int) -> Iterator[tuple[int, int]]:
    """Start and size of each piece of a text. Each piece begins with the last token of the piece before it.

    >>> list(_pieces(10, 4))
    [(0, 4), (3, 4), (6, 4)]
    >>> list(_pieces(3, 4))
    [(0, 3)]
    """
    for first in range(0, max(length - 1, 1), seq_len - 1):
        yield first, min(seq_len, length - first)


def _fit_prompt(prompt: list[int], num_fixed: int, room: int) -> list[int]:
    """The end of a prompt that fits, after the tokens that begin every text. At least one token is left.

    >>> _fit_prompt([1, 5, 6, 7], 1, room=3), _fit_prompt([1, 5, 6, 7], 1, room=0)
    ([1, 6, 7], [7])
    """
    room = max(room, 1)
    if len(prompt) <= room:
        return prompt
    if room <= num_fixed:
        return prompt[-room:]
    return prompt[:num_fixed] + prompt[len(prompt) - room + num_fixed :]


def collate(samples: Sequence[Sample], *, few_widths: bool = False) -> Sample:
    """A micro-batch of some samples, padded on the right: the ``collate=`` of `MacroStep`.

    With `few_widths`, it is padded to one of few lengths, for CUDA graphs, which are recorded once per shape.

    >>> batch = collate([{"input_ids": torch.tensor([7, 8]), "labels": torch.tensor([7, 8])},
    ...                   {"input_ids": torch.tensor([9]), "labels": torch.tensor([9])}])
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["labels"].tolist()
    ([[7, 8], [9, 0]], [[1, 1], [1, 0]], [[7, 8], [9, -100]])
    """
    ids = [sample["input_ids"] for sample in samples]
    longest = max(len(part) for part in ids)
    more = rounded_up(longest) - longest if few_widths else 0

    def pad(parts: list[Tensor], value: int) -> Tensor:
        return F.pad(pad_sequence(parts, batch_first=True, padding_value=value), (0, more), value=value)

    return {
        "input_ids": pad(ids, 0),
        "attention_mask": pad([torch.ones_like(part) for part in ids], 0),
        "labels": pad([sample["labels"] for sample in samples], IGNORED),
    }
