"""List the methods of the benchmark: `discover`, and the baselines.

A method is a callable from a `Problem` to an `Answer`. To run in several processes it must be a
function of a module, or a `functools.partial` of one.
"""

from collections.abc import Callable
from typing import Any, Literal

from symrazor.bench.truth.baselines import (
    augerino,
    best_on_test_set,
    cross_validation,
    maximum_likelihood,
    residual_pathway_prior,
)
from symrazor.bench.truth.task import Answer, Claim, Normal, Problem, Range
from symrazor.data import dataset
from symrazor.discovery import Discovery, discover
from symrazor.discovery.invariances import LearnedInvariances

Method = Callable[[Problem], Answer]


def run_discover(problem: Problem, minutes: float = 2.0, device: str = "cpu") -> Answer:
    """Answer by `symrazor.discover`.

    The problem has a test set of its own, so that nothing needs to be held out for the report: as
    for all methods, every sample is for training.
    """
    options: dict[str, Any] = {
        "minutes": minutes,
        "seed": problem.seed,
        "progress": False,
        "device": device,
        "held_out": 0.0,
    }
    if problem.y is None:
        data = dataset(problem.x, None, kind=problem.kind, times=problem.times)
        return _as_answer(discover(data, **options), problem)
    found = discover(problem.x, problem.y, kind=problem.kind, groups=problem.groups, **options)
    return _as_answer(found, problem)


def _as_answer(found: Discovery, problem: Problem) -> Answer:
    """Return what a discovery states, in the terms of the benchmark."""
    if found.dynamics is not None:
        discovered = found.dynamics.discovered
        count = len(discovered.conserved)
        return Answer((Claim("conserved quantities", count, discovered.probability),))
    answer = found.results[0].answer
    claims = tuple(
        Claim(claim.name, claim.holds, claim.probability, claim.margin, claim.standard_error)
        for claim in answer.claims
    )
    prediction = found.predict(problem.test_x)
    if not problem.is_regression:
        log_probabilities = prediction.mean.clamp(min=1e-12).log()
        return Answer(claims, _ranges(answer.invariances), log_probabilities)
    assert prediction.variance is not None
    mean, deviation = prediction.mean.flatten(), prediction.variance.sqrt().flatten()
    return Answer(claims, {}, Normal(mean.float(), deviation.float()))


def _ranges(learned: LearnedInvariances | str | None) -> dict[str, Range]:
    if not isinstance(learned, LearnedInvariances):
        return {}
    ranges = {}
    for name, spread in learned.learned.spreads.of_class.items():
        is_estimate = learned.supported and spread.is_open
        status = "estimated" if is_estimate else "no evidence"
        ranges[name] = Range(spread.range, *spread.bounds, status)  # type: ignore[arg-type]
    return {**ranges, "flip": ranges["left-right flip"]}


MethodName = Literal[
    "discover",
    "cross-validation",
    "maximum-likelihood",
    "residual-pathway-prior",
    "augerino",
    "best-on-test-set",
]
METHODS: dict[MethodName, Method] = {
    "discover": run_discover,
    "cross-validation": cross_validation,
    "maximum-likelihood": maximum_likelihood,
    "residual-pathway-prior": residual_pathway_prior,
    "augerino": augerino,
    "best-on-test-set": best_on_test_set,
}
"""Name -> method."""
