"""Print to the terminal and write JSON files, for all subcommands."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from symrazor.core import startup
from symrazor.core.errors import AmbiguousDataError
from symrazor.core.files import check_writable_file, write_atomically
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
PIPED_WIDTH = 80
"""Columns of tables in output that is not a terminal."""


def load(name: str) -> ModuleType:
    """Import a module of this package. Until torch is imported, Ctrl-C ends the command at once."""
    module = import_module(f"symrazor.cli.{name}")
    if "torch" in sys.modules:
        startup.raise_on_interrupt()
    return module


def console(quiet: bool = False, width: int | None = None) -> Console:
    """Return a console on standard output."""
    piped = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(quiet=quiet, width=width or piped)


def ask(error: AmbiguousDataError) -> tuple[str, str]:
    """Return the chosen option and its value; without a terminal, raise the error."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise error
    lines = [error.problem]
    lines += [
        f"  {number}  {text} (--{option} {value})"
        for number, (option, value, text) in enumerate(error.answers, 1)
    ]
    print(printable("\n".join(lines)), file=sys.stderr)
    while True:
        print(f"Which one? 1 to {len(error.answers)}: ", end="", file=sys.stderr, flush=True)
        reply = sys.stdin.readline()
        if not reply:
            raise error
        if reply.strip().isdecimal() and 1 <= int(reply) <= len(error.answers):
            option, value, _ = error.answers[int(reply) - 1]
            return option, value


def print_verdict(target: Console, headline: str, details: str = "") -> None:
    """Print a verdict with a bold headline, wrapped in a terminal; brackets are not markup."""
    headline, details = printable(headline), printable(details)
    text = Text(headline, style="bold")
    separator = " " if headline and details else ""
    text.append(separator + details, style="not bold")
    target.print(text, soft_wrap=not target.is_terminal, highlight=False)


def check_output(file: Path | None, *inputs: Path | None) -> None:
    """Raise ValueError if a file cannot be written, or would overwrite one that is read."""
    check_writable_file(file)
    if file is None or not file.exists():
        return
    for source in inputs:
        if source is not None and source.exists() and file.samefile(source):
            raise ValueError(f"{file} is an input and would be overwritten. Choose another file.")


def write_json(file: Path | None, value: Any) -> None:
    """Write a value as a JSON file, if a file is given."""
    if file is not None:
        write_atomically(file, (json.dumps(value, indent=1, default=str) + "\n").encode())
