"""A watch for values that travel from the device to the host, on a machine without a GPU too."""

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Notes, while `watching`, whatever hands the host a value that the device computed, by whichever door."""

    OPERATIONS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item", "masked_select"))
    METHODS = frozenset(("cpu", "numpy", "tolist", "untyped_storage", "storage", "data_ptr", "__array__", "__dlpack__"))

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.watching = False
        self._methods = HostReads.Methods(self)

    def note(self, name: str, watched: frozenset[str]) -> None:
        if self.watching and name in watched:
            self.reads.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func.overloadpacket.__name__, self.OPERATIONS)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "HostReads":
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)

    class Methods(TorchFunctionMode):
        """What reads host memory without an operation of torch."""

        def __init__(self, reads: "HostReads") -> None:
            super().__init__()
            self._reads = reads

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self._reads.note(getattr(func, "__name__", ""), self._reads.METHODS)
            return func(*args, **(kwargs or {}))
