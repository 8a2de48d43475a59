import pytest
import torch


def pytest_collection_modifyitems(items):
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
