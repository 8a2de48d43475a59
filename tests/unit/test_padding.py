"""Nothing is trimmed off a batch but what is known to be padding: the rule by its cases, then for every batch."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from macrobatch import by_count, by_tokens
from macrobatch._cut.padding import IGNORED
from macrobatch._cut.samples import samples_of
from macrobatch._cut.token_groups import LeafInfo, token_groups
from macrobatch.errors import BatchError

at_length = settings(max_examples=400, deadline=None, derandomize=True, database=None)

WIDTH = 8
SHORT, LONG = [2, 3, 2, 1], [7, 5, 6, 7]  # lengths of four samples; none reaches the width


# ------------------------------------------------------------------------------------------------------- the rule


def named(**sizes: int | tuple[int, ...]) -> tuple[LeafInfo, ...]:
    """Tensors of one dict, by their dimensions beyond the samples."""
    return tuple(LeafInfo((n,), size if isinstance(size, tuple) else (size,), True) for n, size in sizes.items())


TRIMMED: dict[str, tuple[dict[str, Any], list[set[str]]]] = {
    "causal": ({"input_ids": 8, "attention_mask": 8, "labels": 8}, [{"input_ids", "attention_mask", "labels"}]),
    "beside tokens": (
        {"input_ids": 8, "attention_mask": 8, "token_type_ids": 8, "position_ids": 8, "special_tokens_mask": 8},
        [{"input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask"}],
    ),
    "other masks": (
        {"input_ids": 8, "attention_mask": 8, "completion_mask": 8, "global_attention_mask": 8},
        [{"input_ids", "attention_mask", "completion_mask", "global_attention_mask"}],
    ),
    "embeddings": ({"inputs_embeds": (8, 8), "attention_mask": 8}, [{"inputs_embeds", "attention_mask"}]),
    "encoder and decoder": (
        {"input_ids": 8, "attention_mask": 8, "decoder_input_ids": 8, "decoder_attention_mask": 8, "labels": 8},
        [{"input_ids", "attention_mask"}, {"decoder_input_ids", "decoder_attention_mask", "labels"}],
    ),
    "a decoder without a mask": (
        {"input_ids": 8, "attention_mask": 8, "decoder_input_ids": 8, "labels": 8},
        [{"input_ids", "attention_mask"}],
    ),
    "labels of another width": ({"input_ids": 8, "attention_mask": 8, "labels": 5}, [{"input_ids", "attention_mask"}]),
    "labels with a mask of their own": (
        {"input_ids": 8, "attention_mask": 8, "labels": 8, "labels_attention_mask": 8},
        [{"input_ids", "attention_mask"}, {"labels", "labels_attention_mask"}],
    ),
    "prefixes": (
        {"chosen_input_ids": 8, "chosen_attention_mask": 8, "rejected_input_ids": 8, "rejected_attention_mask": 8},
        [{"chosen_input_ids", "chosen_attention_mask"}, {"rejected_input_ids", "rejected_attention_mask"}],
    ),
    "suffixes": (
        {"input_ids_chosen": 8, "attention_mask_chosen": 8, "input_ids_rejected": 8, "attention_mask_rejected": 8},
        [{"input_ids_chosen", "attention_mask_chosen"}, {"input_ids_rejected", "attention_mask_rejected"}],
    ),
    "the only tensor of its mask": ({"x": (8, 3), "attention_mask": 8, "y": 1}, [{"x", "attention_mask"}]),
    "named like its mask": (
        {"video": (8, 3), "video_attention_mask": 8, "input_ids": 8, "attention_mask": 8},
        [{"video", "video_attention_mask"}, {"input_ids", "attention_mask"}],
    ),
    "images": ({"input_ids": 8, "attention_mask": 8, "pixel_values": (3, 32, 32)}, [{"input_ids", "attention_mask"}]),
    # What is not known:
    "features as wide": ({"input_ids": 8, "attention_mask": 8, "features": 8}, []),
    "features as wide as one of a pair": (
        {"a_input_ids": 8, "a_attention_mask": 8, "b_input_ids": 9, "b_attention_mask": 9, "features": 9},
        [{"a_input_ids", "a_attention_mask"}],
    ),
    "two tensors of a mask": ({"x": (8, 3), "z": 8, "attention_mask": 8}, []),
    "pairs of positions": ({"distances": (8, 8), "attention_mask": 8}, []),
    "images as wide": ({"input_ids": 8, "attention_mask": 8, "pixel_values": (3, 8, 8)}, []),
    "masks of 3 dimensions": ({"input_ids": 8, "attention_mask": (8, 8)}, []),
    "masks of 4 dimensions": ({"input_ids": 8, "attention_mask": (1, 8, 8)}, []),
    "a mask of 2 and one of 4": ({"input_ids": 8, "attention_mask": 8, "cross_attention_mask": (1, 8, 8)}, []),
    "a mask longer than its tokens": ({"input_ids": 8, "attention_mask": 11}, []),
    "a mask and labels longer than the tokens": ({"input_ids": 8, "attention_mask": 11, "labels": 11}, []),
    "labels without a mask": ({"input_ids": 8, "labels": 8}, []),
    "labels of no known side": (
        {"a_input_ids": 8, "a_attention_mask": 8, "b_input_ids": 8, "b_attention_mask": 8, "labels": 8},
        [],
    ),
    "ids that share a mask": ({"input_ids": 8, "attention_mask": 8, "masked_input_ids": 8}, []),
    "a mask of nothing": ({"attention_mask": 8, "x": 5}, []),
}


@pytest.mark.parametrize("case", TRIMMED)
def test_which_tensors_are_trimmed(case):
    sizes, expected = TRIMMED[case]
    names = list(sizes)
    groups = [{names[i] for i in group.members} for group in token_groups(named(**sizes)) if group.can_trim]
    assert sorted(map(sorted, groups)) == sorted(map(sorted, expected))


@pytest.mark.parametrize(
    ("places", "trimmed"),
    [
        (["query input_ids", "query attention_mask", "document input_ids", "document attention_mask"], 4),
        (["text input_ids", "text attention_mask", "labels"], 3),
        (["text input_ids", "text attention_mask", "features"], 0),
        (["input_ids", "attention_mask", "more token_type_ids"], 3),
        (["query input_ids", "query attention_mask", "document input_ids"], 0),
    ],
    ids=str,
)
def test_a_mask_belongs_to_its_own_dict(places, trimmed):
    groups = token_groups(tuple(LeafInfo(tuple(place.split()), (8,), True) for place in places))
    assert sum(len(group.members) for group in groups if group.can_trim) == trimmed


# ---------------------------------------------------------------------------------------------- what is cut, by cases


def ids(width: int = WIDTH) -> Tensor:
    """No two are the same, in padding neither."""
    return 1000 + torch.arange(4 * width).view(4, width)


def mask(lengths: list[int], width: int = WIDTH, left: bool = False) -> Tensor:
    right = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return right.flip(1) if left else right


def labels(lengths: list[int], width: int = WIDTH) -> Tensor:
    return ids(width).where(mask(lengths, width) != 0, IGNORED)


def side(lengths: list[int]) -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": mask(lengths)}


def cut(batch: Any, budget: int = 2 * WIDTH, **options: Any) -> list[Any]:
    samples = samples_of(batch)
    return [samples.take(part) for part in by_tokens(budget, **options).parts(samples)]


def widths(parts: list[Any], *path: str) -> list[int]:
    found = []
    for part in parts:
        for key in path:
            part = part[key]
        found.append(part.shape[1])
    return found


def test_labels_are_kept_where_the_mask_shows_nothing():
    parts = cut({**side(SHORT), "labels": labels(LONG)})
    assert widths(parts, "labels") == widths(parts, "input_ids") == [7, 6]
    assert sum(int((part["labels"] != IGNORED).sum()) for part in parts) == sum(LONG)


def test_both_sides_of_a_pair_are_trimmed_each_by_its_own_mask():
    sides = {"chosen": SHORT, "rejected": LONG}
    nested = cut({s: side(n) | {"row": torch.arange(4)} for s, n in sides.items()}, 32)
    flat = cut({f"{s}_{name}": leaf for s, n in sides.items() for name, leaf in side(n).items()}, 32)
    assert len(nested) > 1
    for s, lengths in sides.items():
        expected = [max(lengths[row] for row in part[s]["row"]) for part in nested]
        assert widths(nested, s, "input_ids") == widths(flat, f"{s}_attention_mask") == expected


def test_the_budget_counts_all_sequences():
    batch = {"chosen": side(SHORT), "rejected": side(LONG)}
    for budget in (9, 16, 20, 40):
        parts = cut(batch, budget)
        sizes = [sum(part[s]["input_ids"].numel() for s in batch) for part in parts]
        assert all(
            size <= budget or len(part["chosen"]["input_ids"]) == 1 for part, size in zip(parts, sizes, strict=True)
        )
    with pytest.warns(UserWarning, match="sample 0 has 9 tokens, which is above the budget of 8"):
        cut(batch, 8)


def test_labels_of_another_width_count_and_stay():
    parts = cut({**side(SHORT), "labels": labels(LONG, 20)}, 46)
    assert [(tuple(p["input_ids"].shape), tuple(p["labels"].shape)) for p in parts] == [
        ((2, 3), (2, 20)),
        ((2, 2), (2, 20)),
    ]


def test_classes_are_no_tokens():
    for classes in (torch.ones(4, 1).long(), torch.ones(4, 3), torch.ones(4).long()):
        assert len(cut({**side(SHORT), "labels": classes}, 12)) == 1


def test_labels_do_not_tell_what_is_padding():
    """Those of a masked language model: what has none is context."""
    parts = cut({"input_ids": ids(), "labels": labels(SHORT)}, 16)
    assert widths(parts, "input_ids") == widths(parts, "labels") == [WIDTH, WIDTH]


def test_where_nothing_may_be_trimmed_samples_are_as_long_as_they_are_wide():
    for more in ({"features": torch.randn(4, WIDTH)}, {"bias": torch.zeros(4, 1, WIDTH, WIDTH)}):
        parts = cut({**side(SHORT), **more}, 16)
        assert widths(parts, "input_ids") == [WIDTH, WIDTH]
        assert all(part[name].shape[1:] == leaf.shape[1:] for part in parts for name, leaf in more.items())


def test_choices_count_each():
    batch = {"input_ids": torch.ones(4, 3, WIDTH).long(), "attention_mask": torch.ones(4, 3, WIDTH)}
    assert [len(part["input_ids"]) for part in cut(batch, 2 * 3 * WIDTH)] == [2, 2]


@pytest.mark.parametrize(
    "kind",
    [Tensor.long, Tensor.bool, Tensor.float, lambda m: (1 - m.float()) * -1e4, lambda m: m.float().log(), Tensor.numpy],
    ids=["long", "bool", "float", "added", "added, infinite", "array"],
)
def test_every_kind_of_mask(kind):
    batch = {"input_ids": ids(), "attention_mask": kind(mask(LONG)), "labels": labels(LONG)}
    parts = cut(batch, 14)
    assert widths(parts, "attention_mask") == widths(parts, "input_ids") == [7, 6]


def test_a_mask_that_is_to_be_added_and_hides_nothing():
    parts = cut({"input_ids": ids(), "attention_mask": torch.zeros(4, WIDTH)})
    assert widths(parts, "input_ids") == [WIDTH, WIDTH]


def test_weights_of_tokens_are_no_mask_that_is_added():
    weights = torch.where(mask(LONG) != 0, torch.tensor([1.0, -1.0] * 4), 0.0)
    parts = cut({"input_ids": ids(), "loss_mask": weights}, 14, length=lambda batch: LONG)
    assert widths(parts, "loss_mask") == [7, 6]


def test_a_bias_that_is_added_hides_nothing():
    """What counts a little less is shown."""
    bias = -0.1 * torch.arange(float(WIDTH)).expand(4, WIDTH)
    parts = cut({"input_ids": ids(), "attention_mask": bias})
    assert widths(parts, "input_ids") == [WIDTH, WIDTH]
    hidden = torch.where(mask(LONG) != 0, bias, torch.finfo(torch.bfloat16).min)
    assert widths(cut({"input_ids": ids(), "attention_mask": hidden.bfloat16()}, 14), "input_ids") == [7, 6]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_trimmed_tensors_are_in_one_piece(order):
    """As `view()` in losses wants them, whichever samples come together."""
    lengths = [[2, 2, 7, 7][place] for place in order]
    for part in cut(side(lengths), 14):
        assert all(leaf.is_contiguous() for leaf in part.values())


def test_padding_on_the_left_stays():
    parts = cut({"input_ids": ids(), "attention_mask": mask(SHORT, left=True)})
    assert widths(parts, "input_ids") == [WIDTH, WIDTH]


# ----------------------------------------------------------------------------------------------- lengths that were said


@pytest.mark.parametrize(
    ("batch", "said", "message"),
    [
        (side(LONG), SHORT, r"batch\['attention_mask'\] has an entry that is not 0 at position 6"),
        (
            side(SHORT) | {"labels": labels(LONG)},
            SHORT,
            r"batch\['labels'\] has a label that is not -100 at position 6",
        ),
        ({"input_ids": ids(), "labels": labels(LONG)}, SHORT, r"batch\['labels'\] has a label that is not -100"),
        ({"a": side(SHORT), "b": side(LONG)}, SHORT, r"batch\['b'\]\['attention_mask'\] has an entry that is not 0"),
        (side(SHORT) | {"loss_mask": mask(LONG)}, SHORT, r"batch\['loss_mask'\] has an entry that is not 0"),
        ({"input_ids": ids(), "attention_mask": mask(SHORT, left=True)}, SHORT, "sample 0 ends after 2 positions"),
        (side(SHORT) | {"features": torch.randn(4, WIDTH)}, SHORT, r"batch\['features'\] is as wide as the tokens"),
        ({"input_ids": ids(), "attention_mask": torch.ones(4, WIDTH, WIDTH)}, LONG, r"has the shape \(4, 8, 8\)"),
        ({"tokens": ids(), "targets": labels(LONG)}, SHORT, r"batch\['targets'\] has a label that is not -100"),
        ({"tokens": ids(), "seen": mask(LONG).bool()}, SHORT, r"batch\['seen'\] .* holds several values beyond"),
    ],
    ids=[
        "mask",
        "labels",
        "labels alone",
        "another dict",
        "another mask",
        "left",
        "features",
        "3 dimensions",
        "labels of another name",
        "a mask of another name",
    ],
)
def test_what_was_said_to_be_padding_and_is_not(batch, said, message):
    with pytest.raises(BatchError, match=message):
        cut(batch, length=lambda batch: said)


def test_what_was_said_to_be_padding_is_trimmed_off_all_tensors_of_that_width():
    weights = torch.randn(4, WIDTH) * mask(LONG)
    batch = {**side(SHORT), "labels": labels(LONG), "weights": weights, "image": torch.ones(4, 3, WIDTH)}
    parts = cut(batch, 14, length=lambda batch: LONG)
    assert widths(parts, "weights") == widths(parts, "labels") == widths(parts, "attention_mask") == [7, 6]
    assert widths(parts, "image") == [3, 3]
    assert all(torch.equal(part["weights"] != 0, part["labels"] != IGNORED) for part in parts)


def test_labels_and_masks_of_other_names_are_trimmed_too():
    batch = {"tokens": ids(), "targets": labels(SHORT), "hidden": ~mask(LONG).bool()}
    parts = cut(batch, 14, length=lambda batch: LONG)
    assert widths(parts, "tokens") == widths(parts, "targets") == widths(parts, "hidden") == [7, 6]


def test_what_was_said_is_believed_where_no_tensor_is_known_to_be_tokens():
    batch = {"x": torch.randn(4, WIDTH, 3), "y": torch.randn(4, WIDTH), "attention_mask": mask(LONG)}
    parts = cut(batch, 14, length=lambda batch: LONG)
    assert widths(parts, "x") == widths(parts, "y") == widths(parts, "attention_mask") == [7, 6]


def test_what_was_said_holds_for_sides_of_different_widths():
    wide = {"input_ids": ids(20), "attention_mask": mask([9, 5, 6, 8], 20)}
    parts = cut({"a": side(SHORT), "b": wide}, 18, length=lambda batch: [9, 5, 6, 8])
    assert widths(parts, "b", "input_ids") == [9, 6]
    assert widths(parts, "a", "input_ids") == [WIDTH, 6]
    flat = {f"{s}_{name}": leaf for s, b in (("a", side(SHORT)), ("b", wide)) for name, leaf in b.items()}
    assert widths(cut(flat, 18, length=lambda batch: [9, 5, 6, 8]), "a_input_ids") == [WIDTH, 6]


def test_a_mask_that_is_to_be_added_agrees_with_what_was_said():
    parts = cut({"input_ids": ids(), "attention_mask": mask(LONG).float().log()}, 14, length=lambda batch: LONG)
    assert widths(parts, "attention_mask") == [7, 6]


# ---------------------------------------------------------------------------------------------------- lists of samples


def pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    fill = {"labels": IGNORED}
    return {n: pad([torch.as_tensor(s[n]) for s in samples], fill.get(n, 0)) for n in samples[0]}


def rows(samples: list[Any]) -> list[tuple[int, ...]]:
    return samples_of(samples, collate).lengths(None)


def sample(tokens: int, targets: int | None = None, **others: Any) -> dict[str, Any]:
    found = {"input_ids": [1] * tokens, "attention_mask": [1] * tokens}
    return found | ({} if targets is None else {"labels": [5] * targets}) | others


def test_a_sample_of_a_list_has_as_many_tokens_as_all_its_sequences():
    assert rows([sample(3, 3), sample(5, 5)]) == [(3,), (5,)]
    assert rows([sample(3, 10), sample(4, 4)]) == [(3, 10), (4, 4)], "of one length by accident"
    assert rows([{"chosen": sample(3), "rejected": sample(9)}]) == [(3, 9)]
    assert rows([{"q_input_ids": [1, 2], "d_input_ids": [1, 2, 3]}]) == [(2, 3)]
    assert rows([sample(3, decoder_input_ids=[1] * 4, labels=[5] * 4)]) == [(3, 4)]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array], ids=["list", "tensor", "array"])
def test_samples_that_bring_their_padding(kind):
    padded = {"input_ids": kind([1, 2, 3, 4]), "attention_mask": kind([1, 1, 0, 0])}
    assert rows([padded]) == [(2,)]
    assert rows([padded | {"labels": kind([IGNORED, 5, 5, IGNORED])}]) == [(3,)]
    assert rows([padded | {"weights": kind([1, 1, 1, 1])}]) == [(4,)], "it is not trimmed either"
    assert rows([padded | {"attention_mask": kind([0, 0, 0, 0])}]) == [(0,)]


def test_what_collate_makes_is_trimmed_by_the_same_rule():
    batch = [sample(2, 7), sample(3, 5)]

    def wide(some: list[Any]) -> dict[str, Tensor]:
        fill = {"labels": IGNORED}
        more = lambda name, leaf: F.pad(leaf, (0, WIDTH - leaf.shape[1]), value=fill.get(name, 0))  # noqa: E731
        return {name: more(name, leaf) for name, leaf in collate(some).items()}

    samples = samples_of(batch, wide)
    (part,) = [samples.take(part) for part in by_tokens(40).parts(samples)]
    assert {name: tuple(leaf.shape) for name, leaf in part.items()} == dict.fromkeys(part, (2, 7))
    (part,) = [samples.take(part) for part in by_tokens(40, length=lambda sample: 20).parts(samples)]
    assert part["labels"].shape == (2, WIDTH)


# -------------------------------------------------------------------------------------------------------- few shapes


def test_few_shapes_add_what_is_padding_in_every_tensor():
    """The shortest sample by its mask has labels up to the end: its last column is no padding."""
    mask_, labels_ = mask([17, 1, 5, 12], 17), labels([17, 17, 4, 12], 17)
    samples = samples_of({"input_ids": ids(17), "attention_mask": mask_, "labels": labels_})
    (part,) = [samples.take(part) for part in by_tokens(80).parts(samples, few_shapes=True)]
    assert part["labels"].shape == part["attention_mask"].shape == part["input_ids"].shape == (4, 20)
    assert (part["labels"][:, 17:] == IGNORED).all()
    assert (part["attention_mask"][:, 17:] == 0).all()


def test_few_shapes_do_not_touch_what_is_not_known():
    features = torch.randn(4, 17)
    samples = samples_of({"input_ids": ids(17), "attention_mask": mask([17, 1, 5, 12], 17), "features": features})
    (part,) = [samples.take(part) for part in by_tokens(80).parts(samples, few_shapes=True)]
    assert torch.equal(part["features"], features)
    assert part["input_ids"].shape == (4, 17)


def test_few_shapes_of_pairs_have_one_width_each():
    samples = samples_of({"chosen": side(SHORT), "rejected": side(LONG)})
    (part,) = [samples.take(part) for part in by_tokens(2 * 4 * 16).parts(samples, few_shapes=True)]
    assert part["rejected"]["input_ids"].shape == (4, 16)
    assert part["chosen"]["input_ids"].shape == (4, 16)


# ----------------------------------------------------------------------------------------------- what is said about it


def test_what_is_not_trimmed_is_said_once(caplog):
    policy = by_tokens(16)
    for batch in (side(LONG), {**side(LONG), "features": ids()}, {**side(LONG), "features": ids()}):
        policy.parts(samples_of(batch))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "batch['features'] may or may not have a column for each position" in caplog.text
    by_tokens(16).parts(samples_of({"input_ids": ids(), "labels": labels(LONG)}))
    assert "without an attention_mask the tokens there may not be padding" in caplog.text


def test_where_there_is_no_padding_nothing_is_said(caplog):
    full = [WIDTH] * 4
    for batch in ({**side(full), "features": ids()}, {"input_ids": ids(), "labels": labels(full)}):
        by_tokens(16).parts(samples_of(batch))
    assert not caplog.records


# --------------------------------------------------------------------------------------------------- for every batch


@dataclass
class Made:
    """A batch of which it is known what is padding: for each tensor, by its path."""

    samples: int
    tensors: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    padding: dict[tuple[str, ...], Tensor] = field(default_factory=dict)  # True where it is
    together: list[list[tuple[str, ...]]] = field(default_factory=list)  # tensors with the same positions
    tokens: list[tuple[str, ...]] = field(default_factory=list)  # one of each sequence

    def add(self, path: tuple[str, ...], tensor: Tensor, padding: Tensor | None = None) -> None:
        self.tensors[path] = tensor
        hidden = torch.zeros(tensor.shape[:2], dtype=torch.bool) if padding is None else padding
        self.padding[path] = hidden

    @property
    def batch(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"row": torch.arange(self.samples), "text": [f"text {i}" for i in range(self.samples)]}
        for path, tensor in self.tensors.items():
            inner = tree
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = tensor
        return tree


KINDS_OF_MASKS: list[Callable[[Tensor], Tensor]] = [Tensor.long, Tensor.bool, Tensor.float, lambda m: m.float().log()]
ENCODER_DECODER = [("",), ("decoder_",)]
SIDES = [[("",)], [("chosen_",), ("rejected_",)], [("query", ""), ("document", "")], ENCODER_DECODER]


@st.composite
def made(draw: st.DrawFn) -> Made:
    """Tokens of one or two sides, with and without masks and labels, beside features of any width."""
    n = draw(st.integers(1, 6))
    common = draw(st.integers(1, 9))
    found, number = Made(n), 1000
    pick = lambda *of: draw(st.sampled_from(of))  # noqa: E731

    def unique(*shape: int) -> Tensor:
        nonlocal number
        tensor = number + torch.arange(torch.Size(shape).numel()).view(shape)
        number += tensor.numel()
        return tensor

    sides = draw(st.sampled_from(SIDES))
    for *container, affix in sides:
        place = lambda name, container=tuple(container), affix=affix: (*container, affix + name)  # noqa: E731
        width = pick(common, common, draw(st.integers(1, 9)))
        ends = torch.tensor(draw(st.lists(st.integers(0, width), min_size=n, max_size=n)))
        hidden = torch.arange(width) >= ends[:, None]
        if draw(st.booleans()) and draw(st.booleans()):
            hidden = hidden.flip(1)
        aligned = [place("input_ids")]
        found.add(aligned[0], unique(n, width), hidden)
        found.tokens.append(aligned[0])
        if masked := pick(True, True, True, False):
            aligned.append(place("attention_mask"))
            found.add(aligned[-1], pick(*KINDS_OF_MASKS)(~hidden), hidden)
        for name in ("token_type_ids", "position_ids", "hidden"):
            if pick(True, False, False):
                aligned.append(place(name))
                shape = (n, width, draw(st.integers(1, 9))) if name == "hidden" else (n, width)
                found.add(aligned[-1], unique(*shape), hidden)
        kind = pick("none", "aligned", "masked", "beyond", "own width")
        if sides == ENCODER_DECODER:  # whose labels are the decoder's
            place = lambda name: (name,)  # noqa: E731
            kind = "none" if not affix else kind
        if kind != "none":
            own = width if kind != "own width" else draw(st.integers(2, 9))
            targets = unique(n, own)
            if kind == "aligned":
                targets = targets.where(~hidden, IGNORED)
            elif kind == "masked":
                targets = targets.where(torch.arange(own) % 3 == 1, IGNORED)  # a few of all tokens have a label
                targets = targets.where(~hidden, IGNORED) if masked else targets
            found.add(place("labels"), targets, hidden & (targets == IGNORED) if kind != "own width" else None)
            aligned += [place("labels")] if kind in ("aligned", "masked") else []
        found.together.append(aligned)
    for name in ("features", "scores"):
        if pick(True, False, False):
            found.add((name,), unique(n, pick(common, draw(st.integers(1, 9))), *pick((), (), (common,), (3,))))
    return found


def check(given: Made, parts: list[Any], budget: int | None = None) -> None:
    """Every sample is there once; of its tensors nothing is missing but padding, and nothing is added but padding."""
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(given.samples))
    for part in parts:
        rows = part["row"]
        assert part["text"] == [f"text {row}" for row in rows]

        def at(path: tuple[str, ...], part: Any = part) -> Tensor:
            for key in path:
                part = part[key]
            return part

        for path, tensor in given.tensors.items():
            own, width = at(path), min(at(path).shape[1], tensor.shape[1])
            assert torch.equal(own[:, :width], tensor[rows][:, :width]), path
            assert given.padding[path][rows][:, width:].all(), f"{path} has lost what is no padding"
            added = own[:, width:]
            if path[-1].endswith("labels"):
                assert (added == IGNORED).all()
            if path[-1].endswith("attention_mask"):
                assert (added == (-torch.inf if (tensor < 0).any() else 0)).all()
        for aligned in given.together:
            assert len({at(path).shape[1] for path in aligned}) == 1, "what belongs together has one width"
        if budget is not None and len(rows) > 1:
            assert sum(at(path).numel() for path in given.tokens) <= budget


@at_length
@given(made(), st.integers(1, 80), st.booleans())
@pytest.mark.filterwarnings("ignore:sample .* above the budget")
def test_every_element_is_there_once_and_what_is_trimmed_is_padding(given, budget, few_shapes):
    samples = samples_of(given.batch)
    check(given, [samples.take(part) for part in by_count(1 + budget % 4).parts(samples)])
    if not any(path[-1].endswith(("attention_mask", "labels")) for path in given.tensors):
        with pytest.raises(BatchError, match="neither an attention_mask nor labels"):
            by_tokens(budget).parts(samples)
        return
    parts = by_tokens(budget).parts(samples, few_shapes=few_shapes)
    check(given, [samples.take(part) for part in parts], budget)


@at_length
@given(made(), st.integers(1, 80), st.lists(st.integers(0, 9), min_size=6, max_size=6), st.booleans())
@pytest.mark.filterwarnings("ignore:sample .* above the budget")
def test_lengths_that_were_said_cut_nothing_but_padding_or_raise(given, budget, said, few_shapes):
    samples = samples_of(given.batch)
    try:
        parts = by_tokens(budget, length=lambda batch: said[: given.samples]).parts(samples, few_shapes=few_shapes)
    except BatchError:
        return
    for part in [samples.take(part) for part in parts]:
        for path, tensor in given.tensors.items():
            own = part
            for key in path:
                own = own[key]
            lost = tensor[part["row"]][:, own.shape[1] :]
            if path[-1].endswith("labels"):
                assert (lost == IGNORED).all()
            if path[-1].endswith("attention_mask"):
                assert given.padding[path][part["row"]][:, own.shape[1] :].all()
