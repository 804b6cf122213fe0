"""What an attack tried, and what went wrong."""

import os
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


def memory_disk() -> str | None:
    """Return a folder in memory, where files are written quickly; None for the usual one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
