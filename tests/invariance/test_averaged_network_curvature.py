"""Test the curvature of networks averaged over copies of their inputs."""

import math
from collections.abc import Sequence

import pytest
import torch
from augment_case import pictures, small_network
from torch import Tensor, nn

import symrazor as sr
from symrazor import curvature
from symrazor.core.parameters import Hyper
from symrazor.data import TensorLoader, digits
from symrazor.invariance import Augment, Augmented, Flips, Transformation, affine
from symrazor.training.augmentation_baselines import LikelihoodConfig, fit_by_likelihood
from symrazor.training.evidence_training import Training


def test_copies_fold_into_the_shared_index() -> None:
    """The blocks of an averaged network equal those of automatic differentiation."""
    x = pictures(4)
    model = Augmented(small_network(36), Augment([affine("rotation", 1.0), Flips()], 3), at="2")
    model = model.double().eval()
    method = curvature.Method(structure="full")
    result = curvature.estimate_curvature(
        model, sr.Gaussian(noise=1.0), [(x, x.new_zeros(4, 3))], method
    )
    theta = {k: v.detach() for k, v in sr.weights(model).items()}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(theta)
    rows = torch.cat([J[name].reshape(12, -1) for name in result.blocks[0].names], 1)
    torch.testing.assert_close(result.blocks[0].H, rows.T @ rows, rtol=1e-9, atol=1e-12)


def test_curvature_of_averaged_probabilities_is_that_of_autodiff() -> None:
    """Compare the full GGN, with the Hessian of the averaged log probabilities by autodiff."""
    x, y = pictures(4), torch.tensor([0, 1, 2, 0])
    parts = [affine("rotation", 1.0), Flips()]
    model = Augmented(small_network(36), Augment(parts, 3), average="probabilities").double().eval()
    result = curvature.estimate_curvature(
        model, sr.Categorical(), [(x, y)], curvature.Method(structure="full")
    )
    theta = {k: v.detach() for k, v in sr.weights(model).items()}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(theta)
    rows = torch.cat([J[name].reshape(4, 3, -1) for name in result.blocks[0].names], 2)
    p = model(x).detach().exp()
    torch.testing.assert_close(p.sum(1), p.new_ones(4))
    middle = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    expected = torch.einsum("nkp,nkl,nlq->pq", rows, middle, rows)
    torch.testing.assert_close(result.blocks[0].H, expected, rtol=1e-9, atol=1e-12)


def test_an_impossible_copy_has_no_curvature() -> None:
    """With "joint", only the possible copy contributes to the factors."""

    class Away(Transformation):
        dim = 1

        def forward(self, x: Tensor, points: Tensor) -> Tensor:
            return torch.cat([x[:, :2], points.sign()], 1)

        def describe(self, shape: Sequence[int]) -> dict[str, float]:
            return {}

    network = nn.Linear(3, 3).double()
    with torch.no_grad():
        network.weight[:, 2] = 40.0  # of all classes: copies with a -1 there are impossible
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    x[:, 2] = 1
    data = [(x, torch.arange(6) % 3)]
    both = Augmented(network, Augment(Away(), 2), average="joint").double().eval()
    for precision in (0.1, 10.0):
        result, alone = (
            sr.Razor(model, "categorical", 6, prior_precision=precision).evidence(data)
            for model in (both, network)
        )
        torch.testing.assert_close(result.log_det, alone.log_det, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result.log_likelihood, alone.log_likelihood)


def test_kronecker_factors_over_poses_follow_dense_blocks() -> None:
    """Digits shifted half out of the image contribute no curvature."""
    x, y = digits("train")
    x, y = x[:60], y[:60]
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(64, 10))
    model = Augmented(network, Augment(affine("translation", 0.3), 6), average="joint")
    fit_by_likelihood(model, (x, y), config=LikelihoodConfig(epochs=25, batch_size=20, lr=2e-2))
    (width,) = (part for part in model.augment.modules() if isinstance(part, Hyper))
    change = {}
    for structure in ("block", "kron"):
        razor = sr.Razor(model, "categorical", 60, structure=structure)
        values = []
        for value in (0.02, 0.6):
            width.value = torch.full((2,), value)
            values.append(float(razor.evidence([(x, y)]).log_det))
        change[structure] = math.log(values[1] / values[0])
    assert change["kron"] == pytest.approx(change["block"], abs=0.35)


def test_equal_copies_change_nothing() -> None:
    """For symmetric images under flips, the factors equal those without copies."""
    half = pictures(6)
    x, y = half + half.flip(-1), torch.tensor([0, 1, 2, 0, 1, 2])
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())
    network = nn.Sequential(body, small_network(72)).double()
    plain = sr.Razor(network, "categorical", 6).evidence([(x, y)])
    averaged = Augmented(network, Augment(Flips((-1,), 0.2), 1)).double().eval()
    result = sr.Razor(averaged, "categorical", 6).evidence([(x, y)])
    assert float(result.log_det) == pytest.approx(float(plain.log_det), rel=1e-10)


@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_pieces_of_a_batch_give_the_same_results(estimator: str) -> None:
    """Gradients in pieces equal those of whole batches; no pass exceeds a piece."""
    x, y = pictures(9), torch.tensor([0, 1, 2] * 3)
    model = Augmented(small_network(36), Augment(affine("rotation", 0.6), 3)).double().eval()
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, f: seen.append(len(f)))
    values = {}
    for pieces in (1, 2, 4):
        razor = sr.Razor(model, "categorical", 9, pieces=pieces, estimator=estimator)
        batches = [(x[:5], y[:5]), (x[5:], y[5:])]
        result = razor._curvature(batches, None)
        seen.clear()
        state = razor.generator.get_state()
        (gradient,) = razor.hyper_gradient(batches, result).values()
        razor.generator.set_state(state)
        assert max(seen) == -(-5 // pieces) and sum(seen) == 9
        values[pieces] = float(sum(gradient))
    if estimator == "exact":
        assert values[2] == pytest.approx(values[1], rel=1e-9)
        assert values[4] == pytest.approx(values[1], rel=1e-9)
    seen.clear()
    razor = sr.Razor(model, "categorical", 9, estimator=estimator)
    razor.step([(x, y)], subset=6)
    assert max(seen[-4:]) == 3  # cut once, not again for the second pass
    with pytest.raises(ValueError, match="pieces must be at least 1"):
        sr.Razor(model, "categorical", 9, pieces=0)


def test_evidence_batches_of_a_fit() -> None:
    """They are as large as training batches if widths are learned, and larger otherwise."""
    x, y = pictures(12), torch.tensor([0, 1, 2] * 4)
    loader = TensorLoader(x, y, 4, True, torch.Generator())
    for model, options, expected in (
        (Augmented(small_network(36), Augment(Flips(), 1)), {}, 4),
        (Augmented(small_network(36), Augment(Flips(), 1)), {"evidence_batch": 6}, 6),
        (small_network(36), {}, 250),
    ):
        razor = sr.Razor(model.double(), "categorical", 12)
        training = Training(razor, loader, sr.FitConfig(batch_size=4, **options))  # type: ignore[arg-type]
        assert training.curvature_data.batch_size == expected
