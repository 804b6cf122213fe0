"""Define `symrazor data`: list and download official data sets."""

from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from symrazor.cli.terminal import Flag, JsonFile, OptionalName, console, parsed_by, write_json
from symrazor.data.download import PUBLISHERS, download

Name = Literal["mnist", "fashion-mnist", "cifar-10"]
_OptionalDataSet = Annotated[
    Name | None,
    parsed_by(str, get_args(Name)),
    tyro.conf.arg(metavar="[NAME]", help_behavior_hint=""),
]


def data(
    action: tyro.conf.Positional[Literal["get", "list"]],
    name: tyro.conf.Positional[_OptionalDataSet] = None,
    out: Path = Path("data"),
    url: OptionalName = None,
    json_file: JsonFile = None,
    quiet: Flag = False,
) -> None:
    """List official data sets, or download one and check it by SHA-256.

    Args:
        action: list the data sets, or get one.
        name: mnist, fashion-mnist or cifar-10.
        out: folder; the files are written to OUT/NAME.
        url: another server with the same files.
        json_file: write the names of the files to this file.
        quiet: print nothing.
    """
    terminal = console(quiet)
    if action == "list":
        for data_set, source in PUBLISHERS.items():
            text = f"{data_set:<14} {source.description}, from {source.url}"
            terminal.print(escape(text), soft_wrap=True, highlight=False)
        write_json(json_file, {data_set: source.url for data_set, source in PUBLISHERS.items()})
        return
    if name is None:
        raise ValueError(f"Name a data set: symrazor data get {' | '.join(sorted(PUBLISHERS))}.")
    source = PUBLISHERS[name]
    with Progress(console=Console(stderr=True, quiet=quiet), transient=True) as bar:
        tasks = {file.name: bar.add_task(file.name, total=file.size) for file in source.files}
        files = download(source, out / name, url, lambda f, n: bar.update(tasks[f], completed=n))
    write_json(json_file, [str(file) for file in files])
    text = f"{out / name}: {len(files)} files, checked. Next: symrazor discover {out / name}"
    terminal.print(escape(text))
