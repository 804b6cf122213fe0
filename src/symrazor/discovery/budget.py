"""Plan how much training fits into the available time.

A short timed trial of every candidate gives its `Cost`. From the costs follow the plan of the
comparison (the same epochs and samples for all candidates) and of the refit (the recommended
network, trained again for the remaining time). With a run folder, the plan is stored beside the
checkpoints, so that an interrupted run resumes with the same plan.
"""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from symrazor.core.files import write_atomically
from symrazor.core.parameters import weights
from symrazor.curvature.auto import exact_method
from symrazor.curvature.estimate import Method
from symrazor.data import Tensors
from symrazor.discovery.question import (
    MakeLikelihood,
    Options,
    Question,
    Structure,
    Tell,
    groups_as_json,
)
from symrazor.inference.razor import Razor
from symrazor.training.checkpoint import fingerprint
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import fit
from symrazor.training.options import FitConfig

PLAN = "plan.json"
TRIAL_SAMPLES = 512
PLANNED_SHARE = 0.8
"""Share of the available time that is planned; the rest covers what a short trial does not show."""
MIN_EPOCHS, MAX_STEPS, MAX_EPOCHS = 30, 2000, 400
"""Limits of a comparison: at least `MIN_EPOCHS` epochs, on fewer samples if necessary.

The Laplace approximation is valid at a mode. Weights that are still on their way favour the network
that fits soonest. So epochs take precedence over samples.
"""
MIN_SAMPLES = 500
LEFT_OUT_SHARE, LEFT_OUT_MIN_SAMPLES = 0.2, 1000
"""Held-out share of the training data, and the smallest data set that is split this way."""
EVIDENCE_STEPS = 10
EVIDENCE_SUBSET = 1000
"""Samples of an evidence step in a run with limited time."""
EXACT_PRODUCTS_PER_MINUTE = 2.5e11
"""Multiplications of one estimate, per minute of the run, up to which steps are exact."""
MIN_EXACT_MINUTES = 0.5
"""Shorter runs use the fastest structure of the curvature."""
MAX_SLOWDOWN = 3.0
"""Largest correction of a cost by a later run; short runs predict the speed of long ones poorly."""

COMPARISON_SHARE, LONG_COMPARISON_SHARE = 1 / 3, 0.55
"""Share of the time for the comparison; the second if the first allows too few training steps."""
MIN_STEPS = 400
"""Training steps below which a comparison is provisional."""

REFIT_PLANNED_SHARE = 0.95
"""Share of the remaining time that is planned; the cost is known from the comparison."""
MIN_REFIT_EPOCHS = 3
"""Epochs below which a refit uses fewer samples."""
MAX_REFIT_STEPS, MAX_REFIT_EPOCHS = 10_000, 1000
REFIT_EVIDENCE_STEPS, MIN_REFIT_EVIDENCE_STEPS, EVIDENCE_TIME_SHARE = 20, 6, 0.2
"""Evidence steps of a refit: the most that take this share of the time, within these limits."""
SAMPLES_PER_PRECISION = 15
"""A refit starts with precisions of at most n / 15; larger ones keep weights from learning."""


@dataclass(frozen=True)
class Cost:
    """Time that one candidate takes.

    Args:
        training: seconds per sample and epoch.
        evidence: seconds per sample of an evidence step.
        once: further seconds per run.
    """

    training: float
    evidence: float
    once: float

    def loop_seconds(self, n: int, epochs: int, evidence_steps: int = EVIDENCE_STEPS) -> float:
        """Return the time of the epochs and of the evidence steps between them."""
        steps = math.ceil(epochs / evidence_interval(epochs, evidence_steps))
        return n * epochs * self.training + steps * min(n, EVIDENCE_SUBSET) * self.evidence

    def total_seconds(self, n: int, epochs: int, evidence_steps: int = EVIDENCE_STEPS) -> float:
        """Return the time of a whole run."""
        return self.loop_seconds(n, epochs, evidence_steps) + n * self.evidence + self.once

    def corrected(self, n: int, epochs: int, loop: float, after: float) -> "Cost":
        """Return the cost after a run on n samples was timed; corrected by at most `MAX_SLOWDOWN`.

        Its epochs took `loop` seconds, the rest of the run `after` seconds.
        """
        factor = min(MAX_SLOWDOWN, loop / self.loop_seconds(n, epochs))
        return Cost(factor * self.training, factor * self.evidence, after)


@dataclass(frozen=True)
class Plan:
    """Plan of a comparison.

    Args:
        epochs: epochs of each candidate.
        samples: training samples.
        seconds: candidate -> planned time.
        costs: candidate -> cost; empty if the number of epochs was given.
    """

    epochs: int
    samples: int
    seconds: dict[str, float] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Training steps of each candidate."""
        return training_steps(self.epochs, self.samples)


@dataclass(frozen=True)
class RefitPlan:
    """Plan of another training of one network.

    Args:
        name: name of the structure.
        epochs: epochs.
        samples: training samples.
        evidence_steps: number of evidence steps.
        precisions: prior group -> initial precision; empty for the default of a new network.
    """

    name: str
    epochs: int
    samples: int
    evidence_steps: int = REFIT_EVIDENCE_STEPS
    precisions: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Training steps."""
        return training_steps(self.epochs, self.samples)


def batch_size(n: int) -> int:
    """Return a power of 2 between 16 and 128 that gives at least 20 steps per epoch if possible."""
    return 1 << min(7, max(4, int(math.log2(max(1, n / 20)))))


def training_steps(epochs: int, n: int) -> int:
    """Return the number of optimiser steps."""
    return epochs * math.ceil(n / batch_size(n))


def evidence_interval(epochs: int, max_steps: int) -> int:
    """Return the interval between evidence steps that gives at most `max_steps` of them."""
    return max(1, math.ceil(epochs / max_steps))


def default_evidence_interval(epochs: int) -> int:
    """Return the interval that gives at least `EVIDENCE_STEPS` evidence steps, if possible."""
    return max(1, epochs // EVIDENCE_STEPS)


def timed_config(
    config: FitConfig, epochs: int, n: int, evidence_steps: int = EVIDENCE_STEPS
) -> FitConfig:
    """Return training options whose time is `Cost.total_seconds(n, epochs, evidence_steps)`."""
    return replace(
        config,
        epochs=epochs,
        every=evidence_interval(epochs, evidence_steps),
        subset=min(n, EVIDENCE_SUBSET),
        batch_size=batch_size(n),
    )


def measure_costs(
    structures: Sequence[Structure], data: Tensors, likelihood: MakeLikelihood, config: FitConfig
) -> dict[str, Cost]:
    """Return the cost of each candidate, by name.

    Four epochs on a few samples are timed, with an evidence step after every second one. The
    cheaper epoch of each sort counts, which leaves out one-time work (imports, threads).
    """
    x, y = data[0][:TRIAL_SAMPLES], data[1][:TRIAL_SAMPLES]
    trial = config.change(epochs=4, every=2, burn_in=0, progress=False)
    costs: dict[str, Cost] = {}
    with torch.random.fork_rng([]):
        for structure in structures:
            started = time.perf_counter()
            history = fit(structure.make(), (x, y), likelihood(), config=trial).history
            total = time.perf_counter() - started
            ends = [0.0, *(record["seconds"] for record in history)]
            epochs = [after - before for before, after in pairwise(ends)]
            training = min(epochs[0::2])
            evidence = max(min(epochs[1::2]) - training, 0.0)
            once = max(total - ends[-1] - evidence, 0.0)
            costs[structure.name] = Cost(training / len(y), evidence / len(y), once)
    return costs


def most_samples(n: int, fits: Callable[[int], bool], min_samples: int, step: float = 0.9) -> int:
    """Return n, or the first of n `step`, n `step`^2, ... that fits, but at least `min_samples`."""
    samples, min_samples = n, min(n, min_samples)
    while samples > min_samples and not fits(samples):
        samples = max(min_samples, int(step * samples))
    return samples


def plan_comparison(costs: dict[str, Cost], n: int, seconds: float) -> Plan:
    """Return the plan with the most epochs that fit, the same for all candidates.

    Samples are reduced before epochs fall below `MIN_EPOCHS`.
    """

    def total(samples: int, epochs: int) -> float:
        return sum(cost.total_seconds(samples, epochs) for cost in costs.values())

    limit = PLANNED_SHARE * seconds
    samples = n if n < LEFT_OUT_MIN_SAMPLES else int((1 - LEFT_OUT_SHARE) * n)
    samples = most_samples(samples, lambda n: total(n, MIN_EPOCHS) <= limit, MIN_SAMPLES)
    max_epochs = min(MAX_EPOCHS, max(50, math.ceil(MAX_STEPS * batch_size(samples) / samples)))
    epochs = max((e for e in range(1, max_epochs + 1) if total(samples, e) <= limit), default=1)
    each = {name: cost.total_seconds(samples, epochs) for name, cost in costs.items()}
    return Plan(epochs, samples, each, costs)


def plan_refit(name: str, cost: Cost, n: int, seconds: float) -> RefitPlan | None:
    """Return the plan with the most epochs that fit; None if no epoch fits.

    Samples are reduced before epochs fall below `MIN_REFIT_EPOCHS`.
    """
    limit = REFIT_PLANNED_SHARE * seconds
    seconds_per_evidence = max(min(n, EVIDENCE_SUBSET) * cost.evidence, 1e-9)
    affordable = int(min(REFIT_EVIDENCE_STEPS, EVIDENCE_TIME_SHARE * limit / seconds_per_evidence))
    evidence_steps = max(MIN_REFIT_EVIDENCE_STEPS, affordable)

    def fits(samples: int, epochs: int) -> bool:
        return cost.total_seconds(samples, epochs, evidence_steps) <= limit

    samples = most_samples(n, lambda n: fits(n, MIN_REFIT_EPOCHS), MIN_SAMPLES)
    wanted = max(100, math.ceil(MAX_REFIT_STEPS * batch_size(samples) / samples))
    max_epochs = min(MAX_REFIT_EPOCHS, wanted)
    epochs = max((e for e in range(1, max_epochs + 1) if fits(samples, e)), default=0)
    return RefitPlan(name, epochs, samples, evidence_steps) if epochs else None


def initial_precisions(razor: Razor, n: int) -> dict[str, float]:
    """Return prior precisions for a refit on n samples: the learned ones, limited from above.

    A precision describes the size of the weights, whatever the number of samples. One above
    n / `SAMPLES_PER_PRECISION` would keep the weights from learning.
    """
    learned = razor.prior.precisions
    return {name: min(float(value), n / SAMPLES_PER_PRECISION) for name, value in learned.items()}


def can_be_exact(question: Question, n_samples: int, minutes: float) -> bool:
    """Return whether the exact curvature of every candidate is cheap enough for every step.

    Evidences are compared only in the same structure: bounds are not equally tight.
    """
    x, budget = question.train[0][:1], EXACT_PRODUCTS_PER_MINUTE * minutes
    likelihood, method = question.likelihood(), Method()
    for structure in question.family.structures:
        with torch.random.fork_rng([]), torch.no_grad():
            model = structure.make()
            f = outputs(model, x)
        n_columns = len(likelihood.hessian_root(f))
        n_weights = sum(value.numel() for value in weights(model).values())
        n_rows = n_samples * n_columns
        is_cheap = n_rows * n_weights * min(n_rows, n_weights) <= budget
        if not is_cheap or exact_method(method, n_weights, n_rows) is None:
            return False
    return True


def plan_question(question: Question, options: Options, tell: Tell) -> tuple[FitConfig, Plan]:
    """Return training options and plan of a comparison; resume the stored plan if there is one."""
    n = len(question.train[1])
    default = FitConfig(lr=1e-2, batch_size=batch_size(n))
    if options.minutes >= MIN_EXACT_MINUTES and can_be_exact(question, n, options.minutes):
        default = default.change(structure="auto")
    else:
        default = default.change(estimator="mc")
    config = replace(question.config or default, seed=options.seed, progress=options.progress)
    folder = options.unfinished_folder(question.name)
    key = None if folder is None else _plan_key(question, options)
    stored = None if folder is None else _read_plan(folder / PLAN, key)
    if stored is None and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # checkpoints of another run
    if options.epochs is not None or question.config is not None:
        epochs = options.epochs or config.epochs
        plan = Plan(epochs, n)
        every = config.every if question.config else default_evidence_interval(epochs)
        config = replace(config, epochs=epochs, every=every)
    else:
        plan = stored or _plan_by_time(question, options, config, tell)
        config = timed_config(config, plan.epochs, plan.samples)
    if stored is not None:
        tell("  resuming an unfinished run of the same command")
    elif folder is not None:
        write_atomically(folder / PLAN, json.dumps({"key": key, **asdict(plan)}).encode())
    if plan.samples < n:
        limit = f"to stay within {options.minutes:g} minutes"
        tell(f"  comparing on {plan.samples:,} of {n:,} training samples, {limit}")
    return config, plan


P = TypeVar("P")


def stored_plan(file: Path | None, make: Callable[[], P]) -> RefitPlan | P:
    """Return the plan of an interrupted run from a file, or else make and store a new one."""
    if file is None:
        return make()
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RefitPlan(**json.loads(file.read_text()))
    plan = make()
    if isinstance(plan, RefitPlan):
        write_atomically(file, json.dumps(asdict(plan)).encode())
    return plan


def _plan_by_time(question: Question, options: Options, config: FitConfig, tell: Tell) -> Plan:
    tell("  timing a short trial of each network")
    started = time.perf_counter()
    trial = replace(config, device=options.resolved_device())
    costs = measure_costs(question.family.structures, question.train, question.likelihood, trial)
    left = 60 * options.minutes - (time.perf_counter() - started)
    n = len(question.train[1])
    plan = plan_comparison(costs, n, COMPARISON_SHARE * left)
    if plan.steps < MIN_STEPS:
        plan = plan_comparison(costs, n, LONG_COMPARISON_SHARE * left)
    return plan


def _plan_key(question: Question, options: Options) -> dict[str, Any]:
    """Return what two runs must share for one to resume the other."""
    return {
        "data": fingerprint(*question.train),
        "candidates": [s.name for s in question.family.structures],
        "minutes": options.minutes,
        "epochs": options.epochs,
        "seed": options.seed,
        "groups": groups_as_json(options.groups),
        "torch": str(torch.__version__),
    }


def _read_plan(file: Path, key: dict[str, Any] | None) -> Plan | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text())
        if stored["key"] == key:
            costs = {name: Cost(**parts) for name, parts in stored["costs"].items()}
            epochs, samples = int(stored["epochs"]), int(stored["samples"])
            return Plan(epochs, samples, dict(stored["seconds"]), costs)
    return None
