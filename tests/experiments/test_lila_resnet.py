"""Test the ResNet experiment."""

import json
from pathlib import Path

from command import Call

from symrazor.experiments import lila_resnet


def test_resnet_by_command(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "a.json"
    options = ("--small", "--n", "24", "--epochs", "1", "--json", str(file))
    text = call("experiment", "lila-resnet", *options).stdout
    assert "| learned | rotation" in text and "| none |" in text
    narrow, wide, none = json.loads(file.read_text())["runs"]
    assert set(narrow["widths"]) == {*lila_resnet.STARTS["learned/narrow"]} and not none["widths"]
    best = min(narrow, wide, key=lambda r: r["evidence"])
    (learned,) = [line for line in text.splitlines() if line.startswith("| learned |")]
    assert f" {best['nll']:.4g} | {best['evidence']:.4g} |" in learned
