"""Define what a likelihood has to compute, and the default likelihood: `Categorical`."""

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
            raise ValueError(
                f"Model outputs must have shape [n, k], got {list(f.shape)}. For one label per "
                "pixel or token, use likelihood=PerPosition(...)."
            )
        if len(y) != len(f):
            raise ValueError(f"There are {len(f)} outputs but {len(y)} labels.")

    def n_columns(self, f: Outputs) -> int:
        """Return the number of columns of `hessian_root` for these outputs."""
        return len(self.hessian_root(f[:1]))

    def probe_numbers(self, f: Outputs, samples: int) -> int:
        """Return how many numbers per datum `sampled_root` keeps in memory for spectral probes."""
        return self.n_columns(f) * f[0].numel()

    def masked_root(self, root: Columns, y: Tensor) -> Columns:
        """Set a root to zero where labels do not count."""
        return root

    def empirical_root(self, f: Outputs, y: Tensor) -> Columns:
        """Return the root of the empirical Fisher matrix: the residual as one column."""
        return self.residual(f, y).unsqueeze(0)

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

    @torch.no_grad()
    def gain_over_constant(self, f: Outputs, y: Tensor) -> float:
        """Return the log likelihood of outputs f minus that of their mean for every datum."""
        f = f.double()
        constant = f.mean(0, keepdim=True).expand_as(f)
        labels = y.double() if y.is_floating_point() else y
        return float((self.nll(constant, labels) - self.nll(f, labels)).sum())

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
        signs = torch.randint(0, 2, shape, generator=generator, device=device_of(generator, f))
        signs = signs.to(device=f.device, dtype=f.dtype) * 2 - 1
        mixed = (basis * signs.unsqueeze(2)).sum(-1)
        return (root * mixed.movedim(-1, 1).unsqueeze(-1)).sum(1) / math.sqrt(samples)


def device_of(generator: torch.Generator | None, like: Tensor) -> torch.device:
    """Return the device on which random numbers are drawn."""
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
        registered = LIKELIHOODS.get(name, likelihood)
        if registered.__qualname__ != likelihood.__qualname__:
            raise ValueError(
                f"The likelihood name {name!r} belongs to {registered.__qualname__}. "
                "Choose another."
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


def check_targets(f: Tensor, y: Tensor, name: str) -> None:
    """Check for one target per output."""
    if y.shape != f.shape and not (f.shape[1] == 1 and y.dim() == 1):
        raise ValueError(
            f"Targets of a {name} likelihood must have shape {list(f.shape)}, got {list(y.shape)}."
        )


def check_values(y: Tensor, wrong: Tensor, rule: str) -> None:
    """Raise ValueError with the first wrong label."""
    if bool(wrong.any()):
        position = int(wrong.reshape(len(y), -1).any(1).nonzero()[0])
        raise ValueError(f"{rule}, got {y[position].tolist()} at position {position} of the batch.")


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

    def sampled_root(
        self,
        f: Outputs,
        samples: int,
        generator: torch.Generator | None = None,
        probe: Probe = "spectral",
    ) -> Float[Tensor, "s n k"]:
        r"""Draw probes; see `Likelihood.sampled_root`.

        For many classes, signs mix the columns of $B = \mathrm{diag}(\sqrt p) - p \sqrt p^\top$,
        for which $B B^\top = \Lambda$. The cost is proportional to K, not to its square.
        """
        if probe == "label" or f.shape[1] <= MAX_SPECTRAL_COLUMNS:
            return super().sampled_root(f, samples, generator, probe)
        log_p = f.log_softmax(-1)
        signs = torch.randint(
            0, 2, (samples, *f.shape), generator=generator, device=device_of(generator, f)
        )
        mixed = (0.5 * log_p).exp() * (signs.to(device=f.device, dtype=f.dtype) * 2 - 1)
        return (mixed - log_p.exp() * mixed.sum(-1, keepdim=True)) / math.sqrt(samples)

    def n_columns(self, f: Outputs) -> int:
        """Return K - 1."""
        return f.shape[1] - 1

    def probe_numbers(self, f: Outputs, samples: int) -> int:
        """Return the numbers of all probes if there are many classes."""
        is_large = f.shape[1] > MAX_SPECTRAL_COLUMNS
        return samples * f.shape[1] if is_large else super().probe_numbers(f, samples)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw a class per datum."""
        p = f.detach().softmax(-1).to(device_of(generator, f))
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
            position = int(wrong[0])
            raise ValueError(
                f"Label {int(y[position])} at position {position} of the batch is not between 0 "
                f"and {f.shape[1] - 1}: the model has {f.shape[1]} outputs."
            )


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
