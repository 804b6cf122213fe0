"""Test relaxed dense layers: equal outputs, and a strict path that is the group average."""

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor import groups
from symrazor.layers import FC, EquivariantLinear, Relaxed
from symrazor.symmetry.relax_linear import split_dense
from symrazor.testing import assert_close


def _averaged(W: Tensor, group: groups.Group) -> Tensor:
    """Return the mean of rho(g)^-1 W rho(g) over all elements, W[o, t, i, s]."""
    every = group.finite()
    total = torch.zeros_like(W)
    for g in every.elements:
        rho = every.matrix(g).to(W)
        total += torch.einsum("at,oais,sb->otib", rho, W, rho)
    return total / every.order


@pytest.mark.parametrize(
    "group", [groups.symmetric(4), groups.cyclic_permutations(5), groups.cyclic(3)]
)
def test_the_strict_path_is_the_group_average(group: groups.Group) -> None:
    torch.manual_seed(0)
    n = group.size
    W, b = torch.randn(3 * n, 2 * n, dtype=torch.float64), torch.randn(3 * n, dtype=torch.float64)
    layer = split_dense(W, b, [group])
    strict, free = layer.paths
    assert isinstance(strict, EquivariantLinear) and isinstance(free, FC)
    expected = _averaged(W.reshape(3, n, 2, n), group).reshape(3 * n, 2 * n)
    assert_close(strict.map.matrix(), expected, 1e-10)
    assert_close(strict.map.matrix() + free.linear.weight, W, 1e-10)
    inner = (strict.map.matrix() * free.linear.weight).sum()
    assert abs(float(inner.detach())) < 1e-9
    x = torch.randn(4, 2, n, dtype=torch.float64)
    assert_close(layer(x).flatten(1), nn.functional.linear(x.flatten(1), W, b), 1e-10)


def test_a_network_on_vectors() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 18), nn.Tanh(), nn.Linear(18, 4))
    x = torch.randn(5, 6)
    group = groups.cyclic_permutations(6)
    relaxed = sr.relax(mlp, x, groups=[group])
    assert_close(relaxed(x), mlp(x), 1e-5)
    report = sr.relaxation(relaxed)
    assert list(report.changed) == ["0", "2", "4"] and not report.left
    with torch.no_grad():  # the strict part alone is invariant: the head is
        for module in relaxed.modules():
            if isinstance(module, Relaxed):
                module.path(1).scale_(0.0)
        assert_close(relaxed(x.roll(2, 1)), relaxed(x), 1e-5)
    assert sr.equivariance_error(relaxed, x, group) < 1e-5
    assert_close(sr.collapse(relaxed, x)(x), relaxed(x), 1e-5)


def test_a_shared_layer_with_several_groups() -> None:
    torch.manual_seed(0)

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(2, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.outer(self.inner(x).tanh().mean(1))
            return y

    model, x = Sets(), torch.randn(6, 4, 2)
    both = [groups.symmetric(4), groups.cyclic_permutations(4)]
    relaxed = sr.relax(model, x, groups=both)
    assert_close(relaxed(x), model(x), 1e-5)
    report = sr.relaxation(relaxed)
    assert list(report.changed) == ["inner"] and "outer" in report.left
    mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    left = sr.relaxation(sr.relax(mlp, torch.randn(6, 4), groups=both)).left
    assert left == {"2": "its 1 outputs are not a multiple of 4 places, which needs a single group"}
    layer = next(m for m in relaxed.modules() if isinstance(m, Relaxed))
    free = layer.path(2)
    assert isinstance(free, FC)
    assert float(free.linear.weight.detach().abs().max()) < 1e-6  # nothing was left for it
    assert sr.equivariance_error(layer, torch.randn(3, 2, 4), both[0]) < 1e-5
    assert_close(sr.collapse(relaxed, x)(x), relaxed(x), 1e-5)


def test_the_evidence_of_a_relaxed_mlp() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 4)
    y = torch.sin(2 * x).sum(1, keepdim=True)
    mlp = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    relaxed = sr.relax(mlp, x, groups=[groups.symmetric(4)])
    fit = sr.fit(relaxed, (x, y), "gaussian", epochs=4, batch_size=32, lr=0.02, progress=False)
    assert [result.group for result in fit.reading.layers[0].symmetry] == ["S4"]


def test_relax_linear_errors() -> None:
    mlp = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with pytest.raises(ValueError, match=r"acts on .3, 5., not on .batch, c x 4. or .batch, 4, c."):
        sr.relax(mlp, torch.randn(3, 5), groups=[groups.symmetric(4)])
    with pytest.raises(ValueError, match="different numbers of places"):
        sr.relax(mlp, torch.randn(3, 5), groups=[groups.symmetric(5), groups.symmetric(4)])
    with pytest.raises(ValueError, match="groups must include 'translation'"):
        sr.relax(mlp, torch.randn(3, 5), groups=["p4", groups.symmetric(5)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="groups must be a list"):
        sr.relax(mlp, torch.randn(3, 5), groups=groups.symmetric(5))  # type: ignore[arg-type]


def test_a_last_layer_without_invariants_is_not_relaxed() -> None:
    """No linear function of a vector is invariant to rotations."""
    mlp = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    report = sr.relaxation(sr.relax(mlp, torch.randn(4, 3), groups=[groups.so(3)]))
    assert list(report.changed) == ["0"]
    assert report.left == {"2": "no linear map of 3 numbers is invariant to SO(3)"}
