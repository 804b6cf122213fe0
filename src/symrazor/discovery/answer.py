r"""State the answer to one question in words, and recommend a network.

The answer is a claim about the data (`symrazor.discovery.claims`), or "undecided". The network to
use is the one that predicts left-out training samples best. If another one predicts them as well,
up to two standard errors, the one with more symmetry is used, then the one with fewer parameters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from symrazor.core.validation import join_names
from symrazor.discovery.claims import MAX_PROBABILITY, MIN_PROBABILITY, Claim, Margin
from symrazor.discovery.headlines import describe_invariance
from symrazor.discovery.invariances import LearnedInvariances
from symrazor.discovery.members import Member
from symrazor.discovery.question import MIN_LOG_ODDS, NEUTRAL, Family
from symrazor.symmetry.verdict import LayerReading, capitalize, layer_verdict, percent
from symrazor.training.fit import Fit

if TYPE_CHECKING:
    from symrazor.discovery.final import Calibration

SAME_PREDICTION = 2.0
"""Standard errors up to which two networks count as equally good predictors."""


@dataclass(frozen=True)
class Candidate:
    """One structure, trained from several starts.

    Args:
        name: name of the structure.
        fit: the start with the highest evidence.
        members: the trainings of all starts.
        own_temperature: temperature of the logits; None for the mean over all starts.
        gain: nats per left-out sample gained over the network of the comparison, if measured.
    """

    name: str
    fit: Fit
    members: tuple[Member, ...] = field(default=(), compare=False, repr=False)
    own_temperature: float | None = None
    gain: Margin | None = None

    def __repr__(self) -> str:
        return f"Candidate({self.name!r}, log evidence {self.log_evidence:,.1f})"

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the evidence, the mean over all starts."""
        if not self.members:
            return float(self.fit.evidence.log_evidence)
        return fmean(member.log_evidence for member in self.members)

    @property
    def spread(self) -> float:
        """Standard deviation of the log evidence over starts; 0 for a single start."""
        values = [member.log_evidence for member in self.members]
        return stdev(values) if len(values) > 1 else 0.0

    @property
    def temperature(self) -> float:
        """Temperature of the logits, by default the geometric mean over all starts."""
        if self.own_temperature is not None:
            return self.own_temperature
        logs = [math.log(member.temperature) for member in self.members]
        return math.exp(fmean(logs)) if logs else 1.0

    @property
    def left_out(self) -> Tensor:
        """Log likelihood of each left-out training sample, one start after the other."""
        return torch.cat([torch.zeros(0), *(member.left_out for member in self.members)])

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers for JSON."""
        left_out = {"n": len(self.left_out), "log_likelihood": float(self.left_out.sum())}
        return {
            "name": self.name,
            "log_evidence": self.log_evidence,
            "reading": self.fit.reading.to_dict(),
            "history": self.fit.history,
            "spread": self.spread,
            "left_out": left_out if len(self.left_out) else None,
            "temperature": self.temperature,
            "starts": [
                {
                    "log_evidence": member.log_evidence,
                    "left_out": float(member.left_out.sum()),
                    "seconds": member.seconds,
                }
                for member in self.members
            ],
        }


@dataclass(frozen=True)
class Answer:
    """All candidates of one question, best evidence first.

    Args:
        name: name of the question.
        question: the question in words.
        family: the structures that were compared.
        candidates: the trained networks, best evidence first.
        claims: what the data show about each symmetry of the family.
        notes: sentences on limits of the result.
        invariances: learned invariances of images; or a sentence on why they were not tested.
        final: the recommended network, trained on all training data; None if the network of the
            comparison is delivered.
        recommended_name: name of the recommended candidate; "" for the one with the highest
            evidence.
        calibration: how the delivered network predicts; None for the default of the likelihood.
        remedies: name of an undecided claim -> what would decide it.
    """

    name: str
    question: str
    family: Family
    candidates: list[Candidate]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    invariances: LearnedInvariances | str | None = None
    final: Candidate | None = None
    recommended_name: str = ""
    calibration: "Calibration | None" = None
    remedies: Mapping[str, str] = field(default_factory=dict)

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
        """The candidate whose layers are described: the relaxed one, or else the best."""
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
    def delivered(self) -> Candidate:
        """The candidate whose network is delivered."""
        return self.recommended if self.final is None else self.final

    @property
    def recommended_fit(self) -> Fit:
        """The network that is delivered."""
        return self.recommended.fit if self.final is None else self.final.fit

    @property
    def symmetric(self) -> bool | None:
        """Whether every claimed symmetry holds; None if that is undecided or not asked."""
        holds = [claim.holds for claim in self.claims]
        if not holds or None in holds:
            return None
        return all(holds)

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if not self.claims:
            return f"Recommended network: {self.family.label(self.recommended.name)}."
        if self.family.describe is not None:
            return self.family.describe(self.claims)
        wording, (claim, *_) = self.family.wording or NEUTRAL, self.claims
        if claim.holds is None:
            return f"Undecided: the data do not show {wording.undecided}."
        return wording.invariant if claim.holds else wording.not_invariant

    @property
    def details(self) -> str:
        """How sure the answer is, the evidence for it, and the recommended network."""
        sentences = [self._certainties(), *self.notes]
        sentences += [*map(self._evidence, self.claims), self._layers(), self._recommendation()]
        sentences.append(self._final_score())
        learned = self.invariances
        sentences.append(
            learned.verdict if isinstance(learned, LearnedInvariances) else learned or ""
        )
        return " ".join(part for part in sentences if part)

    @property
    def summary(self) -> dict[str, str]:
        """The sentences that a reader needs first, in parts."""
        learned = self.invariances
        return {
            "certainty": self._certainties(),
            "recommendation": self._recommendation(),
            "score": self._final_score(),
            "notes": " ".join(self.notes),
            "invariances": learned.verdict if isinstance(learned, LearnedInvariances) else "",
            "not_tested": learned if isinstance(learned, str) else "",
        }

    @property
    def verdict(self) -> str:
        """Headline and details as one paragraph."""
        return f"{self.headline} {self.details}"

    def _certainties(self) -> str:
        """Return how sure all claims are, in one sentence if all of them are stated."""
        states = {(claim.starts, claim.failed, claim.holds is None) for claim in self.claims}
        if len(self.claims) < 2 or len(states) > 1 or self.claims[0].holds is None:
            return " ".join(map(self._certainty, self.claims))
        listed = join_names([f"{probability_text(c.probability)} ({c.name})" for c in self.claims])
        return f"Probabilities: {listed}, from {self.claims[0].origin}."

    def _certainty(self, claim: Claim) -> str:
        """Return how sure a claim is; for an undecided one, what would decide it."""
        is_single = len(self.claims) == 1
        subject = "Probability" if is_single else f"{capitalize(claim.name)}: probability"
        probability = probability_text(claim.probability)
        if claim.holds is not None:
            return f"{subject} {probability}, from {claim.origin}."
        remedy = self.remedies.get(claim.name, "")
        if claim.probability >= MIN_PROBABILITY:
            return remedy if is_single else f"Undecided for {claim.name}: {remedy}"
        if claim.probability < 0.6:
            balance = "both answers are about equally probable"
        else:
            balance = f"{self._leaning(claim)} ({probability})"
        balance = balance if is_single else f"for {claim.name}, {balance}"
        return f"{capitalize(balance)}, from {claim.origin}. {remedy}".strip()

    def _leaning(self, claim: Claim) -> str:
        """Return the more probable answer, as a clause."""
        if self.family.describe is describe_invariance or claim is not self.claims[0]:
            return f"{'invariant' if claim.leaning else 'not invariant'} is more probable"
        wording = self.family.wording or NEUTRAL
        sentence = wording.invariant if claim.leaning else wording.not_invariant
        clause = sentence.partition(": ")[2] or sentence
        return f"more probably, {clause.removesuffix('.')}"

    def _evidence(self, claim: Claim) -> str:
        """Return the margins behind a claim."""
        pair = f"{self._label(claim.rival)} against {self._label(claim.structure)}"
        text = f"{capitalize(pair)}: log evidence {claim.evidence} nats"
        if claim.left_out is not None:
            text += f", log likelihood of left-out training data {claim.left_out} nats"
        return f"{text}."

    def _label(self, name: str) -> str:
        return self.family.label(name)

    def _layers(self) -> str:
        """Return the symmetry of the layers, with measured errors."""
        reading = self.subject_fit.reading
        text = layer_verdict(numbered(reading.layers), None)
        if text:
            text = f"In {self._label(self.subject.name)}, {text[0].lower()}{text[1:]}"
        text = (self.family.wording or NEUTRAL).apply_terms(text)
        if "permutation" in reading.equivariance_error:
            change = percent(reading.equivariance_error["permutation"])
            text += f" Permuting the points changes the output by {change}."
        return text.strip()

    def _recommendation(self) -> str:
        """Return which network to use, and what it gains over the other answer."""
        name, reason = self.recommended.name, ""
        if self.symmetric and name == self.family.built_in:
            reason = ", which has this symmetry built in"
        text = f"Recommended network: {self._label(name)}{reason}."
        if text == self.headline:
            text = ""
        gain = self.expected_gain
        if gain is not None:
            other, mean, error = gain
            text += (
                f" Expected gain over {self._label(other)}: {mean:.2g} ± {error:.1g} nats per "
                "sample."
            )
        return text.strip()

    @property
    def expected_gain(self) -> tuple[str, float, float] | None:
        """The other answer's network, and the gain over it in nats per sample, with its error."""
        symmetric = [s.structure for s in self.family.symmetries]
        chosen = self.recommended
        rivals = [c for c in self.candidates if (c.name in symmetric) != (chosen.name in symmetric)]
        gains = [
            (c.name, *gain) for c in rivals if (gain := mean_gain(chosen, c)) and gain[0] > gain[1]
        ]
        return min(gains, key=lambda gain: gain[1], default=None)

    def _final_score(self) -> str:
        test = {} if self.final is None else self.final.fit.reading.test
        text, how = "", "as well"
        if self.final is not None and self.final.name != self.recommended.name:
            n, g = self.final.fit.razor.n_data, self.final.gain
            if g is not None and g.z > SAME_PREDICTION:
                how = f"better by {g.mean:.2g} ± {g.standard_error:.1g} nats per left-out sample"
            label = capitalize(self._label(self.final.name))
            text = f"{label}, trained on {n:,} samples, predicts {how} and is delivered. "
        if "accuracy" in test:
            share = f"{100 * test['accuracy']:.1f} %"
            return f"{text}The delivered network classifies {share} of the held-out data correctly."
        if "mse" in test:
            error = f"{test['mse']:.3g} (targets have variance 1)"
            return f"{text}The delivered network's mean squared error on held-out data is {error}."
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        document = {
            "name": self.name,
            "question": self.question,
            "headline": self.headline,
            "verdict": self.verdict,
            "summary": self.summary,
            "claims": [claim.to_dict() for claim in self.claims],
            "margin": self.margin,
            "chosen": self.recommended.name,
            "candidates": [c.to_dict() for c in self.candidates],
            "final": None if self.final is None else self.final.to_dict(),
        }
        if self.calibration is not None:
            document["predictions"] = self.calibration.to_dict()
        if isinstance(self.invariances, LearnedInvariances):
            document["invariances"] = self.invariances.to_dict()
        return document


def probability_text(probability: float) -> str:
    """Format a probability in per cent, at most the largest that is calibrated."""
    return f"{math.floor(100 * min(probability, MAX_PROBABILITY))} %"


def numbered(layers: Sequence[LayerReading]) -> list[LayerReading]:
    """Return the relaxed layers, named 1, 2, ... instead of by their modules."""
    relaxed = [layer for layer in layers if layer.relaxed]
    return [replace(layer, name=str(number)) for number, layer in enumerate(relaxed, 1)]


def mean_gain(first: Candidate, second: Candidate) -> tuple[float, float] | None:
    """Return the gain of the first in nats per left-out sample of shared starts, and its error."""
    of_second = {member.start: member.left_out for member in second.members}
    gaps = [m.left_out - of_second[m.start] for m in first.members if m.start in of_second]
    gap = torch.cat(gaps) if gaps else torch.zeros(0)
    if len(gap) < 2:
        return None
    return float(gap.mean()), float(gap.std()) / math.sqrt(len(gap))


def recommend(candidates: Sequence[Candidate], family: Family, claims: Sequence[Claim] = ()) -> str:
    """Return the name of the structure to use.

    It is the best predictor of left-out samples. A structure with more symmetry is preferred if it
    predicts as well, up to two standard errors, or if its symmetry is stated against the best
    predictor. Without left-out samples, it is the structure with the highest evidence, or the one
    that it contains, if their evidences are equal up to 3 nats or the scatter over starts.
    Structures with fewer starts than others were excluded earlier, and are not recommended.
    """
    most_starts = max(len(c.members) for c in candidates)
    complete = [c for c in candidates if len(c.members) == most_starts]
    ranked = sorted(complete, key=lambda c: -c.log_evidence)
    if mean_gain(ranked[0], ranked[-1]) is None:
        highest = ranked[0]
        inner = next((c for c in ranked if c.name == family.contains.get(highest.name)), highest)
        error = max(MIN_LOG_ODDS, math.hypot(highest.spread, inner.spread))
        return inner.name if highest.log_evidence - inner.log_evidence <= error else highest.name
    best = max(ranked, key=lambda c: float(c.left_out.sum()))
    stated = {claim.structure for claim in claims if claim.holds}
    order = [s.structure for s in family.symmetries] + [s.name for s in family.structures]
    for name in dict.fromkeys(order):
        candidate = next((c for c in ranked if c.name == name), None)
        if candidate is None or candidate.name == best.name:
            continue
        gain, error = mean_gain(best, candidate) or (0.0, 0.0)
        rivals = [s.rivals for s in family.symmetries if s.structure == name]
        is_stated = name in stated and any(best.name in names for names in rivals)
        if rivals and (is_stated or gain <= SAME_PREDICTION * error):
            return name
    return best.name
