r"""Turn conserved quantities into a question of the page, with the flows that they generate.

A quadratic quantity $C(x) = \tfrac12 x^\top A x + b^\top x$ of states $x = (q, p)$ generates the
flow $\dot x = J \nabla C = J (A x + b)$, along which the dynamics are invariant (Noether).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

CURVES, POINTS_PER_CURVE = 3, 60
"""Size of the drawing of a flow."""


def dynamics_question(dynamics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the question for the "dynamics" of a document.

    Candidates are the simulator and the baselines, by their rollouts, then the Hamiltonian networks
    with and without conserved quantities, if they were trained.
    """
    units = (dynamics.get("scale"), dynamics.get("centre"))
    conserved = [add_flow(entry, *units) for entry in dynamics.get("conserved") or ()]
    question = {
        "name": "dynamics",
        "question": "Which quantities are conserved?",
        "verdict": dynamics.get("verdict", ""),
    }
    rollouts = dynamics.get("rollouts")
    if rollouts is None:  # a document with networks only
        margin = (dynamics.get("evidence") or {}).get("margin")
        return question | {"margin": margin, "candidates": _networks(dynamics, conserved)}
    name = dynamics["simulator"]["name"]
    names = [name, *(other for other in rollouts["errors"] if other != name)]
    candidates = [
        {
            "name": other,
            "reading": {
                "layers": [],
                "test": {"rollout_error": _root_mean_square(rollouts["errors"][other])},
                "conserved": conserved if other == name else None,
            },
        }
        for other in names
    ]
    network = dynamics.get("network")
    if network:
        candidates += _networks(network, [add_flow(e, *units) for e in network["conserved"]])
    equations = dynamics["simulator"].get("equations") or []
    return question | {
        "candidates": candidates,
        "rollouts": rollouts,
        "equations": equations,
        "group": dynamics.get("group", ""),
    }


def _root_mean_square(values: Sequence[float | None]) -> float:
    measured = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    return float(measured.square().mean().sqrt()) if len(measured) else 0.0


def _networks(
    network: Mapping[str, Any], conserved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return candidates for networks with and without conserved quantities.

    Bounds per data point, "neg_elbo" and "nll", become evidence and fit of all data.
    """
    n = network.get("n_data") or 1
    evidence = network.get("evidence") or {}
    errors = network.get("held_out_mse") or {}
    histories = network.get("history") or {}
    return [
        {
            "name": title,
            "reading": {
                "evidence": _evidence(evidence.get(key) or {}, n),
                "train": {"n": n},
                "test": {"mse": errors[key]} if key in errors else {},
                "layers": [],
                "conserved": conserved if key == "learned" else None,
            },
            "history": [{**record, **_evidence(record, n)} for record in histories.get(key) or ()],
        }
        for key, title in (
            ("learned", "with conserved quantities"),
            ("plain", "without conserved quantities"),
        )
    ]


def _evidence(bound: Mapping[str, float], n: int) -> dict[str, float]:
    if "neg_elbo" not in bound or "nll" not in bound:
        return {}
    return {
        "log_evidence": -n * bound["neg_elbo"],
        "log_likelihood": -n * bound["nll"],
        "per_datum": -bound["neg_elbo"],
    }


def add_flow(
    entry: Mapping[str, Any],
    scale: Sequence[float] | None = None,
    centre: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return a conserved quantity with its flow, unless it has a flow or is not quadratic.

    The quantity has "matrix" A and optionally "linear" b. The scale is the typical size of each
    entry of a state; the flow is drawn around the centre, by default zero.
    """
    A = torch.as_tensor(entry.get("matrix", []), dtype=torch.float64)
    if "flow" in entry or A.dim() != 2 or A.shape[0] != A.shape[1] or len(A) % 2 or not len(A):
        return dict(entry)
    b = torch.as_tensor(entry.get("linear", [0.0] * len(A)), dtype=torch.float64)
    if centre is not None:
        b = b + A @ torch.as_tensor(centre, dtype=torch.float64)
    size = torch.ones(len(A), dtype=torch.float64) if scale is None else torch.as_tensor(scale)
    states = flow(A, b, size.to(A))
    if not bool(states.isfinite().all()):
        return dict(entry)
    plane = largest_plane(states)
    n = len(A) // 2
    names = [f"{'qp'[i // n]}{i % n + 1 if n > 1 else ''}" for i in plane]
    return {**entry, "flow": states[..., plane].tolist(), "axes": names}


def flow(
    A: Float[Tensor, "d d"], b: Float[Tensor, " d"], scale: Float[Tensor, " d"]
) -> Float[Tensor, "curves points d"]:
    """Return states along the flow, in units of the scale.

    The curves start at three sizes and cover about one period of the fastest rotation.
    """
    n = len(A) // 2
    rows = torch.cat([A[n:], -A[:n]]) * scale / scale.unsqueeze(1)  # J A in scaled units
    drift = torch.cat([b[n:], -b[:n]]) / scale
    affine = torch.zeros(2 * n + 1, 2 * n + 1, dtype=A.dtype)
    affine[:-1, :-1], affine[:-1, -1] = rows, drift
    speed = float(torch.linalg.eigvals(rows).abs().max())
    turn = 2 * torch.pi / speed if speed > 1e-6 else 1 / max(float(drift.abs().max()), 1e-12)
    growth = float(torch.linalg.eigvals(rows).real.max()) * turn
    times = torch.linspace(
        0, turn * min(1.0, 1.5 / max(growth, 1e-12)), POINTS_PER_CURVE, dtype=A.dtype
    )
    maps = torch.linalg.matrix_exp(times.view(-1, 1, 1) * affine)
    start = torch.ones(2 * n + 1, CURVES, dtype=A.dtype)
    start[:-1] = torch.linspace(0.4, 1.0, CURVES, dtype=A.dtype)
    states: Tensor = (maps @ start)[:, :-1].permute(2, 0, 1)
    return states


def largest_plane(states: Float[Tensor, "curves points d"]) -> list[int]:
    """Return the two state entries in whose plane the curves enclose or move most."""
    centred, steps = states[:, :-1] - states.mean(1, keepdim=True), states.diff(dim=1)
    area = torch.einsum("cti,ctj->ij", centred, steps)
    area = (area - area.T).abs()
    if float(area.max()) > 1e-9:
        return sorted(divmod(int(area.argmax()), len(area)))
    moves = (states.amax(1) - states.amin(1)).sum(0)
    return sorted(moves.topk(2).indices.tolist())
