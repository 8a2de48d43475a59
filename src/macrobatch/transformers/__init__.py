"""Exact gradient accumulation inside the `Trainer` of transformers, and inside TRL's trainers, which are subclasses.

>>> from transformers import Trainer
>>> from macrobatch.transformers import exact
>>> trainer_class = exact(Trainer)                      # or exact(Trainer, micro=by_tokens(8192), cuda_graph=True)
>>> issubclass(trainer_class, Trainer), trainer_class.__name__
(True, 'ExactTrainer')
"""

from macrobatch.errors import pip_install as _pip_install

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "macrobatch.transformers builds on the library transformers, which is not installed: "
        f"{_pip_install('transformers')}."
    ) from error

from macrobatch.transformers.trainer import exact

__all__ = ["exact"]
