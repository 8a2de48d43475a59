"""`verify`: compare a training step with one big batch, and name the cause if they differ.

`step_watcher` runs the step under hooks and fills an `observation`; `saved_state` restores everything afterwards.
`sample_matching` finds the step's samples in the batch, `bigbatch` computes their gradient at once, and `comparison`
compares. `causes` explains the difference, with `coupling`, `label_causes`, `term_causes`, `joint_causes`, `clipping`,
`weighting` and `doubts`, by the names in `catalogue`; `report` holds the result. `names` gives parameters the same
names in all copies of a model, `whole_loss` turns a loss of the whole batch (``joint=``) into one function, and
`trainers` handles trainers of other libraries.
"""

from macrobatch.verification.main import verify
from macrobatch.verification.report import Cause, Report

__all__ = ["Cause", "Report", "verify"]
