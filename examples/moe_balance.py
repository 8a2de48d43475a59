"""The balance loss of a mixture of experts over the whole batch: experts can specialise, and are still used equally.

Each micro-batch comes from one of four sources, as documents do. If every micro-batch has its own balance loss, each
expert must take a part of every source. Over the whole batch, the same loss lets each source have its own expert.

python examples/moe_balance.py
"""

# mypy: untyped-calls-exclude=torch
import torch
from torch import Tensor, nn

from macrobatch import Encoded, MacroStep, Sum

SOURCES = EXPERTS = 4
SAMPLES, WIDTH, STEPS, WEIGHT = 32, 8, 300, 0.5

Batch = dict[str, Tensor]


class Mixture(nn.Module):
    """A router sends each sample to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The prediction, the chosen expert, and the probabilities of all experts."""
        probabilities = self.router(x).softmax(-1)
        probability, chosen = probabilities.max(-1)
        all_experts = torch.cat([expert(x) for expert in self.experts], dim=-1)
        return all_experts.gather(-1, chosen[:, None])[:, 0] * probability, chosen, probabilities


def make_batch(seed: int) -> Batch:
    """SAMPLES samples of each source, one source after the other. Each source has its own location and its own rule."""
    draw = torch.Generator().manual_seed(seed)
    source = torch.arange(SOURCES).repeat_interleave(SAMPLES)
    places = 2 * torch.eye(SOURCES, WIDTH)[source]
    x = places + 0.5 * torch.randn(len(source), WIDTH, generator=draw)
    rules = torch.randn(SOURCES, WIDTH, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": (x * rules[source]).sum(-1), "source": source}


def balance(load: Tensor, probability: Tensor, samples: Tensor | int) -> Tensor:
    """The balance loss: 1 if all experts are used equally, more if not (Switch Transformer, equation 4)."""
    return EXPERTS * (load / samples * probability / samples).sum()


def statistics(model: Mixture, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The mean error, the number of samples of each expert, and the sum of its probabilities."""
    predicted, chosen, probabilities = model(batch["x"])
    error = nn.functional.mse_loss(predicted, batch["y"])
    return error, nn.functional.one_hot(chosen, EXPERTS).sum(0), probabilities.sum(0)


def of_each(model: Mixture, batch: Batch) -> Tensor:
    """The usual way: every micro-batch has its own balance loss."""
    error, load, probability = statistics(model, batch)
    return error + WEIGHT * balance(load, probability, len(batch["x"]))


def of_all(model: Mixture, batch: Batch) -> Encoded:
    """The error of the micro-batch, and its sums for the balance loss of the whole batch."""
    error, load, probability = statistics(model, batch)
    samples = len(batch["x"])
    return Encoded(error, samples, load=Sum(load), probability=Sum(probability), samples=Sum(samples))


def joint(model: Mixture, encoded: Encoded) -> Tensor:  # noqa: ARG001
    return WEIGHT * balance(encoded.load, encoded.probability, encoded.samples)


def train(*, whole: bool) -> Mixture:
    torch.manual_seed(1)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    loss_fn, options = (of_all, {"joint": joint}) if whole else (of_each, {})
    step = MacroStep(model, optimizer, loss_fn, micro=SAMPLES, **options)  # type: ignore[arg-type]
    for seed in range(STEPS):
        step(make_batch(seed))
    return model


@torch.no_grad()
def report(name: str, model: Mixture) -> None:
    batch = make_batch(10**6)
    error, load, _ = statistics(model, batch)
    _, chosen, _ = model(batch["x"])
    shares = torch.stack([nn.functional.one_hot(chosen[batch["source"] == s], EXPERTS).sum(0) for s in range(SOURCES)])
    purity = float(shares.max(1).values.sum() / shares.sum())
    used = ", ".join(str(int(number)) for number in load)
    print(f"{name:18} error {error:.3f}; samples of each expert: {used}; {purity:.0%} of a source go to one expert")


def main() -> None:
    report("each micro-batch:", train(whole=False))
    report("the whole batch:", train(whole=True))


if __name__ == "__main__":
    main()
