"""Describe a run in a TOML file: data, network and training options.

    [data]
    name = "digits"
    task = "quadrant"

    [model]
    name = "convolutional"
    relax = true

    [fit]
    epochs = 50
    lr = 0.01

    [razor]
    estimator = "mc"

[fit] takes every field of `FitConfig`, [razor] every field of `RazorConfig`. Missing keys have
their default; unknown keys raise an error.

A file can name code, "package.module:function", for the network and the augmentation. Reading a
configuration imports nothing: names stay names until `import_function` is called for a
configuration that the user gave. A configuration found in a run folder is checked with
`refuse_code` first.
"""

import difflib
import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor

from symrazor.core.files import reader
from symrazor.core.validation import describe_type, matches_type
from symrazor.data import flip_and_crop
from symrazor.groups.constructors import is_group_file
from symrazor.inference.evidence import RazorConfig
from symrazor.training.options import Augment, FitConfig, reject_label_smoothing

HIDDEN: dict[type[Any], tuple[str, ...]] = {
    FitConfig: ("save", "resume", "razor"),
    RazorConfig: ("burn_in", "seed"),
}
"""Fields that are not keys of a file: the run folder is an option, [fit] has burn_in and seed."""

AUGMENTATIONS: dict[str, Augment] = {"flip_and_crop": flip_and_crop}
"""Augmentations of this library; all others are code of the user."""


@dataclass(frozen=True)
class CodeName:
    """Name of a function in a configuration, "package.module:function", not imported."""

    name: str

    def __repr__(self) -> str:
        return repr(self.name)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Raise ValueError: a name cannot be called.

        The method makes the name acceptable as `FitConfig.augment`.
        """
        raise ValueError(f"{self.name!r} is not imported yet. Train with symrazor.runs.run.")


@dataclass(frozen=True)
class DataConfig:
    """Data of a run.

    Args:
        name: digits (embedded), mnist, fashion-mnist, cifar-10 (folders of the official files) or
            npz (a NumPy archive with the keys x and y).
        path: folder of the official files, or archive with the training data.
        test: archive with the test data (npz only).
        task: plain for the images; digit to place them in a quadrant of a canvas; quadrant to
            predict the quadrant, too (digits and mnist only).
        likelihood: categorical, gaussian, bernoulli or poisson.
        dtype: number type of inputs, weights and real targets.
        limit: train on the first LIMIT samples.
        seed: seed of the positions on the canvas.
    """

    name: Literal["digits", "mnist", "fashion-mnist", "cifar-10", "npz"] = "digits"
    path: Path | None = None
    test: Path | None = None
    task: Literal["plain", "digit", "quadrant"] = "plain"
    likelihood: Literal["categorical", "gaussian", "bernoulli", "poisson"] = "categorical"
    dtype: Literal["float32", "float64"] = "float32"
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name != "digits" and self.path is None:
            raise ValueError(f"data.name = {self.name!r} needs data.path, the path of its files.")
        if self.task != "plain" and self.name not in ("digits", "mnist"):
            raise ValueError(f"data.task = {self.task!r} needs digits or mnist, got {self.name}.")
        if self.test is not None and self.name != "npz":
            raise ValueError(f"data.test is only for npz; {self.name} has its own test data.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit must be at least 1, got {self.limit}.")


@dataclass(frozen=True)
class ModelConfig:
    """Network of a run.

    Args:
        name: convolutional, fully-connected, ella, or package.module:function, which is imported
            (the working directory is on the path) and must return a module.
        relax: add a free path beside every convolution.
        groups: symmetries to relax: names or .json files.
        paths: paths of a relaxed layer, see `relax`; for ella see `ella_network`.
        width: width of the built-in networks.
        arguments: keyword arguments of the function.
    """

    name: str = "convolutional"
    relax: bool = True
    groups: tuple[str, ...] = ("translation",)
    paths: str = "f-fc+conv"
    width: int = 8
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.arguments and ":" not in self.name:
            raise ValueError(f"model.arguments has no effect on the network {self.name!r}.")
        relaxes_dense_layers = any(is_group_file(group) for group in self.groups)
        has_no_convolutions = self.name in ("fully-connected", "ella")
        if self.relax and has_no_convolutions and not relaxes_dense_layers:
            raise ValueError(f"{self.name!r} has no convolutions to relax. Set relax = false.")


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run.

    Args:
        data: the data.
        model: the network.
        fit: training options; `fit.razor` is the section [razor].
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    fit: FitConfig = field(default_factory=FitConfig)

    def __post_init__(self) -> None:
        """Reject options that have no effect in a run."""
        for name, instead in (("save", "--out RUN"), ("resume", "--out RUN --resume")):
            if getattr(self.fit, name) is not None:
                raise ValueError(f"fit.{name} has no effect in a run. Use {instead}.")

    def beside(self, folder: str | Path) -> "RunConfig":
        """Return a copy with absolute paths; relative ones start at the folder."""
        folder = Path(folder).absolute()
        paths = {
            name: folder / path
            for name in ("path", "test")
            if (path := getattr(self.data, name)) is not None
        }
        groups = tuple(str(folder / g) if is_group_file(g) else g for g in self.model.groups)
        model = replace(self.model, groups=groups)
        return replace(self, data=replace(self.data, **paths), model=model)

    def code(self) -> dict[str, str]:
        """Return the code that the configuration names: its key -> "package.module:function"."""
        code = {"model.name": self.model.name} if ":" in self.model.name else {}
        if isinstance(self.fit.augment, CodeName):
            code["fit.augment"] = self.fit.augment.name
        return code

    def to_toml(self) -> str:
        """Return the configuration as the text of a file for `read_config`."""
        parts: dict[str, Any] = {"data": self.data, "model": self.model}
        parts |= {"fit": self.fit, "razor": self.fit.razor}
        return "\n".join(_section(name, part) for name, part in parts.items())


SECTIONS: dict[str, type[Any]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "fit": FitConfig,
    "razor": RazorConfig,
}
"""Sections of a file."""


@reader
def read_config(file: str | Path) -> RunConfig:
    """Read a configuration; relative paths start at the folder of the file.

    Raises:
        ValueError: no such file, invalid TOML, unknown sections or keys, or values of another type.
        OSError: a file that cannot be read.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"No such file: {path}")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    return from_document(document).beside(path.parent)


def from_document(document: Mapping[str, Any]) -> RunConfig:
    """Return a configuration from nested dictionaries, as TOML and JSON give them."""
    known = tuple(SECTIONS)
    for name, section in document.items():
        if name not in known:
            raise ValueError(f"Unknown section [{name}]. {_known_names(name, known)}")
        if not isinstance(section, Mapping):
            raise ValueError(f"{name} must be a section [{name}], got {name} = {section!r}.")
    parts = {
        name: _from_section(config_type, name, document.get(name, {}))
        for name, config_type in SECTIONS.items()
    }
    return RunConfig(parts["data"], parts["model"], replace(parts["fit"], razor=parts["razor"]))


def refuse_code(file: Path, code: Mapping[str, str]) -> None:
    """Raise ValueError if a configuration in a run folder names code that would be run."""
    for key, name in code.items():
        raise ValueError(
            f"{file}: {key} names the code {name!r}. Code named in a run folder is not run. If you "
            "trust it, add --trust-code (trust_code=True in Python)."
        )


def import_function(path: str) -> Callable[..., Any]:
    """Import the function that "package.module:function" names, which runs code; or ValueError."""
    module, _, name = path.partition(":")
    if (working_directory := os.getcwd()) not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module may raise anything
        raise ValueError(f"Cannot import {path!r} (package.module:function): {error}") from error
    return function


def _from_section(config_type: type[Any], section: str, values: Mapping[str, Any]) -> Any:
    """Return a dataclass from a section, with every key and value checked."""
    hints = get_type_hints(config_type)
    options: dict[str, Any] = {}
    reject_label_smoothing(values)
    for key, value in values.items():
        _check_key(key, config_type, section)
        if key == "augment":
            if not isinstance(value, str) or not (value in AUGMENTATIONS or ":" in value):
                raise ValueError(
                    "fit.augment must be 'flip_and_crop' or 'package.module:function', got "
                    f"{value!r}."
                )
            options[key] = AUGMENTATIONS.get(value) or CodeName(value)
        elif not matches_type(value, hints[key]):
            expected = describe_type(hints[key])
            raise ValueError(f"{section}.{key} must be {expected}, got {value!r}.")
        else:
            options[key] = tuple(value) if isinstance(value, list) else value
    for key in ("path", "test") if config_type is DataConfig else ():
        options |= {key: Path(options[key])} if key in options else {}
    return config_type(**options)


def _check_key(key: str, config_type: type[Any], section: str) -> None:
    """Raise ValueError for a key that the section does not have; name the right section."""
    known = _keys(config_type)
    if key in known:
        return
    sections = [f"[{name}]" for name, other in SECTIONS.items() if key in _keys(other)]
    if sections:
        raise ValueError(
            f"[{section}] has no key {key!r}: it belongs to {' or '.join(sections)}. Move it there."
        )
    raise ValueError(f"[{section}] has no key {key!r}. {_known_names(key, known)}")


def _keys(config_type: type[Any]) -> list[str]:
    return [f.name for f in fields(config_type) if f.name not in HIDDEN.get(config_type, ())]


def _known_names(word: str, known: Sequence[str]) -> str:
    """Return the most similar known name as a question, or a list of all of them."""
    similar = difflib.get_close_matches(word, known, 1, 0.6)
    return f"Did you mean {similar[0]!r}?" if similar else f"Use one of {', '.join(known)}."


def _section(name: str, part: Any) -> str:
    lines = [f"[{name}]"]
    for option in fields(part):
        value = getattr(part, option.name)
        if value is not None and option.name not in HIDDEN.get(type(part), ()):
            lines.append(f"{option.name} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = value.name if isinstance(value, CodeName) else str(value)
    if callable(value) and not isinstance(value, CodeName):
        names = {function: name for name, function in AUGMENTATIONS.items()}
        text = names.get(value) or f"{value.__module__}:{value.__qualname__}"
    return json.dumps(text, ensure_ascii=False)
