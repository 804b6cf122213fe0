"""Test what the report shows of the delivered network: moved examples, errors, open questions."""

from typing import Any

import pytest
import torch

import symrazor as sr
from symrazor.discovery.document import EXAMPLES, STEPS, evaluate, not_tested, shifts
from symrazor.report.content import LEVELS, page_content


@pytest.fixture(scope="module")
def series() -> sr.Discovery:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 1, 16, generator=generator)
    return sr.discover(x, (x[:, 0, :8].sum(1) > 0).long(), kind="series", epochs=4, starts=2)


def parts(found: sr.Discovery) -> dict[str, Any]:
    (result,) = found.results
    shown = evaluate(result.network, result.posterior, result.data, result.test)
    return {**shown, "not_tested": not_tested(result.data, result.answer)}


def test_shifts_go_in_both_directions() -> None:
    assert shifts(8) == [-3, -2, -1, 0, 1, 2, 3]
    assert shifts(64) == [-24, -16, -8, 0, 8, 16, 24]
    assert shifts(2) == [-3, -2, -1, 0, 1, 2, 3]


def test_moved_examples_are_predicted_like_all_others(series: sr.Discovery) -> None:
    moved = parts(series)["moved"]
    assert len(moved["examples"]) == min(EXAMPLES, 2)
    x = series.results[0].test[0]  # type: ignore[index]
    for example in moved["examples"]:
        own = torch.tensor(example["inputs"][STEPS])
        number = int((x[:, 0] == own).all(1).nonzero()[0])
        name = int(example["output"])
        for step, shown, value in zip(
            moved["steps"], example["inputs"], example["values"], strict=True
        ):
            copy = x[number].roll(step, -1)
            torch.testing.assert_close(torch.tensor(shown), copy[0])
            expected = series.predict(copy.unsqueeze(0)).mean[0, name]
            assert value == pytest.approx(float(expected), abs=1e-6)


def test_confusions_and_worst_examples_are_those_of_held_out_data(series: sr.Discovery) -> None:
    got, (result,) = parts(series), series.results
    assert result.test is not None
    x, y = result.test
    p = series.predict(x).mean
    for label in range(2):
        for guess in range(2):
            count = int(((y == label) & (p.argmax(1) == guess)).sum())
            assert got["confusion"][label][guess] == count
    own = p.gather(1, y.reshape(-1, 1))[:, 0]
    assert got["worst"]["probability"] == pytest.approx(own.sort().values[:8].tolist())
    assert got["shown_on"] == "held-out data"


def test_targets_are_shown_with_their_standard_deviation() -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    found = sr.discover(x, x[:, :1] + 5, epochs=2)
    got, (result,) = parts(found), found.results
    assert result.test is not None
    prediction = found.predict(result.test[0])
    assert prediction.std is not None
    assert got["scatter"]["true"] == result.test[1][:, 0].tolist()
    assert got["scatter"]["predicted"] == pytest.approx(prediction.mean[:, 0].tolist())
    assert got["scatter"]["std"] == pytest.approx(prediction.std[:, 0].tolist())
    assert "moved" not in got and "confusion" not in got


def test_open_questions_are_named(series: sr.Discovery) -> None:
    assert parts(series)["not_tested"] == ["Reversal and stretching of time: not tested."]


def test_the_page_embeds_lines_and_no_raw_inputs(series: sr.Discovery) -> None:
    content = page_content(series.to_dict(), LEVELS[0])["questions"][0]
    example = content["moved"]["examples"][0]
    assert len(example["lines"]) == 2 * STEPS + 1 and "inputs" not in example
    assert len(content["worst"]["lines"]) == len(content["worst"]["labels"])
