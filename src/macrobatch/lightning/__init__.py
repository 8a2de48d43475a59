"""Lightning's Trainer with exact gradient accumulation: ``Trainer(strategy=ExactStrategy("ddp", steps=8))``.

docs/from-lightning.md says what stays as it is, and what is better.
"""

from macrobatch.lightning.strategy import ExactStrategy

__all__ = ["ExactStrategy"]
