"""Test points of the cube and Lie distributions against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from symrazor.groups.lie import LieAlgebra, so2, so3
from symrazor.invariance import AffineLie, LieDistribution, draw, fixed

DOUBLE = torch.float64


def rotation(degrees: float) -> Tensor:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=DOUBLE)


@pytest.mark.parametrize("scheme", ["stochastic", "antithetic", "sobol", "shifted", "mirrored"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_random_points_are_uniform(scheme: str, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.cat([draw(16, k, scheme, generator).points for _ in range(400)])  # type: ignore[arg-type]
    assert points.shape == (6400, k)
    assert float(points.abs().max()) <= 1
    assert torch.allclose(points.mean(0), torch.zeros(k), atol=0.03)
    assert torch.allclose(points.square().mean(0), torch.full((k,), 1 / 3), atol=0.02)


@pytest.mark.parametrize("scheme", ["sobol", "shifted", "antithetic"])
def test_schemes_have_less_variance(scheme: str) -> None:
    """Compare the variance of the mean of a smooth function over 16 points."""

    def error(name: str) -> float:
        generator = torch.Generator().manual_seed(1)
        result = []
        for _ in range(200):
            points = draw(16, 2, name, generator).points  # type: ignore[arg-type]
            result.append((points[:, 0] + 0.5 * points[:, 1] ** 3).exp().mean())
        return float(torch.stack(result).std())

    assert error(scheme) < 0.5 * error("stochastic")


def test_same_generator_same_points_and_leading_dimensions() -> None:
    for scheme in ("stochastic", "antithetic", "sobol", "shifted", "mirrored"):
        first, second = (
            draw(8, 2, scheme, torch.Generator().manual_seed(3), (5,)).points  # type: ignore[arg-type]
            for _ in range(2)
        )
        assert first.shape == (5, 8, 2)
        assert torch.equal(first, second)
        assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("scheme", ["antithetic", "mirrored"])
def test_antithetic_points_cancel(scheme: str) -> None:
    points = draw(10, 4, scheme, torch.Generator().manual_seed(0)).points  # type: ignore[arg-type]
    assert torch.allclose(points.sum(0), torch.zeros(4), atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5, 7, 8, 12])
def test_periodic_grids_never_contain_both_ends(n: int) -> None:
    points = fixed(n, 1, periodic=[True]).points.squeeze(1)
    assert torch.allclose(points.diff(), torch.full((n - 1,), 2 / n, dtype=DOUBLE))
    ends = (
        (-(n / 2 - 1) / (n / 2), 1.0) if n % 2 == 0 else (-(1 - 1 / n), 1 - 1 / n)
    )  # the rule of notes and reference
    assert (float(points[0]), float(points[-1])) == pytest.approx(ends)
    # at a width of pi, the average over the circle kills every harmonic below n
    for m in range(1, n):
        assert abs(float((math.pi * m * points).cos().mean())) < 1e-12


def test_gauss_nodes_integrate_polynomials() -> None:
    points, weights = fixed(4, 2, "gauss")
    assert len(points) == 16
    assert float(weights.sum()) == pytest.approx(1)
    result = (weights * points[:, 0] ** 6 * points[:, 1] ** 4).sum()
    assert float(result) == pytest.approx(1 / 7 / 5)


def test_invalid_numbers_of_points_raise() -> None:
    with pytest.raises(ValueError, match="at least 1 transformation, got 0"):
        draw(0, 1)
    with pytest.raises(ValueError, match="at least 1 generator"):
        draw(4, 0)
    with pytest.raises(ValueError, match="scheme must be 'stochastic', .* got 'halton'"):
        draw(4, 1, "halton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 100,000 nodes, got 10 \\*\\* 6"):
        fixed(10, 6)


# -------------------------------------------------------------------------------- Lie distributions


def test_rotations_and_translations_match_the_paper() -> None:
    points = torch.tensor([[0.5], [-1.0]])
    result = AffineLie("rotation", 0.8).matrices(points).double()
    expected = torch.stack([rotation(math.degrees(0.4)), rotation(math.degrees(-0.8))])
    assert torch.allclose(result, expected, atol=1e-6)  # eq. 4
    widths = {"x-translation": 0.3, "y-translation": 0.6}
    moved = AffineLie("translation", widths).matrices(torch.tensor([[1.0, -0.5]]))[0]
    expected = torch.tensor([[1.0, 0.0, 0.3], [0.0, 1.0, -0.3], [0.0, 0.0, 1.0]])
    assert torch.allclose(moved, expected, atol=1e-6)  # eq. 5


def test_masked_widths_are_exactly_zero() -> None:
    mask = torch.tensor([0.0, 0, 1, 0, 0, 0])
    result = AffineLie("affine", 0.5, mask)
    only = AffineLie("rotation", 0.5)
    points = 2 * torch.rand(4, 6) - 1
    assert torch.allclose(result.widths, 0.5 * mask)
    assert torch.equal(result.widths == 0, mask == 0)
    assert torch.allclose(result.matrices(points), only.matrices(points[:, 2:3]), atol=1e-6)
    result.matrices(points).sum().backward()
    grad = result.width.raw.grad
    assert grad is not None
    assert torch.equal(grad != 0, mask.bool())


def test_many_distributions_side_by_side() -> None:
    widths = torch.tensor([[0.1], [1.0], [3.0]])
    batched = AffineLie("rotation", widths).matrices(torch.tensor([[0.5], [1.0]]))
    assert batched.shape == (3, 2, 3, 3)
    for i, width in enumerate(widths.squeeze(1).tolist()):
        alone = AffineLie("rotation", width).matrices(torch.tensor([[0.5], [1.0]]))
        assert torch.allclose(batched[i], alone, atol=1e-6)


@pytest.mark.parametrize("degrees", [0.5, 5, 90, 175, 179.9])
def test_widths_survive_their_parametrisation(degrees: float) -> None:
    result = AffineLie("rotation", torch.tensor([math.radians(degrees)], dtype=DOUBLE))
    assert result.widths.item() == pytest.approx(math.radians(degrees), rel=1e-6)
    result.widths.sum().backward()
    slope = result.width.raw.grad.item()  # type: ignore[union-attr]
    assert 0 < slope <= 1
    if 5 <= degrees <= 175:  # an even pace, also near the ends
        assert slope > 0.5
    with torch.no_grad():
        result.width.raw.fill_(100.0)
    assert result.widths.item() == pytest.approx(math.pi)


@pytest.mark.parametrize("width", [1e-10, 4e-8, 1e-6, 1e-3])
def test_small_widths_can_be_set_in_single_precision(width: float) -> None:
    part = AffineLie("affine").width
    part.value = torch.full((6,), width, dtype=torch.float32)
    assert part.raw.isfinite().all()
    free = torch.tensor([0, 1, 3, 4, 5])  # without a cap, whose rounding hides smaller ones
    torch.testing.assert_close(part.value[free], torch.full((5,), width), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("form", ["softplus", "tanh"])
def test_other_forms_of_widths(form: str) -> None:
    """The distribution is the same; only the raw parameter differs."""
    start = torch.tensor([0.3, 2.0], dtype=DOUBLE)
    result = AffineLie(("x-scale", "rotation"), start, form=form)  # type: ignore[arg-type]
    assert torch.allclose(result.widths, start, atol=1e-12)
    raw = result.width.raw.detach()
    expected = (1 + raw.exp()).log()
    if form == "tanh":
        expected[1] = math.pi * (expected[1] / math.pi).tanh()
    assert torch.allclose(result.widths, expected, atol=1e-12)
    points = torch.tensor([[0.7, -0.4]], dtype=DOUBLE)
    sharp = AffineLie(("x-scale", "rotation"), start).matrices(points)
    assert torch.allclose(result.matrices(points), sharp, atol=1e-12)
    with torch.no_grad():
        result.width.raw.fill_(30.0)
    assert result.widths[1].item() == pytest.approx(30 if form == "softplus" else math.pi, rel=1e-3)
    if form == "softplus":  # turns more than once are turns too
        assert AffineLie("rotation", 4.0, form="softplus").widths.item() == pytest.approx(4.0)


def test_any_algebra_and_gradients_in_the_widths() -> None:
    result = LieDistribution(so3(), torch.tensor([0.3, 0.7, 1.1], dtype=DOUBLE))
    points = draw(5, 3, generator=torch.Generator().manual_seed(0)).points.double()
    maps = result.matrices(points)
    eye = torch.eye(3, dtype=DOUBLE).expand(5, 3, 3)
    assert torch.allclose(maps @ maps.mT, eye, atol=1e-12)

    def value(raw: Tensor) -> Tensor:
        return torch.func.functional_call(_Maps(result), {"inner.width.raw": raw}, (points,))

    assert torch.autograd.gradcheck(value, (result.width.raw.detach().requires_grad_(),))


class _Maps(torch.nn.Module):
    def __init__(self, inner: LieDistribution) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, points: Tensor) -> Tensor:
        return self.inner.matrices(points)


def test_widths_in_common_units() -> None:
    widths = torch.tensor([0.5, 0.25, math.pi / 2, math.log(2), 0.1, 0.1])
    result = AffineLie("affine", widths).describe(pixels=14)
    assert list(result)[:3] == ["x-translation (px)", "y-translation (px)", "rotation (degrees)"]
    values = [float(v) for v in result.values()]
    assert values[:4] == pytest.approx([7, 3.5, 90, 2], rel=1e-5)


def test_custom_generators() -> None:
    unnamed = LieDistribution(so2().generators, 0.3)
    points = torch.tensor([[0.5]])
    assert torch.allclose(unnamed.matrices(points), LieDistribution(so2(), 0.3).matrices(points))


def test_invalid_distributions_raise() -> None:
    with pytest.raises(ValueError, match="real matrices \\[k, d, d\\], .* \\[1, 2, 3\\]"):
        LieDistribution(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="group must be one of rotation, .* got 'mirror'"):
        AffineLie("mirror")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="widths must have 6 entries, one for each of"):
        AffineLie("affine", torch.ones(4))
    with pytest.raises(ValueError, match="below 3.142 for generators in radians"):
        AffineLie("rotation", 4.0)
    with pytest.raises(ValueError, match="above 0"):
        AffineLie("scale", 0.0)
    with pytest.raises(ValueError, match="form must be 'sharp', 'softplus' or 'tanh', got 'relu'"):
        AffineLie("scale", form="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask must hold zeros and ones, got"):
        AffineLie("scale", mask=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="real matrices \\[k, d, d\\]"):
        LieDistribution(LieAlgebra.of(torch.ones(2, 3)))
    with pytest.raises(ValueError, match="Points must have 1 numbers, .* rotation, got 2"):
        LieDistribution(so2()).matrices(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="an entry for each of"):
        AffineLie("scale", {"x-scale": 0.1})
