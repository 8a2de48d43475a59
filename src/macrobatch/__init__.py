"""The batch you want, on the memory you have, with exactly the gradient you would have got."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from macrobatch._cut.policies import by_count, by_tokens
    from macrobatch.accumulator import Accumulator
    from macrobatch.auditing import audit
    from macrobatch.contrastive import contrastive_loss
    from macrobatch.errors import MacrobatchError
    from macrobatch.losses import causal_lm_loss
    from macrobatch.macrostep import MacroStep
    from macrobatch.types import Encoded, StepResult, Sum
    from macrobatch.verification import verify

__all__ = [
    "Accumulator",
    "Encoded",
    "MacroStep",
    "MacrobatchError",
    "StepResult",
    "Sum",
    "audit",
    "by_count",
    "by_tokens",
    "causal_lm_loss",
    "contrastive_loss",
    "verify",
]
__version__ = "0.2.0"

_MODULES = {
    "Accumulator": "accumulator",
    "Encoded": "types",
    "MacroStep": "macrostep",
    "MacrobatchError": "errors",
    "StepResult": "types",
    "Sum": "types",
    "audit": "auditing",
    "by_count": "_cut.policies",
    "by_tokens": "_cut.policies",
    "causal_lm_loss": "losses",
    "contrastive_loss": "contrastive",
    "verify": "verify",
}


def __getattr__(name: str) -> object:
    """Import a public name, or a module, when it is first used: torch takes seconds, and the command speaks sooner."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_MODULES.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = getattr(module, name) if name in _MODULES else module
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Whoever imports the module `verify` must not find it where the function is expected."""

    def __setattr__(self, name: str, value: object) -> None:
        is_module = name in _MODULES and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if is_module else value)


sys.modules[__name__].__class__ = _Package
