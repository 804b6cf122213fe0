"""ELLA's Table 3 and the share of rotations."""

from pathlib import Path

import pytest
import torch

from symrazor.data import digits as embedded
from symrazor.experiments import ella, ella_tables, rotated_share
from symrazor.experiments.__main__ import main
from symrazor.experiments.ella import Options
from symrazor.experiments.results import add_runs, read_runs
from symrazor.layers.ella import ella_network


def test_table_3_has_the_papers_size_and_a_tenth_of_its_epochs() -> None:
    network = ella_network("f-fc+conv+gconv", 3, 10, alpha=2)
    # the reference has 1,237,527: its first block sees four turned copies of the image
    assert sum(p.numel() for p in network.parameters()) == 1_114_810
    rows = ella_tables.TABLE_3.rows
    assert len(rows) == 10 and sum(row.small for row in rows) == 6
    for row in rows:
        epochs = ella_tables.config_3(row, small=False).epochs
        assert epochs <= (100 if "mnist" in row.task else 400)
    (row,) = (row for row in rows if row.name == "rotated-mnist/laplace")
    assert row.paper == {"accuracy": 95.55, "nll": 0.136, "evidence": 0.896}


def test_transformed_digits_are_the_same_in_every_run_of_a_seed() -> None:
    options = Options(small=True)
    (x, y), (xt, _) = ella_tables.data_3("mnist", options)
    for task in ("translated-mnist", "rotated-mnist"):
        (transformed, labels), (repeated, _) = (
            ella_tables.data_3(task, options)[0] for _ in range(2)
        )
        assert torch.equal(transformed, repeated) and torch.equal(labels, y)
        assert transformed.shape == x.shape == (len(y), 1, 16, 16)
        assert not torch.allclose(transformed, x)
        other = ella_tables.data_3(task, options, 1)[0][0]
        assert not torch.allclose(transformed, other)
    assert xt.shape[1:] == x.shape[1:]


def test_shares_are_shown_with_the_papers() -> None:
    shares_by_path = {"FFC": 0.1, "Conv": 0.3, "GConv p4": 0.6}
    relative = {k: {"mean": v, "min": v / 2, "max": 0.9} for k, v in shares_by_path.items()}
    runs = [
        {"row": "mnist/laplace", "reading": {"relative_effective_parameters": relative}},
        {"row": "cifar-10/laplace", "error": "diverged"},
    ]
    lines = ella_tables.shares(runs).splitlines()
    assert lines[2:] == [
        "| mnist | 10 (5-90) | 10 (0-46) | 30 (15-90) | 15 (0-98) | 60 (30-90) | 75 (1-100) | 1 |"
    ]


def test_files_of_several_machines_are_merged_into_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files, three seeds: mean and deviation beside the paper, shares below."""
    relative = {k: {"mean": 0.3, "min": 0.1, "max": 0.5} for k in ella_tables.PATHS_3}
    for name, seeds in (("a", (0, 1)), ("b", (1, 2))):
        runs = [
            {
                **{"row": "rotated-mnist/laplace", "seed": seed, "small": False, "epochs": 60},
                **{"accuracy": 97.0 + seed, "nll": 0.1, "evidence": 0.3, "seconds": 9.0},
                **{"free_shares": [0.1], "config": {"optimizer": "sgd", "seed": seed}},
                "reading": {"relative_effective_parameters": relative},
            }
            for seed in seeds
        ]
        add_runs("ella-table3", tmp_path / f"{name}.json", runs)
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    main(["ella-table3", "--rows", "--merge", *files])
    text = capsys.readouterr().out
    assert "| rotated-mnist/laplace | 98.00 ± 1.00 | 95.55 | 0.100 | 0.136 |" in text
    assert "| rotated-mnist | 30 (10-50) | 8 (0-20) |" in text and text.strip().endswith("| 3 |")


def test_every_row_takes_changes_of_its_training() -> None:
    changed = Options(set=("optimizer=sgd", "lr=0.02"), epochs=7)
    for row in ella_tables.TABLE_3.rows:
        config = ella._config(ella_tables.config_3(row, False), row, changed, 1000)
        assert (config.optimizer, config.lr, config.epochs) == ("sgd", 0.02, 7)


@pytest.mark.slow
def test_table_3_on_the_digits(tmp_path: Path) -> None:
    file = tmp_path / "t3.json"
    options = Options(
        small=True, device="cpu", rows=("rotated-mnist/laplace",), epochs=2, json=file
    )
    text = ella_tables.TABLE_3.run(options)
    assert "| rotated-mnist | " in text
    (run,) = read_runs("ella-table3", file)
    errors = run["reading"]["layers"][0]["equivariance_error"]
    assert set(errors) == {"translation", "p4"}


def test_turned_digits_and_their_table() -> None:
    x, _ = embedded("train")
    transformed = rotated_share.turned(x, 1)
    back = torch.stack([torch.rot90(transformed, k, (2, 3)) for k in range(4)])
    assert bool((back == x).flatten(2).all(2).any(0).all())
    rows = [
        {"seed": 0, "data": kind, "share": share, "error": 1.0, "accuracy": 90.0}
        for kind, share in (("upright", 40.0), ("turned", 60.0))
    ]
    assert rotated_share.markdown(rows).endswith("in 1 of 1 seeds.")
    network = rotated_share.network(8, 1)
    assert network(x[:2]).shape == (2, 10)
    options = rotated_share.Options(images=1000)
    assert (options.width, options.config.epochs, options.config.batch_size) == (4, 40, 64)
    assert rotated_share.Options(small=True, epochs=3).config.epochs == 3
    assert rotated_share.Options().config.batch_size == 256
