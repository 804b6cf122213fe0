"""Group convolutions in relaxed layers: sums, collapse, networks relaxed to p4, readings."""

import itertools
from typing import get_args

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor import groups
from symrazor.core.likelihood import Categorical
from symrazor.curvature.estimate import Method, estimate_curvature
from symrazor.layers import FFC, Conv, GConv, GroupPool, Relaxed
from symrazor.layers.gconv import Kind
from symrazor.layers.point_group import point_group
from symrazor.layers.relaxed import start_near_
from symrazor.symmetry.collapse import collapse
from symrazor.symmetry.equivariance import layer_errors
from symrazor.testing import Head, assert_close, dense_block, dense_ggn


def _mixed(stride: int, group: str = "p4") -> Relaxed:
    order = point_group(group).order
    sizes = (order, 2 * order, (4, 4), stride)
    return Relaxed([FFC(*sizes), Conv(*sizes), GConv(*sizes, group=group)]).double()


@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("group", ("p4", "p4m"))
def test_a_sum_without_its_free_paths_is_equivariant(stride: int, group: str) -> None:
    """Conv and GConv share one subsampling; otherwise the sum is not equivariant to shifts."""
    torch.manual_seed(0)
    order = point_group(group).order
    convs = [GConv(order, order, (4, 4), stride, group=group) for _ in range(2)]
    layer = Relaxed(
        [*convs, GConv(order, order, (4, 4), stride, group=group, kind="pointwise")]
    ).double()
    x = torch.randn(3, order, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        y = layer(x)
        for before, after in convs[0].transformations():
            moved = layer(torch.roll(before(x), (1, 2), (2, 3)))
            small = range(y.shape[2])
            errors = [
                (moved - torch.roll(after(y), b, (2, 3))).abs().amax((1, 2, 3))
                for b in itertools.product(small, repeat=2)
            ]
            assert float(torch.stack(errors).amin(0).max()) < 1e-12


@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("kind", get_args(Kind))
def test_mixed_layers_collapse(stride: int, kind: str) -> None:
    torch.manual_seed(0)
    channels = 3 if kind == "lift" else 8
    sizes = (channels, 8, (4, 4), stride)
    paths = [Conv(*sizes), GConv(*sizes, kind=kind), GConv(*sizes, kind=kind)]
    x = torch.randn(2, channels, 4, 4)
    model = nn.Sequential(Relaxed(paths), nn.ReLU(), GroupPool(4), nn.Flatten()).eval()
    plain = collapse(model, x)
    for n in (1, 2):
        assert_close(plain(x[:n]), model(x[:n]), 1e-5)
    if kind in ("full", "lift"):  # all three are one convolution of torch
        convs = [m for m in plain.modules() if isinstance(m, nn.Conv2d)]
        assert len(convs) == 1 and convs[0].weight.shape == (8, channels, 3, 3)


def test_a_single_group_convolution_is_a_plain_convolution() -> None:
    torch.manual_seed(0)
    for kind, parts in (("full", 1), ("pointwise", 4)):
        model = nn.Sequential(Relaxed([_mixed(1).path(0), GConv(4, 8, (4, 4), kind=kind)])).double()
        shares = {"0": [0.0, 1.0]}
        plain = collapse(model, torch.randn(2, 4, 4, 4).double(), shares=shares)
        (conv,) = (m for m in plain.modules() if type(m) is nn.Conv2d)
        assert conv.groups == parts


def test_curvature_of_a_mixed_layer() -> None:
    torch.manual_seed(0)
    layer, x = _mixed(2), torch.randn(3, 4, 4, 4, dtype=torch.float64)
    model, y = Head(layer, 8 * 4), torch.arange(3)
    for block in estimate_curvature(
        model, Categorical(), [(x, y)], Method(structure="block")
    ).blocks:
        assert_close(dense_block(block), dense_ggn(model, Categorical(), x, y, block.names), 1e-8)


def _cnn(padding_mode: str = "circular") -> nn.Sequential:
    torch.manual_seed(0)
    options = {"padding": 1, "padding_mode": padding_mode}
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, **options),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, **options),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, **options),
        nn.ReLU(),
        nn.Conv2d(16, 6, 3, **options),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ).double()


def test_relax_with_rotations() -> None:
    """The equivariant part of each convolution becomes a path; the outputs are unchanged."""
    cnn, x = _cnn(), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    model = sr.relax(cnn, x, groups=["translation", "p4", "p4m"])
    assert_close(model(x), cnn(x), 1e-12)
    first, second, strided, last = (m for m in model if isinstance(m, Relaxed))
    assert [path.label for path in first.paths] == ["Conv", "GConv p4", "GConv p4m", "FFC"]
    assert first.path(1).kind == "lift" and second.path(1).kind == "full"
    assert strided.path(1).out_shape == (4, 4) and not strided.path(1).strict
    assert [path.label for path in last.paths] == ["Conv", "FFC"]
    account = sr.relaxation(model).changed
    assert "no p4: out_channels must be a multiple of 4" in account["6"]
    for layer in (first, second):  # orthogonal parts: nothing equivariant is left in the others
        conv, p4, p4m = (layer.path(i) for i in range(3))
        remainders = [conv.conv.weight, p4.stages[0].convolution().weight]
        for remainder in remainders:
            sizes = p4m.in_channels, p4m.out_channels, p4m.in_shape
            left = GConv(*sizes, group="p4m", kind=p4m.kind).double()
            left.stages[0].project_(remainder.detach(), None)
            assert float(left.stages[0].weight.detach().abs().max()) < 1e-12
    assert {name for name in layer_errors(model, x).network} == {"translation", "p4", "p4m"}


def test_point_groups_can_be_given_as_groups() -> None:
    cnn, x = _cnn(), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    model = sr.relax(cnn, x, groups=["translation", groups.cyclic(4)])
    assert [path.label for path in model[0].paths] == ["Conv", "GConv p4", "FFC"]
    with pytest.raises(ValueError, match=r"groups must include .* got .*<Group S3 on 3 positions"):
        sr.relax(cnn, x, groups=["translation", groups.symmetric(3)])


def test_point_groups_can_be_defined_by_the_user() -> None:
    cnn, x = _cnn(), torch.randn(3, 2, 8, 8, dtype=torch.float64)
    swap = groups.Group.from_matrices("swap", [[[0.0, 1.0], [1.0, 0.0]]])
    model = sr.relax(cnn, x, groups=["translation", swap, "p4"])
    assert_close(model(x), cnn(x), 1e-12)
    first = model[0]
    assert [path.label for path in first.paths] == ["Conv", "GConv swap", "GConv p4", "FFC"]
    path = first.path(1)
    ((before, after),) = path.transformations()
    assert torch.equal(before(x), x.transpose(2, 3))
    assert_close(path(before(x)), after(path(x)), 1e-12)
    assert float((path(x) - after(path(x))).detach().abs().max()) > 0.01
    twice = groups.Group.from_matrices("quarters", [[[0.0, 1.0], [-1.0, 0.0]]])
    with pytest.raises(ValueError, match="p4 and quarters have the same elements"):
        sr.relax(cnn, x, groups=["translation", "p4", twice])
    nothing = groups.Group.from_matrices("nothing", [[[1.0, 0.0], [0.0, 1.0]]])
    with pytest.raises(ValueError, match="Group nothing has only the identity"):
        sr.relax(cnn, x, groups=["translation", nothing])
    with pytest.raises(ValueError, match="must include .translation."):
        sr.relax(cnn, x, groups=[swap])
    with pytest.raises(ValueError, match="that map the grid to itself, got .*C8"):
        sr.relax(cnn, x, groups=["translation", groups.cyclic(8)])
    about_z = [[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    with pytest.raises(ValueError, match="The name O is reserved"):
        sr.relax(cnn, x, groups=["translation", groups.Group.from_matrices("O", [about_z])])


def test_relaxed_rotations_start_near_the_largest_group() -> None:
    cnn, x = _cnn(), torch.randn(16, 2, 8, 8, dtype=torch.float64)
    model = sr.relax(cnn, x, groups=["translation", "p4"])
    with torch.no_grad():
        layer = model[0]
        before = max(layer.path(i)(x).square().mean() for i in (0, 1))
        start_near_(model, x)
        conv, p4 = layer.path(0)(x), layer.path(1)(x)
        assert_close(conv.square().mean().sqrt(), 0.1 * p4.square().mean().sqrt(), 1e-10)
        assert_close(p4.square().mean(), before, 1e-10)
    errors = layer_errors(model, x).layers
    assert errors["0"]["p4"] < 0.2 and errors["0"]["translation"] < 1e-12


def test_frozen_convolutions_are_unchanged() -> None:
    cnn, x = _cnn().requires_grad_(False), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    model = sr.relax(cnn, x, groups=["translation", "p4"])
    assert torch.equal(model[0].path(0).conv.weight, cnn[0].weight)
    assert model[0].path(1).is_zero()
    start_near_(model, x)
    assert torch.equal(model[0].path(0).conv.weight, cnn[0].weight)


def test_reading_shows_the_groups() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 2, 8, 8), torch.arange(12) % 3
    cnn = nn.Sequential(
        *list(_cnn().float())[:2], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    model = sr.relax(cnn, x, groups=["translation", "p4"])
    reading = sr.fit(model, (x, y), epochs=2, batch_size=12).reading
    layer = reading.layers[0]
    assert set(layer.equivariance_error) == {"translation", "p4"} == set(reading.equivariance_error)
    assert set(reading.relative_effective_parameters()) == {"Conv", "GConv p4", "FFC"}
    assert (
        "equivariant to" in reading.verdict
        and "p4-equivariant" in reading.verdict
        and "p4" in str(reading)
    )


def test_groups_under_which_a_path_is_equivariant() -> None:
    p4, p4m, p2 = (GConv(8, 8, (4, 4), group=name) for name in ("p4", "p4m", "p2"))
    conv, free = Conv(8, 8, (4, 4)), FFC(8, 8, (4, 4))
    assert (
        p4m.is_equivariant_under(p4)
        and p4.is_equivariant_under(p2)
        and p4.is_equivariant_under(conv)
    )
    assert (
        not p4.is_equivariant_under(p4m)
        and not conv.is_equivariant_under(p4)
        and not p4.is_equivariant_under(free)
    )
    assert Relaxed([free, conv, p4, p4m]).removable_paths() == [0, 1, 2]


@pytest.mark.parametrize("small", ("p4m", "p4", "p2m", "p2", "pm"))
@pytest.mark.parametrize("large", ("p4m", "p4", "p2m", "p2"))
def test_paths_of_two_groups_can_be_added_if_one_contains_the_other(large: str, small: str) -> None:
    """The sum is equivariant to the smaller group if the groups order channels alike."""
    torch.manual_seed(0)
    first, second = (GConv(8, 8, (4, 4), group=group) for group in (large, small))
    layer, x = Relaxed([first, second]).double(), torch.randn(2, 8, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        y = layer(x)
        errors = [(layer(g(x)) - h(y)).abs().max() for g, h in second.transformations()]
    assert first.is_equivariant_under(second) == (float(max(errors)) < 1e-12)
    assert first.is_equivariant_under(second) == ((large, small) in KEPT or large == small)


KEPT = {("p4m", "p4"), ("p4m", "p2"), ("p4", "p2"), ("p2m", "p2")}


def test_the_order_of_channels_does_not_depend_on_the_generators() -> None:
    """The group is given by name, from the library, or by other generators."""
    torch.manual_seed(0)
    swap, mirror = [[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, -1.0]]
    group_of_matrices = groups.Group.from_matrices("mine", [mirror, swap])
    x = torch.randn(2, 8, 4, 4)
    first, *others = (
        GConv(8, 8, (4, 4), group=g) for g in ("p4m", groups.dihedral(4), group_of_matrices)
    )
    for other in others:
        other.load_state_dict(first.state_dict())
        assert_close(other(x), first(x), 1e-6)
        assert first.is_equivariant_under(other) and other.is_equivariant_under(first)
    turned = groups.Group.from_matrices("mine", groups.octahedral().discrete.flip(0))
    assert torch.equal(point_group("O").table, point_group(turned).table)
    assert point_group("Oh").contains(point_group("O")) and point_group("C8").contains(
        point_group("p4")
    )
    assert not point_group("D8").contains(point_group("p4m"))
