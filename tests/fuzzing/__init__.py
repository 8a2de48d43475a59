"""Random programs, run with the library and with plain torch.

>>> from fuzzing import check, draw_program
>>> check(draw_program(1))
"""

import torch

from fuzzing.drawing import draw_program
from fuzzing.loop import Loop
from fuzzing.pair import Pair
from fuzzing.program import Program
from fuzzing.run import MismatchError, SpoiledError
from fuzzing.several import JointWhole, TermLoop, TermWhole
from fuzzing.several_program import SeveralProgram
from fuzzing.shrinking import describe, shrink
from fuzzing.whole import Whole
from macrobatch import MacrobatchError

__all__ = ["MismatchError", "Program", "SeveralProgram", "check", "describe", "draw_program", "failure", "shrink"]

RUNS = {"loop": Loop, "micro": Loop, "macrostep": Whole, "pair": Pair,
        "terms loop": TermLoop, "terms macrostep": TermWhole, "joint": JointWhole}  # fmt: skip


def check(p: Program) -> None:
    """Raise MismatchError unless the program comes to what it should."""
    default = torch.get_default_dtype()
    try:
        torch.manual_seed(p.seed)
        RUNS[p.driver](p).run()
    except SpoiledError:
        pass
    except MacrobatchError as error:
        raise MismatchError("alarm", f"{type(error).__name__}: {error}") from error
    except MismatchError:
        raise
    except Exception as error:
        raise MismatchError("crash", f"{type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(default)


def failure(p: Program) -> MismatchError | None:
    try:
        check(p)
    except MismatchError as wrong:
        return wrong
    return None
