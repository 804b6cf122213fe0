"""List the values that options choose from, without importing torch."""

from typing import Literal, get_args

Kind = Literal["image", "volume", "series", "set", "vector", "trajectory"]
"""Kinds of inputs."""
KindOption = Kind | Literal["series-last"]
"""Values of the option `kind`: kinds, and series whose channels come last."""
Task = Literal["classification", "regression"]
Format = Literal["torch", "safetensors", "onnx"]
"""Formats of a network in a file."""
KINDS: tuple[Kind, ...] = get_args(Kind)
KIND_OPTIONS: tuple[str, ...] = (*KINDS, "series-last")
TASKS: tuple[Task, ...] = get_args(Task)
