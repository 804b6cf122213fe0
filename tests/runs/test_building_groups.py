"""Store groups from files in the run folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from run_case import SMALL, small

from symrazor.runs import load_run, run
from symrazor.runs.building import make_data
from symrazor.runs.config import RunConfig


def test_group_files_are_copied_to_the_run_folder(tmp_path: Path) -> None:
    """The run folder can be moved, and read without the original files."""
    place = tmp_path / "given"
    place.mkdir()
    mirror = place / "mirror.json"
    mirror.write_text('{"name": "mirror", "matrices": [[[-1, 0], [0, 1]]]}')
    text = SMALL.replace("width = 2", 'width = 2\ngroups = ["translation", "mirror.json"]')
    config = small(place, text)
    assert config.model.groups == ("translation", str(mirror))
    trained = run(config, tmp_path / "run")
    assert "mirror" in trained.reading.layers[0].equivariance_error
    written = (tmp_path / "run" / "config.toml").read_text()
    assert 'groups = ["translation", "group-0.json"]' in written
    mirror.unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    again = load_run(tmp_path / "moved")
    x = config_data(config)
    assert torch.equal(again.model(x), trained.model.eval()(x))
    mirror.write_text('{"name": "mirror", "matrices": [[[1, 0], [0, -1]]]}')
    with pytest.raises(ValueError, match="differs from .*group-0.json, with which the run began"):
        run(config, tmp_path / "moved", resume=True)
    with pytest.raises(OSError, match=r"not.json"):
        run(replace(config, model=replace(config.model, groups=("not.json",))), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def config_data(config: RunConfig) -> torch.Tensor:
    return make_data(config.data)[0][0][:5]


def test_dense_networks_are_relaxed_over_groups_from_files(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=(x.sum(1) > 0).astype(np.int64))
    (tmp_path / "ring.json").write_text('{"permutations": [[1, 2, 3, 0]]}')
    text = """
[data]
name = "npz"
path = "d.npz"
[model]
name = "fully-connected"
width = 8
groups = ["ring.json"]
[fit]
epochs = 1
"""
    trained = run(small(tmp_path, text), tmp_path / "run")
    assert [p.path for p in trained.reading.layers[0].paths] == ["Linear[ring]", "FC"]
    assert load_run(tmp_path / "run").reading.layers[0].paths[0].group == "ring"
    with pytest.raises(ValueError, match="'fully-connected' has no convolutions to relax"):
        small(tmp_path, text.replace("ring.json", "translation"))
