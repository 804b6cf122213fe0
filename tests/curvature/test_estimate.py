"""Check eigenvalue jobs of factors, stacked log-determinants, and sums added in place."""

import math
from operator import methodcaller

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.errors import CurvatureError
from symrazor.core.likelihood import Categorical
from symrazor.core.prior import LOG_PRECISION_BOUNDS
from symrazor.curvature import cuda_replay as replay
from symrazor.curvature.coverage import layers
from symrazor.curvature.estimate import Method, estimate_curvature
from symrazor.curvature.task import ROOT_COPIES, CurvatureTask, Total, map_factors
from symrazor.data.batches import NumberedBatch
from symrazor.linalg import eigen_jobs
from symrazor.linalg.blocks import STACKED_ROW, Dense, Diag, Kron, StackedSpectra
from symrazor.linalg.eigen_jobs import EigenJob, solve
from symrazor.linalg.factor import Factor, _gram_in_parts, gram

F64 = torch.float64
EPS = torch.finfo(F64).eps


def _rows(r: int, k: int, i: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(r, k, i, generator=generator, dtype=F64)


@pytest.mark.parametrize("grain", [1, 2**21, 2**40])
@pytest.mark.parametrize(("k", "i"), [(7, 5), (5, 70), (3, 300), (1, 64)])
def test_jobs_of_a_factor_yield_its_spectrum(
    k: int, i: int, grain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eigen_jobs, "MIN_JOB_WORK", grain)
    factor = Factor.of_rows(_rows(2 * i, k, i))
    pieces = EigenJob.of_factor(factor, "w", EPS)
    assert sum(piece.shape[0] for piece in pieces) == k
    if i < 64 or grain == 2**40:
        assert len(pieces) == 1
    elif grain == 1:
        assert len(pieces) == k
    expected = torch.linalg.eigvalsh(factor.matrix)
    eigenvalues = solve(pieces)
    assert [tuple(part.shape) for part in eigenvalues] == [piece.shape for piece in pieces]
    torch.testing.assert_close(torch.cat(eigenvalues), expected, rtol=1e-10, atol=1e-9)


def test_rounding_noise_is_removed_matrix_by_matrix() -> None:
    """The noise threshold of a large matrix does not apply to its neighbours."""
    rows = _rows(90, 1, 80)
    both = torch.cat([rows.float(), 1e-6 * rows.float()], 1)
    factor = Factor.of_rows(both)
    (piece,) = EigenJob.of_factor(factor, "w", torch.finfo(torch.float32).eps)
    large, tiny = piece.solve()
    assert torch.count_nonzero(large) == torch.count_nonzero(tiny) == 80
    torch.testing.assert_close(1e12 * tiny, large, rtol=1e-4, atol=1e-3)


def test_an_error_names_the_factor_and_its_side() -> None:
    model = nn.Linear(70, 70)
    estimate = estimate_curvature(
        model, "categorical", [(torch.randn(200, 70), torch.arange(200) % 70)]
    )
    (kron,) = [block for block in estimate.blocks if isinstance(block, Kron)]
    assert kron.G.total is not None
    kron.G.total.panels[0][0, 0, 0] = math.nan
    with pytest.raises(CurvatureError, match=r"weight \(output side\)"):
        estimate.prepare()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("extra", [0, 1, 77])
def test_sums_over_many_rows_in_parts(dtype: torch.dtype, extra: int) -> None:
    rows = _rows(2 * 4096 + extra, 1, 6).to(dtype)
    expected = gram(rows.double())
    error = (_gram_in_parts(rows.squeeze(1)) - expected).abs().max() / expected.abs().max()
    assert float(error) < 10 * torch.finfo(dtype).eps


def _blocks() -> list[Kron | Dense | Diag]:
    def kron(name: str, k: int, o: int, i: int) -> Kron:
        A, G = Factor.of_rows(_rows(9 * i, k, i, 1)), Factor.of_rows(_rows(9 * o, k, o, 2))
        return Kron(name, A, G, 0.3, EPS, lambda w: w, lambda blocks: blocks)

    H = Factor.of_rows(_rows(30, 1, 7)).matrix[0]
    return [
        kron("a", 2, 3, 4),
        Dense({"b": torch.Size([7])}, H, EPS),
        kron("c", 1, 40, STACKED_ROW // 10),
        Diag("d", _rows(1, 1, STACKED_ROW).square()),
        kron("e", 3, 1, 1),
    ]


def _precisions(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {
        name: _rows(1, 1, max(1, math.prod(shape)), number).reshape(shape).requires_grad_()
        for number, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("shape", [(), (7,)])
def test_stacked_log_determinants_match_the_sum(shape: tuple[int, ...]) -> None:
    """Compare value and derivatives, also with one precision per weight of a block."""
    blocks = _blocks()
    deltas = _precisions({name: shape if name == "b" else () for name in "abcde"})
    expected = torch.stack([block.logdet(deltas) for block in blocks]).sum()
    joined = StackedSpectra(blocks)
    for _ in range(2):
        result = joined.logdet(deltas)
        assert result.item() == pytest.approx(expected.item(), rel=1e-13)
    wanted = torch.autograd.grad(expected, list(deltas.values()))
    got = torch.autograd.grad(result, list(deltas.values()))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_stacked_log_determinants_are_differentiable_in_the_factors() -> None:
    root = _rows(20, 1, 5).requires_grad_()
    delta = _precisions({"w": ()})

    def block() -> Kron:
        A, G = Factor.of_matrix(gram(root)), Factor.of_rows(_rows(9, 1, 2))
        return Kron("w", A, G, 1.0, EPS, lambda w: w, lambda blocks: blocks)

    (wanted,) = torch.autograd.grad(block().logdet(delta), root)
    (got,) = torch.autograd.grad(StackedSpectra([block()]).logdet(delta), root)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", ["tensor", "scalar", "diagonal"])
def test_fixed_point_of_all_groups_at_once(groups: str) -> None:
    r"""$\delta = \gamma / \lVert\theta\rVert^2$ group by group, from effective parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = [(torch.randn(40, 3, dtype=F64), torch.arange(40) % 2)]
    razor = sr.Razor(
        model,
        "categorical",
        40,
        structure="diag",
        prior_groups=groups,
        inner_steps=1,
        damping=1.0,
        burn_in=0,
    )
    curved = estimate_curvature(model, "categorical", data, razor.method)
    razor.step(data)
    h = {block.names[0]: block.spectrum for block in curved.blocks}
    theta = {name: value.detach() for name, value in model.named_parameters()}
    gamma = {name: (value / (value + 1)).reshape(theta[name].shape) for name, value in h.items()}
    for group, result in razor.prior.precisions.items():
        names = razor.prior.members(group)
        if groups == "diagonal":
            wanted = gamma[names[0]] / theta[names[0]].square()
        else:
            size = sum(theta[name].square().sum() for name in names)
            wanted = sum(gamma[name].sum() for name in names) / size
        low, high = (math.exp(bound) for bound in LOG_PRECISION_BOUNDS)
        torch.testing.assert_close(result, wanted.clamp(low, high), rtol=1e-8, atol=0)


def _batches(n: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)).double()
    x, y = torch.randn(n, 250, 1, 6, 6, dtype=F64), torch.arange(250).repeat(n, 1) % 10
    return model, list(zip(x, y, strict=True))


def test_sums_of_a_batch_are_added_in_place() -> None:
    """Factors keep their memory and counts are collected, as in a recorded batch."""
    model, batches = _batches(2)
    task = CurvatureTask(model, layers(model), Categorical(), Method())
    first, second = (task.batch_sums(x, y, "here") for x, y in batches)
    places = {key: _place(value) for key, value in first.sums.items()}
    counts: dict[tuple[str, str], Tensor] = {}
    replay.add_in_place(first.sums, second.sums, counts)
    assert {key: _place(value) for key, value in first.sums.items()} == places
    assert {key for key in counts} == {("0.weight", "count"), ("3.weight", "count")}
    together = estimate_curvature(model, "categorical", batches)
    for key, value in together.sums.items():
        actual = first.sums[key]
        if isinstance(value, Factor) and isinstance(actual, Factor):
            torch.testing.assert_close(actual.matrix, value.matrix, rtol=1e-12, atol=1e-12)
        else:
            assert actual + counts[key] == value


def _place(value: Tensor | Factor) -> list[int]:
    if isinstance(value, Tensor):
        return []
    assert value.total is not None
    return [panel.data_ptr() for panel in value.total.panels]


def test_sums_that_cannot_be_added_in_place_are_rejected() -> None:
    model, batches = _batches(1)
    task = CurvatureTask(model, layers(model), Categorical(), Method())
    (x, y), few = batches[0], 10
    total = task.batch_sums(x, y, "here")
    with pytest.raises(RuntimeError, match="pending rows"):
        replay.add_in_place(total.sums, task.batch_sums(x[:few], y[:few], "here").sums, {})
    with pytest.raises(RuntimeError, match="is new"):
        replay.add_in_place({}, total.sums, {})
    assert not replay.can_record(task, total, x)  # not on a GPU


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("keep_graph", [False, True])
def test_inputs_larger_than_their_factor_are_released_first(keep_graph: bool, many: bool) -> None:
    """Inputs of convolutions come after the backward pass; needed inputs are not released."""
    model, batches = _batches(1)
    task = CurvatureTask(model, layers(model), Categorical(), Method())
    n = 64 if many else 63  # of 64 features each
    x, y = (part[:n] for part in batches[0])
    tape = task.forward(x, keep_graph)
    expected = task.batch_sums(x, y, "here").sums
    roots = task.evaluate_outputs(tape.f, y, "here")[1]
    order: list[set[str]] = []
    for job in task.structure.jobs(task, tape, roots, keep_graph):
        sums = job().sums
        order.append({kind for _, kind in sums} - {"count"})
        for key in sums:
            if key[1] == "A":
                result, reference = sums[key], expected[key]
                assert isinstance(result, Factor) and isinstance(reference, Factor)
                torch.testing.assert_close(result.matrix, reference.matrix, rtol=1e-12, atol=1e-12)
    inputs = [number for number, kinds in enumerate(order) if kinds == {"A"}]
    conv, linear = (use.x.numel() for use in tape.uses)
    if keep_graph or not many:
        assert inputs == [len(order) - 2, len(order) - 1] and conv and linear
    else:
        assert inputs == [0, len(order) - 1] and conv and not linear


def test_pending_rows_are_multiplied_once_for_all_keys() -> None:
    model, batches = _batches(1)
    task = CurvatureTask(model, layers(model), Categorical(), Method())
    (x, y) = batches[0]
    total = task.batch_sums(x, y, "here").absorb(task.batch_sums(x[:3], y[:3], "there"))
    before = {key: value for key, value in total.sums.items() if isinstance(value, Factor)}
    assert any(value.parts for value in before.values())
    assert before["3.bias", "H"] is before["3.weight", "G"]
    map_factors(total.sums, Factor.multiplied)
    assert total.sums["3.bias", "H"] is total.sums["3.weight", "G"]
    for key, value in before.items():
        actual = total.sums[key]
        assert isinstance(actual, Factor) and not actual.parts
        torch.testing.assert_close(actual.matrix, value.matrix, rtol=1e-14, atol=0)


@pytest.mark.parametrize("i", [40, 300])
def test_a_factor_becomes_a_matrix_early_if_enough_rows_will_follow(i: int) -> None:
    """The running sum is then taken in place."""
    rows = [_rows(20, 2, i, seed) for seed in range(3)]
    first = Factor.of_rows(rows[0])
    enough = 0.75 * i / 20
    assert first.prepared_for(0.99 * enough) is first
    early = first.prepared_for(enough)
    assert first.is_rows and not early.is_rows and not early.parts
    place = early.total.panels[0].data_ptr() if early.total is not None else 0
    for more in rows[1:]:
        early = early.absorb(Factor.of_rows(more))
    early = early.multiplied()
    assert early.prepared_for(100.0) is early
    torch.testing.assert_close(early.matrix, gram(torch.cat(rows)), rtol=1e-13, atol=1e-13)
    assert early.total is not None and (i > 40 or early.total.panels[0].data_ptr() == place)


@pytest.mark.parametrize("expected", [40, 1000])
def test_factors_become_matrices_at_once_if_many_samples_are_expected(expected: int) -> None:
    model, batches = _batches(1)
    task = CurvatureTask(model, layers(model), Categorical(), Method())
    (x, y), few = batches[0], 20
    total = task.batch_sums(x[:few], y[:few], "here")
    before = {key: value for key, value in total.sums.items() if isinstance(value, Factor)}
    assert before["3.weight", "A"].is_rows
    map_factors(total.sums, methodcaller("prepared_for", expected / total.n))
    for key, value in before.items():
        actual = total.sums[key]
        assert isinstance(actual, Factor)
        assert actual.is_rows == (
            value.is_rows and expected * value.size < 0.75 * few * value.features
        )
        torch.testing.assert_close(actual.matrix, value.matrix, rtol=1e-13, atol=1e-13)
    assert isinstance(result := total.sums["3.weight", "A"], Factor)
    assert result.is_rows == (expected == 40)
    assert total.sums["3.bias", "H"] is total.sums["3.weight", "G"]


@pytest.mark.parametrize("expected", [None, 20, 1000])
def test_no_rows_are_pending_after_the_first_batch_if_more_follow(
    expected: int | None,
) -> None:
    """With ten samples per batch, 64 features become a matrix if 48 rows are expected."""
    model, batches = _batches(1)
    task = CurvatureTask(model, layers(model), Categorical(), Method(estimator="mc"))
    (x, y) = batches[0]
    total = Total(expected)
    for i in (0, 10):
        for job in task.jobs(x[i : i + 10], y[i : i + 10], "here"):
            total.add(job())
    assert total.value is not None
    result = total.value.sums["3.weight", "A"]
    assert isinstance(result, Factor) and result.is_rows == (expected != 1000)
    truth = task.batch_sums(x[:20], y[:20], "here").sums["3.weight", "A"]
    assert isinstance(truth, Factor)
    torch.testing.assert_close(result.matrix, truth.matrix, rtol=1e-12, atol=1e-13)


def test_sums_do_not_depend_on_the_expected_number() -> None:
    model, batches = _batches(2)
    task = CurvatureTask(model, layers(model), Categorical(), Method())
    cut = [(x[i : i + 25], y[i : i + 25]) for x, y in batches for i in (0, 25)]
    numbered = [NumberedBatch(number, x, y) for number, (x, y) in enumerate(cut)]
    results = []
    for expected in (None, 30, 100):
        running = Total(expected)
        scheduler = replay.GraphReplayScheduler(task)
        for contribution in scheduler.contributions_on(None, iter(numbered), running):
            running.add(contribution)
        results.append(running.value)
    for total in results[1:]:
        assert total is not None and results[0] is not None and total.n == results[0].n == 100
        for key, value in results[0].sums.items():
            actual = total.sums[key]
            if isinstance(value, Factor) and isinstance(actual, Factor):
                torch.testing.assert_close(actual.matrix, value.matrix, rtol=1e-12, atol=1e-13)
            else:
                assert actual == value


@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_memory_of_the_output_hessian_is_bounded(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is divided; the exact estimate stays the same up to rounding."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4).double(), torch.arange(30) % 50
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 50)).double()
    root, largest = Categorical.hessian_root, [0]

    def measured(self: Categorical, f: Tensor) -> Tensor:
        columns = root(self, f)
        largest[0] = max(largest[0], columns.nbytes)
        return columns

    monkeypatch.setattr(Categorical, "hessian_root", measured)
    evidences = []
    for memory in (1.0, 1e-4):
        largest[0] = 0
        razor = sr.Razor(model, "categorical", 30, estimator=estimator, memory=memory)
        evidences.append(razor.evidence([(x, y)]))
        assert (largest[0] > 1e-4 * 2**30 / ROOT_COPIES) == (memory == 1.0)
    if estimator == "exact":
        torch.testing.assert_close(
            evidences[0].log_evidence, evidences[1].log_evidence, rtol=1e-10, atol=0.0
        )


def test_ten_thousand_classes_with_one_probe_take_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output Hessians would take 400 MB for each sample."""
    monkeypatch.setattr(Categorical, "hessian_root", None)
    x, y = torch.randn(20, 4), torch.arange(20) * 500
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 10_000))
    razor = sr.Razor(model, "categorical", 20, estimator="mc")
    assert razor.evidence([(x, y)]).log_evidence.isfinite()
