"""The input factor of convolutions with zero padding, over a grid of shapes, in float64.

The oracle unfolds the padded input with `Tensor.unfold` and multiplies the patches out. Where a
convolution is the whole network and the likelihood is Gaussian, its Kronecker-factored curvature
is the Gauss-Newton matrix itself, and the oracle is the matrix from `torch.func.jacrev`.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.curvature.convolution import Geometry, input_factor

F64 = torch.float64
CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
KERNELS, CHANNELS, LENGTHS = range(1, 16), range(1, 9), range(8, 129)
ROWS = 1100
"""Rows of patches from which `gram` takes its short cut for narrow rows, and a few more."""

Shape = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Kernel, padding and size along each axis, and channels."""


def _line(kernel: int, channels: int, length: int) -> Iterator[Shape]:
    """Yield the convolutions along one axis: without padding, and with half a kernel of it."""
    if kernel <= length:
        yield [kernel], [0], [length], channels
    if kernel > 1:
        yield [kernel], [kernel // 2], [length], channels


def _thin(dims: int, kernel: int, channels: int, length: int) -> Iterator[Shape]:
    """Yield convolutions of `dims` axes, one long and the others at most 3, for each long axis."""
    for axis in range(dims):
        for other in (1, 3):
            kernels, sizes = [other] * dims, [3] * dims
            kernels[axis], sizes[axis] = kernel, length
            yield kernels, [k // 2 for k in kernels], sizes, channels


def _check_factors(shapes: Iterable[Shape]) -> None:
    """Compare the factor of each shape with the Gram matrix of unfolded patches."""
    generator = torch.Generator().manual_seed(0)
    for kernel, padding, size, channels in shapes:
        dims = len(kernel)
        module = CONVS[dims](channels, 1, kernel, padding=padding, device="meta")
        outputs = math.prod(
            s + 2 * p - k + 1 for s, p, k in zip(size, padding, kernel, strict=True)
        )
        n = -(-ROWS // outputs)
        x = torch.randn(n, channels, *size, generator=generator, dtype=F64)
        patches = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
        for axis, k in enumerate(kernel):
            patches = patches.unfold(2 + axis, k, 1)
        rows = patches.movedim(1, 1 + dims).flatten(1 + dims).flatten(0, dims)
        expected = rows.T @ rows
        factor = input_factor(x, Geometry.of(module))[0]
        error = float((factor - expected).abs().max() / expected.abs().max())
        assert factor.shape == expected.shape and error < 1e-10, (kernel, padding, size, channels)


def test_factors_of_sampled_convolutions() -> None:
    grid = itertools.product((1, 2, 3, 5, 8, 15), (1, 3, 8), (8, 13, 64))
    for case in grid:
        _check_factors(_line(*case))
    for dims, kernel, channels in itertools.product((2, 3), (1, 4, 15), (1, 2)):
        _check_factors(_thin(dims, kernel, channels, 8))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_factors_of_all_convolutions(kernel: int) -> None:
    for channels, length in itertools.product(CHANNELS, LENGTHS):
        _check_factors(_line(kernel, channels, length))
    for dims, channels, length in itertools.product((2, 3), CHANNELS, (8, 9, 16, 31, 128)):
        _check_factors(_thin(dims, kernel, channels, length))


def _expected_log_det(model: nn.Module, x: Tensor, precision: float) -> float:
    r"""Return $\log |I + J^\top J / \delta|$ of a Gaussian of unit variance, from the Jacobian."""
    theta = dict(model.named_parameters())

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, parameters, (x,))
        return result.flatten()

    parts = torch.func.jacrev(outputs)(theta).values()
    J = torch.cat([part.flatten(1) for part in parts], 1)
    curvature = torch.eye(J.shape[1], dtype=F64) + J.T @ J / precision
    return float(torch.linalg.slogdet(curvature).logabsdet)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_curvature_of_a_convolution_is_the_dense_gauss_newton_matrix(dims: int) -> None:
    generator, chosen = torch.Generator().manual_seed(1), random.Random(dims)
    cases = [(5, 1, 64)] if dims == 1 else []
    cases += [(chosen.choice(KERNELS), chosen.choice((1, 2, 3)), 8 + 4 * i) for i in range(4)]
    for kernel, channels, length in cases:
        kernels, size = [kernel] + [1] * (dims - 1), [length] + [2] * (dims - 1)
        padding = [k // 2 for k in kernels]
        model = nn.Sequential(
            CONVS[dims](channels, 2, kernels, padding=padding, bias=False, dtype=F64), nn.Flatten()
        )
        n = -(-ROWS // math.prod(size))
        x = torch.randn(n, channels, *size, generator=generator, dtype=F64)
        y = torch.zeros(n, model(x[:1]).shape[1], dtype=F64)
        razor = sr.Razor(model, sr.Gaussian(1.0), n, structure="kron", prior_precision=3.0)
        evidence = float(razor.evidence([(x, y)]).log_det)
        expected = _expected_log_det(model, x, 3.0)
        assert evidence == pytest.approx(expected, rel=1e-9), (dims, kernel, channels, length)


def test_fit_of_a_convolution_of_one_channel_and_one_axis() -> None:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)]
    model = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), *head)
    data = torch.randn(64, 1, 64), torch.arange(64) % 3
    fitted = sr.fit(model, data, epochs=2, every=1, burn_in=1)
    assert math.isfinite(float(fitted.evidence.log_evidence))
