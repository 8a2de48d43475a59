"""Contrastive on a laptop: a loss that compares a thousand pairs with each other, in the memory of 32.

python examples/stories/contrastive_on_a_laptop.py
"""

# mypy: untyped-calls-exclude=torch
# %% [markdown]
# # Contrastive on a laptop
#
# Contrastive training teaches two encoders which things belong together: an image and its caption, a question and its
# answer. Each question looks for its answer among all the answers of the batch, so a larger batch is a better
# exercise. But the loss needs *all* pairs at once, and memory is soon full. Cutting the batch makes it another loss,
# because each question then looks among fewer answers.
#
# This story trains with a thousand pairs while 32 of them are in memory, with exactly the gradient of the thousand.
#
# ## The pairs: `&frac12;` and VULGAR FRACTION ONE HALF
#
# Python's standard library knows how HTML abbreviates characters, and their official names. That makes 1,444 pairs.
# The first 300 are for the test; the model never trains on them.

# %%
import html.entities
import unicodedata
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from macrobatch import Encoded, MacroStep, contrastive_loss, verify

torch.set_default_dtype(torch.float64)  # so that all machines print nearly the same digits

by_name: dict[str, str] = {}
for entity, character in sorted(html.entities.html5.items()):
    if entity.endswith(";") and len(character) == 1 and unicodedata.name(character, "") != "":
        by_name.setdefault(unicodedata.name(character), entity.removesuffix(";"))
order = torch.randperm(len(by_name), generator=torch.Generator().manual_seed(0)).tolist()
texts = [list(by_name.items())[index] for index in order]
print(len(texts), "pairs, for example:")
for name, entity in texts[:4]:
    print(f"  {entity:10} {name}")

# %% [markdown]
# The model sees a text as its short pieces: all runs of one, two or three letters, each with a number. There is one
# encoder for abbreviations and one for names. Both give 64 numbers, which should be similar for a pair.

# %%
PIECES, WIDTH = 2048, 64
Batch = dict[str, Tensor]


def pieces_of(texts: list[str]) -> Tensor:
    """One row for each text: the numbers of its pieces, padded at the end."""
    rows = []
    for text in (f" {text} " for text in texts):
        runs = [text[i : i + size] for size in (1, 2, 3) for i in range(len(text) - size + 1)]
        rows.append(torch.tensor([zlib.crc32(run.encode()) % PIECES for run in runs]))
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PIECES)


def encoder() -> nn.Module:
    return nn.Sequential(
        nn.EmbeddingBag(PIECES + 1, WIDTH, padding_idx=PIECES, mode="mean"),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 256),
        nn.GELU(),
        nn.Linear(256, WIDTH),
    )


class Towers(nn.Module):
    """An encoder for abbreviations, one for names, and how sharply the loss compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.entity, self.name = encoder(), encoder()
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())


def new_model() -> Towers:
    torch.manual_seed(0)
    return Towers()


pairs = {"entity": pieces_of([entity for _, entity in texts]), "name": pieces_of([name for name, _ in texts])}
unseen = {key: rows[:300] for key, rows in pairs.items()}
training = {key: rows[300:] for key, rows in pairs.items()}

# %% [markdown]
# ## The loss, in two functions
#
# `loss_fn` says what the loss needs of each pair: its two encodings. It gets one micro-batch at a time. `joint`
# computes the loss from the encodings of *all* pairs: they are small, 64 numbers each. `contrastive_loss` compares
# them tile by tile and never holds the whole table of comparisons.


# %%
def loss_fn(model: Towers, batch: Batch) -> Encoded:
    return Encoded(entity=model.entity(batch["entity"]), name=model.name(batch["name"]))


def joint(model: Towers, encoded: Encoded) -> Tensor:
    return contrastive_loss(encoded.entity, encoded.name, scale=model.log_scale.exp().clamp(max=100), tile=128)


model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
train = MacroStep(model, optimizer, loss_fn, joint=joint, micro=32)
result = train({key: rows[:1024] for key, rows in training.items()})
print(f"{int(result.items.item()):,} pairs in {result.micro_batches} micro-batches, loss {result.loss.item():.3f}")

# %% [markdown]
# That was one optimizer step on 1,024 pairs. (A model that finds all answers equally likely has a loss of 6.9, the
# logarithm of 1,024.)
#
# ## Is it the same gradient?
#
# `verify` compares the step with one big batch, and so it does with a loop that takes the loss of each piece alone.


# %%
def loss_of_pieces(model: Any, batch: Batch) -> None:
    parts = list(zip(batch["entity"].split(32), batch["name"].split(32), strict=True))
    for entity, name in parts:
        loss = joint(model, loss_fn(model, {"entity": entity, "name": name}))
        (loss / len(parts)).backward()


some = {key: rows[:256] for key, rows in training.items()}
report = verify(new_model(), loss_fn, some, joint=joint, micro=32)
print("joint=:", report.ok, "with an error below 1e-12:", report.max_relative_error < 1e-12)
report = verify(new_model(), loss_fn, some, joint=joint, step=loss_of_pieces)
print("loss of pieces:", report.ok, [cause.name for cause in report.causes], f"error {report.max_relative_error:.1g}")

# %% [markdown]
# The loop of pieces is wrong, and `verify` names the reason: this loss couples the samples of a batch. No weighting of
# the pieces would repair that.
#
# ## Memory stays flat
#
# Now we measure the peak memory of all tensors that a step makes: with all pairs at once in plain torch, and with 32
# pairs at a time. [`memory.py`](../../examples/stories/memory.py) counts the bytes of all tensors that are alive: save
# it beside your script. (For 2,048 pairs we take some of them twice.)


# %%
from memory import PeakMemory


def all_at_once(model: Towers, batch: Batch) -> None:
    encoded = loss_fn(model, batch)
    table = model.log_scale.exp() * F.normalize(encoded.entity) @ F.normalize(encoded.name).T
    answers = torch.arange(len(table))
    ((F.cross_entropy(table, answers) + F.cross_entropy(table.T, answers)) / 2).backward()


SIZES = [256, 512, 1024, 2048]
memory: dict[str, list[float]] = {"all at once": [], "32 at a time": []}
print("pairs  all at once  32 at a time")
for size in SIZES:
    batch = {key: rows.repeat(2, 1)[:size] for key, rows in training.items()}
    with PeakMemory() as peak:
        all_at_once(new_model(), batch)
    memory["all at once"].append(round(peak.mib))
    model = new_model()
    step = MacroStep(model, None, loss_fn, joint=joint, micro=32)
    with PeakMemory() as peak:
        step(batch)
    memory["32 at a time"].append(round(peak.mib))
    print(f"{size:5,}  {memory['all at once'][-1]:7.0f} MiB  {memory['32 at a time'][-1]:8.0f} MiB")

# %% [markdown]
# All at once, memory grows with the square of the batch, because the table of comparisons does. With 32 at a time,
# only the encodings and their gradients grow, by 2 KiB for each pair. The price is time: every micro-batch is encoded
# twice, once for the loss and once for its gradient.
#
# ## What is the large batch good for?
#
# We train with batches of 32, 128, 512 and 1,024 pairs, 40 steps each, and always 32 pairs in memory. Then every
# abbreviation of the test looks for its name among all 300. Guessing would be right once in 300 times: 0.3 %.


# %%
@torch.no_grad()
def accuracy(model: Towers) -> float:
    """How many unseen abbreviations find their own name, in percent."""
    encoded = loss_fn(model, unseen)
    table = F.normalize(encoded.entity) @ F.normalize(encoded.name).T
    return 100 * float((table.argmax(1) == torch.arange(len(table))).double().mean())


def train_model(size: int, steps: int) -> float:
    model, draw = new_model(), torch.Generator().manual_seed(1)
    train = MacroStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn, joint=joint, micro=32)
    for _ in range(steps):
        chosen = torch.randperm(len(training["name"]), generator=draw)[:size]
        train({key: rows[chosen] for key, rows in training.items()})
    return accuracy(model)


BATCHES = [32, 128, 512, 1024]
found = {size: train_model(size, steps=40) for size in BATCHES}
for size, percent in found.items():
    print(f"batches of {size:5,}, 40 steps: {percent:3.0f} % find their name")

many_steps = train_model(32, steps=640)
print(f"batches of    32, 640 steps: {many_steps:.0f} %")

# %% [markdown]
# With the same number of steps, the large batch finds nearly four times as many names as the small one.
#
# The last line asks the fair question: 640 steps of 32 pairs see as many pairs as 40 steps of 512. The small batches
# nearly catch up, with 16 times as many optimizer steps. So a large batch pays where steps are few, or where a small
# batch has too few good wrong answers. Try both; memory is no longer the reason to choose.

# %% [figure]
import matplotlib.pyplot as plt  # only for this figure: pip install matplotlib

figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 3.4), layout="constrained", num="Memory by the number of pairs, and accuracy by the batch"
)
left.plot(SIZES, memory["all at once"], marker="o", color="#d62728", label="all at once")
left.plot(SIZES, memory["32 at a time"], marker="o", color="#1f6fb4", label="32 at a time")
left.set(xlabel="pairs in the batch", ylabel="peak memory of tensors, MiB")
right.plot(BATCHES, list(found.values()), marker="o", color="#1f6fb4", label="40 steps")
right.plot([32], [many_steps], marker="s", linestyle="", color="#ff7f0e", label="640 steps")
right.set(xlabel="pairs in the batch; 32 in memory", ylabel="unseen pairs found, %")
for panel, sizes in ((left, SIZES), (right, BATCHES)):
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.set_ylim(bottom=0)
    panel.spines[["top", "right"]].set_visible(False)
left.legend(frameon=False)
right.legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# [Losses of the whole batch](../contrastive.md) says what `loss_fn` and `joint` get, what is exact, and how it works
# on several ranks. On a GPU, `micro="auto"` finds the largest micro-batch that fits.
