"""The strategy for a name, from the package that the program uses: Lightning exists under two package names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from macrobatch.errors import BackendError, UsageError, pip_install

LATE = ("auto", "fsdp2")  # replaced by another strategy when the Trainer knows its devices
TOLD = {"cluster_environment": None, "parallel_devices": None, "num_nodes": 1, "_layer_sync": None}  # by the Trainer
SHARDED_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")  # supported by ModelParallelStrategy
OUT_OF_REACH = {
    "DeepSpeedStrategy": "DeepSpeed accumulates and divides by itself, and keeps gradients out of reach until its step",
    "XLAStrategy": "gradients on XLA devices are out of reach until they are stepped with",
    "SingleDeviceXLAStrategy": "gradients on XLA devices are out of reach until they are stepped with",
    "FSDPStrategy": "it shards with the first generation of FSDP",
}


def find_strategy(strategy: Any) -> Any:
    """The strategy with that name, or the given one. Raises an error if it gives no access to its gradients."""
    found = _find_by_name(strategy) if isinstance(strategy, str) else strategy
    kind = type(found)
    if not package_of(kind):
        raise UsageError(f"strategy must be a name, or a Strategy of Lightning: got {kind.__name__}.")
    why = next((OUT_OF_REACH[base.__name__] for base in kind.__mro__ if base.__name__ in OUT_OF_REACH), None)
    if why is not None or found.handles_gradient_accumulation:
        raise BackendError(
            f"ExactStrategy cannot be made around {kind.__name__}: {why or 'it accumulates by itself'}. Use "
            '"auto", "ddp" or "fsdp2", or an instance of DDPStrategy or ModelParallelStrategy.'
        )
    return found


def _find_by_name(name: str) -> Any:
    strategies = importlib.import_module(f"{_imported_package()}.strategies")
    known = strategies.StrategyRegistry.available_strategies()
    if name.lower() in LATE:
        found = strategies.SingleDeviceStrategy()  # until the Trainer has set its devices
        vars(found).update(TOLD)
        return found
    if name.lower() not in known:
        raise UsageError(f"strategy={name!r} is no name of a strategy. Known are: {', '.join([*LATE, *known])}.")
    return strategies.StrategyRegistry.get(name.lower())


def choose_strategy(late: Any, name: str) -> Any:
    """The strategy that the Trainer chooses for "auto"; for "fsdp2", all devices are data-parallel."""
    strategies = importlib.import_module(f"{package_of(type(late))}.strategies")
    num_devices = len(late.parallel_devices)
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if name == "fsdp2":
        if late.precision_plugin.precision not in SHARDED_PRECISIONS:
            raise UsageError(
                f"precision={late.precision_plugin.precision!r} cannot go with fsdp2: ModelParallelStrategy takes "
                f"{', '.join(SHARDED_PRECISIONS)}."
            )
        chosen = strategies.ModelParallelStrategy(late.num_nodes * num_devices, 1)
    elif late.num_nodes * num_devices == 1:
        chosen = strategies.SingleDeviceStrategy(late.parallel_devices[0])
    else:
        chosen = strategies.StrategyRegistry.get("ddp_fork" if is_interactive and late.num_nodes == 1 else "ddp")
    for attribute in ("accelerator", "precision_plugin", "checkpoint_io", *TOLD):
        if hasattr(chosen, attribute):
            setattr(chosen, attribute, getattr(late, attribute))
    if hasattr(chosen, "set_world_ranks"):
        chosen.set_world_ranks()
    return chosen


def package_of(kind: type) -> str:
    """The package of the `Strategy` that a class is derived from; "" if it is not derived from one."""
    modules = [base.__module__ for base in kind.__mro__ if base.__name__ == "Strategy"]
    return next((module.split(".strategies")[0] for module in modules if ".strategies" in module), "")


def _imported_package() -> str:
    """The package of the Trainer that the program uses."""
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return "pytorch_lightning"
    try:
        importlib.import_module("lightning.pytorch")
    except ImportError as error:
        raise ImportError(
            f"macrobatch.lightning builds on Lightning, which is not installed: {pip_install('lightning')}."
        ) from error
    return "lightning.pytorch"
