"""Hugging Face Accelerate with exact gradient accumulation: only a program's import lines change.

``from accelerate import Accelerator`` becomes ``from macrobatch.accelerate import Accelerator``, and so on for every
name and sub-module. Only `Accelerator` and `GradientAccumulationPlugin` differ: they are subclasses of Accelerate's.
All other names are Accelerate's own objects. docs/from-accelerate.md lists the differences.
"""

from typing import Any

from macrobatch.errors import pip_install

try:
    import accelerate
except ImportError as error:
    raise ImportError(
        f"macrobatch.accelerate builds on Hugging Face Accelerate, which is not installed: {pip_install('accelerate')}."
    ) from error

from macrobatch.accelerate import forwarding

forwarding.install(__name__, list(__path__))

from macrobatch.accelerate.accelerator import Accelerator  # noqa: E402
from macrobatch.accelerate.utils import GradientAccumulationPlugin  # noqa: E402

__all__ = ["Accelerator", "GradientAccumulationPlugin"]
__all__ += [name for name in vars(accelerate) if not (name.startswith("_") or name in __all__)]


def __getattr__(name: str) -> Any:
    return getattr(accelerate, name)
