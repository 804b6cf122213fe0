"""Test which paths collapse drops: thresholds, shares, and the choice by evidence."""

import copy
import io
import sys

import pytest
import torch
from collapse_networks import pair
from torch import nn

import symrazor as sr
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.symmetry import collapse
from symrazor.symmetry.collapse import path_shares
from symrazor.testing import assert_close


@pytest.mark.parametrize("mean", [False, True])
def test_a_threshold_drops_smaller_shares(mean: bool) -> None:
    model = pair(mean)
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


def test_the_default_threshold() -> None:
    shares = {"0": [0.005, 0.995], "2": [0.02, 0.98]}
    plain = sr.collapse(pair(), torch.randn(2, 1, 8, 8), shares=shares, threshold=None)
    assert plain.collapse_report["threshold"]["value"] == 0.01
    assert "threshold on shares: 0.01, by default" in sr.collapse_table(plain)


def test_zero_paths_are_always_dropped() -> None:
    model = pair()
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


def test_frozen_paths_are_kept() -> None:
    model = pair()
    model[0].paths[0].requires_grad_(False)
    gamma = dict.fromkeys(sr.weights(model), 1.0)
    shares = path_shares(model, gamma)
    assert shares == {"0": [None, 1.0], "2": [0.5, 0.5]}
    plain = sr.collapse(model, torch.randn(2, 1, 8, 8), shares=shares, threshold=0.4)
    assert plain.collapse_report["layers"][0]["paths"][0]["fate"] == "kept"
    alone = model[0]
    assert path_shares(alone, {"paths.1.conv.weight": 2.0}) == {"": [None, 1.0]}


def test_the_evidence_chooses_the_threshold(pair_fit: sr.Fit) -> None:
    plain = pair_fit.collapse()
    report = plain.collapse_report
    candidates = report["threshold"]["candidates"]
    full = float(pair_fit.evidence.log_evidence)
    assert candidates[0]["log_evidence"] == pytest.approx(full, rel=1e-6)
    assert [c["dropped"] for c in candidates] == sorted({c["dropped"] for c in candidates})
    best = max(candidates, key=lambda c: c["log_evidence"])
    assert report["threshold"]["value"] == best["threshold"]
    fates = [p["fate"] for layer in report["layers"] for p in layer["paths"]]
    assert fates.count("dropped") == best["dropped"] >= 1
    read = {layer.name: layer.paths for layer in pair_fit.reading.layers}
    for layer in report["layers"]:
        got = [path["share"] for path in layer["paths"]]
        assert got == pytest.approx([path.share for path in read[layer["name"]]])
    one = copy.deepcopy(pair_fit.model)  # an independent look: a free path without weights
    weakest = min(report["layers"], key=lambda layer: min(p["share"] for p in layer["paths"]))
    paths = one.get_submodule(weakest["name"]).paths
    worst = min(range(2), key=lambda i: weakest["paths"][i]["share"])
    old = {k: float(v) for k, v in pair_fit.razor.prior.precisions.items()}
    dead = f"{weakest['name']}.paths.{worst}"
    for parameter in paths[worst].requires_grad_(False).parameters():
        parameter.zero_()
    groups = {k: v for k, v in sr.layers.path_groups(pair_fit.model).items() if k != dead}
    del old[dead]
    razor = sr.Razor(one, "categorical", 300, prior_groups=groups, prior_precision=old)
    expected = float(razor.evidence(pair_fit.data, structure="auto").log_evidence)
    assert candidates[1]["log_evidence"] == pytest.approx(expected, rel=1e-6)


def test_shares_from_a_reading_or_a_razor(pair_fit: sr.Fit) -> None:
    x = pair_fit.data.x[:4]
    by_reading = sr.collapse(pair_fit.model, x, shares=pair_fit.reading, threshold=0.3)
    by_fit = pair_fit.collapse(threshold=0.3, example_input=x)
    assert by_reading.collapse_report["layers"] == by_fit.collapse_report["layers"]
    options = {"razor": pair_fit.razor, "loader": pair_fit.data, "structure": "auto"}
    by_razor = sr.collapse(pair_fit.model, x, threshold="evidence", **options).collapse_report
    by_razor = by_razor["threshold"]
    assert by_razor == pair_fit.collapse().collapse_report["threshold"]


def test_a_slow_choice_shows_a_progress_bar(
    pair_fit: sr.Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for patience, shown in ((1e9, False), (-1.0, True)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(collapse, "PROGRESS_BAR_DELAY_SECONDS", patience)
        pair_fit.collapse()
        assert ("evidence" in terminal.getvalue()) is shown


def test_a_frozen_convolution_has_no_share_and_is_kept() -> None:
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
