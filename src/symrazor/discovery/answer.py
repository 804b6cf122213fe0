r"""Rank the candidates of one question by evidence, recommend one, and state the result in words.

The evidence of all training data splits into the evidence of the samples $D_1$ used for the
comparison, and the conditional evidence of the held-out samples $D_2$:

$$\log p(D) = \log p(D_1) + \log p(D_2 \mid D_1).$$

The first term includes the cost of learning $D_1$ from nothing. The network that learns most from a
few samples is not always the one that predicts best after thousands. The second term is the
conditional evidence (Lotfi et al. 2022, eq. 5). It measures how well a network predicts from then
on, and needs no curvature. Here it is evaluated at the trained weights, sample by sample:
$\sum_{i \in D_2} \log p(y_i \mid x_i, \theta)$. $D_2$ is training data; the recommended network
is then trained on $D_1$ and $D_2$.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from symrazor.data import Tensors
from symrazor.discovery.invariances import LearnedInvariances
from symrazor.discovery.question import MIN_LOG_ODDS, NEUTRAL, Family, select
from symrazor.symmetry.verdict import (
    LayerReading,
    capitalize,
    join_names,
    layer_verdict,
    percent,
)
from symrazor.training.evidence_training import outputs
from symrazor.training.fit import Fit

MAX_LEFT_OUT = 5000
"""Largest number of left-out samples that are predicted."""
UNCONVERGED_RISE = 0.25
"""A gap is unconverged if the last evidence step alone closed more than this share of it."""


@dataclass(frozen=True)
class Candidate:
    """One trained network.

    Args:
        name: name of its structure.
        fit: the result of its training.
        spread: standard deviation of its log evidence over random probes; 0 if not measured.
        left_out: log likelihood of each held-out training sample of the comparison; None
            if there is none (`log_scores`).
    """

    name: str
    fit: Fit
    spread: float = 0.0
    left_out: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the evidence."""
        return float(self.fit.evidence.log_evidence)

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers for JSON."""
        left_out = None
        if self.left_out is not None:
            left_out = {"n": len(self.left_out), "log_likelihood": float(self.left_out.sum())}
        return {
            "name": self.name,
            "reading": self.fit.reading.to_dict(),
            "history": self.fit.history,
            "spread": self.spread,
            "unseen": left_out,
        }


@dataclass(frozen=True)
class Answer:
    """All candidates of one question, best evidence first.

    Args:
        name: name of the question.
        question: the question in words.
        family: the structures that were compared.
        candidates: the trained networks, best evidence first.
        notes: sentences on limits of the result.
        invariances: learned invariances of images; or a sentence on why they were not tested.
        final: the recommended network, trained again for the remaining time; not comparable with
            the candidates.
        recommended_name: name of the recommended candidate; "" for the one with the highest
            evidence.
    """

    name: str
    question: str
    family: Family
    candidates: list[Candidate]
    notes: tuple[str, ...] = ()
    invariances: LearnedInvariances | str | None = None
    final: Candidate | None = None
    recommended_name: str = ""

    @property
    def best(self) -> Candidate:
        """The candidate with the highest evidence."""
        return self.candidates[0]

    @property
    def margin(self) -> float | None:
        """Nats between the best and the second candidate; None if there is only one."""
        if len(self.candidates) < 2:
            return None
        return self.candidates[0].log_evidence - self.candidates[1].log_evidence

    def named(self, name: str) -> Candidate:
        """Return the candidate of a name."""
        return next(c for c in self.candidates if c.name == name)

    @property
    def subject(self) -> Candidate:
        """The candidate that the verdict describes: the relaxed one, or else the best."""
        return self.named(self.family.relaxed) if self.family.relaxed else self.best

    @property
    def subject_fit(self) -> Fit:
        """The longest training of the subject."""
        if self.final is not None and self.final.name == self.subject.name:
            return self.final.fit
        return self.subject.fit

    @property
    def recommended(self) -> Candidate:
        """The candidate to use."""
        return self.named(self.recommended_name) if self.recommended_name else self.best

    @property
    def recommended_fit(self) -> Fit:
        """The longest training of the recommended candidate."""
        return self.recommended.fit if self.final is None else self.final.fit

    @property
    def symmetric(self) -> bool | None:
        """Whether no relaxed layer breaks the symmetry.

        A layer breaks it if its free paths hold a share of the effective parameters and its
        measured equivariance error is not small. None if no layer is relaxed, or if a layer has a
        large error without such a share, which means that it has not converged.
        """
        kinds = [layer.kind for layer in self.subject_fit.reading.layers if layer.relaxed]
        if not kinds or ("undetermined" in kinds and "broken" not in kinds):
            return None
        return "broken" not in kinds

    @property
    def inseparable(self) -> list[Candidate]:
        """Candidates that the evidence does not separate from the subject."""
        subject = self.subject
        return [c for c in self.candidates if c is not subject and not separated(subject, c)]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if self._other_structure_leads:
            return f"{capitalize(self._label(self.best))} has the highest evidence."
        return self._statement()

    @property
    def details(self) -> str:
        """How sure the answer is, the evidence for it, and the recommended network."""
        parts = [self._certainty(), *self.notes]
        if self._other_structure_leads:
            parts.append(self._comparison())
        parts += [self._layers(), self._evidence(), self._recommendation(), self._final_score()]
        learned = self.invariances
        parts.append(learned.verdict if isinstance(learned, LearnedInvariances) else learned or "")
        return " ".join(part for part in parts if part)

    @property
    def verdict(self) -> str:
        """Headline and details as one paragraph."""
        return f"{self.headline} {self.details}"

    @property
    def _other_structure_leads(self) -> bool:
        """Whether a fixed structure beats the relaxed one, other than by needing no free paths."""
        has_same_symmetry = self.best.name == self.family.built_in and bool(self.symmetric)
        is_better = self.best is not self.subject and separated(self.subject, self.best)
        return is_better and not has_same_symmetry

    def _label(self, candidate: Candidate) -> str:
        return self.family.label(candidate.name)

    def _statement(self) -> str:
        """Return the sentence about the symmetry of the subject."""
        reading = self.subject_fit.reading
        if not any(layer.relaxed for layer in reading.layers):
            return f"Recommended network: {self._label(self.recommended)}."
        if self.symmetric is None:
            return f"Undecided: {self._label(self.subject)} has not converged."
        if self.family.describe is not None:
            return self.family.describe(self.subject.name, reading)
        wording = self.family.wording or NEUTRAL
        return wording.invariant if self.symmetric else wording.not_invariant

    def _comparison(self) -> str:
        """Return the sentence about the relaxed network if another structure has more evidence."""
        subject = self._label(self.subject)
        if self.symmetric is None:
            return f"For comparison, {subject} has not converged."
        statement = self._statement()
        return f"For comparison, {subject} is {statement[0].lower()}{statement[1:]}"

    def _certainty(self) -> str:
        if len(self.candidates) < 2:
            return "Not compared: there was no time to train another network."
        subject = self._label(self.subject)
        if self.inseparable:
            labels = join_names([self._label(c) for c in self.inseparable])
            return f"The evidence does not separate {subject} from {labels}."
        if self.notes:  # the gaps are clear, but not the result
            return ""
        gaps = [abs(g) for g in self._gaps().values()]
        odds = f"{MIN_LOG_ODDS:g} nats are odds of 20 to 1"
        return f"The evidence is clear: at least {min(gaps):,d} nats ({odds})."

    def _gaps(self) -> dict[str, int]:
        """Return the nats of the subject relative to every other candidate, by label."""
        others = [c for c in self.candidates if c is not self.subject]
        return {self._label(c): round(self.subject.log_evidence - c.log_evidence) for c in others}

    def _layers(self) -> str:
        """Return the symmetry of the layers, with measured errors."""
        reading = self.subject_fit.reading
        text = layer_verdict(numbered(reading.layers), None)
        text = (self.family.wording or NEUTRAL).apply_terms(text)
        if "permutation" in reading.equivariance_error:
            change = percent(reading.equivariance_error["permutation"])
            text += f" Permuting the points changes the output by {change}."
        return text.strip()

    def _evidence(self) -> str:
        gaps = [f"{gap:+,d} nats against {label}" for label, gap in self._gaps().items()]
        if not gaps:
            return ""
        return f"Log evidence of {self._label(self.subject)}: {', '.join(gaps)}."

    def _recommendation(self) -> str:
        """Return which network to use, and why if it is not the one with the highest evidence."""
        recommended, best = self.recommended, self.best
        reason = ""
        if recommended.name == self.family.built_in and self.symmetric:
            reason = ", which has the same symmetry and fewer parameters"
        elif recommended is not best and recommended.left_out is not None:
            gain, _ = conditional_gain(recommended, best) or (0.0, 0.0)
            if gain > 0:  # otherwise recommended for its symmetry, or the comparison was too short
                samples = f"{len(recommended.left_out):,} held-out training samples"
                reason = f", which predicts {samples} better than {self._label(best)}"
                reason += f" (by {gain:,.0f} nats)"
        text = f"Recommended network: {self._label(recommended)}{reason}."
        return "" if text == self.headline else text

    def _final_score(self) -> str:
        test = {} if self.final is None else self.final.fit.reading.test
        if "accuracy" in test:
            share = f"{100 * test['accuracy']:.1f} %"
            return f"After the final training it classifies {share} of the held-out data correctly."
        if "mse" in test:
            error = f"{test['mse']:.3g} (targets have variance 1)"
            return f"After the final training its mean squared error on held-out data is {error}."
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        document = {
            "name": self.name,
            "question": self.question,
            "headline": self.headline,
            "verdict": self.verdict,
            "margin": self.margin,
            "chosen": self.recommended.name,
            "candidates": [c.to_dict() for c in self.candidates],
            "final": None if self.final is None else self.final.to_dict(),
        }
        if isinstance(self.invariances, LearnedInvariances):
            document["invariances"] = self.invariances.to_dict()
        return document


def separated(first: Candidate, second: Candidate) -> bool:
    """Return whether the evidence separates two candidates.

    Their gap must exceed `MIN_LOG_ODDS` and two standard deviations over random probes.
    """
    gap = abs(first.log_evidence - second.log_evidence)
    return gap >= max(MIN_LOG_ODDS, 2 * math.hypot(first.spread, second.spread))


def numbered(layers: Sequence[LayerReading]) -> list[LayerReading]:
    """Return the relaxed layers, named 1, 2, ... instead of by their modules."""
    relaxed = [layer for layer in layers if layer.relaxed]
    return [replace(layer, name=str(number)) for number, layer in enumerate(relaxed, 1)]


def left_out_samples(train: Tensors, used: Tensor) -> Tensors | None:
    """Return at most `MAX_LEFT_OUT` samples that are not used; None if all are used."""
    unused = torch.ones(len(train[1]), dtype=torch.bool)
    unused[used] = False
    index = unused.nonzero().flatten()[:MAX_LEFT_OUT]
    return select(train, index) if len(index) else None


@torch.no_grad()
def log_scores(fit: Fit, data: Tensors) -> Tensor:
    """Return the log likelihood of each sample at the trained weights, in float64 on the CPU."""
    f = outputs(fit.model, data[0])
    return -fit.razor.likelihood.nll(f, data[1].to(f.device)).double().cpu()


def conditional_gain(first: Candidate, second: Candidate) -> tuple[float, float] | None:
    """Return the nats by which the first candidate predicts better, and their standard error.

    None if no samples were left out.
    """
    if first.left_out is None or second.left_out is None or len(first.left_out) < 2:
        return None
    gap = first.left_out - second.left_out
    return float(gap.sum()), float(gap.std()) * math.sqrt(len(gap))


def predicts_better(first: Candidate, second: Candidate) -> bool:
    """Return whether the conditional gain exceeds `MIN_LOG_ODDS` and two standard errors."""
    gain = conditional_gain(first, second)
    return gain is not None and gain[0] >= max(MIN_LOG_ODDS, 2 * gain[1])


def best_predictor(ranked: Sequence[Candidate]) -> Candidate:
    """Return the first candidate, or the best of the others that clearly predict better."""
    first = ranked[0]
    better = [c for c in ranked[1:] if predicts_better(c, first)]
    return max(better, key=lambda c: float(c.left_out.sum()), default=first)  # type: ignore[union-attr]


def last_rise(candidate: Candidate) -> float:
    """Return the nats gained at the last evidence step; 0 if the evidence fell."""
    values = [r["log_evidence"] for r in candidate.fit.history if "log_evidence" in r]
    return max(0.0, values[-1] - values[-2]) if len(values) > 1 else 0.0


def unconverged_rival(answer: Answer) -> Candidate | None:
    """Return a relaxed or symmetric network that may still overtake a best one that is neither."""
    best, names = answer.best, (answer.family.relaxed, answer.family.built_in)
    behind = [c for c in answer.candidates if c.name in names and best.name not in names]
    rising = [
        c for c in behind if last_rise(c) > UNCONVERGED_RISE * (best.log_evidence - c.log_evidence)
    ]
    return max(rising, key=lambda c: c.log_evidence, default=None)


def recommend(answer: Answer, provisional: bool = False) -> str:
    """Return the name of the structure to recommend.

    It is the one with the highest evidence, unless another one clearly predicts left-out training
    samples better (`best_predictor`). If it is the relaxed network and all its layers kept their
    symmetry, or if it is not separated from the network with the symmetry built in, the latter is
    recommended. After a provisional comparison only these two are considered.
    """
    relaxed, built_in = answer.family.relaxed, answer.family.built_in
    eligible = [c for c in answer.candidates if not provisional or c.name in (relaxed, built_in)]
    best = best_predictor(eligible or answer.candidates)
    if best.name != relaxed or built_in not in [c.name for c in eligible]:
        return best.name
    layers = [layer for layer in best.fit.reading.layers if layer.relaxed]
    all_equivariant = answer.symmetric and all(layer.kind == "equivariant" for layer in layers)
    plain = answer.named(built_in)
    inseparable = not separated(best, plain) and not predicts_better(best, plain)
    if all_equivariant or (inseparable and (answer.symmetric or provisional)):
        return built_in
    return best.name
