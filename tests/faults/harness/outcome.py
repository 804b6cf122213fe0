"""What an attack tried, and what went wrong."""

from collections import Counter
from dataclasses import dataclass, field

SHOWN = 5
"""Failures of a kind that are described."""


@dataclass
class Outcome:
    """What was counted."""

    tried: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    def fail(self, kind: str, text: str) -> None:
        """Count and describe a failure."""
        self.failures[kind] += 1
        if self.failures[kind] <= SHOWN:
            self.shown.append(f"{kind}: {text}")
