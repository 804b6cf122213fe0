"""An experiment as a command of its own: `python -m`, with argparse and no further packages."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Arguments = Mapping[str, Mapping[str, Any]]
"""Option -> what `ArgumentParser.add_argument` is told about it."""

COMMON: Arguments = {
    "--small": {"action": "store_true"},
    "--data": {"type": Path, "help": "folder with the official files"},
    "--device": {"default": "auto"},
    "--seed": {"type": int, "nargs": "+", "default": [0]},
    "--json": {"type": Path, "help": "merge the results into this file"},
}
"""Options that every experiment has."""

ROWS: Arguments = {"--rows": {"nargs": "*", "default": ["*"], "help": "patterns of rows"}}
"""And those of a table."""


def command(
    name: str, run: Callable[..., str], own: Arguments, arguments: Sequence[str] | None = None
) -> None:
    """Read options, run, and write the table; what went wrong is one line and status 2.

    Args:
        name: of the experiment.
        run: options by keyword -> markdown.
        own: options beside `COMMON`; one of the same name adds to what is said there.
        arguments: of the command line, by default the process's.
    """
    parser = argparse.ArgumentParser(prog=f"symrazor experiment {name}")
    for option in (*COMMON, *(option for option in own if option not in COMMON)):
        parser.add_argument(option, **{**COMMON.get(option, {}), **own.get(option, {})})
    values = vars(parser.parse_args(arguments))
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    try:
        text = run(**(values | lists))
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    sys.stdout.write(f"{text}\n")
