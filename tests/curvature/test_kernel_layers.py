"""Kernel form and bounds on random networks: every registered layer type and likelihood."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import symrazor as sr
from symrazor import groups
from symrazor.core.likelihood import LIKELIHOODS
from symrazor.curvature.coverage import layers
from symrazor.curvature.weight_sharing import registered_type, sharing
from symrazor.layers import FFC, SFC, Conv, GConv, SConv
from symrazor.layers.continuous_gconv import SE2Conv
from symrazor.layers.equivariant import EquivariantLinear

Batches = list[tuple[Tensor, Tensor]]

GRID = (3, 3)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear on tokens": (lambda: nn.Linear(3, 2), (4, 3)),
    "embedding": (lambda: nn.Embedding(5, 3), (4,)),
    "convolution 1d": (lambda: nn.Conv1d(2, 3, 3, 2, 1, padding_mode="circular"), (2, 5)),
    "convolution 2d": (lambda: nn.Conv2d(2, 4, 2, groups=2), (2, *GRID)),
    "convolution 3d": (lambda: nn.Conv3d(1, 2, 2), (1, 2, 3, 2)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 2, 3, 2), (2, 3)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 1, 2), (2, 2, 2)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(1, 2, 2), (1, 2, 1, 2)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "RMS norm": (lambda: nn.RMSNorm(4), (4,)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(2), (2, *GRID)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(2), (2, 2, 1, 2)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True), (3, 4)),
    "recurrent": (lambda: nn.Sequential(nn.GRU(2, 3, batch_first=True), First()), (3, 2)),
    "F-FC": (lambda: FFC(2, 2, GRID, bias=True), (2, *GRID)),
    "CONV": (lambda: Conv(2, 2, GRID), (2, *GRID)),
    "GCONV": (lambda: GConv(4, 4, GRID), (4, *GRID)),
    "S-CONV": (lambda: SConv(1, 2, GRID), (1, *GRID)),
    "S-CONV, learned centres": (lambda: SConv(1, 2, GRID, learn_anchors="weight"), (1, *GRID)),
    "S-FC": (lambda: SFC(1, 2, GRID, bias=True), (1, *GRID)),
    "SE(2)": (lambda: SE2Conv(4, 4, GRID, angles=4, anchors=6, kernel=3), (4, *GRID)),
    "vectors": (lambda: EquivariantLinear(2, 3, groups.so(3)), (2, 3)),
    "permutations": (lambda: EquivariantLinear(2, 2, groups.symmetric(4)), (2, 4)),
    "cyclic": (lambda: EquivariantLinear(1, 2, groups.cyclic_permutations(4)), (1, 4)),
}
"""Name -> maker of the layer, and shape of one input."""


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        """Return the outputs at all times of a recurrent layer."""
        return outputs[0]


class Network(nn.Module):
    """A random layer, tanh and a random linear layer; or outputs at two positions."""

    def __init__(self, name: str, likelihood: str) -> None:
        super().__init__()
        self.layer = LAYERS[name][0]().eval()
        n_positions = 2 if likelihood == "per_position" else 1
        self.n_outputs = {"ordinal": 1, "heteroscedastic": 2}.get(likelihood, 3)
        self.shape = (self.n_outputs,) if n_positions == 1 else (self.n_outputs, n_positions)
        x = inputs(name, 1, torch.Generator())
        features = self.layer.double()(x).numel()
        self.head = nn.Linear(features, self.n_outputs * n_positions).double()

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [n, k], or [n, k, positions]."""
        hidden: Tensor = self.head(torch.tanh(self.layer(x)).flatten(1))
        return hidden.unflatten(1, self.shape)


def inputs(name: str, n: int, generator: torch.Generator) -> Tensor:
    """Return random inputs of a layer."""
    shape = (n, *LAYERS[name][1])
    if name == "embedding":
        return torch.randint(5, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def random_network(name: str, likelihood: str, seed: int, n: int) -> tuple[nn.Module, Batches]:
    """Return a network with random weights and data in two batches, with labels drawn from it."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Network(name, likelihood).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, dtype=parameter.dtype))
        x = inputs(name, n, generator)
        y = LIKELIHOODS[likelihood]().sample(model(x), generator)
    return model, [(x[: n // 2], y[: n // 2]), (x[n // 2 :], y[n // 2 :])]


def log_det(
    model: nn.Module, likelihood: str, batches: Batches, **options: object
) -> tuple[float, dict[str, float]]:
    """Return the log-determinant and the effective parameters."""
    n = sum(len(y) for _, y in batches)
    razor = sr.Razor(model, likelihood, n, prior_precision=0.3, **options)
    evidence = razor.evidence(batches)
    return float(evidence.log_det), evidence.effective_parameters


def check(name: str, likelihood: str, seed: int, n: int, blocks: tuple[int, ...]) -> None:
    """Assert that the kernel form equals the full matrix, and that every bound is below it."""
    model, batches = random_network(name, likelihood, seed, n)

    def value(structure: str, **options: object) -> float:
        return log_det(model, likelihood, batches, structure=structure, **options)[0]

    exact, effective = log_det(model, likelihood, batches, structure="full")
    kernel, from_kernel = log_det(model, likelihood, batches, structure="kernel")
    assert kernel == pytest.approx(exact, rel=1e-8, abs=1e-8)
    for tensor, gamma in effective.items():
        assert from_kernel[tensor] == pytest.approx(gamma, rel=1e-8, abs=1e-8)
    slack = 1e-8 * (1 + exact)
    previous = math.inf
    for block in blocks:  # each partition merges blocks of the one before
        bound = value("kernel", block=block)
        assert exact - slack <= bound <= previous + slack
        assert value("kernel", block=block, outputs="independent") >= bound - slack
        previous = bound
    by_tensor = value("block")
    assert by_tensor >= exact - slack
    assert value("ekfac") >= by_tensor - slack


def test_every_registered_layer_type_has_a_case() -> None:
    used = set()
    for make, _ in LAYERS.values():
        used |= {registered_type(type(layer.module)) for layer in layers(make().eval())}
    own = {
        kind for kind in sharing.registry if kind.__module__.split(".")[0] in ("torch", "symrazor")
    }
    assert own - {object} <= used


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_type(name: str) -> None:
    check(name, "categorical", seed=0, n=5, blocks=(2,))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_every_likelihood(likelihood: str) -> None:
    check("convolution 1d", likelihood, seed=0, n=5, blocks=(2,))


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYERS)),
    likelihood=st.sampled_from(sorted(LIKELIHOODS)),
    seed=st.integers(0, 10**6),
    n=st.integers(2, 9),
)
def test_1000_random_networks(name: str, likelihood: str, seed: int, n: int) -> None:
    check(name, likelihood, seed, n, blocks=(1, 2, 4, 8))
