"""The document of a discovery: all that a page, a script or a later command may want to know."""

import importlib
import importlib.util
import platform
from typing import Any

import torch

from symrazor.discover.result import SCHEMA, Discovery, Found


def document(discovery: Discovery) -> dict[str, Any]:
    """Plain dictionaries, lists, numbers and strings; see docs/discover.md for the keys."""
    from symrazor import __version__

    data = discovery.data or discovery.found[0].data
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": data.kind,
        "task": data.task,
        "command": discovery.command,
        "versions": {
            "symrazor": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
        },
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
    shown = one.answer.subject.fit
    test = one.test
    if test is not None:
        targets = test[1] if one.preparation is None else one.preparation.targets(test[1])
        test = (one.prepared(test[0]), targets)
    return {
        **one.answer.to_dict(),
        "best": one.answer.best.name,
        "symmetric": one.answer.symmetric,
        "classes": list(one.data.names) if one.data.task == "classification" else None,
        **_parts(shown, test, one.data.names),
    }


def _parts(fit: Any, test: Any, classes: tuple[str, ...]) -> dict[str, Any]:
    """Examples, filters, calibration and costs, where pages can be written."""
    if importlib.util.find_spec("symrazor.page") is None:
        return {}
    pages: Any = importlib.import_module("symrazor.page.document")
    found: dict[str, Any] = pages.parts_of(fit, test=test, classes=classes or None)
    return found
