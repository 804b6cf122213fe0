"""Check trajectories in files, and states with velocities."""

from pathlib import Path

import numpy as np
import pytest
import torch

from symrazor.dynamics import systems
from symrazor.dynamics.trajectories import (
    read_trajectories,
    simulate,
    with_velocities,
)


def test_npz_and_csv_give_equal_trajectories(tmp_path: Path) -> None:
    data = simulate(systems.oscillators(), 3, 4, 0.2, seed=0)
    np.savez(tmp_path / "a.npz", states=data.states, times=data.times[0])
    lines = ["trajectory,time,q1,p1"]
    for b in range(3):
        for t in range(5):
            row = [b, *data.times[b, t : t + 1].tolist(), *data.states[b, t].tolist()]
            lines.append(",".join(repr(cell) for cell in row))
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    for name in ("a.npz", "a.csv"):
        read = read_trajectories(tmp_path / name)
        torch.testing.assert_close(read.states, data.states)
        torch.testing.assert_close(read.times, data.times)
    short = "\n".join([*lines[:8], "1,0.4,,"])  # trajectories of five and three states
    (tmp_path / "b.csv").write_text(short)
    read = read_trajectories(tmp_path / "b.csv")
    assert read.observed.sum(1).tolist() == [5, 2]
    assert (read.times.diff(dim=1) > 0).all()
    reversed_rows = "\n".join([lines[0], *reversed(lines[1:])])  # rows are sorted by time
    (tmp_path / "c.csv").write_text(reversed_rows.replace(",", ";"))
    read = read_trajectories(tmp_path / "c.csv")
    torch.testing.assert_close(read.states, data.states.flip(0))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "k,t,q,p\n0,0.0,1,2\n0,1.0,x,2\n", "column 'q', data row 2: not a number"),
        ("a.csv", "k,t,q,p\n0,0.0,1\n", "row 2: 3 fields, but the first row has 4"),
        ("a.csv", "k,t,q,p\n", "a.csv has fewer than two rows"),
        (
            "a.csv",
            "k,t,q,p\n0,1.0,1,2\n0,1.0,1,2\n",
            "rows 1 and 2: .* at time 1",
        ),
        ("a.csv", "k,s,q,p\n0,1.0,1,2\n0,1.0,1,2\n", "has no column 'time'"),
        ("a.dat", "", "must be in a .npz, .csv or .txt file"),
        ("a.csv", "0,0.0,1,2\n0,0.1,1,2\n", "needs a header .* starts with '0,0.0,1,2'"),
        ("a.npz", "junk", "a.npz as an .npz file with plain numbers"),
    ],
)
def test_invalid_files_raise(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_trajectories(tmp_path / name)


def test_npz_without_times_or_numbers_raises(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", states=np.zeros((2, 3, 2)))
    with pytest.raises(ValueError, match="needs arrays 'states' and 'times', but has states"):
        read_trajectories(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", states=np.array([["a"]]), times=np.zeros(1))
    with pytest.raises(ValueError, match="'states' must hold numbers"):
        read_trajectories(tmp_path / "b.npz")


def test_text_with_a_header_in_a_comment(tmp_path: Path) -> None:
    """The format of the double pendulum of Schmidt and Lipson."""
    file = tmp_path / "pendulum.txt"
    rows = ["0 0.0 1.0 2.0 -1.0 0.5 9 9", "0 0.1 1.1 2.1 -1.1 0.6 9 9", "1 5.0 3 4 5 6 9 9"]
    file.write_text("\n".join(["% trial t o1 o2 w1 w2 a1 a2", *rows, "1 5.1 3 4 5 7 9 9", ""]))
    data = read_trajectories(file)
    assert data.states[:, -1].tolist() == [[1.1, 2.1, -1.1, 0.6], [3.0, 4.0, 5.0, 7.0]]
    assert data.times.tolist() == [[0.0, 0.1], [5.0, 5.1]]
    for text, message in (
        ("trial t o1 w1\n0 0 1 1\n", "needs a first line such as '% trial t o1 o2 w1 w2'"),
        ("% trial t o1 w1\n0 0 1\n", "data row 1: 3 numbers for 4 columns"),
        ("% trial t o1 w1\n", "has no data rows"),
        ("", "is empty, or not UTF-8 text"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trajectories(file)


def test_csv_that_is_not_utf8_raises(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"k,t,q,p\n0,0,\xff,1\n")
    with pytest.raises(ValueError, match="a.csv as a UTF-8 CSV file"):
        read_trajectories(str(tmp_path / "a.csv"))


def test_finite_differences_are_exact_for_a_parabola() -> None:
    t = torch.tensor([0.0, 0.1, 0.3, 0.4, 0.6], dtype=torch.float64)
    q = (3 * t**2 - t)[None, :, None]
    states = with_velocities(q, t)
    torch.testing.assert_close(states[0, 1:-1, 1], (6 * t - 1)[1:-1])
    assert states.shape == (1, 5, 2)
    with pytest.raises(ValueError, match="times >= 3"):
        with_velocities(q[:, :2], t[:2])
