"""Define `symrazor fit`: train a network described by a TOML file."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from shlex import quote
from types import NoneType
from typing import Annotated, Any, get_args

import tyro
from rich.console import Console
from rich.markup import escape
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from symrazor.accelerate import processes
from symrazor.cli.terminal import Flag, JsonFile, OptionalFolder, check_output, write_json
from symrazor.core.errors import OptionError
from symrazor.runs import run
from symrazor.runs.config import HIDDEN, SECTIONS, RunConfig, read_config, refuse_code
from symrazor.runs.records import CHECKPOINTS, CONFIG, fit_document
from symrazor.runs.training import owner_of
from symrazor.runs.writing import DEFAULT_FOLDER, choose_folder
from symrazor.training.options import FitConfig

NEW_RUN_OPTIONS = ("--data.", "--model.", "--fit.", "--help", "-h")
"""Options that describe a new run or ask for help; --resume then needs no existing run."""

NO_OPTIONS = {**HIDDEN, FitConfig: ("save", "resume", "augment")}
"""Fields that are not options: the run folder has its own, and a function needs a file."""

_ConfigFile = Annotated[Path | None, tyro.conf.arg(metavar="[FILE]", help_behavior_hint="")]


def fit_command(default: RunConfig) -> Callable[..., None]:
    """Return the command fit with options that default to a configuration."""

    def fit(
        file: tyro.conf.Positional[_ConfigFile] = None,
        config: Annotated[RunConfig, tyro.conf.arg(name="")] = default,
        out: OptionalFolder = None,
        overwrite: Flag = False,
        resume: Flag = False,
        trust_code: Flag = False,
        json_file: JsonFile = None,
        quiet: Flag = False,
    ) -> None:
        """Train a network described by a TOML file, and write a run folder.

        Example: symrazor fit run.toml --out run

        With several processes: torchrun --nproc-per-node 4 -m symrazor fit FILE --out RUN

        Args:
            file: configuration, NAME.toml; without it, the options below are used.
            config: entries of the configuration; they override those of the file.
            out: run folder; if not given, the first of run, run-2, ... without another run.
            overwrite: delete the run that is in the run folder, and start anew.
            resume: resume the run in the run folder, with its own configuration.
            trust_code: let --resume run code that the configuration in the run folder names.
            json_file: write all numbers to this file.
            quiet: print nothing.
        """
        if file is not None and file.suffix != ".toml":
            raise ValueError(f"{file} must have the suffix .toml.")
        check_output(json_file, file)
        if quiet:
            config = replace(config, fit=replace(config.fit, progress=False))
        if resume and out is None:
            out = Path(DEFAULT_FOLDER)
        folder = choose_folder(out, owner_of(config), overwrite)
        try:
            result = run(config, folder, resume, overwrite)
        except (KeyboardInterrupt, SystemExit):
            if processes.is_main_process() and (folder / CHECKPOINTS).exists():
                text = f"symrazor: to resume: symrazor fit --out {quote(str(folder))} --resume"
                text += " --trust-code" if config.code() else ""
                Console(stderr=True).print(escape(text), soft_wrap=True, highlight=False)
            raise
        if processes.is_main_process() and json_file is not None:
            write_json(json_file, fit_document(folder))
        if processes.is_main_process() and not quiet:
            sys.stdout.write(f"{result.reading}\n\nRun folder: {folder}\n")

    return fit


def option_registry(
    sections: Collection[type[Any]] = (RunConfig, *SECTIONS.values()),
) -> ConstructorRegistry:
    """Return tyro's rules for dataclasses of options, without fields of no effect."""
    registry = ConstructorRegistry()
    in_progress: list[type[Any]] = []  # lets tyro's own rule describe the section

    @registry.struct_rule
    def section(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type not in sections or info.type in in_progress:
            return None
        in_progress.append(info.type)
        spec = ConstructorRegistry.get_struct_spec(info)
        in_progress.pop()
        if not isinstance(spec, StructConstructorSpec):
            return None

        def instantiate(**values: Any) -> Any:
            try:
                if isinstance(info.default, info.type):
                    return replace(info.default, **values)
                return info.type(**values)
            except ValueError as error:
                raise OptionError(str(error)) from error

        hidden = NO_OPTIONS.get(info.type, ())
        options = tuple(_named(option) for option in spec.fields if option.name not in hidden)
        return StructConstructorSpec(instantiate, options)

    return registry


def _named(option: StructFieldSpec) -> StructFieldSpec:
    """Return an optional field with the placeholder of its type, instead of "{None}|PATH"."""
    types = [kind for kind in get_args(option.type) if kind is not NoneType]
    if NoneType not in get_args(option.type) or len(types) != 1:
        return option
    name = "{True,False}" if types[0] is bool else getattr(types[0], "__name__", "VALUE").upper()
    annotated: Any = Annotated  # mypy accepts no variable as the type of an Annotated
    hint = "" if option.default is None else None  # None: tyro's own, "(default: ...)"
    placeholder = tyro.conf.arg(metavar=name, help_behavior_hint=hint)
    return replace(option, type=annotated[option.type, placeholder])


def initial_config(arguments: Sequence[str]) -> RunConfig:
    """Return the configuration that the options override: the file's, or that of a resumed run.

    Raises:
        ValueError: nothing to resume and no description of a new run; or a run to resume whose
            configuration names code, without --trust-code.
    """
    file = next((Path(a) for a in arguments if a.endswith(".toml")), None)
    if file is not None or "--resume" not in arguments:
        return RunConfig() if file is None else read_config(file)
    values = [value for option, value in pairwise(arguments) if option == "--out"]
    values += [a.removeprefix("--out=") for a in arguments if a.startswith("--out=")]
    folder = Path(*values[:1] or [DEFAULT_FOLDER])
    file = folder / CONFIG
    if file.exists():
        config = read_config(file)
        if not {"--trust-code", "--trust_code"} & set(arguments):
            refuse_code(file, config.code())
        return config
    if not any(a.startswith(NEW_RUN_OPTIONS) for a in arguments):
        raise ValueError(
            f"There is no run to resume in {folder}. Name the folder of a run, or start a new one: "
            f"symrazor fit FILE.toml --out {quote(str(folder))}"
        )
    return RunConfig()
