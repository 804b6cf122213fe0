r"""Define structures from per-sample gradients: a diagonal, dense blocks, or the full matrix.

With the gradients $J_{nc}$ of `structures`, "diag" sums $J \circ J$; "block" and "full" sum
$J J^\top$.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from symrazor.core.files import free_bytes
from symrazor.curvature.structures import (
    Cotangents,
    Gradients,
    Structure,
    add_gradients,
    tensor_block,
)
from symrazor.curvature.task import CurvatureTask, Key, Statistics
from symrazor.linalg.blocks import Block, Dense
from symrazor.linalg.factor import Factor

FULL_KEY: Key = ("", "H")
CHECKED_BYTES = 1 << 30
"""The free memory is compared with dense matrices from this size on."""


def check_dense_size(columns: int, structure: str, device: torch.device) -> None:
    """Raise ValueError before a float64 matrix is formed that exceeds the free memory.

    For a GPU, torch raises an error that names the memory.
    """
    needed_bytes = 8 * columns**2
    if device.type == "cpu" and needed_bytes > CHECKED_BYTES and needed_bytes > free_bytes():
        raise ValueError(
            f"structure={structure!r} needs a matrix of {columns:,} x {columns:,} numbers "
            f"({needed_bytes / 2**30:,.1f} GiB), but only {free_bytes() / 2**30:,.1f} GiB of "
            "memory are free. Use structure='kron', or freeze weights."
        )


class GradientStructure(Structure):
    """A structure whose sums are computed from per-sample gradients of every tensor."""

    def collect(self, task: CurvatureTask, cotangents: Cotangents, keep_graph: bool) -> Statistics:
        """Return the sums of one batch over some columns of the root."""
        gradients: Gradients = {}
        for uses, gs in cotangents:
            formed = [use.outputs(g) for use, g in zip(uses, gs, strict=True)]
            add_gradients(gradients, uses, gs, formed, uses[0].layer.tensors, keep_graph)
        return self.reduce(task, {name: torch.cat(js) for name, js in gradients.items()})

    @abstractmethod
    def reduce(self, task: CurvatureTask, gradients: dict[str, Tensor]) -> Statistics:
        """Return the sums of per-sample gradients [(c n), p], by tensor."""

    def build(
        self, task: CurvatureTask, sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build one block per tensor."""
        return [tensor_block(task, sums, name, scale) for name in task.tensors]


class DiagonalStructure(GradientStructure):
    """The diagonal of the GGN."""

    runs_in_threads = True

    def reduce(self, task: CurvatureTask, gradients: dict[str, Tensor]) -> Statistics:
        """Sum the squares of the gradients."""
        return {(name, "h"): j.double().square().sum(0) for name, j in gradients.items()}


class BlockStructure(GradientStructure):
    """One dense block per tensor."""

    def check_size(self, theta: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a block does not fit the free memory."""
        for value in theta.values():
            check_dense_size(value.numel(), "block", value.device)

    def reduce(self, task: CurvatureTask, gradients: dict[str, Tensor]) -> Statistics:
        """Sum the outer products of the gradients, by tensor."""
        return {(name, "H"): Factor.of_rows(j.unsqueeze(1)) for name, j in gradients.items()}


class FullStructure(GradientStructure):
    """One dense block for all tensors."""

    def check_size(self, theta: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the block does not fit the free memory."""
        size = sum(value.numel() for value in theta.values())
        check_dense_size(size, "full", next(iter(theta.values())).device)

    def reduce(self, task: CurvatureTask, gradients: dict[str, Tensor]) -> Statistics:
        """Sum the outer products of the concatenated gradients."""
        theta, any_j = task.theta, next(iter(gradients.values()))
        rows = [  # zeros for a layer that does not act on the outputs: a path that is off
            gradients.get(name, any_j.new_zeros(len(any_j), theta[name].numel()))
            for name in task.tensors
        ]
        # Products in float64: rounding noise would count as information for a small precision.
        return {FULL_KEY: Factor.of_rows(torch.cat(rows, 1).double().unsqueeze(1))}

    def build(
        self, task: CurvatureTask, sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build the one block."""
        shapes = {name: task.theta[name].shape for name in task.tensors}
        H = sums[FULL_KEY]
        assert isinstance(H, Factor)
        return [Dense(shapes, H.matrix[0] * scale, task.resolution)]
