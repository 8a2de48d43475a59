"""Tests of the peers that pass with their class and not with ours, by design, each with its reason.

A key is a pattern, as of `fnmatch`, for the names of tests ("[" stands for itself).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_COPIED = "asks whether the Trainer has the very strategy object that was passed: ExactStrategy takes a copy of it"
_SHOWN = "asks for the name of the strategy in a message of Lightning, which then shows the object that it was given"
_MOCKED = "replaces a variable of a module of Lightning that only its own choice of a strategy reads"
_WRAPPED = "lets a mock of Strategy.backward call the backward of a subclass, which calls the mock, and so on"
_OWN_BACKWARD = "overrides backward() with several batches in a window: refused, because the loss would be scaled twice"

KNOWN: dict[str, dict[str, str]] = {
    "transformers": {},
    "trl": {},
    "accelerate": {
        "*/test_grad_sync.py::SyncScheduler::test_gradient_sync_cpu_multi": (
            "asserts half of the right gradient in a last window of one micro-batch, because windows have two"
        ),
    },
    "lightning": {
        "*/test_accelerator_connector.py::test_custom_accelerator": _COPIED,
        "*/test_accelerator_connector.py::test_sync_batchnorm_set_in_custom_strategy": _COPIED,
        "*/test_accelerator_connector.py::test_interactive_incompatible_backend_error": _SHOWN,
        "*/test_accelerator_connector.py::test_ddp_fork_on_unsupported_platform[*": _SHOWN,
        "*/test_accelerator_connector.py::test_strategy_choice_ddp_fork_in_interactive": _MOCKED,
        "*/test_accelerator_connector.py::test_connector_with_tpu_accelerator_instance": (
            "asks for a strategy of XLA, whose gradients are out of reach: ExactStrategy cannot be made around it"
        ),
        "*/test_backward_calls.py::test_backward_count_with_grad_accumulation": (
            "counts calls of Tensor.backward: the engine of autograd is called directly"
        ),
        "*/test_backward_calls.py::test_backward_count_with_closure": (
            "steps LBFGS in windows of two batches: it asks for the loss again, only that of the last one is at hand"
        ),
        "*/test_manual_optimization.py::test_multiple_optimizers_manual_call_counts[*": _WRAPPED,
        "*/test_manual_optimization.py::test_multiple_optimizers_manual_log": _WRAPPED,
        "*/test_manual_optimization.py::test_step_with_optimizer_closure*": _WRAPPED,
        "*/test_config_validator.py::test_trainer_manual_optimization_config": (
            "asks for Lightning's error for manual optimization with accumulate_grad_batches=2: it is one of ours"
        ),
        "*/test_trainer.py::test_gradient_accumulation_scheduling_last_batch[*": _OWN_BACKWARD,
        "*/test_trainer.py::test_train_loop_system": _OWN_BACKWARD,
        "*/test_gradient_accumulation_scheduler.py::test_trainer_accumulate_grad_batches_with_callback[*": (
            "asks for a GradientAccumulationScheduler among the callbacks: its schedule was given to ExactStrategy"
        ),
    },
}


def reason_for(suite: str, test: str) -> str | None:
    """Why this test differs; None if that is not known."""
    patterns = KNOWN[suite]
    return next((patterns[one] for one in patterns if fnmatchcase(test, one.replace("[", "[[]"))), None)
