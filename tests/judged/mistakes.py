"""The planted mistakes, with the causes that `verify` must name."""

import torch
import torch.nn.functional as F
from torch import nn

from harness import loops
from harness.joint import CONTRAST, Towers
from harness.joint import batch_of as pairs_of
from harness.joint_loops import openclip
from harness.loops import (
    UNEQUAL,
    Centred,
    Forgetful,
    Loop,
    Perceptron,
    Statistics,
    TermLoop,
    batch_of,
    by_items,
    cross_entropy,
    multiplied_by_a_hook,
    next_token_fn,
    next_token_loss,
    on_sequences,
    regression,
    sequences,
    squared_error,
    term_shares,
    two_terms,
)
from harness.peers import accelerate_loop, accelerate_tokens, all_labels, lightning_loop
from harness.reference import WIDTH, mean_loss, sum_loss
from judged.wrong_steps import (
    TEN,
    TEN_UNEQUAL,
    TRAINING,
    Mistake,
    accelerate_clipping,
    all_but_the_last,
    always,
    backward_before,
    by_four,
    by_labels,
    by_norm,
    by_samples,
    by_value,
    cleared_before_the_step,
    clipped_each_time,
    clipped_while_scaled,
    divided_below_the_limit,
    in_bf16_buffers,
    interleaved,
    losses_added_first,
    masked_mean,
    mean_over_nothing,
    never_unscaled,
    now_and_then,
    of_a_copy,
    one_halved,
    scaled_and_clipped_but_never_cleared,
    smoothed,
    summed_without_labels,
    twice_the_last,
    with_a_detached_embedding,
    with_a_norm_of_five_hundredths,
    with_an_empty_micro_batch,
    with_clamping_hooks,
    without_items_in_its_first_half,
)
from macrobatch import causal_lm_loss


def term_mistake(cause, weights):
    """A loop over two terms, one of which has other weights."""
    step = TermLoop(weights=lambda window, micro: term_shares(window, micro) | weights(window, micro))
    return Mistake(causes=(cause,), loss_fn=two_terms, step=step)


MISTAKES = {
    # a constant factor
    "undivided": Mistake(causes=("not divided",), step=Loop(weight=always(1.0)), batch=batch_of()),
    "divided twice": Mistake(causes=("divided twice",), step=Loop(weight=always(1 / 16)), batch=batch_of()),
    "sums undivided": Mistake(causes=("not divided",), step=Loop(loss=sum_loss, weight=always(1.0))),
    "short last window": Mistake(causes=("short window",), step=Loop(weight=always(1 / 4)), batch=TEN),
    "one short window": Mistake(causes=("short window",), step=Loop(weight=always(1 / 4)), batch=batch_of(15)),
    "a step each micro-batch": Mistake(
        causes=("short window",), step=Loop(weight=always(1 / 4), closes=lambda *_: True), batch=batch_of()
    ),
    "scaler forgotten": Mistake(causes=("loss scale",), step=never_unscaled, dtype=torch.float32),
    "a hook of the optimizer": Mistake(
        causes=("constant factor",), step=Loop(weight=by_items, make_optimizer=multiplied_by_a_hook(0.7135))
    ),
    "clipped while scaled": Mistake(
        causes=("clipped while scaled",), step=clipped_while_scaled, dtype=torch.float32, batch=batch_of()
    ),
    "a factor that looks like clipping": Mistake(
        causes=("constant factor",), step=with_a_norm_of_five_hundredths, batch=batch_of()
    ),
    "some other factor": Mistake(causes=("constant factor",), step=Loop(weight=always(0.7135)), batch=batch_of()),
    # weights
    "mean of means": Mistake(causes=("mean of means",), step=Loop()),
    "mean of means, clipped": Mistake(causes=("mean of means",), step=Loop(max_norm=0.05)),
    "mean of means, too small": Mistake(causes=("mean of means", "divided twice"), step=Loop(weight=always(1 / 16))),
    "mean of means, loss alone": Mistake(causes=("mean of means",), step=Loop(), loss_fn=mean_loss),
    "mean of means, float32": Mistake(causes=("mean of means",), step=Loop(), dtype=torch.float32),
    "mean of means, bf16": Mistake(
        causes=("mean of means",),
        step=Loop(size=4, steps=5),
        dtype=torch.bfloat16,
        batch=batch_of(items=UNEQUAL, seed=5),
    ),
    "mean of means and a short window": Mistake(
        causes=("mean of means", "short window"), step=Loop(weight=always(1 / 4)), batch=TEN_UNEQUAL
    ),
    "mean of means, and a half of the batch without items": Mistake(
        causes=("mean of means",),
        step=Loop(loss=masked_mean, cut=interleaved),
        loss_fn=masked_mean,
        batch=without_items_in_its_first_half(),
    ),
    "losses added first": Mistake(causes=("mean of means",), step=losses_added_first),
    "labels before the shift, sums": Mistake(
        causes=("labels counted before the shift",),
        step=Loop(loss=lambda model, batch: next_token_loss(model, batch, "sum"), weight=by_labels),
        loss_fn=next_token_fn,
    ),
    "labels before the shift, in loss_fn": Mistake(
        causes=("labels counted before the shift",),
        loss_fn=lambda model, batch: (next_token_loss(model, batch), batch.items),
    ),
    "items that are none": Mistake(
        causes=("items that do not fit the loss",),
        loss_fn=lambda model, batch: (mean_loss(model, batch), int(batch.x.sum())),
    ),
    "items that are the same for all": Mistake(
        causes=("items that do not fit the loss",), loss_fn=lambda model, batch: (mean_loss(model, batch), 1)
    ),
    "cleared inside": Mistake(
        causes=("gradients cleared inside the window",), step=Loop(weight=by_items, zero_each=True)
    ),
    "left out": Mistake(
        causes=("samples left out",),
        step=Loop(steps=9, weight=by_items, cut=all_but_the_last),
        batch=batch_of(22, items=UNEQUAL),
    ),
    "used twice": Mistake(
        causes=("samples used twice",),
        step=Loop(steps=9, weight=by_items, cut=twice_the_last),
        batch=batch_of(22, items=UNEQUAL),
    ),
    "weighed by samples": Mistake(
        causes=("items that do not fit the loss",),
        step=Loop(steps=9, weight=by_samples),
        batch=batch_of(22, items=UNEQUAL),
    ),
    # clipped between micro-batches
    "left over, scaled and clipped": Mistake(
        causes=("gradients left over",), step=scaled_and_clipped_but_never_cleared, dtype=torch.float32
    ),
    "clipped each time": Mistake(causes=("clip per micro-batch",), step=clipped_each_time(by_norm)),
    "clipped each time, float32": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(by_norm), dtype=torch.float32
    ),
    "clipped each time, several windows": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(by_norm), batch=TEN_UNEQUAL
    ),
    "clipped each time, a mean of means": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(by_norm, always(1 / 4))
    ),
    "clipped now and then": Mistake(
        causes=("clip per micro-batch",), step=clipped_each_time(now_and_then, always(1.0))
    ),
    "clipped each time, by value": Mistake(causes=("clip per micro-batch",), step=clipped_each_time(by_value)),
    "clipped by hooks": Mistake(causes=("clip per micro-batch",), before=with_clamping_hooks),
    "clipped by hooks, float32": Mistake(
        causes=("clip per micro-batch",), before=with_clamping_hooks, step=Loop(weight=by_items), dtype=torch.float32
    ),
    "divided each time": Mistake(causes=("divided inside the window",), step=clipped_each_time(by_four, always(1.0))),
    "divided each time, float32": Mistake(
        causes=("divided inside the window",), step=clipped_each_time(by_four), dtype=torch.float32
    ),
    "Accelerate, clipped each time": Mistake(
        causes=("clip per micro-batch",), step=accelerate_clipping, batch=batch_of(40), dtype=torch.float32
    ),
    # labels
    "not shifted": Mistake(
        causes=("labels not shifted",), step=Loop(weight=by_items), loss_fn=next_token_fn, batch=batch_of()
    ),
    "not shifted, a mean of means": Mistake(causes=("labels not shifted",), step=Loop(), loss_fn=next_token_fn),
    "not shifted, sequences": Mistake(
        causes=("labels not shifted",),
        step=on_sequences(cross_entropy(shift=0)),
        loss_fn=cross_entropy(),
        batch=sequences(),
        dtype=torch.float32,
    ),
    "not shifted in loss_fn": Mistake(
        causes=("labels not shifted",),
        step=on_sequences(cross_entropy()),
        loss_fn=cross_entropy(shift=0),
        batch=sequences(),
    ),
    "shifted twice": Mistake(
        causes=("labels shifted twice",),
        step=on_sequences(cross_entropy(shift=2)),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "not shifted, and trained on padding": Mistake(
        causes=("labels not shifted", "trained on padding"),
        step=on_sequences(cross_entropy(shift=0, key="input_ids")),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    # padding
    "trained on padding": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(key="input_ids")),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "trained on padding, not shifted by anybody": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(shift=0, key="input_ids")),
        loss_fn=cross_entropy(shift=0),
        batch=sequences(),
        dtype=torch.float32,
    ),
    "trained on padding, a mean of means": Mistake(
        causes=("trained on padding",),
        step=Loop(loss=lambda model, batch: F.cross_entropy(model(batch.x).flatten(0, 1), batch.x.flatten())),
    ),
    "trained on padding that has a label of its own": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy()),
        loss_fn=cross_entropy(ignored=0),
        batch={key: tensor for key, tensor in sequences(masked=False).items() if key != "attention_mask"},
    ),
    "trained on padding by everybody": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy()),
        loss_fn=cross_entropy(),
        batch=sequences(masked=False),
    ),
    "trained on padding by everybody, by MacroStep": Mistake(
        causes=("trained on padding",), loss_fn=cross_entropy(), batch=sequences(masked=False), dtype=torch.float32
    ),
    "padding counted": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(reduction="sum"), divisor=lambda batch: batch["labels"].numel()),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "padding counted, after the shift": Mistake(
        causes=("trained on padding",),
        step=on_sequences(cross_entropy(reduction="sum"), divisor=lambda batch: batch["labels"][:, 1:].numel()),
        loss_fn=cross_entropy(),
        batch=sequences(),
    ),
    "the mask counted before the shift": Mistake(
        causes=("labels counted before the shift",),
        step=on_sequences(summed_without_labels, divisor=lambda batch: batch["attention_mask"].sum()),
        loss_fn=causal_lm_loss,
        batch={key: sequences()[key] for key in ("input_ids", "attention_mask")},
    ),
    # gradients that stay
    "left over, windows": Mistake(
        causes=("gradients left over",), step=Loop(weight=by_items, zero_after=False), batch=TEN_UNEQUAL
    ),
    "left over, calls": Mistake(causes=("gradients left over",), step=Loop(weight=by_items, zero_after=False)),
    "left over, from before": Mistake(
        causes=("gradients left over",), step=Loop(weight=by_items), before=backward_before
    ),
    # windows
    "never closed": Mistake(
        causes=("window never closed",),
        step=Loop(weight=by_items, closes=lambda index, count, steps: (index + 1) % steps == 0),
        batch=TEN_UNEQUAL,
    ),
    "closed twice": Mistake(
        causes=("window closed twice",), step=Loop(weight=by_items, step_times=2), batch=TEN_UNEQUAL
    ),
    "a step after every micro-batch": Mistake(
        causes=("number of optimizer steps",), step=Loop(weight=by_items, steps=1), windows=1
    ),
    "a step after every micro-batch, and a wrong weight": Mistake(
        causes=("number of optimizer steps", "short window"),
        step=Loop(weight=always(1 / 4), closes=lambda *_: True),
        batch=batch_of(),
        windows=1,
    ),
    "too few windows": Mistake(
        causes=("number of optimizer steps",), step=Loop(weight=by_items), batch=TEN_UNEQUAL, windows=4
    ),
    # samples that see each other
    "BatchNorm": Mistake(
        causes=("statistics over the batch",), make=lambda: Statistics(nn.BatchNorm1d(WIDTH)), before=TRAINING
    ),
    "BatchNorm by hand": Mistake(
        causes=("statistics over the batch",),
        make=lambda: Statistics(nn.BatchNorm1d(WIDTH)),
        before=TRAINING,
        step=Loop(weight=by_items),
        dtype=torch.float32,
    ),
    "a statistic without a name": Mistake(
        causes=("statistics over the batch",), make=lambda: Statistics(Centred()), step=Loop(weight=by_items)
    ),
    "contrastive": Mistake(causes=("loss that couples samples",), loss_fn=loops.contrastive),
    "logit scale in every micro-batch": Mistake(
        causes=("parameters counted several times",),
        loss_fn=CONTRAST.loss_fn,
        joint=CONTRAST.joint,
        make=Towers,
        batch=pairs_of(16),
        step=lambda model, batch: openclip(model, batch, micro=4, joint=CONTRAST.joint),
    ),
    # randomness, precision
    "dropout that cannot be switched off": Mistake(
        causes=("mean of means",), make=lambda: Statistics(Forgetful()), step=Loop()
    ),
    "bf16 buffers": Mistake(causes=("sums in too low a precision",), step=in_bf16_buffers, dtype=torch.float32),
    "bf16 gradients of many": Mistake(
        causes=("sums in too low a precision",),
        make=Perceptron,
        dtype=torch.bfloat16,
        batch=regression(256),
        loss_fn=squared_error,
        step=Loop(size=1, steps=256, loss=squared_error),
    ),
    # nothing
    "detached": Mistake(causes=("parameters that received nothing",), step=with_a_detached_embedding),
    "an optimizer of a copy": Mistake(causes=("parameters that received nothing",), step=of_a_copy),
    "cleared before the step": Mistake(causes=("parameters that received nothing",), step=cleared_before_the_step),
    "nothing at all": Mistake(causes=("parameters that received nothing",), step=lambda model, batch: None),
    "0 / 0": Mistake(
        causes=("not finite",), step=mean_over_nothing, loss_fn=mean_loss, batch=with_an_empty_micro_batch()
    ),
    "another loss": Mistake(
        causes=("unexplained",), step=Loop(loss=lambda model, batch: model(batch.x).square().mean())
    ),
    "divided by too much, just below the limit": Mistake(causes=("short window",), step=divided_below_the_limit),
    "one parameter halved": Mistake(causes=("unexplained",), step=one_halved),
    "almost the same loss": Mistake(causes=("unexplained",), step=Loop(loss=smoothed, weight=by_items)),
    # other libraries' loops
    "Accelerate, mean of means": Mistake(
        causes=("mean of means", "short window"),
        step=accelerate_loop(mean_loss),
        loss_fn=mean_loss,
        batch=TEN_UNEQUAL,
        dtype=torch.float32,
    ),
    "Accelerate, short last window": Mistake(causes=("short window",), step=accelerate_loop(mean_loss), batch=TEN),
    "Accelerate, its token recipe": Mistake(
        causes=("labels counted before the shift",),
        step=accelerate_tokens(all_labels),
        loss_fn=next_token_fn,
        batch=TEN_UNEQUAL,
        dtype=torch.float32,
    ),
    "Lightning, mean of means": Mistake(
        causes=("mean of means", "short window"),
        step=lightning_loop(mean_loss),
        loss_fn=mean_loss,
        batch=TEN_UNEQUAL,
    ),
    "Lightning, short last window": Mistake(
        causes=("short window",), step=lightning_loop(mean_loss), batch=TEN, dtype=torch.float32
    ),
    # several terms: tokens and samples, in micro-batches of 6, 6, 6 and 2 samples
    "term not divided": term_mistake("term not divided", lambda window, micro: {"samples": 1.0}),
    "tokens not divided": term_mistake("term not divided", lambda window, micro: {"tokens": 1.0}),
    "term as a mean of means": term_mistake(
        "term divided by the micro-batch's own count", lambda window, micro: {"samples": 1 / len(window)}
    ),
    "term weighted by the other's items": term_mistake(
        "one count for two terms", lambda window, micro: {"samples": by_items(window, micro)}
    ),
    "term divided by the other's items": term_mistake(
        "one count for two terms",
        lambda window, micro: {"samples": len(micro.x) / sum(other.items for other in window)},
    ),
    "both terms as means of means": Mistake(
        causes=("mean of means",),
        loss_fn=two_terms,
        step=TermLoop(weights=lambda window, micro: dict.fromkeys(("tokens", "samples"), 1 / len(window))),
    ),
}
