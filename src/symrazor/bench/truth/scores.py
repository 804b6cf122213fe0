"""Score answers against known answers: one row for each claim or range."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from statistics import fmean
from typing import Literal

from symrazor.bench.truth.task import Answer, Claim, Fact, Half, Kind, Problem, Range, Task
from symrazor.bench.truth.training import accuracy, negative_log_likelihood

Verdict = Literal["right", "wrong", "undecided"]
NEUTRAL = {"scale": 1.0}
"""Range of a transformation that does nothing; 0 if it is not listed."""
MIN_TOLERANCE = {
    "rotation": 10.0,
    "x-translation": 1.0,
    "y-translation": 1.0,
    "scale": 0.15,
    "flip": 0.15,
}
"""Smallest tolerated error of a range: degrees, pixels, factor, probability."""
RELATIVE_TOLERANCE = 0.15
"""Tolerated error of a range, relative to the known range."""
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Limits of the probabilities in the table of calibration."""


@dataclass(frozen=True)
class Row:
    """One claim or range of one method on one task and seed.

    Args:
        method: name of the method.
        task: name of the task.
        kind: kind of its inputs.
        half: half of the tasks.
        seed: of data and method.
        seconds: run time of the method.
        claim: what was asked: the name of a symmetry, or "range of" a transformation.
        answer: the known answer.
        stated: the stated answer; None if the method does not decide.
        status: comparison of the two.
        probability: stated probability.
        margin: stated nats in favour.
        standard_error: of the margin.
        error: error of a range, if there is an estimate.
        nll: mean negative log likelihood of the test labels.
        oracle_nll: the same for the architecture with the known answer built in.
        regret: difference of the two.
        accuracy: on the test set; for regression the share of explained variance.
        message: error message of a method that failed.
    """

    method: str
    task: str
    kind: Kind
    half: Half
    seed: int
    seconds: float
    claim: str = ""
    answer: Fact | float = False
    stated: Fact | float | None = None
    status: Verdict = "undecided"
    probability: float | None = None
    margin: float | None = None
    standard_error: float | None = None
    error: float | None = None
    nll: float | None = None
    oracle_nll: float | None = None
    regret: float | None = None
    accuracy: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Summary:
    """Totals of one method on one task or half.

    Args:
        name: of the task or half.
        method: name of the method.
        claims: number of claims and ranges.
        right: percentage of them that is stated and right.
        wrong: percentage that is stated and wrong.
        undecided: percentage that is not stated.
        brier: mean squared error of the stated probabilities.
        coverage: percentage of pairs of seeds in which the interval of the margin of one seed, two
            standard errors to both sides, contains the margin of the other.
        range_error: mean error of estimated ranges of rotation, in degrees.
        regret: mean nats per datum behind the oracle architecture.
        minutes: mean run time.
    """

    name: str
    method: str
    claims: int
    right: float
    wrong: float
    undecided: float
    brier: float | None
    coverage: float | None
    range_error: float | None
    regret: float | None
    minutes: float


@dataclass(frozen=True)
class Reliability:
    """Claims whose stated probability lies in one interval."""

    method: str
    low: float
    high: float
    claims: int
    probability: float
    right: float


def score(
    method: str,
    task: Task,
    problem: Problem,
    answer: Answer,
    seconds: float,
    oracle_nll: float | None = None,
    message: str = "",
) -> list[Row]:
    """Return the rows of one answer."""
    nll = quality = regret = None
    if answer.prediction is not None and problem.test_y is not None:
        nll = float(negative_log_likelihood(answer.prediction, problem.test_y).mean())
        quality = accuracy(answer.prediction, problem.test_y)
        regret = None if oracle_nll is None else nll - oracle_nll
    claims = {claim.name: claim for claim in answer.claims}
    row = Row(
        method=method,
        task=task.name,
        kind=task.kind,
        half=task.half,
        seed=problem.seed,
        seconds=round(seconds, 2),
        nll=_rounded(nll),
        oracle_nll=_rounded(oracle_nll),
        regret=_rounded(regret),
        accuracy=_rounded(quality),
        message=message,
    )
    rows = []
    for name, known in task.claims.items():
        claim = claims.get(name, Claim(name, None, math.nan))
        rows.append(
            replace(
                row,
                claim=name,
                answer=known,
                stated=claim.holds,
                status=compare(known, claim.holds),
                probability=_rounded(claim.probability),
                margin=_rounded(claim.margin),
                standard_error=_rounded(claim.standard_error),
            )
        )
    for name, width in task.ranges.items():
        estimate = answer.ranges.get(name, Range(status="not tested"))
        status, error = compare_range(name, width, estimate)
        stated = estimate.estimate if estimate.status == "estimated" else None
        rows.append(
            replace(
                row,
                claim=f"range of {name}",
                answer=width,
                stated=_rounded(stated),
                status=status,
                error=_rounded(error),
            )
        )
    return rows


def _rounded(value: float | None) -> float | None:
    """Return six digits after the point; None for NaN, which JSON lacks."""
    return None if value is None or math.isnan(value) else round(value, 6)


def compare(known: Fact, stated: Fact | None) -> Verdict:
    """Return whether a stated answer is right."""
    if stated is None:
        return "undecided"
    return "right" if stated == known else "wrong"


def compare_range(name: str, known: float, stated: Range) -> tuple[Verdict, float | None]:
    """Return whether a range is right within its tolerance, and the error of an estimate.

    "No evidence" is right for a transformation that does not occur, and decides nothing otherwise.
    """
    neutral = NEUTRAL.get(name, 0.0)
    if stated.status == "not tested":
        return "undecided", None
    if stated.status == "no evidence":
        return ("right" if known == neutral else "undecided"), None
    error = abs(stated.estimate - known)
    tolerance = max(MIN_TOLERANCE[name], RELATIVE_TOLERANCE * known)
    return ("right" if error <= tolerance else "wrong"), error


def summarise(rows: Sequence[Row], name: str = "") -> list[Summary]:
    """Return one summary for each method."""
    summaries = []
    for method in dict.fromkeys(row.method for row in rows):
        chosen = [row for row in rows if row.method == method]
        share = {
            verdict: 100 * sum(row.status == verdict for row in chosen) / len(chosen)
            for verdict in ("right", "wrong", "undecided")
        }
        runs = {(row.task, row.seed): row for row in chosen}.values()
        squares = [
            (row.probability - (row.status == "right")) ** 2
            for row in chosen
            if row.probability is not None and row.status != "undecided"
        ]
        angles = [r.error for r in chosen if r.claim == "range of rotation" and r.error is not None]
        summaries.append(
            Summary(
                name,
                method,
                len(chosen),
                share["right"],
                share["wrong"],
                share["undecided"],
                _mean(squares),
                _coverage(chosen),
                _mean(angles),
                _mean([row.regret for row in runs if row.regret is not None]),
                fmean(row.seconds for row in runs) / 60,
            )
        )
    return summaries


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _coverage(rows: Sequence[Row]) -> float | None:
    """Return the percentage of ordered pairs of seeds whose margins agree within the interval."""
    inside = [
        abs(one.margin - other.margin) <= 2 * one.standard_error
        for one, other in permutations(rows, 2)
        if (one.task, one.claim) == (other.task, other.claim)
        and one.margin is not None
        and one.standard_error is not None
        and other.margin is not None
    ]
    return 100 * fmean(inside) if inside else None


def per_task(rows: Sequence[Row]) -> list[Summary]:
    """Return one summary for each task and method, then one for each half and method."""
    names = list(dict.fromkeys(row.task for row in rows))
    summaries = [s for n in names for s in summarise([r for r in rows if r.task == n], n)]
    halves = sorted({row.half for row in rows})
    return summaries + [
        s for h in halves for s in summarise([r for r in rows if r.half == h], f"half: {h}")
    ]


@dataclass(frozen=True)
class Agreement:
    """Claims that two runs state both, and the percentage of them with the same answer."""

    method: str
    stated: int
    same: float | None


def agreement(rows: Sequence[Row], others: Sequence[Row]) -> list[Agreement]:
    """Compare two runs, for instance with more time or on another device.

    Ranges are the same if both are right or both are wrong.
    """
    known = {(row.method, row.task, row.seed, row.claim): row for row in others}
    table = []
    for method in dict.fromkeys(row.method for row in rows):
        pairs = [
            (row, known[row.method, row.task, row.seed, row.claim])
            for row in rows
            if row.method == method and (row.method, row.task, row.seed, row.claim) in known
        ]
        same = [
            row.status == other.status
            for row, other in pairs
            if "undecided" not in (row.status, other.status)
        ]
        table.append(Agreement(method, len(same), 100 * fmean(same) if same else None))
    return table


def reliability(rows: Sequence[Row]) -> list[Reliability]:
    """Return how often stated claims are right, by stated probability."""
    table = []
    for method in dict.fromkeys(row.method for row in rows):
        stated = [
            (row.probability, row.status == "right")
            for row in rows
            if row.method == method and row.status != "undecided" and row.probability is not None
        ]
        for low, high in pairwise(BINS):
            inside = [s for s in stated if low <= s[0] < high or s[0] == high == BINS[-1]]
            if inside:
                right = fmean(is_right for _, is_right in inside)
                mean = fmean(probability for probability, _ in inside)
                table.append(Reliability(method, low, high, len(inside), mean, right))
    return table
