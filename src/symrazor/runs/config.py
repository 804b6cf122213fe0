"""A run as a file: which data, which network, how to train it. TOML in, TOML out.

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

[fit] takes every field of `FitConfig`, [razor] every field of `RazorConfig`. What is left out keeps
its default; what is not known is refused by name.

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

from symrazor.core.validation import describe_type, matches_type
from symrazor.data import flip_and_crop
from symrazor.groups.group_files import is_group_file
from symrazor.inference.razor_config import RazorConfig
from symrazor.training.options import Augment, FitConfig, reject_label_smoothing

HIDDEN: dict[type[Any], tuple[str, ...]] = {
    FitConfig: ("save", "resume", "razor"),
    RazorConfig: ("burn_in", "seed"),
}
"""Fields that no section has: the folder of a run is given with it, [fit] has burn_in and seed."""

AUGMENTATIONS: dict[str, Augment] = {
    "flip_and_crop": flip_and_crop,
}
"""Augmentations of this library, which are not code of a user."""


class CodeName:
    """Name of a function in a configuration, "package.module:function", which is not imported."""

    def __init__(self, name: str) -> None:
        """Keep the name."""
        self.name = name

    def __repr__(self) -> str:
        """Return the name in quotes."""
        return repr(self.name)

    def __eq__(self, other: object) -> bool:
        """Compare names."""
        return isinstance(other, CodeName) and other.name == self.name

    def __hash__(self) -> int:
        """Hash the name."""
        return hash(self.name)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Raise ValueError: a name cannot be called.

        The method makes the name acceptable as `FitConfig.augment`.
        """
        raise ValueError(
            f"{self.name!r} is not imported yet. Train with symrazor.runs.fit_run.run."
        )


@dataclass(frozen=True)
class DataConfig:
    """The data of a run.

    Args:
        name: "digits" (embedded), "mnist", "fashion-mnist", "cifar-10" (folders of the official
            files) or "npz" (NumPy archives with the keys x and y).
        path: the folder, or the archive to train on; relative to the configuration file.
        test: the archive to test on, for "npz".
        task: "plain" takes images as they are; "digit" puts each in a quadrant of a canvas, and
            "quadrant" also asks for which one ("digits" and "mnist").
        likelihood: "categorical", "gaussian", "bernoulli" or "poisson".
        dtype: of inputs, weights and float targets.
        limit: train on the first so many data only.
        seed: of the canvas.
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
        """Check what belongs together."""
        if self.name != "digits" and self.path is None:
            raise ValueError(f"expected data.path for {self.name}, got none")
        if self.task != "plain" and self.name not in ("digits", "mnist"):
            raise ValueError(f"expected data.task 'plain' for {self.name}, got {self.task!r}")
        if self.test is not None and self.name != "npz":
            raise ValueError(f"expected data.test for npz alone, got {self.test} for {self.name}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"expected data.limit of at least 1, got {self.limit}")


@dataclass(frozen=True)
class ModelConfig:
    """The network of a run.

    Args:
        name: "convolutional", "fully-connected", "ella", or "package.module:function", which
            `make_model` imports (the working directory counts) and calls for a module.
        relax: put free paths beside every convolution, see `relax`.
        groups: the symmetries to relax, by name, or files of groups that end with .json; relative
            to the configuration file.
        paths: what a relaxed layer is made of, see `relax`; for "ella" see `ella_network`.
        width: of the built-in networks.
        arguments: by name, for the function.
    """

    name: str = "convolutional"
    relax: bool = True
    groups: tuple[str, ...] = ("translation",)
    paths: str = "f-fc+conv"
    width: int = 8
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.arguments and ":" not in self.name:
            raise ValueError(f"expected model.arguments for a function alone, got {self.name!r}")
        convolved = not any(is_group_file(group) for group in self.groups)  # else dense layers, too
        if self.relax and self.name in ("fully-connected", "ella") and convolved:
            raise ValueError(
                f"expected relax = false for {self.name!r}, which has no convolutions to relax"
            )


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is made of.

    Args:
        data: what to learn from.
        model: the network.
        fit: how to train it; `fit.razor` is the section [razor].
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    fit: FitConfig = field(default_factory=FitConfig)

    def __post_init__(self) -> None:
        """Refuse what no section has: it would be given and not be heard."""
        fixed = {
            "fit.save": (self.fit.save, "--out RUN"),
            "fit.resume": (self.fit.resume, "--out RUN --resume"),
        }
        for name, (value, instead) in fixed.items():
            if value is not None:
                raise ValueError(f"expected no {name} in a run, got {value}; do: {instead}")

    def beside(self, folder: str | Path) -> "RunConfig":
        """The same with absolute paths; those that are not count from a folder."""
        places = {
            name: Path(folder).absolute() / place
            for name in ("path", "test")
            if (place := getattr(self.data, name)) is not None
        }
        groups = tuple(
            str(Path(folder).absolute() / group) if is_group_file(group) else group
            for group in self.model.groups
        )
        model = replace(self.model, groups=groups)
        return replace(self, data=replace(self.data, **places), model=model)

    def code(self) -> dict[str, str]:
        """Return the code that the configuration names: its key -> "package.module:function"."""
        found = {"model.name": self.model.name} if ":" in self.model.name else {}
        if isinstance(self.fit.augment, CodeName):
            found["fit.augment"] = self.fit.augment.name
        return found

    def to_toml(self) -> str:
        """The configuration as a file that `read_config` takes."""
        parts: dict[str, Any] = {"data": self.data, "model": self.model}
        parts |= {"fit": self.fit, "razor": self.fit.razor}
        return "\n".join(_section(name, part) for name, part in parts.items())


SECTIONS: dict[str, type[Any]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "fit": FitConfig,
    "razor": RazorConfig,
}
"""The sections of a run file."""


def read_config(file: str | Path) -> RunConfig:
    """Read a configuration; paths in it count from the folder of the file.

    Raises:
        ValueError: no file, no TOML, unknown sections or keys, values of another kind.
        OSError: a file that cannot be read.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"expected a TOML file with the run, got {path}, which is not a file")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a TOML file, got {path}: {error}") from error
    return from_document(document).beside(path.parent)


def from_document(document: Mapping[str, Any]) -> RunConfig:
    """A configuration from nested dictionaries, as TOML and JSON give them."""
    known = tuple(SECTIONS)
    for name, section in document.items():
        if name not in known:
            raise ValueError(f"expected sections {known}, got [{name}]{_nearest(name, known)}")
        if not isinstance(section, Mapping):
            raise ValueError(f"expected a section [{name}], got {name} = {section!r}")
    made = {name: _make(kind, name, document.get(name, {})) for name, kind in SECTIONS.items()}
    return RunConfig(made["data"], made["model"], replace(made["fit"], razor=made["razor"]))


def refuse_code(file: Path, code: Mapping[str, str]) -> None:
    """Raise ValueError if a configuration in a run folder names code.

    Args:
        file: the configuration.
        code: what `RunConfig.code` returned, or the part of it that would be run.
    """
    for key, name in code.items():
        raise ValueError(
            f"{file}: {key} names the code {name!r}. Code named in a run folder is not run. If you "
            "trust it, add --trust-code (trust_code=True in Python)."
        )


def import_function(path: str) -> Callable[..., Any]:
    """Import the function that "package.module:function" names. This runs code.

    Raises:
        ValueError: no such module or function.
    """
    module, _, name = path.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"expected 'package.module:function' that can be imported, got {path!r}: {error}"
        ) from error
    return found


def _make(kind: type[Any], section: str, values: Mapping[str, Any]) -> Any:
    """A dataclass from a section, every key and value checked."""
    hints = get_type_hints(kind)
    own = _keys(kind)
    given: dict[str, Any] = {}
    reject_label_smoothing(values)
    for key, value in values.items():
        if key not in own:
            homes = [f"[{name}]" for name, other in SECTIONS.items() if key in _keys(other)]
            if homes:
                raise ValueError(
                    f"[{section}] has no key {key!r}: it belongs to {' or '.join(homes)}. Move it "
                    "there"
                )
            raise ValueError(
                f"expected keys of [{section}] among {', '.join(own)}, got {key!r}"
                f"{_nearest(key, own)}"
            )
        if key == "augment":
            given[key] = AUGMENTATIONS.get(str(value)) or _code_name(value)
        elif not matches_type(value, hints[key]):
            raise ValueError(f"{section}.{key} must be {describe_type(hints[key])}, got {value!r}.")
        else:
            given[key] = tuple(value) if isinstance(value, list) else value
    for key in ("path", "test") if kind is DataConfig else ():
        given |= {key: Path(given[key])} if key in given else {}
    return kind(**given)


def _keys(kind: type[Any]) -> list[str]:
    """Return the keys that a section of a run file takes."""
    return [f.name for f in fields(kind) if f.name not in HIDDEN.get(kind, ())]


def _code_name(value: Any) -> CodeName:
    if not isinstance(value, str) or ":" not in value:
        raise ValueError(
            f"fit.augment is {value!r}, expected 'flip_and_crop' or 'package.module:function'"
        )
    return CodeName(value)


def _nearest(word: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def _section(name: str, part: Any) -> str:
    lines = [f"[{name}]"]
    for entry in fields(part):
        value = getattr(part, entry.name)
        if value is not None and entry.name not in HIDDEN.get(type(part), ()):
            lines.append(f"{entry.name} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _function_name(function: Callable[..., Any]) -> str:
    """Return the name that a configuration gives to a function."""
    if isinstance(function, CodeName):
        return function.name
    own = [name for name, known in AUGMENTATIONS.items() if known is function]
    return own[0] if own else f"{function.__module__}:{function.__qualname__}"


def _value(value: Any) -> str:
    """A value as TOML writes it; None inside of a list or table does not occur."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if callable(value):
        return json.dumps(_function_name(value))
    return json.dumps(str(value), ensure_ascii=False)
