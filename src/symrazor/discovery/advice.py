"""Write code that puts the answer of `discover` into a network of the user's own."""

from collections.abc import Mapping
from itertools import pairwise

from symrazor.core.validation import join_names
from symrazor.data import Dataset
from symrazor.discovery.answer import Answer
from symrazor.discovery.families import PERCEPTRONS
from symrazor.discovery.invariances import LearnedInvariances
from symrazor.symmetry.verdict import capitalize

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


def code_for(answer: Answer, data: Dataset) -> str:
    """Return Python code for a network of the user, as the answer recommends; "" for none."""
    holds = {claim.name: claim.holds for claim in answer.claims}
    parts = [_gain(answer)]
    if data.kind in ("image", "volume", "series"):
        parts += [_shifts(holds, data), _point_groups(holds)]
    elif data.kind == "set":
        parts.append(_points(holds, data))
    elif data.kind == "vector" and "linear" in holds:
        hidden_layers = list(PERCEPTRONS).index(answer.recommended.name)
        parts.append(_vectors(holds["linear"], hidden_layers, data))
    parts.append(_augmentation(answer))
    code = "\n\n".join(part for part in parts[1:] if part)
    return "\n".join(part for part in (parts[0], code) if part) if code else ""


def _gain(answer: Answer) -> str:
    """Return a comment with the gain that is expected of the recommended network."""
    gain = answer.expected_gain
    if gain is None:
        return ""
    other, mean, error = gain
    return (
        f"# Recommended: {answer.family.label(answer.recommended.name)}. Expected gain over "
        f"{answer.family.label(other)}:\n# {mean:.2g} ± {error:.1g} nats per sample."
    )


def _shifts(holds: Mapping[str, bool | None], data: Dataset) -> str:
    """Return code for the question whether position matters."""
    if "translation" not in holds:
        return ""
    what = "when something happens" if data.kind == "series" else "position"
    if holds["translation"]:
        return (
            "import symrazor as sr\n\n"
            f"# {capitalize(what)} does not matter. Make your CNN exactly shift-invariant:\n"
            "# strided pools, zero padding and dense layers on positions are replaced.\n"
            "network = sr.make_equivariant(network, x[:32])\n"
            "print(network.equivariance_report)  # which layer was replaced by what"
        )
    if holds["translation"] is None:
        return (
            "import symrazor as sr\n\n"
            f"# Undecided whether {what} matters. Give your CNN both paths;\n"
            "# the evidence chooses in each layer.\n"
            'network = sr.relax(network, x[:2], groups=["translation"])\n'
            "fit = sr.fit(network, (x, y))\n"
            "print(fit.reading)"
        )
    free = [name for name in ONE_AXIS if holds.get(name)]
    dims = data.x.ndim - 2
    layers, reason = "nn.Flatten()", f"{capitalize(what)} matters."
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


def _augmentation(answer: Answer) -> str:
    """Return code for the random transformations that the data support, and those to leave out."""
    learned = answer.invariances
    if not isinstance(learned, LearnedInvariances):
        return ""
    lines = []
    if learned.supported:
        lines = [
            f"# Random transformations of these ranges:\n{learned.learned.torchvision().strip()}"
        ]
    harmful = [spread.flow.name for spread in learned.learned.label_changing]
    if harmful:
        lines.append(f"# Not these, which change the labels: {join_names(harmful)}.")
    return "\n".join(lines)
