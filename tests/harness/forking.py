"""torchrun that imports what its ranks need, and forks them: starting one takes seconds, nearly all of it for imports.

``forking.py MODULES ...`` with everything else as for torchrun; but the program is a path.
"""

import gc
import importlib
import sys

from torch.distributed import run

if __name__ == "__main__":
    for module in sys.argv[1].split(","):
        importlib.import_module(module)
    gc.freeze()  # before the forks, which then share it
    run.main(["--start-method=fork", "--run-path", *sys.argv[2:]])
