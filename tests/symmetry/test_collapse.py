"""Test that collapsed networks are plain and have the same outputs."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from collapse_networks import CASES, Residual, pair, shake
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers import FC, FFC, BlockLinear, Conv, Path, Relaxed, Subsample
from symrazor.layers.merging import merge
from symrazor.layers.path import is_symrazor_module
from symrazor.testing import assert_close


@pytest.mark.parametrize("reduction", ["l2", "max", "first", "average-pool", "max-pool"])
@pytest.mark.parametrize("size", [(6,), (4, 6), (2, 4, 6)], ids=len)
@pytest.mark.parametrize("elements", [1, 3])
def test_plain_subsampling(reduction: str, size: tuple[int, ...], elements: int) -> None:
    torch.manual_seed(0)
    layer = Subsample(2, reduction, elements)
    plain = layer.plain((6, *size))
    assert not any(is_symrazor_module(m) for m in plain.modules())
    for n in (1, 4):
        x = torch.randn(n, 6, *size, dtype=torch.float64)
        assert_close(plain(x), layer(x), 1e-12)
    assert isinstance(Subsample(1, reduction, elements).plain((6, *size)), nn.Identity)


def _wrapped() -> Path:
    return Conv.wrap(nn.Conv2d(2, 3, 3, 2, 1, bias=False), (6, 4))


MERGES: dict[str, tuple[Callable[[], list[Path]], list[list[int]], list[str]]] = {
    "kernels": (
        lambda: [Conv(2, 3, (6, 4)), Conv(2, 3, (6, 4), kernel=5), Conv(2, 3, (6, 4), kernel=1)],
        [[0, 1, 2]],
        ["Conv2d"],
    ),
    "1 x 1 has no border": (
        lambda: [Conv(2, 3, (6, 4)), Conv(2, 3, (6, 4), kernel=1, padding="zeros")],
        [[0, 1]],
        ["Conv2d"],
    ),
    "borders differ": (
        lambda: [Conv(2, 3, (6, 4)), Conv(2, 3, (6, 4), padding="zeros")],
        [[0], [1]],
        ["Conv2d", "Conv2d"],
    ),
    "fixed strides": (
        lambda: [_wrapped(), Conv(2, 3, (6, 4), 2, kernel=1, padding="zeros", reduction="first")],
        [[0, 1]],
        ["Conv2d"],
    ),
    "padding in words, and dilation": (
        lambda: [
            Conv.wrap(nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), (6, 4)),
            Conv(2, 3, (6, 4)),
            Conv.wrap(nn.Conv2d(2, 3, 3, 1, 2, 2, padding_mode="circular"), (6, 4)),
        ],
        [[0, 1], [2]],
        ["Conv2d", "Conv2d"],
    ),
    "dense": (
        lambda: [Conv(2, 3, (6, 4)), FC(2, 3, (6, 4)), FFC(2, 3, (6, 4), bias=True)],
        [[0, 1, 2]],
        ["Flatten", "Linear", "Unflatten"],
    ),
    "dense, and pooling of two kinds": (
        lambda: [
            FC(2, 3, (6, 4), 2),
            Conv(2, 3, (6, 4), 2, reduction="average-pool"),
            Conv(2, 3, (6, 4), 2, reduction="max-pool"),
        ],
        [[0, 1], [2]],
        ["Flatten", "Linear", "Unflatten", "Conv2d", "MaxPool2d"],
    ),
    "not if it costs more": (
        lambda: [FC(1, 1, (6, 4), bias=False), Conv(1, 1, (6, 4))],
        [[0], [1]],
        ["Flatten", "Linear", "Unflatten", "Conv2d"],
    ),
    "adaptive": (
        lambda: [Conv(2, 3, (6, 4), 2), Conv(2, 3, (6, 4), 2), FFC(2, 3, (6, 4), 2)],
        [[0, 1], [2]],
        ["Conv2d"],
    ),
    "one pixel": (
        lambda: [Conv(2, 3, (1, 1)), FFC(2, 3, (1, 1))],
        [[0, 1]],
        ["Flatten", "Linear", "Unflatten"],
    ),
    "1-D": (lambda: [Conv(2, 3, (9,)), Conv(2, 3, (9,), kernel=5)], [[0, 1]], ["Conv1d"]),
    "3-D": (
        lambda: [Conv(1, 2, (3, 4, 2), kernel=1), Conv(1, 2, (3, 4, 2))],
        [[0, 1]],
        ["Conv3d"],
    ),
}


@pytest.mark.parametrize("case", MERGES)
@pytest.mark.parametrize("mean", [False, True])
def test_merging(case: str, mean: bool) -> None:
    make, terms, kinds = MERGES[case]
    torch.manual_seed(0)
    layer = shake(Relaxed(make(), mean).double())
    assert isinstance(layer, Relaxed)
    before = copy.deepcopy(layer.state_dict())
    plain, got = merge([layer.path(i) for i in range(len(layer.paths))], 1 / 3 if mean else 1)
    assert got == terms
    inside = [type(m).__name__ for m in plain.modules() if next(m.children(), None) is None]
    assert [k for k in inside if k != "Module"] == kinds
    assert sum(p.numel() for p in plain.parameters()) <= sum(p.numel() for p in layer.parameters())
    path = layer.path(0)
    x = torch.randn(4, path.in_channels, *path.in_shape, dtype=torch.float64)
    scale = len(layer.paths) / 3 if mean else 1
    with torch.no_grad():
        assert_close(plain(x), layer(x) * scale, 1e-10)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


def test_a_single_convolution_becomes_a_torch_convolution() -> None:
    model = nn.Sequential(Relaxed([Conv(2, 3, (4, 4))]), nn.ReLU())
    plain = sr.collapse(model, torch.randn(2, 2, 4, 4))
    assert type(plain[0]) is nn.Conv2d
    assert plain[0].padding_mode == "circular"
    assert torch.equal(plain[0].weight, model[0].paths[0].conv.weight)
    assert plain[0].weight is not model[0].paths[0].conv.weight


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_equal_and_all_layers_are_plain(case: str) -> None:
    make, shape = CASES[case]
    model = shake(make()).double().train()
    before = copy.deepcopy(model.state_dict())
    plain = sr.collapse(model, torch.randn(4, *shape, dtype=torch.float64))
    assert not plain.training
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    for module in plain.modules():
        assert type(module).__module__.startswith(("torch.", "collapse_networks"))
    for n in (1, 7):
        x = torch.randn(n, *shape, dtype=torch.float64)
        with torch.no_grad():
            assert_close(plain(x), model(x), 1e-10)
    saved = io.BytesIO()
    torch.save(plain, saved)
    assert b"symrazor" not in saved.getvalue()
    report = plain.collapse_report
    assert report["change"]["largest"] < 1e-10
    if case == "sparse":  # anchors are written out
        return
    assert report["parameters"]["after"] <= report["parameters"]["before"]
    assert report["flops"]["after"] <= report["flops"]["before"]


def test_a_layer_called_twice_is_rewritten_once() -> None:
    plain = sr.collapse(Residual(), torch.randn(2, 1, 8, 8))
    assert plain.block["main"][0] is plain.block["again"]
    assert [p["fate"] for p in plain.collapse_report["layers"][0]["paths"]] == [
        "merged",
        "merged",
        "kept",
    ]


def test_roots_and_small_parts() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 4)
    layer = Relaxed([FFC(2, 2, (4, 4)), Conv(2, 2, (4, 4))])
    for root in (layer, Conv(2, 2, (4, 4)), Subsample(2)):
        plain = sr.collapse(root, x)
        assert_close(plain(x), root(x), 1e-6)
        assert copy.deepcopy(plain).collapse_report == plain.collapse_report
    block = nn.Sequential(nn.Flatten(2), BlockLinear(2, 16, 3))
    assert_close(sr.collapse(block, x)(x), block(x), 1e-6)


def test_collapse_undoes_relax() -> None:
    """Free paths start at zero, so they are dropped and the convolutions are unchanged."""
    ordinary = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(4, 1, 8, 8)
    plain = sr.collapse(sr.relax(ordinary, x), x)
    assert str(plain) == str(ordinary)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), ordinary.parameters(), strict=True)
    )


def _collapse(**options: object) -> Callable[[], object]:
    return lambda: sr.collapse(pair(), torch.randn(1, 1, 8, 8), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sr.collapse(nn.Linear(2, 2), torch.ones(1, 2)),
            "Linear is a plain network already",
        ),
        (_collapse(shares={"0": [0.5, 0.5]}), r"Layers \['2'\]"),
        (_collapse(shares={"0": [1.0], "2": [0, 1], "9": [1]}), r"Layers \['0', '9'\]"),
        (_collapse(threshold=-0.1), "threshold must be between 0 and 1 .*got -0.1"),
        (_collapse(threshold="best"), "threshold must be between 0 and 1 .*got 'best'"),
        (_collapse(threshold=float("nan")), "threshold must be between 0 and 1 .*got nan"),
        (_collapse(threshold=0.1), "threshold of 0.1 needs the shares"),
        (_collapse(shares={"0": [float("nan"), 1.0], "2": [0, 1]}), r"between 0 and 1.*'0': \[nan"),
        (_collapse(shares={"0": [-0.1, 1.0], "2": [0, 1]}), r"between 0 and 1.*'0': \[-0.1, 1.0\]"),
        (_collapse(shares={"0": [0, 1], "2": [0, 1.5]}), r"between 0 and 1.*'2': \[0, 1.5\]"),
        (_collapse(shares={"0": [0, 1], "2": ["a", 1]}), r"between 0 and 1.*'2': \['a', 1\]"),
        (_collapse(shares=[0.5, 0.5]), r"shares must be {layer name: .*}, got \[0.5, 0.5\]"),
        (_collapse(shares={"0": 0.5, "2": 0.5}), r"shares must be {layer name: .*, got {'0': 0.5"),
        (lambda: sr.collapse(None, torch.ones(1)), "torch.nn.Module, got NoneType"),
        (lambda: sr.save_network(nn.ReLU(), ".", torch.ones(1), "onnx"), r"Call \.eval\(\) first"),
        (_collapse(threshold="evidence"), "needs razor=, the razor of this model"),
        (
            lambda: sr.collapse(torch.compile(pair()), torch.ones(1)),
            "compiled module cannot be replaced",
        ),
        (lambda: sr.collapse_table(nn.ReLU()), r"ReLU was not made by collapse"),
        (lambda: sr.save_network(pair(), ".", torch.ones(1), "onnx"), "has the layers .*'Conv'"),
        (
            lambda: sr.save_network(nn.ReLU(), ".", torch.ones(1), "h5"),
            "Unknown format: format='h5'",
        ),
        (
            lambda: sr.save_network(nn.ReLU(), "net.txt", torch.ones(1)),
            "Unknown format: .*'net.txt'",
        ),
    ],
)
def test_bad_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_layers_that_cannot_be_traced_are_named() -> None:
    class Odd(Path):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(ValueError, match=r"cannot trace Odd.* _plain\(\)"):
        sr.collapse(nn.Sequential(Odd(1, 1, (2, 2))), torch.randn(1, 1, 2, 2))
