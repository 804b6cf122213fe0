"""Results of `prequential`: log probabilities by order, start and block, and paired comparisons."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.validation import counted

MIN_NATS = 3.0
"""Smallest difference that decides between two models: odds of 20 to 1."""
MIN_STANDARD_ERRORS = 2.0
"""A difference also has to exceed this many standard errors."""


@dataclass(frozen=True, repr=False, eq=False)
class Prequential:
    r"""Prequential log evidence of one model, in nats.

    Args:
        log_probabilities: log predictive probability of each datum given the blocks before its own,
            in the sequence of `permutations`. The first block is predicted without a network.
        permutations: for each order, the positions of the data in the given data set.
        block_ends: number of data up to the end of each block.
        targets: the labels in their given sequence.
    """

    log_probabilities: Float[Tensor, "orders starts n"]
    permutations: Int[Tensor, "orders n"]
    block_ends: tuple[int, ...]
    targets: Tensor

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Number of data in each block."""
        starts = (0, *self.block_ends[:-1])
        return tuple(end - start for start, end in zip(starts, self.block_ends, strict=True))

    @property
    def blocks(self) -> Float[Tensor, "orders starts blocks"]:
        """Log probability of each block given the blocks before."""
        parts = self.log_probabilities.split(self.block_sizes, dim=-1)
        return torch.stack([part.sum(-1) for part in parts], dim=-1)

    @property
    def totals(self) -> Float[Tensor, "orders starts"]:
        """Log probability of all data, for each order and start."""
        return self.log_probabilities.sum(-1)

    @property
    def log_evidence(self) -> float:
        """Prequential log evidence: the mean of `totals`."""
        return float(self.totals.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of `log_evidence`; see `standard_error_of_mean`."""
        return standard_error_of_mean(self.totals)

    @property
    def last_block(self) -> float:
        """Mean log probability of the last block, which is predicted from most data."""
        return float(self.blocks[..., -1].mean())

    @property
    def by_datum(self) -> Float[Tensor, " n"]:
        """Log probability of each datum in the given sequence, averaged over orders and starts."""
        averaged = self.log_probabilities.mean(1)
        return torch.zeros_like(averaged).scatter(1, self.permutations, averaged).mean(0)

    def __repr__(self) -> str:
        orders, starts = self.totals.shape
        per_datum = self.log_evidence / len(self.targets)
        return (
            f"Prequential({_with_error(self.log_evidence, self.standard_error)} nats, "
            f"{per_datum:.3f} per data point; {len(self.block_ends)} blocks, "
            f"{counted(orders, 'order')}, {counted(starts, 'start')})"
        )

    def compare(self, other: "Prequential") -> "Comparison":
        """Return how many nats this model is ahead of another, paired by order and start.

        Raises:
            ValueError: the results do not have the same labels, orders, starts or blocks.
        """
        if not isinstance(other, Prequential):
            raise ValueError(f"compare needs another Prequential, got {type(other).__name__}.")
        advice = "Compute both with the same data, seed, orders, starts, blocks and stratify."
        if not torch.equal(self.targets, other.targets):
            raise ValueError(f"The two results have different labels. {advice}")
        if self.block_ends != other.block_ends:
            raise ValueError(
                f"The two results have different blocks, which end at {list(self.block_ends)} and "
                f"at {list(other.block_ends)}. {advice}"
            )
        shapes = [list(result.totals.shape) for result in (self, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"The two results have different numbers of [orders, starts]: {shapes[0]} and "
                f"{shapes[1]}. {advice}"
            )
        if not torch.equal(self.permutations, other.permutations):
            raise ValueError(f"The two results have different orders of the data. {advice}")
        gaps = self.by_datum - other.by_datum
        sampling_error = float(gaps.std()) * math.sqrt(len(gaps))
        return Comparison(self.blocks - other.blocks, sampling_error)


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """Paired difference of two prequential log evidences, first minus second, in nats.

    Args:
        blocks: difference for each order, start and block.
        sampling_error: standard error of the difference over data: how much another sample of the
            same size would change it.
    """

    blocks: Float[Tensor, "orders starts blocks"]
    sampling_error: float

    @property
    def totals(self) -> Float[Tensor, "orders starts"]:
        """Difference over all data, for each order and start."""
        return self.blocks.sum(-1)

    @property
    def difference(self) -> float:
        """Mean difference; positive if the first model predicts better."""
        return float(self.totals.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of `difference` over orders and starts; see `standard_error_of_mean`."""
        return standard_error_of_mean(self.totals)

    @property
    def last_block(self) -> float:
        """Mean difference in the last block, which is predicted from most data."""
        return float(self.blocks[..., -1].mean())

    @property
    def last_block_standard_error(self) -> float:
        """Standard error of `last_block` over orders and starts."""
        return standard_error_of_mean(self.blocks[..., -1])

    @property
    def verdict(self) -> Literal["first", "second", "undecided"]:
        """The model that predicts better, or "undecided".

        A difference decides if it is at least `MIN_NATS` and at least `MIN_STANDARD_ERRORS` times
        the larger of its two standard errors. One order and one start decide nothing.
        """
        error = max(self.standard_error, self.sampling_error)
        # A comparison with NaN, the standard error of one run, is False.
        if abs(self.difference) >= MIN_NATS and abs(self.difference) >= MIN_STANDARD_ERRORS * error:
            return "first" if self.difference > 0 else "second"
        return "undecided"

    def __repr__(self) -> str:
        return (
            f"Comparison({self.verdict}: {_with_error(self.difference, self.standard_error, '+')} "
            f"nats over orders and starts, +- {self.sampling_error:.1f} over data; last block "
            f"{_with_error(self.last_block, self.last_block_standard_error, '+')})"
        )


def standard_error_of_mean(values: Float[Tensor, "orders starts"]) -> float:
    """Return the standard error of the mean of all runs.

    Every run has its own initial weights, so the spread of the means over starts, one per order,
    contains both sources of variation. With one order it is the spread over starts alone; with one
    run it is NaN.
    """
    runs = values[0] if len(values) == 1 else values.mean(1)
    return float(runs.std()) / math.sqrt(len(runs)) if len(runs) > 1 else math.nan


def _with_error(value: float, error: float, sign: str = "") -> str:
    uncertainty = "standard error unknown" if math.isnan(error) else f"+- {error:.1f}"
    return f"{value:{sign}.1f} {uncertainty}"
