"""Compare factors kept as rows with factors kept as matrices and with dense curvature."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import symrazor as sr
from symrazor.curvature.estimate import Curvature, Method, estimate_curvature
from symrazor.curvature.task import Statistics, absorb
from symrazor.layers import FC, FFC, Conv, Relaxed
from symrazor.linalg import factor
from symrazor.linalg.blocks import Dense, Kron
from symrazor.linalg.factor import Factor
from symrazor.testing import assert_close, dense_block, dense_ggn

F64 = torch.float64
EPS = torch.finfo(F64).eps
Batches = list[tuple[Tensor, Tensor]]


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


SIZES = st.tuples(*[st.integers(1, 40)] * 2, st.integers(1, 3), st.integers(1, 5))


@settings(max_examples=80, deadline=None)
@given(SIZES, st.integers(0, 99))
def test_factors_of_rows_in_any_number_of_parts(
    sizes: tuple[int, int, int, int], seed: int
) -> None:
    rows, features, blocks, parts = sizes
    a = _normal(rows, blocks, features, seed=seed)
    pieces = [Factor.of_rows(piece) for piece in a.tensor_split(min(parts, rows))]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    expected = torch.einsum("rki,rkj->kij", a, a)
    assert (total.blocks, total.features) == (blocks, features)
    assert total.is_rows == (rows < factor.ROWS_PER_FEATURE * features)
    assert_close(total.matrix, expected, 1e-12)
    values = torch.linalg.eigvalsh(expected)
    eigenvalues = total.spectrum("w", EPS)
    assert_close(eigenvalues, values[:, -eigenvalues.shape[1] :], 1e-11)
    assert not bool((values[:, : -eigenvalues.shape[1]].abs() > 1e-11 * values.max()).any())
    values, vectors = total.eigenvectors("w", EPS)
    assert_close(vectors * values.unsqueeze(1) @ vectors.mT, expected, 1e-11)
    identity = torch.eye(vectors.shape[2], dtype=F64).expand(blocks, -1, -1)
    assert_close(vectors.mT @ vectors, identity, 1e-12)
    assert_close(torch.linalg.eigvalsh(total.projection()(total)), eigenvalues, 1e-11)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 99))
def test_absorb_matches_addition_bitwise(sizes: tuple[int, int, int, int], seed: int) -> None:
    rows, features, blocks, parts = sizes
    pieces = _normal(2 * rows, blocks, features, seed=seed).float().tensor_split(min(parts, rows))
    value, running = (Factor.of_rows(pieces[0].clone()) for _ in range(2))
    for piece in pieces[1:]:
        value, running = value + Factor.of_rows(piece), running.absorb(Factor.of_rows(piece))
    assert running.is_rows == value.is_rows
    assert torch.equal(running.matrix, value.matrix)


def test_a_factor_shared_by_two_keys_is_added_once_or_out_of_place() -> None:
    shared = Factor.of_rows(_normal(9, 1, 3))
    before = shared.matrix.clone()
    first, second = (Factor.of_rows(_normal(9, 1, 3, seed=seed)) for seed in (1, 2))
    left: Statistics = {("w", "G"): shared, ("b", "H"): shared, ("v", "G"): shared}
    total = absorb(left, {("w", "G"): first, ("b", "H"): second})
    for key, added in ((("w", "G"), first.matrix), (("b", "H"), second.matrix), (("v", "G"), 0)):
        result = total[key]
        assert isinstance(result, Factor)
        assert torch.equal(result.matrix, before + added)
    same = absorb({("w", "G"): shared, ("b", "H"): shared}, {("w", "G"): first, ("b", "H"): first})
    assert same["w", "G"] is same["b", "H"]
    assert torch.equal(shared.matrix, before + first.matrix)


def test_rows_in_any_memory_layout() -> None:
    a = _normal(5, 2, 30)
    last = a.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert last.stride(0) == 1
    both = Factor.of_rows(last[:3]) + Factor.of_rows(last[3:])
    assert both.is_rows
    assert_close(both.spectrum("w", EPS), Factor.of_rows(a).spectrum("w", EPS), 1e-14)
    assert_close(both.matrix, torch.einsum("rki,rkj->kij", a, a), 1e-14)


def _kron(rows_a: Tensor, rows_g: Tensor, whole: bool) -> Kron:
    A, G = Factor.of_rows(rows_a), Factor.of_rows(rows_g)
    if whole:
        A, G = Factor.of_matrix(A.matrix), Factor.of_matrix(G.matrix)
    shape = (max(A.blocks, G.blocks), G.features, A.features)
    return Kron("w", A, G, 0.3, EPS, lambda w: w.reshape(shape), lambda b: b.flatten(0, 1))


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.integers(1, 6)] * 2),
    st.sampled_from([(1, 1), (3, 3), (1, 3), (3, 1)]),
    st.floats(-12, 12),
    st.integers(0, 99),
)
def test_kron_of_rows_matches_kron_of_matrices(
    rows: tuple[int, int], blocks: tuple[int, int], log_delta: float, seed: int
) -> None:
    """Compare log-determinant, derivative, draws and covariance with few rows on either side."""
    a = _normal(rows[0], blocks[0], 7, seed=seed)
    g = _normal(rows[1], blocks[1], 5, seed=seed + 1)
    small, whole = _kron(a, g, whole=False), _kron(a, g, whole=True)
    H = dense_block(whole)
    assert_close(dense_block(small), H, 1e-12)
    delta = torch.tensor(log_delta, dtype=F64, requires_grad=True)
    got = small.logdet({"w": delta})
    (slope,) = torch.autograd.grad(got, delta)
    eigenvalues = torch.linalg.eigvalsh(H).clamp(min=0)
    eigenvalues[eigenvalues < 1e-12 * eigenvalues.max()] = 0
    ratio = eigenvalues / math.exp(log_delta)
    assert float(got.detach()) == pytest.approx(float(ratio.log1p().sum()), rel=1e-9)
    assert float(slope) == pytest.approx(-float((ratio / (1 + ratio)).sum()), rel=1e-9)
    posterior = torch.linalg.inv(H + math.exp(log_delta) * torch.eye(len(H), dtype=F64))
    root = small.draw({"w": delta.detach()}, torch.eye(len(H), dtype=F64))
    assert_close(root.T @ root, posterior, 1e-8)
    J = _normal(2, 3, len(H))
    assert_close(small.covariance({"w": delta.detach()}, J), J @ posterior @ J.mT, 1e-8)


class Wide(nn.Module):
    """Return a model with more features than samples, a weight used twice, and a `Hyper`."""

    def __init__(self) -> None:
        super().__init__()
        self.width = sr.Hyper(torch.tensor(0.7, dtype=F64))
        self.relaxed = Relaxed([FFC(2, 3, (6, 6)), Conv(2, 3, (6, 6)), FC(2, 3, (6, 6))])
        self.twice = nn.Linear(108, 108)
        self.head = nn.Linear(108, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.relaxed(x) * self.width.value).flatten(1)
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        f: Tensor = self.head(h * self.width.value)
        return f


def _case(n: int, batch: int, **options: object) -> tuple[sr.Razor, Batches]:
    torch.manual_seed(0)
    model = Wide().double()
    x, y = torch.randn(n, 2, 6, 6, dtype=F64), torch.arange(n) % 3
    razor = sr.Razor(model, "categorical", n, prior_precision=0.7, **options)
    return razor, [(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)]


def _factors(found: Curvature) -> dict[str, Factor]:
    krons = [block for block in found.blocks if isinstance(block, Kron)]
    return {f"{b.name} {side}": getattr(b, side) for b in krons for side in "AG"}


@pytest.mark.parametrize(
    "options",
    [{}, {"flavour": "reduce"}, {"estimator": "mc"}, {"temperature": 0.5}],
    ids=["exact", "reduce", "mc", "tempered"],
)
@pytest.mark.parametrize(("n", "batch"), [(5, 5), (9, 2), (40, 7)])
def test_evidence_and_gradients_do_not_depend_on_the_form(
    n: int, batch: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-determinant, effective parameters, and both routes to the derivative in a `Hyper`.

    The second route reads the data again in another order, which must not matter.
    """
    answers = []
    for enough in (factor.ROWS_PER_FEATURE, 0.0):
        monkeypatch.setattr(factor, "ROWS_PER_FEATURE", enough)
        razor, batches = _case(n, batch, **options)
        evidence = razor.evidence(batches, differentiable=True)
        moved = [*razor.prior.log_precision, *razor.eta.values()]
        kept = torch.autograd.grad(evidence.log_evidence, moved)
        razor, batches = _case(n, batch, **options)
        start = razor.generator.get_state()
        estimate = razor._curvature(batches, None)
        small = {name: f.is_rows for name, f in _factors(estimate).items()}
        assert any(small.values()) == (enough > 0)
        assert not all(small.values())
        razor.generator.set_state(start)
        again = batches if "estimator" in options else batches[::-1]
        fit, occam = razor.hyper_gradient(again, estimate)["width.raw"]
        assert float(fit + occam) == pytest.approx(float(kept[-1]), rel=1e-8)
        gammas = list(evidence.effective_parameters.values())
        values = [evidence.log_det, *gammas, *kept, fit, occam]
        answers.append(torch.stack([torch.as_tensor(v, dtype=F64).detach() for v in values]))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-9, atol=1e-9)


def test_derivative_in_a_hyperparameter_by_finite_differences() -> None:
    razor, batches = _case(6, 4)
    evidence = razor.evidence(batches, differentiable=True)
    raw = razor.eta["width.raw"]
    (got,) = torch.autograd.grad(evidence.log_evidence, [raw])
    values = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            raw.add_(step)
            values.append(float(razor.evidence(batches).log_evidence))
    assert float(got) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_scaling_a_subset_up_scales_the_eigenvalues() -> None:
    razor, batches = _case(6, 3)
    razor.n_data = 60
    estimate = razor._curvature(batches, 6)
    whole = _case(6, 6)[0]._curvature(batches, None)
    for big, little in zip(estimate.blocks, whole.blocks, strict=True):
        if isinstance(big, Kron) and isinstance(little, Kron):
            assert_close(big.spectrum, 10 * little.spectrum, 1e-12)


@pytest.mark.parametrize("n", [1, 4])
def test_blocks_against_the_dense_curvature(n: int) -> None:
    """For one sample G x A is exact for a dense layer; for several its trace is close."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    x, y = torch.randn(n, 9, dtype=F64), torch.arange(n) % 3
    estimate = estimate_curvature(model, "categorical", [(x, y)], Method())
    assert _factors(estimate)["0.weight A"].is_rows
    assert _factors(estimate)["0.weight G"].is_rows
    exact = dense_ggn(model, sr.Categorical(), x, y, ("0.weight", "0.bias"))
    blocks = {block.names[0]: block for block in estimate.blocks}
    bias = blocks["0.bias"]
    assert isinstance(bias, Dense)
    assert_close(dense_block(bias), exact[108:, 108:], 1e-12)
    entry = torch.tensor(0.3, dtype=F64)
    expected = torch.logdet(torch.eye(12) + exact[108:, 108:] / entry.exp())
    assert float(bias.logdet({"0.bias": entry})) == pytest.approx(float(expected), rel=1e-9)
    if n == 1:
        weight = exact[:108, :108]
        expected = torch.logdet(torch.eye(108) + weight / entry.exp())
        got = blocks["0.weight"].logdet({"0.weight": entry})
        assert float(got) == pytest.approx(float(expected), rel=1e-9)
        J = _normal(2, 3, 108)
        posterior = torch.linalg.inv(weight + entry.exp() * torch.eye(108, dtype=F64))
        covariance = blocks["0.weight"].covariance({"0.weight": entry}, J)
        assert_close(covariance, J @ posterior @ J.mT, 1e-9)


def test_a_dense_path_of_ten_thousand_features_needs_no_matrix_of_that_size() -> None:
    """10,240 x 3,072 weights and 4 samples need determinants of a 12 x 12 and a 4 x 4 matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(FC(3, 10, (32, 32)), nn.Tanh(), nn.Flatten(), nn.Linear(10_240, 4))
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    estimate = estimate_curvature(model, "categorical", [(x[:3], y[:3]), (x[3:], y[3:])])
    sizes = {name: f.size for name, f in _factors(estimate).items()}
    assert sizes == {
        "0.linear.weight A": 4,
        "0.linear.weight G": 12,
        "3.weight A": 4,
        "3.weight G": 4,
    }
    block = next(b for b in estimate.blocks if b.names == ("0.linear.weight",))
    assert isinstance(block, Kron)
    A = torch.linalg.eigvalsh(x.flatten(1).double() @ x.flatten(1).double().T)
    assert_close(block.spectrum_A[0], A, 1e-9)
    assert float(block.logdet({"0.linear.weight": torch.zeros((), dtype=F64)})) > 0


def test_input_factors_from_a_part_of_the_samples() -> None:
    """The factor is that of every k-th sample; few data are read whole; outputs always are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    model.double()
    x, y = torch.randn(64, 1, 6, 6, dtype=F64), torch.arange(64) % 2
    blocks = {}
    for rows in (None, 64, 4, 10**6):
        razor = sr.Razor(model, "categorical", 64, input_rows=rows)
        for block in razor._curvature([(x[:32], y[:32]), (x[32:], y[32:])], None).blocks:
            blocks[rows, block.names[0]] = block
    for rows, step in {64: 4, 4: 8, 10**6: 1}.items():
        block, whole = blocks[rows, "0.weight"], blocks[None, "0.weight"]
        assert isinstance(block, Kron) and isinstance(whole, Kron)
        patches = torch.nn.functional.unfold(x[::step], 3, padding=1).transpose(1, 2)
        flat = patches.reshape(-1, 9)
        assert_close(block.A.matrix[0] * block.scale, flat.T @ flat / len(flat), 1e-12)
        assert_close(block.G.matrix, whole.G.matrix, 1e-12)
    assert_close(blocks[64, "3.weight"].spectrum, blocks[None, "3.weight"].spectrum, 1e-12)
