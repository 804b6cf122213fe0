r"""Correct Kronecker factors by exact second moments in their eigenbasis (EKFAC).

A first pass over the data computes Kronecker factors and their eigenvectors $U_G$, $U_A$, for many
data from random probes of the output Hessian (see `EkfacStructure.first_method`). A second pass
computes, for every weight, the exact second moments of the rotated gradients,

$$ D = \sum_{n,c} \big( U_G^\top J_{nc} U_A \big)^{\circ 2} , $$

the diagonal of the Gauss-Newton block in that basis (George et al. 2018).

**Bound.** For any orthogonal Q and positive definite M, Hadamard's inequality gives
$\log|M| \le \sum_i \log (Q^\top M Q)_{ii}$, and Fischer's inequality
$\log|M| \le \sum_b \log|M_{bb}|$. With $M = I + \Delta^{-1/2} H \Delta^{-1/2}$ and one precision
per tensor, the log-determinant of EKFAC is at least that of the block-diagonal, and so of the full
Gauss-Newton matrix: its evidence is a lower bound of theirs. Plain Kronecker factors give no bound.

Eigenvectors of a factor that was kept as few rows do not span the whole space. The part of the
gradients outside of their span, if any, is spread evenly over the missing directions. As the
logarithm is concave, this raises the log-determinant further, and the bound remains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.curvature.structures import (
    Cotangents,
    Gradients,
    Structure,
    add_exact_sums,
    add_gradients,
    tensor_block,
)
from symrazor.curvature.task import CurvatureTask, Statistics
from symrazor.curvature.weight_sharing import Use, join, multiply_blocks, widened
from symrazor.linalg.blocks import Block, Diag, Kron
from symrazor.linalg.eigen_jobs import Spectrum

if TYPE_CHECKING:
    from symrazor.curvature.estimate import Method

MAX_POSITION_PAIRS = 10
"""Pairs of positions up to which second moments are summed without forming gradients."""
MAX_FORMED_ENTRIES = 2**19
"""Entries of gradients that are formed at once, so that they stay in the cache."""
MAX_WAITING_ENTRIES = 2**21
"""Entries of the cotangents of one weight that are kept to form gradients of several columns."""
MIN_BASIS_PROBES = 1000
"""Probes of the output Hessian from which the factors of the first pass are computed."""
MAX_BASIS_SAMPLES = 4
"""With more probes per sample than this, the first pass computes the exact factors."""
BASIS_SHARE = 0.5
"""Fraction of a large data set that the first pass reads; this loosens the bound by about 1 %."""
MIN_SHARED_DATA = 1000
"""Number of samples from which the first pass reads only `BASIS_SHARE` of the data."""


class EkfacStructure(Structure):
    """Second moments in the Kronecker eigenbasis; exact blocks for biases, norms and shaping."""

    columns_per_job = 2**31 - 1  # the rotated inputs serve all columns
    supports_weight_precisions = False
    passes = 2

    def first_method(self, task: CurvatureTask, expected: int | None) -> "Method":
        """Return Kronecker factors from random probes if there are enough samples.

        Any orthogonal basis gives a lower bound, and only the second pass needs all columns of the
        root. For a small data set the factors stay exact, because their eigenvectors span more.
        """
        method = super().first_method(task, expected)
        samples = math.ceil(MIN_BASIS_PROBES / (expected or 1))
        if method.estimator != "exact" or samples > MAX_BASIS_SAMPLES:
            return method
        return replace(method, estimator="mc", samples=samples)

    def first_share(self, expected: int | None) -> float:
        """Return the part of every batch that the first pass reads."""
        return BASIS_SHARE if (expected or 0) >= MIN_SHARED_DATA else 1.0

    def collect(self, task: CurvatureTask, cotangents: Cotangents, keep_graph: bool) -> Statistics:
        """Return second moments of one batch in the eigenbasis of the first pass."""
        sums: Statistics = {}
        gradients: Gradients = {}
        moments: dict[str, Moments] = {}
        for uses, gs in cotangents:
            layer, weight = uses[0].layer, uses[0].factored_weight
            formed = [use.outputs(g) for use, g in zip(uses, gs, strict=True)]
            exact = [name for name in layer.tensors if name != weight]
            add_gradients(gradients, uses, gs, formed, exact, keep_graph)
            basis = None if weight is None or task.bases is None else task.bases.get(weight)
            if weight is None or not isinstance(basis, Kron):
                continue
            if weight not in moments:
                moments[weight] = Moments(uses, basis, keep_graph)
            moments[weight].add(join(formed, 1))
        for weight, collected in moments.items():
            sums[weight, "D"], sums[weight, "E"] = collected.total()
        add_exact_sums(sums, gradients)
        return sums

    def build(
        self, task: CurvatureTask, sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build a block per weight in its eigenbasis, and an exact block for all other tensors."""
        blocks: list[Block] = []
        for name in task.tensors:
            D, energy = sums.get((name, "D")), sums.get((name, "E"))
            basis = None if task.bases is None else task.bases.get(name)
            if isinstance(D, Tensor) and isinstance(energy, Tensor) and isinstance(basis, Kron):
                blocks.append(Eigenbasis.of(basis, scale * D, scale * energy))
            elif isinstance(basis, Kron | Diag) and not {(name, "H"), (name, "h")} & set(sums):
                shape = task.theta[name].shape
                blocks.append(Diag(name, torch.zeros(shape, dtype=torch.float64)))
            else:
                blocks.append(tensor_block(task, sums, name, scale))
        return blocks


@dataclass
class Eigenbasis(Kron):
    """A block that is diagonal in the eigenbasis of Kronecker factors.

    Args:
        moments: diagonal of H in the span of the eigenvectors, [k, g, a].
        energy: trace of H.
    """

    moments: Float[Tensor, "k g a"]
    energy: Float[Tensor, ""]

    @classmethod
    def of(cls, basis: Kron, moments: Tensor, energy: Tensor) -> "Eigenbasis":
        """Replace the eigenvalues of a Kronecker block by second moments."""
        block = cls(
            *(basis.name, basis.A, basis.G, basis.scale, basis.resolution),
            *(basis.to_blocks, basis.from_blocks, moments, energy),
        )
        _, left, right = basis.eigenvectors
        block.__dict__["eigenvectors"] = moments, left, right  # fills the cached property
        return block

    @property
    def _missing(self) -> int:
        """Number of directions outside the span of the eigenvectors."""
        k = max(self.A.blocks, self.G.blocks)
        return k * self.A.features * self.G.features - self.moments.numel()

    @property
    def outside(self) -> Tensor | float:
        """Mean eigenvalue outside the span of the eigenvectors."""
        if not self._missing:
            return 0.0
        remaining = self.energy - self.moments.sum()
        # Below the rounding error of the trace nothing is left.
        threshold = 16 * self.resolution * self.energy
        return torch.where(remaining > threshold, remaining, 0.0) / self._missing

    @property
    def spectrum(self) -> Float[Tensor, " p"]:
        """All diagonal entries."""
        outside = torch.as_tensor(self.outside, dtype=torch.float64, device=self.moments.device)
        return torch.cat([self.moments.double().flatten(), outside.expand(self._missing)])

    def prepare(self) -> list[Spectrum]:
        """Return no jobs: the first pass has solved the eigenproblems."""
        return []


class Moments:
    r"""Sum the squares of the rotated gradients of one weight over the samples of a batch.

    The squares are $(\sum_s g_{ns} a_{ns}^\top)^{\circ 2}$. For few positions, the square is
    expanded into pairs of positions: the products $g_s g_t$ are summed over the columns of the
    root, and the sum over samples is one matrix product. For many positions, the gradients of all
    samples are formed, for several columns at a time.

    Args:
        uses: the calls of the layer.
        basis: its Kronecker factors.
        keep_graph: whether the moments are differentiated afterwards.
    """

    def __init__(self, uses: Sequence[Use], basis: Kron, keep_graph: bool = False) -> None:
        _, left, right = basis.eigenvectors
        inputs = [use.input if keep_graph else use.input.detach() for use in uses]
        # Inputs of an embedding are integers; their one-hot format has the type of the weight.
        dtype = widened(uses[0].form.inputs(inputs[0][:1])).dtype
        self._left, right = left.to(dtype), right.to(dtype)
        calls = list(zip(uses, inputs, strict=True))
        self._a = join([use.projected(x, right) for use, x in calls], 1)
        # The span of a factor that was kept as few rows is smaller than the space.
        is_complete = left.shape[1] == left.shape[2] and right.shape[1] == right.shape[2]
        self._plain = None if is_complete else join([use.inputs(x) for use, x in calls], 1)
        self._first, self._second = torch.triu_indices(
            *self._a.shape[1:2] * 2, device=self._a.device
        )
        self._by_pairs = len(self._first) <= MAX_POSITION_PAIRS
        # Rotate the smaller of the cotangents (one row per position) and the gradients.
        self._rotates_cotangents = self._by_pairs or self._a.shape[1] <= self._a.shape[3]
        self._waiting: list[Tensor] = []
        self._pairs: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0
        self._energy: Tensor | float = 0.0

    def add(self, g: Float[Tensor, "n s k o"]) -> None:
        """Add one column of the root."""
        if self._plain is not None:
            self._energy = self._energy + _energy(g, self._plain)
        rows = multiply_blocks(g, self._left) if self._rotates_cotangents else g
        if self._by_pairs:
            self._pairs = self._pairs + rows[:, self._first] * rows[:, self._second]
            return
        self._waiting.append(rows)
        if len(self._waiting) * rows.numel() >= MAX_WAITING_ENTRIES:
            self._square_waiting()

    def _square_waiting(self) -> None:
        """Form the gradients of the columns that wait, and add their squares."""
        if not self._waiting:
            return
        columns = len(self._waiting)
        stacked = join([rows.unsqueeze(3) for rows in self._waiting], 3)
        rows = stacked.flatten(3).transpose(1, 2)  # [n, k, s, (c o)]
        inputs = self._a.transpose(1, 2)
        k, o, i = max(rows.shape[1], inputs.shape[1]), rows.shape[3] // columns, inputs.shape[3]
        count = max(1, MAX_FORMED_ENTRIES // (k * columns * o * i))
        for row_chunk, input_chunk in zip(rows.split(count), inputs.split(count), strict=True):
            gradients = (row_chunk.mT @ input_chunk).unflatten(2, (columns, o))
            if not self._rotates_cotangents:
                gradients = self._left.mT.unsqueeze(1) @ gradients
            self._squares = self._squares + gradients.square().sum((0, 2)).double()
        self._waiting = []

    def total(self) -> tuple[Float[Tensor, "k o i"], Float[Tensor, ""]]:
        """Return the sum over samples and columns, and the trace of H, in float64."""
        if isinstance(self._pairs, Tensor):
            weight = torch.where(self._first == self._second, 1.0, 2.0).to(self._pairs)
            left = (weight.reshape(1, -1, 1, 1) * self._pairs).flatten(0, 1).transpose(0, 1)
            right = (self._a[:, self._first] * self._a[:, self._second]).flatten(0, 1)
            squares = (left.mT @ right.transpose(0, 1)).double()
        else:
            self._square_waiting()
            assert isinstance(self._squares, Tensor)
            squares = self._squares
        if self._plain is None:
            return squares, squares.sum()
        assert isinstance(self._energy, Tensor)
        return squares, self._energy


def _energy(g: Float[Tensor, "n s k o"], a: Float[Tensor, "n s k i"]) -> Float[Tensor, ""]:
    r"""Return $\sum_n |\sum_s g_{ns} a_{ns}^\top|^2$."""
    s, o, i = g.shape[1], g.shape[3], a.shape[3]
    g, a = g.transpose(1, 2), a.transpose(1, 2)
    if s * (i + o) > o * i:
        return (g.mT @ a).square().sum(dtype=torch.float64)
    return ((g @ g.mT) * (a @ a.mT)).sum(dtype=torch.float64)
