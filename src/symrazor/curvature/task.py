"""Describe a curvature estimate without its data, and compute what one batch contributes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from symrazor.core.errors import DivergenceError
from symrazor.core.likelihood import Likelihood, Probe
from symrazor.core.parameters import weights
from symrazor.curvature.accumulate import BatchSums, Job, Total
from symrazor.curvature.fast_backward import FastBackward
from symrazor.curvature.structures import STRUCTURES, Structure
from symrazor.curvature.tape import Tape, record
from symrazor.curvature.weight_sharing import Layer
from symrazor.data import check_batch
from symrazor.data.batches import Input, map_tensors


@dataclass(frozen=True)
class Method:
    """How curvature is computed.

    Args:
        structure: "kron", "diag", "block" (dense per tensor), "full", or a name given to
            `register_structure`.
        estimator: "exact" (GGN, all outputs), "mc" (random probes of the GGN) or "empirical"
            (gradients at the true labels; cheap, but not the curvature: for comparison).
        samples: probes per sample for "mc".
        probe: "spectral" or "label", see `Likelihood.sampled_root`.
        flavour: how "kron" treats the shared index s: "expand" or "reduce".
        blocks: whether under "kron" each block k has its "own" output factor, or all have the
            "averaged" one; the latter is ELLA's form for factored layers, and less accurate.
        copies: whether "kron" treats copies over which a model averages as further positions
            ("expand"), or averages inputs and sums cotangents over them ("reduce").
    """

    structure: str = "kron"
    estimator: Literal["exact", "mc", "empirical"] = "exact"
    samples: int = 1
    probe: Probe = "spectral"
    flavour: Literal["expand", "reduce"] = "expand"
    blocks: Literal["own", "averaged"] = "own"
    copies: Literal["reduce", "expand"] = "reduce"

    def __post_init__(self) -> None:
        """Check every field."""
        for name, allowed in (
            ("structure", tuple(STRUCTURES)),
            ("estimator", ("exact", "mc", "empirical")),
            ("probe", ("spectral", "label")),
            ("flavour", ("expand", "reduce")),
            ("blocks", ("own", "averaged")),
            ("copies", ("reduce", "expand")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}.")


@dataclass(frozen=True)
class CurvatureTask:
    """Everything but the data.

    Args:
        model: the network.
        layers: its layers, see `coverage.layers`.
        likelihood: likelihood of the outputs.
        method: structure and estimator.
        generator: randomness of the "mc" estimator.
        pieces: each batch is processed in at most this many parts.
    """

    model: nn.Module
    layers: Sequence[Layer]
    likelihood: Likelihood
    method: Method
    generator: torch.Generator | None = None
    pieces: int = 1

    @property
    def structure(self) -> Structure:
        """The structure of the blocks."""
        return STRUCTURES[self.method.structure]

    @property
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
        """Machine epsilon of the weights' dtype."""
        return torch.finfo(next(iter(self.theta.values())).dtype).eps

    def by_batch(self) -> "Callable[[int], CurvatureTask]":
        """Return the task of each batch, by its number, for one pass over the data.

        Each batch draws its probes from its own generator, so that they do not depend on the
        process that works on it.
        """
        if self.generator is None or self.method.estimator != "mc":
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
        log_likelihood, roots = self.evaluate_outputs(tape.f, y, batch_name)
        if not keep_graph:
            log_likelihood, roots = log_likelihood.detach(), roots.detach()
        fit = BatchSums(log_likelihood, len(y), {})
        return [lambda: fit, *self.structure.jobs(self, tape, roots, keep_graph)]

    def forward(self, x: Input, keep_graph: bool = False) -> Tape:
        """Run the model and record its layers, so that cotangents can be computed."""
        if keep_graph:
            return record(self.model, self.layers, x)
        with FastBackward():
            return record(self.model, self.layers, x)

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
                return self.likelihood.hessian_root(f)
            case "mc":
                return self.likelihood.sampled_root(
                    f, self.method.samples, self.generator, self.method.probe
                )
            case _:
                return self.likelihood.residual(f, y).unsqueeze(0)


def check_inputs(x: Input, y: Tensor, batch_name: str) -> None:
    """Check every tensor of a batch; raise ValueError for unusable data."""
    map_tensors(x, lambda part: check_batch(part, y, batch_name))


def _check_outputs(f: Tensor, batch_name: str) -> None:
    if not bool(torch.isfinite(f).all()):
        bad = int((~torch.isfinite(f)).flatten(1).any(1).nonzero()[0])
        raise DivergenceError(
            f"The model outputs of sample {bad} of {batch_name} are not finite: "
            f"{f[bad].tolist()}. The weights have probably diverged: lower the learning rate."
        )
