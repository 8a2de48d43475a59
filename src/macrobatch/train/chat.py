"""Conversations as text, by a chat template; and which characters of the text the model learns: those of the assistant.

A template may mark them itself, with ``{% generation %}``. If it does not, two texts are compared: the conversation up
to an answer, and the conversation before it with the prompt for an answer. The difference is the answer. If a template
writes earlier answers in another way, the answer is searched for word by word. A template with which neither works is
refused.
"""

# mypy: untyped-calls-exclude="transformers"
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from macrobatch.errors import BatchError, UsageError
from macrobatch.train.cache import digest
from macrobatch.train.formats import ASSISTANT, Document, Message
from macrobatch.train.limits import run_within_limits

STOP = "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_STAND_IN = "what nobody would say: 7c1f0e"
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_WITH_MARKS = (
    "Put {% generation %} and {% endgeneration %} around what the assistant says in it, and name that file with "
    "--chat-template."
)


Span = tuple[int, int]  # positions of the first character, and of the one after the last


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text of which the model learns only a part."""

    text: str  # the whole text
    spans: tuple[Span, ...]  # the characters to learn
    # whether the text does not end with a special token after the last answer, so that the tokenizer's end token
    # is added
    needs_end: bool = False


class ChatTemplate:
    """Writes conversations as text, in the way that a model expects.

    `templates` is one Jinja template, or several by name; `tokens` are the special tokens, such as ``bos_token``.
    """

    def __init__(self, tokenizer: Tokenizer, templates: str | Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._tokenizer, self._tokens = tokenizer, dict(tokens)
        self.templates = templates if isinstance(templates, str) else dict(templates)
        self._special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)

    @property
    def fingerprint(self) -> str:
        """A hash of the templates and of the special tokens."""
        named = [("", self.templates)] if isinstance(self.templates, str) else sorted(self.templates.items())
        return digest([part for pair in [*named, *sorted(self._tokens.items())] for part in pair])

    @property
    def writes_the_date(self) -> bool:
        """Whether the text depends on the date."""
        return "strftime_now" in str(self.templates)

    def render(self, document: Document) -> MarkedText:
        """The conversation of a document as text, with the spans to learn."""
        assert document.messages, "a conversation has a message"
        messages = [{name: v for name, v in m.items() if name != "weight"} for m in document.messages]
        learns = [message["role"] == ASSISTANT and message.get("weight") != 0 for message in document.messages]
        tools = None if document.tools is None else list(document.tools)
        source = self._source(tools, document.where)
        self._check_place(document, source)
        by = self._by_marks if _MARKS.search(source) else self._by_prefixes
        what = f"{document.where}: the chat template"
        text, spans = run_within_limits(lambda: by(messages, learns, tools, document.where), what, is_python=True)
        return MarkedText(text, tuple(spans), needs_end=learns[-1] and not text.rstrip().endswith(self._special))

    def question(self, asked: Sequence[Message]) -> tuple[str, str]:
        """A conversation with the prompt for an answer; and the text that the template writes after an answer."""

        def render() -> tuple[str, str]:
            answered: list[Message] = [*asked, {"role": ASSISTANT, "content": _STAND_IN}]
            opening = self._text(asked, None, "the prompt", asks=True)
            *_, after = self._text(answered, None, "the prompt").partition(_STAND_IN)
            return opening, after.strip()

        return run_within_limits(render, "the chat template", is_python=True)

    # ------------------------------------------------------------------------------------------------------- spans

    def _by_marks(
        self, messages: Sequence[Message], learns: Sequence[bool], tools: list[Any] | None, where: str
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, found = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=self._source(tools, where),
                return_assistant_tokens_mask=True, **self._renderer.special_tokens_map,
            )  # fmt: skip
        except MemoryError:
            raise
        except Exception as error:  # whatever a template raises
            raise _rendering_error(error, where) from error
        spans: list[Span] = [(first, last) for first, last in found[0]]
        answers = [one for one, message in zip(learns, messages, strict=True) if message["role"] == ASSISTANT]
        if all(answers):
            return texts[0], spans
        if len(spans) != len(answers):
            raise BatchError(
                f"{where}: an assistant's message has weight 0, and the chat template marks {len(spans)} spans for "
                f"{len(answers)} such messages, so they cannot be matched."
            )
        return texts[0], [span for span, is_learnt in zip(spans, answers, strict=True) if is_learnt]

    def _by_prefixes(
        self, messages: Sequence[Message], learns: Sequence[bool], tools: list[Any] | None, where: str
    ) -> tuple[str, list[Span]]:
        whole, last = self._text(messages, tools, where), len(messages) - 1
        spans: list[Span] = []
        for number, is_learnt in enumerate(learns):
            if not is_learnt or number == 0:  # the first message answers nothing
                continue
            before = self._text(messages[:number], tools, where, asks=True)
            until = whole if number == last else self._text(messages[: number + 1], tools, where)
            if not until.startswith(before) or not whole.startswith(until):
                if (span := self._verbatim(messages, number, tools, whole, where)) is not None:
                    spans.append(span)
                    continue
                raise BatchError(
                    f"{where}: the chat template changes the beginning of this conversation when later messages follow "
                    f"(at message {number + 1}), so the assistant's part cannot be found. {_WITH_MARKS} Or make a "
                    "record of each answer, with messages in prompt and completion."
                )
            turn = until[len(before) :]
            if not turn.strip() and str(messages[number].get("content") or "").strip():
                raise BatchError(
                    f"{where}: the chat template writes nothing of what the assistant says (message {number + 1}). "
                    "Name another one with --chat-template."
                )
            spans.append((len(before), len(before) + self._learnt_length(turn)))
        return whole, spans

    def _verbatim(
        self, messages: Sequence[Message], number: int, tools: list[Any] | None, whole: str, where: str
    ) -> Span | None:
        """The span of an answer that is in the text word for word, with the token that ends it; None if it is not.

        A template may write an answer in another way while it is the last one. So this renders the whole conversation
        with another text in place of the answer: everything around the answer must stay the same.
        """
        said = str(messages[number].get("content") or "")
        changed = [*messages[:number], {**messages[number], "content": _STAND_IN}, *messages[number + 1 :]]
        before, _, after = self._text(changed, tools, where).partition(_STAND_IN)
        for answer in dict.fromkeys((said, said.strip())):
            if answer and whole == before + answer + after:
                ending = next((len(token) for token in self._special if after.startswith(token)), 0)
                return len(before), len(before) + len(answer) + ending
        return None

    def _learnt_length(self, turn: str) -> int:
        """How many characters of a turn to learn: not the white space after the token that ends it."""
        bare = turn.rstrip()
        return len(bare) if bare.endswith(self._special) else len(turn)

    # --------------------------------------------------------------------------------------------------- rendering

    @cached_property
    def _renderer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, chat_template=self.templates, **self._tokens)

    def _source(self, tools: list[Any] | None, where: str) -> str:
        try:
            found: str = self._renderer.get_chat_template(None, tools)
        except ValueError as error:
            raise BatchError(f"{where}: there is no chat template for it: {str(error).splitlines()[0]}") from None
        return found

    def _text(self, messages: Sequence[Message], tools: list[Any] | None, where: str, *, asks: bool = False) -> str:
        try:
            text: str = self._renderer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=asks
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever a template raises
            raise _rendering_error(error, where) from error
        return text

    def _check_place(self, document: Document, source: str) -> None:
        """Refuse tools and tool calls that the template would leave out silently."""
        has_calls = any(message.get("tool_calls") for message in document.messages or ())
        for is_there, name in ((document.tools is not None, "tools"), (has_calls, "tool_calls")):
            if is_there and name not in source:
                raise BatchError(
                    f"{document.where}: the conversation has {name}, and the chat template has no place for them. Name "
                    "another one with --chat-template."
                )


def _rendering_error(error: Exception, where: str) -> BatchError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BatchError(f"{where}: the chat template cannot write this conversation: {said}")


def tokens_in(template: str) -> list[str]:
    """The strings in a template that look like special tokens, each once.

    >>> tokens_in(CHATML)
    ['<|im_start|>', '<|im_end|>']
    """
    return list(dict.fromkeys(re.findall(r"<\|[^|<>\s]+\|>", template)))


def named_template(name: str) -> str:
    """The template that ``--chat-template`` names."""
    if name == "chatml":
        return CHATML
    path = Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--chat-template {name} is neither chatml, nor a file in Jinja that can be read: {reason}."
        ) from None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names. Each is a string, or an object that holds it."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found


def templates_in(config: Mapping[str, Any], files: Mapping[str, str]) -> str | dict[str, str] | None:
    """The chat templates of a tokenizer, from its configuration and from its own files, which go first; None: it has
    none.
    """
    told = config.get("chat_template")
    if isinstance(told, Sequence) and not isinstance(told, str):
        told = {one["name"]: one["template"] for one in told if isinstance(one, Mapping) and len(one) >= 2}
    named = dict(told) if isinstance(told, Mapping) else {"default": told} if isinstance(told, str) else {}
    for place, text in files.items():
        named["default" if place == "chat_template.jinja" else place.rpartition("/")[2].removesuffix(".jinja")] = text
    return named["default"] if list(named) == ["default"] else named or None
