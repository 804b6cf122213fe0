"""The gain of symmetrising a posterior over hidden units, against brute force and its bound."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from symrazor.inference.variational import (
    BlockCholesky,
    Diagonal,
    Full,
    GaussianPosterior,
    MatrixNormal,
    Variational,
)
from symrazor.inference.variational.permutations import permutation_gain

F64 = torch.float64
KINDS = [Diagonal, BlockCholesky, Full, MatrixNormal]


def _parts(
    kind: type, h: int, apart: float, scale: float = 0.3
) -> list[tuple[GaussianPosterior, int]]:
    torch.manual_seed(1)
    into = kind((h, 2), scale=scale, mean=apart * torch.randn(h, 2, dtype=F64))
    bias = Diagonal((h,), scale=scale, mean=apart * torch.randn(h, dtype=F64))
    out = kind((3, h), scale=scale, mean=apart * torch.randn(3, h, dtype=F64))
    for q in (into, bias, out):
        for name, parameter in q.named_parameters():
            if name != "mean":
                parameter.data += 0.1 * torch.randn_like(parameter)
    return [(into, 0), (bias, 0), (out, 1)]


def _brute_force(parts: list[tuple[GaussianPosterior, int]], n: int) -> tuple[float, float]:
    """Mean and standard error of the gain, by dense densities and every permutation."""
    h = parts[0][0].shape[0]
    generator = torch.Generator().manual_seed(3)
    drawn = [q.sample(n, generator).detach() for q, _ in parts]
    total = []
    for order in itertools.permutations(range(h)):
        density = torch.zeros(n, dtype=F64)
        for (q, dim), w in zip(parts, drawn, strict=True):
            root = torch.autograd.functional.jacobian(
                lambda e, q=q: q.deviation_from(1, lambda shape, e=e: e.reshape(*shape))[0].reshape(
                    -1
                ),
                torch.zeros(q.size, dtype=F64),
            )
            dense = MultivariateNormal(q.mean.detach().reshape(-1), root @ root.T)
            density += dense.log_prob(w.index_select(dim + 1, torch.tensor(order)).reshape(n, -1))
        total.append(density)
    stacked = torch.stack(total)
    gain: Tensor = stacked[0] - stacked.logsumexp(0) + math.lgamma(h + 1)
    return float(gain.mean()), float(gain.std() / math.sqrt(n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apart", [0.1, 0.5])
def test_few_units_by_brute_force(kind: type, apart: float) -> None:
    parts = _parts(kind, 3, apart)
    expected, error = _brute_force(parts, 4000)
    gain = float(permutation_gain(parts, 4000, generator=torch.Generator().manual_seed(9)))
    assert abs(gain - expected) < 6 * error + 1e-9
    assert 0 < expected < math.log(6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("h", [2, 4, 30])
def test_the_gain_lies_between_zero_and_the_logarithm_of_the_orders(kind: type, h: int) -> None:
    """None of it where units are alike, all of it where they lie apart and all orders are seen."""
    generator = torch.Generator().manual_seed(0)
    same, near, far = (
        float(permutation_gain(_parts(kind, h, apart)[::2], 500, 100, generator))
        for apart in (0.0, 0.2, 300.0)
    )
    largest = math.lgamma(h + 1)
    assert -0.1 < same < near + 0.1
    assert near - 1e-9 <= far <= largest + 1e-9
    is_exact = kind in (Diagonal, BlockCholesky) or h < 5
    assert far == pytest.approx(largest if is_exact else math.log(100), abs=1e-6)


def test_bounds_are_below_the_exact_gain() -> None:
    """Row sums of the permanent and random permutations, where all can be looked at."""
    parts = _parts(Diagonal, 5, 0.4)
    draws = 3000
    exact = float(permutation_gain(parts, draws, 120, torch.Generator().manual_seed(0)))
    by_row_sums = float(permutation_gain(parts, draws, 1, torch.Generator().manual_seed(0)))
    sampled = float(
        permutation_gain(
            _parts(MatrixNormal, 5, 0.4)[:1], draws, 20, torch.Generator().manual_seed(0)
        )
    )
    by_all_permutations = float(
        permutation_gain(
            _parts(MatrixNormal, 5, 0.4)[:1], draws, 120, torch.Generator().manual_seed(0)
        )
    )
    assert 0 < by_row_sums < exact < math.log(120)
    assert 0 < sampled < by_all_permutations


def test_tensors_of_other_units_raise() -> None:
    with pytest.raises(ValueError, match="the same hidden units"):
        permutation_gain([(Diagonal((3, 2)), 0), (Diagonal((4,)), 0)])
    with pytest.raises(ValueError, match="the same hidden units"):
        permutation_gain([(Diagonal((3,)), 1)])
    with pytest.raises(ValueError, match="draws and permutations must be at least 1"):
        permutation_gain([(Diagonal((3,)), 0)], draws=0)


def test_layers_without_a_posterior_raise() -> None:
    """If one of the two layers is missing or fixed, a permutation gives another network."""
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    vi = Variational(model, "categorical", 4)
    with pytest.raises(ValueError, match="'7.weight' has no posterior"):
        vi.evidence([(x, y)], hidden=[("0", "7")])
    mixed = {"2.weight": "point", "*": "diagonal"}
    vi = Variational(model, "categorical", 4, posterior=mixed)
    with pytest.raises(ValueError, match="Point estimates of \\['2.weight'\\]"):
        vi.evidence([(x, y)], hidden=[("0", "2")])
