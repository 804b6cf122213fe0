"""Times of states that are missing."""

from jaxtyping import Float
from torch import Tensor


def continued(states: Tensor, times: Tensor) -> Tensor:
    """Times after the end of a trajectory, where arrays are padded with NaN, go on as before.

    Args:
        states: [n, time, d], with NaN where one is missing.
        times: [n, time], or any others, which are returned as they are.

    Returns:
        The times; what is still NaN belongs to a state that was seen, or stands before one.
    """
    if times.ndim != 2 or times.shape != states.shape[:2] or not times.isnan().any():
        return times
    found = times.clone()
    for row, path in zip(found, states, strict=True):
        _continue(row, path)
    return found


def _continue(times: Float[Tensor, "t"], path: Tensor) -> None:
    known = (~times.isnan()).nonzero()[:, 0]
    if len(known) == 0:
        return
    last = int(known[-1])
    if not path[last + 1 :].isnan().any(1).all():
        return
    first = int(known[0])
    gap = (times[last] - times[first]) / (last - first) if last > first else 1.0
    for step in range(last + 1, len(times)):
        times[step] = times[step - 1] + gap
