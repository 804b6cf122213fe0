"""A relaxed network that starts from the trained strict network it contains."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.discovery.families import deep_sets
from symrazor.discovery.user_groups import permutation_network
from symrazor.groups import cyclic_permutations, dihedral_permutations, symmetric
from symrazor.layers.plain import convolutional, group_convolutional
from symrazor.layers.relaxed import Relaxed
from symrazor.symmetry.nested import open_paths

Make = Callable[[], nn.Module]
ORDER = [dihedral_permutations(6), symmetric(6), cyclic_permutations(6)]


def relaxed_cnn(
    shape: tuple[int, ...], outputs: int, width: int | None, groups: tuple[str, ...]
) -> nn.Module:
    """Return the relaxation of a convolutional network."""
    return sr.relax(convolutional(shape, outputs, width), torch.zeros(2, *shape), groups)


def permuting(free: bool, *indices: int) -> nn.Module:
    return permutation_network((2, 6), 3, [ORDER[i] for i in indices], free, add_channel=False)


PAIRS: dict[str, tuple[tuple[int, ...], Make, Make]] = {
    f"convolutional {shape}": (
        shape,
        partial(convolutional, shape, 3),
        partial(relaxed_cnn, shape, 3, None, ("translation",)),
    )
    for shape in [(1, 9), (2, 8, 11), (1, 8, 9, 8)]
} | {
    "rotations": (
        (1, 9, 9),
        partial(convolutional, (1, 9, 9), 3, 8),
        partial(relaxed_cnn, (1, 9, 9), 3, 8, ("translation", "p4", "p4m")),
    ),
    "group convolutions": (
        (1, 9, 9),
        partial(group_convolutional, (1, 9, 9), 3, "p4", 8),
        partial(relaxed_cnn, (1, 9, 9), 3, 8, ("translation", "p4", "p4m")),
    ),
    "deep sets": ((4, 5), partial(deep_sets, 4, 5, 3), partial(deep_sets, 4, 5, 3, free=True)),
    "cyclic": ((2, 6), partial(permuting, False, 2), partial(permuting, True, 1, 0, 2)),
    "dihedral": ((2, 6), partial(permuting, False, 0), partial(permuting, True, 1, 0, 2)),
    "symmetric": ((2, 6), partial(permuting, False, 1), partial(permuting, True, 1, 0, 2)),
}


def trained(make: Make) -> nn.Module:
    """Return a network with weights and biases that are not those of its initialisation."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", PAIRS)
def test_the_opened_network_computes_the_outputs_of_the_strict_one(name: str) -> None:
    shape, make_strict, make_relaxed = PAIRS[name]
    strict, relaxed = trained(make_strict).double(), trained(make_relaxed).double()
    x = torch.randn(5, *shape, dtype=torch.float64)
    before = {key: value.clone() for key, value in strict.state_dict().items()}
    open_paths(strict, relaxed, math.inf)
    torch.testing.assert_close(relaxed(x), strict(x), rtol=1e-5, atol=1e-6)
    open_paths(strict, relaxed, 1e12)
    change = (relaxed(x) - strict(x)).abs().max() / strict(x).std()
    assert 0 < change < 1e-4
    assert all(torch.equal(before[key], value) for key, value in strict.state_dict().items())


@pytest.mark.parametrize("precision", [1e6, math.inf])
@pytest.mark.parametrize("name", ["convolutional (2, 8, 11)", "deep sets", "cyclic"])
def test_every_free_path_has_a_gradient(name: str, precision: float) -> None:
    shape, make_strict, make_relaxed = PAIRS[name]
    relaxed = make_relaxed()
    open_paths(trained(make_strict), relaxed, precision)
    relaxed(torch.randn(5, *shape)).square().sum().backward()
    for layer in relaxed.modules():
        if isinstance(layer, Relaxed):
            free = [path for path in layer.path_list if path.group is None]
            assert free
            assert all(any(p.grad.any() for p in path.parameters()) for path in free)


def test_factors_of_an_opened_path_have_the_same_norm() -> None:
    _, make_strict, make_relaxed = PAIRS["convolutional (2, 8, 11)"]
    relaxed = make_relaxed()
    open_paths(make_strict(), relaxed)
    a, b = relaxed[0].paths[1].factors
    torch.testing.assert_close(a.flatten(2).norm(dim=2), b.flatten(1, -2).norm(dim=1).T)
    assert 1e-3 < float(a.detach().square().mean().sqrt()) < 0.1


def test_networks_that_are_not_nested_are_rejected() -> None:
    x = torch.zeros(2, 1, 8, 8)
    strict = convolutional((1, 8, 8), 3)
    with pytest.raises(ValueError, match="no tensor '7.bias' of the same shape"):
        open_paths(strict, relaxed_cnn((1, 8, 8), 4, None, ("translation",)))
    with pytest.raises(ValueError, match="layer '0': the two convolutions have different shapes"):
        open_paths(strict, sr.relax(convolutional((1, 8, 8), 3, 4), x)[:1])
    with pytest.raises(ValueError, match="no module 'x.0'"):
        wrong = nn.Sequential()
        wrong.add_module("x", sr.relax(strict, x))
        open_paths(strict, wrong)
    with pytest.raises(ValueError, match="do not contain the maps of the strict layer"):
        open_paths(permuting(False, 2), permuting(True, 0))
    with pytest.raises(ValueError, match="precision must be positive, got 0"):
        open_paths(strict, sr.relax(strict, x), 0)


def test_a_trained_pair_can_be_compared() -> None:
    """The evidence of an opened network with tiny paths is near that of the strict one."""
    x: Tensor = torch.randn(40, 1, 8, 8)
    y = torch.arange(40) % 3
    strict = convolutional((1, 8, 8), 3, 2)
    relaxed = relaxed_cnn((1, 8, 8), 3, 2, ("translation",))
    open_paths(strict, relaxed, 1e12)
    data = [(x, y)]
    values = []
    for model in (strict, relaxed):
        razor = sr.Razor(model, "categorical", 40)
        values.append(float(razor.evidence(data).log_likelihood))
    assert values[0] == pytest.approx(values[1], abs=1e-3)
