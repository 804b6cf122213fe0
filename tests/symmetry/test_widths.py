"""Test learned widths in readings, pages and sentences, and how they are trained."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.groups.lie import so2
from symrazor.invariance import Augment, Augmented, Flips, affine, lie
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.symmetry.reading import Reading
from symrazor.symmetry.widths import (
    MIN_OPEN_WIDTH,
    Invariance,
    invariance_sentence,
    invariances_of,
)
from symrazor.training.augmentation_baselines import LikelihoodConfig, fit_by_likelihood
from symrazor.training.fit_document import document_of


def _relaxed() -> nn.Module:
    layer = Relaxed([Conv(1, 3, (6, 6)), FFC(1, 3, (6, 6))])
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(108, 2))


def _bars(n: int = 60) -> tuple[Tensor, Tensor]:
    """Return images with a bar at a random position; the label is its half."""
    generator = torch.Generator().manual_seed(0)
    x = 0.2 * torch.randn(n, 1, 6, 6, generator=generator)
    where = torch.randint(0, 6, (n,), generator=generator)
    x[torch.arange(n), 0, where] += 1
    return x, (where >= 3).long()


def _fit() -> sr.Fit:
    torch.manual_seed(0)
    model = Augmented(_relaxed(), Augment([affine("rotation", 0.4), Flips((-1, -2), 0.2)], 3))
    options = {"epochs": 12, "batch_size": 20, "burn_in": 9, "estimator": "mc", "lr": 5e-3}
    return sr.fit(model, _bars(), test=_bars(20), progress=False, **options)


@pytest.fixture(scope="module")
def fitted() -> sr.Fit:
    return _fit()


def test_a_reading_contains_the_widths(fitted: sr.Fit) -> None:
    result = fitted.reading
    assert list(result.invariances) == ["rotation", "left-right flip", "up-down flip"]
    assert isinstance(fitted.model, Augmented)
    widths = fitted.model.invariances((1, 6, 6))
    assert result.invariances["rotation"] == Invariance(widths["rotation (degrees)"], "degrees")
    document = json.loads(result.to_json())
    assert document["invariances"]["rotation"] == {
        "width": pytest.approx(widths["rotation (degrees)"]),
        "unit": "degrees",
    }
    assert Reading.from_dict(document) == result
    older = {k: v for k, v in document.items() if k != "invariances"} | {"schema": 2}
    assert Reading.from_dict(older).invariances == {}
    assert (
        "widths: rotation" in str(result)
        and invariance_sentence(result.invariances) in result.verdict
    )
    layer = next(layer for layer in result.layers if layer.relaxed)
    assert layer.name == "network.0" and layer.error is not None


def test_widths_are_learned_reproducibly(fitted: sr.Fit) -> None:
    again = _fit()
    assert again.reading.invariances == fitted.reading.invariances
    assert float(again.evidence.log_evidence) == float(fitted.evidence.log_evidence)
    assert fitted.reading.invariances["rotation"].width != pytest.approx(math.degrees(0.4), abs=0.1)


def test_a_page_shows_widths_and_transformed_examples(fitted: sr.Fit, tmp_path: Path) -> None:
    question = document_of(fitted)["questions"][0]
    orbits = torch.tensor(question["examples"]["transformed"])
    assert orbits.shape == (6, 12, 1, 6, 6)
    images = torch.tensor(question["examples"]["images"])[:6]
    torch.testing.assert_close(orbits[:, 4:8:4].flip(-1)[:, 0], orbits[:, 0], atol=2, rtol=0)
    assert float((orbits[:, 0] - images).abs().mean()) < 0.5  # turned, not replaced
    assert "network.pt2" not in question["collapse"]["refused"]
    page = fitted.report(tmp_path / "page.html").read_text()
    assert "left-right flip" in page


def test_the_collapsed_network_makes_no_copies(fitted: sr.Fit, tmp_path: Path) -> None:
    x = _bars()[0]
    with pytest.raises(ValueError, match=r"collapse\(model.network, x\)"):
        sr.collapse(fitted.model, x)
    plain = fitted.collapse(0.0)
    assert isinstance(fitted.model, Augmented)
    torch.testing.assert_close(plain(x), fitted.model.network(x), rtol=1e-4, atol=1e-5)
    assert sr.save_network(plain, tmp_path / "network.pt2", x[:2]).is_file()
    assert isinstance(fitted.collapse(), nn.Module)


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ({}, ""),
        (
            {"rotation": (34.2, "degrees"), "left-right flip": (0.07, "probability")},
            "Invariant to rotations up to 34 degrees. No evidence for invariance to left-right "
            "flips.",
        ),
        (
            {"rotation": (178.0, "degrees"), "x-scale": (1.5, "factor")},
            "Invariant to all rotations and horizontal scaling by factors up to 1.5.",
        ),
        (
            {"up-down flip": (0.3, "probability"), "x-translation": (2.25, "pixels")},
            "Invariant to up-down flips (probability 0.3) and horizontal shifts up to 2.2 pixels.",
        ),
        (
            {
                "turn by 90 degrees": (0.23, "probability of 1/4"),
                "turn by 180 degrees": (0.14, "probability of 1/4"),
                "turn by 270 degrees": (0.1, "probability of 1/4"),
            },
            "Invariant to rotations by 90 degrees and rotations by 180 degrees (probability 0.14). "
            "No evidence for invariance to rotations by 270 degrees.",
        ),
        ({"shear": (1.01, "factor")}, "No evidence for invariance to shear."),
        ({"mode 1": (0.5, "share"), "A0": (0.2, "")}, "Invariant to A0 up to 0.2."),
        ({"rotation": (math.nan, "degrees")}, ""),
        ({"A0": (1e-4, "")}, "No evidence for invariance to A0."),
        (
            {
                "mode 1: rotation": (23.0, "degrees"),
                "mode 2: left-right flip": (0.1, "probability"),
            },
            "Invariant to mode 1: rotations up to 23 degrees. No evidence for invariance to mode "
            "2: left-right flips.",
        ),
        (
            {"z-rotation": (29.0, "degrees")},
            "Invariant to rotations about z up to 29 degrees.",
        ),
        (
            {"shear": (1.0, "factor"), "rotation": (1.0, "degrees"), "blur": (0.1, "pixels")},
            "No evidence for invariance to shear, rotations or blur.",
        ),
    ],
)
def test_words(widths: dict[str, tuple[float, str]], words: str) -> None:
    assert invariance_sentence({name: Invariance(*one) for name, one in widths.items()}) == words


def test_thresholds_are_inclusive() -> None:
    for unit, least in MIN_OPEN_WIDTH.items():
        assert Invariance(least, unit).open and not Invariance(0.99 * least, unit).open
    assert not Invariance(0.0, "of one's own").open


def test_widths_of_a_submodule_have_its_name() -> None:
    part = Augmented(nn.Linear(2, 3), Augment(lie(so2(), 0.5), 2))
    result = invariances_of(nn.Sequential(part, nn.Linear(3, 2)), (2,))
    (name,) = result
    assert name.startswith("0: ") and result[name].width == pytest.approx(math.degrees(0.5))
    assert invariances_of(nn.Linear(2, 2), (2,)) == {}


def _points(n: int = 100) -> tuple[Tensor, Tensor]:
    """Return random directions in the plane and the quadrant of each."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(n, generator=generator)
    x = torch.stack([angle.cos(), angle.sin()], 1)
    return x, (angle / (math.pi / 2)).long()


def _turned() -> Augmented:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 4))
    return Augmented(network, Augment(lie(so2(), 0.8), 6), average="probabilities")


def test_likelihood_closes_a_width_and_augerino_opens_any_width() -> None:
    """Neither method respects the labels, although a quadrant is not invariant to rotations."""
    widths = {}
    for strength in (0.0, 0.3):
        model = _turned()
        config = LikelihoodConfig(strength, 40, 25, 3e-2, 3e-2, progress=False)
        fit_by_likelihood(model, _points(), config=config)
        assert not model.training
        (widths[strength],) = model.invariances((2,)).values()
    assert widths[0.0] < 10 and widths[0.3] > 170


def test_evidence_opens_the_width_of_an_invariant_problem() -> None:
    """The label depends on the distance from the origin only."""
    x, _ = _points()
    radius = 0.5 + torch.rand(100, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))
    model = Augmented(network, Augment(lie(so2(), 0.8), 6))
    data = (x * radius.unsqueeze(1), (radius > 1).long())
    sr.fit(model, data, epochs=60, batch_size=50, burn_in=20, lr=2e-2, every=2, progress=False)
    (width,) = model.invariances((2,)).values()
    assert width > 2 * math.degrees(0.8)
