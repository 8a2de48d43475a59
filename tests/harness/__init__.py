"""What tests share: the reference, small models, loops, real ranks, pretended captures. One copy of each."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent  # of the checkout


def environment(**more: str) -> dict[str, str]:
    """This process's environment, for a program that imports the harness, or a test by its name (`tests.ranks...`)."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(ROOT), str(TESTS), *map(os.path.abspath, given)]  # the program may run in another folder
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
