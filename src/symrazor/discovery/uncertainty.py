"""Give the delivered network a posterior, and choose how it predicts.

Plug-in predictions use the trained weights; averaged ones are a mean over the posterior of the last
layer (`symrazor.inference.last_layer`). Both are calibrated on the training samples that the starts
of the recommended structure left out, and the one that predicts these samples better is the
default. Held-out data take no part in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood
from symrazor.data import Tensors
from symrazor.inference.last_layer import (
    LastLayer,
    Unseen,
    calibrated,
    features_of,
    last_layer_posterior,
)
from symrazor.training.fit import Fit

MIN_CALIBRATION_SAMPLES = 20
"""Left-out samples below which predictions are not calibrated on them."""


@dataclass(frozen=True)
class Calibration:
    """How the delivered network predicts.

    Args:
        averaged: whether predictions are averaged over the posterior.
        factor: factor of the logits of classes before that.
        noise: variance of the noise of standardised targets; empty for classes.
        scores: mean negative log likelihood of left-out samples, by "plug-in" and "averaged".
        n: number of left-out samples.
    """

    averaged: bool
    factor: float = 1.0
    noise: tuple[float, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    n: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        default = "averaged" if self.averaged else "plug-in"
        return {"default": default, "nll": dict(self.scores), "n": self.n}


class Start(NamedTuple):
    """A start of the recommended structure, with the samples that it left out.

    Args:
        fit: the trained network.
        temperature: temperature of its logits.
        left_out: the samples.
    """

    fit: Fit
    temperature: float
    left_out: Tensors


def calibrate(starts: Sequence[Start]) -> Calibration | None:
    """Return the better way to predict with a structure, by samples that its starts left out.

    Logits are divided by the temperature of their start first, as those of the delivered network
    are divided by the mean temperature.

    Returns:
        The calibration; None if the network has no posterior or too few samples were left out.
    """
    n = sum(len(start.left_out[1]) for start in starts)
    if n < MIN_CALIBRATION_SAMPLES:
        return None
    unseen = []
    for trained, own, (x, y) in starts:
        model, likelihood = trained.model, trained.razor.likelihood
        posterior = last_layer_posterior(model, trained.data.x, likelihood, 1 / own)
        if posterior is None:
            return None
        f, phi = features_of(model, posterior.head, x)
        unseen.append(Unseen(posterior, f / own, phi, y.cpu()))
    best, scores = calibrated(unseen)
    noise = tuple(best.noise.tolist())
    return Calibration(best.averaged, float(best.factor), noise, scores, n)


def delivered_posterior(
    network: nn.Module,
    x: Tensor,
    likelihood: Likelihood,
    scale: Tensor | float,
    calibration: Calibration | None,
) -> LastLayer | None:
    """Return the posterior of the delivered network with its calibration, or None.

    Args:
        network: the delivered network, which takes data that are not standardised.
        x: its training inputs.
        likelihood: the trained likelihood.
        scale: scale of the targets, or one divided by the temperature of the logits.
        calibration: how it predicts; None for the default of the likelihood.
    """
    posterior = last_layer_posterior(network, x, likelihood, scale)
    if posterior is None or calibration is None:
        return posterior
    factor, noise = (
        torch.tensor(part, dtype=torch.float64) for part in (calibration.factor, calibration.noise)
    )
    return replace(posterior, averaged=calibration.averaged, factor=factor, noise=noise)
