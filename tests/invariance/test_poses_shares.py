"""Test measured shares of flips and quarter turns for networks with known standard poses."""

import math

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import digits
from symrazor.invariance import Augment, Augmented, Choice, Flips, QuarterTurns, affine, find_reach_
from symrazor.invariance.poses import likeliest_shares

NOISE = 0.7
CORNER = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])
"""An image that differs under every flip and rotation."""


class Corner(nn.Module):
    """The true joint density: a bright corner in noise; each class has a standard pose."""

    def __init__(self, turns: tuple[int, ...] = (0, 0)) -> None:
        super().__init__()
        self.middles = torch.stack([CORNER.rot90(k, (-2, -1)) for k in turns])

    def forward(self, x: Tensor) -> Tensor:
        """Log densities of the classes."""
        distance = (x.unsqueeze(1) - self.middles.to(x)).square().sum((2, 3, 4))
        return -0.5 * distance / NOISE**2


def _posed(choice: Choice, shares: list[float], n: int = 500) -> tuple[Tensor, Tensor]:
    """Draw inputs in poses with given shares; labels carry no information."""
    generator = torch.Generator().manual_seed(0)
    x = CORNER + NOISE * torch.randn(n, 1, 2, 2, generator=generator)
    pose = torch.multinomial(torch.tensor(shares), n, True, generator=generator)
    return choice(x)[torch.arange(n), pose], torch.randint(2, (n,), generator=generator)


@pytest.mark.parametrize("turns", [(0, 0), (0, 2), (1, 3)])
@pytest.mark.parametrize("p", [(0.0, 0.0), (0.15, 0.0), (0.3, 0.5), (0.5, 0.5)])
def test_shares_of_flips(p: tuple[float, float], turns: tuple[int, ...]) -> None:
    a, b = p
    shares = [(1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b]
    flips = Flips((-1, -2), 0.49)
    model = Augmented(Corner(turns), Augment(flips), average="joint").eval()
    find_reach_(model, _posed(flips, shares))
    result = list(model.invariances((1, 2, 2)).values())
    assert result == pytest.approx([a, b], abs=0.06)


@pytest.mark.parametrize("turns", [(0, 0), (0, 1), (3, 2)])
@pytest.mark.parametrize(
    "shares", [[1.0, 0, 0, 0], [0.5, 0, 0.5, 0], [0.6, 0.3, 0.1, 0], [0.25] * 4]
)
def test_shares_of_quarter_turns(shares: list[float], turns: tuple[int, ...]) -> None:
    choice = QuarterTurns(0.75)
    choice.logits.raw.data.zero_()
    model = Augmented(Corner(turns), Augment(choice), average="joint").eval()
    find_reach_(model, _posed(choice, shares))
    result = model.augment.shares.sort(descending=True).values.tolist()
    assert result == pytest.approx(sorted(shares, reverse=True), abs=0.06)
    assert float(model.augment.shares[0]) == max(result)


@pytest.mark.parametrize(("n", "classes", "strength"), [(60, 3, 3.0), (120, 40, 2.0)])
def test_estimate_equals_the_brute_force_maximum(n: int, classes: int, strength: float) -> None:
    """With 40 classes of 3 inputs each the standard poses remain uncertain."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % classes
    energies = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    energies[:, 0] += torch.where(torch.rand(n, generator=generator) < 0.15, -strength, strength)
    energies[y == 2] = energies[y == 2].flip(1)  # a class with the other standard pose

    def likelihood(p: float) -> float:
        total = 0.0
        for c in range(classes):
            sides = []
            for q in (p, 1 - p):
                mixed = (1 - q) * energies[y == c, 0].exp() + q * energies[y == c, 1].exp()
                sides.append(float(mixed.log().sum()))
            total += math.log(0.5 * math.exp(sides[0]) + 0.5 * math.exp(sides[1]))
        return total

    best = max((i / 1000 for i in range(501)), key=likelihood)
    result = likeliest_shares(energies, y, Flips().products)
    assert 0.01 < best < 0.3
    assert float(result[1]) == pytest.approx(best, abs=2e-3)


def test_unequal_shares_must_pay_for_their_complexity() -> None:
    y = torch.zeros(40, dtype=torch.long)
    alike = likeliest_shares(torch.zeros(40, 2), y, Flips().products)
    assert alike.tolist() == [0.5, 0.5]
    hints = torch.tensor([[0.1, 0.0]]).repeat(40, 1)  # worth 1.3 nats; the price is 1.8
    assert likeliest_shares(hints, y, Flips().products).tolist() == [0.5, 0.5]
    result = likeliest_shares(3 * hints, y, Flips().products)
    assert float(result[1]) < 0.05


def test_two_choices_and_a_transformation_are_separated() -> None:
    left_right, up_down = Flips((-1,), 0.49), Flips((-2,), 0.49)
    parts = [affine("translation", 1e-3), left_right, up_down]
    model = Augmented(Corner(), Augment(parts, 2), average="joint").eval()
    find_reach_(model, _posed(left_right, [0.7, 0.3], 150))
    result = model.invariances((1, 2, 2))
    assert result["left-right flip (probability)"] == pytest.approx(0.3, abs=0.1)
    assert result["up-down flip (probability)"] == pytest.approx(0, abs=0.05)


def test_shares_are_bounded_by_the_probabilities_and_saved() -> None:
    flips = Flips((-1,), 0.1)
    model = Augmented(Corner(), Augment(flips), average="joint").eval()
    find_reach_(model, _posed(flips, [0.5, 0.5]))
    (result,) = model.invariances((1, 2, 2)).values()
    assert result == pytest.approx(0.1)
    find_reach_(model, _posed(flips, [1.0, 0.0]))
    restored = Augmented(Corner(), Augment(Flips((-1,), 0.4)), average="joint")
    restored.load_state_dict(model.state_dict())
    assert restored.invariances((1, 2, 2)) == model.invariances((1, 2, 2))
    assert next(iter(restored.invariances((1, 2, 2)).values())) < 0.02


def test_a_choice_without_products_keeps_its_probabilities() -> None:
    class Negative(Choice):
        @property
        def probabilities(self) -> Tensor:
            return torch.tensor([0.8, 0.2])

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x, -x], 1)

        def describe(self, shape: object) -> dict[str, float]:
            return {"negative (probability)": 0.2}

    model = Augmented(Corner(), Augment([Negative(), Flips((-1,), 0.4)]), average="joint").eval()
    find_reach_(model, _posed(Flips(), [1.0, 0.0]))
    negative, flip = model.invariances((1, 2, 2)).values()
    assert negative == 0.2 and flip < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("mirrored", "low", "high"), [(0.0, 0.0, 0.1), (0.5, 0.4, 0.5)])
def test_mirrored_digits(mirrored: float, low: float, high: float) -> None:
    """The embedded digits, unchanged or half of them mirrored, from a wide start."""
    x, y = digits("train")
    x, y = x[:400], y[:400]
    chosen = torch.rand(400, generator=torch.Generator().manual_seed(0)) < mirrored
    x = torch.where(chosen.reshape(-1, 1, 1, 1), x.flip(-1), x)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    model = Augmented(network, Augment(Flips((-1,), 0.4)), average="joint")
    options = {"epochs": 30, "batch_size": 50, "lr": 1e-2, "every": 2, "estimator": "mc"}
    fit = sr.fit(model, (x, y), progress=False, **options)  # type: ignore[arg-type]
    (result,) = fit.reading.invariances.values()
    assert low <= result.width <= high
