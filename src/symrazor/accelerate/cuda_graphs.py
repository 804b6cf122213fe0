"""Capture training steps as CUDA graphs, with branches for independent work.

Small networks on a large GPU wait for kernels to be launched, not for kernels to run. A graph holds
the whole step (forward, backward, optimiser, prior) with its addresses, so that the next step costs
one launch. Shapes are fixed, and whatever changes between steps lives in tensors that are written
in place: the batch, the learning rate, the precisions.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from symrazor.accelerate.devices import side_stream

log = logging.getLogger("symrazor")

T = TypeVar("T")

WARM_UP_STEPS = 3
"""Steps launched kernel by kernel before the capture, in which libraries choose algorithms."""

MAX_BATCH_SHAPES = 2
"""Batch shapes that are captured: a full batch, and a smaller last one."""

CAPTURE_STREAM = 0
"""Index of the side stream that captures."""

Graph = torch.cuda.CUDAGraph
Step = Callable[[Tensor, Tensor], Tensor]
Shapes = tuple[torch.Size, torch.Size]


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection: freeing an older graph during a capture would invalidate it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def capture(
    graph: Graph, device: torch.device, share_memory_with: Graph | None = None
) -> Iterator[None]:
    """Capture the kernels launched inside, after freeing graphs that are no longer referenced.

    The memory of `share_memory_with` is reused: never replay both graphs at once.
    """
    gc.collect()
    pool = None if share_memory_with is None else share_memory_with.pool()
    stream = side_stream(device, CAPTURE_STREAM)
    with pause_garbage_collection(), torch.cuda.graph(graph, pool, stream):
        yield


def _run_on_capture_stream(device: torch.device, step: Callable[[], T]) -> T:
    """Run a step on the stream of the capture, so that libraries prepare their state there."""
    stream = side_stream(device, CAPTURE_STREAM)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = step()
    torch.cuda.current_stream().wait_stream(stream)
    return result


class CapturedStep:
    """A step captured for batches of one shape, and not run yet; see `CUDAGraphStep`."""

    def __init__(self, step: Step, x: Tensor, y: Tensor, share_memory_with: Graph | None) -> None:
        self.x, self.y, self.graph = x.clone(), y.clone(), torch.cuda.CUDAGraph()
        with capture(self.graph, x.device, share_memory_with):
            self.result = step(self.x, self.y)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Replay the step on other data."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.result.clone()


class CUDAGraphStep:
    """A step (x, y) -> statistic that is replayed as a CUDA graph.

    It must set gradients to None before it computes them. Batches of more than `max_shapes` shapes
    (0 after a failed capture), and steps that read values on the host, are launched kernel by
    kernel.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.captured: dict[Shapes, CapturedStep] = {}
        self.n_steps: Counter[Shapes] = Counter()
        self.max_shapes = MAX_BATCH_SHAPES

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch."""
        shapes = x.shape, y.shape
        if shapes not in self.captured and len(self.captured) < self.max_shapes:
            self.n_steps[shapes] += 1
            if self.n_steps[shapes] > WARM_UP_STEPS:
                self._try_capture(x, y)
        captured = self.captured.get(shapes)
        if captured is None:
            return _run_on_capture_stream(x.device, lambda: self.step(x, y))
        return captured(x, y)

    def _try_capture(self, x: Tensor, y: Tensor) -> None:
        """Capture a step for batches of these shapes; a failed capture has computed nothing."""
        earlier = next((captured.graph for captured in self.captured.values()), None)
        try:
            self.captured[x.shape, y.shape] = CapturedStep(self.step, x, y, earlier)
        except RuntimeError as error:
            self.max_shapes = 0
            log.warning(
                "Training steps run without a CUDA graph, which is slower: the step could not be "
                "captured (%s). Check whether the model's forward pass reads values on the host or "
                "copies constants from the host.",
                str(error).splitlines()[0],
            )


class CUDAGraphCall:
    """A step without arguments that is replayed as a CUDA graph; its inputs live in tensors.

    It must not read values on the host, and must set gradients to None before it computes them.
    `generators` draw the random numbers of the step on the device.
    """

    def __init__(
        self, step: Callable[[], object], generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.step, self.generators = step, generators
        self.graph: torch.cuda.CUDAGraph | None = None
        self.n_steps = 0

    def __call__(self) -> None:
        """Take one step."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.n_steps += 1
        device = torch.device("cuda", torch.cuda.current_device())
        if self.n_steps <= WARM_UP_STEPS:
            _run_on_capture_stream(device, self.step)
            return
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with capture(graph, device):
            self.step()
        self.graph = graph
        graph.replay()
