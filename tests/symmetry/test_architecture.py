"""Test descriptions of networks as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_document import graph_document
from collapse_networks import line, shake, zoo
from run_case import Own
from safetensors.torch import save_file, save_model
from torch import nn

import symrazor as sr
from symrazor.symmetry.architecture import (
    ARCHITECTURE,
    MAX_DEPTH,
    WEIGHTS,
    read_network,
    write_architecture,
)
from symrazor.symmetry.export import UndescribedError


@pytest.mark.parametrize("make", [zoo, line])
def test_a_described_network_is_the_same(make: Any, tmp_path: Path) -> None:
    x = torch.randn(4, 2, 9) if make is line else torch.randn(4, 1, 8, 8)
    plain = sr.collapse(shake(make()), x)
    save_model(plain, str(tmp_path / WEIGHTS))
    write_architecture(plain, tmp_path, x)
    torch.testing.assert_close(read_network(tmp_path)(x), plain(x))


def test_what_cannot_be_described(tmp_path: Path) -> None:
    for network in (Own(), nn.Sequential(nn.MaxPool2d(2, return_indices=True))):
        save_model(network, str(tmp_path / WEIGHTS))
        (tmp_path / ARCHITECTURE).touch()  # of an earlier network
        with pytest.raises(UndescribedError):
            write_architecture(network.eval(), tmp_path, torch.rand(2, 1, 16, 16))
        assert not (tmp_path / ARCHITECTURE).exists()


def _linear(**changes: Any) -> dict[str, Any]:
    arguments = {"in_features": 1, "out_features": 1, "bias": False} | changes
    return {"type": "Linear", "arguments": arguments}


def _nested(depth: int) -> dict[str, Any]:
    inner = _linear()
    for _ in range(depth):
        inner = {"type": "Sequential", "children": {"0": inner}}
    return inner


INJECTED = 'x"),__import__("os").system("touch ran'


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"type": "os:system", "arguments": {"command": "touch ran"}}, "'os:system' is not a mod"),
        ({"type": "Transformer", "arguments": {}}, "'Transformer' is not a module"),
        ({"type": ["Linear"]}, "is not a module"),
        ([], "'None' is not a module"),
        (_linear(bias="no"), "argument bias must be bool"),
        (_linear(in_features=1.5), "argument in_features"),
        (_linear(in_features=2**60), "argument in_features"),
        (_linear(in_features=-4), "no network can be built"),
        (_linear(device="cpu"), "the keys must be"),
        (_linear(in_features=2**24, out_features=2**24), r"has shape \[1, 1\]"),
        (_nested(MAX_DEPTH + 1), "nested deeper"),
        ({"type": "Sequential", "children": {INJECTED: _linear()}}, "not allowed as a name"),
        ({"type": "Sequential", "children": {"forward": _linear()}}, "no network can be built"),
        ({"type": "Sequential", "children": [1]}, r"not an object \(list\)"),
        (graph_document(steps=[{"call": "input", "target": INJECTED}]), "not allowed as a name"),
        (
            graph_document({"call": "function", "target": "eval"}),
            "function 'eval' is not in the voc",
        ),
        (graph_document({"call": "method", "target": "numpy"}), "method 'numpy' is not in the voc"),
        (graph_document({"call": "tensor", "target": "__class__"}), "tensor '__class__' is not in"),
        (graph_document({"call": "module", "target": INJECTED}), "is not in the vocabulary"),
        (
            graph_document(
                {"call": "function", "target": "attribute", "arguments": [1, "__class__"]}
            ),
            "the attribute must be one of",
        ),
        (
            graph_document({"call": "method", "target": "sum", "keywords": {INJECTED: 1}}),
            "not allowed as a name",
        ),
        (
            graph_document({"call": "method", "target": "sum", "arguments": [{"step": 9}]}),
            "not allowed as an argument",
        ),
        (graph_document(steps=[{"call": "input", "target": "x"}]), "there must be one output"),
        (
            graph_document(tensors={"w": {"kind": "buffer", "shape": [2**30], "dtype": "float32"}}),
            "needs the keys kind, shape and dtype",
        ),
    ],
)
def test_invalid_architectures_are_rejected(
    network: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"0.weight": torch.zeros(1, 1)}, tmp_path / WEIGHTS)
    if isinstance(network, dict) and network.get("type") == "Linear":
        save_file({"weight": torch.zeros(1, 1)}, tmp_path / WEIGHTS)
    (tmp_path / ARCHITECTURE).write_text(json.dumps({"schema": 1, "network": network}))
    with pytest.raises(ValueError, match=message):
        read_network(tmp_path)
    assert not Path("ran").exists()


def test_a_network_that_fails_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = {"weight": {"kind": "buffer", "shape": [1, 1], "dtype": "float32"}}
    read = {"call": "tensor", "target": "weight"}
    wrong = {"call": "function", "target": "sub", "arguments": [{"step": 1}, [1]]}
    document = {"schema": 1, "network": graph_document(read, wrong, tensors=weight)}
    (tmp_path / ARCHITECTURE).write_text(json.dumps(document))
    save_file({"weight": torch.zeros(1, 1)}, tmp_path / WEIGHTS)
    with pytest.raises(TypeError):
        read_network(tmp_path)(torch.zeros(2))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"schema": 2, "network": {}}', "3"])
def test_files_that_are_no_architecture(text: str, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1, 1)}, tmp_path / WEIGHTS)
    (tmp_path / ARCHITECTURE).write_text(text)
    with pytest.raises(ValueError, match=ARCHITECTURE):
        read_network(tmp_path)
