"""`macrobatch train`: a trainer for causal language models on top of `MacroStep`. `trainer` has its main path."""
