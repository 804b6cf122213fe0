"""Define the command `symrazor`; each subcommand is a function of another module.

Only the module of the chosen subcommand is imported, so that help and version need no torch.
"""

import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from symrazor.cli.terminal import load
from symrazor.core.errors import CurvatureError, OptionError
from symrazor.core.text import printable
from symrazor.core.version import __version__

USER_ERROR, STOPPED, CLOSED_PIPE = 2, 130, 141
"""Exit codes; the last two are those of shells for SIGINT and SIGPIPE."""

USER_MISTAKES = (
    *(ValueError, OptionError, OSError, FloatingPointError, ModuleNotFoundError),
    *(CurvatureError, MemoryError),
)
"""Errors that end the command with one line; and those of torch for a lack of memory."""
ALLOCATION_ERRORS = ("can't allocate memory", "not enough memory")
"""Texts of the RuntimeError that torch raises on the CPU in place of a MemoryError."""

COMMANDS = {
    "discover": "Find the structure of a data set, and train a network that has it.",
    "fit": "Train a network described by a TOML file, and write a run folder.",
    "report": "Print the verdict of a run again, and write its report.",
    "export": "Write the network of a run as .pt2, .safetensors or .onnx file.",
    "predict": "Predict classes or targets, with their uncertainty, with the network of a run.",
    "serve": "Try the network of a run in a browser.",
    "data": "List official data sets, or download one.",
    "bench": "Measure run time and memory, and compare answers with known ones.",
    "experiment": "Reproduce a table or figure of a paper.",
    "completion": "Print the completion script for a shell.",
    "version": "Print the version.",
}
"""Subcommand -> what it does, for the help."""
_MODULES = dict.fromkeys(("report", "export", "predict", "serve"), "run_folder")
"""Subcommands whose function is not in the module of their name."""
_HELP = """usage: symrazor [-h] [--version] COMMAND ...

Learn which symmetries a neural network should have, by Bayesian model selection.

Start with: symrazor discover data.npz

commands:
{commands}

Options of a command: symrazor COMMAND --help
"""


def completion(shell: tyro.conf.Positional[Literal["bash", "zsh"]]) -> None:
    """Print the completion script for a shell.

    For bash: symrazor completion bash > ~/.local/share/bash-completion/completions/symrazor

    Args:
        shell: bash or zsh.
    """
    names = [name for name in COMMANDS if name not in ("completion", "version")]
    commands = {name: _function(name, []) for name in names}
    tyro.extras.subcommand_cli_from_dict(
        commands | {"completion": completion, "version": version},
        prog="symrazor",
        args=["--tyro-print-completion", shell],
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
    )


def version() -> None:
    """Print the version."""
    sys.stdout.write(f"{__version__}\n")


def run(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments (by default those of the process) and run a subcommand.

    Raises:
        ValueError: an unknown subcommand.
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    name = args[0] if args else "--help"
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        listed = "\n".join(f"  {key:<{width}}  {text}" for key, text in COMMANDS.items())
        sys.stdout.write(_HELP.format(commands=listed))
    elif name in ("-V", "--version"):
        version()
    elif name in COMMANDS:
        _run_command(name, args[1:])
    else:
        similar = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"Did you mean: symrazor {similar[0]}?" if similar else "See: symrazor --help"
        raise ValueError(f"Unknown command {name!r}. {hint}")


def _run_command(name: str, args: Sequence[str]) -> None:
    config: list[Any] = []
    if name != "fit":  # its sections share names, so that options keep prefixes (--fit.lr)
        config.append(tyro.conf.OmitArgPrefixes)
    tyro.cli(
        _function(name, args),
        prog=f"symrazor {name}",
        args=args,
        config=(*config, tyro.conf.OmitSubcommandPrefixes),
        registry=_registry(name),
    )


def _registry(name: str) -> Any:
    """Return tyro's rules for the options of a subcommand; None for the rules of tyro itself."""
    if name == "fit":
        return load("fit").option_registry()
    if name == "experiment":
        return load("fit").option_registry(load("experiment").OPTIONS)
    return None


def _function(name: str, args: Sequence[str]) -> Callable[..., Any]:
    """Return the function of a subcommand; the arguments may name its defaults."""
    if name in ("completion", "version"):
        return completion if name == "completion" else version
    module = load(_MODULES.get(name, name))
    if name == "fit":
        return module.fit_command(module.initial_config(args))  # type: ignore[no-any-return]
    return getattr(module, name)  # type: ignore[no-any-return]


def main() -> None:
    """Run the command; errors that the user can fix end with one line and exit code 2."""
    try:
        run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED_PIPE)
    except KeyboardInterrupt as stop:
        text = f"\nsymrazor: stopped{f'; {stop}' if str(stop) else ''}"
        Console(stderr=True).print(escape(text), soft_wrap=True, highlight=False)
        sys.exit(STOPPED)
    except Exception as error:
        if not _is_user_mistake(error):
            raise
        text = f"[red]symrazor:[/red] {escape(printable(_message(error)))}"
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)
        sys.exit(USER_ERROR)


def _is_user_mistake(error: Exception) -> bool:
    return isinstance(error, USER_MISTAKES) or _is_out_of_memory(error)


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in ALLOCATION_ERRORS)


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return f"Not enough memory. {str(error)[:200]} Use less data, or close other programs."
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f": {error.filename}" if error.filename is not None else ""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    action = " Free some space and run the same command again." if is_full else ""
    return f"{error.strerror}{place}.{action}"


if __name__ == "__main__":
    main()
