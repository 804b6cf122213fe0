"""One training step as a CUDA graph: recorded once, then replayed without a word from Python.

Small networks on a large GPU wait for kernels to be launched, not for kernels to run. A graph holds
the whole step (forward, backward, optimiser, prior) with its addresses, so that the next one costs
one launch. Shapes are fixed, and whatever changes between steps lives in tensors that are written
in place: the batch, the learning rate, the precisions.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from symrazor.machine.device import second_stream

WARM_UP = 3
"""Steps taken one kernel at a time before the recording: libraries choose their algorithms."""

Step = Callable[[Tensor, Tensor], Tensor]


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
def recording(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Record what is done inside.

    Graphs of earlier trainings that nobody holds any more are freed before.
    """
    gc.collect()
    with no_garbage_collection(), torch.cuda.graph(graph, stream=second_stream(device)):
        yield


class GraphedStep:
    """A step (x, y) -> statistic, replayed as a graph for batches of the first one's shape.

    Batches of another shape (the last one of an epoch) are stepped eagerly.

    Args:
        step: trains on one batch and returns a tensor; must not look at values on the host, and
            must leave gradients at None before it computes them.
    """

    def __init__(self, step: Step) -> None:
        """Record nothing yet."""
        self.step = step
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken = 0
        self.x, self.y, self.result = (torch.empty(0) for _ in range(3))

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch."""
        if self.graph is not None and x.shape == self.x.shape and y.shape == self.y.shape:
            self.x.copy_(x)
            self.y.copy_(y)
            self.graph.replay()
            return self.result.clone()
        self.taken += 1
        if self.graph is None and self.taken > WARM_UP:
            self._record(x, y)
            return self(x, y)
        return self._aside(x, y)

    def _aside(self, x: Tensor, y: Tensor) -> Tensor:
        """Step on the stream of the recording."""
        stream = second_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self.step(x, y)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _record(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, x.device):
            self.result = self.step(self.x, self.y)


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
