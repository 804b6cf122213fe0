"""Networks that `discover` and `fit` start from."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.discovery.families import group_cnn
from symrazor.layers.plain import convolutional
from symrazor.layers.subsampling import Reduction, Subsample
from symrazor.symmetry.relax import relax

SHAPES = [
    *[(1, n) for n in (4, 8, 17, 30, 64)],
    *[(1, n, n) for n in range(8, 22)],
    *[(3, 9, 14), (8, 17, 8), (1, 28, 31), (1, 5, 7), (1, 1, 9)],
    *[(1, 8, 8, 8), (2, 9, 9, 9), (1, 8, 10, 11), (2, 4, 5, 6)],
]


def shift_error(model: nn.Module, x: Tensor, shifts: list[tuple[int, ...]]) -> float:
    """Return the largest change of the outputs under shifts, relative to their spread."""
    dims = tuple(range(2, x.dim()))
    with torch.no_grad():
        y = model(x)
        changes = [(model(x.roll(shift, dims)) - y).abs().max() for shift in shifts]
    spread = y.std(0).mean()
    assert spread > 1e-3
    return float(torch.stack(changes).max() / spread)


def small_shifts(dims: int) -> list[tuple[int, ...]]:
    return [shift for shift in product((0, 1, -2, 3), repeat=dims) if any(shift)][:12]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_convolutional_network_is_shift_invariant(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = convolutional(shape, 3)
    x = torch.randn(6, *shape)
    assert model(x).shape == (6, 3)
    assert shift_error(model, x, small_shifts(len(shape) - 1)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_convolutional_network_is_shift_invariant_for_all_sizes(dims: int) -> None:
    for size in range(8, 65) if dims < 3 else [*range(8, 25), 31, 32, 33]:
        model, x = convolutional((1, *(size,) * dims), 3), torch.randn(8, 1, *(size,) * dims)
        shifts = [tuple(torch.randint(size, (dims,)).tolist()) for _ in range(6)]
        assert shift_error(model, x, [shift for shift in shifts if any(shift)]) < 1e-4, size


def test_the_relaxed_network_is_shift_invariant_without_its_free_paths() -> None:
    model = relax(convolutional((1, 15, 18), 3), torch.zeros(2, 1, 15, 18))
    x = torch.randn(6, 1, 15, 18)
    assert shift_error(model, x, small_shifts(2)) < 1e-4
    with torch.no_grad():
        model[3].paths[1].second.weight.normal_()
    assert shift_error(model, x, small_shifts(2)) > 0.1


@pytest.mark.parametrize("size", [8, 9, 14, 17])
@pytest.mark.parametrize("group", ["p4", "p4m", "pm"])
def test_the_group_network_is_invariant_to_turns_and_shifts(group: str, size: int) -> None:
    torch.manual_seed(0)
    model, x = group_cnn((2, size, size), 3, group, 8), torch.randn(6, 2, size, size)
    assert shift_error(model, x, small_shifts(2)) < 1e-4
    with torch.no_grad():
        y = model(x)
        spread = y.std(0).mean()
        turned, mirrored = model(x.rot90(1, (2, 3)).roll(3, 2)), model(x.flip(3).roll(2, 3))
    assert spread > 1e-3
    assert (float((turned - y).abs().max()) < 1e-4 * spread) == (group in ("p4", "p4m"))
    assert (float((mirrored - y).abs().max()) < 1e-4 * spread) == (group in ("pm", "p4m"))


def test_the_group_network_of_volumes_is_invariant_to_turns_and_shifts() -> None:
    torch.manual_seed(0)
    model, x = group_cnn((1, 9, 9, 9), 3, "O", 24), torch.randn(4, 1, 9, 9, 9)
    with torch.no_grad():
        y = model(x)
        for moved in (x.rot90(1, (2, 3)), x.rot90(1, (3, 4)), x.roll((1, 2), (2, 4))):
            assert float((model(moved) - y).abs().max() / y.std(0).mean()) < 1e-4


@pytest.mark.parametrize("size", [(12, 12), (13, 13), (9, 9, 9)])
@pytest.mark.parametrize("reduction", ["l2", "aligned-max-pool", "aligned-average-pool"])
def test_subsampling_follows_turns_and_reflections(
    size: tuple[int, ...], reduction: Reduction
) -> None:
    """The chosen grid has the values of the untransformed map, in another order."""
    layer, x = Subsample(2, reduction), torch.randn(20, 3, *size, dtype=torch.float64)
    y = layer(x).flatten(2).sort(2)[0]
    for transformed in (x.flip(2), x.flip(-1), x.transpose(2, 3), x.rot90(1, (2, 3))):
        torch.testing.assert_close(layer(transformed).flatten(2).sort(2)[0], y)


@pytest.mark.parametrize("reduction", ["l2", "aligned-max-pool", "aligned-average-pool"])
@pytest.mark.parametrize("size", [8, 9, 11])
@pytest.mark.parametrize("stride", [2, 3])
def test_every_shift_moves_the_subsampled_map(reduction: Reduction, size: int, stride: int) -> None:
    """Oracle: the output for a shifted input is the output, rolled by floor or ceil of t m / n."""
    layer, x = Subsample(stride, reduction), torch.randn(8, 2, size, dtype=torch.float64)
    y = layer(x)
    cells = -(-size // stride)
    assert y.shape == (8, 2, cells)
    for t in range(1, size):
        moved, low = layer(x.roll(t, 2)), t * cells // size
        fits = [(moved - y.roll(move, 2)).abs().amax((1, 2)) < 1e-12 for move in (low, low + 1)]
        assert bool((fits[0] | fits[1]).all())


def test_pools_take_all_pixels_of_the_chosen_cells() -> None:
    """Oracle: max pooling after the roll that gives the highest score."""
    x = torch.randn(30, 3, 6, 8, dtype=torch.float64)
    rolled = torch.stack([x.roll((-i, -j), (2, 3)) for i in range(2) for j in range(2)])
    energy = nn.functional.avg_pool2d(rolled.square().sum(2), 2)
    best = energy.square().sum((2, 3)).argmax(0)
    chosen = rolled[best, torch.arange(30)]
    for memory_format in (torch.contiguous_format, torch.channels_last):
        z = x.contiguous(memory_format=memory_format).requires_grad_()
        y = Subsample(2, "aligned-max-pool")(z)
        assert torch.equal(y, nn.functional.max_pool2d(chosen, 2))
        assert y.is_contiguous(memory_format=memory_format)
        (gradient,) = torch.autograd.grad(y.sum(), z)
        torch.testing.assert_close((gradient * x).sum((1, 2, 3)), y.detach().sum((1, 2, 3)))
        assert int(gradient.sum()) == y.numel()
    assert Subsample(2, "aligned-max-pool")(x[:0]).shape == (0, 3, 3, 4)
    average = Subsample(2, "aligned-average-pool")(x)
    torch.testing.assert_close(average, nn.functional.avg_pool2d(chosen, 2))


def test_group_elements_pool_on_grids_of_their_own() -> None:
    x = torch.randn(10, 6, 5, 8)
    y = Subsample(2, "aligned-max-pool", elements=3)(x)
    alone = [Subsample(2, "aligned-max-pool")(part) for part in x.chunk(3, 1)]
    assert torch.equal(y, torch.cat(alone, 1))


@pytest.mark.parametrize("fill", ["blank", "one pixel", "stripes", "symmetric", "binary"])
@pytest.mark.parametrize("size", [12, 13])
def test_ties_do_not_break_the_invariance_of_the_network(fill: str, size: int) -> None:
    """Tied grids are shifts of each other, so that the global pool hides the choice."""
    torch.manual_seed(1)
    model = convolutional((1, size, size), 3)
    noise = torch.randn(6, 1, size, size)
    x = torch.zeros(6, 1, size, size)
    if fill == "one pixel":
        x[:, 0, 3, 4] = noise[:, 0, 0, 0]
    elif fill == "stripes":
        x += (torch.arange(size) % 2) * noise[:, :, :1, :1]
    elif fill == "symmetric":
        x = noise + noise.flip(2) + noise.flip(3) + noise.flip(2, 3)
    elif fill == "binary":
        x = (noise > 0.8).float()
    with torch.no_grad():
        for shift in small_shifts(2):
            torch.testing.assert_close(model(x.roll(shift, (2, 3))), model(x), atol=1e-5, rtol=0)


def test_the_plain_form_of_a_strict_network_is_invariant_too() -> None:
    model, x = convolutional((1, 13, 10), 3), torch.randn(6, 1, 13, 10)
    plain = sr.collapse(model, x)
    assert not any(type(m).__module__.startswith("symrazor") for m in plain.modules())
    torch.testing.assert_close(plain(x), model(x))
    assert shift_error(plain, x, small_shifts(2)) < 1e-4
