"""Describe a run in a TOML file, train it, and read and write run folders.

May import: `training`, `dynamics`, `symmetry` and the packages below them.
"""

from symrazor.runs.records import Run, load_run
from symrazor.runs.training import run

__all__ = ["Run", "load_run", "run"]
