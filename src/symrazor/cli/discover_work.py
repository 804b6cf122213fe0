"""Run `symrazor discover`: from a data file to a verdict, a report and a plain network."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rich.markup import escape

from symrazor.cli.answer import print_code, print_question
from symrazor.cli.discover import Arguments
from symrazor.cli.live import Display
from symrazor.cli.terminal import ask, check_output, console, print_verdict
from symrazor.core.errors import AmbiguousDataError
from symrazor.core.files import write_atomically
from symrazor.core.text import printable
from symrazor.data import Dataset, read
from symrazor.discovery.answer import Answer
from symrazor.discovery.api import discover as run_discovery
from symrazor.discovery.digits import discover_digits
from symrazor.discovery.question import Options, groups_as_json
from symrazor.runs.writing import DOCUMENT, Owner, choose_folder, owned_folder


def options_of(arguments: Arguments) -> Options:
    """Return the options of `discover`.

    Raises:
        ValueError: options that exclude each other.
    """
    if arguments.invariances and arguments.no_invariances:
        raise ValueError("--invariances and --no-invariances exclude each other. Omit one.")
    if arguments.verbose and arguments.quiet:
        raise ValueError("--verbose and --quiet exclude each other. Omit one.")
    invariances = True if arguments.invariances else None
    return Options().change(
        seed=arguments.seed,
        device=arguments.device,
        groups=arguments.groups,
        epochs=arguments.epochs,
        starts=arguments.starts,
        invariances=False if arguments.no_invariances else invariances,
        positions=arguments.positions,
        progress=False if arguments.quiet else None,
        **({} if arguments.minutes is None else {"minutes": arguments.minutes}),
    )


def owner_of(arguments: Arguments, options: Options) -> Owner:
    """Return the owner of the run folder: the command, and what its result depends on."""
    names = ("minutes", "epochs", "starts", "seed", "device", "invariances", "positions")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names}
    chosen |= {"groups": groups_as_json(options.groups)}
    chosen |= {"kind": arguments.kind, "task": arguments.task}
    for name in ("header", "columns", "group_column"):
        if getattr(arguments, name) is not None:
            chosen[name] = getattr(arguments, name)
    chosen["data"] = None if arguments.data is None else str(arguments.data.absolute())
    return Owner("discover", chosen)


def discover(arguments: Arguments) -> None:
    """Run the command."""
    options = options_of(arguments)
    arguments, data = _read(arguments)
    owner = owner_of(arguments, options)
    out = choose_folder(arguments.out, owner, arguments.overwrite)
    options = options.change(out=out)
    check_output(arguments.report, arguments.data)
    check_output(arguments.json_file, arguments.data)
    terminal = console(arguments.quiet)

    def show_answer(answer: Answer) -> None:
        display.stop()
        print_question(answer.to_dict(), arguments.verbose, arguments.quiet)

    display = Display(terminal)
    with _one_line_warnings(), owned_folder(out, owner, arguments.overwrite), display:
        try:
            if data is None:
                discovery = discover_digits(options, display.tell, show_answer)
            else:
                discovery = run_discovery(data, options=options, tell=display.tell)
                for result in discovery.results:
                    show_answer(result.answer)
                    print_code(result.code, arguments.quiet)
            if discovery.dynamics is not None:
                display.stop()
                print_verdict(console(), discovery.verdict)
            discovery.save(out)
        except KeyboardInterrupt as stop:
            text = str(stop) or f"finished parts are in {out}; run the same command to resume"
            raise KeyboardInterrupt(text) from stop
    if arguments.report is not None:
        discovery.report(arguments.report)
    if arguments.json_file is not None:
        write_atomically(arguments.json_file, (out / DOCUMENT).read_bytes())
    files = ", ".join(sorted(p.name for p in out.iterdir() if not p.name.startswith(".")))
    text = escape(printable(f"\nRun folder: {out} ({files})"))
    terminal.print(text, soft_wrap=True, highlight=False)


def _read(arguments: Arguments) -> tuple[Arguments, Dataset | None]:
    """Return the data, and the arguments with the answers to questions about ambiguous data."""
    if arguments.data is None:
        return arguments, None
    while True:
        header = None if arguments.header is None else arguments.header == "yes"
        try:
            with _one_line_warnings():
                data = read(
                    arguments.data,
                    arguments.kind,
                    arguments.task,
                    header=header,
                    columns=arguments.columns or (),
                    together=arguments.group_column,
                )
            return arguments, data
        except AmbiguousDataError as error:
            option, value = ask(error)
            changes: dict[str, Any] = {option: value}
            arguments = replace(arguments, **changes)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings in one line, and hide log messages on Ctrl-C, which the command explains."""

    def warn(message: Warning | str, *_: object) -> None:
        console().print(
            f"warning: {escape(printable(str(message)))}", style="yellow", soft_wrap=True
        )

    log = logging.getLogger("symrazor")
    level, showwarning = log.level, warnings.showwarning
    log.setLevel(logging.ERROR)
    warnings.showwarning = warn  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = showwarning
        log.setLevel(level)
