"""Check evidence estimates on a GPU: eigenvalues, factors and recorded batches."""

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import pytest
import torch
from cuda_case import ReadsOnHost, numbers, small_net
from torch import Tensor, nn

import symrazor as sr
from symrazor.accelerate import cusolver
from symrazor.accelerate.devices import tf32
from symrazor.curvature import cuda_replay as replay
from symrazor.curvature.convolution import Geometry, input_factor
from symrazor.data import TensorLoader, digits
from symrazor.layers.ella import ella_network
from symrazor.linalg import eigen_jobs, gpu_eigenvalues
from symrazor.linalg.eigen_jobs import EigenJob
from symrazor.linalg.factor import Factor
from symrazor.linalg.gpu_eigenvalues import EigenSchedule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _all_by(who: str, pieces: Sequence[EigenJob]) -> EigenSchedule:
    numbers = list(range(len(pieces)))
    if who != "together":
        return EigenSchedule(
            [], numbers if who == "one by one" else [], numbers if who == "host" else []
        )
    sizes = dict.fromkeys(piece.shape[1] for piece in pieces)
    return EigenSchedule([[n for n in numbers if pieces[n].shape[1] == d] for d in sizes], [], [])


@pytest.mark.parametrize(
    "who", ["together", "one by one", "host", "as planned", "without cuSOLVER"]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_eigenvalues_by_gpu_and_by_threads(
    who: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every solver returns the same values."""
    if who == "without cuSOLVER":
        monkeypatch.setattr(cusolver, "solver", lambda device: None)
    elif who != "as planned":
        monkeypatch.setattr(gpu_eigenvalues, "schedule", lambda pieces, *_: _all_by(who, pieces))
    generator = torch.Generator().manual_seed(0)
    sizes = [(30, 7), (12, 33), (80, 80), (3, 300), (1, 1), (40, 160), (2, 1030)]
    rows = [
        torch.randn(2 * d, k, d, generator=generator, dtype=torch.float64).cuda() for k, d in sizes
    ]
    factors = [Factor.of_rows(part) for part in rows]
    pieces = [piece for factor in factors for piece in EigenJob.of_factor(factor, "w", 1e-16)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        eigenvalues = eigen_jobs.solve(pieces)
    finally:
        torch.set_num_threads(before)
    assert all(value.is_cuda for value in eigenvalues)
    for piece, value in zip(pieces, eigenvalues, strict=True):
        expected = torch.linalg.eigvalsh(piece.matrices().cpu())
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-9, atol=1e-9)


def _matrices(k: int, n: int) -> Tensor:
    """Return matrices on the GPU: singular, with repeated eigenvalues, and zero."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(k, n, n, generator=generator, dtype=torch.float64)
    rows[0, n // 2 :] = 0
    made = rows.mT @ rows
    made[1] = torch.diag(torch.arange(n, dtype=torch.float64) // 3)
    made[2] = 0
    return made.cuda()


def _same(found: Tensor, matrices: Tensor) -> None:
    """Compare with the CPU, to 1e-12 of the largest eigenvalue of each matrix."""
    expected = torch.linalg.eigvalsh(matrices.cpu())
    largest = expected.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    assert found.shape == expected.shape and found.is_cuda
    assert float(((found.cpu() - expected) / largest).abs().max()) < 1e-12


def test_cusolver_is_used_if_available() -> None:
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")))
    assert (cusolver.solver(torch.device("cuda", 0)) is not None) == (version >= (12, 6))


@pytest.mark.parametrize(
    "sizes", [range(1, 34, 4), (32, 33, 64, 65, 80, 81), (96, 97, 128, 129, 160), (256, 257, 300)]
)
def test_batched_eigenvalues_in_one_call(sizes: Sequence[int]) -> None:
    for n in sizes:
        matrices = _matrices(6, n)
        before = matrices.clone()
        _same(cusolver.eigvalsh(matrices), matrices)
        assert torch.equal(matrices, before)


@pytest.mark.parametrize("n", [20, 160])
def test_several_batched_calls_take_the_workspace_of_one(n: int) -> None:
    solver = cusolver.solver(torch.device("cuda", 0))
    if solver is None:
        pytest.skip("needs CUDA 12.6")
    matrices = _matrices(40, n)
    peaks = []
    for workspace in (2**40, 2**24):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _same(solver.eigenvalues(matrices, workspace), matrices)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2**24 + matrices.nbytes < peaks[0]


def test_batched_eigenvalues_on_other_streams_and_threads() -> None:
    """Each call waits for earlier work on its own stream."""

    def find(n: int) -> tuple[Tensor, Tensor]:
        stream = torch.cuda.Stream()
        made = _matrices(5, n)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**7)
            scaled = made * 3.0
            values = cusolver.eigvalsh(scaled)
        stream.synchronize()
        return values, 3.0 * made

    with ThreadPoolExecutor(4) as pool:
        for values, matrices in pool.map(find, [50, 150, 60, 140, 70, 130]):
            _same(values, matrices)


def test_an_error_in_a_thread_is_raised() -> None:
    bad = torch.full((2, 90, 90), float("nan"), dtype=torch.float64, device="cuda")
    piece = EigenJob("layer", (2, 90), bad.device, lambda: bad, 1e-16)
    with pytest.raises(sr.CurvatureError, match="layer"):
        eigen_jobs.solve([piece] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("channels", "size", "stride"), [(3, 32, 1), (20, 16, 1), (40, 8, 2)])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_input_factor_of_a_convolution(
    dtype: torch.dtype, channels: int, size: int, stride: int, mode: str
) -> None:
    """Compare patches in large chunks with the CPU algorithm."""
    conv = nn.Conv2d(channels, 4, 3, stride, 1, padding_mode=mode)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, channels, size, size, generator=generator, dtype=torch.float64)
    expected = input_factor(x, Geometry.of(conv))
    with tf32(False):
        factor = input_factor(x.to(dtype).cuda(), Geometry.of(conv)).cpu().double()
    error = (factor - expected).abs().max() / expected.abs().max()
    assert float(error) < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
def test_input_factor_of_a_convolution_can_be_recorded(mode: str) -> None:
    """Nothing may be copied from the host: a CUDA graph cannot record that."""
    geometry = Geometry.of(nn.Conv2d(20, 4, 3, padding=1, padding_mode=mode))
    x = torch.randn(8, 20, 16, 16, device="cuda")
    expected = input_factor(x, geometry)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = input_factor(x, geometry)
    graph.replay()
    torch.testing.assert_close(recorded, expected)


def test_eigenvalues_need_the_memory_of_few_matrices() -> None:
    """The memory depends neither on the number of blocks nor on the number of threads."""
    rows = torch.randn(1024, 12, 1024, device="cuda")
    pieces = EigenJob.of_factor(Factor.of_rows(rows), "w", 1e-7)
    del rows
    eigen_jobs.solve(pieces[:1])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    eigen_jobs.solve(pieces)
    matrix = 8 * 1024**2
    assert torch.cuda.max_memory_allocated() - before < 14 * matrix


@pytest.mark.parametrize("reads_on_host", [False, True])
@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_replayed_batches_match_the_cpu(
    estimator: str, reads_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use ten batches and a shorter one, most of them replayed unless recording is impossible.

    Three batches come before the recording, none before its reuse in the next estimate.
    """
    added: list[str] = []
    add = replay.Replay.add
    monkeypatch.setattr(
        replay.Replay, "add", lambda self, *a: (added.append(a[1].name), add(self, *a))[1]
    )
    x, y = digits("train")
    x, y = x[:1320].double(), y[:1320]
    values = []
    for device in ("cpu", "cuda"):
        model = small_net().double().to(device)
        model.insert(1, ReadsOnHost() if reads_on_host else nn.Identity())
        razor = sr.Razor(model, "categorical", 1320, estimator=estimator)
        loader = TensorLoader(x.to(device), y.to(device), 128)
        for _ in range(2):
            evidence = razor.step(loader)
            values.append(numbers(evidence))
    assert len(added) == (0 if reads_on_host else 7 + 10)
    assert values[2:] == [pytest.approx(value, rel=1e-8, abs=1e-8) for value in values[:2]]


class _Slow(sr.Categorical):
    """A likelihood that delays its stream before and after it evaluates outputs."""

    def hessian_root(self, f: Tensor) -> Tensor:
        torch.cuda._sleep(10**6)
        f = f.clone()
        torch.cuda._sleep(10**6)
        return super().hessian_root(f)


class _Late:
    """A loader whose batches take long to compute."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in TensorLoader(self.x, self.y, 128):
            torch.cuda._sleep(10**6)
            yield x * 1.0, y


def test_streams_wait_for_each_other() -> None:
    """Batches, outputs and probes are complete before they are used and live as long as needed."""
    x, y = (part[:1280].cuda() for part in digits("train"))
    x = x.double()
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh()),
        nn.Linear(20, 10),
    )
    model = model.double().cuda()
    expected = _slow(x, y, model)
    razor = sr.Razor(model, _Slow(), 1280)
    for _ in range(3):
        assert numbers(razor.evidence(_Late(x, y))) == pytest.approx(expected, rel=1e-9)
    assert replay._last_recordings.get(model) is not None


def test_replayed_batches_of_factored_layers() -> None:
    """Cover factors stored as panels, biases that share a factor, and branches."""
    torch.manual_seed(0)
    x, y = torch.randn(1500, 3, 32, 32, dtype=torch.float64), torch.arange(1500) % 10
    values = []
    for eager in (3, 10**9):
        model = ella_network("f-fc+conv", 3, 10).double().cuda()
        for number, theta in enumerate(model.parameters()):
            generator = torch.Generator("cuda").manual_seed(number)
            nn.init.normal_(theta, std=0.1, generator=generator)
        razor = sr.Razor(model, "categorical", 1500, estimator="mc")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "MIN_EAGER_BATCHES", eager)
            values.append(numbers(razor.evidence(TensorLoader(x.cuda(), y.cuda(), 250))))
    assert values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-6)


def test_estimates_reuse_the_memory_of_earlier_ones() -> None:
    """Recordings of another network and failed recordings do not prevent it."""
    x, y = (part[:1280].cuda() for part in digits("train"))
    models = [nn.Sequential(nn.Flatten(), nn.Linear(64, w), nn.Linear(w, 10)) for w in (150, 120)]
    models.append(nn.Sequential(nn.Flatten(), ReadsOnHost(), nn.Linear(64, 10)))
    razors = [sr.Razor(model.cuda(), "categorical", 1280) for model in models]
    loader = TensorLoader(x, y, 128)
    reserved, values = [], []
    for turn in range(6):
        for razor in razors[: 2 if turn else 3]:
            values.append(float(razor.evidence(loader).log_evidence))
        gc.collect()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[5] - reserved[2] <= 2**22  # the least that a recording takes is 2 MB
    assert values[3::2] == pytest.approx([values[0]] * 5, rel=1e-5)
    assert values[4::2] == pytest.approx([values[1]] * 5, rel=1e-5)


def test_bad_data_are_reported_in_a_replay() -> None:
    """The tenth batch is bad; the recorded sums are not used afterwards."""
    x, y = (part[:1280].cuda() for part in digits("train"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10)).cuda()
    razor = sr.Razor(model, "categorical", 1280)
    loader = TensorLoader(x, y, 128)
    before = float(razor.evidence(loader).log_evidence)
    kept = x[1200].clone()
    for value, error in ((float("inf"), ValueError), (3e38, sr.DivergenceError)):
        x[1200] = value
        with pytest.raises(error, match="batch 9"):
            razor.evidence(loader)
    x[1200] = kept
    assert float(razor.evidence(loader).log_evidence) == pytest.approx(before, rel=1e-6)


class _Slope(nn.Module):
    """A layer with a Python number, whose changes a recording cannot detect by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x


def _slow(x: Tensor, y: Tensor, model: nn.Module) -> list[float]:
    """Return the evidence computed kernel by kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "MIN_EAGER_BATCHES", 10**9)
        patch.setattr(replay, "_last_recordings", WeakKeyDictionary())
        patch.setattr(replay, "_recorded_shapes", {})
        razor = sr.Razor(model, "categorical", len(y))
        return numbers(razor.evidence(TensorLoader(x, y, 128)))


@pytest.mark.parametrize("change", ["nothing", "weights", "number", "frozen", "moved", "replaced"])
def test_a_valid_recording_is_reused(change: str) -> None:
    x, y = (part[:1280].cuda() for part in digits("train"))
    x = x.double()
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 30), _Slope(), nn.Tanh(), nn.Linear(30, 20), nn.Tanh()),
        nn.Linear(20, 10),
    )
    model = model.double().cuda()
    loader = TensorLoader(x, y, 128)
    sr.Razor(model, "categorical", 1280).evidence(loader)
    recorded = replay._last_recordings.get(model)
    assert recorded is not None
    middle = model[4]
    assert isinstance(middle, nn.Linear) and isinstance(model[2], _Slope)
    with torch.no_grad():
        if change == "weights":
            middle.weight.mul_(1.5)
        elif change == "number":
            model[2].slope = 1.25
        elif change == "frozen":
            middle.requires_grad_(False)
        elif change == "moved":
            middle.weight.data = middle.weight.detach().clone()
        elif change == "replaced":
            model[5] = nn.Sigmoid()
    evidence = numbers(sr.Razor(model, "categorical", 1280).evidence(loader))
    assert (replay._last_recordings.get(model) is recorded) == (change in ("nothing", "weights"))
    assert evidence == pytest.approx(_slow(x, y, model), rel=1e-9)


def test_a_result_does_not_change_with_the_next_estimate() -> None:
    """Sums in use are not overwritten: one new recording is made."""
    x, y = (part[:1280].cuda() for part in digits("train"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10)).cuda()
    posterior = sr.Razor(model, "categorical", 1280).posterior(TensorLoader(x, y, 128))
    recorded = [replay._last_recordings.get(model)]
    before = posterior.functional(x[:5])[1]
    with torch.no_grad():
        next(model.parameters()).mul_(0.1)
    for _ in range(2):
        sr.Razor(model, "categorical", 1280).evidence(TensorLoader(x, y, 128))
        recorded.append(replay._last_recordings.get(model))
    assert None not in recorded and recorded[0] is not recorded[1] is recorded[2]
    with torch.no_grad():
        next(model.parameters()).mul_(10.0)
    torch.testing.assert_close(posterior.functional(x[:5])[1], before, rtol=1e-4, atol=1e-6)


def test_a_recording_is_freed_with_its_model() -> None:
    x, y = (part[:1280].cuda() for part in digits("train"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.Tanh(), nn.Linear(100, 10)).cuda()
    sr.Razor(model, "categorical", 1280).evidence(TensorLoader(x, y, 128))
    assert replay._last_recordings.get(model) is not None
    held = torch.cuda.memory_allocated()
    del model
    gc.collect()
    assert not replay._last_recordings and torch.cuda.memory_allocated() < held
