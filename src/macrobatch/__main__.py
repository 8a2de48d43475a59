"""``python -m macrobatch``: the command, e.g. under torchrun."""

import sys

from macrobatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
