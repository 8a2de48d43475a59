"""Checks what users pass: each function returns its argument in the form used inside, or raises an error."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from macrobatch._ranks.collectives import full_tensor
from macrobatch._torch.optimizers import needs_closure, needs_graph
from macrobatch._torch.tensors import number_on_host
from macrobatch.errors import BackendError, BatchError, UsageError
from macrobatch.types import Encoded, Items

T = TypeVar("T")
FEWEST_ITEMS = 1e-30  # the smallest valid number of items besides 0: 1 / a much smaller one is infinite in float32
MOST_ITEMS = 2**53  # per micro-batch: floats cannot count more exactly


# ---------------------------------------------------------------------------------------------- of a micro-batch


def checked_loss(loss: object) -> Tensor:
    """The loss passed to `backward`, or an error that says what is wrong with it."""
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 and loss.dtype.is_floating_point:
        if torch.is_inference_mode_enabled():
            raise UsageError("a backward under torch.inference_mode(): call it outside of that block.")
        return loss if type(loss) is Tensor else full_tensor(loss)
    if isinstance(loss, Mapping):
        raise BatchError(
            f"the loss must be a tensor: got {type(loss).__name__}. A dict of terms ({', '.join(map(str, loss))}) "
            "needs counts=, a function that returns the items of each term in a whole batch: they must be known before "
            "the first backward."
        )
    if isinstance(loss, Encoded):
        raise BatchError(
            "the loss must be a tensor: got an Encoded. The loss of the whole batch that it is for is MacroStep(..., "
            "joint=): a function of the model and all encodings."
        )
    if not isinstance(loss, Tensor):
        raise BatchError(f"the loss must be a tensor: got {type(loss).__name__}. Pass the loss itself, with its graph.")
    _require_number(loss, "the loss must be", 'Reduce it with mean(), or with sum() and reduction="sum".')
    raise BatchError(
        "the loss has no graph: it was detached, computed under no_grad() or inference_mode(), or uses no parameter "
        "that requires a gradient."
    )


def _require_number(loss: Tensor, subject: str, cure: str) -> None:
    if loss.numel() != 1:
        raise BatchError(f"{subject} a scalar: got shape {tuple(loss.shape)}.", cure, code="no scalar")
    if not loss.dtype.is_floating_point:
        raise BatchError(f"{subject} a real number: got dtype {loss.dtype}.")


def checked_ordinary(loss: object, *, needs_graph: bool) -> Tensor:
    """The ordinary loss of an `Encoded`, or an error."""
    if not needs_graph and isinstance(loss, Tensor) and loss.numel() == 1 and loss.dtype.is_floating_point:
        return full_tensor(loss)
    try:
        return checked_loss(loss)
    except BatchError as error:
        raise BatchError(f"the ordinary loss in Encoded(loss, items, ...): {error}") from None


def checked_joint_loss(loss: object) -> Tensor:
    """The loss that `joint` returned, or an error that says what is wrong with it."""
    if not isinstance(loss, Tensor):
        raise BatchError(f"joint must return the loss of the whole batch, a scalar tensor: got {type(loss).__name__}.")
    _require_number(loss, "joint must return", "Reduce it with mean() over the whole batch.")
    if not loss.requires_grad:
        raise BatchError(
            "the loss that joint returned has no graph, so its gradient reaches no encoding: it was detached, computed "
            "under no_grad(), or does not depend on the encodings."
        )
    return full_tensor(loss)


def checked_joint(joint: T, counts: object) -> T:
    if joint is None:
        return joint
    if not callable(joint):
        raise UsageError(f"joint must be a function of the model and the encodings of the whole batch: got {joint!r}.")
    if counts is not None:
        raise UsageError(
            "counts= cannot go with joint=: Encoded(loss, items, ...) holds one ordinary loss, whose items are counted "
            "in the first pass. Leave counts= out."
        )
    return joint


def checked_items(items: object) -> Items:
    """The items passed to `backward`, or an error. The value of a tensor is checked later, on the device."""
    if items is None or (isinstance(items, int) and not isinstance(items, bool) and 0 <= items <= MOST_ITEMS):
        return items
    if isinstance(items, Tensor):
        if items.layout != torch.strided or items.is_meta:
            what = "on the device 'meta', which has no numbers" if items.is_meta else f"of layout {items.layout}"
            raise BatchError(f"items must be one number in a dense tensor: got one {what}.")
        if items.numel() != 1 or items.is_complex() or items.dtype == torch.bool:
            raise BatchError(
                f"items must be one number: got a tensor of shape {tuple(items.shape)} and dtype {items.dtype}. "
                "Count them first, e.g. items=(labels != -100).sum()."
            )
        if items.requires_grad:
            raise BatchError(
                "items must be a count: got a tensor with a graph, which looks like a second loss. Add the losses up, "
                "or pass each with its own items and counts=; items.detach() if it is a count after all."
            )
        if items.is_floating_point() and items.dtype.itemsize < 4:
            raise BatchError(
                f"items must be exact: got a tensor that has dtype {items.dtype}, in which large counts are rounded. "
                "Count in whole numbers or float32, e.g. (mask != 0).sum() instead of mask.sum()."
            )
        return full_tensor(items)
    if not isinstance(items, Real) or isinstance(items, bool):
        raise BatchError(f"items must be a number, a tensor with one, or None: got {items!r}.")
    if items < 0 or not (isinstance(items, Integral) or math.isfinite(items)):
        raise BatchError(
            f"items must be finite and not negative: got {items!r}. They are what the loss is a mean over."
        )
    if not is_countable(items):
        raise BatchError(
            f"items must be 0, or between {FEWEST_ITEMS:g} and 2**53: got {items!r}, by which nothing can be divided "
            "with any precision. They are what the loss is a mean over."
        )
    return int(items) if isinstance(items, Integral) else float(items)


def is_countable(number: Any) -> bool:
    """Whether a sum can be divided precisely by this number."""
    return bool(number == 0 or FEWEST_ITEMS <= number <= MOST_ITEMS)


def items_on_host(items: Items) -> Items:
    """The items as a number, if no wait is needed. Invalid ones stay a tensor, so that all ranks get the error."""
    if type(items) is not Tensor or (number := number_on_host(items)) is None:
        return items
    return number if is_countable(number) else items


def checked_terms(terms: object, items: object, names: Sequence[str]) -> dict[str, tuple[Tensor, Items]]:
    """A dict of terms passed to `backward`, each a loss with its items, or an error that names the term."""
    if not isinstance(terms, Mapping):
        found = "one loss" if isinstance(terms, Tensor) else type(terms).__name__
        raise BatchError(
            f"with counts= every loss is a dict of terms, {{name: (loss, items)}}: got {found}. Name its term, or "
            "leave counts= out."
        )
    if items is not None:
        raise UsageError("items= is for one loss: a dict of terms has the items of each term in it.")
    checked: dict[str, tuple[Tensor, Items]] = {}
    for name, term in terms.items():
        if name not in names:
            raise BatchError(
                f"the term {name!r} is none of those that counts(batch) returns: {', '.join(names)}. Count its items "
                "there, too."
            )
        loss, number = term if isinstance(term, tuple | list) and len(term) == 2 else (term, None)
        try:
            number = checked_items(number)
            is_empty = not isinstance(number, Tensor) and number == 0
            if not (is_empty and isinstance(loss, Tensor)):  # without items, a loss needs no graph
                loss = checked_loss(loss)
        except BatchError as error:
            raise BatchError(f"the term {name!r}: {error}") from None
        checked[name] = loss, number
    return checked


def checked_count(name: object, count: object) -> int | float | Tensor:
    """The count of a term from `counts`, or an error that names the term."""
    if not isinstance(name, str):
        raise BatchError(f"counts(batch) must return the items of each term by name: got {name!r} as a name.")
    try:
        items = checked_items(count)
    except BatchError as error:
        raise BatchError(f"counts(batch) of the term {name!r}: {error}") from None
    if items is None:
        raise BatchError(f"counts(batch) of the term {name!r} is None: return its number of items in the batch.")
    return items


def checked_counts(counts: T) -> T:
    if counts is not None and not callable(counts):
        raise UsageError(
            f"counts must be a function of a batch that returns the number of items of each term: got {counts!r}."
        )
    return counts


# ---------------------------------------------------------------------------------------------- of an accumulator


def refuse_total(reduction: object, option: str) -> None:
    """Raise an error for a total beside an option that gives each term its denominator."""
    if reduction == "total":
        raise UsageError(
            f'reduction="total" cannot go with {option}, whose losses are means or sums over items: leave one out.'
        )


def checked_steps(steps: object, name: str) -> int:
    """A number of micro-batches, or an error."""
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"{name} must be a whole number of micro-batches, 1 or more: got {steps!r}.")
    return int(steps)


def checked_switch(name: str, value: object) -> bool:
    """True or False, or an error."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False: got {value!r}.")
    return value


def require_options(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise an error if an option is unknown."""
    for name in given:
        if name not in known:
            alike = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {alike[0]}?" if alike else f" There are {', '.join(known)}."
            raise UsageError(f"{name} is no option.{hint}")


def checked_models(given: object) -> tuple[nn.Module, ...]:
    """One or several modules. Leaf tensors that only an optimizer holds, such as a temperature, are no modules."""
    several = _several(given, "model")
    tensors = [one for one in several if isinstance(one, Tensor) and one.is_leaf and one.requires_grad]
    modules = [one for one in several if not any(one is tensor for tensor in tensors)]
    return all_of(nn.Module, modules, "model")


def all_of(kind: type[T], given: object, name: str) -> tuple[T, ...]:
    """One or several objects of this type, as a tuple."""
    several = _several(given, name)
    for one in several:
        if not isinstance(one, kind):
            raise UsageError(f"{name} must be of type {kind.__name__}, or a list of such: got {type(one).__name__}.")
    return several


def _several(given: Any, name: str) -> tuple[Any, ...]:
    """One or several objects as a tuple, each once."""
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    for index, one in enumerate(several):
        if any(one is other for other in several[:index]):
            raise UsageError(f"{name} lists the same {type(one).__name__} twice: pass each once.")
    return several


def checked_choice(name: str, value: T, choices: object) -> T:
    if value not in get_args(choices):
        raise UsageError(f"{name} must be one of {get_args(choices)}: got {value!r}.")
    return value


def checked_norm(max_norm: float | None) -> float | None:
    if max_norm is not None and (not isinstance(max_norm, Real) or isinstance(max_norm, bool) or not max_norm > 0):
        raise UsageError(f"max_norm must be positive (inf measures without clipping), or None: got {max_norm!r}.")
    return max_norm


def checked_scaler(scaler: GradScaler | None) -> GradScaler | None:
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise UsageError(f"scaler must be a torch.amp.GradScaler: got {type(scaler).__name__}.")
    return scaler if scaler is not None and scaler.is_enabled() else None


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"accumulate_dtype must be a floating-point dtype such as torch.float32: got {dtype!r}.")
    if not hasattr(Tensor, "grad_dtype"):
        raise BackendError(f"accumulate_dtype needs Tensor.grad_dtype, which torch {torch.__version__} does not have.")
    return dtype


def checked_state(state: Mapping[str, int | float]) -> tuple[int, int, float | None]:
    """The steps taken, the windows, and the typical items (or None) of an Accumulator's `state_dict`."""
    if not isinstance(state, Mapping):
        raise UsageError(f"the state of an Accumulator is what state_dict() gave: got {type(state).__name__}.")
    counts = [state.get(name) for name in ("optimizer_step", "windows")]
    typical = state.get("typical_items")
    is_known = set(state) <= {"optimizer_step", "windows", "typical_items"}
    is_typical = typical is None or (isinstance(typical, float) and math.isfinite(typical) and typical > 0)
    if not (is_known and is_typical and all(type(count) is int and count >= 0 for count in counts)):
        raise UsageError(
            "the state of an Accumulator is a count for each of ('optimizer_step', 'windows'), and may have a number "
            f"for 'typical_items': got {dict(state)!r}."
        )
    return state["optimizer_step"], state["windows"], typical  # type: ignore[return-value]


def checked_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """One or several optimizers. Any object with what the step needs is accepted: it may wrap another optimizer."""
    optimizers = _several(given, "optimizer")
    if not optimizers:
        raise UsageError("optimizer is an empty list: nothing would ever be stepped.")
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer) and not (
            callable(getattr(optimizer, "step", None))
            and callable(getattr(optimizer, "zero_grad", None))
            and isinstance(getattr(optimizer, "param_groups", None), list)
        ):
            raise UsageError(
                "optimizer must be of type Optimizer, or a list of such, or have step(), zero_grad() and param_groups: "
                f"got {name}."
            )
        if not _can_be_called(optimizer):
            raise BackendError(needs_closure(name))
        if getattr(optimizer, "is_second_order", False):
            raise BackendError(needs_graph(name))
    return optimizers


def _can_be_called(owner: Any) -> bool:
    """Whether the `step` of an optimizer or a scheduler needs no argument, as far as it says."""
    own = getattr(type(owner), "step", None)
    try:
        inspect.signature(owner.step if own is None else own).bind(*([] if own is None else [owner]))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def checked_schedulers(given: object, optimizers: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    """One or several schedulers. Any object is accepted with a `step` that needs no argument, or a `step_update`."""
    schedulers = () if given is None else _several(given, "scheduler")
    for scheduler in schedulers:
        if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, Optimizer):
            raise UsageError(f"scheduler must be a learning-rate scheduler, or a list of such: got {scheduler!r}.")
        wants_metric = isinstance(scheduler, ReduceLROnPlateau)
        if not (wants_metric or _can_be_called(scheduler) or callable(getattr(scheduler, "step_update", None))):
            raise UsageError(
                f"{type(scheduler).__name__}.step() needs an argument, which nobody knows here: step it yourself, "
                "where step() has returned a result."
            )
        if wants_metric:
            raise UsageError("ReduceLROnPlateau wants a metric: step it yourself, after the evaluation it comes from.")
        own = getattr(scheduler, "optimizer", None)
        if isinstance(own, Optimizer) and not any(own is optimizer for optimizer in optimizers):
            raise UsageError(f"the scheduler {type(scheduler).__name__} belongs to an optimizer that was not given.")
    return schedulers


def require_gradients_of_samples(models: Sequence[nn.Module]) -> None:
    """Raise an error for layers whose gradient for a sample depends on the other samples of its micro-batch."""
    for name, module in (named for model in models for named in model.named_modules()):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.scale_grad_by_freq and module.weight.requires_grad:
            raise BackendError(
                f"{name or type(module).__name__} has scale_grad_by_freq=True, so torch divides its gradients by how "
                "often an index comes in a micro-batch, not in the whole batch. Make it without that option."
            )
