"""Compare the kernel form with the full Gauss-Newton matrix; test every bound."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import symrazor as sr
from symrazor.curvature import Method, estimate_curvature
from symrazor.curvature.kernel import ROWS_KEY, Kernel
from symrazor.linalg import low_rank_solver
from symrazor.linalg.jacobian_rows import JacobianRows, SharedRows, inner_products, sums_positions

Batches = list[tuple[Tensor, Tensor]]


def _network(seed: int, width: int, outputs: int, pooled: bool) -> nn.Module:
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv1d(2, width, 3, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Conv1d(width, width, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool1d(1) if pooled else nn.Identity(),
        nn.Flatten(),
        nn.Linear(width if pooled else 3 * width, outputs),
    )
    return body.double()


def _data(seed: int, n: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(outputs, (n,), generator=generator)


def _log_det(model: nn.Module, batches: Batches, n: int | None = None, **options: object) -> float:
    n_read = sum(len(y) for _, y in batches)
    razor = sr.Razor(model, "categorical", n or n_read, prior_precision=0.3, **options)
    return float(razor.evidence(batches, subset=n and n_read).log_det)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("width", [2, 12])
def test_kernel_equals_full(likelihood: str, width: int) -> None:
    """For fewer and for more weights than rows: value, effective parameters, updates."""
    model = _network(0, width, 3, pooled=False)
    x, labels = _data(0, 11, 3)
    y = labels if likelihood == "categorical" else torch.eye(3)[labels].double()
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    razors = {
        structure: sr.Razor(model, likelihood, 22, structure=structure, temperature=0.7)
        for structure in ("full", "kernel")
    }
    steps = {name: razor.step([*batches, *batches]) for name, razor in razors.items()}
    assert float(steps["kernel"].log_evidence) == pytest.approx(
        float(steps["full"].log_evidence), rel=1e-10
    )
    for name, gamma in steps["full"].effective_parameters.items():
        assert steps["kernel"].effective_parameters[name] == pytest.approx(gamma, rel=1e-8)
    for group, precision in razors["full"].prior.precisions.items():
        assert float(razors["kernel"].prior.precisions[group]) == pytest.approx(
            float(precision), rel=1e-8
        )


def test_a_subset_scales_the_matrix_like_full() -> None:
    model, (x, y) = _network(1, 12, 3, pooled=False), _data(1, 8, 3)
    values = [_log_det(model, [(x, y)], 40, structure=s) for s in ("full", "kernel")]
    assert values[0] == pytest.approx(values[1], rel=1e-10)


def test_low_rank_contains_the_truth_in_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper end is used, derivatives belong to it, and the error is far below the tolerance."""
    monkeypatch.setattr(low_rank_solver, "MAX_COLUMN_SHARE", 0.5)
    model, (x, y) = _network(2, 24, 3, pooled=False), _data(2, 150, 3)
    curvature = estimate_curvature(model, "categorical", [(x, y)], Method(structure="kernel"))
    (exact,) = curvature.blocks
    assert isinstance(exact, Kernel)
    low_rank = Kernel(exact.shapes, exact.rows, layouts=exact.layouts, exact_rows=0)
    leaves = {n: torch.tensor(1.5, dtype=torch.float64, requires_grad=True) for n in exact.names}
    truth, value = exact.logdet(leaves), low_rank.logdet(leaves)
    width = low_rank.residual(leaves)
    assert 0 < width <= 2
    assert value.item() - width <= truth.item() <= value.item() + 1e-9
    assert value.item() - truth.item() <= 0.2 * width
    slopes = torch.stack(torch.autograd.grad(value, list(leaves.values())))
    expected = torch.stack(torch.autograd.grad(truth, list(leaves.values())))
    assert float((slopes - expected).abs().max()) <= 0.05 * float(expected.abs().max())
    for index, name in enumerate(exact.names):
        moved = {
            sign: low_rank.logdet({**leaves, name: leaves[name] + sign * 1e-5}).item()
            for sign in (1, -1)
        }
        slope = (moved[1] - moved[-1]) / 2e-5
        assert float(slopes[index]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_both_forms_of_the_rows_are_used_and_agree() -> None:
    model, (x, y) = _network(3, 12, 3, pooled=True), _data(3, 6, 3)
    curvature = estimate_curvature(model, "categorical", [(x, y)], Method(structure="kernel"))
    rows = curvature.sums[ROWS_KEY]
    assert isinstance(rows, JacobianRows)
    forms = {type(part).__name__ for part in rows.batches[0].tensors.values()}
    assert forms == {"DenseRows", "SharedRows"}
    for part in rows.batches[0].tensors.values():
        J = part.matrix()
        assert torch.allclose(part.squared_lengths(torch.float64), J.square().sum(1), rtol=1e-12)
        picked = part.pick(torch.tensor([4, 0]), torch.tensor([1, 0]))
        assert torch.allclose(picked.matrix(), J[[9, 0]], rtol=1e-12)
        if isinstance(part, SharedRows):
            assert part.width == J.shape[1]


CASES = st.tuples(
    st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 4), st.booleans(), st.integers(2, 9)
)


def _check_bounds(case: tuple[int, int, int, bool, int]) -> None:
    seed, width, outputs, pooled, n = case
    model, (x, y) = _network(seed, width, outputs, pooled), _data(seed, n, outputs)
    batches = [(x[: n // 2], y[: n // 2]), (x[n // 2 :], y[n // 2 :])]
    exact = _log_det(model, batches, structure="kernel")
    slack = 1e-9 * (1 + exact)
    previous = math.inf
    for block in (1, 2, 4, 8, 16):  # each partition merges blocks of the one before
        value = _log_det(model, batches, structure="kernel", block=block)
        assert exact - slack <= value <= previous + slack
        independent = _log_det(
            model, batches, structure="kernel", block=block, outputs="independent"
        )
        assert independent >= value - slack
        previous = value
    assert value == pytest.approx(exact, rel=1e-10)
    by_tensor = _log_det(model, batches, structure="block")
    assert by_tensor >= exact - slack
    assert _log_det(model, batches, structure="ekfac") >= by_tensor - slack


@settings(max_examples=25, deadline=None)
@given(CASES)
def test_every_bound_lies_below_the_evidence(case: tuple[int, int, int, bool, int]) -> None:
    _check_bounds(case)


def test_subsets_are_a_bound_in_expectation() -> None:
    """The mean over all subsets equals the mean over all partitions into blocks of that size."""
    model, (x, y) = _network(4, 4, 2, pooled=False), _data(4, 4, 2)
    exact = _log_det(model, [(x, y)], structure="kernel")
    pairs = [
        _log_det(model, [(x[list(pair)], y[list(pair)])], 4, structure="kernel", block=2)
        for pair in itertools.combinations(range(4), 2)
    ]
    orders = ([0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2])
    partitions = [
        _log_det(model, [(x[order], y[order])], structure="kernel", block=2) for order in orders
    ]
    assert sum(pairs) / 6 == pytest.approx(sum(partitions) / 3, rel=1e-10)
    assert min(partitions) > exact
    scaled = [
        _log_det(model, [(x[list(pair)], y[list(pair)])], 4, structure="kernel")
        for pair in itertools.combinations(range(4), 2)
    ]
    assert sum(scaled) / 6 < exact  # scaling the matrix of a subset is no lower bound


def test_sampled_outputs_are_unbiased_for_independent_ones() -> None:
    """With one batch, the mean over all columns is the value of independent outputs."""
    model, (x, y) = _network(5, 4, 3, pooled=False), _data(5, 6, 3)
    options = {"structure": "kernel", "block": 3}
    expected = _log_det(model, [(x, y)], outputs="independent", **options)
    razor = sr.Razor(model, "categorical", 6, prior_precision=0.3, outputs="sampled", **options)
    draws = {round(float(razor.evidence([(x, y)]).log_det), 9) for _ in range(30)}
    assert len(draws) == 2  # three outputs have a root of two columns
    assert sum(draws) / 2 == pytest.approx(expected, rel=1e-8)


def test_sampled_outputs_of_several_batches_bound_on_average() -> None:
    """Samples of a block have the columns of their batches: four choices, equally likely."""
    model, (x, y) = _network(5, 4, 3, pooled=False), _data(5, 6, 3)
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    razor = sr.Razor(
        model, "categorical", 6, prior_precision=0.3, structure="kernel", outputs="sampled"
    )
    draws = {round(float(razor.evidence(batches).log_det), 9) for _ in range(60)}
    assert len(draws) == 4
    assert sum(draws) / 4 > _log_det(model, batches, structure="kernel") + 1e-3


def test_blocks_by_class_are_the_blocks_of_sorted_data() -> None:
    """Also where a class is larger than a block, in any order of reading."""
    model, (x, y) = _network(10, 5, 3, pooled=False), _data(10, 13, 3)
    order = y.argsort(stable=True)
    exact = _log_det(model, [(x, y)], structure="kernel")
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    by_label = [(x[y == label], y[y == label]) for label in range(3)]
    for block in (None, 2):
        options = {"structure": "kernel", "grouping": "class", "block": block}
        value = _log_det(model, batches, **options)
        assert value == pytest.approx(_log_det(model, [(x[order], y[order])], **options), rel=1e-10)
        separate = sum(
            _log_det(model, [batch], structure="kernel", block=block) for batch in by_label
        )
        assert value == pytest.approx(separate, rel=1e-10)
        assert value > exact
    razor = sr.Razor(model, "gaussian", 13, structure="kernel", grouping="class")
    with pytest.raises(ValueError, match="grouping='class' needs one integer label"):
        razor.evidence([(x, torch.eye(3, dtype=torch.float64)[y])])


def test_the_geometric_mean_lies_between_two_bounds_in_expectation() -> None:
    """Over all subsets: the scaled matrix is below, the scaled log-determinant above the truth."""
    model, (x, y) = _network(11, 6, 3, pooled=False), _data(11, 6, 3)
    exact = _log_det(model, [(x, y)], structure="kernel")
    subsets = [list(pick) for pick in itertools.combinations(range(6), 3)]
    parts = [[(x[pick], y[pick])] for pick in subsets]
    lower = [_log_det(model, part, 6, structure="kernel") for part in parts]
    upper = [_log_det(model, part, 6, structure="kernel", block=3) for part in parts]
    means = [_log_det(model, part, 6, structure="kernel", scaling="geometric") for part in parts]
    assert sum(lower) / 20 < exact < sum(upper) / 20
    for low, high, mean in zip(lower, upper, means, strict=True):
        assert low < high
        assert mean == pytest.approx(math.sqrt(low * high), rel=1e-10)
    whole = _log_det(model, [(x, y)], structure="kernel", scaling="geometric")
    assert whole == pytest.approx(exact, rel=1e-10)


def test_the_gradient_of_the_geometric_mean() -> None:
    """Effective parameters are its derivatives, and the posterior that of the scaled matrix."""
    model, (x, y) = _network(12, 6, 3, pooled=False), _data(12, 5, 3)
    razor = sr.Razor(
        model, "categorical", 15, prior_precision=0.3, structure="kernel", scaling="geometric"
    )
    gamma = razor.evidence([(x, y)], subset=5).effective_parameters
    (block,) = razor._curvature([(x, y)], 5).blocks
    fixed = {name: torch.tensor(0.3, dtype=torch.float64).log() for name in block.names}
    for name, value in gamma.items():
        ends = [float(block.logdet({**fixed, name: fixed[name] + h})) for h in (1e-5, -1e-5)]
        assert value == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-6)
    scaled = sr.Razor(model, "categorical", 15, prior_precision=0.3, structure="kernel")
    predictions = [r.posterior([(x, y)], 5).predict(x, "probit").mean for r in (razor, scaled)]
    assert torch.allclose(*predictions, rtol=1e-12)


def test_a_geometric_mean_of_zeros_is_zero() -> None:
    model, (x, y) = _network(13, 6, 3, pooled=False), _data(13, 4, 3)
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.copy_(torch.tensor([0.0, 800.0, 0.0]))  # no uncertainty, no curvature
    razor = sr.Razor(model, "categorical", 8, structure="kernel", scaling="geometric")
    evidence = razor.evidence([(x, y)], subset=4)
    assert float(evidence.log_det) == 0
    assert all(math.isfinite(value) for value in evidence.effective_parameters.values())


def test_one_precision_per_weight_is_an_error() -> None:
    model, (x, y) = _network(6, 12, 3, pooled=False), _data(6, 4, 3)
    razor = sr.Razor(model, "categorical", 4, structure="kernel", prior_groups="diagonal")
    with pytest.raises(ValueError, match="one prior precision per weight"):
        razor.evidence([(x, y)])


def test_options_of_blocks_need_the_kernel_form() -> None:
    with pytest.raises(ValueError, match="block has no effect for structure='kron'"):
        Method(block=10)
    with pytest.raises(ValueError, match="outputs has no effect for structure='full'"):
        Method(structure="full", outputs="sampled")
    with pytest.raises(ValueError, match="block must be at least 1"):
        Method(structure="kernel", block=0)
    with pytest.raises(ValueError, match="grouping has no effect for structure='ekfac'"):
        Method(structure="ekfac", grouping="class")
    with pytest.raises(ValueError, match="block has no effect for scaling='geometric'"):
        Method(structure="kernel", scaling="geometric", block=3)


def test_the_posterior_of_the_kernel_form_predicts_like_full() -> None:
    model, (x, y) = _network(7, 12, 3, pooled=False), _data(7, 9, 3)
    probabilities = [
        sr.Razor(model, "categorical", 9, structure=s).posterior([(x, y)]).predict(x, "probit").mean
        for s in ("full", "kernel")
    ]
    assert torch.allclose(*probabilities, rtol=1e-9)


def test_blocks_of_data_have_no_posterior() -> None:
    model, (x, y) = _network(8, 12, 3, pooled=False), _data(8, 9, 3)
    razor = sr.Razor(model, "categorical", 9, structure="kernel", block=3)
    with pytest.raises(ValueError, match="posterior needs block=None"):
        razor.posterior([(x, y)])


@pytest.mark.parametrize("exact_rows", [0, 10**6])
def test_float32_products_are_accurate_for_new_weights(
    exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same weights in float64, and after precisions have changed."""
    monkeypatch.setattr(low_rank_solver, "MAX_COLUMN_SHARE", 0.5)
    model, (x, y) = _network(9, 24, 3, pooled=False).float(), _data(9, 150, 3)
    kernels, double = [], copy.deepcopy(model).double()
    for network, inputs in ((model, x.float()), (double, x)):
        curvature = estimate_curvature(
            network, "categorical", [(inputs, y)], Method(structure="kernel")
        )
        (block,) = curvature.blocks
        assert isinstance(block, Kernel)
        kernels.append(Kernel(block.shapes, block.rows, 1.0, 1.0, block.layouts, exact_rows))
    single, exact = (
        kernels[0],
        Kernel(kernels[1].shapes, kernels[1].rows, layouts=kernels[1].layouts, exact_rows=10**6),
    )
    for log_precision in (1.0, 1.1, -1.0, -4.0):  # a small step, a large one, one needing float64
        fixed = dict.fromkeys(exact.names, torch.tensor(log_precision, dtype=torch.float64))
        truth, value = float(exact.logdet(fixed)), float(single.logdet(fixed))
        width = single.residual(fixed)
        assert width <= 2
        assert truth - 1e-3 <= value <= truth + width + 1e-3


def test_inner_products_by_positions_equal_those_of_formed_rows() -> None:
    """Several blocks and positions, several rows of a sample on both sides."""
    generator = torch.Generator().manual_seed(0)
    shapes = [((5, 2, 3, 40), (5, 2, 2, 30, 3)), ((4, 2, 2, 40), (4, 2, 3, 30, 2))]
    left, right = (
        SharedRows(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in pair))
        for pair in shapes
    )
    products = inner_products([left, left], right, None, torch.float64)
    formed = left.matrix() @ right.matrix().T
    assert torch.allclose(products, torch.cat([formed, formed]), rtol=1e-11, atol=1e-11)
    assert sums_positions(left, right)


def test_a_kernel_that_is_almost_zero_needs_no_columns() -> None:
    """A network whose weights were all pruned: the trace alone is within the tolerance."""
    torch.manual_seed(0)
    x = torch.randn(1200, 3, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-2)
    effective = {}
    for structure in ("kernel", "full"):
        razor = sr.Razor(model, "categorical", 1200, structure=structure, prior_precision=1e7)
        effective[structure] = razor.step([(x, y)]).effective_parameters
        assert all(math.isfinite(p) for p in razor.prior.precisions.values())
    for name, value in effective["full"].items():
        assert effective["kernel"][name] == pytest.approx(value, rel=1e-3)
