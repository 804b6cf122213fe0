"""Test augmentation widths chosen by the training loss and on held-out data."""

import math

import pytest
import torch
from torch import Tensor, nn

from symrazor.groups.lie import so2
from symrazor.invariance import Augment, Augmented, Flips, Mixture, QuarterTurns, lie
from symrazor.training.augmentation_baselines import (
    LikelihoodConfig,
    ValidationConfig,
    fit_by_likelihood,
    fit_by_validation,
    set_widths_,
)

TRAINING = LikelihoodConfig(epochs=25, batch_size=30, lr=3e-2, progress=False)


def _model(width: float = 0.5) -> Augmented:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    return Augmented(network, Augment(lie(so2(), width), 5))


def _rings(n: int = 60, quarter: bool = False) -> tuple[Tensor, Tensor]:
    """Return points labelled by their distance from the centre, or by their half plane."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(n, generator=generator)
    radius = 0.5 + torch.rand(n, generator=generator)
    x = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    return x, (x[:, 0] > 0).long() if quarter else (radius > 1).long()


@pytest.mark.parametrize("folds", [1, 3])
def test_validation_selects_the_width_that_suits_the_labels(folds: int) -> None:
    chosen = {}
    for quarter in (False, True):
        model = _model()
        options = ValidationConfig((0.02, 3.1), folds, 0.3, TRAINING)
        fitted = fit_by_validation(model, _rings(quarter=quarter), config=options)
        chosen[quarter] = fitted.chosen
        assert fitted.scores.index(min(fitted.scores)) == (0.02, 3.1).index(float(fitted.chosen))  # type: ignore[arg-type]
        (width,) = model.invariances((2,)).values()
        assert width == pytest.approx(math.degrees(float(fitted.chosen)))  # type: ignore[arg-type]
        assert not model.training and len(fitted.history) == 25
    assert chosen == {False: 3.1, True: 0.02}


@pytest.mark.parametrize("folds", [1, 3])
def test_scores_are_means_over_examples(folds: int) -> None:
    """An untrained uniform classifier scores log 2 per example."""
    model = _model()
    nn.init.zeros_(model.network[2].weight)  # type: ignore[index, arg-type]
    nn.init.zeros_(model.network[2].bias)  # type: ignore[index, arg-type]
    slow = LikelihoodConfig(epochs=1, batch_size=30, lr=1e-9, progress=False)
    fitted = fit_by_validation(
        model, _rings(), config=ValidationConfig((0.1, 3.0), folds, 0.3, slow)
    )
    assert fitted.scores == pytest.approx((math.log(2),) * 2)


def test_scores_use_networks_that_never_saw_the_held_out_data() -> None:
    """Random labels can be fitted only by a network that has seen them."""
    x, _ = _rings(40)
    y = torch.randint(2, (40,), generator=torch.Generator().manual_seed(3))
    training = LikelihoodConfig(epochs=200, batch_size=40, lr=5e-2, progress=False)
    fitted = fit_by_validation(_model(), (x, y), config=ValidationConfig((0.01,), 2, 0.3, training))
    assert fitted.history[-1] < 0.55 and fitted.scores[0] > math.log(2)


def test_widths_are_set_by_name() -> None:
    model = _model()
    both = Augmented(model.network, Augment([lie(so2(), 0.5), Flips((-1,), 0.2)], 4))
    set_widths_(both, {"choices.0.probability": 0.4})
    result = both.invariances((2,))
    assert list(result.values()) == pytest.approx([math.degrees(0.5), 0.4])
    with pytest.raises(ValueError, match="Unknown widths"):
        set_widths_(both, {"nonsense": 0.4})
    with pytest.raises(ValueError, match="Unknown widths"):
        set_widths_(nn.Linear(2, 2), 0.1)


def test_quarter_turns_take_a_probability_and_mixture_shares_are_unchanged() -> None:
    parts = [Augment(QuarterTurns(0.1)), Augment([lie(so2(), 0.5), Flips((-1,), 0.2)], 4)]
    model = Augmented(nn.Linear(2, 2), Mixture(parts, [0.8, 0.2]))
    set_widths_(model, 0.3)
    turns = parts[0].choices[0].probabilities
    torch.testing.assert_close(turns, torch.tensor([0.7, 0.1, 0.1, 0.1]))
    assert model.augment.describe((1, 2, 2))["mode 1 (share)"] == pytest.approx(0.8)
    assert not any(raw.requires_grad for raw in model.augment.parameters())
    set_widths_(model, {"parts.0.choices.0.logits": 0.6})
    torch.testing.assert_close(turns.new_tensor(0.4), parts[0].choices[0].probabilities[0])
    with pytest.raises(ValueError, match=r"parts.0.choices.0.logits: .*got 1.5"):
        set_widths_(model, {"parts.0.choices.0.logits": 1.5})


def test_augerino_opens_quarter_turns() -> None:
    """The regulariser rewards the whole group and affects only the augmentation."""
    model = Augmented(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), Augment(QuarterTurns(0.1)))
    x, y = torch.zeros(8, 1, 2, 2), torch.arange(8) % 2
    config = LikelihoodConfig(strength=1.0, epochs=150, width_lr=0.1, progress=False)
    fit_by_likelihood(model, (x, y), config=config)
    probabilities = model.augment.choices[0].probabilities
    torch.testing.assert_close(probabilities, torch.full((4,), 0.25), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": ()}, "at least one entry"),
        ({"grid": ("a",)}, "numbers by name, got 'a'"),
        ({"folds": 2.5}, "folds must be an integer"),
        ({"folds": 0}, "folds must be at least 1"),
        ({"held_out": 1.0}, "held_out must be in"),
    ],
)
def test_invalid_options_are_rejected(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ValidationConfig(**changes)  # type: ignore[arg-type]


def test_more_folds_than_examples_are_rejected() -> None:
    with pytest.raises(ValueError, match="more examples than folds"):
        fit_by_validation(_model(), _rings(3), config=ValidationConfig((0.1,), 5, 0.3, TRAINING))
