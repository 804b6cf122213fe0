"""Compute what one batch contributes to the curvature.

`CurvatureTask` runs the model on a batch, computes the output Hessian, and returns the remaining
work as jobs. Their sums (`BatchSums`) are added up over all batches (`Total`). A scheduler decides
how batches and jobs are computed: one after the other (`SerialScheduler`), in threads
(`ThreadedScheduler`), by replayed CUDA graphs (`cuda_replay.GraphReplayScheduler`), or in several
processes (`process_sums.ProcessScheduler`, around one of the others).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import (
    ambient_autocast,
    autocast,
    iter_in_threads,
    iter_sequentially,
)
from symrazor.core.errors import DivergenceError
from symrazor.core.likelihood import Likelihood
from symrazor.core.parameters import weights
from symrazor.curvature.operations import record
from symrazor.curvature.weight_sharing import Layer, Tape
from symrazor.data.batches import Input, NumberedBatch, call, check_inputs, map_tensors
from symrazor.linalg.factor import Factor
from symrazor.linalg.jacobian_rows import JacobianRows

if TYPE_CHECKING:
    from symrazor.curvature.estimate import Method
    from symrazor.curvature.structures import Bases, Structure

DEFAULT_MEMORY = 1.0
"""Default of `CurvatureTask.memory`, in GiB."""
ROOT_COPIES = 4
"""Arrays of the size of a root that exist at a time while it is computed."""

Key = tuple[str, str]
"""Name of a tensor, and the kind of sum: "A", "G", "count", "H", "h", or "J" for rows."""
Statistic = Tensor | Factor | JacobianRows
Statistics = dict[Key, Statistic]


@dataclass
class BatchSums:
    """Contribution of one or several batches: log likelihood, number of samples and sums."""

    log_likelihood: Tensor
    n: int
    sums: Statistics

    def absorb(self, other: "BatchSums") -> "BatchSums":
        """Return the sum of both, in the memory of this one; neither may be used afterwards."""
        return BatchSums(
            self.log_likelihood + other.log_likelihood,
            self.n + other.n,
            absorb(self.sums, other.sums),
        )


Job = Callable[[], BatchSums]
Contributions = Generator[BatchSums, None, None]


class Total:
    """Running sum of contributions.

    If the number of samples in all batches is `expected`, factors that will become matrices are
    multiplied after the first batch, and no rows wait for later batches.
    """

    def __init__(self, expected: int | None = None) -> None:
        self.expected = expected
        self.value: BatchSums | None = None
        self._batches = 0

    def add(self, contribution: BatchSums) -> None:
        """Add a contribution, which may not be used afterwards."""
        # Several contributions may belong to one batch; only the first of them has n > 0.
        self._batches += contribution.n > 0
        if contribution.n and self._batches == 2:
            self.prepare_for_more()
        self.value = contribution if self.value is None else self.value.absorb(contribution)

    def prepare_for_more(self) -> None:
        """Switch factors to matrix form now if the expected batches would force it anyway."""
        if self.value is not None and self.expected is not None:
            n_batches = self.expected / self.value.n
            map_factors(self.value.sums, methodcaller("prepared_for", n_batches))


def add(sums: Statistics, key: Key, value: Statistic) -> None:
    """Add a value to the sum of a key, or start the sum."""
    sums[key] = sums[key] + value if key in sums else value  # type: ignore[operator]


def map_factors(sums: Statistics, change: Callable[[Factor], Factor]) -> None:
    """Replace every factor in place; keys that share one factor keep sharing one."""
    factors = {id(value): value for value in sums.values() if isinstance(value, Factor)}
    changed = {number: change(factor) for number, factor in factors.items()}
    for key, value in sums.items():
        if isinstance(value, Factor):
            sums[key] = changed[id(value)]


def absorb(left: Statistics, right: Statistics) -> Statistics:
    """Add statistics key by key; keys that share one factor keep sharing one."""
    total = {**left, **right}
    users = Counter(map(id, left.values()))
    pairs: dict[tuple[int, int], list[Key]] = {}
    for key, value in right.items():
        if key in left:
            pairs.setdefault((id(left[key]), id(value)), []).append(key)
    for (left_id, _), keys in pairs.items():
        a, b = left[keys[0]], right[keys[0]]
        if isinstance(a, Factor) and isinstance(b, Factor) and users[left_id] == len(keys):
            result: Statistic = a.absorb(b)
        else:  # another key still needs the left value unchanged
            result = a + b  # type: ignore[operator]
        total |= dict.fromkeys(keys, result)
    return total


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
    method: "Method"
    generator: torch.Generator | None = None
    pieces: int = 1
    bases: "Bases | None" = None
    labels: Tensor | None = None
    memory: float = DEFAULT_MEMORY
    expected: int | None = None
    precisions: Mapping[str, torch.dtype] | None = None

    @property
    def structure(self) -> "Structure":
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

    def jobs_by_batch(self, keep_graph: bool) -> Callable[[NumberedBatch], list[Job]]:
        """Return the function that runs the model on a batch and returns the remaining jobs."""
        task_of = self.by_batch()
        channels_last: bool | None = None  # decided on the first batch

        def jobs(batch: NumberedBatch) -> list[Job]:
            nonlocal channels_last
            x = batch.x
            if channels_last is None:
                channels_last = not keep_graph and _accepts_channels_last(self, x)
            if channels_last and isinstance(x, Tensor):
                x = x.contiguous(memory_format=torch.channels_last)
            return task_of(batch.number).jobs(x, batch.y, batch.name, keep_graph)

        return jobs

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


STRUCTURES: dict[str, "Structure"] = {}
"""Structures by the name that users give as `structure=`."""


def register_structure(name: str, structure: "Structure") -> None:
    """Make a structure available as `structure=name`."""
    if name in STRUCTURES:
        raise ValueError(f"A curvature structure named {name!r} exists already: choose another.")
    STRUCTURES[name] = structure


def _check_outputs(f: Tensor, batch_name: str) -> None:
    if not bool(torch.isfinite(f).all()):
        bad = int((~torch.isfinite(f)).flatten(1).any(1).nonzero()[0])
        raise DivergenceError(
            f"The model outputs of sample {bad} of {batch_name} are not finite: "
            f"{f[bad].tolist()}. The weights have probably diverged: lower the learning rate."
        )


def _accepts_channels_last(task: CurvatureTask, x: Input) -> bool:
    """Return whether a model convolves images on a CPU, faster in that layout, and accepts it."""
    convolves = any(isinstance(layer.module, nn.Conv2d) for layer in task.layers)
    if not (convolves and isinstance(x, Tensor) and x.dim() == 4 and x.device.type == "cpu"):
        return False
    with suppress(RuntimeError), torch.no_grad():  # view() does not accept every memory layout
        call(task.model, x[:2].contiguous(memory_format=torch.channels_last))
        return True
    return False


class Scheduler(ABC):
    """Compute the contributions of batches; subclasses differ in speed only."""

    @abstractmethod
    def contributions(self, batches: Iterable[NumberedBatch], total: Total) -> Contributions:
        """Yield the contributions of all batches, which are read lazily, in order.

        The caller adds each contribution to `total` before it asks for the next. Only graph replay
        uses `total`: replayed batches are added to its sums in place.
        """

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context in which an error is passed on to all other processes."""
        return nullcontext()

    def reduce(self, local: BatchSums | None) -> BatchSums:
        """Return the sums of all processes; `local` is None for a process without batches."""
        if local is None:
            raise ValueError("The loader is empty: at least one batch is needed.")
        return local


@dataclass(frozen=True)
class SerialScheduler(Scheduler):
    """Run the jobs of every batch, which `jobs` returns after a forward pass, one by one."""

    jobs: Callable[[NumberedBatch], list[Job]]

    def contributions(self, batches: Iterable[NumberedBatch], total: Total) -> Contributions:
        """Yield the contributions of all batches, in order."""
        yield from iter_sequentially(self._all_jobs(batches))

    def _all_jobs(self, batches: Iterable[NumberedBatch]) -> Iterator[Job]:
        for batch in batches:
            jobs = self.jobs(batch)
            del batch
            while jobs:
                yield jobs.pop(0)  # a job holds activations: no reference may outlive it


class ThreadedScheduler(SerialScheduler):
    """Run the jobs in CPU threads; forward passes stay in the calling thread."""

    def contributions(self, batches: Iterable[NumberedBatch], total: Total) -> Contributions:
        """Yield the contributions of all batches, in order."""
        yield from iter_in_threads(self._all_jobs(batches))
