"""Learned augmentation: modules, code and words from measured spreads."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from symrazor.invariance.flows import image_flows
from symrazor.invariance.learned_augmentation import (
    LearnedAugmentation,
    RandomAugmentation,
    changed_predictions,
    classes_of,
    learn_augmentation,
)
from symrazor.invariance.spread import Spread, Spreads

FLOWS = {flow.name: flow for flow in image_flows((1, 20, 20))}


def _spread(name: str, share: float = 0.0, order: int = 1) -> Spread:
    """Return a spread over a share of the tested range; flips with their probability."""
    flow = FLOWS[name]
    loss = -50.0
    if flow.kind == "circle":
        loss = math.log(flow.bins * order * share) if share else loss
    elif flow.kind == "choice":
        loss = -share * math.log(share) - (1 - share) * math.log(1 - share) if share else loss
    elif share:
        loss = math.log(2 * share) - share / 2 - math.log(2 / flow.bins)
    return Spread(flow, loss, 0.01, 0.0, order)


def _learned(of_all: dict[str, float] | None = None, **shares: float) -> LearnedAugmentation:
    of_class = {name: _spread(name, shares.get(name.split("-")[0], 0.0)) for name in FLOWS}
    everything = of_class | {name: _spread(name, v) for name, v in (of_all or {}).items()}
    return LearnedAugmentation(Spreads(of_class, everything), (1, 20, 20), 2.0, 500)


def test_the_verdict_separates_invariant_aligned_and_label_changing() -> None:
    learned = _learned({"left-right flip": 0.5}, rotation=0.25)
    text = learned.verdict
    assert "Labels are unchanged by rotations up to 45 degrees (29 to 46)." in text
    assert "Labels change with left-right flips" in text
    assert "No evidence for invariance to up-down flips, horizontal shifts" in text
    assert "rotations" not in text.partition("No evidence")[2]
    assert "all rotations" in _learned(rotation=1.0).verdict
    turns = replace(learned.spreads.of_class["rotation"], order=4)
    spreads = replace(learned.spreads, of_class={"rotation": turns})
    assert "multiples of 90 degrees" in replace(learned, spreads=spreads).verdict


def test_augmentation_moves_in_training_only() -> None:
    x = torch.rand(64, 1, 20, 20)
    module = _learned(rotation=0.5).augmentation()
    torch.manual_seed(0)
    assert (module.train()(x) - x).abs().max() > 0.1
    assert torch.equal(module.eval()(x), x) and "rotation 90" in repr(module)
    nothing = _learned().augmentation()
    assert torch.equal(nothing.train()(x), x)


@pytest.mark.parametrize(("name", "inverse"), [("left-right flip", -1), ("up-down flip", -2)])
def test_flips_have_their_probability(name: str, inverse: int) -> None:
    x = torch.rand(2000, 1, 4, 4)
    moved = RandomAugmentation([_spread(name, 0.4)]).transform(x, torch.Generator().manual_seed(0))
    kept = (moved - x).abs().flatten(1).amax(1) < 1e-4
    flipped = (moved - x.flip(inverse)).abs().flatten(1).amax(1) < 1e-4
    assert bool((kept ^ flipped).all())
    assert float(flipped.double().mean()) == pytest.approx(0.4, abs=0.04)


def test_angles_are_uniform_on_the_range() -> None:
    """A point at a known angle moves to angles that fill the range."""
    side = 41
    x = torch.zeros(400, 1, side, side)
    x[:, :, 20, 34:37] = 1.0
    moved = RandomAugmentation([_spread("rotation", 0.25)]).transform(
        x, torch.Generator().manual_seed(0)
    )
    q = torch.arange(side) - 20.0
    mass = moved[:, 0] / moved[:, 0].sum((1, 2), keepdim=True)
    angle = torch.atan2((mass.sum(2) @ q), (mass.sum(1) @ q)).rad2deg()
    assert float(angle.abs().max()) <= 46 and float(angle.std()) == pytest.approx(26, abs=3)
    quarter = RandomAugmentation([_spread("rotation", 0.001, order=4)]).transform(
        x, torch.Generator().manual_seed(0)
    )
    mass = quarter[:, 0] / quarter[:, 0].sum((1, 2), keepdim=True)
    angle = torch.atan2((mass.sum(2) @ q), (mass.sum(1) @ q)).rad2deg()
    assert len(set((angle / 90).round().long().remainder(4).tolist())) == 4
    assert float((angle - 90 * (angle / 90).round()).abs().max()) < 3


def test_values_change_in_units_of_the_data() -> None:
    x = torch.rand(500, 1, 6, 6)
    moved = RandomAugmentation([_spread("brightness", 0.5)], deviation=2.0).transform(
        x, torch.Generator().manual_seed(0)
    )
    change = (moved - x).flatten(1)
    assert float(change.std(1).max()) < 1e-5
    assert float(change.abs().max()) == pytest.approx(1.0, abs=0.02)


def test_code_for_other_libraries_is_valid() -> None:
    learned = _learned(rotation=0.25, left=0.5, x=0.8, contrast=0.9, scale=0.9)
    for code, names in (
        (learned.torchvision(), ("v2.RandomAffine(degrees=45", "v2.RandomHorizontalFlip(0.50)")),
        (learned.albumentations(), ("A.Affine(rotate=(-45, 45)", "A.HorizontalFlip(p=0.50)")),
    ):
        compile(code, "code", "exec")
        assert all(name in code for name in names)
    document = learned.to_dict()
    assert document["transformations"]["rotation"]["found"]
    turns = Spreads({"rotation": _spread("rotation", 0.01, order=4)}, {})
    assert "RandomRotate90" in replace(learned, spreads=turns).albumentations()
    assert "RandomChoice" in replace(learned, spreads=turns).torchvision()


def test_changed_predictions_are_zero_for_an_invariant_network() -> None:
    x = torch.rand(50, 1, 12, 12)
    flips = RandomAugmentation([_spread("left-right flip", 0.5)])
    total = nn.Sequential(nn.Flatten(), nn.Linear(144, 2, bias=False))
    with torch.no_grad():
        half = torch.zeros(12, 12)
        half[:, :6] = 1
        total[1].weight.copy_(torch.stack([half.flatten(), 1 - half.flatten()]))
    assert changed_predictions(total, x, flips) == pytest.approx(0.5, abs=0.15)
    with torch.no_grad():
        total[1].weight.copy_(torch.stack([torch.ones(144), torch.zeros(144)]))
    assert changed_predictions(total, x, flips) == 0 and total.training


def test_classes_of_targets_are_quantiles() -> None:
    y = torch.randn(1000, 1)
    assert classes_of(y).bincount().tolist() == [200] * 5
    assert torch.equal(classes_of(torch.tensor([2, 0])), torch.tensor([2, 0]))


def test_learning_from_images_and_a_network() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(100, 1, 8, 8, generator=generator)
    y = torch.randint(2, (100,), generator=generator)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    learned = learn_augmentation(model, (x, y), steps=4)
    assert learned.n == 100 and set(learned.spreads.of_class) == set(FLOWS)
    assert learned.change is not None and "predictions change for" in learned.verdict
    with pytest.raises(ValueError, match="floating-point images"):
        learn_augmentation(None, (x[0], y))
