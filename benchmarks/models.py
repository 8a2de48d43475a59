"""The models of `gpu.py`, made from configurations, with windows of random samples and with their losses."""

# mypy: untyped-calls-exclude="torch,transformers,peft"
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]

IGNORED = -100
SPREAD = 0.8  # standard deviation of the logarithm of lengths
ATTENTION = "sdpa_without_mask"
LLAMAS = {  # width, layers, heads, words
    "110M": (768, 12, 12, 32_000),
    "41M": (512, 8, 8, 32_000),
    "1.1B": (2048, 22, 32, 32_000),
    "tiny": (32, 2, 2, 64),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


# ---------------------------------------------------------------------------------------------------------- the models


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, with a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)),
        )
        is_same = stride == 1 and channels == wide
        projection = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        self.shortcut = nn.Identity() if is_same else projection

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet(width: int, depths: Sequence[int], classes: int) -> nn.Module:
    """A residual network of bottlenecks: ResNet-50 has a width of 64 and depths of 3, 4, 6 and 3."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, channels = list[nn.Module](), width
    for stage, depth in enumerate(depths):
        for place in range(depth):
            blocks.append(Bottleneck(channels, width << stage, 2 if stage and not place else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def attention() -> str:
    """An attention that needs no mask, because padding is at the end, where no real token sees it.

    In every eager forward, transformers' own attention checks the positions to see whether samples are packed, and the
    host waits for the device. Compiled or recorded it cannot check, and uses a slower kernel with a mask of zeros.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    return ATTENTION


def gpt2(tiny: bool) -> nn.Module:
    """GPT-2 with its usual dropout of 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64} if tiny else {}
    config = GPT2Config(attn_implementation=attention(), bos_token_id=0, eos_token_id=0, **sizes)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def llama(size: str, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, words = LLAMAS[size]
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,  # odd sizes are slow on a GPU
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation=attention(),
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def lora(size: str, length: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    # By default one of the two factors begins at zero, so that the other would have no gradient.
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model: Any = llama(size, length)
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=16, target_modules=layers, init_lora_weights=False))
    return adapted


def vit(tiny: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {**SMALL, "image_size": 32} if tiny else {}
    config = ViTConfig(num_labels=10 if tiny else 1_000, attn_implementation="sdpa", **sizes)
    model: nn.Module = ViTForImageClassification(config)
    return model


def bert(tiny: bool) -> nn.Module:
    """BERT without dropout, so that its gradient can be compared with one big batch."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {**SMALL, "vocab_size": 64} if tiny else {}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = BertForMaskedLM(BertConfig(attn_implementation="sdpa", **dropout, **sizes))
    return model


# ------------------------------------------------------------------------------------------------ windows and losses


def tokens(words: int, length: int, samples: int, draw: torch.Generator) -> Batch:
    return {"input_ids": torch.randint(words, (samples, length), generator=draw)}


def images(side: int, classes: int, samples: int, draw: torch.Generator) -> Batch:
    pixels = torch.randn(samples, 3, side, side, generator=draw)
    return {"pixels": pixels, "labels": torch.randint(classes, (samples,), generator=draw)}


def masked_texts(words: int, longest: int, samples: int, draw: torch.Generator) -> Batch:
    """Texts of log-normal lengths, padded to the longest. 15 % of the tokens have to be predicted."""
    drawn = torch.empty(samples).log_normal_(math.log(longest / 4), SPREAD, generator=draw)
    lengths = drawn.clamp(8, longest).int()
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(5, words, mask.shape, generator=draw).masked_fill(~mask, 0)
    hidden = mask & (torch.rand(mask.shape, generator=draw) < 0.15)
    labels = ids.masked_fill(~hidden, IGNORED)
    return {"input_ids": ids.masked_fill(hidden, 4), "attention_mask": mask.long(), "labels": labels}


def chats(words: int, longest: int, samples: int, draw: torch.Generator) -> Batch:
    """Texts of log-normal lengths, with padding at the end, where no real token sees it. Labels are not shifted."""
    batch = masked_texts(words, longest, samples, draw)
    mask, ids = batch["attention_mask"].bool(), torch.randint(words, batch["labels"].shape, generator=draw)
    labels = ids.masked_fill(~mask, IGNORED)
    labels[:, 0] = IGNORED  # no token predicts the first one
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": batch["attention_mask"], "labels": labels}


def next_token_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    ids = batch["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def chat_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss without an attention mask, which would be a mask of zeros with a slower kernel."""
    logits, labels = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def image_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    found = model(batch["pixels"])
    logits = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


def masked_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (batch["labels"] != IGNORED).sum()


# ---------------------------------------------------------------------------------------------------------- the shapes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its windows. `micro_batch` and `micro_batches` are those of the peers."""

    name: str
    title: str
    section: str = "others"
    micro_batch: int
    micro_batches: int
    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]  # draws a window with this number of samples
    loss: Callable[[Any, Batch], tuple[Tensor, Any]]  # the summed loss, and its number of items
    depends_on: str = ""  # the layer because of which the gradient depends on the cut
    longest: int | None = None  # tokens of the longest sample, if lengths vary
    together: int | None = None  # number of samples of the reference that fit at once; None: all
    alive: int = 12  # number of loops whose models fit into memory together

    @property
    def samples(self) -> int:
        return self.micro_batch * self.micro_batches

    @property
    def budget(self) -> int | None:
        """The tokens, with padding, of the peers' largest micro-batch; the limit for `by_tokens`."""
        return None if self.longest is None else self.micro_batch * self.longest

    @property
    def unit(self) -> str:
        return "images" if self.loss is image_loss else "tokens"

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return self.make().to(DEVICE, dtype).train()

    def window(self, index: int) -> Batch:
        return self.draw(self.samples, torch.Generator().manual_seed(index))


def size_of(window: Batch) -> int:
    """The number of tokens without padding, or of images."""
    if "attention_mask" in window:
        return int(window["attention_mask"].sum())
    return window["input_ids"].numel() if "input_ids" in window else len(window["labels"])


def items_of(shape: Shape, batch: Batch) -> Any:
    """The number of items of a micro-batch on the host."""
    if "attention_mask" in batch:
        return (batch["labels"] != IGNORED).sum()
    return len(batch["labels"]) if shape.unit == "images" else batch["input_ids"][:, 1:].numel()


def cut(window: Batch, size: int, is_grouped: bool = False) -> list[Batch]:
    """Micro-batches of `size` samples with trimmed padding; if grouped, samples are sorted by length first."""
    mask = window.get("attention_mask")
    if mask is None:
        starts = range(0, len(next(iter(window.values()))), size)
        return [{name: tensor[start : start + size] for name, tensor in window.items()} for start in starts]
    lengths = mask.sum(1)
    order = lengths.argsort(stable=True) if is_grouped else torch.arange(len(lengths))
    return [
        {name: tensor[rows, : int(lengths[rows].max())].contiguous() for name, tensor in window.items()}
        for rows in order.split(size)
    ]


def pinned(batch: Batch) -> Batch:
    return {name: tensor.pin_memory() for name, tensor in batch.items()} if DEVICE == "cuda" else batch


def moved(batch: Batch) -> Batch:
    return {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in batch.items()}


def autocast(is_compiled: bool = False) -> contextlib.AbstractContextManager[object]:
    """Autocast; for compiled code without its cache, which recordings turn off: the code would be compiled again."""
    if DEVICE == "cpu":
        return contextlib.nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False if is_compiled else None)


def of_equal_length(size: str, micro_batch: int, length: int, micro_batches: int, section: str = "fixed") -> Shape:
    words, name = LLAMAS[size][-1], f"{size}, {micro_batch} x {length} x {micro_batches}"
    return Shape(
        name=f"{'sweep-' * (section == 'sweep')}{micro_batch}x{length}x{micro_batches}",
        title=f"Llama {name}",
        section=section,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        make=lambda: llama(size, length),
        draw=lambda samples, draw: tokens(words, length, samples, draw),
        loss=next_token_loss,
    )


def of_many_lengths(size: str, micro_batches: int, longest: int, together: int) -> Shape:
    return Shape(
        name="chats",
        title=f"Llama {size}, {2 * micro_batches} samples of up to {longest}",
        section="variable",
        micro_batch=2,
        micro_batches=micro_batches,
        make=lambda: llama(size, longest),
        draw=lambda samples, draw: chats(LLAMAS[size][-1], longest, samples, draw),
        loss=chat_loss,
        longest=longest,
        together=together,
    )


def swept(size: str, sizes: Sequence[int], length: int) -> list[Shape]:
    """The same window in micro-batches of these sizes. The last size is the whole window."""
    return [of_equal_length(size, number, length, sizes[-1] // number, "sweep") for number in reversed(sizes)]


SHAPES = [
    of_equal_length("110M", 1, 512, 16),
    of_equal_length("41M", 2, 256, 16),
    of_equal_length("110M", 4, 1024, 8),
    of_many_lengths("110M", 32, 2048, together=8),
    Shape(
        name="gpt2",
        title="GPT-2 124M, dropout 0.1, 2 x 512 x 16",
        micro_batch=2,
        micro_batches=16,
        make=lambda: gpt2(tiny=False),
        draw=lambda samples, draw: tokens(50_257, 512, samples, draw),
        loss=next_token_loss,
        depends_on="dropout",
    ),
    Shape(
        name="vit",
        title="ViT-B/16, 8 x 16",
        micro_batch=8,
        micro_batches=16,
        make=lambda: vit(tiny=False),
        draw=lambda samples, draw: images(224, 1_000, samples, draw),
        loss=image_loss,
    ),
    Shape(
        name="resnet",
        title="ResNet-50, BatchNorm, 16 x 8",
        micro_batch=16,
        micro_batches=8,
        make=lambda: resnet(64, (3, 4, 6, 3), 1_000),
        draw=lambda samples, draw: images(224, 1_000, samples, draw),
        loss=image_loss,
        depends_on="BatchNorm",
    ),
    Shape(
        name="lora",
        title="LoRA on 110M, 2 x 512 x 16",
        micro_batch=2,
        micro_batches=16,
        make=lambda: lora("110M", 512),
        draw=lambda samples, draw: tokens(32_000, 512, samples, draw),
        loss=next_token_loss,
    ),
    Shape(
        name="1.1B",
        title="Llama 1.1B, 1 x 2048 x 8",
        micro_batch=1,
        micro_batches=8,
        make=lambda: llama("1.1B", 2_048),
        draw=lambda samples, draw: tokens(32_000, 2_048, samples, draw),
        loss=next_token_loss,
        together=2,
        alive=5,  # 18 GB for each
    ),
    Shape(
        name="bert",
        title="BERT-base masked LM, 128 samples of up to 512",
        micro_batch=8,
        micro_batches=16,
        make=lambda: bert(tiny=False),
        draw=lambda samples, draw: masked_texts(30_522, 512, samples, draw),
        loss=masked_loss,
        longest=512,
        together=16,
    ),
    *swept("110M", [1, 4, 16], 512),
]
LARGE = {shape.name: shape for shape in SHAPES}
TINY = [
    of_equal_length("tiny", 1, 16, 4),
    of_many_lengths("tiny", 6, 64, together=4),
    replace(
        LARGE["gpt2"],
        title="tiny GPT-2, dropout 0.1",
        micro_batches=3,
        make=lambda: gpt2(tiny=True),
        draw=lambda samples, draw: tokens(64, 16, samples, draw),
    ),
    replace(
        LARGE["vit"],
        title="tiny ViT",
        micro_batch=2,
        micro_batches=3,
        make=lambda: vit(tiny=True),
        draw=lambda samples, draw: images(32, 10, samples, draw),
    ),
    replace(
        LARGE["resnet"],
        title="tiny ResNet, BatchNorm",
        micro_batch=4,
        micro_batches=2,
        make=lambda: resnet(8, (1, 1), 10),
        draw=lambda samples, draw: images(32, 10, samples, draw),
    ),
    replace(
        LARGE["lora"],
        title="LoRA on a tiny Llama",
        micro_batches=3,
        make=lambda: lora("tiny", 16),
        draw=lambda samples, draw: tokens(64, 16, samples, draw),
    ),
    replace(
        LARGE["1.1B"],
        title="tiny Llama, 4 loops at once",
        micro_batches=3,
        make=lambda: llama("tiny", 16),
        draw=lambda samples, draw: tokens(64, 16, samples, draw),
        alive=4,
    ),
    replace(
        LARGE["bert"],
        title="tiny BERT, 12 samples of up to 64",
        micro_batch=2,
        micro_batches=6,
        make=lambda: bert(tiny=True),
        draw=lambda samples, draw: masked_texts(64, 64, samples, draw),
        longest=64,
        together=4,
    ),
    *swept("tiny", [1, 2, 4], 16),
]
