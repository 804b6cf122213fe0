"""Test the prequential evidence against the chain rule of a closed-form model."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.training.predictive import PredictiveName, log_predictive

F64 = torch.float64
PRECISION, NOISE = 2.0, 0.5
SHORT: dict[str, Any] = {"epochs": 3, "lr": 0.01}
FIXED_PRIOR: dict[str, Any] = {"burn_in": 10**9, "prior_precision": PRECISION}


def linear_data(n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=F64)
    noise = NOISE * torch.randn(n, generator=generator, dtype=F64)
    return x, x @ torch.tensor([1.0, -0.5, 0.2], dtype=F64) + noise


def class_data(n: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return x, x[:, :3].argmax(1)


def linear_model() -> nn.Module:
    return nn.Linear(3, 1, bias=False).double()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def log_marginal(x: Tensor, y: Tensor) -> float:
    """Return the closed-form log marginal likelihood of the linear-Gaussian model."""
    covariance = x @ x.T / PRECISION + NOISE**2 * torch.eye(len(x), dtype=F64)
    model = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=F64), covariance)
    return float(model.log_prob(y))


def exact_predictive(fit: sr.Fit, x: Tensor, y: Tensor) -> Tensor:
    """Return the exact log p(y_i | earlier y of the block, prefix) of the linear-Gaussian model."""
    assert [float(p) for p in fit.razor.prior.precisions.values()] == pytest.approx([PRECISION])
    assert float(fit.razor.likelihood.noise.value.detach()) == pytest.approx(NOISE)  # type: ignore[union-attr, operator]
    old_x, old_y = fit.data.x, fit.data.y
    posterior = PRECISION * torch.eye(3, dtype=F64) + old_x.T @ old_x / NOISE**2
    mean = torch.linalg.solve(posterior, old_x.T @ old_y / NOISE**2)
    covariance = x @ torch.linalg.solve(posterior, x.T) + NOISE**2 * torch.eye(len(x), dtype=F64)
    root = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(root, (y - x @ mean).unsqueeze(1), upper=False).squeeze(1)
    return -0.5 * z.square() - root.diagonal().log() - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("blocks", [4, 12, [2, 3, 9]])
def test_exact_predictions_add_up_to_the_marginal_likelihood_for_every_order(
    blocks: int | list[int],
) -> None:
    x, y = linear_data()
    result = sr.prequential(
        linear_model,
        (x, y),
        sr.Gaussian(NOISE),
        blocks=blocks,
        orders=3,
        predict=exact_predictive,
        epochs=1,
        **FIXED_PRIOR,
    )
    for order, index in enumerate(result.permutations):
        first = index[: result.block_ends[0]]
        without_first_block = float(result.blocks[order, 0, 1:].sum())
        expected = log_marginal(x, y) - log_marginal(x[first], y[first])
        assert without_first_block == pytest.approx(expected, abs=1e-9)
        total = without_first_block + log_marginal(x[first], y[first])
        assert total == pytest.approx(log_marginal(x, y), abs=1e-9)
    assert not torch.equal(result.permutations[0], result.permutations[1])


@pytest.mark.parametrize("how", ["mc", "map"])
def test_only_integrated_predictions_add_up_to_the_marginal_likelihood(
    how: PredictiveName,
) -> None:
    """The Laplace posterior of a linear model is exact; blocks of one datum need nothing joint."""
    x, y = linear_data(8)

    def predict(fit: sr.Fit, inputs: Tensor, labels: Tensor) -> Tensor:
        old_x, old_y = fit.data.x, fit.data.y
        posterior = PRECISION * torch.eye(3, dtype=F64) + old_x.T @ old_x / NOISE**2
        mean = torch.linalg.solve(posterior, old_x.T @ old_y / NOISE**2)
        sr.weights(fit.model)["weight"].data.copy_(mean.unsqueeze(0))
        return log_predictive(fit, inputs, labels, how)

    options = FIXED_PRIOR | {"structure": "full", "epochs": 1, "orders": 1, "blocks": 8}
    result = sr.prequential(linear_model, (x, y), sr.Gaussian(NOISE), predict=predict, **options)
    first = result.permutations[0, :1]
    expected = log_marginal(x, y) - log_marginal(x[first], y[first])
    error = abs(float(result.blocks[..., 1:].sum()) - expected)
    assert error < 1e-6 if how == "mc" else error > 0.1


def test_the_first_block_is_laplaces_rule_and_the_next_is_the_network() -> None:
    x, y = class_data(12)
    fits: list[sr.Fit] = []

    def predict(fit: sr.Fit, inputs: Tensor, labels: Tensor) -> Tensor:
        fits.append(fit)
        return torch.distributions.Categorical(logits=fit.model(inputs)).log_prob(labels).detach()

    result = sr.prequential(mlp, (x, y), blocks=[4, 8], orders=1, predict=predict, **SHORT)
    counts = torch.bincount(y[result.permutations[0, :4]], minlength=3).tolist()
    guess = math.lgamma(3) + sum(math.lgamma(c + 1) for c in counts) - math.lgamma(4 + 3)
    assert float(result.blocks[0, 0, 0]) == pytest.approx(guess, abs=1e-12)
    assert [fit.data.n_data for fit in fits] == [4, 8]
    default = sr.prequential(mlp, (x, y), blocks=[4, 8], orders=1, **SHORT)
    assert torch.allclose(default.log_probabilities, result.log_probabilities, atol=1e-5)


def test_labels_of_later_blocks_have_no_influence() -> None:
    x, y = class_data()
    before = sr.prequential(mlp, (x, y), blocks=4, orders=1, **SHORT)
    changed = y.clone()
    last = before.permutations[0, before.block_ends[-2] :]
    changed[last] = (changed[last] + 1) % 3
    after = sr.prequential(mlp, (x, changed), blocks=4, orders=1, **SHORT)
    assert torch.equal(before.blocks[..., :-1], after.blocks[..., :-1])
    assert not torch.equal(before.blocks[..., -1], after.blocks[..., -1])


@pytest.mark.parametrize("warm_start", [False, True])
def test_the_same_seed_gives_the_same_numbers(warm_start: bool) -> None:
    options = SHORT | {"blocks": 3, "starts": 2, "warm_start": warm_start}
    state = torch.get_rng_state()
    first = sr.prequential(mlp, class_data(), seed=4, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)  # the global random state does not matter
    second = sr.prequential(mlp, class_data(), seed=4, **options)
    other = sr.prequential(mlp, class_data(), seed=5, **options)
    assert torch.equal(first.log_probabilities, second.log_probabilities)
    assert not torch.equal(first.permutations, other.permutations)
    assert first.totals.shape == (2, 2)
    assert len(set(first.totals.flatten().tolist())) == 4
    more = sr.prequential(mlp, class_data(), seed=4, **options | {"orders": 3})
    assert torch.equal(more.totals[:2], first.totals)


@pytest.mark.parametrize("warm_start", [False, True])
def test_warm_starts_use_the_weights_of_the_shorter_prefix(warm_start: bool) -> None:
    """Weights are marked after the first training; the second one hardly moves them."""
    weights: list[Tensor] = []

    def predict(fit: sr.Fit, inputs: Tensor, labels: Tensor) -> Tensor:
        weights.append(sr.weights(fit.model)["0.weight"].detach().clone())
        nn.init.constant_(sr.weights(fit.model)["0.weight"], 0.75)
        return torch.zeros(len(labels))

    options: dict[str, Any] = {"epochs": 1, "lr": 1e-9, "orders": 1, "blocks": 3}
    sr.prequential(mlp, class_data(), predict=predict, warm_start=warm_start, **options)
    expected = torch.full_like(weights[0], 0.75) if warm_start else weights[0]
    assert torch.allclose(weights[1], expected, atol=1e-6)


def test_classes_that_are_absent_from_a_prefix() -> None:
    x, y = class_data(9)
    result = sr.prequential(mlp, (x, y), blocks=[1, 2, 4], orders=2, **SHORT)
    assert all(len(y[index[:1]].unique()) == 1 for index in result.permutations)
    assert bool(torch.isfinite(result.log_probabilities).all())
    assert result.block_sizes == (1, 1, 2, 5)


def test_the_likelihood_is_not_changed() -> None:
    likelihood = sr.Gaussian(0.7)
    x, y = linear_data()
    options: dict[str, Any] = {"epochs": 12, "every": 2, "lr": 0.05, "blocks": 3}
    first = sr.prequential(linear_model, (x, y), likelihood, **options)
    assert float(likelihood.noise.value.detach()) == pytest.approx(0.7)
    second = sr.prequential(linear_model, (x, y), likelihood, **options)
    assert torch.equal(first.log_probabilities, second.log_probabilities)


def test_every_training_takes_the_same_number_of_steps() -> None:
    batches: list[tuple[int, int]] = []

    def predict(fit: sr.Fit, inputs: Tensor, labels: Tensor) -> Tensor:
        batches.append((fit.data.n_data, fit.razor.training_steps))
        return torch.zeros(len(labels))

    sr.prequential(mlp, class_data(), blocks=4, orders=1, batch_size=8, predict=predict, **SHORT)
    assert batches == [(6, 9), (12, 9), (18, 9)]


def test_arrays_are_accepted() -> None:
    x, y = class_data(12)
    from_tensors = sr.prequential(mlp, (x, y), blocks=2, **SHORT)
    from_arrays = sr.prequential(mlp, (x.numpy(), y.numpy()), blocks=2, **SHORT)
    assert torch.equal(from_tensors.log_probabilities, from_arrays.log_probabilities)


def test_stratified_orders_spread_the_classes() -> None:
    y = torch.tensor([0] * 30 + [1] * 20 + [2] * 10)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))

    def largest_deviation(stratify: bool) -> float:
        options = {"blocks": [59], "orders": 4, "stratify": stratify}
        result = sr.prequential(mlp, (x, y), epochs=1, **options)  # type: ignore[arg-type]
        assert torch.equal(result.permutations.sort(1).values, torch.arange(60).expand(4, -1))
        seen = nn.functional.one_hot(y[result.permutations]).cumsum(1).double()
        share = torch.arange(1, 61).reshape(-1, 1) / 60
        return float((seen - share * torch.tensor([30, 20, 10])).abs().max())

    assert largest_deviation(True) < 2 < largest_deviation(False)


def test_inputs_that_matter_are_found() -> None:
    """A network without the three inputs that determine the class predicts worse."""
    x, y = class_data(64)

    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs * inputs.new_tensor([0.0, 0, 0, 1]))

    options: dict[str, Any] = {"epochs": 60, "lr": 0.03, "blocks": 4, "every": 20}
    seeing, blind = (sr.prequential(make, (x, y), **options) for make in (mlp, Blind))
    assert seeing.compare(blind).verdict == "first"
    assert blind.compare(seeing).verdict == "second"
    assert seeing.log_evidence > -64 * math.log(3)


_NETWORK = mlp()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"make_model": _NETWORK}, "function that returns a new network, got Sequential"),
        ({"make_model": lambda: _NETWORK}, "returned the same network.*deepcopy"),
        ({"make_model": lambda: nn.Sequential(_NETWORK)}, "or the same weights, twice"),
        ({"make_model": lambda: 3}, "must return a network, got int"),
        ({"make_model": nn.ReLU}, "without parameters"),
        ({"make_model": lambda: nn.Linear(7, 3)}, r"cannot process.*\[12, 4\]"),
        ({"blocks": 13}, "12 data cannot fill 13 blocks. Use blocks=12"),
        ({"blocks": 1}, "blocks.* integer of at least 2, got 1"),
        ({"blocks": [4, 4]}, r"increasing prefix sizes, got \[4, 4\]"),
        ({"blocks": [4, 3]}, r"increasing prefix sizes, got \[4, 3\]"),
        ({"blocks": []}, "increasing prefix sizes"),
        ({"blocks": [0, 3]}, "prefix in blocks must be an integer of at least 1, got 0"),
        ({"blocks": [4, 20]}, "prefix of 20 data, but there are only 12"),
        ({"blocks": [12]}, "no data to predict"),
        ({"orders": 0}, "orders must be an integer of at least 1, got 0"),
        ({"starts": 1.5}, "starts must be an integer of at least 1, got 1.5"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"predict": "bridge"}, "predict must be 'map' or 'mc', got 'bridge'"),
        ({"predict": lambda fit, x, y: torch.zeros(2, 1)}, r"shape \[3\], got \[2, 1\]"),
        ({"predict": lambda fit, x, y: 1.0}, "got float"),
        ({"predict": lambda fit, x, y: y * -math.inf}, "log probability (nan|-inf)"),
        ({"data": torch.zeros(3)}, r"pair \(x, y\), got Tensor"),
        ({"data": (torch.zeros(12, 4), torch.arange(11))}, "same number of samples"),
        ({"data": (torch.zeros(12, 4), torch.arange(12))}, "Label 3 .*has 3 outputs"),
        ({"save": "runs"}, "does not accept 'save'"),
        ({"epoch": 3}, "Did you mean 'epochs'"),
        ({"likelihood": "binomial"}, "Unknown likelihood 'binomial'"),
    ],
)
def test_errors_name_the_culprit(changes: dict[str, Any], message: str) -> None:
    x, y = class_data(12)
    options = {"make_model": mlp, "data": (x, y), "blocks": 4, "epochs": 1, **changes}
    with pytest.raises(ValueError, match=message):
        sr.prequential(**options)


def test_stratify_needs_classes() -> None:
    with pytest.raises(ValueError, match="stratify=True needs class labels"):
        sr.prequential(linear_model, linear_data(), "gaussian", stratify=True)


def test_errors_of_a_training_name_the_prefix() -> None:
    def fail(fit: sr.Fit, inputs: Tensor, labels: Tensor) -> Tensor:
        raise RuntimeError("no prediction")

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    with pytest.raises(RuntimeError, match="no prediction"):
        sr.prequential(mlp, class_data(), predict=fail, **SHORT)
    with pytest.raises(ValueError) as caught:
        sr.prequential(make, class_data(), blocks=4, **SHORT)
    assert "training on the first 6 of 24 data" in "".join(caught.value.__notes__)


def test_copies_of_one_network_are_new_networks() -> None:
    network = mlp()
    before = copy.deepcopy(network.state_dict())
    sr.prequential(lambda: copy.deepcopy(network), class_data(), blocks=2, **SHORT)
    assert all(torch.equal(network.state_dict()[k], v) for k, v in before.items())
