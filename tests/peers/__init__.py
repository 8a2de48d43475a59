"""`make peers`: the test suites of transformers, TRL, Accelerate and Lightning, with our classes in place of theirs."""
