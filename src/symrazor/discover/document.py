"""The document of a discovery: all that a page, a script or a later command may want to know."""

from typing import Any

from symrazor.discover.result import SCHEMA, Discovery, Found
from symrazor.page.document import parts_of, versions


def document(discovery: Discovery) -> dict[str, Any]:
    """Plain dictionaries, lists, numbers and strings; see docs/discover.md for the keys."""
    data = discovery.data or discovery.found[0].data
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": data.kind,
        "task": data.task,
        "command": discovery.command,
        "versions": versions(),
        "data": {
            "path": data.source,
            "n": len(data.x),
            "shape": list(data.x.shape[1:]),
            "classes": list(data.names) if data.task == "classification" else None,
        },
        "questions": [_question(one) for one in discovery.found],
    }
    if discovery.dynamics is not None:
        found["dynamics"] = discovery.dynamics.to_dict()
        found["verdict"] = discovery.verdict
    return found


def _question(one: Found) -> dict[str, Any]:
    shown = one.answer.shown
    test = one.test
    if test is not None:
        targets = test[1] if one.preparation is None else one.preparation.targets(test[1])
        test = (one.prepared(test[0]), targets)
    parts = parts_of(shown, test=test, classes=one.data.names or None)
    if one.answer.delivered is not shown:  # how far to trust the network that is used
        used = parts_of(one.answer.delivered, test=test, classes=one.data.names or None)
        parts |= {key: used[key] for key in ("calibration",) if key in used}
    return {
        **one.answer.to_dict(),
        "best": one.answer.best.name,
        "symmetric": one.answer.symmetric,
        "classes": list(one.data.names) if one.data.task == "classification" else None,
        **parts,
    }
