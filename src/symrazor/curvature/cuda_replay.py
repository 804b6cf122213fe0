"""Sum over many batches on a GPU by three CUDA graphs, recorded once for a model, then replayed.

A batch is about six hundred small kernels, and launching them takes longer than running them. After
a few batches, when libraries have chosen their algorithms and factors have become matrices (after
one batch if both are known to happen), one batch is recorded: its forward pass; the sums over
inputs; the backward pass with the sums over cotangents. The recorded sums are added in place.

Outputs have to be evaluated and probes drawn before the backward pass. This happens kernel by
kernel on the caller's stream, while the recording's stream computes the sums over inputs. The next
batch is read on the caller's stream, too, during the backward pass of this one. What cannot be
recorded (a model that reads values on the host, batches of another shape) is computed kernel by
kernel.

The last recording of a GPU is kept, with its sums, for the next estimate of the same model. That
estimate computes one batch kernel by kernel first. The recording is valid if weights are at the
same addresses, layers are called in the same way, and the outputs agree. The sums are lent to the
caller: their memory is not reused while one of their factors lives; a new recording is made
instead.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from symrazor.accelerate.cuda_graphs import pause_garbage_collection
from symrazor.accelerate.devices import iter_sequentially, side_stream
from symrazor.accelerate.torch_internals import foreach_zero_
from symrazor.curvature.task import (
    BatchSums,
    Contributions,
    CurvatureTask,
    Job,
    Key,
    Scheduler,
    Statistics,
    Total,
)
from symrazor.curvature.weight_sharing import Tape
from symrazor.data.batches import Input, NumberedBatch, check_inputs, map_tensors
from symrazor.linalg.factor import Factor, Symmetric

log = logging.getLogger("symrazor")

Stream = torch.cuda.Stream

MIN_EAGER_BATCHES = 3
"""Batches before a recording; one is enough if a batch of this shape was recorded before."""
_recorded_shapes: WeakKeyDictionary[nn.Module, set[torch.Size]] = WeakKeyDictionary()


class GraphReplayScheduler(Scheduler):
    """Record one batch of a task on a GPU as CUDA graphs and replay it for all others."""

    def __init__(self, task: CurvatureTask) -> None:
        self.task = task

    def contributions(self, batches: Iterable[NumberedBatch], total: Total) -> Contributions:
        """Yield contributions; replayed batches have added their factors to `total` in place."""
        with _on_side_stream(self.task.device) as caller:
            yield from self.contributions_on(caller, iter(batches), total)

    def contributions_on(
        self, caller: Stream | None, batches: Iterator[NumberedBatch], total: Total
    ) -> Contributions:
        """Yield contributions computed on the current stream; record nothing without a caller."""
        task_of = self.task.by_batch()
        recordings = _last_recordings.get(self.task.model)
        replay: Replay | None = None
        eager_batches, tried = 0, False
        while (batch := _next(batches, None if replay is None else caller)) is not None:
            task = task_of(batch.number)
            if (
                recordings is not None
                and total.value is None
                and recordings.is_valid_for(task, batch.x)
            ):
                total.value, replay, tried = recordings.empty_sums(), recordings, True
            due = not tried and eager_batches >= _batches_before_recording(task.model, batch.x)
            if total.value is not None and due and can_record(task, total.value, batch.x):
                replay, tried = _record(task, total.value, batch), True
            if total.value is not None and replay is not None and replay.fits(batch.x):
                assert caller is not None
                yield replay.add(task, batch, caller)
                continue
            replay = None
            jobs = task.jobs(batch.x, batch.y, batch.name)
            del batch
            yield from iter_sequentially(jobs.pop(0) for _ in range(len(jobs)))
            eager_batches += 1
            if eager_batches == 1:
                total.prepare_for_more()


def _next(batches: Iterator[NumberedBatch], reader: Stream | None) -> NumberedBatch | None:
    """Return the next batch, read on the reader's stream if there is one, for the current one."""
    if reader is None:
        return next(batches, None)
    with torch.cuda.stream(reader):
        batch = next(batches, None)
    current = torch.cuda.current_stream(reader.device)
    current.wait_stream(reader)
    if batch is not None:
        _mark_used_on(current, batch.x, batch.y)
    return batch


def _mark_used_on(stream: Stream, *parts: Input) -> None:
    """Keep the memory of tensors of another stream until this stream has used them."""
    for part in parts:
        map_tensors(part, lambda t: t.record_stream(stream) if t.is_cuda else None)


def _batches_before_recording(model: nn.Module, x: Input) -> int:
    is_recorded = isinstance(x, Tensor) and x.shape in _recorded_shapes.get(model, ())
    return 1 if is_recorded else MIN_EAGER_BATCHES


def can_record(task: CurvatureTask, total: BatchSums, x: Input) -> bool:
    """Return whether all sums of a batch can be added in place, on a GPU."""
    if not isinstance(x, Tensor) or not x.is_cuda or not task.structure.replayable:
        return False
    return all(
        value.total is not None and value.total.mutable and not value.parts
        if isinstance(value, Factor)
        else isinstance(value, Tensor) and value.device.type == "cpu"
        for value in total.sums.values()
    )


class Replay:
    """One recorded batch, and the sums that it is added to, whose factors must not move.

    All replayed batches have the same shape. If the batch cannot be recorded, RuntimeError is
    raised and nothing has been added.
    """

    def __init__(self, task: CurvatureTask, total: BatchSums, batch: NumberedBatch) -> None:
        x, y = batch.x, batch.y
        assert isinstance(x, Tensor)
        check_inputs(x, y, batch.name)
        self.x, self.counts = x.clone(), dict[Key, Tensor]()
        self.forward, self.inputs, self.backward = (torch.cuda.CUDAGraph() for _ in range(3))
        with _recording(self.forward, _memory_pool(x.device).pool()):
            tape = task.forward(self.x)
        self.f, self.premises = tape.f.detach(), _premises(task, tape)
        # The backward graph needs the number of columns of the root: evaluate the outputs once.
        self.forward.replay()
        self.roots = task.evaluate_outputs(self.f, y, batch.name)[1].clone()
        before_roots, after_roots = task.structure.input_jobs(task, tape)
        self._record(self.inputs, [*before_roots, *after_roots], total)
        self._record(self.backward, task.structure.output_jobs(task, tape, self.roots), total)
        # Memory of each factor; none for a number on the host.
        self.panels = {
            key: value.total.panels if isinstance(value, Factor) and value.total else []
            for key, value in total.sums.items()
        }
        self._lend(total.sums)

    def _record(self, graph: torch.cuda.CUDAGraph, jobs: list[Job], total: BatchSums) -> None:
        with _recording(graph, self.forward.pool()):
            for part in iter_sequentially(jobs.pop(0) for _ in range(len(jobs))):
                add_in_place(total.sums, part.sums, self.counts)

    def _lend(self, sums: Statistics) -> None:
        """Mark the memory of the sums as in use as long as one of the factors lives."""
        loan = _Loan()
        self.loan = ref(loan)
        for value in sums.values():
            if isinstance(value, Factor) and value.total is not None:
                value.total.loan = loan

    def fits(self, x: Input) -> bool:
        """Return whether a batch has the recorded shape and dtype."""
        return isinstance(x, Tensor) and x.shape == self.x.shape and x.dtype == self.x.dtype

    def is_valid_for(self, task: CurvatureTask, x: Input) -> bool:
        """Return whether the sums are free and a batch is still computed as it was recorded."""
        if self.loan() is not None or not self.fits(x):
            return False
        assert isinstance(x, Tensor)
        tape = task.forward(x)
        f, premises = tape.f.detach(), _premises(task, tape)
        del tape
        if premises != self.premises:
            return False
        self.x.copy_(x)
        self.forward.replay()
        tolerance = 100 * torch.finfo(f.dtype).eps * f.abs().max()
        return bool(((self.f - f).abs() <= tolerance).all())

    def empty_sums(self) -> BatchSums:
        """Return zero sums in the recorded memory; keys that share a factor keep sharing it."""
        sums: Statistics = {}
        by_address: dict[int, Factor] = {}
        for key, panels in self.panels.items():
            if not panels:
                sums[key] = torch.zeros((), dtype=torch.float64)
                continue
            address = panels[0].data_ptr()
            if address not in by_address:
                foreach_zero_(panels)
                by_address[address] = Factor([], Symmetric(panels))
            sums[key] = by_address[address]
        self._lend(sums)
        return BatchSums(torch.zeros((), dtype=torch.float64, device=self.x.device), 0, sums)

    def add(self, task: CurvatureTask, batch: NumberedBatch, caller: Stream) -> BatchSums:
        """Add the factors of a batch in place and return the rest of its contribution.

        The graphs run on the current stream; outputs are evaluated on the caller's stream.
        """
        x, y = batch.x, batch.y
        assert isinstance(x, Tensor)
        current = torch.cuda.current_stream(self.x.device)
        with torch.cuda.stream(caller):
            check_inputs(x, y, batch.name)
        self.x.copy_(x)
        self.forward.replay()
        caller.wait_stream(current)
        self.inputs.replay()
        with torch.cuda.stream(caller):
            log_likelihood, roots = task.evaluate_outputs(self.f, y, batch.name)
        current.wait_stream(caller)
        _mark_used_on(current, log_likelihood, roots)
        self.roots.copy_(roots)
        self.backward.replay()
        return BatchSums(log_likelihood, len(y), dict(self.counts))


class _Loan:
    """Held by factors whose memory belongs to a recording."""


def _premises(task: CurvatureTask, tape: Tape) -> tuple[object, ...]:
    """Return everything that a recording depends on except the values of weights and data."""
    state = [*task.model.parameters(), *task.model.buffers()]
    addresses = [(t.data_ptr(), t.shape, t.dtype, t.requires_grad) for t in state]
    calls = [
        (use.layer.name, use.layer.tensors, use.x.shape, use.y_shape, use.copies)
        for use in tape.uses
    ]
    return task.method, task.expected, tape.f.shape, tape.f.dtype, addresses, calls


_last_recordings: WeakKeyDictionary[nn.Module, Replay] = WeakKeyDictionary()
"""The last recording of each GPU, by model."""


def _drop_recordings(device: torch.device) -> None:
    """Free the recording of a GPU: the next one is made in its memory."""
    for model, replay in list(_last_recordings.items()):
        if replay.x.device == device:
            del _last_recordings[model]


def _record(task: CurvatureTask, total: BatchSums, batch: NumberedBatch) -> Replay | None:
    """Return a recording of a batch, or None if it cannot be recorded."""
    assert isinstance(batch.x, Tensor)
    _drop_recordings(batch.x.device)
    try:
        replay = Replay(task, total, batch)
    except RuntimeError as error:
        log.debug("The sums over batches cannot be recorded as a CUDA graph: %s", error)
        _memory_pool.cache_clear()  # torch considers its memory to be in use
        return None
    _recorded_shapes.setdefault(task.model, set()).add(batch.x.shape)
    _last_recordings[task.model] = replay
    return replay


def add_in_place(total: Statistics, sums: Statistics, counts: dict[Key, Tensor]) -> None:
    """Add factors in place; collect numbers on the host, which a graph cannot add, in `counts`.

    New keys, and rows that cannot be multiplied yet, raise RuntimeError.
    """
    done: set[int] = set()
    for key, value in sums.items():
        current = total.get(key)
        if isinstance(value, Factor) and isinstance(current, Factor):
            if id(value) not in done:
                after = current.absorb(value)
                if after.parts or after.total is not current.total:
                    raise RuntimeError(f"The sum {key} has pending rows and cannot be in place.")
            done.add(id(value))
        elif isinstance(value, Tensor) and value.device.type == "cpu" and current is not None:
            counts[key] = counts[key] + value if key in counts else value
        else:
            raise RuntimeError(f"The sum {key} is new and cannot be added in place.")


@contextmanager
def _on_side_stream(device: torch.device) -> Iterator[Stream]:
    """Work on the stream of the recordings; yield the caller's stream, which waits for it."""
    stream, caller = side_stream(device, 0), torch.cuda.current_stream(device)
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            yield caller
    finally:
        caller.wait_stream(stream)


@cache
def _memory_pool(device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a nearly empty recording in whose memory all others are made.

    The memory of a deleted recording is not reused before the GPU is full, unless another
    recording still uses the same pool.
    """
    graph = torch.cuda.CUDAGraph()
    with _recording(graph):
        torch.zeros(1, device=device)
    return graph


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record the kernels of the current stream, in the memory pool of another graph if given."""
    torch.cuda.synchronize()
    with pause_garbage_collection():
        # Other threads, such as those of a data loader, may use the GPU meanwhile.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
