r"""Take evidence steps from one mini-batch, of the size that a wanted relative error needs.

With `structure="kernel"` and `scaling="geometric"`, a random subset of the data gives two figures
L and U, between which the log-determinant of all data lies in expectation (`curvature.kernel`), and
their geometric mean as the estimate. `minibatch_size` doubles the subset until
$\sqrt{U/L} - 1$ is at most the wanted relative error. The step then follows the gradient of the
estimate; its cost does not depend on the size of the data set.

    razor = Razor(model, "categorical", n_data=60_000, structure="kernel", scaling="geometric")
    minibatch_step(razor, loader, relative_error=0.5)      # loader yields data in random order
"""

import math
from dataclasses import dataclass

from symrazor.core.parameters import weights
from symrazor.curvature.subset_kernel import SubsetKernel
from symrazor.data.batches import Loader
from symrazor.inference.evidence import Evidence, log_curvatures
from symrazor.inference.razor import Razor

FIRST_SAMPLES = 32
"""Size of the first mini-batch."""


@dataclass(frozen=True)
class MiniBatch:
    """Size of a mini-batch and what it says about the log-determinant of all data.

    Args:
        samples: number of samples.
        lower: lower bound of the log-determinant, in expectation over mini-batches.
        upper: upper bound, in expectation.
    """

    samples: int
    lower: float
    upper: float

    @property
    def relative_error(self) -> float:
        """Largest relative error of the geometric mean if the bounds are at their expectations."""
        return 0.0 if self.upper <= 0 else math.sqrt(self.upper / max(self.lower, 1e-300)) - 1


def minibatch_size(
    razor: Razor, loader: Loader, relative_error: float = 0.5, first: int = FIRST_SAMPLES
) -> MiniBatch:
    """Return the smallest mini-batch, of first, 2 first, 4 first, ... samples, that is accurate.

    Args:
        razor: a Razor with structure="kernel" and scaling="geometric", which is not changed.
        loader: (x, y) batches in random order, which can be read several times.
        relative_error: wanted relative error of the log-determinant.
        first: size of the first mini-batch.
    """
    if razor.method.scaling != "geometric":
        raise ValueError(
            "Evidence steps from a mini-batch need a Razor with structure='kernel' and "
            f"scaling='geometric', got scaling={razor.method.scaling!r}."
        )
    if not relative_error > 0:
        raise ValueError(f"relative_error must be positive, got {relative_error}.")
    if iter(loader) is loader:
        raise ValueError(
            "The loader is a generator, which can be read only once. The size of a mini-batch is "
            "found in several passes: pass a list of batches or a DataLoader."
        )
    samples = min(first, razor.n_data)
    while True:
        curvature = razor._curvature(loader, samples)
        (block,) = curvature.blocks
        assert isinstance(block, SubsetKernel)
        lower, upper = block.bounds(log_curvatures(razor.prior, curvature, weights(razor.model)))
        result = MiniBatch(samples, float(lower.detach()), float(upper.detach()))
        if samples == razor.n_data or result.relative_error <= relative_error:
            return result
        samples = min(2 * samples, razor.n_data)


def minibatch_step(razor: Razor, loader: Loader, relative_error: float = 0.5) -> Evidence:
    """Take an evidence step from one mini-batch, of the size that `minibatch_size` returns.

    Args:
        razor: a Razor with structure="kernel" and scaling="geometric".
        loader: (x, y) batches in random order, which can be read several times.
        relative_error: wanted relative error of the log-determinant.
    """
    samples = minibatch_size(razor, loader, relative_error).samples
    return razor.step(loader, None if samples == razor.n_data else samples)
