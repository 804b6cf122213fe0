"""Define the options that experiments share."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from symrazor.accelerate.devices import resolve_device


@dataclass(frozen=True)
class Common:
    """Options of every experiment.

    Args:
        small: Run a reduced version, in minutes on two cores.
        device: "auto" uses a GPU if there is one.
        json: File to merge the results into after each run.
    """

    small: bool = False
    device: str = "auto"
    json: Path | None = None

    @property
    def resolved_device(self) -> str:
        """Name of the device to use."""
        return resolve_device(self.device)


@dataclass(frozen=True)
class OfOfficialData:
    """Options of an experiment that reads an official data set.

    Args:
        data: Folder with the official files (not needed with small).
    """

    data: Path | None = None


@dataclass(frozen=True)
class OfSeeds(Common):
    """Options of an experiment that is repeated for several seeds.

    Args:
        seed: One or more seeds of data, initial weights, shuffling and probes.
    """

    seed: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class OfTable(OfSeeds):
    """Options of a table.

    Args:
        rows: Patterns of the rows to run, for example "digit/*"; empty to show the file only.
    """

    rows: tuple[str, ...] = ("*",)

    def wants(self, row: str) -> bool:
        """Return whether a row matches one of the patterns."""
        return any(fnmatchcase(row, pattern) for pattern in self.rows)

    def choose(self, rows: Iterable[str]) -> list[str]:
        """Return the rows that match the patterns.

        Raises:
            ValueError: A pattern matches no row.
        """
        rows = list(rows)
        idle = [p for p in self.rows if not any(fnmatchcase(row, p) for row in rows)]
        if idle:
            raise ValueError(f"No row matches {' '.join(idle)}. Rows: {', '.join(rows)}.")
        return [row for row in rows if self.wants(row)]


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse the texts "name=value" of the option `--set`.

    Raises:
        ValueError: A text has another form.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value, got {text!r}. For example: --set lr=0.01")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
