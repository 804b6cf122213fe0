"""Test the options of `symrazor fit`."""

import re
from pathlib import Path

import pytest

from symrazor.cli import app
from symrazor.cli.fit import NO_OPTIONS, initial_config
from symrazor.core.errors import OptionError
from symrazor.runs.config import SECTIONS, RunConfig

HIDDEN_OPTIONS = [
    f"--{'fit.razor' if name == 'razor' else name}.{field.replace('_', '-')}"
    for name, section in SECTIONS.items()
    for field in NO_OPTIONS.get(section, ())
]


def test_the_help_lists_no_option_that_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.run(["fit", "--help"])
    listed = set(re.findall(r"--[a-z.-]*[a-z]", capsys.readouterr().out))
    assert {"--fit.lr", "--fit.save-every", "--fit.razor.lr", "--data.path"} <= listed
    assert {"--fit.save", "--fit.resume", "--fit.razor.seed"} <= set(HIDDEN_OPTIONS)
    assert not listed & set(HIDDEN_OPTIONS)


@pytest.mark.parametrize("option", HIDDEN_OPTIONS)
def test_fields_without_effect_are_no_options(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        app.run(["fit", option, "3"])
    assert stopped.value.code == 2
    assert "Unrecognized options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--fit.epochs", "0", "epochs must be at least 1, got 0."),
        ("--data.limit", "0", "data.limit must be at least 1, got 0."),
        ("--model.name", "ella", "'ella' has no convolutions to relax. Set relax = false."),
        ("--fit.razor.structure", "dense", "structure must be one of"),
    ],
)
def test_a_wrong_value_is_explained_without_names_of_the_parser(
    option: str, value: str, message: str
) -> None:
    with pytest.raises(OptionError) as raised:
        app.run(["fit", option, value])
    assert str(raised.value).startswith(message)
    assert issubclass(OptionError, app.USER_MISTAKES)


def test_options_replace_entries_of_the_file_and_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[fit]\naugment = "flip_and_crop"\nepochs = 3\n[razor]\nlr = 0.5\n')
    configs: list[RunConfig] = []

    def stop(config: RunConfig, *_: object) -> None:
        configs.append(config)
        raise SystemExit

    monkeypatch.setattr("symrazor.cli.fit.run", stop)
    with pytest.raises(SystemExit):
        app.run(["fit", str(file), "--fit.epochs", "2", "--fit.razor.damping", "0.25"])
    (config,) = configs
    assert (config.fit.epochs, config.fit.razor.lr, config.fit.razor.damping) == (2, 0.5, 0.25)
    assert config.fit.augment is initial_config([str(file)]).fit.augment is not None
