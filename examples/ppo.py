"""Proximal policy optimization: three terms with their own denominators, on episodes of different lengths.

The policy and value terms are means over steps, and the entropy bonus is a mean over episodes. So the weights of the
terms do not depend on how the rollout is cut.

python examples/ppo.py
"""

import torch
from torch import Tensor, nn

from macrobatch import MacroStep

Batch = dict[str, Tensor]


def make_rollout() -> Batch:
    """32 episodes of 5 to 50 steps."""
    mask = torch.arange(50) < torch.randint(5, 51, (32, 1))
    rollout = {"state": torch.randn(32, 50, 6), "action": torch.randint(3, (32, 50)), "mask": mask}
    return rollout | {"advantage": torch.randn(32, 50), "reward": torch.randn(32, 50)}


def log_probabilities(actor: nn.Module, batch: Batch) -> Tensor:
    every: Tensor = actor(batch["state"]).log_softmax(-1)
    return every


def of_actions(every: Tensor, batch: Batch) -> Tensor:
    return every.gather(-1, batch["action"][..., None])[..., 0]


def ppo(models: list[nn.Module], batch: Batch) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Each term, and what it is a mean over."""
    actor, critic = models
    mask, every = batch["mask"], log_probabilities(actor, batch)
    ratio = (of_actions(every, batch) - batch["before"]).exp()
    gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
    error = (critic(batch["state"])[..., 0] - batch["reward"]).square()
    entropy = -(every.exp() * every).sum(-1)
    steps, episodes = mask.sum(), len(mask)
    return {
        "policy": (-(gain * mask).sum() / steps, steps),
        "value": (0.5 * (error * mask).sum() / steps, steps),
        "entropy": (-0.01 * ((entropy * mask).sum(1) / mask.sum(1)).mean(), episodes),
    }


def counts(batch: Batch) -> dict[str, Tensor | int]:
    """The denominators in the whole rollout, which are known before it is cut."""
    return {"policy": batch["mask"].sum(), "value": batch["mask"].sum(), "entropy": len(batch["mask"])}


def train(micro: int) -> list[float]:
    """The losses of four passes over one rollout."""
    torch.manual_seed(0)
    actor, critic, rollout = nn.Linear(6, 3), nn.Linear(6, 1), make_rollout()
    with torch.no_grad():
        rollout["before"] = of_actions(log_probabilities(actor, rollout), rollout)
    optimizers = [torch.optim.AdamW(actor.parameters(), lr=3e-4), torch.optim.AdamW(critic.parameters(), lr=1e-3)]
    update = MacroStep([actor, critic], optimizers, ppo, counts=counts, micro=micro, max_norm=0.5)
    return [update(rollout).loss.item() for _ in range(4)]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    whole, cut = train(micro=32), train(micro=5)
    print("one big batch:   ", *(f"{loss:.12f}" for loss in whole))
    print("micro-batches:   ", *(f"{loss:.12f}" for loss in cut))
    assert max(abs(one - other) for one, other in zip(whole, cut, strict=True)) < 1e-12
