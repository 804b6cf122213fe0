"""Test readings: shares, measured errors, sentences, JSON, and the choice of the razor."""

import copy
import gc
import json
import math
import pickle
import re
import sys
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import digits
from symrazor.inference.evidence import Evidence, latest_razor
from symrazor.layers import FC, FFC, Conv, Relaxed, path_groups
from symrazor.symmetry.equivariance import layer_errors
from symrazor.symmetry.reading import SCHEMA, Reading, read


def _data(n: int = 40) -> tuple[Tensor, Tensor]:
    x, y = digits("train")
    return x[:n], y[:n]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Relaxed([Conv(1, 3, (8, 8), 2), FFC(1, 3, (8, 8), 2, bias=True)]),
        nn.ReLU(),
        FFC(3, 2, (4, 4)),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def _razor(model: nn.Module, **options: Any) -> tuple[sr.Razor, Evidence]:
    razor = sr.Razor(model, "categorical", 40, **options)
    return razor, razor.evidence([_data()])


# The function.


def test_reading_of_the_latest_razor() -> None:
    model, (x, _) = _model(), _data()
    razor, evidence = _razor(model)
    result = sr.reading(model, x)
    assert isinstance(result, Reading)
    assert result == read(razor, evidence, {"n": 40}, x=x)
    assert [(layer.name, layer.relaxed) for layer in result.layers] == [
        ("0", True),
        ("2", False),
        ("4", False),
    ]
    errors = layer_errors(model, x)
    assert result.equivariance_error == errors.network
    assert [layer.equivariance_error for layer in result.layers] == [
        errors.layers["0"],
        errors.layers["2"],
        {},
    ]
    gamma = evidence.effective_parameters
    (lone,) = result.layers[1].paths
    assert (lone.path, lone.group, lone.share, lone.parameters) == ("FFC", None, 1.0, 2 * 3 * 32)
    assert lone.effective_parameters == pytest.approx(
        gamma["2.first.weight"] + gamma["2.second.weight"]
    )
    assert set(lone.precision) == {"first.weight", "second.weight"}
    total = sum(layer.effective_parameters for layer in result.layers)
    assert total == pytest.approx(sum(gamma.values()))


def test_explicit_razor_and_evidence_take_precedence() -> None:
    model, (x, _) = _model(), _data()
    first, early = _razor(model, prior_precision=100.0)
    second, _ = _razor(model)
    assert latest_razor(model) is second
    assert sr.reading(model, x).config["prior_precision"] == 1.0
    assert sr.reading(model, x, razor=first).config["prior_precision"] == 100.0
    first.prior.log_precision[0].data.add_(1.0)
    late = first.evidence([_data()])
    assert sr.reading(model, x, first).evidence == late.to_dict() != early.to_dict()
    assert sr.reading(model, x, first, early).evidence == early.to_dict()


def test_the_latest_evidence() -> None:
    model = _model()
    razor = sr.Razor(model, "categorical", 40)
    assert razor.latest is None
    assert razor.evidence([_data()]) is razor.latest
    kept = razor.evidence([_data()], differentiable=True)
    assert kept.log_evidence.requires_grad
    assert not razor.latest.log_evidence.requires_grad
    razor.step([_data()])  # before the first update nothing is kept
    second = razor.step([_data()])
    assert razor.latest is second
    razor.evidence([_data()])
    assert razor.restore_best() is razor.latest is second
    razor.load_state_dict(razor.state_dict())
    assert razor.latest is None


def test_the_registry_holds_weak_references() -> None:
    model, (x, _) = _model(), _data()
    before = set(model.__dict__)
    razor, _ = _razor(model)
    assert latest_razor(model) is razor
    assert set(model.__dict__) == before
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert latest_razor(twin) is None
        with pytest.raises(ValueError, match="no Razor. Make one with razor = .*razor="):
            sr.reading(twin, x)
    del razor
    gc.collect()
    with pytest.raises(ValueError, match="pass razor="):
        sr.reading(model, x)


def test_reading_errors() -> None:
    model, other, (x, _) = _model(), _model(), _data()
    razor = sr.Razor(model, "categorical", 40)
    with pytest.raises(ValueError, match=r"Call razor.evidence\(loader\) first"):
        sr.reading(model, x)
    with pytest.raises(ValueError, match="Pass the razor of this model"):
        sr.reading(other, x, razor)
    _, evidence = _razor(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    with pytest.raises(
        ValueError, match="another model: it has no effective parameters for .*0.paths.0"
    ):
        sr.reading(model, x, razor, evidence)


def test_reading_is_importable_and_picklable() -> None:
    from symrazor import reading as function
    from symrazor.symmetry.reading import reading

    assert function is reading is sr.reading
    assert pickle.loads(pickle.dumps(sr.Reading)) is Reading


# Layers and shares.


def test_frozen_paths_and_layers_are_listed() -> None:
    model, (x, _) = _model(), _data()
    model[0].paths[1].requires_grad_(False)
    model[2].requires_grad_(False)
    _razor_alive = _razor(model)
    result = sr.reading(model, x)
    frozen = result.layers[0].paths[1]
    assert (frozen.share, frozen.effective_parameters, frozen.parameters) == (0.0, 0.0, 0)
    assert result.layers[1].name == "2"
    assert result.layers[1].error > 0.5
    assert str(result).count("frozen") == 2


def test_a_model_that_is_one_relaxed_layer() -> None:
    class Digits(Relaxed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(1)

    torch.manual_seed(0)
    model = Digits([Conv(1, 10, (8, 8), 8), FC(1, 10, (8, 8), 8)])
    _razor_alive = _razor(model)
    reading = sr.reading(model, _data()[0])
    assert repr(reading).endswith(", 1 layer)")
    (layer,) = reading.layers
    assert [path.path for path in layer.paths] == ["Conv", "FC"]
    assert [set(path.precision) for path in layer.paths] == [
        {"conv.weight", "conv.bias"},
        {"linear.weight", "linear.bias"},
    ]


def test_fit_measures_relaxed_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def count(model: nn.Module, x: Tensor) -> Any:
        seen.append(len(x))
        return layer_errors(model, x)

    monkeypatch.setattr(sys.modules["symrazor.symmetry.reading"], "layer_errors", count)
    model, data = _model(), _data(200)
    fits = [
        sr.fit(copy.deepcopy(model), data, epochs=2, prior_groups=path_groups(model), seed=s)
        for s in (0, 0)
    ]
    assert seen == [128, 128]
    assert fits[0].reading.equivariance_error == fits[1].reading.equivariance_error
    assert "Layer" in fits[0].reading.verdict
    assert "Log evidence" in fits[0].reading.verdict
    assert json.loads(fits[0].json)["equivariance_error"]["translation"] > 0
    again = sr.reading(fits[0].model, data[0])
    assert again.evidence == fits[0].reading.evidence
    plain = sr.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data, epochs=1)
    assert seen == [128, 128, 200]
    assert plain.reading.equivariance_error == {}
    assert plain.reading.verdict.startswith("Log evidence")


def test_a_switched_off_free_path_reads_as_equivariant() -> None:
    """A free path at zero with a huge prior precision is exactly equivariant."""
    model, (x, y) = _model()[:2], _data()
    model.extend([Conv(3, 10, (4, 4), 4), nn.Flatten()])
    model.double()
    razor = sr.Razor(
        model,
        "categorical",
        40,
        prior_groups=path_groups(model),
        prior_precision={"0.paths.0": 1.0, "0.paths.1": 1e10, "2": 1.0},
    )
    with torch.no_grad():
        for parameter in model[0].paths[1].parameters():
            parameter.zero_()
    razor.evidence([(x.double(), y)])
    result = sr.reading(model, x.double())
    assert result.layers[0].error < 1e-12
    assert result.layers[0].free_share < 1e-4
    assert result.equivariance_error["translation"] < 1e-12
    error = r"\(error (0|below 0\.01) %\)"  # 0 where sums are rounded alike at all positions
    assert re.match(
        f"The whole network is translation-equivariant {error}. Layers 0 and 2 are "
        f"translation-equivariant {error}",
        result.verdict,
    )


KINDS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Conv(1, 3, (8, 8), padding="zeros"), "conv"),
    (lambda: Conv(1, 3, (8, 8), 2, reduction="first"), "subsampling"),
]


@pytest.mark.parametrize(("make", "where"), KINDS)
def test_borders_and_strides_are_named(make: Callable[[], nn.Module], where: str) -> None:
    torch.manual_seed(0)
    path = make()
    head = nn.Linear(3 * path.pixels_out, 10)
    model = nn.Sequential(Relaxed([path]), nn.Flatten(), head)
    _razor_alive = _razor(model)
    result = sr.reading(model, _data()[0])
    assert result.layers[0].kind == "borders"
    assert "Layer 0 is translation-equivariant up to borders and strides" in result.verdict
    assert result.verdict.startswith("The whole network is not translation-equivariant (error ")
    assert list(result.breaking) == [f"0.paths.0.{where}", "2"]
    assert f"(0.paths.0.{where}) and dense layer on flattened positions (2)" in result.verdict


@pytest.mark.parametrize(
    "options",
    [
        {"prior_groups": {"all": ["*"]}, "prior_precision": MappingProxyType({"all": 2.0})},
        {"prior_groups": "scalar", "prior_precision": torch.tensor(3.0)},
        {"temperature": math.inf},
    ],
)
def test_json_is_plain(options: dict[str, Any]) -> None:
    model, (x, _) = _model(), _data()
    if options.get("temperature") == math.inf:
        razor, evidence = _razor(model)
        razor.config = sr.RazorConfig(**options)
    else:
        razor, evidence = _razor(model, **options)
    result = read(razor, evidence, x=x)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(result.to_json(), parse_constant=refuse)
    assert document == result.to_dict()
    assert document["schema"] == SCHEMA == 3
    precision = document["config"]["prior_precision"]
    assert precision == ({"all": 2.0} if isinstance(precision, dict) else pytest.approx(precision))
    assert document["equivariance_error"]["translation"] > 0
    assert document["layers"][0]["equivariance_error"]["translation"] > 0
    assert document["layers"][0]["relaxed"] is True
    assert [path["strict"] for path in document["layers"][0]["paths"]] == [True, True]
    shares = document["relative_effective_parameters"]
    assert set(shares) == {"Conv", "FFC"}
    assert set(shares["Conv"]) == {"mean", "min", "max"}
    assert set(document) == {
        *("verdict", "evidence", "train", "test", "layers", "config", "versions", "schema"),
        *("equivariance_error", "relative_effective_parameters", "invariances", "breaking"),
    }
