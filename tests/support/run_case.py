"""A small run, as a file, for tests of runs."""

from pathlib import Path

from symrazor.runs.config import RunConfig, read_config

SMALL = """
[data]
name = "digits"
task = "digit"
limit = 60

[model]
width = 2

[fit]
epochs = 2
every = 1
burn_in = 0
batch_size = 20
lr = 0.01

[razor]
estimator = "mc"
"""


def small(tmp_path: Path, text: str = SMALL) -> RunConfig:
    (tmp_path / "small.toml").write_text(text)
    return read_config(tmp_path / "small.toml")
