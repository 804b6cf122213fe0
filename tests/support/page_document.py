"""A small document with every part a page can show, and names that try to be markup."""

import math
from typing import Any

XSS = '</script><img src=x onerror="window.hacked=1"><svg/onload=hacked=2>"\'&lt;=1+1'


def reading(shares: list[tuple[float, float]], **more: Any) -> dict[str, Any]:
    """Relaxed layers "0", "1", ... with these shares of a convolution and a free path."""
    layers = [
        {
            "name": str(i),
            "paths": [
                path("Conv", "translation", conv, 40.0 + i),
                path("FFC", None, free, 10.0),
            ],
            "equivariance_error": {"translation": free},
            "relaxed": True,
        }
        for i, (conv, free) in enumerate(shares)
    ]
    last = {"name": "head", "paths": [path("Linear", None, 1.0, 5.5)], "equivariance_error": {}}
    return {
        "verdict": "A verdict.",
        "evidence": {"log_evidence": -120.5, "log_likelihood": -20.25, "per_datum": -1.2},
        "train": {"n": 100, "epochs": 20, "seconds": 1.5},
        "test": {"accuracy": 0.97, "nll": 0.1, "ece": 0.02},
        "layers": [*layers, {**last, "relaxed": False}],
        "config": {"estimator": "mc", "structure": "kron"},
        **more,
    }


def path(kind: str, group: str | None, share: float, effective: float) -> dict[str, Any]:
    return {
        "path": kind,
        "group": group,
        "share": share,
        "effective_parameters": effective,
        "parameters": 80,
        "precision": {"weight": 2.0, "bias": 8.0},
    }


def history(epochs: int = 20) -> list[dict[str, Any]]:
    """Every record has a loss, every fifth an evidence."""
    records: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        record: dict[str, Any] = {"epoch": epoch, "nll": 1 / epoch, "seconds": 0.1 * epoch}
        if epoch % 5 == 0:
            record |= {
                "log_evidence": -100 - 1000 / epoch,
                "log_likelihood": -20 - 100 / epoch,
                "complexity": 80 + 900 / epoch,
                "precisions": {"0.paths.0": 2.0, "0.paths.1": 1.0 * epoch, "head.weight": 3.0},
                "effective_parameters": {
                    "0.paths.0.conv.weight": 30.0,
                    "0.paths.0.conv.bias": 10.0,
                    "0.paths.1.first.weight": 10 / epoch,
                    "head.weight": 5.0,
                },
            }
        records.append(record)
    return records


def circle(radius: float) -> list[list[float]]:
    angles = [2 * math.pi * i / 40 for i in range(41)]
    return [[radius * math.cos(a), radius * math.sin(a)] for a in angles]


CONSERVED = [
    {
        "name": "angular momentum",
        "singular_value": 2.0,
        "parallelness": 0.99,
        "drift": 1e-3,
        "matrix": [[0.0, 1.0, 0.1], [-1.0, 0.0, 0.0], [0.0, 0.2, -0.5]],
        "flow": [circle(1.0), circle(2.0)],
    },
    {
        "name": "energy",
        "singular_value": 0.5,
        "parallelness": 0.4,
        "drift": 0.2,
        "matrix": [[1.0, 0.0], [0.0, -1.0]],
        "flow": circle(1.0),
    },
]


def image(shift: int, size: int = 12) -> list[list[float]]:
    return [
        [float((row + column + shift) % size == 0) for column in range(size)] for row in range(size)
    ]


def document() -> dict[str, Any]:
    """Two questions; the first with two candidates and every optional part."""
    collapse = {
        "layers": [{"name": "0", "paths": [{"path": "FFC", "share": 0.0, "fate": "dropped"}]}],
        "data": 32,
        "change": {"rms": 1e-6, "largest": 1e-5},
        "parameters": {"before": 2000, "after": 500},
        "flops": {"before": 4000, "after": 3000},
        "latency_ms": {"before": 1.5, "after": 0.75},
    }
    first = {
        "name": "where",
        "question": "Where is it?",
        "verdict": "Position matters: layer 1 uses it, error 30 %.",
        "margin": 12.5,
        "candidates": [
            {
                "name": "relaxed",
                "reading": reading(
                    [(0.99, 0.01), (0.7, 0.3)],
                    invariances={"rotation": {"width": 34.0, "unit": "degrees"}, "flip": 0.0},
                ),
                "history": history(),
            },
            {
                "name": "plain",
                "reading": reading(
                    [(1.0, 0.0)], evidence={"log_evidence": -133.0, "log_likelihood": -20.0}
                ),
                "history": history(10),
            },
        ],
        "examples": {
            "images": [image(i) for i in range(6)],
            "labels": ["a", "b", XSS, "d", "e", "f"],
            "transformed": [[image(i + k) for k in range(5)] for i in range(2)],
        },
        "calibration": {
            "confidence": [0.55, 0.95],
            "accuracy": [0.5, 0.97],
            "count": [10, 90],
            "on": "held-out data",
        },
        "filters": {"0.paths.0": [[[[0.5, -1.0], [0.0, 1.0]]] * 3]},
        "anchors": {"1.basis": {"shape": [8, 8], "points": [[0.0, 0.0], [2.5, -3.0]]}},
        "collapse": collapse,
        "costs": [
            {
                "layer": "0",
                "type": "Relaxed",
                "parameters": 160,
                "flops": 99,
                "parameters_after": 80,
                "flops_after": 50,
            }
        ],
    }
    second = {
        "name": XSS,
        "question": f"Is it conserved? {XSS}",
        "verdict": f"Yes. {XSS}",
        "candidates": [{"name": XSS, "reading": reading([], conserved=CONSERVED)}],
    }
    return {
        "schema": 1,
        "kind": "image",
        "task": "classification",
        "command": f"symrazor discover {XSS}",
        "versions": {"symrazor": "0.1.0", "torch": "2.13.0"},
        "data": {"path": XSS, "n": 100, "shape": [1, 12, 12], "classes": ["a", "b", XSS]},
        "questions": [first, second],
    }
