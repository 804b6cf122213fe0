"""Train the candidates of one question, one after the other, within the time given."""

import contextlib
import dataclasses
import json
import math
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symrazor.checkpoint import fingerprint
from symrazor.data import Tensors
from symrazor.discover.answer import Answer, Candidate, rank
from symrazor.discover.budget import Cost, Make, Plan, batch_size, costs_of, every, plan, timed
from symrazor.discover.longer import COMPARING, Longer, longer_plan, rise, unsettled, winner
from symrazor.discover.structures import Family, Structure
from symrazor.equivariance import Action, equivariance_error
from symrazor.fit import Fit, fit
from symrazor.options import FitConfig
from symrazor.reading import scores
from symrazor.report import write_atomically
from symrazor.training import outputs

Tell = Callable[[str], object]
PROBES = 3
"""Further estimates of an evidence that is near to another one."""
NEAR = 30.0
"""Nats below which two evidences are measured again, with other probes."""
LATEST = 0.6
"""A candidate that would end after this part of the time given is left out."""
ORDERS = 8
FEW = 400
"""Training steps below which a verdict says that it comes early."""
SCORED = 2000
"""Held-out data on which networks are scored that are only compared."""
LONGER = 1.5
"""The winner is trained again if it gets so many times the steps of the comparison."""


@dataclass(frozen=True)
class Options:
    """How to discover.

    Args:
        minutes: for the training of all candidates together.
        epochs: passes over all data for each candidate, instead of a time.
        seed: of splits, initial weights, shuffling and probes.
        device: "auto" (CUDA if there is one), "cpu", "cuda", ...
        groups: symmetries to relax; None for what the kind of data has.
        held_out: part of the data that is kept for the report alone, where none came with them.
        invariances: whether to learn which transformations of pictures leave their label alone;
            None for "if there is a time to share, rather than a number of epochs".
        out: run folder; what is unfinished there is taken up again.
        progress: show bars; None for "if this is a terminal".
    """

    minutes: float = 2.0
    epochs: int | None = None
    seed: int = 0
    device: str = "auto"
    groups: tuple[str, ...] | None = None
    held_out: float = 0.2
    invariances: bool | None = None
    out: Path | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"expected minutes above 0, got {self.minutes}; do --minutes 2")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"expected epochs of at least 1, got {self.epochs}; do --epochs 50")

        if not 0 <= self.held_out < 1:
            raise ValueError(f"expected held_out as a fraction in [0, 1), got {self.held_out}")

    def change(self, **changes: Any) -> "Options":
        """A copy with some fields replaced.

        Raises:
            ValueError: a field that is not there.
        """
        known = {f.name for f in fields(self)}
        if not set(changes) <= known:
            got = sorted(set(changes) - known)
            raise ValueError(f"expected options among {sorted(known)}, got {got}")
        if changes.get("groups") is not None:
            changes["groups"] = tuple(changes["groups"])
        if changes.get("out") is not None:
            changes["out"] = Path(changes["out"])
        return replace(self, **changes)

    @property
    def work(self) -> Path | None:
        """Folder for what is not finished."""
        return None if self.out is None else self.out / "unfinished"

    def place(self) -> str:
        """The device to train on."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Asked:
    """One question: its data as the networks see them, and what is compared.

    Args:
        name: of the question.
        question: in words.
        family: the candidates.
        train: prepared training data.
        test: prepared held-out data.
        likelihood: makes a fresh one.
        config: of training; None to plan one for the time given.
        ordered: whether inputs are lists of points, whose order may matter.
    """

    name: str
    question: str
    family: Family
    train: Tensors
    test: Tensors | None
    likelihood: Make
    config: FitConfig | None = None
    ordered: bool = False


def answer(asked: Asked, options: Options, tell: Tell) -> Answer:
    """Train the candidates and rank them; then the winner again for the rest of the time.

    The first candidate is trained in any case, others while time is left.
    """
    started = time.perf_counter()
    config, used, planned = _planned(asked, options, tell)
    train = (asked.train[0][used], asked.train[1][used])
    found, spent = _compared(asked, train, config, planned, options, tell)
    steps = config.epochs * math.ceil(len(train[1]) / config.batch_size)
    why = "fit into the time: allow more" if planned.costs else "were made: ask for more epochs"
    notes = (f"Only {steps} training steps {why}.",) if steps < FEW else ()
    ranked = rank(list(_measured_again(found)))
    compared = Answer(asked.name, asked.question, asked.family, ranked, notes)
    if not planned.costs:
        return compared
    late = unsettled(compared)
    if late is not None:
        label = asked.family.label(late.name)
        still = f"The evidence of {label} still rose by {rise(late):,.0f} nats at its last step"
        compared = replace(
            compared, notes=(*notes, f"{still}: this is not settled, allow more time.")
        )
    name = winner(compared, early=steps < FEW or late is not None)
    loop = compared.named(name).fit.history[-1]["seconds"]
    cost = planned.costs[name].seen(len(train[1]), config.epochs, loop, spent[name] - loop)
    left = 60 * options.minutes - (time.perf_counter() - started)
    chosen = _longer(asked, longer_plan(name, cost, len(asked.train[1]), left), options)
    if chosen is None or chosen.steps < LONGER * steps:
        return compared
    label = asked.family.label(chosen.name)
    tell(f"  the rest of the time: {label}, {chosen.epochs} epochs on {chosen.data:,} data")
    return replace(compared, final=_train_longer(asked, chosen, config, options))


def _compared(
    asked: Asked,
    train: Tensors,
    config: FitConfig,
    planned: Plan,
    options: Options,
    tell: Tell,
) -> tuple[list[Candidate], dict[str, float]]:
    """The candidates, trained alike, and the seconds that each took."""
    structures, expected = asked.family.structures, planned.seconds
    deadline = time.perf_counter() + LATEST * 60 * options.minutes
    found: list[Candidate] = []
    spent: dict[str, float] = {}
    late = 1.0
    for number, structure in enumerate(structures, 1):
        started = time.perf_counter()
        due = started + late * expected.get(structure.name, 0.0)
        if found and expected and due > deadline:
            tell(f"  {number} of {len(structures)}: {structure.name}: no time left")
            continue
        candidate = _train(asked, structure, train, config, options)
        found.append(candidate)
        seconds = candidate.fit.history[-1]["seconds"]
        spent[structure.name] = max(seconds, time.perf_counter() - started)
        if expected:
            late = max(1.0, sum(spent.values()) / sum(expected[name] for name in spent))
        place = f"{number} of {len(structures)}"
        tell(f"  {place}: {candidate.name} done, {config.epochs} epochs in {seconds:.0f} s")
    return found, spent


def _longer(asked: Asked, fresh: Longer | None, options: Options) -> Longer | None:
    """The longer training as it was begun before, or as it is planned now."""
    if options.work is None:
        return fresh
    file = options.work / _slug(asked.name) / "longer.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Longer(**json.loads(file.read_text()))
    if fresh is not None:
        write_atomically(file, json.dumps(vars(fresh)).encode())
    return fresh


def _train_longer(asked: Asked, chosen: Longer, config: FitConfig, options: Options) -> Candidate:
    """The winner anew, with the passes and data of its plan."""
    structure = next(s for s in asked.family.structures if s.name == chosen.name)
    used = _some(len(asked.train[1]), chosen.data, options.seed)
    config = timed(config, chosen.epochs, chosen.data)
    data = (asked.train[0][used], asked.train[1][used])
    return _train(asked, structure, data, config, options, "longer")


def _some(n: int, count: int, seed: int) -> Tensor:
    """Which of n data are used: all, or so many by chance."""
    if count >= n:
        return torch.arange(n)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:count].sort().values


def _train(
    asked: Asked,
    structure: Structure,
    train: Tensors,
    config: FitConfig,
    options: Options,
    place: str | None = None,
) -> Candidate:
    folder = options.work and options.work / _slug(asked.name) / _slug(place or structure.name)
    with torch.random.fork_rng([]):
        torch.manual_seed(options.seed)
        model = structure.make()
        done = fit(
            model,
            train,
            asked.likelihood(),
            test=asked.test if asked.config else None,  # within a time: scored once, at the end
            config=replace(config, resume=folder, device=options.place()),
        )
    if asked.test is not None and not asked.config:
        n = len(asked.test[1])
        some = _some(n, n if place else SCORED, options.seed)
        x, y = (part[some].to(done.data.x.device) for part in asked.test)
        figures = scores(done.razor.likelihood, outputs(model, x), y)
        done.reading = replace(done.reading, test=figures)
    if asked.ordered:
        x = train[0][:128].to(next(model.parameters()).device)
        error = equivariance_error(model, x, permutations(x.shape[2], options.seed))
        measured = {**done.reading.equivariance_error, "permutation": error}
        done.reading = replace(done.reading, equivariance_error=measured)
    return Candidate(structure.name, done)


def permutations(points: int, seed: int) -> list[Action]:
    """Random orders of points [n, features, points], under which outputs must not change."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(points, generator=generator) for _ in range(ORDERS)]
    return [Action(lambda x, o=o: x[:, :, o.to(x.device)], (lambda y: y,)) for o in orders]  # type: ignore[misc]


def _measured_again(candidates: list[Candidate]) -> Iterator[Candidate]:
    """The candidates; with the spread of their evidence where another one is near."""
    for one in candidates:
        near = any(
            other is not one and abs(other.log_evidence - one.log_evidence) < NEAR
            for other in candidates
        )
        yield replace(one, spread=_spread(one.fit)) if near else one


def _spread(done: Fit) -> float:
    """Standard deviation over probes; 0 for an exact curvature."""
    if done.razor.config.estimator != "mc":
        return 0.0
    values = [float(done.razor.evidence(done.data).log_evidence) for _ in range(PROBES)]
    return statistics.stdev([float(done.evidence.log_evidence), *values])


# The plan, and what is kept of it beside unfinished candidates.


def _planned(asked: Asked, options: Options, tell: Tell) -> tuple[FitConfig, Tensor, Plan]:
    """Options of training, which data to use, and the seconds each candidate should take."""
    n = len(asked.train[1])
    config = asked.config or FitConfig(lr=1e-2, batch_size=batch_size(n)).change(estimator="mc")
    config = replace(config, seed=options.seed, progress=options.progress)
    key = _key(asked, options)
    file = None if options.work is None else options.work / _slug(asked.name) / "plan.json"
    kept = _kept(file, key)
    if kept is None and file is not None:
        shutil.rmtree(file.parent, ignore_errors=True)
    if options.epochs is not None or asked.config is not None:
        epochs = options.epochs or config.epochs
        chosen = Plan(epochs, n, {})
        config = replace(
            config, epochs=epochs, every=config.every if asked.config else every(epochs)
        )
    else:
        if kept is None:
            tell("  timing a short try of each network")
            started = time.perf_counter()
            tried = replace(config, device=options.place())
            costs = costs_of(asked.family.structures, asked.train, asked.likelihood, tried)
            left = 60 * options.minutes - (time.perf_counter() - started)
            chosen = plan(costs, n, COMPARING * left)
        else:
            chosen = kept
        config = timed(config, chosen.epochs, chosen.data)
    if file is not None and kept is None:
        numbers = dataclasses.asdict(chosen)
        write_atomically(file, json.dumps({"key": key, **numbers}).encode())
    elif kept is not None:
        tell("  going on with an unfinished run of the same command")
    if chosen.data < n:
        within = f"to stay within {options.minutes:g} minutes"
        tell(f"  {chosen.data:,} of {n:,} data are used to compare, {within}")
    return config, _some(n, chosen.data, options.seed), chosen


def _key(asked: Asked, options: Options) -> dict[str, Any]:
    """What a run must share with the one that it continues."""
    return {
        "data": fingerprint(*asked.train),
        "candidates": [s.name for s in asked.family.structures],
        "minutes": options.minutes,
        "epochs": options.epochs,
        "seed": options.seed,
        "groups": None if options.groups is None else list(options.groups),
        "torch": str(torch.__version__),
    }


def _kept(file: Path | None, key: dict[str, Any]) -> Plan | None:
    if file is None or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())
        if found["key"] != key:
            return None
        costs = {name: Cost(**parts) for name, parts in found["costs"].items()}
        return Plan(int(found["epochs"]), int(found["data"]), dict(found["seconds"]), costs)
    except (ValueError, KeyError, TypeError):
        return None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
