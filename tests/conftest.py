import pytest
import torch

# The files that take longest, by the seconds they took on two cores, start first (xdist's own order is by the number
# of tests in a file): one that starts last keeps a core busy for minutes while the other has nothing left to do.
LONGEST = (
    "train/test_killed",
    "ranks/test_train",
    "ranks/test_fsdp",
    "ranks/test_macrostep",
    "unit/test_exactness",
    "unit/test_docs",
    "unit/test_verify_right",
    "ranks/test_tensor_parallel",
    "ranks/test_uneven",
    "ranks/test_checkpoint",
    "unit/test_cli",
    "ranks/test_failing",
    "unit/test_verify_mistakes",
    "ranks/test_fuzz",
    "contract/test_torch",
    "unit/test_fit",
    "unit/test_macrostep",
    "train/test_checkpoint",
    "ranks/test_accelerate",
    "unit/test_bench",
    "ranks/test_ddp",
    "unit/test_traps",
    "ranks/test_verify",
    "train/test_corpus",
)


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(f"{item.path.parent.name}/{item.path.stem}", len(place)))
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
