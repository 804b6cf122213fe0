"""Choose the recommended network, and train it for the remaining time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from known_candidate import KnownCandidate

import symrazor as sr
from symrazor.core.likelihood import Categorical
from symrazor.discovery import api, digits
from symrazor.discovery.answer import (
    Answer,
    conditional_gain,
    left_out_samples,
    log_scores,
    numbered,
    predicts_better,
    recommend,
    unconverged_rival,
)
from symrazor.discovery.budget import (
    RefitPlan,
    initial_precisions,
)
from symrazor.discovery.question import Options, Question
from symrazor.training.options import FitConfig


@pytest.fixture(scope="module")
def fitted() -> dict[str, sr.Fit]:
    torch.manual_seed(0)
    (x, y), _ = digits.digits_on_canvas("digit")
    data = (x[:64], y[:64])
    structures = digits.digit_family("digit").structures
    return {s.name: sr.fit(s.make(), data, epochs=1, estimator="mc") for s in structures}


@pytest.mark.parametrize(
    ("values", "early", "expected"),
    [
        ((0, -400, -900), False, "relaxed"),  # uses its freedom, if little
        ((0, -1, -900), False, "convolutional"),
        ((0, 50, -900), False, "convolutional"),
        ((0, -50, 70), False, "fully connected"),
        ((0, 50, 70), True, "convolutional"),
        ((0, -1, 70), True, "convolutional"),
    ],
)
def test_recommended_network(
    fitted: dict[str, sr.Fit], values: tuple[float, ...], early: bool, expected: str
) -> None:
    names = ("relaxed", "convolutional", "fully connected")
    known = type("K", (KnownCandidate,), {"values": dict(zip(names, values, strict=True))})
    candidates = sorted((known(n, fitted[n]) for n in names), key=lambda c: -c.log_evidence)
    answer = Answer("digit", "?", digits.digit_family("digit"), candidates)
    assert answer.symmetric
    assert recommend(answer, early) == expected


def test_log_scores_of_left_out_samples(
    fitted: dict[str, sr.Fit],
) -> None:
    (x, y), _ = digits.digits_on_canvas("digit")
    used = torch.arange(0, len(y), 2)
    left_out = left_out_samples((x, y), used)
    assert left_out is not None and torch.equal(left_out[0], x[1::2])
    assert left_out_samples((x, y), torch.arange(len(y))) is None
    fit = fitted["convolutional"]
    scores = log_scores(fit, left_out)
    with torch.no_grad():
        p = fit.model(left_out[0]).double().softmax(1)
    expected = p[torch.arange(len(p)), left_out[1]].log()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("relaxed", "plain", "early", "expected"),
    [
        (0.0, 0.0, False, "fully connected"),  # no better: the evidence decides
        (0.1, -0.5, False, "relaxed"),
        (0.1, 0.2, False, "convolutional"),
        (0.1, 0.0999, False, "relaxed"),  # told apart by the evidence
        (-0.1, -0.3, True, "relaxed"),
    ],
)
def test_conditional_evidence_can_overrule_the_evidence(
    fitted: dict[str, sr.Fit], relaxed: float, plain: float, early: bool, expected: str
) -> None:
    """Parameters are mean gains per left-out sample over the network with the highest evidence."""
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gains = {"fully connected": 0.0, "relaxed": relaxed, "convolutional": plain}
    values = {"fully connected": 70.0, "relaxed": 0.0, "convolutional": -50.0}
    known = type("K", (KnownCandidate,), {"values": values})
    candidates = [
        known(name, fitted[name], left_out=-2 + gain + 0.01 * noise.roll(number))
        for number, (name, gain) in enumerate(gains.items())
    ]
    answer = Answer("digit", "?", digits.digit_family("digit"), candidates)
    gap = conditional_gain(candidates[1], candidates[0])
    assert gap is not None and gap[0] == pytest.approx(200 * relaxed, abs=0.5)
    difference = 0.01 * (noise.roll(1) - noise)
    assert gap[1] == pytest.approx(float(difference.std()) * 200**0.5)
    assert predicts_better(candidates[1], candidates[0]) is (relaxed > 0)
    assert recommend(answer, early) == expected
    said = replace(answer, recommended_name=recommend(answer, early)).verdict
    predicts = "held-out training samples better than a fully"
    has_same_symmetry = expected == "convolutional"
    assert (predicts in said) is (not early and relaxed > 0 and not has_same_symmetry)
    assert said.count("Recommended network: ") == 1


@pytest.mark.parametrize(("spread", "expected"), [(0.1, True), (1.0, False)])
def test_a_gain_within_its_standard_error_does_not_count(
    fitted: dict[str, sr.Fit], spread: float, expected: bool
) -> None:
    """Use 400 samples and a gain of 10 nats; the standard error is 20 times the spread."""
    known = type("K", (KnownCandidate,), {"values": {"relaxed": 0.0, "convolutional": 0.0}})
    scatter = torch.tensor([spread, -spread], dtype=torch.float64).repeat(200)
    one = known("relaxed", fitted["relaxed"], left_out=-1 + 0.025 + scatter)
    other = known("convolutional", fitted["convolutional"], left_out=torch.full_like(scatter, -1))
    assert predicts_better(one, other) is expected


def test_refit_starts_with_the_learned_precisions(
    fitted: dict[str, sr.Fit],
) -> None:
    razor = fitted["convolutional"].razor
    precisions = initial_precisions(razor, 64)
    assert precisions == {k: min(float(v), 64 / 15) for k, v in razor.prior.precisions.items()}
    again = sr.Razor(fitted["convolutional"].model, "categorical", 64, prior_precision=precisions)
    assert {k: float(v) for k, v in again.prior.precisions.items()} == pytest.approx(precisions)


def test_refit_uses_the_precisions_of_its_plan(
    fitted: dict[str, sr.Fit], monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, y), _ = digits.digits_on_canvas("digit")
    family = digits.digit_family("digit")
    question = Question("digit", "?", family, (x[:64], y[:64]), None, Categorical)
    names = fitted["relaxed"].razor.prior.names
    learned = {name: 0.5 + 0.25 * number for number, name in enumerate(names)}
    # No evidence step, which would change the precisions.
    never = {"epochs": 1, "burn_in": 10**9}
    monkeypatch.setattr(api, "timed_config", lambda config, *_: config.change(**never))
    plan = RefitPlan("relaxed", 1, 64, 1, learned)
    candidate = api._refit(question, plan, FitConfig(), Options(device="cpu"))
    assert {k: float(v) for k, v in candidate.fit.razor.prior.precisions.items()} == pytest.approx(
        learned
    )


@pytest.mark.parametrize(
    ("last", "best", "expected"),
    [
        (300.0, 700.0, "relaxed"),  # made good nearly half of the gap in one step
        (100.0, 700.0, None),
        (-50.0, 700.0, None),
        (300.0, -700.0, None),  # it is ahead anyway
    ],
)
def test_a_closing_gap_is_not_converged(
    fitted: dict[str, sr.Fit], last: float, best: float, expected: str | None
) -> None:
    histories = {"relaxed": [-last, 0.0], "fully connected": [best - 1, best]}
    candidates = []
    for name, values in histories.items():
        records = [{"log_evidence": value} for value in values]
        known = type("K", (KnownCandidate,), {"values": {name: values[-1]}})
        candidates.append(known(name, replace(fitted[name], history=records)))
    candidates.sort(key=lambda c: -c.log_evidence)
    late = unconverged_rival(Answer("digit", "?", digits.digit_family("digit"), candidates))
    assert (None if late is None else late.name) == expected


@pytest.mark.usefixtures("work_clock")
def test_the_final_network_is_saved(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=generator)
    discovery = sr.discover(x, x[:, 0] + 0.1 * torch.randn(120, generator=generator), minutes=0.12)
    answer = discovery.results[0].answer
    assert answer.final is not None
    assert answer.final.name == answer.best.name
    assert len(answer.final.fit.history) > len(answer.best.fit.history)
    assert (
        "After the final training its mean squared error on held-out data is" in discovery.verdict
    )
    preparation = discovery.results[0].preparation
    assert preparation is not None
    with torch.no_grad():
        expected = answer.final.fit.model(preparation.inputs(x[:5]))
        y = discovery.results[0].data.y
        assert y is not None
        expected = expected * y.std(0, correction=0) + y.mean(0)
        torch.testing.assert_close(discovery.predict(x[:5]), expected, rtol=1e-4, atol=1e-4)
    document = json.loads(json.dumps(discovery.to_dict()))
    assert document["questions"][0]["final"]["name"] == answer.final.name
    assert discovery.reading.train["epochs"] == len(answer.final.fit.history)


def test_layers_are_numbered(fitted: dict[str, sr.Fit]) -> None:
    layers = numbered(fitted["relaxed"].reading.layers)
    assert [layer.name for layer in layers] == ["1", "2", "3"]
    assert [layer.name for layer in fitted["relaxed"].reading.layers][:3] == ["0", "3", "6"]
