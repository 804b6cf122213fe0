"""Check option values, and put values in words for messages and in JSON types for documents.

Annotations are the only list of allowed types and choices: a `Literal` names its choices.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

T = TypeVar("T")

_DESCRIPTIONS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Path: "a path",
    type(None): "None",
}


def check_types(options: Any) -> None:
    """Raise ValueError for the first field of a dataclass that does not match its annotation.

    Integers count as numbers. NumPy scalars are converted to Python scalars.
    """
    hints = get_type_hints(type(options))
    for field in fields(options):
        expected, value = hints[field.name], getattr(options, field.name)
        if not matches_type(value, expected):
            raise ValueError(f"{field.name} must be {describe_type(expected)}, got {value!r}.")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:  # integers of torch
            raise ValueError(f"{field.name} must be between -2^63 and 2^63 - 1, got {value}.")
        if isinstance(value, np.generic):
            object.__setattr__(options, field.name, value.item())  # the dataclass may be frozen


def check_at_least(options: Any, minimum: float, *names: str) -> None:
    """Raise ValueError unless the named fields of a dataclass are None or at least `minimum`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}.")


def check_positive_integer(name: str, value: object) -> int:
    """Return an integer of at least 1, or raise ValueError that calls it `name`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise ValueError unless a value is one of the choices of a `Literal`."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be {describe_type(choices)}, got {value!r}.")


def replace_options(options: T, changes: Mapping[str, Any]) -> T:
    """Return a copy of a dataclass with some fields replaced; raise ValueError for other names."""
    check_known(changes, [field.name for field in fields(options)])  # type: ignore[arg-type]
    return replace(options, **changes)  # type: ignore[type-var]


def check_known(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError for the first name that is no option, with a similar one if there is one."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Options: {', '.join(known)}."
            raise ValueError(f"Unknown option {name!r}. {hint}")


def replace_nested(options: T, inner: str, changes: Mapping[str, Any]) -> T:
    """Return a copy of a dataclass with fields replaced in it, or in its field `inner`."""
    changes = dict(changes)
    outer_names = {field.name for field in fields(options)}  # type: ignore[arg-type]
    inner_options = changes.pop(inner, getattr(options, inner))
    inner_names = {field.name for field in fields(inner_options)} - outer_names
    check_known(changes, sorted(outer_names | inner_names))
    inner_changes = {name: changes.pop(name) for name in list(changes) if name in inner_names}
    changes[inner] = replace(inner_options, **inner_changes)
    return replace(options, **changes)  # type: ignore[type-var]


def matches_type(value: Any, expected: Any) -> bool:
    """Return whether a value has an annotated type; items of lists and mappings are not checked."""
    origin = get_origin(expected)
    if origin in (Union, UnionType):
        return any(matches_type(value, option) for option in get_args(expected))
    if origin is not None:
        return _matches_generic(value, expected, origin)
    if isinstance(value, bool | np.bool_):
        return expected in (bool, Any)
    if expected is float and isinstance(value, Tensor):
        return value.numel() == 1
    abstract: dict[Any, Any] = {int: Integral, float: Real, Path: (str, PathLike), Any: object}
    return isinstance(value, abstract.get(expected, expected))


def _matches_generic(value: Any, expected: Any, origin: Any) -> bool:
    """Return whether a value has an annotated type such as `list[int]` or `Literal["a"]`."""
    if origin is Literal:
        return isinstance(value, str | int | float | bool) and value in get_args(expected)
    if origin is Callable:
        return callable(value)
    list_like = origin is tuple or issubclass(origin, Sequence)
    return isinstance(value, (list, tuple) if list_like else Mapping)


def describe_type(expected: Any) -> str:
    """Return an annotation in words, such as "an integer or None"."""
    return join_names(_alternatives(expected), "or")


def _alternatives(expected: Any) -> list[str]:
    origin = get_origin(expected)
    if origin in (Union, UnionType):
        return [text for option in get_args(expected) for text in _alternatives(option)]
    if origin is Literal:
        return [repr(choice) for choice in get_args(expected)]
    if origin is Callable:
        return ["a function"]
    if origin is not None and issubclass(origin, Mapping):
        return ["a mapping"]
    if expected in _DESCRIPTIONS:
        return [_DESCRIPTIONS[expected]]
    name = str(expected).replace("typing.", "").replace("collections.abc.", "")
    return [name if "[" in name else getattr(expected, "__name__", name)]


def short_repr(options: Any) -> str:
    """Return a dataclass as Python code, without the fields that have their default value."""
    changed = [
        f"{field.name}={getattr(options, field.name)!r}"
        for field in fields(options)
        if getattr(options, field.name)
        != (field.default if field.default_factory is MISSING else field.default_factory())
    ]
    return f"{type(options).__name__}({', '.join(changed)})"


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Join names as in "a, b and c"."""
    return f" {conjunction} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, as in "1 epoch" or "1,200 epochs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def json_ready(value: Any) -> Any:
    """Convert a value to JSON types: arrays to lists, NaN and infinity to None, others to text."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(part) for part in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return json_ready(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else str(value)
