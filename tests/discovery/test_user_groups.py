"""Pass groups by name, as files and as `Group`s."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from discover_data import some_data
from torch import Tensor

import symrazor as sr
from symrazor import groups
from symrazor.data import dataset
from symrazor.data.arrays import prepare
from symrazor.discovery import digits
from symrazor.discovery.api import analyse
from symrazor.discovery.digits import discover_digits
from symrazor.discovery.families import candidates_for
from symrazor.discovery.question import Options
from symrazor.experiments.hidden_symmetry import ring
from symrazor.groups import Group
from symrazor.layers import Relaxed
from symrazor.symmetry.equivariance import layer_errors
from symrazor.testing.oracles import assert_close

TURN = [[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
RINGS = [
    ring(order, f"ring {i}") for i, order in enumerate(([0, 1, 2, 3, 4, 5], [0, 2, 4, 1, 5, 3]))
]


def written(folder: Path, group: Group) -> str:
    """Write a group of permutations to a file."""
    assert group.permutations is not None
    file = folder / f"{group.name.replace(' ', '-')}.json"
    document = {"name": group.name, "permutations": group.permutations.tolist()}
    file.write_text(json.dumps(document))
    return str(file)


def neighbours(n: int = 240) -> tuple[Tensor, Tensor]:
    """Return six numbers, and the sum of products of neighbours on the second ring."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    along = x[:, [0, 2, 4, 1, 5, 3]]
    y = (along * along.roll(-1, 1)).sum(1)
    return x, y / y.std() + 0.1 * torch.randn(n, generator=generator)


@pytest.mark.slow
def test_the_right_group_of_two_is_found(tmp_path: Path) -> None:
    """Either the network with the group built in or the relaxed network finds it."""
    given = [written(tmp_path, group) for group in RINGS]
    discovery = sr.discover(*neighbours(), groups=given, epochs=25, progress=False)
    headline = discovery.results[0].answer.headline
    stated, _, _ = headline.partition(";")  # ring 0 may remain undecided
    assert stated.removesuffix(".") in (
        "Invariant under ring 1",
        "Invariant under ring 1, not under ring 0",
    )
    nats = {c.name: c.log_evidence for c in discovery.candidates}
    assert nats["ring 1"] > nats["ring 0"] + 20


def test_a_group_from_a_file_is_built_into_the_saved_network(tmp_path: Path) -> None:
    x, y = neighbours(60)
    given = [written(tmp_path, group) for group in RINGS]
    discovery = sr.discover(x, y, groups=given, epochs=1, starts=1, progress=False)
    kept = discovery.results[0].answer.named("ring 1").fit
    assert (
        discovery.results[0].answer.named("ring 1").fit.reading.equivariance_error["ring 1"] < 1e-5
    )
    assert discovery.results[0].answer.named("ring 1").fit.reading.equivariance_error["S6"] > 1e-3
    moved = x[:, RINGS[1].element(2).argsort()]
    assert_close(kept.model.cpu()(moved), kept.model(x), 1e-5)
    discovery.save(tmp_path / "run")
    again = torch.export.load(tmp_path / "run" / "network.pt2").module()
    assert_close(again(x), discovery.network()(x), 1e-5)


def test_candidates_are_invariant_under_their_group() -> None:
    """The relaxed network has a path for every group."""
    flip = Group.from_permutations("flip", [[5, 4, 3, 2, 1, 0]])
    shapes = {"vector": (6,), "series": (2, 6), "set": (6, 2), "image": (2, 2, 3)}
    for kind, shape in shapes.items():
        data = dataset(torch.randn(30, *shape), torch.arange(30) % 2, kind=kind)  # type: ignore[arg-type]
        family = candidates_for(data, ["cyclic", flip])
        assert [s.name for s in family.structures] == ["relaxed", "Z6", "flip", "fully connected"]
        x = prepare(data, same_scale=True).inputs(data.x)
        relaxed = family.structures[0].make()
        labels = [[p.group for p in m.paths] for m in relaxed.modules() if isinstance(m, Relaxed)]
        assert labels == [["S6", "Z6", "flip", None]] * 2
        for structure in family.structures[1:3]:
            model = structure.make()
            before = groups.action_on(family.groups[structure.name], x.shape)
            for g in before.sample(3):
                assert_close(model(before.act(x, g)), model(x), 1e-5)
            other = next(g for name, g in family.groups.items() if name != structure.name)
            assert (
                sr.equivariance_error(
                    model, x, (groups.action_on(other, x.shape), groups.TrivialAction(other))
                )
                > 1e-3
            )


def test_permuted_features_share_one_scale() -> None:
    x, y = neighbours()
    x = x * torch.tensor([1.0, 2, 3, 4, 5, 6])
    options = replace(Options(epochs=1, starts=1, progress=False), groups=("cyclic",))
    result = analyse(dataset(x, y), options, lambda text: None)
    assert result.preparation is not None and result.preparation.scale.shape == (1,)
    alone = analyse(dataset(x, y), Options(epochs=1, starts=1, progress=False), lambda text: None)
    assert alone.preparation is not None and alone.preparation.scale.shape == (6,)


def test_as_many_outputs_as_positions() -> None:
    """Outputs are invariant, although a map of positions to positions would permute them."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    discovery = sr.discover(
        x, torch.arange(60) % 6, groups="cyclic", epochs=1, starts=1, progress=False
    )
    kept = next(c for c in discovery.candidates if c.name == "Z6")
    assert kept.fit.reading.equivariance_error["Z6"] < 1e-5


def test_an_unfinished_run_is_not_resumed_with_another_group(tmp_path: Path) -> None:
    told: list[str] = []
    for steps in ([[1, 2, 3, 4, 5, 0]], [[1, 2, 3, 4, 5, 0]], [[5, 4, 3, 2, 1, 0]]):
        group = Group.from_permutations("mine", steps)
        options = {
            "epochs": 1,
            "starts": 1,
            "out": tmp_path,
            "progress": False,
            "tell": told.append,
        }
        sr.discover(*neighbours(40), groups=[group], **options)
        told.append("next")
    again = [text for text in told if "resuming" in text or text == "next"]
    assert again[1:] == ["  resuming an unfinished run of the same command", "next", "next"]


def test_grid_groups_from_files(tmp_path: Path) -> None:
    file = tmp_path / "swap.json"
    file.write_text('{"name": "swap", "matrices": [[[0, 1], [1, 0]]]}')
    discovery = sr.discover(
        some_data("image"), groups=str(file), epochs=1, starts=1, progress=False
    )
    layers = [
        layer
        for layer in discovery.results[0].answer.named("relaxed").fit.reading.layers
        if layer.relaxed
    ]
    assert all({"swap", "translation"} == {*layer.equivariance_error} for layer in layers)
    about_z = Group.from_matrices("about z", [TURN])
    family = candidates_for(some_data("volume"), ["translation", about_z, "O"])
    for structure in family.structures[:2]:  # 4 channels are too few for 24 rotations
        convolution = next(m for m in structure.make().modules() if hasattr(m, "kernel_size"))
        assert convolution.out_channels == 24
    paths = [m.paths for m in family.structures[0].make().modules() if isinstance(m, Relaxed)]
    assert [[p.group for p in layer_paths] for layer_paths in paths] == [
        ["translation", "about z", "O", None]
    ] * len(paths)


def test_digits_use_the_groups_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_groups: list[object] = []

    def note(task: object, given: object) -> object:
        passed_groups.append(given)
        raise InterruptedError

    monkeypatch.setattr(digits, "digit_family", note)
    with pytest.raises(InterruptedError):
        discover_digits(Options(groups=("p4",)))
    assert passed_groups == [("p4",)]
    monkeypatch.undo()
    names = {
        p.group
        for m in digits.digit_family("digit", ["p4"]).structures[0].make().modules()
        if isinstance(m, Relaxed)
        for p in m.paths
    }
    assert names == {"translation", "p4", None}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "vector",
            ["p4"],
            "Groups for vectors must permute positions, got p4. Use permutation, cyclic",
        ),
        ("vector", ["p4", "cyclic"], "unknown group 'p4' for vectors. Use permutation, "),
        (
            "vector",
            [groups.cyclic_permutations(4)],
            "Z4 consists of permutations of 4, but vectors of 5 need permutations of 5",
        ),
        ("vector", [groups.cyclic(5)], "matrices of 2 rows, but vectors have 5"),
        (
            "vector",
            ["cyclic", groups.cyclic(5)],
            "Group C5 consists of matrices of 2, but vectors of 5 need permutations of 5",
        ),
        ("vector", ["cyclic", "cyclic"], "Groups need different names .* got Z5, Z5 and S5"),
        (
            "vector",
            ["cyclic", Group.from_permutations("?", [[1, 0, 2, 3, 4]])],
            "letters or digits",
        ),
        ("set", ["translation"], "Groups for sets must permute positions, got translation"),
        ("series", [Group.from_permutations("1", [[*range(16)]])], None),
        ("image", [Group.from_permutations("one", [[*range(64)]])], None),
        ("image", [Group.from_permutations("1", [[*range(64)]])], None),
        ("image", ["O"], "Group O does not fit the data: "),
        ("image", ["teapot"], "Unknown group 'teapot'. Use translation, "),
        ("image", [groups.so(2)], "is continuous"),
        ("image", ["cyclic"], None),
        ("image", [3], "A group must be a name, .* or a Group, got int"),
    ],
)
def test_wrong_groups_raise_errors(kind: str, given: list[object], message: str | None) -> None:
    data = some_data(kind)
    if message is None:
        assert candidates_for(data, given).structures  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=message):
        sr.discover(data, groups=given, epochs=1)


def test_large_groups_trajectories_and_wrong_files_raise_errors(tmp_path: Path) -> None:
    data = dataset(torch.randn(30, 100), torch.arange(30) % 2)
    with pytest.raises(ValueError, match="10,000 equivariant maps on 100 positions; at most 4,096"):
        candidates_for(data, [groups.trivial(100)])
    times = np.linspace(0, 1, 30)
    states = torch.randn(4, 30, 2)
    moving = dataset(states, kind="trajectory", times=torch.from_numpy(times))
    with pytest.raises(ValueError, match="groups has no effect on trajectories"):
        sr.discover(moving, groups=["cyclic"])
    (tmp_path / "bad.json").write_text('{"permutations": [[0, 0]]}')
    with pytest.raises(ValueError, match=r"bad.json: Row 0 is not a permutation of 0 to 1"):
        Options(groups=(str(tmp_path / "bad.json"),))
    for missing in (tmp_path / "not-there.json", str(tmp_path / "not-there.json")):
        with pytest.raises(OSError, match=r"not-there.json"):
            Options().change(groups=missing)
    with pytest.raises(ValueError, match="groups is empty. Name at least one group"):
        Options(groups=())


def test_error_of_a_network_on_vectors() -> None:
    mlp = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2))
    x = torch.randn(20, 6)
    model = sr.relax(mlp, x, groups=[groups.cyclic_permutations(6)])
    group = groups.cyclic_permutations(6)
    error = sr.equivariance_error(mlp, x, group)
    assert layer_errors(model, x).network == {"Z6": pytest.approx(error, rel=1e-3)}
