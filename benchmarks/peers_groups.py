r"""Group convolutions by symrazor and by escnn, side by side: the same filters, both speeds.

Needs escnn, in an environment of its own:

    pip install --no-deps escnn lie_learn pymanopt autograd joblib "numpy<2"
    python benchmarks/peers_groups.py

escnn draws a filter from its own basis. Its expanded filter, with channels put in our order
(element, field), is projected on our filters; if both mean the same equivariance nothing is lost,
and the two layers agree on random images. The exit code is 1 if they do not to `TOLERANCE`.
Without escnn there is nothing to compare, and the exit code is 0.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from symrazor.layers import Conv, GConv
from symrazor.layers.point_group import PointGroup, point_group

try:
    from escnn import gspaces
    from escnn import nn as peer
except ImportError as error:
    sys.stdout.write(f"escnn cannot be imported ({error}); see {Path(__file__).name}\n")
    sys.exit(0)

TOLERANCE = 1e-6
FIELDS, SIZE, BATCH, ROUNDS = 8, 16, 64, 9


def order(space: Any, group: PointGroup) -> list[int]:
    """For each of our elements its index in escnn's regular representation.

    Matrices of escnn act on (x, y) with y upwards; ours on (row, column).
    """
    to_rows = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    standard = space.basespace_action
    theirs = []
    for element in space.fibergroup.elements:
        matrix = torch.as_tensor(standard(element), dtype=torch.float64)
        theirs.append(to_rows @ matrix @ to_rows.T)
    return [
        min(range(len(theirs)), key=lambda i: float((theirs[i] - R).abs().max()))
        for R in group.matrices
    ]


def ours_order(channels: Tensor, dim: int, places: list[int]) -> Tensor:
    """Channels (field, element) of escnn as (element, field), elements in our order."""
    split = channels.unflatten(dim, (-1, len(places)))
    index = torch.tensor(places)
    found: Tensor = split.index_select(dim + 1, index).transpose(dim, dim + 1)
    return found.flatten(dim, dim + 1)


def timed(run: Callable[[], object]) -> float:
    """Median of process times, in milliseconds."""
    run()
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        found.append(1000 * (time.process_time() - start))
    return median(found)


def step(
    layer: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]
) -> Callable[[], object]:
    return lambda: torch.autograd.grad(layer(x).sum(), [x, *parameters])


def compare(name: str, space: Any) -> float:
    """Print one row; returns the relative difference."""
    torch.manual_seed(0)
    group = point_group(name)
    places = order(space, group)
    field = peer.FieldType(space, FIELDS * [space.regular_repr])
    start = time.perf_counter()
    theirs = peer.R2Conv(field, field, 3, padding=1, padding_mode="circular")
    built_theirs = time.perf_counter() - start
    start = time.perf_counter()
    ours = GConv(FIELDS * group.order, FIELDS * group.order, (SIZE, SIZE), group=name)
    built_ours = time.perf_counter() - start
    kernel, bias = (part.detach() for part in theirs.expand_parameters())
    kernel = ours_order(ours_order(kernel, 0, places), 1, places)
    ours.stages[0].project_(kernel, ours_order(bias, 0, places))
    x = torch.randn(BATCH, FIELDS * group.order, SIZE, SIZE)
    with torch.no_grad():
        expected = ours_order(theirs(peer.GeometricTensor(x, field)).tensor, 1, places)
        apart = ours(ours_order(x, 1, places)) - expected
        difference = float(apart.abs().max() / expected.abs().max())
    x.requires_grad_()
    plain = Conv(FIELDS * group.order, FIELDS * group.order, (SIZE, SIZE))
    times = [
        timed(step(plain, x, list(plain.parameters()))),
        timed(step(ours, x, list(ours.parameters()))),
        timed(
            step(
                lambda x: theirs(peer.GeometricTensor(x, field)).tensor,
                x,
                [p for p in theirs.parameters() if p.requires_grad],
            )
        ),
    ]
    cells = [name, f"{difference:.1e}", *(f"{t:.1f}" for t in times)]
    cells += [f"{1000 * built_ours:.1f}", f"{1000 * built_theirs:.1f}"]
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    return difference


def main() -> int:
    torch.set_num_threads(1)
    head = [
        "group",
        "difference",
        "CONV ms",
        "GConv ms",
        "R2Conv ms",
        "GConv built ms",
        "R2Conv built ms",
    ]
    sys.stdout.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
    spaces = {"p4": gspaces.rot2dOnR2(4), "p4m": gspaces.flipRot2dOnR2(4)}
    return int(max(compare(name, space) for name, space in spaces.items()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
