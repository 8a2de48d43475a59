"""Text to token ids and back: a byte-pair encoding trained on the documents, or an existing tokenizer.

The files are the usual ones: ``tokenizer.json`` with ``tokenizer_config.json`` beside it. The library tokenizers reads
them; transformers is used only if there is no ``tokenizer.json``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from macrobatch.errors import UsageError
from macrobatch.train.cache import cached, digest
from macrobatch.train.chat import CHATML, STOP, ChatTemplate, MarkedText, special_tokens, templates_in, tokens_in
from macrobatch.train.documents import Document, Documents
from macrobatch.train.limits import run_within_limits
from macrobatch.train.pretrained import read_json, reason
from macrobatch.train.sources import blocks

END = "<|endoftext|>"  # the end token of vocabularies trained here

# End tokens of other tokenizers, for a tokenizer.json without a tokenizer_config.json that names it.
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<|end|>", "[EOS]", "[SEP]")
_HUB_NAME = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?(?<!\.json)")
_BYTES = 256
_ENOUGH = 64_000_000  # characters to train a vocabulary on; more would take long, and change little
_AT_ONCE = 1_000_000  # characters that are encoded together: the library needs some hundred bytes per character
_WORD = 256  # largest word, in bytes, to learn merges from: the time grows with the square of its length
_LONG = re.compile(rf"\s{{{_WORD // 4},}}|\S{{{_WORD // 4},}}")  # a character has at most four bytes


class Vocabulary:
    """A tokenizer with its special tokens and its chat template.

    >>> vocabulary = Vocabulary.train([Document("def f(x): return x")] * 2, size=300)
    >>> ids, = vocabulary.encode(["return x"])
    >>> vocabulary.decode(ids), vocabulary.decode([*ids, vocabulary.end])
    ('return x', 'return x')

    `size` is one more than the largest id; `start` are the ids before every text, `end` is the one after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end: int,
        pad: int | None = None,
        config: dict[str, Any] | None = None,
        templates: dict[str, str] | None = None,
    ) -> None:
        tokenizer.no_truncation()  # a file may turn it on, and text would be lost silently
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._config = _without_code(config or {})
        self._templates = templates or {}
        self.size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.end = end
        self.pad = end if pad is None else pad
        self.start = _before_a_text(tokenizer)
        found = templates_in(self._config, self._templates)
        self.chat = None if found is None else ChatTemplate(tokenizer, found, special_tokens(self._full_config()))

    def __len__(self) -> int:
        return self.size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without start and end tokens."""
        return list(self.encode_each(texts))

    def encode_each(self, texts: Iterable[str | MarkedText]) -> Iterator[list[int]]:
        """The ids of each text, one text after the other, for texts that should not be in memory at once.

        A text of more than 250,000 characters is encoded in parts that end at line ends. In a marked text, a token has
        a loss if it shares a character with a span. All other tokens have ``~id``, which is negative, in place of their
        id.
        """
        waiting: list[str | MarkedText] = []
        size = 0
        for text in texts:
            waiting.append(text)
            size += len(text if isinstance(text, str) else text.text)
            if size > _AT_ONCE:
                yield from self._encode_batch(waiting)
                waiting, size = [], 0
        yield from self._encode_batch(waiting)

    def _encode_batch(self, texts: list[str | MarkedText]) -> Iterator[list[int]]:
        plain = [part for text in texts if isinstance(text, str) for part in blocks(text)]
        # Not in parts, as other programs encode conversations; and with the position of each token.
        marked = [text.text for text in texts if isinstance(text, MarkedText)]

        def encode_both() -> tuple[list[Any], list[Any]]:
            return (
                self._tokenizer.encode_batch_fast(plain, add_special_tokens=False),
                self._placing.encode_batch(marked, add_special_tokens=False),
            )

        share = 1 + sum(map(len, [*plain, *marked])) / 1e6
        try:
            parts, wholes = map(iter, run_within_limits(encode_both, "the tokenizer", share=share))
        except TypeError:  # for a lone surrogate
            raise UsageError("a text holds half of a character (a lone surrogate): it cannot be encoded.") from None
        for text in texts:
            if isinstance(text, str):
                yield [token for _ in blocks(text) for token in next(parts).ids]
            else:
                found = next(wholes)
                yield _mark_learnt(found.ids, found.offsets, text.spans) + [self.end] * text.needs_end

    @cached_property
    def _placing(self) -> Tokenizer:
        """The tokenizer without its post-processor, which moves the positions of tokens that begin with a space."""
        bare = Tokenizer.from_str(self._tokenizer.to_str())
        bare.post_processor = None
        return bare

    def decode(self, ids: Iterable[int], *, with_special: bool = False) -> str:
        """The text of these ids; without special tokens, unless `with_special` is set."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not with_special)
        return text

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the ids of a text."""
        return digest([self._tokenizer.to_str(), str(self.end), str(self.start)])

    def differences(self, other: Vocabulary) -> int:
        """How many ids stand for other tokens, or none, in another vocabulary."""
        theirs = other._tokenizer.id_to_token
        return sum(token != theirs(number) for token, number in self._tokenizer.get_vocab().items())

    def with_chat(self, template: str) -> Vocabulary:
        """The same vocabulary with another chat template, which is saved with it."""
        config = {name: value for name, value in self._config.items() if name != "chat_template"}
        return Vocabulary(
            self._tokenizer, end=self.end, pad=self.pad, config=config, templates={"chat_template.jinja": template}
        )

    # -------------------------------------------------------------------------------------------- from and to files

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` and ``AutoTokenizer`` of transformers can read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps(self._full_config(), indent=2) + "\n", encoding="utf-8"
        )
        for place, template in self._templates.items():
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(template, encoding="utf-8")

    def _full_config(self) -> dict[str, Any]:
        """The content of its tokenizer_config.json."""
        name = self._tokenizer.id_to_token
        defaults = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": name(self.end),
            "pad_token": name(self.pad),
        }
        return {**defaults, **self._config}

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Load a ``tokenizer.json``, a folder with one, or anything else that ``AutoTokenizer`` can load."""
        return run_within_limits(lambda: cls._load(Path(path)), f"loading the tokenizer {path}")

    @classmethod
    def _load(cls, path: Path) -> Vocabulary:
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            tokenizer, config, templates = _tokenizer_in(file), _config_beside(file), _templates_beside(file)
        elif file.exists():
            raise UsageError(f"{file} is no file.")
        else:
            (tokenizer, config), templates = _by_transformers(str(path)), {}
        told = _special_id(tokenizer, config, "eos_token")
        ends = [told, *map(tokenizer.token_to_id, _ENDS)]
        end = next((found for found in ends if found is not None), None)
        if end is None:
            raise UsageError(
                f'the tokenizer {path} does not say which token ends a text. Put {{"eos_token": "..."}} into a file '
                "tokenizer_config.json beside its tokenizer.json."
            )
        return cls(
            tokenizer, end=end, pad=_special_id(tokenizer, config, "pad_token"), config=config, templates=templates
        )

    # ------------------------------------------------------------------------------------------------------ training

    @classmethod
    def train(
        cls, documents: Iterable[Document], size: int, cache: Path | None = None, *, template: str = CHATML
    ) -> Vocabulary:
        """Train a byte-pair encoding of at most `size` ids. The same documents make the same vocabulary.

        It can encode any text, because every byte has an id. With little text it has fewer ids than `size`. If there
        are conversations, it has a chat template, whose special tokens have their own ids.

        Of very large data only evenly spaced parts are used. Strings in `template` such as <|this|> become
        special tokens.
        """
        documents = Documents.of(documents)
        marks = tokens_in(template) if documents.has_conversations else []
        end_of_text = STOP if STOP in marks else END  # so that generation stops after an answer
        special = list(dict.fromkeys([end_of_text, *marks]))
        smallest = _BYTES + len(special)
        if isinstance(size, bool) or not isinstance(size, int) or size < smallest:
            raise UsageError(
                f"a vocabulary has at least {smallest} ids, for each byte, the end and the like: got {size!r}."
            )
        texts = _some(documents)
        name = f"vocabulary-{size}-{digest([*special, str(_WORD), *texts])}"
        content = cached(cache, name, lambda: _byte_pairs(texts, size, special).to_str().encode())
        tokenizer = Tokenizer.from_str(content.decode())
        end = tokenizer.token_to_id(special[0])
        assert end is not None, "it was trained with it"
        templates = {"chat_template.jinja": template} if documents.has_conversations else {}
        return cls(tokenizer, end=end, templates=templates)


def _mark_learnt(ids: list[int], places: list[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The id of each token that has a character in a span, and ``~id`` of all other tokens.

    >>> _mark_learnt([5, 6, 7], [(0, 2), (2, 4), (4, 6)], [(3, 4)])
    [-6, 6, -8]
    """
    found, left = [], list(reversed(spans))
    for token, (first, last) in zip(ids, places, strict=True):
        while left and left[-1][1] <= first:
            left.pop()
        is_learnt = bool(left) and left[-1][0] < max(last, first + 1)
        found.append(token if is_learnt else ~token)
    return found


def _before_a_text(tokenizer: Tokenizer) -> list[int]:
    """The ids that a tokenizer puts before a text."""
    # Batches, as the library lets other threads run meanwhile, so that `within` can look at the time.
    bare: list[int] = tokenizer.encode_batch(["a"], add_special_tokens=False)[0].ids
    dressed: list[int] = tokenizer.encode_batch(["a"], add_special_tokens=True)[0].ids
    places = range(len(dressed) - len(bare) + 1)
    first = next((place for place in places if dressed[place : place + len(bare)] == bare), 0)
    return dressed[:first]


def _some(documents: Documents) -> list[str]:
    """Evenly spaced parts of the documents' texts, about as many as are enough."""
    stride = -(-documents.num_characters // _ENOUGH) or 1
    parts = (block for document in documents for text in document.texts for block in blocks(text))
    return list(itertools.islice(parts, None, None, stride))


def _byte_pairs(texts: list[str], size: int, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bounded = pre_tokenizers.Split(Regex(f"(?m:.){{1,{_WORD}}}"), behavior="isolated")
    has_long = any(_LONG.search(text) for text in texts)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bounded]) if has_long else words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words  # without a limit: encoding a long word is fast
    return tokenizer


def _tokenizer_in(file: Path) -> Tokenizer:
    try:
        content = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not a tokenizer.json: not UTF-8.") from None
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain exceptions
        raise UsageError(f"{file} is not a tokenizer.json that the library tokenizers can read: {error}.") from None


def _config_beside(file: Path) -> dict[str, Any]:
    config = file.with_name("tokenizer_config.json")
    if not config.exists():
        return {}
    found = read_json(config)
    if not isinstance(found, dict):
        raise UsageError(f"{config} must hold a JSON object: found {type(found).__name__}.")
    return found


def _without_code(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without references to code that some tokenizers come with."""
    import transformers

    name = config.get("tokenizer_class")
    is_known = isinstance(name, str) and hasattr(transformers, name)
    return {key: v for key, v in config.items() if key != "auto_map" and (key != "tokenizer_class" or is_known)}


def _templates_beside(file: Path) -> dict[str, str]:
    """Chat templates in their own files: the text by relative path."""
    places = [file.with_name("chat_template.jinja"), *file.parent.glob("additional_chat_templates/*.jinja")]
    try:
        return {
            str(path.relative_to(file.parent)): path.read_text(encoding="utf-8") for path in places if path.is_file()
        }
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the chat templates beside {file} cannot be read: {error}.") from None


def _special_id(tokenizer: Tokenizer, config: dict[str, Any], name: str) -> int | None:
    """The id of a special token in a configuration."""
    token = special_tokens(config).get(name)
    found: int | None = None if token is None else tokenizer.token_to_id(token)
    return found


def _by_transformers(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer in a folder without a tokenizer.json, or on the hub, loaded by transformers."""
    missing = f"there is no tokenizer {name!r}: neither a tokenizer.json, nor a folder with one"
    is_folder = Path(name).is_dir()
    if not is_folder and not _HUB_NAME.fullmatch(name):
        raise UsageError(f"{missing}. Relative names start at {str(Path.cwd())!r}.")
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=is_folder or hub_is_out_of_reach()
        )
    except Exception as error:  # many types, e.g. for a missing, damaged or unreachable tokenizer
        raise UsageError(f"{missing}, nor anything that transformers can load: {reason(error)}") from error
    if getattr(found, "backend_tokenizer", None) is None:
        raise UsageError(f"the tokenizer {name!r} has no fast version, which is needed here. Convert it first.")
    wanted = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template")
    specials = {key: getattr(found, key) for key in wanted if getattr(found, key, None)}
    return found.backend_tokenizer, specials


def hub_is_out_of_reach() -> bool:
    """Whether the hub cannot be reached, so that a request would only retry for a minute."""
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return False  # the proxy resolves the name
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return True
    return False
