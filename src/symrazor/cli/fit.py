"""`symrazor fit`: a run as a TOML file says."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from symrazor.accelerate import processes
from symrazor.cli.terminal import JsonFile, write_json
from symrazor.core.files import check_writable_file
from symrazor.runs import fit_run as runs
from symrazor.runs.config import RunConfig, read_config, refuse_code
from symrazor.runs.fit_folder import fit_document

OF_A_RUN = ("--data.", "--model.", "--fit.", "--help", "-h")
"""Options that say what a run is, or ask for what may be said."""


def fit_command(default: RunConfig) -> Callable[..., None]:
    """The command fit, whose options start from a configuration."""

    def fit(
        file: tyro.conf.Positional[Path | None] = None,
        config: Annotated[RunConfig, tyro.conf.arg(name="")] = default,
        out: Path = Path("run"),
        resume: bool = False,
        trust_code: tyro.conf.FlagCreatePairsOff[bool] = False,
        json_file: JsonFile = None,
        quiet: bool = False,
    ) -> None:
        """Train a network as a TOML file says, and leave a folder with all that was learned.

        With several processes: torchrun --nproc-per-node 4 -m symrazor fit FILE --out RUN.

        Args:
            file: the configuration, NAME.toml; without one, the options below.
            config: every entry of the file, to be given here instead.
            out: folder of the run.
            resume: go on with the run in that folder, if there is one; its own configuration
                counts where no file is given.
            trust_code: run the code that the configuration in the folder names, to resume the run
                without a file. Code named in FILE is run in any case.
            json_file: write all that was learned to this file, as `symrazor report` does.
            quiet: no progress bar and no table.
        """
        if file is not None and file.suffix != ".toml":
            raise ValueError(f"expected a configuration NAME.toml, got {file}; do: name it so")
        check_writable_file(json_file)
        if quiet:
            config = replace(config, fit=replace(config.fit, progress=False))
        try:
            found = runs.run(config, out, resume)
        except (KeyboardInterrupt, SystemExit):
            if processes.is_main_process() and (out / runs.CHECKPOINTS).exists():
                text = f"symrazor: to go on: symrazor fit --out {quote(str(out))} --resume"
                text += " --trust-code" if config.code() else ""
                Console(stderr=True).print(escape(text), soft_wrap=True, highlight=False)
            raise
        if processes.is_main_process() and json_file is not None:
            write_json(json_file, fit_document(out))
        if processes.is_main_process() and not quiet:
            sys.stdout.write(f"{found.reading}\n")

    return fit


def given_config(arguments: Sequence[str]) -> RunConfig:
    """What the options of fit start from: the file, or the configuration of a run to resume.

    Raises:
        ValueError: nothing to resume, and nothing that says what a new run is to be; or a run to
            resume whose configuration names code, without --trust-code.
    """
    file = next((Path(a) for a in arguments if a.endswith(".toml")), None)
    if file is None and "--resume" in arguments:
        values = [v for k, v in pairwise(arguments) if k == "--out"]
        values += [a.removeprefix("--out=") for a in arguments if a.startswith("--out=")]
        folder = Path(*values[:1] or ["run"])
        file = folder / runs.CONFIG if (folder / runs.CONFIG).exists() else None
        if file is None and not any(a.startswith(OF_A_RUN) for a in arguments):
            raise ValueError(
                f"expected a run to go on with in {folder}, got none; do: name its folder, or the "
                f"file of a new run: symrazor fit FILE.toml --out {quote(str(folder))} --resume"
            )
        if file is not None:
            config = read_config(file)
            if not {"--trust-code", "--trust_code"} & set(arguments):
                refuse_code(file, config.code())
            return config
    return RunConfig() if file is None else read_config(file)
