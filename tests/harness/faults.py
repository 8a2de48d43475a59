"""Exceptions planted at any line of the kernel and at any torch operation, as Ctrl-C or a failing kernel brings them.

A program is run once to note its calls and their places. Then, for each planted place, it is run again from the start
with an exception there. The program recovers as a user would: it makes the same call again, and where an error asks
for discard(), it calls that and goes on with the batches that are left. Plain torch runs beside it, from one window to
the next, so that a window that is counted twice, closed early or stepped wrongly shows.

`python -m harness.faults` plants at every place instead of once for each line, and also recovers by discard() at once.
"""

import argparse
import contextlib
import copy
import dis
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import macrobatch
from harness import joint, terms
from harness.reference import relative_error
from macrobatch import Accumulator, MacroStep, StepResult
from macrobatch.errors import UsageError

SOURCE = Path(macrobatch.__file__).parent
ROOMS = ("_border", "_engine", "_checks", "_loop", "_terms", "_joint", "_batch")  # the kernel and what drives it
FACES = ("accumulator.py", "macrostep.py")
STEPS, MICRO, RATE, MAX_NORM, BOUND = 3, 2, 0.1, 0.5, 1e-11

Kind = Literal["line", "operation"]
Recovery = Literal["again", "discard"]
T = TypeVar("T")


class PlantedError(BaseException):
    """As KeyboardInterrupt, it is no Exception: nothing but the program that planted it may catch it."""


class WrongError(Exception):
    """What the library made of a program that must not be."""


# ---------------------------------------------------------------------------------------------------------- planting


@functools.cache
def place_of(file: str) -> str:
    """The name of a file of the package, e.g. "_step/engine.py"; "" for other files."""
    path = Path(file)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else ""


@functools.cache
def is_kernel(file: str) -> bool:
    name = place_of(file)
    return name in FACES or name.split("/")[0] in ROOMS


@functools.cache
def exits_of(code: CodeType) -> frozenset[int]:
    """The offsets at which a `with` statement calls `__exit__`.

    An exception that comes just there leaves `__exit__` out: Python promises no more, and no code can help it.
    """
    steps = list(dis.get_instructions(code))
    names = [step.opname for step in steps]
    calls = [i for i in range(len(steps) - 3) if all(is_none(step) for step in steps[i : i + 3])]
    calls = [i for i in calls if names[i + 3] in ("PRECALL", "CALL", "CALL_FUNCTION")]
    calls += [i for i in range(len(steps) - 1) if names[i + 1] == "WITH_EXCEPT_START"]
    kept = [i - 1 for i in calls if names[i - 1] == "SWAP"]  # a value that is returned is kept meanwhile
    return frozenset(steps[i].offset for i in (*calls, *kept))


def is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


class Lines:
    """Notes each line of the kernel that runs, and raises at the one with the number `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.places = at, list[str]()

    def __enter__(self) -> Self:
        self._earlier = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._earlier)

    def _enter_frame(self, frame: FrameType, event: str, _: object) -> Any:
        return self._run_line if is_kernel(frame.f_code.co_filename) else None

    def _run_line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lasti not in exits_of(frame.f_code):
            self.places.append(f"{place_of(frame.f_code.co_filename)}:{frame.f_lineno}")
            if len(self.places) - 1 == self.at:
                raise PlantedError
        return self._run_line


class Operations(TorchDispatchMode):
    """Notes each torch operation, those of a backward and of an optimizer too, and raises at the one numbered `at`."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.places = at, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None and not place_of(frame.f_code.co_filename):
            frame = frame.f_back
        where = f" at {place_of(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
        self.places.append(f"{function}{where}")
        if len(self.places) - 1 == self.at:
            raise PlantedError
        return function(*args, **(kwargs or {}))


PLANTERS: dict[Kind, Callable[..., Lines | Operations]] = {"line": Lines, "operation": Operations}


@dataclass(frozen=True)
class Plant:
    """Where an exception is planted: in the call with this number, at the line or operation `at` of that call."""

    kind: Kind
    call: int
    at: int


@dataclass(frozen=True)
class Call:
    """A call of the library that a program made: its name, where in its window it is, and the places it went through.

    `rank` sorts calls: where several would do, the exception is planted in the one of the lowest.
    """

    name: str
    where: str
    rank: int
    places: list[str]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.where}" if self.where else self.name


class Calls:
    """The calls of one run of a program. Either all are noted, or an exception is planted in one of them."""

    def __init__(self, plant: Plant | None = None, notes: Kind | None = None) -> None:
        self.plant, self.notes, self.made, self.count = plant, notes, list[Call](), 0
        self.kind = notes if plant is None else plant.kind

    def __call__(self, name: str, where: str, rank: int, function: Callable[[], T]) -> T:
        number, self.count = self.count, self.count + 1
        if self.plant is not None and self.plant.call == number:
            with PLANTERS[self.plant.kind](self.plant.at):
                return function()
        if self.notes is None:
            return function()
        planter = PLANTERS[self.notes]()
        try:
            with planter:
                return function()
        finally:
            self.made.append(Call(name, where, rank, planter.places))


# -------------------------------------------------------------------------------------------------------- objectives


@dataclass(frozen=True)
class Objective:
    """A loss in every form that the programs need.

    `arguments` are those of `backward`. `whole` is the loss of some batches in plain torch. `items` are the items of
    some batches, or several numbers where each would be right.
    """

    template: Callable[[], nn.Module]
    batches: Callable[[], list[Any]]
    whole: Callable[[Any, Sequence[Any]], Tensor]
    items: Callable[[Sequence[Any]], Sequence[float]]
    arguments: Callable[[Any, Any], tuple[Any, ...]] = lambda model, batch: ()
    loss_fn: Callable[[Any, Any], Any] | None = None
    options: Callable[[], dict[str, Any]] = dict

    def model(self) -> nn.Module:
        return copy.deepcopy(self.template())


@functools.cache
def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def pairs(sizes: Sequence[int]) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(2, size, 3, generator=draw, dtype=torch.float64) for size in sizes]


def mean_loss(model: Any, batch: Tensor) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x)[:, 0], y[:, 0])


def whole_mean(model: Any, batches: Sequence[Tensor]) -> Tensor:
    return mean_loss(model, torch.cat(list(batches), dim=1))


def num_rows(batches: Sequence[Tensor]) -> int:
    return sum(batch.shape[1] for batch in batches)


def mean_objective(given: Callable[[Tensor], tuple[Any, ...]], sizes: Sequence[int]) -> Objective:
    return Objective(
        layers,
        functools.cache(lambda: pairs(sizes)),
        whole_mean,
        lambda batches: (num_rows(batches), *((len(batches),) if len(set(sizes)) == 1 else ())),
        lambda model, batch: (mean_loss(model, batch), *given(batch)),
    )


TERMS = terms.Losses(("tokens", "chosen", "samples"), items="mixed")
SIZES = (2, 1, 3, 1, 4, 2, 3, 1, 2)
WHOLE_SIZES = (3, 5)


def term_batches(sizes: Sequence[int]) -> list[Any]:
    return [terms.batch_of(size, seed=number, chosen=0.3) for number, size in enumerate(sizes)]


def terms_objective(sizes: Sequence[int]) -> Objective:
    return Objective(
        functools.cache(terms.heads),
        functools.cache(lambda: term_batches(sizes)),
        lambda model, batches: terms.whole_loss(model, batches, TERMS.names)[0],
        lambda batches: (sum(int(batch["mask"].sum()) for batch in batches),),
        lambda model, batch: (TERMS(model, batch),),
        TERMS,
        lambda: {"counts": TERMS.counts},
    )


def joint_objective(case: joint.Case) -> Objective:
    return Objective(
        functools.cache(joint.towers),
        functools.cache(lambda: [joint.batch_of(samples, seed=samples) for samples in WHOLE_SIZES]),
        lambda model, batches: case.whole(model, joint.concatenate(batches)),
        lambda batches: (sum(len(batch["x"]) for batch in batches),),
        loss_fn=case.loss_fn,
        options=lambda: {"joint": case.joint},
    )


LOOPS = {
    "mean, items as ints": mean_objective(lambda batch: (batch.shape[1],), SIZES),
    "mean, items as tensors": mean_objective(lambda batch: (torch.tensor(batch.shape[1]),), SIZES),
    "mean without items": mean_objective(lambda batch: (), (2,) * len(SIZES)),
    "terms": terms_objective(SIZES),
}
WHOLES = {
    "MacroStep, mean": Objective(
        layers,
        functools.cache(lambda: [batch.movedim(1, 0) for batch in pairs(WHOLE_SIZES)]),
        lambda model, batches: whole_mean(model, [batch.movedim(0, 1) for batch in batches]),
        lambda batches: (sum(map(len, batches)),),
        loss_fn=lambda model, batch: (mean_loss(model, batch.movedim(0, 1)), len(batch)),
    ),
    "MacroStep, terms": terms_objective(WHOLE_SIZES),
    "MacroStep, joint: rows, and a parameter": joint_objective(joint.CONTRAST),
    "MacroStep, joint: sums, and an ordinary loss": joint_objective(joint.BALANCE),
}
# Many places of these are also those of another one. Unless all are asked for, one in SOME of such places is planted.
ALIKE = {
    "terms": "mean, items as ints",
    "mean, items as tensors": "mean, items as ints",
    "mean without items": "mean, items as ints",
    "MacroStep, terms": "MacroStep, mean",
    "MacroStep, joint: rows, and a parameter": "MacroStep, mean",
    "MacroStep, joint: sums, and an ordinary loss": "MacroStep, joint: rows, and a parameter",
}
SOME = 4


# ------------------------------------------------------------------------------------------------------ plain torch


class Trained:
    """A model that the library trains, and beside it the weights that plain torch comes to, window by window."""

    def __init__(self, objective: Objective, kind: Kind | None) -> None:
        self.objective, self.kind = objective, kind
        self.model = objective.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.twin = objective.model()
        self.taken = 0

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step_of(self, batches: Sequence[Any]) -> tuple[dict[str, Tensor], Tensor]:
        """The weights after a step with these batches as one, and their loss. The twin's weights stay as they are."""
        named = dict(self.twin.named_parameters())
        loss = self.objective.whole(self.twin, batches)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        factor = min(1.0, MAX_NORM / (norm.item() + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        stepped = {name: p.detach() - RATE * factor * g for (name, p), g in zip(named.items(), gradients, strict=True)}
        return stepped, loss.detach()

    def compare(self, result: StepResult, batches: Sequence[Any], micro_batches: int) -> None:
        """Raise an error unless the step is that of these batches. Plain torch takes it too."""
        stepped, loss = self.step_of(batches)
        if result.micro_batches != micro_batches:
            raise WrongError(f"result.micro_batches is {result.micro_batches}, not {micro_batches}")
        if float(result.items) not in self.objective.items(batches):
            raise WrongError(f"result.items is {float(result.items)}, not {self.objective.items(batches)[0]}")
        if (error := relative_error(self.weights(), stepped)) > BOUND:
            raise WrongError(f"a wrong step: the weights are off by {error:.1e}")
        if abs(float(result.loss) - float(loss)) > 1e-9:
            raise WrongError(f"result.loss is {float(result.loss):.6f}, not {float(loss):.6f}")
        self.taken += 1
        if result.step != self.taken:
            raise WrongError(f"result.step is {result.step}, not {self.taken}")
        self.follow()

    def follow(self) -> None:
        """Plain torch goes on from the weights of the library."""
        self.twin.load_state_dict(self.model.state_dict())

    def follow_failed(self, batches: Sequence[Any], taken: int) -> None:
        """As `follow`, after a step that failed: it has happened, or it has not.

        An exception inside the optimizer may also leave it half-way, where the library cannot help it.
        """
        now, before = self.weights(), {name: p.detach() for name, p in self.twin.named_parameters()}
        if self.kind == "line":
            candidates = [before, *([self.step_of(batches)[0]] if batches else [])]
            if min(relative_error(now, each) for each in candidates) > BOUND:
                raise WrongError("a step that failed left weights of neither before nor after it")
        if taken not in (self.taken, self.taken + 1):
            raise WrongError(f"optimizer_step is {taken} after a step that failed, not {self.taken} or one more")
        self.taken = taken
        self.follow()


# ------------------------------------------------------------------------------------------------------- the programs


class LoopProgram:
    """A loop over an Accumulator: an epoch of three full windows.

    After an exception in the last of them, an epoch of a full and a short window shows whether those are right.
    """

    def __init__(self, objective: Objective, calls: Calls, recovery: Recovery = "again") -> None:
        self.objective, self.calls, self.recovery = objective, calls, recovery
        self.trained = Trained(objective, calls.kind)
        options = objective.options() | {"steps": STEPS, "max_norm": MAX_NORM}
        self.acc = Accumulator(self.trained.model, self.trained.optimizer, **options)
        self.window: list[Any] = []  # the batches that must be in the open window
        self.slots = 0  # how many of its batches have begun
        self.num_windows = 0
        self.fails_late = False

    def run(self) -> None:
        batches = self.objective.batches()
        rest = self.epoch(batches)
        while rest:
            rest = self.epoch(rest)
        if self.fails_late:
            self.epoch(batches[: STEPS + 1])

    def epoch(self, loader: list[Any]) -> list[Any]:
        """One pass. Returns the batches that an exception has left."""
        iterator = self.begin(loader)
        for index, batch in enumerate(loader):
            self.slots += 1
            is_final = index == len(loader) - 1
            try:
                if self.call("next", functools.partial(next, iterator), is_final) is not batch:
                    raise WrongError(f"batch {index} was not the next one of the loader")
            except PlantedError:
                self.slots -= 1
                if self.recovery == "discard":
                    self.discard()
                return loader[index:]
            self.micro_batch(batch, is_final)
        try:
            self.calls("next", "at the end of the epoch", self.num_windows, functools.partial(next, iterator))
        except StopIteration:
            return []
        except PlantedError:
            self.fails_late = True
            if self.recovery == "discard":
                self.discard()
            return []
        raise WrongError("more batches than the loader has")

    def begin(self, loader: list[Any]) -> Iterator[Any]:
        try:
            iterator = iter(self.acc.batches(loader))
        except UsageError as error:
            require_discard(error, "batches()")
            self.discard()
            return iter(self.acc.batches(loader))
        if self.window:
            raise WrongError("a new batches() over an open window was accepted")
        return iterator

    def call(self, name: str, function: Callable[[], T], is_final: bool) -> T:
        """Make a call. Exceptions are planted in the second window rather than in others: it has one on either side."""
        where = {1: "first of the window", STEPS: "last of the window"}.get(self.slots, "amid the window")
        window = self.num_windows
        try:
            return self.calls(name, where, {1: 0, 0: 1}.get(window, window), function)
        except PlantedError:
            self.fails_late = window >= 2
            raise

    def closes(self, is_final: bool) -> bool:
        return is_final or self.slots == STEPS

    def micro_batch(self, batch: Any, is_final: bool) -> None:
        if not self.backward(batch, is_final):
            return
        result = self.step(is_final)
        if result == "dropped":
            return
        if (result is not None) != self.closes(is_final):
            raise WrongError(f"step() returned {result} after batch {self.slots} of a window")
        if isinstance(result, StepResult):
            self.trained.compare(result, self.window, len(self.window))
            self.drop()

    def drop(self) -> None:
        self.num_windows += 1
        self.window, self.slots = [], 0

    def discard(self) -> None:
        self.acc.discard()
        self.drop()

    # ------------------------------------------------------------------------------------------------------- backward

    def backward(self, batch: Any, is_final: bool) -> bool:
        """Whether the batch is in the window then. After a discard(), the error may have left it out."""
        self.expect_last(is_final)
        arguments = self.objective.arguments(self.trained.model, batch)
        try:
            self.call("backward", lambda: self.acc.backward(*arguments), is_final)
        except PlantedError:
            if not self.backward_again(batch, is_final):
                return False
        self.window.append(batch)
        return True

    def backward_again(self, batch: Any, is_final: bool) -> bool:
        if self.recovery == "again":
            try:
                self.acc.backward(*self.objective.arguments(self.trained.model, batch))
                return True
            except UsageError as error:
                require_discard(error, "backward()")
        self.discard()
        self.slots = 1
        try:
            self.expect_last(is_final)
            self.acc.backward(*self.objective.arguments(self.trained.model, batch))
        except UsageError:
            self.slots = 0
            return False
        return True

    def expect_last(self, is_final: bool) -> None:
        if self.acc.is_last != self.closes(is_final):
            raise WrongError(f"is_last is {self.acc.is_last} in batch {self.slots} of a window")

    # ----------------------------------------------------------------------------------------------------------- step

    def step(self, is_final: bool) -> StepResult | Literal["dropped"] | None:
        try:
            return self.call("step", self.acc.step, is_final)
        except PlantedError:
            if self.recovery == "again":
                try:
                    return self.acc.step()
                except UsageError as error:
                    require_discard(error, "step()", "no window is open")
            self.trained.follow_failed(self.window if self.closes(is_final) else [], self.acc.optimizer_step)
            self.discard()
            return "dropped"


def require_discard(error: UsageError, call: str, *others: str) -> None:
    """Raise an error unless this one asks for discard(), or says one of the `others`."""
    if not any(word in str(error) for word in ("discard()", *others)):
        raise WrongError(f"the second {call} raised an error that does not name discard(): {error}") from error


class WholeProgram:
    """Two batches for a MacroStep. After an exception, the same batch comes again."""

    def __init__(self, objective: Objective, calls: Calls, recovery: Recovery = "again") -> None:
        assert objective.loss_fn is not None
        self.objective, self.calls = objective, calls
        self.trained = Trained(objective, calls.kind)
        options = objective.options() | {"micro": MICRO, "max_norm": MAX_NORM}
        self.train = MacroStep(self.trained.model, self.trained.optimizer, objective.loss_fn, **options)

    def run(self) -> None:
        for number, batch in enumerate(self.objective.batches()):
            try:
                result = self.calls("train", "", (1, 0)[number], functools.partial(self.train, batch))
            except PlantedError:
                self.trained.follow_failed([batch], self.train.optimizer_step)
                result = self.train(batch)
            self.trained.compare(result, [batch], -(-self.num_samples(batch) // MICRO))

    def num_samples(self, batch: Any) -> int:
        return len(batch) if isinstance(batch, Tensor) else len(batch["x"])


# ------------------------------------------------------------------------------------------------------ many of them


@dataclass(frozen=True)
class Failure:
    call: str
    place: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.call}, {self.place}: {self.wrong}"


def program_of(name: str, calls: Calls, recovery: Recovery = "again") -> LoopProgram | WholeProgram:
    return LoopProgram(LOOPS[name], calls, recovery) if name in LOOPS else WholeProgram(WHOLES[name], calls, recovery)


def plants_in(calls: Sequence[Call], kind: Kind, known: Set[str] = frozenset()) -> list[Plant]:
    """For each place in a call of each sort, the first time that it comes there; where `known`, of some calls only."""
    chosen: dict[tuple[str, ...], Plant] = {}
    for number in sorted(range(len(calls)), key=lambda number: calls[number].rank):
        call = calls[number]
        for at, place in enumerate(call.places):
            chosen.setdefault((place, call.name, call.where), Plant(kind, number, at))
    plants = sorted(chosen.values(), key=lambda plant: (plant.call, plant.at))
    return [p for i, p in enumerate(plants) if not i % SOME or calls[p.call].places[p.at] not in known]


def every_plant_in(calls: Sequence[Call], kind: Kind) -> list[Plant]:
    return [Plant(kind, number, at) for number, call in enumerate(calls) for at in range(len(call.places))]


def noted_calls(name: str, kind: Kind) -> list[Call]:
    """The calls of an undisturbed run, which must be right; not of the first one, after which caches are filled."""
    program_of(name, Calls()).run()
    calls = Calls(notes=kind)
    program_of(name, calls).run()
    return calls.made


def check(name: str, kind: Kind, *, every: bool = False, recovery: Recovery = "again") -> tuple[int, list[Failure]]:
    """Plant exceptions in the program of an objective. Returns how many, and those that it did not recover from."""
    calls = noted_calls(name, kind)
    known = {place for call in noted_calls(ALIKE[name], kind) for place in call.places} if name in ALIKE else set()
    plants = every_plant_in(calls, kind) if every else plants_in(calls, kind, known)
    failures = []
    with ignored_in_destructors():
        for plant in plants:
            wrong = failure_of(name, plant, recovery)
            if wrong is not None:
                call = calls[plant.call]
                failures.append(Failure(call.title, call.places[plant.at], wrong))
    return len(plants), failures


def failure_of(name: str, plant: Plant, recovery: Recovery) -> str | None:
    try:
        program_of(name, Calls(plant), recovery).run()
        if not torch.is_grad_enabled():
            return "gradients stayed off, as under torch.no_grad()"
    except WrongError as error:
        return str(error)
    except PlantedError:
        return "the exception was raised once more, by another call"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.set_grad_enabled(True)
    return None


@contextlib.contextmanager
def ignored_in_destructors() -> Iterator[None]:
    """Python ignores what is raised in a destructor or a weak reference's callback, and prints it: not this."""
    earlier = sys.unraisablehook
    sys.unraisablehook = lambda raised: None if raised.exc_type is PlantedError else earlier(raised)
    try:
        yield
    finally:
        sys.unraisablehook = earlier


def main() -> int:
    parser = argparse.ArgumentParser(prog="harness.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="what the tests run: each line once")
    parser.add_argument("--counts", action="store_true", help="print no places, only their number")
    parser.add_argument("objectives", nargs="*", help=f"default: all of {', '.join((*LOOPS, *WHOLES))}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_failed = 0
    for name in options.objectives or (*LOOPS, *WHOLES):
        for kind in PLANTERS:
            recoveries: tuple[Recovery, ...] = ("again",) if options.quick or name in WHOLES else ("again", "discard")
            for recovery in recoveries:
                count, failures = check(name, kind, every=not options.quick, recovery=recovery)
                num_failed += len(failures)
                print(f"{name}, {kind}, {recovery}: {len(failures)} of {count} failed", flush=True)
                if options.counts:
                    for what, times in Counter(f"{f.call.split(',')[0]}: {f.wrong[:110]}" for f in failures).items():
                        print(f"    {times} x {what}")
                else:
                    print("".join(f"    {failure}\n" for failure in failures), end="")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
