"""The data of a run: samples to train on, samples for validation, and the vocabulary."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from macrobatch._cut.padding import IGNORED
from macrobatch.errors import BatchError, UsageError, counted
from macrobatch.train import models
from macrobatch.train.cache import cache_folder
from macrobatch.train.chat import CHATML, named_template
from macrobatch.train.corpus import Corpus
from macrobatch.train.documents import Say, documents
from macrobatch.train.settings import DEFAULT_VALIDATION, Settings
from macrobatch.train.vocabulary import Vocabulary

logger = logging.getLogger("macrobatch")

FEW = 16  # samples; a validation with fewer gets a warning


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run: samples to train on, samples for validation, and the vocabulary."""

    train: Corpus
    validation: Corpus
    vocabulary: Vocabulary

    @classmethod
    def read(cls, settings: Settings, say: Say | None = None) -> Data:
        """Read, tokenize and split the data according to the settings. `say` prints the progress if that takes long."""
        cache = cache_folder()
        read = partial(documents, text_field=settings.text_field, fields=settings.fields, cache=cache, say=say)
        template = None if settings.chat_template is None else named_template(settings.chat_template)
        texts = read(settings.data)
        if template is not None and not texts.has_conversations:
            logger.warning("--chat-template %s: there is no conversation in the data.", settings.chat_template)
        name = _tokenizer(settings)
        if name is None:
            vocabulary = Vocabulary.trained(texts, settings.vocabulary_size, cache=cache, template=template or CHATML)
        else:
            vocabulary = _loaded(name, "--model" if settings.tokenizer is None else "--tokenizer")
            vocabulary = vocabulary if template is None else vocabulary.with_chat(template)
        corpus = Corpus.made(texts, vocabulary, seq_len=settings.seq_len, cache=cache)
        if settings.validation_data:
            held_out = read(settings.validation_data)
            train = corpus
            validation = Corpus.made(held_out, vocabulary, seq_len=settings.seq_len, cache=cache)
        else:
            part = DEFAULT_VALIDATION if settings.validation is None else settings.validation
            train, validation = corpus.split(part, settings.seed)
        return cls(train=train, validation=validation, vocabulary=vocabulary)

    def warn_of_few(self) -> None:
        """Warn if the validation has so few samples that its loss is unreliable."""
        if 0 < len(self.validation) < FEW:
            logger.warning(
                "the validation has only %s: its loss says little. Name more with --validation-data, or a larger "
                "--validation.", counted(len(self.validation), "sample"),
            )  # fmt: skip

    def fits(self, vocabulary_size: int, positions: int | None) -> None:
        """Refuse samples with token ids or lengths that the model does not support."""
        largest = max(self.train.largest_id, self.validation.largest_id)
        if largest >= vocabulary_size:
            raise BatchError(
                f"the data has the token {largest}, and the model's vocabulary ends at "
                f"{vocabulary_size - 1}: model and tokenizer do not belong together. Say which --tokenizer does."
            )
        longest = max([*self.train.lengths, *self.validation.lengths])
        if positions is not None and longest > positions:
            raise UsageError(
                f"the longest sample has {longest} tokens, and the model takes {positions}: say --seq-len {positions}."
            )

    @property
    def opening(self) -> str:
        """The beginning of a sample, as the default prompt for a text by the trained model."""
        sample = (self.validation if len(self.validation) else self.train)[0]
        ids, start = sample["input_ids"].tolist(), self.vocabulary.start
        question = int((sample["labels"] == IGNORED).long().cumprod(0).sum())  # tokens before the first one with a loss
        if not question or self.vocabulary.chat is None:
            return self.vocabulary.decode(ids[:8])
        asked = ids[len(start) : question] if ids[: len(start)] == start else ids[:question]
        return self.vocabulary.decode(asked, with_special=True)


def _loaded(name: str, flag: str) -> Vocabulary:
    try:
        return Vocabulary.load(name)
    except UsageError as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def _tokenizer(settings: Settings) -> str | None:
    """The name or path of the tokenizer; None: train one."""
    return settings.tokenizer or models.origin_of(settings).tokenizer
