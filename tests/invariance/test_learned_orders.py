"""Learn the order of cyclic groups from labels of which it is known."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.groups.lie import so3
from symrazor.invariance.learned_orders import MAX_ORDER, learn_order

AXES = so3().generators.float()


def _normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def test_sevenths_of_a_turn_about_one_axis() -> None:
    """A label that jumps seven times in a turn about z; turns about x change it."""
    x = _normal(3000)
    part = torch.atan2(x[:, 1], x[:, 0]) % (2 * math.pi / 7)
    y = x[:, 2] / (1 + part)
    about_z, about_x = (learn_order(x, y, AXES[axis], steps=1000) for axis in (2, 0))
    assert about_z.order == 7 and about_z.is_decided and not about_z.is_whole
    assert "multiples of 1/7 of a turn" in about_z.verdict
    assert about_x.order == 1 and about_x.is_decided
    assert about_x.verdict == "Labels are changed by every part of a turn, down to 1/24."


def test_half_turns_leave_classes_unchanged() -> None:
    """Quadrants with equal signs: a quarter turn swaps the classes."""
    x = _normal(1000)
    found = learn_order(x, (x[:, 0] * x[:, 1] > 0).long(), AXES[2], steps=500)
    assert found.order == 2 and found.is_decided


def test_all_turns() -> None:
    x = _normal(1000)
    found = learn_order(x, x[:, :2].norm(dim=1) + x[:, 2], AXES[2], steps=500)
    assert found.is_whole and found.order == MAX_ORDER
    assert found.verdict == "Labels are unchanged by all turns."


def test_noise_is_undecided() -> None:
    found = learn_order(_normal(400), _normal(400, 1)[:, 0], AXES[2], steps=100)
    assert not found.is_decided and found.verdict.startswith("Undecided")


@pytest.mark.parametrize("generator", [torch.eye(3), AXES[0][:2, :2], 0.5 * AXES[0]])
def test_flows_that_do_not_close_are_refused(generator: Tensor) -> None:
    with pytest.raises(ValueError, match="3 x 3 matrix whose flow closes"):
        learn_order(_normal(300), _normal(300)[:, 0], generator)
