"""Experiments on learned invariances: their small versions run, merge and refuse."""

import pytest

from symrazor.experiments import lila, lila_recovery, lila_resnet, lila_small_data
from symrazor.experiments.__main__ import main


@pytest.mark.parametrize("name", ["lila_recovery", "lila_resnet"])
def test_unknown_rows_raise(name: str) -> None:
    module = {"lila_recovery": lila_recovery, "lila_resnet": lila_resnet}[name]
    with pytest.raises(ValueError, match="No row matches"):
        module.run(lila.Options(small=True, rows=("nonsense",)))


def test_missing_data_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="Use --data DIR"):
        lila_small_data.run(lila.Options(rows=("mnist/312/none",)))
    with pytest.raises(SystemExit, match="2"):
        main(["lila-resnet", "--rows", "none"])
    assert "Use --data DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["lila-resnet", "--average", "medians"])
