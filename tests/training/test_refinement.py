"""Test that a refinement ends at a mode of the posterior with a higher exact evidence."""

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.parameters import weights
from symrazor.data import TensorLoader
from symrazor.training import refinement
from symrazor.training.refinement import maximise_posterior_, refine_


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * torch.randn(40, generator=generator) > 0).long()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_the_gradient_of_the_posterior_vanishes_at_the_mode() -> None:
    x, y = _data()
    razor = sr.Razor(_net(), "categorical", len(x), prior_precision=2.0)
    steps = razor.training_steps
    maximise_posterior_(razor, TensorLoader(x, y, 16), 300)
    joint = razor.likelihood.nll(razor.model(x), y).mean() + razor.penalty()
    gradients = torch.autograd.grad(joint, list(weights(razor.model).values()))
    assert max(float(g.abs().max()) for g in gradients) < 1e-6
    assert razor.training_steps == steps + 1  # the penalty above
    assert all(p.grad is None for p in razor.model.parameters())


def test_the_evidence_rises_and_the_prior_is_at_its_fixed_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refinement, "MIN_CHANGE", 1e-6)
    options = {"epochs": 10, "lr": 0.05, "batch_size": 10}
    before = sr.fit(_net(), _data(), **options)
    after = sr.fit(_net(), _data(), refine=8, **options)
    assert float(after.evidence.log_evidence) > float(before.evidence.log_evidence)
    assert after.evidence.is_exact
    assert after.razor.method.structure == "kron"
    # Layers whose scales are free against each other converge slowly: the fixed point of one layer.
    linear = nn.Linear(3, 2).double()
    after = sr.fit(linear, _data(), refine=60, prior_groups={"all": "*"}, **options)
    theta = {name: value.detach() for name, value in weights(after.model).items()}
    for group in after.razor.prior.precisions:  # MacKay: delta |w|^2 = gamma
        members = after.razor.prior.members(group)
        norm = sum(float(theta[n].square().sum()) for n in members)
        gamma = sum(after.evidence.effective_parameters[n] for n in members)
        assert float(after.razor.prior.precisions[group]) * norm == pytest.approx(gamma, abs=0.1)


def test_a_fixed_prior_stays() -> None:
    fit = sr.fit(_net(), _data(), epochs=2, refine=2, burn_in=10**9, prior_precision=3.0)
    refine_(fit.razor, fit.data, 1)
    for precision in fit.razor.prior.precisions.values():
        assert float(precision) == pytest.approx(3.0)


def test_augmented_data_have_no_refinement() -> None:
    with pytest.raises(ValueError, match="refine=2 conflicts with augment"):
        sr.fit(_net(), _data(), refine=2, augment=lambda x, generator: x)
