"""Print to the terminal and write JSON files, for all subcommands."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from symrazor.core.files import write_atomically
from symrazor.core.text import printable


def parsed_by(parse: Callable[[str], Any], choices: tuple[str, ...] | None = None) -> Any:
    """Return a parser of an optional argument, as an annotation.

    Without it, tyro's error messages also list None, in an order that changes from run to run.
    """
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="",  # every optional argument has its own
        instance_from_str=lambda fields: parse(fields[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
        choices=choices,
    )


# Optional arguments: a short placeholder, and no "(default: None)" in the help.
OptionalFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
OptionalName = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
OptionalInt = Annotated[
    int | None, parsed_by(int), tyro.conf.arg(metavar="N", help_behavior_hint="")
]
JsonFile = Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="")]
"""An option `--json FILE`."""
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""An option `--name` that is off by default."""
TABLE_WIDTH = 180
"""Columns of output that is not a terminal; wide enough for the tables."""


def console(quiet: bool = False) -> Console:
    """Return a console on standard output."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else TABLE_WIDTH)


def print_verdict(target: Console, headline: str, details: str) -> None:
    """Print a verdict with a bold headline; brackets in the text are not markup."""
    headline, details = printable(headline), printable(details)
    text = Text(headline, style="bold green")
    separator = " " if headline and details else ""
    text.append(separator + details, style="not bold default")
    target.print(text, soft_wrap=True, highlight=False)


def write_json(file: Path | None, value: Any) -> None:
    """Write a value as a JSON file, if a file is given."""
    if file is not None:
        write_atomically(file, (json.dumps(value, indent=1, default=str) + "\n").encode())
