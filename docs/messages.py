"""The page of messages: every error and warning, as the source of the package has it."""

import ast
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parent.parent / "src" / "macrobatch"
WARNING = "warn"
KINDS = ("UsageError", "BatchError", "BackendError", "NonFiniteError", "FitError", "CheckpointError", WARNING)
PARTS = {
    "accelerate": "macrobatch.accelerate",
    "transformers": "macrobatch.transformers",
    "lightning": "macrobatch.lightning",
    "train": "macrobatch train",
    "verification": "verify",
    "auditing": "audit",
}
CORE = "Accumulator and MacroStep"
HEAD = """\
# Messages

Every error and warning of Macrobatch, in the words of its source: … stands for what your program has there, such as a
name or a number. Search this page for a few words of what you see. The adapters for trainers word the advice for these.
[Troubleshooting](troubleshooting.md) begins with symptoms.
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the page to the site."""
    files.append(File.generated(config, "messages.md", content=page()))
    return files


class Message(NamedTuple):
    """A message of the package."""

    part: str  # of the library
    kind: str  # the class of an error, or `WARNING`
    text: str


def messages(source: Path = SOURCE) -> Iterator[Message]:
    """All messages that the source writes out."""
    trees = [(_part_of(file.relative_to(source)), ast.parse(file.read_text())) for file in sorted(source.rglob("*.py"))]
    raisers: dict[str, tuple[ast.FunctionDef, ast.Call]] = {}  # functions whose callers give them a part of the text
    for part, tree in trees:
        around = {id(node): one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) for node in ast.walk(one)}
        for call in _calls_in(tree, KINDS):
            function = around.get(id(call))
            named = _assigned(tree.body) | ({} if function is None else _assigned(function.body))
            if function is not None and _takes_text(function, call):
                raisers[function.name] = function, call
            yield from _message(part, call, named)
    for part, tree in trees:
        for caller in _calls_in(tree, raisers):
            function, call = raisers[_name_of(caller.func)]
            names = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
            given = dict(zip(names, caller.args, strict=False)) | {one.arg or "": one.value for one in caller.keywords}
            yield from _message(part, call, _assigned(tree.body) | given)


def _message(part: str, call: ast.Call, named: dict[str, ast.expr]) -> Iterator[Message]:
    text = " ".join(_text(one, named) for one in _texts_of(call)).strip()
    if len(re.findall(r"\w{2,}", text)) > 3:  # else another error's own words
        yield Message(part, _name_of(call.func), text)


def _part_of(file: Path) -> str:
    return PARTS.get(file.parts[0], CORE)


def _calls_in(tree: ast.AST, names: Container[str]) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of(node.func) in names]


def _takes_text(function: ast.FunctionDef, call: ast.Call) -> bool:
    """Whether an argument of the function is a part of the text."""
    names = {node.id for text in _texts_of(call) for node in ast.walk(text) if isinstance(node, ast.Name)}
    return not names.isdisjoint(one.arg for one in (*function.args.args, *function.args.kwonlyargs))


def page() -> str:
    """The page, by part and kind."""
    found, lines = sorted(set(messages())), [HEAD]
    for part in (CORE, *PARTS.values()):
        lines.append(f"\n## {part}\n")
        for kind in KINDS:
            texts = [one.text for one in found if (one.part, one.kind) == (part, kind)]
            title = "Warnings" if kind == WARNING else kind
            lines += [f"\n### {title}\n", *(f"- {_escaped(text)}" for text in texts)] if texts else []
    return "\n".join(lines) + "\n"


def _name_of(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _texts_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args[:2], *(word.value for word in call.keywords if word.arg == "cure")]


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """What names stand for, where they are assigned once."""
    found = [
        (target.id, one.value)
        for one in body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    ]
    names = [name for name, _ in found]
    return {name: value for name, value in found if names.count(name) == 1}


def _text(node: ast.expr, named: dict[str, ast.expr]) -> str:
    """The text of an expression, with … for what only a run knows."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, named) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if name in named:
            rest = {other: value for other, value in named.items() if other != name}
            return _text(named[name], rest)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, named) + _text(right, named)
    return "…"


def _escaped(text: str) -> str:
    """The text as Markdown that shows it."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text.replace("\n", " "))
