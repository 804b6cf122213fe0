"""List the values that options choose from, without importing torch."""

from typing import Literal, get_args

Kind = Literal["image", "volume", "series", "set", "vector", "trajectory"]
"""Kinds of inputs."""
Task = Literal["classification", "regression"]
Format = Literal["torch", "safetensors", "onnx"]
"""Formats of a network in a file."""
KINDS: tuple[Kind, ...] = get_args(Kind)
TASKS: tuple[Task, ...] = get_args(Task)
