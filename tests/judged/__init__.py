"""Training steps for `verify`: right ones and planted mistakes, on one process and on ranks, with their verdicts."""
