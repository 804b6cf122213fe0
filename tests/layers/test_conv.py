"""Merged filters have the same sums and gradients; hooks see every filter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import CircularPad
from symrazor.layers import FFC, Conv, GConv, Path, Relaxed, ScaleConv, SConv, SE2Conv, SGConv
from symrazor.testing import assert_close

SIZES = (8, 8, (6, 6))


def _layers(stride: int) -> dict[str, list[Path]]:
    sizes = (*SIZES, stride)
    wide = nn.Conv2d(8, 8, 3, 1, 2, 2, padding_mode="circular", bias=False)  # dilated
    other = [GConv(*sizes, kind=k) for k in ("pointwise", "separable", "depthwise-separable")]
    layers: dict[str, list[Path]] = {
        "one": [Conv(*sizes)],
        "two": [Conv(*sizes), GConv(*sizes)],
        "several groups": [GConv(*sizes, group="p4m"), GConv(*sizes), Conv(*sizes), FFC(*sizes)],
        "anchors": [SConv(*sizes), SGConv(*sizes), Conv(*sizes)],
        "paddings": [Conv(*sizes, padding="zeros"), Conv(*sizes), GConv(*sizes, padding="zeros")],
        "sizes": [Conv(*sizes, kernel=5), GConv(*sizes), Conv(*sizes, kernel=1), Conv(*sizes)],
        "parts": [*other, GConv(*sizes, kind="pointwise"), Conv(*sizes)],
    }
    if stride == 1:
        layers["others"] = [Conv.wrap(wide, (6, 6)), Conv(*sizes), GConv(*sizes)]
        images = (2, 12, (6, 6))
        layers["functions"] = [
            SE2Conv(*images, angles=4, kind="lift"),
            ScaleConv(*images, scales=(1.0, 1.4), kind="lift", kernel=5),
            GConv(*images, kind="lift", kernel=5),
        ]
    return layers


def _gradients(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    y = layer(x)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return (y, *torch.autograd.grad(y, [x, *layer.parameters()], cotangent))


@pytest.mark.parametrize("stride", (1, 2))
@pytest.mark.parametrize("case", _layers(1))
def test_merged_filters_equal_separate_convolutions(case: str, stride: int) -> None:
    """With a hook on every module, the layer calls them all; the result is the same."""
    torch.manual_seed(0)
    if case not in _layers(stride):
        return
    layer = Relaxed(_layers(stride)[case]).double()
    x = torch.randn(3, layer.path(0).in_channels, 6, 6, dtype=torch.float64, requires_grad=True)
    at_once = _gradients(layer, x)
    called: list[nn.Module] = []
    for path in layer.paths:
        for module in path.conv.modules() if hasattr(path, "conv") else ():
            module.register_forward_hook(lambda m, args, y: called.append(m))
    one_by_one = _gradients(layer, x)
    filters = [path.conv for path in layer.paths if hasattr(path, "conv")]
    assert all(sum(m is conv for m in called) == 1 for conv in filters)
    for merged, separate in zip(at_once, one_by_one, strict=True):
        assert_close(merged, separate, 1e-12)


def test_one_convolution_for_a_convolution_and_a_group_convolution() -> None:
    layer, x = Relaxed([Conv(*SIZES), GConv(*SIZES), FFC(*SIZES)]), torch.randn(2, 8, 6, 6)
    with torch.profiler.profile() as profile, torch.no_grad():
        layer(x)
    calls = [event.name for event in profile.events() if event.name == "aten::conv2d"]
    assert len(calls) == 1


def test_a_path_with_a_hook_is_called_separately() -> None:
    """At stride 1 the output of the layer is the sum of the outputs of its paths."""
    layer, seen = Relaxed([Conv(*SIZES), GConv(*SIZES)]).double(), []
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    expected = layer(x)
    layer.paths[0].register_forward_hook(lambda m, args, y: seen.append(y))
    assert_close(layer(x), expected, 1e-12)
    assert len(seen) == 1
    assert_close(seen[0] + layer.paths[1](x), expected, 1e-12)


@pytest.mark.parametrize("dims", (1, 2, 3))
def test_circular_padding_and_its_derivatives(dims: int) -> None:
    """Padding agrees with F.pad, in all derivatives and modes."""
    x = torch.randn(1, 1, *(4, 3, 3)[:dims], dtype=torch.float64, requires_grad=True)
    amounts = (1, 2, 0, 1, 2, 2)[: 2 * dims]

    def pad(x: Tensor) -> Tensor:
        y: Tensor = CircularPad.apply(x, amounts)  # type: ignore[no-untyped-call]
        return y

    expected = F.pad(x, amounts, mode="circular")
    assert torch.equal(pad(x), expected)
    assert torch.autograd.gradcheck(pad, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: pad(x).square(), (x,))
    padded = torch.func.vmap(pad)(torch.stack([x.detach(), 2 * x.detach()]))
    assert_close(padded[1], 2 * expected, 1e-12)


def test_a_sum_of_filters_compiles_in_one_graph_with_its_gradient() -> None:
    layer = Relaxed([Conv(*SIZES), GConv(*SIZES)]).double()
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for merged, separate in zip(_gradients(compiled, x), _gradients(layer, x), strict=True):
        assert_close(merged, separate, 1e-12)
