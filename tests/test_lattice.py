"""Which of several groups a layer keeps: relations, supports, readings, starts."""

import json

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor import groups
from symrazor.layers import FC, Circulant, Conv, DeepSets, EquivariantLinear, Relaxed, SetPool
from symrazor.layers.relaxed import free_groups, start_near_
from symrazor.readings.equivariance import layer_errors
from symrazor.readings.lattice import sentence, support


def layer(c: int = 2, d: int = 2) -> Relaxed:
    return Relaxed([DeepSets(c, d, 4), Circulant(c, d, 4), FC(c, d, (4,))])


def test_a_path_keeps_its_subgroups() -> None:
    sets, ring, free = layer().paths
    reversals = EquivariantLinear(2, 2, groups.dihedral_permutations(4))
    assert sets.keeps(ring) and sets.keeps(reversals) and reversals.keeps(ring)
    assert not ring.keeps(sets) and not ring.keeps(reversals)
    assert not free.keeps(ring) and not sets.keeps(free)
    assert Conv(2, 2, (4,)).keeps(Conv(2, 2, (4,)))
    assert not Conv(2, 2, (4,)).keeps(sets) and not sets.keeps(Conv(2, 2, (4,)))
    assert not DeepSets(2, 2, 5).keeps(ring)
    rest = EquivariantLinear(2, 2, groups.cyclic_permutations(4), beyond=[groups.symmetric(4)])
    assert rest.keeps(ring) and not rest.keeps(sets) and not rest.keeps(reversals)
    even, all_of_them = groups.alternating(30), groups.symmetric(30)  # the same linear maps
    assert EquivariantLinear(1, 1, even).keeps(EquivariantLinear(1, 1, all_of_them))
    turns, mirrored = (EquivariantLinear(1, 1, g) for g in (groups.cyclic(4), groups.dihedral(4)))
    assert mirrored.keeps(turns) and not turns.keeps(mirrored)


def test_loose_paths_start_small() -> None:
    torch.manual_seed(0)
    relaxed = layer()
    assert relaxed.loose() == [1, 2]
    assert free_groups(nn.Sequential(relaxed)) == {"0.paths.1", "0.paths.2"}
    x = torch.randn(50, 2, 4)
    start_near_(nn.Sequential(relaxed), x)
    sizes = [float(path(x).detach().square().mean().sqrt()) for path in relaxed.paths]
    for size in sizes[1:]:
        assert size == pytest.approx(sizes[0] / 10, rel=1e-4)
    rings = Relaxed([Circulant(1, 1, 4), EquivariantLinear(1, 1, groups.cyclic_permutations(4))])
    assert rings.loose() == []  # the same group twice: neither is stricter


@pytest.mark.parametrize(
    ("shares", "errors", "supported", "largest", "words"),
    [
        ((0.97, 0.02, 0.01), {}, ["S4", "Z4"], ["S4"], "supports S4, which contains Z4."),
        ((0.5, 0.48, 0.02), {}, ["Z4"], ["Z4"], "supports Z4, not S4."),
        ((0.2, 0.2, 0.6), {}, [], [], "supports none of S4 and Z4."),
        ((0.2, 0.2, 0.6), {"S4": 0.01, "Z4": 0.01}, ["S4", "Z4"], ["S4"], "supports S4"),
        ((0.97, 0.02, 0.01), {"S4": 0.2, "Z4": 0.01}, ["Z4"], ["Z4"], "supports Z4, not S4."),
    ],
)
def test_the_largest_group_that_nothing_breaks(
    shares: tuple[float, ...],
    errors: dict[str, float],
    supported: list[str],
    largest: list[str],
    words: str,
) -> None:
    found = support(layer(), shares, errors)
    assert [one.group for one in found if one.supported] == supported
    assert [one.group for one in found if one.largest] == largest
    assert words in sentence("3", found)
    assert found[0].outside == pytest.approx(shares[1] + shares[2])
    assert found[1].outside == pytest.approx(shares[2])


def test_errors_by_group() -> None:
    torch.manual_seed(0)
    relaxed = layer(1, 3)
    model = nn.Sequential(relaxed, nn.Tanh(), SetPool("sum")).double()
    x = torch.randn(20, 1, 4, dtype=torch.float64)
    relaxed.path(1).scale_(0.0)
    relaxed.path(2).scale_(0.0)
    errors = layer_errors(model, x)
    assert set(errors.layers["0"]) == set(errors.network) == {"S4", "Z4"}
    assert max(*errors.layers["0"].values(), *errors.network.values()) < 1e-14
    relaxed.path(1).scale_(1.0)
    nn.init.normal_(relaxed.path(1).map.weight)  # type: ignore[union-attr, arg-type]
    errors = layer_errors(model, x)
    assert errors.layers["0"]["Z4"] < 1e-14 and errors.network["Z4"] < 1e-14
    assert errors.layers["0"]["S4"] > 0.1 and errors.network["S4"] > 0.1


def test_a_reading_names_the_group() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 4)
    y = x.square().sum((1, 2)).unsqueeze(1) + 0.1 * torch.randn(64, 1)
    model = nn.Sequential(layer(1, 4), nn.Tanh(), SetPool("mean"), nn.Linear(4, 1))
    fit = sr.fit(model, (x, y), "gaussian", epochs=4, every=2, progress=False)
    document = json.loads(fit.json)
    entries = document["layers"][0]["symmetry"]
    assert [entry["group"] for entry in entries] == ["S4", "Z4"]
    assert set(entries[0]) == {"group", "outside", "error", "supported", "largest"}
    assert [path["path"] for path in document["layers"][0]["paths"]][:2] == [
        "Linear[S4]",
        "Linear[Z4]",
    ]
    assert "Layer 0 supports" in fit.reading.verdict
    assert "shift" not in str(fit.reading)
    plain = fit.collapse()
    assert float((plain(x) - fit.model(x)).detach().abs().max()) < 10
