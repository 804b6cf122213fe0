r"""Represent curvature blocks: Kronecker, dense or diagonal positive semi-definite matrices.

A block $H$ belongs to one or several parameter tensors. With the diagonal prior precision $\Delta$
of these tensors and $P = H + \Delta$, it computes $\log|I + \Delta^{-1} H|$, draws from
$N(0, P^{-1})$, and $J P^{-1} J^\top$.

Eigenvalues and log-determinants are computed in float64, and $\log(\lambda + \delta) - \log \delta$
always as $\log(1 + \lambda/\delta)$ by log1p.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.errors import CurvatureError
from symrazor.linalg.eigen_jobs import EigenJob, LinAlgError, Spectrum, eigenvalues, symmetric_part
from symrazor.linalg.factor import Factor

LogPrecisions = Mapping[str, Tensor]
Rows = Float[Tensor, "s p"]
"""Vectors over all weights of a block."""
Jacobians = Float[Tensor, "n c p"]
Covariances = Float[Tensor, "n c c"]

STACKED_ROW = 256
"""Entries of a row of `StackedSpectra`; the last row of a block is padded with zeros."""


class Block(ABC):
    """Curvature H of one or several tensors, scaled to the whole data set."""

    names: tuple[str, ...]

    @abstractmethod
    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        r"""Return $\log|I + \Delta^{-1} H|$, differentiable in log precisions and factors."""

    @property
    @abstractmethod
    def spectrum(self) -> Tensor:
        """Eigenvalues of H; zeros may be missing."""

    @abstractmethod
    def prepare(self) -> list[Spectrum]:
        """Return the eigenvalue jobs that `logdet` depends on."""

    @abstractmethod
    def draw(self, log_precision: LogPrecisions, noise: Rows) -> Rows:
        r"""Turn white noise into draws from $N(0, (H + \Delta)^{-1})$, tensors flattened."""

    @abstractmethod
    def covariance(self, log_precision: LogPrecisions, jacobian: Jacobians) -> Covariances:
        r"""Return $J (H + \Delta)^{-1} J^\top$ for each sample."""


def per_weight_precision_error(name: str) -> ValueError:
    """Return the error for a Kronecker block with one prior precision per weight."""
    return ValueError(
        f"Tensor {name} has one prior precision per weight, but a Kronecker block plus a diagonal "
        "has no cheap log-determinant. Use structure='diag', 'block' or 'full', or "
        "prior_groups='tensor'."
    )


@dataclass
class Kron(Block):
    r"""Kronecker blocks $H = \bigoplus_k s\, G_k \otimes A_k$ of a weight $W[k, o, i]$.

    Either factor may be shared by all blocks (leading dimension 1).

    Args:
        name: name of the weight tensor.
        A: input factors $\sum a a^\top$, [k, i, i].
        G: output factors $\sum g g^\top$, [k, o, o].
        scale: s, one over the number of terms of A, times N/n for a subset.
        resolution: machine epsilon of the arithmetic that computed the factors.
        to_blocks: maps the parameter layout to [k, o, i].
        from_blocks: the inverse of `to_blocks`.
    """

    name: str
    A: Factor
    G: Factor
    scale: float
    resolution: float
    to_blocks: Callable[[Tensor], Tensor]
    from_blocks: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        self.names = (self.name,)

    def _label(self, side: str) -> str:
        return f"{self.name} ({'input' if side == 'A' else 'output'} side)"

    @cached_property
    def spectrum_A(self) -> Float[Tensor, "k a"]:
        """Eigenvalues of the input factors; zeros may be missing."""
        return self.A.spectrum(self._label("A"), self.resolution)

    @cached_property
    def spectrum_G(self) -> Float[Tensor, "k g"]:
        """Eigenvalues of the output factors; zeros may be missing."""
        return self.G.spectrum(self._label("G"), self.resolution)

    @property
    def spectrum(self) -> Float[Tensor, "k g a"]:
        """Products of the eigenvalues of both factors; zeros may be missing."""
        return self.scale * self.spectrum_G.unsqueeze(2) * self.spectrum_A.unsqueeze(1)

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        """Sum log1p(lambda / delta) over the products of eigenvalues."""
        return torch.log1p(self.spectrum * (-self._log_delta(log_precision)).exp()).sum()

    def _log_delta(self, log_precision: LogPrecisions) -> Tensor:
        log_delta = log_precision[self.name]
        if log_delta.dim():
            raise per_weight_precision_error(self.name)
        return log_delta

    def prepare(self) -> list[Spectrum]:
        """Return the jobs of both factors."""
        return [self._spectrum_of("A", self.A), self._spectrum_of("G", self.G)]

    def _spectrum_of(self, side: str, factor: Factor) -> Spectrum:
        def store(values: list[Tensor]) -> None:
            self.__dict__[f"spectrum_{side}"] = torch.cat(values)  # fills the cached property

        return Spectrum(EigenJob.of_factor(factor, self._label(side), self.resolution), store)

    @cached_property
    def eigenvectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues [k, g, a] of H, and eigenvectors [k, o, g] of G and [k, i, a] of A."""
        values_a, vectors_a = self.A.eigenvectors(self.name, self.resolution)
        values_g, vectors_g = self.G.eigenvectors(self.name, self.resolution)
        return self.scale * values_g.unsqueeze(2) * values_a.unsqueeze(1), vectors_g, vectors_a

    @property
    def outside(self) -> Tensor | float:
        """Eigenvalue of H outside the span of the eigenvectors."""
        return 0.0

    def _whiten(self, log_precision: LogPrecisions, flat: Rows) -> Rows:
        r"""Return $(H + \Delta)^{-1/2} v$ for every row v, a matrix V in each block.

        $U_G\, [(\lambda + \delta)^{-1/2} \circ (U_G^\top V U_A)]\, U_A^\top$ for the part of V in
        the span of the eigenvectors, and $\delta^{-1/2}$ times its complement, where H is zero.
        """
        values, left, right = self.eigenvectors
        delta = self._log_delta(log_precision).exp()
        V = torch.stack([self.to_blocks(v) for v in flat.double().reshape(-1, *self._shape)])
        inside = left.mT @ V @ right
        outside = V - left @ inside @ right.mT
        white = left @ (inside * (values + delta).rsqrt()) @ right.mT
        white = white + outside * (self.outside + delta).rsqrt()
        return torch.stack([self.from_blocks(v).flatten() for v in white])

    @property
    def _shape(self) -> torch.Size:
        k = max(self.A.blocks, self.G.blocks)
        return self.from_blocks(torch.empty(k, self.G.features, self.A.features)).shape

    def draw(self, log_precision: LogPrecisions, noise: Rows) -> Rows:
        """Multiply the noise by the symmetric root of the covariance."""
        return self._whiten(log_precision, noise)

    def covariance(self, log_precision: LogPrecisions, jacobian: Jacobians) -> Covariances:
        """Multiply the whitened Jacobian by its transpose."""
        white = self._whiten(log_precision, jacobian.flatten(0, 1)).reshape(jacobian.shape)
        return white @ white.mT


@dataclass
class Dense(Block):
    """A dense H, for one tensor or for all tensors (structure 'full').

    Args:
        shapes: tensor name -> shape, in the order of the rows of H.
        H: the matrix.
        resolution: machine epsilon of the arithmetic that computed H.
        known_spectrum: returns the eigenvalues if another block computes them anyway.
    """

    shapes: dict[str, torch.Size]
    H: Float[Tensor, "p p"]
    resolution: float
    known_spectrum: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        self.names = tuple(self.shapes)

    @property
    def _label(self) -> str:
        return ", ".join(self.names)

    @cached_property
    def spectrum(self) -> Float[Tensor, " p"]:
        """Eigenvalues of H."""
        if self.known_spectrum is not None:
            return self.known_spectrum()
        return eigenvalues(self.H, self._label, self.resolution)

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        r"""Use the spectrum of H for one precision, else $|I + \Delta^{-1/2} H \Delta^{-1/2}|$."""
        deltas = [log_precision[name] for name in self.names]
        if len(deltas) == 1 and deltas[0].dim() == 0:
            return torch.log1p(self.spectrum * (-deltas[0]).exp()).sum()
        log_delta = self._expand(log_precision)
        try:
            return log_determinant(self.H.double(), log_delta)
        except LinAlgError:  # negative eigenvalues by rounding: check them, set them to zero
            root = (-0.5 * log_delta).exp()
            whitened = root.unsqueeze(1) * self.H.double() * root
            return torch.log1p(eigenvalues(whitened, self._label, self.resolution)).sum()

    def _expand(self, log_precision: LogPrecisions) -> Float[Tensor, " p"]:
        parts = [log_precision[n].expand(shape).reshape(-1) for n, shape in self.shapes.items()]
        return torch.cat(parts)

    def prepare(self) -> list[Spectrum]:
        """Return the job of H if its spectrum serves every precision."""
        if len(self.names) > 1 or self.known_spectrum is not None:
            return []

        def store(values: list[Tensor]) -> None:
            self.__dict__["spectrum"] = values[0].squeeze(0)  # fills the cached property

        matrices, shape = partial(torch.unsqueeze, self.H, 0), (1, len(self.H))
        job = EigenJob(self.names[0], shape, self.H.device, matrices, self.resolution)
        return [Spectrum([job], store)]

    def _cholesky(self, log_precision: LogPrecisions) -> Tensor:
        delta = self._expand(log_precision).exp()
        H = symmetric_part(self.H, self._label)
        try:
            factor: Tensor = torch.linalg.cholesky(H + torch.diag(delta))
        except LinAlgError as error:
            raise CurvatureError(
                f"The posterior precision of {self._label} is singular to rounding. Use float64 "
                "or a larger prior precision."
            ) from error
        return factor

    def draw(self, log_precision: LogPrecisions, noise: Rows) -> Rows:
        r"""Return $L^{-\top} e$ with $L L^\top = H + \Delta$."""
        L = self._cholesky(log_precision)
        draws: Tensor = torch.linalg.solve_triangular(L.mT, noise.double().T, upper=True).T
        return draws

    def covariance(self, log_precision: LogPrecisions, jacobian: Jacobians) -> Covariances:
        r"""Return $(L^{-1} J^\top)^\top (L^{-1} J^\top)$."""
        L = self._cholesky(log_precision)
        # All samples at once: torch would copy the matrix for each sample of a batch.
        rows = jacobian.double().flatten(0, 1)
        half: Tensor = torch.linalg.solve_triangular(L, rows.mT, upper=False).mT
        half = half.unflatten(0, jacobian.shape[:2])
        return half @ half.mT


@dataclass
class Diag(Block):
    """The diagonal of H, in the shape of the tensor."""

    name: str
    h: Tensor

    def __post_init__(self) -> None:
        self.names = (self.name,)
        if not bool(torch.isfinite(self.h).all()):  # no eigenvalue solver checks it later
            raise CurvatureError(
                f"The curvature of {self.name} contains NaN or infinity. The weights have "
                "probably diverged: lower the learning rate."
            )

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        """Sum log1p(h / delta)."""
        return torch.log1p(self.spectrum * (-log_precision[self.name]).exp()).sum()

    @property
    def spectrum(self) -> Tensor:
        """The diagonal in float64."""
        return self.h.double()

    def prepare(self) -> list[Spectrum]:
        """Return no jobs."""
        return []

    def _deviation(self, log_precision: LogPrecisions) -> Tensor:
        return (self.h.double() + log_precision[self.name].exp()).rsqrt().reshape(-1)

    def draw(self, log_precision: LogPrecisions, noise: Rows) -> Rows:
        """Scale the noise by the standard deviations."""
        return noise.double() * self._deviation(log_precision)

    def covariance(self, log_precision: LogPrecisions, jacobian: Jacobians) -> Covariances:
        """Multiply the Jacobian, scaled by the standard deviations, by its transpose."""
        weighted = jacobian.double() * self._deviation(log_precision)
        return weighted @ weighted.mT


def log_determinant(H: Float[Tensor, "p p"], log_delta: Float[Tensor, " p"]) -> Tensor:
    r"""Return $\log|I + \Delta^{-1/2} H \Delta^{-1/2}|$ by a Cholesky factor, differentiable once.

    It takes a tenth of the time of eigenvalues and eigenvectors, which a gradient would need.

    Raises:
        LinAlgError: the matrix is not positive definite.
    """
    value: Tensor = _LogDeterminant.apply(H, log_delta)  # type: ignore[no-untyped-call]
    return value


class _LogDeterminant(torch.autograd.Function):
    r"""Compute $\log|M|$ with $M = I + \Delta^{-1/2} H \Delta^{-1/2}$.

    With $S = M^{-1}$, $\partial \log|M| / \partial H = \Delta^{-1/2} S \Delta^{-1/2}$, and
    $\partial \log|M| / \partial \log\delta_i = -[S (M - I)]_{ii} = S_{ii} - 1$.
    """

    @staticmethod
    def forward(ctx: Any, H: Tensor, log_delta: Tensor) -> Tensor:
        root = (-0.5 * log_delta).exp()
        M = root.unsqueeze(1) * H * root
        M.diagonal().add_(1)
        L: Tensor = torch.linalg.cholesky(M)
        ctx.save_for_backward(L, root)
        return 2 * L.diagonal().log().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        L, root = ctx.saved_tensors
        S = torch.cholesky_inverse(L)
        slope = gradients[0] * (S.diagonal() - 1)
        if not ctx.needs_input_grad[0]:
            return None, slope
        return gradients[0] * root.unsqueeze(1) * S * root, slope


class StackedSpectra:
    r"""Compute the log-determinants of many blocks by a few large operations.

    If every tensor has one precision, $\sum_b \log|I + H_b / \delta_b|$ is a sum over eigenvalues.
    Block by block this takes a dozen small kernels each, forward and backward, and a GPU waits for
    their launches. The eigenvalues of all blocks are therefore the rows of one matrix; each row
    belongs to one block.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks

    def logdet(self, log_precision: LogPrecisions) -> Float[Tensor, ""]:
        r"""Return $\sum_b \log|I + \Delta_b^{-1} H_b|$, differentiable like `Block.logdet`."""
        one_tensor_each = all(len(block.names) == 1 for block in self.blocks)
        if not one_tensor_each or any(log_precision[b.names[0]].dim() for b in self.blocks):
            return torch.stack([block.logdet(log_precision) for block in self.blocks]).sum()
        rows, owner = self._rows
        deltas = torch.stack([log_precision[block.names[0]] for block in self.blocks])
        return torch.log1p(rows * (-deltas).exp()[owner].unsqueeze(1)).sum()

    @cached_property
    def _rows(self) -> tuple[Float[Tensor, "r w"], Int[Tensor, " r"]]:
        """All eigenvalues, and the number of the block of each row."""
        parts, owner = [], list[int]()
        for number, block in enumerate(self.blocks):
            values = block.spectrum.flatten()
            padded = F.pad(values, (0, -len(values) % STACKED_ROW)).view(-1, STACKED_ROW)
            parts.append(padded)
            owner += [number] * len(padded)
        rows = torch.cat(parts)
        return rows, torch.tensor(owner, device=rows.device)
