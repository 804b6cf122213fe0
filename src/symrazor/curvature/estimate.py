r"""Estimate the curvature and the log likelihood of a model on a data set.

The curvature is the generalised Gauss-Newton matrix of the whole data set,
$H = \sum_n J_n^\top \Lambda_n J_n$, in the requested structure. Sums run over batches in float64,
so that batch size and order do not matter beyond rounding. `collect_curvature` is the path from
`Razor.step` to the blocks: one loop over batches that adds their contributions (`task`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import (
    ambient_autocast,
    autocast,
    is_plain,
    keep_freed_memory,
    tf32,
)
from symrazor.accelerate.processes import is_distributed, unwrap, world
from symrazor.core.likelihood import Likelihood, Probe, as_likelihood
from symrazor.core.validation import check_at_least, check_types
from symrazor.curvature.coverage import check_mode, layers, verify
from symrazor.curvature.cuda_replay import GraphReplayScheduler
from symrazor.curvature.process_sums import ProcessScheduler
from symrazor.curvature.structures import Bases
from symrazor.curvature.task import (
    STRUCTURES,
    CurvatureTask,
    Scheduler,
    SerialScheduler,
    Statistics,
    ThreadedScheduler,
    Total,
    map_factors,
)
from symrazor.data.batches import (
    Input,
    Loader,
    RepeatedBatches,
    map_tensors,
    numbered_batches,
)
from symrazor.linalg.blocks import Block, StackedSpectra
from symrazor.linalg.eigen_jobs import solve
from symrazor.linalg.factor import Factor

AUTO = "auto"
"""Structure that a `Razor` chooses by its cost; see `inference.evidence`."""
KERNEL_OPTIONS = {"block": None, "outputs": "joint", "grouping": "order", "scaling": "matrix"}
"""Options of "kernel" and their defaults."""
BASIS_SEED = 0
"""Seed of the probes in the first pass of an exact estimate."""


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


@dataclass
class Curvature:
    """Curvature and log likelihood of a model on a data set.

    Args:
        blocks: one block per tensor (or one for all), scaled to `n_data`.
        log_likelihood: of the whole data set, scaled to `n_data`, divided by the temperature.
        n_data: size of the data set that the figures stand for.
        n_seen: number of samples that were read.
        scale: factor of the sums over the samples read, n_data / n_seen / temperature.
        sums: the statistics from which the blocks were built.
        build: maps statistics to blocks.
        bases: results of the first pass, for structures that need two.
        method: the method that computed it.
        gap: distance in nats to another lower bound of the evidence that was computed, if any.
    """

    blocks: list[Block]
    log_likelihood: Tensor
    n_data: int
    n_seen: int
    scale: float
    sums: Statistics
    build: Callable[[Statistics], list[Block]] = field(repr=False)
    bases: Bases | None = field(default=None, repr=False)
    method: Method = field(default_factory=Method)
    gap: float | None = None

    @cached_property
    def stacked(self) -> StackedSpectra:
        """The blocks, for the log-determinant of all of them."""
        return StackedSpectra(self.blocks)

    def prepare(self) -> "Curvature":
        """Compute all spectra now, in parallel; see `linalg.eigen_jobs`."""
        spectra = [spectrum for block in self.blocks for spectrum in block.prepare()]
        values = iter(solve([job for spectrum in spectra for job in spectrum.jobs]))
        for spectrum in spectra:
            spectrum.store([next(values) for _ in spectrum.jobs])
        return self


def estimate_curvature(
    model: nn.Module,
    likelihood: str | Likelihood,
    loader: Loader,
    method: Method | None = None,
    *,
    n_data: int | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Curvature:
    """Return the curvature of `model` over all batches of `loader`, detached from autograd.

    The model is verified on two samples first (see `coverage.verify`).

    Args:
        model: any module; its trainable weights must belong to registered layers.
        likelihood: a Likelihood or its name.
        loader: an iterable of (x, y) batches, read once; each process reads its own.
        method: structure and estimator; exact Kronecker by default.
        n_data: the figures are scaled by n_data / n_seen; default n_seen.
        temperature: T of the tempered likelihood p^(1/T).
        generator: randomness of the "mc" estimator.
    """
    model = unwrap(model)
    model_layers = layers(model)
    check_mode(model)
    task = CurvatureTask(
        model, model_layers, as_likelihood(likelihood), method or Method(), generator
    )
    data: Loader = _verified(task, loader)
    if iter(loader) is not loader:
        data = RepeatedBatches(partial(_verified, task, loader))
    return collect_curvature(task, data, n_data=n_data, temperature=temperature)


def _verified(task: CurvatureTask, loader: Loader) -> Iterator[tuple[Input, Tensor]]:
    """Yield the batches of a loader; verify the model on the first one."""
    for number, (x, y) in enumerate(loader):
        if number == 0:
            verify(task.model, x)
        yield x, y


def collect_curvature(
    task: CurvatureTask,
    loader: Loader,
    *,
    n_data: int | None = None,
    temperature: float = 1.0,
    keep_graph: bool = False,
    expected: int | None = None,
) -> Curvature:
    """Sum the contributions of all batches and build the blocks; see `estimate_curvature`.

    Args:
        task: model, likelihood and method.
        loader: batches, read once.
        n_data: size of the data set that the figures are scaled to.
        temperature: temperature of the likelihood.
        keep_graph: whether the result is differentiated in the hyperparameters.
        expected: number of samples that all processes read together, if known. Factors can then
            become matrices after the first batch.
    """
    _check_options(n_data, temperature, keep_graph)
    if task.precisions is None:  # only the forward pass is computed in another precision
        task = replace(task, precisions=ambient_autocast())
        is_coarse = bool(task.precisions) or any(
            value.dtype == torch.bfloat16 for value in task.theta.values()
        )
        with autocast({}), tf32(True) if is_coarse else nullcontext():
            return collect_curvature(
                task,
                loader,
                n_data=n_data,
                temperature=temperature,
                keep_graph=keep_graph,
                expected=expected,
            )
    if task.method.structure == AUTO:
        raise ValueError("structure='auto' needs a prior: use a Razor, or name a structure.")
    if task.structure.passes > 1 and task.bases is None:
        task = replace(task, bases=_first_pass(task, loader, n_data, temperature, expected))
    task.structure.check_size(task.theta)
    task = replace(task, expected=expected)
    keep_freed_memory()
    scheduler = choose_scheduler(task, keep_graph)
    total = Total(_expected_locally(task, keep_graph, expected))
    batches = numbered_batches(loader, task.pieces)
    with scheduler.sharing_errors(), closing(scheduler.contributions(batches, total)) as results:
        for result in results:
            total.add(result)
            del result  # its memory is free before the next contribution is computed
    sums = scheduler.reduce(total.value)
    map_factors(sums.sums, Factor.multiplied)  # here, where no precision is reduced

    n_data = n_data or sums.n
    repeats = n_data / sums.n
    scale = repeats / temperature

    def build(statistics: Statistics) -> list[Block]:
        return task.structure.build(task, statistics, scale, repeats)

    log_likelihood = sums.log_likelihood * scale
    return Curvature(
        build(sums.sums),
        log_likelihood,
        n_data,
        sums.n,
        scale,
        sums.sums,
        build,
        task.bases,
        task.method,
    )


def _first_pass(
    task: CurvatureTask,
    loader: Loader,
    n_data: int | None,
    temperature: float,
    expected: int | None,
) -> Bases:
    """Return the blocks of the first pass over the data, by tensor."""
    if iter(loader) is loader:
        raise ValueError(
            f"structure={task.method.structure!r} reads the data twice, but the loader is a "
            "generator, which can be read only once. Pass a list of batches or a DataLoader."
        )
    expected = expected or n_data
    method, generator = task.structure.first_method(task, expected), task.generator
    share = task.structure.first_share(expected)
    if method.estimator != task.method.estimator:  # an exact estimate depends on no other state
        generator = torch.Generator(task.device).manual_seed(BASIS_SEED)
    factors = collect_curvature(
        replace(task, method=method, generator=generator),
        loader if share == 1 else RepeatedBatches(partial(_first_parts, loader, share)),
        n_data=n_data,
        temperature=temperature,
        expected=None if expected is None else math.ceil(share * expected),
    )
    return {name: block for block in factors.blocks for name in block.names}


def _first_parts(loader: Loader, share: float) -> Iterator[tuple[Input, Tensor]]:
    """Yield the first part of every batch."""
    for x, y in loader:
        part = slice(math.ceil(share * len(y)))
        yield map_tensors(x, itemgetter(part)), y[part]


def _check_options(n_data: int | None, temperature: float, keep_graph: bool) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if n_data is not None and n_data < 1:
        raise ValueError(f"n_data must be a positive integer, got {n_data}.")
    if keep_graph and is_distributed():
        raise ValueError(
            f"A differentiable evidence needs one process, but there are {world().size}. Compute "
            "it under symrazor.accelerate.processes.single_process() and pass all the data."
        )


def choose_scheduler(task: CurvatureTask, keep_graph: bool = False) -> Scheduler:
    """Choose how the batches are computed; the result does not depend on it beyond rounding."""
    accelerated = not (keep_graph or is_plain())
    on_cpu = all(w.device.type == "cpu" for w in task.theta.values())
    scheduler: Scheduler
    if accelerated and task.device.type == "cuda":
        scheduler = GraphReplayScheduler(task)
    elif accelerated and on_cpu and task.structure.runs_in_threads:
        scheduler = ThreadedScheduler(task.jobs_by_batch(keep_graph))
    else:
        scheduler = SerialScheduler(task.jobs_by_batch(keep_graph))
    return ProcessScheduler(scheduler, task.device) if is_distributed() else scheduler


def _expected_locally(task: CurvatureTask, keep_graph: bool, expected: int | None) -> int | None:
    """Return the expected number of samples of this process, if factors may switch form early."""
    if expected is None or keep_graph:
        return None
    early = task.device.type == "cuda" or task.structure.runs_in_threads
    return expected // world().size if early else None
