"""Several batches as one."""

from collections import UserDict
from typing import NamedTuple

import pytest
import torch

from macrobatch._cut.joining import joined, narrowed
from macrobatch.errors import BatchError

LABELS = {"labels": -100, "input_ids": 9}


class Pair(NamedTuple):
    x: torch.Tensor
    rest: dict


def test_any_nesting():
    one = Pair(torch.ones(2, 3), {"text": ["a", "b"], "beta": 0.1, "y": [torch.zeros(2), torch.ones(2)]})
    two = Pair(torch.zeros(1, 3), {"text": ["c"], "beta": 0.1, "y": [torch.ones(1), torch.zeros(1)]})
    found = joined([one, two], {})
    assert isinstance(found, Pair)
    assert found.x.tolist() == [[1] * 3, [1] * 3, [0] * 3]
    assert found.rest["text"] == ["a", "b", "c"]
    assert found.rest["beta"] == 0.1
    assert [y.tolist() for y in found.rest["y"]] == [[0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("at_left", [False, True])
def test_parts_are_as_wide_as_the_batches_that_they_came_from(at_left):
    def batch(*lengths):
        width = max(lengths)
        mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
        mask = mask.flip(1) if at_left else mask
        return Pair(
            torch.rand(len(lengths), 5), {"attention_mask": mask, "input_ids": mask * 5, "text": ["a"] * len(lengths)}
        )

    batches = [batch(2, 1), batch(1, 4, 3), batch(3, 2)]
    whole = joined(batches, LABELS)
    cuts = [slice(0, 2), slice(2, 5), slice(5, 7)]
    parts = [Pair(whole.x[cut], {name: value[cut] for name, value in whole.rest.items()}) for cut in cuts]
    for found, wanted in zip(narrowed(parts, batches), batches, strict=True):
        assert found.x.equal(wanted.x)
        assert found.rest["text"] == wanted.rest["text"]
        assert all(found.rest[name].equal(wanted.rest[name]) for name in ("attention_mask", "input_ids"))
        assert found.rest["input_ids"].is_contiguous()


@pytest.mark.parametrize("prefix", ["", "chosen_"])
def test_padding_by_names_at_the_side_where_it_is(prefix):
    def batch(*rows):
        mask = torch.tensor(rows)
        named = {"input_ids": mask * 5 + (1 - mask) * 9, "labels": mask * 5 - 100 * (1 - mask), "attention_mask": mask}
        return UserDict({prefix + name: value for name, value in named.items()})

    right = joined([batch([1, 1]), batch([1, 1, 1], [1, 0, 0])], LABELS)
    assert isinstance(right, UserDict)
    assert right[prefix + "input_ids"].tolist() == [[5, 5, 9], [5, 5, 5], [5, 9, 9]]
    assert right[prefix + "labels"].tolist() == [[5, 5, -100], [5, 5, 5], [5, -100, -100]]
    left = joined([batch([1, 1]), batch([1, 1, 1], [0, 0, 1])], LABELS)
    assert left[prefix + "input_ids"].tolist() == [[9, 5, 5], [5, 5, 5], [9, 9, 5]]
    assert left[prefix + "attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]


def test_a_field_whose_padding_nobody_knows():
    batches = [(torch.ones(1, 2), torch.ones(1)), (torch.ones(1, 3), torch.ones(1))]
    assert joined(batches, {})[0].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert joined(batches, {0: 4}, unknown=None)[0].tolist() == [[1, 1, 4], [1, 1, 1]]
    with pytest.raises(BatchError, match=r"batch\[0\] has the shapes .* not known by its name"):
        joined(batches, LABELS, unknown=None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"x": torch.ones(1)}, {"y": torch.ones(1)}], "different things: batch\\['x'\\], and batch\\['y'\\]"),
        ([{"x": torch.ones(1), "t": 1}, {"x": torch.ones(1), "t": 2}], r"batch\['t'\] is 1 and 2"),
        ([{"x": torch.ones(1), "t": t} for t in (0, 1, 0, 0)], r"batch\['t'\] is 0 and 1"),
        ([{"x": torch.ones(1), "t": t} for t in (0, torch.ones(1), 0)], r"batch\['t'\] is 0 and tensor"),
        ([{"x": torch.ones(1), "t": torch.tensor(n)} for n in (1, 2)], "one number, another in each"),
        ([torch.ones(1, 2, 3), torch.ones(1, 2, 4)], "Only the second dimension"),
    ],
)
def test_batches_of_different_kinds(values, message):
    with pytest.raises(BatchError, match=message):
        joined(values, {})


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("nan")), "a", None, torch.tensor(3)], ids=str)
def test_what_is_the_same_in_all_is_passed_on(value):
    whole = joined([{"x": torch.ones(1), "t": value} for _ in range(3)], {})
    assert whole["t"] is value
