"""The categorical likelihood of class labels, and how well predicted classes are calibrated."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.likelihood.base import (
    MAX_SPECTRAL_COLUMNS,
    Columns,
    Covariances,
    Likelihood,
    MeanAndVariance,
    Outputs,
    Probe,
    device_of,
    register_likelihood,
)


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
            first = int(wrong[0])
            raise ValueError(
                f"Label {int(y[first])} at position {first} of the batch is not between 0 and "
                f"{f.shape[1] - 1}: the model has {f.shape[1]} outputs."
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
