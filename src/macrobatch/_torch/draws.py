"""Random operations: notice each one, and let somebody else give its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Drawing(NamedTuple):
    """A random operation that has drawn numbers.

    Attributes:
        name: the name of the operation.
        state: the state of its generator before, which is the same when a checkpoint computes it again.
        result: what it has drawn; None if the result depends on other inputs too, so that nobody else can give it.
    """

    name: str
    state: bytes
    result: Tensor | None


class RandomOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `draw` for each random operation inside the block. What it returns replaces the numbers that were drawn."""

    def __init__(self, draw: Callable[[Drawing], Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
        before = _state(generator, args, kwargs)
        result = func(*args, **kwargs)
        if _state(generator, args, kwargs) == before:
            return result  # it can be random, but has drawn nothing: dropout of 0
        name = str(func.overloadpacket).removeprefix("aten.")
        is_pure = isinstance(result, Tensor) and "dropout" not in name and "rrelu" not in name
        given = self._draw(Drawing(name, before, result.detach() if is_pure else None))
        if given is None:
            return result
        if any(result is each for each in (*args[:1], kwargs.get("out")) if isinstance(each, Tensor)):
            return result.copy_(given)
        return given.to(result)


def _state(generator: torch.Generator | None, args: Any, kwargs: Any) -> bytes:
    """The state of the generator that an operation draws from."""
    if generator is not None:
        return generator.get_state().numpy().tobytes()
    devices = [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    devices += [each.device for each in args if isinstance(each, Tensor)]
    gpu = next((device for device in devices if device.type == "cuda"), None)
    state = torch.default_generator.get_state() if gpu is None else torch.cuda.get_rng_state(gpu)
    return bytes(state.tolist()) if gpu is not None else state.numpy().tobytes()
