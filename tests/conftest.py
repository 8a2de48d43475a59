import contextlib
import gc
import os
import signal
from math import inf

import pytest
import torch

import durations

# What `make quick` runs: files with something from each room, in this order, without their slow test functions.
QUICK = (
    "ranks/test_one_of_each",
    "unit/test_macrostep",
    "unit/test_traps",
    "unit/test_losses",
    "unit/test_contrastive",
    "unit/test_verify",
    "unit/test_plan",
    "unit/test_public",
    "unit/test_site",
    "contract/test_fence",
    "gpu/test_cuda_graph",
    "unit/test_split",
    "unit/test_accelerate",
    "unit/test_accumulator",
    "unit/test_unexpected",
    "unit/test_recordable",
    "unit/test_own_parts",
    "unit/test_errors",
    "train/test_settings",
)


def pytest_configure(config):
    """One thread, for fixtures of modules too, which run before those of a test: two threads sum in another order.

    Programs that tests start must not inherit from nohup, from a shell that runs the tests in the background, or from a
    CI that SIGHUP or SIGINT is ignored.
    """
    if config.getoption("--write-durations"):
        config.pluginmanager.register(durations.Durations(config))
    use_memory_for_files()
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def use_memory_for_files():
    """Where there is room, temporary folders are in memory: a run of the trainer calls fsync at every save, 65 times in
    30 steps, and waits for a disk half of its time.
    """
    with contextlib.suppress(OSError):
        memory = os.statvfs("/dev/shm")
        has_room = memory.f_bavail * memory.f_frsize > 4 * 2**30
        if has_room and not memory.f_flag & os.ST_NOEXEC and os.access("/dev/shm", os.W_OK):
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true", help="into tests/durations.json, of the tests that run")
    parser.addoption("--quick", action="store_true", help="the tests to run while editing, and no others")


def pytest_ignore_collect(collection_path, config):
    is_other = collection_path.suffix == ".py" and name_of(collection_path) not in QUICK
    return True if config.getoption("--quick") and is_other else None


def pytest_collection_modifyitems(config, items):
    """The files that take longest start first, and those that nobody has measured: one that starts last keeps a core
    busy for minutes while the other has nothing left to do. (xdist's own order is by the number of tests in a file.)
    """
    measured = durations.read()
    if config.getoption("--quick"):
        items.sort(key=lambda item: QUICK.index(name_of(item.path)))
        slow = [item for item in items if durations.function_of(item) in measured["functions"]]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    else:
        items.sort(key=lambda item: -measured["files"].get(item.nodeid.partition("::")[0], inf))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    freeze_objects()


def freeze_objects():
    """What has been imported stays: a million objects that neither Python's collector nor `verify`, which looks for
    optimizers among all objects, has to visit again. That takes two thirds off the time of the tests of `verify`.
    """
    gc.collect()
    gc.freeze()


def name_of(path):
    """As in the list above."""
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """What the files before have imported late."""
    freeze_objects()


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """What the commands of a file of tests prepare is theirs alone, and nothing is looked for on a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MACROBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
