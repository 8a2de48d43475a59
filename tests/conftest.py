import pytest
import torch

# The files that take longest, by the seconds they took on two cores, start first (xdist's own order is by the number
# of tests in a file): one that starts last keeps a core busy for minutes while the other has nothing left to do.
LONGEST = (
    "test_train_killed",
    "test_ranks_train",
    "test_ranks_fsdp",
    "test_ranks_macrostep",
    "test_exactness",
    "test_docs",
    "test_verify_right",
    "test_ranks_tensor_parallel",
    "test_ranks_uneven",
    "test_ranks_checkpoint",
    "test_cli",
    "test_ranks_failing",
    "test_verify_mistakes",
    "test_ranks_fuzz",
    "test_fit",
    "test_macrostep",
    "test_train_checkpoint",
    "test_ranks_accelerate",
    "test_bench",
    "test_ranks_ddp",
    "test_traps",
    "test_verify_ranks",
    "test_train_corpus",
)


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
