"""Run an experiment as a command (`python -m`) with argparse, for machines without tyro."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Arguments = Mapping[str, Mapping[str, Any]]
"""Option -> keyword arguments of `ArgumentParser.add_argument`."""


def command(
    name: str,
    run: Callable[..., str],
    options_type: type[Any],
    arguments: Sequence[str] | None = None,
    extra: Arguments | None = None,
) -> None:
    """Parse options, run the experiment and print its table; errors are one line and exit code 2.

    Args:
        name: Name of the experiment.
        run: Function of the options, and of the extra options by keyword, to markdown.
        options_type: Dataclass of options; its types and docstring define the command line.
        arguments: Command line; by default that of the process.
        extra: Options that are not in the dataclass.
    """
    parser = argparse.ArgumentParser(prog=f"symrazor experiment {name}")
    for option, keywords in {**_options(options_type), **(extra or {})}.items():
        parser.add_argument(option, **keywords)
    values = vars(parser.parse_args(arguments))
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    names = {entry.name for entry in fields(options_type)}
    try:
        options = options_type(**{key: value for key, value in values.items() if key in names})
        text = run(options, **{key: value for key, value in values.items() if key not in names})
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    sys.stdout.write(f"{text}\n")


def _options(options_type: type[Any]) -> dict[str, dict[str, Any]]:
    """Return the command-line option of every field of a dataclass."""
    hints, helps = get_type_hints(options_type), _descriptions(options_type)
    options: dict[str, dict[str, Any]] = {}
    for entry in fields(options_type):
        keywords = {**_keywords(hints[entry.name]), "help": helps.get(entry.name)}
        if entry.default is not MISSING:
            is_tuple = isinstance(entry.default, tuple)
            keywords["default"] = list(entry.default) if is_tuple else entry.default
        options[f"--{entry.name.replace('_', '-')}"] = keywords
    return options


def _keywords(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a value of this type."""
    if get_origin(hint) in (Union, UnionType):  # X | None
        return _keywords(next(part for part in get_args(hint) if part is not NoneType))
    if get_origin(hint) is tuple:
        return {"nargs": "*", **_keywords(get_args(hint)[0])}
    if get_origin(hint) is Literal:
        return {"choices": list(get_args(hint))}
    return {"action": "store_true"} if hint is bool else {"type": hint}


def _descriptions(options_type: type[Any]) -> dict[str, str]:
    """Return the description of each argument in the docstring of a class."""
    text = (inspect.getdoc(options_type) or "").partition("Args:\n")[2]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(words.split()).replace("%", "%%") for name, words in found}
