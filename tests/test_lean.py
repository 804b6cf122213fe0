"""An even range of poses told apart from the lean of the data."""

import math

import pytest
import torch
from torch import Tensor, nn

from symrazor.augment import Augment, Augmented, Flips, find_lean, find_reach_, lie
from symrazor.augment.lean import _before
from symrazor.groups.lie import so2, so3


class Sharp(nn.Module):
    """Label 0 points to the right, label 1 to the left, within some degrees."""

    def forward(self, x: Tensor) -> Tensor:
        """Log densities of two classes, von Mises in the angle."""
        return 60 * torch.stack([x[:, 0], -x[:, 0]], 1)


def _leaning(even: float, lean: float, n: int = 2000) -> tuple[Tensor, Tensor]:
    """Draws of that density with a lean, and turned: both in degrees."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(2, (n,), generator=generator)
    own = torch.randn(n, generator=generator) / math.sqrt(60)
    z = math.radians(lean) * torch.randn(n, generator=generator)
    u = math.radians(even) * (2 * torch.rand(n, generator=generator) - 1)
    angle = own + z + u + math.pi * y
    return torch.stack([angle.cos(), angle.sin()], 1), y


@pytest.mark.parametrize("even,lean", [(0.0, 0.0), (0.0, 12.0), (30.0, 12.0), (60.0, 0.0)])
def test_both_parts_are_found(even: float, lean: float) -> None:
    model = Augmented(Sharp(), Augment(lie(so2(), 2.5), 4), average="joint").eval()
    found = find_lean(model, _leaning(even, lean))
    degrees = math.degrees(2.5)
    assert degrees * found.even == pytest.approx(even, abs=8 if lean else 3)
    assert degrees * found.spread == pytest.approx(lean, abs=3)
    assert 0 <= found.low <= found.high <= 1
    assert found.low - 0.01 <= found.even <= found.high + 0.01  # of nearly one value, nearly that
    assert degrees * found.low - 3 <= even <= degrees * found.high + 3


def test_the_whole_circle() -> None:
    """How soft the ends of a range are which has no ends is anybody's guess."""
    model = Augmented(Sharp(), Augment(lie(so2(), 3.14), 4), average="joint").eval()
    data = _leaning(180.0, 0.0, 500)
    found = find_lean(model, data)
    assert found.even > 0.98 and found.high == 1
    assert float(find_reach_(model, data)) == 1


@pytest.mark.parametrize("circle", [False, True])
def test_none_some_and_all_are_equally_likely_before(circle: bool) -> None:
    before = _before([*range(1, 49)], [*range(97)], 48, circle).sum(1)
    before = before / before.sum()
    parts = [before[0], before[1:-1].sum(), before[-1]]
    parts = parts if circle else [parts[0], parts[1] + parts[2]]
    torch.testing.assert_close(torch.stack(parts), before.new_full((len(parts),), 1 / len(parts)))
    sparse = _before([*range(1, 49, 2)], [*range(0, 97, 3)], 48, circle)[1:].sum()
    whole = _before([*range(1, 49)], [*range(97)], 48, circle)[1:-1].sum()
    assert 0.3 < float(sparse / whole) < 3  # steps stand for what they leave out


def test_the_range_of_all_poses_is_wider_than_its_even_part() -> None:
    data = _leaning(30.0, 12.0)
    model = Augmented(Sharp(), Augment(lie(so2(), 2.5), 4), average="joint").eval()
    assert float(find_reach_(model, data)) > find_lean(model, data).even


def test_what_has_no_lean() -> None:
    data = _leaning(30.0, 0.0, 20)
    with pytest.raises(ValueError, match="one generator, got 0"):
        find_lean(Augmented(Sharp(), Augment(Flips((-1,))), average="joint"), data)
    with pytest.raises(ValueError, match="one generator, got 3"):
        find_lean(Augmented(Sharp(), Augment(lie(so3(), 1.0)), average="joint"), data)
    with pytest.raises(ValueError, match="average 'joint'"):
        find_lean(Augmented(Sharp(), Augment(lie(so2(), 1.0))), data)
