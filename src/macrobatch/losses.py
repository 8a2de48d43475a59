"""`causal_lm_loss`: the loss of a causal language model, with the tokens that it is a mean over.

What takes the memory of such a loss is the logits, tokens x words of the vocabulary, several times over and in float32.
A model that returns its projection of the last hidden states untouched need not make them: it is run with a projection
of one position only (`_Watch`), and the rest is projected here, a few tokens at a time, in the forward and once more in
the backward (`_ProjectedLoss`). Any other model returns its logits, and those are used.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from macrobatch._cut.padding import IGNORED
from macrobatch.errors import BackendError, BatchError, UsageError
from macrobatch.types import Reduction

CHUNK = 2048  # tokens: enough rows for fast products and few additions of a weight's gradient; 1 GB for 128,000 words

# Settings of transformers' models that change the logits after the projection, where they are not None.
_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, Any], *, chunk: int | None = CHUNK, reduction: Reduction = "mean"
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of predicting each token from those before it, and the number of tokens predicted.

    It is what `MacroStep` wants for its `loss_fn`, for any model that takes ``input_ids`` and returns logits: those of
    transformers, or a module of your own. With options: ``functools.partial(causal_lm_loss, chunk=256)``.

    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]]),
    ...          "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    >>> loss, items = causal_lm_loss(model, batch)
    >>> items                       # 6, 7, 8 and 3: nothing stands before a first token, and padding does not count
    tensor(4)

    The host reads nothing of what it computes. A batch without a token to predict has loss 0 and 0 items.

    The logits of the whole batch are never in memory at once, neither forward nor backward, if the model's
    ``get_output_embeddings()`` is a plain ``nn.Linear`` whose result the model returns as it is: most models of
    transformers, in DDP too. The rest is as exact, and needs the memory: models that cap or scale their logits,
    compiled models, FSDP, heads with hooks.

    Args:
        model: wrapped or not. It is called with the batch, but for ``labels``.
        batch: ``input_ids`` (samples, length); ``attention_mask``, 0 where there is padding, where the model takes one;
            ``labels`` of the same shape, -100 where nothing is to be predicted, not shifted; by default ``input_ids``,
            where the mask has both the token and the one before it. Whatever else it holds is handed to the model.
        chunk: how many tokens are projected on the vocabulary at a time; None: all, and nothing twice.
        reduction: "mean" over the tokens, or their "sum".

    Returns:
        The loss, in float32 (float64 where the logits are), and its items, both on the device.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction must be 'mean' or 'sum': got {reduction!r}.")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise UsageError(f"chunk must be a number of tokens, at least 1, or None for all at once: got {chunk!r}.")
    targets = _targets(batch)
    args, kwargs = _inputs(_inner(model), batch)
    loss = None
    if chunk is not None and targets.numel() > chunk and (head := _untouched_head(model)) is not None:
        loss = _chunked(model, head, args, kwargs, targets, chunk)
    if loss is None:
        loss = _plain(model(*args, **kwargs), targets)
    items = (targets != IGNORED).sum().to(loss.device)
    return (loss / items.clamp(min=1) if reduction == "mean" else loss), items


# ---------------------------------------------------------------------------------------------------- what goes in


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """(samples, length): the token that each position should predict, IGNORED where there is none."""
    tokens = _tensor(batch, "input_ids")
    if tokens.dim() != 2:
        raise BatchError(f"batch['input_ids'] must have the shape (samples, length): found {tuple(tokens.shape)}.")
    if batch.get("labels") is not None:
        labels = _tensor(batch, "labels")
        if labels.shape != tokens.shape or labels.is_floating_point() or labels.is_complex():
            raise BatchError(
                f"batch['labels'] must be token ids of the shape of input_ids, {tuple(tokens.shape)}, which are "
                f"shifted here: found {labels.dtype} of shape {tuple(labels.shape)}."
            )
        shifted = labels[:, 1:]
    else:
        shifted = tokens[:, 1:]
        if batch.get("attention_mask") is not None:
            mask = _tensor(batch, "attention_mask")
            if mask.shape != tokens.shape:
                raise BatchError(
                    f"batch['attention_mask'] has the shape {tuple(mask.shape)}, input_ids {tuple(tokens.shape)}: it "
                    "does not tell which tokens are padding. Add labels to the batch, -100 where there is padding."
                )
            attended = mask != 0
            # A first token is predicted by nothing, whether padding stands before it or not.
            shifted = shifted.masked_fill(~(attended[:, 1:] & attended[:, :-1]), IGNORED)
    return F.pad(shifted.long(), (0, min(1, tokens.shape[1])), value=IGNORED)  # the last position predicts nothing


def _tensor(batch: Mapping[str, Any], name: str) -> Tensor:
    if not isinstance(batch, Mapping):
        raise BatchError(f"causal_lm_loss wants a mapping with 'input_ids' for its batch: got {type(batch).__name__}.")
    if name not in batch:
        raise BatchError(f"the batch has no {name!r}: found {', '.join(map(repr, batch)) or 'nothing'}.")
    if not isinstance(batch[name], Tensor):
        raise BatchError(f"batch[{name!r}] must be a tensor: got {type(batch[name]).__name__}.")
    tensor: Tensor = batch[name]
    return tensor


def _inputs(inner: nn.Module, batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with: the batch without its labels, and without a mask that the model cannot take."""
    if inspect.ismethod(inner.forward) and "forward" not in vars(inner):
        accepted, kinds = _accepted_by_method(type(inner).forward)
    else:  # of its own, which may hold anything
        accepted, kinds = _described(inspect.signature(inner.forward).parameters.values())
    kwargs = {key: value for key, value in batch.items() if key not in ("labels", "input_ids")}
    if "attention_mask" not in accepted and inspect.Parameter.VAR_KEYWORD not in kinds:
        kwargs.pop("attention_mask", None)
    if "use_cache" in accepted:
        kwargs.setdefault("use_cache", False)  # keys and values for tokens that will never come: copies of them all
    if "input_ids" in accepted or kinds == {inspect.Parameter.VAR_KEYWORD}:
        return (), {"input_ids": batch["input_ids"], **kwargs}
    return (batch["input_ids"],), kwargs


Accepted = tuple[frozenset[str], frozenset[Any]]  # the names and the kinds of what a forward takes


@functools.lru_cache(maxsize=16)  # to look takes longer than all the rest here
def _accepted_by_method(forward: Callable[..., Any]) -> Accepted:
    own, *others = inspect.signature(forward).parameters.values()
    return _described([own, *others] if own.kind is inspect.Parameter.VAR_POSITIONAL else others)


def _described(parameters: Iterable[inspect.Parameter]) -> Accepted:
    parameters = list(parameters)
    return frozenset(one.name for one in parameters), frozenset(one.kind for one in parameters)


# ------------------------------------------------------------------------------------------------------ plain logits


def _plain(output: Any, targets: Tensor) -> Tensor:
    """The summed loss, of the logits that a model returned."""
    logits = _logits_in(output)
    if logits is None:
        raise BackendError(
            "causal_lm_loss found no logits in what the model returned: it must be a tensor, a tuple that begins with "
            f"one, or have a field 'logits'; got {type(output).__name__}."
        )
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise BackendError(
            f"for input_ids of shape {tuple(targets.shape)} the model's logits must have the shape "
            f"{(*targets.shape, 'vocabulary')}: found {tuple(logits.shape)}."
        )
    return _sum(logits.flatten(0, 1), targets.to(logits.device).flatten())


def _logits_in(output: Any) -> Tensor | None:
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    return found if isinstance(found, Tensor) else None


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(_wide(logits.dtype)), targets, ignore_index=IGNORED, reduction="sum")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ------------------------------------------------------------------------------------------- without the whole logits


def _wrappers(model: nn.Module) -> list[Any]:
    """The model, what it wraps, what that wraps, and so on: compiled, DDP, FSDP1."""
    found: list[Any] = [model]
    while True:
        outer = found[-1]
        if isinstance(outer, DistributedDataParallel) or _is_a(outer, "FullyShardedDataParallel"):
            found.append(outer.module)
        elif isinstance(outer, nn.Module) and "_orig_mod" in outer._modules:
            found.append(outer._orig_mod)
        else:
            return found


def _inner(model: nn.Module) -> nn.Module:
    inner: nn.Module = _wrappers(model)[-1]
    return inner


def _is_a(module: object, name: str) -> bool:
    """By the name of a class, which then need not be imported."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _untouched_head(model: nn.Module) -> nn.Linear | None:
    """The projection on the vocabulary, where nothing is known to need all its logits, or to run anything but it."""
    *outer, inner = _wrappers(model)
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return None  # traced; tensors that do not count how often they were changed
    # Static graphs hang a callback on what the model returns, and DDP's mixed precision swaps the weights.
    if not all(isinstance(w, DistributedDataParallel) and not (w.static_graph or w.mixed_precision) for w in outer):
        return None
    if any(_is_a(inner, name) for name in ("FSDPModule", "ActivationWrapper")):
        return None  # weights are whole only inside the forward; or the forward runs again, in the backward
    config = getattr(inner, "config", None)
    for settings in (config, getattr(config, "text_config", None)):
        if any(getattr(settings, name, None) is not None for name in _CHANGES_LOGITS):
            return None
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return None  # adapters, quantised or sharded weights
    if any(map(_is_rewired, (*outer, inner, head))) or head._forward_hooks or head._forward_pre_hooks:
        return None
    return head


def _is_rewired(module: nn.Module) -> bool:
    """Whether a call runs something else than the forward of its class, or a backward something that it should see."""
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return True
    return bool(module._backward_hooks or module._backward_pre_hooks)


class _Watch:
    """Hooks for one forward, in which the head projects one position only.

    Afterwards `hidden` holds what the head was to project, and `is_faithful` says whether the model returned the head's
    result as it was. If it did not, or called the head more than once, only the model itself can make its logits.
    """

    def __init__(self, inner: nn.Module, head: nn.Linear) -> None:
        self.hidden: Tensor | None = None
        self.is_faithful = False
        self._inner, self._head = inner, head
        self._calls = 0
        self._projected: Tensor | None = None
        self._version = 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> _Watch:
        self._handles.append(self._head.register_forward_pre_hook(self._narrow))
        self._handles.append(self._head.register_forward_hook(self._note))
        self._handles.append(self._inner.register_forward_hook(self._compare))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _narrow(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        self._calls += 1
        if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            return None
        self.hidden = args[0]
        return (args[0][:, -1:],)  # as in generation, so every model can do with that

    def _note(self, _head: nn.Module, _args: object, projected: Tensor) -> None:
        self._projected, self._version = projected, projected._version

    def _compare(self, _inner: nn.Module, _args: object, output: object) -> None:
        returned = _logits_in(output)
        self.is_faithful = (
            self._calls == 1
            and returned is not None
            and returned is self._projected
            and returned._version == self._version  # not capped in place
        )


def _chunked(
    model: nn.Module,
    head: nn.Linear,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Tensor,
    chunk: int,
) -> Tensor | None:
    """The summed loss, without the logits as a whole; None where the model turns out to need them."""
    with _Watch(_inner(model), head) as watch:
        output = model(*args, **kwargs)  # through its wrappers: DDP prepares its reducer there
    hidden = watch.hidden
    if hidden is None:
        return _plain(output, targets)  # the head was not asked: these are the logits
    if not watch.is_faithful or hidden.shape[:2] != targets.shape:
        warnings.warn(
            f"causal_lm_loss ran the forward of {type(_inner(model)).__name__} twice: the model does not return what "
            "its output embeddings compute as it is, so that its logits cannot be made in chunks. Hand over chunk=None "
            "to run it once: functools.partial(causal_lm_loss, chunk=None).",
            stacklevel=3,
        )
        return None
    device = hidden.device
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    loss: Tensor = _ProjectedLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), head.weight, head.bias, targets.to(device).flatten(), chunk, dtype
    )
    return loss


class _ProjectedLoss(torch.autograd.Function):
    """``cross_entropy(linear(hidden, weight, bias), targets, reduction="sum")``, a few rows at a time.

    The logits are computed again in the backward. Of one row they are z, with p = softmax(z), and the derivative of its
    loss by z is p less 1 at the target. Products are taken in `dtype`, as the layer itself would; the gradients of
    weight and bias are summed up in float32 at least, so that more chunks do not mean more rounding. What concerns
    whole rows, the seed of the backward and which are ignored, is applied where rows are `hidden` wide, not as wide as
    the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.chunk, ctx.dtype = chunk, dtype
        total = torch.zeros((), dtype=_wide(dtype), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                total += _sum(F.linear(hidden[part].to(dtype), weight, bias), targets[part])
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        dtype, wide = ctx.dtype, _wide(ctx.dtype)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if for_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                rows, wanted = hidden[part].to(dtype), targets[part, None]
                ignored = wanted == IGNORED
                slope = torch.softmax(F.linear(rows, weight, bias), -1, dtype=wide)  # (rows, vocabulary)
                slope.scatter_add_(1, wanted.masked_fill(ignored, 0), torch.full_like(wanted, -1, dtype=wide))
                if grad_bias is not None:
                    grad_bias += slope.t() @ (~ignored[:, 0]).to(wide)
                slope = slope.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (slope @ weight).masked_fill_(ignored, 0)
                rows = rows.masked_fill(ignored, 0)
                if grad_weight is not None and dtype == wide:
                    grad_weight.addmm_(slope.t(), rows)
                elif grad_weight is not None:
                    grad_weight += slope.t() @ rows
        for gradient in (grad_hidden, grad_weight, grad_bias):
            if gradient is not None:
                gradient *= seed
        return grad_hidden, grad_weight, grad_bias, None, None, None
