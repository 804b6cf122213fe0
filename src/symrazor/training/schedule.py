r"""Compute when and how fast training moves: learning rates, and the burn-in of the prior.

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

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.inference.razor_state import State

log = logging.getLogger("symrazor")

DEFAULT_WARMUP = 0.05
"""Fraction of all steps in which the learning rate rises."""
BURN_IN_FRACTION = 0.2
"""Fraction of all steps before the first change of a hyperparameter."""
N_INTERVALS = 60
"""Intervals into which a training is divided (one per step if there are fewer steps)."""
WINDOW = 3
"""Intervals per median: a twentieth of the training."""
SETTLED_FRACTION = 0.05
"""A settled loss falls between windows by at most this fraction of its total decrease."""


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

        With $W = \lfloor \text{warmup} \cdot T \rfloor$, step $t = 0, 1, \ldots, T - 1$ has the
        rate $(t + 1) / (W + 1)$ for $t < W$ and $\tfrac12 (1 + \cos \pi \tfrac{t - W}{T - W})$
        afterwards.

        Args:
            n_steps: number of training steps T.
            warmup: fraction of the steps in the warm-up.
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

    Losses are accumulated on their own device and read only when `over` is called, so the burn-in
    does not synchronise a GPU at every step.

    Args:
        min_steps: steps before the burn-in can end.
        max_steps: steps after which it ends even if the loss has not settled.
        n_steps: steps of the whole training.
        device: device of the losses.
    """

    def __init__(self, min_steps: int, max_steps: int, n_steps: int, device: torch.device) -> None:
        """Start with no steps."""
        self.min_steps, self.max_steps, self.n_steps = min_steps, max_steps, n_steps
        self.n_intervals = min(N_INTERVALS, n_steps)
        self.sums: Float[Tensor, "intervals"] = torch.zeros(
            self.n_intervals, dtype=torch.float64, device=device
        )
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
