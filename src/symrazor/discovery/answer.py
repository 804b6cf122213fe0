"""The candidates of one question, ranked by evidence, and what that says in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from symrazor.discovery.structures import Family
from symrazor.symmetry.verdict import LayerReading, layer_verdict, percent
from symrazor.training.fit import Fit

if TYPE_CHECKING:
    from symrazor.discovery.invariances import Widths

ODDS = 3.0
"""Nats below which the evidence of two networks does not separate them: odds of 20 to 1."""


@dataclass(frozen=True)
class Candidate:
    """One network, trained.

    Args:
        name: of its structure.
        fit: what training gave.
        spread: standard deviation of its log evidence over random probes; 0 if not measured.
        unseen: log likelihood of each training datum that it was not trained on; None if it was
            trained on all (`symrazor.discovery.conditional_evidence`).
    """

    name: str
    fit: Fit
    spread: float = 0.0
    unseen: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def log_evidence(self) -> float:
        """Natural log of the evidence."""
        return float(self.fit.evidence.log_evidence)

    def to_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        return {
            "name": self.name,
            "reading": self.fit.reading.to_dict(),
            "history": self.fit.history,
            "spread": self.spread,
            "unseen": None
            if self.unseen is None
            else {"n": len(self.unseen), "log_likelihood": float(self.unseen.sum())},
        }


@dataclass(frozen=True)
class Answer:
    """All candidates of one question, best evidence first.

    Args:
        name: of the question.
        question: in words.
        family: what was compared.
        candidates: those that were trained.
        notes: sentences on what the verdict cannot be trusted for.
        widths: what transformations of the input may do, if that was asked
            (`symrazor.discovery.invariances`).
        final: the winner, trained again for the time that was left; not compared with the others.
        chosen: name of the winner, the candidate to use; "" for the one with the highest evidence.
    """

    name: str
    question: str
    family: Family
    candidates: list[Candidate]
    notes: tuple[str, ...] = ()
    widths: "Widths | None" = None
    final: Candidate | None = None
    chosen: str = ""

    @property
    def best(self) -> Candidate:
        """The candidate with the highest evidence."""
        return self.candidates[0]

    @property
    def margin(self) -> float | None:
        """Nats between the best and the second; None if there is only one."""
        if len(self.candidates) < 2:
            return None
        return self.candidates[0].log_evidence - self.candidates[1].log_evidence

    def named(self, name: str) -> Candidate:
        """The candidate of a name."""
        return next(c for c in self.candidates if c.name == name)

    @property
    def subject(self) -> Candidate:
        """The candidate of the verdict: the one that learned a structure, or the best."""
        return self.named(self.family.learned) if self.family.learned else self.best

    @property
    def shown(self) -> Fit:
        """Of the subject: its longest training."""
        if self.final is not None and self.final.name == self.subject.name:
            return self.final.fit
        return self.subject.fit

    @property
    def delivered(self) -> Fit:
        """Of the network to use: the winner's longest training."""
        return self.choice.fit if self.final is None else self.final.fit

    @property
    def choice(self) -> Candidate:
        """The candidate to use."""
        return self.named(self.chosen) if self.chosen else self.best

    @property
    def symmetric(self) -> bool | None:
        """Whether no relaxed layer breaks the symmetry.

        A layer breaks it if its free paths hold a share and its measured error is not small. None
        where nothing is relaxed, and where a layer is off for no reason that the data gave.
        """
        kinds = [layer.kind for layer in self.shown.reading.layers if layer.relaxed]
        if not kinds or ("undetermined" in kinds and "broken" not in kinds):
            return None
        return "broken" not in kinds

    @property
    def inseparable(self) -> list[Candidate]:
        """Candidates whose evidence is too near to that of the subject to tell which is better."""
        own = self.subject
        return [c for c in self.candidates if c is not own and not separated(own, c)]

    @property
    def verdict(self) -> str:
        """What was learned, the evidence beside that of the others, and how sure that is."""
        own, best = self.subject, self.best
        near = [self.family.label(c.name) for c in self.inseparable]
        best_label = self.family.label(best.name)
        less = best.name == self.family.simplest and bool(self.symmetric)
        led = best is not own and separated(own, best) and not less
        named = self.family.label(own.name) if led else "this structure"
        parts = [*self._learned(), self._against(named)]
        if led:
            take = ", so take that" if self.choice is best else ""
            lead = f"{_upper(best_label)} has the highest evidence{take}; "
            lead += f"{self.family.label(own.name)} says: {parts[0]}"
            parts[0] = lead
        parts.append(self._predicts())
        if near:
            parts.append(f"The evidence does not separate it from {_and(near)}.")
        elif best is not own and less:
            take = ": take that" if self.choice is best else ""
            parts.append(f"{_upper(best_label)} says the same with less{take}.")
        parts.append(self._trained())
        if self.widths is not None:
            parts.append(self.widths.verdict)
        return " ".join(part for part in (*parts, *self.notes) if part)

    def _learned(self) -> list[str]:
        """The symmetry that was kept or broken, and where."""
        reading = self.shown.reading
        if not any(layer.relaxed for layer in reading.layers):
            return [f"The data ask for {self.family.label(self.subject.name)}."]
        found = [self.family.kept if self.symmetric else self.family.broken]
        if self.family.says is not None:
            found = [self.family.says(self.subject.name, reading)]
        if self.symmetric is None:
            found = ["This network is not trained enough to tell."]
        text = layer_verdict(numbered(reading.layers), None)
        for usual, here in self.family.terms.items():
            text = text.replace(usual, here)
        found.append(text)
        if "permutation" in reading.equivariance_error:
            changed = percent(reading.equivariance_error["permutation"])
            found.append(f"Another order of the points changes the outputs by {changed}.")
        return found

    def _against(self, named: str) -> str:
        own = self.subject
        others = sorted((c for c in self.candidates if c is not own), key=lambda c: c.log_evidence)
        if not others:
            return "There was no time to train another network to compare with."
        gaps = [(round(own.log_evidence - c.log_evidence), c.name) for c in reversed(others)]
        listed = [f"{gap:+,d} nats against {self.family.label(name)}" for gap, name in gaps]
        return f"Evidence for {named}: {', '.join(listed)}."

    def _predicts(self) -> str:
        """Why another network is used than the one with the highest evidence."""
        one, best = self.choice.unseen, self.best.unseen
        if self.choice is self.best or one is None or best is None:
            return ""
        gap = float((one - best).sum())
        label, other = self.family.label(self.choice.name), self.family.label(self.best.name)
        if gap <= 0:  # chosen for its symmetry, or because this came early
            return ""
        n = f"{len(one):,} training data that it had not seen"
        return f"{_upper(label)} predicts {n} better than {other} (by {gap:,.0f} nats): take that."

    def _trained(self) -> str:
        """How good the network became in the rest of the time."""
        test = {} if self.final is None else self.final.fit.reading.test
        if self.final is None or not test:
            return ""
        figure = f"{100 * test['accuracy']:.1f} % of" if "accuracy" in test else ""
        label = _upper(self.family.label(self.final.name))
        if figure:
            return f"{label}, trained for the rest of the time, is right on {figure} held-out data."
        error = f"a mean squared error of {test['mse']:.3g} (variance 1)"
        return f"{label}, trained for the rest of the time, has {error} on held-out data."

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        moved = {} if self.widths is None else {"invariances": self.widths.to_dict()}
        return {
            "name": self.name,
            "question": self.question,
            "verdict": self.verdict,
            "margin": self.margin,
            "chosen": self.choice.name,
            **moved,
            "candidates": [c.to_dict() for c in self.candidates],
            "final": None if self.final is None else self.final.to_dict(),
        }


def separated(one: Candidate, other: Candidate) -> bool:
    """Whether two evidences differ by more than odds of 20 to 1, and than two spreads of probes."""
    gap = abs(one.log_evidence - other.log_evidence)
    return gap >= max(ODDS, 2 * math.hypot(one.spread, other.spread))


def numbered(layers: Sequence[LayerReading]) -> list[LayerReading]:
    """The relaxed layers, named 1, 2, ... instead of by their modules."""
    relaxed = [layer for layer in layers if layer.relaxed]
    return [replace(layer, name=str(number)) for number, layer in enumerate(relaxed, 1)]


def rank(candidates: list[Candidate]) -> list[Candidate]:
    """Sorted by evidence, the best first."""
    return sorted(candidates, key=lambda c: -c.log_evidence)


def _and(names: list[str]) -> str:
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
