"""Code for a network of the user: what the answer asks to change, ready to paste."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Dataset, dataset
from symrazor.discovery.document import COPIES, code_for
from symrazor.groups import OnGrid
from symrazor.layers.point_group import point_group

GENERATOR = torch.Generator().manual_seed(0)


def answered(**holds: bool | None) -> Any:
    """Return a stand-in for an answer with these claims, and no measured gain."""
    claims = [SimpleNamespace(name=k.replace("_", "-"), holds=v) for k, v in holds.items()]
    recommended = SimpleNamespace(name="two hidden layers")
    return SimpleNamespace(
        claims=claims, expected_gain=None, invariances=None, recommended=recommended
    )


def data_of(kind: str, *shape: int) -> Dataset:
    x = torch.rand(40, *shape, generator=GENERATOR)
    return dataset(x, torch.arange(40) % 3, kind=kind)


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(code, names)
    return names


def test_a_cnn_becomes_invariant_where_position_does_not_matter() -> None:
    data = data_of("image", 1, 8, 8)
    cnn = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    )
    network = run(code_for(answered(translation=True), data), network=cnn, x=data.x)["network"]
    shifted = network(data.x.roll((1, 3), (2, 3)))
    assert torch.allclose(shifted, network(data.x), atol=1e-5)


@pytest.mark.parametrize(
    ("holds", "moves"),
    [
        ({}, ()),
        ({"x_translation": True, "y_translation": False}, (3,)),
        ({"x_translation": False, "y_translation": True}, (2,)),
        ({"x_translation": True, "y_translation": True}, ()),  # contradicts the first claim
    ],
)
def test_a_readout_sees_the_axes_that_matter(holds: dict[str, bool], moves: tuple[int]) -> None:
    data = data_of("image", 1, 8, 8)
    readout = run(code_for(answered(translation=False, **holds), data))["readout"]
    maps = torch.rand(5, 4, 6, 6, generator=GENERATOR)
    for axis in (2, 3):
        is_equal = torch.allclose(readout(maps), readout(maps.roll(1, axis)), atol=1e-6)
        assert is_equal == (axis in moves)
    assert readout(maps).shape == (5, 3)


@pytest.mark.parametrize("kind", ["series", "volume"])
def test_other_grids_have_their_own_pool(kind: str) -> None:
    data = data_of(kind, *((2, 12) if kind == "series" else (1, 4, 4, 4)))
    code = code_for(answered(translation=False), data)
    assert f"AdaptiveMaxPool{data.x.ndim - 2}d" in code
    assert run(code)["readout"](data.x).shape == (40, 3)


@pytest.mark.parametrize("name", COPIES)
def test_averages_have_the_group(name: str) -> None:
    data = data_of("image", 1, 5, 5)
    predict = run(code_for(answered(**{name: True}), data))["predict"]
    network = nn.Sequential(nn.Flatten(), nn.Linear(25, 3))
    group = point_group(name)
    action = OnGrid(group.group, (5, 5))
    for element in range(group.order):
        copies = action.act(data.x.double(), element).float()
        assert torch.allclose(predict(network, copies), predict(network, data.x), atol=1e-5)
    assert len(eval(COPIES[name], {"x": data.x})) == group.order


def test_the_largest_group_that_holds_is_used() -> None:
    code = code_for(answered(p2=True, p4=True, p4m=False), data_of("image", 1, 5, 5))
    assert COPIES["p4"] in code
    assert COPIES["p2"] not in code
    code = code_for(answered(pm=False), data_of("image", 1, 5, 5))
    assert code == "# No augmentation by pm: it changes the labels."


@pytest.mark.parametrize("holds", [True, False])
def test_sets(holds: bool) -> None:
    x = torch.rand(40, 6, 2, generator=GENERATOR)
    data = dataset(x, torch.arange(40) % 3, kind="set")
    names = run(code_for(answered(permutation=holds), data), x=x)
    order = torch.tensor([2, 0, 1, 5, 4, 3])
    if holds:
        moved = names["head"](names["each"](x[:, order]).mean(1))
        assert torch.allclose(moved, names["outputs"], atol=1e-6)
    else:
        assert not torch.allclose(names["network"](x[:, order]), names["network"](x), atol=1e-3)


@pytest.mark.parametrize("holds", [True, False])
def test_vectors(holds: bool) -> None:
    data = data_of("vector", 4)
    network = run(code_for(answered(linear=holds), data))["network"]
    assert isinstance(network, nn.Linear) == holds
    assert sum(isinstance(module, nn.Linear) for module in network.modules()) == (1 if holds else 3)
    assert network(data.x).shape == (40, 3)


def test_undecided_networks_are_relaxed() -> None:
    code = code_for(answered(translation=None), data_of("image", 1, 8, 8))
    assert 'sr.relax(network, x[:2], groups=["translation"])' in code
    assert code_for(answered(linear=None), data_of("vector", 4)) == ""


def test_the_code_of_a_run_has_its_gain_and_is_part_of_the_document() -> None:
    x = torch.randn(200, 3, generator=GENERATOR)
    y = x[:, :1] - x[:, 1:2] + 0.01 * torch.randn(200, 1, generator=GENERATOR)
    found = sr.discover(x, y, epochs=60, starts=2)
    assert found.code.startswith("# Recommended: a linear model.")
    assert "nats per sample" in found.code
    assert found.to_dict()["questions"][0]["code"] == found.code
    network: Any = run(found.code)["network"]
    outputs: Tensor = network(x)
    assert outputs.shape == y.shape
