"""A benchmark in a process of its own."""

import os
import subprocess
import sys

from harness import ROOT


def run_benchmark(script: object, *words: object) -> "subprocess.CompletedProcess[str]":
    """On one core of a CPU, from this checkout."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, (script, *words))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
