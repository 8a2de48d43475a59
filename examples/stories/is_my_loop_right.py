"""Is my loop right? A training loop with three mistakes that raise no error: `verify` names them, one cure at a time.

python examples/stories/is_my_loop_right.py
"""

# mypy: untyped-calls-exclude=torch
# %% [markdown]
# # Is my loop right?
#
# A loop that accumulates gradients over micro-batches can be wrong without any error: it still learns, just not as
# well as it should. This story starts with such a loop, asks `verify` what is wrong, cures one mistake after the
# other, and measures what they cost.
#
# ## The data: the names of emoji
#
# Python's standard library knows the official name of every character. The names of 848 pictographs are our texts:
# some are short (`OX`), some are long. A small model learns to spell them, as a language model does.

# %%
import unicodedata
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from macrobatch import Accumulator, verify

torch.set_default_dtype(torch.float64)  # so that every machine prints the same digits

names = [unicodedata.name(chr(code)) for code in range(0x1F300, 0x1F650)]
order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
names = [names[index] for index in order]
held_out, training = names[:100], names[100:]
print(len(training), "names to learn from, for example:")
for name in training[:4]:
    print("  ", name)

# %% [markdown]
# As usual, the names of a batch are sorted by length, cut into micro-batches of 8, and padded to the longest of each.
# Four micro-batches make a **window**: one optimizer step on 32 names.

# %%
PAD, END, MICRO, STEPS = 0, 1, 8, 4
LETTERS = sorted(set("".join(names)))


def pad(names: list[str]) -> Tensor:
    """One row for each name: its letters as numbers, the end, and padding."""
    longest = max(map(len, names))
    return torch.tensor(
        [[LETTERS.index(x) + 2 for x in name] + [END] + [PAD] * (longest - len(name)) for name in names]
    )


def micro_batches(names: list[str]) -> list[Tensor]:
    parts = []
    for start in range(0, len(names), MICRO * STEPS):
        window = sorted(names[start : start + MICRO * STEPS], key=len)
        parts += [pad(window[i : i + MICRO]) for i in range(0, len(window), MICRO)]
    return parts


class Speller(nn.Module):
    """For every letter of a name, scores for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS) + 2, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, len(LETTERS) + 2)

    def forward(self, letters: Tensor) -> Tensor:
        scores: Tensor = self.head(self.memory(self.embed(letters))[0])
        return scores


print(pad(["OX", "COW"]).tolist())

# %% [markdown]
# ## The loop
#
# Many of us would write this loop. It divides the loss by 4, because 4 micro-batches make a step, and steps after the
# very last micro-batch, so that no name is lost.


# %%
def first_loop(model: nn.Module, names: list[str]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = micro_batches(names)
    for index, letters in enumerate(loader):
        scores = model(letters)[:, :-1]
        loss = F.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())
        (loss / STEPS).backward()
        if (index + 1) % STEPS == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


# %% [markdown]
# ## Ask `verify`
#
# `verify` needs to know what you *want*: the loss of one big batch. Here that is the mean over all real letters,
# without padding. It runs the loop, and compares the gradient at every optimizer step with that of one big batch of
# the same names. 76 names are enough: two windows of 32, and a short one of 12. The model is left as it was.


# %%
def loss_fn(model: nn.Module, letters: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the letters that are not padding; and how many they are."""
    scores, targets = model(letters)[:, :-1], letters[:, 1:]
    loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD)
    return loss, (targets != PAD).sum()


def new_model() -> Speller:
    torch.manual_seed(0)
    return Speller()


report = verify(new_model(), loss_fn, training[:76], step=first_loop, collate=pad)
print(report)

# %% [markdown]
# *Error* is the largest difference in any gradient, divided by the largest gradient of the model: an exact loop has
# 0.000000000001 or less, and this loop has more than 1. The last column says how much of the right gradient is in
# that of the loop: 1 would be right. The cause is below: the loop trains on padding, since `cross_entropy` does not
# know that 0 means padding.
#
# ## Cure 1: no training on padding
#
# `loss_fn` has the right loss already, so the loop can use it.


# %%
def second_loop(model: nn.Module, names: list[str]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = micro_batches(names)
    for index, letters in enumerate(loader):
        loss, _ = loss_fn(model, letters)
        (loss / STEPS).backward()
        if (index + 1) % STEPS == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


report = verify(new_model(), loss_fn, training[:76], step=second_loop, collate=pad)
for cause in report.causes:
    print(cause.name)

# %% [markdown]
# Two more causes were hidden behind the first:
#
# - **Mean of means.** Each micro-batch counts for a quarter of the step. But the micro-batch with the shortest names
#   has 57 letters, and the one with the longest has 269: a letter of a short name counts almost five times as much.
# - **Short window.** The last window has 2 micro-batches, but its losses are divided by 4. Its gradient is half of
#   what it should be.
#
# ## Cure 2: every letter counts the same
#
# The short window is easy to cure by hand: divide by the number of micro-batches that it really has. The mean of means
# is harder: to divide by the letters of the window, you have to know them before the first backward. The `Accumulator`
# is told how many items each loss is a mean over, and divides once, when the window closes. That cures both.


# %%
def right_loop(model: nn.Module, names: list[str]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    acc = Accumulator(model, optimizer, steps=STEPS)
    for letters in acc.batches(micro_batches(names)):
        loss, items = loss_fn(model, letters)
        acc.backward(loss, items)
        acc.step()


report = verify(new_model(), loss_fn, training[:76], step=right_loop, collate=pad)
print("ok:", report.ok)
print("causes:", report.causes)
print("error below 1e-12:", report.max_relative_error < 1e-12)

# %% [markdown]
# No causes, and no difference beyond rounding, in all three windows.
#
# ## What did the mistakes cost?
#
# We train four models for two epochs, from the same weights, with the same names in the same order: with the first
# loop, the second, the right one, and real big batches of 32 names. After every optimizer step we ask how well the
# model spells the 100 names that it has never seen.


# %%
def big_batches(model: nn.Module, names: list[str]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for start in range(0, len(names), MICRO * STEPS):
        loss, _ = loss_fn(model, pad(names[start : start + MICRO * STEPS]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def losses_of(loop: Callable[[nn.Module, list[str]], None]) -> list[float]:
    """The loss on the held-out names after every optimizer step of two epochs."""
    model, losses, unseen = new_model(), [], pad(held_out)

    def look(*_: object) -> None:
        with torch.no_grad():
            losses.append(loss_fn(model, unseen)[0].item())

    handle = register_optimizer_step_post_hook(look)
    for _ in range(2):
        loop(model, training)
    handle.remove()
    return losses


curves = {loop.__name__: losses_of(loop) for loop in (first_loop, second_loop, right_loop, big_batches)}
print("loss on unseen names, and the largest distance from big batches on the way:")
for name, losses in curves.items():
    distance = max(abs(x - y) for x, y in zip(losses, curves["big_batches"], strict=True))
    print(f"  {name:12} {losses[-1]:.2f}  {'below 1e-9' if distance < 1e-9 else f'{distance:.2f}'}")

# %% [markdown]
# The right loop follows the big batches up to rounding. The first loop ends far above them. The second is a little
# worse at almost every step, and nothing tells you.

# %% [figure]
import matplotlib.pyplot as plt  # only for this figure: pip install matplotlib

figure, (left, right) = plt.subplots(
    1, 2, figsize=(9, 3.6), layout="constrained", num="Loss on unseen names, and its distance from big batches"
)
STYLES = {"first_loop": "#d62728", "second_loop": "#ff7f0e", "right_loop": "#1f6fb4"}
left.plot(curves["big_batches"], color="#bbbbbb", linewidth=6, label="big batches")
for name, colour in STYLES.items():
    left.plot(curves[name], color=colour, label=name.replace("_", " "))
    gap = [x - y for x, y in zip(curves[name], curves["big_batches"], strict=True)]
    right.plot(gap, color=colour)
left.set(xlabel="optimizer steps", ylabel="loss on unseen names")
left.legend(frameon=False)
right.set(xlabel="optimizer steps", ylabel="above the loss of big batches")
for panel in (left, right):
    panel.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# To check a loop of your own: write its `loss_fn`, wrap the loop into a function of the model and the data, and call
# `verify(model, loss_fn, batch, step=your_loop)`. [Verify](../verify.md) has all the causes that it knows.
