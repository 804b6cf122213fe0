"""Test configurations of runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import symrazor as sr
from symrazor.data import flip_and_crop
from symrazor.inference.evidence import RazorConfig
from symrazor.runs.config import DataConfig, ModelConfig, RunConfig, from_document, read_config


def test_a_configuration_is_written_and_read(tmp_path: Path) -> None:
    config = RunConfig(
        DataConfig("mnist", path=tmp_path / 'a "quoted" folder', task="quadrant", seed=3),
        ModelConfig(name="a.b:c", relax=False, arguments={"x": [1, 2.5], "y": {"z": True}}),
        sr.FitConfig(lr=1e-3, augment=flip_and_crop, patience=3).change(
            prior_groups={"all": ["*"]}, prior_precision={"all": 2.0}
        ),
    )
    (tmp_path / "x.toml").write_text(config.to_toml())
    again = read_config(tmp_path / "x.toml")
    assert again.data == config.data
    assert again.fit == replace(config.fit, razor=again.fit.razor)
    assert again.fit.razor.prior_groups == {"all": ("*",)} or again.fit.razor == config.fit.razor
    assert again.model.arguments == config.model.arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save": "x"}, "fit.save has no effect in a run. Use --out RUN"),
        ({"resume": "x"}, "fit.resume has no effect in a run. Use --out RUN --resume"),
        ({"razor": RazorConfig(seed=3)}, r"RazorConfig\(seed=3\) .* FitConfig\(seed=3\)"),
        ({"razor": RazorConfig(burn_in=3)}, r"RazorConfig\(burn_in=3\) .* FitConfig\(burn_in=3\)"),
    ],
)
def test_options_without_effect_raise_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig(fit=replace(sr.FitConfig(), **changes))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"fitt": {}}, r"Unknown section \[fitt\]. Did you mean 'fit'"),
        ({"fit": {"label_smoothing": 0.1}}, "label_smoothing is not supported"),
        ({"fit": {"epoch": 3}}, r"\[fit\] has no key 'epoch'. Did you mean 'epochs'"),
        ({"razor": {"estimater": "mc"}}, "no key 'estimater'. Did you mean 'estimator'"),
        ({"razor": {"burn_in": 3}}, r"\[razor\] has no key 'burn_in': it belongs to \[fit\]"),
        ({"fit": {"dtype": "float64"}}, r"\[fit\] has no key 'dtype': it belongs to \[data\]"),
        ({"model": {"lr": 0.1}}, r"'lr': it belongs to \[fit\] or \[razor\]. Move it there"),
        ({"data": {"width": 4}}, r"'width': it belongs to \[model\]"),
        ({"fit": {"resume": "x"}}, "no key 'resume'. Use one of epochs"),
        ({"fit": {"epochs": "many"}}, "fit.epochs must be an integer, got 'many'"),
        ({"fit": {"epochs": True}}, "fit.epochs must be an integer, got True"),
        ({"razor": {"estimator": "best"}}, "razor.estimator must be 'exact', 'mc' or"),
        ({"fit": {"augment": "thing"}}, "fit.augment must be 'flip_and_crop' or .*got 'thing'"),
        ({"data": {"name": "mnist"}}, "data.name = 'mnist' needs data.path"),
        (
            {"data": {"name": "cifar-10", "path": "x", "task": "digit"}},
            "digits or mnist, got cifar",
        ),
        ({"data": 3}, r"data must be a section \[data\], got data = 3"),
        ({"model": {"name": "ella"}}, "'ella' has no convolutions to relax. Set relax = false"),
    ],
)
def test_wrong_configurations_raise_errors(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_document(document)


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf[fit]\r\nepochs = 7\r\n")
    assert read_config(file).fit.epochs == 7
