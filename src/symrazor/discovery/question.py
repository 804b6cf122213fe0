"""Define a question: its data, its candidates, and the options of `discover`."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.devices import resolve_device
from symrazor.core.likelihood import Likelihood
from symrazor.data import Tensors
from symrazor.discovery.candidates import Family, UserGroup, slug
from symrazor.discovery.groups import as_groups
from symrazor.training.options import FitConfig

Tell = Callable[[str], object]
MakeLikelihood = Callable[[], Likelihood]
MIN_LOG_ODDS = 3.0
"""Nats of evidence below which two networks are not separated: odds of 20 to 1."""


@dataclass(frozen=True)
class Options:
    """Options of `discover`.

    Args:
        minutes: training time of all candidates together.
        epochs: passes over the data for each candidate; replaces `minutes`.
        seed: seed of splits, initial weights, shuffling and random probes.
        device: "auto" (CUDA if available), "cpu", "cuda", ...
        groups: symmetries to relax: names, files that end with .json, or `symrazor.groups.Group`s.
            None for the default of the kind of data.
        held_out: share of the data that is held out for the report, unless the data have a test
            set.
        invariances: whether to learn invariances of images to rotations, shifts, scales and flips.
            None for yes with `minutes` and no with `epochs`.
        positions: whether trajectories are positions only; momenta are then finite differences.
        out: run folder. An unfinished run of the same command is resumed from it.
        progress: whether to show progress bars; None for yes in a terminal.
    """

    minutes: float = 2.0
    epochs: int | None = None
    seed: int = 0
    device: str = "auto"
    groups: tuple[UserGroup, ...] | None = None
    held_out: float = 0.2
    invariances: bool | None = None
    positions: bool = False
    out: Path | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check ranges and read groups that are files."""
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes must be positive, got {self.minutes}.")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}.")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit into 64 bits, got {self.seed}.")
        if self.device != "auto":
            self._check_device()
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be in [0, 1), got {self.held_out}.")
        if self.groups is not None:
            object.__setattr__(self, "groups", as_groups(self.groups))

    def _check_device(self) -> None:
        try:
            device_type = torch.device(self.device).type
        except RuntimeError:
            raise ValueError(f"Unknown device {self.device!r}. Use auto, cpu or cuda.") from None
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"Device {self.device!r} is not available: no CUDA on this machine. Use --device "
                "auto."
            )

    def change(self, **changes: Any) -> "Options":
        """Return a copy with some options replaced.

        Raises:
            ValueError: an unknown option.
        """
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(
                f"Unknown option {', '.join(unknown)}. Options: {', '.join(sorted(known))}."
            )
        if changes.get("out") is not None:
            changes["out"] = Path(changes["out"])
        if changes.get("groups") is not None:
            changes["groups"] = as_groups(changes["groups"])
        return replace(self, **changes)

    def unfinished_folder(self, question: str) -> Path | None:
        """Return the folder for checkpoints of a question; None without a run folder."""
        return None if self.out is None else self.out / "unfinished" / slug(question)

    def resolved_device(self) -> str:
        """Return the device to train on."""
        return resolve_device(self.device)


@dataclass(frozen=True)
class Question:
    """One question to a data set.

    Args:
        name: short name, used for folders.
        text: the question in words.
        family: the candidates.
        train: prepared training data.
        test: prepared held-out data.
        likelihood: returns a new likelihood.
        config: training options; None to plan them for the available time.
    """

    name: str
    text: str
    family: Family
    train: Tensors
    test: Tensors | None
    likelihood: MakeLikelihood
    config: FitConfig | None = None


def subsample(n: int, count: int, seed: int) -> Tensor:
    """Return at most `count` random indices below n, sorted."""
    if count >= n:
        return torch.arange(n)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:count].sort().values


def select(data: Tensors, index: Tensor) -> Tensors:
    """Return the samples of an index."""
    return data[0][index], data[1][index]
