"""Points of the cube, Lie distributions, and maps of pictures and vectors, against brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symrazor.groups.lie import LieAlgebra, so2, so3
from symrazor.invariance import AffineLie, LieDistribution, act, adjoint_resample, draw, fixed
from symrazor.invariance import resample as resampled

DOUBLE = torch.float64


def rotation(degrees: float) -> Tensor:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=DOUBLE)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def smooth(n: int, size: int, seed: int = 0) -> Tensor:
    """Sums of a few wide bumps that vanish at the border."""
    line = torch.linspace(-1, 1, size, dtype=DOUBLE)
    y, x = torch.meshgrid(line, line, indexing="ij")
    centres = 0.5 * (2 * torch.rand(n, 4, 2, generator=torch.Generator().manual_seed(seed)) - 1)
    apart = (x - centres[..., :1, None]).square() + (y - centres[..., 1:, None]).square()
    signs = torch.tensor([1.0, -1.0, 0.7, -0.5], dtype=DOUBLE)[:, None, None]
    return (signs * (-apart / 0.05).exp()).sum(1, keepdim=True)


# ---------------------------------------------------------------------------------------- pictures


def test_a_quarter_turn_is_rot90() -> None:
    x = noise(2, 3, 7, 7)
    turned = resampled(x, torch.stack([rotation(90), rotation(180)]))
    # x(T q) with T: right -> down, so the picture turns the other way
    assert torch.allclose(turned[:, 0], torch.rot90(x, 1, (2, 3)), atol=1e-12)
    assert torch.allclose(turned[:, 1], x.flip(2, 3), atol=1e-12)


def test_whole_pixels_shift_with_zeros() -> None:
    x = noise(1, 1, 6, 8)
    shift = torch.eye(3, dtype=DOUBLE)
    shift[0, 2], shift[1, 2] = 2 / 4, -1 / 4  # half-widths of 4 pixels: right 2, up 1
    moved = resampled(x, shift.unsqueeze(0))[0, 0, 0]
    expected = torch.zeros(6, 8, dtype=DOUBLE)
    expected[1:, :-2] = x[0, 0, :-1, 2:]
    assert torch.allclose(moved, expected, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 6), st.integers(3, 6))
def test_bilinear_reading_by_brute_force(seed: int, h: int, w: int) -> None:
    """Hat functions at every pixel, written down as a dense matrix."""
    x = noise(2, 1, h, w, seed=seed)
    T = torch.eye(3, dtype=DOUBLE) + 0.4 * noise(3, 3, seed=seed + 1)
    T[2] = torch.tensor([0, 0, 1])
    rows, columns = torch.arange(h, dtype=DOUBLE), torch.arange(w, dtype=DOUBLE)
    expected = torch.zeros(2, h, w, dtype=DOUBLE)
    for i in range(h):
        for j in range(w):
            place = [(2 * j - w + 1) / w, (2 * i - h + 1) / w, 1.0]
            u, v, _ = (T @ torch.tensor(place, dtype=DOUBLE)).tolist()
            column, row = u * w / 2 + (w - 1) / 2, v * w / 2 + (h - 1) / 2
            hats = (1 - (rows - row).abs()).clamp_min(0)[:, None]
            hats = hats * (1 - (columns - column).abs()).clamp_min(0)
            expected[:, i, j] = (x[:, 0] * hats).sum((1, 2))
    assert torch.allclose(resampled(x, T.unsqueeze(0))[:, 0, 0], expected, atol=1e-10)


def test_maps_may_differ_between_leading_dimensions() -> None:
    x = noise(3, 2, 1, 5, 5)
    T = torch.stack([rotation(a) for a in (0, 10, 20, 30, 40, 50)]).reshape(3, 2, 3, 3)
    together = resampled(x, T)
    assert together.shape == (3, 2, 2, 1, 5, 5)
    for i in range(3):
        assert torch.allclose(together[i], resampled(x[i], T[i]), atol=1e-12)


def test_gradient_in_the_map() -> None:
    x, start = smooth(2, 9), rotation(17.0).unsqueeze(0) + 0.03 * noise(1, 3, 3)

    def read(top: Tensor) -> Tensor:
        bottom = torch.tensor([[[0, 0, 1]]], dtype=DOUBLE)
        return resampled(x, torch.cat([top, bottom], 1))

    assert torch.autograd.gradcheck(read, (start[:, :2].clone().requires_grad_(),), eps=1e-7)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_adjoint_is_exact_for_quarter_turns(degrees: float) -> None:
    w, x, T = noise(4, 2, 6, 6), noise(5, 2, 6, 6, seed=1), rotation(degrees).unsqueeze(0)
    by_input = torch.einsum("wchk,nschk->nsw", w, resampled(x, T))
    by_weights = torch.einsum("wschk,nchk->nsw", adjoint_resample(w, T), x)
    assert torch.allclose(by_input, by_weights, atol=1e-12)


def test_adjoint_within_interpolation_error() -> None:
    """Smooth pictures: the error shrinks with the pixel, and the area of the map is counted."""
    T = torch.linalg.matrix_exp(
        torch.tensor([[0.2, -0.5, 0.1], [0.4, 0.1, -0.1], [0, 0, 0]], dtype=DOUBLE)
    ).unsqueeze(0)
    errors = []
    for size in (24, 48):
        w, x = smooth(3, size, 1), smooth(4, size, 2)
        by_input = torch.einsum("wchk,nschk->nsw", w, resampled(x, T))
        by_weights = torch.einsum("wschk,nchk->nsw", adjoint_resample(w, T), x)
        errors.append(float((by_input - by_weights).norm() / by_input.norm()))
    assert errors[0] < 0.06
    assert errors[1] < 0.4 * errors[0]


def test_blur_keeps_the_sum_inside_and_the_default_is_none() -> None:
    x = torch.zeros(1, 1, 15, 15, dtype=DOUBLE)
    x[0, 0, 7, 7] = 1.0
    eye = torch.eye(3, dtype=DOUBLE).unsqueeze(0)
    assert torch.equal(resampled(x, eye)[:, 0], x)
    wide = resampled(x, eye, blur=1.0)[0, 0, 0]
    assert abs(float(wide.sum()) - 1) < 1e-9
    assert abs(float(wide[7, 8] / wide[7, 7]) - math.exp(-0.5)) < 1e-9
    assert torch.allclose(resampled(x, eye, blur=0.1)[:, 0], x, atol=1e-12)


def test_vectors_under_linear_and_affine_maps() -> None:
    x, linear = noise(5, 2), noise(3, 2, 2, seed=1)
    assert torch.allclose(act(x, linear)[1, 2], linear[2] @ x[1])
    affine = noise(3, 3, 3, seed=2)
    expected = affine[1, :2] @ torch.cat([x[4], torch.ones(1, dtype=DOUBLE)])
    assert torch.allclose(act(x, affine)[4, 1], expected)


@pytest.mark.parametrize(
    ("x", "T", "message"),
    [
        (torch.zeros(4, 28), torch.eye(3)[None], "Images must be .* got \\[4, 28\\]"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.eye(3)[None], "floating-point"),
        (torch.zeros(4, 1, 8, 8), torch.eye(2)[None], "Affine maps of the plane"),
        (torch.zeros(4, 1, 8, 8), torch.zeros(0, 3, 3), "s >= 1, got \\[0, 3, 3\\]"),
        (torch.zeros(2, 4, 1, 8, 8), torch.eye(3).expand(3, 1, 3, 3), "leading dimensions \\[2\\]"),
    ],
)
def test_wrong_pictures_are_refused(x: Tensor, T: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resampled(x, T)


def test_wrong_blurs_are_refused() -> None:
    with pytest.raises(ValueError, match="blur must be at least 0 pixels, got -1"):
        resampled(noise(1, 1, 4, 4), rotation(0).unsqueeze(0), blur=-1.0)


def test_wrong_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 2 x 2 .* or 3 x 3 .* got \\[4, 4\\]"):
        act(torch.zeros(5, 2), torch.eye(4)[None])


# ---------------------------------------------------------------------------------------- sampling


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
    """The mean of a smooth function of two numbers, over 16 points."""

    def error(name: str) -> float:
        generator = torch.Generator().manual_seed(1)
        found = []
        for _ in range(200):
            points = draw(16, 2, name, generator).points  # type: ignore[arg-type]
            found.append((points[:, 0] + 0.5 * points[:, 1] ** 3).exp().mean())
        return float(torch.stack(found).std())

    assert error(scheme) < 0.5 * error("stochastic")


def test_same_generator_same_points_and_leading_dimensions() -> None:
    for scheme in ("stochastic", "antithetic", "sobol", "shifted", "mirrored"):
        one, two = (
            draw(8, 2, scheme, torch.Generator().manual_seed(3), (5,)).points  # type: ignore[arg-type]
            for _ in range(2)
        )
        assert one.shape == (5, 8, 2)
        assert torch.equal(one, two)
        assert not torch.equal(one[0], one[1])


@pytest.mark.parametrize("scheme", ["antithetic", "mirrored"])
def test_antithetic_points_cancel(scheme: str) -> None:
    points = draw(10, 4, scheme, torch.Generator().manual_seed(0)).points  # type: ignore[arg-type]
    assert torch.allclose(points.sum(0), torch.zeros(4), atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5, 7, 8, 12])
def test_periodic_grids_never_hold_both_ends(n: int) -> None:
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
    found = (weights * points[:, 0] ** 6 * points[:, 1] ** 4).sum()
    assert float(found) == pytest.approx(1 / 7 / 5)


def test_wrong_numbers_of_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 transformation, got 0"):
        draw(0, 1)
    with pytest.raises(ValueError, match="at least 1 generator"):
        draw(4, 0)
    with pytest.raises(ValueError, match="scheme must be one of .* got 'halton'"):
        draw(4, 1, "halton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 100,000 nodes, got 10 \\*\\* 6"):
        fixed(10, 6)


# -------------------------------------------------------------------------------- Lie distributions


def test_rotations_and_translations_are_the_papers() -> None:
    points = torch.tensor([[0.5], [-1.0]])
    found = AffineLie("rotation", 0.8).matrices(points).double()
    expected = torch.stack([rotation(math.degrees(0.4)), rotation(math.degrees(-0.8))])
    assert torch.allclose(found, expected, atol=1e-6)  # eq. 4
    widths = {"x-translation": 0.3, "y-translation": 0.6}
    moved = AffineLie("translation", widths).matrices(torch.tensor([[1.0, -0.5]]))[0]
    expected = torch.tensor([[1.0, 0.0, 0.3], [0.0, 1.0, -0.3], [0.0, 0.0, 1.0]])
    assert torch.allclose(moved, expected, atol=1e-6)  # eq. 5


def test_masked_widths_are_exactly_zero() -> None:
    mask = torch.tensor([0.0, 0, 1, 0, 0, 0])
    found = AffineLie("affine", 0.5, mask)
    only = AffineLie("rotation", 0.5)
    points = 2 * torch.rand(4, 6) - 1
    assert torch.allclose(found.widths, 0.5 * mask)
    assert torch.equal(found.widths == 0, mask == 0)
    assert torch.allclose(found.matrices(points), only.matrices(points[:, 2:3]), atol=1e-6)
    found.matrices(points).sum().backward()
    grad = found.width.raw.grad
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
def test_widths_survive_their_parameterisation(degrees: float) -> None:
    found = AffineLie("rotation", torch.tensor([math.radians(degrees)], dtype=DOUBLE))
    assert found.widths.item() == pytest.approx(math.radians(degrees), rel=1e-6)
    found.widths.sum().backward()
    slope = found.width.raw.grad.item()  # type: ignore[union-attr]
    assert 0 < slope <= 1
    if 5 <= degrees <= 175:  # an even pace, also near the ends
        assert slope > 0.5
    with torch.no_grad():
        found.width.raw.fill_(100.0)
    assert found.widths.item() == pytest.approx(math.pi)


@pytest.mark.parametrize("width", [1e-10, 4e-8, 1e-6, 1e-3])
def test_small_widths_can_be_set_in_single_precision(width: float) -> None:
    part = AffineLie("affine").width
    part.value = torch.full((6,), width, dtype=torch.float32)
    assert part.raw.isfinite().all()
    free = torch.tensor([0, 1, 3, 4, 5])  # without a cap, whose rounding hides smaller ones
    torch.testing.assert_close(part.value[free], torch.full((5,), width), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("form", ["softplus", "tanh"])
def test_other_forms_of_widths(form: str) -> None:
    """The same distribution; only the raw parameter that an optimiser moves is another."""
    start = torch.tensor([0.3, 2.0], dtype=DOUBLE)
    found = AffineLie(("x-scale", "rotation"), start, form=form)  # type: ignore[arg-type]
    assert torch.allclose(found.widths, start, atol=1e-12)
    raw = found.width.raw.detach()
    expected = (1 + raw.exp()).log()
    if form == "tanh":
        expected[1] = math.pi * (expected[1] / math.pi).tanh()
    assert torch.allclose(found.widths, expected, atol=1e-12)
    points = torch.tensor([[0.7, -0.4]], dtype=DOUBLE)
    sharp = AffineLie(("x-scale", "rotation"), start).matrices(points)
    assert torch.allclose(found.matrices(points), sharp, atol=1e-12)
    with torch.no_grad():
        found.width.raw.fill_(30.0)
    assert found.widths[1].item() == pytest.approx(30 if form == "softplus" else math.pi, rel=1e-3)
    if form == "softplus":  # turns more than once are turns too
        assert AffineLie("rotation", 4.0, form="softplus").widths.item() == pytest.approx(4.0)


def test_any_algebra_and_gradients_in_the_widths() -> None:
    found = LieDistribution(so3(), torch.tensor([0.3, 0.7, 1.1], dtype=DOUBLE))
    points = draw(5, 3, generator=torch.Generator().manual_seed(0)).points.double()
    maps = found.matrices(points)
    eye = torch.eye(3, dtype=DOUBLE).expand(5, 3, 3)
    assert torch.allclose(maps @ maps.mT, eye, atol=1e-12)

    def value(raw: Tensor) -> Tensor:
        return torch.func.functional_call(_Maps(found), {"inner.width.raw": raw}, (points,))

    assert torch.autograd.gradcheck(value, (found.width.raw.detach().requires_grad_(),))


class _Maps(torch.nn.Module):
    def __init__(self, inner: LieDistribution) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, points: Tensor) -> Tensor:
        return self.inner.matrices(points)


def test_widths_in_units_a_person_thinks_in() -> None:
    widths = torch.tensor([0.5, 0.25, math.pi / 2, math.log(2), 0.1, 0.1])
    found = AffineLie("affine", widths).describe(pixels=14)
    assert list(found)[:3] == ["x-translation (px)", "y-translation (px)", "rotation (degrees)"]
    values = [float(v) for v in found.values()]
    assert values[:4] == pytest.approx([7, 3.5, 90, 2], rel=1e-5)


def test_generators_of_ones_own() -> None:
    own = LieDistribution(so2().generators, 0.3)
    points = torch.tensor([[0.5]])
    assert torch.allclose(own.matrices(points), LieDistribution(so2(), 0.3).matrices(points))


def test_wrong_distributions_are_refused() -> None:
    with pytest.raises(ValueError, match="expected generators \\[k, d, d\\] .*, got \\[1, 2, 3\\]"):
        LieDistribution(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="group must be one of rotation, .* got 'mirror'"):
        AffineLie("mirror")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="widths must have 6 entries, one for each of"):
        AffineLie("affine", torch.ones(4))
    with pytest.raises(ValueError, match="below 3.142 for generators in radians"):
        AffineLie("rotation", 4.0)
    with pytest.raises(ValueError, match="above 0"):
        AffineLie("scale", 0.0)
    with pytest.raises(ValueError, match="form must be one of sharp, softplus, tanh, got 'relu'"):
        AffineLie("scale", form="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask must hold zeros and ones, got"):
        AffineLie("scale", mask=torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="expected generators \\[k, d, d\\]"):
        LieDistribution(LieAlgebra.of(torch.ones(2, 3)))
    with pytest.raises(ValueError, match="Points must have 1 numbers, .* rotation, got 2"):
        LieDistribution(so2()).matrices(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="an entry for each of"):
        AffineLie("scale", {"x-scale": 0.1})
