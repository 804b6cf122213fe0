"""Build the document of a `Fit`: everything its report shows, as plain numbers, lists and strings.

`document_of` is the entry point. It collects examples, calibration, filters, anchors and costs of
the trained network.
"""

import math
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from symrazor.core.likelihood import Bernoulli, Categorical, Likelihood, Weighted, confidence_sums
from symrazor.core.version import __version__
from symrazor.data import Tensors
from symrazor.data.batches import Input, call
from symrazor.data.streams import Column
from symrazor.invariance.averaged_network import Augmented
from symrazor.layers import Basis, Conv, SConv
from symrazor.layers.relaxed import Relaxed
from symrazor.report.content import SCHEMA
from symrazor.symmetry.collapse import batch_length, collapse

if TYPE_CHECKING:
    from symrazor.training.fit import Fit

MAX_STREAMED = 5_000
"""Training data for the calibration, if the data are read batch by batch."""
MAX_EXAMPLES = 24
"""Training inputs that a report shows."""
MAX_TRANSFORMED, N_COPIES = 6, 12
"""Training inputs that are shown transformed, and copies of each."""
COST_SAMPLES = 32
"""Training inputs on which costs are measured."""
MAX_FILTERS = 48
"""Filters per layer that a report shows."""

AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def document_of(
    fit: "Fit",
    question: str = "What did the network learn?",
    *,
    name: str = "network",
    test: Tensors | None = None,
    classes: Sequence[str] | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Return the document of a fit, for `write_page`.

    Args:
        fit: result of `fit`.
        question: question that the report answers.
        name: name of the network.
        test: held-out data for the calibration; by default the calibration is measured on the
            training data, and the report says so.
        classes: names of the classes.
        command: command that produced the fit; by default the command of this process.
    """
    x = fit.data.x
    is_classifier = isinstance(_without_weights(fit), Categorical | Bernoulli)
    return {
        "schema": SCHEMA,
        "kind": {2: "vector", 3: "series", 4: "image", 5: "volume"}.get(x.dim()),
        "task": "classification" if is_classifier else "regression",
        "command": shlex.join(sys.orig_argv) if command is None else command,
        "versions": versions(),
        "data": {
            "n": len(x),
            "shape": list(x.shape[1:]),
            "classes": None if classes is None else list(classes),
        },
        "questions": [
            {
                "name": name,
                "question": question,
                "verdict": fit.reading.verdict,
                "candidates": [
                    {"name": name, "reading": fit.reading.to_dict(), "history": fit.history}
                ],
                **parts_of(fit, test=test, classes=classes),
            }
        ],
    }


def versions() -> dict[str, str]:
    """Return the versions of the software that produced a report."""
    return {
        "symrazor": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def parts_of(
    fit: "Fit", *, test: Tensors | None = None, classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return what a question shows about its network; for the arguments see `document_of`."""
    parts: dict[str, Any] = {
        "examples": examples_of(fit, classes),
        "filters": {name: w.tolist() for name, w in filters_of(fit.model).items()},
        "anchors": anchors_of(fit.model),
        **costs_of(fit),
    }
    if isinstance(_without_weights(fit), Categorical):
        limited = slice(MAX_STREAMED if isinstance(fit.data.x, Column) else None)
        x, y = (fit.data.x[limited], _labels(fit, fit.data.y[limited])) if test is None else test
        with torch.no_grad():
            p = fit.predict(x).mean
        parts["calibration"] = {
            **calibration_bins(p, y),
            "on": "training data" if test is None else "held-out data",
        }
    return {key: value for key, value in parts.items() if value}


def _without_weights(fit: "Fit") -> Likelihood:
    likelihood = fit.razor.likelihood
    return likelihood.each if isinstance(likelihood, Weighted) else likelihood


def _labels(fit: "Fit", y: Tensor) -> Tensor:
    """Return training labels without the weights of the samples."""
    likelihood = fit.razor.likelihood
    return likelihood.labels(y) if isinstance(likelihood, Weighted) else y


def examples_of(fit: "Fit", classes: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the first training images or series with their labels; {} for other data."""
    x = fit.data.x[:MAX_EXAMPLES].detach().cpu()
    y = _labels(fit, fit.data.y[:MAX_EXAMPLES]).detach().cpu()
    if x.dim() == 3 and x.shape[1] == 1:
        x = x[:, 0]  # a series with one channel
    elif x.dim() != 4:
        return {}
    examples = {"images": x.tolist(), "labels": [_label(value, classes) for value in y]}
    if any(isinstance(module, Augmented) for module in fit.model.modules()) and x.dim() == 4:
        examples["transformed"] = orbits_of(fit, examples["images"]).tolist()
    return examples


@torch.no_grad()
def orbits_of(fit: "Fit", images: Any) -> Tensor:
    """Return transformed copies of the first images, as an `Augmented` network sees them."""
    x = torch.as_tensor(images[:MAX_TRANSFORMED]).to(fit.data.x)
    augmented = next(m for m in fit.model.modules() if isinstance(m, Augmented))
    return augmented.augment.copies(x)[0][:, :N_COPIES].detach().cpu()


def _label(value: Tensor, classes: Sequence[str] | None) -> str:
    if value.numel() != 1:
        return ""
    number = value.item()
    if classes is not None and isinstance(number, int) and 0 <= number < len(classes):
        return str(classes[number])
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def calibration_bins(
    probabilities: Float[Tensor, "n k"], labels: Int[Tensor, " n"], bins: int = 10
) -> dict[str, list[float]]:
    """Return mean confidence, accuracy and count of each bin of confidence that is not empty.

    Confidence is the probability of the predicted class; bins have equal width. The gaps, weighted
    by the counts, sum to `calibration_error` with the same number of bins.
    """
    sums = confidence_sums(probabilities, labels, bins)
    confidence, correct, count = sums[:, sums[2] > 0]
    return {
        "confidence": (confidence / count).tolist(),
        "accuracy": (correct / count).tolist(),
        "count": count.int().tolist(),
    }


@torch.no_grad()
def filters_of(
    model: nn.Module, max_filters: int = MAX_FILTERS
) -> dict[str, Float[Tensor, "_ _ _"]]:
    """Return the filters [m, h, w] of every convolution with more than one position, by layer.

    Covers `Conv` and `SConv` paths and torch's convolutions, in the order of (output, input) pairs.
    Filters of one dimension have height 1; of three dimensions, the middle slice is returned.
    """
    filters: dict[str, Tensor] = {}
    visited_paths: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{path}.") for path in visited_paths):
            continue
        if isinstance(module, (Conv, SConv)):
            dense = module.dense()
            weight = dense.conv.weight if isinstance(dense, Conv) else None
            visited_paths.append(name)
        else:
            weight = module.weight if isinstance(module, AnyConv) else None
        if isinstance(weight, Tensor) and math.prod(weight.shape[2:]) > 1:
            filters[name or "network"] = _planes(weight.detach())[:max_filters].cpu().clone()
    return filters


def _planes(weight: Float[Tensor, "d c *size"]) -> Float[Tensor, "m h w"]:
    flat = weight.flatten(0, 1)
    if flat.dim() == 2:
        return flat.unsqueeze(1)
    return flat[:, flat.shape[1] // 2] if flat.dim() == 4 else flat


@torch.no_grad()
def anchors_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return map shape and anchor positions of every 2-D `Basis`, in pixels from the centre."""
    return {
        name: {
            "shape": list(module.shape),
            "points": module.anchors.tolist(),
            "omega": abs(float(module.value("omega"))),
        }
        for name, module in model.named_modules()
        if isinstance(module, Basis) and len(module.shape) == 2
    }


def costs_of(fit: "Fit") -> dict[str, Any]:
    """Return the cost of each layer, and the report of `collapse` for relaxed networks.

    If the network cannot be collapsed, "collapse" is {"refused": reason}.
    """
    x = fit.data.x[:COST_SAMPLES]
    names = [layer.name for layer in fit.reading.layers]
    modules = dict(fit.model.named_modules())
    after: dict[str, dict[str, int]] = {}
    outcome: dict[str, Any] = {}
    if any(isinstance(module, Relaxed) for module in modules.values()):
        try:
            plain = collapse(fit.model, x, shares=fit.reading)
        except ValueError as error:
            outcome["collapse"] = {"refused": str(error)}
        else:
            outcome["collapse"], after = plain.collapse_report, layer_costs(plain, x, names)
    outcome["costs"] = [
        {
            "layer": name,
            "type": type(modules[name]).__name__,
            **costs,
            **{f"{key}_after": value for key, value in after.get(name, {}).items()},
        }
        for name, costs in layer_costs(fit.model, x, names).items()
    ]
    return outcome


@torch.no_grad()
def layer_costs(model: nn.Module, x: Input, names: list[str]) -> dict[str, dict[str, int]]:
    """Return parameters and floating-point operations per example of the named modules.

    Names that the model does not have are left out.
    """
    with FlopCounterMode(display=False) as counter:
        call(model, x)
    flops = counter.get_flop_counts()
    modules = dict(model.named_modules())
    root = type(model).__name__
    return {
        name: {
            "parameters": sum(p.numel() for p in modules[name].parameters()),
            "flops": sum(flops.get(f"{root}.{name}" if name else root, {}).values())
            // batch_length(x),
        }
        for name in names
        if name in modules
    }
