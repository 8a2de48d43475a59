"""How others accumulate losses of the whole batch, in loops of the same shape written here: their mistakes included.

Each takes one step of SGD with a learning rate of 1, on the pairs of a batch.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.joint import Batch, parts_of
from macrobatch import Encoded

JointLoss = Callable[[Any, Encoded], Tensor]
Pair = tuple[Tensor, Tensor]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)


def gradcache(model: Any, batch: Batch, *, micro: int, joint: JointLoss, gathers: bool = False) -> None:
    """GradCache: encode, the gradients of all encodings, encode again with the same random numbers.

    With `gathers`, each rank computes the loss of all ranks' pairs, of which only its own have gradients. Under DDP
    the mean over the ranks makes it too small by their number.
    """
    optimizer, parts, states = _sgd(model), parts_of(batch, micro), []
    bare = model.module if gathers else model
    encoded = []
    with torch.no_grad():
        for part in parts:
            states.append(torch.get_rng_state())
            encoded.append(model(part)[:2])
    after = torch.get_rng_state()
    image, text = (torch.cat(rows).requires_grad_() for rows in zip(*encoded, strict=True))
    whole = [_gathered(rows) for rows in (image, text)] if gathers else [image, text]
    joint(bare, Encoded(image=whole[0], text=whole[1])).backward()
    assert image.grad is not None
    assert text.grad is not None
    gradients = zip(image.grad.split(micro), text.grad.split(micro), strict=True)
    for part, state, of_part in zip(parts, states, gradients, strict=True):
        torch.set_rng_state(state)
        is_last = part is parts[-1]
        with contextlib.nullcontext() if is_last or not gathers else model.no_sync():
            found = model(part)[:2]
            sum((rows * gradient).sum() for rows, gradient in zip(found, of_part, strict=True)).backward()
    torch.set_rng_state(after)
    optimizer.step()
    optimizer.zero_grad()


def _gathered(own: Tensor) -> Tensor:
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.detach())
    everyone[dist.get_rank()] = own
    return torch.cat(everyone)


def openclip(model: nn.Module, batch: Batch, *, micro: int, joint: JointLoss) -> None:
    """OpenCLIP's --accum-freq: each micro-batch is encoded again, among the cached rest, and the whole loss goes back.

    So the logit scale gets its gradient once for each micro-batch. Random numbers are not those of the first pass.
    """
    optimizer, parts = _sgd(model), parts_of(batch, micro)
    with torch.no_grad():
        cached = [model(part)[:2] for part in parts]
    for index, part in enumerate(parts):
        encoded: list[Pair] = [*cached[:index], model(part)[:2], *cached[index + 1 :]]
        image, text = (torch.cat(rows) for rows in zip(*encoded, strict=True))
        joint(model, Encoded(image=image, text=text)).backward()
    optimizer.step()
    optimizer.zero_grad()


def sentence_transformers(model: nn.Module, batch: Batch, *, micro: int, joint: JointLoss) -> None:
    """Its cached loss: as GradCache, but the second pass is a hook of the loss's backward. Right on one device."""
    optimizer, parts, states = _sgd(model), parts_of(batch, micro), []
    rows: list[list[Tensor]] = []
    with torch.no_grad():
        for part in parts:
            states.append(torch.get_rng_state())
            rows.append([one.detach().requires_grad_() for one in model(part)[:2]])
    after = torch.get_rng_state()
    image, text = (torch.cat(column) for column in zip(*rows, strict=True))
    loss = joint(model, Encoded(image=image, text=text))
    loss.backward()
    value = loss.detach().requires_grad_()

    def encode_again(gradient: Tensor) -> None:
        for part, state, leaves in _each(parts, states, rows):
            torch.set_rng_state(state)
            with torch.enable_grad():
                found = model(part)[:2]
                total = sum((one * leaf.grad).sum() for one, leaf in zip(found, leaves, strict=True))
                (total * gradient).backward()

    value.register_hook(encode_again)
    value.backward()
    torch.set_rng_state(after)
    optimizer.step()
    optimizer.zero_grad()


def _each(parts: list[Batch], states: list[Tensor], rows: list[list[Tensor]]) -> Iterator[Any]:
    return iter(list(zip(parts, states, rows, strict=True)))
