"""The result of `discover`: conserved quantities, their names, and a simulator."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from symrazor.dynamics.findings import MAX_TERMS, Findings, Quantity
from symrazor.dynamics.invariants import FAMILY_ERROR
from symrazor.dynamics.network_result import NetworkResult
from symrazor.dynamics.noether import Noether, entry_of
from symrazor.dynamics.rollouts import Rollouts

LISTED = 4
"""Quantities that the verdict writes out, at most."""


@dataclass
class Discovered:
    """Conserved quantities of trajectories.

    Args:
        names: of the coordinates.
        findings: quantities by the noise test; None if the trajectories are too few for it.
        reason: why there are no findings.
        noether: names of the quantities, their flows and their algebra.
        network: quantities that the evidence of a Hamiltonian network selects; None if it was not
            trained.
        model: a simulator, `model(state, t)`, in the user's units.
        model_name: what the simulator is.
        equations: of the simulator, as text.
        rollouts: errors of the simulator and of baselines on trajectories set aside.
    """

    names: list[str]
    findings: Findings | None
    reason: str
    noether: Noether
    network: NetworkResult | None
    model: nn.Module
    model_name: str
    equations: list[str]
    rollouts: Rollouts
    seconds: float = 0.0

    @property
    def quantities(self) -> list[Quantity]:
        """Functionally independent quantities that passed the noise test."""
        return [] if self.findings is None else self.findings.quantities

    @property
    def conserved(self) -> list[dict[str, Any]]:
        """An entry for each conserved quantity: by the noise test, then by the evidence."""
        entries = self.noether.entries
        if self.network is not None and not self.is_decided and not entries:
            entries = [{**entry, "by": "evidence"} for entry in self.network.conserved]
        return entries

    @property
    def all_quantities(self) -> list[dict[str, Any]]:
        """Entries of `conserved`, and of further quantities that are functions of these."""
        functions = [] if self.findings is None else self.findings.functions
        return [*self.conserved, *(entry_of(quantity) for quantity in functions)]

    @property
    def is_decided(self) -> bool:
        """Whether the noise test gave a definite answer."""
        return self.findings is not None and self.findings.is_decided

    @property
    def probability(self) -> float:
        """Probability of the answer: of the noise test, else of the network's evidence."""
        if self.is_decided:
            return 1 - FAMILY_ERROR
        if self.network is None:
            return 0.5
        return 1 / (1 + math.exp(-min(abs(self.network.margin), 50.0)))

    @property
    def verdict(self) -> str:
        """The result in words, the answer first."""
        sentences = [self._answer(), *self._certainty()]
        return " ".join(sentence for sentence in sentences if sentence)

    def _answer(self) -> str:
        entries = self.noether.entries
        if self.findings is None or (not entries and not self.is_decided):
            if self.network is None:
                return f"Undecided: {self.reason}." if self._undecided() == "" else ""
            return f"Undecided by the noise test: {self.reason}. {self.network.verdict}"
        if not entries:
            return f"No quantity within the library is conserved. {self.noether.decay}".strip()
        rest = "; no other within the library" if self.is_decided else ""
        if len(entries) == 1:
            (entry,) = entries
            name = entry["name"] or "one quantity"
            return f"{name[:1].upper()}{name[1:]} is conserved: {entry['formula']}{rest}."
        shown = [
            f"{entry['name']} = {entry['formula']}" if entry["name"] else entry["formula"]
            for entry in entries[:LISTED]
        ]
        more = f"; and {len(entries) - LISTED} more" if len(entries) > LISTED else ""
        group = f" They generate {self.noether.group}." if self.noether.group else ""
        return f"{len(entries)} quantities are conserved: {'; '.join(shown)}{more}{rest}.{group}"

    def _undecided(self) -> str:
        """Return what the data cannot tell, in words."""
        if self.findings is None or not self.findings.undecided:
            return ""
        count, first = len(self.findings.undecided), self.findings.undecided[0]
        is_short = first.terms <= MAX_TERMS
        example = f"such as {first.formula}" if is_short else f"of the {first.library.title}"
        return (
            f"Undecided: {count} {'further ' if self.noether.entries else ''}"
            f"combination{'s' if count > 1 else ''}, {example}; more or cleaner data would tell."
        )

    def _certainty(self) -> list[str]:
        sentences = [self.noether.coordinates]
        if self.noether.entries:
            p = min(entry["p_value"] for entry in self.noether.entries)
            limit = max(entry["limit"] for entry in self.noether.entries)
            sentences.append(
                f"Along trajectories set aside {'it' if len(self.noether.entries) == 1 else 'they'}"
                f" change{'s' if len(self.noether.entries) == 1 else ''} no more than noise "
                f"explains (p = {p:.2g}; at most {100 * limit:.2g} % of the variance)."
            )
        sentences.append(self._undecided())
        for relation in [] if self.findings is None else self.findings.relations:
            sentences.append(f"{relation.shortest} has the same value in all states.")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        findings = self.findings
        document: dict[str, Any] = {
            "verdict": self.verdict,
            "conserved": self.conserved,
            "functions": [] if findings is None else [q.estimate for q in findings.functions],
            "undecided": [] if findings is None else [q.estimate for q in findings.undecided],
            "relations": [] if findings is None else [q.estimate for q in findings.relations],
            "libraries": [] if findings is None else findings.libraries,
            "skipped": [] if findings is None else findings.skipped,
            **self.noether.to_dict(),
            "coordinates": self.names,
            "simulator": {"name": self.model_name, "equations": self.equations},
            "rollouts": self.rollouts.to_dict(),
            "seconds": self.seconds,
        }
        if findings is not None and findings.noise is not None:
            document["noise"] = findings.noise.variance.sqrt().tolist()
        if self.network is not None:
            document["network"] = self.network.to_dict()
        return document

    def simulator(self) -> nn.Module:
        """Return a plain module that maps a state and a time to a state, in the user's units."""
        return self.model
