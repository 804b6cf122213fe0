"""Trajectories and their transitions: in memory, from NPZ and CSV files, or simulated."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.core.files import reader, reserve
from symrazor.data.binary_files import read_archive
from symrazor.data.csv_files import FIRST_UNNAMED_COLUMN, PADDED_COPIES, Columns, read_columns
from symrazor.data.csv_files import read_trajectories as parse_trajectories
from symrazor.data.times import extrapolate_times
from symrazor.dynamics.mechanics import solve
from symrazor.dynamics.systems import System

STATES_KEYS = ("states", "trajectories", "x")
"""Names of the array of states in an NPZ file; the first that is present is read."""
TIMES_KEYS = ("times", "time", "t")
ACCELERATION = re.compile(r"a\d+")


@dataclass(frozen=True)
class Trajectories:
    """B trajectories of T states each; see `Trajectories.of`.

    Args:
        states: [B, T, 2n], float64.
        times: [B, T], increasing along each row.
        observed: [B, T], False where a state is missing.
    """

    states: Float[Tensor, "b t d"]
    times: Float[Tensor, "b t"]
    observed: Bool[Tensor, "b t"]

    @classmethod
    def of(cls, states: Tensor, times: Tensor, observed: Tensor | None = None) -> "Trajectories":
        """Check states and times; repeat shared times and mark NaN states as missing.

        Raise ValueError for shapes that do not fit, times that do not increase, or infinite states.
        The message names the trajectory and the row.
        """
        if states.ndim != 3 or states.shape[1] < 2:
            raise ValueError(
                "states must have shape [trajectories, times >= 2, 2n], got "
                f"{list(states.shape)}. Stack trajectories of equal length, or pad them with NaN."
            )
        states64, clock = states.double(), times.double()
        if clock.ndim == 1:
            clock = clock.expand(len(states64), -1)
        if clock.shape != states64.shape[:2]:
            raise ValueError(
                f"times must have shape [{states64.shape[1]}] or {list(states64.shape[:2])}, "
                f"got {list(times.shape)}."
            )
        _check_times_increase(clock)
        infinite = torch.isinf(states64).any(-1)
        if infinite.any():
            b, t = (int(i) for i in infinite.nonzero()[0])
            raise ValueError(
                f"Infinite state in trajectory {b}, row {t}. Mark missing states with NaN."
            )
        present = torch.isfinite(states64).all(-1)
        if observed is not None:
            if observed.shape != present.shape or observed.dtype != torch.bool:
                raise ValueError(
                    f"observed must be a boolean tensor of shape {list(present.shape)}, got "
                    f"{observed.dtype} of shape {list(observed.shape)}."
                )
            present = present & observed
        return cls(states64, clock, present)

    @property
    def phase(self) -> int:
        """Number of entries of a state, 2n."""
        return self.states.shape[2]

    def __len__(self) -> int:
        return len(self.states)

    def with_noise(self, variance: float, seed: int) -> "Trajectories":
        """Return a copy with independent normal noise on every state; `variance` is at least 0."""
        _check_variance(variance)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.states.shape, generator=generator, dtype=torch.float64)
        return Trajectories(self.states + variance**0.5 * noise, self.times, self.observed)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Trajectories":
        """Apply a function to states, times and mask."""
        return Trajectories(*(function(part) for part in (self.states, self.times, self.observed)))


def _check_variance(variance: float) -> None:
    if not variance >= 0:
        raise ValueError(f"The noise variance must not be negative, got {variance}.")


def _check_times_increase(clock: Float[Tensor, "b t"]) -> None:
    wrong = ~(clock.diff(dim=1) > 0) | clock[:, 1:].isinf()  # NaN compares as False
    if wrong.any():
        b, t = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"Times must be finite and increase, got {clock[b, t]:g} then {clock[b, t + 1]:g} in "
            f"trajectory {b}, rows {t} and {t + 1}. Sort the rows and drop duplicates."
        )


@dataclass(frozen=True)
class Transitions:
    """N data for training: an initial state and the H states that follow it.

    Args:
        x: [N, 2n], initial states.
        y: [N, H, 2n], the states that follow.
        gaps: [N, H], time since the previous state.
        observed: [N, H], 1 where y was observed, else 0.
    """

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n h d"]
    gaps: Float[Tensor, "n h"]
    observed: Float[Tensor, "n h"]

    def __len__(self) -> int:
        return len(self.x)

    def at(self, index: Tensor) -> "Transitions":
        """Return the transitions with these indices."""
        return Transitions(self.x[index], self.y[index], self.gaps[index], self.observed[index])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Transitions":
        """Convert to a device and a dtype."""
        tensors = (self.x, self.y, self.gaps, self.observed)
        return Transitions(*(tensor.to(device, dtype) for tensor in tensors))


def transitions(
    data: Trajectories, noise: float = 0.0, seed: int = 0, horizon: int = 1
) -> Transitions:
    """Return every window of `horizon` steps that starts at an observed state.

    Args:
        data: the trajectories.
        noise: variance of normal noise added to the targets, drawn once.
        seed: of the noise.
        horizon: number of steps per window; the paper uses 1.

    Raises:
        ValueError: there is no such window, or the variance is negative.
    """
    _check_variance(noise)
    length = data.states.shape[1]
    if not 1 <= horizon < length:
        raise ValueError(f"horizon must be between 1 and {length - 1} steps, got {horizon}.")
    n_starts = length - horizon
    index = torch.arange(n_starts)[:, None] + torch.arange(1, horizon + 1)
    x = data.states[:, :n_starts].flatten(0, 1)
    y = data.states[:, index].flatten(0, 1)
    gaps = data.times.diff(dim=1)[:, index - 1].flatten(0, 1)
    observed = data.observed[:, index].flatten(0, 1)
    use = data.observed[:, :n_starts].flatten() & observed.any(1)
    if not use.any():
        raise ValueError("No two consecutive states are observed: there is nothing to learn from.")
    generator = torch.Generator().manual_seed(seed)
    y = y + noise**0.5 * torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device)
    return Transitions(x[use], torch.nan_to_num(y)[use], gaps[use], observed.to(y)[use])


def velocities(data: Trajectories, velocity: Tensor | None = None) -> Transitions:
    """Return states and their velocities, the data of derivative matching.

    Args:
        data: the trajectories.
        velocity: measured velocities [B, T, 2n]. By default second-order central differences on
            the (possibly irregular) times, which leave out the first and the last state.

    Raises:
        ValueError: no state has a velocity.
    """
    states, observed = data.states, data.observed
    if velocity is None:
        velocity, _ = _central_differences(states, data.times)
        observed = observed[:, 1:-1] & observed[:, :-2] & observed[:, 2:]
        states = states[:, 1:-1]
    use = observed.flatten() & torch.isfinite(velocity).all(-1).flatten()
    if not use.any():
        raise ValueError("No three consecutive states are observed: there is no velocity to learn.")
    x, y = states.flatten(0, 1)[use], velocity.flatten(0, 1)[use]
    ones = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
    return Transitions(x, y[:, None], ones, ones)


def _central_differences(states: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Return second-order differences at all inner times, and the rates between two times."""
    gaps = times.diff(dim=1)[..., None]
    rates = states.diff(dim=1) / gaps
    before, after = gaps[:, :-1], gaps[:, 1:]
    return (rates[:, :-1] * after + rates[:, 1:] * before) / (before + after), rates


def simulate(
    system: System, count: int, steps: int, dt: float, seed: int, tolerance: float = 1e-10
) -> Trajectories:
    """Simulate `count` trajectories of `steps` steps from the system's initial states.

    Raises FloatingPointError if the tolerance is not reached.
    """
    if count < 1 or steps < 1 or not dt > 0:
        raise ValueError(
            f"simulate needs count >= 1, steps >= 1 and dt > 0, got {count}, {steps} and {dt}."
        )
    generator = torch.Generator().manual_seed(seed)
    start = system.start(count, generator)
    times = dt * torch.arange(steps + 1, dtype=torch.float64)
    return Trajectories.of(solve(system.field, start, times, tolerance), times)


def noise_variance(data: Trajectories) -> Float[Tensor, "d"]:
    r"""Estimate the noise variance of each entry of a state, from differences along trajectories.

    The k-th divided difference $\sum_i w_i x_i$, $w_i \propto \prod_{j \ne i} 1/(t_i - t_j)$ with
    $\sum_i w_i^2 = 1$, of independent noise has the variance $\sigma^2$. The motion adds to it, so
    every k overestimates; the smallest value over k = 1, 2, 3 is returned. No model is needed.
    """
    states = torch.where(data.observed[..., None], data.states, torch.nan).cpu()
    clock = data.times.cpu()
    estimates = [states.new_full(states.shape[-1:], torch.inf)]
    for k in range(1, min(3, states.shape[1] - 1) + 1):
        windows, times = states.unfold(1, k + 1, 1), clock.unfold(1, k + 1, 1)
        weights = divided_difference_weights(times)[..., None, :]
        differences = (weights * windows).sum(-1).flatten(0, 1)
        differences = differences[differences.isfinite().all(-1)]
        if len(differences):
            estimates.append(differences.square().mean(0))
    return torch.stack(estimates).amin(0)


def divided_difference_weights(times: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    """Return the weights of the divided difference over these times, with unit norm."""
    gaps = times[..., :, None] - times[..., None, :]
    gaps = gaps / gaps.abs().amax((-2, -1), keepdim=True)
    gaps = gaps + torch.eye(times.shape[-1], dtype=times.dtype)  # skip the factor j = i
    return torch.nn.functional.normalize(1 / gaps.prod(-1), dim=-1)


def observed_states(data: Trajectories) -> Float[Tensor, "n d"]:
    """Return all observed states in float64 on the CPU."""
    return data.states[data.observed].double().cpu()


def interleave(data: Trajectories, stride: int) -> Trajectories:
    """Split each trajectory into `stride` interleaved ones of every `stride`-th state."""
    length = data.states.shape[1] // stride * stride

    def split_steps(values: Tensor) -> Tensor:
        parts: Tensor = values[:, :length].unflatten(1, (-1, stride))
        return parts.transpose(1, 2).flatten(0, 1)

    return data.map(split_steps)


def split(data: Trajectories, seed: int) -> tuple[Trajectories, Trajectories]:
    """Hold out a random fifth of the trajectories; with fewer than five, use all for both parts."""
    count = len(data)
    if count < 5:
        return data, data
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held_out, training = order[: count // 5], order[count // 5 :]
    return data.map(lambda part: part[training]), data.map(lambda part: part[held_out])


# ------------------------------------------------------------------------------------------- files


@reader
def read_trajectories(path: Path | str, positions: bool = False) -> Trajectories:
    """Read trajectories from a file.

    - `.npz`: "states" [B, T, 2n], with NaN for missing states, and "times" [T] or [B, T].
    - `.csv`: a header, then rows `trajectory,time,q1,...,qn,p1,...,pn`, sorted by time on reading.
      Empty cells are missing states, and trajectories may differ in length.
    - `.txt`: a header such as `% trial t o1 o2 w1 w2`, then numbers between spaces, as in the
      pendulum data of Schmidt and Lipson (2009). Accelerations (a1, a2, ...) are left out.

    Args:
        path: the file.
        positions: whether states are positions only; momenta are then finite differences, see
            `with_velocities`.

    Raises:
        ValueError: unsupported format or invalid content; the message names the row.
        OSError: the file does not exist.
    """
    path = Path(path)
    if path.suffix.lower() == ".npz":
        states, times = _read_npz(path)
        times = extrapolate_times(states, times)
    elif path.suffix.lower() == ".csv":
        columns = read_columns(path)
        if FIRST_UNNAMED_COLUMN in columns:
            first = ",".join(fields[0] for fields in columns.values())
            raise ValueError(
                f"{path.name} needs a header trajectory,time,q1,...,p1,... but starts with "
                f"{first!r}."
            )
        states, times = parse_trajectories(columns, path)
    elif path.suffix.lower() == ".txt":
        states, times = parse_trajectories(_read_text_columns(path), path)
    else:
        raise ValueError(f"{path.name}: trajectories must be in a .npz, .csv or .txt file.")
    if positions:
        states = with_velocities(states, times)
    return Trajectories.of(states, times)


def with_velocities(states: Tensor, times: Tensor) -> Tensor:
    """Append second-order finite differences: positions [B, T, n] -> (q, dq/dt) [B, T, 2n].

    Velocities equal momenta only for unit masses, and differences amplify noise; callers should
    warn about both. Fewer than three times raise ValueError.
    """
    if states.ndim != 3 or states.shape[1] < 3:
        raise ValueError(
            "Finite differences need positions of shape [trajectories, times >= 3, n], got "
            f"{list(states.shape)}."
        )
    q = states.double()
    inner, rates = _central_differences(q, times.double().expand(len(q), -1))
    first = rates[:, :1] + (rates[:, :1] - inner[:, :1])
    last = rates[:, -1:] + (rates[:, -1:] - inner[:, -1:])
    return torch.cat([q, torch.cat([first, inner, last], dim=1)], dim=2)


def _read_text_columns(path: Path) -> Columns:
    """Return the columns of numbers between spaces, with their names in the first line."""
    reserve(PADDED_COPIES * path.stat().st_size, path)
    try:
        header, *lines = path.read_text(encoding="utf-8").strip().splitlines()
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path.name} is empty, or not UTF-8 text.") from error
    names = header.lstrip("% ").lower().split()
    rows = [line.split() for line in lines if line.strip()]
    if not header.startswith("%") or len(names) < 3:
        raise ValueError(
            f"{path.name} needs a first line such as '% trial t o1 o2 w1 w2', got {header[:40]!r}."
        )
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise ValueError(
                f"{path.name}, data row {number}: {len(row)} numbers for {len(names)} columns."
            )
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
    if not columns:
        raise ValueError(f"{path.name} has no data rows.")
    return {name: column for name, column in columns.items() if not ACCELERATION.fullmatch(name)}


def _read_npz(path: Path) -> tuple[Tensor, Tensor]:
    arrays = read_archive(path, (), (*STATES_KEYS, *TIMES_KEYS))
    states = next((arrays[name] for name in STATES_KEYS if name in arrays), None)
    times = next((arrays[name] for name in TIMES_KEYS if name in arrays), None)
    if states is None or times is None:
        raise ValueError(
            f"{path.name} needs arrays 'states' and 'times', but has "
            f"{', '.join(arrays) or 'neither'}. "
            "Write it with np.savez(file, states=..., times=...)."
        )
    for name, array in (("states", states), ("times", times)):
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{path.name}: {name!r} must hold numbers, got {array.dtype}.")
        reserve(PADDED_COPIES * 8 * array.size, path)
    return torch.from_numpy(states.astype(np.float64)), torch.from_numpy(times.astype(np.float64))
