"""Test the report of a fit and its notebook representation."""

import copy
import json
from pathlib import Path

import page_document
import pytest
import torch
from page_reader import Page
from torch import nn

import symrazor as sr
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.training.fit_document import document_of


@pytest.fixture(scope="module")
def fitted() -> sr.Fit:
    torch.manual_seed(0)
    x = torch.randn(40, 1, 6, 6)
    y = (x[:, 0, :, :3].mean((1, 2)) > 0).long()
    layer = Relaxed([Conv(1, 2, (6, 6)), FFC(1, 2, (6, 6))])
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
    return sr.fit(model, (x, y), test=(x, y), epochs=6, batch_size=20, progress=False)


def test_repr_of_a_fit_is_one_short_line(fitted: sr.Fit) -> None:
    text = repr(fitted)
    assert text.startswith("Fit(6 epochs, Evidence(") and "Reading(" in text
    assert len(text) < 400 and "\n" not in text


def test_fit_writes_a_report(fitted: sr.Fit, tmp_path: Path) -> None:
    file = fitted.report(tmp_path / "report.html", question="Left?", classes=["no", "yes"])
    data = Page(file.read_text("utf-8")).data
    question = data["questions"][0]
    assert question["question"] == "Left?" and data["kind"] == "image"
    assert question["calibration"]["on"] == "training data"
    assert sum(question["calibration"]["count"]) == 40
    assert set(question["examples"]["labels"]) == {"no", "yes"}
    assert len(question["filters"]["0.paths.0"]) == 2
    assert question["costs"][0]["parameters"] == sum(
        p.numel() for p in fitted.model[0].parameters()
    )  # type: ignore[index]
    candidate = question["candidates"][0]
    assert candidate["reading"]["evidence"]["log_evidence"] == pytest.approx(
        float(fitted.evidence.log_evidence), rel=1e-5
    )
    layer = candidate["reading"]["layers"][0]
    last = candidate["series"]["effective_parameters"]
    assert set(last) == {"0.paths.0", "0.paths.1", "3"} and layer["relaxed"]


def test_document_of_a_fit_is_plain_json(fitted: sr.Fit) -> None:
    document = document_of(fitted, test=(fitted.data.x[:9], fitted.data.y[:9]), command="mine")
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["questions"][0]["calibration"]["on"] == "held-out data"
    assert sum(document["questions"][0]["calibration"]["count"]) == 9
    assert document["command"] == "mine" and document["versions"]["torch"] == torch.__version__


def test_regression_on_vectors_writes_a_report(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 3)
    fit = sr.fit(nn.Linear(3, 1), (x, x[:, :1]), "gaussian", epochs=4, progress=False)
    data = Page(fit.report(tmp_path / "page.html").read_text("utf-8")).data
    assert data["kind"] == "vector" and data["task"] == "regression"
    assert not {"calibration", "examples", "filters", "collapse"} & set(data["questions"][0])


def test_weights_of_samples_do_not_change_what_a_report_has(tmp_path: Path) -> None:
    """The calibration and the examples need class labels, not labels with weights."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 1, 6), torch.arange(30) % 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    fit = sr.fit(net, (x, y), sample_weights=torch.ones(30), epochs=2, progress=False)
    data = Page(fit.report(tmp_path / "page.html").read_text("utf-8")).data
    (question,) = data["questions"]
    assert data["task"] == "classification"
    assert question["examples"]["labels"][:2] == ["0", "1"]
    assert sum(question["calibration"]["count"]) == 30


def test_notebooks_show_readings_and_fits(fitted: sr.Fit) -> None:
    text = fitted._repr_html_()
    assert repr(fitted).count("\n") == repr(fitted.reading).count("\n") == 0
    assert fitted.reading._repr_html_() in text and "<svg" in text and "log evidence" in text
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("tr") == 1 + len(fitted.reading.layers)
    bars = [a["style"] for tag, a in page.elements if tag == "span" and "background" in str(a)]
    assert len(bars) == 3
    wild = copy.deepcopy(fitted.reading)
    object.__setattr__(wild, "verdict", page_document.XSS)
    object.__setattr__(wild.layers[0], "name", page_document.XSS)
    assert not {"script", "img", "svg"} & {tag for tag, _ in Page(wild._repr_html_()).elements}
