"""A batch of any kind is sliced by a plan, without copies, and loses nothing but padding."""

import math
import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import BatchEncoding

from macrobatch import MacroStep, by_count, by_tokens
from macrobatch._cut.plans import rounded_up
from macrobatch._cut.samples import samples_of
from macrobatch._cut.trees import leaves
from macrobatch.errors import BatchError, UsageError

quickly = settings(max_examples=100, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------------------- kinds of batches


class Pair(NamedTuple):
    x: Any
    along: Any


@dataclass
class Plain:
    x: Any
    along: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    along: Any


@dataclass(slots=True)
class Slotted:
    x: Any
    along: Any


@dataclass(frozen=True, slots=True)
class Both:
    x: Any
    along: Any


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, along: {"x": x, "along": along},
    "OrderedDict": lambda x, along: OrderedDict(x=x, along=along),
    "defaultdict": lambda x, along: defaultdict(list, x=x, along=along),
    "UserDict": lambda x, along: UserDict(x=x, along=along),
    "BatchEncoding": lambda x, along: BatchEncoding({"x": x, "along": along}, n_sequences=1),
    "list": lambda x, along: [x, along],
    "tuple": lambda x, along: (x, along),
    "namedtuple": Pair,
    "dataclass": Plain,
    "frozen": Frozen,
    "slots": Slotted,
    "frozen slots": Both,
}
ALONG = [torch.tensor(3.0), np.float32(3), "a string", b"bytes", None, 7, 1.5, True, {}, {1, 2}, len]
kinds = pytest.mark.parametrize("kind", KINDS)


def parts(batch: Any, how: Any = None, collate: Any = None) -> list[Any]:
    samples = samples_of(batch, collate)
    return [samples.take(part) for part in (how or by_count(2)).parts(samples)]


def x_of(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list | tuple) else batch["x"] if hasattr(batch, "keys") else batch.x


def along_of(batch: Any) -> Any:
    return batch[1] if isinstance(batch, list | tuple) else batch["along"] if hasattr(batch, "keys") else batch.along


def shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@kinds
def test_every_kind_of_batch_is_cut_into_its_own_kind(kind):
    x = torch.arange(15.0).view(5, 3)
    batch = KINDS[kind](x, None)
    cut = parts(batch)
    assert [type(part) for part in cut] == [type(batch)] * 3
    assert [len(x_of(part)) for part in cut] == [2, 2, 1]
    assert torch.equal(torch.cat([x_of(part) for part in cut]), x)
    assert x_of(batch) is x, "the batch itself stays as it is"


@kinds
@pytest.mark.parametrize("along", ALONG, ids=lambda along: type(along).__name__)
def test_what_has_no_samples_goes_along_whole(kind, along):
    for part in parts(KINDS[kind](torch.ones(5, 3), along)):
        assert along_of(part) is along or along_of(part) == along == {}


@kinds
@pytest.mark.parametrize("inner", KINDS)
def test_kinds_within_kinds(kind, inner):
    x, y = torch.arange(5), torch.arange(10).view(5, 2)
    cut = parts(KINDS[kind](x, KINDS[inner](y, "whole")))
    assert torch.equal(torch.cat([x_of(part) for part in cut]), x)
    assert torch.equal(torch.cat([x_of(along_of(part)) for part in cut]), y)
    assert all(type(along_of(part)) is type(KINDS[inner](y, "whole")) for part in cut)
    assert all(along_of(along_of(part)) == "whole" for part in cut)


def test_a_mapping_that_cannot_be_changed():
    cut = parts(MappingProxyType({"x": torch.arange(5), "along": 1}))
    assert [part["x"].tolist() for part in cut] == [[0, 1], [2, 3], [4]]
    assert all(part["along"] == 1 for part in cut)


def test_a_bare_tensor():
    assert [part.tolist() for part in parts(torch.arange(5))] == [[0, 1], [2, 3], [4]]


def test_what_a_mapping_carries_besides_its_items_stays():
    encoding = BatchEncoding({"input_ids": torch.ones(4, 3)}, n_sequences=1)
    assert all(part.n_sequences == 1 and part.input_ids.shape == (2, 3) for part in parts(encoding))


@kinds
def test_samples_that_lie_together_are_not_copied(kind):
    x = torch.arange(15.0).view(5, 3)
    cut = [x_of(part) for part in parts(KINDS[kind](x, None))]
    assert all(shares(part, x) for part in cut)
    cut[1][0, 0] = -1
    assert x[2, 0] == -1


def test_arrays_are_cut_like_tensors():
    x = np.arange(15).reshape(5, 3)
    cut = parts({"x": x, "y": torch.arange(5)})
    assert all(isinstance(part["x"], np.ndarray) and np.shares_memory(part["x"], x) for part in cut)
    assert np.array_equal(np.concatenate([part["x"] for part in cut]), x)
    assert [part["y"].tolist() for part in cut] == [[0, 1], [2, 3], [4]]


# -------------------------------------------------------------------------------------------- lists, an entry a sample


class Names(list):
    pass


class Fixed(tuple):
    pass


ENTRIES: dict[str, list[Any]] = {
    "texts": ["a", "b", "c", "d", "e"],
    "numbers": [1, 2.5, True, 4, 5],
    "nothing": [None, None, "c", None, b"e"],
    "objects": [len, {1}, object(), range(3), "e"],
    "scalars": [torch.tensor(float(i)) for i in range(5)],
    "dicts": [{"id": i, "tags": ["x"] * i} for i in range(5)],
    "lists of any length": [["a"], [], ["b", "c"], ["d"] * 5, ["e"]],
}


@kinds
@pytest.mark.parametrize("entries", ENTRIES)
def test_a_list_with_an_entry_for_each_sample_is_cut_like_a_tensor(kind, entries):
    for container in (list, tuple, Names, Fixed):
        found = [along_of(part) for part in parts(KINDS[kind](torch.ones(5, 3), container(ENTRIES[entries])))]
        assert [type(part) for part in found] == [container] * 3
        assert list(map(list, found)) == [ENTRIES[entries][:2], ENTRIES[entries][2:4], ENTRIES[entries][4:]]


def test_entries_go_with_their_samples_wherever_those_are():
    batch = tokens([2, 7, 3, 6], 8, text=["a", "b", "c", "d"], deeper={"ids": (1, 2, 3, 4)})
    first, second = parts(batch, by_tokens(14))
    assert (first["text"], first["deeper"]) == (["b", "d"], {"ids": (2, 4)})
    assert (second["text"], second["deeper"]) == (["a", "c"], {"ids": (1, 3)})


def test_lists_of_texts_as_default_collate_makes_them():
    samples = [{"x": torch.ones(2), "text": f"t{i}", "pair": (f"a{i}", f"b{i}"), "n": i} for i in range(4)]
    for count in (2, 3, 4):  # with two samples, as many as there are in a pair
        batch = default_collate(samples[:count])
        cut = parts(batch, by_count(1))
        assert [part["text"] for part in cut] == [[f"t{i}"] for i in range(count)]
        assert [list(map(list, part["pair"])) for part in cut] == [[[f"a{i}"], [f"b{i}"]] for i in range(count)]


@pytest.mark.parametrize(
    "along",
    [
        ["a"] * 4,
        ("a",) * 6,
        [],
        ["a", ["b"]],
        "abcde",
        b"abcde",
        torch.Size([5, 1, 1, 1, 1]),
        {"a", "b", "c", "d", "e"},
    ],
    ids=lambda along: f"{type(along).__name__} of {len(along)}",
)
def test_what_is_no_list_with_an_entry_for_each_sample_goes_along_whole(along):
    for part in parts({"x": torch.ones(5, 3), "along": along}):
        assert part["along"] == along
        assert type(part["along"]) is type(along)


def test_lists_of_tensors_are_containers_however_long():
    x = torch.arange(4).view(2, 2)
    for batch in ([x, x + 4], (x, x + 4), [{"x": x}, {"x": x + 4}], {"x": [x, "whole"]}):
        cut = parts(batch, by_count(1))
        assert all(leaf.shape == (1, 2) for part in cut for _, leaf in leaves(part, "") if isinstance(leaf, Tensor))
        assert [type(part) for part in cut] == [type(batch)] * 2


def three_views(samples, views=3):
    return {"x": torch.ones(samples, 2), "views": [torch.randn(samples, 4) for _ in range(views)]}


@pytest.mark.parametrize(
    "batch",
    [
        three_views(3),
        {"x": torch.ones(3, 2), "boxes": [{"at": torch.ones(3, 4), "text": "a"} for _ in range(3)]},
        {"inner": {"images": [torch.ones(3, 5, 5), torch.ones(3, 6, 5), torch.ones(3, 5, 6)]}},
    ],
    ids=["views", "boxes", "images"],
)
def test_lists_that_may_have_a_tensor_for_each_sample(batch):
    """Cut inside each tensor, every micro-batch would have all images, with one channel each."""
    with pytest.raises(
        BatchError, match=r"a list of 3 tensors with 3 rows each.*collate=.*a tuple in place of the list"
    ):
        parts(batch, by_count(1))


def test_lists_that_are_parts_of_the_batch():
    pair = {"x": torch.ones(2, 2), "pair": [torch.ones(2, 4), torch.ones(2, 4)]}
    unlike = {"x": torch.ones(3, 2), "parts": [torch.ones(3, 4), torch.ones(3).long(), torch.ones(3, 4)]}
    as_tuple = three_views(3) | {"views": tuple(three_views(3)["views"])}
    for batch in (pair, unlike, as_tuple, three_views(4)):
        assert all(len(leaf) == 1 for part in parts(batch, by_count(1)) for _, leaf in leaves(part, ""))


def test_a_list_that_was_of_another_length_is_part_of_the_batch():
    """As in the last batch of an epoch, which is short."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = MacroStep(model, optimizer, lambda model, batch: sum(map(model, batch["views"])).mean(), micro=1)
    train(three_views(5))
    assert train(three_views(3)).micro_batches == 3


def test_arrays_of_objects_are_cut():
    texts = np.array(["a", None, "c", {}, "e"], dtype=object)
    assert [part["t"].tolist() for part in parts({"x": torch.ones(5), "t": texts})] == [["a", None], ["c", {}], ["e"]]
    cut = parts(tokens([2, 7, 3, 6, 1], 8, text=texts), by_tokens(14))
    assert sorted(str(text) for part in cut for text in part["text"]) == sorted(map(str, texts))


def test_columns_of_pandas_are_cut_by_their_places():
    pandas = pytest.importorskip("pandas")
    column = pandas.Series(["a", "b", "c", "d"], index=[3, 2, 1, 0])
    cut = parts(tokens([2, 7, 3, 6], 8, text=column), by_tokens(14))
    assert [list(part["text"]) for part in cut] == [["b", "d"], ["a", "c"]]


# ----------------------------------------------------------------------------------------------------- unusual tensors


def test_sparse_tensors_are_cut():
    x = torch.eye(5).to_sparse()
    assert torch.equal(torch.cat([part["x"].to_dense() for part in parts({"x": x})]), torch.eye(5))


def test_views_of_any_strides_are_cut():
    for x in (torch.arange(15).view(3, 5).T, torch.arange(3).expand(5, 3), torch.arange(30).view(10, 3)[::2]):
        assert torch.equal(torch.cat([part["x"] for part in parts({"x": x})]), x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.utils.rnn.pack_sequence([torch.ones(2, 1)]), r"batch\['x'\] is a packed sequence"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        (lambda: torch.eye(2).to_sparse_csr(), r"tensor of layout torch\.sparse_csr"),
    ],
    ids=["packed", "jagged", "nested", "CSR"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_tensors_that_cannot_be_cut(make, message):
    for batch in ({"x": make()}, {"y": torch.ones(2), "x": make()}):
        with pytest.raises(BatchError, match=f"{message}.*collate="):
            samples_of(batch)


def test_fields_that_were_never_set_stay_so():
    @dataclass
    class Lazy:
        x: Tensor
        y: Tensor = field(init=False)

    assert [part.x.tolist() for part in parts(Lazy(torch.arange(3)))] == [[0, 1], [2]]


# ------------------------------------------------------------------------------------------------------------- lengths


def tokens(lengths: Sequence[int], width: int | None = None, **others: Any) -> dict[str, Any]:
    """Token ids that say which sample and which position they are, 0 where there is padding; and a mask."""
    width = max(lengths) if width is None else width
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = 100 * (1 + torch.arange(len(lengths)))[:, None] + torch.arange(width)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), **others}


def shown(batches: Sequence[dict[str, Any]]) -> list[int]:
    return sorted(i for batch in batches for i in batch["input_ids"][batch["attention_mask"] != 0].tolist())


@quickly
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(9, 40), st.integers(0, 5))
def test_nothing_but_padding_is_trimmed_off(lengths, budget, spare):
    batch = tokens(lengths, max(lengths) + spare + 1)
    cut = parts(batch, by_tokens(budget))
    assert shown(cut) == shown([batch])
    assert sum(len(part["input_ids"]) for part in cut) == len(lengths)
    for part in cut:
        assert part["input_ids"].shape == part["attention_mask"].shape
        assert part["input_ids"].numel() <= budget
        assert part["input_ids"].shape[1] == max(int(part["attention_mask"].sum(1).max()), 1)


def test_what_belongs_to_the_mask_is_trimmed_and_nothing_else():
    batch = tokens([2, 7, 3, 6], 8)
    batch |= {
        "labels": batch["input_ids"].where(batch["attention_mask"] != 0, -100),
        "inputs_embeds": torch.ones(4, 8, 5),
        "image": torch.ones(4, 6),
        "y": torch.ones(4),
    }
    first, second = parts(batch, by_tokens(14))
    shapes = [{name: tuple(leaf.shape) for name, leaf in part.items()} for part in (first, second)]
    for shape, width in zip(shapes, (7, 3), strict=True):
        positions = dict.fromkeys(("input_ids", "attention_mask", "labels"), (2, width))
        assert shape == positions | {"inputs_embeds": (2, width, 5), "image": (2, 6), "y": (2,)}


def test_samples_that_lie_together_are_copied_only_where_they_are_trimmed():
    batch = tokens([8, 6, 2, 3], 8, image=torch.ones(4, 6))
    first, second = parts(batch, by_tokens(16))
    assert shares(first["image"], batch["image"])
    assert all(leaf.is_contiguous() for part in (first, second) for leaf in part.values())


def test_samples_that_lie_apart_keep_their_order_and_their_rows_together():
    batch = tokens([2, 7, 3, 6], note=np.arange(4))
    first, second = parts(batch, by_tokens(14))
    assert first["input_ids"][:, 0].tolist() == [200, 400]
    assert second["input_ids"][:, 0].tolist() == [100, 300]
    assert [part["note"].tolist() for part in (first, second)] == [[1, 3], [0, 2]]


NAMED = {
    "labels": torch.where(tokens([4, 3, 2, 1])["attention_mask"] != 0, 5, -100),
    "attention_mask": tokens([1, 2, 3, 4])["attention_mask"],
}


def lengths(batch: Any, length: Any = None) -> list[int]:
    return [sum(row) for row in samples_of(batch).lengths(length)]


def said(batch: Any) -> list[int]:
    return [4, 3, 3, 4]


@pytest.mark.parametrize(
    ("names", "length", "expected"),
    [
        (["attention_mask"], said, [4, 3, 3, 4]),
        (["attention_mask"], None, [1, 2, 3, 4]),
        (["labels"], said, [4, 3, 3, 4]),
        (["labels", "attention_mask"], None, [4, 3, 3, 4]),
        (["labels"], None, [4, 4, 4, 4]),  # which do not tell what is padding
    ],
    ids=["said", "masked", "said of labels", "masked and labelled", "labelled"],
)
def test_lengths_are_said_or_shown(names, length, expected):
    batch = {"x": torch.arange(16).view(4, 4)} | {name: NAMED[name] for name in names}
    assert lengths(batch, length and (lambda batch: expected)) == expected


@pytest.mark.parametrize(
    "wrap",
    [torch.tensor, lambda n: torch.tensor(n).float(), np.array, list, tuple, lambda n: [torch.tensor(i) for i in n]],
    ids=["tensor", "floats", "array", "list", "tuple", "list of tensors"],
)
def test_lengths_may_be_said_in_many_ways(wrap):
    batch = {"x": torch.arange(12).view(3, 4)}
    cut = parts(batch, by_tokens(4, length=lambda b: wrap([4, 1, 2])))
    assert [part["x"].tolist() for part in cut] == [[[0, 1, 2, 3]], [[4, 5], [8, 9]]]


def test_labels_and_masks_in_dataclasses_and_deeper_down():
    @dataclass
    class Batch:
        input_ids: Tensor
        attention_mask: Tensor
        labels: Tensor

    ids, mask = tokens([4, 1, 2]).values()
    labels = torch.where(mask != 0, 5, -100)
    batches = [Batch(ids, mask, labels), {"a": [None, {"input_ids": ids, "attention_mask": mask}], "labels": labels}]
    for batch in batches:
        assert lengths(batch) == [4, 1, 2]
    assert parts(batches[0], by_tokens(4))[1].input_ids.shape == (2, 2)
    assert parts(batches[1], by_tokens(4))[1]["labels"].shape == (2, 2)


def test_padding_on_the_left_is_no_reason_to_lose_a_token():
    batch = {name: leaf.flip(1) for name, leaf in tokens([2, 5, 3]).items()}
    assert shown(parts(batch, by_tokens(5))) == shown([batch])


# ---------------------------------------------------------------------------------------------------------- few shapes


def parts_of_few_shapes(batch: Any, budget: int) -> list[Any]:
    samples = samples_of(batch)
    return [samples.take(part) for part in by_tokens(budget).parts(samples, few_shapes=True)]


def test_few_shapes_pad_as_the_batch_does():
    """Wider than the batch is: with what it has itself in its padding."""
    ids = torch.tensor([[5] * 17, [6, 6, 6, *[9] * 14]])  # 9 is padding
    mask = torch.tensor([[1] * 17, [1, 1, 1, *[0] * 14]])
    hidden = torch.stack([torch.ones(17, 2), torch.cat([torch.ones(3, 2), torch.full((14, 2), 7.0)])])
    batch = {"input_ids": ids, "attention_mask": mask, "inputs_embeds": hidden, "id": mask[:, 0]}
    (taken,) = parts_of_few_shapes(batch, 64)
    assert taken["input_ids"].tolist() == [[5] * 17 + [9] * 3, [6] * 3 + [9] * 17]
    assert taken["attention_mask"].sum(1).tolist() == [17, 3]
    assert taken["inputs_embeds"].shape == (2, 20, 2)
    assert taken["inputs_embeds"][0, 17:].unique().tolist() == [7.0]
    assert taken["id"].shape == (2,)


def test_few_shapes_of_a_batch_without_padding_stay_as_they_are():
    ids = torch.ones(4, 17).long()
    taken = parts_of_few_shapes({"input_ids": ids, "attention_mask": ids}, 34)
    assert [tuple(part["input_ids"].shape) for part in taken] == [(1, 17)] * 4


def test_few_shapes_of_listed_samples_are_as_collate_pads_them():
    def collate(samples: list[list[int]]) -> dict[str, Tensor]:
        width = rounded_up(max(map(len, samples)))
        return {"attention_mask": torch.tensor([[*sample, *[0] * (width - len(sample))] for sample in samples])}

    samples = samples_of([[1] * n for n in (30, 9, 4, 2, 17, 8, 3)], collate)
    parts = by_tokens(64).parts(samples, few_shapes=True)
    assert [tuple(samples.take(part)["attention_mask"].shape) for part in parts] == [(2, 32), (4, 16), (1, 16)]


# ---------------------------------------------------------------------------------------------------- lists of samples


def pad(samples: list[list[int]]) -> Tensor:
    longest = max(map(len, samples))
    return torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])


@quickly
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 40))
def test_a_list_of_samples_is_collated_by_micro_batches(lengths, budget):
    batch = [[i + 1] * n for i, n in enumerate(lengths)]
    cut = parts(batch, by_tokens(budget, length=len), collate=pad)
    assert sorted(i for part in cut for i in part[:, 0].tolist()) == list(range(1, len(lengths) + 1))
    assert all(part.numel() <= budget for part in cut)
    assert torch.cat([pad([s]).flatten() for s in batch]).sum() == sum(part.sum() for part in cut)


def test_lists_of_samples_by_count_keep_their_order():
    assert parts(["a", "b", "c"], collate="".join) == ["ab", "c"]
    assert parts(("a", "b", "c"), by_count(3), collate="".join) == ["abc"]


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ([5, 6, 7], 3),
        (torch.ones(3), 3),
        (np.ones(3), 3),
        ({"input_ids": [5, 6, 7]}, 3),
        ({"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, 3),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, 3),
        ({"input_ids": torch.ones(3), "labels": torch.tensor(0)}, 3),  # a class, which has no length
        ({"input_ids": [5, 6, 7], "labels": 1}, 3),
        (BatchEncoding({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}), 3),
    ],
    ids=str,
)
def test_the_length_of_a_sample(sample, expected):
    assert samples_of([sample], list).lengths(None) == [(expected,)]


def test_samples_that_bring_their_padding_keep_the_budget_too():
    batch = tokens([2, 7, 3, 6], 8)
    samples = [{name: leaf[i] for name, leaf in batch.items()} for i in range(4)]
    cut = parts(samples, by_tokens(14), collate=default_collate)
    assert shown(cut) == shown([batch])
    assert all(part["input_ids"].numel() <= 14 for part in cut)


def padded_to(width: int, *, left: bool) -> Callable[[list[Any]], Any]:
    def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        rows = [sample["input_ids"] for sample in samples]
        rows = [[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in rows]
        return {"input_ids": torch.tensor(rows), "attention_mask": (torch.tensor(rows) != 0).long()}

    return collate


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_no_token_is_lost_wherever_collate_puts_the_padding(left):
    samples = [{"input_ids": [10 * i + j for j in range(1, n + 1)]} for i, n in enumerate((5, 3, 2, 4))]
    samples = [sample | {"attention_mask": [1] * len(sample["input_ids"])} for sample in samples]
    cut = parts(samples, by_tokens(10), collate=padded_to(8, left=left))
    assert shown(cut) == sorted(i for sample in samples for i in sample["input_ids"])


def test_no_token_is_lost_that_collate_adds():
    def collate(samples: list[list[int]]) -> dict[str, Tensor]:
        ids = pad([[*sample, 99] for sample in samples])  # an end of text
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    assert shown(parts([[1, 2, 3], [4, 5]], by_tokens(6), collate)) == [1, 2, 3, 4, 5, 99, 99]


def test_collate_may_make_anything_of_samples():
    def packed(samples: list[list[int]]) -> dict[str, Tensor]:
        flat, ends = [i for sample in samples for i in sample], torch.tensor([0, *map(len, samples)]).cumsum(0)
        return {"flat": torch.tensor(flat), "ends": ends}

    assert [part["flat"].tolist() for part in parts([[1, 2], [3]], by_tokens(4), packed)] == [[1, 2, 3]]
    assert parts([[1, 2], [3]], by_tokens(4), collate=str) == ["[[1, 2], [3]]"]


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("batch", "paths"),
    [
        ({"x": torch.ones(4, 2), "y": torch.ones(3)}, [r"batch\['x'\] has 4", r"batch\['y'\] has 3"]),
        (Plain(torch.ones(4), [torch.ones(4), torch.ones(5)]), [r"batch\.x has 4", r"batch\.along\[1\] has 5"]),
        ((torch.ones(4), {"a": np.ones((2, 2))}), [r"batch\[0\] has 4", r"batch\[1\]\['a'\] has 2"]),
        (Pair(torch.ones(4), UserDict(a=torch.ones(1))), [r"batch\.x has 4", r"batch\.along\['a'\] has 1"]),
    ],
    ids=["dict", "dataclass", "tuple", "namedtuple"],
)
def test_leaves_of_different_lengths_are_named_by_their_path(batch, paths):
    with pytest.raises(BatchError, match=r".*".join(paths)):
        samples_of(batch)


@pytest.mark.parametrize("batch", [{}, [], 5, "text", {"x": None}, torch.tensor(1.0), [[], {}]], ids=str)
def test_a_batch_without_tensors(batch):
    with pytest.raises(BatchError, match=r"no tensor that could be cut.*collate"):
        samples_of(batch)


@pytest.mark.parametrize("batch", [{"x": torch.ones(3)}, torch.ones(3), "text", 5], ids=lambda b: type(b).__name__)
def test_collate_wants_a_list(batch):
    with pytest.raises(BatchError, match=f"list of samples: got {type(batch).__name__}"):
        samples_of(batch, default_collate)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4", None, torch.tensor(4)], ids=repr)
@pytest.mark.parametrize("how", [by_count, by_tokens])
def test_sizes_must_be_whole_numbers(how, wrong):
    with pytest.raises(UsageError, match=r"whole number.*got"):
        how(wrong)


def test_arguments_of_by_tokens():
    with pytest.raises(UsageError, match=r"length must be a function.*got 5"):
        by_tokens(4, length=5)
    with pytest.raises(UsageError, match=r'oversize must be "warn" or "raise": got \'ignore\''):
        by_tokens(4, oversize="ignore")


@pytest.mark.parametrize(
    "said",
    [
        [1, 2],
        [1, 2, 3, 4],
        [1, 2, -1],
        [1, 2, 1.5],
        torch.tensor([1, 2, math.nan]),
        torch.tensor([1, 2, math.inf]),
        ["a", "b", "c"],
        None,
        3,
        torch.ones(3, 2),
    ],
    ids=str,
)
def test_what_is_no_length_of_the_samples(said):
    batch = {"x": torch.ones(3, 4)}
    with pytest.raises(BatchError, match="length"):
        parts(batch, by_tokens(8, length=lambda batch: said))


@pytest.mark.parametrize("said", [-1, 1.5, math.nan, math.inf, "a", None], ids=repr)
def test_what_is_no_length_of_a_sample(said):
    with pytest.raises(BatchError, match=r"length of a sample must be a whole number.*sample 0 has"):
        parts(["a"], by_tokens(8, length=lambda sample: said), collate=list)


def test_lengths_that_nobody_can_tell():
    with pytest.raises(BatchError, match=r"neither an attention_mask nor labels.*length="):
        parts({"x": torch.ones(3, 4)}, by_tokens(8))
    with pytest.raises(BatchError, match=r"length of a sample of type str.*length="):
        parts(["a"], by_tokens(8), collate=list)


def test_a_dimension_of_positions_that_nobody_can_tell():
    batch = {"x": torch.ones(3, 4), "z": torch.ones(3, 5)}
    with pytest.raises(BatchError, match=r"which dimension holds the positions.*batch\['x'\].*attention_mask"):
        parts(batch, by_tokens(8, length=lambda batch: [4, 4, 4]))


def test_lengths_beyond_every_tensor():
    with pytest.raises(BatchError, match=r"sample 1 has 5 positions, but no tensor .* wider than 4: .*'x'"):
        parts({"x": torch.ones(3, 4)}, by_tokens(8, length=lambda batch: [4, 5, 4]))


@pytest.mark.parametrize("collate", [None, lambda batch: {"input_ids": pad([sample["input_ids"] for sample in batch])}])
def test_a_sample_above_the_budget_is_alone_and_warned_of(collate):
    batch = tokens([2, 9, 3])
    if collate is not None:
        batch = [{"input_ids": [1] * length} for length in (2, 9, 3)]
    with pytest.warns(UserWarning, match=r"sample 1 has 9 tokens.*budget of 6.*of its own"):
        cut = parts(batch, by_tokens(6), collate)
    assert [tuple(part["input_ids"].shape) for part in cut] == [(1, 9), (2, 3)]
    with pytest.raises(BatchError, match=r"sample 1 has 9 tokens.*budget of 6.*Truncate"):
        parts(batch, by_tokens(6, oversize="raise"), collate)


def test_samples_above_the_budget_are_warned_of_once_and_again_only_of_a_larger_one():
    policy = by_tokens(6)
    for lengths, warned in (([2, 9], True), ([9, 2], False), ([8, 9], False), ([3, 12], True), ([12, 10], False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parts(tokens(lengths), policy)
        assert [f"has {max(lengths)} tokens" in str(one.message) for one in caught] == [True] * warned
    with pytest.warns(UserWarning, match="has 9 tokens"):
        parts(tokens([2, 9]), by_tokens(6))


def test_a_batch_of_no_samples_has_no_parts():
    assert parts(None) == parts([], collate=default_collate) == parts({"x": torch.ones(0, 3)}) == []
    assert parts(tokens([1])["attention_mask"][:0], by_tokens(4, length=lambda batch: [])) == []
    assert parts({"attention_mask": torch.ones(0, 3)}, by_tokens(4)) == []
