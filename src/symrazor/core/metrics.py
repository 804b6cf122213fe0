"""Score predictions: accuracy, negative log likelihood, calibration, squared error."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.likelihood import Bernoulli, Categorical, Likelihood


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
