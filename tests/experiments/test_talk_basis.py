"""The experiment on the first part of the talk: its claims and its files."""

import json
from pathlib import Path

import pytest
import torch

from symrazor.experiments import talk_basis
from symrazor.experiments.__main__ import main
from symrazor.experiments.talk_basis import Results, same_order


def test_order_by_evidence_is_the_order_by_test_error() -> None:
    for seed in range(3):
        results = Results()
        talk_basis.four_panels(results, seed)
        assert same_order(results.panels)
        by_name = {row["model"]: row for row in results.panels}
        best_fit = min(results.panels, key=lambda row: row["train"])
        best = max(results.panels, key=lambda row: row["log_evidence"])
        assert best is by_name["medium, symmetric"]
        assert (
            best_fit is by_name["high frequencies"]
        )  # the training error chooses the worst but one


def test_training_error_falls_with_size_but_test_error_does_not() -> None:
    results = Results()
    talk_basis.error_by_size(results, 0, repeats=2)
    plain = [row for row in results.sizes if not row["symmetric"]]
    symmetric = [row for row in results.sizes if row["symmetric"]]
    for rows in (plain, symmetric):
        assert rows[-1]["train"] < rows[0]["train"]
    assert plain[-1]["test"] > 2 * plain[0]["test"]
    assert plain[-1]["train"] < symmetric[-1]["train"]  # the loss prefers no symmetry
    assert symmetric[-1]["test"] < plain[-1]["test"]


def test_command_writes_tables_json_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, figure = tmp_path / "new" / "a.json", tmp_path / "a.png"
    main(["talk-basis", "--small", "--seed", "1", "--json", str(file), "--figure", str(figure)])
    text = capsys.readouterr().out
    assert "| medium, symmetric | " in text and "-16.97" in text
    assert "The order by evidence equals the order by test error." in text
    document = json.loads(file.read_text())
    assert document["experiment"] == "talk-basis" and document["deep"] == []
    assert document["amounts"]["evidence amount"][-1] > 0.9
    assert document["amounts"]["likelihood amount"][-1] < 0.5
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_deep_network_by_three_objectives() -> None:
    """Maximum likelihood fits best and generalises worst; both evidences lower the frequency."""
    results = Results()
    talk_basis.deep_demo(results, 0)
    loss, laplace, bound = results.deep
    assert loss["train"] < min(laplace["train"], bound["train"])
    assert loss["test"] > 2 * max(laplace["test"], bound["test"])
    assert max(laplace["omega2"], bound["omega2"]) < loss["omega2"]


def test_the_true_function_is_even() -> None:
    x, y = talk_basis.sample(5, 0)
    assert x.shape == (5, 1) and y.shape == (5,)
    assert torch.equal(talk_basis.truth(x), talk_basis.truth(-x))
