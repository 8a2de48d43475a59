"""Checks of ranks: nothing that was accumulated may stay on one rank."""

from __future__ import annotations

from typing import Any

from macrobatch._engine.engine import Engine
from macrobatch._engine.events import Check
from macrobatch._engine.totals import Micro
from macrobatch._ranks.backend import UnsynchronisedError
from macrobatch._ranks.select import require_same_wrapping, wrapping


class Unsynchronised(Check):
    """Compares the parameters that the last backward reaches with those that DDP's reducer waits for.

    Where the graph does not show all of them, hooks note which parameters really get a gradient.
    """

    name = "an unsynchronised parameter"
    sentence = "Under DDP, the last micro-batch does not use a parameter that an earlier one used."
    cost = "per window, a comparison of the last graph with the parameters"
    shows = "parameters have no part in this rank's last micro-batch of the window"
    num_ranks = 2
    program = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(2, 1), nn.Linear(2, 1)

            def forward(self, x, uses_first):
                return self.first(x) if uses_first else self.second(x)

        model = nn.parallel.DistributedDataParallel(Model())
        acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        for index, batch in enumerate(acc.batches(loader)):
            acc.backward(model(batch, index == 0).square().mean())
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._awaited: list[str] = []
        self._seen: set[str] = set()
        self._hooks: list[Any] = []
        return engine.backend.group is not None and engine.backend.abilities.leaves_are_parameters

    def before_backward(self, engine: Engine, micro: Micro) -> None:
        self.window_end(engine)
        if not engine.backend.will_check or micro.root is None:
            return
        reach, named = engine.reach(micro.root), engine.store.named
        self._awaited = list(engine.backend.check(set(map(id, reach.leaves)), named, may_nest=reach.may_nest))
        self._hooks = [
            named[name].register_hook(lambda _, name=name: self._seen.add(name))  # type: ignore[no-untyped-call]
            for name in self._awaited
            if named[name].requires_grad
        ]

    def after_backward(self, engine: Engine, micro: Micro | None) -> None:
        missing = [name for name in self._awaited if name not in self._seen]
        self.window_end(engine)
        if missing:
            raise UnsynchronisedError(
                f"{len(missing)} parameters got no gradient in this rank's last micro-batch of the window, the first "
                f"of them {missing[0]!r}: DistributedDataParallel has not synchronised what they have accumulated. Use "
                "every parameter in every micro-batch, or wrap the model with find_unused_parameters=True, which needs "
                "checkpoint(..., use_reentrant=False)."
            )

    def window_end(self, engine: Engine) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._awaited, self._seen = [], [], set()


class WrappedLater(Check):
    """Compares the models' wrappers, and the number of ranks, with those when the engine was made."""

    name = "a model wrapped later"
    sentence = "A model is wrapped, or torch.distributed initialized, after the Accumulator was made."
    cost = "a look at the type of each model per window"
    shows = "a model was wrapped, or torch.distributed initialized, after this Accumulator was made"
    program = """
        class Wrapped(nn.Linear):
            pass

        model.__class__ = Wrapped  # as fully_shard(model) does
        for batch in acc.batches(loader):
            acc.backward(loss_fn(batch))
            acc.step()
        """

    def watch(self, engine: Engine) -> bool:
        self._wrapping = wrapping(engine.models)
        return True

    def window_begin(self, engine: Engine) -> None:
        require_same_wrapping(engine.models, self._wrapping)
