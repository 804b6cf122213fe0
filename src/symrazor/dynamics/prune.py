r"""Many quantities first, then only the directions that were learned.

With a single quantity on offer the bound has local optima: a flow that happened to fit early. With
several on offer one of them finds its way, and the others vanish. Dropping those half-way leaves
fewer flow times to average over, so the rest of the training sees less noise.
"""

import copy

import torch

from symrazor.dynamics.algebra import quantities
from symrazor.dynamics.analysis import spectrum
from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.hamiltonian import HamiltonianNetwork
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.simple import simplified, worth
from symrazor.dynamics.symmetrised import SymmetrisedNetwork
from symrazor.dynamics.train import Progress, Record, Trained, train
from symrazor.dynamics.trajectories import Transitions


def pruned(model: SymmetrisedNetwork) -> SymmetrisedNetwork:
    r"""The same network with one quantity for each learned direction, or none at all.

    The singular value decomposition $G = U S V^\top$ of the stacked generators gives directions
    $s_j V_j$; they are rescaled so that flows are as long as before under the measure over fewer
    times. A single direction gets stratified times on [-1, 1].

    Raises:
        ValueError: nothing to prune.
    """
    conserved, times = model.conserved, model.times
    if not isinstance(conserved, Quadratic) or times is None:
        raise ValueError("expected a model with learned quadratic quantities, got none")
    found = spectrum(conserved)
    m = found.dimension
    if m == 0:
        return SymmetrisedNetwork(model.network)
    fewer = FlowTimes(m, times.measure, times.draws) if m > 1 else FlowTimes(1, "cube", "quasi")
    A, b = quantities(found.directions[:m] * found.values[:m, None, None])
    scale = (times.variance / fewer.variance) ** 0.5
    kept = Quadratic(A.shape[-1], m, scale=conserved.scale, norm_cap=conserved.norm_cap)
    with torch.no_grad():
        kept.A_raw.copy_(scale * A)
        kept.b.copy_(scale * b)
    return SymmetrisedNetwork(model.network, kept.to(conserved.b), fewer)


def train_and_prune(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
    simplify: bool = False,
) -> Trained:
    """Half of the steps with all quantities, the other half with those that were learned.

    Args:
        model: see `train`; the returned one is another around the same network or its copy.
        data: transitions.
        config: options.
        progress: called with each record.
        simplify: do the second half twice, free and with directions rounded to simple
            coefficients (see `symrazor.dynamics.simple`), and return what has more evidence.
    """
    config = config or TrainConfig()
    parts = 3 if simplify else 2
    minutes = None if config.minutes is None else config.minutes / parts
    half = max(1, config.steps // 2)
    tell = [None if progress is None else shifted(progress, k, parts) for k in range(parts)]
    first = train(model, data, config.change(steps=half, minutes=minutes), tell[0])
    kept = pruned(model)
    rest = config.change(
        steps=max(1, config.steps - half), minutes=minutes, burn_in=0.0, seed=config.seed + 1
    )
    network = copy.deepcopy(kept.network) if simplify else kept.network
    second = continued(first, train(kept, data, rest, tell[1]))
    if not simplify or kept.conserved is None:
        return second
    last = pruned(kept)
    simple = simplified(SymmetrisedNetwork(network, last.conserved, last.times))
    if simple is None or not isinstance(last.conserved, Quadratic):
        return second
    other = continued(first, train(simple, data, rest, tell[2]))
    other.seconds += second.seconds - first.seconds
    second.seconds = other.seconds
    loss = (other.bound["neg_elbo"] - second.bound["neg_elbo"]) * len(data)
    d = last.conserved.A.shape[-1]
    saved = worth(last.conserved.count, d * (d + 3) // 2, len(data))
    return other if loss < saved else second


def refitted(
    chosen: Trained,
    fresh: HamiltonianNetwork,
    data: Transitions,
    config: TrainConfig,
    progress: Progress | None = None,
) -> Trained:
    """A fresh network trained for all steps with the quantities that were chosen, held as they are.

    The network that chose them saw its final quantities for a part of the steps only. Whichever
    of the two has more evidence is returned, with the time of both.

    Args:
        chosen: where the quantities come from.
        fresh: a network with the same layers; changed in place.
        data: transitions.
        config: of the whole training.
        progress: called with each record.
    """
    found = chosen.model
    model = SymmetrisedNetwork(fresh, copy.deepcopy(found.conserved), found.times)
    if model.conserved is not None:
        model.conserved.requires_grad_(False)
    again = train(model, data, config, progress)
    if not again.bound["neg_elbo"] < chosen.bound["neg_elbo"]:
        chosen.seconds += again.seconds
        return chosen
    return continued(chosen, again)


def continued(first: Trained, second: Trained) -> Trained:
    """The second training with the history and the time of both."""
    last = first.history[-1]
    for record in second.history:
        record["step"] += last["step"]
        record["seconds"] += last["seconds"]
    second.history = first.history + second.history
    second.seconds += first.seconds
    second.skipped += first.skipped
    return second


def shifted(progress: Progress, part: int, parts: int) -> Progress:
    """Reports of one part as those of the whole."""

    def tell(record: Record) -> None:
        progress(record | {"share": (part + record["share"]) / parts})

    return tell
