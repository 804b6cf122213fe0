r"""Gaussian posteriors $q(w) = N(m, \Sigma)$ over one weight tensor, and their divergence.

A posterior has all that the evidence lower bound needs: reparameterised draws, $\log|\Sigma|$,
$\mathrm{E}\|w\|^2$, and draws of the outputs of a linear layer; `posteriors` has the structures of
$\Sigma$. A tensor of shape [out, ...] is seen as the matrix [out, rest]; a vector as a single row.

With `batch=b` one object holds the posteriors of b models at once: the mean is [b, *shape], draws
are [n, b, *shape], and the scalars become vectors [b].
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

Draw = Callable[[Sequence[int]], Tensor]
"""Standard normal numbers of a shape."""


class GaussianPosterior(nn.Module, ABC):
    """Base of all posteriors: a mean, and a covariance of some structure.

    Args:
        shape: of the weight tensor.
        scale: standard deviation of every weight to start with.
        mean: to start with, [*shape] or [batch, *shape]; zero by default.
        batch: number of models side by side, or None for one without a leading dimension.
        dtype: of the parameters; by default that of `mean`.
        device: of the parameters; by default that of `mean`.

    Raises:
        ValueError: a mean of another shape, a scale that is not positive, a batch below 1.
    """

    mean: nn.Parameter

    def __init__(
        self,
        shape: Sequence[int],
        scale: float = 0.1,
        mean: Tensor | None = None,
        batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Start at `mean` with independent weights of deviation `scale`; see the class."""
        super().__init__()
        self.shape, self.batch = torch.Size(shape), batch
        if not self.shape.numel():
            raise ValueError(f"expected at least one weight, got the shape {list(shape)}")
        if batch is not None and batch < 1:
            raise ValueError(f"expected a batch of at least 1 model, got {batch}")
        if not 0 < scale < math.inf:
            raise ValueError(f"expected a positive scale of the posterior, got {scale}")
        self.lead = () if batch is None else (batch,)
        start = torch.zeros(self.shape) if mean is None else mean.detach()
        if start.shape not in (self.shape, self.lead + self.shape):
            raise ValueError(
                f"expected a mean of shape {[*self.lead, *self.shape]}, got {list(start.shape)}"
            )
        dtype = dtype or (torch.get_default_dtype() if mean is None else start.dtype)
        start = start.to(dtype=dtype, device=device or start.device)
        self.mean = nn.Parameter(start.expand(self.lead + self.shape).clone())
        self.start(scale)

    def start(self, scale: float) -> None:
        """Make the covariance: independent weights of this deviation, or nearly so."""

    @property
    def size(self) -> int:
        """Number of weights D (of one model)."""
        return self.shape.numel()

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the tensor seen as a matrix."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows, self.size // rows

    @abstractmethod
    def deviation_from(self, n: int, draw: Draw) -> Float[Tensor, "n *shape"]:
        """Draws of w - m from a source of noise whose first dimension is n."""

    @abstractmethod
    def variance(self) -> Float[Tensor, "*shape"]:
        r"""Diagonal of $\Sigma$."""

    @abstractmethod
    def log_det(self) -> Tensor:
        r"""$\log |\Sigma|$ in float64."""

    @abstractmethod
    def mahalanobis(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        r"""$(w - m)^\top \Sigma^{-1} (w - m)$ of each row."""

    def sample(
        self, n: int, generator: torch.Generator | None = None, antithetic: bool = False
    ) -> Float[Tensor, "n *shape"]:
        """Reparameterised draws: differentiable in the mean and the covariance.

        Args:
            n: number of draws.
            generator: of the noise.
            antithetic: draw in pairs m + d, m - d: linear functions of w are then exact.
        """
        return self.mean + self.deviation(n, generator, antithetic)

    def deviation(
        self, n: int, generator: torch.Generator | None = None, antithetic: bool = False
    ) -> Float[Tensor, "n *shape"]:
        """Draws of w - m; see `sample`."""
        if n < 1:
            raise ValueError(f"expected at least 1 draw from a posterior, got {n}")
        return self.deviation_from(
            n, partial(self._noise, generator=generator, antithetic=antithetic)
        )

    def trace(self) -> Tensor:
        r"""$\mathrm{tr}\, \Sigma$ in float64."""
        return self._sum(self.variance())

    def second_moment(self) -> Tensor:
        r"""$\mathrm{E}\|w\|^2 = \mathrm{tr}\, \Sigma + m^\top m$ in float64."""
        return self.trace() + self._sum(self.mean.square())

    def log_prob(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        r"""$\log q(w)$ of each row."""
        constant = self.size * math.log(2 * math.pi) + self.log_det()
        return -0.5 * (self.mahalanobis(w) + constant)

    def linear(
        self,
        x: Float[Tensor, "*rows in"],
        n: int = 1,
        generator: torch.Generator | None = None,
        antithetic: bool = False,
    ) -> Float[Tensor, "n *rows out"]:
        """Draws of x W', row by row: the outputs themselves where their distribution is known.

        Local reparameterisation: each row of x gets noise of its own, with the exact distribution
        of its output. Rows of one draw are then independent, which a sum over data does not see.
        With `batch` the first dimension of x is the model.

        Args:
            x: inputs.
            n: number of draws.
            generator: of the noise.
            antithetic: draw in pairs.
        """
        mean = torch.einsum("...ni,...oi->...no", self._rows(x), self.mean)
        noise = self.linear_deviation(x, n, generator, antithetic)
        return mean.reshape(*x.shape[:-1], -1) + noise

    def linear_deviation(
        self,
        x: Float[Tensor, "*rows in"],
        n: int = 1,
        generator: torch.Generator | None = None,
        antithetic: bool = False,
    ) -> Float[Tensor, "n *rows out"]:
        """Draws of x (W - M)'; see `linear`."""
        draw = partial(self._noise, generator=generator, antithetic=antithetic)
        drawn = self.output_deviation(self._rows(x), n, draw)
        return drawn.reshape(n, *x.shape[:-1], self.shape[0])

    def output_deviation(
        self, x: Float[Tensor, "*lead rows in"], n: int, draw: Draw
    ) -> Float[Tensor, "n *lead rows out"]:
        """Draws of x (W - M)' from any source of noise; by drawn weights by default."""
        return torch.einsum("...ni,s...oi->s...no", x, self.deviation_from(n, draw))

    @abstractmethod
    def output_variance(self, x: Float[Tensor, "*lead rows in"]) -> Float[Tensor, "*lead rows out"]:
        """Variance of each output of x W', in closed form."""

    def _rows(self, x: Tensor) -> Tensor:
        """Inputs as [*lead, rows, in]."""
        if len(self.shape) != 2:
            raise ValueError(f"expected a weight matrix [out, in], got shape {list(self.shape)}")
        if x.shape[-1] != self.shape[1] or x.shape[: len(self.lead)] != self.lead:
            raise ValueError(
                f"expected inputs [{', '.join(map(str, (*self.lead, '...', self.shape[1])))}], "
                f"got {list(x.shape)}"
            )
        return x.reshape(*self.lead, -1, x.shape[-1])

    def _noise(
        self, shape: Sequence[int], generator: torch.Generator | None, antithetic: bool
    ) -> Tensor:
        """Standard normal numbers, the first dimension in pairs of opposite sign if wanted."""
        n = shape[0]
        if n < 1:
            raise ValueError(f"expected at least 1 draw from a posterior, got {n}")
        drawn = -(-n // 2) if antithetic else n
        device = generator.device if generator is not None else self.mean.device
        noise = torch.randn(
            (drawn, *shape[1:]), generator=generator, device=device, dtype=self.mean.dtype
        ).to(self.mean.device)
        return torch.cat([noise, -noise])[:n] if antithetic else noise

    def _sum(self, values: Tensor) -> Tensor:
        """Over the weights of each model, in float64."""
        return values.reshape(*self.lead, -1).sum(-1, dtype=torch.float64)

    def _matrices(self, w: Tensor) -> Tensor:
        """[n, *lead, *shape] -> [n, *lead, rows, columns]."""
        return w.reshape(len(w), *self.lead, *self.matrix_shape)

    def extra_repr(self) -> str:
        """Shape and number of models, for `print(model)`."""
        return f"{list(self.shape)}" + ("" if self.batch is None else f", batch={self.batch}")


class Point(GaussianPosterior):
    """No posterior: the weight is a point estimate, and has no part in the divergence."""

    def deviation_from(self, n: int, draw: Draw) -> Float[Tensor, "n *shape"]:
        """Zero."""
        return torch.zeros_like(self.mean).expand(n, *self.mean.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        """Zero."""
        return torch.zeros_like(self.mean)

    def log_det(self) -> Tensor:
        """Zero."""
        return self.mean.new_zeros(self.lead, dtype=torch.float64)

    def mahalanobis(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        """Has no meaning for a point."""
        raise ValueError("expected a posterior with a density, got a point estimate")

    def output_variance(self, x: Float[Tensor, "*lead rows in"]) -> Float[Tensor, "*lead rows out"]:
        """Zero."""
        return x.new_zeros(*x.shape[:-1], self.shape[0])

    def output_deviation(
        self, x: Float[Tensor, "*lead rows in"], n: int, draw: Draw
    ) -> Float[Tensor, "n *lead rows out"]:
        """Zero."""
        return x.new_zeros(n, *x.shape[:-1], self.shape[0])


def kl(q: GaussianPosterior, precision: float | Tensor) -> Tensor:
    r"""$\mathrm{KL}(q \,\|\, N(0, \delta^{-1} I))$ in float64; 0 for a `Point`.

    $$ \tfrac12 \big[ \delta (\mathrm{tr}\,\Sigma + m^\top m) - D - D \log \delta
       - \log|\Sigma| \big] $$

    Args:
        q: the posterior.
        precision: one, one per model of a batch, or one for every weight.
    """
    if not isinstance(precision, Tensor) and not precision > 0:
        raise ValueError(f"expected a positive prior precision, got {precision}")
    delta = torch.as_tensor(precision, dtype=torch.float64, device=q.mean.device)
    if isinstance(q, Point):
        return q.log_det()
    if delta.shape in (torch.Size(), torch.Size(q.lead)):
        return 0.5 * (delta * q.second_moment() - q.size * (1 + delta.log()) - q.log_det())
    if delta.shape not in (q.shape, q.mean.shape):
        raise ValueError(
            f"expected one prior precision or {list(q.shape)} of them, got {list(delta.shape)}"
        )
    moment = q._sum(delta * (q.variance() + q.mean.square()))
    logs = q._sum(delta.log().expand_as(q.mean))
    return 0.5 * (moment - q.size - logs - q.log_det())


def best_variance(q: GaussianPosterior) -> Tensor:
    r"""$v^* = (\mathrm{tr}\,\Sigma + m^\top m) / D$, the prior variance of least divergence."""
    return q.second_moment() / q.size


def collapsed_kl(q: GaussianPosterior) -> Tensor:
    r"""The divergence at the best prior variance, $\tfrac12 [D \log v^* - \log|\Sigma|]$."""
    if isinstance(q, Point):
        return q.log_det()
    return 0.5 * (q.size * best_variance(q).log() - q.log_det())
