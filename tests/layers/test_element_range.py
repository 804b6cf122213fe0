"""Limit group convolutions to a learned range of rotations."""

import math

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor.layers import ElementRange, GConv, GroupPool


def _network(*ranges: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    lift = GConv(1, 8, (8, 8), group="p4", kind="lift")
    return nn.Sequential(
        lift, nn.ReLU(), *ranges, GroupPool("p4"), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1e-3, [1, 0, 0, 0]), (45, [1, 0.5, 0, 0.5]), (90, [1, 1, 0, 1]), (179.99, [1, 1, 1, 1])],
)
def test_weights_of_quarter_turns(degrees: float, expected: list[float]) -> None:
    weights = ElementRange("p4", degrees).weights()
    torch.testing.assert_close(weights, torch.tensor(expected).float(), atol=1e-3, rtol=0)


def test_elements_are_weighted_by_their_own_angle() -> None:
    """Oracle: the angle by which an element turns a picture with one bright pixel."""
    window = ElementRange("C8", 60)
    weights = window.weights().detach()
    generator = sr.groups.cyclic(8).finite()
    angles = sorted(
        abs(math.atan2(float(m[1, 0]), float(m[0, 0])))
        for m in generator.matrices  # type: ignore[union-attr]
    )
    expected = sorted(
        (max(0.0, min(1.0, 1 + (math.pi / 3 - a) / (math.pi / 4))) for a in angles), reverse=True
    )
    assert sorted(weights.tolist(), reverse=True) == pytest.approx(expected, abs=1e-6)
    assert float(weights[0]) == 1


def test_a_whole_range_keeps_the_symmetry_and_a_narrow_one_breaks_it() -> None:
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    turned = torch.rot90(x, 1, (2, 3))

    def change(model: nn.Module) -> float:
        return float((model(turned) - model(x)).detach().abs().max() / model(x).detach().std())

    assert change(_network(ElementRange("p4", 179.99))) < 1e-3
    assert change(_network(ElementRange("p4", 1.0))) > 0.1


def test_a_narrow_range_is_an_ordinary_convolution() -> None:
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    model = _network(ElementRange("p4", 1e-4))
    lifted = torch.relu(model[0](x)).unflatten(1, (4, 2))[:, 0]  # the filters as they are
    torch.testing.assert_close(model(x), lifted.mean((2, 3)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("degrees", [40.0, 120.0])
def test_an_evidence_step_moves_the_range_to_more_evidence(degrees: float) -> None:
    """Oracle: the evidence at a slightly smaller and a slightly larger range."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, 8, 8, generator=generator)
    y = torch.randint(2, (30,), generator=generator)
    window = ElementRange("p4", degrees)
    model = nn.Sequential(_network(window), nn.Linear(2, 2))
    razor = sr.Razor(model, "categorical", n_data=30, config=sr.RazorConfig(structure="full"))
    start = window.range.value.detach().clone()

    def evidence(change: float) -> float:
        window.range.value = start + change
        return float(razor.evidence([(x, y)]).log_evidence)

    slope = evidence(1e-2) - evidence(-1e-2)
    window.range.value = start
    razor.step([(x, y)])
    moved = float(window.range.value.detach() - start)
    assert abs(slope) > 1e-4 and moved * slope > 0


def test_groups_without_angles_raise_an_error() -> None:
    with pytest.raises(ValueError, match="rotations of the plane, got the group p4m"):
        ElementRange("p4m")
    with pytest.raises(ValueError, match="degrees must be between 0 and 180, got 180"):
        ElementRange("p4", 180)
