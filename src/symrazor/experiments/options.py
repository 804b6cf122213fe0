"""What every experiment can be told."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from symrazor.accelerate.devices import resolve_device


@dataclass(frozen=True)
class Common:
    """Options of every experiment; each says more of what they mean there.

    Args:
        small: the shape of the result, in minutes on two cores.
        data: folder with the official files.
        device: "auto" for a GPU if there is one.
        seed: one or more.
        json: file for the results.
    """

    small: bool = False
    data: Path | None = None
    device: str = "auto"
    seed: tuple[int, ...] = (0,)
    json: Path | None = None

    @property
    def place(self) -> str:
        """The device."""
        return resolve_device(self.device)


@dataclass(frozen=True)
class OfTable(Common):
    """Options of a table.

    Args:
        rows: patterns of rows to run, as in "digit/*".
    """

    rows: tuple[str, ...] = ("*",)

    def wants(self, row: str) -> bool:
        """Whether a row was asked for."""
        return any(fnmatchcase(row, pattern) for pattern in self.rows)
