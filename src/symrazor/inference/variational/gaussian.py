r"""Define Gaussian posteriors $q(w) = N(m, \Sigma)$ over one weight tensor, and their divergence.

A posterior provides what the evidence lower bound needs: reparameterised draws, $\log|\Sigma|$,
$\mathrm{E}\|w\|^2$, and draws of the outputs of a linear layer; `posteriors` defines the
structures of $\Sigma$. A tensor of shape [out, ...] is treated as a matrix [out, -1], a vector as a
single row.

With `batch=b` one object holds the posteriors of b models at once: the mean is [b, *shape], draws
are [n, b, *shape], and the scalars become vectors [b].
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

Draw = Callable[[Sequence[int]], Tensor]
"""Returns standard normal noise of a shape."""
Samples = Float[Tensor, "n *shape"]
Inputs = Float[Tensor, "*lead rows in"]
Outputs = Float[Tensor, "*lead rows out"]
OutputSamples = Float[Tensor, "n *lead rows out"]


class GaussianPosterior(nn.Module, ABC):
    """Base class of all posteriors: a mean, and a covariance of some structure.

    Args:
        shape: shape of the weight tensor.
        scale: starting standard deviation of every weight, positive.
        mean: starting mean, [*shape] or [batch, *shape]; zero by default.
        batch: number of models in one object, or None for one model without a leading dimension.
        dtype: dtype of the parameters; by default that of `mean`.
        device: device of the parameters; by default that of `mean`.
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
        super().__init__()
        self.shape, self.batch = torch.Size(shape), batch
        if not self.shape.numel():
            raise ValueError(f"A posterior needs at least one weight, got shape {list(shape)}.")
        if batch is not None and batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}.")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        self.lead = () if batch is None else (batch,)
        start = torch.zeros(self.shape) if mean is None else mean.detach()
        if start.shape not in (self.shape, self.lead + self.shape):
            raise ValueError(
                f"mean must have shape {[*self.lead, *self.shape]}, got {list(start.shape)}."
            )
        dtype = dtype or (torch.get_default_dtype() if mean is None else start.dtype)
        start = start.to(dtype=dtype, device=device or start.device)
        self.mean = nn.Parameter(start.expand(self.lead + self.shape).clone())
        self.start(scale)

    def start(self, scale: float) -> None:
        """Create the covariance: (nearly) independent weights of this standard deviation."""

    @property
    def size(self) -> int:
        """Number of weights D (of one model)."""
        return self.shape.numel()

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the tensor as a matrix."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows, self.size // rows

    @abstractmethod
    def deviation_from(self, n: int, draw: Draw) -> Samples:
        """Return samples of w - m made of noise from `draw`, whose first dimension is n."""

    @abstractmethod
    def variance(self) -> Float[Tensor, "*shape"]:
        r"""Return the diagonal of $\Sigma$."""

    @abstractmethod
    def log_det(self) -> Tensor:
        r"""Return $\log |\Sigma|$ in float64."""

    @abstractmethod
    def mahalanobis(self, w: Samples) -> Float[Tensor, "n *batch"]:
        r"""Return $(w - m)^\top \Sigma^{-1} (w - m)$ of each row."""

    def sample(
        self, n: int, generator: torch.Generator | None = None, antithetic: bool = False
    ) -> Samples:
        """Return reparameterised samples, differentiable in mean and covariance.

        Args:
            n: number of samples.
            generator: random generator.
            antithetic: sample in pairs m + d, m - d, for which linear functions of w are exact.
        """
        return self.mean + self.deviation(n, generator, antithetic)

    def deviation(
        self, n: int, generator: torch.Generator | None = None, antithetic: bool = False
    ) -> Samples:
        """Return samples of w - m; see `sample`."""
        return self.deviation_from(n, self._draw(n, generator, antithetic))

    def trace(self) -> Tensor:
        r"""Return $\mathrm{tr}\, \Sigma$ in float64."""
        return self._sum(self.variance())

    def second_moment(self) -> Tensor:
        r"""Return $\mathrm{E}\|w\|^2 = \mathrm{tr}\, \Sigma + m^\top m$ in float64."""
        return self.trace() + self._sum(self.mean.square())

    def log_prob(self, w: Float[Tensor, "n *shape"]) -> Float[Tensor, "n *batch"]:
        r"""Return $\log q(w)$ of each row."""
        constant = self.size * math.log(2 * math.pi) + self.log_det()
        return -0.5 * (self.mahalanobis(w) + constant)

    def linear(
        self,
        x: Float[Tensor, "*rows in"],
        n: int = 1,
        generator: torch.Generator | None = None,
        antithetic: bool = False,
    ) -> Float[Tensor, "n *rows out"]:
        """Return samples of x W', from the distribution of the outputs where it is known.

        Local reparameterisation: each row of x gets its own noise, with the exact distribution of
        its output. Rows of one sample are then independent, which does not matter in a sum over
        data. With `batch` the first dimension of x is the model. For the arguments see `sample`.
        """
        mean = torch.einsum("...ni,...oi->...no", self._rows(x), self.mean)
        noise = self.linear_deviation(x, n, generator, antithetic)
        return mean.reshape(*x.shape[:-1], -1) + noise

    def linear_deviation(
        self, x: Tensor, n: int, generator: torch.Generator | None = None, antithetic: bool = False
    ) -> Tensor:
        """Return samples of x (W - M)'; see `linear`."""
        drawn = self.output_deviation(self._rows(x), n, self._draw(n, generator, antithetic))
        return drawn.reshape(n, *x.shape[:-1], self.shape[0])

    def output_deviation(self, x: Inputs, n: int, draw: Draw) -> OutputSamples:
        """Return samples of x (W - M)'; by default from sampled weights."""
        return torch.einsum("...ni,s...oi->s...no", x, self.deviation_from(n, draw))

    @abstractmethod
    def output_variance(self, x: Inputs) -> Outputs:
        """Return the variance of each output of x W', in closed form."""

    def _rows(self, x: Tensor) -> Tensor:
        """Reshape inputs to [*lead, rows, in]."""
        if len(self.shape) != 2:
            raise ValueError(
                f"The weight must be a matrix [out, in], got shape {list(self.shape)}."
            )
        if x.shape[-1] != self.shape[1] or x.shape[: len(self.lead)] != self.lead:
            raise ValueError(
                f"Inputs must be [{', '.join(map(str, (*self.lead, '...', self.shape[1])))}], "
                f"got {list(x.shape)}."
            )
        return x.reshape(*self.lead, -1, x.shape[-1])

    def _draw(self, n: int, generator: torch.Generator | None, antithetic: bool) -> Draw:
        """Return the source of noise of n samples, in pairs of opposite sign if antithetic."""
        if n < 1:
            raise ValueError(f"The number of samples must be at least 1, got {n}.")
        device = generator.device if generator is not None else self.mean.device

        def draw(shape: Sequence[int]) -> Tensor:
            fresh = (-(-n // 2) if antithetic else n, *shape[1:])
            noise = torch.randn(fresh, generator=generator, device=device, dtype=self.mean.dtype)
            noise = noise.to(self.mean.device)
            return torch.cat([noise, -noise])[:n] if antithetic else noise

        return draw

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the weights of each model, in float64."""
        return values.reshape(*self.lead, -1).sum(-1, dtype=torch.float64)

    def extra_repr(self) -> str:
        """Show the shape and number of models in `print(model)`."""
        return f"{list(self.shape)}" + ("" if self.batch is None else f", batch={self.batch}")


class Point(GaussianPosterior):
    """A point estimate, which has no part in the divergence."""

    def deviation_from(self, n: int, draw: Draw) -> Samples:
        """Return zeros."""
        return torch.zeros_like(self.mean).expand(n, *self.mean.shape)

    def variance(self) -> Float[Tensor, "*shape"]:
        """Return zeros."""
        return torch.zeros_like(self.mean)

    def log_det(self) -> Tensor:
        """Return zeros."""
        return self.mean.new_zeros(self.lead, dtype=torch.float64)

    def mahalanobis(self, w: Samples) -> Float[Tensor, "n *batch"]:
        """Raise ValueError."""
        raise ValueError("A point estimate has no density.")

    def output_variance(self, x: Inputs) -> Outputs:
        """Return zeros."""
        return x.new_zeros(*x.shape[:-1], self.shape[0])


def kl(q: GaussianPosterior, precision: float | Tensor) -> Tensor:
    r"""Return $\mathrm{KL}(q \,\|\, N(0, \delta^{-1} I))$ in float64; 0 for a `Point`.

    $$ \tfrac12 \big[ \delta (\mathrm{tr}\,\Sigma + m^\top m) - D - D \log \delta
       - \log|\Sigma| \big] $$

    Args:
        q: the posterior.
        precision: one number, one per model of a batch, or one per weight.
    """
    if not isinstance(precision, Tensor) and not precision > 0:
        raise ValueError(f"The prior precision must be positive, got {precision}.")
    delta = torch.as_tensor(precision, dtype=torch.float64, device=q.mean.device)
    if isinstance(q, Point):
        return q.log_det()
    if delta.shape in (torch.Size(), torch.Size(q.lead)):
        return 0.5 * (delta * q.second_moment() - q.size * (1 + delta.log()) - q.log_det())
    if delta.shape not in (q.shape, q.mean.shape):
        raise ValueError(
            f"The prior precision must be one number or have shape {list(q.shape)}, got "
            f"{list(delta.shape)}."
        )
    moment = q._sum(delta * (q.variance() + q.mean.square()))
    logs = q._sum(delta.log().expand_as(q.mean))
    return 0.5 * (moment - q.size - logs - q.log_det())


def best_variance(q: GaussianPosterior) -> Tensor:
    r"""Return $v^* = (\mathrm{tr}\,\Sigma + m^\top m) / D$, the best prior variance."""
    return q.second_moment() / q.size


def collapsed_kl(q: GaussianPosterior) -> Tensor:
    r"""Return the divergence at the best prior variance, $\tfrac12 [D \log v^* - \log|\Sigma|]$."""
    if isinstance(q, Point):
        return q.log_det()
    return 0.5 * (q.size * best_variance(q).log() - q.log_det())
