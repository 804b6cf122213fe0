"""Linear layers that commute with any group, compared with brute force."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from work import Work

from symrazor import collapse, groups
from symrazor.groups import maps
from symrazor.layers import (
    FC,
    FFC,
    SFC,
    SGFFC,
    Circulant,
    DeepSets,
    EquivariantLinear,
    GConv,
    GraphLinear,
    Relaxed,
    ScaleConv,
    SConv,
    SE2Conv,
    SetPool,
    SGConv,
    relaxed_over,
)
from symrazor.layers.path import Path
from symrazor.testing import PathSuite, assert_close


class TestDeepSets(PathSuite):
    def make(self) -> Path:
        return DeepSets(2, 3, 4)


class TestWideDeepSets(PathSuite):
    """Basis maps first, and Kronecker curvature."""

    def make(self) -> Path:
        return DeepSets(17, 16, 3)


class TestCirculant(PathSuite):
    def make(self) -> Path:
        return Circulant(2, 2, 5)


class TestManyCoefficients(PathSuite):
    """The whole matrix, and Kronecker curvature."""

    def make(self) -> Path:
        return Circulant(13, 6, 7)


class TestGrid(PathSuite):
    def make(self) -> Path:
        return EquivariantLinear(1, 2, groups.translations((2, 3)), in_shape=(2, 3))


class TestVectors(PathSuite):
    def make(self) -> Path:
        return EquivariantLinear(2, 3, groups.so(3))


class TestTensors(PathSuite):
    """From vectors and scalars to matrices, with a bias along the unit matrix."""

    def make(self) -> Path:
        group = groups.o(2)
        vectors = groups.defining(group)
        return EquivariantLinear(2, 2, vectors + groups.invariant(group), vectors * vectors)


class TestRegular(PathSuite):
    def make(self) -> Path:
        group = groups.dihedral(3)
        return EquivariantLinear(1, 2, groups.regular(group), groups.defining(group))


def reynolds(source: groups.Representation, target: groups.Representation) -> Tensor:
    """Return the projection onto equivariant maps, by averaging over all elements."""
    finite = source.group.finite()
    images = [{finite.identity: torch.eye(r.size).double()} for r in (source, target)]
    waiting = [finite.identity]
    for a in waiting:
        for k, g in enumerate(finite.generators):
            b = int(finite.table[a, g])
            if b not in images[0]:
                for image, r in zip(images, (source, target), strict=True):
                    image[b] = image[a] @ r.discrete[k]
                waiting.append(b)
    total = sum(torch.kron(images[1][g], torch.linalg.inv(images[0][g]).T) for g in finite.elements)
    assert isinstance(total, Tensor)
    return total / finite.order


@pytest.mark.parametrize(
    "group",
    [
        groups.symmetric(4),
        groups.alternating(4),
        groups.dihedral_permutations(5),
        groups.cyclic_permutations(2) @ groups.symmetric(3),
        groups.cyclic_permutations(3) * groups.symmetric(2),
        groups.dihedral(3),
        groups.octahedral(),
        groups.cyclic(4) * groups.cyclic(2),
    ],
    ids=lambda g: g.name,
)
@pytest.mark.parametrize("kind", ["same", "to regular", "from scalars", "to tensors"])
def test_the_basis_spans_the_image_of_the_averaging_projection(
    group: groups.Group, kind: str
) -> None:
    source = target = groups.defining(group)
    if kind == "to regular":
        target = groups.regular(group)
    elif kind == "from scalars":
        source = groups.invariant(group, 2)
    elif kind == "to tensors":
        target = target * target
    if source.size * target.size > 200:
        target = groups.invariant(group)
    Q = groups.equivariant_maps(source, target).matrices().flatten(1)
    t = target.size
    assert float((Q @ Q.T - t * torch.eye(len(Q)).double()).abs().sum()) < 1e-9
    assert float((Q.T @ Q / t - reynolds(source, target)).abs().max()) < 1e-10


@pytest.mark.parametrize("n", [2, 5, 100])
def test_sets_have_two_maps(n: int) -> None:
    layer = DeepSets(3, 2, n).double()
    x = torch.randn(4, 3, n, dtype=torch.float64)
    u = layer.map.weight.detach()
    others = (x.sum(2, keepdim=True) - x) / (n - 1) ** 0.5
    expected = torch.einsum("oi,nis->nos", u[:, :, 0], x)
    expected = expected + torch.einsum("oi,nis->nos", u[:, :, 1], others)
    assert_close(layer(x), expected, 1e-12)


def test_a_circulant_layer_is_a_circular_convolution() -> None:
    layer = Circulant(2, 3, 6).double()
    conv = nn.Conv1d(2, 3, 6, bias=False).double()
    labels = layer.map.labels
    with torch.no_grad():
        # entry (t, s) of the matrix of a convolution that looks ahead belongs to offset s - t
        conv.weight.copy_(layer.map.weight[:, :, labels[0]])
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    expected = conv(torch.cat([x, x[:, :, :-1]], 2))
    assert_close(layer(x), expected, 1e-12)


@pytest.mark.parametrize("n", [3, 4])
def test_every_element_commutes(n: int) -> None:
    layer = DeepSets(2, 2, n).double()
    x = torch.randn(3, 2, n, dtype=torch.float64)
    for order in itertools.permutations(range(n)):
        assert_close(layer(x[:, :, list(order)]), layer(x)[:, :, list(order)], 1e-12)


def test_converting_through_float32_loses_nothing() -> None:
    layer = EquivariantLinear(1, 1, groups.dihedral(5)).float().double()
    x = torch.randn(3, 1, 2, dtype=torch.float64)
    turn = groups.dihedral(5).discrete[0]
    assert_close(layer(x @ turn.T), layer(x) @ turn.T, 1e-12)


RING = torch.eye(200).roll(1, 0) + torch.eye(200).roll(-1, 0)
LARGE = {
    "DeepSets": lambda: DeepSets(8, 8, 1000),
    "Circulant": lambda: Circulant(8, 8, 1000),
    "translations": lambda: EquivariantLinear(
        8, 8, groups.translations((32, 32)), in_shape=(32, 32)
    ),
    "GraphLinear": lambda: GraphLinear(8, 8, RING),
    "SO(3)": lambda: EquivariantLinear(8, 8, groups.so(3)),
    "SO(30)": lambda: EquivariantLinear(1, 1, groups.so(30)),
    "GConv, p4m": lambda: GConv(256, 256, (16, 16), group="p4m"),
    "GConv, C16": lambda: GConv(256, 256, (16, 16), group="C16", kernel=7),
    "SGConv": lambda: SGConv(256, 256, (16, 16), group="C8", kernel=5),
    "SE2Conv": lambda: SE2Conv(256, 256, (16, 16), angles=16, kernel=7),
    "ScaleConv": lambda: ScaleConv(240, 240, (16, 16)),
    "SGFFC": lambda: SGFFC(64, 64, (16, 16), group="p4m"),
    "SConv": lambda: SConv(256, 256, (16, 16)),
    "SFC": lambda: SFC(128, 128, (16, 16)),
    "FFC": lambda: FFC(128, 128, (16, 16)),  # as long as it takes to draw 8 million numbers
}


@pytest.mark.parametrize("name", LARGE)
def test_construction_takes_little_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are twice the largest counts without a cache: 17,364 and 46 million."""
    monkeypatch.setattr(maps, "_cache", type(maps._cache)())
    with Work() as work:
        LARGE[name]()
    assert work.operations < 35_000
    assert work.numbers < 92e6


def test_isotropic_tensors() -> None:
    """Maps between powers of vectors under SO(3): 1, 0, 1, 1, 3, 6 invariants of rank 0 to 5."""
    group = groups.so(3)
    v = groups.defining(group)
    powers = [groups.invariant(group), v, v * v, v * v * v]
    counts = [groups.equivariant_maps(powers[0], p).count for p in powers]
    assert counts == [1, 0, 1, 1]
    assert groups.equivariant_maps(powers[2], powers[2]).count == 3
    assert groups.equivariant_maps(powers[2], powers[3]).count == 6


def test_representations_that_do_not_fit_raise() -> None:
    group, other = groups.so(3), groups.o(3)
    v = groups.defining(group)
    with pytest.raises(ValueError, match="representations of one group"):
        EquivariantLinear(1, 1, v, groups.defining(other))
    with pytest.raises(ValueError, match="generators of SO\\(3\\) and O\\(3\\) differ"):
        v * groups.defining(other)
    with pytest.raises(ValueError, match="no equivariant map from"):
        EquivariantLinear(1, 1, v, groups.invariant(group))
    with pytest.raises(ValueError, match=r"need 4 input and 4 output positions, got .* \(5,\)"):
        EquivariantLinear(1, 1, groups.symmetric(4), in_shape=(5,))
    with pytest.raises(ValueError, match="Group or a Representation, got int"):
        EquivariantLinear(1, 1, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'sum', 'mean' or 'max'"):
        SetPool("median")  # type: ignore[arg-type]


def test_a_representation_must_compose() -> None:
    group = groups.dihedral(3)
    with pytest.raises(ValueError, match=r"do not compose as D3 for the pair"):
        groups.Representation.of(group, [[1, 2, 0], [0, 1, 2]])
    rows = groups.Representation.of(group, [[1, 2, 0], [1, 0, 2]])
    assert rows.size == 3
    turned = groups.so(3).lie
    assert turned is not None
    with pytest.raises(ValueError, match="flows do not compose as SO"):
        groups.Representation.of(groups.so(3), flows=2 * turned.generators)


def test_pools_are_permutation_invariant() -> None:
    x = torch.randn(3, 2, 2, 3, dtype=torch.float64)
    flat = x.flatten(2)
    for reduction, expected in {
        "sum": flat.sum(2),
        "mean": flat.mean(2),
        "max": flat.amax(2),
    }.items():
        assert_close(SetPool(reduction)(x), expected, 1e-14)  # type: ignore[arg-type]
    for wrong in (torch.randn(3, 4), torch.randn(3, 4, 0)):
        with pytest.raises(ValueError, match="non-empty maps"):
            SetPool("max")(wrong)


def test_paths_of_several_groups_and_a_free_one_collapse_to_a_matrix() -> None:
    torch.manual_seed(0)
    layer = Relaxed([DeepSets(2, 3, 4), Circulant(2, 3, 4), FC(2, 3, (4,))])
    model = nn.Sequential(layer, nn.ReLU(), SetPool("sum"), nn.Linear(3, 2)).double()
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    plain = collapse(model, x)
    assert_close(plain(x), model(x), 1e-12)
    assert [type(m).__name__ for m in plain[0]] == ["Flatten", "Linear", "Unflatten"]


class TestBeyond(PathSuite):
    def make(self) -> Path:
        ring = groups.cyclic_permutations(5)
        larger = [groups.dihedral_permutations(5), groups.symmetric(5)]
        return EquivariantLinear(2, 2, ring, orthogonal_to=larger)


def test_every_map_belongs_to_one_path() -> None:
    """Paths of a chain of groups are orthogonal and span the maps of the smallest group."""
    ring, both, all_permutations = (
        groups.cyclic_permutations(6),
        groups.dihedral_permutations(6),
        groups.symmetric(6),
    )
    layer = relaxed_over(1, 1, [ring, all_permutations, both])
    maps = [layer.path(i).map._exact.get("basis") for i in range(3)]  # type: ignore[union-attr]
    whole = groups.equivariant_maps(groups.defining(ring), groups.defining(ring)).matrices()
    largest = groups.equivariant_maps(
        groups.defining(all_permutations), groups.defining(all_permutations)
    ).matrices()
    spans = [largest, maps[0], maps[2]]
    assert [len(Q) for Q in spans if Q is not None] == [2, 2, 2]  # 6 in all: Z6 has 6 maps
    stacked = torch.cat([Q.flatten(1) for Q in spans if Q is not None]) / 6**0.5
    assert_close(stacked @ stacked.T, torch.eye(6).double(), 1e-10)
    flat = whole.flatten(1) / 6**0.5
    assert_close(stacked.T @ stacked, flat.T @ flat, 1e-10)
    assert [path.group for path in layer.paths] == ["Z6", "S6", "Dih6", None]
    assert [bool(list(path.offset.parameters())) for path in list(layer.paths)[:3]] == [
        False,
        True,
        False,
    ]  # the constant bias is that of the largest group


def test_orthogonal_maps_must_exist() -> None:
    with pytest.raises(ValueError, match="no equivariant map from"):
        EquivariantLinear(1, 1, groups.alternating(4), orthogonal_to=[groups.symmetric(4)])
    with pytest.raises(ValueError, match="on the 4 positions of Z4, got S5"):
        EquivariantLinear(1, 1, groups.cyclic_permutations(4), orthogonal_to=[groups.symmetric(5)])
    for beyond in (groups.symmetric(4), ["S4"]):
        with pytest.raises(ValueError, match="orthogonal_to must be a list of groups"):
            EquivariantLinear(1, 1, groups.cyclic_permutations(4), orthogonal_to=beyond)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one symrazor.groups.Group"):
        relaxed_over(1, 1, [])


def test_a_graph_layer_commutes_with_its_symmetries() -> None:
    path_graph = torch.diag(torch.ones(4), 1) + torch.diag(torch.ones(4), -1)
    layer = GraphLinear(2, 3, path_graph).double()
    assert layer.map.count == 13  # orbits of 25 pairs under the reversal
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    with torch.no_grad():
        layer.offset.values.normal_()  # type: ignore[union-attr, operator]
    assert_close(layer(x.flip(2)), layer(x).flip(2), 1e-12)
    assert layer.offset.values.shape == (3, 3)  # type: ignore[union-attr]


def _projection(rho: groups.Representation) -> Tensor:
    """The basis spans the null space of all constraints together."""
    n, identity = rho.size, torch.eye(rho.size, dtype=torch.float64)
    rows = [
        torch.kron(m.contiguous(), identity) - torch.kron(identity, m.T.contiguous())
        for m in (*rho.discrete, *rho.flows)
    ]
    _, sigma, V = torch.linalg.svd(torch.cat(rows))
    kept = V[int((sigma > 1e-9).sum()) :]
    return kept.T @ kept if rows else torch.eye(n * n, dtype=torch.float64)


_TURNS = groups.so(3)
_CUBE = groups.octahedral()
SPACES = {
    "SO(4)": groups.defining(groups.so(4)),
    "O(5)": groups.defining(groups.o(5)),
    "tensors": groups.defining(_TURNS) * groups.defining(_TURNS) + groups.defining(_TURNS),
    "cube": groups.defining(_CUBE) * groups.defining(_CUBE),
    "C5 twice": groups.defining(groups.cyclic(5) * groups.cyclic(5)),
    "not normal": groups.defining(groups.affine2()),
    "SE(2)": groups.defining(groups.se2()),
    "shears": groups.defining(groups.Group.from_matrices("s", [[[1, 1], [0, 1]]])),
    "skewed": groups.defining(groups.Group.from_matrices("s", [[[1, 1], [0, -1]]])),
}


@pytest.mark.parametrize("name", SPACES)
def test_null_spaces_are_those_of_all_constraints_at_once(name: str) -> None:
    rho = SPACES[name]
    basis = groups.equivariant_maps(rho, rho)
    flat = basis.matrices().flatten(1) / rho.size**0.5
    assert_close(flat @ flat.T, torch.eye(basis.count, dtype=torch.float64), 1e-10)
    assert_close(flat.T @ flat, _projection(rho), 1e-9)


def test_large_orthogonal_groups_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decomposing the 900 x 900 constraints of one generator would take 729 million operations."""
    monkeypatch.setattr(maps, "_cache", type(maps._cache)())
    with Work() as work:
        rho = groups.defining(groups.so(30))
        basis = groups.equivariant_maps(rho, rho)
    assert work.numbers < 50e6
    assert_close(basis.matrices()[0].abs(), torch.eye(30, dtype=torch.float64), 1e-9)
    assert EquivariantLinear(1, 1, groups.o(40)).map.count == 1  # no limit of 32 x 32 any more
    shear = torch.eye(33, dtype=torch.float64)
    shear[0, 1] = 1.0
    with pytest.raises(ValueError, match="orthogonal matrices"):
        EquivariantLinear(1, 1, groups.Group.from_matrices("shear", shear.unsqueeze(0)))


def test_groups_with_the_same_maps_raise() -> None:
    for pair in ([groups.symmetric(4)] * 2, [groups.symmetric(4), groups.alternating(4)]):
        with pytest.raises(ValueError, match="have the same equivariant maps"):
            relaxed_over(1, 1, pair)
    with pytest.raises(ValueError, match="Group, got 'p4'"):
        relaxed_over(1, 1, ["p4"])  # type: ignore[list-item]


def test_two_equal_groups_can_be_combined() -> None:
    first, second = groups.symmetric(4), groups.symmetric(4)
    assert first.is_same(second) and not first.is_same(groups.alternating(4))
    assert not groups.cyclic(4).is_same(groups.so(2)) and groups.so(3).is_same(groups.so(3))
    path = EquivariantLinear(
        1, 1, groups.defining(first) * groups.defining(second), groups.defining(second)
    )
    assert path.maps.count == 5  # orbits of triples of places: Bell(3)


def test_a_single_group_and_ragged_graphs_raise() -> None:
    with pytest.raises(ValueError, match="groups must be a list of groups, got <Group S8"):
        relaxed_over(1, 1, groups.symmetric(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Pass an adjacency matrix \[n, n\], got a list"):
        GraphLinear(1, 1, [[0, 1], [1]])  # type: ignore[arg-type]
