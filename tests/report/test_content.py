"""Test the contents of a report against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from symrazor.core.likelihood import calibration_error
from symrazor.layers import FFC, Conv, Relaxed, SConv
from symrazor.training.fit_document import anchors_of, calibration_bins, filters_of, layer_costs


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(2, 5), st.integers(1, 15), st.integers(0, 2**31))
def test_calibration_bins_against_a_loop(n: int, k: int, bins: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(n, k, dtype=torch.float64, generator=generator).mul(2).softmax(1)
    y = torch.randint(k, (n,), generator=generator)
    held: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(p.tolist(), y.tolist(), strict=True):
        top = max(row)
        held.setdefault(min(int(top * bins), bins - 1), []).append((top, row.index(top) == label))
    result = calibration_bins(p, y, bins)
    expected = [held[b] for b in sorted(held)]
    assert result["count"] == [len(part) for part in expected]
    for key, at in (("confidence", 0), ("accuracy", 1)):
        means = [sum(pair[at] for pair in part) / len(part) for part in expected]
        assert result[key] == pytest.approx(means)
    gaps = zip(result["count"], result["accuracy"], result["confidence"], strict=True)
    error = sum(count * abs(a - c) for count, a, c in gaps) / n
    assert error == pytest.approx(calibration_error(p, y, bins))


def test_filters_of_every_kind_of_convolution() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "relaxed": Relaxed([Conv(2, 3, (4, 4)), FFC(2, 3, (4, 4))]),
            "sparse": SConv(1, 2, (6, 6), anchors=4),
            "line": nn.Conv1d(2, 3, 5),
            "cube": nn.Conv3d(1, 2, 3),
            "point": nn.Conv2d(4, 4, 1),
        }
    )
    result = filters_of(model, max_filters=5)
    assert {name: tuple(w.shape) for name, w in result.items()} == {
        "relaxed.paths.0": (5, 3, 3),
        "sparse": (2, 3, 3),
        "line": (5, 1, 5),
        "cube": (2, 3, 3),
    }
    conv = model["relaxed"].paths[0].conv  # type: ignore[union-attr, index]
    assert torch.equal(result["relaxed.paths.0"][3], conv.weight[1, 1])
    assert torch.equal(result["cube"][1], model["cube"].weight[1, 0, 1])
    basis = anchors_of(model)
    assert len(basis) == 1
    assert all(len(held["points"]) == 4 for held in basis.values())


def test_costs_of_layers_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(3 * 16, 5))
    result = layer_costs(model, torch.zeros(7, 2, 4, 4), ["0", "2", "missing"])
    assert result == {
        "0": {"parameters": 2 * 3 * 9 + 3, "flops": 2 * 16 * 3 * 2 * 9},
        "2": {"parameters": 48 * 5 + 5, "flops": 2 * 48 * 5},
    }
