"""Test the batched training of invariant networks: widths, scales and filters."""

import pytest
import torch
from invariant_model import PLAN, ring_models

from symrazor.data import rings
from symrazor.groups.lie import so2
from symrazor.invariance import (
    InvariantWeights,
    LieDistribution,
    Rectified,
)
from symrazor.training.batched_training import (
    BatchedConfig,
    Data,
    Member,
    evaluate,
    train,
)


def test_bound_learns_the_rotation_and_maximum_likelihood_does_not() -> None:
    model, data, members = ring_models([5.0, 5.0, 90.0, 90.0], ["vi", "ml", "vi", "ml"])
    train(model, data, members, PLAN)
    vi, ml, vi_90, ml_90 = model.distribution.widths.rad2deg().squeeze(1).tolist()
    assert vi > 60
    assert ml < 30
    assert vi_90 > 115
    assert ml_90 < 110
    bound, accuracy = evaluate(model, data, members)
    assert float(accuracy.min()) > 0.95
    assert bound.per_datum[2] > bound.per_datum[0] - 0.02


def test_fixed_widths_are_unchanged_and_the_history_is_recorded() -> None:
    model, data, _ = ring_models([30.0, 30.0], ["vi", "vi"])
    members = [Member(learn=False), Member()]
    plan = BatchedConfig(steps=21, batch=50, samples=4, note_every=5)
    seen: list[int] = []
    history = train(model, data, members, plan, lambda step, m, h: seen.append(step))
    assert seen == history.steps == [0, 5, 10, 15, 20]
    assert torch.stack(history.widths).shape == (5, 2, 1)
    widths = model.distribution.widths.rad2deg().squeeze(1).tolist()
    assert widths[0] == pytest.approx(30, rel=1e-5)
    assert abs(widths[1] - 30) > 0.1


def test_scale_learned_by_gradient_equals_the_closed_form() -> None:
    model, data, _ = ring_models([60.0], ["vi"])
    model.features.requires_grad_(False)
    plan = BatchedConfig(150, 120, 4, scale_rate=0.1, rates=(0.3, 0.02), every=4)
    train(model, data, [Member(learn=False)], plan)
    assert model.scale.value.item() != pytest.approx(10, rel=0.1)  # where it started
    q = model.posterior  # its weights have prior variance 1 in units of the scale
    second_moment = (q.trace() + q.mean.square().sum()).item() / q.size
    assert second_moment == pytest.approx(1.0, abs=0.06)


def test_same_seed_gives_the_same_result() -> None:
    results = []
    for _ in range(2):
        model, data, members = ring_models([20.0], ["vi"])
        train(model, data, members, BatchedConfig(steps=10, batch=40, samples=4))
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_models_can_be_selected_from_a_batch_and_replaced() -> None:
    model, data, members = ring_models([20.0, 60.0, 100.0], ["vi", "vi", "vi"])
    train(model, data, members, BatchedConfig(steps=10, batch=40, samples=4))
    part = model.select([2, 0, 2])
    both = model.predict(data.x.expand(3, -1, -1)), part.predict(data.x.expand(3, -1, -1))
    assert torch.equal(both[0][2], both[1][2])  # in the same place, with the same draws
    for mine, new in zip(model.posterior.parameters(), part.posterior.parameters(), strict=True):
        assert torch.equal(mine[[2, 0, 2]], new)
    assert part.distribution.describe()["rotation (degrees)"].shape == (3,)
    train(part, data, members, BatchedConfig(steps=3, batch=40, samples=4))
    model.replace([1], part.select([1]))
    again = model.predict(data.x.expand(3, -1, -1))
    assert torch.equal(again[1], part.predict(data.x.expand(3, -1, -1))[1])
    assert torch.equal(again[2], both[0][2])
    with pytest.raises(ValueError, match="places must be between 0 and 2, got \\[3\\]"):
        model.select([3])
    with pytest.raises(ValueError, match="2 models must replace 2 places, got \\[3\\]"):
        model.replace([0, 1], part)


def test_learned_filters_raise_the_bound() -> None:
    data, results = Data.of([rings(120, seed=1)]), []
    for rate in (0.03, 0.0):
        features = Rectified((2,), 32, (1,), torch.Generator().manual_seed(0))
        model = InvariantWeights(features, LieDistribution(so2(), torch.full((1, 1), 0.1)), 2)
        plan = BatchedConfig(80, 120, 4, weight_rate=rate, rates=(0.3, 0.1), every=8)
        train(model, data, [Member()], plan)
        results.append(evaluate(model, data, [Member()])[0].per_datum.item())
    assert results[0] > results[1] + 0.02


def test_invalid_members_and_options_are_rejected() -> None:
    model, data, _ = ring_models([30.0], ["vi"])
    plan = BatchedConfig(steps=2)
    with pytest.raises(ValueError, match="data must be between 0 and 0, got 3"):
        train(model, data, [Member(data=3)], plan)
    with pytest.raises(ValueError, match="method of member 0 must be 'vi', .*, got 'mle'"):
        train(model, data, [Member(method="mle")], plan)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Labels must be between 0 and 1, got 2"):
        train(model, Data(data.x, data.y + 1), [Member()], plan)
    model.distribution = LieDistribution(so2(), 0.2)
    with pytest.raises(ValueError, match="the shape \\[1, 1\\], one row per member"):
        train(model, data, [Member()], plan)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        BatchedConfig(samples=0)
    with pytest.raises(ValueError, match="rates must be above 0"):
        BatchedConfig(rates=(0.1, 0.0))
