r"""Find the symmetry of sets, of periodic signals, and a hidden one, by the evidence.

Regressions on eight numbers, by networks of two relaxed layers and a mean over positions:

| row | target | paths next to the free one | correct if |
|---|---|---|---|
| set | a sum over elements, $\sum_s f(x_s)$ | S8 | S8 is supported |
| order | the same, with a weight for each position | S8 | S8 is not supported |
| periodic | products of neighbours on a ring | Z8 | Z8 is supported |
| position | the same, with a weight for each pair | Z8 | Z8 is not supported |
| hidden | neighbours on a ring with relabelled positions | one of three rings | it is chosen |
| at once | the same | S8 and all three rings | it is chosen |

A group is supported if the measured equivariance errors of all layers and of the network are below
5 % (`symrazor.symmetry.verdict`). In row "hidden" three networks are trained, each with another
ring next to its free paths, and the one with the highest evidence is chosen. In row "at once" there
is one network (`symrazor.layers.relaxed_over`), and the ring with the largest share is chosen.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor import groups
from symrazor.data import Tensors
from symrazor.experiments.options import OfTable
from symrazor.experiments.results import Run, run_rows, table
from symrazor.groups import Group
from symrazor.layers import SetPool, relaxed_over
from symrazor.symmetry.verdict import SMALL_ERROR

NAME = "hidden-symmetry"
PLACES = 8
WIDTH = 6
NOISE = 0.1
CONFIG = sr.FitConfig(epochs=100, batch_size=128, lr=2e-2, every=3, evidence_structure=None)
ROWS = ("set", "order", "periodic", "position", "hidden", "at once")


@dataclass(frozen=True)
class Options(OfTable):
    """Options of the experiment.

    Args:
        small: Train for a third of the time.
        rows: Patterns of tasks, see the module.
    """

    seed: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Task:
    """Data, the candidate groups, and the group that the data have."""

    x: Tensor
    y: Tensor
    candidates: list[Group]
    truth: str | None


def ring(order: Sequence[int], name: str) -> Group:
    """Return the circular shifts along a ring that visits positions in the given order."""
    step = torch.empty(len(order), dtype=torch.long)
    positions = torch.tensor(order)
    step[positions] = positions.roll(-1)
    return Group.from_permutations(name, step.unsqueeze(0), ("t",))


def make_task(row: str, seed: int, n: int = 512) -> Task:
    """Generate the data of a row.

    Raises:
        ValueError: The row is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, PLACES, generator=generator)
    positions = x[:, 0]
    weights = torch.randn(PLACES, generator=generator) if row in ("order", "position") else 1.0
    candidates, truth = [groups.symmetric(PLACES)], "S8"
    match row:
        case "set" | "order":
            f = (torch.sin(2 * positions) * weights).sum(1)
        case "periodic" | "position":
            candidates, truth = [groups.cyclic_permutations(PLACES)], "Z8"
            f = (positions * positions.roll(-1, 1) * weights).sum(1)
        case "hidden" | "at once":
            orders = [torch.randperm(PLACES, generator=generator) for _ in range(3)]
            candidates = [ring(o.tolist(), f"ring {i}") for i, o in enumerate(orders)]
            right = int(torch.randint(3, (), generator=generator))
            truth = f"ring {right}"
            along = positions[:, orders[right]]
            f = (along * along.roll(-1, 1)).sum(1)
        case _:
            raise ValueError(f"Unknown row {row!r}. Rows: {ROWS}.")
    f = (f - f.mean()) / f.std()
    y = f + NOISE * torch.randn(n, generator=generator)
    supported_group = None if row in ("order", "position") else truth
    return Task(x, y.unsqueeze(1), candidates, supported_group)


def network(candidates: Sequence[Group]) -> nn.Module:
    """Return two relaxed layers with one path per candidate group, and a mean over positions."""
    layer_1, layer_2 = (relaxed_over(c, WIDTH, candidates) for c in (1, WIDTH))
    body = [layer_1, nn.Tanh(), layer_2, nn.Tanh()]
    return nn.Sequential(*body, SetPool("mean"), nn.Linear(WIDTH, 1))


def train(task: Task, candidates: Sequence[Group], seed: int, options: Options) -> sr.Reading:
    """Train one network with the given candidate groups and return its reading."""
    epochs = CONFIG.epochs // 3 if options.small else CONFIG.epochs
    torch.manual_seed(seed)
    config = CONFIG.change(seed=seed, device=options.resolved_device, epochs=epochs, progress=False)
    data: Tensors = (task.x, task.y)
    return sr.fit(network(candidates), data, "gaussian", config=config).reading


def run_row(row: str, seed: int, options: Options) -> Run:
    """Train one network, or one per candidate group, and return the result."""
    task = make_task(row, seed)
    started = time.process_time()
    everything = groups.symmetric(PLACES)
    choices = {
        "hidden": [[group] for group in task.candidates],
        "at once": [[everything, *task.candidates]],
    }.get(row, [task.candidates])
    readings = [train(task, candidates, seed, options) for candidates in choices]
    evidences = [reading.evidence["log_evidence"] for reading in readings]
    best = evidences.index(max(evidences))
    reading = readings[best]
    names = [group.name for group in choices[best] if group is not everything]
    layers = [layer for layer in reading.layers if layer.relaxed]
    shares = {
        name: mean(p.share for layer in layers for p in layer.paths if p.group == name)
        for name in names
    }
    supported = [name for name in names if _supported(name, reading)]
    likeliest = max(shares, key=lambda name: shares[name])
    picked = likeliest if len(task.candidates) > 1 or likeliest in supported else None
    rivals = [value for i, value in enumerate(evidences) if i != best]
    return {
        "truth": task.truth,
        "picked": picked,
        "right": picked == task.truth,
        "supported": supported,
        "margin": evidences[best] - max(rivals) if rivals else None,
        "shares": shares,
        "free_shares": [layer.free_share for layer in layers],
        "errors": [layer.equivariance_error for layer in layers],
        "network_error": reading.equivariance_error,
        "evidence": -reading.evidence["per_datum"],
        "seconds": time.process_time() - started,
        "readings": [trained.to_dict() for trained in readings],
    }


def _supported(name: str, reading: sr.Reading) -> bool:
    """Return whether all layers and the network are equivariant to a group."""
    symmetries = (entry for layer in reading.layers for entry in layer.symmetry)
    supported = all(entry.supported for entry in symmetries if entry.group == name)
    return supported and reading.equivariance_error[name] < SMALL_ERROR


def run(options: Options) -> str:
    """Find the symmetry of sets, of periodic signals and of a hidden group.

    Raises:
        ValueError: A row is unknown.
    """
    return markdown(run_rows(NAME, options, ROWS, run_row))


def markdown(runs: Sequence[Run]) -> str:
    """Return one line per row: number of correct results, shares, errors, evidence."""
    rows = []
    for row in sorted({run["row"] for run in runs}, key=ROWS.index):
        row_runs = [run for run in runs if run["row"] == row]
        layers = zip(*(run["free_shares"] for run in row_runs), strict=True)
        free = " / ".join(f"{100 * min(s):.0f} to {100 * max(s):.0f}" for s in layers)
        errors = [100 * min(run["network_error"].values()) for run in row_runs]
        truth = {run["truth"] or "none" for run in row_runs}
        margins = [run["margin"] for run in row_runs if run["margin"] is not None]
        cells = [
            row,
            truth.pop() if row in ROWS[:4] else "one of three",
            f"{sum(run['right'] for run in row_runs)} of {len(row_runs)}",
            free,
            f"{min(errors):.1f} to {max(errors):.1f}",
            f"{mean(run['evidence'] for run in row_runs):.3f}",
            f"{min(margins):.0f} to {max(margins):.0f}" if margins else "",
            f"{mean(run['seconds'] for run in row_runs):.0f}",
        ]
        rows.append(cells)
    head = ["row", "truth", "right", "free share by layer %", "network error %", "-log ev/N"]
    return table([*head, "margin, nats", "CPU seconds"], rows)
