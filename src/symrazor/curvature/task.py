"""Define how curvature is computed, and compute what one batch contributes to it.

`Method` holds the options. `CurvatureTask` adds the model and its likelihood. It runs the model on
a batch, computes the output Hessian, and returns the remaining work as jobs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import (
    ambient_autocast,
    autocast,
)
from symrazor.core.errors import DivergenceError
from symrazor.core.likelihood import Likelihood, Probe
from symrazor.core.parameters import weights
from symrazor.core.validation import check_at_least, check_types
from symrazor.curvature.accumulate import (
    BatchSums,
    Job,
    Total,
)
from symrazor.curvature.operations import record
from symrazor.curvature.structures import STRUCTURES, Bases, Structure
from symrazor.curvature.tape import Tape
from symrazor.curvature.weight_sharing import Layer
from symrazor.data.batches import (
    Input,
    check_inputs,
    map_tensors,
)

AUTO = "auto"
"""Structure that a `Razor` chooses by its cost; see `inference.evidence`."""
KERNEL_OPTIONS = {"block": None, "outputs": "joint", "grouping": "order", "scaling": "matrix"}
"""Options of "kernel" and their defaults."""
DEFAULT_MEMORY = 1.0
"""Default of `CurvatureTask.memory`, in GiB."""
ROOT_COPIES = 4
"""Arrays of the size of a root that exist at a time while it is computed."""


@dataclass(frozen=True)
class Method:
    """How curvature is computed.

    Args:
        structure: "kron" (Kronecker factors), "ekfac" (second moments in their eigenbasis), "diag",
            "block" (dense per tensor), "full", "kernel" (full, over samples), a name given to
            `register_structure`, or, for a `Razor`, "auto" (see `inference.evidence`).
        estimator: "exact" (GGN, all outputs), "mc" (random probes of the GGN) or "empirical"
            (gradients at the true labels; cheap, but not the curvature: for comparison).
        samples: probes per sample for "mc".
        probe: "spectral" or "label", see `Likelihood.sampled_root`.
        flavour: how "kron" treats the shared index s: "expand" or "reduce".
        blocks: whether under "kron" each block k has its "own" output factor, or all have the
            "averaged" one; the latter is ELLA's form for factored layers, and less accurate.
        copies: whether "kron" treats copies over which a model averages as further positions
            ("expand"), or averages inputs and sums cotangents over them ("reduce").
        input_rows: rows per feature from which "kron" computes an input factor, without bias, if
            the data have more; None for all rows. They are those of evenly spaced samples of each
            batch (pass the data in random order), at least an eighth. 200 are plenty for
            convolutions, whose positions give millions of rows for a few hundred features.
        block: number of samples in a block for "kernel", which gives a lower bound of the evidence;
            None for all samples together.
        outputs: whether "kernel" treats the outputs of a sample together ("joint"), as
            "independent" (a lower bound), or reads one random output per batch ("sampled", a lower
            bound on average).
        grouping: whether "kernel" makes blocks of consecutive samples ("order") or of samples with
            the same label ("class").
        scaling: how "kernel" scales a subset to all data: its "matrix", or "geometric", the mean of
            two bounds of the log-determinant (see `curvature.kernel`).
    """

    structure: str = "kron"
    estimator: Literal["exact", "mc", "empirical"] = "exact"
    samples: int = 1
    probe: Probe = "spectral"
    flavour: Literal["expand", "reduce"] = "expand"
    blocks: Literal["own", "averaged"] = "own"
    copies: Literal["reduce", "expand"] = "reduce"
    input_rows: int | None = None
    block: int | None = None
    outputs: Literal["joint", "independent", "sampled"] = "joint"
    grouping: Literal["order", "class"] = "order"
    scaling: Literal["matrix", "geometric"] = "matrix"

    def __post_init__(self) -> None:
        check_types(self)
        if self.structure not in (*STRUCTURES, AUTO):
            raise ValueError(
                f"structure must be one of {(*STRUCTURES, AUTO)}, got {self.structure!r}."
            )
        check_at_least(self, 1, "samples", "input_rows", "block")
        changed = [
            name for name, default in KERNEL_OPTIONS.items() if getattr(self, name) != default
        ]
        if changed and self.structure != "kernel":
            raise ValueError(
                f"{changed[0]} has no effect for structure={self.structure!r}, only for 'kernel'."
            )
        if self.scaling == "geometric" and len(changed) > 1:
            raise ValueError(
                f"{changed[0]} has no effect for scaling='geometric', which has one block."
            )

    @property
    def description(self) -> str:
        """The structure in words, as reports name it."""
        words = {
            "full": "full Gauss-Newton matrix",
            "kernel": "full Gauss-Newton matrix",
            "ekfac": "EKFAC, a lower bound",
            "kron": "Kronecker factors",
        }
        if self.scaling == "geometric":
            return "a subset, between two bounds"
        if self.block is not None or self.outputs != "joint" or self.grouping != "order":
            block = "all" if self.block is None else f"{self.block:,}"
            label = " of one class" if self.grouping == "class" else ""
            outputs = "" if self.outputs == "joint" else f", {self.outputs} outputs"
            bound = "a lower bound on average" if self.outputs == "sampled" else "a lower bound"
            return f"blocks of {block} samples{label}{outputs}, {bound}"
        return words.get(self.structure, self.structure)


@dataclass(frozen=True)
class CurvatureTask:
    """Everything that an estimate needs but the data.

    Args:
        model: the network.
        layers: its layers, see `coverage.layers`.
        likelihood: likelihood of the outputs.
        method: structure and estimator.
        generator: randomness of the "mc" estimator.
        pieces: each batch is processed in at most this many parts.
        bases: results of a first pass that a structure needs for its second pass.
        labels: labels of the batch that is processed, if samples are grouped by class.
        memory: largest size in GiB of the roots of the output Hessian; a batch that needs more is
            divided further.
        expected: number of samples that all processes read together, if known.
        precisions: precisions of `torch.autocast` in the forward pass, by type of device; None for
            those that are active.
    """

    model: nn.Module
    layers: Sequence[Layer]
    likelihood: Likelihood
    method: Method
    generator: torch.Generator | None = None
    pieces: int = 1
    bases: Bases | None = None
    labels: Tensor | None = None
    memory: float = DEFAULT_MEMORY
    expected: int | None = None
    precisions: Mapping[str, torch.dtype] | None = None

    @property
    def structure(self) -> Structure:
        """The structure of the blocks."""
        return STRUCTURES[self.method.structure]

    @cached_property
    def theta(self) -> dict[str, nn.Parameter]:
        """Trainable weights by name."""
        return weights(self.model)

    @property
    def tensors(self) -> list[str]:
        """Names of all weight tensors, in the order of the rows of a full curvature matrix."""
        return [name for layer in self.layers for name in layer.tensors]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.theta.values())).device

    @property
    def resolution(self) -> float:
        """Machine epsilon of the sums: that of the weights' dtype, at most that of float32."""
        eps = torch.finfo(next(iter(self.theta.values())).dtype).eps
        return min(eps, torch.finfo(torch.float32).eps)

    def by_batch(self) -> "Callable[[int], CurvatureTask]":
        """Return the task of each batch, by its number, for one pass over the data.

        Each batch draws its probes from its own generator, so that they do not depend on the
        process that works on it.
        """
        is_random = self.method.estimator == "mc" or self.method.outputs == "sampled"
        if self.generator is None or not is_random:
            return lambda number: self
        device = self.generator.device
        base = int(torch.randint(2**62, (), generator=self.generator, device=device))
        return lambda number: replace(
            self, generator=torch.Generator(device).manual_seed(base + number)
        )

    def batch_sums(
        self, x: Input, y: Tensor, batch_name: str, keep_graph: bool = False
    ) -> BatchSums:
        """Return the sums of one batch; `keep_graph` makes them differentiable."""
        total = Total()
        for job in self.jobs(x, y, batch_name, keep_graph):
            total.add(job())
        assert total.value is not None
        return total.value

    def jobs(self, x: Input, y: Tensor, batch_name: str, keep_graph: bool = False) -> list[Job]:
        """Run the model on one batch and return the remaining work as independent jobs."""
        check_inputs(x, y, batch_name)
        tape = self.forward(x, keep_graph)
        samples = self._samples_at_once(tape.f)
        if samples < len(y):
            return self._divided(x, y, batch_name, keep_graph, samples)
        with autocast({}):
            log_likelihood, roots = self.evaluate_outputs(tape.f, y, batch_name)
        if not keep_graph:
            log_likelihood, roots = log_likelihood.detach(), roots.detach()
        fit = BatchSums(log_likelihood, len(y), {})
        task = replace(self, labels=y) if self.method.grouping == "class" else self
        return [lambda: fit, *self.structure.jobs(task, tape, roots, keep_graph)]

    def _samples_at_once(self, f: Tensor) -> int:
        """Return how many samples have roots that fit the memory."""
        memory = self.memory * 2**30 / (ROOT_COPIES * f.element_size())
        if f.numel() * f[0].numel() <= memory or self.method.estimator == "empirical":
            return len(f)  # there are at most as many columns as outputs
        if self.method.estimator == "exact":
            numbers = self.likelihood.n_columns(f) * f[0].numel()
        elif self.method.probe == "spectral":
            numbers = self.likelihood.probe_numbers(f, self.method.samples)
        else:
            numbers = self.method.samples * f[0].numel()
        return max(1, int(memory / numbers))

    def _divided(
        self, x: Input, y: Tensor, batch_name: str, keep_graph: bool, samples: int
    ) -> list[Job]:
        """Return a job for each part of a batch; each has a generator of its own."""
        jobs: list[Job] = []
        for start in range(0, len(y), samples):
            part, task = slice(start, start + samples), self
            if self.generator is not None:
                device = self.generator.device
                seed = int(torch.randint(2**62, (), generator=self.generator, device=device))
                task = replace(self, generator=torch.Generator(device).manual_seed(seed))
            inputs = map_tensors(x, itemgetter(part))
            jobs.append(partial(task.batch_sums, inputs, y[part], batch_name, keep_graph))
        return jobs

    def forward(self, x: Input, keep_graph: bool = False) -> Tape:
        """Run the model and record its layers, so that cotangents can be computed."""
        precisions = ambient_autocast() if self.precisions is None else self.precisions
        with autocast(precisions):
            return record(self.model, self.layers, x, fast_backward=not keep_graph)

    def evaluate_outputs(self, f: Tensor, y: Tensor, batch_name: str) -> tuple[Tensor, Tensor]:
        """Check outputs; return their log likelihood and the columns [c, n, k] of the root."""
        self.likelihood.check(f, y)
        _check_outputs(f, batch_name)
        labels = y.double() if y.is_floating_point() else y
        log_likelihood = -self.likelihood.nll(f.double(), labels).sum()
        return log_likelihood, self._roots(f, y)

    def _roots(self, f: Tensor, y: Tensor) -> Tensor:
        match self.method.estimator:
            case "exact":
                root = self.likelihood.hessian_root(f)
            case "mc":
                root = self.likelihood.sampled_root(
                    f, self.method.samples, self.generator, self.method.probe
                )
            case _:
                return self.likelihood.empirical_root(f, y)
        return self.likelihood.masked_root(root, y)


def _check_outputs(f: Tensor, batch_name: str) -> None:
    if not bool(torch.isfinite(f).all()):
        bad = int((~torch.isfinite(f)).flatten(1).any(1).nonzero()[0])
        raise DivergenceError(
            f"The model outputs of sample {bad} of {batch_name} are not finite: "
            f"{f[bad].tolist()}. The weights have probably diverged: lower the learning rate."
        )
