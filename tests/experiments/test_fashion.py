"""Test the Fashion-MNIST experiment."""

import json
from pathlib import Path

import pytest

from symrazor.experiments import fashion


@pytest.mark.usefixtures("work_clock")
def test_fashion_experiment_small(tmp_path: Path) -> None:
    """A few seconds of it on the embedded digits: four rows, and a verdict."""
    file = tmp_path / "a.json"
    text = fashion.run(fashion.Options(small=True, minutes=0.03, json=file))
    rows = json.loads(file.read_text())["rows"]
    assert rows[-1]["network"] == "plain CNN"
    assert rows[-1]["accuracy"] > 0.5
    assert rows[-1]["data"] == 1437
    assert "translation" in text
    assert text.count("\n| ") == len(rows)
    with pytest.raises(ValueError, match="files of Fashion-MNIST"):
        fashion.run(fashion.Options())


@pytest.mark.slow
@pytest.mark.usefixtures("work_clock")
def test_fashion_experiment_for_a_minute() -> None:
    """On the embedded digits: what discovery delivers is no worse."""
    text = fashion.run(fashion.Options(small=True, minutes=1))
    rows = [line.split("|") for line in text.splitlines()[2:] if line.startswith("|")]
    longer = [row for row in rows if "the rest of the time" in row[1]]
    delivered, plain = (float(row[4]) for row in ((longer or rows)[0], rows[-1]))
    assert delivered > plain - 2, text
