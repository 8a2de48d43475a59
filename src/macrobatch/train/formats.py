"""A record of JSON or of a table as a `Document`: a text, a pair of prompt and completion, or a conversation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from macrobatch.errors import BatchError, UsageError

TEXT = "text"
ASSISTANT = "assistant"
Message = Mapping[str, Any]

# The roles of chat templates, by their names in data sets.
ROLES = {
    name: role
    for role, names in {
        "system": "system",
        "developer": "developer",
        "user": "user human prompter",
        ASSISTANT: "assistant gpt chatgpt model bot function_call",
        "tool": "tool function function_response observation",
        "ipython": "ipython",
    }.items()
    for name in names.split()
}
_ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text, pair of prompt and completion, or conversation to train on."""

    text: str = ""  # the text; with a completion, the prompt, which has no loss
    # the completion of the prompt; None: there is no prompt, and the whole text has a loss
    completion: str | None = None
    where: str = ""  # the source for error messages: "file.jsonl, line 812"
    # a conversation, for a tokenizer with a chat template. A tokenizer without one uses the text and the
    # completion instead; if both are empty, a template is needed
    messages: tuple[Message, ...] | None = None
    tools: tuple[Any, ...] | None = None  # the tools of the conversation that the assistant may call, as JSON schemas
    # whether the next document continues the same text, which is too long to be in memory at once
    goes_on: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no text, no completion and no message."""
        return not self.text and self.completion is None and self.messages is None

    @property
    def texts(self) -> list[str]:
        """The texts in it that people wrote, to train a vocabulary on."""
        if self.messages is None:
            return [text for text in (self.text, self.completion) if text]
        return [message["content"] for message in self.messages if message.get("content")]

    @property
    def identity(self) -> list[str]:
        """Strings that identify its content, independent of its source."""
        kind = f"{'...' if self.goes_on else ''}{'text' if self.completion is None else f'+{self.completion}'}"
        if self.messages is None:
            return [self.text, kind]
        return [self.text, kind, json.dumps([self.messages, self.tools], sort_keys=True, default=str)]


@dataclass(frozen=True)
class Columns:
    """The names of the fields of records. If a user names some, only the formats with these fields are tried.

    >>> columns = Columns.of(["prompt=question", "completion=answer"])
    >>> columns.document({"question": "2 + 2?", "answer": "4", "text": "no"}, "line 1").completion
    '4'
    """

    named: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: Sequence[str] = (), text_field: str = TEXT) -> Columns:
        """The names from ``NAME=COLUMN`` of the command line."""
        named = {} if text_field == TEXT else {TEXT: text_field}
        for one in fields:
            name, _, column = one.partition("=")
            if name not in _NAMES or not column:
                raise UsageError(
                    f"--fields takes NAME=COLUMN, where NAME is one of {', '.join(_NAMES)}: got {one!r}. E.g. --fields "
                    "prompt=question completion=answer."
                )
            if name in named:
                raise UsageError(f"--fields names {name!r} twice{' (--text-field is one)' if name == TEXT else ''}.")
            named[name] = column
        return cls(named)

    def of_name(self, name: str) -> str:
        """The name of a field in these records."""
        return self.named.get(name, name)

    def document(self, record: Any, where: str) -> Document:
        """The document that a record holds. Refuses a record that fits no format, or several."""
        if isinstance(record, str):
            record = {self.of_name(TEXT): record}
        if not isinstance(record, Mapping):
            raise BatchError(f"{where}: a record must be an object with fields, or a string: found {kind_of(record)}.")
        asked = [names for names in _FORMATS if set(names) & set(self.named)] or list(_FORMATS)
        present = [names for names in asked if all(self.of_name(name) in record for name in names)]
        # A table has every column in every row, so a column that a row does not use is empty.
        filled = [names for names in present if all(record[self.of_name(name)] is not None for name in names)]
        fitting = filled or present
        found = ", ".join(map(repr, record)) or "none at all"
        if not fitting:
            wanted = ", nor ".join(" and ".join(repr(self.of_name(name)) for name in names) for names in asked)
            raise BatchError(
                f"{where}: no field {wanted}; found {found}. Repair the record, or say which fields to take: --fields "
                "text=..., prompt=... completion=..., or messages=..."
            )
        if len(fitting) > 1:
            both = " or as ".join(" and ".join(repr(self.of_name(name)) for name in names) for names in fitting)
            say = " ".join(f"{name}={self.of_name(name)}" for name in fitting[-1])
            raise BatchError(
                f"{where}: the record can be read as {both}; found {found}. Say what to take, e.g. --fields {say}."
            )
        return _FORMATS[fitting[0]](_Record(record, self, where))


class _Record:
    """The fields of a record, checked when they are read."""

    def __init__(self, fields: Mapping[str, Any], columns: Columns, where: str) -> None:
        self._fields, self._columns, self.where = fields, columns, where

    def value(self, name: str) -> Any:
        return self._fields.get(self._columns.of_name(name))

    def string(self, name: str) -> str:
        return _string(self.value(name), f"the field {self._columns.of_name(name)!r}", self.where)

    def optional(self, name: str) -> str:
        return "" if self.value(name) is None else self.string(name)

    def items(self, name: str) -> list[Any]:
        """A list, or a string with a list in JSON, as tables have it."""
        value = self.value(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if not isinstance(value, list):
            column = self._columns.of_name(name)
            raise BatchError(f"{self.where}: the field {column!r} must be a list: found {kind_of(value)}.")
        return value

    def messages(self, name: str) -> list[dict[str, Any]]:
        return [_message(item, f"{self.where}, message {n}") for n, item in enumerate(self.items(name), 1)]

    def conversation(self, messages: Sequence[Message], text: str = "", completion: str | None = None) -> Document:
        if not messages:
            raise BatchError(f"{self.where}: the conversation has no message. Remove it.")
        system = self.optional("system")
        if system and messages[0]["role"] in ("system", "developer"):
            raise BatchError(f"{self.where}: the record has a system message twice: as a field, and in its messages.")
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        has_tools = self.value("tools") not in (None, "", [])
        tools = tuple(map(_without_nulls, self.items("tools"))) if has_tools else None
        return Document(text, completion, self.where, tuple(messages), tools)


# -------------------------------------------------------------------------------------------------------- the formats


def _text(record: _Record) -> Document:
    return Document(record.string("text"), None, record.where)


def _pair(record: _Record) -> Document:
    """Two strings; or two lists of messages, of which only the second has a loss."""
    prompt, completion = record.value("prompt"), record.value("completion")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        for name in ("system", "tools"):
            if record.value(name) not in (None, "", [], {}):
                raise BatchError(
                    f"{record.where}: the record has {name!r} beside a prompt that is a string, which has no place for "
                    "it. Put it into the prompt, or make the prompt a list of messages."
                )
        return Document(record.string("prompt"), record.string("completion"), record.where)
    before = [_message(item, f"{record.where}, message {n}") for n, item in enumerate(record.items("prompt"), 1)]
    unlearnt = [message | {"weight": 0} if message["role"] == ASSISTANT else message for message in before]
    return record.conversation([*unlearnt, *record.messages("completion")])


def _alpaca(record: _Record) -> Document:
    instruction, given, output = record.string("instruction"), record.optional("input"), record.string("output")
    asked = f"{instruction}\n\n{given}" if given else instruction
    messages = [*_history(record), {"role": "user", "content": asked}, {"role": ASSISTANT, "content": output}]
    if len(messages) > 2:
        return record.conversation(messages)  # Alpaca's prompt has no place for earlier turns
    prompt = _ALPACA.format(
        with_input=", paired with an input that provides further context" if given else "",
        instruction=instruction,
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    system = record.optional("system")
    return record.conversation(messages, f"{system}\n\n{prompt}" if system else prompt, output)


def _history(record: _Record) -> list[Message]:
    """Earlier turns, which LLaMA-Factory stores beside Alpaca's fields: pairs of a question and its answer."""
    if record.value("history") in (None, "", []):
        return []
    turns: list[Message] = []
    for pair in record.items("history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BatchError(f"{record.where}: 'history' must be a list of pairs of question and answer.")
        for role, text in zip(("user", ASSISTANT), pair, strict=True):
            turns.append({"role": role, "content": _string(text, "a turn in 'history'", record.where)})
    return turns


_FORMATS: dict[tuple[str, ...], Callable[[_Record], Document]] = {
    ("text",): _text,
    ("prompt", "completion"): _pair,
    ("messages",): lambda record: record.conversation(record.messages("messages")),
    ("conversations",): lambda record: record.conversation(record.messages("conversations")),
    ("instruction", "output"): _alpaca,
}
_NAMES = [*(name for names in _FORMATS for name in names), "input", "history", "system", "tools"]


def _message(item: Any, where: str) -> dict[str, Any]:
    """A message with the names of chat templates, from the names of OpenAI or ShareGPT."""
    if not isinstance(item, Mapping):
        raise BatchError(f"{where}: a message must be an object: found {kind_of(item)}.")
    rest = _without_nulls(item)
    named = [name for name in ("role", "from") if name in rest]
    if len(named) != 1:
        found = ", ".join(map(repr, rest)) or "none at all"
        raise BatchError(f"{where}: a message has 'role' and 'content', or 'from' and 'value': found {found}.")
    speaker = rest.pop(named[0])
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BatchError(f"{where}: unknown {named[0]} {speaker!r}. Known are {', '.join(ROLES)}.")
    content = rest.pop("content" if named == ["role"] else "value", None)
    if content is None and not rest.get("tool_calls"):
        raise BatchError(f"{where}: the message of the {role} has no content.")
    weight = rest.get("weight")
    if weight is not None and (weight not in (0, 1) or (weight and role != ASSISTANT)):
        raise BatchError(
            f"{where}: weight must be 0 or 1, and 1 only for the assistant's messages, as nothing else is learnt: "
            f"found {weight!r} for the {role}."
        )
    return {"role": role, **({} if content is None else {"content": _content(content, where)}), **rest}


def _content(value: Any, where: str) -> str:
    """The text of a message, which may be a list of text parts."""
    if not isinstance(value, list):
        return _string(value, "the content", where)
    is_text = [isinstance(part, Mapping) and part.get("type", "text") == "text" for part in value]
    if not all(is_text):
        raise BatchError(f"{where}: a part of the content is not text, and only text is learnt here.")
    return "".join(_string(part.get("text"), "the content", where) for part in value)


def _without_nulls(value: Any) -> Any:
    """A value without null entries, which tables have in every row that does not use a column."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _string(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise BatchError(f"{where}: {what} must be a string: found {kind_of(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BatchError(f"{where}: {what} holds half of a character (a lone surrogate). Repair it.") from None
    return value


def kind_of(value: object) -> str:
    """The JSON type of a value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", type(None): "null"}
    return "true or false" if isinstance(value, bool) else names.get(type(value), type(value).__name__)
