"""Test edge cases of copies: loaded states, tokens, noise, custom transformations."""

from collections.abc import Sequence

import pytest
import torch
from augment_case import pictures, small_network
from torch import Tensor, nn

from symrazor.core.parameters import Hyper
from symrazor.invariance import (
    Augment,
    Augmented,
    Flips,
    Jitter,
    Mixture,
    Noise,
    Transformation,
    affine,
)


def test_a_loaded_state_restores_its_shift() -> None:
    """Also in a new model, which is in training mode until `eval`."""
    x = pictures()
    model = Augmented(small_network(36), Augment(affine("rotation", 1.0), 4)).double().eval()
    other = Augmented(small_network(36), Augment(affine("rotation", 0.3), 4, seed=3)).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(x), model(x))
    other.train()
    assert not torch.equal(other.eval()(x), model(x))
    other.train()
    other.load_state_dict(model.state_dict())
    other(x)  # training goes on
    assert not torch.equal(other.eval()(x), model(x))


def test_copies_of_integers_have_fractional_weights() -> None:
    """The weights of tokens are not rounded to 0."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (5, 4))
    network = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 2))
    flips = Augment(Flips((-1,), 0.2))
    expected = 0.8 * network(tokens) + 0.2 * network(tokens.flip(-1))
    torch.testing.assert_close(Augmented(network, flips)(tokens), expected)
    mixed = Mixture([flips, Augment(Flips((-1,), 0.4))])
    expected = 0.7 * network(tokens) + 0.3 * network(tokens.flip(-1))
    torch.testing.assert_close(Augmented(network, mixed)(tokens), expected)


@pytest.mark.parametrize("kind", [Noise, Jitter])
def test_copies_have_different_noise(kind: type[Noise]) -> None:
    x = torch.zeros(2, 5, 3, dtype=torch.float64)
    moved, _ = Augment(kind(0.5), 8).double().eval().copies(x)
    assert torch.linalg.matrix_rank(moved[0].flatten(1)) == 8
    assert torch.equal(moved[0], moved[1])  # but the same for all data


class _Light(Transformation):
    """A transformation with two widths."""

    dim = 2
    poses = "anywhere"

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.offset = Hyper(0.5), Hyper(0.25)

    def forward(self, x: Tensor, points: Tensor) -> Tensor:
        by, plus = (points.to(x).view(-1, 2, 1, 1, 1)).unbind(1)
        return x * (by * self.gain.value).exp() + plus * self.offset.value

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        return {"gain": float(self.gain.value.detach()), "offset": self.offset.value.item()}


class _Fixed(Transformation):
    """A transformation without a width."""

    dim = 1

    def forward(self, x: Tensor, points: Tensor) -> Tensor:
        return x * (1 + 0.5 * points.to(x).view(-1, 1, 1, 1))

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        return {"gain": 0.5}


def test_descriptions_of_custom_transformations() -> None:
    """With any number of hyperparameters."""
    augment = Augment([_Light(), _Fixed()], 3)
    augment.reach.copy_(torch.tensor([0.5, 0.2, 0.1]))
    result = augment.describe((1, 6, 6))
    assert result == pytest.approx({"gain": 0.5, "offset": 0.05})  # that of the fixed one is last
    only = Augment(_Light(), 3)
    only.reach.copy_(torch.tensor([0.5, 0.2]))
    assert only.describe((1, 6, 6)) == pytest.approx({"gain": 0.25, "offset": 0.05})


def test_shifts_of_points_are_in_the_unit_of_the_data() -> None:
    result = Augment(affine("translation", 0.2), 3)
    assert set(result.describe((5, 2))) == {
        "x-translation (in the unit of the data)",
        "y-translation (in the unit of the data)",
    }
    assert result.describe((1, 8, 8))["x-translation (px)"] == pytest.approx(0.8)


class _Places(nn.Module):
    """Modules that are never called, called twice, or return no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.twice, self.last = nn.Identity(), nn.Linear(6, 6), nn.Linear(6, 2)
        self.memory = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.memory(self.twice(self.twice(x[:, 0])))[0][:, -1])
        return out


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("unused", "network did not call 'unused'"),
        ("twice", "'twice' must be called once.* in call 2"),
        ("memory", "got tuple in call 1"),
    ],
)
def test_modules_that_cannot_be_averaged_raise(at: str, words: str) -> None:
    model = Augmented(_Places(), Augment(affine("rotation", 0.3), 3), at=at)
    with pytest.raises(ValueError, match=words):
        model(pictures().float())
