"""Test measured ranges of poses for networks with known standard poses."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.parameters import Hyper
from symrazor.groups.lie import LieAlgebra, so2, so3
from symrazor.invariance import (
    Augment,
    Augmented,
    Blur,
    Flips,
    Jitter,
    Mixture,
    Noise,
    Transformation,
    find_reach_,
    lie,
)
from symrazor.invariance.poses import open_generators


class Upright(nn.Module):
    """The true joint density: label 0 points to the right, label 1 to the left, both sharply."""

    def forward(self, x: Tensor) -> Tensor:
        """Log densities of two classes, von Mises in the angle."""
        return 20 * torch.stack([x[:, 0], -x[:, 0]], 1)


def _turned(n: int, degrees: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw from that density, rotated by a uniform angle."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (n,), generator=generator)
    noise = torch.randn(n, generator=generator) / math.sqrt(20)
    turn = math.radians(degrees) * (2 * torch.rand(n, generator=generator) - 1)
    angle = noise + turn + math.pi * y
    return torch.stack([angle.cos(), angle.sin()], 1), y


@pytest.mark.parametrize("degrees", [0.0, 20.0, 45.0, 80.0, 110.0])
@pytest.mark.parametrize("width", [2.2, 3.0])
def test_the_measured_range_equals_the_true_range(degrees: float, width: float) -> None:
    model = Augmented(Upright(), Augment(lie(so2(), width), 4), average="joint").eval()
    find_reach_(model, _turned(500, degrees))
    (result,) = model.invariances((2,)).values()
    assert result == pytest.approx(degrees, abs=8)


class Reader(nn.Module):
    """Inputs are pose, sign and sharpness; signs are visible near pose 0, sharp inputs likely."""

    def forward(self, x: Tensor) -> Tensor:
        """Log densities of two classes; without a sign to be seen, the first is likelier."""
        pose, sign, sharp = x.unbind(1)
        seen = 2 * sign * (-0.5 * (pose / 0.2).square()).exp()
        return torch.stack([seen + 0.3, -seen], 1) + 6 * sharp.unsqueeze(1)


class Softening(Transformation):
    """A transformation that costs sharpness unless it is the identity, like interpolation."""

    dim = 1

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = Hyper(width)

    def forward(self, x: Tensor, points: Tensor) -> Tensor:
        """Poses add up."""
        pose, sign, sharp = x.unbind(1)
        point = points[:, 0].to(x)
        sharp = sharp * (0.5 + 0.5 * (-(point / 0.01).square()).exp())
        return torch.stack([pose + point * self.width.value, sign, sharp], 1)

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """The width."""
        return {"move": self.width.value.item()}


@pytest.mark.parametrize(("moved", "shown"), [(0.0, 0.0), (1.0, 1.1)])
def test_sharpness_is_not_mistaken_for_a_pose(moved: float, shown: float) -> None:
    """If labels are visible only in copies, the inputs were transformed."""
    generator = torch.Generator().manual_seed(0)
    pose = moved * (2 * torch.rand(300, generator=generator) - 1)
    y = torch.randint(2, (300,), generator=generator)
    x = torch.stack([pose, 1.0 - 2 * y, torch.ones(300)], 1)
    model = Augmented(Reader(), Augment(Softening(1.1), 4), average="joint").eval()
    find_reach_(model, (x, y))
    assert model.invariances((3,))["move"] == pytest.approx(shown, abs=0.03)


def test_estimate_equals_the_brute_force_maximum() -> None:
    x, y = _turned(300, 60)
    model = Augmented(Upright(), Augment(lie(so2(), 2.0), 4), average="joint").eval()
    (reach,) = find_reach_(model, (x, y)).tolist()
    angle = torch.atan2(x[:, 1], x[:, 0]).double() - math.pi * y

    def likelihood(v: float) -> float:
        e = v * (torch.arange(400, dtype=torch.float64) + 0.5) / 400
        e = torch.cat([e, -e])
        return float((20 * (angle.unsqueeze(1) + e).cos()).logsumexp(1).sum()) - 300 * math.log(800)

    fractions = [i / 100 for i in range(1, 101)]
    best = max(fractions, key=lambda fraction: likelihood(2.0 * fraction))
    assert reach == pytest.approx(best, abs=0.04)


@pytest.mark.parametrize("offsets", [(50.0, -30.0), (170.0, 100.0)])
def test_the_standard_pose_of_a_class_is_arbitrary(offsets: tuple[float, float]) -> None:
    """The network takes rotated images for upright ones, by another angle for each class."""

    class Offset(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            angle = torch.atan2(x[:, 1], x[:, 0])
            middle = [math.radians(offsets[0]), math.pi + math.radians(offsets[1])]
            return 20 * torch.stack([(angle - m).cos() for m in middle], 1)

    model = Augmented(Offset(), Augment(lie(so2(), 3.1), 4), average="joint").eval()
    find_reach_(model, _turned(500, 45))
    (result,) = model.invariances((2,)).values()
    assert result == pytest.approx(45, abs=8)


def test_a_full_circle_is_measured_as_a_full_circle() -> None:
    model = Augmented(Upright(), Augment(lie(so2(), 3.14), 4), average="joint").eval()
    find_reach_(model, _turned(500, 180))
    (result,) = model.invariances((2,)).values()
    assert result > 170


def test_inputs_that_look_the_same_in_all_poses_do_not_count() -> None:
    x, y = _turned(200, 40)
    model = Augmented(Upright(), Augment(lie(so2(), 2.5), 4), average="joint").eval()
    alone = find_reach_(model, (x, y)).clone()
    blank = torch.zeros(200, 2)
    both = find_reach_(model, (torch.cat([x, blank]), torch.cat([y, y])))
    torch.testing.assert_close(both, alone)


@pytest.mark.parametrize("algebra,size", [(so2(), 2), (so3(), 3)])
def test_a_network_that_ignores_poses_has_the_whole_width(algebra: LieAlgebra, size: int) -> None:
    class Lengths(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.square().sum(1), -x.square().sum(1)], 1)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, size, generator=generator, dtype=torch.float64)
    augment = Augment(lie(algebra, 1.0), 4)
    model = Augmented(Lengths(), augment, average="joint").double().eval()
    assert find_reach_(model, (x, torch.arange(200) % 2)).tolist() == [1.0] * augment.reach.numel()


def test_two_generators_that_are_both_sharp() -> None:
    """A coarse lattice alone would miss the poses of many inputs."""

    class Spot(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            near = -200 * (x - torch.tensor([1.0, 0.0, 0.0])).square().sum((1, 2))
            return torch.stack([near, near - 50], 1)

    generator = torch.Generator().manual_seed(0)
    z, up = (0.7 * (2 * torch.rand(300, generator=generator) - 1) for _ in range(2))
    x = torch.stack([z.cos() * up.cos(), z.sin() * up.cos(), up.sin()], 1).unsqueeze(1)
    model = Augmented(Spot(), Augment(lie(so3(), 1.4), 4), average="joint").eval()
    result = (1.4 * find_reach_(model, (x, torch.zeros(300, dtype=torch.long)))).sort().values
    assert result.tolist() == pytest.approx([0.7, 0.7, 1.4], abs=0.15)  # it cannot see its own spin


def test_each_generator_has_its_own_range() -> None:
    """Points in space near a pole, rotated about one horizontal axis only."""

    class Pole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 30 * torch.stack([x[:, 2], -x[:, 2]], 1)

    generator = torch.Generator().manual_seed(0)
    angle = math.radians(50) * (2 * torch.rand(400, generator=generator) - 1)
    x = torch.stack([torch.zeros(400), -angle.sin(), angle.cos()], 1)
    augment = Augment([lie(so3(), 1.2), Flips((-1,), 1e-4)], 4)
    model = Augmented(Pole(), augment, average="joint").eval()
    find_reach_(model, (x, torch.zeros(400, dtype=torch.long)))
    result = list(model.invariances((3,)).values())
    units = sorted(result[:3])
    assert units[0] < 15 and max(result[:3]) == pytest.approx(50, abs=12)
    assert result[3] == pytest.approx(0, abs=1e-4)


class Large(nn.Module):
    """Log densities of lengths; the standard length is e^middle in every direction, within 7 %."""

    def __init__(self, middle: float) -> None:
        super().__init__()
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        near = -100 * (x.abs().log() - self.middle).square().sum(1)
        return torch.stack([near, near - 50], 1)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(("middle", "spread"), [(-0.5, 0.4), (0.3, 0.15), (0.5, 0.4), (0.1, 1.0)])
def test_a_standard_pose_near_the_end_of_the_width(
    directions: int, middle: float, spread: float
) -> None:
    """Large digits are the standard pose, so small ones are further away than the width."""
    generator, shape = torch.Generator().manual_seed(0), (300, directions)
    noise = torch.randn(shape, generator=generator) / math.sqrt(200)
    x = (noise + spread * (2 * torch.rand(shape, generator=generator) - 1)).exp()
    stretches = LieAlgebra.of(torch.diag_embed(torch.eye(directions)))
    model = Augmented(Large(middle), Augment(lie(stretches, 0.6), 4), average="joint").eval()
    result = 0.6 * find_reach_(model, (x, torch.zeros(300, dtype=torch.long)))
    assert result.tolist() == pytest.approx([min(spread, 0.6)] * directions, abs=0.06)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_no_range_if_poses_accumulate_at_an_end(directions: int, spread: float) -> None:
    """If larger is always likelier, the data do not determine the range."""

    class Larger(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            near = 5 * x.log().sum(1)
            return torch.stack([near, near - 50], 1)

    generator = torch.Generator().manual_seed(0)
    x = (spread * (2 * torch.rand(200, directions, generator=generator) - 1)).exp() + 1e-3
    stretches = LieAlgebra.of(torch.diag_embed(torch.eye(directions)))
    model = Augmented(Larger(), Augment(lie(stretches, 0.6), 4), average="joint").eval()
    assert find_reach_(model, (x, torch.arange(200) % 2)).tolist() == [1.0] * directions


def test_custom_transformations_are_searched_within_the_cube() -> None:
    class Turn(Transformation):
        dim = 1

        def __init__(self) -> None:
            super().__init__()
            self.width = Hyper(0.5)

        def forward(self, x: Tensor, points: Tensor) -> Tensor:
            assert bool((points.abs() <= 1).all())
            return x * (self.width.value * points).exp()

        def describe(self, shape: Sequence[int]) -> dict[str, float]:
            return {"size": float(self.width.value)}

    x = torch.linspace(-0.2, 0.2, 200).exp().unsqueeze(1)
    model = Augmented(Large(0.0), Augment(Turn(), 4), average="joint").eval()
    result = 0.5 * find_reach_(model, (x, torch.zeros(200, dtype=torch.long)))
    assert result.tolist() == pytest.approx([0.2], abs=0.04)


def test_noise_and_blur_have_no_poses() -> None:
    """Transformations without an inverse have no poses; readings show the width of the copies."""

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ends = x.flatten(1)[:, [0, -1]]
            return -50 * ends.square()

    x, y = torch.randn(100, 1, 4, 4), torch.arange(100) % 2
    augment = Augment([Noise(0.7), Blur(0.8)], 4)
    model = Augmented(Sum(), augment, average="joint").eval()
    assert find_reach_(model, (x, y)).tolist() == [1.0, 1.0]
    assert list(model.invariances((1, 4, 4)).values()) == pytest.approx([0.7, 0.8])


def test_closed_generators_are_skipped() -> None:
    """Ten classes with a pole each; two of three generators change almost nothing."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (1200,), generator=generator)
    turn = math.radians(40) * (2 * torch.rand(1200, generator=generator) - 1)
    angle = turn + 0.2 * y + 0.1 * torch.randn(1200, generator=generator)
    x = torch.stack([torch.zeros(1200), -angle.sin(), angle.cos()], 1)

    class Poles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pole = 0.2 * torch.arange(10)
            return 100 * (torch.atan2(-x[:, 1:2], x[:, 2:]) - pole).cos()

    turns = [j for j, generator in enumerate(so3().generators) if not bool(generator[0].any())]
    widths = torch.full((3,), 0.01)
    widths[turns] = 2.0
    augment = Augment([lie(so3(), widths), Flips((-1,), 1e-3)], 4)
    assert open_generators(augment, x) == turns and len(turns) == 1
    model = Augmented(Poles(), augment, average="joint").eval()
    result = find_reach_(model, (x, y))
    assert [float(result[j]) for j in range(3) if j not in turns] == [1.0, 1.0]
    assert math.degrees(2 * float(result[turns[0]])) == pytest.approx(40, abs=6)
    nothing = Augment(lie(so3(), 0.01), 4)
    assert open_generators(nothing, x) == []
    still = Augmented(Poles(), nothing, average="joint").eval()
    assert find_reach_(still, (x[:50], y[:50])).tolist() == [1.0] * 3


def test_fit_measures_and_saves_poses() -> None:
    x, y = _turned(80, 30)
    torch.manual_seed(0)
    model = Augmented(nn.Linear(2, 2), Augment(lie(so2(), 2.0), 4), average="joint")
    fit = sr.fit(model, (x, y), epochs=3, every=1, batch_size=20, progress=False)
    assert 0 <= float(model.augment.reach) <= 1  # type: ignore[arg-type]
    (reported,) = fit.reading.invariances.values()
    assert [reported.width] == pytest.approx(list(model.invariances((2,)).values()))
    restored = Augmented(nn.Linear(2, 2), Augment(lie(so2(), 0.5), 4), average="joint")
    restored.load_state_dict(model.state_dict())
    assert restored.invariances((2,)) == model.invariances((2,))


@pytest.mark.parametrize("width", [1e-6, 0.3, 3.1])
def test_a_closed_width_can_be_described(width: float) -> None:
    augment = Augment(lie(so3(), width), 2)
    augment.reach.zero_()
    assert all(0 <= value < 0.01 for value in augment.describe((3,)).values())
    augment.reach.fill_(0.5)
    expected = max(math.degrees(width) / 2, math.degrees(1e-4))
    assert list(augment.describe((3,)).values()) == pytest.approx([expected] * 3, rel=1e-2)


def test_seven_generators_have_points_in_all_bins() -> None:
    """A lattice of seven dimensions visits few places in one of them."""
    moves = [lie(so3(), 0.5), lie(so3(), 0.4), Jitter(0.1)]
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    model = Augmented(network, Augment(moves, 2), average="joint").eval()
    result = find_reach_(model, (torch.randn(4, 2, 3), torch.tensor([0, 1, 0, 1])))
    assert len(result) == 7 and bool(((result >= 0) & (result <= 1)).all())


def test_poses_need_a_joint_average() -> None:
    data = _turned(4, 10)
    outputs = Augmented(Upright(), Augment(lie(so2()), 2))
    mixture = Mixture([Augment(lie(so2()), 2), Augment(lie(so2()), 2)])
    for model in (outputs, Augmented(Upright(), mixture, average="joint")):
        with pytest.raises(ValueError, match="average 'joint'"):
            find_reach_(model, data)
    with pytest.raises(ValueError, match="an Augmented network, got Upright"):
        find_reach_(Upright(), data)  # type: ignore[arg-type]
    joint = Augmented(Upright(), Augment(lie(so2()), 2), average="joint")
    with pytest.raises(ValueError, match="integer classes"):
        find_reach_(joint, (data[0], torch.rand(4)))
    flips = Augmented(Upright(), Augment(Flips((-1,), 0.2)), average="joint")
    assert find_reach_(flips, data).numel() == 0
