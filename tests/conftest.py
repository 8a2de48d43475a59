import gc
import signal

import pytest
import torch

# The files that take longest, by the seconds they took on two cores, start first (xdist's own order is by the number
# of tests in a file): one that starts last keeps a core busy for minutes while the other has nothing left to do.
LONGEST = (
    "train/test_killed",
    "ranks/test_train",
    "ranks/test_fsdp",
    "ranks/test_macrostep",
    "train/test_recipes",
    "ranks/test_cluster_files",
    "ranks/test_tune",
    "train/test_lora",
    "train/test_memory",
    "train/test_trackers",
    "ranks/test_train_hooks",
    "ranks/test_terms",
    "unit/test_faults",
    "unit/test_exactness",
    "unit/test_docs",
    "unit/test_stories",
    "unit/test_verify_right",
    "ranks/test_ray",
    "ranks/test_joint",
    "ranks/test_tensor_parallel",
    "ranks/test_uneven",
    "ranks/test_checkpoint",
    "unit/test_cli",
    "ranks/test_accelerate_programs",
    "ranks/test_failing",
    "unit/test_verify_mistakes",
    "ranks/test_fuzz",
    "contract/test_torch",
    "unit/test_fit",
    "unit/test_macrostep",
    "train/test_checkpoint",
    "ranks/test_accelerate",
    "unit/test_bench",
    "unit/test_wheel",
    "unit/test_terms",
    "ranks/test_ddp",
    "unit/test_traps",
    "ranks/test_verify",
    "train/test_corpus",
)


# What `make quick` runs: files with something from each room, in this order, without the slow ones of their tests.
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
SLOW = {
    "test_a_language_model_of_transformers",
    "test_an_exception_leaves_nothing_behind",
    "test_an_overflow_inside_a_window_skips_it_and_backs_off_once",
    "test_any_batch_and_any_cut_train_as_the_whole",
    "test_attention_and_convolutions_cut_by_samples",
    "test_bitwise_as_eager",
    "test_by_tokens_rounds_to_few_shapes",
    "test_lists_of_samples",
    "test_models_of_transformers",
    "test_models_that_are_not_what_they_seem",
    "test_no_cut_of_the_sorted_samples_is_shorter_nor_as_short_with_less_padding",
    "test_no_model_is_kept",
    "test_no_plan_has_fewer_micro_batches_nor_as_few_with_less_padding",
    "test_nothing_is_read_inside_a_window",
    "test_other_libraries_leave_no_trace",
    "test_the_core_starts_without_what_the_trainer_needs",
    "test_the_loss_is_checkpointed",
    "test_the_loss_is_compiled",
    "test_torch_is_imported_when_it_is_needed",
}


def pytest_configure():
    """One thread, for fixtures of modules too, which run before those of a test: two threads sum in another order.

    Programs that tests start must not inherit from nohup, from a shell that runs the tests in the background, or from a
    CI that SIGHUP or SIGINT is ignored.
    """
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="the tests to run while editing, and no others")


def pytest_ignore_collect(collection_path, config):
    is_other = collection_path.suffix == ".py" and name_of(collection_path) not in QUICK
    return True if config.getoption("--quick") and is_other else None


def pytest_collection_modifyitems(config, items):
    is_quick = config.getoption("--quick")
    place = {name: number for number, name in enumerate(QUICK if is_quick else LONGEST)}
    items.sort(key=lambda item: place.get(name_of(item.path), len(place)))
    if is_quick:
        slow = [item for item in items if getattr(item, "originalname", None) in SLOW]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
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
    """As in the lists above."""
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
