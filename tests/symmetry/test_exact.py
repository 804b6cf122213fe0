"""Exact replacements of the modules that break translation equivariance."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr


def shift_change(model: nn.Module, x: Tensor) -> float:
    """Return the largest change of vector outputs under shifts, relative to their spread."""
    dims = tuple(range(2, x.dim()))
    with torch.no_grad():
        y = model(x)
        shifts = [(1,) * len(dims), (2, *(0,) * (len(dims) - 1)), (*(3,) * (len(dims) - 1), -1)]
        changes = [(model(x.roll(shift, dims)) - y).abs().max() for shift in shifts]
    assert y.std(0).mean() > 1e-6
    return float(max(changes) / y.std(0).mean())


def vgg() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AvgPool2d(3, 2, 1)),
        *(nn.Flatten(), nn.Linear(8 * 9, 7), nn.ReLU(), nn.Linear(7, 3)),
    )


class Residual(nn.Module):
    """Strided convolutions on both branches, and a flattening in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="reflect")
        self.shortcut = nn.Conv2d(2, 4, 1, stride=2)
        self.even = nn.Conv2d(4, 4, 4, padding=1, dilation=1)
        self.head = nn.Linear(4 * 7 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.even(F.relu(self.conv(x)))
        return self.head(y.flatten(1))


class Series(nn.Sequential):
    """A one-dimensional network with a padding module and an adaptive pool."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.ZeroPad1d(2), nn.Conv1d(2, 5, 5), nn.Tanh(), nn.AdaptiveMaxPool1d(5)),
            *(nn.Conv1d(5, 5, 3, padding="same"), nn.Flatten(), nn.Linear(25, 3)),
        )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vgg": (vgg, (2, 16, 16)),
    "vgg, not square": (
        lambda: nn.Sequential(*list(vgg())[:7], nn.AdaptiveMaxPool2d(1), nn.Flatten()),
        (2, 13, 18),
    ),
    "strided": (Residual, (2, 15, 13)),
    "series": (Series, (2, 20)),
    "volume": (
        lambda: nn.Sequential(
            *(nn.Conv3d(2, 4, 3, 2, 1), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten()),
            nn.Linear(4 * 8, 3),
        ),
        (2, 8, 8, 8),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_new_network_is_exactly_shift_invariant(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(8, *shape)
    before = model(x)
    assert shift_change(model, x) > 0.05
    exact = sr.make_equivariant(model, x)
    assert shift_change(exact, x) < 1e-4
    assert torch.equal(model(x), before)
    report = exact.equivariance_report
    assert not report.left
    assert report.before > 0.05
    assert report.after < 1e-4
    plain = sr.collapse(exact, x)
    assert shift_change(plain, x) < 1e-4
    assert sr.make_equivariant(exact, x).equivariance_report.changed == {}


def test_the_report_names_modules_and_reasons() -> None:
    x = torch.randn(4, 2, 16, 16)
    text = str(sr.make_equivariant(vgg(), x).equivariance_report)
    for line in (
        "0       replaced  padding that marks the border -> Conv2d with circular padding\n",
        "2       replaced  pooling with a stride -> Subsample(stride=2, reduction='aligned-max",
        "3       replaced  filter without padding -> Conv2d with circular padding\n",
        "8       replaced  dense layer on flattened positions -> Unflatten(",
    ):
        assert line in text
    assert text.endswith("after")


def test_a_network_of_equivariant_modules_is_not_changed() -> None:
    same = {"padding": 1, "padding_mode": "circular"}
    conv = nn.Conv2d(1, 3, 3, **same)
    model = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    x = torch.randn(4, 1, 8, 8)
    exact = sr.make_equivariant(model, x)
    assert exact.equivariance_report.changed == exact.equivariance_report.left == {}
    assert torch.equal(exact(x), model(x))


def test_weights_are_kept() -> None:
    """Where nothing but the border changes, the outputs far from the border stay the same."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 4, padding=1))
    x = torch.randn(4, 1, 12, 12)
    exact = sr.make_equivariant(model, x)
    torch.testing.assert_close(exact(x)[..., 3:8, 3:8], model(x)[..., 3:8, 3:8])


def test_a_report_of_a_forward_pass_with_functions_says_so() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(self.conv(x), 3, 2).mean((2, 3))

    report = sr.make_equivariant(Functional(), torch.randn(4, 1, 9, 9)).equivariance_report
    assert report.after > 0.01
    assert "operations that are no modules, such as F.max_pool2d(x, 2)" in str(report)


def test_a_dense_layer_becomes_its_average_over_shifts() -> None:
    model = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(3 * 20, 4)).double()
    x = torch.randn(5, 3, 4, 5, dtype=torch.float64)
    expected = torch.stack(
        [model(x.roll((i, j), (2, 3))) for i in range(4) for j in range(5)]
    ).mean(0)
    torch.testing.assert_close(sr.make_equivariant(model, x)(x), expected)


def test_what_cannot_be_replaced_is_named() -> None:
    x = torch.randn(4, 1, 12, 8)
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, 3, stride=(2, 1), padding=1), nn.ConvTranspose2d(2, 2, 2, 2)),
        *(nn.AdaptiveAvgPool2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    exact = sr.make_equivariant(model, x)
    assert exact.equivariance_report.left == {
        "0": "convolution with a stride: its strides differ between dimensions",
        "1": "transposed convolution: there is no exact replacement",
        "2": "adaptive pooling to several positions: the sizes are not one multiple of the output "
        "sizes",
    }
    relaxed = sr.relax(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)), x)
    left = sr.make_equivariant(relaxed, x).equivariance_report.left
    assert list(left) == ["0.paths.0.conv"]
    assert "call make_equivariant before relax" in left["0.paths.0.conv"]


def test_wrong_inputs() -> None:
    with pytest.raises(ValueError, match=r"must be a torch.nn.Module, got int"):
        sr.make_equivariant(3, torch.zeros(2, 1, 8, 8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not run on the example input"):
        sr.make_equivariant(vgg(), torch.zeros(2, 3, 16, 16))

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(2)
            self.conv = nn.Conv2d(1, 1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.pool(x)).reshape(len(x), 4)

    with pytest.raises(ValueError, match="does not run with its modules replaced"):
        sr.make_equivariant(Fixed(), torch.zeros(2, 1, 8, 8))
