"""A small run, as a file, for tests of runs."""

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from symrazor.runs.config import RunConfig, read_config
from symrazor.runs.writing import Owner, read_manifest, seal

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


def reseal(folder: Path, *names: str) -> None:
    """Accept the files of a run folder as they are, as a stranger would who made the folder."""
    manifest = read_manifest(folder)
    owner = Owner("discover") if manifest is None else manifest.owner
    parts = names or (() if manifest is None else tuple(manifest.files or ()))
    seal(folder, owner, [name for name in parts if (folder / name).is_file()])


_CALLS: list[int] = []


def perceptron(hidden: int) -> nn.Module:
    """Return the network that configurations name as "run_case:perceptron"."""
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def impatient(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The user stops the process in the step that CTRL_C says."""
    _CALLS.append(0)
    if len(_CALLS) == int(os.environ.get("CTRL_C", "0")):
        os.kill(os.getpid(), signal.SIGINT)
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def deadly(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The second of two processes dies in its eighth step, the first time."""
    _CALLS.append(0)
    mark = os.environ.get("DEATH")
    if mark and len(_CALLS) == 8 and os.environ.get("RANK") == "1" and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def ordinary() -> nn.Module:
    """Return a network of torch modules, for a configuration."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))


class Own(nn.Module):
    """A network of a user's own class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.layer(x.flatten(1))
        return out
