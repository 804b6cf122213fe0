"""The document of a discovery: all that a page, a script or a later command may want to know."""

from typing import Any

from symrazor.data import Dataset
from symrazor.discovery.result import SCHEMA, Discovery, Found
from symrazor.training.fit_document import orbits_of, parts_of, versions

BYTES = ", bytes divided by 255"
"""What is done to images, volumes and series of bytes when they are read."""
_LOAD = """{name} = torch.export.load("{file}").module()
{call}"""


def document(discovery: Discovery) -> dict[str, Any]:
    """Plain dictionaries, lists, numbers and strings; see docs/how-to/discover.md for the keys."""
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
            "dtype": dtype_name(data),
            "classes": list(data.names) if data.task == "classification" else None,
        },
        "questions": [_question(one) for one in discovery.found],
    }
    found["load"] = _load(discovery)
    if discovery.dynamics is not None:
        found["dynamics"] = discovery.dynamics.to_dict()
        found["verdict"] = discovery.verdict
    return found


def dtype_name(data: Dataset) -> str:
    """Return the number type of the inputs that networks trained on these data take."""
    if data.kind == "trajectory":
        return "float64"
    return str(data.x.dtype).removeprefix("torch.")


def _load(discovery: Discovery) -> str:
    """Code that loads the networks from a run folder."""
    states = _LOAD.format(name="step", file="network.pt2", call="later = step(states)  # float64")
    parts = [] if discovery.found else [states]
    for one in discovery.found:
        file = f"{one.answer.name}/network.pt2" if len(discovery.found) > 1 else "network.pt2"
        shape = ", ".join(map(str, one.data.x.shape[1:]))
        scale = BYTES if one.data.kind in ("image", "volume", "series") else ""
        call = f"outputs = network(x)  # x: {dtype_name(one.data)} [n, {shape}]{scale}"
        parts.append(_LOAD.format(name="network", file=file, call=call))
    return "\n\n".join(["import torch  # in the run folder", *parts])


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
    if "calibration" in parts:
        parts["calibration"]["network"] = _delivered(one)
    return {
        **_numbered(_with_widths(one, parts)),
        "network": one.answer.subject.name,
        "best": one.answer.best.name,
        "symmetric": one.answer.symmetric,
        "classes": list(one.data.names) if one.data.task == "classification" else None,
        **parts,
    }


def _delivered(one: Found) -> str:
    """The network to use, as the page calls it."""
    final = one.answer.final
    return one.answer.choice.name if final is None else f"{final.name}, longer"


def _numbered(found: dict[str, Any]) -> dict[str, Any]:
    """The answer with a number for each layer, the one that the verdict calls it by."""
    for candidate in (*found["candidates"], found["final"]):
        layers = [] if candidate is None else candidate["reading"]["layers"]
        relaxed = [layer["relaxed"] for layer in layers]
        if relaxed == sorted(relaxed, reverse=True):  # the verdict counts relaxed layers alone
            for number, layer in enumerate(layers, 1):
                layer["number"] = number
    return found


def _with_widths(one: Found, parts: dict[str, Any]) -> dict[str, Any]:
    """The answer; supported widths beside the network they are of, and orbits among the examples.

    The page shows them there.
    """
    found, widths = one.answer.to_dict(), one.answer.widths
    if widths is None or not widths.supported:
        return found
    for candidate in (*found["candidates"], found["final"] or {}):
        if candidate.get("name") == widths.network:
            reading = widths.averaged.reading.to_dict()
            candidate["reading"]["invariances"] = reading["invariances"]
    orbits = orbits_of(widths.averaged, parts["examples"]["images"])
    parts["examples"]["transformed"] = orbits.tolist()
    return found
