"""Makes every name and sub-module of Accelerate importable from here, as the same objects, not copies."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

THEIRS = "accelerate"


class _Forwarder(MetaPathFinder, Loader):
    """Finds the sub-modules of `package` that are not its `own`, and returns Accelerate's module objects.

    It comes before all other finders: a finder that searches the folder of a forwarded package would load a second
    copy.
    """

    def __init__(self, package: str, own: frozenset[str]) -> None:
        self._package, self._own = package, own

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if not fullname.startswith(self._package + ".") or fullname.removeprefix(self._package + ".") in self._own:
            return None
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(self._origin_of(fullname)) is not None:
                return ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._origin_of(spec.name))
        spec.loader_state = module.__spec__  # because the import system sets module.__spec__ to `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def _origin_of(self, fullname: str) -> str:
        return THEIRS + fullname.removeprefix(self._package)


def install(package: str, folder: Iterable[str]) -> None:
    """Add the sub-modules of Accelerate to `package`, besides those in its own folder."""
    if not any(isinstance(finder, _Forwarder) for finder in sys.meta_path):
        own = frozenset(module.name for module in pkgutil.iter_modules(folder))
        sys.meta_path.insert(0, _Forwarder(package, own))
