"""Benchmarks are run by hand, so that a name of hflow that has changed would not be noticed there."""

import sys
from pathlib import Path

import forked_python

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib
from pathlib import Path

for file in sorted(Path("benchmarks").rglob("*.py")):
    # Recipes are loaded by hflow. Programs of peers run in environments of their own.
    if {"recipes", "peers"}.isdisjoint(file.parts):
        try:
            importlib.import_module(".".join(file.with_suffix("").parts))
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] in ("benchmarks", "hflow"):
                raise
            print(file, "is not imported:", error)
"""


def test_every_benchmark_can_be_imported():
    done = forked_python.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
