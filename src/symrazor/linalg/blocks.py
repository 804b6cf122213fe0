r"""Positive semi-definite curvature blocks as values: Kronecker, dense, diagonal.

A block $H$ belongs to one or several parameter tensors and answers three questions about
$P = H + \Delta$, where $\Delta$ is the diagonal prior precision of those tensors:
$\log|I + \Delta^{-1} H|$, draws from $N(0, P^{-1})$, and $J P^{-1} J^\top$.

Law: factors are summed, and eigenvalues and log-determinants computed, in float64;
$\log(\lambda + \delta) - \log \delta$ is always $\log(1 + \lambda/\delta)$ by log1p.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.errors import CurvatureError
from symrazor.linalg.eigen_jobs import EigenJob, Spectrum
from symrazor.linalg.factor import Factor
from symrazor.linalg.spectra import LinAlgError, eigenvalues, symmetric

LogPrecisions = Mapping[str, Tensor]


class Block(ABC):
    """Curvature of one or several tensors; H is already scaled to the whole data set."""

    names: tuple[str, ...]

    @abstractmethod
    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        r"""$\log|I + \Delta^{-1} H|$, differentiable in the log precisions and in the factors."""

    @property
    @abstractmethod
    def spectrum(self) -> Tensor:
        """Eigenvalues of H; zeros may be missing."""

    @abstractmethod
    def factors(self) -> list[Tensor | Factor]:
        """What H is made of."""

    @abstractmethod
    def prepare(self) -> list[Spectrum]:
        """The eigenvalues that `logdet` will need."""

    @abstractmethod
    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        """Turn white noise into draws from N(0, (H + Delta)^-1), tensors in order, flattened."""

    @abstractmethod
    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        r"""$J (H + \Delta)^{-1} J^\top$ for each datum."""


def per_weight_precision_error(name: str) -> ValueError:
    """What to say about a Kronecker block whose weights have a precision each."""
    return ValueError(
        f"expected one prior precision for {name}, got one per weight: a Kronecker block plus a "
        "diagonal has no cheap log-determinant; use structure 'diag', 'block' or 'full', or prior "
        "groups 'tensor'"
    )


@dataclass
class Kron(Block):
    r"""$H = \bigoplus_k s\, G_k \otimes A_k$ for $W[k, o, i]$: one pair of factors per block k.

    Either factor may be shared by all blocks (leading dimension 1).

    Args:
        name: the weight tensor.
        A: input factors $\sum a a^\top$, [k, i, i].
        G: output factors $\sum g g^\top$, [k, o, o].
        scale: one over the number of terms of A, times N/n for a subset.
        resolution: machine epsilon of the arithmetic that made the factors.
        to_blocks: parameter layout -> [k, o, i].
        from_blocks: its inverse.
    """

    name: str
    A: Factor
    G: Factor
    scale: float
    resolution: float
    to_blocks: Callable[[Tensor], Tensor]
    from_blocks: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        """Record the name in the common form."""
        self.names = (self.name,)

    def called(self, side: str) -> str:
        """A factor's name in an error."""
        return f"{self.name} ({'input' if side == 'A' else 'output'} side)"

    @cached_property
    def spectrum_A(self) -> Float[Tensor, "k a"]:
        """Eigenvalues of the input factors; zeros may be missing."""
        return self.A.spectrum(self.called("A"), self.resolution)

    @cached_property
    def spectrum_G(self) -> Float[Tensor, "k g"]:
        """Eigenvalues of the output factors; zeros may be missing."""
        return self.G.spectrum(self.called("G"), self.resolution)

    @property
    def spectrum(self) -> Float[Tensor, "k g a"]:
        """Products of eigenvalues of both factors; zeros may be missing."""
        return self.scale * self.spectrum_G.unsqueeze(2) * self.spectrum_A.unsqueeze(1)

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        """Sum of log1p(lambda / delta) over products of eigenvalues."""
        return torch.log1p(self.spectrum * (-self._delta(log_precision)).exp()).sum()

    def _delta(self, log_precision: LogPrecisions) -> Tensor:
        log_delta = log_precision[self.name]
        if log_delta.dim():
            raise per_weight_precision_error(self.name)
        return log_delta

    def factors(self) -> list[Tensor | Factor]:
        """A and G."""
        return [self.A, self.G]

    def prepare(self) -> list[Spectrum]:
        """Both spectra."""
        sides = {"A": self.A, "G": self.G}
        return [self._side(side, factor) for side, factor in sides.items()]

    def _side(self, side: str, factor: Factor) -> Spectrum:
        def put(values: list[Tensor]) -> None:
            self.__dict__[f"spectrum_{side}"] = torch.cat(values)

        return Spectrum(EigenJob.of_factor(factor, self.called(side), self.resolution), put)

    @cached_property
    def _vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        values_a, vectors_a = self.A.eigenvectors(self.name, self.resolution)
        values_g, vectors_g = self.G.eigenvectors(self.name, self.resolution)
        return self.scale * values_g.unsqueeze(2) * values_a.unsqueeze(1), vectors_g, vectors_a

    def _whiten(
        self, log_precision: LogPrecisions, flat: Float[Tensor, "m p"]
    ) -> Float[Tensor, "m p"]:
        r"""$(H + \Delta)^{-1/2} v$ for every row v, a matrix V in each block.

        $U_G\, [(\lambda + \delta)^{-1/2} \circ (U_G^\top V U_A)]\, U_A^\top$ for the part of V
        between eigenvectors, and $\delta^{-1/2}$ times the rest, where H is zero.
        """
        values, left, right = self._vectors
        delta = self._delta(log_precision).exp()
        V = torch.stack([self.to_blocks(v) for v in flat.double().reshape(-1, *self._shape)])
        inside = left.mT @ V @ right
        rest = V - left @ inside @ right.mT
        white = left @ (inside * (values + delta).rsqrt()) @ right.mT + rest * delta.rsqrt()
        return torch.stack([self.from_blocks(v).flatten() for v in white])

    @property
    def _shape(self) -> torch.Size:
        """Of the parameter."""
        k = max(self.A.blocks, self.G.blocks)
        return self.from_blocks(torch.empty(k, self.G.features, self.A.features)).shape

    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        """The symmetric root of the covariance, times the noise."""
        return self._whiten(log_precision, noise)

    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        """The Jacobian times the root of the covariance, times itself."""
        white = self._whiten(log_precision, jacobian.flatten(0, 1)).reshape(jacobian.shape)
        return white @ white.mT


@dataclass
class Dense(Block):
    """H stored whole, for one tensor or for all of them (structure 'full').

    Args:
        shapes: tensor name -> shape, in the order of the rows of H.
        H: the matrix.
        resolution: machine epsilon of the arithmetic that made H.
        known: the eigenvalues, where somebody else computes them anyway.
    """

    shapes: dict[str, torch.Size]
    H: Float[Tensor, "p p"]
    resolution: float
    known: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        """Record the names in the common form."""
        self.names = tuple(self.shapes)

    @cached_property
    def spectrum(self) -> Float[Tensor, " p"]:
        """Eigenvalues of H."""
        if self.known is not None:
            return self.known()
        return eigenvalues(self.H, ", ".join(self.names), self.resolution)

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        r"""By the spectrum of H under one precision, else of $\Delta^{-1/2} H \Delta^{-1/2}$."""
        deltas = [log_precision[name] for name in self.names]
        if len(deltas) == 1 and deltas[0].dim() == 0:
            return torch.log1p(self.spectrum * (-deltas[0]).exp()).sum()
        root = (-0.5 * self._expand(log_precision)).exp()
        whitened = root.unsqueeze(1) * self.H.double() * root
        return torch.log1p(eigenvalues(whitened, ", ".join(self.names), self.resolution)).sum()

    def _expand(self, log_precision: LogPrecisions) -> Float[Tensor, " p"]:
        parts = [log_precision[n].expand(shape).reshape(-1) for n, shape in self.shapes.items()]
        return torch.cat(parts)

    def factors(self) -> list[Tensor | Factor]:
        """H itself."""
        return [self.H]

    def prepare(self) -> list[Spectrum]:
        """The spectrum, where one precision will do."""
        if len(self.names) > 1 or self.known is not None:
            return []

        def put(values: list[Tensor]) -> None:
            self.__dict__["spectrum"] = values[0].squeeze(0)

        make, shape = partial(torch.unsqueeze, self.H, 0), (1, len(self.H))
        return [
            Spectrum([EigenJob(self.names[0], shape, self.H.device, make, self.resolution)], put)
        ]

    def _cholesky(self, log_precision: LogPrecisions) -> Tensor:
        delta = self._expand(log_precision).exp()
        H = symmetric(self.H, ", ".join(self.names))
        try:
            factor: Tensor = torch.linalg.cholesky(H + torch.diag(delta))
        except LinAlgError as error:
            raise CurvatureError(
                f"expected a positive definite posterior precision for {', '.join(self.names)}, "
                "got one that is singular to rounding; use float64 or a larger prior precision"
            ) from error
        return factor

    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        r"""$L^{-\top} e$ with $L L^\top = H + \Delta$."""
        L = self._cholesky(log_precision)
        drawn: Tensor = torch.linalg.solve_triangular(L.mT, noise.double().T, upper=True).T
        return drawn

    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        r"""$(L^{-1} J^\top)^\top (L^{-1} J^\top)$."""
        L = self._cholesky(log_precision)
        half: Tensor = torch.linalg.solve_triangular(L, jacobian.double().mT, upper=False)
        return half.mT @ half


@dataclass
class Diag(Block):
    """Only the diagonal of H, in the tensor's own shape."""

    name: str
    h: Tensor

    def __post_init__(self) -> None:
        """Record the name in the common form; a diagonal cannot be checked any later."""
        self.names = (self.name,)
        if not bool(torch.isfinite(self.h).all()):
            raise CurvatureError(
                f"expected a finite curvature for {self.name}, got NaN or infinity"
            )

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        """Sum of log1p(h / delta)."""
        return torch.log1p(self.spectrum * (-log_precision[self.name]).exp()).sum()

    @property
    def spectrum(self) -> Tensor:
        """The diagonal, in float64."""
        return self.h.double()

    def factors(self) -> list[Tensor | Factor]:
        """The diagonal."""
        return [self.h]

    def prepare(self) -> list[Spectrum]:
        """Nothing to prepare."""
        return []

    def _deviation(self, log_precision: LogPrecisions) -> Tensor:
        return (self.h.double() + log_precision[self.name].exp()).rsqrt().reshape(-1)

    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        """Noise over the root of the diagonal."""
        return noise.double() * self._deviation(log_precision)

    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        """J D^-1 J'."""
        weighted = jacobian.double() * self._deviation(log_precision)
        return weighted @ weighted.mT


ROW = 256
"""Entries of a row; the last row of a block is filled up with zeros, which add nothing."""


class StackedSpectra:
    """Blocks whose log-determinants are asked for together.

    Args:
        blocks: all of them.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        """Keep them."""
        self.blocks = blocks

    def logdet(self, log_precision: LogPrecisions) -> Float[Tensor, ""]:
        r"""$\sum_b \log|I + \Delta_b^{-1} H_b|$, differentiable as `Block.logdet` is."""
        single = all(len(block.names) == 1 for block in self.blocks)
        if not single or any(log_precision[b.names[0]].dim() for b in self.blocks):
            return torch.stack([block.logdet(log_precision) for block in self.blocks]).sum()
        rows, owner = self._rows
        deltas = torch.stack([log_precision[block.names[0]] for block in self.blocks])
        return torch.log1p(rows * (-deltas).exp()[owner].unsqueeze(1)).sum()

    @cached_property
    def _rows(self) -> tuple[Float[Tensor, "r w"], Int[Tensor, " r"]]:
        """All eigenvalues, and the block of each row."""
        parts, owner = [], list[int]()
        for number, block in enumerate(self.blocks):
            values = block.spectrum.flatten()
            filled = F.pad(values, (0, -len(values) % ROW)).view(-1, ROW)
            parts.append(filled)
            owner += [number] * len(filled)
        rows = torch.cat(parts)
        return rows, torch.tensor(owner, device=rows.device)
