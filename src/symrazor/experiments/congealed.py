r"""Pictures turned until those of a class agree: how far handwriting leans by itself.

    python -m symrazor.experiments.congealed --data DIR

Congealing, without any network: each picture is turned by the angle at which it correlates best
with the mean of its class, the mean is taken again, and so on. The angles are the poses that the
pictures had, up to one angle for each class, and measure how far pictures differ in pose before
anybody turns them.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.data import mnist, rotated

REACH, STEP = 45.0, 1.5
"""Degrees: angles that are tried."""
ROUNDS = 12


def congealed(
    x: Float[Tensor, "n c h w"], y: Int64[Tensor, " n"]
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, " n"]]:
    """Pictures in the pose of their class, and the degrees each of them was turned by.

    Args:
        x: pictures on a black ground.
        y: classes.
    """
    aligned, degrees = x.clone(), x.new_zeros(len(x))
    for label in y.unique():
        own = (y == label).nonzero()[:, 0]
        aligned[own], degrees[own] = _agreed(x[own])
    return aligned, degrees


def _agreed(x: Float[Tensor, "n c h w"]) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, " n"]]:
    """One class."""
    angles = torch.arange(-REACH, REACH + STEP / 2, STEP, device=x.device)
    poses = torch.stack([_turned(x, float(angle)) for angle in angles], 1)
    flat = F.normalize(poses.flatten(2), dim=2)
    every = torch.arange(len(x), device=x.device)
    middle = len(angles) // 2
    chosen = torch.full((len(x),), middle, device=x.device)
    for _ in range(ROUNDS):
        chosen = (flat @ flat[every, chosen].mean(0)).argmax(1)
        offset = (chosen.float().mean() - middle).round().long()
        chosen = (chosen - offset).clamp(0, len(angles) - 1)
    return poses[every, chosen], angles[chosen]


def _turned(x: Float[Tensor, "n c h w"], degrees: float) -> Float[Tensor, "n c h w"]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = x.new_tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(x), 2, 3)
    grid = F.affine_grid(turn, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def spread(degrees: Float[Tensor, " n"], y: Int64[Tensor, " n"]) -> float:
    r"""Standard deviation of the angles about the mean of their class.

    Uniform angles on $\pm v$ have $v / \sqrt 3$.
    """
    left = [degrees[y == label] - degrees[y == label].mean() for label in y.unique()]
    return float(torch.cat(left).square().mean().sqrt())


def report(x: Float[Tensor, "n c h w"], y: Int64[Tensor, " n"], turn: float = 30.0) -> str:
    """Spreads of pictures as they are, aligned, and turned by up to some degrees, as markdown."""
    aligned, found = congealed(x, y)
    own = spread(found, y)
    again = spread(congealed(aligned, y)[1], y)
    both = spread(congealed(rotated(x, turn, 0), y)[1], y)
    left = math.sqrt(3 * max(0.0, both**2 - own**2))
    return (
        "| pictures | spread in degrees |\n|---|---|\n"
        f"| as they are | {own:.1f} |\n| aligned | {again:.1f} |\n"
        f"| turned by up to {turn:g} degrees | {both:.1f} |\n\n"
        f"Left for the turns: {left:.1f} degrees."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """A table for some digits of MNIST."""
    parser = argparse.ArgumentParser(prog="congealed")
    parser.add_argument("--data", type=Path, required=True, help="folder with the official files")
    parser.add_argument("--n", type=int, default=1000, help="pictures")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    x, y = mnist(options.data, "train")
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(options.seed))
    chosen = chosen[: options.n]
    sys.stdout.write(f"{report(x[chosen], y[chosen])}\n")


if __name__ == "__main__":
    main()
