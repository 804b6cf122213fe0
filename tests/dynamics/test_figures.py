"""Check the animations of trajectories."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from symrazor.dynamics import figures, systems
from symrazor.dynamics.trajectories import (
    simulate,
)


def test_animations_are_gif_files_that_move(tmp_path: Path) -> None:
    data = simulate(systems.oscillators(), 2, 7, 0.2, seed=0)
    motion = data.states.transpose(0, 1)
    file = figures.motion_animation({"true": motion, "same": motion}, tmp_path / "m.gif")
    with Image.open(file) as picture:
        assert picture.format == "GIF" and picture.n_frames == 8
        panels = np.asarray(picture.convert("RGB"))
        half = panels.shape[1] // 2
        picture.seek(4)
        later = np.asarray(picture.convert("RGB"))
    assert (panels != later).any(-1).sum() > 20  # it moves
    assert panels[:, :half].shape == panels[:, half : 2 * half].shape
    with pytest.raises(ValueError, match=r"must have the same length, got \[5, 8\]"):
        figures.motion_animation({"a": motion, "b": motion[:5]}, tmp_path / "x.gif")


def test_animation_panels_share_axis_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    panels = figures._panels
    monkeypatch.setattr(figures, "_panels", lambda *size: drawn.append(panels(*size)) or drawn[-1])
    angle = torch.linspace(0.0, 3.0, 4)[:, None]
    true = torch.stack([100 + angle.cos(), angle.sin()], dim=-1)  # centred far from zero
    for other, widest in ((true / 1.001, 2.5), (50 * true, 4.5), (true[:1].expand(4, 1, 2), 2.3)):
        figures.motion_animation({"true": true, "learned": other}, tmp_path / "m.gif")
        left, right = drawn[-1][1]
        assert left.get_xlim() == right.get_xlim() and left.get_ylim() == right.get_ylim()
        low, high = left.get_xlim()
        assert low < 99.01 and high > 101 and high - low < widest
    still = torch.ones(3, 1, 2)
    figures.motion_animation({"true": still}, tmp_path / "m.gif")
    low, high = drawn[-1][1][0].get_xlim()
    assert low < 1 < high
