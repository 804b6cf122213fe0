"""Evidence estimates on a GPU: eigenvalues, factors, recorded batches; run where there is one."""

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from cuda_case import numbers, small_net
from symrazor.curvature import eigenvalues as work
from symrazor.curvature import replay
from symrazor.curvature.geometry import Geometry
from symrazor.curvature.patch_factor import input_factor
from symrazor.data import (
    TensorLoader,
    digits,
)
from symrazor.experiments.ella_network import ella_network
from symrazor.linear_algebra.factor import Factor
from symrazor.linear_algebra.pieces import Piece
from symrazor.machine.rounding import tf32

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("gpu", [True, False, None])
@pytest.mark.parametrize("threads", [1, 3])
def test_eigenvalues_by_gpu_and_by_threads(
    gpu: bool | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds them; None for the mixture that is planned."""
    if gpu is not None:
        monkeypatch.setattr(work, "dealt_out", lambda pieces, threads: [gpu] * len(pieces))
    generator = torch.Generator().manual_seed(0)
    sizes = [(30, 7), (12, 33), (80, 80), (3, 300), (1, 1), (2, 1030)]
    rows = [
        torch.randn(2 * d, k, d, generator=generator, dtype=torch.float64).cuda() for k, d in sizes
    ]
    factors = [Factor.of_rows(part) for part in rows]
    pieces = [piece for factor in factors for piece in Piece.of_factor(factor, "w", 1e-16)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = work.eigenvalues(pieces)
    finally:
        torch.set_num_threads(before)
    assert all(value.is_cuda for value in found)
    for piece, value in zip(pieces, found, strict=True):
        expected = torch.linalg.eigvalsh(piece.matrices().cpu())
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-9, atol=1e-9)


def test_an_error_among_the_threads_is_raised() -> None:
    bad = torch.full((2, 90, 90), float("nan"), dtype=torch.float64, device="cuda")
    piece = Piece("layer", (2, 90), bad.device, lambda: bad, 1e-16)
    with pytest.raises(sr.errors.CurvatureError, match="layer"):
        work.eigenvalues([piece] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("channels", "size", "stride"), [(3, 32, 1), (20, 16, 1), (40, 8, 2)])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_input_factor_of_a_convolution(
    dtype: torch.dtype, channels: int, size: int, stride: int, mode: str
) -> None:
    """From patches in large chunks, against the CPU's way."""
    conv = nn.Conv2d(channels, 4, 3, stride, 1, padding_mode=mode)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, channels, size, size, generator=generator, dtype=torch.float64)
    expected = input_factor(x, Geometry.of(conv))
    with tf32(False):
        found = input_factor(x.to(dtype).cuda(), Geometry.of(conv)).cpu().double()
    error = (found - expected).abs().max() / expected.abs().max()
    assert float(error) < 100 * torch.finfo(dtype).eps


def test_eigenvalues_need_the_memory_of_few_matrices() -> None:
    """Not of all blocks of a factor, and not one for every thread."""
    rows = torch.randn(1024, 12, 1024, device="cuda")
    pieces = Piece.of_factor(Factor.of_rows(rows), "w", 1e-7)
    del rows
    work.eigenvalues(pieces[:1])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work.eigenvalues(pieces)
    matrix = 8 * 1024**2
    assert torch.cuda.max_memory_allocated() - before < 14 * matrix


class _Looks(nn.Module):
    """A layer that looks at a value on the host: no graph can hold it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().abs().sum()) >= 0 else -x


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_replayed_batches_are_those_of_the_cpu(
    estimator: str, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten batches and a shorter one, most of them replayed; or none, where none can be."""
    added: list[str] = []
    add = replay.Replay.add
    monkeypatch.setattr(
        replay.Replay, "add", lambda self, *a: (added.append(a[-1]), add(self, *a))[1]
    )
    x, y = digits("train")
    x, y = x[:1320].double(), y[:1320]
    values = []
    for device in ("cpu", "cuda"):
        model = small_net().double().to(device)
        model.insert(1, _Looks() if looks else nn.Identity())
        razor = sr.Razor(model, "categorical", 1320, estimator=estimator)
        loader = TensorLoader(x.to(device), y.to(device), 128)
        for _ in range(2):
            found = razor.step(loader)
            values.append(numbers(found))
    assert len(added) == (0 if looks else 2 * 7)
    assert values[2:] == [pytest.approx(value, rel=1e-8, abs=1e-8) for value in values[:2]]


def test_replayed_batches_of_factored_layers() -> None:
    """Large factors, kept by panels, and biases that share the factor of their weight."""
    torch.manual_seed(0)
    x, y = torch.randn(1500, 3, 32, 32), torch.arange(1500) % 10
    values = []
    for eager in (3, 10**9):
        model = ella_network("f-fc+conv", 3, 10, alpha=2).cuda()
        for number, theta in enumerate(model.parameters()):
            generator = torch.Generator("cuda").manual_seed(number)
            nn.init.normal_(theta, std=0.1, generator=generator)
        razor = sr.Razor(model, "categorical", 1500, estimator="mc")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "EAGER", eager)
            values.append(numbers(razor.evidence(TensorLoader(x.cuda(), y.cuda(), 250))))
    assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-3)


def test_bad_data_are_found_in_a_replay() -> None:
    """In the tenth batch; the sums that were recorded are not used any more."""
    x, y = (part[:1280].cuda() for part in digits("train"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10)).cuda()
    razor = sr.Razor(model, "categorical", 1280)
    loader = TensorLoader(x, y, 128)
    before = float(razor.evidence(loader).log_evidence)
    kept = x[1200].clone()
    for value, error in ((float("inf"), ValueError), (3e38, sr.errors.DivergenceError)):
        x[1200] = value
        with pytest.raises(error, match="batch 9"):
            razor.evidence(loader)
    x[1200] = kept
    assert float(razor.evidence(loader).log_evidence) == pytest.approx(before, rel=1e-6)
