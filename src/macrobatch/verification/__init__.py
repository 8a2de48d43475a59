"""`verify`: prove it on your own model, and name the cause where it fails.

A step's way through: it is run under hooks (`witness`, which notes what was `seen`) and put back as it was (`keep`);
its samples are found in the batch (`rows`); what one big batch gives is computed (`bigbatch`) and compared
(`comparison`); what differs is explained (`causes`, `coupling`, `aims`, `clipping`, `weights`) and told (`report`).
`names` says which parameter is which.
"""

from macrobatch.verification.main import verify
from macrobatch.verification.report import Cause, Report

__all__ = ["Cause", "Report", "verify"]
