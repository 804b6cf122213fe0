"""Test which of several groups a layer supports, and how readings report it."""

import json

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor import groups
from symrazor.layers import (
    FC,
    Circulant,
    Conv,
    DeepSets,
    EquivariantLinear,
    GConv,
    GReadout,
    Relaxed,
    SetPool,
    SGConv,
    relaxed_over,
)
from symrazor.layers.relaxed import free_groups, start_near_
from symrazor.symmetry.equivariance import layer_errors
from symrazor.symmetry.verdict import support, supported_groups


def layer(c: int = 2, d: int = 2) -> Relaxed:
    return Relaxed([DeepSets(c, d, 4), Circulant(c, d, 4), FC(c, d, (4,))])


def test_a_path_is_equivariant_under_subgroups() -> None:
    sets, ring, free = layer().paths
    reversals = EquivariantLinear(2, 2, groups.dihedral_permutations(4))
    assert (
        sets.is_equivariant_under(ring)
        and sets.is_equivariant_under(reversals)
        and reversals.is_equivariant_under(ring)
    )
    assert not ring.is_equivariant_under(sets) and not ring.is_equivariant_under(reversals)
    assert not free.is_equivariant_under(ring) and not sets.is_equivariant_under(free)
    assert Conv(2, 2, (4,)).is_equivariant_under(Conv(2, 2, (4,)))
    assert not Conv(2, 2, (4,)).is_equivariant_under(sets) and not sets.is_equivariant_under(
        Conv(2, 2, (4,))
    )
    assert not DeepSets(2, 2, 5).is_equivariant_under(ring)
    rest = EquivariantLinear(
        2, 2, groups.cyclic_permutations(4), orthogonal_to=[groups.symmetric(4)]
    )
    assert (
        rest.is_equivariant_under(ring)
        and not rest.is_equivariant_under(sets)
        and not rest.is_equivariant_under(reversals)
    )
    even, all_of_them = groups.alternating(30), groups.symmetric(30)  # the same linear maps
    assert EquivariantLinear(1, 1, even).is_equivariant_under(EquivariantLinear(1, 1, all_of_them))
    turns, mirrored = (EquivariantLinear(1, 1, g) for g in (groups.cyclic(4), groups.dihedral(4)))
    assert mirrored.is_equivariant_under(turns) and not turns.is_equivariant_under(mirrored)


def test_less_symmetric_paths_start_small() -> None:
    torch.manual_seed(0)
    relaxed = layer()
    assert relaxed.removable_paths() == [1, 2]
    assert free_groups(nn.Sequential(relaxed)) == {"0.paths.1", "0.paths.2"}
    x = torch.randn(50, 2, 4)
    start_near_(nn.Sequential(relaxed), x)
    sizes = [float(path(x).detach().square().mean().sqrt()) for path in relaxed.paths]
    for size in sizes[1:]:
        assert size == pytest.approx(sizes[0] / 10, rel=1e-4)
    rings = Relaxed([Circulant(1, 1, 4), EquivariantLinear(1, 1, groups.cyclic_permutations(4))])
    assert rings.removable_paths() == []  # the same group twice: neither is stricter


@pytest.mark.parametrize(
    ("shares", "errors", "supported", "largest", "words"),
    [
        ((0.97, 0.02, 0.01), {}, ["S4", "Z4"], ["S4"], "equivariant to S4 (which contains Z4)."),
        ((0.5, 0.48, 0.02), {}, ["Z4"], ["Z4"], "equivariant to Z4 but not to S4."),
        ((0.2, 0.2, 0.6), {}, [], [], "equivariant to none of S4 and Z4."),
        ((0.2, 0.2, 0.6), {"S4": 0.01, "Z4": 0.01}, ["S4", "Z4"], ["S4"], "equivariant to S4"),
        (
            (0.97, 0.02, 0.01),
            {"S4": 0.2, "Z4": 0.01},
            ["Z4"],
            ["Z4"],
            "equivariant to Z4 but not to S4.",
        ),
    ],
)
def test_the_largest_supported_group(
    shares: tuple[float, ...],
    errors: dict[str, float],
    supported: list[str],
    largest: list[str],
    words: str,
) -> None:
    result = support(layer(), shares, errors)
    assert [entry.group for entry in result if entry.supported] == supported
    assert [entry.group for entry in result if entry.largest] == largest
    assert words in supported_groups("3", result)
    assert result[0].outside == pytest.approx(shares[1] + shares[2])
    assert result[1].outside == pytest.approx(shares[2])


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


def test_two_groups_with_one_name_raise() -> None:
    """A reading could show only one of them, with the error of the other."""
    one, two = ([[1, 2, 3, 4, 0]], [[2, 3, 1, 4, 0]])
    rings = [groups.Group.from_permutations("ring", rows) for rows in (one, two)]
    with pytest.raises(ValueError, match="Two different groups of the layer are called 'ring'"):
        relaxed_over(1, 2, rings)
    again = groups.Group.from_permutations("ring", one)
    Relaxed([EquivariantLinear(1, 2, g) for g in (rings[0], again)])
    turns = groups.cyclic(4)
    Relaxed([GConv(4, 4, (5, 5), group="p4"), SGConv(4, 4, (5, 5), group=turns)])


def test_a_network_is_measured_under_the_group_of_its_inputs() -> None:
    """A later layer may use the same group name on other places."""
    torch.manual_seed(0)
    ring, small = (groups.Group.from_permutations("ring", [[*range(1, n), 0]]) for n in (6, 3))
    model = nn.Sequential(
        EquivariantLinear(1, 2, ring), nn.Tanh(), nn.AvgPool1d(2), EquivariantLinear(2, 2, small),
        nn.Tanh(), SetPool("mean"),
    ).double()  # fmt: skip
    x = torch.randn(8, 1, 6, dtype=torch.float64)
    whole = sr.equivariance_error(model, x, ring)
    assert whole > 1e-3  # pairs of places do not follow a shift by one
    assert layer_errors(model, x).network == {"ring": pytest.approx(whole)}


def test_names_of_grid_groups_are_reserved() -> None:
    quarter, mirror = [[[0.0, -1], [1, 0]]], [[[-1.0, 0], [0, 1]]]
    make = groups.Group.from_matrices
    assert GConv(4, 4, (4, 4), group=make("p4", quarter)).group == "p4"
    assert GConv(4, 4, (4, 4), group=make("C1", quarter)).group == "C1"  # not translations alone
    about_z = make("C4", [[[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]])
    assert GConv(4, 4, (4, 4, 4), group=about_z).group == "C4"
    for name in ("p4", "translation"):
        with pytest.raises(ValueError, match=f"The name {name} is reserved for another group"):
            GConv(4, 4, (4, 4), group=make(name, mirror))


@pytest.mark.parametrize("name", ["p2", "p4", "p4m"])
def test_a_named_group_acts_on_the_channels_of_its_layers(name: str) -> None:
    """Otherwise an exactly equivariant layer would have an error near the square root of 2."""
    torch.manual_seed(0)
    image, maps = (torch.randn(3, c, 6, 6, dtype=torch.float64) for c in (1, 8))
    lift = GConv(1, 8, (6, 6), group="p4m", kind="lift").double()
    full = GConv(8, 8, (6, 6), 2, group="p4m").double()
    out = GReadout(8, 3, (6, 6), group="p4m").double()
    assert sr.equivariance_error(lift, image, name) < 1e-13
    assert sr.equivariance_error(full, maps, name) < 1e-13
    assert sr.equivariance_error(out, maps, name) < 1e-13
    free = Relaxed([full, Conv(8, 8, (6, 6), 2).double()])
    assert sr.equivariance_error(free, maps, name) > 0.1


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
    assert "Layer 0 is equivariant to" in fit.reading.verdict
    assert "shift" not in str(fit.reading)
    plain = fit.collapse()
    assert float((plain(x) - fit.model(x)).detach().abs().max()) < 10
