"""Data at any scale and of any number type: a finite, unchanged verdict, or an error of our own."""

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies
import torch
from torch import Tensor

import symrazor as sr
from harness.outcome import Outcome

MAX_EXPONENT = 20
MAX_SHIFT = 1e12
"""Largest shift of a column, in units of its spread: more is lost in float64."""
MAX_NATS = 1.0
"""Largest change of an evidence by a change of units, which rounds the data differently."""

Data = tuple[Tensor, Tensor]
Change = Callable[[random.Random, Tensor, Tensor], Data]


def _units(rng: random.Random, x: Tensor, y: Tensor) -> Data:
    """Return the same data in other units: each column is scaled and shifted."""

    def convert(column: Tensor) -> Tensor:
        scale = 10 ** rng.uniform(-MAX_EXPONENT, MAX_EXPONENT)
        shift = rng.choice((0, 1, -1)) * 10 ** rng.uniform(-MAX_EXPONENT, math.log10(MAX_SHIFT))
        return (column.double() + shift) * scale

    x = torch.stack([convert(column) for column in x.T], 1)
    return x, convert(y[:, 0])[:, None] if y.is_floating_point() else y


def _scaled(rng: random.Random, x: Tensor, y: Tensor) -> Data:
    return x.double() * 10 ** rng.uniform(-300, 300), y


UNCHANGED: dict[str, Change] = {
    "other units": _units,
    "other class numbers": lambda rng, x, y: (x, y + 10 if not y.is_floating_point() else y),
    "float64": lambda rng, x, y: (x.double(), y),
}
"""Changes after which the verdict must be the same."""
UNUSUAL: dict[str, Change] = {
    "any scale": _scaled,
    "constant column": lambda rng, x, y: (torch.cat([x, torch.full_like(x[:, :1], 7)], 1), y),
    "duplicate columns": lambda rng, x, y: (torch.cat([x, x], 1), y),
    "zeros": lambda rng, x, y: (torch.zeros_like(x), y),
    "few samples": lambda rng, x, y: (x[: (n := rng.randint(1, 22))], y[:n]),
    "one class": lambda rng, x, y: (x, torch.zeros_like(y)),
    "one sample of a class": lambda rng, x, y: (x, (torch.arange(len(x)) == 3).long()),
    "float16": lambda rng, x, y: (x.half(), y),
    "bfloat16": lambda rng, x, y: (x.bfloat16(), y),
    "bytes": lambda rng, x, y: ((x * 20 + 100).clamp(0, 255).byte(), y),
    "integers": lambda rng, x, y: ((x * 1e3).long(), y),
    "huge integers": lambda rng, x, y: ((x.double() * 2.0**60).long(), y),
    "an outlier": lambda rng, x, y: (x.index_fill(0, torch.tensor(3), 1e30), y),
    "missing values": lambda rng, x, y: (x.index_fill(0, torch.tensor(3), torch.nan), y),
    "infinite values": lambda rng, x, y: (x.index_fill(0, torch.tensor(3), torch.inf), y),
    "rare units": lambda rng, x, y: (x * (torch.rand(x.shape) < 0.02), y),
}
"""Changes after which the verdict must be finite, or an error says what is wrong."""


def _data(rng: random.Random) -> Data:
    generator = torch.Generator().manual_seed(rng.randrange(100))
    x = torch.randn(40, 3, generator=generator)
    target = x[:, :1] * x[:, 1:2]
    return (x, (target[:, 0] > 0).long()) if rng.random() < 0.5 else (x, target)


def _verdict(x: Tensor, y: Tensor) -> dict[str, Any]:
    discovery = sr.discover(x, y, epochs=2)
    answer = discovery.results[0].answer
    evidences = [candidate.log_evidence for candidate in answer.candidates]
    predictions = discovery.predict(x).mean
    is_finite = all(map(math.isfinite, evidences)) and bool(predictions.isfinite().all())
    by_name = {candidate.name: candidate.log_evidence for candidate in answer.candidates}
    return {"finite": is_finite, "recommended": answer.recommended.name, "evidences": by_name}


def _check(name: str, change: Change, rng: random.Random) -> str | None:
    """Return the kind of a failure, followed by a description; None if there is none."""
    original = _data(rng)
    try:
        found = _verdict(*change(rng, *original))
    except Exception as error:
        is_ours = type(error) is ValueError or type(error).__module__.startswith("symrazor")
        wrong = name in UNCHANGED or not is_ours
        return f"wrong exception: {name}: {error!r}" if wrong else None
    if not found["finite"]:
        return f"wrong verdict: {name}: {found}"
    if name not in UNCHANGED:
        return None
    expected = _verdict(*original)
    close = all(
        abs(value - expected["evidences"][key]) < MAX_NATS
        for key, value in found["evidences"].items()
    )
    if close and found["recommended"] == expected["recommended"]:
        return None
    return f"wrong verdict: {name}: {found}, not {expected}"


def attack(count: int, seed: int = 0) -> Outcome:
    """Run `discover` on `count` data sets, changed in ways that hypothesis chooses."""
    changes = {**UNCHANGED, **UNUSUAL}

    def check(rng: random.Random) -> str | None:
        name = rng.choice(list(changes))
        return _check(name, changes[name], rng)

    return search(check, count, seed)


def search(check: Callable[[random.Random], str | None], count: int, first: int) -> Outcome:
    """Call `check` with the choices of hypothesis, which simplifies those that fail."""
    outcome = Outcome()
    warnings.simplefilter("ignore")
    found = ""

    @hypothesis.seed(first)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(hypothesis.strategies.randoms(use_true_random=False))
    def test(rng: random.Random) -> None:
        nonlocal found
        outcome.tried += 1
        found = check(rng) or ""
        assert not found

    try:
        test()
    except AssertionError:
        kind, _, text = found.partition(": ")
        outcome.fail(kind, text)
    return outcome
