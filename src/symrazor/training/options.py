"""Options of `fit`, checked before any work is done."""

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
from symrazor.training.schedule import BURN_IN_FRACTION, DEFAULT_WARMUP

Augment = Callable[[Tensor, torch.Generator], Tensor]
DEFAULT_LR = {"adamw": 2e-3, "sgd": 0.03, "muon": 0.01}
MAY_CHANGE_ON_RESUME = {"keep", "patience", "save", "resume", "save_every", "device", "progress"}
"""Options that do not affect the weights of a step."""


@dataclass(frozen=True)
class FitConfig:
    """Options of `fit`.

    There is no label smoothing: the evidence is the probability of the observed labels, and cross
    entropy with smoothed labels is not a negative log likelihood.

    Args:
        epochs: passes over the training data; default 60.
        batch_size: examples per training step; default 128.
        optimizer: "adamw" (default), "sgd" (momentum 0.9) or "muon"; see `optimisers`.
        lr: peak learning rate; default 0.002 (adamw), 0.03 (sgd) or 0.01 (muon).
        warmup: fraction of all steps with a rising learning rate, then a cosine; default 0.05.
        sam_radius: radius of sharpness-aware steps (0.05 is common, twice the cost); default None.
        sam_from: fraction of all steps before the first sharpness-aware step; default 0.
        augment: function (x, generator) -> x applied to each training batch; default None.
            All its randomness must come from the generator. Evidence and test figures use the
            data without augmentation.
        start: "near" (default) starts close to the equivariant network; "given" keeps the weights.
            "near" scales down the free paths (`symrazor.layers.relaxed.start_near_`) and gives them
            a prior precision of 30, or a fifteenth of the number of examples if that is less.
            `free_precision`, or `prior_precision` by group, replaces that precision.
        switch_off: whether to try to remove free paths from mid-training on; default False.
            A path stays off if the evidence recovers without it; see `trials`.
        every: epochs between evidence steps; default 5.
        burn_in: training steps before the first update of hyperparameters; default a fifth of all.
        burn_in_most: training steps after which updates start in any case; default `burn_in`.
            Between the two, updates wait until the training loss has settled; see `schedule`.
        subset: examples per evidence step, scaled up to all; default all, at most 5,000.
        evidence_batch: examples per batch of an evidence step; default chosen by memory.
            That is `batch_size` if the network has hyperparameters, else 250 on a GPU, and at least
            250 with at most 400,000 input numbers on a CPU.
        patience: evidence steps without a new best before stopping, after burn-in; default None.
        keep: return the state with the "best" evidence (default) or the "last" state.
        seed: seed of shuffling, augmentation and probes; default 0.
        save: directory for the checkpoints of a new run; default None.
        resume: directory to continue from and save to, may be missing or empty; default None.
        save_every: epochs between checkpoints; default 5.
        device: "auto" (default, the device of the model), "cpu", "cuda", ...
        progress: whether to show a progress bar; default None, if standard error is a terminal.
        razor: options of the evidence step. `seed` and `burn_in` are set here instead.
    """

    epochs: int = 60
    batch_size: int = 128
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: float | None = None
    warmup: float = DEFAULT_WARMUP
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
        """Check types and ranges."""
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        if str(self.optimizer) == "sam":
            raise ValueError("Unknown optimizer 'sam'. Use optimizer='sgd', sam_radius=0.05.")
        check_types(self)
        self._check_ranges()
        if self.sam_from and self.sam_radius is None:
            raise ValueError(f"sam_from={self.sam_from} has no effect without a sam_radius.")
        for name in ("seed", "burn_in"):
            value = getattr(self.razor, name)
            if value != getattr(RazorConfig, name):
                raise ValueError(
                    f"RazorConfig({name}={value}) has no effect in fit, which sets the {name} of "
                    f"its razor itself. Use FitConfig({name}={value}), or fit(..., {name}={value})."
                )
        directories = {Path(p) for p in (self.save, self.resume) if p is not None}
        if len(directories) > 1:
            raise ValueError(
                f"save={str(self.save)!r} and resume={str(self.resume)!r} are different "
                "directories. Pass resume alone; it saves to the same directory."
            )

    def _check_ranges(self) -> None:
        minimum = dict.fromkeys(("epochs", "batch_size", "every", "save_every", "patience"), 1)
        minimum |= {"evidence_batch": 1, "subset": 1, "burn_in": 0, "burn_in_most": 0}
        for name, bound in minimum.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}, got {value}.")
        for name in ("lr", "sam_radius"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}.")
        for name in ("warmup", "sam_from"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        if not -(2**63) <= self.seed < 2**63:  # the range of torch's generators
            raise ValueError(f"seed must be between -2^63 and 2^63 - 1, got {self.seed}.")

    def change(self, **changes: Any) -> "FitConfig":
        """Return a copy with changed fields, of this config or of its `razor`.

        Raises:
            ValueError: neither config has such a field.
        """
        fit_names = {f.name for f in fields(self)}
        razor_names = {f.name for f in fields(self.razor)} - fit_names
        unknown = set(changes) - fit_names - razor_names
        reject_label_smoothing(unknown)
        if unknown:
            raise ValueError(
                f"Unknown options {sorted(unknown)}. Known options: "
                f"{', '.join(sorted(fit_names | razor_names))}."
            )
        razor = changes.pop("razor", self.razor)
        if not isinstance(razor, RazorConfig):
            raise ValueError(f"razor must be a RazorConfig, got {razor!r}.")
        razor_changes = {k: changes.pop(k) for k in list(changes) if k in razor_names}
        return replace(self, razor=replace(razor, **razor_changes), **changes)

    def burn_in_steps(self, total: int) -> tuple[int, int]:
        """Return the minimum and maximum number of burn-in steps of `total` training steps."""
        shortest = int(total * BURN_IN_FRACTION) if self.burn_in is None else self.burn_in
        return shortest, shortest if self.burn_in_most is None else self.burn_in_most

    def fixed(self) -> dict[str, Any]:
        """Return the options that a resumed run must share, as plain JSON values.

        Functions cannot be compared, so `augment` is reduced to whether there is one.
        """
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        options |= {f"razor.{f.name}": getattr(self.razor, f.name) for f in fields(self.razor)}
        options |= {"augment": self.augment is not None}
        options = {k: v for k, v in options.items() if k not in MAY_CHANGE_ON_RESUME | {"razor"}}
        plain: dict[str, Any] = json.loads(json.dumps(options, default=_as_plain))
        return plain


def reject_label_smoothing(names: Container[str]) -> None:
    """Explain why `label_smoothing` is not an option, if it is among the names."""
    if "label_smoothing" in names:
        raise ValueError(
            "label_smoothing is not supported: cross entropy with smoothed labels is not a "
            "likelihood of the labels, so it has no evidence."
        )


def _as_plain(value: Any) -> Any:
    """Convert mappings and numbers of numpy or torch for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else str(value)
