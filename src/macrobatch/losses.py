"""`causal_lm_loss`: the loss of a causal language model, and the number of tokens that it predicts.

Logits (tokens x vocabulary), several times and in float32, take most of the memory of such a loss. If a model returns
the plain output of its head, `_loss_in_chunks` lets the head compute one position only, and `_ChunkedLoss` computes the
rest a few tokens at a time, in the forward and again in the backward. Other models' own logits are used.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from macrobatch._cut.padding import IGNORED
from macrobatch._torch.autograd import only_first
from macrobatch._torch.modules import (
    has_backward_hooks,
    has_compiled_call,
    has_forward_hooks,
    is_fully_sharded,
    layers_around,
    unwrapped,
)
from macrobatch._torch.tensors import version_of
from macrobatch.errors import BackendError, BatchError, UsageError
from macrobatch.types import Reduction

ONLY_FIRST = (
    "causal_lm_loss was differentiated twice, but in chunks it has only first derivatives. For second ones (gradient "
    "penalties, Hessians), pass chunk=None."
)
CHUNK = 2048  # tokens: large enough for fast matrix products; the logits take 1 GB for a vocabulary of 128,000

# Settings of transformers' models that change the logits after the head, unless they are None.
_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, Any], *, chunk: int | None = CHUNK, reduction: Reduction = "mean"
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of predicting each token from the ones before it, and the number of predicted tokens.

    Use it as the `loss_fn` of `MacroStep`, for any model that takes ``input_ids`` and returns logits: a transformers
    model, or a module of your own. To set options, pass ``functools.partial(causal_lm_loss, chunk=256)``.

    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]]),
    ...          "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    >>> loss, items = causal_lm_loss(model, batch)
    >>> items                       # 6, 7, 8 and 3: a first token has nothing before it, and padding does not count
    tensor(4)

    The host never waits for the device. A batch without a token to predict has the loss 0 and 0 items.

    The logits of the whole batch are never in memory at once, in the forward or in the backward, if the model's
    ``get_output_embeddings()`` is a plain ``nn.Linear`` whose output the model returns unchanged. This holds for most
    transformers models, also in DDP. Models that cap or scale their logits, compiled models, FSDP and heads with hooks
    give the same loss, but need the memory for all logits.

    Args:
        model: the model, wrapped or not. It gets all entries of the batch except ``labels``.
        batch: a mapping with ``input_ids`` of shape (samples, length). Two entries are optional: ``attention_mask``,
            which is 0 for padding, and ``labels`` of the same shape, which are not shifted and are -100 for tokens that
            the loss leaves out. Without ``labels``, the loss predicts each token, unless the mask is 0 for it or for
            the token before it.
        chunk: the number of tokens whose logits are computed at a time. None computes all logits at once, and does not
            compute them again in the backward.
        reduction: whether to return the "mean" of the tokens' losses, or their "sum".

    Returns:
        The loss in float32 (in float64 if the logits are float64), and the number of predicted tokens. Both are tensors
        on the device.

    Raises:
        UsageError: `chunk` or `reduction` is invalid.
        BatchError: the batch has no ``input_ids``, or its tensors have the wrong shapes.
        BackendError: the model does not return logits of the expected shape.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction must be 'mean' or 'sum': got {reduction!r}.")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise UsageError(f"chunk must be a number of tokens, at least 1, or None for all at once: got {chunk!r}.")
    targets = _shifted_targets(batch)
    args, kwargs = _model_inputs(unwrapped(model), batch)
    loss = None
    if chunk is not None and targets.numel() > chunk and (head := _plain_head(model)) is not None:
        loss = _loss_in_chunks(model, head, args, kwargs, targets, chunk)
    if loss is None:
        loss = _loss_of_output(model(*args, **kwargs), targets)
    items = (targets != IGNORED).sum().to(loss.device)
    return (loss / items.clamp(min=1) if reduction == "mean" else loss), items


# ---------------------------------------------------------------------------------------------------- inputs


def _shifted_targets(batch: Mapping[str, Any]) -> Tensor:
    """(samples, length): the token that each position should predict, or IGNORED."""
    tokens = _required_tensor(batch, "input_ids")
    if tokens.dim() != 2:
        raise BatchError(f"batch['input_ids'] must have the shape (samples, length): found {tuple(tokens.shape)}.")
    if batch.get("labels") is not None:
        labels = _required_tensor(batch, "labels")
        if labels.shape != tokens.shape or labels.is_floating_point() or labels.is_complex():
            raise BatchError(
                f"batch['labels'] must be token ids of the same shape as input_ids, {tuple(tokens.shape)}, not "
                f"shifted: found {labels.dtype} of shape {tuple(labels.shape)}."
            )
        shifted = labels[:, 1:]
    else:
        shifted = tokens[:, 1:]
        if batch.get("attention_mask") is not None:
            mask = _required_tensor(batch, "attention_mask")
            if mask.shape != tokens.shape:
                raise BatchError(
                    f"batch['attention_mask'] has the shape {tuple(mask.shape)}, but input_ids {tuple(tokens.shape)}: "
                    "it does not show which tokens are padding. Add labels to the batch, with -100 in padding."
                )
            attended = mask != 0
            # Nothing predicts a first token, even if there is padding before it.
            shifted = shifted.masked_fill(~(attended[:, 1:] & attended[:, :-1]), IGNORED)
    return F.pad(shifted.long(), (0, min(1, tokens.shape[1])), value=IGNORED)  # the last position predicts nothing


def _required_tensor(batch: Mapping[str, Any], name: str) -> Tensor:
    if not isinstance(batch, Mapping):
        raise BatchError(f"the batch of causal_lm_loss must be a mapping with 'input_ids': got {type(batch).__name__}.")
    if name not in batch:
        raise BatchError(f"the batch has no {name!r}: found {', '.join(map(repr, batch)) or 'nothing'}.")
    if not isinstance(batch[name], Tensor):
        raise BatchError(f"batch[{name!r}] must be a tensor: got {type(batch[name]).__name__}.")
    tensor: Tensor = batch[name]
    return tensor


def _model_inputs(inner: nn.Module, batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for the model: the batch without its labels, and without a mask that the model does not accept."""
    if inspect.ismethod(inner.forward) and "forward" not in vars(inner):
        accepted, kinds = _accepted_arguments(type(inner).forward)
    else:  # a forward of the instance, which may hold references: not cached
        accepted, kinds = _names_and_kinds(inner.forward)
    kwargs = {key: value for key, value in batch.items() if key not in ("labels", "input_ids")}
    if "attention_mask" not in accepted and inspect.Parameter.VAR_KEYWORD not in kinds:
        kwargs.pop("attention_mask", None)
    if "use_cache" in accepted:
        kwargs.setdefault("use_cache", False)  # a cache would copy all keys and values, which training never uses
    if "input_ids" in accepted or kinds == {inspect.Parameter.VAR_KEYWORD}:
        return (), {"input_ids": batch["input_ids"], **kwargs}
    return (batch["input_ids"],), kwargs


Accepted = tuple[frozenset[str], frozenset[Any]]  # the names and kinds of a forward's parameters


@functools.lru_cache(maxsize=16)  # the inspection takes longer than everything else here
def _accepted_arguments(forward: Callable[..., Any]) -> Accepted:
    return _names_and_kinds(functools.partial(forward, None))  # without self


def _names_and_kinds(forward: Callable[..., Any]) -> Accepted:
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(one.name for one in parameters), frozenset(one.kind for one in parameters)


# ------------------------------------------------------------------------------------------------------ plain logits


def _loss_of_output(output: Any, targets: Tensor) -> Tensor:
    """The summed loss of the logits that a model returned."""
    if (logits := _logits_in(output)) is None:
        raise BackendError(
            "causal_lm_loss found no logits in the output of the model. It must be a tensor, a tuple that begins with "
            f"one, or have a field 'logits': got {type(output).__name__}."
        )
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise BackendError(
            f"for input_ids of shape {tuple(targets.shape)} the model's logits must have the shape "
            f"{(*targets.shape, 'vocabulary')}: found {tuple(logits.shape)}."
        )
    return _summed_loss(logits.flatten(0, 1), targets.to(logits.device).flatten())


def _logits_in(output: Any) -> Tensor | None:
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    return found if isinstance(found, Tensor) else None


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(_sum_dtype(logits.dtype)), targets, ignore_index=IGNORED, reduction="sum")


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ------------------------------------------------------------------------------------------- logits in chunks


def _plain_head(model: nn.Module) -> nn.Linear | None:
    """The output layer of the model, if its logits can be computed in chunks; otherwise None."""
    *outer, inner = layers_around(model)
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return None  # no hooks under tracing; inference tensors have no version counter
    # DDP's static graph puts a callback on the model's output, and its mixed precision swaps the weights. Compiled
    # models are traced, checkpointed ones run their forward again, and sharded weights are whole only in the forward.
    if not all(isinstance(w, DistributedDataParallel) and not (w.static_graph or w.mixed_precision) for w in outer):
        return None
    if is_fully_sharded(inner):
        return None
    config = getattr(inner, "config", None)
    for settings in (config, getattr(config, "text_config", None)):
        if any(getattr(settings, name, None) is not None for name in _CHANGES_LOGITS):
            return None
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return None  # adapters, quantised or sharded weights
    if any(map(_runs_other_code, (*outer, inner, head))) or has_forward_hooks(head):
        return None
    return head


def _runs_other_code(module: nn.Module) -> bool:
    """Whether a call runs other code than the forward of the class, or a backward runs hooks."""
    return "forward" in vars(module) or has_compiled_call(module) or has_backward_hooks(module)


def _loss_in_chunks(
    model: nn.Module, head: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Tensor, chunk: int
) -> Tensor | None:
    """The summed loss without the whole logits; None if the model turns out to need them."""
    output, hidden, is_faithful = _output_and_hidden(model, head, args, kwargs)
    if hidden is None:
        return _loss_of_output(output, targets)  # the model did not call the head: the output has the logits
    if not is_faithful or hidden.shape[:2] != targets.shape:
        name = type(unwrapped(model)).__name__
        warnings.warn(
            f"causal_lm_loss ran the forward of {name} twice, because the model changes the output of its head, so "
            "that its logits cannot be computed in chunks. Pass chunk=None to run it once: "
            "functools.partial(causal_lm_loss, chunk=None).",
            stacklevel=3,
        )
        return None
    device, dtype = hidden.device, hidden.dtype
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), head.weight, head.bias, targets.to(device).flatten(), chunk, dtype
    )
    return loss


def _output_and_hidden(
    model: nn.Module, head: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Tensor | None, bool]:
    """Run a forward in which the head computes one position only: the output, and the input of the head.

    The last value says whether the model called the head once and returned its output unchanged. If not, only the
    model itself can compute its logits.
    """
    hidden: Tensor | None = None
    projected: list[tuple[Tensor, int]] = []  # what the head returned, with its version
    is_faithful = False

    def narrow(_head: nn.Module, given: tuple[Any, ...]) -> tuple[Tensor] | None:
        nonlocal hidden
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() != 3:
            return None
        hidden = given[0]
        return (hidden[:, -1:],)  # as in generation, which every model supports

    def note(_head: nn.Module, _given: object, output: Tensor) -> None:
        projected.append((output, version_of(output)))

    def compare(_inner: nn.Module, _given: object, output: object) -> None:
        nonlocal is_faithful
        returned = _logits_in(output)
        is_faithful = (
            len(projected) == 1
            and returned is projected[0][0]
            and version_of(projected[0][0]) == projected[0][1]  # not capped in place
        )

    handles = [
        head.register_forward_pre_hook(narrow),
        head.register_forward_hook(note),
        unwrapped(model).register_forward_hook(compare),
    ]
    try:
        return model(*args, **kwargs), hidden, is_faithful  # through the wrappers: DDP prepares its reducer there
    finally:
        for handle in handles:
            handle.remove()


class _ChunkedLoss(torch.autograd.Function):
    """``cross_entropy(linear(hidden, weight, bias), targets, reduction="sum")``, a few rows at a time.

    The backward computes the logits again. For a row with logits z and p = softmax(z), the derivative of its loss by z
    is p, minus 1 at the target. Matrix products use `dtype`, as the layer itself would. The gradients of weight and
    bias are summed in float32 at least, so that more chunks do not mean more rounding. Factors of whole rows (the seed
    of the backward, ignored rows) are applied to rows of the hidden size, which is smaller than the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.chunk, ctx.dtype = chunk, dtype
        total = torch.zeros((), dtype=_sum_dtype(dtype), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                total += _summed_loss(F.linear(hidden[part].to(dtype), weight, bias), targets[part])
        return total

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), torch.autocast(seed.device.type, enabled=False):
            gradients = _ChunkedLoss._gradients(ctx, seed)
        return *only_first(gradients, (seed, *ctx.saved_tensors[:3]), ONLY_FIRST), None, None, None

    @staticmethod
    def _gradients(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        """Those of the hidden states, the weight and the bias."""
        hidden, weight, bias, targets = ctx.saved_tensors
        dtype, wide = ctx.dtype, _sum_dtype(ctx.dtype)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if for_bias else None
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
        return grad_hidden, grad_weight, grad_bias
