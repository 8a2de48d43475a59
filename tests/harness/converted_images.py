"""Published programs for images, each reduced to its step and converted."""

from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.converting import PLAIN, Batch, N, Terms, as_a_batch, draw, in_a_loop, layers, program, whole_numbers
from macrobatch import Encoded, Sum


@program(
    "torchvision references, ImageNet",
    ("pytorch/vision", "e6f0400", "references/classification/train.py"),
    "cross-entropy with label smoothing, of mixed targets; clipped",
    "loader, `backward`, `step`",
    3,
)
def imagenet() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)

    labels = in_a_loop(layers(6, 8, 5), loss_of, (draw(N, 6), whole_numbers(5, N)), max_norm=0.1)
    mixed = draw(N, 5, seed=5).softmax(1)  # probabilities
    return max(labels, in_a_loop(layers(6, 8, 5), loss_of, (draw(N, 6), mixed), max_norm=0.1))


@program(
    "timm, mixup",
    ("huggingface/pytorch-image-models", "aa4b585", "train.py"),
    "mean over samples of soft-target cross-entropies",
    PLAIN,
    3,
)
def timm() -> float:
    targets = draw(N, 5, seed=5).softmax(1)
    return in_a_loop(
        layers(6, 8, 5), lambda m, b: (-b[1] * m(b[0]).log_softmax(1)).sum(1).mean(), (draw(N, 6), targets)
    )


def dice_loss(inter: Tensor, sizes: Tensor) -> Tensor:
    return 1 - (2 * inter + 1e-6) / (torch.where(sizes == 0, 2 * inter, sizes) + 1e-6)


@program(
    "U-Net, segmentation",
    ("milesial/Pytorch-UNet", "21d7850", "train.py"),
    "cross-entropy over pixels, and the Dice loss of the whole batch",
    "`joint=` with `Sum`",
    7,
)
def unet() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    batch = (draw(N, 2, 5, 5), whole_numbers(3, N, 5, 5))

    def parts(m: nn.Module, b: Batch) -> tuple[Tensor, Tensor, Tensor]:
        logits = m(b[0])
        found, wanted = logits.softmax(1), F.one_hot(b[1], 3).permute(0, 3, 1, 2).double()
        return F.cross_entropy(logits, b[1]), (found * wanted).sum(), found.sum() + wanted.sum()

    def loss_fn(m: nn.Module, b: Batch) -> Encoded:
        loss, inter, sizes = parts(m, b)
        return Encoded(loss, b[1].numel(), inter=Sum(inter), sizes=Sum(sizes))

    def loss_of(m: nn.Module) -> Tensor:
        loss, inter, sizes = parts(m, batch)
        return loss + dice_loss(inter, sizes)

    return as_a_batch(model, loss_fn, batch, loss_of, joint=lambda _, e: dice_loss(e.inter, e.sizes))


@program(
    "MAE",
    ("facebookresearch/mae", "efb2a80", "engine_pretrain.py"),
    "squared error of normalised patches, over masked ones",
    "and `items=mask.sum()`",
    4,
)
def mae() -> float:
    def loss_of(m: nn.Module, b: Batch) -> Tensor:
        patches, mask = b
        target = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6) ** 0.5
        error = (m(patches * (1 - mask)[..., None]) - target).square().mean(-1)
        return (error * mask).sum() / mask.sum()

    kept = draw(N, 8, seed=6).argsort(1) < 2  # two patches of each sample
    batch = (draw(N, 8, 3), 1 - kept.double())
    return in_a_loop(layers(3, 8, 3), loss_of, batch, items=lambda b: b[1].sum())


# ------------------------------------------------------------------------------------------------------- detection


def areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def corners(boxes: Tensor) -> Tensor:
    centre, size = boxes.chunk(2, -1)
    return torch.cat([centre - size / 2, centre + size / 2], -1)


def overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes with their centre and size, and its generalised form."""
    a, b = corners(a), corners(b)
    both = torch.cat([torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])], -1)
    inter = (both[..., 2:] - both[..., :2]).clamp(min=0).prod(-1)
    union = areas(a) + areas(b) - inter
    hull = areas(torch.cat([torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])], -1))
    return inter / union, inter / union - (hull - union) / hull


class Queries(nn.Module):
    """Boxes and classes of three queries an image, after each of two layers. The last class is "no object"."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = layers(6, 8, seed=0), nn.ModuleList(layers(8, 8, 24, seed=s) for s in (1, 2))

    def forward(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        outputs = [head(self.body(x)).unflatten(-1, (3, 8)) for head in self.heads]
        return [(found[..., :4].sigmoid(), found[..., 4:]) for found in outputs]


@torch.no_grad()
def matched(boxes: Tensor, logits: Tensor, wanted: Tensor, labels: Tensor) -> tuple[int, ...]:
    """The queries of an image that suit its objects best together."""
    best = min(
        permutations(range(len(boxes)), len(wanted)),
        key=lambda picked: float(
            5 * (boxes[list(picked)] - wanted).abs().sum()
            - logits.softmax(-1)[list(picked), labels].sum()
            - 2 * overlaps(boxes[list(picked)], wanted)[1].sum()
        ),
    )
    return tuple(best)


NO_OBJECT = 0.1  # the weight of "no object"


def weights_of(number: Tensor) -> dict[str, Tensor]:
    """What the terms are means over: boxes, and queries by the weights of their classes."""
    boxes = number.sum().double()
    return {"boxes": boxes, "classes": boxes + NO_OBJECT * (3 * len(number) - boxes)}


@program(
    "DETR",
    ("facebookresearch/detr", "29901c5", "models/detr.py"),
    "in each layer: box errors over all boxes, weighted cross-entropy over all queries; clipped",
    "a dict of terms and `counts=`; the all-reduce in the criterion goes",
    7,
)
def detr() -> float:
    importance = torch.tensor([1, 1, 1, NO_OBJECT], dtype=torch.float64)

    def terms(m: nn.Module, b: Batch) -> Terms:
        x, wanted, labels, number = b
        counts, boxes_loss, classes_loss = weights_of(number), torch.zeros(()).double(), torch.zeros(()).double()
        for boxes, logits in m(x):
            classes = torch.full(logits.shape[:2], 3)
            for i, k in enumerate(number.tolist()):
                picked = list(matched(boxes[i], logits[i], wanted[i, :k], labels[i, :k])) if k else []
                classes[i, picked] = labels[i, :k]
                l1, overlap = (boxes[i, picked] - wanted[i, :k]).abs().sum(), overlaps(boxes[i, picked], wanted[i, :k])
                boxes_loss = boxes_loss + 5 * l1 + 2 * (1 - overlap[1]).sum()
            classes_loss = classes_loss + F.cross_entropy(logits.transpose(1, 2), classes, importance)
        return {
            "boxes": (boxes_loss / counts["boxes"].clamp(min=1), counts["boxes"]),
            "classes": (classes_loss, counts["classes"]),
        }

    number = whole_numbers(3, N, seed=5)
    number[4:6] = 0  # a micro-batch without any object
    batch = (draw(N, 6), draw(N, 2, 4, seed=3).sigmoid(), whole_numbers(3, N, 2, seed=4), number)
    return in_a_loop(Queries(), terms, batch, max_norm=0.1, counts=lambda b: weights_of(b[3]))


class Cells(nn.Module):
    """Predictions of two layers: four cells an image, then two. Each has a box, one for an object, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = layers(6, 8, 16, seed=1), layers(6, 8, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fine(x).unflatten(-1, (4, 8)), self.coarse(x).unflatten(-1, (2, 8))


@program(
    "YOLOv5",
    ("ultralytics/yolov5", "5081342", "utils/loss.py"),
    "in each layer: means over targets (boxes, classes) and cells; times the batch size; clipped",
    "a dict of terms and `counts=`; `* bs` becomes the nominal size",
    8,
)
def yolo() -> float:
    bce, nominal = F.binary_cross_entropy_with_logits, 64

    def counts(b: Batch) -> dict[str, Any]:
        targets = {f"targets {i}": hits.sum() for i, hits in enumerate(b[1:3])}
        return targets | {f"cells {i}": hits.numel() for i, hits in enumerate(b[1:3])}

    def terms(m: nn.Module, b: Batch) -> Terms:
        x, *places, boxes, labels = b
        numbers, found = counts(b), {}
        for i, (p, is_hit, balance) in enumerate(zip(m(x), places, (4.0, 1.0), strict=True)):
            wanted, on = torch.zeros_like(p[..., 4]), boxes[:, None].expand(-1, p.shape[1], -1)[is_hit]
            loss = p.sum() * 0
            if len(on):
                iou, _ = overlaps(p[is_hit][:, :4].sigmoid(), on)
                wanted[is_hit] = iou.detach()
                classes = F.one_hot(labels[:, None].expand(-1, p.shape[1])[is_hit], 3).double()
                loss = 0.05 * (1 - iou).mean() + 0.5 * bce(p[is_hit][:, 5:], classes)
            found[f"targets {i}"] = nominal * loss, numbers[f"targets {i}"]
            found[f"cells {i}"] = nominal * balance * bce(p[..., 4], wanted), numbers[f"cells {i}"]
        return {name: found[name] for name in numbers}

    places = [draw(N, 4, seed=3) > 1, draw(N, 2, seed=4) > 0.5]
    places[0][4:6] = False  # a micro-batch without any target in a layer
    batch = (draw(N, 6), *places, draw(N, 4, seed=5).sigmoid(), whole_numbers(3, N, seed=6))
    return in_a_loop(Cells(), terms, batch, max_norm=10.0, counts=counts)
