"""Hooks of the user on parameters: they may read the gradients that a window accumulates, but not change them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from macrobatch._torch.tensors import hooks_after_accumulation, version_of
from macrobatch.errors import UsageError


def hooked_parameters(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters with a hook that runs after each addition to their gradient."""
    return {name: p for name, p in named.items() if hooks_after_accumulation(p)}


@contextlib.contextmanager
def guard_hooks(hooked: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """While a backward runs, raise an error if one of these hooks writes to a gradient, replaces it or clears it."""
    handles = []
    for name, parameter in hooked.items():
        if not parameter.requires_grad:  # frozen since: its hooks do not run
            continue
        guard = _Guard(name)
        first = parameter.register_post_accumulate_grad_hook(guard.note)  # type: ignore[no-untyped-call]
        _put_first(hooks_after_accumulation(parameter), first.id)
        last = parameter.register_post_accumulate_grad_hook(guard.check)  # type: ignore[no-untyped-call]
        handles += [first, last]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _put_first(hooks: dict[int, Any], key: int) -> None:
    """Make a hook the first one. Torch runs hooks in the order of insertion, which `move_to_end` does not change."""
    others = [(other, hook) for other, hook in hooks.items() if other != key]
    own = hooks[key]
    hooks.clear()
    hooks[key] = own
    hooks.update(others)


class _Guard:
    """Runs before and after all other hooks of one parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def note(self, parameter: Tensor) -> None:
        self._gradient = parameter.grad
        self._version = -1 if parameter.grad is None else version_of(parameter.grad)

    def check(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is self._gradient and (gradient is None or version_of(gradient) == self._version):
            return
        raise UsageError(
            f"a hook that runs after each addition to the gradient of parameter {self._name!r} "
            "(register_post_accumulate_grad_hook) has changed or cleared it. Inside a window it is an undivided sum: "
            "do this once a window, in a hook of the optimizer (register_step_pre_hook), which sees the mean."
        )
