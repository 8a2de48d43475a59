"""What is legal, but hardly meant: one warning, at the line of the program that does it."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from macrobatch import Accumulator, MacroStep
from macrobatch.errors import UsageError


def accumulator(**options) -> tuple[nn.Module, Accumulator]:
    model = nn.Linear(3, 1)
    return model, Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def loader(samples: int = 13) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1)), batch_size=4)


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    assert {Path(one.filename) for one in caught} <= {Path(__file__)}, "it is told where the loop is"
    return [str(one.message) for one in caught]


@pytest.fixture
def caught():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


# ------------------------------------------------------------------------------------------ sizes without items


def unread(losses: Tensor) -> Tensor:
    """Their mean, by a division that may be anything."""
    return losses.sum() / losses.numel()


def epochs(acc, model, batches, items=None, count: int = 2) -> None:
    for _ in range(count):
        for x, y in acc.batches(batches):
            acc.backward(unread((model(x) - y).square()), items)
            acc.step()


@pytest.mark.parametrize("has_length", [True, False])
def test_a_short_last_batch_without_items(caught, has_length):
    model, acc = accumulator(steps=2)
    for _ in range(2):
        epochs(acc, model, loader() if has_length else iter(loader()), count=1)
    (message,) = told(caught)
    assert "micro-batches of 4 and of 1 samples weigh the same" in message
    assert "items=len(x)" in message
    assert "DivBackward0 was not understood" in message


@pytest.mark.parametrize(
    ("samples", "options", "items"),
    [
        (13, {"steps": 2}, 1),  # meant
        (12, {"steps": 2}, None),  # all alike
        (13, {"steps": 3}, None),  # the short one is alone in its window
        (13, {"steps": 2, "reduction": "total"}, None),  # which weighs nothing
    ],
)
def test_nothing_is_said_of_what_is_right(caught, samples, options, items):
    model, acc = accumulator(**options)
    epochs(acc, model, loader(samples), items)
    assert told(caught) == []


@pytest.mark.parametrize(("lengths", "count"), [((3, 7), 1), ((5, 5), 0)])
def test_labels_tell_what_samples_do_not(caught, lengths, count):
    """As many samples in each, but not as many labels."""
    model, acc = accumulator(steps=2)
    labels = [torch.where(torch.arange(8) < length, 1, -100).repeat(4, 1) for length in lengths]
    for batch in acc.batches([{"x": torch.randn(4, 3), "labels": each} for each in labels]):
        acc.backward(unread(model(batch["x"])))
        acc.step()
    messages = told(caught)
    assert len(messages) == count
    assert not count or "micro-batches of 12 and of 28 labels weigh the same" in messages[0]


def test_nothing_is_said_of_a_window_that_is_discarded(caught):
    model, acc = accumulator(steps=3)
    for number, x in enumerate(acc.batches([torch.randn(n, 3) for n in (4, 2, 4, 4, 4)])):
        acc.backward(unread(model(x)))
        acc.discard() if number == 1 else acc.step()
    assert told(caught) == []


def test_arrays_tell_their_sizes_too(caught):
    model, acc = accumulator(steps=2)
    for batch in acc.batches([{"x": torch.randn(n, 3).numpy()} for n in (4, 2, 4)]):
        acc.backward(unread(model(torch.from_numpy(batch["x"]))))
        acc.step()
    assert len(told(caught)) == 1


@pytest.mark.parametrize("has_length", [True, False])
def test_a_loop_that_is_left_when_its_window_closes(caught, has_length):
    model, acc = accumulator(steps=2)
    batches = [torch.randn(n, 3) for n in (4, 2, 4)]
    for x in acc.batches(batches if has_length else iter(batches)):
        acc.backward(unread(model(x)))
        if acc.step():
            break
    assert len(told(caught)) == 1


def test_a_batch_that_is_left_without_its_backward_tells_nothing(caught):
    model, acc = accumulator(steps=3)
    for number, x in enumerate(acc.batches([torch.randn(n, 3) for n in (4, 4, 2)])):
        if number == 2:
            break
        acc.backward(unread(model(x)))
        acc.step()
    acc.discard()
    assert told(caught) == []


@pytest.mark.parametrize("sample", [lambda: torch.randn(3), lambda: {"x": torch.randn(3)}])
def test_lists_of_samples_tell_their_sizes_too(caught, sample):
    model, acc = accumulator(steps=2)
    for batch in acc.batches([[sample() for _ in range(n)] for n in (4, 2)]):
        rows = [each["x"] if isinstance(each, dict) else each for each in batch]
        acc.backward(unread(model(torch.stack(rows))))
        acc.step()
    (message,) = told(caught)
    assert "micro-batches of 4 and of 2 samples" in message


def test_a_table_beside_the_samples_does_not_hide_them(caught):
    model, acc = accumulator(steps=2)
    for x, _, weights in acc.batches([(torch.randn(n, 3), torch.randn(n), torch.ones(10)) for n in (4, 2)]):
        acc.backward(unread(model(x)) * weights.mean())
        acc.step()
    (message,) = told(caught)
    assert "micro-batches of 4 and of 2 samples" in message


def test_a_progress_bar_is_not_the_line_that_is_meant(caught):
    model, acc = accumulator(steps=2)
    for x, y in tqdm(acc.batches(loader()), disable=None):
        acc.backward(unread((model(x) - y).square()))
        acc.step()
    assert len(told(caught)) == 1


def test_tensors_of_different_lengths_do_not_tell_samples(caught):
    """A graph's nodes and edges, e.g.: the loss may be a mean over one thing that each batch has."""
    model, acc = accumulator(steps=2)
    for nodes, _ in acc.batches([(torch.randn(n, 3), torch.randn(2, n)) for n in (4, 3)]):
        acc.backward(unread(model(nodes)))
        acc.step()
    assert told(caught) == []


@pytest.mark.parametrize("given", [3, None, nn.Linear(2, 1), {"x": torch.ones(2)}, "abc", DataLoader])
def test_what_is_no_loader(given):
    with pytest.raises(UsageError, match=rf"needs a loader, .* got a {type(given).__name__}"):
        accumulator()[1].batches(given)


# ------------------------------------------------------------------------------------------ an epoch without a step


@pytest.mark.parametrize("has_length", [True, False])
def test_an_epoch_that_is_dropped_whole(caught, has_length):
    model, acc = accumulator(steps=5, remainder="drop")
    for _ in range(2):
        epochs(acc, model, loader() if has_length else iter(loader()), items=1, count=1)
    (message,) = told(caught)
    assert "this epoch took no step" in message
    assert acc.optimizer_step == 0


def test_an_epoch_with_one_step_and_a_rest(caught):
    model, acc = accumulator(steps=3, remainder="drop")
    epochs(acc, model, loader(), items=1)
    assert (told(caught), acc.optimizer_step) == ([], 2)


# ------------------------------------------------------------------------------------------ schedulers


@pytest.mark.parametrize("is_macro", [False, True])
@pytest.mark.parametrize("is_chained", [False, True])
def test_a_scheduler_that_is_stepped_twice(caught, is_macro, is_chained):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    if is_chained:
        scheduler = ChainedScheduler([scheduler, StepLR(optimizer, 3)])
    if is_macro:
        train = MacroStep(model, optimizer, lambda model, x: model(x).mean(), micro=2, scheduler=scheduler)
        for _ in range(5):
            train(torch.randn(4, 3))
            scheduler.step()
    else:
        acc = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
        for x in acc.batches([torch.randn(4, 3) for _ in range(10)]):
            acc.backward(model(x).mean(), items=4)
            if acc.step():
                scheduler.step()
    (message,) = told(caught)
    assert "Leave out scheduler.step()" in message


def test_a_scheduler_that_is_stepped_with_each_micro_batch_too(caught):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    acc = Accumulator(model, optimizer, steps=3, scheduler=scheduler)
    for x in acc.batches([torch.randn(4, 3) for _ in range(12)]):
        acc.backward(model(x).mean(), items=4)
        acc.step()
        scheduler.step()
    assert "Leave out scheduler.step()" in "".join(message for message in told(caught) if "passed" in message)


def test_a_scheduler_that_is_stepped_once_an_epoch_too(caught):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    acc = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
    for _ in range(4):
        for x in acc.batches([torch.randn(4, 3) for _ in range(6)]):
            acc.backward(model(x).mean(), items=4)
            acc.step()
        scheduler.step()
    assert len(told(caught)) == 1


def test_an_optimizer_is_no_scheduler():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="must be a learning-rate scheduler"):
        Accumulator(model, optimizer, scheduler=optimizer)


def test_a_scheduler_that_is_set_when_a_run_is_resumed(caught):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2)
    acc = Accumulator(model, optimizer, scheduler=scheduler)
    for number, x in enumerate(acc.batches([torch.randn(4, 3) for _ in range(6)])):
        acc.backward(model(x).mean(), items=4)
        acc.step()
        if number == 2:
            scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 40})
    assert told(caught) == []
    assert scheduler.last_epoch == 43
