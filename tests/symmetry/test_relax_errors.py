"""Test which layers relax does not change, the reasons it gives, and its errors."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from relax_networks import Looking, ResNet, classifier, same
from torch import Tensor, nn
from torch.nn.utils import prune

import symrazor as sr
from symrazor.layers import FFC, Conv


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Left(nn.Module):
    """A convolution that can be relaxed, and one layer for each reason not to."""

    def __init__(self) -> None:
        super().__init__()

        class Own(nn.Conv2d):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        class Plain(nn.Conv2d):
            pass

        self.good = Plain(1, 2, 3, padding=1)
        self.own = Own(2, 2, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3, padding=1))
        self.pruned = prune.identity(nn.Conv2d(2, 2, 1, bias=False), "weight")
        self.never = nn.Conv2d(2, 2, 3)
        self.sizes = nn.Conv2d(2, 2, 3, padding=1)
        self.keyword = nn.Conv2d(2, 2, 1)
        self.alone = nn.Conv2d(2, 2, 1)
        self.up = nn.ConvTranspose2d(2, 2, 2, stride=2)
        self.pixel = nn.Conv2d(2, 2, 1)
        self.act = nn.PReLU()
        self.norm = nn.LayerNorm(4)
        self.fc1 = nn.Linear(32, 32)
        self.fc2 = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.act(self.pruned(self.normed(self.own(self.good(x))))))
        x = self.sizes(x) + F.interpolate(self.sizes(F.max_pool2d(x, 2)), scale_factor=2)
        x = self.keyword(input=x)
        x = torch.stack([self.alone(image) for image in x])
        x = F.max_pool2d(self.up(x), 2) + self.pixel(x.mean((2, 3), keepdim=True))
        x = nn.Identity()(x)
        return self.scale * self.fc2(self.fc1(self.norm(x).flatten(1)))


def test_every_reason_not_to_relax_a_module(caplog: pytest.LogCaptureFixture) -> None:
    model = Left()
    with caplog.at_level(logging.INFO, "symrazor"):
        relaxed = same(model, torch.randn(2, 1, 4, 4))
    report = sr.relaxation(relaxed)
    assert report.changed == {
        "good": "1x4x4 -> 2x4x4: Conv (20) + FFC (64), equivariant up to borders and strides"
    }
    reasons = {
        "": "Left has no free path",
        "own": "custom forward pass: Own overrides forward of Conv2d",
        "normed": "its weight is computed",
        "pruned": "its weight is computed",
        "never": "never called for the example input",
        "sizes": "called on maps of different shapes: [(2, 2), (4, 4)]",
        "keyword": "not with one positional tensor",
        "alone": "called without a batch dimension",
        "up": "a transposed convolution",
        "pixel": "only one position",
        "fc1": "already free: separate weights for every position",
        "fc2": "no positions: acts on features",
    }
    assert list(report.left) == list(reasons)
    for name, reason in reasons.items():
        assert reason in report.left[name]
    assert report.breaking.keys() == {"good", "own", "normed", "sizes", "up", "fc1"}
    text = str(report)
    assert text.startswith("The whole network is not translation-equivariant (error ")
    table = text[text.index("module  ") :].splitlines()
    assert len(table) == 1 + 1 + len(reasons)
    assert table[1].split()[:2] == ["good", "relaxed"]
    assert table[-1] == "fc2      left     no positions: acts on features"
    assert str(report) in caplog.text


def test_the_relaxation_report_survives_copies() -> None:
    relaxed = sr.relax(ResNet(), torch.randn(2, 1, 8, 8))
    report = sr.relaxation(relaxed)
    assert sr.relaxation(copy.deepcopy(relaxed)) == report
    assert sr.relaxation(pickle.loads(pickle.dumps(relaxed))) == report
    assert not any("relaxation" in key for key in relaxed.state_dict())
    with pytest.raises(ValueError, match=r"This Linear was not made by relax\(\)"):
        sr.relaxation(nn.Linear(1, 1))


X = torch.zeros(2, 1, 5, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ["rotation"]}, r"groups must include 'translation'.*got \['rotation'\]"),
        ({"groups": ["translations"]}, r"Did you mean 'translation'\?"),
        ({"groups": []}, r"groups must include 'translation'.*got \[\]"),
        ({"paths": "g-fc+conv"}, r"names among .*'s-fc', 'conv', 's-conv'\], got 'g-fc\+conv'"),
        ({"paths": ""}, r"names among .*, got ''"),
        ({"paths": "f-fc"}, r"exactly one of \['conv', 's-conv'\] .*, got 'f-fc'"),
        (
            {"paths": "fc+fc+conv"},
            r"each of \['f-fc', 'fc', 's-fc'\] at most once, got 'fc\+fc\+conv'",
        ),
        ({"precision": 0.0}, "positive number or None, got 0.0"),
        ({"precision": "1"}, "positive number or None, got '1'"),
        ({"groups": None}, r"groups must include 'translation'.*got \[None\]"),
        ({"paths": ["f-fc", "conv"]}, r"paths must be a string .*, got \['f-fc', 'conv'\]"),
        ({"example_input": X[:, :, :2]}, r"example input of shape \[2, 1, 2, 5\]: Runtime"),
        ({"example_input": {"x": X}}, r"of shape {'x': \[2, 1, 5, 5\]}: TypeError"),
        ({"example_input": X.numpy()}, "must be a tensor, or a tuple or .*, got ndarray"),
        ({"example_input": X.double()}, "RuntimeError: Input type .double. and bias type"),
        ({"example_input": (X, X)}, r"of shape \[\[2, 1, 5, 5\], \[2, 1, 5, 5\]\]: TypeError"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    options.setdefault("example_input", X)
    with pytest.raises(ValueError, match=message):
        sr.relax(classifier(nn.Conv2d(1, 2, 3)), **options)


def test_a_single_group_may_be_a_string() -> None:
    assert sr.relax(classifier(nn.Conv2d(1, 2, 3)), X, groups="translation")


def test_nothing_to_relax() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="no layer that can be relaxed:\n  1: .*\n  "):
        sr.relax(model, X)
    with pytest.raises(
        ValueError, match="no layer that can be relaxed: it has no layers with weights"
    ):
        sr.relax(nn.ReLU(), X)
    relaxed = sr.relax(classifier(nn.Conv2d(1, 2, 3)), X)
    with pytest.raises(ValueError, match="can be relaxed:\n  0: already a relaxed layer$"):
        sr.relax(relaxed, X)
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got NoneType"):
        sr.relax(None, X)


def test_layers_that_are_already_relaxed_are_listed_once() -> None:
    layer = sr.relax(classifier(nn.Conv2d(1, 2, 3, padding=1)), X)[0]
    more = [layer, nn.ReLU(), FFC(2, 2, (5, 5)), nn.Conv2d(2, 1, 3, padding=1), layer]
    report = sr.relaxation(sr.relax(nn.Sequential(*more), X))
    assert list(report.changed) == ["3"]
    assert report.left == {
        "0": "already a relaxed layer",
        "2": "already a path: FFC",
        "4": "already a relaxed layer",
    }


def test_a_convolution_shared_with_a_path_is_not_relaxed() -> None:
    conv = nn.Conv2d(1, 1, 3, padding=1)
    model = nn.Sequential(Conv.wrap(conv, (5, 5)), conv, nn.Conv2d(1, 2, 3))
    relaxed = sr.relax(model, X, precision=float("inf"))
    assert sr.relaxation(relaxed).left == {
        "0": "already a path: Conv",
        "1": "already inside a relaxed layer",
    }
    assert relaxed[0].conv is relaxed[1]


def test_a_linear_layer_shared_by_positions_is_not_relaxed() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(2), nn.Linear(9, 4), nn.Flatten(), nn.Linear(8, 3)
    )
    assert sr.relaxation(sr.relax(model, X)).left == {
        "2": "shared by all positions: acts on features",
        "4": "no positions: acts on features",
    }


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("attribute", "does not run with its layers replaced: AttributeError.*calling self"),
        ("list", r"does not call its new layers \['conv'\]"),
        ("type", "The outputs changed"),
    ],
)
def test_forward_passes_that_bypass_their_modules_raise(how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.relax(Looking(how), X + 1)


def test_models_with_several_outputs() -> None:
    class Both(Looking):
        def forward(self, x: Tensor) -> Any:
            return self.conv(x), x

    with pytest.raises(ValueError, match=r"must return a tensor \[n, k\], got tuple"):
        sr.relax(Both(""), X)


def test_scripted_models() -> None:
    scripted = torch.jit.trace(classifier(nn.Conv2d(1, 2, 3)), X)
    with pytest.raises(
        ValueError, match="compiled by torch.jit cannot be changed. Pass the Python module"
    ):
        sr.relax(scripted, X)


def test_models_that_cannot_be_copied() -> None:
    model = nn.Linear(1, 1)
    model.cache = model.weight * 2
    for change in (sr.replace_batchnorm, lambda m: sr.relax(m, X)):
        with pytest.raises(ValueError, match=r"copy\.deepcopy cannot copy this model: "):
            change(model)
