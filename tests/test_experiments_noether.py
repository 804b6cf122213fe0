"""The experiments on conserved quantities: their files and commands, with hardly any training."""

import json
from pathlib import Path

import pytest

from symrazor.experiments import (
    noether,
    noether_controls,
    noether_n_oscillators,
    noether_nbody,
    noether_oscillator,
)

KEYS = ("parallelness", "singular_values", "test_mse", "neg_elbo_per_datum")


def test_oscillator_writes_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = noether.Options(small=True, device="cpu", json=file, steps=4)
    text = noether_oscillator.run(options)
    document = json.loads(file.read_text())
    assert all(key in document for key in KEYS)
    assert set(document["models"]) == {"hnn", "learned", "oracle"}
    assert [run["model"] for run in document["runs"]] == ["hnn", "learned", "oracle"]
    assert document["models"]["oracle"]["total_parallelness"] == pytest.approx(1.0)
    assert "learned / oracle" in text and "Paper" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_experiments_run(tmp_path: Path) -> None:
    common = {"small": True, "device": "cpu", "steps": 2, "set": ("draws=2", "flows=2")}
    options = noether.Options(**common, models=("learned",), json=tmp_path / "n.json")  # type: ignore[arg-type]
    noether_n_oscillators.run(options, (1, 2))
    found = json.loads((tmp_path / "n-2.json").read_text())
    assert len(found["runs"][0]["recovered"]) == 4
    options = noether.Options(**common, models=("oracle",), json=tmp_path / "b.json")  # type: ignore[arg-type]
    assert "moved" in noether_nbody.run(options, noise=1e-2)
    options = noether.Options(**common, json=tmp_path / "c.json")  # type: ignore[arg-type]
    text = noether_controls.run(options)
    assert all(row in text for row in noether_controls.ROWS)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda o: noether_oscillator.run(noether.Options(models=("gp",))),
            "expected models among",
        ),
        (lambda o: noether_oscillator.run(noether.Options(set=("lr",))), "expected name=value"),
        (lambda o: noether_controls.run(o, ("planets",)), "expected rows among pendulum"),
    ],
)
def test_wrong_options_are_refused(run: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(noether.Options(small=True, steps=1, device="cpu"))  # type: ignore[operator]
