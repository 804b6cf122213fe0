r"""Correct Kronecker factors by exact second moments in their eigenbasis (EKFAC).

A first pass over the data computes the Kronecker factors and their eigenvectors $U_G$, $U_A$. A
second pass computes, for every weight, the exact second moments of the rotated gradients,

$$ D = \sum_{n,c} \big( U_G^\top J_{nc} U_A \big)^{\circ 2} , $$

the diagonal of the Gauss-Newton block in that basis (George et al. 2018).

**Bound.** For any orthogonal Q and positive definite M, Hadamard's inequality gives
$\log|M| \le \sum_i \log (Q^\top M Q)_{ii}$, and Fischer's inequality
$\log|M| \le \sum_b \log|M_{bb}|$. With $M = I + \Delta^{-1/2} H \Delta^{-1/2}$ and one precision
per tensor, the log-determinant of EKFAC is at least that of the block-diagonal, and so of the full
Gauss-Newton matrix: its evidence is a lower bound of theirs. Plain Kronecker factors are no bound.

Eigenvectors of a factor that was kept as few rows do not span the whole space. The part of the
gradients outside of their span, if any, is spread evenly over the missing directions. As the
logarithm is concave, this raises the log-determinant further, and the bound remains.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.curvature.accumulate import Statistics
from symrazor.curvature.structures import (
    Cotangents,
    Gradients,
    Structure,
    add_exact_sums,
    add_gradients,
    tensor_block,
)
from symrazor.curvature.tape import Use
from symrazor.linalg.blocks import Block, Diag, Kron
from symrazor.linalg.eigen_jobs import Spectrum

if TYPE_CHECKING:
    from symrazor.curvature.estimate import CurvatureTask

MAX_POSITION_PAIRS = 10
"""Pairs of positions up to which second moments are summed without forming gradients."""


class EkfacStructure(Structure):
    """Second moments in the Kronecker eigenbasis; exact blocks for biases, norms and shaping."""

    columns_per_job = 2**31 - 1  # the rotated inputs serve all columns
    supports_weight_precisions = False
    passes = 2

    def collect(
        self, task: "CurvatureTask", cotangents: Cotangents, keep_graph: bool
    ) -> Statistics:
        """Return second moments of one batch in the eigenbasis of the first pass."""
        sums: Statistics = {}
        gradients: Gradients = {}
        inputs: dict[str, tuple[Tensor, Tensor]] = {}  # in the format, and rotated
        for uses, gs in cotangents:
            layer, weight = uses[0].layer, uses[0].layer.factored_weight
            formed = [use.outputs(g) for use, g in zip(uses, gs, strict=True)]
            exact = [name for name in layer.tensors if name != weight]
            add_gradients(gradients, uses, gs, formed, exact, keep_graph)
            basis = None if weight is None or task.bases is None else task.bases.get(weight)
            if weight is None or not isinstance(basis, Kron):
                continue
            _, left, right = (part.to(formed[0].dtype) for part in basis.eigenvectors)
            if weight not in inputs:
                a = _inputs(uses, keep_graph)
                inputs[weight] = a, _rotate(a, right)
            a, rotated = inputs[weight]
            g = torch.cat(formed, 1)
            moments = second_moments(_rotate(g, left), rotated)
            for kind, value in (("D", moments), ("E", _energy(g, a))):
                key = (weight, kind)
                sums[key] = sums[key] + value if key in sums else value  # type: ignore[operator]
        add_exact_sums(sums, gradients)
        return sums

    def build(
        self, task: "CurvatureTask", sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build a block per weight in its eigenbasis, and an exact block for all other tensors."""
        blocks: list[Block] = []
        for name in task.tensors:
            D, energy = sums.get((name, "D")), sums.get((name, "E"))
            basis = None if task.bases is None else task.bases.get(name)
            if isinstance(D, Tensor) and isinstance(energy, Tensor) and isinstance(basis, Kron):
                blocks.append(Eigenbasis.of(basis, scale * D, scale * energy))
            elif isinstance(basis, Kron | Diag) and (name, "H") not in sums:
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


def _inputs(uses: list[Use], keep_graph: bool) -> Float[Tensor, "n s k i"]:
    inputs = [use.input if keep_graph else use.input.detach() for use in uses]
    return torch.cat([use.inputs(x) for use, x in zip(uses, inputs, strict=True)], 1)


def _rotate(x: Float[Tensor, "n s k f"], basis: Float[Tensor, "k f r"]) -> Float[Tensor, "n s k r"]:
    """Multiply every block by its basis, one matrix product for all samples."""
    n, s, k, f = x.shape
    blocks = max(k, len(basis))
    rows = x.permute(2, 0, 1, 3).reshape(k, n * s, f).expand(blocks, -1, -1)
    return (rows @ basis).reshape(blocks, n, s, -1).permute(1, 2, 0, 3)


def second_moments(
    g: Float[Tensor, "n s k o"], a: Float[Tensor, "n s k i"]
) -> Float[Tensor, "k o i"]:
    r"""Return $\sum_n (\sum_s g_{ns} a_{ns}^\top)^{\circ 2}$ in float64.

    For few positions the square is expanded into pairs of positions, and the sum over samples is
    one matrix product; otherwise the gradients of all samples are formed.
    """
    s = g.shape[1]
    first, second = torch.triu_indices(s, s, device=g.device)
    if len(first) > MAX_POSITION_PAIRS:
        gradients = g.permute(0, 2, 3, 1) @ a.transpose(1, 2)
        return gradients.square().sum(0, dtype=torch.float64)
    weight = torch.where(first == second, 1.0, 2.0).to(g).reshape(1, -1, 1, 1)
    left = (weight * g[:, first] * g[:, second]).flatten(0, 1).transpose(0, 1)
    right = (a[:, first] * a[:, second]).flatten(0, 1).transpose(0, 1)
    return (left.mT @ right).double()


def _energy(g: Float[Tensor, "n s k o"], a: Float[Tensor, "n s k i"]) -> Float[Tensor, ""]:
    r"""Return $\sum_n |\sum_s g_{ns} a_{ns}^\top|^2$."""
    s, o, i = g.shape[1], g.shape[3], a.shape[3]
    g, a = g.transpose(1, 2), a.transpose(1, 2)
    if s * (i + o) > o * i:
        return (g.mT @ a).square().sum(dtype=torch.float64)
    return ((g @ g.mT) * (a @ a.mT)).sum(dtype=torch.float64)
