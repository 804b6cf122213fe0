"""Test which structure "auto" stands for, and how a Razor uses it."""

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.curvature import Method, estimate_curvature
from symrazor.inference import evidence as evidence_module
from symrazor.inference import razor as razor_module
from symrazor.inference.evidence import exact_method, exact_products, resolve

AUTO = Method(structure="auto", estimator="mc")


def _case() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    return model, [(x[:5], y[:5]), (x[5:], y[5:])]


def test_the_cheaper_exact_form_is_chosen() -> None:
    assert exact_method(AUTO, 500, 10**6) == Method(structure="full")
    assert exact_method(AUTO, 2500, 72) == Method(structure="kernel")
    assert exact_method(AUTO, 10**6, 500) == Method(structure="kernel")
    assert exact_method(AUTO, 10**6, 10**4) is None
    assert exact_method(AUTO, 10**8, 5000) is None


def test_bounds_keep_the_estimator_and_limit_the_block() -> None:
    ekfac, blocks = resolve(AUTO, 10**4, 10**4, 9)
    assert ekfac == Method(structure="ekfac", estimator="mc")
    assert blocks == Method(structure="kernel", block=24)
    (only,) = resolve(AUTO, 10**8, 10**5, 9)  # blocks would be too small to help
    assert only.structure == "ekfac"
    assert resolve(Method(), 10**8, 10**5, 9) == [Method()]


@pytest.mark.parametrize("as_option", [False, True])
def test_a_razor_uses_the_exact_matrix(as_option: bool) -> None:
    model, batches = _case()
    full = sr.Razor(model, "categorical", 12, structure="full").evidence(batches)
    if as_option:
        evidence = sr.Razor(model, "categorical", 12, structure="auto").step(batches)
    else:
        evidence = sr.Razor(model, "categorical", 12).evidence(batches, structure="auto")
    assert float(evidence.log_evidence) == pytest.approx(float(full.log_evidence), rel=1e-10)
    assert evidence.structure == "full Gauss-Newton matrix"
    assert not evidence.gap


@pytest.mark.parametrize("one_shot", [False, True])
def test_the_tighter_of_two_bounds_is_used(one_shot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "MAX_FULL_WEIGHTS", 0)
    monkeypatch.setattr(evidence_module, "MAX_KERNEL_ROWS", 0)
    model, batches = _case()
    values = {}
    for block in (1, 12):
        monkeypatch.setattr(evidence_module, "MIN_BLOCK", 0)
        monkeypatch.setattr(evidence_module, "MAX_BLOCK_PRODUCTS", block * 12 * 4 * 51)
        razor = sr.Razor(model, "categorical", 12, structure="auto")
        evidence = razor.evidence(iter(batches) if one_shot else batches)
        bounds = [
            float(sr.Razor(model, "categorical", 12, **options).evidence(batches).log_evidence)
            for options in ({"structure": "ekfac"}, {"structure": "kernel", "block": block})
        ]
        assert float(evidence.log_evidence) == pytest.approx(max(bounds), rel=1e-10)
        assert evidence.gap == pytest.approx(max(bounds) - min(bounds), rel=1e-8)
        values[block] = evidence.structure
    assert values == {
        1: "EKFAC, a lower bound",
        12: "blocks of 12 samples, a lower bound",
    }


def test_auto_needs_a_prior_and_names_are_checked() -> None:
    model, batches = _case()
    with pytest.raises(ValueError, match="structure='auto' needs a prior"):
        estimate_curvature(model, "categorical", batches, Method(structure="auto"))
    with pytest.raises(ValueError, match="structure must be one of .*'auto'.*, got 'best'"):
        sr.FitConfig(evidence_structure="best")


def test_fit_returns_the_evidence_in_another_structure() -> None:
    model, batches = _case()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    fit = sr.fit(model, (x, y), epochs=3, evidence_structure="auto")
    exact = fit.razor.evidence(fit.data, structure="full")
    assert float(fit.evidence.log_evidence) == pytest.approx(float(exact.log_evidence), rel=1e-9)
    assert "Curvature: full Gauss-Newton matrix." in fit.reading.verdict
    kron = fit.razor.evidence(fit.data)
    assert float(kron.log_evidence) != pytest.approx(float(exact.log_evidence), rel=1e-6)


def test_fit_uses_the_exact_matrix_by_default_where_it_is_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batches = _case()
    data = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    fit = sr.fit(model, data, epochs=2)
    exact = fit.razor.evidence(fit.data, structure="full")
    assert fit.evidence.is_exact
    assert float(fit.evidence.log_evidence) == pytest.approx(float(exact.log_evidence), rel=1e-9)
    assert "Curvature: full Gauss-Newton matrix." in fit.reading.verdict
    for options in ({"evidence_structure": None}, {"structure": "diag"}):
        assert not sr.fit(_case()[0], data, epochs=2, **options).evidence.is_exact
    monkeypatch.setattr(razor_module, "MAX_READING_PRODUCTS", 0)
    fit = sr.fit(_case()[0], data, epochs=2)
    assert fit.evidence.structure == "Kronecker factors"
    assert "Curvature: Kronecker factors, error unknown." in fit.reading.verdict


def test_the_cost_of_the_exact_matrix() -> None:
    assert exact_products(AUTO, 500, 10**6) == 500**2 * (10**6 + 500)
    assert exact_products(AUTO, 10**6, 500) == 500**2 * (10**6 + 500)
    assert exact_products(AUTO, 10**6, 10**4) == float("inf")
