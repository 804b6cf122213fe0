"""Odds of units against exact evidences and dense posteriors; smaller networks against masks."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor.symmetry.pruning import consumers_of, prune, unit_log_odds, unit_posteriors
from symrazor.testing import assert_close, dense_block

F64 = torch.float64


def test_odds_are_exact_for_a_linear_gaussian_model() -> None:
    """Without a row, output k is noise: compare the two closed-form evidences."""
    torch.manual_seed(0)
    x, delta, sigma = torch.randn(20, 4, dtype=F64), 0.7, 0.5
    y = x @ torch.randn(4, 3, dtype=F64) * torch.tensor([0.0, 0.2, 1.0]) + sigma * torch.randn(
        20, 3
    )
    model = nn.Linear(4, 3, bias=False).double()
    P = x.T @ x / sigma**2 + delta * torch.eye(4)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(P, x.T @ y / sigma**2).T)
    razor = sr.Razor(model, sr.Gaussian(sigma), 20, prior_precision=delta)
    odds = unit_log_odds(razor, [(x, y)])[""]
    noise = sigma**2 * torch.eye(20, dtype=F64)
    signal = noise + x @ x.T / delta
    zero = torch.zeros(20, dtype=F64)
    expected = [
        torch.distributions.MultivariateNormal(zero, noise).log_prob(y[:, k])
        - torch.distributions.MultivariateNormal(zero, signal).log_prob(y[:, k])
        for k in range(3)
    ]
    assert_close(odds, torch.stack(expected), 1e-8)
    assert odds[0] > 0 > odds[2]


def _networks() -> list[tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    conv = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 6, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 7),
        nn.GELU(),
        nn.Linear(7, 3),
    )
    return [(conv.double().eval(), torch.randn(9, 1, 4, 4, dtype=F64))]


@pytest.mark.parametrize(("model", "x"), _networks())
def test_odds_follow_from_the_dense_posterior(model: nn.Module, x: Tensor) -> None:
    y = torch.arange(len(x)) % 3
    razor = sr.Razor(model, "categorical", len(x), prior_precision=0.4)
    odds = unit_log_odds(razor, [(x, y)])
    blocks = {b.names[0]: b for b in razor.posterior([(x, y)]).curvature.blocks}
    assert set(odds) == {"0", "3", "6", "8"}
    for name, values in odds.items():
        expected = torch.zeros_like(values)
        for local, parameter in model.get_submodule(name).named_parameters():
            H = dense_block(blocks[f"{name}.{local}"])
            covariance = torch.linalg.inv(H + 0.4 * torch.eye(len(H), dtype=F64))
            size = parameter[0].numel()
            for unit, mu in enumerate(parameter.detach().reshape(len(parameter), -1)):
                rows = slice(unit * size, (unit + 1) * size)
                S = covariance[rows, rows]
                fit = mu @ torch.linalg.solve(S, mu)
                expected[unit] -= 0.5 * (fit + torch.logdet(0.4 * S))
        assert_close(values, expected, 1e-7)


@pytest.mark.parametrize(("model", "x"), _networks())
def test_odds_after_a_removal_are_those_of_the_pair(model: nn.Module, x: Tensor) -> None:
    """Removing u, then v, has the Savage-Dickey odds of both from the dense posterior."""
    y = torch.arange(len(x)) % 3
    razor = sr.Razor(model, "categorical", len(x), prior_precision=0.4)
    blocks = {b.names[0]: b for b in razor.posterior([(x, y)]).curvature.blocks}
    for name, units in unit_posteriors(razor, [(x, y)]).items():
        u, v = 2, 0
        total = float(units.log_odds()[u])
        units.remove(u)
        total += float(units.log_odds()[v])
        assert float(units.log_odds()[u]) == -math.inf
        expected = 0.0
        for local, parameter in model.get_submodule(name).named_parameters():
            H = dense_block(blocks[f"{name}.{local}"])
            covariance = torch.linalg.inv(H + 0.4 * torch.eye(len(H), dtype=F64))
            flat, size = parameter.detach().flatten(), parameter[0].numel()
            index = torch.cat([torch.arange(w * size, (w + 1) * size) for w in (u, v)])
            S = covariance[index][:, index]
            fit = flat[index] @ torch.linalg.solve(S, flat[index])
            expected -= 0.5 * float(fit + torch.logdet(0.4 * S))
        assert total == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("model", "x"), _networks())
@pytest.mark.parametrize("keep", [None, 0.3])
def test_the_smaller_network_computes_what_the_masked_one_does(
    model: nn.Module, x: Tensor, keep: float | None
) -> None:
    y = torch.arange(len(x)) % 3
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name in ("0", "3", "6"):  # some units have next to no effect
            for parameter in model.get_submodule(name).parameters():
                parameter[1:4] *= 1e-3
    before = copy.deepcopy(model.state_dict())
    razor = sr.Razor(model, "categorical", len(x), prior_precision=1.0)
    pruned = prune(razor, [(x, y)], keep=keep)
    assert set(pruned.kept) == {"0", "3", "6"}
    assert any(not bool(kept.all()) for kept in pruned.kept.values())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    masked = copy.deepcopy(model)
    with torch.no_grad():
        for name, kept in pruned.kept.items():
            for parameter in masked.get_submodule(name).parameters():
                parameter[~kept] = 0
    assert_close(pruned.model(x), masked(x), 1e-12)
    n_before, n_after = (sum(p.numel() for p in m.parameters()) for m in (model, pruned.model))
    assert n_after < n_before
    if keep is not None:
        assert n_after <= keep * n_before


def test_hidden_units_without_a_use_are_removed() -> None:
    """A teacher with two hidden units: most of sixteen units go, and the accuracy stays."""
    torch.manual_seed(0)
    x = torch.randn(400, 4)
    y = (torch.tanh(3 * x[:, 0]) + torch.tanh(3 * x[:, 1]) > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    fit = sr.fit(model, (x, y), epochs=60, lr=0.02, every=3, progress=False)
    pruned = prune(fit.razor, fit.data)
    assert int(pruned.kept["0"].sum()) <= 12
    accuracy = float((pruned.model(x).argmax(1) == y).double().mean())
    assert accuracy > float((model(x).argmax(1) == y).double().mean()) - 0.02


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.head(x + self.b(h))


def test_layers_that_cannot_be_pruned() -> None:
    assert consumers_of(Residual()) == {"a": ["b"]}
    normed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    data = [(torch.randn(6, 4), torch.arange(6) % 3)]
    with pytest.raises(ValueError, match="No layer can be pruned"):
        prune(sr.Razor(normed, "categorical", 6), data)
    with pytest.raises(ValueError, match="keep must be above 0"):
        prune(sr.Razor(nn.Linear(4, 3), "categorical", 6), data, keep=0.0)
