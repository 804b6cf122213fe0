# Over 400 lines: every rule that divides the time of a run, so that they are read together.
"""Plan how `discover` spends the available time: epochs, samples and curvature.

Every structure is timed in a short trial. The comparison trains several starts of each structure in
two phases, in worker processes (`symrazor.discovery.comparison`). The rest of the time is for
further starts, where the decision is close, and for the final training.
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from symrazor.accelerate.devices import cpu_threads
from symrazor.core.files import parse_json, write_atomically
from symrazor.core.parameters import weights
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
from symrazor.inference.evidence import exact_method
from symrazor.training.checkpoint import fingerprint
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import fit
from symrazor.training.loop import clock
from symrazor.training.options import AFFORDABLE, FitConfig

PLAN = "plan.json"
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Errors of a missing or damaged plan of an interrupted run, which is then made again."""
TRIAL_SAMPLES = 256
PLANNED_SHARE = 0.8
"""Share of the available time that is planned; the rest covers what a short trial does not show."""
MIN_EPOCHS, MAX_STEPS, MAX_EPOCHS = 12, 1000, 200
"""Limits of a phase: at least `MIN_EPOCHS` epochs, on fewer samples if necessary.

The Laplace approximation is valid at a mode. Weights that are still on their way favour the network
that fits soonest. So epochs take precedence over samples.
"""
MIN_SAMPLES, MIN_LARGE_SAMPLES = 500, 5000
"""Fewest samples of a comparison, if there are as many; the same for large data sets, which take
fewer epochs instead: what their left-out samples say about few data need not hold for many."""
LEFT_OUT_SHARE = 0.2
"""Share of the training samples that each start leaves out and predicts."""
MAX_LEFT_OUT = 2500
SCORING_COST = 1 / 3
"""Time of a prediction relative to a training step on the same samples."""
MIN_SPLIT_SAMPLES = 25
"""With fewer training samples none is left out."""
EVIDENCE_STEPS, MIN_EVIDENCE_STEPS, STEPS_BETWEEN = 6, 2, 100
"""Most and fewest evidence steps of a phase, and training steps between two of them: in a short
phase, more evidence steps would take the time of the epochs that bring the weights to rest."""
EVIDENCE_SUBSET = 1000
"""Samples of an evidence step in a run with limited time."""
EXACT_STEP_PRODUCTS, EXACT_RESULT_PRODUCTS = 4e9, 4e10
"""Multiplications of one estimate per minute of the run, up to which every evidence step is exact,
and up to which the evidence that is compared is exact."""
MIN_EXACT_MINUTES = 0.5
"""Shorter runs use the fastest structure of the curvature."""
MAX_GPU_WORKERS = 4
"""Trainings that share a GPU; small networks leave most of it idle."""

COMPARISON_SHARES, LARGE_COMPARISON_SHARES = (0.4, 0.65), (0.4, 0.45)
"""Share of the time for the first starts, and for all starts if the decision is close; the same for
large data sets, whose final training needs the time."""
LARGE_SAMPLES = 10_000
"""Training samples from which a data set counts as large."""
MIN_STEPS, WANTED_STEPS = 300, 1000
"""Training steps of both phases below which a comparison is provisional, and below which the first
starts get the time of further ones."""

FINAL_PLANNED_SHARE = 0.9
"""Share of the remaining time that is planned; the cost is known from the comparison."""
MIN_FINAL_EPOCHS = 3
"""Epochs below which the final training uses fewer samples."""
MAX_FINAL_STEPS, MAX_FINAL_EPOCHS = 10_000, 200
ORDINARY_LEARNING_RATE, ORDINARY_BATCH_SIZE = 5e-3, 64
"""Peak learning rate and largest batches of the ordinary network, which is trained for few epochs;
chosen on left-out training images of Fashion-MNIST."""
RESULT_SAMPLES = 5000
"""Samples for the evidence of the final network of a large data set."""
FINAL_EVIDENCE_STEPS, MIN_FINAL_EVIDENCE_STEPS, EVIDENCE_TIME_SHARE = 12, 4, 0.1
"""Evidence steps of the final training: the most that take this share of the time, within these
limits."""


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


@dataclass(frozen=True)
class Plan:
    """Plan of a comparison.

    Args:
        epochs: epochs of both phases.
        samples: training samples of each start.
        seconds: planned time of the first starts.
        costs: structure -> cost; empty if the number of epochs was given.
    """

    epochs: tuple[int, int]
    samples: int
    seconds: float = 0.0
    costs: dict[str, Cost] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Training steps of each start."""
        n = self.samples
        return sum(epochs * math.ceil(n / phase_batch_size(n, epochs)) for epochs in self.epochs)


@dataclass(frozen=True)
class FinalPlan:
    """Plan of the final training of one network, or of a training for learned invariances.

    Args:
        name: name of the structure.
        epochs: epochs.
        samples: training samples.
        evidence_steps: number of evidence steps.
    """

    name: str
    epochs: int
    samples: int
    evidence_steps: int = FINAL_EVIDENCE_STEPS

    @property
    def steps(self) -> int:
        """Training steps."""
        return self.epochs * math.ceil(self.samples / batch_size(self.samples))


def batch_size(n: int) -> int:
    """Return a power of 2 between 16 and 128 that gives at least 20 steps per epoch if possible."""
    return _power_of_2(n / 20)


def phase_batch_size(n: int, epochs: int) -> int:
    """Return the batch size of a phase: a few epochs on many samples need smaller batches."""
    if n < MIN_LARGE_SAMPLES:
        return batch_size(n)
    return min(batch_size(n), _power_of_2(n * epochs / (MIN_STEPS / 2)))


def _power_of_2(size: float) -> int:
    return 1 << min(7, max(4, int(math.log2(max(1, size)))))


def evidence_interval(epochs: int, max_steps: int) -> int:
    """Return the interval between evidence steps that gives at most `max_steps` of them."""
    return max(1, math.ceil(epochs / max_steps))


def phase_evidence_steps(n: int, epochs: int) -> int:
    """Return the number of evidence steps of a phase."""
    steps = epochs * math.ceil(n / phase_batch_size(n, epochs))
    return max(MIN_EVIDENCE_STEPS, min(EVIDENCE_STEPS, steps // STEPS_BETWEEN))


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
    cheaper epoch of each sort counts. A first training, which is not timed, does one-time work.
    """
    x, y = data[0][:TRIAL_SAMPLES], data[1][:TRIAL_SAMPLES]
    trial = config.change(epochs=4, every=2, burn_in=0, progress=False, equivariance=False)
    costs: dict[str, Cost] = {}
    with torch.random.fork_rng([]):
        fit(structures[0].make(), (x, y), likelihood(), config=trial)  # one-time work
        for structure in structures:
            started = clock.now()
            history = fit(structure.make(), (x, y), likelihood(), config=trial).history
            total = clock.now() - started
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


def training_samples(n: int) -> int:
    """Return how many of n training samples each start is trained on; the others are left out."""
    return n if n < MIN_SPLIT_SAMPLES else n - max(1, int(LEFT_OUT_SHARE * n))


def plan_comparison(
    costs: dict[str, Cost], containing: set[str], n: int, seconds: float, starts: int, workers: int
) -> Plan:
    """Return the plan with the most epochs that fit, the same for all structures.

    Samples are reduced before a phase falls below `MIN_EPOCHS`, but not below the fewest samples.

    Args:
        costs: structure -> cost.
        containing: structures that start from the first phase of another one.
        n: number of training samples.
        seconds: available time.
        starts: starts of each structure.
        workers: trainings that run at the same time.
    """

    def total(samples: int, epochs: int) -> float:
        steps, left_out = phase_evidence_steps(samples, epochs), min(n - samples, MAX_LEFT_OUT)
        phases = [
            (1 if name in containing else 2)
            * (cost.total_seconds(samples, epochs, steps) + left_out * SCORING_COST * cost.training)
            for name, cost in costs.items()
        ]
        return max(starts * sum(phases) / workers, *phases)

    limit = PLANNED_SHARE * seconds
    samples = training_samples(n)
    fewest = MIN_LARGE_SAMPLES if n >= LARGE_SAMPLES else MIN_SAMPLES
    samples = most_samples(samples, lambda n: total(n, MIN_EPOCHS) <= limit, fewest)
    possible = range(1, longest_phase(samples) + 1)
    epochs = max((e for e in possible if total(samples, e) <= limit), default=1)
    return Plan((epochs, epochs), samples, total(samples, epochs), costs)


def longest_phase(samples: int) -> int:
    """Return the largest number of epochs of a phase."""
    return min(MAX_EPOCHS, max(25, math.ceil(MAX_STEPS * batch_size(samples) / samples)))


def comparison_shares(n: int) -> tuple[float, float]:
    """Return the shares of the time for the first starts and for all, for n training samples."""
    return LARGE_COMPARISON_SHARES if n >= LARGE_SAMPLES else COMPARISON_SHARES


def plan_final(name: str, cost: Cost, n: int, seconds: float) -> FinalPlan | None:
    """Return the plan with the most epochs that fit; None if no epoch fits.

    Samples are reduced before epochs fall below `MIN_FINAL_EPOCHS`. The evidence of many samples is
    estimated from some of them (`result_samples`).
    """
    limit = FINAL_PLANNED_SHARE * seconds
    seconds_per_evidence = max(min(n, EVIDENCE_SUBSET) * cost.evidence, 1e-9)
    affordable = int(min(FINAL_EVIDENCE_STEPS, EVIDENCE_TIME_SHARE * limit / seconds_per_evidence))
    evidence_steps = max(MIN_FINAL_EVIDENCE_STEPS, affordable)

    def fits(samples: int, epochs: int) -> bool:
        result = (result_samples(samples) or samples) * cost.evidence + cost.once
        return cost.loop_seconds(samples, epochs, evidence_steps) + result <= limit

    samples = most_samples(n, lambda n: fits(n, MIN_FINAL_EPOCHS), MIN_SAMPLES)
    wanted = max(50, math.ceil(MAX_FINAL_STEPS * batch_size(samples) / samples))
    max_epochs = min(MAX_FINAL_EPOCHS, wanted)
    epochs = max((e for e in range(1, max_epochs + 1) if fits(samples, e)), default=0)
    return FinalPlan(name, epochs, samples, evidence_steps) if epochs else None


def result_samples(n: int) -> int | None:
    """Return the samples for the evidence of a final network; None for all."""
    return RESULT_SAMPLES if n >= LARGE_SAMPLES else None


def exact_products(question: Question, n_samples: int) -> float:
    """Return the multiplications of the most expensive exact estimate; infinity if one is too big.

    Evidences are compared only in the same structure: bounds are not equally tight.
    """
    x = question.train[0][:1]
    likelihood, method, products = question.likelihood(), Method(), 0.0
    for structure in question.family.structures:
        with torch.random.fork_rng([]), torch.no_grad():
            model = structure.make()
            f = outputs(model, x)
        n_columns = len(likelihood.hessian_root(f))
        n_weights = sum(value.numel() for value in weights(model).values())
        n_rows = n_samples * n_columns
        if exact_method(method, n_weights, n_rows) is None:
            return math.inf
        products = max(products, float(n_rows * n_weights * min(n_rows, n_weights)))
    return products


def comparison_config(question: Question, options: Options) -> FitConfig:
    """Return the training options of a comparison, without epochs and batch size.

    The exact curvature is used for the evidence that is compared, or even for every evidence step,
    if it is cheap for all structures.
    """
    config = question.config or FitConfig(lr=1e-2).change(estimator="mc")
    if config.evidence_structure == AFFORDABLE:  # evidences are compared: one structure for all
        config = replace(config, evidence_structure=None)
    products = exact_products(question, training_samples(len(question.train[1])))
    minutes = options.minutes if options.minutes >= MIN_EXACT_MINUTES else 0.0
    if question.config is None and products <= EXACT_STEP_PRODUCTS * minutes:
        config = config.change(structure="auto", estimator="exact")
    elif question.config is None and products <= EXACT_RESULT_PRODUCTS * minutes:
        config = config.change(evidence_structure="auto")
    device = options.resolved_device()
    # A network that learned nothing is recognised by its left-out samples; no time for a restart.
    return replace(config, seed=options.seed, device=device, progress=False, restart=False)


def n_workers(options: Options) -> int:
    """Return the number of trainings that run at the same time."""
    if not clock.is_wall_time():
        return 1
    is_cpu = torch.device(options.resolved_device()).type == "cpu"
    return cpu_threads() if is_cpu else min(MAX_GPU_WORKERS, cpu_threads())


def plan_question(question: Question, options: Options, tell: Tell) -> tuple[FitConfig, Plan]:
    """Return training options and plan of a comparison; resume the stored plan if there is one."""
    n = len(question.train[1])
    config = comparison_config(question, options)
    folder = options.unfinished_folder(question.name)
    key = None if folder is None else _plan_key(question, options)
    given = options.epochs or (config.epochs if question.config is not None else 0)
    longest = max(given, MAX_EPOCHS)
    stored = None if folder is None else _read_plan(folder / PLAN, key, longest)
    if stored is None and folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # checkpoints of another run
    if given:
        plan = Plan((max(1, given // 2), max(1, given - given // 2)), training_samples(n))
    else:
        plan = stored or _plan_by_time(question, options, config, tell)
        config = replace(config, subset=min(plan.samples, EVIDENCE_SUBSET))
    if stored is not None:
        tell("  resuming an unfinished run of the same command")
    elif folder is not None:
        write_atomically(folder / PLAN, json.dumps({"key": key, **asdict(plan)}).encode())
    if plan.samples < training_samples(n):
        limit = f"to stay within {options.minutes:g} minutes"
        tell(f"  comparing on {plan.samples:,} of {n:,} training samples, {limit}")
    return config, plan


P = TypeVar("P")


def stored_plan(file: Path | None, name: str, longest: int, make: Callable[[], P]) -> FinalPlan | P:
    """Return the plan of an interrupted training from a file, or else make and store a new one.

    A stored plan is that of the named structure, of at most `longest` epochs.
    """
    if file is None:
        return make()
    with contextlib.suppress(*DAMAGED):
        stored = FinalPlan(**parse_json(file))
        _check_counts([stored.epochs], longest)
        _check_counts([stored.samples, stored.evidence_steps])
        if stored.name == name:
            return stored
    plan = make()
    if isinstance(plan, FinalPlan):
        write_atomically(file, json.dumps(asdict(plan)).encode())
    return plan


def _check_counts(counts: Sequence[Any], most: int = sys.maxsize) -> None:
    """Raise ValueError unless all numbers of a stored plan are from 1 to the largest one."""
    if not all(type(count) is int and 0 < count <= most for count in counts):
        raise ValueError(f"{counts} must be from 1 to {most}")


def _plan_by_time(question: Question, options: Options, config: FitConfig, tell: Tell) -> Plan:
    tell("  timing a short trial of each network")
    started = clock.now()
    family, workers, n = question.family, n_workers(options), len(question.train[1])
    is_large = n >= LARGE_SAMPLES
    size = phase_batch_size(MIN_LARGE_SAMPLES, 2) if is_large else batch_size(training_samples(n))
    config = replace(config, batch_size=size)
    threads = torch.get_num_threads()
    try:
        if workers > 1:  # as in a worker
            torch.set_num_threads(1)
        costs = measure_costs(family.structures, question.train, question.likelihood, config)
    finally:
        torch.set_num_threads(threads)
    left = 60 * options.minutes - (clock.now() - started)
    # Large data have few epochs. Without the optional structures, the others get more of them.
    required = {name: cost for name, cost in costs.items() if name not in family.optional}
    for tried in (costs, required):
        for share in comparison_shares(n):
            containing = set(family.contains) & set(tried)
            plan = plan_comparison(tried, containing, n, share * left, options.starts, workers)
            if plan.steps >= WANTED_STEPS:
                return plan
        if not is_large or plan.epochs[0] >= MIN_EPOCHS:
            return plan
    return plan


def _plan_key(question: Question, options: Options) -> dict[str, Any]:
    """Return what two runs must share for one to resume the other."""
    return {
        "data": fingerprint(*question.train),
        "candidates": [s.name for s in question.family.structures],
        "optional": list(question.family.optional),
        "minutes": options.minutes,
        "epochs": options.epochs,
        "starts": options.starts,
        "seed": options.seed,
        "groups": groups_as_json(options.groups),
        "torch": str(torch.__version__),
    }


def _read_plan(file: Path, key: dict[str, Any] | None, longest: int) -> Plan | None:
    with contextlib.suppress(*DAMAGED):
        stored = parse_json(file)
        if stored["key"] == key:
            costs = {name: Cost(**parts) for name, parts in stored["costs"].items()}
            seconds = [value for cost in costs.values() for value in vars(cost).values()]
            missing = set(stored["key"]["candidates"]) - set(costs)
            is_known = not costs or not missing or missing == set(stored["key"]["optional"])
            if not is_known or not all(0 <= value < math.inf for value in seconds):
                return None
            first, second = stored["epochs"]
            _check_counts([first, second], longest)
            _check_counts([stored["samples"]])
            return Plan((first, second), stored["samples"], float(stored["seconds"]), costs)
    return None
