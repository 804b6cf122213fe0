r"""Positive semi-definite curvature blocks as values: Kronecker, dense, diagonal.

A block $H$ belongs to one or several parameter tensors and answers three questions about
$P = H + \Delta$, where $\Delta$ is the diagonal prior precision of those tensors:
$\log|I + \Delta^{-1} H|$, draws from $N(0, P^{-1})$, and $J P^{-1} J^\top$.

Law: factors are summed, and eigenvalues and log-determinants computed, in float64;
$\log(\lambda + \delta) - \log \delta$ is always $\log(1 + \lambda/\delta)$ by log1p.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.errors import CurvatureError
from symrazor.spectra import LinAlgError, eigenvalues, eigenvectors, symmetric

LogPrecisions = Mapping[str, Tensor]


NARROW, WIDE = 16, 128


def gram(rows: Float[Tensor, "*r k i"]) -> Float[Tensor, "k i i"]:
    r"""$\sum_r a_{rk} a_{rk}^\top$ for each block k; the leading dimensions are summed over.

    Two shapes for which a plain matrix product is slow get a detour: narrow rows are folded so that
    several stand side by side (the diagonal blocks of the wider product are added up), and wide
    ones are split in two halves, again and again, so that the symmetric part is computed once.
    """
    k, i = rows.shape[-2:]
    if k > 1:
        flat = rows.reshape(-1, k, i)
        return torch.einsum("rki,rkj->kij", flat, flat)
    flat = rows.reshape(math.prod(rows.shape[:-2]), i)
    fold = -(-NARROW // max(i, 1))
    if fold > 1 and len(flat) >= 64 * fold:
        whole = len(flat) - len(flat) % fold
        folded = flat[:whole].reshape(-1, fold * i)
        wide = (folded.T @ folded).view(fold, i, fold, i)
        tail = flat[whole:]
        total = torch.einsum("fifj->ij", wide) + tail.T @ tail
    else:
        total = _halved_gram(flat)
    return total.unsqueeze(0)


def _halved_gram(flat: Float[Tensor, "r i"]) -> Float[Tensor, "i i"]:
    i = flat.shape[1]
    if i <= WIDE:
        return flat.T @ flat
    half = -(-i // 2 // 16) * 16  # vector registers hold 16 numbers
    left, right = flat[:, :half], flat[:, half:]
    across = left.T @ right
    upper = torch.cat([_halved_gram(left), across], 1)
    return torch.cat([upper, torch.cat([across.T, _halved_gram(right)], 1)], 0)


class Block(ABC):
    """Curvature of one or several tensors; H is already scaled to the whole data set."""

    names: tuple[str, ...]

    @abstractmethod
    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        r"""$\log|I + \Delta^{-1} H|$, differentiable in the log precisions and in the factors."""

    @abstractmethod
    def factors(self) -> list[Tensor]:
        """The tensors that H is made of."""

    @abstractmethod
    def prepare(self) -> list[Callable[[], object]]:
        """Independent pieces of work that `logdet` will need; run once, maybe in parallel."""

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


@dataclass
class Kron(Block):
    r"""$H = \bigoplus_k s\, G_k \otimes A_k$ for $W[k, o, i]$: one pair of factors per block k.

    Either factor may be shared by all blocks (leading dimension 1).

    Args:
        name: the weight tensor.
        A: input factors $\sum a a^\top$.
        G: output factors $\sum g g^\top$.
        scale: one over the number of terms of A, times N/n for a subset.
        resolution: machine epsilon of the arithmetic that made the factors.
        to_blocks: parameter layout -> [k, o, i].
        from_blocks: its inverse.
    """

    name: str
    A: Float[Tensor, "k i i"]
    G: Float[Tensor, "k o o"]
    scale: float
    resolution: float
    to_blocks: Callable[[Tensor], Tensor]
    from_blocks: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        """Record the name in the common form."""
        self.names = (self.name,)

    @cached_property
    def spectrum_A(self) -> Float[Tensor, "k i"]:
        """Eigenvalues of the input factors."""
        return self._spectrum(self.A, "input")

    @cached_property
    def spectrum_G(self) -> Float[Tensor, "k o"]:
        """Eigenvalues of the output factors."""
        return self._spectrum(self.G, "output")

    def _spectrum(self, factor: Tensor, side: str) -> Tensor:
        name = f"{self.name} ({side} side)"
        if factor.shape[0] == 1:
            return eigenvalues(factor[0], name, self.resolution).unsqueeze(0)
        return eigenvalues(factor, name, self.resolution)

    @property
    def spectrum(self) -> Float[Tensor, "k o i"]:
        """Eigenvalues of H."""
        return self.scale * self.spectrum_G.unsqueeze(2) * self.spectrum_A.unsqueeze(1)

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        """Sum of log1p(lambda / delta) over products of eigenvalues."""
        return torch.log1p(self.spectrum * (-self._delta(log_precision)).exp()).sum()

    def _delta(self, log_precision: LogPrecisions) -> Tensor:
        log_delta = log_precision[self.name]
        if log_delta.dim():
            raise ValueError(
                f"expected one prior precision for {self.name}, got one per weight: a Kronecker "
                "block plus a diagonal has no cheap log-determinant; use structure 'diag', 'block' "
                "or 'full', or prior groups 'tensor'"
            )
        return log_delta

    def factors(self) -> list[Tensor]:
        """A and G."""
        return [self.A, self.G]

    def prepare(self) -> list[Callable[[], object]]:
        """Both spectra."""
        return [lambda: self.spectrum_A, lambda: self.spectrum_G]

    @cached_property
    def _vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        values_a, vectors_a = eigenvectors(self.A, self.name, self.resolution)
        values_g, vectors_g = eigenvectors(self.G, self.name, self.resolution)
        return self.scale * values_g.unsqueeze(2) * values_a.unsqueeze(1), vectors_g, vectors_a

    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        r"""$U_G\, [(\lambda + \delta)^{-1/2} \circ E]\, U_A^\top$ in every block."""
        values, left, right = self._vectors
        white = torch.stack([self.to_blocks(e) for e in self._reshape(noise)])
        scaled = white * (values + self._delta(log_precision).exp()).rsqrt()
        coloured = left @ scaled @ right.mT
        return torch.stack([self.from_blocks(e).flatten() for e in coloured])

    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        """Rotate the Jacobian into the eigenbasis, where P is diagonal."""
        values, left, right = self._vectors
        n, c, p = jacobian.shape
        rows = torch.stack([self.to_blocks(j) for j in self._reshape(jacobian.reshape(n * c, p))])
        rotated = left.mT @ rows @ right
        root = (values + self._delta(log_precision).exp()).rsqrt()
        weighted = (rotated * root).reshape(n, c, -1)
        return weighted @ weighted.mT

    def _reshape(self, flat: Tensor) -> Tensor:
        like = self.from_blocks(self.spectrum.detach())
        return flat.double().reshape(len(flat), *like.shape)


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

    def factors(self) -> list[Tensor]:
        """H itself."""
        return [self.H]

    def prepare(self) -> list[Callable[[], object]]:
        """The spectrum, where one precision will do."""
        return [lambda: self.spectrum] if len(self.names) == 1 and self.known is None else []

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
        return torch.log1p(self.h.double() * (-log_precision[self.name]).exp()).sum()

    def factors(self) -> list[Tensor]:
        """The diagonal."""
        return [self.h]

    def prepare(self) -> list[Callable[[], object]]:
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
