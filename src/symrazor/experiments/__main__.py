"""Run an experiment with argparse, for machines without tyro.

python -m symrazor.experiments NAME [options]
"""

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from symrazor.experiments.registry import EXPERIMENTS, options_type, summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an experiment and print its table; errors are one line and exit code 2.

    Args:
        arguments: Name and options of the experiment; by default those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m symrazor.experiments")
    names = parser.add_subparsers(dest="experiment", required=True, metavar="NAME")
    for name in EXPERIMENTS:
        text = summary(name)
        subparser = names.add_parser(name, help=text, description=text, allow_abbrev=False)
        _add_options(subparser, options_type(name))
    values = vars(parser.parse_args(arguments))
    name = values.pop("experiment")
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    try:
        text = EXPERIMENTS[name](options_type(name)(**values))
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog} {name}: {error}\n")
    sys.stdout.write(f"{text}\n")


def _add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an option for every field of a dataclass."""
    hints, descriptions = get_type_hints(options), _descriptions(options)
    for field in fields(options):
        keywords = {**_keywords(hints[field.name]), "help": descriptions.get(field.name)}
        if field.default is not MISSING:
            is_tuple = isinstance(field.default, tuple)
            keywords["default"] = list(field.default) if is_tuple else field.default
        parser.add_argument(f"--{field.name.replace('_', '-')}", **keywords)


def _keywords(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a value of this type."""
    if get_origin(hint) in (Union, UnionType):  # X | None
        return _keywords(next(part for part in get_args(hint) if part is not NoneType))
    if get_origin(hint) is tuple:
        return {"nargs": "*", **_keywords(get_args(hint)[0])}
    if get_origin(hint) is Literal:
        return {"choices": list(get_args(hint))}
    return {"action": "store_true"} if hint is bool else {"type": hint}


def _descriptions(options: type[Any]) -> dict[str, str]:
    """Return the description of each argument in the docstrings of a class and its bases."""
    descriptions: dict[str, str] = {}
    for base in reversed(options.__mro__[:-1]):
        text = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2]
        entries = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL)
        descriptions |= {name: " ".join(words.split()) for name, words in entries}
    return {name: words.replace("%", "%%") for name, words in descriptions.items()}


if __name__ == "__main__":
    main()
