"""Test the report on conserved quantities."""

from typing import Any

import numpy as np
import pytest
import torch
from page_reader import Page

from symrazor.report.conserved import add_flow, flow
from symrazor.report.page import page_html


def dynamics() -> dict[str, Any]:
    """Return a small document of conserved quantities."""
    entry = {
        "name": "energy",
        "formula": "q^2 + p^2",
        "singular_value": 1.5,
        "parallelness": 0.99,
        "drift": 0.01,
        "matrix": [[1.0, 0.0], [0.0, 1.0]],
        "linear": [0.0, 0.0],
    }
    bounds = {"learned": {"nll": 1.0, "neg_elbo": 1.5}, "plain": {"nll": 1.0, "neg_elbo": 1.75}}
    return {
        "verdict": "1 quantity is conserved: energy.",
        "conserved": [entry],
        "evidence": {**bounds, "margin": 25.0},
        "held_out_mse": {"learned": 0.1, "plain": 0.2},
        "scale": [2.0, 0.5],
        "n_data": 100,
        "history": {"learned": [{"step": 100 * i, "nll": 1.0, "neg_elbo": 2.0} for i in (1, 2)]},
    }


def test_dynamics_become_a_question() -> None:
    data = Page(page_html({"questions": [], "dynamics": dynamics()})).data
    (question,) = data["questions"]
    assert question["verdict"] == "1 quantity is conserved: energy." and question["margin"] == 25
    learned, plain = question["candidates"]
    assert learned["reading"]["evidence"]["log_evidence"] == -150
    assert plain["reading"]["evidence"]["log_evidence"] == -175
    assert learned["series"]["clock"] == "step" and learned["series"]["epoch"] == [100, 200]
    assert "conserved" not in plain["reading"]
    assert learned["reading"]["conserved"][0]["axes"] == ["q", "p"]
    flow = np.array(learned["reading"]["conserved"][0]["flow"]) * dynamics()["scale"]
    energy = (flow**2).sum(-1)  # constant along each curve
    assert flow.shape == (3, 60, 2) and np.ptp(energy, axis=1) == pytest.approx(0, abs=1e-4)
    assert np.ptp(flow, axis=1).min() > 0.3


def test_flows_are_shown_in_their_plane_of_rotation() -> None:
    momentum = torch.zeros(4, 4)
    momentum[0, 3] = momentum[3, 0] = 1.0
    momentum[1, 2] = momentum[2, 1] = -1.0  # q1 p2 - q2 p1 turns q1 and q2, and p1 and p2
    result = add_flow({"name": "angular momentum", "matrix": momentum.tolist()})
    radius = np.linalg.norm(np.array(result["flow"]), axis=-1)
    assert result["axes"] in (["q1", "q2"], ["p1", "p2"], ["q1", "p2"], ["q2", "p1"])
    assert np.ptp(radius, axis=1) == pytest.approx(0, abs=1e-9)
    straight = add_flow({"matrix": np.zeros((4, 4)).tolist(), "linear": [0.0, 0.0, 1.0, 0.0]})
    assert "q1" in straight["axes"]
    assert "flow" not in add_flow({"matrix": [[1.0, 2.0, 3.0]]})
    spring = {"matrix": np.eye(2).tolist(), "linear": [-10.0, 0.0]}  # about q = 10
    radius = np.linalg.norm(np.array(add_flow(spring, [1.0, 1.0], [10.0, 0.0])["flow"]), axis=-1)
    assert np.ptp(radius, axis=1) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_flows_conserve_their_generating_quantity(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    A, b = A + A.T, torch.randn(2, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.5, 3.0], dtype=torch.float64)
    x = flow(A, b, scale) * scale
    value = 0.5 * torch.einsum("cti,ij,ctj->ct", x, A, x) + x @ b
    assert torch.allclose(value, value[:, :1].expand_as(value), atol=1e-8)
    assert bool(x.isfinite().all()) and float(x.diff(dim=1).abs().max()) > 1e-3
