r"""Options of `fit`, checked before any work is done, and the schedules that they define.

`Schedule` is the learning rate of every training in the library. `BurnIn` decides when the
evidence steps of `fit` may start to change precisions and other hyperparameters.

**Why a burn-in.** A free path that has not learned anything yet has no evidence in its favour, so
an early evidence step would switch it off. A free path that learns faster than the equivariant path
beside it looks indispensable. Both conclusions hold for the current weights and fail for the
trained ones, so hyperparameters wait until the training loss has settled.

**When the loss has settled.** Training is divided into `N_INTERVALS` intervals, each with the mean
loss of its steps. Let $b$ be the median over the last `WINDOW` completed intervals, $a$ the median
over the `WINDOW` intervals before them, and $s$ the median over the first `WINDOW`. The loss has
settled if

$$a - b \le \max(\tfrac{1}{20} (s - b),\ \text{noise}),$$

that is, if it falls by less than a twentieth of its total decrease, or by less than its
fluctuation. The noise is half the median absolute second difference, which vanishes for a steady
decrease and approximates the standard deviation of $a - b$ for independent errors. The rule uses
differences only, so the loss may have any unit and sign, and medians, so no single interval
decides. It cannot recognise a plateau that training will leave later; the minimum number of steps
guards against that.
"""

import json
import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.core.validation import check_at_least, check_types, replace_nested, short_repr
from symrazor.inference.evidence import RazorConfig
from symrazor.inference.razor_state import State
from symrazor.layers.relaxed import FREE_PATH_PRECISION

log = logging.getLogger("symrazor")

Augment = Callable[[Tensor, torch.Generator], Tensor]
DEFAULT_LR = {"adamw": 2e-3, "sgd": 0.03, "muon": 0.01}
MAY_CHANGE_ON_RESUME = {
    *("keep", "patience", "restart", "save", "resume", "save_every", "device", "progress"),
}
"""Options that do not affect the weights of a step."""
AFFORDABLE = "affordable"
"""Default of `FitConfig.evidence_structure`."""
DEFAULT_WARMUP = 0.05
"""Fraction of all steps in which the learning rate rises."""
BURN_IN_FRACTION = 0.2
"""Fraction of all steps before the first change of a hyperparameter."""
DATA_PER_FREE_PRECISION = 15
"""A free path learns only if its prior precision is at most one per this many examples."""
GENTLE_PRECISION = 0.1
"""Largest starting precision in the second training, and its factor to that of the first."""
GENTLE_BURN_IN = 0.5
"""Fraction of the second training before the first change of a hyperparameter."""
N_INTERVALS = 60
"""Intervals into which a training is divided (one per step if there are fewer steps)."""
WINDOW = 3
"""Intervals per median: a twentieth of the training."""
SETTLED_FRACTION = 0.05
"""A settled loss falls between windows by at most this fraction of its total decrease."""


@dataclass(frozen=True, repr=False)
class FitConfig:
    """Options of `fit`.

    There is no label smoothing: the evidence is the probability of the observed labels, and cross
    entropy with smoothed labels is not a negative log likelihood.

    Args:
        epochs: passes over the training data.
        batch_size: examples per training step.
        optimizer: "adamw", "sgd" (momentum 0.9) or "muon"; see `optimisers`.
        lr: peak learning rate; None for 0.002 (adamw), 0.03 (sgd) or 0.01 (muon).
        warmup: fraction of all steps with a rising learning rate, then a cosine.
        sam_radius: radius of sharpness-aware steps (0.05 is common, twice the cost); None for none.
        sam_from: fraction of all steps before the first sharpness-aware step.
        augment: function (x, generator) -> x applied to each training batch.
            All its randomness must come from the generator. Evidence and test figures use the
            data without augmentation.
        start: "near" starts close to the equivariant network; "given" keeps the weights.
            "near" scales down the free paths (`symrazor.layers.relaxed.start_near_`) and gives them
            a prior precision of 30, or a fifteenth of the number of examples if that is less.
            `free_precision`, or `prior_precision` by group, replaces that precision.
        switch_off: whether to try to remove free paths from mid-training on.
            A path stays off if the evidence recovers without it; see `trials`.
        every: epochs between evidence steps.
        burn_in: training steps before the first update of hyperparameters; None for a fifth of all.
        burn_in_most: training steps after which updates start in any case; None for `burn_in`.
            Between the two, updates wait until the training loss has settled; see `BurnIn`.
        subset: examples per evidence step, scaled up to all; None for all, at most 5000.
        evidence_batch: examples per batch of an evidence step; None: chosen by memory.
            That is `batch_size` if the network has hyperparameters, else 250 on a GPU, and at least
            250 with at most 400,000 input numbers on a CPU.
        evidence_structure: structure of the curvature for the evidence and the shares of the
            returned state. "affordable" uses the exact curvature where evidence steps have
            Kronecker factors and it takes a few seconds (`Razor.is_exact_affordable`), else the
            `structure` of the evidence steps. "auto" replaces an exact curvature that costs too
            much by lower bounds. None: the `structure` of the evidence steps. `RazorConfig` lists
            all structures.
        evidence_samples: samples for the evidence of the returned state, scaled up; None for all.
        equivariance: whether the reading measures equivariance errors on training inputs.
        refine: rounds of refinement after the last epoch, see `training.refinement`. Each takes the
            weights to the mode of the posterior over all data, and an evidence step with "auto". A
            few rounds raise the evidence of small data by tens of nats. They use the data without
            augmentation.
        patience: evidence steps without a new best before stopping, after burn-in; None: no limit.
        keep: return the state with the "best" evidence or the "last" state.
        restart: whether a network whose weights the evidence has pruned is trained once more with a
            weaker prior; see `symrazor.training.fit`. The one with the higher evidence is
            returned. The second training saves no checkpoints.
        seed: seed of shuffling, augmentation and probes.
        save: directory for the checkpoints of a new run.
        resume: directory to continue from and save to, may be missing or empty.
        save_every: epochs between checkpoints.
        device: "auto" (the device of the model), "cpu", "cuda", ...
        progress: whether to show a progress bar; None: if standard error is a terminal.
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
    evidence_structure: str | None = AFFORDABLE
    evidence_samples: int | None = None
    equivariance: bool = True
    refine: int = 0
    patience: int | None = None
    keep: Literal["best", "last"] = "best"
    restart: bool = True
    seed: int = 0
    save: str | Path | None = None
    resume: str | Path | None = None
    save_every: int = 5
    device: str = "auto"
    progress: bool | None = None
    razor: RazorConfig = field(default_factory=RazorConfig)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        if str(self.optimizer) == "sam":
            raise ValueError("Unknown optimizer 'sam'. Use optimizer='sgd', sam_radius=0.05.")
        check_types(self)
        if self.evidence_structure not in (None, AFFORDABLE):
            replace(self.razor, structure=self.evidence_structure)  # checks the name
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
        check_at_least(self, 1, "epochs", "batch_size", "every", "save_every", "patience")
        check_at_least(self, 1, "evidence_batch", "subset")
        check_at_least(self, 0, "burn_in", "burn_in_most", "refine")
        if self.refine and self.augment is not None:
            raise ValueError(
                f"refine={self.refine} conflicts with augment: the refinement uses unchanged data. "
                "Omit one of them."
            )
        for name in ("lr", "sam_radius"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}.")
        for name in ("warmup", "sam_from"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")

    def change(self, **changes: Any) -> "FitConfig":
        """Return a copy with changed fields, of this config or of its `razor`."""
        reject_label_smoothing(changes)
        if not isinstance(changes.get("razor", self.razor), RazorConfig):
            raise ValueError(f"razor must be a RazorConfig, got {changes['razor']!r}.")
        return replace_nested(self, "razor", changes)

    def burn_in_steps(self, total: int) -> tuple[int, int]:
        """Return the minimum and maximum number of burn-in steps of `total` training steps."""
        shortest = int(total * BURN_IN_FRACTION) if self.burn_in is None else self.burn_in
        return shortest, shortest if self.burn_in_most is None else self.burn_in_most

    def starting_razor(self, n_data: int) -> RazorConfig:
        """Return the razor's options, with the free precision of `start="near"` if none is set."""
        razor = self.razor
        is_set = razor.free_precision is not None or not razor.has_free_precision
        if self.start == "given" or is_set:
            return razor
        precision = min(FREE_PATH_PRECISION, n_data / DATA_PER_FREE_PRECISION)
        return replace(razor, free_precision=precision)

    def gentler(self, total_steps: int) -> "FitConfig":
        """Return the options of a second training, of a network that the evidence has pruned."""
        razor = self.razor
        if isinstance(razor.prior_precision, int | float):
            precision = GENTLE_PRECISION * min(1.0, razor.prior_precision)
            razor = replace(razor, prior_precision=precision)
        shortest, longest = self.burn_in_steps(total_steps)
        burn_in = max(int(GENTLE_BURN_IN * total_steps), shortest)
        longest = max(burn_in, longest)
        return replace(
            self, razor=razor, burn_in=burn_in, burn_in_most=longest, save=None, resume=None
        )

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


@dataclass(frozen=True)
class Schedule:
    r"""Learning rate over time, as a fraction of its peak: zero, linear rise, cosine decay.

    $$ r(t) = \min\!\Big(1, \frac{t - \text{hold}}{\text{rise}}\Big) \cdot
       \tfrac12 \Big(1 + \cos \pi \frac{t - \text{decay\_from}}{\text{total} -
       \text{decay\_from}}\Big), \qquad r(t) = 0 \text{ for } t < \text{hold}, $$

    where the cosine factor is 1 before `decay_from`. All times share one unit: training steps, or
    the fraction of the training (`total=1`).

    Args:
        total: length of the training.
        hold: time before which the rate is zero.
        rise: duration of the linear rise after `hold`; 0 for a jump to the peak.
        decay_from: time at which the cosine decay starts; `total` for no decay.
    """

    total: float = 1.0
    hold: float = 0.0
    rise: float = 0.0
    decay_from: float = 0.0

    @classmethod
    def with_warmup(cls, n_steps: int, warmup: float = 0.0) -> "Schedule":
        r"""Return the schedule of `fit`: a warm-up, then a cosine decay over the other steps.

        With $T$ steps and $W = \lfloor \text{warmup} \cdot T \rfloor$, step
        $t = 0, 1, \ldots, T - 1$ has the rate $(t + 1) / (W + 1)$ for $t < W$ and
        $\tfrac12 (1 + \cos \pi \tfrac{t - W}{T - W})$ afterwards.
        """
        n_warmup = int(warmup * n_steps)
        # The rise starts one step early, so that the first step has a positive rate.
        return cls(n_steps, hold=-1, rise=n_warmup + 1, decay_from=n_warmup)

    def decay(self, time: float) -> float:
        """Return the elapsed fraction of the decay, between 0 and 1."""
        if time <= self.decay_from:
            return 0.0
        return min(1.0, (time - self.decay_from) / (self.total - self.decay_from))

    def __call__(self, time: float) -> float:
        """Return the learning rate at `time` as a fraction of its peak."""
        if time < self.hold:
            return 0.0
        rise = min(1.0, (time - self.hold) / self.rise) if self.rise else 1.0
        return rise * 0.5 * (1 + math.cos(math.pi * self.decay(time)))


def has_settled(losses: Sequence[float]) -> bool:
    """Return whether the mean losses of consecutive intervals have settled at the end."""
    if len(losses) < 2 * WINDOW:
        return False
    first, last = losses[:WINDOW], losses[-2 * WINDOW :]
    older, newer = median(last[:WINDOW]), median(last[WINDOW:])
    bends = [abs(a - 2 * b + c) for a, b, c in zip(last, last[1:], last[2:], strict=False)]
    return older - newer <= max(SETTLED_FRACTION * (median(first) - newer), median(bends) / 2)


class BurnIn:
    """Decide when hyperparameters may start to change.

    The burn-in ends after `min_steps` once the loss has settled, at the latest after `max_steps`,
    of `n_steps` in the whole training. Losses are accumulated on their own device and read only
    when `over` is called, so the burn-in does not synchronise a GPU at every step.
    """

    def __init__(self, min_steps: int, max_steps: int, n_steps: int, device: torch.device) -> None:
        self.min_steps, self.max_steps, self.n_steps = min_steps, max_steps, n_steps
        self.n_intervals = min(N_INTERVALS, n_steps)
        self.sums = torch.zeros(self.n_intervals, dtype=torch.float64, device=device)
        self.ended = False

    def add(self, loss: Float[Tensor, ""], step: int) -> None:
        """Record the loss of a step; the first step is 0."""
        if self.max_steps > self.min_steps and not self.ended:
            self.sums[step * self.n_intervals // self.n_steps] += loss

    def over(self, steps_done: int) -> bool:
        """Return whether the burn-in has ended; once it has, it stays so."""
        if steps_done >= self.min_steps and not self.ended:
            settled = has_settled(self.mean_losses(steps_done))
            self.ended = settled or steps_done >= self.max_steps
            if self.ended and self.max_steps > self.min_steps:
                reason = "the training loss has settled" if settled else "burn_in_most is reached"
                log.info("Burn-in ends after %d steps: %s.", steps_done, reason)
        return self.ended

    def mean_losses(self, steps_done: int) -> list[float]:
        """Return the mean loss of each completed interval."""
        n = self.n_intervals
        bounds = [-(-interval * self.n_steps // n) for interval in range(n + 1)]
        return [
            total / (end - start)
            for total, start, end in zip(self.sums.tolist(), bounds, bounds[1:], strict=False)
            if end <= steps_done
        ]

    def state_dict(self) -> State:
        """Return the state for a checkpoint."""
        return {"sums": self.sums.clone(), "ended": self.ended}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`."""
        self.sums.copy_(state["sums"])
        self.ended = state["ended"]
