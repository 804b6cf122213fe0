r"""Collect the rows of the Jacobian for the kernel form of the evidence; see `linalg.kernel`.

`structure="kernel"` is the full Gauss-Newton matrix, in the smaller of its two forms: one row per
weight, or one row per sample and output. With `Method.block`, samples are cut into blocks of that
many, in the order in which they are read or, with `Method.grouping`, within each class.
`Method.outputs` treats outputs jointly, as independent, or reads one random output per batch: lower
bounds of the evidence, proved in `linalg.kernel`. Pass data in random order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symrazor.curvature.accumulate import Job, Key, Statistics
from symrazor.curvature.structures import (
    Cotangents,
    Gradients,
    Structure,
    add_gradients,
    as_job,
    check_dense_size,
    layer_cotangents,
)
from symrazor.curvature.tape import Tape, Use, join
from symrazor.linalg.blocks import Block, Dense
from symrazor.linalg.jacobian_rows import (
    BatchRows,
    DenseRows,
    JacobianRows,
    Layout,
    Rows,
    SharedRows,
    batch_tensors,
)
from symrazor.linalg.kernel import Kernel, SubsetKernel

if TYPE_CHECKING:
    from symrazor.curvature.task import CurvatureTask

ROWS_KEY: Key = ("", "J")


class KernelStructure(Structure):
    """The full Gauss-Newton matrix from the rows of its Jacobian, or blocks of it."""

    def output_jobs(
        self, task: "CurvatureTask", tape: Tape, roots: Tensor, keep_graph: bool = False
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

    def collect(
        self, task: "CurvatureTask", cotangents: Cotangents, keep_graph: bool
    ) -> Statistics:
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
        self, task: "CurvatureTask", sums: Statistics, scale: float, repeats: float
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
                for part in _outputs(samples, method.outputs):
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


def blocks_of_samples(batches: Iterable[BatchRows], block: int) -> Iterator[list[BatchRows]]:
    """Cut batches, in order, into blocks of this many samples; the last may be smaller."""
    current: list[BatchRows] = []
    missing = block
    for batch in batches:
        start = 0
        while start < batch.n:
            part = batch.select(slice(start, start + missing))
            current.append(part)
            start, missing = start + part.n, missing - part.n
            if not missing:
                yield current
                current, missing = [], block
    if current:
        yield current


def by_class(batches: Sequence[BatchRows]) -> Iterator[list[BatchRows]]:
    """Yield the rows of each class."""
    for label in sorted({label for batch in batches for label in batch.labels}):
        parts = []
        for batch in batches:
            index = [i for i, other in enumerate(batch.labels) if other == label]
            if index:
                parts.append(
                    batch.select(torch.tensor(index, device=batch_tensors(batch)[0].device))
                )
        yield parts


def _class_labels(y: Tensor) -> tuple[int, ...]:
    """Return the class of each sample; raise ValueError for other labels."""
    if y.dim() != 1 or y.is_floating_point():
        raise ValueError(
            "grouping='class' needs one integer label for each sample, got labels of type "
            f"{y.dtype} and shape {list(y.shape)}. Use grouping='order'."
        )
    return tuple(y.tolist())


def _outputs(samples: list[BatchRows], outputs: str) -> Iterator[JacobianRows]:
    """Yield the rows of a block, together or for each output."""
    if outputs != "independent":
        yield JacobianRows(samples)
        return
    for column in range(samples[0].c):
        part = slice(column, column + 1)
        yield JacobianRows([s.select(slice(None), part) for s in samples])
