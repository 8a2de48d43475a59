"""Training steps as people publish them, with the verdict that they deserve."""

from harness import published as p
from harness.published import UNEQUAL, Program, ordinary


def right(make, **options) -> Program:
    return Program(make=make, **options)


def unknown(make, cause: str) -> Program:
    return Program(make=make, verdict="unknown", cause=cause)


def wrong(make, cause: str) -> Program:
    return Program(make=make, verdict="wrong", cause=cause)


MEANS, RANDOM, STATE = "mean of means", "random numbers that differ", "loss that keeps state"

RIGHT = {
    # two models
    "GAN: the critic": right(p.gan()),
    "GAN: the critic, accumulated": right(p.gan(sizes=(4, 4, 4))),
    "GAN: the generator": right(p.gan(verifies="generator")),
    "GAN: the generator, accumulated": right(p.gan(sizes=(4, 4, 4), verifies="generator")),
    "WGAN-GP": right(ordinary(p.penalised, model=lambda: p.net(5, 1))),
    "WGAN, weights clamped after the step": right(
        ordinary(
            lambda m, b: m(b["x"]).mean() + m(b["x"]).square().mean(),
            model=lambda: p.net(5, 1),
            steps=1,
            after=p.clamp_weights,
        )
    ),
    "hinge loss with R1": right(ordinary(p.r1, model=lambda: p.net(5, 1))),
    "SAC: the critic": right(p.actor_critic(verifies="critic"), windows=2),
    "SAC: the actor": right(p.actor_critic(verifies="actor"), windows=2),
    "PPO": right(p.with_step(p.several_epochs(p.surrogate, 1 / 2), p.surrogate), windows=4),
    "REINFORCE, sampled in the loss": right(ordinary(p.sampled)),
    "DQN": right(p.q_learning()),
    "DQN, the target follows in between": unknown(p.q_learning(weight=1.0, steps=1), STATE),
    "BYOL": right(ordinary(p.bootstrap, model=p.Byol, steps=1, after=lambda m: m.follow()), windows=3),
    "DPO": right(ordinary(p.ranked)),
    # random numbers
    "VAE": right(ordinary(p.elbo, model=p.Vae)),
    "VAE, unequal": right(ordinary(p.elbo, model=p.Vae, sizes=UNEQUAL)),
    "VAE, in three windows": right(ordinary(p.elbo, model=p.Vae, steps=1), windows=3),
    "VAE, shuffled": right(p.with_step(p.shuffled_vae, p.elbo, p.Vae)),
    "DDPM": right(ordinary(p.diffusion, model=p.wide())),
    "DDPM, in two windows": right(ordinary(p.diffusion, model=p.wide(), sizes=(3,) * 4, steps=2), windows=2),
    "DDPM, drawn by the loop": right(p.with_step(p.diffusion_by_hand, p.diffusion, p.wide())),
    "rectified flow": right(ordinary(p.flow, model=p.wide())),
    "MAE": right(ordinary(p.masked, model=lambda: p.net(5, 5))),
    "MAE, in two windows": right(ordinary(p.masked, model=lambda: p.net(5, 5), sizes=(3,) * 4, steps=2), windows=2),
    "denoising": right(ordinary(p.denoising, model=lambda: p.net(5, 5))),
    "F.dropout": right(ordinary(p.functional_dropout)),
    "drop path": right(ordinary(model=p.DropPath)),
    "dropout in a checkpoint": right(ordinary(model=p.Checkpointed)),
    "R-Drop": right(ordinary(p.r_drop)),
    "mixup, a share for each sample": right(ordinary(p.mixup)),
    "mixup, one share": unknown(ordinary(p.one_share_mixup), RANDOM),
    "noise of numpy, in the same order": right(ordinary(p.numpy_noise)),
    "noise of numpy, in two windows": unknown(ordinary(p.numpy_noise, sizes=(3,) * 4, steps=2), RANDOM),
    "Gumbel softmax": right(ordinary(p.gumbel)),
    # self-supervised
    "MoCo, whole": right(ordinary(p.info_nce, model=p.Moco, sizes=(12,))),
    "MoCo, accumulated": unknown(ordinary(p.info_nce, model=p.Moco), STATE),
    "SimCLR, whole": right(ordinary(p.simclr, sizes=(12,))),
    "DINO": right(p.dino(moves=False)),
    "DINO, the centre moves in the loss": unknown(p.dino(moves=True), STATE),
    "DINO, the last layer frozen": unknown(p.dino(moves=False, last_layer=True), "parameters that received nothing"),
    # what is done to gradients
    "SAM": right(p.sharpness(sizes=(12,)), windows=2),
    "SAM, accumulated": right(p.sharpness(), windows=2),
    "ASAM": right(p.sharpness(adaptive=True), windows=2),
    "SAM for each micro-batch": unknown(p.sharpness(each=True), "unexplained"),
    "AGC": right(ordinary(before=p.clip_adaptively)),
    "clip by norm": right(ordinary(before=p.clip_norm)),
    "clip by value": right(ordinary(before=p.clip_value)),
    "clip by value, then by norm": right(ordinary(before=p.clip_value_then_norm)),
    "clip each parameter": right(ordinary(before=p.clip_each_parameter)),
    "normalised": right(ordinary(before=p.normalise)),
    "centralised": right(ordinary(before=p.centralise)),
    "centralised, then clipped": right(ordinary(before=p.centralise_and_clip)),
    "signs": unknown(ordinary(before=p.take_signs), "unexplained"),
    "noise on the gradient": unknown(ordinary(before=p.add_noise), "unexplained"),
    "a slower first layer": unknown(ordinary(before=p.slow_down_the_first_layer), "unexplained"),
    # optimizers
    "apex: float32 copies": right(p.masters(sums=True)),
    "fairseq: one flat copy": right(p.masters(flat=True)),
    "bf16, in bf16": right(ordinary(p.low_loss, model=p.low)),
    "SGD by hand": right(p.by_hand(p.plain)),
    "SGD by hand, in windows": right(p.by_hand(p.plain, steps=1), windows=3),
    "SGD by hand that divides": unknown(p.by_hand(p.divided, weight=p.undivided), "weights changed by hand"),
    "Adam by hand": unknown(p.by_hand(p.adam), "weights changed by hand"),
    "gradients by hand": right(p.manual_gradients(p.by_samples)),
    "LBFGS": right(p.closure(p.by_samples)),
    "Lightning, manual optimization": right(p.with_step(p.two_optimizers), windows=2),
    "an average of the weights": right(ordinary(steps=1, after=p.averages(p.net())), windows=3),
    # language, detection, classification
    "nanoGPT, equal": right(
        ordinary(
            lambda m, b: p.F.cross_entropy(m(b["tokens"]).flatten(0, 1), b["tokens"].flatten()),
            model=p.Words,
            weight=p.alike,
        )
    ),
    "nanoGPT with a scaler": right(p.scaled()),
    "num_items_in_batch": right(p.language(weight=p.by_words)),
    "fairseq: sums, divided after": right(p.language(p.word_sum, weight=p.undivided, before=p.divide_by_words(p.data))),
    "packed": right(p.packed(p.by_labels)),
    "DETR, with shares": right(p.detect(shares=True)),
    "YOLO: times the batch size": right(
        p.with_step(
            p.Steps(loss=lambda m, b: p.detection_sum(m, b)[0] / 12, weight=p.undivided),
            lambda m, b: p.F.mse_loss(m(b["x"]), b["t"]),
        )
    ),
    "timm: a short last group": right(ordinary(sizes=(4, 4, 2, 2), steps=2), windows=2),
    "distillation": right(ordinary(p.distil)),
    "focal loss": right(ordinary(p.focal, sizes=UNEQUAL)),
    "label smoothing": right(ordinary(p.smoothed)),
    "class weights": right(ordinary(p.class_weights, weight=p.by_class_weights)),
    "triplets": right(ordinary(p.triplet)),
    "a regulariser": right(ordinary(p.regularised, sizes=UNEQUAL)),
    "equal inputs, other labels": right(ordinary(batch=p.twins)),
}


WRONG = {
    "GAN: the critic is never cleared": wrong(p.gan(clears=False), "gradients left over"),
    "GAN: unequal": wrong(p.gan(sizes=UNEQUAL), MEANS),
    "GAN: the generator, unequal": wrong(p.gan(sizes=UNEQUAL, verifies="generator"), MEANS),
    "GAN: cleared each time": wrong(p.restarted_gan(), "gradients cleared inside the window"),
    "word vectors, clipped each time": wrong(
        ordinary(p.word_vectors, model=p.Vectors, each=p.clip_little, sizes=(6, 6), steps=2), "clip per micro-batch"
    ),
    "WGAN-GP, unequal": wrong(ordinary(p.penalised, model=lambda: p.net(5, 1), sizes=UNEQUAL, weight=p.alike), MEANS),
    "SAC: the critic keeps the actor's": wrong(p.actor_critic(verifies="critic", clears=False), "gradients left over"),
    "SAC: undivided": wrong(p.actor_critic(verifies="critic", weight=1.0), "not divided"),
    "SAC: the actor, undivided": wrong(p.actor_critic(verifies="actor", weight=1.0), "not divided"),
    "PPO: undivided": wrong(p.with_step(p.several_epochs(p.surrogate, 1.0), p.surrogate), "not divided"),
    "PPO: advantages normalised in the loss": wrong(ordinary(p.normalised_surrogate), "loss that couples samples"),
    "REINFORCE, unequal": wrong(ordinary(p.sampled, sizes=UNEQUAL, weight=p.alike), MEANS),
    "DQN: divided twice": wrong(p.q_learning(weight=1 / 9), "divided twice"),
    "BYOL, unequal": wrong(ordinary(p.bootstrap, model=p.Byol, sizes=UNEQUAL, weight=p.alike), MEANS),
    "DPO, unequal": wrong(ordinary(p.ranked, sizes=UNEQUAL, weight=p.alike), MEANS),
    "VAE, unequal": wrong(ordinary(p.elbo, model=p.Vae, sizes=UNEQUAL, weight=p.alike), MEANS),
    "VAE, undivided": wrong(ordinary(p.elbo, model=p.Vae, weight=p.undivided), "not divided"),
    "VAE, cleared inside": wrong(
        p.with_step(p.Steps(loss=lambda m, b: (m.zero_grad(), p.elbo(m, b))[1]), p.elbo, p.Vae),
        "gradients cleared inside the window",
    ),
    "DDPM, unequal": wrong(ordinary(p.diffusion, model=p.wide(), sizes=UNEQUAL, weight=p.alike), MEANS),
    "DDPM, undivided": wrong(ordinary(p.diffusion, model=p.wide(), weight=p.undivided), "not divided"),
    "flow, divided twice": wrong(ordinary(p.flow, model=p.wide(), weight=lambda a, w: 1 / 9), "divided twice"),
    "MAE, unequal": wrong(ordinary(p.masked, model=lambda: p.net(5, 5), sizes=UNEQUAL, weight=p.alike), MEANS),
    "MAE, a short window": wrong(
        ordinary(p.masked, model=lambda: p.net(5, 5), sizes=(3,) * 4, weight=lambda a, w: 1 / 3), "short window"
    ),
    "denoising, clipped each time": wrong(
        ordinary(p.denoising, model=lambda: p.net(5, 5), each=p.clip_norm), "clip per micro-batch"
    ),
    "F.dropout, unequal": wrong(ordinary(p.functional_dropout, sizes=UNEQUAL, weight=p.alike), MEANS),
    "R-Drop, undivided": wrong(ordinary(p.r_drop, weight=p.undivided), "not divided"),
    "mixup, unequal": wrong(ordinary(p.mixup, sizes=UNEQUAL, weight=p.alike), MEANS),
    "noise of numpy, unequal": wrong(ordinary(p.numpy_noise, sizes=UNEQUAL, weight=p.alike), MEANS),
    "SimCLR, accumulated": wrong(ordinary(p.simclr), "loss that couples samples"),
    "DINO, unequal": wrong(p.with_step(p.Steps(sizes=UNEQUAL, weight=p.alike)), MEANS),
    "SAM, unequal": wrong(p.sharpness(sizes=UNEQUAL, weight=p.alike), MEANS),
    "SAM, undivided": wrong(p.sharpness(weight=p.undivided), "not divided"),
    "SAM, not cleared in between": unknown(p.sharpness(clears=False), "gradients left over"),  # or FGM, which is right
    "AGC each time": wrong(ordinary(each=p.clip_adaptively), "clip per micro-batch"),
    "AGC, unequal": wrong(ordinary(before=p.clip_adaptively, sizes=UNEQUAL, weight=p.alike), MEANS),
    "normalised each time": wrong(ordinary(each=p.normalise), "clip per micro-batch"),
    "centralised, unequal": wrong(ordinary(before=p.centralise, sizes=UNEQUAL, weight=p.alike), MEANS),
    "signs, unequal": wrong(ordinary(before=p.take_signs, sizes=UNEQUAL, weight=p.alike), MEANS),
    "value then norm, unequal": wrong(ordinary(before=p.clip_value_then_norm, sizes=UNEQUAL, weight=p.alike), MEANS),
    "clipped to its norm, unequal": wrong(ordinary(before=p.clip_norm, sizes=UNEQUAL, weight=p.alike), MEANS),
    "apex: unequal": wrong(p.masters(sizes=UNEQUAL, weight=p.alike), MEANS),
    "apex: only the last": wrong(p.masters(sums=False), "gradients cleared inside the window"),
    "apex: copies without gradients": wrong(p.masters(stale=True), "parameters that received nothing"),
    "fairseq: flat, undivided": wrong(p.masters(flat=True, weight=p.undivided), "not divided"),
    "SGD by hand, unequal": wrong(p.by_hand(p.plain, sizes=UNEQUAL, weight=p.alike), MEANS),
    "SGD by hand, undivided": unknown(p.by_hand(p.plain, weight=p.undivided), "weights changed by hand"),
    "gradients by hand, unequal": wrong(p.manual_gradients(p.alike, UNEQUAL), MEANS),
    "gradients by hand, undivided": wrong(p.manual_gradients(p.undivided), "not divided"),
    "LBFGS, unequal": wrong(p.closure(p.alike, UNEQUAL), MEANS),
    "nanoGPT on unequal texts": wrong(p.language(weight=p.alike), MEANS),
    "nanoGPT, clipped while scaled": wrong(p.scaled(unscales=False), "clipped while scaled"),
    "nanoGPT, stepped around the scaler": wrong(p.scaled(unscales=False, steps_by_scaler=False), "loss scale"),
    "num_items_in_batch before the shift": wrong(p.language(weight=p.by_labels), "labels counted before the shift"),
    "fairseq: sums, undivided": wrong(p.language(p.word_sum, weight=p.undivided), "not divided"),
    "packed, a mean of means": wrong(p.packed(p.alike), MEANS),
    "DETR, its own counts": wrong(p.detect(shares=False), "term divided by the micro-batch's own count"),
    "DETR, one number": wrong(ordinary(p.detection_alone), "terms with different items"),
    "YOLO: a step after the first": wrong(p.boundary(lambda index: index % 2 == 0), "short window"),
    "YOLO: the epoch ends inside": wrong(p.boundary(lambda index: index % 4 == 3), "not divided"),
    "timm: a short last group": wrong(ordinary(sizes=(4, 4, 4), steps=2, weight=lambda a, w: 1 / 2), "short window"),
    "distillation, unequal": wrong(ordinary(p.distil, sizes=UNEQUAL, weight=p.alike), MEANS),
    "focal loss, unequal": wrong(ordinary(p.focal, sizes=UNEQUAL, weight=p.alike), MEANS),
    "class weights by samples": wrong(ordinary(p.class_weights, sizes=UNEQUAL), "items that do not fit the loss"),
    "class weights, a mean of means": wrong(ordinary(p.class_weights, weight=p.alike), MEANS),
    "label smoothing, undivided": wrong(ordinary(p.smoothed, weight=p.undivided), "not divided"),
    "triplets, unequal": wrong(ordinary(p.triplet, sizes=UNEQUAL, weight=p.alike), MEANS),
    "a regulariser, unequal": wrong(ordinary(p.regularised, sizes=UNEQUAL, weight=p.alike), MEANS),
    "cleared before the step": wrong(ordinary(before=p.clear), "parameters that received nothing"),
    "BatchNorm": wrong(ordinary(model=p.normalised), "statistics over the batch"),
    "an optimizer of other tensors": unknown(p.with_step(p.other_tensors), "optimizer of other tensors"),
    "equal inputs, in another order": unknown(
        lambda: ordinary(batch=p.twins, steps=1, sizes=(2,) * 6)() | {"step": p.backwards}, "samples that look alike"
    ),
    "a loader of its own": unknown(p.with_step(p.own_loader), "step that does not use the batch"),
}
