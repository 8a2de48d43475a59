"""Programs with two models in one graph, each with an Accumulator of its own: a GAN, an actor and its critic."""

import dataclasses
import random

import torch
from torch import Tensor

from fuzzing.loop import Loop
from fuzzing.model import Batch, Net, errors, make_batch, micro_loss
from fuzzing.program import Program


class Pair:
    def __init__(self, p: Program) -> None:
        self.p, self.random = p, random.Random(p.seed)
        other = dataclasses.replace(p, steps=tuple(reversed(p.steps)) if len(p.steps) > 1 else (p.steps[0] % 3 + 1,))
        self.maker, self.judge = Loop(p, "maker", is_alone=False), Loop(other, "judge", is_alone=False)

    def run(self) -> None:
        torch.set_default_dtype(getattr(torch, self.p.default_dtype))
        for loop in (self.maker, self.judge):
            loop.acc = loop.accumulator()
        for epoch, sizes in enumerate(self.p.epochs):
            for index, samples in enumerate(sizes):
                batch = make_batch(self.p, epoch, index, samples)
                for loop in (self.maker, self.judge):
                    if self.random.random() < 0.7:
                        self.micro_step(loop, batch)
        for loop in (self.maker, self.judge):
            if loop.reference.window:
                loop.settle(now=True)
            loop.finish()

    def micro_step(self, loop: Loop, batch: Batch) -> None:
        """The judge's loss on what the maker made: a micro-batch for one of the two."""
        detaches = loop is self.judge and self.random.random() < 0.5
        maker, judge = self.maker, self.judge
        losses = errors(judge.reference.net, batch, made(maker.reference.net, batch, detaches))
        closes = loop.closes(is_last=False)
        with loop.acc.micro_batch():
            loss = micro_loss(self.p, judge.net, batch, made(maker.net, batch, detaches))
            loop.acc.backward(loss, items=loop.items(batch))
        loop.reference.add(batch, losses)
        if closes:
            loop.settle()
        else:
            loop.acc.step()


def made(net: Net, batch: Batch, detaches: bool) -> Tensor:
    features = net.features(batch.x)
    return features.detach() if detaches else features
