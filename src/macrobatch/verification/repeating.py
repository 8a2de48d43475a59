"""Let one big batch draw the random numbers of the step, where the loss draws any."""

from __future__ import annotations

from macrobatch.verification.comparison import Case
from macrobatch.verification.draws import Draw, Repetition, UnrepeatableError, num_samples
from macrobatch.verification.sample_matching import match_samples


def repeat_draws(case: Case) -> None:
    """Repeat the random numbers of the step from now on, or note why that is impossible."""
    big, observation = case.big, case.observation
    if big.draws_elsewhere:
        case.unrepeatable = "it draws random numbers with numpy or Python's random"
    if not big.draws or big.samples is None or big.ranks.world_size > 1:
        if big.draws and not case.unrepeatable:
            case.unrepeatable = "the batch has no samples that could be told apart, or there are several ranks"
        case.unrepeatable = max(big.ranks.gather(case.unrepeatable))
        return
    try:
        parts = _parts(case, big.samples.count)
        big.repetition = Repetition(big.draws, parts)
        with big.in_own_precision(observation.autocast_dtype):
            case.big_batch_calls[:] = big.calls()
    except UnrepeatableError as error:
        big.repetition, case.unrepeatable = None, str(error)


def _parts(case: Case, count: int) -> list[tuple[list[int], list[Draw]]]:
    """For each micro-batch, its samples and its draws. Samples are assumed in the order of the batch if unknown."""
    used: set[int] = set()
    parts: list[tuple[list[int], list[Draw]]] = []
    calls = [call for call in case.observation.calls if call.has_weight]
    first = 0
    for micro in sorted({call.first_backward for call in calls}):
        own = [call for call in calls if call.first_backward == micro]
        draws = [draw for draw in case.observation.draws if draw.backward == micro]
        rows = match_samples(own, case.big_batch_calls, count, used)
        if rows is not None and len(rows.parts) == 1:
            samples: list[int] = rows.parts[0]
        elif (number := num_samples(case.big.draws, draws, count)) is not None and first + number <= count:
            samples = list(range(first, first + number))
        else:
            raise UnrepeatableError("a micro-batch draws numbers for samples that cannot be told apart")
        first += len(samples)
        if not set(samples) & {sample for other, _ in parts for sample in other}:  # not those of a second epoch
            parts.append((samples, draws))
    return parts
