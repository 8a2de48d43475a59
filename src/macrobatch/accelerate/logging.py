"""`get_logger`: a logger that speaks for one process, or for each of them."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from macrobatch.accelerate.state import AcceleratorState


class ProcessLogger(logging.LoggerAdapter[logging.Logger]):
    """Every call takes ``main_process_only`` (True) and ``in_order`` (False: the processes speak as they come)."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        state = AcceleratorState()
        main_process_only, in_order = options.pop("main_process_only", True), options.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        options.setdefault("stacklevel", 2)
        for turn in range(state.num_processes) if in_order else (state.process_index,):
            if turn == state.process_index and (in_order or not main_process_only or state.is_main_process):
                super().log(level, msg, *args, **options)
            if in_order:
                state.wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> ProcessLogger:
    """A logger for a program of several processes.

    Args:
        name: of the logger, mostly ``__name__``.
        log_level: e.g. "INFO"; None: what ACCELERATE_LOG_LEVEL says, or the logger's own.
    """
    logger = logging.getLogger(name)
    if (level := log_level or os.environ.get("ACCELERATE_LOG_LEVEL")) is not None:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return ProcessLogger(logger, {})
