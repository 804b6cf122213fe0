"""Predict with the delivered network: its posterior, its calibration, and what the report shows.

Plug-in predictions use the trained weights; averaged ones are a mean over the posterior of the last
layer (`symrazor.inference.last_layer`). Both are calibrated on the training samples that the starts
of the recommended structure left out, and the one that predicts these samples better is the
default. Held-out data take no part in it.

`evaluate` shows what the network does with the user's own examples: the symmetry itself, with
examples that are moved step by step, and predictions of held-out data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Likelihood
from symrazor.data import Dataset, Tensors
from symrazor.inference.last_layer import (
    LastLayer,
    Unseen,
    calibrated,
    features_of,
    last_layer_posterior,
    predict,
)
from symrazor.inference.posterior import Prediction
from symrazor.training.fit import Fit

if TYPE_CHECKING:
    from symrazor.discovery.answer import Answer

MIN_CALIBRATION_SAMPLES = 20
"""Left-out samples below which predictions are not calibrated on them."""
MAX_SAMPLES = 2000
"""Held-out samples that are predicted for the report."""
EXAMPLES, STEPS = 3, 3
"""Examples that are moved, and steps in each direction."""
MAX_SHIFT = 3 / 8
"""Largest shift, as a share of the size."""
MAX_CONFUSION_CLASSES = 30
WORST, SCATTER = 8, 300
"""Worst examples, and points of the plot of predicted against true targets."""
MAX_NUMBERS = 1 << 14
"""Numbers of an example that a document stores."""


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


def evaluate(
    network: nn.Module,
    posterior: LastLayer | None,
    data: Dataset,
    test: Tensors | None,
) -> dict[str, Any]:
    """Return the parts of a question's document that show the delivered network at work.

    Args:
        network: the delivered network.
        posterior: the posterior of its last layer, or None.
        data: the training data.
        test: held-out data, not standardised; without them training data are shown.
    """
    x, y = data.labelled if test is None else test
    x, y = x[:MAX_SAMPLES].to(data.x.dtype), y[:MAX_SAMPLES]
    is_classifier = data.task == "classification"
    prediction = predict(network, x, posterior, is_classifier)
    parts: dict[str, Any] = {}
    of = "training data" if test is None else "held-out data"
    if data.kind in ("image", "series") and x[0].numel() <= MAX_NUMBERS:
        parts["moved"] = _moved(network, posterior, x, y, data)
    if is_classifier:
        parts |= _classified(x, y, prediction, data)
    elif data.outputs == 1:
        parts["scatter"] = _scatter(y, prediction)
    if {"confusion", "scatter", "worst"} & set(parts):
        parts["shown_on"] = of
    return parts


def shifts(size: int) -> list[int]:
    """Return the shifts, in both directions, of an example with `size` positions."""
    step = max(1, round(MAX_SHIFT * size / STEPS))
    return [step * k for k in range(-STEPS, STEPS + 1)]


def _moved(
    network: nn.Module, posterior: LastLayer | None, x: Tensor, y: Tensor, data: Dataset
) -> dict[str, Any]:
    """Return examples that are shifted along the last axis, with their predictions."""
    steps, names = shifts(x.shape[-1]), data.names
    chosen = _one_per_class(y)[:EXAMPLES]
    examples = []
    for number in chosen:
        copies = torch.stack([x[number].roll(step, -1) for step in steps])
        prediction = predict(network, copies, posterior, data.task == "classification")
        entry: dict[str, Any] = {"inputs": _shown(copies)}
        if data.task == "classification":
            own = int(prediction.mean[STEPS].argmax())
            entry["label"] = names[int(y[number])]
            entry["output"] = names[own]
            entry["values"] = prediction.mean[:, own].tolist()
            entry["predicted"] = [names[k] for k in prediction.mean.argmax(1).tolist()]
        else:
            entry["values"] = prediction.mean[:, 0].tolist()
            entry["output"] = names[0] if names else "target"
        if prediction.epistemic is not None:
            column = own if data.task == "classification" else 0
            entry["spread"] = prediction.epistemic[:, column].tolist()
        examples.append(entry)
    unit = "pixels to the right" if data.kind == "image" else "time steps later"
    return {"steps": steps, "unit": unit, "examples": examples}


def _shown(x: Tensor) -> list[Any]:
    """Return images [n, c, h, w], or the first channel of series, as lists."""
    shown: list[Any] = (x if x.ndim == 4 else x[:, 0]).float().tolist()
    return shown


def _one_per_class(y: Tensor) -> list[int]:
    """Return sample numbers: the first of each class, or spread over the sorted targets."""
    if y.is_floating_point():
        order = y[:, 0].argsort().tolist()
        return [order[(2 * k + 1) * len(order) // (2 * EXAMPLES)] for k in range(EXAMPLES)]
    first: dict[int, int] = {}
    for number, label in enumerate(y.tolist()):
        first.setdefault(label, number)
    return list(first.values()) or [0]


def _classified(x: Tensor, y: Tensor, prediction: Prediction, data: Dataset) -> dict[str, Any]:
    """Return the confusion matrix and the examples with the least probable labels."""
    p, k = prediction.mean, len(data.names)
    parts: dict[str, Any] = {}
    if k <= MAX_CONFUSION_CLASSES:
        counts = torch.zeros(k, k, dtype=torch.int64)
        counts.index_put_((y, p.argmax(1)), torch.ones(len(y), dtype=torch.int64), accumulate=True)
        parts["confusion"] = counts.tolist()
    own = p.gather(1, y.reshape(-1, 1))[:, 0]
    worst = own.argsort()[:WORST]
    entry: dict[str, Any] = {
        "labels": [data.names[label] for label in y[worst].tolist()],
        "predicted": [data.names[label] for label in p[worst].argmax(1).tolist()],
        "probability": own[worst].tolist(),
    }
    if data.kind in ("image", "series") and x[0].numel() <= MAX_NUMBERS:
        entry["inputs"] = _shown(x[worst])
    parts["worst"] = entry
    return parts


def _scatter(y: Tensor, prediction: Prediction) -> dict[str, Any]:
    """Return true and predicted targets, with the standard deviation if it is known."""
    chosen = slice(SCATTER)
    std = None if prediction.std is None else prediction.std[chosen, 0].tolist()
    mean = prediction.mean[chosen, 0].tolist()
    return {"true": y[chosen, 0].tolist(), "predicted": mean, "std": std}


def not_tested(data: Dataset, answer: "Answer") -> list[str]:
    """Return sentences on symmetries that the answer says nothing about."""
    sentences = [answer.summary["not_tested"]] if answer.summary["not_tested"] else []
    asked = {claim.name for claim in answer.claims}
    has_groups = bool(asked & {"p2", "p4", "pm", "p2m", "p4m", "O", "Oh"})
    open_questions: dict[str, Sequence[tuple[bool, str]]] = {
        "image": [
            (
                answer.invariances is None and not has_groups,
                "Rotations, reflections and scales: not tested (`--invariances`, or `--groups p4m`"
                " for exact quarter turns and reflections).",
            )
        ],
        "volume": [(not has_groups, "Rotations of the volume: not tested (`--groups O`).")],
        "series": [(True, "Reversal and stretching of time: not tested.")],
        "set": [(True, "Rotations and shifts of the points: not tested.")],
        "vector": [
            (
                not answer.family.groups,
                "Exchanges of columns: not tested (`--groups permutation` or a group of your own).",
            )
        ],
    }
    sentences += [text for is_open, text in open_questions.get(data.kind, ()) if is_open]
    return sentences
