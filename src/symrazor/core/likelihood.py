r"""Likelihoods $p(y \mid f)$ of a network output $f \in \mathbb R^K$.

Each owns four facts: its negative log likelihood with every constant, a check of its labels, the
residual $\partial_f (-\log p)$, and a root of the output Hessian

$$ \Lambda(f) = -\nabla_f^2 \log p(y \mid f) = \sum_c r_c(f)\, r_c(f)^\top , $$

which for these canonical links does not depend on $y$, so that the generalised Gauss-Newton matrix
$\sum_n J_n^\top \Lambda_n J_n$ equals the Fisher information.
"""

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from symrazor.accelerate.devices import run_in_threads
from symrazor.core.parameters import Hyper

Probe = Literal["spectral", "label"]


class Likelihood(nn.Module, ABC):
    """Base of all likelihoods; docs/how-to/add-a-likelihood.md explains the five methods."""

    @abstractmethod
    def nll(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, " n"]:
        """Negative log likelihood of each datum, normalising constants included."""

    @abstractmethod
    def residual(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, "n k"]:
        """Gradient of `nll` with respect to `f`."""

    @abstractmethod
    def hessian_root(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "c n k"]:
        r"""Vectors $r_c$ with $\sum_c r_c r_c^\top = \Lambda(f)$, differentiable in `f`."""

    @abstractmethod
    def sample(self, f: Float[Tensor, "n k"], generator: torch.Generator | None) -> Tensor:
        """One label per datum from the model's own predictive distribution."""

    @abstractmethod
    def mean(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Mean of y given f (class probabilities for a categorical)."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise ValueError if outputs and labels cannot belong together."""
        if f.dim() != 2:
            raise ValueError(f"expected model outputs of shape [n, k], got {list(f.shape)}")
        if len(y) != len(f):
            raise ValueError(f"expected {len(f)} labels for {len(f)} outputs, got {len(y)}")

    def sampled_root(
        self,
        f: Float[Tensor, "n k"],
        samples: int,
        generator: torch.Generator | None = None,
        probe: Probe = "spectral",
    ) -> Float[Tensor, "s n k"]:
        r"""Random vectors $z_s$ with $E \sum_s z_s z_s^\top = \Lambda$, differentiable in `f`.

        "label": residuals of sampled labels, the textbook Monte Carlo Fisher.

        "spectral": $z = R V \epsilon$ with signs $\epsilon = \pm 1$ and $V$ the right singular
        vectors of the root $R = [r_1, r_2, \dots]$ of each datum. As the columns of $RV$ are
        orthogonal, $|z|^2 = \mathrm{tr}\, \Lambda$ holds for every draw, not only on average: at
        equal cost the error of the evidence is several times smaller (docs/results.md). V is held
        fixed in derivatives: any orthogonal V is unbiased, so the gradient is, too, though it is
        not the derivative of this one draw.
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


LARGEST_SPECTRAL_PROBE = 64


def _right_singular_vectors(root: Float[Tensor, "c n k"]) -> Float[Tensor, "n c c"]:
    """Per datum, the orthogonal V that makes the columns of R V orthogonal.

    Above 64 columns the batched eigenproblem would cost more than the backward pass it serves, and
    V = I (plain Rademacher mixing) takes its place.
    """
    n, c = root.shape[1], root.shape[0]
    if c > LARGEST_SPECTRAL_PROBE:
        return torch.eye(c, dtype=root.dtype, device=root.device).expand(n, c, c)
    gram = _gram(root.double())
    scale = gram.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(gram.dtype).tiny)
    try:
        vectors = _eigenvectors(gram / scale.reshape(-1, 1, 1))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Any orthogonal V is right, only less precise.
        return torch.eye(c, dtype=root.dtype, device=root.device).expand(n, c, c)
    return _with_signs(vectors).to(root.dtype)


FEW_PRODUCTS = 2**19
"""So many are multiplied and added as they are: a GPU's library would want 32 MB to work in."""


def _gram(root: Float[Tensor, "c n k"]) -> Float[Tensor, "n c c"]:
    """Inner products of the columns of each datum."""
    if root.shape[0] * root.numel() > FEW_PRODUCTS:
        return torch.einsum("cnk,dnk->ncd", root, root)
    rows = root.movedim(0, 1)
    return (rows.unsqueeze(2) * rows.unsqueeze(1)).sum(-1)


def _with_signs(vectors: Float[Tensor, "n c c"]) -> Float[Tensor, "n c c"]:
    """Eigenvectors that all point to the same side of a plane, one that no symmetry prefers.

    A library returns either sign, by chance of rounding: other machines, devices and numbers of
    processes would draw other probes from the same random numbers.
    """
    golden = (math.sqrt(5) - 1) / 2
    place = torch.arange(1, vectors.shape[1] + 1, dtype=vectors.dtype, device=vectors.device)
    side = ((0.5 + (golden * place).frac()).unsqueeze(1) * vectors).sum(1)
    return vectors * torch.where(side < 0, -1.0, 1.0).unsqueeze(1)


def _eigenvectors(gram: Float[Tensor, "n c c"]) -> Float[Tensor, "n c c"]:
    """Of many small matrices; above 32 rows CUDA takes them one by one, and CPU threads are faster.

    (5,000 matrices of 39 rows: 2.8 s on an H200, 0.2 s on 16 threads.)
    """
    if not gram.is_cuda or gram.shape[-1] <= 32:
        vectors: Tensor = torch.linalg.eigh(gram)[1]
        return vectors
    parts = [partial(torch.linalg.eigh, part) for part in gram.cpu().split(100)]
    return torch.cat([found[1] for found in run_in_threads(parts)]).to(gram.device)


class Categorical(Likelihood):
    r"""$y \in \{0..K-1\}$, $p = \mathrm{softmax}(f)$, $\Lambda = \mathrm{diag}(p) - p p^\top$."""

    def nll(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, " n"]:
        """Cross entropy of each datum."""
        return F.cross_entropy(f, y.long(), reduction="none")

    def residual(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, "n k"]:
        """Softmax minus one-hot."""
        return f.softmax(-1) - F.one_hot(y.long(), f.shape[-1]).to(f.dtype)

    def hessian_root(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "c n k"]:
        r"""Closed-form Cholesky factor of $\mathrm{diag}(p) - pp^\top$: K-1 columns.

        With tail sums $s_j = \sum_{i \ge j} p_i$,

        $$ L_{jj} = \sqrt{p_j s_{j+1} / s_j}, \qquad
           L_{ij} = -p_i \sqrt{p_j / (s_j s_{j+1})} \quad (i > j). $$

        Everything is exp of a combination of log-probabilities, so that it and its gradient stay
        finite at probabilities 0 and 1.
        """
        log_p = f.log_softmax(-1)
        log_tail = log_p.flip(-1).logcumsumexp(-1).flip(-1)
        head, here, rest = log_p[:, :-1], log_tail[:, :-1], log_tail[:, 1:]
        diagonal = (0.5 * (head + rest - here)).exp()
        # The exponent is bounded by 0 only below the diagonal: clip what is masked out anyway.
        exponent = log_p.unsqueeze(1) + (0.5 * (head - here - rest)).unsqueeze(2)
        below = -exponent.clamp(max=0).exp().triu(1)
        embedded = torch.diag_embed(diagonal, dim1=1, dim2=2)
        columns = below + F.pad(embedded, (0, 1))
        return columns.transpose(0, 1)

    def sample(self, f: Float[Tensor, "n k"], generator: torch.Generator | None) -> Tensor:
        """A class per datum."""
        p = f.detach().softmax(-1)
        where = _device(generator, f)
        drawn = torch.multinomial(p.to(where), 1, generator=generator).squeeze(1)
        return drawn.to(f.device)

    def mean(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Class probabilities."""
        return f.softmax(-1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Integer labels 0..K-1, at least two classes."""
        super().check(f, y)
        if f.shape[1] < 2:
            raise ValueError(
                f"expected at least 2 outputs for a categorical likelihood, got {f.shape[1]}; "
                "use Bernoulli for one logit"
            )
        if y.dim() != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(
                f"expected integer class labels of shape [n], got {y.dtype} {list(y.shape)}"
            )
        wrong = ((y < 0) | (y >= f.shape[1])).nonzero()
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"expected labels between 0 and {f.shape[1] - 1} (the model has {f.shape[1]} "
                f"outputs), got {int(y[first])} at position {first} of the batch"
            )


class Gaussian(Likelihood):
    r"""$y \sim N(f, \sigma^2)$ with a learned noise scale, $\Lambda = \sigma^{-2} I$.

    Args:
        noise: starting standard deviation.
        outputs: None for one noise scale, or K for one per output.
    """

    def __init__(self, noise: float = 1.0, outputs: int | None = None) -> None:
        """Make the noise a hyperparameter in float64."""
        super().__init__()
        shape = () if outputs is None else (outputs,)
        self.noise = Hyper(torch.full(shape, noise, dtype=torch.float64))

    def nll(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, " n"]:
        """Half squared error over the variance, plus half log 2 pi sigma^2, summed over outputs."""
        sigma = self.noise.value.to(f.dtype)
        z = (f - y.reshape(f.shape)) / sigma
        return (0.5 * z.square() + sigma.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def residual(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, "n k"]:
        """(f - y) / sigma^2."""
        return (f - y.reshape(f.shape)) / self.noise.value.to(f.dtype).square()

    def hessian_root(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "c n k"]:
        """Unit vectors over sigma."""
        n, k = f.shape
        inverse = (1 / self.noise.value.to(f.dtype)).expand(k)
        return torch.diag(inverse).unsqueeze(1).expand(k, n, k)

    def sample(self, f: Float[Tensor, "n k"], generator: torch.Generator | None) -> Tensor:
        """The output plus noise."""
        noise = torch.randn(f.shape, generator=generator, device=_device(generator, f))
        scale = self.noise.value.detach().to(f.dtype)
        return f.detach() + scale * noise.to(device=f.device, dtype=f.dtype)

    def mean(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """The output itself."""
        return f

    def check(self, f: Tensor, y: Tensor) -> None:
        """Real targets, one for each output."""
        super().check(f, y)
        _check_targets(f, y, "a Gaussian likelihood")
        noise = self.noise.value
        if noise.dim() and noise.numel() != f.shape[1]:
            raise ValueError(
                f"expected {noise.numel()} outputs (one per noise scale), got {f.shape[1]}"
            )


class Bernoulli(Likelihood):
    r"""$y_k \in \{0, 1\}$ with logit $f_k$, $\Lambda = \mathrm{diag}(p(1-p))$."""

    def nll(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, " n"]:
        """Binary cross entropy summed over outputs."""
        target = y.reshape(f.shape).to(f.dtype)
        return F.binary_cross_entropy_with_logits(f, target, reduction="none").sum(-1)

    def residual(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, "n k"]:
        """Probability minus label."""
        return f.sigmoid() - y.reshape(f.shape).to(f.dtype)

    def hessian_root(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "c n k"]:
        r"""$\sqrt{p (1-p)} = \exp \tfrac12 (\log p + \log(1-p))$, safe at p = 0 and 1."""
        root = (0.5 * (F.logsigmoid(f) + F.logsigmoid(-f))).exp()
        return torch.diag_embed(root).transpose(0, 1)

    def sample(self, f: Float[Tensor, "n k"], generator: torch.Generator | None) -> Tensor:
        """A coin per output."""
        p = f.detach().sigmoid().to(_device(generator, f))
        return torch.bernoulli(p, generator=generator).to(f.device)

    def mean(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Probability of 1."""
        return f.sigmoid()

    def check(self, f: Tensor, y: Tensor) -> None:
        """Labels 0 or 1, one for each output."""
        super().check(f, y)
        _check_targets(f, y, "a Bernoulli likelihood")
        _check_values(y, (y != 0) & (y != 1), "labels 0 or 1")


class Poisson(Likelihood):
    r"""Counts with log rate $f_k$, $\Lambda = \mathrm{diag}(e^{f})$."""

    def nll(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, " n"]:
        """Rate - y log rate + log y!, summed over outputs."""
        count = y.reshape(f.shape).to(f.dtype)
        return (f.exp() - count * f + torch.lgamma(count + 1)).sum(-1)

    def residual(self, f: Float[Tensor, "n k"], y: Tensor) -> Float[Tensor, "n k"]:
        """Rate - y."""
        return f.exp() - y.reshape(f.shape).to(f.dtype)

    def hessian_root(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "c n k"]:
        """Square root of the rate."""
        return torch.diag_embed((0.5 * f).exp()).transpose(0, 1)

    def sample(self, f: Float[Tensor, "n k"], generator: torch.Generator | None) -> Tensor:
        """A count per output."""
        rate = f.detach().exp().to(_device(generator, f))
        return torch.poisson(rate, generator=generator).to(f.device)

    def mean(self, f: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """The rate."""
        return f.exp()

    def check(self, f: Tensor, y: Tensor) -> None:
        """Whole numbers from 0 on, one for each output."""
        super().check(f, y)
        _check_targets(f, y, "a Poisson likelihood")
        _check_values(y, (y < 0) | (y != y.floor() if y.is_floating_point() else y < 0), "counts")


def _check_targets(f: Tensor, y: Tensor, what: str) -> None:
    if y.shape != f.shape and not (f.shape[1] == 1 and y.dim() == 1):
        raise ValueError(
            f"expected targets of shape {list(f.shape)} for {what}, got {list(y.shape)}"
        )


def _check_values(y: Tensor, wrong: Tensor, expected: str) -> None:
    if bool(wrong.any()):
        first = int(wrong.reshape(len(y), -1).any(1).nonzero()[0])
        raise ValueError(f"expected {expected}, got {y[first].tolist()} at position {first}")


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
}


def check_compatible(model: nn.Module, likelihood: Likelihood) -> None:
    """Ask a model that has a `check_likelihood` whether its outputs suit the likelihood."""
    check = getattr(model, "check_likelihood", None)
    if check is not None:
        check(likelihood)


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood itself, or the one of that name with its default settings."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ValueError(
            f"expected a Likelihood or one of {sorted(LIKELIHOODS)}, got {likelihood!r}"
        )
    return LIKELIHOODS[likelihood]()


def calibration_error(
    probabilities: Float[Tensor, "n k"], labels: Int[Tensor, " n"], bins: int = 15
) -> float:
    r"""Expected calibration error.

    $\sum_b \frac{n_b}{n} |\mathrm{accuracy}_b - \mathrm{confidence}_b|$ over bins b of equal width
    in confidence, the probability of the predicted class.
    """
    confidence, predicted = probabilities.double().max(1)
    correct = (predicted == labels).double()
    index = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gaps.index_add_(0, index, correct - confidence)
    return float(gaps.abs().sum() / len(labels))


def scores(
    likelihood: Likelihood, f: Float[Tensor, "n k"] | Float[Tensor, "s n k"], y: Tensor
) -> dict[str, float]:
    """Test figures of outputs f: accuracy and calibration of a classifier, else squared error.

    Outputs under several draws of the weights, [s, n, k], are scored as one mixture.
    """
    with torch.no_grad():
        draws = f.double().reshape(-1, *f.shape[-2:])
        log_p = torch.stack([-likelihood.nll(one, y) for one in draws])
        nll = float((math.log(len(draws)) - log_p.logsumexp(0)).mean())
        mean = torch.stack([likelihood.mean(one) for one in draws]).mean(0)
        match likelihood:
            case Categorical():
                accuracy = float((mean.argmax(1) == y).double().mean())
                return {"accuracy": accuracy, "nll": nll, "ece": calibration_error(mean, y)}
            case Bernoulli():
                hits = (mean > 0.5) == (y.reshape(mean.shape) > 0.5)
                return {"accuracy": float(hits.double().mean()), "nll": nll}
            case _:
                error = mean - y.reshape(mean.shape).double()
                return {"mse": float(error.square().mean()), "nll": nll}
