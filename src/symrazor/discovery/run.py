"""Train the candidates of one question, one after the other, within the time given."""

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from symrazor.core.files import write_atomically
from symrazor.core.likelihood import scores
from symrazor.data import Tensors
from symrazor.discovery.answer import Answer, Candidate, rank
from symrazor.discovery.budget import Plan, timed
from symrazor.discovery.conditional_evidence import log_scores, rest
from symrazor.discovery.planning import planned
from symrazor.discovery.question import Asked, Options, Tell, slug, some
from symrazor.discovery.refit import (
    FEW,
    Longer,
    learned_precisions,
    longer_plan,
    rise,
    unsettled,
    winner,
)
from symrazor.discovery.structures import Structure
from symrazor.groups import GroupAction, TrivialAction, action_on
from symrazor.symmetry.equivariance import Action, equivariance_error
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import outputs
from symrazor.training.options import FitConfig

PROBES = 3
"""Further estimates of an evidence that is near to another one."""
NEAR = 30.0
"""Nats below which two evidences are measured again, with other probes."""
LATEST = 0.6
"""A candidate that would end after this part of the time given is left out."""
ORDERS = 8
MOVED = 128
"""Training data whose places are exchanged, to see what that changes of the outputs."""
SCORED = 2000
"""Held-out data on which networks are scored that are only compared."""


def answer(asked: Asked, options: Options, tell: Tell) -> Answer:
    """Train the candidates and rank them; then the winner again for the rest of the time.

    The first candidate is trained in any case, others while time is left.
    """
    started = time.perf_counter()
    config, used, plan = planned(asked, options, tell)
    train = (asked.train[0][used], asked.train[1][used])
    found, spent = _compared(asked, train, config, plan, options, tell)
    if plan.costs and (left_out := rest(asked.train, used)) is not None:
        found = [replace(c, unseen=log_scores(c.fit, left_out)) for c in found]
    steps = config.epochs * math.ceil(len(train[1]) / config.batch_size)
    why = "fit into the time: allow more" if plan.costs else "were made: ask for more epochs"
    notes = (f"Only {steps} training steps {why}.",) if steps < FEW else ()
    ranked = rank(list(_measured_again(found)))
    compared = Answer(asked.name, asked.question, asked.family, ranked, notes)
    if not plan.costs:
        return compared
    late = unsettled(compared)
    if late is not None:
        label = asked.family.label(late.name)
        still = f"The evidence of {label} still rose by {rise(late):,.0f} nats at its last step"
        notes = (*notes, f"{still}: this is not settled, allow more time.")
    name = winner(compared, early=steps < FEW or late is not None)
    compared = replace(compared, notes=notes, chosen=name)
    trained = compared.named(name).fit
    loop = trained.history[-1]["seconds"]
    cost = plan.costs[name].seen(len(train[1]), config.epochs, loop, spent[name] - loop)
    left = 60 * options.minutes - (time.perf_counter() - started)
    fresh = longer_plan(name, cost, len(asked.train[1]), left)
    if fresh is not None:
        fresh = replace(fresh, precisions=learned_precisions(trained.razor, fresh.data))
    chosen = _longer(asked, fresh, options)
    if chosen is None or chosen.epochs * chosen.data < config.epochs * len(train[1]):
        return compared  # too little time is left to do better
    label = asked.family.label(chosen.name)
    tell(f"  the rest of the time: {label}, {chosen.epochs} epochs on {chosen.data:,} data")
    final = _train_longer(asked, chosen, config, options)
    return replace(compared, chosen=chosen.name, final=final)


def _compared(
    asked: Asked,
    train: Tensors,
    config: FitConfig,
    plan: Plan,
    options: Options,
    tell: Tell,
) -> tuple[list[Candidate], dict[str, float]]:
    """The candidates, trained alike, and the seconds that each took."""
    structures, expected = asked.family.structures, plan.seconds
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
    folder = options.work(asked.name)
    if folder is None:
        return fresh
    file = folder / "longer.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Longer(**json.loads(file.read_text()))
    if fresh is not None:
        write_atomically(file, json.dumps(dataclasses.asdict(fresh)).encode())
    return fresh


def _train_longer(asked: Asked, chosen: Longer, config: FitConfig, options: Options) -> Candidate:
    """The winner anew, with the passes, data and prior of its plan."""
    structure = next(s for s in asked.family.structures if s.name == chosen.name)
    used = some(len(asked.train[1]), chosen.data, options.seed)
    config = timed(config, chosen.epochs, chosen.data, chosen.measured)
    if chosen.precisions:
        config = config.change(prior_precision=chosen.precisions)
    data = (asked.train[0][used], asked.train[1][used])
    return _train(asked, structure, data, config, options, "longer")


def _train(
    asked: Asked,
    structure: Structure,
    train: Tensors,
    config: FitConfig,
    options: Options,
    place: str | None = None,
) -> Candidate:
    folder = options.work(asked.name)
    folder = folder and folder / slug(place or structure.name)
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
        scored = some(n, n if place else SCORED, options.seed)
        x, y = (part[scored].to(done.data.x.device) for part in asked.test)
        figures = scores(done.razor.likelihood, outputs(model, x), y)
        done.reading = replace(done.reading, test=figures)
    moved: dict[str, Sequence[Action] | tuple[GroupAction, GroupAction]] = {}
    x = train[0][:MOVED].to(next(model.parameters()).device)
    if asked.ordered:
        moved["permutation"] = permutations(x.shape[2], options.seed)
    for name, group in asked.family.groups.items():
        moved[name] = (action_on(group, x.shape), TrivialAction(group))
    errors = {name: equivariance_error(model, x, how) for name, how in moved.items()}
    measured = {**done.reading.equivariance_error, **errors}
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
