# Over 400 lines: everything that a report shows of a result, with templates of code.
"""Write the document of a result: numbers, examples, predictions, and code for the user's network.

`document_of` returns plain numbers and strings for JSON, from which the report is made. `evaluate`
shows what the network does with the user's own examples: the symmetry itself, with examples that
are moved step by step, and predictions of held-out data. `code_for` writes code that puts the
answer into a network of the user's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from symrazor.core.validation import join_names
from symrazor.data import Dataset, Tensors
from symrazor.discovery.answer import Answer
from symrazor.discovery.families import PERCEPTRONS
from symrazor.discovery.invariances import LearnedInvariances
from symrazor.inference.last_layer import LastLayer, predict
from symrazor.inference.posterior import Prediction
from symrazor.report.content import SCHEMA
from symrazor.symmetry.verdict import capitalize
from symrazor.training.fit_document import MAX_TRANSFORMED, parts_of, versions

if TYPE_CHECKING:
    from symrazor.discovery.result import Discovery, QuestionResult

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

COPIES = {
    "p2": "[x, x.rot90(2, (-2, -1))]",
    "p4": "[x.rot90(turns, (-2, -1)) for turns in range(4)]",
    "pm": "[x, x.flip(-1)]",
    "p2m": "[x, x.flip(-1), x.flip(-2), x.flip((-2, -1))]",
    "p4m": "[y.rot90(turns, (-2, -1)) for y in (x, x.flip(-1)) for turns in range(4)]",
}
"""Group of images -> code of all transformed copies of a batch."""
MAX_POOLS = {
    1: "nn.AdaptiveMaxPool1d(1)",
    2: "nn.AdaptiveMaxPool2d(1)",
    3: "nn.AdaptiveMaxPool3d(1)",
}
ONE_AXIS = {
    "x-translation": ("vertical", "nn.AdaptiveMaxPool2d((None, 1))"),
    "y-translation": ("horizontal", "nn.AdaptiveMaxPool2d((1, None))"),
}
HIDDEN = 64
"""Width of the networks for sets and vectors."""


def document_of(discovery: "Discovery") -> dict[str, Any]:
    """Return dictionaries, lists, numbers and strings; for the keys see docs/how-to/discover.md."""
    data = discovery.data or discovery.results[0].data
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": data.kind,
        "task": data.task,
        "command": discovery.command,
        "versions": versions(),
        "data": {
            "path": data.source,
            "n": len(data.x),
            "shape": list(data.x.shape[1:]),
            "dtype": dtype_name(data),
            "classes": _class_names(data),
            "columns": list(data.columns) or None,
        },
        "questions": [_question_document(result) for result in discovery.results],
        "load": discovery.loading_code,
    }
    if discovery.dynamics is not None:
        document["dynamics"] = discovery.dynamics.to_dict()
        document["verdict"] = discovery.verdict
    return document


def dtype_name(data: Dataset) -> str:
    """Return the number type of the inputs that the plain network takes."""
    return "float64" if data.kind == "trajectory" else str(data.x.dtype).removeprefix("torch.")


def _class_names(data: Dataset) -> list[str] | None:
    return list(data.names) if data.task == "classification" else None


def _question_document(result: "QuestionResult") -> dict[str, Any]:
    answer, test, names = result.answer, result.prepared_test(), _class_names(result.data)
    sections = parts_of(answer.subject_fit, test=test, classes=names)
    if answer.recommended_fit is not answer.subject_fit:  # calibration of the network to use
        recommended = parts_of(answer.recommended_fit, test=test, classes=names)
        if "calibration" in recommended:
            sections["calibration"] = recommended["calibration"]
    if "calibration" in sections:
        final = answer.final  # the page calls its training "longer"
        network = answer.recommended.name if final is None else f"{final.name}, longer"
        sections["calibration"]["network"] = network
    document = answer.to_dict()
    _number_layers(document)
    if isinstance(answer.invariances, LearnedInvariances) and answer.invariances.supported:
        _add_invariances(document, sections, answer.invariances)
    return {
        **document,
        "network": answer.subject.name,
        "best": answer.best.name,
        "symmetric": answer.symmetric,
        "classes": _class_names(result.data),
        "targets": list(result.data.names) if result.data.task == "regression" else None,
        **sections,
        "not_tested": not_tested(result.data, answer),
        "code": result.code,
        **evaluate(result.network, result.posterior, result.data, result.test),
    }


def _number_layers(document: dict[str, Any]) -> None:
    """Add to each layer the number that the verdict gives it; it counts relaxed layers only."""
    for candidate in (*document["candidates"], document["final"]):
        layers = [] if candidate is None else candidate["reading"]["layers"]
        relaxed = [layer["relaxed"] for layer in layers]
        if relaxed == sorted(relaxed, reverse=True):  # relaxed layers come first
            for number, layer in enumerate(layers, 1):
                layer["number"] = number


def _add_invariances(
    document: dict[str, Any], sections: dict[str, Any], invariances: LearnedInvariances
) -> None:
    """Add the widths to the candidate they belong to, and transformed copies to the examples."""
    entries = {name: asdict(entry) for name, entry in invariances.invariances.items()}
    for candidate in (*document["candidates"], document["final"] or {}):
        if candidate.get("name") == invariances.network:
            candidate["reading"]["invariances"] = entries
    images = torch.as_tensor(sections["examples"]["images"][:MAX_TRANSFORMED])
    sections["examples"]["transformed"] = invariances.examples(images).tolist()


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
    sections: dict[str, Any] = {}
    of = "training data" if test is None else "held-out data"
    if data.kind in ("image", "series") and x[0].numel() <= MAX_NUMBERS:
        sections["moved"] = _moved(network, posterior, x, y, data)
    if is_classifier:
        sections |= _classified(x, y, prediction, data)
    elif data.outputs == 1:
        sections["scatter"] = _scatter(y, prediction)
    if {"confusion", "scatter", "worst"} & set(sections):
        sections["shown_on"] = of
    return sections


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
            predicted = int(prediction.mean[STEPS].argmax())
            entry["label"] = names[int(y[number])]
            entry["output"] = names[predicted]
            entry["values"] = prediction.mean[:, predicted].tolist()
            entry["predicted"] = [names[k] for k in prediction.mean.argmax(1).tolist()]
        else:
            entry["values"] = prediction.mean[:, 0].tolist()
            entry["output"] = names[0] if names else "target"
        if prediction.epistemic is not None:
            column = predicted if data.task == "classification" else 0
            entry["spread"] = prediction.epistemic[:, column].tolist()
        examples.append(entry)
    unit = "pixels to the right" if data.kind == "image" else "time steps later"
    return {"steps": steps, "unit": unit, "examples": examples}


def _shown(x: Tensor) -> list[Any]:
    """Return images [n, c, h, w], or the first channel of series, as lists."""
    values: list[Any] = (x if x.ndim == 4 else x[:, 0]).float().tolist()
    return values


def _one_per_class(y: Tensor) -> list[int]:
    """Return sample numbers: the first of each class, or spread over the sorted targets."""
    if y.is_floating_point():
        order = y[:, 0].argsort().tolist()
        return [order[(2 * k + 1) * len(order) // (2 * EXAMPLES)] for k in range(EXAMPLES)]
    first_of_class: dict[int, int] = {}
    for number, label in enumerate(y.tolist()):
        first_of_class.setdefault(label, number)
    return list(first_of_class.values()) or [0]


def _classified(x: Tensor, y: Tensor, prediction: Prediction, data: Dataset) -> dict[str, Any]:
    """Return the confusion matrix and the examples with the least probable labels."""
    p, k = prediction.mean, len(data.names)
    sections: dict[str, Any] = {}
    if k <= MAX_CONFUSION_CLASSES:
        counts = torch.zeros(k, k, dtype=torch.int64)
        counts.index_put_((y, p.argmax(1)), torch.ones(len(y), dtype=torch.int64), accumulate=True)
        sections["confusion"] = counts.tolist()
    true_probability = p.gather(1, y.reshape(-1, 1))[:, 0]
    worst = true_probability.argsort()[:WORST]
    entry: dict[str, Any] = {
        "labels": [data.names[label] for label in y[worst].tolist()],
        "predicted": [data.names[label] for label in p[worst].argmax(1).tolist()],
        "probability": true_probability[worst].tolist(),
    }
    if data.kind in ("image", "series") and x[0].numel() <= MAX_NUMBERS:
        entry["inputs"] = _shown(x[worst])
    sections["worst"] = entry
    return sections


def _scatter(y: Tensor, prediction: Prediction) -> dict[str, Any]:
    """Return true and predicted targets, with the standard deviation if it is known."""
    chosen = slice(SCATTER)
    std = None if prediction.std is None else prediction.std[chosen, 0].tolist()
    mean = prediction.mean[chosen, 0].tolist()
    return {"true": y[chosen, 0].tolist(), "predicted": mean, "std": std}


def not_tested(data: Dataset, answer: Answer) -> list[str]:
    """Return sentences on symmetries that the answer says nothing about."""
    sentences = [answer.summary["not_tested"]] if answer.summary["not_tested"] else []
    tested = {claim.name for claim in answer.claims}
    has_groups = bool(tested & {"p2", "p4", "pm", "p2m", "p4m", "O", "Oh"})
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


def code_for(answer: Answer, data: Dataset) -> str:
    """Return Python code for a network of the user, as the answer recommends; "" for none."""
    holds = {claim.name: claim.holds for claim in answer.claims}
    blocks = [_gain(answer)]
    if data.kind in ("image", "volume", "series"):
        blocks += [_shifts(holds, data), _point_groups(holds)]
    elif data.kind == "set":
        blocks.append(_points(holds, data))
    elif data.kind == "vector" and "linear" in holds:
        hidden_layers = list(PERCEPTRONS).index(answer.recommended.name)
        blocks.append(_vectors(holds["linear"], hidden_layers, data))
    blocks.append(_augmentation(answer, data))
    code = "\n\n".join(part for part in blocks[1:] if part)
    return "\n".join(part for part in (blocks[0], code) if part) if code else ""


def _gain(answer: Answer) -> str:
    """Return a comment with the gain that is expected of the recommended network."""
    gain = answer.expected_gain
    if gain is None:
        return ""
    rival, mean, error = gain
    return (
        f"# Recommended: {answer.family.label(answer.recommended.name)}. Expected gain over "
        f"{answer.family.label(rival)}:\n# {mean:.2g} ± {error:.1g} nats per sample."
    )


def _shifts(holds: Mapping[str, bool | None], data: Dataset) -> str:
    """Return code for the question whether position matters."""
    if "translation" not in holds:
        return ""
    subject = "when something happens" if data.kind == "series" else "position"
    if holds["translation"]:
        return (
            "import symrazor as sr\n\n"
            f"# {capitalize(subject)} does not matter. Make your CNN exactly shift-invariant:\n"
            "# strided pools, zero padding and dense layers on positions are replaced.\n"
            "network = sr.make_equivariant(network, x[:32])\n"
            "print(network.equivariance_report)  # which layer was replaced by what"
        )
    if holds["translation"] is None:
        return (
            "import symrazor as sr\n\n"
            f"# Undecided whether {subject} matters. Give your CNN both paths;\n"
            "# the evidence chooses in each layer.\n"
            'network = sr.relax(network, x[:2], groups=["translation"])\n'
            "fit = sr.fit(network, (x, y))\n"
            "print(fit.reading)"
        )
    free = [name for name in ONE_AXIS if holds.get(name)]
    dims = data.x.ndim - 2
    layers, reason = "nn.Flatten()", f"{capitalize(subject)} matters."
    if len(free) == 1:
        axis, pool = ONE_AXIS[free[0]]
        layers, reason = f"{pool}, nn.Flatten()", f"Only the {axis} position matters."
    return (
        "from torch import nn\n\n"
        f"# {reason} In place of a global pool such as {MAX_POOLS[dims]},\n"
        "# end your CNN with a layer that sees where a feature is. No random shifts.\n"
        f"readout = nn.Sequential({layers}, nn.LazyLinear({data.outputs}))"
    )


def _point_groups(holds: Mapping[str, bool | None]) -> str:
    """Return code that averages a network over the largest group that holds."""
    names = [name for name in COPIES if holds.get(name)]
    if not names:
        broken = [name for name in COPIES if holds.get(name) is False]
        if not broken:
            return ""
        return f"# No augmentation by {join_names(broken, 'or')}: it changes the labels."
    return (
        "import torch\n\n\n# For training and prediction:\n"
        "def predict(network, x):\n"
        f'    """Return the output averaged over {names[-1]}: exactly invariant."""\n'
        f"    copies = {COPIES[names[-1]]}\n"
        "    return torch.stack([network(copy) for copy in copies]).mean(0)"
    )


def _points(holds: Mapping[str, bool | None], data: Dataset) -> str:
    """Return code for the question whether the order of points matters."""
    if holds.get("permutation") is None:
        return ""
    points, features = data.x.shape[1:]
    if holds["permutation"]:
        return (
            "from torch import nn\n\n"
            "# The order of the points does not matter: the same layers for every point, then a "
            "mean.\n# x: [n, points, features]\n"
            f"each = nn.Sequential(nn.Linear({features}, {HIDDEN}), nn.ReLU(), "
            f"nn.Linear({HIDDEN}, {HIDDEN}), nn.ReLU())\n"
            f"head = nn.Sequential(nn.Linear({HIDDEN}, {HIDDEN}), nn.ReLU(), "
            f"nn.Linear({HIDDEN}, {data.outputs}))\n"
            "outputs = head(each(x).mean(1))"
        )
    return (
        "from torch import nn\n\n"
        "# The order of the points matters: a layer with weights of its own for each point.\n"
        f"network = nn.Sequential(nn.Flatten(), nn.Linear({points * features}, {HIDDEN}), "
        f"nn.ReLU(), nn.Linear({HIDDEN}, {data.outputs}))"
    )


def _vectors(is_linear: bool | None, hidden_layers: int, data: Dataset) -> str:
    """Return code for the question whether hidden layers improve the prediction."""
    if is_linear is None:
        return ""
    n = data.x.shape[1]
    if is_linear:
        return (
            "from torch import nn\n\n"
            "# Hidden layers do not improve the prediction. Standardise the inputs first.\n"
            f"network = nn.Linear({n}, {data.outputs})"
        )
    widths = [n, *[HIDDEN] * max(1, hidden_layers)]
    layers = "".join(
        f"    nn.Linear({c_in}, {c_out}),\n    nn.ReLU(),\n" for c_in, c_out in pairwise(widths)
    )
    return (
        "from torch import nn\n\n"
        "# Hidden layers improve the prediction. Standardise the inputs first.\n"
        f"network = nn.Sequential(\n{layers}    nn.Linear({HIDDEN}, {data.outputs}),\n)"
    )


def _augmentation(answer: Answer, data: Dataset) -> str:
    """Return code for the random transformations that the data support, and those to leave out."""
    learned = answer.invariances
    if not isinstance(learned, LearnedInvariances):
        return ""
    lines = []
    if learned.supported:
        pipeline = learned.for_images(data.x).torchvision().strip()
        lines = [f"# Random transformations of these ranges:\n{pipeline}"]
    harmful = [spread.flow.name for spread in learned.learned.label_changing]
    if harmful:
        lines.append(f"# Not these, which change the labels: {join_names(harmful)}.")
    return "\n".join(lines)
