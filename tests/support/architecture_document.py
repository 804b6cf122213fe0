"""Documents that describe an architecture, as saved runs hold them."""

from typing import Any


def graph_document(*steps: Any, **changes: Any) -> dict[str, Any]:
    """Return the document of a graph with these steps between its input and its output."""
    first = {"call": "input", "target": "x"}
    last = {"call": "output", "target": "output", "arguments": [{"step": 0}]}
    whole = {"type": "Graph", "children": {}, "tensors": {}, "steps": [first, *steps, last]}
    return whole | changes
