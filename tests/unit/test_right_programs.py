"""Programs that are right in plain torch, and may not be refused."""

from collections.abc import MutableMapping

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from macrobatch import Accumulator, MacroStep
from macrobatch.errors import BackendError, BatchError, UsageError


def numbers(*sizes, width=3):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, width, generator=draw, dtype=torch.float64) for size in sizes]


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def accumulate(acc, loss_of, batches):
    return [acc.step() for batch in acc.batches(batches) if acc.backward(loss_of(batch)) is None]


def error_of(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


# ------------------------------------------------------------------------------------------------ sparse gradients


def embedding():
    torch.manual_seed(0)
    return nn.Embedding(20, 4, sparse=True).double()


def of_words(model, words):
    return model(words).square().mean()


WORDS = [torch.tensor([1, 2]), torch.tensor([2, 3, 4])]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad, in plain torch too
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_sparse_gradients(make, max_norm):
    weights = []
    for cut in (False, True):
        model = embedding()
        optimizer = make(list(model.parameters()), lr=0.1)
        if cut:
            acc = Accumulator(model, optimizer, steps=2, max_norm=max_norm)
            accumulate(acc, lambda words, model=model: of_words(model, words), WORDS)
        else:
            of_words(model, torch.cat(WORDS)).backward()
            gradient = model.weight.grad.coalesce()
            if max_norm is not None:
                gradient = gradient * (max_norm / gradient.values().norm()).clamp(max=1)
            model.weight.grad = gradient
            optimizer.step()
        weights.append(model.weight.detach())
    assert error_of(*weights) <= 1e-6


def test_a_sparse_mean_is_left_in_grad():
    model, whole = embedding(), embedding()
    of_words(whole, torch.cat(WORDS)).backward()
    MacroStep(model, None, of_words, micro=2)(torch.cat(WORDS))
    assert model.weight.grad.is_sparse
    assert error_of(model.weight.grad.to_dense(), whole.weight.grad.to_dense()) <= 1e-12


def test_a_sparse_gradient_that_is_not_finite_is_noticed():
    model = embedding()
    acc = Accumulator(model, torch.optim.SparseAdam(model.parameters()), steps=1, nonfinite="skip")
    assert accumulate(acc, lambda words: of_words(model, words) * torch.inf, WORDS[:1])[0].skipped


# ------------------------------------------------------------------------------------------------------ optimizers


class Warming:
    """An optimizer that wraps another one, as in many published programs: it inherits from nothing."""

    def __init__(self, optimizer):
        self._optimizer, self.number = optimizer, 0
        self.param_groups = optimizer.param_groups

    def step(self):
        self.number += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * self.number
        self._optimizer.step()

    def zero_grad(self, set_to_none=True):
        self._optimizer.zero_grad(set_to_none)


class Noisy(torch.optim.Optimizer):
    """One that shares the state of another, and does something before its step, as Opacus' does."""

    def __init__(self, base):
        self.base = base
        self.defaults, self.state, self.number = base.defaults, base.state, 0

    @property
    def param_groups(self):
        return self.base.param_groups

    def step(self, closure=None):
        self.number += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.01, 0.01)
        return self.base.step()


@pytest.mark.parametrize("make", [Warming, Noisy])
def test_optimizers_that_wrap_others(make):
    weights = []
    for cut in (False, True):
        model = linear()
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1))
        if cut:
            acc = Accumulator(model, optimizer, steps=2)
            accumulate(acc, lambda x, model=model: model(x).square().mean(), numbers(4, 2, 3, 3))
        else:
            for window in (numbers(4, 2, 3, 3)[:2], numbers(4, 2, 3, 3)[2:]):
                model(torch.cat(window)).square().mean().backward()
                optimizer.step()
                model.zero_grad()
        assert optimizer.number == 2
        weights.append(model.weight.detach())
    assert error_of(*weights) <= 1e-12


def test_a_step_inside_the_window_is_still_noticed():
    model = linear()
    optimizer = Warming(torch.optim.SGD(model.parameters(), lr=0.1))
    acc = Accumulator(model, optimizer, steps=2)
    with pytest.raises(UsageError, match="inside the open window"):
        for x in acc.batches(numbers(4, 2)):
            acc.backward(model(x).square().mean())
            optimizer.step()
            acc.step()


class ByHand:
    """A home-made one, which calls no optimizer of torch."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad

    def zero_grad(self):
        raise AssertionError("nobody calls it")


def test_a_home_made_optimizer():
    model, plain = linear(), linear()
    acc = Accumulator(model, ByHand(model.parameters()), steps=2)
    result = accumulate(acc, lambda x: model(x).square().mean(), numbers(4, 2))[1]
    plain(torch.cat(numbers(4, 2))).square().mean().backward()
    assert error_of(model.weight, plain.weight - 0.1 * plain.weight.grad) <= 1e-12
    assert result.step == 1
    with pytest.raises(BatchError, match=r"'weight', a parameter, changed inside window"):
        for x in acc.batches(numbers(4, 2)):
            acc.backward(model(x).square().mean())
            acc._engine.optimizers[0].step()
            acc.step()


@pytest.mark.parametrize("kind", [object, list, nn.Module])
def test_what_is_no_optimizer(kind):
    model = linear()
    with pytest.raises(UsageError, match=r"have step\(\), zero_grad\(\) and param_groups"):
        Accumulator(model, [kind()])


# ------------------------------------------------------------------------------------- closures and second derivatives


class Sharp(torch.optim.SGD):
    """Steps at the worst point nearby, as SAM does: with a closure, or in two halves."""

    def step(self, closure=None):
        assert closure is not None, "Sharpness needs a closure"
        raise NotImplementedError

    @torch.no_grad()
    def perturb(self):
        self.moved = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"]]
        for parameter, by in self.moved:
            parameter += by

    @torch.no_grad()
    def step_back(self):
        for parameter, by in self.moved:
            parameter -= by
        super().step()


class Curved(torch.optim.SGD):
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        torch.autograd.grad([p.grad.sum() for p in held], held)
        super().step(closure)


class Told(torch.optim.SGD):
    is_second_order = True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, r"LBFGS evaluates the loss several times.*MacroStep\(model, None"),
        (Sharp, r"Sharp evaluates the loss several times.*MacroStep\(model, None"),
        (Curved, r"Curved.step\(\) differentiates the gradients once more.*create_graph"),
        (Told, r"Told.step\(\) differentiates the gradients once more.*create_graph"),
    ],
)
def test_optimizers_that_need_more_than_a_gradient(make, message):
    model = linear()
    with pytest.raises(BackendError, match=message):
        accumulate(Accumulator(model, make(model.parameters(), lr=0.1)), lambda x: model(x).mean(), numbers(4))


def test_other_errors_of_a_step_stay_as_they_are():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise TypeError("something else")

    model = linear()
    with pytest.raises(TypeError, match="something else"):
        accumulate(Accumulator(model, Fails(model.parameters(), lr=0.1)), lambda x: model(x).mean(), numbers(4))


def test_lbfgs_with_a_gradient_of_the_whole_batch():
    weights, batch = [], torch.cat(numbers(7))
    for micro in (7, 2):
        model = linear()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        train = MacroStep(model, None, lambda model, x: (model(x) - 1).square().mean(), micro=micro)

        def closure(optimizer=optimizer, train=train):
            optimizer.zero_grad()
            return train(batch).loss

        optimizer.step(closure)
        weights.append(model.weight.detach())
    assert error_of(*weights) <= 1e-12


def test_sam_with_gradients_of_the_whole_batch():
    weights, batch = [], torch.cat(numbers(7))
    for micro in (7, 2):
        model = linear()
        optimizer = Sharp(model.parameters(), lr=0.1)
        train = MacroStep(model, None, lambda model, x: (model(x) - 1).square().mean(), micro=micro)
        train(batch)
        optimizer.perturb()
        optimizer.zero_grad()
        train(batch)
        optimizer.step_back()
        optimizer.zero_grad()
        weights.append(model.weight.detach())
    assert error_of(*weights) <= 1e-12


# ---------------------------------------------------------------------------------------- tensors that no model holds


def test_a_temperature_beside_the_model():
    seen = []
    for cut in (False, True):
        model, scale = linear(), torch.ones((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        if cut:
            acc = Accumulator(model, optimizer, steps=2, max_norm=0.1)
            accumulate(acc, lambda x, m=model, s=scale: (s * m(x)).square().mean(), numbers(4, 2))
        else:
            (scale * model(torch.cat(numbers(4, 2)))).square().mean().backward()
            nn.utils.clip_grad_norm_([*model.parameters(), scale], 0.1)
            optimizer.step()
        seen.append(torch.cat([model.weight.detach().flatten(), scale.detach().reshape(1)]))
    assert error_of(*seen) <= 1e-12


@pytest.mark.parametrize("as_model", ["tensor", "list"])
def test_a_temperature_alone(as_model):
    log_alpha = torch.zeros(1, requires_grad=True, dtype=torch.float64)
    model = log_alpha if as_model == "tensor" else []
    acc = Accumulator(model, torch.optim.SGD([log_alpha], lr=1.0), steps=2)
    accumulate(acc, lambda x: (log_alpha.exp() * x).mean(), numbers(4, 2))
    assert error_of(-log_alpha.detach(), torch.cat(numbers(4, 2)).mean()) <= 1e-12


def test_a_parameter_of_no_given_model_is_still_an_error():
    model, other = linear(), linear()
    with pytest.raises(BackendError, match="belongs to no given model"):
        Accumulator(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))


# ------------------------------------------------------------------------------------------------------- wide sums


@pytest.mark.parametrize("micro", [2, 7])
def test_sums_in_float32_stay_float32_without_an_optimizer(micro):
    model = linear().bfloat16()
    whole = linear().bfloat16().float()
    x = torch.cat(numbers(7)).bfloat16()
    train = MacroStep(
        model, None, lambda m, x: m(x).float().square().mean(), micro=micro, accumulate_dtype=torch.float32
    )
    for _ in range(2):
        train(x)
        assert model.weight.grad.dtype == torch.float32
        model.zero_grad()
    train(x)
    whole(x.float()).square().mean().backward()
    assert error_of(model.weight.grad, whole.weight.grad) < 0.02
    assert model.weight.grad.bfloat16().float().ne(model.weight.grad).any()  # not rounded
    model.zero_grad()
    model.weight.grad = torch.ones_like(model.weight, dtype=torch.float32)  # as long as the program may want it


# ------------------------------------------------------------------------------------------------------- schedules


class Timm:
    """A scheduler like timm's: `step` wants the epoch, `step_update` the number of updates."""

    def __init__(self, optimizer):
        self.optimizer, self.updates, self.epochs = optimizer, [], []

    def step(self, epoch, metric=None):
        self.epochs.append(epoch)

    def step_update(self, num_updates, metric=None):
        self.updates.append(num_updates)
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + num_updates)

    def state_dict(self):
        return {"noise": [1, 2]}


def test_a_scheduler_that_counts_updates():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Timm(optimizer)
    acc = Accumulator(model, optimizer, steps=2, scheduler=scheduler)
    results = accumulate(acc, lambda x: model(x).square().mean(), numbers(4, 2, 3, 3))
    assert scheduler.updates == [1, 2]
    assert scheduler.epochs == []
    assert [result.lr for result in results if result] == [(0.1,), (0.05,)]


def test_a_scheduler_that_wants_to_know_something():
    class Plateau:
        def step(self, metric):
            raise AssertionError("never")

    model = linear()
    with pytest.raises(UsageError, match=r"Plateau.step\(\) needs an argument"):
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), scheduler=Plateau())


# --------------------------------------------------------------------------------------------------------- loaders


class Stream(IterableDataset):
    """Ten samples, shared by workers: the DataLoader estimates fewer batches than there are."""

    def __len__(self):
        return 10

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, 10, step):
            yield torch.full((3,), float(index), dtype=torch.float64)


class Bar:
    """Shows progress, as tqdm does."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __len__(self):
        return len(self.iterable)

    def __iter__(self):
        yield from self.iterable


@pytest.mark.parametrize("wrap", [iter, Bar, lambda loader: loader])
def test_a_length_that_is_an_estimate(wrap):
    loader = DataLoader(Stream(), batch_size=4, num_workers=2)
    assert len(loader) == 3
    model, seen = linear(), 0
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.001), steps=3)
    for x in acc.batches(wrap(loader)):
        seen += len(x)
        acc.backward(model(x).square().mean())
        acc.step()
    assert (seen, acc.optimizer_step) == (10, 2)


def test_a_loader_of_another_length_is_still_an_error():
    class Claims(list):
        def __len__(self):
            return 3

    model = linear()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.001), steps=2)
    with pytest.raises(BatchError, match="its length is 3"):
        accumulate(acc, lambda x: model(x).square().mean(), Claims(numbers(1, 2, 3, 4)))


# -------------------------------------------------------------------------------------------------- discard, go on


@pytest.mark.parametrize("failing", [{0}, {1}, {2, 3}, {5}, {0, 5}])
@pytest.mark.parametrize("has_terms", [False, True])
def test_discard_and_continue(failing, has_terms):
    """What was accumulated is dropped with the batch that failed, and windows go on with the next one."""
    model, batches, seen = linear(), numbers(4, 2, 3, 1, 5, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    acc = Accumulator(model, optimizer, steps=2, counts=(lambda x: {"a": len(x)}) if has_terms else None)
    windows, window = [], []
    for index, x in enumerate(acc.batches(batches)):
        if index in failing:
            window.clear()
            acc.discard()
            continue
        loss = model(x).square().sum(1).mean()
        acc.backward({"a": (loss, len(x))} if has_terms else loss)
        window.append(x)
        if acc.step():
            windows.append(torch.cat(window))
            window.clear()
    assert len(seen) == len(windows) > 0
    for gradient, whole in zip(seen, windows, strict=True):
        model.zero_grad()
        model(whole).square().sum(1).mean().backward()
        assert error_of(gradient, model.weight.grad) <= 1e-12


def test_discard_inside_of_a_micro_batch():
    model = linear()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    with acc.micro_batch():
        acc.discard()
    with acc.micro_batch():
        acc.backward(model(numbers(2)[0]).mean())
    assert acc.step().step == 1


# --------------------------------------------------------------------------------------------------------- batches


class Dict(MutableMapping):
    """A dict with a batch size, which its tensors must have: like a TensorDict."""

    def __init__(self, source, batch_size):
        self.batch_size, self._tensors = torch.Size(batch_size), {}
        for key, value in source.items():
            self[key] = value

    @property
    def shape(self):
        return self.batch_size

    def __getitem__(self, index):
        if isinstance(index, str):
            return self._tensors[index]
        cut = {key: value[index] for key, value in self._tensors.items()}
        return Dict(cut, [len(next(iter(cut.values())))])

    def __setitem__(self, key, value):
        if value.shape[: len(self.batch_size)] != self.batch_size:
            raise RuntimeError("batch dimension mismatch")
        self._tensors[key] = value

    def __delitem__(self, key):
        del self._tensors[key]

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)


@pytest.mark.parametrize("is_nested", [False, True])
def test_batches_that_know_their_size(is_nested):
    model, (x,) = linear(), numbers(7)
    batch = Dict({"x": x, "y": torch.arange(7)}, [7])
    sizes = []

    def loss_fn(model, batch):
        batch = batch["inner"] if is_nested else batch
        assert isinstance(batch, Dict)
        sizes.append(batch.batch_size[0])
        return model(batch["x"]).square().mean()

    MacroStep(model, None, loss_fn, micro=3)({"inner": batch} if is_nested else batch)
    whole = linear()
    whole(x).square().mean().backward()
    assert sizes == [3, 3, 1]
    assert error_of(model.weight.grad, whole.weight.grad) <= 1e-12


class Padded:
    """Images and their mask, as detection programs hold them: an object of no kind that can be cut."""

    def __init__(self, tensors, mask):
        self.tensors, self.mask = tensors, mask


class Slotted:
    __slots__ = ("tensors",)

    def __init__(self, tensors):
        self.tensors = tensors


@pytest.mark.parametrize("wrap", [lambda x: Padded(x, None), Slotted, lambda x: Padded({"deep": [x]}, None)])
def test_objects_that_hold_samples_are_not_repeated_whole(wrap):
    (x,) = numbers(6)
    train = MacroStep(linear(), None, lambda model, batch: model(batch["y"]).mean(), micro=2)
    with pytest.raises(BatchError, match=r"batch\['image'\].*holds a tensor of 6 rows.*dataclass"):
        train({"image": wrap(x), "y": x})


def test_objects_without_samples_are_passed_on():
    (x,), config = numbers(6), Padded(torch.ones(5), None)

    def loss_fn(model, batch):
        assert batch["config"] is config
        assert isinstance(batch["layer"], nn.Module)
        return model(batch["y"]).mean()

    MacroStep(linear(), None, loss_fn, micro=2)({"config": config, "y": x, "layer": nn.Linear(6, 6), "f": len})


# ----------------------------------------------------------------------------------------------------- newcomers


@pytest.mark.parametrize(
    "swapped",
    [
        lambda batch, model: model(batch["x"]).mean(),
        lambda batch, model: nn.functional.mse_loss(model(batch[0]), batch[1]),
        lambda batch, model: [x.mean() for x, _ in zip(*[batch], strict=True)],
    ],
)
def test_a_loss_fn_that_takes_the_batch_first(swapped):
    with pytest.raises(UsageError, match=r"loss_fn is called as loss_fn\(model, batch\), in this order"):
        MacroStep(linear(), None, swapped, micro=2)({"x": torch.randn(4, 3).double()})


def test_other_type_errors_stay_as_they_are():
    with pytest.raises(TypeError, match="unsupported operand"):
        MacroStep(linear(), None, lambda model, batch: model(batch) + "1", micro=2)(torch.randn(4, 3).double())


def test_how_to_change_the_gradient_of_a_window_is_said():
    model = linear()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with pytest.raises(UsageError, match=r"register_step_pre_hook"):
        for x in acc.batches(numbers(4, 2)):
            acc.backward(model(x).mean())
            model.weight.grad.mul_(2)
            acc.step()


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(reduction="sum"), lambda y, t: nn.functional.cross_entropy(y, t, reduction="none").sum()],
)
def test_a_sum_that_is_given_as_a_mean_over_items(loss):
    model = linear()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with (
        pytest.raises(BatchError, match=r"a sum of losses .* as a mean over 4 items.*reduction=\"sum\""),
        acc.micro_batch(),
    ):
        acc.backward(loss(model(numbers(4)[0]), torch.zeros(4, dtype=torch.long)), items=4)


@pytest.mark.parametrize(("steps", "is_left"), [(3, True), (2, False)])
def test_a_division_by_steps_that_is_left_over_several_means(steps, is_left):
    model = linear()
    acc = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps)
    with acc.micro_batch():
        output = model(numbers(4)[0])
        loss = (output.square().mean() + output.abs().mean()) / steps
        if is_left:
            with pytest.raises(UsageError, match="divided by 3, as in a loop"):
                acc.backward(loss)
            acc.skip()
        else:
            acc.backward(loss)  # the mean of two terms


def test_an_object_that_refers_to_everything_is_not_searched_without_end():
    (x,), config = numbers(6), Padded(None, None)
    config.tensors = [config, [Padded(config, index) for index in range(100_000)]]
    MacroStep(linear(), None, lambda model, batch: model(batch["y"]).mean(), micro=2)({"config": config, "y": x})
