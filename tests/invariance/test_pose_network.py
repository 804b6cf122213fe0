"""Predictions of amounts."""

import math

import torch

from symrazor.invariance.flows import Flow
from symrazor.invariance.pose_network import HARMONICS, PoseNetwork


def _keep(x: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
    return x


FLOWS = (
    Flow("rotation", "circle", 36, math.pi, "degrees", _keep),
    Flow("flip", "choice", 2, 1, "probability", _keep),
)


def test_predictions_are_log_probabilities_for_every_kind_of_input() -> None:
    torch.manual_seed(0)
    y = torch.tensor([0, 1, 2])
    for shape in ((4,), (2, 16), (1, 12, 10)):
        network = PoseNetwork(torch.zeros(1, *shape), FLOWS, 3).eval()
        for flow, bins in ((0, 36), (1, 2)):
            with_label, without = network(torch.randn(3, *shape), y, flow)
            for log_p in (with_label, without):
                assert log_p.shape == (3, bins)
                assert torch.allclose(log_p.exp().sum(1), torch.ones(3), atol=1e-5)
            assert not torch.allclose(with_label, without)


def test_densities_on_a_circle_have_few_frequencies() -> None:
    torch.manual_seed(0)
    log_p, _ = PoseNetwork(torch.zeros(1, 4), FLOWS, 2).eval()(
        torch.randn(5, 4), torch.zeros(5, dtype=torch.long), 0
    )
    spectrum = torch.fft.rfft(log_p.detach().double(), dim=1).abs()
    assert float(spectrum[:, HARMONICS + 1 :].max()) < 1e-4 < float(spectrum[:, 1].min())
