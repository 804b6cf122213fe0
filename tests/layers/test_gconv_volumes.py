"""Group convolutions on grids in three dimensions: the rotations of a cube and their subgroups."""

import pytest
import torch
from gconv_case import largest_error
from torch import nn

import symrazor as sr
from symrazor import groups
from symrazor.core.likelihood import Categorical
from symrazor.curvature.estimate import Method, estimate_curvature
from symrazor.layers import GFFC, Conv, GConv, GReadout, GroupPool, Path, Relaxed, SGConv
from symrazor.layers.gconv import Kind
from symrazor.layers.point_group import point_group
from symrazor.symmetry.collapse import collapse
from symrazor.testing import Head, PathSuite, assert_close, dense_block, dense_ggn


def _about_z() -> groups.Group:
    """Return quarter turns about one axis: a subgroup of the octahedral group."""
    turn = [[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    return groups.Group.from_matrices("C4 about z", [turn])


def _tetrahedral() -> groups.Group:
    """Return the tetrahedral group, with 12 elements."""
    half = torch.diag(torch.tensor([-1.0, -1.0, 1.0])).tolist()
    third = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    return groups.Group.from_matrices("T", [half, third])


class TestLift(PathSuite):
    def make(self) -> Path:
        return GConv(1, 4, (2, 2, 2), group=_about_z(), kind="lift")


class TestFull(PathSuite):
    def make(self) -> Path:
        return GConv(4, 4, (2, 2, 2), group=_about_z())


class TestStrided(PathSuite):
    def make(self) -> Path:
        return GConv(4, 4, (2, 2, 2), 2, group=_about_z())


class TestNotACube(PathSuite):
    def make(self) -> Path:
        return GConv(4, 4, (3, 2, 2), group=_about_z(), kind="separable")


class TestSparse(PathSuite):
    def make(self) -> Path:
        return SGConv(1, 4, (2, 2, 2), group=_about_z(), kind="lift", anchors=4)


class TestReadout(PathSuite):
    def make(self) -> Path:
        return GReadout(8, 2, (2, 2, 2), group=_about_z())


def _random(path: Path) -> tuple[Path, torch.Tensor]:
    path = path.double()
    with torch.no_grad():
        for parameter in path.parameters():
            parameter.normal_()
    return path, torch.randn(2, path.in_channels, *path.in_shape, dtype=torch.float64)


@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize(
    ("group", "kind"),
    [
        *(("O", k) for k in ("lift", "full", "pointwise", "separable", "depthwise-separable")),
        *(("Oh", k) for k in ("lift", "full")),
    ],
)
def test_every_element_of_the_octahedral_group_commutes(
    group: str, kind: Kind, stride: int
) -> None:
    torch.manual_seed(0)
    order = point_group(group).order
    channels = 2 if kind == "lift" else order
    path, x = _random(GConv(channels, order, (4, 4, 4), stride, group=group, kind=kind))
    assert path.strict and path.group == group and order == {"O": 24, "Oh": 48}[group]
    assert len(path.transformations()) == order - 1
    assert largest_error(path, x) < 1e-12


def test_elements_move_images_as_their_matrices_say() -> None:
    """A quarter turn about z maps x to y: on a tensor [z, y, x] it rotates two axes."""
    group = point_group(_about_z())
    x = torch.randn(1, 1, 3, 4, 4)
    turned = group.act(1, x, regular=False)
    assert torch.equal(turned, torch.rot90(x, -1, (-2, -1)))


def test_curvature_of_a_lift_to_the_tetrahedral_group_is_the_dense_ggn() -> None:
    torch.manual_seed(0)
    path = GConv(1, 12, (2, 2, 2), group=_tetrahedral(), kind="lift").double()
    x = torch.randn(3, 1, 2, 2, 2, dtype=torch.float64)
    model, y = Head(path, 12 * 8), torch.arange(3)
    for block in estimate_curvature(
        model, Categorical(), [(x, y)], Method(structure="block")
    ).blocks:
        expected = dense_ggn(model, Categorical(), x, y, block.names)
        assert_close(dense_block(block), expected, 1e-8)


def test_a_whole_network_is_invariant_and_collapses() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(GConv(1, 24, (4, 4, 4), group="O", kind="lift"), nn.ReLU()),
        *(Relaxed([GConv(24, 24, (4, 4, 4), 2, group="O"), Conv(24, 24, (4, 4, 4), 2)]), nn.ReLU()),
        *(GroupPool("O"), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(1, 3)),
    ).double()
    x = torch.randn(3, 1, 4, 4, 4, dtype=torch.float64)
    assert_close(collapse(model, x)(x), model(x).detach(), 1e-9)
    with torch.no_grad():
        for parameter in model[2].path(1).parameters():
            parameter.zero_()
    assert sr.equivariance_error(model, x, groups.octahedral(), count=23) < 1e-10


def test_maps_of_another_shape_raise() -> None:
    with pytest.raises(ValueError, match=r"O needs cubic maps in 3 dimensions, got .*\(4, 4\)"):
        GConv(1, 24, (4, 4), group="O", kind="lift")
    with pytest.raises(ValueError, match=r"O needs cubic maps in 3 dimensions, got .*\(4, 4, 3\)"):
        GConv(1, 24, (4, 4, 3), group="O", kind="lift")
    with pytest.raises(ValueError, match=r"needs square maps in 2 dimensions, got .*\(4, 4, 4\)"):
        GConv(1, 4, (4, 4, 4), kind="lift")
    GConv(1, 4, (3, 4, 4), group=_about_z(), kind="lift")
    GConv(1, 8, (2, 3, 4), group=groups.reflections(3), kind="lift")
    with pytest.raises(ValueError, match=r"O acts on maps in 3 dimensions, got \(4, 4\)"):
        GFFC(24, 24, (4, 4), group="O")
    with pytest.raises(ValueError, match=r"SO\(3\) is continuous. Sample it"):
        GConv(1, 24, (4, 4, 4), group=groups.so(3), kind="lift")


@pytest.mark.parametrize("group", ["O", groups.octahedral()], ids=["name", "group"])
def test_a_network_on_volumes_is_relaxed(group: str | groups.Group) -> None:
    """The equivariant part of every convolution becomes a path; the outputs are unchanged."""
    torch.manual_seed(0)
    cnn = nn.Sequential(
        *(nn.Conv3d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv3d(24, 24, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(24, 3)),
    )
    x = torch.randn(2, 1, 4, 4, 4)
    relaxed = sr.relax(cnn, x, groups=["translation", group])
    assert_close(relaxed(x), cnn(x), 1e-5)
    assert [path.label for path in relaxed[2].paths] == ["Conv", "GConv O", "FFC"]
