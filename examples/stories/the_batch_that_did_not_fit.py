"""The batch that did not fit: the same batch under a real limit of memory, cut in several ways, with one gradient.

python examples/stories/the_batch_that_did_not_fit.py    (on Linux, or with a CUDA GPU)
"""

# mypy: untyped-calls-exclude=torch
# %% [markdown]
# # The batch that did not fit
#
# You want to train with a batch of 64 texts, but only a few of them fit into memory. This story gives the program a
# real memory limit, sees the batch fail, and trains on it anyway. Then it measures what each way of cutting costs.
#
# ## A batch of very different lengths
#
# 64 texts of random words, most of them short, a few long, as in most real data. All are padded to the longest.

# %%
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from macrobatch import MacroStep, StepResult, by_tokens, causal_lm_loss

torch.set_default_dtype(torch.float64)  # to compare gradients to the last digit
device = "cuda" if torch.cuda.is_available() else "cpu"

TEXTS, LONGEST, WORDS, WIDTH, MIB = 64, 160, 200, 64, 2**20
generator = torch.Generator().manual_seed(0)
lengths = (3.4 + 0.8 * torch.randn(TEXTS, generator=generator)).exp().long().clamp(4, LONGEST)
mask = torch.arange(int(lengths.max())) < lengths[:, None]
words = torch.randint(1, WORDS, mask.shape, generator=generator)
batch = {"input_ids": words * mask, "attention_mask": mask}
real, padded = int(mask.sum()), mask.numel()
print(f"{TEXTS} texts of {lengths.min()} to {lengths.max()} words, half of them up to {lengths.median()}")
print(f"{real:,} words; padded {padded:,}: {1 - real / padded:.0%} of the batch is padding")

# %% [markdown]
# The model is a small transformer that predicts the next word.


# %%
class Reader(nn.Module):
    """Scores for the next word, at every word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        # Padding comes after the words, and no word looks ahead: the attention mask is not needed.
        width = input_ids.shape[1]
        later = torch.ones(width, width, dtype=torch.bool, device=input_ids.device).triu(1)
        hidden = self.embed(input_ids) + self.place(torch.arange(width, device=input_ids.device))
        scores: Tensor = self.head(self.layers(hidden, mask=later, is_causal=True))
        return scores


def new_model() -> Reader:
    torch.manual_seed(0)
    return Reader().to(device)


def train_one_batch(micro: Any) -> StepResult:
    """One optimizer step on the whole batch, cut as `micro` says."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = MacroStep(model, optimizer, causal_lm_loss, micro=micro, max_norm=1.0)
    return train(batch)


# %% [markdown]
# ## A real limit
#
# From here on the program gets 96 MiB more than it has now. On a GPU, torch can set such a limit for its own process;
# on a CPU, Linux can.


# %%
def set_limit(mib: int) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mib * MIB) / total)
    else:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + mib * MIB, resource.RLIM_INFINITY))


def lift_limit() -> None:
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


train_one_batch(8)  # torch loads some of its parts at first use: before the limit counts
set_limit(96)
try:
    train_one_batch(TEXTS)  # all 64 texts at once
except RuntimeError as failure:
    print("all at once:", "out of memory" if "allocate" in str(failure) else failure)

# %% [markdown]
# ## Cut it
#
# `MacroStep` cuts the whole batch into micro-batches, here of 8 texts, adds up their gradients, and takes one
# optimizer step. The limit is still the same.

# %%
result = train_one_batch(8)
print(f"8 texts at a time: {result.micro_batches} micro-batches, loss {result.loss.item():.4f}")

# %% [markdown]
# With `micro="auto"`, `MacroStep` finds the number: it begins with all 64 texts. If memory runs out, it puts everything
# back as it was, and tries again with half as many. (Which number it finds depends on the machine.)

# %%
result = train_one_batch("auto")
print("auto fits:", 1 < result.micro_batches <= TEXTS)
print(f"loss {result.loss.item():.4f}")

# %% [markdown]
# ## Less padding
#
# In a micro-batch of 8 texts, one long text makes 7 short ones long. `by_tokens` sorts the texts by length first. Then
# it puts together as many as a budget of words allows, padding included, and trims the padding that is no longer
# needed. (`by_tokens("auto")` finds the budget by itself.)

# %%
result = train_one_batch(by_tokens(1200))
print(f"1,200 words at a time: {result.micro_batches} micro-batches, loss {result.loss.item():.4f}")
lift_limit()

# %% [markdown]
# ## The same gradient
#
# The loss is the same in each case. And the gradient? We compare every way of cutting with one big batch in plain
# torch. (`MacroStep` without an optimizer leaves the gradient of the batch in `.grad`.) The error is the largest
# difference anywhere, divided by the largest gradient. We also count the words that go through the model, and the peak
# of memory: [`memory.py`](../../examples/stories/memory.py) counts the bytes of all tensors that are alive. Save it
# beside your script.


# %%
from memory import PeakMemory


def one_big_batch(model: nn.Module) -> None:
    scores = model(**{name: tensor.to(device) for name, tensor in batch.items()})
    targets = batch["input_ids"].masked_fill(~mask, -100).to(device)
    nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), targets[:, 1:].flatten()).backward()


reference = new_model()
one_big_batch(reference)
wanted = [p.grad for p in reference.parameters() if p.grad is not None]
largest = max(float(gradient.abs().max()) for gradient in wanted)

CHOICES: dict[str, Any] = {
    "all at once": TEXTS,
    "32 texts": 32,
    "16 texts": 16,
    "8 texts": 8,
    "4 texts": 4,
    "2,400 words": by_tokens(2400),
    "1,200 words": by_tokens(1200),
    "600 words": by_tokens(600),
}
peaks, computed = {}, {}
print("               pieces  peak MiB  words computed  padding  error below 1e-12")
for name, micro in CHOICES.items():
    shapes: list[torch.Size] = []

    def loss_fn(model: nn.Module, part: dict[str, Tensor], shapes: list[torch.Size] = shapes) -> Any:
        shapes.append(part["input_ids"].shape)
        return causal_lm_loss(model, part)

    model = new_model()
    with PeakMemory() as peak:
        result = MacroStep(model, None, loss_fn, micro=micro)(batch)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    error = max(float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True)) / largest
    peaks[name], computed[name] = peak.mib, sum(shape.numel() for shape in shapes)
    numbers = f"{result.micro_batches:6}  {peaks[name]:8.0f}  {computed[name]:14,}  {1 - real / computed[name]:7.0%}"
    print(f"  {name:11}  {numbers}  {error < 1e-12}")

# %% [markdown]
# Every cut has the gradient of the big batch. A cut by number needs less memory the smaller its pieces are, but
# computes the same padding every time. A cut by words computes about a third of that, in no more memory: most of the
# work that is left is real.

# %% [figure]
import matplotlib.pyplot as plt  # only for this figure: pip install matplotlib

figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 3.2), layout="constrained", sharey=True, num="Peak memory and padding of each way to cut"
)
labels = list(CHOICES)
colours = ["#bbbbbb"] + ["#9ecae1"] * 4 + ["#1f6fb4"] * 3
left.barh(labels, [peaks[name] for name in labels], color=colours)
left.invert_yaxis()
left.set_xlabel("peak memory of tensors, MiB")
right.barh(labels, [real] * len(labels), color="#1f6fb4", label="words")
right.barh(labels, [computed[name] - real for name in labels], left=real, color="#f0b27a", label="padding")
right.set_xlabel("computed in one batch")
right.legend(frameon=False, loc="lower right")
for panel in (left, right):
    panel.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# In your own program, begin with `micro="auto"` on a GPU, or with `by_tokens("auto")` if lengths differ much. [Whole
# batches](../whole-batches.md) has the rules, also for lists of samples, several sequences in a sample, and ranks.
