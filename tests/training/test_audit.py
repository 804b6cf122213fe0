"""Audit networks whose symmetries are known by construction."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Tensors


class Pooled(nn.Module):
    """Invariant to shifts, by circular convolutions and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
        self.act, self.pool = nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.act(self.conv(x))).flatten(1))


def _network(how: str) -> nn.Module:
    torch.manual_seed(0)
    if how == "pooled":
        return Pooled()
    padding = "zeros" if how == "zeros" else "circular"
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode=padding),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 2),
    )


def _bars(n: int = 120) -> Tensors:
    """Horizontal against vertical bars, anywhere on a torus."""
    generator = torch.Generator().manual_seed(0)
    x = 0.2 * torch.randn(n, 1, 6, 6, generator=generator)
    y = torch.arange(n) % 2
    for image, label in zip(x, y, strict=True):
        place = int(torch.randint(6, (), generator=generator))
        image[0].select(int(label), place).add_(1)
    return x, y


def test_symmetries_of_known_networks() -> None:
    x, y = _bars()
    exact = {s.name: s for s in sr.audit(_network("pooled"), (x, y)).symmetries}
    assert set(exact) == {"shifts", "mirror up-down", "mirror left-right", "quarter turns"}
    assert exact["shifts"].error < 1e-5
    assert exact["shifts"].layers["conv"] < 1e-5
    assert abs(exact["shifts"].cost) < 1e-5
    assert exact["quarter turns"].error > 0.05
    flat = {s.name: s for s in sr.audit(_network("flat"), (x, y)).symmetries}
    assert flat["shifts"].error > 0.2
    assert flat["shifts"].layers["0"] < 1e-5  # the convolution is not the reason
    padded = {s.name: s for s in sr.audit(_network("zeros"), (x, y)).symmetries}
    assert "0" in padded["shifts"].breaking


def test_the_cost_is_the_rise_of_the_loss() -> None:
    """Turned by 90 degrees, a horizontal bar is a vertical one."""
    x, y = _bars()
    model = Pooled()
    sr.fit(model, (x, y), epochs=40, lr=0.02, progress=False)
    before = copy.deepcopy(model.state_dict())
    result = sr.audit(model, (x, y), samples=120)
    turns = next(s for s in result.symmetries if s.name == "quarter turns")
    losses = [
        nn.functional.cross_entropy(model(x.rot90(k, (2, 3))), y, reduction="none").double()
        for k in range(4)
    ]
    rises = torch.stack(losses[1:]).mean(0) - losses[0]
    assert turns.cost == pytest.approx(rises.mean().item(), rel=1e-5)
    assert turns.cost_error == pytest.approx(float(rises.detach().std()) / 120**0.5, rel=1e-4)
    assert "uses it" in turns.verdict
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_evidence_run_and_report(tmp_path: Path) -> None:
    x, y = _bars()
    model = _network("pooled")
    sr.fit(model, (x, y), epochs=10, lr=0.02, progress=False)
    before = copy.deepcopy(model.state_dict())
    result = sr.audit(model, (x, y), epochs=3, config=sr.FitConfig(every=1).change(estimator="mc"))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert result.free_path_gain is not None
    assert result.verdict in str(result)
    text = result.report(tmp_path / "audit.html").read_text()
    assert "whole network" in text
    assert result.to_dict()["symmetries"][0]["name"] == "shifts"


def test_networks_without_convolutions() -> None:
    x, y = _bars()
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    result = sr.audit(model, (x, y), epochs=1)
    assert result.free_path_gain is None
    assert "No evidence run" in str(result)
    with pytest.raises(ValueError, match="inputs with positions"):
        sr.audit(model, (x.flatten(1), y))
