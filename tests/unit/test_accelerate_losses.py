"""What `macrobatch.accelerate` makes of the losses of programs that only changed their imports."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness import loss_programs, programs, reference
from harness.loss_programs import READ, UNREAD, big_gradient, gradients, hinge, tokens
from harness.programs import OURS, THEIRS
from harness.reference import batches, relative_error
from macrobatch.accelerate import Accelerator, GradientAccumulationPlugin
from macrobatch.accelerate.reading import read
from macrobatch.errors import BatchError, UsageError

SIZES = [3, 1, 2, 4, 2]  # the samples of micro-batches; the labels are fewer, and other numbers
STEPS = 3  # so the second window is short


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    """Every test finds the process as at its start."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    programs.start_anew()
    yield
    programs.start_anew()


def windows(data, steps=STEPS):
    return [data[begin : begin + steps] for begin in range(0, len(data), steps)]


def gradients_with(library, loss_of, data=None, steps=STEPS, model=None, **options):
    """The gradients of each step of a program, whose loader Accelerate knows."""
    with programs.fresh():
        accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
        data = batches(SIZES) if data is None else data
        loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=None))
        return gradients(accelerator, model or reference.trainee().model, loader, loss_of)


# ----------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", READ)
def test_losses_that_are_read_are_those_of_one_big_batch(name):
    data = batches(SIZES)
    found = gradients_with(OURS, READ[name], data)
    assert len(found) == 2
    for gradient, window in zip(found, windows(data), strict=True):
        assert relative_error(gradient, big_gradient(reference.trainee().model, window, READ[name])) <= 1e-12


@pytest.mark.parametrize("name", READ)
def test_accelerate_is_off_by_far(name):
    """So that the test above can fail."""
    found = gradients_with(THEIRS, READ[name])[0]
    assert relative_error(found, big_gradient(reference.trainee().model, batches(SIZES)[:STEPS], READ[name])) > 1e-3


@pytest.mark.parametrize("name", [name for name in READ if name != "class weights"])
def test_equal_micro_batches_are_bitwise_as_theirs(name):
    data = [reference.batch(2, seed=seed, items=5) for seed in range(6)]
    for own, other in zip(
        gradients_with(OURS, READ[name], data), gradients_with(THEIRS, READ[name], data), strict=True
    ):
        assert relative_error(own, other) == 0


@pytest.mark.parametrize("name", [*READ, *UNREAD])
def test_without_accumulation_all_is_bitwise_as_theirs(name):
    loss_of = READ.get(name) or UNREAD[name].loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = gradients_with(OURS, loss_of, steps=1)
    for one, other in zip(own, gradients_with(THEIRS, loss_of, steps=1), strict=True):
        assert relative_error(one, other) == 0


@pytest.mark.parametrize("name", [*READ, *UNREAD])
def test_switched_off_all_is_bitwise_as_theirs(name):
    loss_of = READ.get(name) or UNREAD[name].loss
    for one, other in zip(gradients_with(OURS, loss_of, exact=False), gradients_with(THEIRS, loss_of), strict=True):
        assert relative_error(one, other) == 0


def test_reading_warns_of_nothing():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    gradients(accelerator, reference.trainee().model, batches(SIZES), tokens)


def test_labels_that_only_a_device_would_know(monkeypatch):
    """On a GPU the host does not know the count of a cross-entropy."""
    monkeypatch.setattr("macrobatch._loss.weighing.number_on_host", lambda tensor: None)
    data = batches(SIZES)
    assert isinstance(read(tokens(reference.trainee().model, data[0])).items, torch.Tensor)
    for gradient, window in zip(gradients_with(OURS, tokens, data), windows(data), strict=True):
        assert relative_error(gradient, big_gradient(reference.trainee().model, window, tokens)) <= 1e-12


def test_a_micro_batch_without_labels_counts_for_nothing():
    data = [reference.batch(2, seed=1, items=0), *batches([3, 1]), reference.batch(1, seed=3, items=0)]
    (found,) = gradients_with(OURS, tokens, data, steps=4)
    assert relative_error(found, big_gradient(reference.trainee().model, data, tokens)) <= 1e-12


def test_a_window_without_labels_changes_nothing():
    data = [reference.batch(2, seed=seed, items=0) for seed in (1, 2)]
    (found,) = gradients_with(OURS, tokens, data, steps=2)
    assert all(g is None or not g.any() for g in found.values())


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": False}])
def test_options_of_backward(options):
    data = batches(SIZES[:STEPS])
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    (found,) = gradients(accelerator, reference.trainee().model, data, tokens, **options)
    assert relative_error(found, big_gradient(reference.trainee().model, data, tokens)) <= 1e-12


def test_a_skipped_last_backward():
    """The gradient is completed when the program steps."""
    data = batches(SIZES[:STEPS])
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    own, seen = reference.trainee().model, []
    raw = torch.optim.SGD(own.parameters(), lr=0.0)
    raw.register_step_pre_hook(lambda *_: seen.append(reference.gradients_of(own)))
    model, optimizer = accelerator.prepare(own, raw)
    for index, batch in enumerate(data):
        with accelerator.accumulate(model):
            if index < 2:
                accelerator.backward(tokens(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert relative_error(seen[0], big_gradient(reference.trainee().model, data[:2], tokens)) <= 1e-12


# ------------------------------------------------------------------------------------- what the program scales itself


def recipe(data, steps):
    """Accelerate's guide: a sum, divided by the labels of the whole window, undoing the division by steps."""
    totals = {id(batch): sum(b.items for b in window) for window in windows(data, steps) for batch in window}
    return lambda model, batch: tokens(model, batch, reduction="sum") * steps / totals[id(batch)]


def test_the_recipe_for_tokens_stays_as_it_is():
    data = batches(SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator = Accelerator(gradient_accumulation_steps=STEPS)
        found = gradients(
            accelerator,
            reference.trainee().model,
            accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=None)),
            recipe(data, STEPS),
        )
    for gradient, window in zip(found, windows(data), strict=True):
        assert relative_error(gradient, big_gradient(reference.trainee().model, window, tokens)) <= 1e-12
    for own, other in zip(found, gradients_with(THEIRS, recipe(data, STEPS), data), strict=True):
        assert relative_error(own, other) == 0


def test_a_sum_divided_by_its_own_labels_is_as_theirs():
    def loss_of(model, batch):
        return tokens(model, batch, reduction="sum") / batch.items

    for own, other in zip(gradients_with(OURS, loss_of), gradients_with(THEIRS, loss_of), strict=True):
        assert relative_error(own, other) == 0


# ------------------------------------------------------------------------------------------------ what is not read


@pytest.mark.parametrize("name", UNREAD)
def test_losses_that_are_not_read_have_equal_weights(name):
    case, data = UNREAD[name], batches(SIZES)
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=None))
    with pytest.warns(UserWarning, match=case.warning) as seen:
        whole, short = gradients(accelerator, reference.trainee().model, loader, case.loss)
    assert len(seen) == 1
    theirs, their_short = gradients_with(THEIRS, case.loss, data)
    assert relative_error(whole, theirs) == 0
    scaled = {key: None if g is None else g * STEPS / 2 for key, g in their_short.items()}
    assert relative_error(short, scaled) <= 1e-12


def test_compiled_losses():
    compiled = torch.compile(tokens, backend="aot_eager")
    accelerator, data = Accelerator(gradient_accumulation_steps=STEPS), batches(SIZES[:STEPS])
    with pytest.warns(UserWarning, match="CompiledFunctionBackward"):
        (found,) = gradients(accelerator, reference.trainee().model, data, compiled)
    programs.start_anew()
    accelerator = THEIRS.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    assert relative_error(found, gradients(accelerator, reference.trainee().model, data, compiled)[0]) <= 1e-12


def several(accelerator, data, given=lambda model: (model,), cut=1, steps=True):
    """Several backwards in each accumulate(), and which models it gets."""
    own = reference.trainee().model
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    found = []
    for batch in data:
        with accelerator.accumulate(*given(model)):
            for loss_of in (tokens, hinge)[:cut]:
                accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                found.append(reference.gradients_of(own))
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("options", "words"), [({"cut": 2}, "several backward"), ({"given": lambda model: ()}, "was not given the models")]
)
def test_windows_that_cannot_be_weighed_are_as_theirs(options, words):
    data = batches([3, 1, 2, 4, 2, 5])
    with pytest.warns(UserWarning, match=words) as seen:
        own = several(Accelerator(gradient_accumulation_steps=STEPS), data, **options)
    assert len(seen) == 1
    programs.start_anew()
    theirs = several(THEIRS.Accelerator(cpu=True, gradient_accumulation_steps=STEPS), data, **options)
    for one, other in zip(own, theirs, strict=True):
        assert relative_error(one, other) == 0


@pytest.mark.parametrize("length", [STEPS, 2])
def test_two_backwards_in_the_last_micro_batch_only(length):
    """A penalty in the micro-batch that closes a window is added to the mean, also of a short window."""
    accelerator, data = Accelerator(gradient_accumulation_steps=STEPS), batches(SIZES[:length])
    own = reference.trainee().model
    model, _, loader = accelerator.prepare(
        own, torch.optim.SGD(own.parameters(), lr=0.0), torch.utils.data.DataLoader(data, batch_size=None)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(tokens(model, batch))
                if accelerator.sync_gradients:
                    accelerator.backward(sum(p.square().sum() for p in model.parameters()))
    found = reference.gradients_of(own)

    def whole_loss(model, batch):
        return tokens(model, batch) + sum(p.square().sum() for p in model.parameters()) / length

    assert relative_error(found, big_gradient(own, data, whole_loss)) <= 1e-12


# ------------------------------------------------------------------------ what turns out in the middle of a window


def custom(model, batch):
    return loss_programs.Custom.apply(model(batch.x).square())


def by_turns(*losses):
    turn = iter(losses * 10)
    return lambda model, batch: next(turn)(model, batch)


@pytest.mark.parametrize("losses", [(custom, hinge, hinge), (hinge, custom, hinge), (hinge, hinge, custom)])
def test_an_unread_loss_after_equal_ones_returns_to_equal_weights(losses):
    """Equal ones weigh as in Accelerate; those after the unread one are not equal."""
    sizes = [2, 2, 2, 3, 1, 2] if losses[2] is custom else [2, 2, 3, 3, 1, 2]
    data = batches(sizes)
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    with pytest.warns(UserWarning, match="CustomBackward") as seen:
        own = gradients(accelerator, reference.trainee().model, data, by_turns(*losses))
    assert len(seen) == 1
    for one, other in zip(own, gradients_with(THEIRS, by_turns(*losses), data), strict=True):
        assert relative_error(one, other) == 0


def test_an_unread_loss_after_unequal_ones_is_an_error():
    """Nothing was changed by it, and the window goes on with losses that can be read."""
    data = batches([2, 3, 1, 4])
    accelerator, own = Accelerator(gradient_accumulation_steps=3), reference.trainee().model
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    for batch in data[:2]:
        with accelerator.accumulate(model):
            accelerator.backward(tokens(model, batch))
    before = reference.gradients_of(own)
    with accelerator.accumulate(model):
        with pytest.raises(BatchError, match=r"DivBackward0\).*cannot be weighed anew.*items=.*exact=False"):
            accelerator.backward(loss_programs.by_hand(model, data[2]))
        assert relative_error(reference.gradients_of(own), before) == 0
        accelerator.backward(tokens(model, data[2]))
    assert relative_error(reference.gradients_of(own), big_gradient(own, data[:3], tokens)) <= 1e-12


def test_half_precision_scales_return_to_equal_weights():
    """Under a scaler, a weight refers to the largest number of items so far."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    data = [*batches([4, 2]), *batches([1, 2])]
    own = reference.trainee().model
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch, loss_of in zip(data, (hinge, hinge, hinge, custom), strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    found = reference.gradients_of(own)
                    own.zero_grad()
    expected = [big_gradient(own, [b], loss_of) for b, loss_of in zip(data[2:], (hinge, custom), strict=True)]
    for name, gradient in found.items():
        mean = sum(one[name] for one in expected) / 2
        torch.testing.assert_close(gradient / 2.0**20, mean, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------------- several models


def losses_of(model, x, generator, critic):
    """Of the critic, or of the generator: then it goes through the critic."""
    made = generator(-x)
    scores = critic(made if model is generator else made.detach())
    loss = F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(model is generator)))
    if model is critic:
        loss = loss + F.binary_cross_entropy_with_logits(scores := critic(x), torch.ones_like(scores))
    return loss


def adversarial(library, sizes, frozen, steps):
    """A critic and a generator by turns, each in its own accumulate(). The gradients of each with their windows."""
    with programs.fresh():
        torch.manual_seed(0)
        generator, critic = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
        accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=steps)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (critic, generator)]
        generator, critic, *optimizers = accelerator.prepare(generator, critic, *optimizers)
        draw, found = torch.Generator().manual_seed(0), []
        pending = {critic: [], generator: []}
        for size in sizes:
            x = torch.randn(size, 2, dtype=torch.float64, generator=draw)
            for model, optimizer in zip((critic, generator), optimizers, strict=True):
                critic.requires_grad_(model is critic or not frozen)
                pending[model].append(x)
                with accelerator.accumulate(model):
                    accelerator.backward(losses_of(model, x, generator, critic))
                    if accelerator.sync_gradients:
                        window, pending[model] = torch.cat(pending[model]), []
                        gradient = reference.gradients_of(model)
                        critic.requires_grad_(True)
                        whole = torch.autograd.grad(losses_of(model, window, generator, critic), model.parameters())
                        found.append((gradient, dict(zip(gradient, whole, strict=True))))
                    optimizer.step()
                    optimizer.zero_grad()
        return found


def test_models_trained_by_turns_are_weighed_each_for_itself():
    """Accelerate's counter counts both: the critic's first window has two micro-batches, all others three."""
    for gradient, whole in adversarial(OURS, [3, 1, 2, 4, 1, 2], frozen=True, steps=3):
        assert relative_error(gradient, whole) <= 1e-12
    assert relative_error(*adversarial(THEIRS, [3, 1, 2, 4, 1, 2], frozen=True, steps=3)[1]) > 1e-2


def test_a_generator_that_reaches_the_critic_is_as_theirs():
    sizes = [2, 1, 3, 2, 4, 1]
    own, theirs = (adversarial(library, sizes, frozen=False, steps=3) for library in (OURS, THEIRS))
    for (one, _), (other, _) in zip(own[1:], theirs[1:], strict=True):  # the first window has two micro-batches
        assert relative_error(one, other) == 0


EQUAL_BEFORE = [(2, False), (2, True), (3, False), (1, True), (4, False)]


def through_another(library, micro_batches=EQUAL_BEFORE):
    """An unread loss that also trains a model whose window is open."""
    with programs.fresh():
        torch.manual_seed(0)
        accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=5)
        first, second = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
        first, second, *_ = accelerator.prepare(
            first, second, *(torch.optim.SGD(model.parameters(), lr=0.0) for model in (first, second))
        )
        draw = torch.Generator().manual_seed(0)
        for size, through in micro_batches:
            x = torch.randn(size, 2, dtype=torch.float64, generator=draw)
            with accelerator.accumulate(second if through else first):
                loss = loss_programs.Custom.apply(second(first(x))) if through else first(x).square().mean()
                accelerator.backward(loss)
        return reference.gradients_of(first)


def test_an_unread_loss_of_another_model_returns_an_open_window_to_equal_weights():
    assert relative_error(through_another(OURS), through_another(THEIRS)) == 0
    with pytest.raises(BatchError, match="cannot be weighed anew"):
        through_another(OURS, [(2, False), (3, False), (2, True)])


# ---------------------------------------------------------------------------------------------------------- the switch


@pytest.mark.parametrize(
    ("options", "variables", "is_exact"),
    [
        ({}, {}, True),
        ({"exact": False}, {}, False),
        ({"exact_remainder": False}, {}, False),
        ({"exact": True}, {"MACROBATCH_EXACT": "0"}, True),
        ({}, {"MACROBATCH_EXACT": "0"}, False),
        ({}, {"MACROBATCH_EXACT_REMAINDER": "0"}, False),
        ({}, {"MACROBATCH_EXACT": "1", "MACROBATCH_EXACT_REMAINDER": "0"}, True),
        ({"plugin": {"exact": False}}, {"MACROBATCH_EXACT": "1"}, False),
        ({"plugin": {"exact_remainder": False}}, {}, False),
        ({"plugin": {"exact": False}, "exact": True}, {}, True),
        ({"plugin": {"exact": False}, "exact_remainder": True}, {}, True),
    ],
)
def test_who_says_whether_windows_are_exact(options, variables, is_exact, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = dict(options)
    plugin = options.pop("plugin", None)
    if plugin is not None:
        options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=STEPS, **plugin)
    else:
        options["gradient_accumulation_steps"] = STEPS
    data = batches(SIZES[:STEPS])
    (found,) = gradients(Accelerator(**options), reference.trainee().model, data, tokens)
    error = relative_error(found, big_gradient(reference.trainee().model, data, tokens))
    assert (error <= 1e-12) == is_exact


def test_switches_that_contradict_each_other(monkeypatch):
    with pytest.raises(UsageError, match="mean the same"):
        Accelerator(exact=True, exact_remainder=False)
    with pytest.raises(UsageError, match="True or False: got 'no'"):
        Accelerator(exact="no")
    with pytest.raises(UsageError, match=r"GradientAccumulationPlugin.*mean the same"):
        Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(exact=True, exact_remainder=False))
    monkeypatch.setenv("MACROBATCH_EXACT", "perhaps")
    with pytest.raises(UsageError, match="MACROBATCH_EXACT must be 0 or 1: got 'perhaps'"):
        Accelerator()


# ----------------------------------------------------------------------------------------- however programs are written


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("prepared", [True, False])
def test_an_accelerator_is_freed_without_the_garbage_collector(counts, prepared):
    gc.collect()
    gc.disable()
    try:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = reference.trainee().model
        if prepared:
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for batch in batches([2, 1, 3]):
            with accelerator.accumulate(model):
                accelerator.backward(tokens(model, batch), **({"items": batch.items} if counts else {}))
                if prepared:
                    optimizer.step()
                    optimizer.zero_grad()
        kept = weakref.ref(accelerator)
        del accelerator
        assert kept() is None
    finally:
        gc.enable()


def test_accumulate_as_a_decorator():
    data = batches(SIZES[:STEPS])
    accelerator, own = Accelerator(gradient_accumulation_steps=STEPS), reference.trainee().model
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    synced = []

    @accelerator.accumulate(model)
    def micro_step(batch, *, loss_of):
        """Train."""
        accelerator.backward(loss_of(model, batch))
        synced.append(accelerator.sync_gradients)
        return len(batch.x)

    assert [micro_step(batch, loss_of=tokens) for batch in data] == SIZES[:STEPS]
    assert micro_step.__doc__ == "Train."
    assert synced == [False, False, True]
    assert relative_error(reference.gradients_of(own), big_gradient(own, data, tokens)) <= 1e-12
    with accelerator.accumulate(model) as nothing:
        assert nothing is None


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_the_model_cleared_inside_a_window(counts, set_to_none):
    """The window then has what comes after that."""
    data = batches(SIZES[:STEPS])
    accelerator, own = Accelerator(gradient_accumulation_steps=STEPS), reference.trainee().model
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    for index, batch in enumerate(data):
        with accelerator.accumulate(model):
            if index == 1:
                model.zero_grad(set_to_none)
            accelerator.backward(tokens(model, batch), **({"items": batch.items} if counts else {}))
    assert relative_error(reference.gradients_of(own), big_gradient(own, data[1:], tokens)) <= 1e-12


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_raw_backward_before_the_first_of_a_window(counts, later):
    """Its gradient is the program's own: nothing divides it."""
    data = batches(SIZES)
    accelerator, own = Accelerator(gradient_accumulation_steps=5), reference.trainee().model
    raw = torch.optim.SGD(own.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(own, raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1 + later):
            hinge(model, data[0]).backward()
            for batch in data:
                with accelerator.accumulate(model):
                    accelerator.backward(tokens(model, batch), **({"items": batch.items} if counts else {}))
                    found = reference.gradients_of(own)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
    own.zero_grad()
    hinge(own, data[0]).backward()
    if counts:
        tokens(own, reference.concatenate(data)).backward()
    else:  # as in Accelerate
        for batch in data:
            (tokens(own, batch) / 5).backward()
    assert relative_error(found, reference.gradients_of(own)) <= 1e-12


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by_model", [True, False])
def test_however_gradients_are_cleared_the_next_window_is_weighed(set_to_none, by_model):
    data = batches([3, 1, 2, 4])
    accelerator, own = Accelerator(gradient_accumulation_steps=2), reference.trainee().model
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(tokens(model, batch))
            found = reference.gradients_of(own)
            optimizer.step()
            if by_model and accelerator.sync_gradients:
                model.zero_grad(set_to_none)
            elif not by_model:
                optimizer.zero_grad(set_to_none)
    assert relative_error(found, big_gradient(own, data[2:], tokens)) <= 1e-12


def test_items_out_of_proportion_to_what_is_read():
    """Labels counted before the shift: in the next micro-batch their proportion is another."""
    accelerator, own = Accelerator(gradient_accumulation_steps=2), reference.trainee().model
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    first, second = batches([3, 1])
    with accelerator.accumulate(model):
        accelerator.backward(tokens(model, first), items=first.items)
    with accelerator.accumulate(model), pytest.raises(BatchError, match="not in proportion"):
        accelerator.backward(tokens(model, second), items=second.items + 1)


def test_clipping_sees_the_weighed_mean():
    data = batches(SIZES[:STEPS])
    accelerator, own = Accelerator(gradient_accumulation_steps=STEPS), reference.trainee().model
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(tokens(model, batch))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    whole = copy.deepcopy(own)
    whole.zero_grad()
    tokens(whole, reference.concatenate(data)).backward()
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(whole.parameters(), 1e-3).item(), rel=1e-12)
    assert relative_error(reference.gradients_of(own), reference.gradients_of(whole)) <= 1e-12


def test_messages_speak_of_the_accelerator():
    accelerator, own = Accelerator(gradient_accumulation_steps=3), reference.trainee().model
    model, _ = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.0))
    first, second = batches([3, 1])
    with accelerator.accumulate(model):
        accelerator.backward(tokens(model, first), items=first.items)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with (
        accelerator.accumulate(model),
        pytest.raises(UsageError, match=r"changed.*if accelerator\.sync_gradients") as one,
    ):
        accelerator.backward(tokens(model, second), items=second.items)
    assert "discard" not in str(one.value)
