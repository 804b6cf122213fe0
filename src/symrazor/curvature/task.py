r"""Sums over a batch from which every curvature structure is built.

With $a$ and $g$ in the weight-sharing format and one cotangent $g_c$ per column of the root of the
output Hessian, the exact GGN of a weight is $\sum_{n,c} J_{nc} J_{nc}^\top$ where

$$ J_{nc}[k, o, i] = \sum_s g_c[n, s, k, o]\, a[n, s, k, i] . $$

| key | sum over n (and c) | used by |
|---|---|---|
| A, G | $aa^\top$, $g_cg_c^\top$, also over s; or of the mean / sum over s ("reduce") | Kronecker |
| count | terms in A | Kronecker |
| H | $JJ^\top$ | dense blocks; biases and norm scales under "kron" too |
| h | $J \circ J$ | diagonal |

The Kronecker block is $G_k \otimes A_k / \text{count}$ ("expand" and "reduce" of Eschenhagen et al.
2023). A bias has $a = 1$, so that $J_{nc}[k, o] = \sum_s g_c$ and its block is exact and cheap.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.errors import DivergenceError
from symrazor.core.likelihood import Likelihood, Probe
from symrazor.core.parameters import weights
from symrazor.curvature.accumulate import Batch, Key, Statistics, Task, add, add_batches
from symrazor.curvature.fast_backward import FastBackward
from symrazor.curvature.tape import Input, Tape, Use, map_tensors, record, weight_gradients
from symrazor.curvature.weight_sharing import Layer
from symrazor.data import check_batch
from symrazor.linalg.factor import Factor

FULL: Key = ("", "H")
LARGEST_DENSE = 4096
"""Biases and norm scales with more entries than this get a diagonal block under "kron"."""
COTANGENTS = 3
"""Columns of the root that one task handles: their rows of small factors are multiplied at once."""
SMALL = 2**18
"""Cotangents with at most so many entries are collected before they are multiplied."""


@dataclass(frozen=True)
class Method:
    """How curvature is computed.

    Args:
        structure: "kron", "diag", "block" (dense per tensor) or "full".
        estimator: "exact" (GGN, all outputs), "mc" (random probes of the GGN) or "empirical"
            (gradients at the true labels; cheap, and not the curvature: for comparison).
        samples: probes per datum for "mc".
        probe: "spectral" or "label", see `Likelihood.sampled_root`.
        flavour: how "kron" treats the shared index s: "expand" or "reduce".
        blocks: whether under "kron" each block k has its "own" output factor, or all have the
            "averaged" one; the latter is ELLA's form for factored layers, and less accurate.
        copies: whether "kron" treats copies over which a model averages as further positions
            ("expand"), or averages inputs and sums cotangents over them ("reduce").
    """

    structure: Literal["kron", "diag", "block", "full"] = "kron"
    estimator: Literal["exact", "mc", "empirical"] = "exact"
    samples: int = 1
    probe: Probe = "spectral"
    flavour: Literal["expand", "reduce"] = "expand"
    blocks: Literal["own", "averaged"] = "own"
    copies: Literal["reduce", "expand"] = "reduce"

    def __post_init__(self) -> None:
        """Check every field."""
        for name, allowed in (
            ("structure", ("kron", "diag", "block", "full")),
            ("estimator", ("exact", "mc", "empirical")),
            ("probe", ("spectral", "label")),
            ("flavour", ("expand", "reduce")),
            ("blocks", ("own", "averaged")),
            ("copies", ("reduce", "expand")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} in {allowed}, got {getattr(self, name)!r}")
        if self.samples < 1:
            raise ValueError(f"expected at least 1 sample, got {self.samples}")


@dataclass(frozen=True)
class CurvatureTask:
    """Everything but the data: model, layers, likelihood, method, randomness, pieces of a batch."""

    model: nn.Module
    layers: Sequence[Layer]
    likelihood: Likelihood
    method: Method
    generator: torch.Generator | None = None
    pieces: int = 1

    def passes(self) -> "Callable[[int], CurvatureTask]":
        """For one pass over the data: the source of each batch, by its number.

        Each batch draws its probes from a generator of its own, so that they do not depend on
        which process works on it.
        """
        if self.generator is None or self.method.estimator != "mc":
            return lambda number: self
        place = self.generator.device
        base = int(torch.randint(2**62, (), generator=self.generator, device=place))
        return lambda number: replace(
            self, generator=torch.Generator(place).manual_seed(base + number)
        )

    def batch(self, x: Input, y: Tensor, where: str, keep_graph: bool = False) -> Batch:
        """Statistics of one batch; with `keep_graph` differentiable in the hyperparameters."""
        total = add_batches(task() for task in self.tasks(x, y, where, keep_graph))
        assert total is not None
        return total

    def tasks(self, x: Input, y: Tensor, where: str, keep_graph: bool = False) -> list[Task]:
        """Run the model on one batch; what remains to be done, in independent pieces."""
        check_inputs(x, y, where)
        tape = self.forward(x, keep_graph)
        log_likelihood, roots = self.evaluate_outputs(tape.f, y, where)
        if not keep_graph:
            log_likelihood, roots = log_likelihood.detach(), roots.detach()
        fit = Batch(log_likelihood, len(y), {})
        return [lambda: fit, *self.sums(tape, roots, keep_graph)]

    def forward(self, x: Input, keep_graph: bool = False) -> Tape:
        """Run the model, so that cotangents can be read."""
        if keep_graph:
            return record(self.model, self.layers, x)
        with FastBackward():
            return record(self.model, self.layers, x)

    def evaluate_outputs(self, f: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        """Check outputs; their log likelihood, and the columns of the root [c, n, k] to be used."""
        self.likelihood.check(f, y)
        _check_outputs(f, where)
        log_likelihood = -self.likelihood.nll(f.double(), _as_double(y)).sum()
        return log_likelihood, self._roots(f, y)

    def sums(self, tape: Tape, roots: Tensor, keep_graph: bool = False) -> list[Task]:
        """All sums of a batch whose forward pass is done; to be worked on in this order.

        Inputs that take more memory than the A that they are the rows of come first, and are let
        go; all others come last, when the graph is no longer in memory.
        """
        first, last = self.of_inputs(tape, keep_graph)
        return [*first, *self.of_outputs(tape, roots, keep_graph), *last]

    def of_inputs(self, tape: Tape, keep_graph: bool = False) -> tuple[list[Task], list[Task]]:
        """Sums that need no cotangents: those after which inputs are let go, and all others."""
        first: list[Task] = []
        last: list[Task] = []
        for uses in _by_layer(tape.uses) if self.method.structure == "kron" else ():
            early = not keep_graph and _to_be_let_go(uses)
            task = _task(partial(self._input_sums, uses, early), keep_graph)
            (first if early else last).append(task)
        return first, last

    def of_outputs(self, tape: Tape, roots: Tensor, keep_graph: bool = False) -> list[Task]:
        """Sums that need the cotangents of some columns of the root each."""
        parts = roots.split(COTANGENTS if self.method.structure == "kron" else 1)
        once = len(parts) == 1 and not keep_graph
        return [_task(partial(self._output_sums, tape, some, once), keep_graph) for some in parts]

    def _roots(self, f: Tensor, y: Tensor) -> Tensor:
        match self.method.estimator:
            case "exact":
                return self.likelihood.hessian_root(f)
            case "mc":
                return self.likelihood.sampled_root(
                    f, self.method.samples, self.generator, self.method.probe
                )
            case _:
                return self.likelihood.residual(f, y).unsqueeze(0)

    def _input_sums(self, uses: list[Use], let_go: bool, keep_graph: bool) -> Statistics:
        """A and its count for one layer; nobody needs its inputs after that if they are let go."""
        layer = uses[0].layer
        if layer.weight is None or layer.form.dense:
            return {}
        inputs = [use.seen if keep_graph else use.seen.detach() for use in uses]
        form, short_cut = layer.form, layer.form.input_factor
        if self.method.flavour == "reduce":
            parts = [use.inputs(x) for use, x in zip(uses, inputs, strict=True)]
            positions = sum(a.shape[1] for a in parts)
            mean = torch.stack([a.sum(1) for a in parts]).sum(0) / positions
            factors, count = [Factor.of_rows(mean)], len(mean)
        else:
            reduced = self.method.copies == "reduce"
            if reduced:
                inputs = [use.mean_input(x) for use, x in zip(uses, inputs, strict=True)]
            factors = [
                Factor.of_matrix(short_cut(x)) if short_cut else Factor.of_rows(form.inputs(x))
                for x in inputs
            ]
            count = sum(use.rows // (use.copies if reduced and use.averaged else 1) for use in uses)
        sums: Statistics = {
            (layer.weight, "count"): torch.tensor(float(count), dtype=torch.float64)
        }
        for factor in factors:
            add(sums, (layer.weight, "A"), factor)
        if let_go:
            for use in uses:
                use.release_input()
        return sums

    def _output_sums(self, tape: Tape, roots: Tensor, once: bool, keep_graph: bool) -> Statistics:
        """Everything that needs the cotangents of some columns of the root.

        Nobody differentiates the outputs after the last column if all are done at `once`: the graph
        is then let go on the way.
        """
        sums: Statistics = {}
        gradients: dict[str, list[Tensor]] = {}  # per-datum gradients, one entry per column
        small: dict[str, list[Tensor]] = {}  # rows of G, one entry per column
        same: dict[str, str] = {}  # biases whose H is the G of their weight
        for number, root in enumerate(roots, 1):
            again = not once or number < len(roots)
            cotangents = tape.cotangents(root, create_graph=keep_graph, retain_graph=again)
            paired = [
                (use, g) for use, g in zip(tape.uses, cotangents, strict=True) if g is not None
            ]
            for uses, gs in _group(paired):
                layer = uses[0].layer
                formed = [use.outputs(g) for use, g in zip(uses, gs, strict=True)]
                for name in layer.shaping.values():
                    pairs = zip(uses, gs, strict=True)
                    j = [use.shaped(name, g) for use, g in pairs]
                    gradients.setdefault(name, []).append(torch.stack(j).sum(0))
                if layer.bias is not None and self._one_factor(layer, formed):
                    same[layer.bias] = str(layer.weight)
                elif layer.bias is not None:
                    gradients.setdefault(layer.bias, []).append(_over_uses(formed).flatten(1))
                if layer.weight is None:
                    continue
                if self.method.structure != "kron" or layer.form.dense:
                    xs = [use.seen if keep_graph else use.seen.detach() for use in uses]
                    gradients.setdefault(layer.weight, []).append(
                        weight_gradients(uses, xs, formed)
                    )
                    continue
                for part in self._rows_of_G(uses, gs, formed):
                    flat = part.reshape(-1, *part.shape[-2:])
                    if part.numel() <= SMALL:
                        small.setdefault(layer.weight, []).append(flat)
                    else:
                        add(sums, (layer.weight, "G"), Factor.of_rows(flat))
        for name, parts in small.items():
            add(sums, (name, "G"), Factor(parts))
        self._add_gradients(sums, {name: torch.cat(js) for name, js in gradients.items()})
        for bias, weight in same.items():
            sums[bias, "H"] = sums[weight, "G"]
        return sums

    def _rows_of_G(self, uses: list[Use], gs: list[Tensor], formed: list[Tensor]) -> list[Tensor]:
        """Cotangents as the flavour wants them, [n, ..., k, o] each."""
        if self.method.flavour == "reduce":
            return [_over_uses(formed)]
        if self.method.copies == "expand":
            return formed
        return [use.summed_output(g) for use, g in zip(uses, gs, strict=True)]

    def _one_factor(self, layer: Layer, formed: Sequence[Tensor]) -> bool:
        """Whether the weight is used once per datum, so that G is also the H of the bias."""
        if self.method.structure != "kron" or layer.form.dense or layer.weight is None:
            return False
        positions, blocks, features = formed[0].shape[1:]
        return len(formed) == positions == blocks == 1 and features <= LARGEST_DENSE

    def _add_gradients(self, sums: Statistics, gradients: dict[str, Tensor]) -> None:
        """Per-datum gradients j[(c n), p] of each tensor into whatever the structure needs."""
        if self.method.structure == "full":
            theta, any_j = weights(self.model), next(iter(gradients.values()))
            rows = [  # zeros for a layer that does not act on the outputs: a path that is off
                gradients.get(name, any_j.new_zeros(len(any_j), theta[name].numel()))
                for name in tensors(self.layers)
            ]
            sums[FULL] = Factor.of_rows(torch.cat(rows, 1).unsqueeze(1))
            return
        for name, j in gradients.items():
            if self.method.structure == "diag" or (
                self.method.structure == "kron" and j.shape[1] > LARGEST_DENSE
            ):
                sums[name, "h"] = j.double().square().sum(0)
            else:
                sums[name, "H"] = Factor.of_rows(j.unsqueeze(1))


def _to_be_let_go(uses: Sequence[Use]) -> bool:
    """Whether inputs, as they are, are rows of a smaller A and needed for nothing else."""
    layer, form = uses[0].layer, uses[0].layer.form
    if layer.weight is None or form.weight is None or form.dense:
        return False
    if form.input_factor is not None or layer.shaping:
        return False
    k, _, i = form.to_blocks(getattr(layer.module, form.weight).detach()).shape
    return sum(use.x.nbytes for use in uses) >= 8 * k * i * i


def _over_uses(formed: Sequence[Tensor]) -> Float[Tensor, "n k o"]:
    """Sum over all uses and all positions."""
    total = formed[0].sum(1) if formed[0].shape[1] > 1 else formed[0].squeeze(1)
    for g in formed[1:]:
        total = total + g.sum(1)
    return total


def tensors(layers: Iterable[Layer]) -> list[str]:
    """Names of all weight tensors, in the order of the rows of a full curvature matrix."""
    return [name for layer in layers for name in layer.tensors]


def _task(sums: Callable[[bool], Statistics], keep_graph: bool) -> Task:
    def run() -> Batch:
        with torch.set_grad_enabled(keep_graph):  # a format may use hyperparameters of its own
            return Batch(torch.zeros((), dtype=torch.float64), 0, sums(keep_graph))

    return run


def _by_layer(uses: Iterable[Use]) -> list[list[Use]]:
    groups: dict[str, list[Use]] = {}
    for use in uses:
        groups.setdefault(use.layer.name, []).append(use)
    return list(groups.values())


def _group(paired: Iterable[tuple[Use, Tensor]]) -> list[tuple[list[Use], list[Tensor]]]:
    groups: dict[str, tuple[list[Use], list[Tensor]]] = {}
    for use, g in paired:
        uses, gs = groups.setdefault(use.layer.name, ([], []))
        uses.append(use)
        gs.append(g)
    return list(groups.values())


def _as_double(y: Tensor) -> Tensor:
    return y.double() if y.is_floating_point() else y


def check_inputs(x: Input, y: Tensor, where: str) -> None:
    """Refuse a batch that no model should see."""
    map_tensors(x, lambda part: check_batch(part, y, where))


def _check_outputs(f: Tensor, where: str) -> None:
    if not bool(torch.isfinite(f).all()):
        bad = int((~torch.isfinite(f)).flatten(1).any(1).nonzero()[0])
        raise DivergenceError(
            f"expected finite model outputs, got {f[bad].tolist()} for sample {bad} of {where}; "
            "the weights have probably diverged"
        )
