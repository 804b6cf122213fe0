r"""Define the full Gauss-Newton matrix in kernel form: the structure "kernel".

With the rows $J_t$ of every tensor t, the precision $\delta_t$ of its prior, $w_t = 1/\delta_t$ and
$K_t = J_t J_t^\top$,

$$ \log |I + \Delta^{-1} J^\top J| = \log |I + K|, \qquad K = \sum_t w_t K_t , $$

a matrix with one row per sample and column of the root of the output Hessian, whatever the number
of weights. The matrices $K_t$ are computed once. The value, the effective parameters
$\gamma_t = w_t\, \mathrm{tr}\,[(I + K)^{-1} K_t]$ and MacKay's updates for any precisions then need
no further pass over the data. `linalg.kernel_solvers` computes them.

**Bounds.** $I + K$ is positive definite. Fischer's inequality bounds the determinant of such a
matrix by the product of the determinants of its diagonal blocks. Leaving out the entries of K
between blocks of samples, or between columns of the root, therefore never lowers the
log-determinant, and never raises the evidence:

1. Blocks that partition the samples give a lower bound of the evidence. Merging blocks tightens it;
   one block is exact.
2. Independent outputs (one block per column of the root) give a lower bound, too.
3. A random subset of n of N samples as one block, its log-determinant times N/n, has as its
   expectation the mean of (1) over all partitions into blocks of n. It is a lower bound in
   expectation, not for each draw.
4. One random column c of C for each batch, its log-determinant times C, is a lower bound in
   expectation, too. Shifting the columns of all samples together, $c + j$ modulo C for
   $j = 1 \ldots C$, gives C blocks that partition the rows, and all shifts are equally likely.
5. Scaling the matrix of a subset instead, $\log|I + (N/n) \Delta^{-1} H_n|$, is not a lower bound.
   As the log-determinant is concave and the mean of $(N/n) H_n$ is H, Jensen's inequality bounds
   its expectation by $\log|I + \Delta^{-1} H|$ from above. `subset_kernel` combines (3) and (5).

`structure="kernel"` uses the smaller of two matrices: one row per weight, or one row per sample and
output. With `Method.block`, samples are cut into blocks of that many, in the order in which they
are read or, with `Method.grouping`, within each class. `Method.outputs` treats outputs jointly, as
independent, or reads one random output per batch. Pass data in random order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.curvature.gradient_structures import check_dense_size
from symrazor.curvature.structures import (
    Cotangents,
    Gradients,
    Structure,
    add_gradients,
    as_job,
    layer_cotangents,
)
from symrazor.curvature.subset_kernel import SubsetKernel
from symrazor.curvature.task import CurvatureTask, Job, Key, Statistics
from symrazor.curvature.weight_sharing import Tape, Use, join
from symrazor.linalg.blocks import Block, Dense, LogPrecisions
from symrazor.linalg.eigen_jobs import Spectrum, eigenvalues, eigenvectors
from symrazor.linalg.jacobian_rows import (
    BatchRows,
    DenseRows,
    JacobianRows,
    Layout,
    Rows,
    SharedRows,
    blocks_of_samples,
    by_class,
    split_outputs,
)
from symrazor.linalg.kernel_solvers import (
    ExactSolver,
    Products,
    Solver,
    Weights,
    cholesky,
    combine,
    plus_identity_,
    rounding_error,
)
from symrazor.linalg.low_rank_solver import LowRankSolver

EXACT_ROWS = 1000
"""Kernels with more rows are approximated from some of their columns."""
ROWS_KEY: Key = ("", "J")


class KernelStructure(Structure):
    """The full Gauss-Newton matrix from the rows of its Jacobian, or blocks of it."""

    def output_jobs(
        self, task: CurvatureTask, tape: Tape, roots: Tensor, keep_graph: bool = False
    ) -> list[Job]:
        """Return the one job of a batch, for all columns of the root or for a random one."""
        columns = roots
        if task.method.outputs == "sampled":
            chosen = int(torch.randint(len(roots), (), generator=task.generator))
            columns = roots[chosen : chosen + 1]
        labels = () if task.labels is None else _class_labels(task.labels)

        def sums() -> Statistics:
            cotangents = layer_cotangents(tape, columns, not keep_graph, keep_graph)
            rows = self.collect(task, cotangents, keep_graph)[ROWS_KEY]
            assert isinstance(rows, JacobianRows)
            stands_for = len(roots) / len(columns)
            batch = replace(rows.batches[0], labels=labels, stands_for=stands_for)
            return {ROWS_KEY: JacobianRows([batch])}

        return [as_job(sums, keep_graph)]

    def collect(self, task: CurvatureTask, cotangents: Cotangents, keep_graph: bool) -> Statistics:
        """Return the rows of one batch, in the smaller form for each tensor."""
        by_layer: dict[str, tuple[list[Use], list[list[Tensor]]]] = {}
        for uses, gs in cotangents:
            by_layer.setdefault(uses[0].layer.name, (uses, []))[1].append(gs)
        rows: dict[str, Rows] = {}
        n, c = 0, 1
        for uses, columns in by_layer.values():
            weight = uses[0].factored_weight
            names = [name for name in uses[0].layer.tensors if name != weight]
            formed = [[use.outputs(g) for use, g in zip(uses, gs, strict=True)] for gs in columns]
            n, c = len(formed[0][0]), len(columns)
            gradients: Gradients = {}
            for gs, column in zip(columns, formed, strict=True):
                add_gradients(gradients, uses, gs, column, names, keep_graph)
            rows |= {name: DenseRows(torch.stack(js, 1)) for name, js in gradients.items()}
            if weight is not None:
                inputs = [use.input if keep_graph else use.input.detach() for use in uses]
                a = join([use.inputs(x) for use, x in zip(uses, inputs, strict=True)], 1)
                # Positions before outputs, as most layers compute them: no values are transposed.
                g = torch.stack([join(column, 1) for column in formed], 3).permute(0, 2, 3, 4, 1)
                rows[weight] = _weight_rows(a, g, uses[0].layer.form.from_blocks)
        return {ROWS_KEY: JacobianRows([BatchRows(n, c, rows)])}

    def build(
        self, task: CurvatureTask, sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build one block for all weights, or one block for each block of samples."""
        rows = sums[ROWS_KEY]
        assert isinstance(rows, JacobianRows)
        shapes = {name: task.theta[name].shape for name in task.tensors}
        layouts = {layer.weight: layer.form.from_blocks for layer in task.layers if layer.weight}
        method = task.method
        if method.scaling == "geometric":
            return [SubsetKernel(Kernel(shapes, rows, scale, layouts=layouts), repeats)]
        if method.block is None and method.outputs == "joint" and method.grouping == "order":
            kernel = Kernel(shapes, rows, scale, layouts=layouts)
            n_weights = sum(shape.numel() for shape in shapes.values())
            if n_weights > rows.size:
                return [kernel]
            check_dense_size(n_weights, "kernel", kernel.device)
            return [Dense(shapes, kernel.gauss_newton(), task.resolution)]
        blocks = []
        groups = [rows.batches] if method.grouping == "order" else by_class(rows.batches)
        for group in groups:
            for samples in blocks_of_samples(group, method.block or rows.n):
                for part in split_outputs(samples, method.outputs):
                    factor = samples[0].stands_for * repeats
                    blocks.append(Kernel(shapes, part, scale / repeats, factor, layouts))
        return list(blocks)


def _weight_rows(a: Tensor, g: Tensor, layout: Layout) -> Rows:
    """Return the rows of a weight from a[n, s, k, i] and g[n, k, c, o, s]."""
    k = max(a.shape[2], g.shape[1])
    n, s, _, i = a.shape
    c, o = g.shape[2:4]
    shared = SharedRows(a.transpose(1, 2).expand(n, k, s, i), g.expand(n, k, c, o, s))
    if c * shared.width > s * k * (i + c * o):
        return shared
    return DenseRows(shared.matrix(layout).unflatten(0, (n, c)))


def _class_labels(y: Tensor) -> tuple[int, ...]:
    """Return the class of each sample; raise ValueError for other labels."""
    if y.dim() != 1 or y.is_floating_point():
        raise ValueError(
            "grouping='class' needs one integer label for each sample, got labels of type "
            f"{y.dtype} and shape {list(y.shape)}. Use grouping='order'."
        )
    return tuple(y.tolist())


@dataclass
class Kernel(Block):
    """The full Gauss-Newton matrix of some samples in kernel form.

    Args:
        shapes: tensor name -> shape.
        rows: rows of the Jacobian.
        scale: factor of the Gauss-Newton matrix.
        repeats: factor of the log-determinant, the size of the data set over the samples read.
        layouts: tensor name -> map from blocks [k, o, i] to the layout of the parameter.
        exact_rows: up to this many rows, no approximation is made.
    """

    shapes: dict[str, torch.Size]
    rows: JacobianRows
    scale: float = 1.0
    repeats: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    exact_rows: int = EXACT_ROWS

    def __post_init__(self) -> None:
        self.names = tuple(self.shapes)
        self._kept_solver: Solver | None = None

    def logdet(self, log_precision: LogPrecisions) -> Tensor:
        r"""Return $\log|I + \Delta^{-1} H|$, differentiable in log precisions and rows."""
        for name in self.names:
            if log_precision[name].dim():
                raise ValueError(
                    f"Tensor {name} has one prior precision per weight, but the kernel form needs "
                    "one per tensor. Use structure='full' or 'diag', or prior_groups='tensor'."
                )
        log_weights = torch.stack([-log_precision[name].double() for name in self.names])
        if any(tensor.requires_grad for tensor in self.rows.tensors):
            return self._differentiable_logdet(log_weights)
        value: Tensor = _LogDeterminant.apply(log_weights, self)  # type: ignore[no-untyped-call]
        return value

    def _differentiable_logdet(self, log_weights: Float[Tensor, " t"]) -> Tensor:
        root = (0.5 * log_weights).exp().unbind()
        scaled = [w * self.jacobian(name) for name, w in zip(self.names, root, strict=True)]
        B = torch.cat(scaled, 1) * math.sqrt(self.scale)
        K = B @ B.mT + torch.eye(len(B), dtype=B.dtype, device=B.device)
        L: Tensor = torch.linalg.cholesky(K)
        return self.repeats * 2 * L.diagonal().log().sum()

    def residual(self, log_precision: LogPrecisions) -> float:
        """Return the width of the interval that contains the log-determinant, in nats."""
        if any(tensor.requires_grad for tensor in self.rows.tensors):
            return 0.0  # computed without approximation
        weights = self._weights(log_precision)
        return self.repeats * self._solver(weights).residual(weights)

    def _weights(self, log_precision: LogPrecisions) -> tuple[float, ...]:
        return tuple(
            self.scale * float((-log_precision[name].detach()).exp()) for name in self.names
        )

    def _solver(self, weights: Weights) -> Solver:
        """Return the present solver if it is accurate for these weights, else a new one."""
        solver = self._kept_solver
        if solver is None or not solver.is_accurate(weights):
            # Where some columns do not suffice, they will not for similar precisions either.
            exact = isinstance(solver, LowRankSolver)
            exact_rows = self.rows.size if exact else self.exact_rows
            self._kept_solver = None  # frees its memory
            solver = self._kept_solver = accurate_solver(self._products, weights, exact_rows)
        return solver

    @property
    def _products(self) -> Products:
        return Products(self.names, self.rows, self.layouts)

    def jacobian(self, name: str) -> Float[Tensor, "m p"]:
        """Return the rows of a tensor in float64."""
        layout, width = self.layouts.get(name), self.shapes[name].numel()
        blocks = []
        for batch in self.rows.batches:
            part = batch.tensors.get(name)
            if part is None:  # it does not act on the outputs
                blocks.append(
                    torch.zeros(batch.size, width, dtype=torch.float64, device=self.device)
                )
            else:
                blocks.append(part.matrix(layout).double())
        return torch.cat(blocks)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows.tensors[0].device

    def gauss_newton(self) -> Float[Tensor, "p p"]:
        r"""Return H; for networks with fewer weights than rows."""
        size = sum(shape.numel() for shape in self.shapes.values())
        total = torch.zeros(size, size, dtype=torch.float64, device=self.device)
        for rows in self._products.pieces:
            J = Kernel(self.shapes, JacobianRows([rows]), self.scale, layouts=self.layouts).whole
            total = total + J.mT @ J
        return total

    # The posterior.

    @property
    def whole(self) -> Float[Tensor, "m p"]:
        """Rows of all tensors side by side, scaled."""
        root = math.sqrt(self.scale)
        return torch.cat([self.jacobian(name) for name in self.names], 1) * root

    @property
    def _label(self) -> str:
        return ", ".join(self.names)

    @property
    def _resolution(self) -> float:
        return torch.finfo(self.rows.tensors[0].dtype).eps

    @property
    def spectrum(self) -> Float[Tensor, " m"]:
        """Eigenvalues of H; zeros may be missing."""
        J = self.whole
        return eigenvalues(J @ J.mT, self._label, self._resolution)

    def prepare(self) -> list[Spectrum]:
        """Return no jobs: there are no eigenvalues."""
        return []

    def _deviations(self, log_precision: LogPrecisions) -> Float[Tensor, " p"]:
        deviations = [
            (-0.5 * log_precision[name].detach()).exp().expand(shape).reshape(-1)
            for name, shape in self.shapes.items()
        ]
        return torch.cat(deviations)

    def draw(
        self, log_precision: LogPrecisions, noise: Float[Tensor, "s p"]
    ) -> Float[Tensor, "s p"]:
        r"""Multiply the noise by a root of the covariance.

        With $B = J \Delta^{-1/2}$ and $B B^\top = U \lambda U^\top$,
        $(I + B^\top B)^{-1/2} = I + B^\top U \frac{(1 + \lambda)^{-1/2} - 1}{\lambda} U^\top B$.
        """
        deviation = self._deviations(log_precision)
        B = self.whole * deviation
        values, vectors = eigenvectors(B @ B.mT, self._label, self._resolution)
        root = (1 + values).sqrt()
        shrinkage = -1 / (root * (1 + root))  # ((1 + x)^(-1/2) - 1) / x without cancellation
        white = noise.double()
        inside = (vectors * shrinkage) @ (vectors.mT @ (B @ white.mT))
        return (white + (B.mT @ inside).mT) * deviation

    def covariance(
        self, log_precision: LogPrecisions, jacobian: Float[Tensor, "n c p"]
    ) -> Float[Tensor, "n c c"]:
        r"""Return $\tilde J \tilde J^\top - \tilde J B^\top (I + B B^\top)^{-1} B \tilde J^\top$.

        $\tilde J$ is the Jacobian scaled by the prior's standard deviations.
        """
        deviation = self._deviations(log_precision)
        B, scaled = self.whole * deviation, jacobian.double() * deviation
        L = cholesky(plus_identity_(B @ B.mT))
        half: Tensor = torch.linalg.solve_triangular(L, B @ scaled.flatten(0, 1).mT, upper=False)
        explained: Tensor = half.mT.unflatten(0, scaled.shape[:2])
        return scaled @ scaled.mT - explained @ explained.mT


def accurate_solver(products: Products, weights: Weights, exact_rows: int) -> Solver:
    """Return the cheapest solver that is accurate for these weights."""
    diagonals = products.diagonals(products.dtype)
    trace = float(combine(diagonals.sum(1).unsqueeze(1), weights))
    dtype = torch.float32
    if products.dtype == torch.float64 or rounding_error(trace) > 1:
        dtype, diagonals = torch.float64, products.diagonals(torch.float64)
    if products.rows.size > exact_rows:
        low_rank = LowRankSolver(products, diagonals, dtype)
        if low_rank.is_accurate(weights):
            return low_rank
    return ExactSolver(products, diagonals, dtype)


class _LogDeterminant(torch.autograd.Function):
    """Compute log|I + K|; its derivatives in the log weights are the effective parameters."""

    @staticmethod
    def forward(ctx: Any, log_weights: Float[Tensor, " t"], kernel: Kernel) -> Tensor:
        """Return the value."""
        ctx.kernel = kernel
        ctx.weights = tuple((kernel.scale * log_weights.exp()).tolist())
        value = kernel._solver(ctx.weights).value(ctx.weights)
        return value * kernel.repeats

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the effective parameters times the gradient."""
        kernel: Kernel = ctx.kernel
        slopes = kernel._solver(ctx.weights).slopes(ctx.weights)
        weights = slopes.new_tensor(ctx.weights)
        return gradients[0] * kernel.repeats * weights * slopes, None
