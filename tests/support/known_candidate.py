"""A candidate of `discover` whose evidence a test chooses."""

from typing import ClassVar

from symrazor.discovery.answer import Candidate


class KnownCandidate(Candidate):
    """Candidate with a given evidence."""

    values: ClassVar[dict[str, float]] = {}

    @property
    def log_evidence(self) -> float:
        return self.values[self.name]
