"""Test the equivariance error against brute force and maps whose error is known."""

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from symrazor.layers import FC, FFC, Conv, Path, Relaxed
from symrazor.symmetry.equivariance import (
    Action,
    Errors,
    equivariance_error,
    layer_errors,
    translations,
)


def _input(*shape: int, n: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(dtype)


def _by_loops(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Loop over every shift, sample and output shift near t * out/in."""
    with torch.no_grad():
        y = f(x)
        shape, small = x.shape[2:], y.shape[2:]
        dims = list(range(1, 1 + len(shape)))
        errors = []
        for shift in itertools.product(*(range(size) for size in shape)):
            if not any(shift):
                continue
            moved = f(torch.roll(x, shift, [d + 1 for d in dims]))
            for n in range(len(x)):
                best = math.inf
                for back in itertools.product(*(range(size + 1) for size in small)):
                    gaps = [
                        abs(b - t * out / size)
                        for b, t, out, size in zip(back, shift, small, shape, strict=False)
                    ]
                    if max(gaps, default=0.0) < 1 - 1e-9:
                        target = torch.roll(y[n], back, dims) if small else y[n]
                        best = min(best, float((moved[n] - target).square().mean()))
                errors.append(best)
        channels = y.transpose(0, 1).flatten(1)
        spread = float(channels.var(1, correction=0).mean())
    return math.sqrt(sum(errors) / len(errors) / spread)


def _path(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: FFC(2, 3, (4, 6), stride=2, bias=True), (2, 4, 6)),
        (lambda: FC(2, 3, (6,), stride=3), (2, 6)),
        (lambda: Conv(2, 3, (4, 4), padding="zeros"), (2, 4, 4)),
        (lambda: Conv(2, 3, (6, 4), stride=2, reduction="first"), (2, 6, 4)),
        (lambda: Conv(1, 2, (4, 2, 2), stride=2, reduction="max-pool"), (1, 4, 2, 2)),
        (lambda: nn.Conv2d(2, 3, 3), (2, 5, 4)),
        (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
        (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1, padding=1), (2, 5)),
        (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten()), (2, 4, 4)),
    ],
    ids=["ffc", "fc 1d", "zeros", "fixed", "pool 3d", "valid", "odd stride", "up", "vectors"],
)
def test_error_equals_brute_force(make: Callable[[], nn.Module], shape: tuple[int]) -> None:
    f, x = _path(make), _input(*shape)
    expected = _by_loops(f, x)
    assert expected > 0.01
    assert equivariance_error(f, x, count=10**6) == pytest.approx(expected, rel=1e-10)


STRICT: list[Callable[[], Path]] = [
    lambda: Conv(2, 3, (4, 6)),
    lambda: Conv(2, 3, (8,), stride=2),
    lambda: Conv(2, 3, (6, 9), stride=3, kernel=5),
    lambda: Conv(2, 3, (8, 4), stride=2, reduction="max"),
    lambda: Conv(1, 2, (4, 2, 4), stride=2),
    lambda: Conv(2, 3, (2, 2), stride=2),
]


@pytest.mark.parametrize("make", STRICT)
def test_error_grows_with_the_scale_of_the_free_path(
    make: Callable[[], Path],
) -> None:
    strict = _path(make)
    free = FFC(strict.in_channels, strict.out_channels, strict.in_shape, strict.stride, bias=True)
    layer = Relaxed([strict, free.double()])
    x = _input(strict.in_channels, *strict.in_shape)
    start = copy.deepcopy(free.second.weight.data)
    errors = []
    for scale in (0.0, 1e-3, 1e-2, 1e-1, 1.0):
        free.second.weight.data = scale * start
        errors.append(equivariance_error(layer, x))
    assert errors[0] < 1e-12
    assert errors == sorted(errors)
    assert errors[1] > 1e-5
    assert errors[2] == pytest.approx(10 * errors[1], rel=0.1)


@pytest.mark.parametrize("make", [lambda: FC(2, 3, (4, 4)), lambda: FFC(2, 3, (4, 4))])
def test_free_paths_have_an_error_of_order_one(make: Callable[[], Path]) -> None:
    assert 1.0 < equivariance_error(_path(make), _input(2, 4, 4, n=50)) < 2.0


def test_borders_and_fixed_strides_break_equivariance() -> None:
    def error(size: int, **options: object) -> float:
        return equivariance_error(
            _path(lambda: Conv(2, 3, (size, size), **options)), _input(2, size, size, n=20)
        )

    assert error(8) < 1e-12
    assert 0.05 < error(32, padding="zeros") < error(8, padding="zeros") < 0.8
    for reduction in ("first", "average-pool", "max-pool"):
        assert error(8, stride=2, reduction=reduction) > 0.1
    for reduction in ("l2", "max"):
        assert error(8, stride=2, reduction=reduction) < 1e-12


def test_a_pixel_bias_breaks_equivariance_and_a_channel_bias_does_not() -> None:
    pixels = FFC(2, 3, (4, 4), bias=True).double()
    with torch.no_grad():
        pixels.second.weight.zero_()
        pixels.offset.bias.copy_(torch.arange(16.0))
    x = _input(2, 4, 4)
    assert equivariance_error(pixels, x, count=100) == pytest.approx(_by_loops(pixels, x))
    assert equivariance_error(pixels, x) > 1.0
    strict = _path(lambda: Conv(2, 3, (4, 4)))
    both = Relaxed([strict, pixels])
    alone = equivariance_error(both, x)
    with torch.no_grad():
        strict.conv.bias.add_(1e4)  # must not hide the broken symmetry
    assert equivariance_error(both, x) == pytest.approx(alone, rel=1e-6)
    with torch.no_grad():
        pixels.offset.bias.zero_()
    assert equivariance_error(both, x) < 1e-10


def test_constant_maps_and_single_positions() -> None:
    x = _input(2, 4, 4, dtype=torch.float32)
    assert equivariance_error(torch.zeros_like, x) == 0.0
    assert equivariance_error(lambda x: torch.full_like(x, 0.1), x) == 0.0
    nearly = Conv(2, 3, (4, 4))  # outputs differ by less than float32 can tell
    with torch.no_grad():
        nearly.conv.weight.mul_(1e-9)
        nearly.conv.bias.fill_(1.0)
    assert equivariance_error(nearly, x) == 0.0
    first = x.clone()
    recognised = equivariance_error(lambda z: (z != first).flatten(1).any(1)[:, None] * 1.0, x)
    assert recognised == math.inf
    overflowing = equivariance_error(lambda z: z[:, 0, 0] / (z == first).flatten(1).all(1, True), x)
    assert overflowing == math.inf
    assert equivariance_error(_path(lambda: FFC(2, 3, (1, 1))), _input(2, 1, 1)) == 0.0


def test_networks_with_vector_outputs_are_measured_by_invariance() -> None:
    torch.manual_seed(0)
    convolutional = nn.Sequential(
        Conv(1, 4, (8, 8), 2), nn.ReLU(), Conv(4, 4, (4, 4), 4), nn.Flatten(), nn.Linear(4, 3)
    ).double()
    x = _input(1, 8, 8)
    assert equivariance_error(convolutional, x) < 1e-12
    dense = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double()
    assert equivariance_error(dense, x) > 1.0


def test_choice_of_shifts() -> None:
    def shifts(*args: object, **options: object) -> list[int]:
        marks = torch.zeros(1, 1, 6, 5)
        marks[0, 0, 0, 0] = 1
        return [int(a.inputs(marks).argmax()) for a in translations((6, 5), None, *args, **options)]

    assert shifts(29) == shifts(1000) == list(range(1, 30))
    assert len(set(shifts())) == 16
    assert 0 not in shifts()
    assert shifts() == shifts(seed=0) != shifts(seed=1)
    assert translations((1, 1), (1, 1)) == []


def test_a_few_shifts_estimate_the_error_of_all() -> None:
    path, x = _path(lambda: FFC(1, 4, (12, 12))), _input(1, 12, 12, n=64)
    exact = equivariance_error(path, x, count=1000)
    assert equivariance_error(path, x) == pytest.approx(exact, rel=0.1)
    assert equivariance_error(path, x) == equivariance_error(path, x, seed=0)
    assert equivariance_error(path, x) != equivariance_error(path, x, seed=1)


def test_other_groups_are_lists_of_actions() -> None:
    """Flips commute with a convolution only if its filters are symmetric."""
    flip = Action(lambda x: x.flip(3), (lambda y: y.flip(3),))
    conv = _path(lambda: nn.Conv2d(2, 3, 3, padding=1))
    x = _input(2, 5, 5)
    assert equivariance_error(conv, x, [flip]) > 0.1
    with torch.no_grad():
        conv.weight.add_(conv.weight.flip(3))
    assert equivariance_error(conv, x, [flip]) < 1e-12


def test_batches_modes_gradients_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    f = _path(lambda: nn.Sequential(FFC(2, 3, (4, 4)), nn.Dropout(0.5), nn.Dropout(0.5)))
    f.train()
    f[1].eval()
    x = _input(2, 4, 4, n=11).requires_grad_()
    error = equivariance_error(f, x)
    assert [f.training, f[1].training, f[2].training] == [True, False, True]
    assert equivariance_error(f.float(), x.float()) == pytest.approx(error, rel=1e-5)
    f.double()
    monkeypatch.setattr("symrazor.symmetry.equivariance.BATCH_SIZE", 4)
    assert equivariance_error(f, x) == pytest.approx(error, rel=1e-12)

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("from inside")

    f[0].forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="from inside"):
        equivariance_error(f, x)
    assert [f.training, f[1].training, f[2].training] == [True, False, True]


class Residual(nn.Module):
    """A relaxed layer called twice, with in-place sums, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Relaxed([Conv(2, 2, (4, 4)), FFC(2, 2, (4, 4))])
        self.lone = FFC(2, 2, (4, 4), 2)
        self.idle = FC(2, 2, (4, 4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = 1.0 * x
        x += self.layer(x=x)
        x += self.layer(x)
        return self.head(self.lone(x.relu_()).flatten(1))


def test_layers_are_measured_on_their_own_inputs() -> None:
    model, x = _path(Residual), _input(2, 4, 4)
    model.train()
    result = layer_errors(model, x)
    with torch.no_grad():
        second = x + model.layer(x)
        third = (second + model.layer(second)).relu()
    assert result.layers == {
        "layer": {"translation": equivariance_error(model.layer, torch.cat([x, second]))},
        "lone": {"translation": equivariance_error(model.lone, third)},
    }
    assert result.network == {"translation": equivariance_error(model, x)}
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_the_network_is_not_measured_if_its_input_is_not_a_map() -> None:
    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Relaxed([Conv(1, 2, (4, 4))])

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = self.layer(x.reshape(len(x), 1, 4, 4))
            return y.flatten(1) if scale is None else y.flatten(1) * scale

    model = Vectors().double()
    for x in (_input(16), _input(4, 4), (_input(16), torch.ones(1).double())):
        result = layer_errors(model, x)
        assert result.network == {}
        assert result.layers["layer"]["translation"] < 1e-12
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).double()
    assert layer_errors(plain, _input(16)) == Errors({}, {})
    assert layer_errors(plain, _input(4, 4)).network["translation"] > 0.5


def test_the_network_is_not_measured_on_a_single_input() -> None:
    model = nn.Sequential(Relaxed([FFC(1, 2, (4, 4))]), nn.Flatten(), nn.Linear(32, 3)).double()
    assert set(layer_errors(model, _input(1, 4, 4, n=2)).network) == {"translation"}
    result = layer_errors(model, _input(1, 4, 4, n=1))
    assert result.network == {}
    assert 0 < result.layers["0"]["translation"] < math.inf


def test_a_model_that_is_one_layer() -> None:
    layer = _path(lambda: Relaxed([FFC(1, 2, (4,))]))
    x = _input(1, 4)
    result = layer_errors(layer, x)
    assert result.layers[""] == result.network == {"translation": equivariance_error(layer, x)}


X = torch.zeros(2, 1, 4, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: equivariance_error(lambda x: x, X[0, 0]),
            r"1 to 3 dimensions of size, got \[4, 4\]",
        ),
        (lambda: equivariance_error(lambda x: x, X[:0]), r"got \[0, 1, 4, 4\]"),
        (lambda: equivariance_error(lambda x: x, [X]), "1 to 3 dimensions of size, got list"),
        (lambda: equivariance_error(lambda x: x[:, 0], X), r"vectors \[2, k\], got \[2, 4, 4\]"),
        (lambda: equivariance_error(lambda x: x[:1], X), r"\[2, d, .* got \[1, 1, 4, 4\]"),
        (lambda: equivariance_error(lambda x: (x, x), X), r"got tuple"),
        (lambda: equivariance_error(lambda x: x / 0, X), "outputs are not finite"),
        (
            lambda: equivariance_error(lambda x: x, X, count=0),
            "positive integer, got 0",
        ),
        (lambda: equivariance_error(lambda x: x, X, actions=[]), "actions is empty"),
    ],
)
def test_bad_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
