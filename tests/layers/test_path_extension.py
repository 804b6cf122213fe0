"""Add a path from outside the package, and take it through evidence, reading and collapse."""

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor import curvature
from symrazor.layers import FFC, Path, Relaxed
from symrazor.testing import PathSuite, assert_close


class Mixing(nn.Module):
    """The only module of the path with a weight: it maps [n, c, s] to [n, d, s]."""

    def __init__(self, in_channels: int, out_channels: int, gain: float) -> None:
        super().__init__()
        values = torch.randn(out_channels, in_channels) * gain / in_channels**0.5
        self.weight = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x


@curvature.sharing.register
def _(module: Mixing) -> curvature.Sharing:
    def positions_as_uses(x: Tensor) -> Tensor:
        return x.transpose(1, 2).unsqueeze(2)  # [n, c, s] -> a[n, s, 1, c]

    return curvature.Sharing(inputs=positions_as_uses, outputs=positions_as_uses, bias=None)


class ChannelMixing(Path):
    """Mix the channels at every position: equivariant to translations."""

    group = "translation"

    def _build(self, *, gain: float = 1.0) -> None:
        self.mixing = Mixing(self.in_channels, self.out_channels, gain)

    @property
    def affine(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        y: Tensor = self.mixing(x.flatten(2)).unflatten(2, self.out_shape)
        return y


class TestChannelMixing(PathSuite):
    def make(self) -> Path:
        return ChannelMixing(2, 3, (4, 2), gain=0.5)


def test_a_new_path_is_read_and_collapsed() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(48, 2, 4, 4), torch.arange(48) % 3
    x[y == 1, 0] += 2.0
    x[y == 2, 1] += 2.0
    layer = Relaxed([ChannelMixing(2, 4, (4, 4)), FFC(2, 4, (4, 4))])
    layer.scale_free_paths(30.0)
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    model = nn.Sequential(layer, *head)
    fit = sr.fit(model, (x, y), likelihood="categorical", epochs=3)
    reading = str(fit.reading)
    assert "ChannelMixing" in reading and "FFC" in reading
    trained = fit.model.eval()
    plain = fit.collapse()
    assert not any(isinstance(module, Path | Relaxed) for module in plain.modules())
    whole = sr.collapse(trained, x[:2])
    with torch.no_grad():
        assert_close(whole(x), trained(x), 1e-4)
