"""Basis-function models: features, exact evidence, learned hyperparameters."""

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from symrazor.core.parameters import hyperparameters
from symrazor.inference.basis_models import (
    BasisModel,
    Features,
    Fourier,
    Symmetrised,
    reflection,
    rotations,
)

F64 = torch.float64


def _features() -> Features:
    return Fourier(12, omega2=1.5)


def _data(n: int = 7, odd: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(n, 1, generator=generator, dtype=F64) - 2
    wave = torch.sin(3 * x) if odd else torch.cos(3 * x)
    return x, (wave + 0.1 * torch.randn(n, 1, generator=generator, dtype=F64)).squeeze(1)


def test_features_are_what_they_say() -> None:
    x = torch.tensor([[0.3], [-1.0]], dtype=F64)
    waves = Fourier(12, omega2=1.5, seed=3)
    by_hand = (1.5 * x[0, 0] * waves.directions[5, 0] + waves.phases[5]).cos() / 6**0.5
    assert float(waves(x)[0, 5].detach()) == pytest.approx(float(by_hand))


def test_relaxed_features_are_the_talks() -> None:
    """(1 - lambda/2) phi(x) + lambda/2 phi(-x); invariant if and only if lambda = 1."""
    x, features = _data()[0], _features()
    phi, mirrored = features(x), features(-x)
    for amount in (0.25, 0.9):
        relaxed = Symmetrised(features, amount=amount)(x)
        assert torch.allclose(relaxed, (1 - amount / 2) * phi + amount / 2 * mirrored)
    strict = Symmetrised(features)
    assert torch.allclose(strict(x), (phi + mirrored) / 2)
    assert torch.allclose(strict(x), strict(-x))


def test_any_finite_group_of_matrices() -> None:
    group = rotations(6)
    assert torch.allclose(group[1] @ group[5], torch.eye(2, dtype=F64), atol=1e-12)
    model = Symmetrised(Fourier(20, dim=2), group)
    x = torch.randn(4, 2, dtype=F64)
    assert torch.allclose(model(x), model(x @ group[2].T))
    assert not torch.allclose(model(x), model(x @ rotations(5)[1].T), atol=1e-3)
    assert torch.equal(reflection(2)[1], -torch.eye(2, dtype=F64))


@pytest.mark.parametrize("n", [5, 40])
def test_evidence_and_predictions_of_the_dense_gaussian(n: int) -> None:
    """Both routes, fewer and more data than features, against one joint normal distribution."""
    (x, y), new = _data(n), torch.tensor([[0.1], [1.7], [-3.0]], dtype=F64)
    model = BasisModel(Symmetrised(_features(), amount=0.6), 1.7, 0.3).requires_grad_(False)
    phi = model.features(torch.cat([x, new]))
    joint = 1.7 * phi @ phi.T + 0.09 * torch.eye(n + 3, dtype=F64)
    K, cross = joint[:n, :n], joint[n:, :n]
    dense = MultivariateNormal(torch.zeros(n, dtype=F64), K).log_prob(y)
    assert float(model.log_evidence(x, y)) == pytest.approx(float(dense), abs=1e-9)
    prediction = model.predict(x, y, new)
    assert prediction.variance is not None
    solved = torch.linalg.solve(K, cross.T)
    assert torch.allclose(prediction.mean.squeeze(1), y @ solved, atol=1e-8)
    assert torch.allclose(
        prediction.variance.squeeze(1),
        joint[n:, n:].diagonal() - (cross.T * solved).sum(0),
        atol=1e-8,
    )


def test_gradient_of_the_evidence_by_finite_differences() -> None:
    x, y = _data()
    model = BasisModel(Symmetrised(Fourier(12), amount=0.4), 1.3, 0.3)
    moved = hyperparameters(model)
    assert len(moved) == 4  # omega2, lambda, variance, noise
    for parameter, got in zip(
        moved.values(),
        torch.autograd.grad(model.log_evidence(x, y), list(moved.values())),
        strict=True,
    ):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-6)
                ends.append(float(model.log_evidence(x, y)))
                parameter.sub_(sign * 1e-6)
        assert float(got) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("odd", [False, True])
def test_the_evidence_learns_the_symmetry_of_the_data(odd: bool) -> None:
    x, y = _data(24, odd)
    model = BasisModel(Symmetrised(Fourier(100, omega2=2.0), amount=0.5), 1.0, 0.3)
    before = float(model.log_evidence(x, y).detach())
    history = model.learn(x, y)
    amount = model.values()["features.amount"]
    assert amount < 0.1 if odd else amount > 0.9
    assert history[-1]["objective"] > before + 3
    assert history[-1]["features.amount"] == amount
    assert 0.05 < model.values()["noise"] < 0.2  # 0.1


def test_the_likelihood_of_the_best_weights_does_not() -> None:
    """More features than data: the fit is as good without the symmetry, or better."""
    x, y = _data(24)
    model = BasisModel(Symmetrised(Fourier(100, omega2=2.0), amount=0.5), 1e4, 0.1)
    model.variance.requires_grad_(False)
    model.noise.requires_grad_(False)
    model.features.features.omega2.requires_grad_(False)  # type: ignore[union-attr,operator]
    model.learn(x, y, "likelihood")
    assert model.values()["features.amount"] < 0.5


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="The 2 matrices are not a group"):
        Symmetrised(Fourier(5, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)]))
    with pytest.raises(ValueError, match="between 0 and 1 .exclusive., got 1.0. Use amount=None"):
        Symmetrised(Fourier(5), amount=1.0)
    frozen = BasisModel(Fourier(5)).requires_grad_(False)
    with pytest.raises(ValueError, match="0 trainable hyperparameters"):
        frozen.learn(torch.rand(4, 1), torch.rand(4))
    x, y = _data()
    with pytest.raises(ValueError, match="size and dim must be at least 1"):
        Fourier(0)
    with pytest.raises(ValueError, match=r"shape \[g, 1, 1\], got \[2, 2, 2\]"):
        Symmetrised(Fourier(3), reflection(2))
    with pytest.raises(ValueError, match="n must be at least 1"):
        rotations(0)
    with pytest.raises(ValueError, match=r"shape \[n, 1\], got \[7\]"):
        BasisModel(Fourier(3)).log_evidence(x.squeeze(1), y)
    with pytest.raises(ValueError, match="objective must be 'evidence' or 'likelihood'"):
        BasisModel(Fourier(3)).learn(x, y, "map")  # type: ignore[arg-type]
