"""Run an experiment as a command (`python -m`) with argparse, for machines without tyro."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Arguments = Mapping[str, Mapping[str, Any]]
"""Option -> keyword arguments of `ArgumentParser.add_argument`."""

COMMON: Arguments = {
    "--small": {"action": "store_true"},
    "--data": {"type": Path, "help": "folder with the official files"},
    "--device": {"default": "auto"},
    "--seed": {"type": int, "nargs": "+", "default": [0]},
    "--json": {"type": Path, "help": "merge the results into this file"},
}
"""Options of every experiment."""

ROWS: Arguments = {"--rows": {"nargs": "*", "default": ["*"], "help": "patterns of rows"}}
"""Options of a table."""


def command(
    name: str, run: Callable[..., str], own: Arguments, arguments: Sequence[str] | None = None
) -> None:
    """Parse options, run the experiment and print its table; errors are one line and exit code 2.

    Args:
        name: Name of the experiment.
        run: Function from options (by keyword) to markdown.
        own: Further options; an option of `COMMON` is extended.
        arguments: Command line; by default that of the process.
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
