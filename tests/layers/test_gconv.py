"""Group convolutions: exact equivariance, the public suite, continuous filters, pooling."""

import itertools
import math

import pytest
import torch
from gconv_case import largest_error, random_case

from symrazor import groups
from symrazor.layers import GFFC, SGFFC, GConv, GReadout, GroupPool, Path, SGConv
from symrazor.layers.point_group import point_group
from symrazor.layers.relaxed import balance_
from symrazor.testing import PathSuite, assert_close

EXACT = ("p4", "p4m", "p2", "pm", "p2m")


KINDS = ("full", "lift", "pointwise", "separable", "depthwise-separable")


class TestFull(PathSuite):
    def make(self) -> Path:
        return GConv(4, 4, (3, 3))


class TestFullStrided(PathSuite):
    def make(self) -> Path:
        return GConv(4, 4, (2, 2), stride=2)


class TestMirrored(PathSuite):
    def make(self) -> Path:
        return GConv(8, 8, (2, 2), group="p4m")


class TestLift(PathSuite):
    def make(self) -> Path:
        return GConv(2, 8, (3, 3), kind="lift")


class TestPointwise(PathSuite):
    def make(self) -> Path:
        return GConv(8, 4, (3, 3), kind="pointwise", padding="zeros")


class TestSeparable(PathSuite):
    def make(self) -> Path:
        return GConv(8, 4, (2, 2), kind="separable")


class TestDepthwiseSeparable(PathSuite):
    def make(self) -> Path:
        return GConv(8, 4, (2, 2), kind="depthwise-separable")


class TestRectangle(PathSuite):
    def make(self) -> Path:
        return GConv(4, 4, (2, 3), group="p2m")


class TestSparse(PathSuite):
    def make(self) -> Path:
        return SGConv(4, 4, (2, 2), anchors=4)


class TestSparseLearned(PathSuite):
    def make(self) -> Path:
        return SGConv(
            2, 3, (3, 3), group="C3", kind="lift", learn_omega="weight", learn_anchors="weight"
        )


class TestFactored(PathSuite):
    def make(self) -> Path:
        return GFFC(8, 4, (2, 2), stride=2, bias=True)


class TestFactoredLift(PathSuite):
    def make(self) -> Path:
        return GFFC(3, 8, (3, 3), lift=True)


class TestSparseFactored(PathSuite):
    def make(self) -> Path:
        return SGFFC(4, 8, (4, 4), 2, anchors=3, bias=True)


class TestSparseFactoredLearned(PathSuite):
    def make(self) -> Path:
        return SGFFC(2, 4, (3, 3), group="p4", lift=True, anchors=4, learn_omega="weight")


class TestReadout(PathSuite):
    def make(self) -> Path:
        return GReadout(8, 3, (2, 2))


class TestInterpolated(PathSuite):
    def make(self) -> Path:
        return GConv(3, 6, (3, 3), group="C3")


@pytest.mark.parametrize("group", EXACT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stride", (1, 2))
def test_every_element_commutes(group: str, kind: str, stride: int) -> None:
    torch.manual_seed(0)
    order = point_group(group).order
    channels = 3 if kind == "lift" else 2 * order
    path, x = random_case(GConv(channels, order, (6, 6), stride, group=group, kind=kind))
    assert path.strict and path.group == group
    assert len(path.transformations()) == order - 1
    assert largest_error(path, x) < 1e-12


@pytest.mark.parametrize("stride", (1, 2, 3))
def test_rotations_and_reflections_of_the_plane(stride: int) -> None:
    """The path is equivariant to rotations about any pixel: a rotation and a shift."""
    torch.manual_seed(0)
    path, x = random_case(GConv(4, 4, (6, 6), stride, group="p4"))
    with torch.no_grad():
        y = path(x)
        for before, after in path.transformations():
            for shift in ((1, 0), (2, 5), (3, 3)):
                moved = path(torch.roll(before(x), shift, (2, 3)))
                backs = itertools.product(range(path.out_shape[0]), repeat=2)
                errors = [
                    (moved - torch.roll(after(y), b, (2, 3))).abs().amax((1, 2, 3)) for b in backs
                ]
                assert float(torch.stack(errors).amin(0).max()) < 1e-12


def test_is_the_definition() -> None:
    """Compute the convolution with loops over elements and offsets."""
    torch.manual_seed(0)
    group = point_group("p4m")
    path, x = random_case(GConv(8, 16, (5, 5), group="p4m"))
    W, b = path.conv.weight.detach(), path.conv.bias.detach()
    y = torch.zeros(2, 8, 2, 5, 5, dtype=torch.float64)
    inputs = x.unflatten(1, (8, 1))
    for g, h, s in itertools.product(range(8), range(8), range(9)):
        source = torch.tensor([s // 3 - 1, s % 3 - 1], dtype=torch.float64)
        dy, dx = (int(v) for v in group.matrices[g] @ source)  # psi(delta') is met at R_g delta'
        relative = next(r for r in range(8) if int(group.table[g, r]) == h)
        shifted = torch.roll(inputs[:, h], (-dy, -dx), (2, 3))
        y[:, g] += torch.einsum("oc,nchw->nohw", W[:, relative, :, s], shifted)
    y += b.reshape(1, 1, -1, 1, 1)
    assert_close(path(x), y.flatten(1, 2), 1e-12)


def test_invalid_inputs_raise() -> None:
    with pytest.raises(ValueError, match="in_channels must be a multiple of 4"):
        GConv(6, 8, (4, 4))
    with pytest.raises(ValueError, match="out_channels must be a multiple of 4"):
        GConv(3, 6, (4, 4), kind="lift")
    with pytest.raises(ValueError, match="needs square maps"):
        GConv(4, 4, (4, 6))
    with pytest.raises(ValueError, match="Unknown group"):
        GConv(4, 4, (4, 4), group="p5")
    with pytest.raises(ValueError, match="kind must be 'full', 'lift'"):
        GConv(4, 4, (4, 4), kind="half")
    with pytest.raises(ValueError, match="'max' or 'mean'"):
        GroupPool(4, "sum")


def test_group_pool() -> None:
    x = torch.randn(2, 8, 3, 3)
    group = point_group("p4")
    for how in ("max", "mean"):
        pool = GroupPool("p4", how)
        for g in range(4):
            moved = pool(group.act(g, x))
            assert torch.allclose(moved, group.act(g, pool(x), regular=False))
    assert torch.equal(GroupPool(4)(x)[:, 0], x[:, ::2].amax(1))


def test_maps_of_a_larger_group_are_maps_of_its_subgroup() -> None:
    """Channels of p4m are channels of p4 with twice the fields; likewise p4 and p2."""
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64)
    for large, small in (("p4m", "p4"), ("p4m", "p2"), ("p4", "p2"), ("D8", "C8"), ("C8", "p4")):
        larger, smaller = point_group(large), point_group(small)
        if not larger.exact:
            continue
        for g in range(smaller.order):
            same = [
                h
                for h in range(larger.order)
                if torch.equal(larger.matrices[h], smaller.matrices[g])
            ]
            assert torch.equal(smaller.act(g, x), larger.act(same[0], x))


def _blobs(size: int, angle: float) -> torch.Tensor:
    """Return a smooth image in the disc, rotated exactly by an angle."""
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    places = (torch.arange(size) - (size - 1) / 2).double() / size
    grid = torch.stack(torch.meshgrid(places, places, indexing="ij"), -1)
    image = torch.zeros(size, size, dtype=torch.float64)
    for centre, width in (((0.1, 0.15), 0.08), ((-0.12, 0.02), 0.06)):
        at = turn.double() @ torch.tensor(centre, dtype=torch.float64)
        image += torch.exp(-(grid - at).square().sum(-1) / (2 * width**2))
    return image.reshape(1, 1, size, size)


def _error_at_45_degrees(size: int, kernel: int) -> float:
    """Measure a continuous filter, as wide as the kernel, on exactly rotated images."""
    torch.manual_seed(0)
    anchors = 0.2 * kernel * torch.tensor([[0.5, 0.2], [-0.7, 0.4], [0.1, -0.9]])
    options = {"group": "C8", "kind": "lift", "anchors": anchors, "omega": 10 / kernel}
    path = SGConv(1, 8, (size, size), kernel=kernel, **options).double()
    (g,) = (
        g
        for g, R in enumerate(path.point_group.matrices)
        if torch.allclose(R, _rotation(math.pi / 4), atol=1e-9)
    )
    with torch.no_grad():
        y, moved = path(_blobs(size, 0.0)), path(_blobs(size, math.pi / 4))
        expected = y.index_select(1, path.point_group.relative[g])
        sizes = moved.square().sum((2, 3)).sqrt(), expected.square().sum((2, 3)).sqrt()
    return float((sizes[0] - sizes[1]).abs().max() / sizes[1].max())


def _rotation(angle: float) -> torch.Tensor:
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)


def test_continuous_filters_turn_by_any_angle_as_far_as_pixels_allow() -> None:
    """A rotation by 45 degrees permutes channel norms, more accurately on finer grids."""
    errors = [_error_at_45_degrees(size, kernel) for size, kernel in ((12, 5), (24, 9), (48, 17))]
    assert errors[0] > 2 * errors[1] and errors[2] < 1e-3, errors
    assert SGConv(4, 4, (4, 4)).interpolation_error == 0
    path, x = random_case(SGConv(4, 4, (6, 6), 2, anchors=5))
    assert path.strict
    with torch.no_grad():
        for before, after in path.transformations():
            assert_close(path(before(x)), after(path(x)), 1e-12)


def test_factored_path_on_a_group() -> None:
    """The path has DC|G|(S + S') weights and equals two sums by einsum."""
    torch.manual_seed(0)
    path, x = random_case(GFFC(8, 12, (2, 3)))
    assert sum(p.numel() for p in path.parameters()) == 2 * 3 * 4 * (6 + 6)
    a, b = path.first.weight.detach(), path.second.weight.detach()
    inputs = x.reshape(2, 4, 2, 6)
    hidden = torch.einsum("cdgs,ngcs->ndc", a.reshape(2, 3, 4, 6), inputs)
    y = torch.einsum("dgoc,ndc->ngdo", b.reshape(3, 4, 6, 2), hidden)
    assert_close(path(x), y.reshape(2, 12, 2, 3), 1e-12)


def test_layers_are_created_on_the_default_device() -> None:
    with torch.device("meta"):
        path = GConv(6, 6, (5, 5), group="C6", kernel=5)
    assert all(value.is_meta for value in (*path.parameters(), *path.buffers()))
    assert GConv(6, 6, (5, 5), group="C6").conv.matrices.device.type == "cpu"


def test_group_pool_checks_its_arguments() -> None:
    x = torch.randn(2, 8, 3, 3)
    assert torch.equal(GroupPool(groups.cyclic(4))(x), GroupPool("p4")(x))
    with pytest.raises(ValueError, match="4 group elements do not divide 6 channels"):
        GroupPool("p4")(x[:, :6])
    with pytest.raises(ValueError, match="number of elements, got 0"):
        GroupPool(0)
    assert GroupPool(groups.symmetric(3)).elements == 6  # of any regular representation
    assert GConv(128, 128, (4, 4), group="C128").point_group.order == 128


@pytest.mark.parametrize("kind", ["separable", "depthwise-separable"])
def test_separable_filters_are_balanced(kind: str) -> None:
    """Balanced filters give the same map, with the highest prior density."""
    torch.manual_seed(0)
    path = GConv(12, 8, (4, 4), kind=kind).double()  # type: ignore[arg-type]
    x = torch.randn(2, 12, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        path.stages[0].weight[1].mul_(50.0)
        path.stages[-1].weight[:, :, 2].mul_(0.01)
    before = path(x).detach()
    groups_of = {name: "all" for name, _ in path.named_parameters()}
    balance_(path, groups_of)
    assert_close(path(x), before, 1e-12)
    *first, last = (stage.weight.detach() for stage in path.stages)
    norms = [w.flatten(1).norm(dim=1) for w in first] + [
        last.transpose(0, 2).flatten(1).norm(dim=1)
    ]
    for norm in norms[1:]:
        assert_close(norm, norms[0], 1e-12)
    weights = [stage.weight.detach().clone() for stage in path.stages]
    with torch.no_grad():  # a zero stays one, and what is beside it is left alone
        path.stages[0].weight[0].zero_()
        path.balance_()
    for stage, old in zip(path.stages[1:], weights[1:], strict=True):
        assert_close(stage.weight, old, 1e-12)
    apart = {**groups_of, "conv.0.weight": "another"}
    with torch.no_grad():
        path.stages[0].weight.mul_(3.0)
    kept = path.stages[0].weight.detach().clone()
    balance_(path, apart)  # tied by no common prior: nothing is moved
    assert torch.equal(path.stages[0].weight, kept)


@pytest.mark.parametrize("group", ["p4", "p4m", "C3"])
def test_learned_widths_rotate_filters_like_fixed_ones(group: str) -> None:
    torch.manual_seed(0)
    order = point_group(group).order
    fixed = SGConv(order, 2 * order, (5, 5), group=group, anchors=4).double()
    torch.manual_seed(0)
    learned = SGConv(order, 2 * order, (5, 5), group=group, anchors=4, learn_omega="weight")
    x = torch.randn(2, order, 5, 5, dtype=torch.float64)
    assert_close(learned.double()(x), fixed(x), 1e-5)  # a fixed basis is made in float32
