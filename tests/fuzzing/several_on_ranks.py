"""Programs with several terms, or with a loss of the whole batch, on ranks: some have no samples, or none of a term."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fuzzing.loop import Sized
from fuzzing.run import MismatchError
from fuzzing.several import JointWhole, Several, TermLoop, TermWhole
from fuzzing.several_model import Batch, SeveralNet
from fuzzing.several_program import SeveralRankProgram

RANKS = 2


def wrap(p: SeveralRankProgram, net: SeveralNet) -> nn.Module:
    if p.wrap.startswith("ddp"):
        unused, view = p.wrap == "ddp unused", p.wrap == "ddp view"
        return DistributedDataParallel(net, find_unused_parameters=unused, gradient_as_bucket_view=view)
    if p.wrap == "fsdp1":
        wrapped: nn.Module = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        wrapped = fully_shard(net)
    net.named = dict(net.named_parameters())
    return wrapped


class OnRanks(Several):
    def __init__(self, p: SeveralRankProgram) -> None:
        net = SeveralNet(p)
        self.wrapped, self.rank = wrap(p, net), dist.get_rank()
        super().__init__(p, net)

    def models(self) -> nn.Module:
        return self.wrapped

    def options(self) -> dict[str, Any]:
        return super().options() | {"sync": self.p.sync, "gather": self.p.gather}

    def sizes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return self.p.epochs_of(rank)

    def weights(self) -> dict[str, Tensor]:
        if self.p.wrap != "fsdp1":
            return super().weights()
        with FullyShardedDataParallel.summon_full_params(self.wrapped, writeback=False):
            return {name: parameter.detach().clone() for name, parameter in self.net.named_parameters()}

    def state(self) -> list[dict[str, Tensor]]:
        return [{}, {}] if self.p.wrap == "fsdp1" else super().state()  # there, pieces of it, in no order


class RankTermLoop(OnRanks, TermLoop):
    """A window holds the same places of all loaders, as far as these reach."""

    def epoch(self, epoch: int) -> None:
        lengths = [len(self.p.epochs_of(rank)[epoch]) for rank in range(RANKS)]
        own = [self.batch(epoch, index, self.rank) for index in range(lengths[self.rank])]
        begin, end, index = 0, max(lengths), -1
        for batch in self.acc.batches(iter(own) if self.p.unsized else Sized(own)):
            if not self.acc.is_repeat:
                index += 1
                if not torch.equal(batch["ids"], own[index]["ids"]):
                    raise MismatchError("silent", f"batch {index} was not the next one of the loader")
                if index >= begin + self.p.steps_at(self.reference.taken):
                    raise MismatchError("silent", f"batch {index} is in a window that ought to be closed")
            self.acc.backward(self.terms(self.models(), batch))
            result = self.acc.step()
            if result is None:
                continue
            places = range(begin, min(begin + self.p.steps_at(self.reference.taken), end))
            begin = places.stop
            self.close(result, epoch, places)
        is_short = end - begin < self.p.steps_at(self.reference.taken)
        if index < len(own) - 1 and not (is_short and self.p.remainder == "drop"):
            raise MismatchError("silent", f"only {index + 1} of {len(own)} batches were handed out")
        if self.p.remainder == "step" and begin < end:
            raise MismatchError("silent", "the last window of an epoch was not closed")

    def close(self, result: Any, epoch: int, places: range) -> None:
        for place in places:
            for rank in range(RANKS):
                if place < len(self.p.epochs_of(rank)[epoch]):
                    self.reference.append(self.batch(epoch, place, rank))
        expected = self.reference.close()
        expected.micro_batches = result.micro_batches  # with repeats, on this rank
        self.compare(result, expected)


class WholeOnRanks(OnRanks):
    """Every rank passes its share of a batch, or nothing where it has no samples."""

    def run(self) -> None:
        self.train = self.macro_step()
        for window in range(len(self.p.epochs)):
            shares = [self.batch(window, 0, rank) for rank in range(RANKS)]
            own = shares[self.rank]
            self.parts: list[Batch] = []
            result = self.train(own if len(own["ids"]) else None)
            if any(len(share["ids"]) for share in shares):
                self.account_all(result, shares)
            elif not bool(result.skipped):
                raise MismatchError("silent", "a step without samples")
        self.finish()

    def account_all(self, result: Any, shares: list[Batch]) -> None:
        own = shares[self.rank]["ids"].tolist()
        found = sorted({number for part in self.parts for number in part["ids"].tolist()})
        if own and found != own:
            raise MismatchError("silent", f"samples {found} were trained on, not {own}")
        for share in shares:
            if len(share["ids"]):
                self.reference.append(share)
        expected = self.reference.close()
        expected.micro_batches = result.micro_batches
        self.compare(result, expected)


class RankTermWhole(WholeOnRanks, TermWhole):
    pass


class RankJointWhole(WholeOnRanks, JointWhole):
    pass


SEVERAL_ON_RANKS = {"terms loop": RankTermLoop, "terms macrostep": RankTermWhole, "joint": RankJointWhole}
