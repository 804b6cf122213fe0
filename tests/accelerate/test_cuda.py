"""Compare figures on a GPU with those on a CPU; skipped without a GPU."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_job as job
import pytest
import torch
import torch.distributed as dist
from cuda_case import ReadsOnHost, numbers, small_net
from torch import Tensor, nn

import symrazor as sr
from symrazor.accelerate import processes
from symrazor.data import (
    TensorLoader,
    digits,
    flip_and_crop,
    quadrants,
    rotated,
    scaled,
    translated,
)
from symrazor.layers.ella import Prior, ella_network
from symrazor.training.optimisers import Stepper
from symrazor.training.options import BurnIn, FitConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("structure", ["kron", "diag", "block"])
@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_evidence_equals_the_cpu(structure: str, estimator: str) -> None:
    x, y = digits("test")
    values = []
    for device in ("cpu", "cuda"):
        model = small_net().double().to(device)
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


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_messages_by_nccl_change_nothing(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums, gathered rows and shared eigenvalues as several GPUs send them; here to oneself."""
    x, y = job.images()

    def found() -> list[float]:
        values: list[float] = []
        for structure in ("kron", "diag", "block", "full", "kernel", "ekfac"):
            razor = sr.Razor(job.network().cuda(), "categorical", job.N, structure=structure)
            loader = processes.ShardedLoader(TensorLoader(x, y, 10))
            for _ in range(2):
                values += numbers(razor.step(loader))
        return values

    expected, sent = found(), []
    for name in ("all_reduce", "all_gather"):
        send = getattr(dist, name)
        monkeypatch.setattr(
            dist, name, lambda *a, s=send, n=name, **k: (sent.append(n), s(*a, **k))
        )
    torch.cuda.set_device(0)
    with job.group_of_one(backend, tmp_path / "store"):
        monkeypatch.setattr(processes, "MIN_PROCESSES", 1)
        got = found()
        assert processes.all_gather_text("Grüße") == ["Grüße"]  # from the CPU
        assert processes.any_process(True) and not processes.any_process(False)
    assert {"all_reduce", "all_gather"} <= set(sent)
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("radius", [None, 0.05])
def test_fit_by_nccl(radius: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with messages, which no graph records, and evidence steps with messages."""
    options = {"epochs": 4, "every": 2, "burn_in": 0, "sam_radius": radius, "device": "cuda"}

    def found() -> list[float]:
        data = (job.images()[0], job.images()[1])
        fit = sr.fit(job.network(), data, **options)
        return [*numbers(fit.evidence), *(record["nll"] for record in fit.history)]

    expected = found()
    torch.cuda.set_device(0)
    with job.group_of_one("nccl", tmp_path / "store"):
        monkeypatch.setattr(processes, "MIN_PROCESSES", 1)
        got = found()
    assert got == pytest.approx(expected, rel=1e-6)


def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    """NCCL wants a GPU for each; gloo carries what is on the GPU, too."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, job.__file__, str(tmp_path), "on_gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"on_gpu-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    expected = json.loads(json.dumps(job.on_gpu()))
    for key, values in expected.items():
        gamma = values.pop("gamma")
        assert first[key].pop("gamma") == pytest.approx(gamma, rel=1e-9, abs=1e-10), key
        assert first[key] == pytest.approx(values, rel=1e-9), key


def _jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.01 * torch.randn(x.shape, generator=generator, device=x.device)


@pytest.mark.parametrize(
    ("optimizer", "radius"), [("adamw", None), ("sgd", None), ("sgd", 0.05), ("muon", None)]
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_run_goes_on_here_and_elsewhere(
    optimizer: str, radius: float | None, device: str, tmp_path: Path
) -> None:
    x, y = digits("train")

    def run(device: str, **options: Any) -> sr.Fit:
        options |= {"optimizer": optimizer, "sam_radius": radius}
        options = {"epochs": 6, "every": 2, "burn_in": 0} | options
        model = small_net().double()
        return sr.fit(model, (x.double(), y), augment=_jitter, device=device, **options)

    def stop(record: dict[str, float]) -> None:
        if record["epoch"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run("cuda", save=tmp_path, callbacks=[stop])
    resumed, whole = run(device, resume=tmp_path), run("cuda")
    assert len(resumed.history) == 6
    close = 1e-6 if device == "cuda" else 0.1  # a CPU draws other noise
    assert float(resumed.evidence.per_datum) == pytest.approx(
        float(whole.evidence.per_datum), rel=close
    )


def test_steps_that_no_graph_holds(caplog: pytest.LogCaptureFixture) -> None:
    """They are taken kernel by kernel, with a word about it, and come to the same end."""
    x, y = digits("train")
    results = []
    for layer in (nn.Identity(), ReadsOnHost()):
        model = small_net().double()
        model.insert(1, layer)
        fit = sr.fit(model, (x.double(), y), epochs=3, every=3, device="cuda")
        results.append(numbers(fit.evidence))
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    told = [record.message for record in caplog.records if "CUDA graph" in record.message]
    assert len(told) == 1


def test_fit_moves_model_and_data() -> None:
    fit = sr.fit(small_net(), digits("train"), test=digits("test"), epochs=5, device="cuda")
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
        result = make(x.cuda())
        assert result.is_cuda
        torch.testing.assert_close(result.cpu(), make(x), atol=1e-4, rtol=0)


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
    data, results = job.images(), {}
    options = {"epochs": 10, "batch_size": 16, "every": 2, "burn_in": 4, "optimizer": optimizer}
    for device in ("cpu", "cuda"):
        fit = sr.fit(job.network(), data, switch_off=True, device=device, **options)
        results[device] = (
            [record["nll"] for record in fit.history],
            [
                (record["trial"]["paths"], record["trial"]["stay_off"])
                for record in fit.history
                if "trial" in record
            ],
        )
    assert results["cuda"][1] == results["cpu"][1] != []
    assert results["cuda"][0] == pytest.approx(results["cpu"][0], rel=1e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_augmentation_on_the_device_waits_for_nothing() -> None:
    x = torch.rand(64, 3, 32, 32)
    same = flip_and_crop(x.cuda(), torch.Generator().manual_seed(0))
    assert torch.equal(same.cpu(), flip_and_crop(x, torch.Generator().manual_seed(0)))
    batch, generator = x.cuda(), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = flip_and_crop(batch, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.shape == x.shape
    assert not torch.equal(result, flip_and_crop(batch, generator))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_batches_on_the_device_wait_for_nothing() -> None:
    """The order is drawn on the host, as everywhere, and copied once."""
    x, y = (part.cuda() for part in digits("train"))
    batches = iter(TensorLoader(x, y, 100, True, torch.Generator().manual_seed(0)))
    seen = [next(batches)[0]]
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen += [x for x, _ in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = TensorLoader(x.cpu(), y.cpu(), 100, True, torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat(seen).cpu(), torch.cat([x for x, _ in again]))


def test_group_convolutions_on_the_device() -> None:
    """Steps as a graph, and the evidence of the CPU."""
    torch.manual_seed(0)
    x, y = digits("test")
    x = torch.nn.functional.interpolate(x, (16, 16))
    model = ella_network("f-fc+conv+gconv", 1, 10, alpha=1, size=16)
    fitted = sr.fit(model, (x, y), epochs=3, batch_size=60, device="cuda", estimator="mc")
    assert set(fitted.reading.equivariance_error) == {"translation", "p4"}
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


@pytest.mark.parametrize(
    ("paths", "optimizer", "sharp"),
    [
        ("f-fc+conv", "muon", {}),
        ("f-fc+conv+gconv", "muon", {}),
        ("s-fc+s-conv omega", "muon", {}),
        ("f-fc+conv", "muon", {"sam_radius": 0.05, "sam_from": 0.5}),
        ("f-fc+conv", "adamw", {"sam_radius": 0.05}),
        ("f-fc+conv", "sgd", {"sam_radius": 0.05}),
    ],
)
def test_steps_as_a_graph_are_those_of_the_cpu(
    paths: str, optimizer: str, sharp: dict[str, float]
) -> None:
    """In float64, with a learning rate that changes from step to step, and a radius once."""
    x, y = digits("train")
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        names, _, omega = paths.partition(" ")
        prior: Prior = "omega" if omega else "weights"
        model = ella_network(names, 1, 10, 2, 16, prior).double().to(device)
        large = nn.functional.interpolate(x[:120], (16, 16)).double().to(device)
        razor = sr.Razor(model, "categorical", 120)
        config = FitConfig(optimizer=optimizer, lr=0.003, **sharp)
        stepper = Stepper(razor, config, 30)
        for size in [120, 120, 70] * 10:  # the last batch of an epoch is smaller
            stepper.step(large[:size], y[:size].to(device))
        assert device == "cpu" or len(stepper.run.captured) == 2  # type: ignore[attr-defined]
        results.append({name: value.cpu() for name, value in model.state_dict().items()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-8)
