"""Candidates for images: invariance along both axes, along one, along none."""

from types import SimpleNamespace

import pytest
import torch
from discover_data import some_data

from symrazor.core.likelihood import Categorical
from symrazor.discovery.budget import Plan
from symrazor.discovery.claims import Claim, Margin, describe_shifts
from symrazor.discovery.comparison import Compared
from symrazor.discovery.families import candidates_for, grid_family
from symrazor.discovery.members import Comparison
from symrazor.discovery.question import Question
from symrazor.training.options import FitConfig


@pytest.mark.parametrize("size", [(8, 8), (9, 14), (17, 12)])
def test_networks_are_invariant_along_their_axes_only(size: tuple[int, int]) -> None:
    family = grid_family((2, *size), 3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, *size, generator=generator)
    axes = {"convolutional": "xy", "x-invariant": "x", "y-invariant": "y", "positional": ""}
    for name, invariant in axes.items():
        torch.manual_seed(0)
        network = family.structure(name).make().requires_grad_(False)
        f = network(x)
        for axis, dim in (("x", 3), ("y", 2)):
            change = max(
                float((network(x.roll(shift, dim)) - f).abs().max() / f.std())
                for shift in (1, 3, 4)
            )
            assert (change < 1e-4) == (axis in invariant), (name, axis, change)


def test_all_of_them_start_from_the_plain_network() -> None:
    family = grid_family((1, 8, 8), 3)
    inner = {name for name, start in family.contains.items() if start == "convolutional"}
    assert inner == {"relaxed", "x-invariant", "y-invariant", "positional"}
    assert "x-invariant" not in [s.name for s in grid_family((1, 32), 3).structures]


def claim(name: str, holds: bool | None) -> Claim:
    return Claim(name, holds, 0.99, "positional", Margin(0.0, 1.0), None, 3)


@pytest.mark.parametrize(
    ("translation", "x", "y", "headline"),
    [
        (True, True, True, "Translation-invariant: position does not matter."),
        (None, True, True, "Undecided: the data do not show whether position matters."),
        (False, None, False, "Not translation-invariant: position matters."),
        (False, True, True, "Not translation-invariant: position matters."),
        (
            False,
            True,
            None,
            "Translation-invariant along one axis: the horizontal position does not matter, the "
            "vertical position matters.",
        ),
        (
            False,
            False,
            True,
            "Translation-invariant along one axis: the vertical position does not matter, the "
            "horizontal position matters.",
        ),
    ],
)
def test_headlines(translation: bool | None, x: bool | None, y: bool | None, headline: str) -> None:
    claims = [claim("translation", translation)]
    if translation is False:
        claims += [claim("x-translation", x), claim("y-translation", y)]
    assert describe_shifts(claims) == headline


@pytest.mark.parametrize(("gain", "names"), [(-1.0, 1), (0.0, 1), (3.0, 3)])
def test_single_axes_are_asked_about_only_if_position_matters(gain: float, names: int) -> None:
    data = some_data("image", n=100)
    question = Question("a", "?", candidates_for(data), data.labelled, None, Categorical)
    scores = torch.full((20,), -1.0, dtype=torch.float64)
    members = [
        SimpleNamespace(
            structure=structure.name,
            start=start,
            evidence=SimpleNamespace(n_data=80),
            log_evidence=100 * gain * (structure.name != "convolutional"),
            left_out=scores + gain * (structure.name != "convolutional"),
            guess=scores - 1,
        )
        for structure in question.family.structures
        for start in range(3)
    ]
    comparison = Comparison(question, FitConfig(), 80, 0)
    compared = Compared(comparison, Plan((1, 1), 80), members)  # type: ignore[arg-type]
    assert len(compared.claims) == names
