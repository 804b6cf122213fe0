"""Flows of vectors, point clouds and series against exact maps."""

import math

import pytest
import torch

from symrazor.invariance.flows import Flow
from symrazor.invariance.matrix_flows import (
    point_flows,
    prepared_series,
    series_flows,
    vector_flows,
)
from symrazor.invariance.spread import measure_spread

TURN = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
BOOST = torch.tensor([[0.0, 1.0], [1.0, 0.0]])


def _named(flows: tuple[Flow, ...], name: str) -> Flow:
    return next(flow for flow in flows if flow.name == name)


def test_generators_are_circles_or_lines() -> None:
    turn, boost = vector_flows({"turn": TURN, "boost": BOOST}, end=0.7)
    assert (turn.kind, boost.kind, boost.end) == ("circle", "line", 0.7)
    x = torch.tensor([[2.0, 1.0, 5.0]])  # the last entry is a target
    assert turn.move(x, torch.tensor([math.pi / 2])).tolist()[0] == pytest.approx([-1, 2, 5])
    c, s = math.cosh(0.3), math.sinh(0.3)
    expected = [2 * c + s, 2 * s + c, 5]
    assert boost.move(x, torch.tensor([0.3])).tolist()[0] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="square matrix"):
        vector_flows({"wrong": torch.zeros(2, 3)})


def test_point_clouds_turn_about_each_axis() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]])
    quarter = torch.tensor([math.pi / 2])
    expected = {"x": [1, -3, 2], "y": [3, 2, -1], "z": [-2, 1, 3]}
    for axis, place in expected.items():
        moved = _named(point_flows(3), f"rotation about {axis}").move(x, quarter)
        assert moved[0, 0].tolist() == pytest.approx(place, abs=1e-5)
    mirrored = _named(point_flows(3), "reflection of y").move(x, torch.ones(1))
    assert mirrored[0, 0].tolist() == [1, -2, 3]
    assert torch.equal(_named(point_flows(2), "scale").move(x[..., :2], torch.zeros(1)), x[..., :2])
    with pytest.raises(ValueError, match="2 or 3 coordinates"):
        point_flows(4)


def test_series_are_read_at_other_times() -> None:
    t = torch.arange(40.0)
    x = torch.stack([t, t.flip(0)]).unsqueeze(0)
    flows = series_flows((2, 40))
    shift, stretch = _named(flows, "shift"), _named(flows, "stretch")
    rest, moved = (shift.move(x, torch.tensor([e])) for e in (0.0, 3.0))
    inside = slice(0, int((rest[0, 0] != 0).sum()))
    change = (moved - rest)[0, :, inside]
    assert torch.allclose(change, torch.tensor([[3.0], [-3.0]]).expand_as(change), atol=1e-4)
    slope = stretch.move(x, torch.tensor([math.log(1.2)]))[0, 0, 5:15].diff()
    assert torch.allclose(slope, torch.full_like(slope, 1.2), atol=1e-4)
    assert torch.equal(_named(flows, "reversal").move(x, torch.ones(1)), x.flip(-1))
    assert torch.allclose(_named(flows, "offset").move(x, torch.full((1,), 0.5)), x + 0.5)
    assert abs(float(prepared_series(x).mean())) < 0.05


def test_an_arrow_that_turns_by_quarters_has_order_four() -> None:
    turns = torch.randint(4, (500,), generator=torch.Generator().manual_seed(0)) * math.pi / 2
    x = torch.stack([turns.cos(), turns.sin()], 1)
    spread = measure_spread(x, None, vector_flows({"turn": TURN}), steps=500).of_all["turn"]
    assert spread.order == 4 and spread.range < 10


@pytest.mark.slow
def test_labels_that_boosts_leave_unchanged() -> None:
    """The label is the sign of t^2 - x^2: all rapidities occur, and turns change labels."""
    generator = torch.Generator().manual_seed(0)
    rapidity, y = (
        1.5 * (2 * torch.rand(800, generator=generator) - 1),
        torch.randint(2, (800,), generator=generator),
    )
    vectors = torch.stack([rapidity.cosh(), rapidity.sinh()], 1)
    x = torch.where(y.unsqueeze(1) == 1, vectors, vectors.flip(1))
    spreads = measure_spread(x, y, vector_flows({"boost": BOOST, "turn": TURN}), steps=900)
    assert spreads.of_class["boost"].range > 0.8
    assert spreads.of_class["turn"].range < 60 and not spreads.of_class["turn"].is_whole


def test_point_clouds_have_features_without_order() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 6, 3, generator=generator) * torch.tensor([3.0, 1.0, 0.3])
    spreads = measure_spread(x, None, point_flows(3), steps=8, is_cloud=True)
    assert set(spreads.of_all) == {flow.name for flow in point_flows(3)}
