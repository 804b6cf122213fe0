"""Plain networks out of relaxed ones: equal outputs, no class of ours, files that load alone."""

import copy
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path as File

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor import pruning
from symrazor.data import digits
from symrazor.layers import FC, FFC, SFC, BlockLinear, Conv, Path, Relaxed, SConv, Subsample
from symrazor.layers.merge import merge
from symrazor.layers.trace import is_ours
from symrazor.testing import assert_close


def _shake(model: nn.Module) -> nn.Module:
    """Every parameter away from zero, biases included."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _zoo() -> nn.Module:
    """Every kind of path, with every kind of subsampling."""
    torch.manual_seed(0)
    return nn.Sequential(
        Relaxed([Conv(1, 3, (8, 8))]),
        nn.ReLU(),
        Relaxed([FFC(3, 4, (8, 8), 2, bias=True), Conv(3, 4, (8, 8), 2)], mean=True),
        nn.ReLU(),
        Relaxed([Conv(4, 4, (4, 4), 2, reduction="max"), FFC(4, 4, (4, 4), 2)]),
        nn.ReLU(),
        Relaxed([FC(4, 4, (2, 2)), Conv(4, 4, (2, 2))]),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def _line() -> nn.Module:
    torch.manual_seed(0)
    layers = [Relaxed([Conv(2, 4, (9,), 3), FFC(2, 4, (9,), 3)]), nn.GELU(), FC(4, 4, (3,))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 5))


def _volume() -> nn.Module:
    torch.manual_seed(0)
    layers = [Relaxed([Conv(1, 3, (4, 2, 4), 2), FFC(1, 3, (4, 2, 4), 2)]), nn.ReLU()]
    return nn.Sequential(*layers, Conv(3, 3, (2, 1, 2)), nn.Flatten(), nn.Linear(12, 5))


class Residual(nn.Module):
    """A network of a class of its own: nested, with a sum, one layer used twice, a Hyper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = Conv(1, 4, (8, 8))
        both = Relaxed([Conv(4, 4, (8, 8)), Conv(4, 4, (8, 8), kernel=5), FFC(4, 4, (8, 8))])
        self.block = nn.ModuleDict({"main": nn.Sequential(both, nn.ReLU()), "again": both})
        self.shrink = Subsample(4, "max", elements=2)
        self.gain = sr.Hyper(0.7)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        h = h + self.gain.value * self.block["main"](h) + 0.1 * self.block["again"](h)
        return self.head(self.shrink(h).flatten(1))


def _relaxed() -> nn.Module:
    """An ordinary network that was relaxed, with strides and padding of its own."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 4, 3)]
    ordinary = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))
    return sr.relax(ordinary, torch.zeros(2, 1, 8, 8))


def _sparse() -> nn.Module:
    torch.manual_seed(0)
    space = (2, 3, (4, 4), 2)
    layer = Relaxed([SConv(*space), SFC(*space, learn_omega="hyper", bias=True)], mean=True)
    return nn.Sequential(layer, nn.ReLU(), SConv(3, 3, (2, 2)), nn.Flatten(), nn.Linear(12, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2-D": (_zoo, (1, 8, 8)),
    "1-D": (_line, (2, 9)),
    "3-D": (_volume, (1, 4, 2, 4)),
    "residual": (Residual, (1, 8, 8)),
    "sparse": (_sparse, (2, 4, 4)),
    "relaxed": (_relaxed, (1, 8, 8)),
}


def _ella() -> nn.Module:
    """The eight-block network of ELLA section 6.2, narrow."""
    torch.manual_seed(0)
    channels = [3, *(2 * m for m in (1, 2, 2, 4, 4, 8, 8, 16))]
    size, blocks = 32, []
    for c, d, stride in zip(channels, channels[1:], (1, 2, 1, 2, 1, 2, 2, 2), strict=False):
        space = (c, d, (size, size), stride)
        blocks += [Relaxed([FFC(*space), Conv(*space)]), nn.ReLU()]
        size //= stride
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))


# One layer.


@pytest.mark.parametrize("reduction", ["l2", "max", "first", "average-pool", "max-pool"])
@pytest.mark.parametrize("size", [(6,), (4, 6), (2, 4, 6)], ids=len)
@pytest.mark.parametrize("elements", [1, 3])
def test_plain_subsampling(reduction: str, size: tuple[int, ...], elements: int) -> None:
    torch.manual_seed(0)
    layer = Subsample(2, reduction, elements)
    plain = layer.plain((6, *size))
    assert not any(is_ours(m) for m in plain.modules())
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
        lambda: [_wrapped(), Conv(2, 3, (6, 4), 2, 1, "zeros", "first")],
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
    layer = _shake(Relaxed(make(), mean).double())
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


def test_a_single_convolution_is_bare() -> None:
    model = nn.Sequential(Relaxed([Conv(2, 3, (4, 4))]), nn.ReLU())
    plain = sr.collapse(model, torch.randn(2, 2, 4, 4))
    assert type(plain[0]) is nn.Conv2d
    assert plain[0].padding_mode == "circular"
    assert torch.equal(plain[0].weight, model[0].paths[0].conv.weight)
    assert plain[0].weight is not model[0].paths[0].conv.weight


# Whole networks.


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_equal_and_nothing_of_ours_is_left(case: str) -> None:
    make, shape = CASES[case]
    model = _shake(make()).double().train()
    before = copy.deepcopy(model.state_dict())
    plain = sr.collapse(model, torch.randn(4, *shape, dtype=torch.float64))
    assert not plain.training
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    for module in plain.modules():
        assert type(module).__module__.startswith(("torch.", __name__))
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


def test_a_layer_that_is_used_twice_stays_one() -> None:
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


def test_relax_and_collapse_is_the_network_as_it_was() -> None:
    """Free paths start at zero: they are dropped, and the convolutions are what they were."""
    ordinary = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(4, 1, 8, 8)
    plain = sr.collapse(sr.relax(ordinary, x), x)
    assert str(plain) == str(ordinary)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), ordinary.parameters(), strict=True)
    )


# Which paths are dropped.


def _pair(mean: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layer = Relaxed([FFC(1, 4, (8, 8)), Conv(1, 4, (8, 8))], mean)
    other = Relaxed([FFC(4, 4, (8, 8), 2), Conv(4, 4, (8, 8), 2)])
    layer.scale_free_paths(1e4)
    return nn.Sequential(layer, nn.ReLU(), other, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("mean", [False, True])
def test_a_threshold_drops_the_shares_below_it(mean: bool) -> None:
    model = _pair(mean)
    x = torch.randn(16, 1, 8, 8)
    shares = {"0": [0.005, 0.995], "2": [0.02, 0.98]}
    plain = sr.collapse(model, x, shares=shares)
    assert type(plain[0]) is nn.Conv2d
    fates = [[p["fate"] for p in layer["paths"]] for layer in plain.collapse_report["layers"]]
    assert fates == [["dropped", "kept"], ["kept", "kept"]]
    with torch.no_grad():
        f, g = model(x), plain(x)
        expected = float((f - g).square().mean().sqrt() / f.square().mean().sqrt())
    assert plain.collapse_report["change"]["rms"] == pytest.approx(expected, rel=1e-4)
    assert 0 < expected < 0.1
    assert plain.collapse_report["change"]["largest"] >= expected
    both = sr.collapse(model, x, shares=shares, threshold=1.0)
    assert sum(p.numel() for p in both.parameters()) == 40 + 148 + 650


def test_without_a_threshold_it_is_a_hundredth() -> None:
    shares = {"0": [0.005, 0.995], "2": [0.02, 0.98]}
    plain = sr.collapse(_pair(), torch.randn(2, 1, 8, 8), shares=shares, threshold=None)
    assert plain.collapse_report["threshold"]["value"] == 0.01
    assert "threshold on shares: 0.01, by default" in sr.collapse_table(plain)


def test_zero_paths_go_without_being_asked() -> None:
    model = _pair()
    with torch.no_grad():
        model[0].paths[0].second.weight.zero_()
        for parameter in model[2].parameters():
            parameter.zero_()
    x = torch.randn(4, 1, 8, 8)
    plain = sr.collapse(model, x)
    fates = [[p["fate"] for p in layer["paths"]] for layer in plain.collapse_report["layers"]]
    assert fates[0] == ["dropped", "kept"]
    assert sorted(fates[1]) == ["dropped", "kept"]
    assert_close(plain(x), model(x), 1e-6)
    assert "no shares were given" in sr.collapse_table(plain)


def test_frozen_paths_stay() -> None:
    model = _pair()
    model[0].paths[0].requires_grad_(False)
    gamma = dict.fromkeys(sr.weights(model), 1.0)
    shares = sr.path_shares(model, gamma)
    assert shares == {"0": [None, 1.0], "2": [0.5, 0.5]}
    plain = sr.collapse(model, torch.randn(2, 1, 8, 8), shares=shares, threshold=0.4)
    assert plain.collapse_report["layers"][0]["paths"][0]["fate"] == "kept"
    alone = model[0]
    assert sr.path_shares(alone, {"paths.1.conv.weight": 2.0}) == {"": [None, 1.0]}


@pytest.fixture(scope="module")
def fit() -> sr.Fit:
    x, y = digits("train")
    groups = sr.layers.path_groups(_pair())
    options = {"epochs": 12, "every": 2, "burn_in": 0, "prior_groups": groups}
    return sr.fit(_pair(), (x[:300], y[:300]), **options)


def test_the_evidence_chooses_the_threshold(fit: sr.Fit) -> None:
    plain = fit.collapse()
    report = plain.collapse_report
    candidates = report["threshold"]["candidates"]
    full = float(fit.evidence.log_evidence)
    assert candidates[0]["log_evidence"] == pytest.approx(full, rel=1e-6)
    assert [c["dropped"] for c in candidates] == sorted({c["dropped"] for c in candidates})
    best = max(candidates, key=lambda c: c["log_evidence"])
    assert report["threshold"]["value"] == best["threshold"]
    fates = [p["fate"] for layer in report["layers"] for p in layer["paths"]]
    assert fates.count("dropped") == best["dropped"] >= 1
    read = {layer.name: layer.paths for layer in fit.reading.layers}
    for layer in report["layers"]:
        got = [path["share"] for path in layer["paths"]]
        assert got == pytest.approx([path.share for path in read[layer["name"]]])
    one = copy.deepcopy(fit.model)  # an independent look: a free path without weights
    weakest = min(report["layers"], key=lambda layer: min(p["share"] for p in layer["paths"]))
    paths = one.get_submodule(weakest["name"]).paths
    worst = min(range(2), key=lambda i: weakest["paths"][i]["share"])
    old = {k: float(v) for k, v in fit.razor.prior.precisions.items()}
    dead = f"{weakest['name']}.paths.{worst}"
    for parameter in paths[worst].requires_grad_(False).parameters():
        parameter.zero_()
    groups = {k: v for k, v in sr.layers.path_groups(fit.model).items() if k != dead}
    del old[dead]
    razor = sr.Razor(one, "categorical", 300, prior_groups=groups, prior_precision=old)
    expected = float(razor.evidence(fit.data).log_evidence)
    assert candidates[1]["log_evidence"] == pytest.approx(expected, rel=1e-6)


def test_a_reading_and_a_razor_have_shares_too(fit: sr.Fit) -> None:
    x = fit.data.x[:4]
    by_reading = sr.collapse(fit.model, x, shares=fit.reading, threshold=0.3)
    by_fit = fit.collapse(threshold=0.3, example_input=x)
    assert by_reading.collapse_report["layers"] == by_fit.collapse_report["layers"]
    by_razor = sr.collapse(
        fit.model, x, threshold="evidence", razor=fit.razor, loader=fit.data
    ).collapse_report["threshold"]
    assert by_razor == fit.collapse().collapse_report["threshold"]


def test_a_slow_choice_shows_its_progress(fit: sr.Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for patience, shown in ((1e9, False), (-1.0, True)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(pruning, "PATIENCE", patience)
        fit.collapse()
        assert ("evidence" in terminal.getvalue()) is shown


def test_the_table_and_the_report(fit: sr.Fit) -> None:
    plain = fit.collapse()
    text = sr.collapse_table(plain)
    for word in ("FFC", "Conv", "dropped", "parameters", "FLOPs per datum", "ms for 32 data"):
        assert word in text
    assert "chosen by evidence" in text
    assert json.loads(json.dumps(plain.collapse_report)) == plain.collapse_report


# Files.


LOADER = """
import sys
sys.modules["symrazor"] = None  # importing it fails
import onnxruntime, safetensors.torch, torch
x, expected = torch.load("case.pt")
whole = torch.load("whole.pt", weights_only=False)
empty = torch.load("whole.pt", weights_only=False)
for tensor in empty.state_dict().values():
    tensor.detach().zero_()
safetensors.torch.load_model(empty, "network.safetensors")
program = torch.export.load("network.pt2").module()
session = onnxruntime.InferenceSession("network.onnx")
with torch.no_grad():
    outputs = [whole(x), empty(x), program(x)]
name = session.get_inputs()[0].name
outputs.append(torch.from_numpy(session.run(None, {name: x.numpy()})[0]))
for y in outputs:
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()
assert whole.collapse_report["layers"]
assert not [name for name in sys.modules if name.startswith(("symrazor.", "jaxtyping"))]
print("loaded")
"""


def test_files_load_and_run_where_this_library_is_not(tmp_path: File) -> None:
    model = _shake(_zoo())
    x = torch.randn(4, 1, 8, 8)
    plain = sr.collapse(model, x)
    for format in ("torch", "safetensors", "onnx"):
        sr.save_network(plain, tmp_path, x, format)
    torch.save(plain, tmp_path / "whole.pt")
    more = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        torch.save((more, model(more)), tmp_path / "case.pt")
    command = [sys.executable, "-c", LOADER]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout == "loaded\n", run.stderr
    left = {file.name for file in tmp_path.iterdir()}
    names = {"network.pt2", "network.safetensors", "network.onnx"}
    assert left == {*names, "whole.pt", "case.pt"}


def _round_trip(model: nn.Module, shape: tuple[int, ...], folder: File) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    example = torch.randn(3, *shape)
    plain = sr.collapse(model, example)
    program = torch.export.load(sr.save_network(plain, folder / "a.pt2", example)).module()
    sr.save_network(plain, folder / "a.safetensors", example)
    session = onnxruntime.InferenceSession(sr.save_network(plain, folder / "a.onnx", example))
    for n in (1, 6):
        x = torch.randn(n, *shape)
        with torch.no_grad():
            expected = model(x)
        assert_close(program(x), expected, 1e-5)
        feed = {session.get_inputs()[0].name: x.numpy()}
        assert_close(torch.from_numpy(session.run(None, feed)[0]), expected, 1e-5)


@pytest.mark.parametrize("case", ["1-D", "3-D", "residual"])
def test_round_trips(case: str, tmp_path: File) -> None:
    make, shape = CASES[case]
    _round_trip(_shake(make()), shape, tmp_path)


def test_several_inputs(tmp_path: File) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look, self.head = Conv(1, 2, (4, 4)), nn.Linear(35, 2)

        def forward(self, image: Tensor, more: Tensor) -> Tensor:
            return self.head(torch.cat([self.look(image).flatten(1), more], 1))

    model, image, more = Two(), torch.randn(3, 1, 4, 4), torch.randn(3, 3)
    for x in ((image, more), {"more": more, "image": image}):
        plain = sr.collapse(model, x)
        assert_close(plain(image, more), model(image, more), 1e-6)
        for suffix in ("pt2", "onnx"):
            assert sr.save_network(plain, tmp_path / f"two.{suffix}", x).exists()


@pytest.mark.slow
def test_round_trip_of_eight_blocks(tmp_path: File) -> None:
    _round_trip(_shake(_ella()), (3, 32, 32), tmp_path)


def test_safetensors_carry_the_report(tmp_path: File) -> None:
    from safetensors import safe_open

    x = torch.randn(2, 2, 9)
    plain = sr.collapse(_line(), x)
    with safe_open(sr.save_network(plain, tmp_path / "n.safetensors", x), "pt") as file:
        about = json.loads(file.metadata()["network"])
    assert about["input"] == ["n", 2, 9]
    assert about["output"] == ["n", 5]
    assert about["collapse"] == plain.collapse_report


# Bad input.


def _collapse(**options: object) -> Callable[[], object]:
    return lambda: sr.collapse(_pair(), torch.randn(1, 1, 8, 8), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sr.collapse(nn.Linear(2, 2), torch.ones(1, 2)), "relaxed layers, got Linear"),
        (_collapse(shares={"0": [0.5, 0.5]}), r"see the layers \['2'\]"),
        (_collapse(shares={"0": [1.0], "2": [0, 1], "9": [1]}), r"see the layers \['0', '9'\]"),
        (_collapse(threshold=-0.1), "threshold from 0 to 1 .*got -0.1"),
        (_collapse(threshold="best"), "threshold from 0 to 1 .*got 'best'"),
        (_collapse(threshold=float("nan")), "threshold from 0 to 1 .*got nan"),
        (_collapse(threshold=0.1), "shares for the threshold 0.1, got none"),
        (_collapse(shares={"0": [float("nan"), 1.0], "2": [0, 1]}), r"from 0 to 1.*'0': \[nan"),
        (_collapse(shares={"0": [-0.1, 1.0], "2": [0, 1]}), r"from 0 to 1.*'0': \[-0.1, 1.0\]"),
        (_collapse(shares={"0": [0, 1], "2": [0, 1.5]}), r"from 0 to 1.*'2': \[0, 1.5\]"),
        (_collapse(shares={"0": [0, 1], "2": ["a", 1]}), r"from 0 to 1.*'2': \['a', 1\]"),
        (_collapse(shares=[0.5, 0.5]), r"shares as {layer: .*}, got \[0.5, 0.5\]"),
        (_collapse(shares={"0": 0.5, "2": 0.5}), r"shares as {layer: .*, got {'0': 0.5"),
        (lambda: sr.collapse(None, torch.ones(1)), "torch.nn.Module, got NoneType"),
        (lambda: sr.save_network(nn.ReLU(), ".", torch.ones(1), "onnx"), r"call \.eval\(\) first"),
        (_collapse(threshold="evidence"), "razor of this very model"),
        (lambda: sr.collapse(torch.compile(_pair()), torch.ones(1)), "torch.compile'd"),
        (lambda: sr.collapse_table(nn.ReLU()), "made by collapse, got ReLU"),
        (lambda: sr.save_network(_pair(), ".", torch.ones(1), "onnx"), "got layers .*'Conv'"),
        (lambda: sr.save_network(nn.ReLU(), ".", torch.ones(1), "h5"), "format in .*got .*'h5'"),
        (lambda: sr.save_network(nn.ReLU(), "net.txt", torch.ones(1)), "got .*'net.txt'"),
    ],
)
def test_bad_input(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_code_that_cannot_be_traced_is_named() -> None:
    class Odd(Path):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(ValueError, match=r"can trace, got Odd.* _plain\(\)"):
        sr.collapse(nn.Sequential(Odd(1, 1, (2, 2))), torch.randn(1, 1, 2, 2))


def test_files_that_cannot_be_written(tmp_path: File, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Linear(2, 2).eval(), torch.ones(2, 2)
    with pytest.raises(FileNotFoundError, match="folder that exists, got .*nowhere"):
        sr.save_network(net, tmp_path / "nowhere" / "a.pt2", x)
    with pytest.raises(ValueError, match="relative difference .*nothing was written"):
        sr.save_network(net, tmp_path / "a.safetensors", x, tolerance=-1.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install symrazor\[onnx\]"):
        sr.save_network(net, tmp_path / "a.onnx", x)
    assert not list(tmp_path.iterdir())


def test_a_frozen_convolution_has_no_share_and_stays() -> None:
    torch.manual_seed(0)
    layer = Relaxed([Conv(1, 2, (4, 4)), FFC(1, 2, (4, 4))])
    layer.paths[0].requires_grad_(False)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(32, 3))
    x, y = torch.randn(12, 1, 4, 4), torch.arange(12) % 3
    fit = sr.fit(model, (x, y), epochs=1, burn_in=0, every=1)
    plain = sr.collapse(model, x, shares=fit.reading, threshold=0.01)
    assert [path["fate"] for path in plain.collapse_report["layers"][0]["paths"]] != [
        "dropped",
        "kept",
    ]
    torch.testing.assert_close(plain(x), model(x))
    assert list(fit.reading.relative_effective_parameters()) == ["FFC"]


def test_double_precision_without_a_kernel_in_the_runtime(tmp_path: File) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten()).double().eval()
    x = torch.ones(2, 1, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"has kernels for, got \['torch.float64'\].*x.float\(\)"):
        sr.save_network(net, tmp_path / "a.onnx", x)
    assert not list(tmp_path.iterdir())
