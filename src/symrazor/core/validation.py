"""Whether values are of the kinds that a dataclass of options says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor


def check_types(options: Any) -> None:
    """Refuse a field of a dataclass that holds another kind of value than its annotation says.

    Whole numbers count as numbers, and those of NumPy become Python's own. Values of a `Literal`
    are left to the dataclass's own words.

    Raises:
        ValueError: by the name of the field.
    """
    hints = get_type_hints(type(options))
    for entry in fields(options):
        kind, value = hints[entry.name], getattr(options, entry.name)
        if get_origin(kind) is not Literal and not matches_type(value, kind):
            raise ValueError(f"expected {entry.name} as {describe_type(kind)}, got {value!r}")
        if isinstance(value, np.generic):
            object.__setattr__(options, entry.name, value.item())  # the dataclass may be frozen


def matches_type(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation says; what is inside of lists and mappings is not."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(matches_type(value, one) for one in get_args(kind))
    if origin is not None:
        return _matches_generic(value, kind, origin)
    if isinstance(value, bool | np.bool_):
        return kind in (bool, Any)
    if kind is float and isinstance(value, Tensor):
        return value.numel() == 1
    plain: dict[Any, Any] = {int: Integral, float: Real, Path: (str, PathLike), Any: object}
    return isinstance(value, plain.get(kind, kind))


def _matches_generic(value: Any, kind: Any, origin: Any) -> bool:
    """The same for annotations with brackets."""
    if origin is Literal:
        return value in get_args(kind)
    if origin is Callable:
        return callable(value)
    list_like = origin is tuple or issubclass(origin, Sequence)
    return isinstance(value, (list, tuple) if list_like else Mapping)


def describe_type(kind: Any) -> str:
    """An annotation in words, as in "int or None"."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(describe_type(one) for one in get_args(kind))
    if kind is type(None):
        return "None"
    if get_origin(kind) is Callable:
        return "a function"
    name = str(kind).replace("typing.", "").replace("pathlib.", "").replace("collections.abc.", "")
    return name if "[" in name else getattr(kind, "__name__", name)
