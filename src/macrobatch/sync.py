"""When gradients travel: one small class a backend, chosen by `sync_for`.

In one process they do not travel at all, so there is one class so far. What it says is how a backward may be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from macrobatch.errors import BackendError, UsageError

When = Literal["window", "micro"]


class Local:
    """One process: gradients stay where they are."""

    def backward_inputs(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter] | None:
        """What a backward of `loss` may be confined to, so that it adds to no other model's gradients.

        Under reentrant checkpointing that is nothing: torch would leave out, silently, the parameters whose part of
        the graph exists only during the backward.
        """
        return None if _has_node(loss, CheckpointFunction._backward_cls) else tuple(parameters)


def sync_for(models: Sequence[nn.Module], *, sync: When, gather: When, process_group: object) -> Local:
    """The class that fits these models, or an error that says which option does not."""
    for name, value in (("sync", sync), ("gather", gather)):
        if value not in ("window", "micro"):
            raise UsageError(f'{name} must be "window" or "micro": got {value!r}.')
    if gather == "window":
        raise BackendError('gather="window" keeps the parameters of FSDP2 gathered; no given model is sharded by it.')
    if process_group is not None:
        raise BackendError("process_group was given, but this version accumulates in one process only.")
    for model in models:
        if (kind := _wrapper(model)) is not None:
            raise BackendError(f"the model is wrapped in {kind}; this version accumulates in one process only.")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise BackendError(
            f"torch.distributed runs with {dist.get_world_size()} ranks; this version accumulates in one process only."
        )
    return Local()


def _wrapper(model: nn.Module) -> str | None:
    """The name of the data-parallel wrapper around `model`, compiled or not."""
    model = getattr(model, "_orig_mod", model)
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
    return next((c.__name__ for c in type(model).__mro__ if c.__name__ in wrappers), None)


def _has_node(loss: Tensor, kind: type) -> bool:
    """Whether the graph behind `loss` holds a node of that kind."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if type(node) is kind:
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False
