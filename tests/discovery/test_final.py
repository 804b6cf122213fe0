"""Train the recommended network on all training data, and keep the better network."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from discover_data import some_data

import symrazor as sr
from symrazor.core.likelihood import Categorical
from symrazor.data import dataset
from symrazor.discovery import final
from symrazor.discovery.answer import Candidate
from symrazor.discovery.api import answer_question
from symrazor.discovery.claims import Margin
from symrazor.discovery.families import candidates_for
from symrazor.discovery.question import Family, Options, Question


def test_the_final_network_is_delivered() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=generator)
    y = x[:, 0] + 0.1 * torch.randn(120, generator=generator)
    discovery = sr.discover(x, y, epochs=20, starts=2)
    answer = discovery.results[0].answer
    assert answer.final is not None
    assert answer.final.name == answer.recommended.name
    assert answer.final.fit.razor.n_data == 96  # all training data, not four fifths of them
    assert answer.recommended.fit.razor.n_data == 77
    said = "The delivered network's mean squared error on held-out data is"
    assert said in discovery.verdict
    preparation, seen = discovery.results[0].preparation, discovery.results[0].data.y
    assert preparation is not None and seen is not None
    with torch.no_grad():
        expected = answer.final.fit.model(preparation.inputs(x[:5]))
        expected = expected * seen.std(0, correction=0) + seen.mean(0)
        torch.testing.assert_close(discovery.predict(x[:5]).mean, expected, rtol=1e-4, atol=1e-4)
    document = json.loads(json.dumps(discovery.to_dict()))
    assert document["questions"][0]["final"]["name"] == answer.final.name


@pytest.mark.parametrize("n", [80, 2400])
def test_a_worse_final_network_is_not_delivered(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil the final training: few data are judged by the evidence, many by samples set aside."""
    data = some_data("vector", n=n)
    x, y = data.labelled
    question = Question("a", "?", candidates_for(data), (x, y), None, Categorical)
    train, sizes = final.fit, []

    def spoiled(model: torch.nn.Module, *arguments: object, **options: object) -> object:
        result = train(model, *arguments, **options)  # type: ignore[arg-type]
        sizes.append(result.razor.n_data)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        evidence = result.razor.evidence(result.data)
        result.evidence = evidence
        return result

    options = Options(epochs=6, starts=1, progress=False)
    kept = answer_question(question, options, lambda text: None)
    assert kept.final is not None
    expected = max(1.0, kept.recommended.temperature)
    assert n > 80 or kept.delivered.temperature == expected
    monkeypatch.setattr(final, "fit", spoiled)
    told: list[str] = []
    spoilt = answer_question(question, options, told.append)
    assert spoilt.final is None
    assert any("predicts better and is kept" in text for text in told)
    assert sizes == [n if n < 2000 else n - 120]  # a twentieth is set aside


@pytest.mark.parametrize(
    ("gain", "how"),
    [(0.01, "as well"), (0.5, "better by 0.5 ± 0.1 nats per left-out sample")],
)
def test_many_data_without_symmetry_get_the_ordinary_network(
    gain: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is trained on all data but those of the check, which give its temperature."""
    monkeypatch.setattr(final, "LARGE_SAMPLES", 1000)
    monkeypatch.setattr(final, "_gain", lambda *_: Margin(gain, 0.1))
    n, generator = 2000, torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 2
    full = candidates_for(dataset(x, y))
    structures = [full.structure("fully connected")]
    family = Family(structures, ordinary=full.ordinary)
    question = Question("a", "?", family, (x, y), (x[:9], y[:9]), Categorical)
    options = Options(epochs=2, starts=1, progress=False)
    answer = answer_question(question, options, lambda text: None)
    assert answer.final is not None
    assert (answer.recommended.name, answer.final.name) == ("fully connected", "ordinary")
    assert answer.final.fit.razor.n_data == 1800
    assert answer.delivered.temperature == answer.final.own_temperature != 1.0
    assert f"An ordinary CNN, trained on 1,800 samples, predicts {how} and" in answer.details


@pytest.mark.parametrize(("gain", "name"), [(0.05, "small"), (0.5, "large")])
def test_a_larger_network_must_predict_clearly_better(
    gain: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred samples with a deviation of 1 show a difference of 0.5, not one of 0.05."""
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = {"small": torch.zeros_like(noise), "large": noise - noise.mean() + gain}
    check = torch.zeros(100, 1), torch.zeros(100)
    monkeypatch.setattr(final, "_final_names", lambda *_: list(scores))
    monkeypatch.setattr(final, "_split", lambda *_: (check, check))
    monkeypatch.setattr(final, "_train_final", lambda question, compared, name, *_: name)
    monkeypatch.setattr(final, "_gain", lambda *_: Margin(1.0, 0.1))
    monkeypatch.setattr(final, "log_scores", lambda trained, check: (scores[trained], 1.0))
    start: Any = SimpleNamespace(log_evidence=0.0)
    unused: Any = None
    candidate = Candidate("small", unused, (start,))
    chosen = final.train_final(unused, unused, candidate, Options(), 1.0, lambda text: None)
    assert chosen is not None and chosen.name == name
