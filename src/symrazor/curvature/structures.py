r"""Define the structures of the curvature, and the diagonal, the dense and the full one.

With inputs $a$ and cotangents $g$ in the weight-sharing format, and one cotangent $g_c$ per column
of the root of the output Hessian, the exact GGN of a weight is
$\sum_{n,c} J_{nc} J_{nc}^\top$ where

$$ J_{nc}[k, o, i] = \sum_s g_c[n, s, k, o]\, a[n, s, k, i] . $$

A structure defines the sums that one batch contributes (`collect`), and how blocks are built from
the sums over all batches (`build`):

| key | sum over n (and c) | used by |
|---|---|---|
| A, G | $aa^\top$, $g_cg_c^\top$, also over s; or of the mean / sum over s ("reduce") | "kron" |
| count | number of terms in A | "kron" |
| H | $JJ^\top$ | "block", "full"; biases and norm scales under "kron" |
| h | $J \circ J$ | "diag" |

`kronecker`, `ekfac` and `kernel` define the other structures. A bias has $a = 1$, so that
$J_{nc}[k, o] = \sum_s g_c$ and its block is exact and cheap.

To add a structure, subclass `Structure` or `GradientStructure` and call `register_structure`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symrazor.accelerate.devices import autocast
from symrazor.core.files import free_bytes
from symrazor.curvature.accumulate import BatchSums, Job, Key, Statistics
from symrazor.curvature.tape import Tape, Use
from symrazor.linalg.blocks import Block, Dense, Diag
from symrazor.linalg.factor import Factor

if TYPE_CHECKING:
    from symrazor.curvature.task import CurvatureTask, Method

FULL_KEY: Key = ("", "H")
MAX_DENSE_ENTRIES = 4096
"""Under "kron", biases and norm scales with more entries get a diagonal block."""
CHECKED_BYTES = 1 << 30
"""The free memory is compared with dense matrices from this size on."""

Cotangents = Iterable[tuple[list[Use], list[Tensor]]]
"""Calls of one layer and their cotangents, for every column of the root and every layer."""
Bases = dict[str, Block]
"""Blocks of the first of two passes, by tensor."""
Gradients = dict[str, list[Tensor]]
"""Per-sample gradients [n, p] of each tensor, one entry per column of the root."""


def check_dense_size(columns: int, structure: str, device: torch.device) -> None:
    """Raise ValueError before a float64 matrix is formed that exceeds the free memory.

    For a GPU, torch raises an error that names the memory.
    """
    needed = 8 * columns**2
    if device.type == "cpu" and needed > CHECKED_BYTES and needed > free_bytes():
        raise ValueError(
            f"structure={structure!r} needs a matrix of {columns:,} x {columns:,} numbers "
            f"({needed / 2**30:,.1f} GiB), but only {free_bytes() / 2**30:,.1f} GiB of memory are "
            "free. Use structure='kron', or freeze weights."
        )


class Structure(ABC):
    """Which sums a batch contributes, and how blocks are built from the sums.

    Attributes:
        columns_per_job: columns of the root of the output Hessian that one job handles.
        runs_in_threads: whether several jobs may run at once; False if one needs much memory.
        replayable: whether all sums are factors or counts, so that CUDA graphs can add to them.
        supports_weight_precisions: whether a prior may have one precision per weight.
        passes: number of passes over the data, 1 or 2.
        first: name of the structure of the first of two passes; the second has its blocks as
            `task.bases`.
    """

    columns_per_job = 1
    runs_in_threads = False
    replayable = False
    supports_weight_precisions = True
    passes = 1
    first = "kron"

    def first_method(self, task: "CurvatureTask", expected: int | None) -> "Method":
        """Return the method of the first of two passes.

        Args:
            task: model, layers and method.
            expected: number of samples that will be read, if known.
        """
        return replace(task.method, structure=self.first)

    def first_share(self, expected: int | None) -> float:
        """Return the part of every batch that the first of two passes reads.

        Args:
            expected: number of samples that will be read, if known.
        """
        return 1.0

    def check_size(self, theta: Mapping[str, Tensor]) -> None:  # noqa: B027 (most need none)
        """Raise ValueError if the blocks of these tensors do not fit the free memory."""

    @abstractmethod
    def collect(
        self, task: "CurvatureTask", cotangents: Cotangents, keep_graph: bool
    ) -> Statistics:
        """Return the sums of one batch over some columns of the root.

        Args:
            task: model, layers and method.
            cotangents: for every column and every layer, the calls of the layer and the gradients
                with respect to their outputs; computed lazily.
            keep_graph: whether the sums are differentiated afterwards.
        """

    def input_jobs(
        self, task: "CurvatureTask", tape: Tape, keep_graph: bool = False
    ) -> tuple[list[Job], list[Job]]:
        """Return the jobs that need no cotangents: those that release inputs, and the others."""
        return [], []

    @abstractmethod
    def build(
        self, task: "CurvatureTask", sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build the blocks of the whole data set.

        Args:
            task: model, layers and method.
            sums: the sums over all batches.
            scale: factor that scales them to the whole data set, divided by the temperature.
            repeats: size of the whole data set over the number of samples read.
        """

    def jobs(
        self, task: "CurvatureTask", tape: Tape, roots: Tensor, keep_graph: bool = False
    ) -> list[Job]:
        """Return all jobs of a batch after its forward pass, to be run in this order.

        Inputs that take more memory than the factor A they are the rows of come first and are
        released. All other inputs come last, when the graph is no longer in memory.
        """
        first, last = self.input_jobs(task, tape, keep_graph)
        return [*first, *self.output_jobs(task, tape, roots, keep_graph), *last]

    def output_jobs(
        self, task: "CurvatureTask", tape: Tape, roots: Tensor, keep_graph: bool = False
    ) -> list[Job]:
        """Return the jobs that need cotangents, each for some columns of the root."""
        parts = roots.split(self.columns_per_job)
        release_graph = len(parts) == 1 and not keep_graph

        def sums(columns: Tensor) -> Statistics:
            cotangents = layer_cotangents(tape, columns, release_graph, keep_graph)
            return self.collect(task, cotangents, keep_graph)

        return [as_job(partial(sums, columns), keep_graph) for columns in parts]


class GradientStructure(Structure):
    """A structure whose sums are computed from per-sample gradients of every tensor."""

    def collect(
        self, task: "CurvatureTask", cotangents: Cotangents, keep_graph: bool
    ) -> Statistics:
        """Return the sums of one batch over some columns of the root."""
        gradients: Gradients = {}
        for uses, gs in cotangents:
            formed = [use.outputs(g) for use, g in zip(uses, gs, strict=True)]
            add_gradients(gradients, uses, gs, formed, uses[0].layer.tensors, keep_graph)
        return self.reduce(task, {name: torch.cat(js) for name, js in gradients.items()})

    @abstractmethod
    def reduce(self, task: "CurvatureTask", gradients: dict[str, Tensor]) -> Statistics:
        """Return the sums of per-sample gradients [(c n), p], by tensor."""

    def build(
        self, task: "CurvatureTask", sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build one block per tensor."""
        return [tensor_block(task, sums, name, scale) for name in task.tensors]


class DiagonalStructure(GradientStructure):
    """The diagonal of the GGN."""

    runs_in_threads = True

    def reduce(self, task: "CurvatureTask", gradients: dict[str, Tensor]) -> Statistics:
        """Sum the squares of the gradients."""
        return {(name, "h"): j.double().square().sum(0) for name, j in gradients.items()}


class BlockStructure(GradientStructure):
    """One dense block per tensor."""

    def check_size(self, theta: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a block does not fit the free memory."""
        for value in theta.values():
            check_dense_size(value.numel(), "block", value.device)

    def reduce(self, task: "CurvatureTask", gradients: dict[str, Tensor]) -> Statistics:
        """Sum the outer products of the gradients, by tensor."""
        return {(name, "H"): Factor.of_rows(j.unsqueeze(1)) for name, j in gradients.items()}


class FullStructure(GradientStructure):
    """One dense block for all tensors."""

    def check_size(self, theta: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the block does not fit the free memory."""
        size = sum(value.numel() for value in theta.values())
        check_dense_size(size, "full", next(iter(theta.values())).device)

    def reduce(self, task: "CurvatureTask", gradients: dict[str, Tensor]) -> Statistics:
        """Sum the outer products of the concatenated gradients."""
        theta, any_j = task.theta, next(iter(gradients.values()))
        rows = [  # zeros for a layer that does not act on the outputs: a path that is off
            gradients.get(name, any_j.new_zeros(len(any_j), theta[name].numel()))
            for name in task.tensors
        ]
        # Products in float64: rounding noise would count as information for a small precision.
        return {FULL_KEY: Factor.of_rows(torch.cat(rows, 1).double().unsqueeze(1))}

    def build(
        self, task: "CurvatureTask", sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build the one block."""
        shapes = {name: task.theta[name].shape for name in task.tensors}
        H = sums[FULL_KEY]
        assert isinstance(H, Factor)
        return [Dense(shapes, H.matrix[0] * scale, task.resolution)]


STRUCTURES: dict[str, Structure] = {}
"""Structures by the name that users give as `structure=`."""


def register_structure(name: str, structure: Structure) -> None:
    """Make a structure available as `structure=name`."""
    if name in STRUCTURES:
        raise ValueError(f"A curvature structure named {name!r} exists already: choose another.")
    STRUCTURES[name] = structure


register_structure("diag", DiagonalStructure())
register_structure("block", BlockStructure())
register_structure("full", FullStructure())


def add_exact_sums(sums: Statistics, gradients: Gradients) -> None:
    """Add H of every tensor, or its diagonal h for a tensor with many entries."""
    for name, parts in gradients.items():
        j = torch.cat(parts)
        if j.shape[1] > MAX_DENSE_ENTRIES:
            sums[name, "h"] = j.double().square().sum(0)
        else:
            sums[name, "H"] = Factor.of_rows(j.unsqueeze(1))


def as_job(sums: Callable[[], Statistics], keep_graph: bool) -> Job:
    """Wrap a function that computes sums as a job; it contributes no samples of its own."""

    def job() -> BatchSums:
        # A format may depend on hyperparameters: their graph is needed if it is kept.
        with torch.set_grad_enabled(keep_graph), autocast({}):
            return BatchSums(torch.zeros((), dtype=torch.float64), 0, sums())

    return job


def tensor_block(task: "CurvatureTask", sums: Statistics, name: str, scale: float) -> Block:
    """Build the block of one tensor from its "H" or "h"; zero if its layer was never used."""
    value = task.theta[name]
    H = sums.get((name, "H"))
    if isinstance(H, Factor):
        return Dense({name: value.shape}, H.matrix[0] * scale, task.resolution)
    h = sums.get((name, "h"))
    if not isinstance(h, Tensor):
        h = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
    return Diag(name, h.reshape(value.shape) * scale)


def layer_cotangents(
    tape: Tape, columns: Tensor, release_graph: bool, keep_graph: bool
) -> Iterator[tuple[list[Use], list[Tensor]]]:
    """Yield the calls of every layer and their cotangents, column by column.

    With `release_graph` the backward pass of the last column frees the graph on its way.
    """
    for number, root in enumerate(columns, 1):
        retain = not release_graph or number < len(columns)
        cotangents = tape.cotangents(root, create_graph=keep_graph, retain_graph=retain)
        by_layer: dict[str, tuple[list[Use], list[Tensor]]] = {}
        for use, g in zip(tape.uses, cotangents, strict=True):
            if g is not None:
                uses, gs = by_layer.setdefault(use.layer.name, ([], []))
                uses.append(use)
                gs.append(g)
        yield from by_layer.values()


def add_gradients(
    gradients: Gradients,
    uses: Sequence[Use],
    gs: Sequence[Tensor],
    formed: Sequence[Tensor],
    names: Sequence[str],
    keep_graph: bool,
) -> None:
    """Add the gradients of some tensors of a layer, summed over its calls."""
    calls = zip(uses, gs, formed, strict=True)
    parts = [use.gradients(g, y, names, keep_graph) for use, g, y in calls]
    for name in names:
        j = torch.stack([part[name] for part in parts if name in part]).sum(0)
        gradients.setdefault(name, []).append(j)
