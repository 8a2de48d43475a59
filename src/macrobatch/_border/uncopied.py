"""Objects that belong to one model and its optimizers."""

from typing import NoReturn

from macrobatch.errors import UsageError


class Uncopied:
    """Belongs to a model and its optimizers, and cannot be copied or pickled."""

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise UsageError(
            "an Accumulator or a MacroStep cannot be copied or pickled: it belongs to its model and its optimizers. "
            "Keep it outside of the model, and save its state_dict()."
        )
