"""`macrobatch.verify` as a module: ``from macrobatch.verify import Report``.

The package's own name `verify` is the function, and Python hands that out for ``import macrobatch.verify as v`` too. So
the function has the names of this module as attributes.
"""

from macrobatch.verification import Cause, Report, verify

__all__ = ["Cause", "Report", "verify"]

for _name in __all__:
    setattr(verify, _name, globals()[_name])
