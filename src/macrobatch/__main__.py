"""``python -m macrobatch``: the command, e.g. under torchrun."""

from macrobatch.cli import leave, main

if __name__ == "__main__":
    leave(main())
