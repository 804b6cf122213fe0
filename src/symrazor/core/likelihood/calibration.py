"""Compare the confidence of predicted classes with their accuracy."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from symrazor.core.likelihood.base import Outputs


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
