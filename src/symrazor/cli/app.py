"""The command `symrazor`: verbs, each in a file of `commands`; no logic here."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape

from symrazor.cli.bench import bench
from symrazor.cli.completion import completion
from symrazor.cli.data import data
from symrazor.cli.discover import discover
from symrazor.cli.experiment import experiment
from symrazor.cli.fit import fit_command, given_config
from symrazor.cli.run_folder import export, predict, report
from symrazor.core import startup
from symrazor.core.version import __version__
from symrazor.runs.config import RunConfig


def version() -> None:
    """Print the version."""
    Console().print(__version__)


COMMANDS: dict[str, Callable[..., Any]] = {
    "discover": discover,
    "fit": fit_command(RunConfig()),
    "report": report,
    "export": export,
    "predict": predict,
    "data": data,
    "bench": bench,
    "experiment": experiment,
    "completion": completion,
    "version": version,
}


def run(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, by default those of the process, and run a verb."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands, config = dict(COMMANDS), [tyro.conf.OmitSubcommandPrefixes]
    if given[:1] == ["fit"]:  # its sections share names: --fit.lr, --fit.razor.lr
        commands["fit"] = fit_command(given_config(given[1:]))
    else:
        config.append(tyro.conf.OmitArgPrefixes)
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="symrazor", args=given, config=tuple(config)
    )


def main() -> None:
    """Entry point: exit code 2 for what the user can mend, with one line that says how."""
    startup.loaded()
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        shown = escape(str(error))
        Console(stderr=True).print(f"[red]symrazor:[/red] {shown}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        said = f"\nsymrazor: stopped{f'; {stop}' if str(stop) else ''}"
        Console(stderr=True).print(escape(said), soft_wrap=True, highlight=False)
        sys.exit(130)


if __name__ == "__main__":
    main()
