"""Check the states and times of trajectories, and continue times over missing states."""

from torch import Tensor


def extrapolate_times(states: Tensor, times: Tensor) -> Tensor:
    """Continue the times [n, time] of trajectories that are padded with NaN at the end.

    Times of another shape are unchanged. A time that is still NaN belongs to an observed state, or
    precedes one.
    """
    if times.ndim != 2 or times.shape != states.shape[:2] or not times.isnan().any():
        return times
    extended = times.clone()
    for row, path in zip(extended, states, strict=True):
        known = (~row.isnan()).nonzero()[:, 0].tolist()
        if not known or not path[known[-1] + 1 :].isnan().any(1).all():
            continue
        first, last = known[0], known[-1]
        step = (row[last] - row[first]) / (last - first) if last > first else 1.0
        for number in range(last + 1, len(row)):
            row[number] = row[number - 1] + step
    return extended


def check_states(x: Tensor, times: Tensor | None, source: str) -> None:
    """Check states and times of trajectories; NaN marks a missing state."""
    infinite = x.isinf().any(2).nonzero()
    if len(infinite):
        raise ValueError(
            f"{source}, trajectory {int(infinite[0, 0])}, row {int(infinite[0, 1])}: an infinite "
            "state. Repair it, or mark it as missing with NaN."
        )
    if times is None:
        return
    if times.shape not in (x.shape[1:2], x.shape[:2]):
        raise ValueError(
            f"{source} has {x.shape[1]} steps, but times of shape {list(times.shape)}. Save one "
            "time for each step."
        )
    missing = (~times.isfinite()).nonzero()
    if len(missing):
        *trajectory, row = missing[0].tolist()
        raise ValueError(f"{source}, {_row_name(trajectory, row)}: no time. Fill it in.")
    not_increasing = (~(times.diff(dim=-1) > 0)).nonzero()
    if len(not_increasing):
        *trajectory, row = not_increasing[0].tolist()
        before, after = (float(times[(*trajectory, r)]) for r in (row, row + 1))
        action = "Sort the rows by time." if after < before else "Drop one of the two rows."
        raise ValueError(
            f"{source}, {_row_name(trajectory, row)} and row {row + 1}: times must increase, got "
            f"{before:.9g} and {after:.9g}. {action}"
        )


def _row_name(trajectory: list[int], row: int) -> str:
    return f"trajectory {trajectory[0]}, row {row}" if trajectory else f"row {row}"
