r"""When precisions begin to move: after some steps, and not before the training loss has settled.

A free path that has not learned anything yet is worth nothing, and an evidence step would switch it
off; one that learns faster than the equivariant path beside it looks worth everything. Both are
right about the weights as they are and wrong about those that training would have found. So the
hyperparameters wait.

The training is cut into `PARTS` parts, and of each there is the mean loss of its steps. With the
median $b$ of the last `WINDOW` parts that are done, $a$ of as many before them and $s$ of the first
ones, the loss has settled if

$$a - b \le \max(\tfrac{1}{20} (s - b),\ \text{noise})$$

that is, if it falls by less than a twentieth of all that it has fallen so far, or by less than it
goes up and down: half of the median of the absolute second differences, which a steady fall does
not have; for independent errors, that is about the standard deviation of $a - b$. Differences only,
so that losses may have any unit and sign; medians, so that no single part counts.

A plateau that a training will leave later looks the same. That is what the least number of steps is
for.
"""

import logging
from collections.abc import Sequence
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.inference.razor_state import State

log = logging.getLogger("symrazor")

PARTS = 60
"""Parts of a training, or fewer where there are fewer steps."""
WINDOW = 3
"""Parts whose median counts: a twentieth of the training."""
SLOW = 0.05
"""Share of the fall so far that a loss which has settled may still fall from window to window."""


def settled(losses: Sequence[float]) -> bool:
    """Whether losses, of equal stretches of a training, have come to rest in the last of them."""
    if len(losses) < 2 * WINDOW:
        return False
    first, last = losses[:WINDOW], losses[-2 * WINDOW :]
    older, newer = median(last[:WINDOW]), median(last[WINDOW:])
    bends = [abs(a - 2 * b + c) for a, b, c in zip(last, last[1:], last[2:], strict=False)]
    return older - newer <= max(SLOW * (median(first) - newer), median(bends) / 2)


class BurnIn:
    """Counts steps and looks at losses; on the device they come from, until it is asked.

    Args:
        least: steps before the end of the burn-in.
        most: steps after which it is over whether or not the loss has settled.
        total: steps of the training.
        device: of the losses.
    """

    def __init__(self, least: int, most: int, total: int, device: torch.device) -> None:
        """No step is done."""
        self.least, self.most, self.total = least, most, total
        self.parts = min(PARTS, total)
        self.sums: Float[Tensor, "parts"] = torch.zeros(
            self.parts, dtype=torch.float64, device=device
        )
        self.found = False

    def add(self, loss: Float[Tensor, ""], step: int) -> None:
        """The loss of a step, which are counted from 0."""
        if self.most > self.least and not self.found:
            self.sums[step * self.parts // self.total] += loss

    def over(self, done: int) -> bool:
        """Whether precisions may move after so many steps; once they may, they always may."""
        if done >= self.least and not self.found:
            rests = settled(self._losses(done))
            self.found = rests or done >= self.most
            if self.found and self.most > self.least:
                log.info("the loss has %ssettled after %d steps", "" if rests else "not ", done)
        return self.found

    def _losses(self, done: int) -> list[float]:
        """Means over the parts that are done."""
        ends = [-(-part * self.total // self.parts) for part in range(self.parts + 1)]
        sums = self.sums.tolist()
        return [
            sums[part] / (ends[part + 1] - ends[part])
            for part in range(self.parts)
            if ends[part + 1] <= done
        ]

    def state_dict(self) -> State:
        """All that the answer depends on."""
        return {"sums": self.sums.clone(), "found": self.found}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`."""
        self.sums.copy_(state["sums"])
        self.found = state["found"]
