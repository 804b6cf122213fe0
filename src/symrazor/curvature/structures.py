r"""Define what a structure of the curvature is, and the default one: Kronecker factors.

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

Under "kron" the block of a weight is $G_k \otimes A_k / \text{count}$, with sums over samples and
shared uses ("expand") or of their sums and means over shared uses ("reduce", Eschenhagen et al.
2023). A bias has $a = 1$, so that $J_{nc}[k, o] = \sum_s g_c$ and its block is exact and cheap.

`gradient_structures`, `ekfac` and `kernel` define the other structures. To add one, subclass
`Structure` or `GradientStructure` and call `register_structure`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symrazor.accelerate.devices import autocast
from symrazor.curvature.task import BatchSums, CurvatureTask, Job, Statistics, add
from symrazor.curvature.weight_sharing import Layer, Tape, Use, widened
from symrazor.linalg.blocks import Block, Dense, Diag, Kron
from symrazor.linalg.factor import Factor

if TYPE_CHECKING:
    from symrazor.curvature.estimate import Method

MAX_DENSE_ENTRIES = 4096
"""Under "kron", biases and norm scales with more entries get a diagonal block."""
COLUMNS_PER_JOB = 3
"""Columns of the root per job under "kron": rows of small factors are multiplied together."""
MIN_INPUT_SHARE = 1 / 8
"""Smallest part of the samples that an input factor is computed from (`Method.input_rows`)."""
MAX_COLLECTED_ENTRIES = 2**18
"""Cotangents with at most this many entries are collected before they are multiplied."""

Cotangents = Iterable[tuple[list[Use], list[Tensor]]]
"""Calls of one layer and their cotangents, for every column of the root and every layer."""
Bases = dict[str, Block]
"""Blocks of the first of two passes, by tensor."""
Gradients = dict[str, list[Tensor]]
"""Per-sample gradients [n, p] of each tensor, one entry per column of the root."""


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

    def first_method(self, task: CurvatureTask, expected: int | None) -> "Method":
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
    def collect(self, task: CurvatureTask, cotangents: Cotangents, keep_graph: bool) -> Statistics:
        """Return the sums of one batch over some columns of the root.

        Args:
            task: model, layers and method.
            cotangents: for every column and every layer, the calls of the layer and the gradients
                with respect to their outputs; computed lazily.
            keep_graph: whether the sums are differentiated afterwards.
        """

    def input_jobs(
        self, task: CurvatureTask, tape: Tape, keep_graph: bool = False
    ) -> tuple[list[Job], list[Job]]:
        """Return the jobs that need no cotangents: those that release inputs, and the others."""
        return [], []

    @abstractmethod
    def build(
        self, task: CurvatureTask, sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build the blocks of the whole data set.

        Args:
            task: model, layers and method.
            sums: the sums over all batches.
            scale: factor that scales them to the whole data set, divided by the temperature.
            repeats: size of the whole data set over the number of samples read.
        """

    def jobs(
        self, task: CurvatureTask, tape: Tape, roots: Tensor, keep_graph: bool = False
    ) -> list[Job]:
        """Return all jobs of a batch after its forward pass, to be run in this order.

        Inputs that take more memory than the factor A they are the rows of come first and are
        released. All other inputs come last, when the graph is no longer in memory.
        """
        before_outputs, after_outputs = self.input_jobs(task, tape, keep_graph)
        return [*before_outputs, *self.output_jobs(task, tape, roots, keep_graph), *after_outputs]

    def output_jobs(
        self, task: CurvatureTask, tape: Tape, roots: Tensor, keep_graph: bool = False
    ) -> list[Job]:
        """Return the jobs that need cotangents, each for some columns of the root."""
        portions = roots.split(self.columns_per_job)
        release_graph = len(portions) == 1 and not keep_graph

        def sums(columns: Tensor) -> Statistics:
            cotangents = layer_cotangents(tape, columns, release_graph, keep_graph)
            return self.collect(task, cotangents, keep_graph)

        return [as_job(partial(sums, columns), keep_graph) for columns in portions]


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


def tensor_block(task: CurvatureTask, sums: Statistics, name: str, scale: float) -> Block:
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


class KroneckerStructure(Structure):
    """Kronecker factors for weights; exact blocks for biases, norm scales and shaping tensors."""

    columns_per_job = COLUMNS_PER_JOB
    runs_in_threads = True
    replayable = True
    supports_weight_precisions = False

    def input_jobs(
        self, task: CurvatureTask, tape: Tape, keep_graph: bool = False
    ) -> tuple[list[Job], list[Job]]:
        """Return the jobs of the input factors A."""
        by_layer: dict[str, list[Use]] = {}
        for use in tape.uses:
            if use.factored_weight is not None:
                by_layer.setdefault(use.factored_weight, []).append(use)
        releasing: list[Job] = []
        keeping: list[Job] = []
        for weight, uses in by_layer.items():
            release = not keep_graph and _input_exceeds_factor(uses)
            sums = partial(_input_sums, task, weight, uses, release, keep_graph)
            (releasing if release else keeping).append(as_job(sums, keep_graph))
        return releasing, keeping

    def collect(self, task: CurvatureTask, cotangents: Cotangents, keep_graph: bool) -> Statistics:
        """Return the output factors G, and H or h of all other tensors."""
        sums: Statistics = {}
        gradients: Gradients = {}
        small: dict[str, list[Tensor]] = {}  # rows of G, one entry per column
        shared: dict[str, str] = {}  # biases whose H is the G of their weight
        for uses, gs in cotangents:
            layer, weight = uses[0].layer, uses[0].factored_weight
            formed = [use.outputs(g) for use, g in zip(uses, gs, strict=True)]
            exact = [name for name in layer.tensors if name != weight]
            if weight is not None and layer.bias is not None and _used_once(formed):
                shared[layer.bias] = weight
                exact.remove(layer.bias)
            add_gradients(gradients, uses, gs, formed, exact, keep_graph)
            if weight is None:
                continue
            for rows in _rows_of_G(task, uses, gs, formed):
                flat = rows.reshape(-1, *rows.shape[-2:])
                if rows.numel() <= MAX_COLLECTED_ENTRIES:
                    small.setdefault(weight, []).append(flat)
                else:
                    add(sums, (weight, "G"), Factor.of_rows(flat))
        for name, parts in small.items():
            add(sums, (name, "G"), Factor(parts))
        add_exact_sums(sums, gradients)
        for bias, weight in shared.items():
            sums[bias, "H"] = sums[weight, "G"]
        return sums

    def build(
        self, task: CurvatureTask, sums: Statistics, scale: float, repeats: float
    ) -> list[Block]:
        """Build a Kronecker block per weight and an exact block for every other tensor."""
        blocks: list[Block] = []
        for layer in task.layers:
            for name in layer.tensors:
                if name != layer.factored_weight:
                    _check_format_is_known(sums, name)
                    blocks.append(tensor_block(task, sums, name, scale))
                    continue
                block = _kronecker_block(task, sums, layer, scale)
                bias = blocks[-1] if layer.bias is not None else None
                if isinstance(bias, Dense) and isinstance(block, Kron):
                    _share_spectrum(sums, bias, block, scale)
                blocks.append(block)
        return blocks


def _kronecker_block(task: CurvatureTask, sums: Statistics, layer: Layer, scale: float) -> Block:
    name, form = str(layer.weight), layer.form
    A, G = sums.get((name, "A")), sums.get((name, "G"))
    if not (isinstance(A, Factor) and isinstance(G, Factor)):  # the layer was never used
        return tensor_block(task, sums, name, scale)
    if task.method.blocks == "averaged":
        G = G.averaged()
    count = sums[name, "count"]
    assert isinstance(count, Tensor)
    return Kron(name, A, G, scale / float(count), task.resolution, form.to_blocks, form.from_blocks)


def _check_format_is_known(sums: Statistics, name: str) -> None:
    """Raise ValueError if only other processes have recorded the format of a parameter."""
    if (name, "A") in sums:
        raise ValueError(
            f"The operations of {name} were not recorded in this process, because it read no data. "
            "Give every process at least one batch."
        )


def _share_spectrum(sums: Statistics, bias: Dense, weight: Kron, scale: float) -> None:
    """Reuse the eigenvalues of a weight's G for its bias if both have the same factor."""
    if sums[bias.names[0], "H"] is sums[weight.name, "G"]:
        bias.known_spectrum = lambda: scale * weight.spectrum_G[0]


def _rows_of_G(
    task: CurvatureTask, uses: list[Use], gs: list[Tensor], formed: list[Tensor]
) -> list[Tensor]:
    """Return cotangents as the method's flavour needs them, [n, ..., k, o] each."""
    if task.method.flavour == "reduce":
        return [torch.stack([g.sum(1) for g in formed]).sum(0)]
    if task.method.copies == "expand":
        return formed
    return [use.summed_output(g) for use, g in zip(uses, gs, strict=True)]


def _used_once(formed: Sequence[Tensor]) -> bool:
    """Return whether a weight is used once per sample, so that G is also H of the bias."""
    positions, blocks, features = formed[0].shape[1:]
    return len(formed) == positions == blocks == 1 and features <= MAX_DENSE_ENTRIES


def _input_exceeds_factor(uses: Sequence[Use]) -> bool:
    """Return whether the inputs take more memory than A and are needed for nothing else."""
    layer, form = uses[0].layer, uses[0].layer.form
    if form.weight is None or form.input_factor is not None or layer.shaping:
        return False
    k, _, i = form.to_blocks(getattr(layer.module, form.weight).detach()).shape
    return sum(use.x.nbytes for use in uses) >= 8 * k * i * i


def _sample_step(task: CurvatureTask, weight: str, uses: Sequence[Use]) -> int:
    """Return k such that every k-th sample of a batch gives enough rows for the input factor."""
    input_rows, expected, samples = task.method.input_rows, task.expected, len(uses[0].x)
    if input_rows is None or expected is None or task.method.flavour == "reduce":
        return 1
    if any(use.copies > 1 or len(use.x) != samples or use.y_shape[0] != samples for use in uses):
        return 1
    k, _, i = uses[0].form.to_blocks(task.theta[weight].detach()).shape
    rows = sum(use.rows for use in uses) / samples * expected
    share = max(input_rows * k * i / rows, MIN_INPUT_SHARE)
    return max(1, min(int(1 / share), samples))


def _input_sums(
    task: CurvatureTask, weight: str, uses: list[Use], release: bool, keep_graph: bool
) -> Statistics:
    """Return A and its count for one weight, then release the inputs if nothing else needs them."""
    method = task.method
    inputs = [use.input if keep_graph else use.input.detach() for use in uses]
    step = _sample_step(task, weight, uses)
    inputs = [x[::step] for x in inputs]
    if method.flavour == "reduce":
        inputs_of_uses = [use.inputs(x) for use, x in zip(uses, inputs, strict=True)]
        positions = sum(a.shape[1] for a in inputs_of_uses)
        mean = torch.stack([a.sum(1) for a in inputs_of_uses]).sum(0) / positions
        factors, count = [Factor.of_rows(mean)], len(mean)
    else:
        reduced = method.copies == "reduce"
        if reduced:
            inputs = [use.mean_input(x) for use, x in zip(uses, inputs, strict=True)]
        factors = [
            Factor.of_matrix(use.form.input_factor(widened(x)))
            if use.form.input_factor
            else Factor.of_rows(use.form.inputs(widened(x)))
            for use, x in zip(uses, inputs, strict=True)
        ]
        per_sample = [use.rows // len(use.x) for use in uses]
        count = sum(rows * len(x) for rows, x in zip(per_sample, inputs, strict=True))
    sums: Statistics = {(weight, "count"): torch.tensor(float(count), dtype=torch.float64)}
    for factor in factors:
        add(sums, (weight, "A"), factor)
    if release:
        for use in uses:
            use.release_input()
    return sums
