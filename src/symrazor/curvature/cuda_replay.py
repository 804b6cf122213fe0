"""Sums over many batches on a GPU: three CUDA graphs, recorded once for a model, then replayed.

A batch is six hundred small kernels, and a GPU waits for their launches for longer than it works.
After a few batches, when libraries have chosen their algorithms and factors have become matrices
(after one, where both are known to come), one is recorded: its forward pass; the sums over inputs;
the backward pass with the sums over cotangents. Sums are added to where they are.

Outputs have to be looked at and probes drawn before there is a backward pass: on the stream of the
caller, kernel by kernel as ever, while the stream of the recordings is at the sums over inputs.
The next batch is read there, too, during the backward pass of this one. What cannot be recorded (a
model that looks at values on the host, batches of another shape) goes on kernel by kernel.

The last recording of a GPU is kept, with its sums, for the model's next estimate, which begins by
computing one batch kernel by kernel: if weights are where they were, and layers are called as they
were and come to the same outputs, the recording still holds. The sums are lent to the caller: as
long as one of their factors lives, their memory is not used again, and a new recording is made.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import methodcaller
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from symrazor.accelerate.cuda_graphs import pause_garbage_collection
from symrazor.accelerate.devices import iter_sequentially, side_stream
from symrazor.curvature.accumulate import Batch, Key, Statistics, Task, settle
from symrazor.curvature.tape import Input, Tape, map_tensors
from symrazor.curvature.task import CurvatureTask, check_inputs
from symrazor.linalg.factor import Factor, Symmetric

log = logging.getLogger("symrazor")

EAGER = 3
"""Batches before the recording, at least; one, where a batch of this shape was recorded before."""
_recorded_shapes: WeakKeyDictionary[nn.Module, set[torch.Size]] = WeakKeyDictionary()


def summed(
    source: CurvatureTask,
    batches: Iterable[tuple[int, Input, Tensor]],
    device: torch.device,
    expected: int | None = None,
) -> Batch | None:
    """The sums over numbered batches, worked on in turn; None for no batch.

    Args:
        source: of all batches.
        batches: with their numbers.
        device: of the model.
        expected: how many data they have, where that is known.
    """
    with _beside(device) as caller:
        total = _summed(source, iter(batches), expected, caller)
        if total is not None:
            settle(total.sums)
        return total


def _next(
    batches: Iterator[tuple[int, Input, Tensor]], reader: torch.cuda.Stream | None
) -> tuple[int, Input, Tensor] | None:
    """The next batch, made on the stream of the reader, if given, for the current one."""
    if reader is None:
        return next(batches, None)
    with torch.cuda.stream(reader):
        batch = next(batches, None)
    here = torch.cuda.current_stream(reader.device)
    here.wait_stream(reader)
    if batch is not None:
        _used_on(here, *batch[1:])
    return batch


def _used_on(stream: torch.cuda.Stream, *parts: Input) -> None:
    """Say so of what was made on another stream: its memory is not to be used again too soon."""
    for part in parts:
        map_tensors(part, lambda t: t.record_stream(stream) if t.is_cuda else None)


def _summed(
    source: CurvatureTask,
    batches: Iterator[tuple[int, Input, Tensor]],
    expected: int | None,
    caller: torch.cuda.Stream | None = None,
) -> Batch | None:
    """See `summed`; nothing is recorded without the stream of a caller."""
    of_batch = source.passes()
    total: Batch | None = None
    kept = _last.of(source.model)
    replay: Replay | None = None
    eager, tried = 0, False
    while (batch := _next(batches, None if replay is None else caller)) is not None:
        number, x, y = batch
        del batch
        where = f"batch {number}"
        if kept is not None and total is None and kept.holds(of_batch(number), x):
            total, replay, tried = kept.empty(), kept, True
        due = not tried and eager >= _batches_before(source.model, x)
        if total is not None and due and ready(source, total, x):
            replay, tried = _recorded(of_batch(number), total, x, y, where), True
        if total is not None and replay is not None and replay.fits(x):
            assert caller is not None
            replay.add(of_batch(number), total, (x, y), caller, where)
            continue
        replay = None
        tasks = of_batch(number).tasks(x, y, where)
        del x, y
        for part in iter_sequentially(tasks.pop(0) for _ in range(len(tasks))):
            total = part if total is None else total.absorb(part)
        eager += 1
        if eager == 1 and total is not None and expected is not None:
            settle(total.sums, methodcaller("prepared_for", expected / total.n))
    return total


def _batches_before(model: nn.Module, x: Input) -> int:
    """How many come before one like x is recorded."""
    known = isinstance(x, Tensor) and x.shape in _recorded_shapes.get(model, ())
    return 1 if known else EAGER


def ready(source: CurvatureTask, total: Batch, x: Input) -> bool:
    """Whether all that a batch adds can be added in place, on a GPU."""
    if not isinstance(x, Tensor) or not x.is_cuda or source.method.structure != "kron":
        return False
    return all(
        value.total is not None and value.total.mutable and not value.parts
        if isinstance(value, Factor)
        else value.device.type == "cpu"
        for value in total.sums.values()
    )


class Replay:
    """One batch, recorded, and the sums that it is added to.

    Args:
        source: of this batch.
        total: what batches are added to; its factors have to stay where they are.
        x: of this batch, like x of all others.
        y: its labels.
        where: its name in an error.

    Raises:
        RuntimeError: it cannot be recorded; nothing has been added.
    """

    def __init__(
        self, source: CurvatureTask, total: Batch, x: Tensor, y: Tensor, where: str
    ) -> None:
        """Record all graphs; the last needs to know how many columns of the root there are."""
        check_inputs(x, y, where)
        self.x, self.counts = x.clone(), dict[Key, Tensor]()
        self.forward, self.inputs, self.backward = (torch.cuda.CUDAGraph() for _ in range(3))
        with _recording(self.forward, _pool(x.device).pool()):
            tape = source.forward(self.x)
        self.f, self.premises = tape.f.detach(), _premises(source, tape)
        self.forward.replay()
        self.roots = source.evaluate_outputs(self.f, y, where)[1].clone()
        first, last = source.of_inputs(tape)
        self._record(self.inputs, [*first, *last], total)
        self._record(self.backward, source.of_outputs(tape, self.roots), total)
        self.panels = {key: _panels(value) for key, value in total.sums.items()}
        self._lend(total.sums)

    def _record(self, graph: torch.cuda.CUDAGraph, tasks: list[Task], total: Batch) -> None:
        """Tasks that add to the sums, each let go when it is done."""
        with _recording(graph, self.forward.pool()):
            for part in iter_sequentially(tasks.pop(0) for _ in range(len(tasks))):
                add_in_place(total.sums, part.sums, self.counts)

    def _lend(self, sums: Statistics) -> None:
        """Note that the memory of the sums is in use as long as a factor in it lives."""
        loan = _Loan()
        self.loan = ref(loan)
        for value in sums.values():
            if isinstance(value, Factor) and value.total is not None:
                value.total.loan = loan

    def fits(self, x: Input) -> bool:
        """Whether a batch is like the one that was recorded."""
        return isinstance(x, Tensor) and x.shape == self.x.shape and x.dtype == self.x.dtype

    def holds(self, source: CurvatureTask, x: Input) -> bool:
        """Whether the sums are free, and this batch, kernel by kernel, is computed as recorded."""
        if self.loan() is not None or not self.fits(x):
            return False
        assert isinstance(x, Tensor)
        tape = source.forward(x)
        f, premises = tape.f.detach(), _premises(source, tape)
        del tape
        if premises != self.premises:
            return False
        self.x.copy_(x)
        self.forward.replay()
        most = 100 * torch.finfo(f.dtype).eps * f.abs().max()
        return bool(((self.f - f).abs() <= most).all())

    def empty(self) -> Batch:
        """Sums over no data, to be added to; two keys of one factor stay two keys of one factor."""
        sums: Statistics = {}
        made: dict[int, Factor] = {}
        for key, panels in self.panels.items():
            if not panels:
                sums[key] = torch.zeros((), dtype=torch.float64)
                continue
            place = panels[0].data_ptr()
            if place not in made:
                torch._foreach_zero_(panels)
                made[place] = Factor([], Symmetric(panels))
            sums[key] = made[place]
        self._lend(sums)
        return Batch(torch.zeros((), dtype=torch.float64, device=self.x.device), 0, sums)

    def add(
        self,
        source: CurvatureTask,
        total: Batch,
        batch: tuple[Input, Tensor],
        caller: torch.cuda.Stream,
        where: str,
    ) -> None:
        """Add a batch to the sums, on the current stream; look at it on the caller's.

        The first one was made on the current stream, but whoever compares or records has waited.
        """
        (x, y), here = batch, torch.cuda.current_stream(self.x.device)
        assert isinstance(x, Tensor)
        with torch.cuda.stream(caller):
            check_inputs(x, y, where)
        self.x.copy_(x)
        self.forward.replay()
        caller.wait_stream(here)
        self.inputs.replay()
        with torch.cuda.stream(caller):
            log_likelihood, roots = source.evaluate_outputs(self.f, y, where)
        here.wait_stream(caller)
        _used_on(here, log_likelihood, roots)
        self.roots.copy_(roots)
        self.backward.replay()
        total.log_likelihood, total.n = total.log_likelihood + log_likelihood, total.n + len(y)
        for key, count in self.counts.items():
            value = total.sums[key]
            assert isinstance(value, Tensor)
            total.sums[key] = value + count


class _Loan:
    """Held by factors whose memory is that of a recording."""


def _panels(value: Tensor | Factor) -> list[Tensor]:
    """Where a factor is; nowhere for a number on the host."""
    return value.total.panels if isinstance(value, Factor) and value.total is not None else []


def _premises(source: CurvatureTask, tape: Tape) -> tuple[object, ...]:
    """What a recording depends on beside the values of weights and data: where, which, how."""
    model = source.model
    places = [(t.data_ptr(), t.shape, t.dtype, t.requires_grad) for t in _state(model)]
    calls = [
        (use.layer.name, use.layer.tensors, use.x.shape, use.y_shape, use.copies)
        for use in tape.uses
    ]
    return source.method, tape.f.shape, tape.f.dtype, places, calls


def _state(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


class _Last:
    """The last recording of each GPU, for as long as its model lives."""

    def __init__(self) -> None:
        """None yet."""
        self.kept: dict[torch.device, tuple[ref[nn.Module], Replay]] = {}

    def of(self, model: nn.Module) -> Replay | None:
        """That of this model, if it is the last one."""
        return next((found for its, found in self.kept.values() if its() is model), None)

    def keep(self, model: nn.Module, replay: Replay) -> None:
        """In place of the one before."""
        device = replay.x.device
        self.kept[device] = ref(model, lambda gone: self._forget(device, gone)), replay

    def drop(self, device: torch.device) -> None:
        """Before a recording: the next one is made in the memory of the last."""
        self.kept.pop(device, None)

    def _forget(self, device: torch.device, gone: object) -> None:
        if device in self.kept and self.kept[device][0] is gone:
            del self.kept[device]


_last = _Last()


def _recorded(
    source: CurvatureTask, total: Batch, x: Input, y: Tensor, where: str
) -> Replay | None:
    """A recording, or None where there can be none."""
    assert isinstance(x, Tensor)
    _last.drop(x.device)
    try:
        found = Replay(source, total, x, y, where)
    except RuntimeError as error:
        log.debug("the sums over batches are not recorded as a graph: %s", error)
        _pool.cache_clear()  # torch takes its memory to be in use
        return None
    _recorded_shapes.setdefault(source.model, set()).add(x.shape)
    _last.keep(source.model, found)
    return found


def add_in_place(total: Statistics, sums: Statistics, counts: dict[Key, Tensor]) -> None:
    """Add factors where they are; numbers on the host, which a graph does not see, are set aside.

    Raises:
        RuntimeError: a factor that is new, or whose rows would have to wait.
    """
    done: set[int] = set()
    for key, value in sums.items():
        own = total.get(key)
        if isinstance(value, Factor) and isinstance(own, Factor):
            if id(value) not in done:
                after = own.absorb(value)
                if after.parts or after.total is not own.total:
                    raise RuntimeError(f"expected to add to {key} in place, got rows that wait")
            done.add(id(value))
        elif isinstance(value, Tensor) and value.device.type == "cpu" and own is not None:
            counts[key] = counts[key] + value if key in counts else value
        else:
            raise RuntimeError(f"expected {key} among the sums, got a new one")


@contextmanager
def _beside(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Work on the stream of the recordings, beside the one of the caller, which waits for it."""
    stream, before = side_stream(device, 0), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield before
    finally:
        before.wait_stream(stream)


@cache
def _pool(device: torch.device) -> torch.cuda.CUDAGraph:
    """A recording of next to nothing, in whose memory all others are made, one after the other.

    Memory of a recording that is gone is not used again before a GPU is full, unless some other
    recording lives in it.
    """
    graph = torch.cuda.CUDAGraph()
    with _recording(graph):
        torch.zeros(1, device=device)
    return graph


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what is launched on the current stream, in the memory of another graph if given."""
    torch.cuda.synchronize()
    with pause_garbage_collection():
        graph.capture_begin(pool, capture_error_mode="thread_local")  # loaders may have threads
        try:
            yield
        finally:
            graph.capture_end()
