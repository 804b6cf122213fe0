"""Pieces side by side: in order on a CPU; branches of a CUDA graph, which do not interfere."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import symrazor as sr
from symrazor.accelerate.devices import N_STREAMS, run_on_streams
from symrazor.layers.ella import ella_network
from symrazor.training.optimisers import Stepper
from symrazor.training.options import FitConfig

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_results_come_in_order_and_are_differentiable() -> None:
    """More pieces than lanes; none at all."""
    x = torch.arange(3.0, requires_grad=True)
    pieces = [partial(torch.mul, x, float(n)) for n in range(2 * N_STREAMS + 1)]
    result = run_on_streams(pieces, [x])
    assert [float(y.detach()[1]) for y in result] == list(range(2 * N_STREAMS + 1))
    torch.stack(result).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), float(sum(range(2 * N_STREAMS + 1)))))
    assert run_on_streams([], []) == []


@needs_a_gpu
def test_a_recording_has_branches() -> None:
    """Only one: outside of it all is done on the current stream."""
    x = torch.ones(2, device="cuda")

    def where() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    outside = run_on_streams([where] * 6, [x])
    assert set(outside) == {torch.cuda.current_stream().cuda_stream}
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1  # a recording of nothing is warned of
        inside = run_on_streams([where] * 6, [x])
    assert len(set(inside)) == N_STREAMS
    assert inside[:2] == inside[N_STREAMS:]


@contextmanager
def _tried(stepper: Stepper) -> Iterator[None]:
    """Weights and moments are put back at the end."""
    moments = [value for state in stepper.optimiser.state.values() for value in state.values()]
    tensors = [*stepper.theta, *(value for value in moments if isinstance(value, Tensor))]
    before = [value.detach().clone() for value in tensors]
    yield
    with torch.no_grad():
        for value, old in zip(tensors, before, strict=True):
            value.copy_(old)


@needs_a_gpu
@pytest.mark.parametrize(
    ("paths", "optimizer", "radius"),
    [
        ("f-fc+conv", "muon", None),
        ("f-fc+conv", "adamw", None),
        ("f-fc+conv", "muon", 0.1),
        ("f-fc+conv+gconv", "muon", None),
    ],
)
def test_replayed_steps_are_those_taken_kernel_by_kernel(
    paths: str, optimizer: str, radius: float | None
) -> None:
    """At the size of ELLA's tables, where branches do run at once; each step on other data."""
    torch.manual_seed(0)
    model = ella_network(paths, 3, 10, 4 if "gconv" in paths else 10).double().cuda()
    razor = sr.Razor(model, "categorical", 50_000)
    options = FitConfig(optimizer=optimizer, lr=0.003, sam_radius=radius)
    stepper = Stepper(razor, options, 100)
    for number in range(25):
        x = torch.randn(256, 3, 32, 32, dtype=torch.float64, device="cuda")
        y = torch.randint(10, (256,), device="cuda")
        if number < 5:
            stepper.step(x, y)
            continue
        with _tried(stepper):
            replayed = [stepper.step(x, y), *(theta.detach().clone() for theta in stepper.theta)]
        assert stepper.run.captured  # type: ignore[attr-defined]
        for result, value in zip(replayed, [stepper._run(x, y), *stepper.theta], strict=True):
            torch.testing.assert_close(result, value.detach(), rtol=1e-8, atol=1e-10)
