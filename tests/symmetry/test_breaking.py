"""Name the modules of a network that break translation equivariance."""

import torch
from torch import nn

from symrazor.symmetry.breaking import breaking_modules, network_error, record_calls
from symrazor.symmetry.verdict import describe_breaking


def strided() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(3, 2, 1)),
        *(nn.Flatten(), nn.Linear(8 * 9, 7), nn.ReLU(), nn.Linear(7, 3)),
    )


def test_reasons_for_a_network_and_its_error() -> None:
    x = torch.zeros(3, 2, 16, 16)
    model = strided()
    reasons = breaking_modules(model, record_calls(model, x)[1])
    assert list(reasons) == ["0", "2", "3", "6", "8"]
    assert describe_breaking({"0": "a", "2": "b", "3": "a"}) == "a (0, 3) and b (2)"
    error = network_error(model, x)  # equal inputs are replaced by random ones
    assert error is not None
    assert error > 0.05
    assert network_error(model, torch.zeros(1, 2, 16, 16)) is None
    assert network_error(nn.Linear(3, 2), torch.zeros(4, 3)) is None
