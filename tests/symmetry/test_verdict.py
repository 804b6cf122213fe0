"""Test sentences, tables and JSON of layers constructed by hand."""

import json
import math
from typing import Any

import pytest

from symrazor.symmetry.reading import TABLE_WIDTH, LayerReading, PathReading, Reading
from symrazor.symmetry.verdict import (
    FREE_SHARE,
    LARGE_ERROR,
    SMALL_ERROR,
    layer_verdict,
    network_sentence,
    percent,
)


def _layer(
    name: str, error: float | None, free: float, strict: bool = True, relaxed: bool = True
) -> LayerReading:
    paths = [
        PathReading("Conv", "translation", 1 - free, 10 * (1 - free), 20, {"w": 1.0}, strict),
        PathReading("FFC", None, free, 10 * free, 200, {"a": 2.0, "b": 2.0}),
    ]
    return LayerReading(name, paths, {} if error is None else {"translation": error}, relaxed)


def _reading(layers: list[LayerReading], **fields: Any) -> Reading:
    return Reading("Verdict.", {"log_evidence": -1.0}, {}, {}, layers, **fields)


def test_relative_effective_parameters() -> None:
    """Shares by path type over relaxed layers; paths of one type in a layer are added."""
    twins = LayerReading(
        "2",
        [
            PathReading("Conv", "translation", 0.5, 5, 9, {}),
            PathReading("Conv", "translation", 0.2, 2, 9, {}),
            PathReading("FC", None, 0.3, 3, 9, {}),
        ],
        relaxed=True,
    )
    plain = LayerReading("3", [PathReading("Linear", None, 1.0, 4, 9, {})])
    result = _reading([_layer("0", None, 0.1), _layer("1", None, 0.4), twins, plain])
    got = result.relative_effective_parameters()
    expected = {
        "Conv": ((0.9 + 0.6 + 0.7) / 3, 0.6, 0.9),
        "FFC": (0.25, 0.1, 0.4),
        "FC": (0.3, 0.3, 0.3),
    }
    assert {kind: tuple(spread) for kind, spread in got.items()} == {
        kind: pytest.approx(values) for kind, values in expected.items()
    }
    assert got["FFC"].max == 0.4
    assert "share over layers, mean (min to max): Conv 73 % (60 to 90 %)" in str(result)
    assert _reading([plain]).relative_effective_parameters() == {}
    assert "share over" not in str(_reading([plain]))


@pytest.mark.parametrize(
    ("error", "free", "strict", "kind"),
    [
        (0.0, 0.0, True, "equivariant"),
        (0.99 * SMALL_ERROR, 0.99 * FREE_SHARE, True, "equivariant"),
        (0.99 * SMALL_ERROR, FREE_SHARE, True, "unused freedom"),
        (SMALL_ERROR, 0.0, False, "borders"),
        (SMALL_ERROR, 0.01, True, "approximate"),
        (LARGE_ERROR, 0.01, True, "undetermined"),
        (0.99, 0.01, False, "borders"),
        (1.06, 0.01, False, "undetermined"),
        (SMALL_ERROR, FREE_SHARE, True, "broken"),
        (SMALL_ERROR, FREE_SHARE, False, "broken"),
        (math.inf, 1.0, True, "broken"),
        (None, 1.0, True, None),
    ],
)
def test_kinds_of_layers(error: float | None, free: float, strict: bool, kind: str | None) -> None:
    assert _layer("0", error, free, strict).kind == kind


def test_words() -> None:
    layers = [_layer(str(i), e, 0.01) for i, e in ((0, 0.0), (2, 0.003), (4, 0.0001))]
    layers.append(LayerReading("head", [PathReading("Linear", None, 1.0, 4, 9, {})]))
    layers.append(_layer("6", 0.12, 0.26))
    assert layer_verdict(layers, "The whole network.") == (
        "The whole network. Layers 0 to 4 are translation-equivariant (error at most 0.3 %); layer "
        "6 depends on position (free paths hold 26 % of its effective parameters, error 12 %)."
    )
    none = layer_verdict([_layer("0", 0.0, 0.0), _layer("1", 0.0, 0.0)])
    assert none == "Layers 0 and 1 are translation-equivariant (error 0 %)."
    more = [*layers, _layer("8", 1e-9, 0.0), _layer("9", 0.5, 0.5), _layer("", 0.2, 0.0, False)]
    assert layer_verdict(more) == (
        "Layers 0 to 4 and 8 are translation-equivariant (error at most 0.3 %); layer (the model) "
        "is translation-equivariant up to borders and strides (error 20 %); layers 6 and 9 depend "
        "on position (free paths hold 26 to 50 % of their effective parameters, error 12 to 50 %)."
    )
    assert layer_verdict([_layer("a.b", 0.03, 0.12)]) == (
        "Layer a.b is translation-equivariant (error 3 %), although free paths hold 12 % of its "
        "effective parameters."
    )
    off = [_layer("0", 0.1, 0.01), _layer("3", 1.06, 0.0004, strict=False), _layer("6", 0.5, 0.0)]
    assert layer_verdict(off) == (
        "Layer 0 is approximately translation-equivariant (error 10 %); the data do not determine "
        "whether layers 3 and 6 are translation-equivariant (error at most 106 %, free paths hold "
        "0 to 0.04 % of their effective parameters)."
    )
    assert layer_verdict([_layer("0", None, 0.5)], "Network.") == ""


def test_the_whole_network_comes_first_with_the_modules_that_break_it() -> None:
    breaking = {"0": "zero padding", "2": "pooling with a stride", "3": "zero padding"}
    assert network_sentence({"translation": 0.345}, breaking) == (
        "The whole network is not translation-equivariant (error 34 %). Shift equivariance is lost "
        "between layers: zero padding (0, 3) and pooling with a stride (2) break it. "
        "symrazor.make_equivariant(model, x) replaces such modules."
    )
    small = 0.99 * SMALL_ERROR
    assert network_sentence({"translation": small}, breaking) == (
        "The whole network is translation-equivariant (error 5 %)."
    )
    assert network_sentence({"translation": 0.2, "p4": 0.0}) == (
        "The whole network is p4-equivariant (error 0 %) and not translation-equivariant (error "
        "20 %)."
    )
    assert network_sentence({"translation": 0.2}, {"": "x"}).endswith(
        "x ((root)) breaks it. symrazor.make_equivariant(model, x) replaces such modules."
    )
    assert network_sentence({"translation": None}, breaking) == network_sentence({}) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 %"),
        (1e-13, "below 0.01 %"),
        (0.00012, "0.012 %"),
        (0.0031, "0.31 %"),
        (0.0994, "9.9 %"),
        (0.0999, "10 %"),
        (1.4142, "141 %"),
        (math.inf, "infinite"),
    ],
)
def test_percent(value: float, text: str) -> None:
    assert percent(value) == text


def test_the_table_fits_the_terminal() -> None:
    long = "encoder.stages.3.blocks.2.residual.branch.convolution"
    many = {f"factor_{i}.weight": 1.5 * 10**i for i in range(5)}
    wide = LayerReading(
        long, [PathReading("ConvTranspose2d", None, 1.0, 1e6, 10**7, many)], {"translation": 1e-9}
    )
    test = {"accuracy": 0.9}
    verdict = layer_verdict([wide] * 3, "Network.") + " and so on" * 30
    result = Reading(verdict, {}, {}, test, [_layer("0", 0.3, 0.2), wide])
    lines = str(result).splitlines()
    assert max(map(len, lines)) <= TABLE_WIDTH
    assert all(
        f"{name} {value:.3g}" in " ".join(str(result).split()) for name, value in many.items()
    )
    assert "30 %" in lines[1]
    assert "30 %" not in lines[2]
    assert lines[2].endswith("2")  # both tensors have this precision
    assert long[-21:] in lines[3]
    assert "below 0.01 %" in lines[3]
    assert all(not line.startswith("%") for line in lines)
    plain = _reading([LayerReading("0", [PathReading("Linear", None, 1.0, 4, 9, {"weight": 1.0})])])
    assert "error" not in str(plain)


def test_an_infinite_error_is_null() -> None:
    result = _reading([_layer("0", math.inf, 0.5)])
    assert json.loads(result.to_json())["layers"][0]["equivariance_error"] == {"translation": None}
    assert "infinite" in str(result)


def test_notebooks_show_the_answer_in_bold() -> None:
    reading = Reading("Layer 0 <b> is equivariant. Log evidence -1.0.", {}, {}, {}, [])
    text = reading._repr_html_()
    assert "<strong>Layer 0 &lt;b&gt; is equivariant.</strong> Log evidence &minus;1.0." in text
