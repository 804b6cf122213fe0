"""The same figures on a GPU; run where there is one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distributed_job as job
import symrazor as sr
from symrazor import distributed
from symrazor.curvature import eigenvalues as work
from symrazor.curvature import replay
from symrazor.curvature.geometry import Geometry
from symrazor.curvature.patch_factor import input_factor
from symrazor.data import (
    TensorLoader,
    digits,
    flip_and_crop,
    quadrants,
    rotated,
    scaled,
    translated,
)
from symrazor.experiments.ella_network import ella_network
from symrazor.linear_algebra.factor import Factor
from symrazor.linear_algebra.pieces import Piece
from symrazor.machine.rounding import tf32
from symrazor.training.burn_in import BurnIn
from symrazor.training.options import FitConfig
from symrazor.training.stepper import Stepper

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@pytest.mark.parametrize("structure", ["kron", "diag", "block"])
@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_evidence_equals_the_cpu(structure: str, estimator: str) -> None:
    x, y = digits("test")
    values = []
    for device in ("cpu", "cuda"):
        model = _net().double().to(device)
        razor = sr.Razor(model, "categorical", 360, structure=structure, estimator=estimator)
        batches = [(x[:200].double(), y[:200]), (x[200:].double(), y[200:])]
        razor.step(batches)
        values.append(float(razor.evidence(batches).log_evidence))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_hyperparameters_and_noise_on_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).cuda()
    x, y = torch.randn(50, 4), torch.randn(50, 2)
    razor = sr.Razor(model, sr.Gaussian(outputs=2), 50)
    before = razor.likelihood.noise.value.detach().clone()
    razor.step([(x, y)])
    assert not torch.equal(before, razor.likelihood.noise.value.detach())
    prediction = razor.posterior([(x, y)]).predict(x.cuda())
    assert prediction.variance is not None
    assert prediction.variance.is_cuda


def _numbers(found: sr.Evidence) -> list[float]:
    return [*found.to_dict().values(), *found.effective_parameters.values()]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_messages_by_nccl_change_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums, gathered rows and shared eigenvalues as several GPUs send them; here to oneself."""
    x, y = job.images()

    def found() -> list[float]:
        values: list[float] = []
        for structure in ("kron", "diag", "block", "full"):
            razor = sr.Razor(job.network().cuda(), "categorical", job.N, structure=structure)
            loader = distributed.Shared(TensorLoader(x, y, 10))
            for _ in range(2):
                values += _numbers(razor.step(loader))
        return values

    expected, sent = found(), []
    for name in ("all_reduce", "all_gather"):
        send = getattr(dist, name)
        monkeypatch.setattr(
            dist, name, lambda *a, s=send, n=name, **k: (sent.append(n), s(*a, **k))
        )
    torch.cuda.set_device(0)
    with job.group_of_one(backend, tmp_path / "store"):
        monkeypatch.setattr(distributed, "FEWEST", 1)
        got = found()
        assert distributed.exchange("Grüße") == ["Grüße"]  # from the CPU
        assert distributed.any_(True) and not distributed.any_(False)
    assert {"all_reduce", "all_gather"} <= set(sent)
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", "sam"])
def test_fit_by_nccl(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with messages, which no graph records, and evidence steps with messages."""
    options = {"epochs": 4, "every": 2, "burn_in": 0, "optimizer": optimizer, "device": "cuda"}

    def found() -> list[float]:
        data = (job.images()[0], job.images()[1])
        fit = sr.fit(job.network(), data, **options)
        return [*_numbers(fit.evidence), *(record["nll"] for record in fit.history)]

    expected = found()
    torch.cuda.set_device(0)
    with job.group_of_one("nccl", tmp_path / "store"):
        monkeypatch.setattr(distributed, "FEWEST", 1)
        got = found()
    assert got == pytest.approx(expected, rel=1e-6)


def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    """NCCL wants a GPU for each; gloo carries what is on the GPU, too."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, job.__file__, str(tmp_path), "on_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"on_gpu-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    expected = json.loads(json.dumps(job.on_gpu()))
    for key, numbers in expected.items():
        gamma = numbers.pop("gamma")
        assert first[key].pop("gamma") == pytest.approx(gamma, rel=1e-9, abs=1e-10), key
        assert first[key] == pytest.approx(numbers, rel=1e-9), key


def _jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.01 * torch.randn(x.shape, generator=generator, device=x.device)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sam", "muon"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_run_goes_on_here_and_elsewhere(optimizer: str, device: str, tmp_path: Path) -> None:
    def run(device: str, **options: Any) -> sr.Fit:
        options = {"epochs": 6, "every": 2, "burn_in": 0, "optimizer": optimizer} | options
        return sr.fit(_net(), digits("train"), augment=_jitter, device=device, **options)

    def stop(record: dict[str, float]) -> None:
        if record["epoch"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run("cuda", save=tmp_path, callbacks=[stop])
    resumed, whole = run(device, resume=tmp_path), run("cuda")
    assert len(resumed.history) == 6
    close = 1e-3 if device == "cuda" else 0.1
    assert float(resumed.evidence.per_datum) == pytest.approx(
        float(whole.evidence.per_datum), rel=close
    )


def test_fit_moves_model_and_data() -> None:
    fit = sr.fit(_net(), digits("train"), test=digits("test"), epochs=5, device="cuda")
    assert next(fit.model.parameters()).is_cuda
    assert fit.reading.test["accuracy"] > 0.5
    assert fit.predict(digits("test")[0][:4], how="map").mean.is_cuda


def test_transforms_are_the_same_on_the_device() -> None:
    x, y = digits("test")
    for make in (
        lambda x: rotated(x, 180.0, seed=1),
        lambda x: translated(x, 3.0, seed=1),
        lambda x: scaled(x, 2.0, seed=1),
        lambda x: quadrants(x, y.to(x.device), "digit", seed=1, size=16)[0],
    ):
        found = make(x.cuda())
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), make(x), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_burn_in_notes_losses_without_waiting_for_them() -> None:
    burn_in, loss = BurnIn(50, 300, 600, torch.device("cuda")), torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(100):
            burn_in.add(loss, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert burn_in.over(100)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_trials_take_turns_on_the_device(optimizer: str) -> None:
    """A recorded step must not go on with the optimiser's memory of the other branch."""
    data, found = job.images(), {}
    options = {"epochs": 10, "batch_size": 16, "every": 2, "burn_in": 4, "optimizer": optimizer}
    for device in ("cpu", "cuda"):
        fit = sr.fit(job.network(), data, switch_off=True, device=device, **options)
        found[device] = (
            [record["nll"] for record in fit.history],
            [
                (record["trial"]["paths"], record["trial"]["stay_off"])
                for record in fit.history
                if "trial" in record
            ],
        )
    assert found["cuda"][1] == found["cpu"][1] != []
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=1e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_augmentation_on_the_device_waits_for_nothing() -> None:
    x = torch.rand(64, 3, 32, 32)
    same = flip_and_crop(x.cuda(), torch.Generator().manual_seed(0))
    assert torch.equal(same.cpu(), flip_and_crop(x, torch.Generator().manual_seed(0)))
    batch, generator = x.cuda(), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = flip_and_crop(batch, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.shape == x.shape
    assert not torch.equal(found, flip_and_crop(batch, generator))


def test_group_convolutions_on_the_device() -> None:
    """Steps as a graph, and the evidence of the CPU."""
    torch.manual_seed(0)
    x, y = digits("test")
    x = torch.nn.functional.interpolate(x, (16, 16))
    model = ella_network("f-fc+conv+gconv", 1, 10, alpha=1, size=16)
    found = sr.fit(model, (x, y), epochs=3, batch_size=60, device="cuda", estimator="mc")
    assert set(found.reading.equivariance_error) == {"translation", "p4"}
    values = []
    for device in ("cpu", "cuda"):
        razor = sr.Razor(model.double().to(device), "categorical", 360)
        values.append(float(razor.evidence([(x.double(), y)]).log_evidence))
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_paths_are_switched_off_between_two_recordings() -> None:
    """The step is recorded anew without them; what was switched off is zero at the end."""
    x, y = digits("train")
    x, y = x[:512], y[:512]
    torch.manual_seed(0)
    model = ella_network("f-fc+conv", 1, 10, 2, 16).cuda()
    large = nn.functional.interpolate(x, (16, 16))
    options = {"epochs": 12, "every": 1, "batch_size": 64, "estimator": "mc", "start": "given"}
    fit = sr.fit(model, (large, y), switch_off=True, **options)
    tried = [record["off"] for record in fit.history if record.get("off")]
    assert tried
    for path in fit.history[-1]["off"]:
        assert not any(bool(w.any()) for w in model.get_submodule(path).parameters())


@pytest.mark.parametrize("paths", ["f-fc+conv", "f-fc+conv+gconv"])
def test_steps_of_muon_as_a_graph_are_those_of_the_cpu(paths: str) -> None:
    """In float64, with a learning rate that changes from step to step"""
    x, y = digits("train")
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = ella_network(paths, 1, 10, 2, 16).double().to(device)
        large = nn.functional.interpolate(x[:120], (16, 16)).double().to(device)
        razor = sr.Razor(model, "categorical", 120)
        stepper = Stepper(razor, FitConfig(optimizer="muon", lr=0.01), 10)
        for _ in range(10):
            stepper.step(large, y[:120].to(device))
        assert device == "cpu" or stepper.run.graph is not None  # type: ignore[union-attr]
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-6, atol=1e-8)


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
        model = _net().double().to(device)
        model.insert(1, _Looks() if looks else nn.Identity())
        razor = sr.Razor(model, "categorical", 1320, estimator=estimator)
        loader = TensorLoader(x.to(device), y.to(device), 128)
        for _ in range(2):
            found = razor.step(loader)
            values.append(_numbers(found))
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
            values.append(_numbers(razor.evidence(TensorLoader(x.cuda(), y.cuda(), 250))))
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
