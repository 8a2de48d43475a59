"""Contrastive training with a batch of 2,048 pairs in the memory of 32 pairs: larger batches make retrieval better.

python examples/contrastive.py
"""

# mypy: untyped-calls-exclude=torch
import torch
from torch import Tensor, nn

from macrobatch import Encoded, MacroStep, contrastive_loss

MICRO = 32  # pairs in memory at a time, for every batch size
STEPS = 40
IMAGE, TEXT, TOPICS, WIDTH = 48, 40, 12, 64

Batch = dict[str, Tensor]


class Towers(nn.Module):
    """An encoder for images, one for texts, and the scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(IMAGE, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.text = nn.Sequential(nn.Linear(TEXT, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(10.0).log())


class World:
    """Pairs of an image and a text about the same topics, made by two fixed random maps, with noise."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self._image = 0.3 * torch.randn(TOPICS, IMAGE, generator=draw)
        self._text = 0.3 * torch.randn(TOPICS, TEXT, generator=draw)

    def pairs(self, count: int, seed: int) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        topics = torch.randn(count, TOPICS, generator=draw)
        image = (topics @ self._image).sin() + 0.3 * torch.randn(count, IMAGE, generator=draw)
        text = (topics @ self._text).cos() + 0.3 * torch.randn(count, TEXT, generator=draw)
        return {"image": image, "text": text}


def loss_fn(model: Towers, batch: Batch) -> Encoded:
    """The encodings of each pair, for the joint loss."""
    return Encoded(image=model.image(batch["image"]), text=model.text(batch["text"]))


def joint(model: Towers, encoded: Encoded) -> Tensor:
    """The loss of the whole batch: each image must find its text among all texts, and each text its image."""
    return contrastive_loss(encoded.image, encoded.text, scale=model.logit_scale.exp().clamp(max=100))


@torch.no_grad()
def accuracy(model: Towers, pairs: Batch) -> float:
    """The share of images that find their own text among all of these."""
    model.eval()
    encoded = loss_fn(model, pairs)
    images, texts = nn.functional.normalize(encoded.image), nn.functional.normalize(encoded.text)
    model.train()
    return float(((images @ texts.T).argmax(1) == torch.arange(len(images))).float().mean())


def train(size: int, steps: int = STEPS) -> float:
    """Train some steps with batches of `size` pairs, MICRO of them in memory at a time, and return the accuracy."""
    torch.manual_seed(0)
    world, model = World(), Towers()
    step = MacroStep(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss_fn, joint=joint, micro=MICRO)
    for seed in range(steps):
        step(world.pairs(size, 1 + seed))
    return accuracy(model, world.pairs(1000, 10**6))


def main() -> None:
    print(f"{STEPS} steps each, {MICRO} pairs in memory at a time; retrieval among 1,000:")
    for size in (32, 256, 2048):
        print(f"batch {size:5,}: {train(size):6.1%} of the images find their text")


if __name__ == "__main__":
    main()
