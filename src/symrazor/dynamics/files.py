"""Trajectories from files: NPZ or CSV, of equal length or not."""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from symrazor.data.csv_columns import MADE_UP, read_columns
from symrazor.data.csv_tables import read_trajectories as table_of_trajectories
from symrazor.data.times import continued
from symrazor.dynamics.trajectories import Trajectories

STATES = ("states", "trajectories", "x")
TIMES = ("times", "time", "t")


def read_trajectories(path: Path | str, positions: bool = False) -> Trajectories:
    """Read a file.

    - `.npz`: "states" [B, T, 2n] (NaN where one is missing) and "times" [T] or [B, T].
    - `.csv`: a header, then rows `trajectory,time,q1,...,qn,p1,...,pn`, sorted by time first; empty
      cells are missing states, and trajectories may differ in length.

    Args:
        path: the file.
        positions: the states are positions only; momenta become finite differences, see
            `with_velocities`.

    Raises:
        ValueError: another format or content; the row is named.
        OSError: no such file.
    """
    path = Path(path)
    if path.suffix.lower() == ".npz":
        states, times = _read_npz(path)
        times = continued(states, times)
    elif path.suffix.lower() == ".csv":
        states, times = _read_csv(path)
    else:
        raise ValueError(f"expected a .npz or .csv file with trajectories, got {path.name}")
    if positions:
        states = with_velocities(states, times)
    return Trajectories.of(states, times)


def with_velocities(states: Tensor, times: Tensor) -> Tensor:
    """Positions [B, T, n] -> (q, dq/dt) [B, T, 2n] by finite differences of second order.

    Velocities are momenta only if all masses are 1, and differences add noise: a caller should
    warn about both.

    Raises:
        ValueError: fewer than three times.
    """
    if states.ndim != 3 or states.shape[1] < 3:
        raise ValueError(
            f"expected positions [trajectories, times >= 3, n], got {tuple(states.shape)}"
        )
    q = states.double()
    clock = times.double().expand(len(q), -1)
    gaps, rates = clock.diff(dim=1)[..., None], q.diff(dim=1) / clock.diff(dim=1)[..., None]
    back, ahead = gaps[:, :-1], gaps[:, 1:]
    inner = (rates[:, :-1] * ahead + rates[:, 1:] * back) / (back + ahead)
    first = rates[:, :1] + (rates[:, :1] - inner[:, :1])
    last = rates[:, -1:] + (rates[:, -1:] - inner[:, -1:])
    return torch.cat([q, torch.cat([first, inner, last], dim=1)], dim=2)


def _read_npz(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as file:
            states = next((file[name] for name in STATES if name in file), None)
            times = next((file[name] for name in TIMES if name in file), None)
            names = ", ".join(file.files)
    except (ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"expected a NumPy archive of numbers, got {path.name} ({error}); do write it with "
            "np.savez(file, states=..., times=...), padding short trajectories with NaN"
        ) from error
    if states is None or times is None:
        raise ValueError(f"expected arrays 'states' and 'times' in {path.name}, got {names}")
    for name, array in (("states", states), ("times", times)):
        if array.dtype.kind not in "fiu":
            raise ValueError(f"expected numbers in {name!r} of {path.name}, got {array.dtype}")
    return torch.from_numpy(states.astype(np.float64)), torch.from_numpy(times.astype(np.float64))


def _read_csv(path: Path) -> tuple[Tensor, Tensor]:
    columns = read_columns(path)
    if MADE_UP in columns:
        first = ",".join(fields[0] for fields in columns.values())
        raise ValueError(
            f"expected a header trajectory,time,q1,...,p1,... in {path.name}, got {first!r}"
        )
    return table_of_trajectories(columns, path)
