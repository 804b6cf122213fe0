"""Run the benchmark of known answers without the command line of the package.

python -m symrazor.bench.truth --half develop --seeds 0 1 --jobs 2 --json rows.jsonl
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symrazor.bench.truth.main import Options, main
from symrazor.bench.truth.methods import METHODS


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m symrazor.bench.truth",
        description="Run discover and other methods on tasks with a known answer.",
    )
    defaults = Options()
    add = parser.add_argument
    add("--half", choices=("develop", "report", "all"), default=defaults.half)
    add("--methods", nargs="+", choices=tuple(METHODS), default=defaults.methods)
    add("--tasks", nargs="+", default=(), help="names of tasks; default: all of the half")
    add("--seeds", nargs="+", type=int, default=defaults.seeds)
    add("--minutes", type=float, default=defaults.minutes, help="time of discover per task")
    add("--time", choices=("cpu", "wall"), default=defaults.time, help="what --minutes counts")
    add("--jobs", type=int, default=defaults.jobs, help="processes with one thread each")
    add("--small", action="store_true", help="few tasks and little time")
    add("--data", type=Path, help="folder with mnist, fashion-mnist and cifar-10")
    add("--json", type=Path, help="append rows to this file, one JSON object per line")
    add("--resume", action="store_true", help="leave out what the file of rows has")
    add(
        "--stop-after",
        type=float,
        default=defaults.stop_after,
        help="minutes; start no further task",
    )
    add("--read", action="store_true", help="run nothing, summarise the file of rows")
    add("--check", action="store_true", help="compare the fixed architectures instead")
    add("--device", default=defaults.device, help="device of discover")
    add("--compare", type=Path, help="rows of another run, to count claims with the same answer")
    add("--compared-run", default="", help="description of that run, for the result file")
    add("--result", type=Path, help="write the tables to this file, for the benchmark pages")
    add("--machine", default="", help="description of the machine, for the result file")
    add("--command", default="", help="the command that measured the rows, for the result file")
    values = vars(parser.parse_args(arguments))
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Options(**options)


if __name__ == "__main__":
    main(parse())
