"""Test that relaxed networks have the same outputs, a curvature, and can learn."""

import copy
from typing import Any

import pytest
import torch
from relax_networks import ResNet, classifier, same
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import digits
from symrazor.layers import FC, FFC, Conv, Relaxed, path_groups
from symrazor.testing import assert_close


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("paths", ["f-fc+conv", "fc+conv", "FFC + CONV", "conv", "conv+F-FC+fc"])
def test_a_nested_residual_network(dtype: torch.dtype, tolerance: float, paths: str) -> None:
    model = ResNet().to(dtype)
    relaxed = same(model, torch.randn(3, 1, 8, 6, dtype=dtype), tolerance, paths=paths)
    assert all(p.dtype == dtype for p in relaxed.parameters())
    report = sr.relaxation(relaxed)
    convs = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert list(report.changed) == convs
    assert report.left == {"head.1": "no positions: acts on features"}
    kinds = {tuple(type(p) for p in m.paths) for m in relaxed.modules() if isinstance(m, Relaxed)}
    (kind,) = kinds
    assert kind[0] is Conv
    assert {FFC: "ffc" in paths.lower().replace("-", ""), FC: "fc" in paths.split("+")} == {
        FFC: FFC in kind,
        FC: FC in kind,
    }


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding=1), (7,)),
        (nn.Conv1d(2, 4, 4, stride=3), (11,)),
        (nn.Conv2d(2, 3, (3, 5), padding=(1, 2)), (5, 7)),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), (7, 5)),
        (nn.Conv2d(2, 3, 3, stride=(1, 3)), (6, 9)),
        (nn.Conv2d(2, 3, 3, dilation=2), (7, 6)),
        (nn.Conv2d(2, 3, 2, padding="same", dilation=(1, 3)), (5, 6)),
        (nn.Conv2d(2, 3, 3, padding="valid"), (5, 4)),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5)),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), (4, 5)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 6)),
        (nn.Conv2d(2, 3, 5, padding=2, padding_mode="reflect"), (6, 5)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (3, 5)),
        (nn.Conv2d(2, 3, 1), (3, 3)),
        (nn.Conv2d(2, 3, (3, 4)), (3, 4)),
        (nn.Conv3d(1, 2, 3, stride=2, padding=1), (4, 3, 5)),
    ],
    ids=str,
)
def test_every_convolution(conv: nn.Conv2d, shape: tuple[int, ...]) -> None:
    x = torch.randn(2, conv.in_channels, *shape, dtype=torch.float64)
    model = nn.Sequential(copy.deepcopy(conv).double(), nn.Tanh(), nn.Flatten())
    relaxed = same(model, x, 1e-12)
    layer = relaxed[0]
    assert layer.paths[0].out_shape == layer.paths[1].out_shape == tuple(model[0](x).shape[2:])
    assert torch.equal(layer.paths[0].conv.weight, model[0].weight)
    same(model, x, 1e-12, paths="fc+conv")


def test_a_bare_convolution() -> None:
    relaxed = same(nn.Conv2d(1, 2, 3), torch.randn(2, 1, 5, 5))
    assert isinstance(relaxed, Relaxed)
    assert "(root)  relaxed  1x5x5 -> 2x3x3: Conv (20) + FFC (68)" in str(sr.relaxation(relaxed))


def test_the_relaxed_model_can_break_the_symmetry() -> None:
    x = torch.randn(2, 1, 6, 6)
    conv = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")
    relaxed = sr.relax(conv, x, precision=1.0)
    with torch.no_grad():
        moved = relaxed(x.roll(1, 3)) - relaxed(x).roll(1, 3)
    assert float(moved.abs().max()) > 0.1
    assert_close(relaxed.paths[0](x), conv(x), 1e-6)


def test_the_model_is_not_changed() -> None:
    model = ResNet().train()
    model.blocks[0].eval()
    state = copy.deepcopy(model.state_dict())
    relaxed = sr.relax(model, torch.randn(2, 1, 8, 8))
    assert [type(m) for m in model.modules()] == [type(m) for m in ResNet().modules()]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training and not model.blocks[0].training
    assert relaxed.training and relaxed.head[0].training
    assert relaxed.stem.training and relaxed.stem.paths[1].training
    assert not any(m.training for m in relaxed.blocks[0].modules())
    assert not any(m._forward_hooks for m in relaxed.modules())
    x = torch.zeros(1, 1, 8, 8)
    sr.relax(classifier(nn.ReLU(inplace=True), nn.Conv2d(1, 1, 3)), x - 1)


def test_frozen_weights_stay_frozen() -> None:
    model = ResNet()
    model.stem.requires_grad_(False)
    relaxed = sr.relax(model, torch.randn(2, 1, 8, 8))
    assert not any(p.requires_grad for p in relaxed.stem.paths[0].parameters())
    assert all(p.requires_grad for p in relaxed.stem.paths[1].parameters())
    assert all(p.requires_grad for p in relaxed.blocks.parameters())


def test_random_numbers() -> None:
    model, x = ResNet(), torch.randn(2, 1, 8, 8)
    before = torch.get_rng_state()
    one, two = sr.relax(model, x, seed=1), sr.relax(model, x, seed=1)
    other = sr.relax(model, x, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    first = [m.stem.paths[1].first.weight for m in (one, two, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    sr.relax(model, x, paths="conv")  # nothing to draw
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(sr.relax(model, x).stem.paths[1].first.weight, first[0])


def test_free_paths_drawn_from_their_prior() -> None:
    model, x = ResNet(), torch.randn(2, 1, 8, 8)
    loose, tight = (sr.relax(model, x, precision=p, seed=0) for p in (1.0, 100.0))
    a, b = (m.stem.paths[1] for m in (loose, tight))
    assert torch.equal(a.first.weight, b.first.weight)
    assert_close(b.second.weight, a.second.weight / 10, 1e-6)
    assert_close(b(x), a(x) / 10, 1e-6)


def test_a_shared_module_stays_shared() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), nn.Sequential(conv, nn.Flatten()))
    relaxed = same(model, torch.randn(2, 2, 4, 4))
    assert relaxed[0] is relaxed[2][0]
    report = sr.relaxation(relaxed)
    assert list(report.changed) == ["0", "2.0"] and not report.left


def test_tuples_and_dictionaries() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, image: Tensor, shift: Tensor) -> Tensor:
            return self.conv(image).flatten(1) + shift

    image, shift = torch.randn(2, 1, 5, 5), torch.randn(2, 1)
    model = Two()
    for x in ((image, shift), [image, shift], {"shift": shift, "image": image}):
        relaxed = sr.relax(model, x)
        assert_close(relaxed(image, shift), model(image, shift), 1e-6)


def test_compiled_modules_are_unwrapped() -> None:
    model, x = ResNet().eval(), torch.randn(2, 1, 8, 8)
    relaxed = sr.relax(torch.compile(model), x)
    assert isinstance(relaxed, ResNet)
    assert_close(relaxed(x), model(x), 1e-5)
    outer = nn.Sequential(torch.compile(nn.Sequential(nn.Conv2d(1, 2, 3))), nn.Flatten())
    assert list(sr.relaxation(sr.relax(outer, x)).changed) == ["0.0"]
    assert sr.relaxation(torch.compile(relaxed)) == sr.relaxation(relaxed)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 2, 3, padding=2, dilation=2, groups=2),
        nn.Conv2d(2, 2, 3, padding="same", bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("paths", ["f-fc+conv", "fc+conv"])
def test_the_curvature_supports_every_relaxed_layer(conv: nn.Conv2d, paths: str) -> None:
    """Also for a layer that is called twice; `Razor` verifies every gradient."""
    conv = copy.deepcopy(conv)
    model = nn.Sequential(conv, nn.Tanh(), conv, nn.Conv2d(2, 3, 2, stride=2), nn.Flatten())
    x, y = torch.randn(6, 2, 5, 4), torch.randint(0, 12, (6,))
    relaxed = sr.relax(model, x, paths=paths)
    razor = sr.Razor(relaxed, "categorical", len(y), prior_groups=path_groups(relaxed))
    assert set(razor.prior.names) == {"0.paths.0", "0.paths.1", "3.paths.0", "3.paths.1"}
    assert torch.isfinite(razor.step([(x, y)]).log_evidence)


def test_a_relaxed_residual_network_learns_from_the_evidence() -> None:
    x, y = (part[:200] for part in digits("train"))
    relaxed = sr.relax(ResNet(), x[:2], groups=["translation"])
    groups = path_groups(relaxed)
    assert {"stem.paths.0", "stem.paths.1", "blocks.1.shortcut.paths.1"} <= set(groups)
    razor = sr.Razor(relaxed.eval(), "categorical", n_data=len(y), prior_groups=groups)
    assert torch.isfinite(razor.step([(x, y)]).log_evidence)
    options = {"epochs": 14, "every": 7, "burn_in": 0, "batch_size": 20, "lr": 0.01}
    fit = sr.fit(relaxed, (x, y), prior_groups=groups, **options)
    assert torch.isfinite(fit.evidence.log_evidence)
    assert fit.history[-1]["nll"] < 0.7 * fit.history[0]["nll"]
    by_name = {layer.name: [path.path for path in layer.paths] for layer in fit.reading.layers}
    assert by_name["blocks.1.conv2"] == ["Conv", "FFC"]
    assert any(m.any() for n, m in relaxed.named_parameters() if n.endswith("second.weight"))
    assert len(sr.relaxation(relaxed).changed) == 6


def test_free_paths_grow_if_the_label_depends_on_position() -> None:
    """A convolution with a global mean cannot predict the quadrant of a digit."""
    x = digits("train")[0][:300]
    y = torch.arange(300) % 4
    canvas = torch.zeros(300, 1, 2, 8, 2, 8)
    canvas[torch.arange(300), :, y // 2, :, y % 2] = x
    canvas = canvas.reshape(300, 1, 16, 16)
    around: dict[str, Any] = {"stride": 2, "padding": 1, "padding_mode": "circular"}
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, **around), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model.append(nn.Linear(6, 4))
    evidence = {}
    for paths in ("f-fc+conv", "conv"):
        relaxed = sr.relax(model, canvas[:1], paths=paths, seed=0)
        options = {"epochs": 20, "every": 5, "batch_size": 30, "lr": 0.01}
        fit = sr.fit(relaxed, (canvas, y), prior_groups=path_groups(relaxed), **options)
        evidence[paths] = float(fit.evidence.per_datum)
    assert evidence["f-fc+conv"] > -0.7 and evidence["conv"] < -1.3  # guessing: -log 4 = -1.39


def test_sparse_paths() -> None:
    """S-FC starts at zero; S-CONV with 5 of 9 anchors has the least-squares error."""
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten()
    )
    x = torch.randn(3, 1, 7, 7)
    same = sr.relax(cnn, x, paths="s-fc+conv")
    assert [type(path).__name__ for path in same[0].paths] == ["Conv", "SFC"]
    torch.testing.assert_close(same(x), cnn(x))
    sparse = sr.relax(cnn, x, paths="S-FC + S-CONV")
    assert [type(layer.paths[0]).__name__ for layer in (sparse[0], sparse[2])] == ["SConv", "Conv"]
    change = ((sparse[0](x) - cnn[0](x)).norm() / cnn[0](x).norm()).detach().item()
    assert 0.1 < change < 1
