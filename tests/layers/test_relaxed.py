"""Relaxed layers: the start of free paths, priors, shares and balancing."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor.data import digits
from symrazor.layers import FC, FFC, Conv, Relaxed, path_groups
from symrazor.layers.relaxed import start_near_
from symrazor.testing import assert_close


def test_sum_and_mean_of_paths() -> None:
    torch.manual_seed(0)
    paths = [Conv(2, 3, (4, 4)), FFC(2, 3, (4, 4))]
    x = torch.randn(5, 2, 4, 4)
    expected = paths[0](x) + paths[1](x)
    assert_close(Relaxed(paths)(x), expected, 1e-6)
    assert_close(Relaxed(paths, mean=True)(x), expected / 2, 1e-6)


def test_paths_of_a_layer_need_one_reduction() -> None:
    """With two reductions, a shift moves outputs by different steps: the sum is not equivariant."""
    spaces = (2, 3, (4, 4), 2)
    with pytest.raises(ValueError, match="l2 and max. Use the same reduction"):
        Relaxed([Conv(*spaces), Conv(*spaces, reduction="max")])
    layer = Relaxed([Conv(*spaces, reduction="max"), Conv(*spaces, reduction="max"), FFC(*spaces)])
    layer.path(2).scale_(0.0)
    assert sr.equivariance_error(layer.double(), torch.randn(5, 2, 4, 4).double()) < 1e-12
    Relaxed([Conv(2, 3, (4, 4)), Conv(2, 3, (4, 4), reduction="max")])  # nothing to choose


def test_free_paths_start_small() -> None:
    torch.manual_seed(0)
    layer = Relaxed([Conv(2, 3, (4, 4)), FFC(2, 3, (4, 4))])
    x = torch.randn(5, 2, 4, 4)
    strict, free = layer.paths[0](x), layer.paths[1](x)
    layer.scale_free_paths(100.0)
    assert torch.equal(layer.paths[0](x), strict)
    assert_close(layer.paths[1](x), free / 10, 1e-6)
    layer.scale_free_paths(math.inf)
    assert torch.equal(layer(x), strict)


def test_one_prior_group_per_path_and_its_share_in_the_reading() -> None:
    torch.manual_seed(0)
    layer = Relaxed([Conv(1, 4, (8, 8), stride=2), FFC(1, 4, (8, 8), stride=2, bias=True)])
    layer.scale_free_paths(10.0)
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
    groups = path_groups(model)
    assert groups["0.paths.1"] == [
        "0.paths.1.first.weight",
        "0.paths.1.second.weight",
        "0.paths.1.offset.bias",
    ]
    assert sorted(n for names in groups.values() for n in names) == sorted(sr.weights(model))
    fit = sr.fit(model, digits("train"), epochs=4, every=1, burn_in=0, prior_groups=groups)
    relaxed = fit.reading.layers[0]
    assert [(p.path, p.group) for p in relaxed.paths] == [("Conv", "translation"), ("FFC", None)]
    assert sum(p.share for p in relaxed.paths) == pytest.approx(1.0)
    gamma = fit.evidence.effective_parameters
    expected = gamma["0.paths.0.conv.weight"] + gamma["0.paths.0.conv.bias"]
    assert relaxed.paths[0].effective_parameters == pytest.approx(expected)
    assert len(set(relaxed.paths[1].precision.values())) == 1


def test_free_paths_have_their_own_initial_precision() -> None:
    layer = Relaxed([Conv(1, 2, (4, 4)), FFC(1, 2, (4, 4))])
    alone = Relaxed([FFC(2, 2, (4, 4))])
    model = nn.Sequential(layer, alone, nn.Flatten(), nn.Linear(32, 3))
    start = sr.Razor(model, "categorical", 10).prior.precisions
    assert {name: round(float(delta), 9) for name, delta in start.items()} == {
        "0.paths.0": 1.0,
        "0.paths.1": 30.0,
        "1.paths.0": 1.0,
        "3.weight": 1.0,
        "3.bias": 1.0,
    }
    given = sr.Razor(model, "categorical", 10, prior_precision=2.0, free_precision=7.0)
    assert float(given.prior.precisions["0.paths.1"]) == pytest.approx(7.0)
    assert float(given.prior.precisions["3.bias"]) == pytest.approx(2.0)
    for options in ({"prior_groups": "layer"}, {"prior_precision": dict.fromkeys(start, 2.0)}):
        for free in (7.0, 30.0):  # 30 is the precision without the option
            with pytest.raises(
                ValueError, match=f"free_precision={free} conflicts with {next(iter(options))}"
            ):
                sr.Razor(model, "categorical", 10, free_precision=free, **options)


def test_a_step_balances_factors_that_share_a_prior() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 1, 4, 4), torch.arange(12) % 3
    for groups, balanced in (("path", True), ("tensor", False)):
        path = FFC(1, 2, (4, 4))
        path.scale_(0.01)
        model = nn.Sequential(path, nn.Flatten(), nn.Linear(32, 3))
        f = model(x).detach()
        razor = sr.Razor(model, "categorical", 12, prior_groups=groups)
        razor.evidence([(x, y)])
        first, second = (p.detach().clone() for p in path.factors)
        assert float(first.norm() / second.norm()) > 10  # an estimate alone moves nothing
        razor.step([(x, y)])
        ratio = float((path.factors[0].norm() / path.factors[1].norm()).detach())
        assert (abs(ratio - 1) < 1e-4) == balanced
        assert_close(model(x), f, 1e-5)


@pytest.mark.parametrize("precision", [1e-4, 1.0, 1e6, math.inf])
def test_the_start_of_free_paths_does_not_depend_on_their_scale(precision: float) -> None:
    torch.manual_seed(0)
    layers = [
        Relaxed([Conv(1, 3, (6, 6), stride=2), FFC(1, 3, (6, 6), stride=2)]),
        Relaxed([Conv(3, 3, (3, 3)), FFC(3, 3, (3, 3)), FC(3, 3, (3, 3))]),
        Relaxed([FFC(3, 3, (3, 3))]),
    ]
    for layer in layers[:2]:
        layer.scale_free_paths(precision)
    x, alone = torch.randn(50, 1, 6, 6), layers[2].paths[0].second.weight.clone()
    start_near_(nn.Sequential(*layers), x)
    for layer in layers[:2]:
        with torch.no_grad():
            strict, *free = (path(x).square().mean().sqrt().item() for path in layer.paths)
            ratios = [size / strict for size in free]
            x = layer(x)
        wanted = 0.0 if precision == math.inf else 0.1
        assert ratios == pytest.approx([wanted] * len(free), rel=1e-4)
    assert torch.equal(layers[2].paths[0].second.weight, alone)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 20 / 15),
        ({"prior_precision": 5.0}, 20 / 15),
        ({"free_precision": 3.0}, 3.0),
        ({"free_precision": 30.0}, 30.0),
        ({"prior_precision": {"0.paths.0": 1.0, "0.paths.1": 7.0, "2.weight": 1.0}}, 7.0),
        ({"prior_groups": {"0.paths.1": ["0.paths.1.*"], "rest": ["0.paths.0.*", "2.*"]}}, 1.0),
    ],
)
@pytest.mark.parametrize("start", ["near", "given"])
def test_a_given_precision_of_free_paths_is_used(
    options: dict[str, Any], expected: float, start: str
) -> None:
    """The dense path is free; `fit` chooses its precision only if none is given."""
    layer = Relaxed([Conv(1, 2, (4, 4)), FC(1, 2, (4, 4))])
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3, bias=False))
    data = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
    fit = sr.fit(model, data, start=start, epochs=1, lr=1e-9, burn_in=10**6, **options)
    if start == "given" and expected == 20 / 15:
        expected = 30.0
    assert float(fit.razor.prior.precisions["0.paths.1"]) == pytest.approx(expected)


def test_fit_can_start_from_the_given_weights() -> None:
    torch.manual_seed(0)
    layer = Relaxed([Conv(1, 2, (4, 4)), FFC(1, 2, (4, 4))])
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3))
    x, y = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
    options = {"epochs": 1, "lr": 1e-9, "burn_in": 10**6}
    before = layer.paths[1].second.weight.detach().clone()
    fit = sr.fit(model, (x, y), start="given", prior_precision=2.0, free_precision=3.0, **options)
    assert_close(layer.paths[1].second.weight, before, 1e-5)
    assert float(fit.razor.prior.precisions["0.paths.1"]) == pytest.approx(3.0)
    near = sr.fit(model, (x, y), **options)
    assert float(layer.paths[1].second.weight.detach().norm()) < 0.5 * float(before.norm())
    assert float(near.razor.prior.precisions["0.paths.1"]) == pytest.approx(20 / 15)
    with pytest.raises(ValueError, match="start must be 'near' or 'given', got 'far'"):
        sr.fit(model, (x, y), start="far")
