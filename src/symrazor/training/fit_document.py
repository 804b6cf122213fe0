"""The document of a `Fit`: everything its page shows, as plain numbers, lists and strings."""

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from symrazor.core.likelihood import Bernoulli, Categorical
from symrazor.data import Tensors
from symrazor.invariance.averaged_network import Augmented
from symrazor.layers.relaxed import Relaxed
from symrazor.report.content import SCHEMA
from symrazor.symmetry.collapse import collapse
from symrazor.training.extract import anchors_of, calibration_bins, filters_of, layer_costs

if TYPE_CHECKING:
    from symrazor.training.fit import Fit

EXAMPLES = 24
ORBITS, DRAWS = 6, 12  # examples that are shown transformed, and copies of each
MEASURED = 32  # data on which costs are measured


def document_of(
    fit: "Fit",
    question: str = "What did the network learn?",
    *,
    name: str = "network",
    test: Tensors | None = None,
    classes: Sequence[str] | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """The document of one fit, for `write_page`.

    Args:
        fit: what `fit` returned.
        question: what was asked of the data.
        name: of the network.
        test: held-out data for the calibration; without them it is that of the training data, and
            the page says so.
        classes: names of the classes.
        command: what made it; by default the command of this process.
    """
    x = fit.data.x
    vectors = x.dim() == 2
    return {
        "schema": SCHEMA,
        "kind": "vector" if vectors else {3: "series", 4: "image", 5: "volume"}.get(x.dim()),
        "task": "classification" if _is_classifier(fit) else "regression",
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


def document_of_runs(experiment: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of an experiment's runs: a question for each row, its seeds as candidates.

    Args:
        experiment: its name.
        runs: as `experiments.results.read_runs` returns them; those that diverged are named.

    Raises:
        ValueError: no run with a reading.
    """
    done = [run for run in runs if "reading" in run]
    if not done:
        raise ValueError(f"expected runs with a reading, got {len(runs)} runs without any")
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for run in done:
        rows.setdefault(str(run["row"]), []).append(run)
    lost = [f"{run['row']}, seed {run['seed']}" for run in runs if "reading" not in run]
    return {
        "schema": SCHEMA,
        "title": f"Experiment {experiment}",
        "command": f"symrazor experiment {experiment}",
        "versions": {**versions(), **done[0]["reading"].get("versions", {})},
        "data": {"diverged": lost} if lost else None,
        "questions": [
            {
                "name": row,
                "question": row,
                "verdict": of_row[0]["reading"].get("verdict", ""),
                "candidates": [
                    {"name": f"seed {run['seed']}", "reading": run["reading"]} for run in of_row
                ],
            }
            for row, of_row in rows.items()
        ],
    }


def versions() -> dict[str, str]:
    """Of what made a page."""
    from symrazor.core.version import __version__

    return {
        "symrazor": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def parts_of(
    fit: "Fit", *, test: Tensors | None = None, classes: Sequence[str] | None = None
) -> dict[str, Any]:
    """What a question shows beside its candidates, of the network it is about.

    Args:
        fit: of that network.
        test: held-out data.
        classes: names of the classes.
    """
    found: dict[str, Any] = {
        "examples": examples_of(fit, classes),
        "filters": {name: w.tolist() for name, w in filters_of(fit.model).items()},
        "anchors": anchors_of(fit.model),
        **costs_of(fit),
    }
    if isinstance(fit.razor.likelihood, Categorical):
        x, y = (fit.data.x, fit.data.y) if test is None else test
        with torch.no_grad():
            p = fit.predict(x).mean
        found["calibration"] = {
            **calibration_bins(p, y),
            "on": "training data" if test is None else "held-out data",
        }
    return {key: value for key, value in found.items() if value}


def _is_classifier(fit: "Fit") -> bool:
    return isinstance(fit.razor.likelihood, (Categorical, Bernoulli))


def examples_of(fit: "Fit", classes: Sequence[str] | None = None) -> dict[str, Any]:
    """The first images or series of the training data and their labels; {} for other data."""
    x, y = fit.data.x[:EXAMPLES].detach().cpu(), fit.data.y[:EXAMPLES].detach().cpu()
    if x.dim() == 3 and x.shape[1] == 1:
        x = x[:, 0]  # one channel of a series
    elif x.dim() != 4:
        return {}
    found = {"images": x.tolist(), "labels": [_label(value, classes) for value in y]}
    if any(isinstance(module, Augmented) for module in fit.model.modules()) and x.dim() == 4:
        found["transformed"] = orbits_of(fit, found["images"]).tolist()
    return found


@torch.no_grad()
def orbits_of(fit: "Fit", images: Any) -> Tensor:
    """Copies of the first of some pictures, as an `Augmented` network sees them."""
    x = torch.as_tensor(images[:ORBITS]).to(fit.data.x)
    augmented = next(m for m in fit.model.modules() if isinstance(m, Augmented))
    return augmented.augment.copies(x)[0][:, :DRAWS].detach().cpu()


def _label(value: Tensor, classes: Sequence[str] | None) -> str:
    if value.numel() != 1:
        return ""
    number = value.item()
    if classes is not None and isinstance(number, int) and 0 <= number < len(classes):
        return str(classes[number])
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def costs_of(fit: "Fit") -> dict[str, Any]:
    """The report of `collapse` by the shares of the reading, and the cost of each layer.

    A network that cannot be collapsed says why, under "refused".
    """
    x = fit.data.x[:MEASURED]
    names = [layer.name for layer in fit.reading.layers]
    before = layer_costs(fit.model, x, names)
    if not any(isinstance(module, Relaxed) for module in fit.model.modules()):
        return {"costs": _costs(fit.model, names, before, {})}
    try:
        plain = collapse(fit.model, x, shares=fit.reading)
    except ValueError as error:
        return {"collapse": {"refused": str(error)}, "costs": _costs(fit.model, names, before, {})}
    after = layer_costs(plain, x, names)
    return {"collapse": plain.collapse_report, "costs": _costs(fit.model, names, before, after)}


def _costs(
    model: nn.Module,
    names: list[str],
    before: dict[str, dict[str, int]],
    after: dict[str, dict[str, int]],
) -> list[dict[str, Any]]:
    modules = dict(model.named_modules())
    return [
        {
            "layer": name,
            "type": type(modules[name]).__name__,
            **before[name],
            **{f"{key}_after": value for key, value in after.get(name, {}).items()},
        }
        for name in names
        if name in before
    ]
