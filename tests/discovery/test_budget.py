"""Plan comparisons and final trainings, split data, and reject wrong options."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from discover_data import some_data
from torch import nn

import symrazor as sr
from symrazor.core.likelihood import Gaussian
from symrazor.data import dataset
from symrazor.data.arrays import prepare
from symrazor.discovery import budget
from symrazor.discovery.api import split_held_out
from symrazor.discovery.budget import (
    EVIDENCE_SUBSET,
    Cost,
    FinalPlan,
    batch_size,
    evidence_interval,
    phase_evidence_steps,
    plan_comparison,
    plan_final,
    plan_question,
    stored_plan,
    timed_config,
)
from symrazor.discovery.comparison import with_structures
from symrazor.discovery.families import candidates_for
from symrazor.discovery.question import Family, Options, Question, Structure
from symrazor.training.options import FitConfig


def total(costs: dict[str, Cost], n: int, samples: int, epochs: int) -> float:
    """Return the time of three starts of "b", and of "a", which starts from it, on two workers."""
    steps, left_out = phase_evidence_steps(samples, epochs), min(n - samples, 2500)
    a, b = (
        costs[name].total_seconds(samples, epochs, steps) + left_out * costs[name].training / 3
        for name in "ab"
    )
    return max(3 * (a + 2 * b) / 2, 2 * max(a, b))


@pytest.mark.parametrize("seconds", [0.1, 5.0, 60.0, 1e4])
@pytest.mark.parametrize("n", [30, 1000, 60_000])
def test_comparison_plan_has_the_most_epochs_that_fit(n: int, seconds: float) -> None:
    costs = {"a": Cost(1e-4, 2e-4, 0.5), "b": Cost(5e-5, 1e-4, 0.1)}
    plan = plan_comparison(costs, {"a"}, n, seconds, 3, 2)
    samples, (epochs, second) = plan.samples, plan.epochs
    assert 1 <= epochs <= 200 and second == epochs
    assert plan.seconds == pytest.approx(total(costs, n, samples, epochs))
    if epochs > 1:
        assert plan.seconds <= 0.8 * seconds
    most = n - n // 5  # the rest is left out and predicted
    if samples < most:  # fewer data only where twelve passes over them would be too long
        assert total(costs, n, most, 12) > 0.8 * seconds
    assert min(most, 500) <= samples <= most


def test_discover_stays_within_the_time(work_clock: Callable[[], float]) -> None:
    """Include the timed trials in the time."""
    started = work_clock()
    discovery = sr.discover(some_data("vector", n=200), minutes=0.05)
    assert work_clock() - started < 2 * 60 * 0.05
    assert discovery.candidates


def test_batch_sizes_and_evidence_intervals() -> None:
    assert [batch_size(n) for n in (10, 400, 1437, 60_000)] == [16, 16, 64, 128]
    assert [evidence_interval(epochs, 6) for epochs in (1, 6, 7, 50)] == [1, 1, 2, 9]
    # 400 samples are 25 batches of 16: 100, 300, 600 and 1,200 steps
    assert [phase_evidence_steps(400, epochs) for epochs in (4, 12, 24, 48)] == [2, 3, 6, 6]


def test_held_out_split_is_stratified_and_disjoint() -> None:
    y = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)
    data = dataset(torch.arange(80.0).reshape(-1, 1), y)
    train, test = split_held_out(data, 0.2, seed=0)
    assert test is not None
    assert test[1].bincount().tolist() == [10, 4, 2]
    both = torch.cat([train.x, test[0]]).flatten().sort().values
    assert torch.equal(both, torch.arange(80.0))
    assert split_held_out(data, 0.0, seed=0)[1] is None


def test_constant_columns_are_standardised_to_zero() -> None:
    x = torch.ones(30, 2)
    x[:, 1] = torch.arange(30)
    prepared = prepare(dataset(x, torch.arange(30) % 2)).inputs(x)
    assert torch.equal(prepared[:, 0], torch.zeros(30))
    assert float(prepared[:, 1].std(correction=0)) == pytest.approx(1)


def test_wrong_options_raise_errors() -> None:
    with pytest.raises(ValueError, match="minutes must be positive, got 0"):
        sr.discover(some_data("vector"), minutes=0)
    with pytest.raises(ValueError, match="Unknown option 'minute'. Did you mean 'minutes'"):
        sr.discover(some_data("vector"), minute=1)
    with pytest.raises(
        ValueError, match="Groups for vectors must permute positions, got translation"
    ):
        sr.discover(some_data("vector"), groups=["translation"])
    with pytest.raises(ValueError, match="Unknown group 'rotations of a teapot'"):
        sr.discover(some_data("image"), groups=["rotations of a teapot"])
    with pytest.raises(ValueError, match="images need at least 4 positions"):
        sr.discover(torch.randn(30, 1, 1, 2), torch.arange(30) % 2)
    with pytest.raises(ValueError, match="has no labels"):
        sr.discover(torch.randn(30, 4))
    assert Options().change(groups=["a"], out="b").out == Path("b")
    assert Options().change(groups="p4").groups == ("p4",)


def test_labels_of_a_family() -> None:
    family = Family([Structure("a", nn.Identity, "an a")])
    assert family.label("a") == "an a"
    assert [s.name for s in candidates_for(some_data("set")).structures][1] == "shared"


def test_comparison_takes_a_larger_share_of_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect two fifths of the time if that gives enough steps, otherwise more."""
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    family = candidates_for(dataset(x, x[:, 0], kind="vector"))
    question = Question("a", "?", family, (x, x[:, :1]), None, Gaussian)
    cost = {s.name: Cost(1e-4, 0.0, 0.0) for s in family.structures}
    monkeypatch.setattr(budget, "measure_costs", lambda *arguments: cost)
    monkeypatch.setattr(budget, "cpu_threads", lambda: 2)
    for minutes, part in ((0.06, 0.65), (1.0, 0.4)):
        plan = plan_question(question, Options(minutes=minutes), lambda text: None)[1]
        expected = plan_comparison(cost, set(), 300, part * 60 * minutes, 3, 2)
        assert abs(plan.epochs[0] - expected.epochs[0]) <= 1, minutes
        shorter = plan_comparison(cost, set(), 300, 0.4 * 60 * minutes, 3, 2)
        assert (shorter.steps < 1000) is (part > 0.5)


@pytest.mark.parametrize("seconds", [5.0, 60.0, 1e4])
@pytest.mark.parametrize("n", [30, 1000, 60_000])
def test_final_plan_has_the_most_epochs_that_fit(n: int, seconds: float) -> None:
    cost = Cost(1e-4, 2e-4, 0.5)
    plan = plan_final("a", cost, n, seconds)
    assert plan is not None
    limit = 0.9 * seconds

    def total(samples: int, epochs: int, evidence_steps: int) -> float:
        """Return the time; the evidence of many samples is estimated from 5,000."""
        result = min(samples, 5000) if samples >= 10_000 else samples
        return cost.loop_seconds(samples, epochs, evidence_steps) + 2e-4 * result + 0.5

    assert total(plan.samples, plan.epochs, plan.evidence_steps) <= limit
    steps = min(n, EVIDENCE_SUBSET) * 2e-4  # seconds of an evidence step
    assert plan.evidence_steps == 12 or (plan.evidence_steps + 1) * steps > 0.1 * limit
    assert plan.evidence_steps == 4 or plan.evidence_steps * steps <= 0.1 * limit
    if plan.samples < n:
        assert total(n, 3, plan.evidence_steps) > limit
    is_longest = plan.epochs in (50, 200) or plan.steps >= 10_000
    longer = total(plan.samples, plan.epochs + 1, plan.evidence_steps)
    assert is_longest or longer > limit
    assert plan_final("a", cost, n, 0.3) is None


def test_cost_of_a_run() -> None:
    """Compute by hand: evidence steps at epochs 4, 8, 12, 16 and 20, and one on all data."""
    config = timed_config(FitConfig(), 20, 5000, 5)
    assert (config.every, config.subset, config.batch_size) == (4, EVIDENCE_SUBSET, 128)
    assert [evidence_interval(epochs, 10) for epochs in (1, 10, 11, 30)] == [1, 1, 2, 3]
    expected = 20 * 5000 * 1e-3 + (5 * 1000 + 5000) * 1e-2 + 3
    assert Cost(1e-3, 1e-2, 3.0).total_seconds(5000, 20, 5) == pytest.approx(expected)
    assert FinalPlan("a", 3, 1000).steps == 3 * 32  # batches of 32


def test_small_data_are_compared_by_the_exact_curvature() -> None:
    discovery = sr.discover(some_data("vector", n=60), minutes=1.0, epochs=3, starts=1)
    for candidate in discovery.candidates:
        assert candidate.fit.evidence.structure == "full Gauss-Newton matrix"
    short = sr.discover(some_data("vector", n=60), minutes=0.05, epochs=3, starts=1)
    for candidate in short.candidates:
        assert candidate.fit.evidence.structure == "Kronecker factors"


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": [10**400, 1]},
        {"epochs": [3]},
        {"epochs": [1, 2.5]},
        {"samples": -1},
        {"seconds": "long"},
        {"costs": {"linear model": {"training": 1.0, "evidence": 0.0, "once": 0.0}}},
        {"costs": {"other": 3}},
        {"key": None},
    ],
)
def test_an_impossible_stored_plan_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    family = candidates_for(dataset(x, x[:, 0], kind="vector"))
    question = Question("a", "?", family, (x, x[:, :1]), None, Gaussian)
    cost = {s.name: Cost(1e-4, 0.0, 0.0) for s in family.structures}
    monkeypatch.setattr(budget, "measure_costs", lambda *arguments: cost)
    options, told = Options(out=tmp_path), list[str]()
    expected = plan_question(question, options, told.append)[1].samples
    assert plan_question(question, options, told.append)[1].samples == expected
    assert told.count("  resuming an unfinished run of the same command") == 1
    (file,) = tmp_path.rglob("plan.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert plan_question(question, options, told.append)[1].samples == expected
    assert told.count("  resuming an unfinished run of the same command") == 1


@pytest.mark.parametrize(
    "change", [{}, {"name": "other"}, {"epochs": 201}, {"samples": 0}, {"x": 1}, {"epochs": "3"}]
)
def test_an_impossible_stored_training_is_planned_again(
    tmp_path: Path, change: dict[str, object]
) -> None:
    file = tmp_path / "final.json"
    stored = {"name": "a", "epochs": 5, "samples": 7, "evidence_steps": 1}
    file.write_text(json.dumps(stored | change))
    plan = stored_plan(file, "a", 200, lambda: FinalPlan("a", 3, 1000))
    assert plan.epochs == (3 if change else 5)
    assert stored_plan(file, "a", 200, lambda: None) == plan  # it was stored


def test_a_large_data_set_drops_the_questions_about_single_axes_before_its_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = torch.rand(12_000, 1, 8, 8), torch.arange(12_000) % 2
    family = candidates_for(dataset(x, y, kind="image"))
    question = Question("a", "?", family, (x, y), None, sr.Categorical)
    cost = {s.name: Cost(1e-4, 1e-4, 0.0) for s in family.structures}
    monkeypatch.setattr(budget, "measure_costs", lambda *arguments: cost)

    def planned(minutes: float) -> tuple[set[str], int]:
        _, plan = plan_question(question, Options(minutes=minutes), lambda text: None)
        return set(plan.costs), plan.epochs[0]

    short, epochs = planned(1.0)
    assert set(cost) - short == {"x-invariant", "y-invariant"} == set(family.optional)
    assert 1 <= epochs < 12
    assert {s.name for s in with_structures(question, short).family.structures} == short
    every, epochs = planned(10.0)
    assert every == set(cost) and epochs >= 12
