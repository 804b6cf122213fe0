"""Measure the spread of inputs over transformations, on data with a known spread."""

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

import symrazor.invariance.spread as spread_module
from symrazor.invariance.flows import Flow, add
from symrazor.invariance.spread import (
    Spread,
    Spreads,
    _p_value,
    half_width_on_line,
    measure_spread,
    two_sample_test,
)
from symrazor.invariance.window import Window


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos * x[:, 0] - sin * x[:, 1], sin * x[:, 0] + cos * x[:, 1]], 1)


CIRCLE = Flow("rotation", "circle", 36, math.pi, "degrees", _turn, 180 / math.pi, min_range=18)
LINE = Flow("shift", "line", 9, 1.0, "units", add)


def _arrows(angle: Tensor) -> Tensor:
    return _turn(torch.tensor([[1.0, 0.0]]).expand(len(angle), 2), angle)


def _uniform(n: int, half_width: float, seed: int = 0) -> Tensor:
    return half_width * (2 * torch.rand(n, generator=torch.Generator().manual_seed(seed)) - 1)


@pytest.mark.parametrize("v", [0.05, 0.3, 0.9, 1.5, 3.0])
def test_half_widths_invert_the_entropy_of_a_sum(v: float) -> None:
    """Oracle: the conditional entropy, integrated numerically on a grid."""
    step = 0.001
    e = torch.arange(-1 + step / 2, 1, step, dtype=torch.float64)
    total = torch.arange(-1 - v, 1 + v, step, dtype=torch.float64)
    possible = ((total.unsqueeze(1) - e).abs() <= v).sum(1) * step
    entropy = float((possible * possible.clamp(min=step).log()).sum() / possible.sum())
    bins = 9
    assert half_width_on_line(entropy - math.log(2 / bins), bins) == pytest.approx(v, rel=0.02)


@pytest.mark.parametrize("degrees", [45, 180])
def test_angles_of_arrows(degrees: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_module, "LEARNING_RATE", 1e-2)
    x = _arrows(_uniform(600, math.radians(degrees)))
    spread = measure_spread(x, None, [CIRCLE], steps=700).of_all["rotation"]
    assert spread.range == pytest.approx(degrees, abs=10)
    low, high = spread.interval
    assert low <= spread.range <= high and spread.order == 1
    assert spread.is_whole == (degrees == 180)
    assert (spread.p_value < 1e-3) == (degrees != 180)


def test_quarter_turns_are_a_group_of_order_four() -> None:
    turns = torch.randint(4, (600,), generator=torch.Generator().manual_seed(0)) * math.pi / 2
    spread = measure_spread(_arrows(turns), None, [CIRCLE], steps=600).of_all["rotation"]
    assert spread.order == 4 and spread.range < 15 and spread.is_open and not spread.is_whole


def test_labels_that_depend_on_the_angle() -> None:
    y = torch.randint(2, (600,), generator=torch.Generator().manual_seed(1))
    spreads = measure_spread(_arrows(math.pi / 2 * y), y, [CIRCLE], steps=500)
    assert spreads.of_class["rotation"].range < 18 < spreads.of_all["rotation"].range


def test_shifts_on_a_line() -> None:
    x = _uniform(600, 0.5).unsqueeze(1)
    spread = measure_spread(x, None, [LINE], steps=400).of_all["shift"]
    assert spread.range == pytest.approx(0.5, abs=0.12)
    assert spread.amount == spread.range


def test_two_processes_give_the_numbers_of_one() -> None:
    x = _uniform(100, 0.5).unsqueeze(1)
    one, two = (measure_spread(x, None, [LINE], steps=4, workers=k) for k in (1, 2))
    assert one == two and isinstance(one, Spreads)


def test_flips_and_amounts_of_factors() -> None:
    flip = Flow("flip", "choice", 2, 1, "probability", add)
    share = 0.3
    loss = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert Spread(flip, loss, 0.0, 0.5).range == pytest.approx(share, abs=1e-6)
    assert Spread(flip, math.log(2), 0.0, 0.5).is_whole
    factor = Flow("scale", "line", 9, math.log(1.4), "factor", add, min_range=1.2)
    wide = Spread(factor, math.log(9), 0.0, 0.5)
    assert wide.is_whole and wide.amount == pytest.approx(math.log(1.4))


def test_a_range_beyond_what_was_tested_is_cut() -> None:
    factor = Flow("scale", "line", 9, math.log(1.4), "factor", add, min_range=1.2)
    for low, is_whole in ((1.3, False), (1.41, True)):
        window = Window(math.log(1.45), math.log(low), math.log(1.6))
        spread = Spread(factor, math.log(9), 0.0, 0.5, window=window)
        assert spread.range == pytest.approx(1.4) and spread.is_whole is is_whole
        assert spread.bounds == pytest.approx((low, 1.6))


def test_p_values_are_uniform_if_scores_are_random() -> None:
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(400):
        log_p = torch.randn(50, 6, generator=generator, dtype=torch.float64).log_softmax(1)
        cell = torch.randint(6, (50, 1), generator=generator)
        values.append(_p_value(log_p, log_p.gather(1, cell)[:, 0]))
    alarms = sum(p < 0.05 for p in values) / len(values)
    limit = 3 * math.sqrt(0.05 * 0.95 / 400)
    assert abs(alarms - 0.05) < limit and abs(sum(values) / 400 - 0.5) < 0.06
    assert NormalDist().cdf(0) == 0.5


def test_two_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    assert two_sample_test(x, torch.neg, steps=150) > 0.01
    assert two_sample_test(x + 0.5, torch.neg, steps=150) < 1e-3


@pytest.mark.slow
def test_two_sample_tests_keep_their_level() -> None:
    alarms = [
        two_sample_test(
            torch.randn(120, 3, generator=torch.Generator().manual_seed(seed)),
            torch.neg,
            seed,
            steps=60,
        )
        < 0.05
        for seed in range(200)
    ]
    assert sum(alarms) / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_too_few_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 80 inputs, got 10"):
        measure_spread(torch.randn(10, 2), None, [CIRCLE])
