"""Convert values to what JSON can represent."""

import math
from collections.abc import Mapping
from typing import Any


def json_ready(value: Any) -> Any:
    """What JSON has a word for: other things by their number or their name."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(part) for part in value]
    if hasattr(value, "tolist"):  # numpy and torch
        return json_ready(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else str(value)
