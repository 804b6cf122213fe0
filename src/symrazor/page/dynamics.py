r"""Conserved quantities on a page: a question of its own, and the flows that they generate.

A quadratic quantity $C(x) = \tfrac12 x^\top A x + b^\top x$ of states $x = (q, p)$ generates the
flow $\dot x = J \nabla C = J (A x + b)$; along it the dynamics do not change (Noether).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

CURVES, POINTS = 3, 60


def question_of(dynamics: Mapping[str, Any]) -> dict[str, Any]:
    """The question of a document's "dynamics": with the learned quantities, and without.

    Bounds per datum, "neg_elbo" and "nll", become the evidence and the fit of all data.
    """
    n = dynamics.get("n_data") or 1
    evidence = dynamics.get("evidence") or {}
    errors = dynamics.get("held_out_mse") or {}
    histories = dynamics.get("history") or {}
    scale = dynamics.get("scale")
    conserved = [with_flow(entry, scale) for entry in dynamics.get("conserved") or ()]
    return {
        "name": "dynamics",
        "question": "What is conserved?",
        "verdict": dynamics.get("verdict", ""),
        "margin": evidence.get("margin"),
        "candidates": [
            {
                "name": title,
                "reading": {
                    "evidence": _evidence(evidence.get(key) or {}, n),
                    "train": {"n": n},
                    "test": {"mse": errors[key]} if key in errors else {},
                    "layers": [],
                    "conserved": conserved if key == "learned" else None,
                },
                "history": [_record(record, n) for record in histories.get(key) or ()],
            }
            for key, title in (("learned", "with conserved quantities"), ("plain", "without"))
        ],
    }


def _evidence(bound: Mapping[str, float], n: int) -> dict[str, float]:
    if "neg_elbo" not in bound or "nll" not in bound:
        return {}
    return {
        "log_evidence": -n * bound["neg_elbo"],
        "log_likelihood": -n * bound["nll"],
        "per_datum": -bound["neg_elbo"],
    }


def _record(record: Mapping[str, Any], n: int) -> dict[str, Any]:
    return {**record, **_evidence(record, n)}


def with_flow(entry: Mapping[str, Any], scale: Sequence[float] | None = None) -> dict[str, Any]:
    """A conserved quantity with its flow, unless it has one or is not quadratic.

    Args:
        entry: with "matrix" A and perhaps "linear" b.
        scale: how large each entry of a state is.
    """
    A = torch.as_tensor(entry.get("matrix", []), dtype=torch.float64)
    if "flow" in entry or A.dim() != 2 or A.shape[0] != A.shape[1] or len(A) % 2 or not len(A):
        return dict(entry)
    b = torch.as_tensor(entry.get("linear", [0.0] * len(A)), dtype=torch.float64)
    size = torch.ones(len(A), dtype=torch.float64) if scale is None else torch.as_tensor(scale)
    curves = flow(A, b, size.to(A))
    return {**entry, "flow": curves.tolist()} if bool(curves.isfinite().all()) else dict(entry)


def flow(
    A: Float[Tensor, "d d"], b: Float[Tensor, " d"], scale: Float[Tensor, " d"]
) -> Float[Tensor, "curves points 2"]:
    """Curves of the flow, in the plane of the two entries of a state that move most.

    In units of the scale, from states of three sizes, over about one turn of the fastest rotation.
    """
    n = len(A) // 2
    rows = torch.cat([A[n:], -A[:n]]) * scale / scale.unsqueeze(1)  # J A in scaled units
    drift = torch.cat([b[n:], -b[:n]]) / scale
    affine = torch.zeros(2 * n + 1, 2 * n + 1, dtype=A.dtype)
    affine[:-1, :-1], affine[:-1, -1] = rows, drift
    speed = float(torch.linalg.eigvals(rows).abs().max())
    turn = 2 * torch.pi / speed if speed > 1e-6 else 1 / max(float(drift.abs().max()), 1e-12)
    grows = float(torch.linalg.eigvals(rows).real.max()) * turn
    times = torch.linspace(0, turn * min(1.0, 1.5 / max(grows, 1e-12)), POINTS, dtype=A.dtype)
    maps = torch.linalg.matrix_exp(times.view(-1, 1, 1) * affine)
    start = torch.ones(2 * n + 1, CURVES, dtype=A.dtype)
    start[:-1] = torch.linspace(0.4, 1.0, CURVES, dtype=A.dtype)
    states = (maps @ start)[:, :-1].permute(2, 0, 1)
    moves = (states.amax(1) - states.amin(1)).sum(0)
    shown: Tensor = moves.topk(2).indices.sort().values
    return states.index_select(2, shown)
