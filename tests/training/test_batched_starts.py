"""Test how starting widths of invariant networks are chosen."""

import pytest
import torch
from invariant_model import PLAN, ring_models

from symrazor.invariance import AffineLie, InvariantWeights, RandomFourier
from symrazor.training.batched_starts import choose_starts
from symrazor.training.batched_training import Data, Member


def test_starting_points_are_compared_by_the_bound() -> None:
    """On full rings a small rotation is worse than a large one; fixed widths are not compared."""
    model, data, members = ring_models([170.0, 170.0], ["vi", "vi"])
    members[1] = Member(learn=False)
    bounds = choose_starts(model, data, members, PLAN, (1.0, 0.1), steps=30)
    assert bounds.shape == (2, 2)
    assert bounds[0, 0] > bounds[1, 0]
    assert bounds[:, 1].isnan().all()
    assert torch.allclose(model.distribution.widths.rad2deg(), torch.tensor(170.0), rtol=1e-4)
    means = model.posterior.mean.detach().abs().amax((1, 2))
    assert means[0] > 0.1  # the posterior of the trial stays
    assert means[1] == 0
    with pytest.raises(ValueError, match="must be positive"):
        choose_starts(model, data, members, PLAN, (0.0,))
    with pytest.raises(ValueError, match="below \\[3.14"):
        choose_starts(model, data, members, PLAN, (2.0,))


def test_starting_points_differ_by_generator_and_masked_ones_are_not_repeated() -> None:
    """Classes depend on the second coordinate, so shifts of the first help unless masked."""
    x = 4 * torch.rand(120, 2, generator=torch.Generator().manual_seed(1)) - 2
    mask = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    names = ("x-translation", "y-translation")
    model = InvariantWeights(
        RandomFourier((2,), 48, 3.0, (2,), torch.Generator().manual_seed(0)),
        AffineLie(names, torch.full((2, 2), 0.1), mask),
        classes=2,
    )
    data = Data.of([(x, (x[:, 1] > 0).long())])
    shares = (1.0, (20.0, 1.0), (1.0, 20.0))
    bounds = choose_starts(model, data, [Member(), Member()], PLAN, shares, steps=30)
    assert bounds[:, 0].argmax() == 1
    assert bounds[:, 1].isnan().tolist() == [False, True, False]
    widths = model.distribution.widths.detach()
    torch.testing.assert_close(widths[0], torch.tensor([2.0, 0.1]))
    assert widths[1, 0] == 0
    with pytest.raises(ValueError, match="one number or 2 numbers, one per generator"):
        choose_starts(model, data, [Member(), Member()], PLAN, ((1.0, 1.0, 1.0),))
