"""The data of a run: samples to train on, samples for validation, and the vocabulary."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from macrobatch._cut.padding import IGNORED
from macrobatch.errors import BatchError, UsageError, counted
from macrobatch.train import models
from macrobatch.train.cache import cache_folder
from macrobatch.train.chat import CHATML, named_template
from macrobatch.train.corpus import Corpus
from macrobatch.train.documents import Documents, Say, documents
from macrobatch.train.settings import DEFAULT_VALIDATION, Settings
from macrobatch.train.stream import Mixture
from macrobatch.train.vocabulary import Vocabulary

logger = logging.getLogger("macrobatch")

ENOUGH = 0.9  # of a model's tokens; embeddings often have some more rows than the tokenizer has tokens
MOST_CUT = 0.05  # of the conversations, unless the user wants more to be cut
SHOWN = 400  # tokens of the sample that is shown
FEW = 16  # samples; a validation with fewer gets a warning


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run: samples to train on, samples for validation, and the vocabulary."""

    train: Corpus
    validation: Corpus
    vocabulary: Vocabulary
    seq_len: int
    mixture: Mixture | None = None

    @classmethod
    def read(cls, settings: Settings, say: Say | None = None, *, is_new: bool = True) -> Data:
        """Read, tokenize and split the data according to the settings.

        A resumed run (`is_new` False) keeps what was cut at its beginning.
        """
        cache = cache_folder()
        read = partial(documents, text_field=settings.text_field, fields=settings.fields, cache=cache, say=say)
        template = None if settings.chat_template is None else named_template(settings.chat_template)
        texts = read(settings.data)
        if template is not None and not texts.has_conversations:
            logger.warning("--chat-template %s: there is no conversation in the data.", settings.chat_template)
        name = _tokenizer(settings)
        if name is None:
            vocabulary = Vocabulary.train(texts, settings.vocabulary_size, cache=cache, template=template or CHATML)
        else:
            vocabulary = _load_tokenizer(name, "--model" if settings.tokenizer is None else "--tokenizer")
            vocabulary = vocabulary if template is None else vocabulary.with_chat(template)
        sources = [texts, *([read(settings.validation_data)] if settings.validation_data else [])]
        seq_len, whole_len = models.lengths_of(settings)
        is_asked = settings.truncate or settings.seq_len is not None
        most_cut = 1.0 if is_asked or not is_new else MOST_CUT
        made = partial(
            Corpus.from_documents, vocabulary=vocabulary, most_cut=most_cut, positions=models.positions_of(settings)
        )
        corpora = [made(source, seq_len=seq_len, whole_len=whole_len, cache=cache) for source in sources]
        longest = max(seq_len, *(max(corpus.lengths) for corpus in corpora))
        if longest > seq_len and any(
            corpus.num_whole < len(source) for corpus, source in zip(corpora, sources, strict=True)
        ):  # there are texts too: their pieces get the same length as the conversations
            corpora = [made(source, seq_len=longest, cache=cache) for source in sources]
        if settings.validation_data:
            train, validation = corpora
        else:
            part = DEFAULT_VALIDATION if settings.validation is None else settings.validation
            train, validation = corpora[0].split(part, settings.seed)
        mixture = None
        if texts.weights is not None:
            mixture = _mixture(train, texts, settings.data)
        return cls(train=train, validation=validation, vocabulary=vocabulary, seq_len=longest, mixture=mixture)

    @property
    def length_summary(self) -> str:
        """The distribution of the lengths of samples, and what fits, as text."""
        sizes = self.train.sizes.sort().values
        half, most = (int(sizes[int(share * (len(sizes) - 1))]) for share in (0.5, 0.95))
        spread = f"{int(sizes[0]):,} to {int(sizes[-1]):,} tokens; half have at most {half:,}, 95 % at most {most:,}"
        cut, whole = self.train.truncated, self.train.num_whole
        if not whole:
            return f"{spread}; longer texts are cut into pieces of {self.seq_len:,}"
        cure = f"; --seq-len {self.train.longest} would keep them" if cut else ""
        return f"{spread}; {whole - cut:,} of {whole:,} fit into {self.seq_len:,}{cure}"

    @property
    def example(self) -> str:
        """A sample as text, in which the tokens that the model learns are marked."""
        codes = self.train[0]
        ids, is_learnt = codes["input_ids"][:SHOWN].tolist(), (codes["labels"][:SHOWN] != IGNORED).tolist()
        more = " ..." if len(codes["input_ids"]) > SHOWN else ""
        if all(is_learnt):
            return f"a sample; the model learns all of it:\n{self.vocabulary.decode(ids, with_special=True)}{more}\n"
        text = ""
        for learnt, group in itertools.groupby(zip(ids, is_learnt, strict=True), key=lambda pair: pair[1]):
            part = self.vocabulary.decode((token for token, _ in group), with_special=True)
            text += f">>>{part}<<<" if learnt else part
        return f"a sample; the model learns the part between >>> and <<<:\n{text}{more}\n"

    def warn_of_few(self) -> None:
        """Warn if the validation has so few samples that its loss is unreliable."""
        if 0 < len(self.validation) < FEW:
            logger.warning(
                "the validation has only %s: its loss is unreliable. Name more with --validation-data, or a larger "
                "--validation.", counted(len(self.validation), "sample"),
            )  # fmt: skip

    def check_fit(self, vocabulary_size: int, positions: int | None, *, packs: bool = False) -> None:
        """Refuse samples with token ids or lengths that the model does not support."""
        largest = max(self.train.largest_id, self.validation.largest_id)
        if largest >= vocabulary_size:
            raise BatchError(
                f"the data has the token {largest}, and the model's vocabulary ends at "
                f"{vocabulary_size - 1}: the tokenizer is not that of the model. Name the right --tokenizer."
            )
        longest = self.seq_len if packs else max([*self.train.lengths, *self.validation.lengths])
        if positions is not None and longest > positions:
            what = "a packed row" if packs else "the longest sample"
            raise UsageError(
                f"{what} has {longest} tokens, and the model takes {positions}: say --seq-len {positions}."
            )

    def warn_of_tokenizer(self, settings: Settings, vocabulary_size: int, end: object) -> None:
        """Warn if the tokenizer seems to be of another model than the existing weights.

        `end` is what the model's configuration says of the tokens that end a text: one, several or none.
        """
        origin = models.origin_of(settings)
        if not origin.has_weights:
            return
        name, said = settings.tokenizer or origin.tokenizer, ""
        if settings.tokenizer and origin.tokenizer and settings.tokenizer != origin.tokenizer:
            others = self.vocabulary.differences(Vocabulary.load(origin.tokenizer))
            said = f"{others:,} of its {self.vocabulary.size:,} tokens differ there" if others else ""
        elif self.vocabulary.size < ENOUGH * vocabulary_size:
            said = f"it has {self.vocabulary.size:,} tokens, and the model has {vocabulary_size:,}"
        elif not origin.tokenizer and self.vocabulary.end not in (end if isinstance(end, list) else [end, None]):
            said = f"its texts end with the token {self.vocabulary.end}, and those of the model with {end}"
        if said:
            logger.warning(
                "the tokenizer %s seems to be that of another model than %s: %s. The weights would not know what the "
                "tokens mean.", name, settings.model, said,
            )  # fmt: skip

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


def _mixture(train: Corpus, texts: Documents, names: Sequence[str]) -> Mixture:
    """The samples of each source, with its weight."""
    assert texts.weights is not None
    sources = torch.bucketize(train.parents, torch.tensor(texts.ends), right=True)
    members = [(sources == number).nonzero().flatten().tolist() for number in range(len(texts.ends))]
    if empty := [name for name, samples in zip(names, members, strict=True) if not samples]:
        raise BatchError(f"--data {empty[0]}: it has no sample to train on, so it cannot have a weight.")
    return Mixture(members, texts.weights)


def _load_tokenizer(name: str, flag: str) -> Vocabulary:
    try:
        return Vocabulary.load(name)
    except UsageError as error:
        raise UsageError(f"{flag} {name}: {error}") from None


def _tokenizer(settings: Settings) -> str | None:
    """The name or path of the tokenizer; None: train one."""
    return settings.tokenizer or models.origin_of(settings).tokenizer
