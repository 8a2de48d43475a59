"""The suites: which files of a peer's repository are run, and what takes the place of what."""

from __future__ import annotations

from dataclasses import dataclass

Group = tuple[str, ...]  # files and folders that one process runs


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tests of a peer.

    Attributes:
        package: what its tests import.
        ours: the function that says what takes the place of what, as "module:name".
        folder: where its tests are run, relative to the checkout.
        groups: what is run, relative to ``folder``.
    """

    package: str
    ours: str
    folder: str = "."
    groups: tuple[Group, ...]


def _groups(pattern: str, *lines: str) -> tuple[Group, ...]:
    """A group for each line of names, which the pattern makes paths of."""
    return tuple(tuple(pattern.format(name) for name in line.split()) for line in lines)


SUITES = {
    "transformers": Suite(
        package="transformers",
        ours="peers.plugin:substitute_trainer",
        groups=_groups(
            "tests/trainer/test_{}.py",
            "trainer",
            "trainer_data trainer_accelerator trainer_callback",
            "trainer_checkpointing trainer_evaluation",
            "trainer_optimizers trainer_hyperparameter trainer_seq2seq",
        ),
    ),
    "trl": Suite(
        package="trl",
        ours="peers.plugin:substitute_trainer",
        groups=_groups("tests/test_{}_trainer.py", "sft", "dpo", "reward kto", "grpo", "rloo")
        + _groups(
            "tests/experimental/test_{}_trainer.py",
            "distillation gkd minillm server_distillation iw_opd",
            "bco cpo orpo tpo prm",
            "sdft sdpo ssd",
            "a2po gmpo gspo_token grpo_with_replay_buffer",
            "nash_md online_dpo xpo ppo",
            "gold",
        ),
    ),
    "accelerate": Suite(
        package="accelerate",
        ours="peers.plugin:substitute_accelerator",
        groups=_groups(
            "tests/test_{}.py",
            "accelerator grad_sync optimizer scheduler cpu metrics",
            "state_checkpointing kwargs_handlers data_loader logging tracking",
        ),
    ),
    "lightning": Suite(
        package="lightning.pytorch",
        ours="peers.plugin:substitute_strategy",
        folder="tests",
        groups=_groups(
            "tests_pytorch/{}", "loops models/test_hooks.py", "trainer", "callbacks", "checkpointing plugins core"
        ),
    ),
}
