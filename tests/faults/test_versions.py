"""Run folders of earlier versions are read; those of newer ones are refused with their version."""

import json
from pathlib import Path

import numpy as np
import pytest
from harness.stored import reseal

from symrazor.cli import app as cli
from symrazor.core.version import __version__
from symrazor.inference.last_layer import UNCERTAINTY
from symrazor.runs.folder import read_document
from symrazor.runs.predictions import predict
from symrazor.runs.records import CONFIG, RAZOR, READING
from symrazor.runs.writing import DOCUMENT, MANIFEST, read_manifest
from symrazor.symmetry.architecture import ARCHITECTURE, WEIGHTS

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*/*"))


def _copy(source: Path, target: Path) -> Path:
    for file in source.rglob("*"):
        if file.is_file():
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    return target


def test_there_are_small_runs_of_this_version_with_all_kinds_of_files() -> None:
    own = [path for path in GOLDEN if path.parent.name.startswith(__version__)]
    assert len(own) >= 3, "Run: PYTHONPATH=src:tests/faults python -m harness.golden"
    names = {file.name for path in own for file in path.rglob("*") if file.is_file()}
    assert {DOCUMENT, ARCHITECTURE, WEIGHTS, UNCERTAINTY, CONFIG, READING, RAZOR} <= names
    assert sum(f.stat().st_size for g in GOLDEN for f in g.rglob("*") if f.is_file()) < 300_000


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: f"{path.parent.name} {path.name}")
def test_a_run_folder_of_an_earlier_version_is_read(golden: Path, tmp_path: Path) -> None:
    run = _copy(golden / "run", tmp_path / "run")
    expected = np.load(golden / "predictions.npy")
    found = predict(run, golden / "inputs.npz").values.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    cli.run(["report", str(run), "--quiet"])
    assert (run / "report.html").stat().st_size > 10_000
    cli.run(
        [
            "export",
            str(run),
            "--format",
            "safetensors",
            "--out",
            str(tmp_path / "n.safetensors"),
            "--quiet",
        ]
    )
    assert (tmp_path / "n.safetensors").stat().st_size > 100


def test_a_newer_run_folder_is_refused_with_the_version_needed(tmp_path: Path) -> None:
    golden = next(path for path in GOLDEN if path.name == "discover-vectors")
    run = _copy(golden / "run", tmp_path / "run")
    manifest = json.loads((run / MANIFEST).read_text())
    (run / MANIFEST).write_text(json.dumps(manifest | {"symrazor": "7.1"}))
    document = json.loads((run / "discover.json").read_text())
    (run / "discover.json").write_text(json.dumps(document | {"schema": 99}))
    reseal(run)
    with pytest.raises(ValueError, match=r"discover.json has schema 99, written by symrazor 7.1;"):
        read_document(run)
    (run / MANIFEST).write_text(json.dumps(manifest | {"symrazor": "7.1", "schema": 99}))
    with pytest.raises(ValueError, match=r"run.json has schema 99, written by symrazor 7.1;"):
        read_manifest(run)
