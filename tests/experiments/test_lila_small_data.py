"""Test the experiment on small data."""

from pathlib import Path

from command import Call


def test_small_data_by_command(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "a.json"
    options = ("--small", "--epochs", "1", "--rows", "mnist/100/a*", "--json", str(file))
    text = call("experiment", "lila-small-data", *options).stdout
    assert "| mnist | 100 | augerino |" in text
    assert file.with_suffix(".png").is_file()
