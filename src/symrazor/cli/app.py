"""Define the command `symrazor`; each subcommand is a function of another module."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape

from symrazor.cli.bench import bench
from symrazor.cli.data import data
from symrazor.cli.discover import discover
from symrazor.cli.experiment import experiment
from symrazor.cli.fit import OptionError, fit_command, initial_config, option_registry
from symrazor.cli.run_folder import export, predict, report
from symrazor.core import startup
from symrazor.core.errors import CurvatureError
from symrazor.core.text import printable
from symrazor.core.version import __version__
from symrazor.runs.config import RunConfig

USER_ERROR, STOPPED, CLOSED_PIPE = 2, 130, 141
"""Exit codes; the last two are those of shells for SIGINT and SIGPIPE."""

USER_MISTAKES = (
    *(ValueError, OptionError, OSError, FloatingPointError, ModuleNotFoundError),
    *(CurvatureError, MemoryError, torch.OutOfMemoryError),
)
"""Errors that end the command with one line."""


def completion(shell: tyro.conf.Positional[Literal["bash", "zsh"]]) -> None:
    """Print the completion script for a shell.

    For bash: symrazor completion bash > ~/.local/share/bash-completion/completions/symrazor

    Args:
        shell: bash or zsh.
    """
    run(["--tyro-print-completion", shell])


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
DESCRIPTION = """Learn which symmetries a neural network should have, by Bayesian model selection.

Start with: symrazor discover data.npz"""


def run(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments (by default those of the process) and run a subcommand."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    commands, config = dict(COMMANDS), [tyro.conf.OmitSubcommandPrefixes]
    if args[:1] == ["fit"]:  # keeps prefixes: its sections share names (--fit.lr, --fit.razor.lr)
        commands["fit"] = fit_command(initial_config(args[1:]))
    else:
        config.append(tyro.conf.OmitArgPrefixes)
    tyro.extras.subcommand_cli_from_dict(
        commands,
        prog="symrazor",
        description=DESCRIPTION,
        args=args,
        config=tuple(config),
        registry=option_registry(),
    )


def main() -> None:
    """Run the command; errors that the user can fix end with one line and exit code 2."""
    startup.raise_on_interrupt()
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED_PIPE)
    except USER_MISTAKES as error:
        text = f"[red]symrazor:[/red] {escape(printable(_message(error)) or 'not enough memory')}"
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt as stop:
        text = f"\nsymrazor: stopped{f'; {stop}' if str(stop) else ''}"
        Console(stderr=True).print(escape(text), soft_wrap=True, highlight=False)
        sys.exit(STOPPED)


def _message(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return str(error)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    action = " Free some space and run the same command again." if is_full else ""
    return f"{error.strerror}: {error.filename}.{action}"


if __name__ == "__main__":
    main()
