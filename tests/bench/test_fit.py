"""Test the benchmark of `fit` on a few samples."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from symrazor.bench import fit as fit_bench


def test_bench_fit_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few samples, and skip the processes that measure memory and scaling."""
    monkeypatch.setattr(fit_bench, "memory", lambda o: [fit_bench.Row("peak", 1.6, "", "<= 1.5")])
    file = tmp_path / "rows.json"
    options = fit_bench.Options(alpha=1, images=8, batch=4, rounds=1, threads=1)
    options = replace(options, only=("times", "memory"))
    rows = fit_bench.main(replace(options, json=file))
    assert json.loads(file.read_text()) == [asdict(row) for row in rows]
    plain, epoch, estimate, *ratios, _ = (row.value for row in rows)
    total = (5 * epoch + estimate) / (5 * plain)
    expected = [epoch / plain, estimate / plain, total, estimate / (5 * epoch)]
    assert ratios == pytest.approx(expected)
    assert [row.unit for row in rows[:3]] == ["s"] * 3
    table = fit_bench.markdown(rows).splitlines()
    assert table[0] == "CPU, width 1, 8 images, batches of 4"
    assert table[-1] == "| peak | 1.6 | <= 1.5 | NO |"
    assert len(table) == 4 + len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "Device 'gpu' is not available"),
        (["--device", "cuda:99"], "Device 'cuda:99' is not available"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--only", "speed"], "takes some of times, memory, scaling, got speed"),
    ],
)
def test_bench_fit_rejects_wrong_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit_bench.command(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_bench_fit_measures_two_processes() -> None:
    """Each of two processes does about half of the work."""
    rows = fit_bench.scaling(fit_bench.Options(alpha=2, images=1000, batch=100, rounds=1))
    assert rows[1].value > 1.3
