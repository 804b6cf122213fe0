"""Test learning rates against closed forms, and the burn-in of the hyperparameters."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resume_job import Interrupted, outcome, run
from torch import Tensor, nn

import symrazor as sr
from symrazor.training.batched_training import BatchedConfig
from symrazor.training.checkpoint import Checkpoints
from symrazor.training.options import (
    N_INTERVALS,
    SETTLED_FRACTION,
    WINDOW,
    BurnIn,
    Schedule,
    has_settled,
)

CPU = torch.device("cpu")


# Learning rates.


@pytest.mark.parametrize(
    ("total", "warmup"), [(1, 0.99), (7, 0.0), (60, 0.05), (100, 0.1), (150, 0.02), (999, 0.3)]
)
def test_warmup_and_cosine_in_steps(total: int, warmup: float) -> None:
    """`fit`, `fit_variational` and `fit_by_likelihood`; equal to the last bit."""
    schedule, n_warmup = Schedule.with_warmup(total, warmup), int(warmup * total)
    for t in range(total):
        if t < n_warmup:
            expected = (t + 1) / (n_warmup + 1)
        else:
            fraction = (t - n_warmup) / (total - n_warmup)
            expected = 0.5 * (1 + math.cos(math.pi * fraction))
        assert schedule(t) == expected


@pytest.mark.parametrize("hold", [0.0, 0.15, 0.3])
def test_cosine_in_fractions_of_the_training_after_a_hold(hold: float) -> None:
    """The training of Hamiltonian networks, by steps or by time; equal to the last bit."""
    for share in (0.0, 0.1, 0.15, 0.29999, 0.3, 0.7, 0.999, 1.0):
        expected = 0.5 * 5e-3 * (1 + math.cos(math.pi * share)) if share >= hold else 0.0
        assert 5e-3 * Schedule(hold=hold)(share) == expected


@pytest.mark.parametrize("config", [{}, {"hold": 0.0}, {"hold": 1.0}, {"settle": 0.0}])
def test_rates_of_batched_training(config: dict[str, float]) -> None:
    """Hold, linear rise and decay at the end; equal up to rounding."""
    options = BatchedConfig(steps=200, **config)  # type: ignore[arg-type]
    widths, scale, filters = options.schedules()
    for step in range(options.steps):
        done = step / options.steps
        hold, settle = max(options.hold, 1e-9), options.settle
        rise = min(1.0, max(0.0, done / hold - 1))
        settling = max(0.0, (done - (1 - settle)) / max(settle, 1e-9))
        decay = 0.5 * (1 + math.cos(math.pi * settling))
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        start, end = options.rates
        assert widths(done) == pytest.approx(rise * decay, rel=1e-12, abs=1e-15)
        assert scale(done) == pytest.approx(decay, rel=1e-12, abs=1e-15)
        assert filters(done) == pytest.approx(rise * cosine, rel=1e-12, abs=1e-15)
        assert options.posterior_rate(done) == pytest.approx(start * (end / start) ** settling)


# Whether losses have settled.


def test_exponential_decay_settles_as_the_formula_predicts() -> None:
    """With l = q^t, medians are at the centre of the windows, and the noise is second order."""
    q = 0.8
    losses = [q**t for t in range(60)]
    first = next(n for n in range(1, 61) if has_settled(losses[:n]))

    def still_falls(n: int) -> bool:
        newer, older = q ** (n - 2), q ** (n - 2 - WINDOW)
        bends = sorted(q ** (n - 1 - k) * (1 / q - 1) ** 2 for k in range(1, 2 * WINDOW - 1))
        return older - newer > max(SETTLED_FRACTION * (q - newer), (bends[1] + bends[2]) / 4)

    assert first == next(n for n in range(6, 61) if not still_falls(n))
    assert all(has_settled(losses[:n]) for n in range(first, 61))


def test_linear_decay_settles_only_after_a_much_larger_decrease() -> None:
    losses = [100.0 - t for t in range(60)]
    assert not any(has_settled(losses[:n]) for n in range(61))
    assert has_settled([1000.0] * 3 + losses)  # 3 of more than 900


def test_constant_loss_with_noise_has_settled() -> None:
    generator = torch.Generator().manual_seed(0)
    noisy = (1 + 0.1 * torch.randn(200, 6, generator=generator)).tolist()
    assert sum(has_settled(losses) for losses in noisy) > 0.75 * len(noisy)
    assert has_settled([2.0] * 6)
    assert not has_settled([2.0] * 5)  # too few to tell


def test_one_bad_first_step_does_not_dominate() -> None:
    losses = [1e6] + [3 * 0.9**t for t in range(9)]
    assert not has_settled(losses)


@given(
    st.lists(st.floats(-10, 10), min_size=6, max_size=20),
    st.floats(0.01, 100),
    st.floats(-100, 100),
)
def test_settling_is_invariant_to_scale_and_offset(
    losses: list[float], unit: float, zero: float
) -> None:
    grid = [round(loss * 64) / 64 for loss in losses]  # sums of these are exact
    unit, zero = 2.0 ** round(math.log2(unit)), float(round(zero))
    assert has_settled(grid) == has_settled([unit * loss + zero for loss in grid])


# Burn-in.


@pytest.mark.parametrize("total", [7, 59, 60, 61, 150, 1234])
def test_intervals_have_the_mean_loss_of_their_steps(total: int) -> None:
    losses = torch.rand(total, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    burn_in, parts = BurnIn(0, total, total, CPU), min(N_INTERVALS, total)
    for done in range(total + 1):
        expected = []
        for part in range(parts):
            actual = [t for t in range(total) if t * parts // total == part]
            if actual[-1] < done:
                expected.append(float(losses[actual].mean()))
        assert burn_in.mean_losses(done) == pytest.approx(expected, rel=1e-12)
        if done < total:
            burn_in.add(losses[done], done)


def first_over(losses: Tensor, least: int, most: int) -> int | None:
    """Return the step after which the burn-in is over, queried after every step."""
    burn_in = BurnIn(least, most, len(losses), CPU)
    answers = []
    for step, loss in enumerate(losses):
        burn_in.add(loss, step)
        answers.append(burn_in.over(step + 1))
    assert answers == sorted(answers)  # once over, always over
    return answers.index(True) + 1 if any(answers) else None


def test_burn_in_ends_early_late_or_never() -> None:
    t = torch.arange(600.0, dtype=torch.float64)
    assert first_over(torch.exp(-t / 10), 120, 300) == 120  # at rest long before
    late = first_over(torch.exp(-t / 80), 120, 300)
    assert late is not None and 130 < late < 300
    assert first_over(10 - t / 60, 120, 300) == 300  # never
    assert first_over(10 - t / 60, 120, 120) == 120  # no waiting
    assert first_over(torch.exp(-t / 10), 601, 300) is None  # the least counts


# Burn-in of fit.


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), (x, y)


def first_update(history: list[dict[str, Any]]) -> int | None:
    """Return the first epoch whose evidence step changed a precision."""
    start = history[0]["precisions"]
    return next((record["epoch"] for record in history if record["precisions"] != start), None)


@pytest.mark.parametrize(
    ("lr", "options", "expected"),
    [
        (4e-4, {}, {8}),  # a fifth, without waiting
        (4e-4, {"burn_in": 3}, {3}),
        (1e-9, {"burn_in_most": 20}, {8}),  # nothing moves at all: settled at a fifth
        (0.02, {"burn_in_most": 20}, set(range(9, 20))),  # falls, and comes to rest
        (4e-4, {"burn_in_most": 20}, {20}),  # falls and falls
        (4e-4, {"burn_in": 3, "burn_in_most": 12}, {12}),
        (4e-4, {"burn_in_most": 0}, {8}),
        (1e-9, {"burn_in": 10**9, "burn_in_most": 20}, {None}),
    ],
)
def test_fit_waits_until_the_loss_has_settled(
    lr: float, options: dict[str, Any], expected: set[int | None]
) -> None:
    """Train 40 epochs of one step, with an evidence step after each."""
    model, data = problem()
    fit = sr.fit(model, data, epochs=40, batch_size=64, every=1, lr=lr, warmup=0.0, **options)
    assert first_update(fit.history) in expected


@pytest.mark.parametrize("steps", [(3, 8), (8, 4), (10, 5)])
def test_run_resumed_within_the_burn_in_is_bit_identical(
    tmp_path: Path, steps: tuple[int, int]
) -> None:
    """Stop before the minimum burn-in and while it waits for the loss; 24 epochs of 2 steps."""
    options: dict[str, Any] = {"epochs": 24, "batch_size": 25, "every": 1, "lr": 5e-3}
    options |= {"burn_in": 6, "burn_in_most": 40}
    whole = run("relaxed", **options)
    assert 8 < (first_update(whole.history) or 0) < 20  # it waited, but not until the end
    for step in steps:
        with pytest.raises(SystemExit):
            stop = Interrupted(signal.SIGTERM, step)
            run("relaxed", resume=tmp_path, augment=stop, **options)
    saved = Checkpoints(tmp_path).load()
    assert saved is not None and saved["step"] == sum(steps)
    assert not saved["burn_in"]["ended"]
    assert outcome(run("relaxed", resume=tmp_path, **options)) == outcome(whole)
