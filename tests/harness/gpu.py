"""What tests on a GPU share: a small model and its data, a watch for host reads, and how far two models are apart."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to("cuda", dtype)


def make_data(
    dtype: torch.dtype = torch.float32, sizes: Sequence[int] = (5, 2, 7, 4, 1, 3)
) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(n, 8, device="cuda", dtype=dtype), torch.randn(n, 1, device="cuda", dtype=dtype)) for n in sizes
    ]


def difference(a: nn.Module, b: nn.Module) -> float:
    """Of the weights, relative to the largest."""
    weights = [[getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()] for model in (a, b)]
    pairs = list(zip(*weights, strict=True))
    return max((p - q).abs().max().item() for p, q in pairs) / max(q.abs().max().item() for _, q in pairs)


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
