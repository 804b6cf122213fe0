r"""Likelihoods $p(y \mid f)$ of a network output $f \in \mathbb R^K$.

A likelihood owns its negative log likelihood with every constant, the check of its labels, the
residual $\partial_f (-\log p)$, its predictions and scores, and a root of the output Hessian

$$ \Lambda(f) = -\nabla_f^2 \log p(y \mid f) = \sum_c r_c(f)\, r_c(f)^\top , $$

which for these canonical links does not depend on $y$, so that the generalised Gauss-Newton matrix
$\sum_n J_n^\top \Lambda_n J_n$ equals the Fisher information. A new likelihood is a subclass with a
registered name: see docs/how-to/add-a-likelihood.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.accelerate.devices import run_in_threads
from symrazor.core.parameters import Hyper

Probe = Literal["spectral", "label"]
Outputs = Float[Tensor, "n k"]
Columns = Float[Tensor, "c n k"]
Covariances = Float[Tensor, "n k k"]
MeanAndVariance = tuple[Tensor, Tensor | None]

MAX_SPECTRAL_COLUMNS = 64
"""Largest root for which spectral probes are computed; a larger eigenproblem costs too much."""

MAX_ELEMENTWISE_PRODUCTS = 2**19
"""Up to here products are summed elementwise: a GPU library would allocate 32 MB of workspace."""


class Likelihood(nn.Module, ABC):
    """Base class of all likelihoods. Five methods are required; the others have defaults."""

    @abstractmethod
    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        """Return the negative log likelihood of each datum, with all normalising constants."""

    @abstractmethod
    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return the gradient of `nll` in `f`."""

    @abstractmethod
    def hessian_root(self, f: Outputs) -> Columns:
        r"""Return vectors $r_c$ with $\sum_c r_c r_c^\top = \Lambda(f)$, differentiable in `f`."""

    @abstractmethod
    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        r"""Draw one label per datum from $p(y \mid f)$."""

    @abstractmethod
    def mean(self, f: Outputs) -> Outputs:
        """Return the mean of y given f (class probabilities for a categorical)."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check that outputs and labels belong together; raise ValueError otherwise."""
        if f.dim() != 2:
            raise ValueError(f"Model outputs must have shape [n, k], got {list(f.shape)}.")
        if len(y) != len(f):
            raise ValueError(f"There are {len(f)} outputs but {len(y)} labels.")

    def noise_variance(self, mean: Outputs) -> Outputs | None:
        """Return the variance of y given its mean, or None for class labels."""
        return None

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return mean and variance of y (None for class labels) for Gaussian outputs."""
        raise ValueError(
            f"{type(self).__name__} has no closed-form prediction. Use how='mc' or 'sampling'."
        )

    def scores(self, f: Outputs | Float[Tensor, "s n k"], y: Tensor) -> dict[str, float]:
        """Return test scores of outputs f: the negative log likelihood, and those of `_scores`.

        Outputs under several draws of the weights, [s, n, k], are scored as one mixture.
        """
        with torch.no_grad():
            draws = f.double().reshape(-1, *f.shape[-2:])
            log_p = torch.stack([-self.nll(outputs, y) for outputs in draws])
            nll = float((math.log(len(draws)) - log_p.logsumexp(0)).mean())
            mean = torch.stack([self.mean(outputs) for outputs in draws]).mean(0)
            return self._scores(mean, y, nll)

    def _scores(self, mean: Tensor, y: Tensor, nll: float) -> dict[str, float]:
        """Return the scores of a predictive mean: squared error, unless overridden."""
        error = mean - y.reshape(mean.shape).double()
        return {"mse": float(error.square().mean()), "nll": nll}

    def sampled_root(
        self,
        f: Outputs,
        samples: int,
        generator: torch.Generator | None = None,
        probe: Probe = "spectral",
    ) -> Float[Tensor, "s n k"]:
        r"""Draw vectors $z_s$ with $E \sum_s z_s z_s^\top = \Lambda$, differentiable in `f`.

        "label": residuals of sampled labels, the usual Monte Carlo Fisher.

        "spectral": $z = R V \epsilon$ with signs $\epsilon = \pm 1$ and $V$ the right singular
        vectors of the root $R = [r_1, r_2, \dots]$ of each datum. As the columns of $RV$ are
        orthogonal, $|z|^2 = \mathrm{tr}\, \Lambda$ holds for every draw, not only on average: at
        equal cost the error of the evidence is several times smaller. Derivatives keep V fixed. Any
        orthogonal V is unbiased, so the gradient is unbiased, too, though it is not the derivative
        of this draw.
        """
        if probe == "label":
            draws = [self.residual(f, self.sample(f, generator)) for _ in range(samples)]
            return torch.stack(draws) / math.sqrt(samples)
        root = self.hessian_root(f)
        basis = _right_singular_vectors(root.detach())
        shape = (samples, basis.shape[0], basis.shape[-1])
        signs = torch.randint(0, 2, shape, generator=generator, device=_device(generator, f))
        signs = signs.to(device=f.device, dtype=f.dtype) * 2 - 1
        mixed = (basis * signs.unsqueeze(2)).sum(-1)
        return (root * mixed.movedim(-1, 1).unsqueeze(-1)).sum(1) / math.sqrt(samples)


def _device(generator: torch.Generator | None, like: Tensor) -> torch.device:
    return generator.device if generator is not None else like.device


def _right_singular_vectors(root: Columns) -> Float[Tensor, "n c c"]:
    """Return, for each datum, the orthogonal V that makes the columns of R V orthogonal.

    Large roots and failed eigenproblems get V = I (plain Rademacher mixing), which is unbiased and
    less precise.
    """
    c, n = root.shape[:2]
    if c <= MAX_SPECTRAL_COLUMNS:
        gram = _gram(root.double())
        scale = gram.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(gram.dtype).tiny)
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            return _fix_signs(_eigenvectors(gram / scale.reshape(-1, 1, 1))).to(root.dtype)
    return torch.eye(c, dtype=root.dtype, device=root.device).expand(n, c, c)


def _gram(root: Columns) -> Float[Tensor, "n c c"]:
    """Return the inner products of the columns of each datum."""
    if root.shape[0] * root.numel() > MAX_ELEMENTWISE_PRODUCTS:
        return torch.einsum("cnk,dnk->ncd", root, root)
    rows = root.movedim(0, 1)
    return (rows.unsqueeze(2) * rows.unsqueeze(1)).sum(-1)


def _fix_signs(vectors: Float[Tensor, "n c c"]) -> Float[Tensor, "n c c"]:
    """Turn all eigenvectors to the same side of a plane in general position.

    Libraries return either sign, depending on rounding. Without a convention, other machines,
    devices and numbers of processes would draw other probes from the same random numbers.
    """
    golden_ratio = (math.sqrt(5) - 1) / 2
    index = torch.arange(1, vectors.shape[1] + 1, dtype=vectors.dtype, device=vectors.device)
    side = ((0.5 + (golden_ratio * index).frac()).unsqueeze(1) * vectors).sum(1)
    return vectors * torch.where(side < 0, -1.0, 1.0).unsqueeze(1)


def _eigenvectors(gram: Float[Tensor, "n c c"]) -> Float[Tensor, "n c c"]:
    """Return eigenvectors of many small matrices.

    CUDA solves matrices of more than 32 rows one by one, and CPU threads are then faster (5,000
    matrices of 39 rows: 2.8 s on an H200, 0.2 s on 16 threads).
    """
    if not gram.is_cuda or gram.shape[-1] <= 32:
        vectors: Tensor = torch.linalg.eigh(gram)[1]
        return vectors
    tasks = [partial(torch.linalg.eigh, part) for part in gram.cpu().split(100)]
    return torch.cat([solution[1] for solution in run_in_threads(tasks)]).to(gram.device)


LIKELIHOODS: dict[str, type[Likelihood]] = {}
"""Registered likelihoods by name."""

L = TypeVar("L", bound=type[Likelihood])


def register_likelihood(name: str) -> Callable[[L], L]:
    """Return a class decorator that makes a likelihood available by name, as in `fit`.

    The class must have defaults for all arguments of its constructor.

    Raises:
        ValueError: another class has this name.
    """

    def register(likelihood: L) -> L:
        other = LIKELIHOODS.get(name, likelihood)
        if other.__qualname__ != likelihood.__qualname__:
            raise ValueError(
                f"The likelihood name {name!r} belongs to {other.__qualname__}. Choose another."
            )
        LIKELIHOODS[name] = likelihood
        return likelihood

    return register


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood itself, or the registered one of that name with its defaults."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        names = ", ".join(repr(name) for name in LIKELIHOODS)
        raise ValueError(f"Unknown likelihood {likelihood!r}. Use one of {names}, or a Likelihood.")
    return LIKELIHOODS[likelihood]()


def check_compatible(model: nn.Module, likelihood: Likelihood) -> None:
    """Call the model's `check_likelihood`, if it has one."""
    check = getattr(model, "check_likelihood", None)
    if check is not None:
        check(likelihood)


@register_likelihood("categorical")
class Categorical(Likelihood):
    r"""$y \in \{0..K-1\}$, $p = \mathrm{softmax}(f)$, $\Lambda = \mathrm{diag}(p) - p p^\top$."""

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        """Return the cross entropy of each datum."""
        return F.cross_entropy(f, y.long(), reduction="none")

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return softmax minus one-hot."""
        return f.softmax(-1) - F.one_hot(y.long(), f.shape[-1]).to(f.dtype)

    def hessian_root(self, f: Outputs) -> Columns:
        r"""Return the closed-form Cholesky factor of $\mathrm{diag}(p) - pp^\top$: K-1 columns.

        With tail sums $s_j = \sum_{i \ge j} p_i$,

        $$ L_{jj} = \sqrt{p_j s_{j+1} / s_j}, \qquad
           L_{ij} = -p_i \sqrt{p_j / (s_j s_{j+1})} \quad (i > j). $$

        All terms are exponentials of sums of log-probabilities, so that the factor and its gradient
        stay finite at probabilities 0 and 1.
        """
        log_p = f.log_softmax(-1)
        log_tail = log_p.flip(-1).logcumsumexp(-1).flip(-1)
        head, tail, next_tail = log_p[:, :-1], log_tail[:, :-1], log_tail[:, 1:]
        diagonal = (0.5 * (head + next_tail - tail)).exp()
        # Only below the diagonal is the exponent at most 0. Clip the rest, which is masked anyway,
        # so that it does not overflow and make the gradient NaN.
        exponent = log_p.unsqueeze(1) + (0.5 * (head - tail - next_tail)).unsqueeze(2)
        below = -exponent.clamp(max=0).exp().triu(1)
        embedded = torch.diag_embed(diagonal, dim1=1, dim2=2)
        columns = below + F.pad(embedded, (0, 1))
        return columns.transpose(0, 1)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw a class per datum."""
        p = f.detach().softmax(-1).to(_device(generator, f))
        return torch.multinomial(p, 1, generator=generator).squeeze(1).to(f.device)

    def mean(self, f: Outputs) -> Outputs:
        """Return class probabilities."""
        return f.softmax(-1)

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return class probabilities by the probit approximation.

        A shift common to all logits changes no probability, so its variance is removed first.
        """
        centred = covariance - covariance.mean(1, keepdim=True)
        centred = centred - centred.mean(2, keepdim=True)
        variance = centred.diagonal(dim1=1, dim2=2)
        return (f * (1 + math.pi / 8 * variance).rsqrt()).softmax(-1), None

    def _scores(self, mean: Tensor, y: Tensor, nll: float) -> dict[str, float]:
        accuracy = float((mean.argmax(1) == y).double().mean())
        return {"accuracy": accuracy, "nll": nll, "ece": calibration_error(mean, y)}

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for integer labels 0..K-1 and at least two classes."""
        super().check(f, y)
        if f.shape[1] < 2:
            raise ValueError(
                "A categorical likelihood needs at least 2 model outputs, got 1. Use the Bernoulli "
                "likelihood for a single logit."
            )
        if y.dim() != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(
                f"Class labels must be integers of shape [n], got {y.dtype} {list(y.shape)}."
            )
        wrong = ((y < 0) | (y >= f.shape[1])).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"Label {int(y[first])} at position {first} of the batch is not between 0 and "
                f"{f.shape[1] - 1}: the model has {f.shape[1]} outputs."
            )


@register_likelihood("gaussian")
class Gaussian(Likelihood):
    r"""$y \sim N(f, \sigma^2)$ with a learned noise scale, $\Lambda = \sigma^{-2} I$.

    Args:
        noise: starting standard deviation.
        outputs: None for one noise scale, or K for one per output.
    """

    def __init__(self, noise: float = 1.0, outputs: int | None = None) -> None:
        super().__init__()
        shape = () if outputs is None else (outputs,)
        self.noise = Hyper(torch.full(shape, noise, dtype=torch.float64))

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        r"""Return $\tfrac12 z^2 + \log \sigma + \tfrac12 \log 2\pi$, summed over outputs."""
        sigma = self.noise.value.to(f.dtype)
        z = (f - y.reshape(f.shape)) / sigma
        return (0.5 * z.square() + sigma.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        r"""Return $(f - y) / \sigma^2$."""
        return (f - y.reshape(f.shape)) / self.noise.value.to(f.dtype).square()

    def hessian_root(self, f: Outputs) -> Columns:
        r"""Return the unit vectors divided by $\sigma$."""
        n, k = f.shape
        inverse = (1 / self.noise.value.to(f.dtype)).expand(k)
        return torch.diag(inverse).unsqueeze(1).expand(k, n, k)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw the output plus noise."""
        noise = torch.randn(f.shape, generator=generator, device=_device(generator, f))
        scale = self.noise.value.detach().to(f.dtype)
        return f.detach() + scale * noise.to(device=f.device, dtype=f.dtype)

    def mean(self, f: Outputs) -> Outputs:
        """Return the output itself."""
        return f

    def noise_variance(self, mean: Outputs) -> Outputs:
        r"""Return $\sigma^2$."""
        return self.noise.value.detach().square().expand_as(mean)

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return the exact mean and variance."""
        return f, covariance.diagonal(dim1=1, dim2=2) + self.noise_variance(f)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for one real target per output."""
        super().check(f, y)
        _check_targets(f, y, "Gaussian")
        noise = self.noise.value
        if noise.dim() and noise.numel() != f.shape[1]:
            raise ValueError(
                f"The Gaussian likelihood has {noise.numel()} noise scales, but the model has "
                f"{f.shape[1]} outputs."
            )


@register_likelihood("bernoulli")
class Bernoulli(Likelihood):
    r"""$y_k \in \{0, 1\}$ with logit $f_k$, $\Lambda = \mathrm{diag}(p(1-p))$."""

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        """Return the binary cross entropy, summed over outputs."""
        target = y.reshape(f.shape).to(f.dtype)
        return F.binary_cross_entropy_with_logits(f, target, reduction="none").sum(-1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return probability minus label."""
        return f.sigmoid() - y.reshape(f.shape).to(f.dtype)

    def hessian_root(self, f: Outputs) -> Columns:
        r"""Return $\sqrt{p (1-p)} = \exp \tfrac12 (\log p + \log(1-p))$, finite at p = 0 and 1."""
        root = (0.5 * (F.logsigmoid(f) + F.logsigmoid(-f))).exp()
        return torch.diag_embed(root).transpose(0, 1)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw 0 or 1 per output."""
        p = f.detach().sigmoid().to(_device(generator, f))
        return torch.bernoulli(p, generator=generator).to(f.device)

    def mean(self, f: Outputs) -> Outputs:
        """Return the probability of 1."""
        return f.sigmoid()

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return probabilities by the probit approximation."""
        variance = covariance.diagonal(dim1=1, dim2=2)
        return self.mean(f * (1 + math.pi / 8 * variance).rsqrt()), None

    def _scores(self, mean: Tensor, y: Tensor, nll: float) -> dict[str, float]:
        correct = (mean > 0.5) == (y.reshape(mean.shape) > 0.5)
        return {"accuracy": float(correct.double().mean()), "nll": nll}

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for labels 0 or 1, one per output."""
        super().check(f, y)
        _check_targets(f, y, "Bernoulli")
        _check_values(y, (y != 0) & (y != 1), "Labels must be 0 or 1")


@register_likelihood("poisson")
class Poisson(Likelihood):
    r"""Counts with log rate $f_k$, $\Lambda = \mathrm{diag}(e^{f})$."""

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        r"""Return $e^f - y f + \log y!$, summed over outputs."""
        count = y.reshape(f.shape).to(f.dtype)
        return (f.exp() - count * f + torch.lgamma(count + 1)).sum(-1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return rate minus count."""
        return f.exp() - y.reshape(f.shape).to(f.dtype)

    def hessian_root(self, f: Outputs) -> Columns:
        """Return the square root of the rate."""
        return torch.diag_embed((0.5 * f).exp()).transpose(0, 1)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw a count per output."""
        rate = f.detach().exp().to(_device(generator, f))
        return torch.poisson(rate, generator=generator).to(f.device)

    def mean(self, f: Outputs) -> Outputs:
        """Return the rate."""
        return f.exp()

    def noise_variance(self, mean: Outputs) -> Outputs:
        """Return the mean."""
        return mean

    def closed_form_prediction(self, f: Outputs, covariance: Covariances) -> MeanAndVariance:
        """Return the exact mean and variance for a log-normal rate."""
        variance = covariance.diagonal(dim1=1, dim2=2)
        rate = (f + 0.5 * variance).exp()
        return rate, rate + rate.square() * torch.expm1(variance)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for integers from 0 on, one per output."""
        super().check(f, y)
        _check_targets(f, y, "Poisson")
        wrong = (y < 0) | (y != y.floor() if y.is_floating_point() else y < 0)
        _check_values(y, wrong, "Counts must be integers from 0 on")


def _check_targets(f: Tensor, y: Tensor, name: str) -> None:
    if y.shape != f.shape and not (f.shape[1] == 1 and y.dim() == 1):
        raise ValueError(
            f"Targets of a {name} likelihood must have shape {list(f.shape)}, got {list(y.shape)}."
        )


def _check_values(y: Tensor, wrong: Tensor, rule: str) -> None:
    if bool(wrong.any()):
        first = int(wrong.reshape(len(y), -1).any(1).nonzero()[0])
        raise ValueError(f"{rule}, got {y[first].tolist()} at position {first} of the batch.")


def calibration_error(probabilities: Outputs, labels: Int[Tensor, " n"], bins: int = 15) -> float:
    r"""Return the expected calibration error.

    $\sum_b \frac{n_b}{n} |\mathrm{accuracy}_b - \mathrm{confidence}_b|$ over bins b of equal width
    in confidence, the probability of the predicted class.
    """
    confidence, correct, _ = confidence_sums(probabilities, labels, bins)
    return float((correct - confidence).abs().sum() / len(labels))


def confidence_sums(
    probabilities: Outputs, labels: Int[Tensor, " n"], bins: int
) -> Float[Tensor, "3 bins"]:
    """Return the sums of confidence and of correct predictions, and the count, of each bin."""
    confidence, predicted = probabilities.detach().double().max(1)
    correct = (predicted == labels.to(predicted.device)).double()
    index = (confidence * bins).long().clamp(max=bins - 1)
    terms = torch.stack([confidence, correct, torch.ones_like(correct)])
    return terms.new_zeros(3, bins).index_add_(1, index, terms)
