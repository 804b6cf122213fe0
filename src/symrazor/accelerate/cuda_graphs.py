"""One training step as a CUDA graph: recorded once, then replayed without a word from Python.

Small networks on a large GPU wait for kernels to be launched, not for kernels to run. A graph holds
the whole step (forward, backward, optimiser, prior) with its addresses, so that the next one costs
one launch. Shapes are fixed, and whatever changes between steps lives in tensors that are written
in place: the batch, the learning rate, the precisions.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from symrazor.accelerate.device import second_stream

log = logging.getLogger("symrazor")

WARM_UP = 3
"""Steps taken one kernel at a time before the recording: libraries choose their algorithms."""

SHAPES = 2
"""Shapes of batches that are recorded."""

Step = Callable[[Tensor, Tensor], Tensor]
Shapes = tuple[torch.Size, torch.Size]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For a recording: an older graph that the garbage collector came across would spoil it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, device: torch.device, memory: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """Record what is done inside.

    Graphs of earlier trainings that nobody holds any more are freed before.

    Args:
        graph: what is recorded.
        device: where.
        memory: a graph whose memory is used again; the two are never replayed at once.
    """
    gc.collect()
    pool, stream = None if memory is None else memory.pool(), second_stream(device)
    with no_garbage_collection(), torch.cuda.graph(graph, pool, stream):
        yield


class Recorded:
    """A step, recorded for batches like (x, y) and not taken yet; see `GraphedStep`."""

    def __init__(
        self, step: Step, x: Tensor, y: Tensor, memory: torch.cuda.CUDAGraph | None
    ) -> None:
        """Record it."""
        self.x, self.y, self.graph = x.clone(), y.clone(), torch.cuda.CUDAGraph()
        with recording(self.graph, x.device, memory):
            self.result = step(self.x, self.y)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Take it on other data."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.result.clone()


class GraphedStep:
    """A step (x, y) -> statistic, replayed as a graph for the batches of an epoch.

    These have at most two shapes: the last one may be smaller. Batches of any other are stepped
    kernel by kernel, and so are all where a step cannot be recorded.

    Args:
        step: trains on one batch and returns a tensor; must leave gradients at None before it
            computes them. One that looks at values on the host is not recorded.

    Attributes:
        recorded: by the shapes of x and y.
        most: how many of them are recorded at most.
    """

    def __init__(self, step: Step) -> None:
        """Record nothing yet."""
        self.step = step
        self.recorded: dict[Shapes, Recorded] = {}
        self.taken: Counter[Shapes] = Counter()
        self.most = SHAPES

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch."""
        shapes = x.shape, y.shape
        if shapes not in self.recorded and len(self.recorded) < self.most:
            self.taken[shapes] += 1
            if self.taken[shapes] > WARM_UP:
                self._record(x, y)
        found = self.recorded.get(shapes)
        return self._aside(x, y) if found is None else found(x, y)

    def _record(self, x: Tensor, y: Tensor) -> None:
        """Record a step on batches like these, if it can be; nothing has been computed if not."""
        memory = next((other.graph for other in self.recorded.values()), None)
        try:
            self.recorded[x.shape, y.shape] = Recorded(self.step, x, y, memory)
        except RuntimeError as error:
            self.most = 0
            log.warning(
                "training steps of this model are launched kernel by kernel, which is slower: they "
                "cannot be recorded as a CUDA graph (%s); does its forward pass look at values on "
                "the host, or copy constants from there?",
                str(error).splitlines()[0],
            )

    def _aside(self, x: Tensor, y: Tensor) -> Tensor:
        """Step on the stream of the recording."""
        stream = second_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self.step(x, y)
        torch.cuda.current_stream().wait_stream(stream)
        return result


class GraphedCall:
    """A step without arguments, replayed as a graph: what changes lives in tensors.

    Args:
        step: must not look at values on the host, and must leave gradients at None before it
            computes them.
        generators: of the random numbers that it draws, on the device.
    """

    def __init__(
        self, step: Callable[[], object], generators: Sequence[torch.Generator] = ()
    ) -> None:
        """Record nothing yet."""
        self.step, self.generators = step, generators
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken = 0

    def __call__(self) -> None:
        """Take one step."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.taken += 1
        device = torch.device("cuda", torch.cuda.current_device())
        if self.taken <= WARM_UP:
            stream = second_stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with recording(graph, device):
            self.step()
        self.graph = graph
        graph.replay()
