r"""Define Kronecker factors: the structure "kron".

The block of a weight is $G_k \otimes A_k / \text{count}$, with sums over samples and shared uses
("expand") or of their sums and means over shared uses ("reduce", Eschenhagen et al. 2023).
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symrazor.curvature.accumulate import Job, Statistics, add
from symrazor.curvature.structures import (
    MAX_DENSE_ENTRIES,
    Cotangents,
    Gradients,
    Structure,
    add_exact_sums,
    add_gradients,
    as_job,
    tensor_block,
)
from symrazor.curvature.tape import Tape, Use, widened
from symrazor.curvature.weight_sharing import Layer
from symrazor.linalg.blocks import Block, Dense, Kron
from symrazor.linalg.factor import Factor

if TYPE_CHECKING:
    from symrazor.curvature.task import CurvatureTask

COLUMNS_PER_JOB = 3
"""Columns of the root per job under "kron": rows of small factors are multiplied together."""
MIN_INPUT_SHARE = 1 / 8
"""Smallest part of the samples that an input factor is computed from (`Method.input_rows`)."""
MAX_COLLECTED_ENTRIES = 2**18
"""Cotangents with at most this many entries are collected before they are multiplied."""


class KroneckerStructure(Structure):
    """Kronecker factors for weights; exact blocks for biases, norm scales and shaping tensors."""

    columns_per_job = COLUMNS_PER_JOB
    runs_in_threads = True
    replayable = True
    supports_weight_precisions = False

    def input_jobs(
        self, task: "CurvatureTask", tape: Tape, keep_graph: bool = False
    ) -> tuple[list[Job], list[Job]]:
        """Return the jobs of the input factors A."""
        by_layer: dict[str, list[Use]] = {}
        for use in tape.uses:
            if use.factored_weight is not None:
                by_layer.setdefault(use.factored_weight, []).append(use)
        first: list[Job] = []
        last: list[Job] = []
        for weight, uses in by_layer.items():
            release = not keep_graph and _input_exceeds_factor(uses)
            sums = partial(_input_sums, task, weight, uses, release, keep_graph)
            (first if release else last).append(as_job(sums, keep_graph))
        return first, last

    def collect(
        self, task: "CurvatureTask", cotangents: Cotangents, keep_graph: bool
    ) -> Statistics:
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
        self, task: "CurvatureTask", sums: Statistics, scale: float, repeats: float
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


def _kronecker_block(task: "CurvatureTask", sums: Statistics, layer: Layer, scale: float) -> Block:
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
    task: "CurvatureTask", uses: list[Use], gs: list[Tensor], formed: list[Tensor]
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


def _sample_step(task: "CurvatureTask", weight: str, uses: Sequence[Use]) -> int:
    """Return k such that every k-th sample of a batch gives enough rows for the input factor."""
    wanted, expected, samples = task.method.input_rows, task.expected, len(uses[0].x)
    if wanted is None or expected is None or task.method.flavour == "reduce":
        return 1
    if any(use.copies > 1 or len(use.x) != samples or use.y_shape[0] != samples for use in uses):
        return 1
    k, _, i = uses[0].form.to_blocks(task.theta[weight].detach()).shape
    rows = sum(use.rows for use in uses) / samples * expected
    share = max(wanted * k * i / rows, MIN_INPUT_SHARE)
    return max(1, min(int(1 / share), samples))


def _input_sums(
    task: "CurvatureTask", weight: str, uses: list[Use], release: bool, keep_graph: bool
) -> Statistics:
    """Return A and its count for one weight, then release the inputs if nothing else needs them."""
    method = task.method
    inputs = [use.input if keep_graph else use.input.detach() for use in uses]
    step = _sample_step(task, weight, uses)
    inputs = [x[::step] for x in inputs]
    if method.flavour == "reduce":
        parts = [use.inputs(x) for use, x in zip(uses, inputs, strict=True)]
        positions = sum(a.shape[1] for a in parts)
        mean = torch.stack([a.sum(1) for a in parts]).sum(0) / positions
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
