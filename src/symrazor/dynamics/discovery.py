"""Discover the conserved quantities of trajectories, and a simulator of them."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.data.times import extrapolate_times
from symrazor.dynamics.config import DiscoverConfig, TrainConfig
from symrazor.dynamics.conserved import Quadratic
from symrazor.dynamics.delivery import candidates, most_accurate
from symrazor.dynamics.findings import Findings
from symrazor.dynamics.hamiltonian import FlowTimes, HamiltonianNetwork, SymmetrisedNetwork
from symrazor.dynamics.invariants import check_coordinates, find_conserved
from symrazor.dynamics.journal import Journal
from symrazor.dynamics.mechanics import degrees_of_freedom
from symrazor.dynamics.network_result import NetworkResult, Units, describe_quantities
from symrazor.dynamics.noether import Noether, describe_findings
from symrazor.dynamics.noise import noise_estimate
from symrazor.dynamics.observables import coordinate_names as canonical_names
from symrazor.dynamics.result import Discovered
from symrazor.dynamics.rollouts import baselines, compare_rollouts
from symrazor.dynamics.selection import train_and_select
from symrazor.dynamics.trained import Record, Trained, mean_squared_error
from symrazor.dynamics.training import train
from symrazor.dynamics.trajectories import (
    Trajectories,
    Transitions,
    interleave,
    noise_variance,
    observed_states,
    split,
    transitions,
    with_velocities,
)
from symrazor.training.loop import clock, fraction_bar

TrajectoryInput = Float[Tensor, "b t d"] | np.ndarray | Trajectories
Progress = Callable[[float, str], None]
"""Called with the fraction done and a status line."""
NETWORK_NAME = "Hamiltonian network"
LEARNING_RATE = 2e-2
"""For networks of width 32 and 64."""
MAX_GAP = 3.0
"""Longest time between two states to learn from, in units in which states change by about 1."""
MAX_INTEGRATOR_STEP = 1.0
"""Longest step of the integrator, in the same units."""
SELECTION_TIME_FRACTION = 0.85
"""Fraction of the time for selecting quantities; the network without gets the remainder."""
MAX_OFFSET_STDS = 2.0
"""Entries whose mean is further from zero than this many standard deviations are centred."""
MIN_STEP_CHANGE = 0.08
"""Smallest change per step to learn from, without noise and relative to the size of states."""
LARGE_STEP_CHANGE = 0.5
"""Change per step, relative to the size of states, that is large enough whatever the noise."""
MIN_STATES = 4
"""States that every trajectory keeps, at least, when states are taken further apart."""


def discover(
    trajectories: TrajectoryInput,
    times: Tensor | Sequence[float] | np.ndarray | None = None,
    config: DiscoverConfig | None = None,
    progress: Progress | bool | None = None,
    **changes: Any,
) -> Discovered:
    """Learn conserved quantities and a simulator from trajectories alone.

    The equations of motion are fitted and searched for conserved quantities, which a noise test
    has to confirm (`find_conserved`). If this cannot decide, because trajectories are few, short or
    noisy, or if no equations fit, a Hamiltonian network is trained, and its evidence selects
    quadratic quantities (`train_and_select`).

    Args:
        trajectories: states [B, T, d] as a tensor or array, with NaN for missing states, or
            the `Trajectories` of `read_trajectories`. Positions come first, then the same number of
            momenta, for everything about energies and groups.
        times: [T] or [B, T]; leave out for `Trajectories`, which have their own.
        config: all options. Single options can be given by name, as in
            `discover(states, times, minutes=2, seed=1)`.
        progress: called with a fraction and a status line; or whether to show a progress bar, by
            default if the output is a terminal.
        **changes: single options of `DiscoverConfig`.

    Raises:
        ValueError: invalid options or trajectories; the message names the row.
        KeyboardInterrupt: SIGINT; with `resume`, after writing a checkpoint.
        SystemExit: SIGTERM with `resume`, after writing a checkpoint.
    """
    started = clock.now()
    config = (config or DiscoverConfig()).change(**changes)
    if config.positions:
        warnings.warn(
            "momenta are finite differences of positions: exact for unit masses only, and noisier "
            "than measured momenta",
            stacklevel=2,
        )
    data = as_trajectories(trajectories, times, config.positions)
    if data.phase == 1:
        degrees_of_freedom(data.phase)  # raises the error
    if data.phase % 2 == 0:
        choose_units(interleave(data, choose_stride(data)))  # rejects states without motion
    check_coordinates(data)
    names = coordinate_names(data.phase)
    findings, reason = _search(data, names, config.seed)
    network = None
    with nullcontext(progress) if callable(progress) else fraction_bar(progress) as report:
        if _needs_network(findings, data, config):
            network = _learn_network(data, config, report)
    training, held_out = split(data, config.seed)
    x = observed_states(data)
    deviation = noise_estimate(data).deviation(x)
    equations = candidates(findings, training, deviation, x)
    models: dict[str, nn.Module] = {**equations}
    if network is not None:
        models[NETWORK_NAME] = network.simulator()
    if not models:
        raise ValueError(reason + ". Add longer trajectories.")
    others = baselines(training, deviation)
    rollouts = compare_rollouts({**models, **others}, held_out, deviation)
    chosen = most_accurate(models, rollouts, held_out, deviation)
    shown = [name for name in models if name in (chosen, NETWORK_NAME)]
    rollouts = rollouts.only([*shown, *others])
    formulas = equations[chosen].field.formulas(names) if chosen in equations else []
    noether = Noether() if findings is None else describe_findings(findings, x)
    return Discovered(
        names=names,
        findings=findings,
        reason=reason,
        noether=noether,
        network=network,
        model=models[chosen],
        model_name=chosen,
        equations=formulas,
        rollouts=rollouts,
        seconds=clock.now() - started,
    )


def coordinate_names(phase: int) -> list[str]:
    """Return q, p or q1, ..., pn for an even number of coordinates, else x1, ..., xd."""
    if phase % 2:
        return [f"x{i + 1}" for i in range(phase)]
    return ["q", "p"] if phase == 2 else canonical_names(phase)


def _search(data: Trajectories, names: list[str], seed: int) -> tuple[Findings | None, str]:
    """Return the findings, or None and a reason; and why they are not definite, if they are not."""
    try:
        findings = find_conserved(data, names, seed=seed)
    except ValueError as error:
        return None, str(error).rstrip(".")
    if findings.undecided:
        return findings, "the data are too few or too noisy for some combinations"
    if not findings.is_decided:
        return findings, findings.skipped[0]
    return findings, ""


def _needs_network(findings: Findings | None, data: Trajectories, config: DiscoverConfig) -> bool:
    """Return whether to train a network: on request, or if nothing else gives an answer."""
    if data.phase % 2:
        return False
    if config.network is not None and findings is not None:
        return config.network
    if findings is None:
        return True
    return findings.fields.adequate is None and not findings.quantities and not findings.is_decided


def _learn_network(data: Trajectories, config: DiscoverConfig, report: Progress) -> NetworkResult:
    """Train a Hamiltonian network with the quantities that its evidence selects."""
    degrees_of_freedom(data.phase)
    stride = choose_stride(data)
    units = choose_units(interleave(data, stride))
    training, held_out = (
        interleave(part, stride) for part in split(units.to_scaled(data), config.seed)
    )
    train_set = _without_long_gaps(transitions(training))
    test_set = _without_long_gaps(transitions(held_out))
    journal = None if config.resume is None else Journal(config.resume)
    model = _model(data.phase, config.count, config.seed)
    options = _train_config(train_set, config)
    learned, plain = _train_both(model, train_set, options, report, journal)
    errors = {
        "learned": mean_squared_error(learned, test_set),
        "plain": mean_squared_error(plain, test_set),
    }
    described = describe_quantities(learned.model.conserved, units, held_out)
    return NetworkResult(learned, plain, units, *described, errors, len(train_set))


def _without_long_gaps(data: Transitions) -> Transitions:
    """Remove transitions over long times: costly to integrate, with little information."""
    use = data.gaps[:, 0] <= max(MAX_GAP, float(data.gaps.min()))
    return data.at(use.nonzero()[:, 0])


def _train_both(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig,
    report: Progress,
    journal: Journal | None,
) -> tuple[Trained, Trained]:
    """Train with the selected quantities, and without any for as many steps."""
    minutes = config.minutes or 0.0
    selection = config.change(minutes=SELECTION_TIME_FRACTION * minutes)
    stage = _stage(report, 0.0, SELECTION_TIME_FRACTION)
    learned = train_and_select(model, data, selection, stage, journal)
    plain = learned if learned.model.conserved is None else learned.plain
    if plain is not None:
        report(1.0, "done")
        return learned, plain
    comparison = learned.config.change(minutes=(1 - SELECTION_TIME_FRACTION) * minutes)
    network = SymmetrisedNetwork(copy.deepcopy(model.network))
    stage = _stage(report, SELECTION_TIME_FRACTION, 1.0)
    return learned, train(network, data, comparison, stage, journal)


def _train_config(data: Transitions, config: DiscoverConfig) -> TrainConfig:
    step_variance = float((data.y[:, 0] - data.x).square().mean())
    longest = float(data.gaps.max())
    return TrainConfig(
        steps=config.steps,
        minutes=config.minutes,
        batch_size=200,
        draws=2,
        flows=16,
        lr=LEARNING_RATE,
        integrator="rk4" if longest > 0.3 else "midpoint",
        substeps=math.ceil(longest / MAX_INTEGRATOR_STEP),
        noise=max(1e-6, 0.05 * step_variance),
        noise_kind="closed",
        burn_in=0.5,
        seed=config.seed,
        device=config.device,
    )


def _model(phase: int, count: int | None, seed: int) -> SymmetrisedNetwork:
    if count is None:  # more than u(n) and any number of bodies have
        n_monomials = phase * (phase + 1) // 2 + phase
        count = min(n_monomials - 1, max(3, (phase // 2) ** 2 + 2))
    generator = torch.Generator().manual_seed(seed)
    width = 32 if phase <= 4 else 64
    network = HamiltonianNetwork(phase, None, width, activation="elu", generator=generator)
    conserved = Quadratic(phase, count, generator=generator)
    return SymmetrisedNetwork(network, conserved, FlowTimes(count, "ball", "antithetic"))


def _stage(report: Progress, start: float, end: float) -> Callable[[Record], None]:
    """Return a callback that maps the progress of one training to [start, end]."""

    def report_record(record: Record) -> None:
        line = f"step {record['step']:.0f}  -ELBO/n {record['neg_elbo']:.3f}"
        report(start + (end - start) * record["share"], line)

    return report_record


# -------------------------------------------------------------------------- preparation of the data


def choose_units(data: Trajectories) -> Units:
    """Choose units in which states and their rates of change are about 1.

    Raise ValueError if no state is observed, or if the states are constant.
    """
    centre, scale = _centre_and_scale(data)
    return Units(centre, scale, _time_unit(data, scale))


def _centre_and_scale(data: Trajectories) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    states = data.states[data.observed]
    if len(states) == 0:
        raise ValueError("No state is observed: all are missing (NaN).")
    # Divide by the largest entry first, so that no square overflows.
    largest = states.abs().max().clamp_min(1e-300)
    mean, spread = largest * (states / largest).mean(0), largest * (states / largest).std(0)
    centre = torch.where(mean.abs() > MAX_OFFSET_STDS * spread, mean, 0.0)
    sizes = [_root_mean_square(half) for half in (states - centre).chunk(2, dim=1)]
    if min(sizes) == 0:
        raise ValueError("Positions or momenta are constant: there is no motion to learn from.")
    n = data.phase // 2
    scale = torch.tensor([sizes[0]] * n + [sizes[1]] * n, dtype=torch.float64)
    return centre, scale


def _root_mean_square(values: Tensor) -> float:
    """Return the root mean square without overflow."""
    largest = float(values.abs().max())
    return largest * float((values / largest).square().mean().sqrt()) if largest > 0 else 0.0


def _time_unit(data: Trajectories, scale: Float[Tensor, "d"]) -> float:
    """Return the time in which scaled states change by about 1.

    Only steps between half and twice the median are used: very short ones show mainly noise, very
    long ones say little about the rate.
    """
    steps, gaps = data.states.diff(dim=1) / scale, data.times.diff(dim=1)
    use = data.observed[:, 1:] & data.observed[:, :-1]
    if not use.any():
        raise ValueError("No two consecutive states are observed: there is nothing to learn from.")
    median = gaps[use].median()
    use = use & (gaps >= median / 2) & (gaps <= 2 * median)
    rate = _root_mean_square((steps / gaps[..., None])[use])
    if rate == 0:
        raise ValueError("States are constant in time: there is no motion to learn from.")
    return 1 / rate


def choose_stride(data: Trajectories) -> int:
    """Return the stride, a power of two, at which states change visibly from one to the next.

    States that were recorded densely differ by little but noise. The change over one stride,
    without the noise, should be at least `MIN_STEP_CHANGE`.
    """
    states = torch.where(data.observed[..., None], data.states, torch.nan)
    states = states / _centre_and_scale(data)[1]
    noise = noise_variance(Trajectories(states, data.times, data.observed)).mean()
    noise = noise.nan_to_num(0.0, 0.0)  # infinite if no two consecutive states are observed
    stride, length = 1, states.shape[1]
    while 2 * MIN_STATES * stride <= length:
        change = (states[:, stride:] - states[:, :-stride]).square().nanmean()
        if change >= LARGE_STEP_CHANGE**2 or change - 2 * noise >= MIN_STEP_CHANGE**2:
            break
        stride *= 2
    return stride


def as_trajectories(trajectories: TrajectoryInput, times: Any, positions: bool) -> Trajectories:
    """Validate a user's states and times; the latter are None for `Trajectories`.

    With `positions`, the states are positions only, and velocities are appended. Invalid values,
    and times that are missing or given twice, raise ValueError.
    """
    if isinstance(trajectories, Trajectories):
        if times is not None:
            raise ValueError("Trajectories have their own times; leave out times=.")
        if not positions:
            return trajectories
        states = torch.where(trajectories.observed[..., None], trajectories.states, torch.nan)
        times = trajectories.times
    elif times is None:
        raise ValueError("Pass the times of the states, of shape [T] or [B, T].")
    else:
        states = _as_tensor(trajectories, "states")
    clock = extrapolate_times(states, _as_tensor(times, "times"))
    return Trajectories.of(with_velocities(states, clock) if positions else states, clock)


def _as_tensor(values: Any, name: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values).detach().cpu()
        if tensor.is_complex():
            raise TypeError("complex numbers")
        return tensor.double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be a tensor or array of real numbers, got {type(values).__name__} "
            f"({error}). Pad trajectories of unequal length with NaN, or read a file with "
            "read_trajectories."
        ) from error
