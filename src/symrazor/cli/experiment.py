"""Define `symrazor experiment`: reproduce tables and figures of the papers."""

import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

import tyro

from symrazor.experiments.registry import EXPERIMENTS, options_type, summary

OPTIONS = {options_type(name) for name in EXPERIMENTS}
"""Dataclasses of the options of all experiments."""


def _command(name: str) -> Callable[..., str]:
    """Return a function whose signature and docstring define a subcommand."""

    def run(options: Any) -> str:
        return EXPERIMENTS[name](options)

    annotated: Any = Annotated  # mypy accepts no variable as the type of an Annotated
    options = annotated[options_type(name), tyro.conf.arg(name="")]
    run.__annotations__ = {"options": options, "return": str}
    run.__doc__ = summary(name)
    return run


_Experiment: Any = Union[  # noqa: UP007  (of a tuple)
    tuple(
        Annotated[str, tyro.conf.subcommand(name, constructor=_command(name))]
        for name in EXPERIMENTS
    )
]


def experiment(result: _Experiment, quiet: bool = False) -> None:
    """Reproduce a table or figure of a paper, with the published numbers beside ours.

    Args:
        result: the experiment.
        quiet: do not print the table; use with --json.
    """
    if not quiet:
        sys.stdout.write(f"{result}\n")
