"""Test the recovery experiment."""

import json
from pathlib import Path

from command import Call

from symrazor.experiments import lila_recovery


def test_recovery_by_command(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "a.json"
    small = ("lila-recovery", "--small", "--n", "40", "--epochs", "2", "--json", str(file))
    text = call("experiment", *small, "--rows", "flip 1/*", "--average", "probabilities").stdout
    assert [line.split(" | ")[1] for line in text.splitlines()[2:]] == [*lila_recovery.METHODS]
    second_text = call("experiment", *small, "--rows", "rotation 0/none").stdout
    assert "| flip 1 | learned | left-right flip (probability)" in second_text
    runs = json.loads(file.read_text())["runs"]
    assert [r["average"] for r in runs if r["row"] == "flip 1/learned"] == ["probabilities"]
    assert len(runs) == 5 and all(len(r["starts"]) == 2 for r in runs if "starts" in r)
