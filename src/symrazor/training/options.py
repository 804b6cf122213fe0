"""Everything `fit` can be told, checked before any work is done."""

import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from symrazor.core.validation import check_types
from symrazor.inference.razor_config import RazorConfig

Augment = Callable[[Tensor, torch.Generator], Tensor]
DEFAULT_LR = {"adamw": 2e-3, "sgd": 0.03, "muon": 0.01}
FREE_TO_CHANGE = {"keep", "patience", "save", "resume", "save_every", "device", "progress"}
"""Options that may differ when a run is resumed: they do not move the weights."""


@dataclass(frozen=True)
class FitConfig:
    """Everything `fit` can be told.

    There is no label smoothing: the evidence is a probability of the labels that were observed, and
    cross entropy with smoothed labels is not minus the logarithm of one.

    Args:
        epochs: passes over the data.
        batch_size: data per training step.
        optimizer: "adamw", "sgd" with momentum 0.9 or "muon" (see `stepper`).
        lr: peak learning rate of the schedule; by default 0.002 (adamw), 0.01 (muon) or 0.03 (sgd).
        warmup: fraction of all steps in which the learning rate rises linearly; a cosine follows.
        sam_radius: take each gradient so far up the slope of the training loss (sharpness-aware
            minimisation, with any optimizer; 0.05 is usual), at twice the cost; None for not.
        sam_from: fraction of all steps that are plain before the first sharpness-aware one.
        augment: (x, generator) -> x of the same length, for each training batch, on its device;
            all its randomness has to come from the generator. The evidence and the test figures
            are measured on the data as they are.
        start: "near" scales the weights of free paths so that the network starts close to the
            symmetric one (see `symrazor.layers.relaxed.start_near_`), and gives free paths a prior
            precision of 30, or of one fifteenth of the number of data if that is less; a
            `free_precision`, or a `prior_precision` by group, takes the place of that precision.
            "given" leaves the weights unchanged, for a network that is trained already.
        switch_off: try, from the middle of the training on, to do without free paths, and leave
            those off whose loss is made good by the others (see `trials`).
        every: epochs between evidence steps.
        burn_in: training steps before the first update; None for a fifth of all steps.
        burn_in_most: training steps after which updates begin at the latest; from `burn_in` to then
            they wait for the training loss to settle (see `symrazor.training.burn_in`). None for
            `burn_in`: no waiting.
        subset: data per evidence step, scaled up; None for all of them, at most 5,000.
        evidence_batch: data in a batch of an evidence step; None for `batch_size`, or, if the
            network has no hyperparameters, whose gradient would need the memory, for 250 on a GPU
            and at least 250 on a CPU, but no more than have 400,000 numbers.
        patience: stop after so many evidence steps in a row, counted from the burn-in, without a
            new best evidence; None for never.
        keep: return the state with the "best" evidence or the "last" one.
        seed: of the shuffling, the augmentation and the probes.
        save: directory for checkpoints of a new run.
        resume: directory to continue from, and to save to; a missing or empty one is a new run.
        save_every: epochs between checkpoints.
        device: "auto" (where the model is), "cpu", "cuda", ...
        progress: show a progress bar; None for "if this is a terminal".
        razor: options of the evidence step; `seed` and `burn_in` are set here, not there.
    """

    epochs: int = 60
    batch_size: int = 128
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float | None = None
    warmup: float = 0.05
    sam_radius: float | None = None
    sam_from: float = 0.0
    augment: Augment | None = None
    start: Literal["near", "given"] = "near"
    switch_off: bool = False
    every: int = 5
    burn_in: int | None = None
    burn_in_most: int | None = None
    subset: int | None = None
    evidence_batch: int | None = None
    patience: int | None = None
    keep: Literal["best", "last"] = "best"
    seed: int = 0
    save: str | Path | None = None
    resume: str | Path | None = None
    save_every: int = 5
    device: str = "auto"
    progress: bool | None = None
    razor: RazorConfig = field(default_factory=RazorConfig)

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        check_types(self)
        least = dict.fromkeys(("epochs", "batch_size", "every", "save_every", "patience"), 1)
        least |= {"evidence_batch": 1, "subset": 1, "burn_in": 0, "burn_in_most": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"expected {name} of at least {bound}, got {value}")
        _check_seed(self.seed)
        if self.optimizer not in DEFAULT_LR:
            hint = {"sam": "; do optimizer='sgd', sam_radius=0.05"}.get(self.optimizer, "")
            known = sorted(DEFAULT_LR)
            raise ValueError(f"expected optimizer in {known}, got {self.optimizer!r}{hint}")
        if self.start not in ("near", "given"):
            raise ValueError(f"expected start 'near' or 'given', got {self.start!r}")
        if self.keep not in ("best", "last"):
            raise ValueError(f"expected keep 'best' or 'last', got {self.keep!r}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"expected a positive, finite lr, got {self.lr}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"expected warmup as a fraction in [0, 1), got {self.warmup}")
        if self.sam_radius is not None and not 0 < self.sam_radius < math.inf:
            raise ValueError(f"expected a positive, finite sam_radius, got {self.sam_radius}")
        if not 0 <= self.sam_from < 1:
            raise ValueError(f"expected sam_from as a fraction in [0, 1), got {self.sam_from}")
        if self.sam_from and self.sam_radius is None:
            raise ValueError(f"expected a sam_radius with sam_from={self.sam_from}, got None")
        _check_razor(self.razor)
        both = [Path(p) for p in (self.save, self.resume) if p is not None]
        if len(set(both)) > 1:
            raise ValueError(
                f"expected one directory, got save={str(self.save)!r} and resume="
                f"{str(self.resume)!r}; do: resume=... alone, which saves there too"
            )

    def change(self, **changes: Any) -> "FitConfig":
        """A copy with some fields of this config or of its `razor` replaced.

        Raises:
            ValueError: a field that neither has.
        """
        mine = {f.name for f in fields(self)}
        theirs = {f.name for f in fields(self.razor)} - mine
        unknown = set(changes) - mine - theirs
        refuse_smoothing(unknown)
        if unknown:
            raise ValueError(
                f"expected options among {sorted(mine | theirs)}, got {sorted(unknown)}"
            )
        razor = changes.pop("razor", self.razor)
        if not isinstance(razor, RazorConfig):
            raise ValueError(f"expected razor as a RazorConfig, got {razor!r}")
        razor = replace(
            razor,
            **{k: changes.pop(k) for k in list(changes) if k in theirs},
        )
        return replace(self, razor=razor, **changes)

    def burn_in_steps(self, total: int) -> tuple[int, int]:
        """Training steps before the first update, of so many in all: at least, at most."""
        least = total // 5 if self.burn_in is None else self.burn_in
        return least, least if self.burn_in_most is None else self.burn_in_most

    def fixed(self) -> dict[str, Any]:
        """The options that a resumed run must share, as plain JSON values.

        Of `augment` they say only whether there is one: a function has no name to rely on.
        """
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        kept |= {f"razor.{f.name}": getattr(self.razor, f.name) for f in fields(self.razor)}
        kept |= {"augment": self.augment is not None}
        kept = {k: v for k, v in kept.items() if k not in FREE_TO_CHANGE | {"razor"}}
        plain: dict[str, Any] = json.loads(json.dumps(kept, default=_as_plain))
        return plain


def refuse_smoothing(names: Container[str]) -> None:
    """Say why there is no such option, to those who ask for it."""
    if "label_smoothing" in names:
        raise ValueError(
            "expected no label_smoothing: cross entropy with smoothed labels is not a "
            "likelihood of the labels, so there would be no evidence to measure"
        )


def _check_seed(seed: int) -> None:
    """Refuse what torch's generators do not take."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"expected a seed from -2^63 to 2^63 - 1, got {seed}")


def _check_razor(razor: RazorConfig) -> None:
    """Refuse options of the razor that `fit` sets itself."""
    for name in ("seed", "burn_in"):
        value = getattr(razor, name)
        if value != getattr(RazorConfig, name):
            raise ValueError(
                f"RazorConfig({name}={value}) has no effect in fit, which sets the {name} of its "
                f"razor itself. Use FitConfig({name}={value}), or fit(..., {name}={value})"
            )


def _as_plain(value: Any) -> Any:
    """What JSON does not know: other mappings, numbers of numpy, torch or Python's own."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)
