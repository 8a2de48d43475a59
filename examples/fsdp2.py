"""Several processes with FSDP2: each rank keeps a part of every parameter, of its gradient and of its optimizer state.

torchrun --nproc-per-node 2 examples/fsdp2.py     # plain python runs it as a world of one rank
"""

# mypy: untyped-calls-exclude=torch
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from macrobatch import Accumulator

WORDS, WIDTH = 64, 32
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def make_loader(epoch: int) -> list[Tensor]:
    """This rank's share of 21 micro-batches: with two ranks, 11 and 10. Their lengths differ too."""
    generator = torch.Generator().manual_seed(epoch)
    lengths = torch.randint(3, 30, (21,), generator=generator).tolist()
    starts = torch.randint(WORDS, (21, 4, 1), generator=generator)
    batches = [(start + torch.arange(length)) % WORDS for start, length in zip(starts, lengths, strict=True)]
    return batches[dist.get_rank() :: dist.get_world_size()]


def main() -> None:
    os.environ.update({name: value for name, value in ALONE.items() if "RANK" not in os.environ})  # torchrun sets them
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights on every rank: unlike DDP, fully_shard does not copy those of rank 0
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # after sharding, because it must hold the shards

    # gather="window" gathers the parameters once per window; the default "micro" needs less memory: docs/scaling.md.
    acc = Accumulator(model, optimizer, steps=4, max_norm=1.0, gather="window")
    for epoch in range(3):
        for tokens in acc.batches(make_loader(epoch)):  # equally many on every rank: the shorter one repeats its last
            inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            acc.backward(loss, items=targets.numel())
            if (result := acc.step()) and dist.get_rank() == 0:  # loss and items are those of all ranks
                print(f"step {result.step}: loss {result.loss.item():.4f} over {int(result.items.item())} tokens")

    own = torch.cat([part.full_tensor().flatten() for part in model.state_dict().values()])
    first = own.clone()
    dist.broadcast(first, src=0)
    if not torch.equal(own, first):
        raise SystemExit(f"Rank {dist.get_rank()} has other weights than rank 0: this is a bug in Macrobatch.")
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"The same weights on every rank of {dist.get_world_size()}.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
