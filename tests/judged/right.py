"""Steps that are right, whatever the model, the precision, the optimizer or the library."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.loops import (
    UNEQUAL,
    Loop,
    Perceptron,
    Statistics,
    TermLoop,
    batch_of,
    by_items,
    cross_entropy,
    loss_fn,
    multiplied_by_a_hook,
    next_token_fn,
    on_sequences,
    regression,
    squared_error,
    term_shares,
    two_counts,
    two_terms,
)
from harness.peers import accelerate_loop, accelerate_tokens, lightning_loop, shifted_labels
from harness.reference import (
    WIDTH,
    Attention,
    PartlyFrozen,
    mean_loss,
)
from judged.right_parts import (
    EVERY_MODEL,
    FLOATS,
    RIGHT,
    SEQUENCES,
    Aside,
    CallsItsParent,
    Checkpointed,
    Local,
    Narrow,
    Recurrent,
    Towers,
    Uncalled,
    accelerate_in_bf16,
    accumulated,
    autocast,
    averaged_as_it_goes,
    by_length,
    clipping_each,
    distance_of_towers,
    divided_at_the_end,
    encoded_loss,
    filled_on_the_left,
    fused,
    in_a_closure,
    in_the_backward,
    in_training_mode,
    loss_aside,
    losses_added_first,
    mean_left_to_clipping,
    named_loss,
    other_way_round,
    padded,
    prompted,
    recomputed_loss,
    scaled,
    shuffled,
    terms_in_windows,
    trimmed,
    two_languages,
    two_optimizers,
    with_a_label_for_padding,
    with_an_evaluation,
    without_an_optimizer,
)
from macrobatch import causal_lm_loss, verify

TWENTY = batch_of(items=UNEQUAL)  # in micro-batches of 5, one window of 4


FIFTY = batch_of(50, items=UNEQUAL)  # three windows, the last of 2


@dataclass(frozen=True, kw_only=True)
class Right:
    step: Callable[[nn.Module, Any], Any] | None = RIGHT
    batch: Any = FIFTY
    loss_fn: Callable[[nn.Module, Any], Any] = loss_fn
    make: Callable[[], nn.Module] = Attention
    dtype: torch.dtype = torch.float64
    training: bool = False
    note: str | None = None  # what the report has to mention
    windows: int = 3
    counts: Callable[[Any], Any] | None = None

    def verified(self) -> Any:
        torch.manual_seed(0)
        model = self.make().to(self.dtype).train(self.training)
        return verify(model, self.loss_fn, self.batch, step=self.step, counts=self.counts)


STEPS = {
    f"{make.__name__}, {dtype}": Right(make=make, dtype=dtype, step=None, windows=1)
    for make in EVERY_MODEL
    for dtype in FLOATS
} | {
    "by hand": Right(),
    "by hand, float32": Right(dtype=torch.float32),
    "by hand, bf16": Right(dtype=torch.bfloat16),
    "partly frozen by hand": Right(make=PartlyFrozen),
    "cleared at the beginning": Right(
        step=Loop(weight=by_items, zero_before=True, zero_after=False), windows=1, batch=TWENTY
    ),
    "clipped": Right(step=Loop(weight=by_items, max_norm=0.05), note="clipped, to a norm of 0.05"),
    "clipped, float32": Right(step=Loop(weight=by_items, max_norm=0.05), dtype=torch.float32, note="clipped"),
    "clipped, bf16": Right(step=Loop(weight=by_items, max_norm=0.05), dtype=torch.bfloat16, note="clipped"),
    "clipped to an odd number": Right(step=Loop(weight=by_items, max_norm=0.05371), note="a norm of 0.05371"),
    "clipped, each parameter by itself": Right(
        step=Loop(weight=by_items, make_optimizer=clipping_each(0.02)),
        note="each parameter's",
    ),
    "clipped, each by itself, to an odd number, float32": Right(
        step=Loop(weight=by_items, make_optimizer=clipping_each(0.02371)), dtype=torch.float32, note="by itself"
    ),
    "clipped, each by itself, after a division": Right(step=mean_left_to_clipping, note="by itself", windows=1),
    "clipped, the weights alone": Right(
        step=Loop(weight=by_items, make_optimizer=clipping_each(0.02, least_dims=2)), note="by itself"
    ),
    "Accumulator": Right(step=accumulated()),
    "Accumulator, fused": Right(step=accumulated(fused), dtype=torch.float32),
    "Accumulator, fused and clipped": Right(
        step=accumulated(fused, max_norm=0.05), dtype=torch.float32, note="clipped"
    ),
    "Accumulator, in float32": Right(step=accumulated(accumulate_dtype=torch.float32), dtype=torch.bfloat16),
    "GradScaler": Right(step=scaled, dtype=torch.float32, windows=1),
    "a hook of the optimizer divides": Right(
        step=Loop(weight=lambda window, micro: 8 * by_items(window, micro), make_optimizer=multiplied_by_a_hook(1 / 8))
    ),
    "an optimizer that calls its parent's step": Right(step=Loop(weight=by_items, make_optimizer=CallsItsParent)),
    "autocast": Right(step=Loop(weight=by_items, loss=autocast), loss_fn=autocast, dtype=torch.float32),
    "autocast in the step alone": Right(step=Loop(weight=by_items, loss=autocast), dtype=torch.float32),
    "a closure": Right(step=in_a_closure, windows=1),
    "two optimizers": Right(step=two_optimizers),
    "optimizers in the backward": Right(step=in_the_backward, windows=1),
    "no optimizer": Right(step=without_an_optimizer, windows=1),
    "losses added first": Right(step=losses_added_first, windows=1),
    "divided at the end": Right(step=divided_at_the_end, windows=1),
    "evaluations in between": Right(step=with_an_evaluation, windows=6),
    "shuffled": Right(step=Loop(weight=by_items, cut=shuffled)),
    "padding trimmed": Right(make=Local, step=Loop(weight=by_items, cut=trimmed), batch=padded(FIFTY)),
    "sparse gradients": Right(make=lambda: Local(sparse=True)),
    "by tokens": Right(
        make=Local, step=by_length, loss_fn=named_loss, batch={"input_ids": FIFTY.x, "labels": FIFTY.y}, windows=1
    ),
    "averaged as it goes": Right(step=averaged_as_it_goes, windows=1),
    "sequences": Right(
        step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=SEQUENCES, windows=1, dtype=torch.float32
    ),
    "sequences, not shifted": Right(
        step=on_sequences(cross_entropy(shift=0)), loss_fn=cross_entropy(shift=0), batch=SEQUENCES, windows=1
    ),
    "sequences without labels": Right(
        step=None, loss_fn=causal_lm_loss, batch={"input_ids": SEQUENCES["input_ids"]}, windows=1
    ),
    "sequences, our own loss": Right(step=None, loss_fn=causal_lm_loss, batch=SEQUENCES, windows=1),
    "prompts": Right(step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=prompted(), windows=1),
    "filled on the left": Right(
        step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=filled_on_the_left(), windows=1
    ),
    "a mask the other way round": Right(
        step=on_sequences(cross_entropy()), loss_fn=cross_entropy(), batch=other_way_round(), windows=1
    ),
    "two languages": Right(
        step=on_sequences(cross_entropy(shift=0)), loss_fn=cross_entropy(shift=0), batch=two_languages(), windows=1
    ),
    "a label for padding": Right(
        step=on_sequences(cross_entropy(ignored=0)),
        loss_fn=cross_entropy(ignored=0),
        batch=with_a_label_for_padding(),
        windows=1,
    ),
    "two towers": Right(
        make=Towers, loss_fn=distance_of_towers, step=Loop(loss=distance_of_towers, size=10, steps=5), windows=1
    ),
    "float32 inside": Right(make=lambda: Statistics(Narrow()), step=None, windows=1),
    "a loss around what the model returns": Right(
        make=Aside, loss_fn=loss_aside, step=Loop(weight=by_items, loss=loss_aside)
    ),
    "checkpointing": Right(make=Checkpointed),
    "checkpointing as a whole": Right(loss_fn=recomputed_loss, step=Loop(weight=by_items, loss=recomputed_loss)),
    "a mode that the step sets": Right(
        make=lambda: Statistics(nn.BatchNorm1d(WIDTH)), step=in_training_mode, windows=1
    ),
    "never called itself": Right(make=Uncalled, loss_fn=encoded_loss, step=Loop(weight=by_items, loss=encoded_loss)),
    "compiled": Right(make=lambda: torch.compile(Local(), backend="eager"), batch=padded(FIFTY)),
    "dropout": Right(make=lambda: Statistics(nn.Dropout(0.5)), training=True, note="dropout was switched off"),
    "dropout in a GRU": Right(make=Recurrent, training=True, note="gru.dropout"),
    "BatchNorm, not training": Right(make=lambda: Statistics(nn.BatchNorm1d(WIDTH))),
    "many micro-batches in bf16": Right(
        make=Perceptron,
        dtype=torch.bfloat16,
        batch=regression(64),
        loss_fn=squared_error,
        step=Loop(size=1, steps=64, loss=squared_error),
        windows=1,
    ),
    "Accelerate, full windows": Right(
        step=accelerate_loop(mean_loss), batch=batch_of(40), dtype=torch.float32, windows=2
    ),
    "Accelerate, in bf16": Right(step=accelerate_in_bf16, batch=batch_of(40), dtype=torch.float32, windows=2),
    "Accelerate, labels counted rightly": Right(
        step=accelerate_tokens(shifted_labels), loss_fn=next_token_fn, dtype=torch.float32
    ),
    "Lightning, full windows": Right(step=lightning_loop(mean_loss), batch=batch_of(40), windows=2),
    "two terms": Right(step=None, loss_fn=two_terms, counts=two_counts, windows=1),
    "two terms, by hand": Right(step=TermLoop(weights=term_shares), loss_fn=two_terms, windows=1),
    "two terms, float32": Right(step=None, loss_fn=two_terms, counts=two_counts, dtype=torch.float32, windows=1),
    "two terms, in windows": Right(step=terms_in_windows, loss_fn=two_terms),
}
