"""Learn to which transformations of an image the chosen network should be invariant.

The network is trained again, averaged over rotated, shifted, scaled and mirrored copies of its
input; the evidence learns the widths of these transformations. The same network is trained without
copies, on the same data for as many epochs, and the two evidences are compared.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from symrazor.core.likelihood import Categorical
from symrazor.data import Dataset
from symrazor.discovery.budget import (
    EVIDENCE_SUBSET,
    PLANNED_SHARE,
    FinalPlan,
    batch_size,
    measure_costs,
    most_samples,
    stored_plan,
)
from symrazor.discovery.question import (
    MIN_LOG_ODDS,
    Options,
    Question,
    Structure,
    Tell,
    select,
    subsample,
)
from symrazor.invariance.averaged_network import Augment, Augmented, Average
from symrazor.invariance.transformation import Flips, affine
from symrazor.symmetry.verdict import invariance_sentence
from symrazor.training.fit import Fit, fit
from symrazor.training.loop import clock
from symrazor.training.options import FitConfig

TIME_SHARE = 0.35
"""Share of the available time for learning invariances."""
COPIES = 4
"""Copies of each image, before mirroring doubles them; few, to be fast."""
MIN_SIDE_PIXELS = 8
"""Images whose shorter side is smaller are not transformed."""
INITIAL_WIDTHS = {
    "rotation": 0.3,
    "x-translation": 0.1,
    "y-translation": 0.1,
    "x-scale": 0.1,
    "y-scale": 0.1,
}
"""Generator -> initial width: radians, half-widths of the image, log factors."""
MIN_SAMPLES, MAX_SAMPLES = 300, 2000
"""Fewer samples say little about widths; beyond the maximum, more epochs are worth more."""
MIN_EPOCHS, MAX_EPOCHS = 20, 60
EVIDENCE_STEPS = 20
MIN_EVIDENCE_STEPS = 10
"""With fewer evidence steps the widths are still close to their initial values."""
TRIAL_SAMPLES = 128


@dataclass(frozen=True)
class LearnedInvariances:
    """Learned widths of transformations, and the evidence for them.

    Args:
        network: name of the structure.
        averaged: the network averaged over copies, trained.
        without: the same network without copies, on the same data for as many epochs.
    """

    network: str
    averaged: Fit
    without: Fit

    @property
    def gain(self) -> float:
        """Nats of evidence in favour of the copies."""
        with_copies, without = self.averaged.evidence, self.without.evidence
        return float(with_copies.log_evidence) - float(without.log_evidence)

    @property
    def converged(self) -> bool:
        """Whether there were enough evidence steps to learn the widths."""
        steps = sum("log_evidence" in record for record in self.averaged.history)
        return steps >= MIN_EVIDENCE_STEPS

    @property
    def supported(self) -> bool:
        """Whether the evidence prefers the copies by more than odds of 20 to 1."""
        return self.converged and self.gain >= MIN_LOG_ODDS

    @property
    def verdict(self) -> str:
        """The invariances in words, with the evidence for them."""
        if not self.converged:
            needed = f"{MIN_EVIDENCE_STEPS} evidence steps"
            remedy = f"`--epochs {MIN_EVIDENCE_STEPS}` or more"
            return f"Invariances: not tested (needs at least {needed}; run with {remedy})."
        samples = f"{self.averaged.razor.n_data:,} samples"
        evidence = f"{self.gain:+,.0f} nats against the same network without averaging, {samples}"
        if not self.supported:
            return f"No evidence for invariance to the tested transformations ({evidence})."
        sentence = invariance_sentence(self.averaged.reading.invariances).removesuffix(".")
        # Widths grow from small values, and the training ends before large ones are reached.
        sentence = sentence.replace(" up to ", " up to at least ")
        return f"{sentence} ({evidence})."

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {
            "network": self.network,
            "verdict": self.verdict,
            "gain": self.gain,
            "supported": self.supported,
            "n": self.averaged.razor.n_data,
            "reading": self.averaged.reading.to_dict(),
        }


def wants_invariances(data: Dataset, options: Options) -> bool:
    """Return whether to learn invariances: for images, if requested or if the run is timed."""
    if data.kind != "image" or min(data.x.shape[2:]) < MIN_SIDE_PIXELS:
        return False
    return options.epochs is None if options.invariances is None else options.invariances


def averaged_structure(
    structure: Structure, seed: int = 0, average: Average = "joint"
) -> Structure:
    """Return a structure averaged over transformed copies of its input."""

    def make() -> nn.Module:
        transformations = affine(tuple(INITIAL_WIDTHS), INITIAL_WIDTHS)
        augment = Augment([transformations, Flips((-1,), 0.1)], COPIES, seed)
        return Augmented(structure.make(), augment, average=average)

    return Structure(f"{structure.name}, averaged", make, f"{structure.label} over copies")


def learn_invariances(
    question: Question, network: str, options: Options, tell: Tell
) -> LearnedInvariances | str:
    """Train the chosen network again, with and without copies, within `options.minutes`.

    Returns the learned invariances, or a sentence that says how much time is missing.
    """
    n = len(question.train[1])
    config = FitConfig(lr=1e-2, batch_size=batch_size(n), seed=options.seed, progress=False)
    config = replace(config.change(estimator="mc"), device=options.resolved_device())
    folder = options.unfinished_folder(question.name)
    make = partial(_make_plan, question, network, options, config)
    plan = stored_plan(folder and folder / "widths.json", make)
    if isinstance(plan, str):
        return plan
    config = replace(
        config,
        epochs=plan.epochs,
        every=max(1, plan.epochs // EVIDENCE_STEPS),
        batch_size=batch_size(plan.samples),
        subset=min(plan.samples, EVIDENCE_SUBSET),
    )
    train = select(question.train, subsample(n, plan.samples, options.seed))
    started, fits = clock.now(), []
    for place, structure in zip(
        ("widths", "no-widths"), _structures(question, plan.name, options.seed), strict=True
    ):
        with torch.random.fork_rng([]):
            torch.manual_seed(options.seed)
            model, likelihood = structure.make(), question.likelihood()
            resumed = replace(config, resume=folder and folder / place)
            fits.append(fit(model, train, likelihood, test=question.test, config=resumed))
    seconds = clock.now() - started
    size = f"{plan.samples:,} samples, {plan.epochs} epochs"
    tell(f"  invariances to transformations: {size} in {seconds:.0f} s")
    return LearnedInvariances(plan.name, *fits)


def _structures(question: Question, name: str, seed: int) -> list[Structure]:
    """Return the network averaged over copies, and the network itself."""
    plain = question.family.structure(name)
    is_classifier = isinstance(question.likelihood(), Categorical)
    return [averaged_structure(plain, seed, "joint" if is_classifier else "outputs"), plain]


def _make_plan(
    question: Question, network: str, options: Options, config: FitConfig
) -> FinalPlan | str:
    """Plan the most samples for which `MIN_EPOCHS` fit, or say how much time is missing."""
    n = min(len(question.train[1]), MAX_SAMPLES)
    if options.epochs is not None:
        return FinalPlan(network, options.epochs, n)
    started = clock.now()
    trial = (question.train[0][:TRIAL_SAMPLES], question.train[1][:TRIAL_SAMPLES])
    structures = _structures(question, network, options.seed)
    costs = measure_costs(structures, trial, question.likelihood, config).values()
    spent = clock.now() - started
    limit = PLANNED_SHARE * (60 * options.minutes - spent)

    def seconds(samples: int, epochs: int) -> float:
        return sum(cost.total_seconds(samples, epochs, EVIDENCE_STEPS) for cost in costs)

    samples = most_samples(n, lambda n: seconds(n, MIN_EPOCHS) <= limit, MIN_SAMPLES, 0.8)
    shortest = seconds(samples, MIN_EPOCHS)
    if shortest > limit:
        needed = (shortest / PLANNED_SHARE + spent) / 60
        return not_tested(options.minutes / TIME_SHARE, needed / TIME_SHARE)
    epochs = max(e for e in range(MIN_EPOCHS, MAX_EPOCHS + 1) if seconds(samples, e) <= limit)
    return FinalPlan(network, epochs, samples)


def not_tested(minutes: float, needed: float) -> str:
    """Say that invariances did not fit into the minutes of a run, and how many would be needed."""
    total = max(math.ceil(needed), math.floor(minutes) + 1)
    missing = f"needs about {total - minutes:.2g} more minutes"
    return f"Invariances: not tested ({missing}; run with `--minutes {total}`)."
