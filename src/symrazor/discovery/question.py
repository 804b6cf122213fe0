"""What is asked, of which data, and how."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symrazor.accelerate.devices import resolve_device
from symrazor.data import Tensors
from symrazor.discovery.budget import Make
from symrazor.discovery.structures import Family
from symrazor.discovery.user_groups import Offered, as_groups
from symrazor.training.options import FitConfig

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """How to discover.

    Args:
        minutes: for the training of all candidates together.
        epochs: passes over all data for each candidate, instead of a time.
        seed: of splits, initial weights, shuffling and probes.
        device: "auto" (CUDA if there is one), "cpu", "cuda", ...
        groups: symmetries to relax, by name, as files that end with .json, or as
            `symrazor.groups.Group`s; None for what the kind of data has.
        held_out: part of the data that is kept for the report alone, where none came with them.
        invariances: whether to learn which transformations of pictures leave their label alone;
            None for "if there is a time to share, rather than a number of epochs".
        positions: trajectories are positions only; velocities by finite differences stand for
            momenta.
        out: run folder; what is unfinished there is taken up again.
        progress: show bars; None for "if this is a terminal".
    """

    minutes: float = 2.0
    epochs: int | None = None
    seed: int = 0
    device: str = "auto"
    groups: tuple[Offered, ...] | None = None
    held_out: float = 0.2
    invariances: bool | None = None
    positions: bool = False
    out: Path | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check ranges, and read groups that are files."""
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"expected minutes above 0, got {self.minutes}; do --minutes 2")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"expected epochs of at least 1, got {self.epochs}; do --epochs 50")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"expected a seed of 64 bits, got {self.seed}; do --seed 0")
        if self.device != "auto":
            self._check_device()
        if not 0 <= self.held_out < 1:
            raise ValueError(f"expected held_out as a fraction in [0, 1), got {self.held_out}")
        if self.groups is not None:
            object.__setattr__(self, "groups", as_groups(self.groups))

    def _check_device(self) -> None:
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise ValueError(
                f"expected a device: auto, cpu or cuda, got {self.device!r}; do --device auto"
            ) from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"expected a device that is there, got {self.device!r} without CUDA; "
                "do --device auto"
            )

    def change(self, **changes: Any) -> "Options":
        """A copy with some fields replaced.

        Raises:
            ValueError: a field that is not there.
        """
        known = {f.name for f in fields(self)}
        if not set(changes) <= known:
            got = sorted(set(changes) - known)
            raise ValueError(f"expected options among {sorted(known)}, got {got}")
        if changes.get("out") is not None:
            changes["out"] = Path(changes["out"])
        if changes.get("groups") is not None:
            changes["groups"] = as_groups(changes["groups"])
        return replace(self, **changes)

    def work(self, question: str) -> Path | None:
        """Folder for what is not finished of a question."""
        return None if self.out is None else self.out / "unfinished" / slug(question)

    def place(self) -> str:
        """The device to train on."""
        return resolve_device(self.device)


@dataclass(frozen=True)
class Asked:
    """One question: its data as the networks see them, and what is compared.

    Args:
        name: of the question.
        question: in words.
        family: the candidates.
        train: prepared training data.
        test: prepared held-out data.
        likelihood: makes a fresh one.
        config: of training; None to plan one for the time given.
        ordered: whether inputs are lists of points, whose order may matter.
    """

    name: str
    question: str
    family: Family
    train: Tensors
    test: Tensors | None
    likelihood: Make
    config: FitConfig | None = None
    ordered: bool = False


def some(n: int, count: int, seed: int) -> Tensor:
    """Which of n data are used: all, or so many by chance."""
    if count >= n:
        return torch.arange(n)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:count].sort().values


def slug(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
