"""Define the options that all experiments share."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from symrazor.accelerate.devices import resolve_device


@dataclass(frozen=True)
class Common:
    """Options of every experiment.

    Args:
        small: Run a reduced version, in minutes on two cores.
        data: Folder with the official files.
        device: "auto" uses a GPU if there is one.
        seed: One or more seeds.
        json: File for the results.
    """

    small: bool = False
    data: Path | None = None
    device: str = "auto"
    seed: tuple[int, ...] = (0,)
    json: Path | None = None

    @property
    def place(self) -> str:
        """Name of the device to use."""
        return resolve_device(self.device)


@dataclass(frozen=True)
class OfTable(Common):
    """Options of a table.

    Args:
        rows: Patterns of the rows to run, for example "digit/*".
    """

    rows: tuple[str, ...] = ("*",)

    def wants(self, row: str) -> bool:
        """Return whether a row matches one of the patterns."""
        return any(fnmatchcase(row, pattern) for pattern in self.rows)
