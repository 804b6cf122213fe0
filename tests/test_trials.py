"""Free paths switched off on trial: which stay off, which come back, and what is left of them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.data import Tensors
from symrazor.layers import FC, FFC, Conv, Relaxed
from symrazor.layers import Path as LayerPath
from symrazor.training import trials

SIZE = 6
OPTIONS: dict[str, Any] = {"epochs": 20, "batch_size": 32, "every": 2, "lr": 0.02, "seed": 3}
OPTIONS |= {"start": "given"}
PLACE: dict[str, Any] = OPTIONS | {"batch_size": 16, "free_precision": 1.0}


def bars(task: str) -> Tensors:
    """A bar of three pixels anywhere: is it upright, or is it in the upper half?"""
    generator = torch.Generator().manual_seed(0)
    x = 0.1 * torch.randn(192, 1, SIZE, SIZE, generator=generator)
    upright = torch.randint(2, (192,), generator=generator).bool()
    rows, columns = torch.randint(SIZE, (2, 192), generator=generator)
    for k in range(3):
        down = torch.where(upright, k, 0)
        across = torch.where(upright, 0, k)
        x[torch.arange(192), 0, (rows + down) % SIZE, (columns + across) % SIZE] += 1
    return x, (upright if task == "content" else rows < SIZE // 2).long()


def network(free: type[LayerPath] = FFC) -> nn.Sequential:
    torch.manual_seed(1)
    space: tuple[Any, ...] = (1, 8, (SIZE, SIZE))
    layer = Relaxed([Conv(*space), free(*space)])
    pool: list[nn.Module] = [nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(layer, *pool, nn.Linear(8, 2))


def free_path(model: nn.Module) -> LayerPath:
    layer = next(module for module in model.modules() if isinstance(module, Relaxed))
    return layer.path(1)


@pytest.mark.parametrize("free", [FFC, FC])
def test_a_path_that_is_not_needed_is_switched_off(free: type[LayerPath]) -> None:
    kept = sr.fit(network(free), bars("content"), **OPTIONS)
    shaved = sr.fit(network(free), bars("content"), switch_off=True, **OPTIONS)
    assert kept.reading.layers[0].free_share > 0.05  # there is something to shave
    assert not any(bool(weight.any()) for weight in free_path(shaved.model).parameters())
    assert shaved.reading.layers[0].free_share < 1e-6
    assert shaved.reading.layers[0].error == pytest.approx(0, abs=1e-5)
    assert "bound" not in shaved.reading.verdict
    assert not any(m.silent for m in shaved.model.modules() if isinstance(m, Relaxed))
    steps = [record for record in shaved.history if "off" in record]
    begun = next(i for i, record in enumerate(steps) if record["off"])
    best = max(record["per_datum"] for record in steps[1 : begun + 1])
    assert shaved.evidence.per_datum >= best - 2 * trials.SAME
    plain = shaved.collapse(0.0)
    x = bars("content")[0]
    assert torch.allclose(plain(x), shaved.model(x), atol=1e-5)


def test_a_path_that_is_needed_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "AFFORDABLE", 100.0)
    fit = sr.fit(network(), bars("place"), switch_off=True, **PLACE)
    steps = [record for record in fit.history if "off" in record]
    assert any(record["off"] for record in steps)  # it was tried
    assert steps[-1]["off"] == []
    assert fit.reading.layers[0].free_share > 0.1
    best = max(record["per_datum"] for record in steps if not record["off"])
    assert float(fit.evidence.per_datum) > best - 0.1


def test_a_path_that_cannot_be_afforded_is_not_tried() -> None:
    plain = sr.fit(network(), bars("place"), **PLACE)
    asked = sr.fit(network(), bars("place"), switch_off=True, **PLACE)
    assert float(plain.evidence.per_datum) > -0.5
    assert not any(record.get("off") for record in asked.history)
    assert plain.evidence.log_evidence == asked.evidence.log_evidence


class Stop:
    """SIGTERM after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, record: dict[str, Any]) -> None:
        if record["epoch"] == self.epoch:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("task", ["content", "place"])
def test_resumed_in_the_middle_of_a_trial_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr(trials, "AFFORDABLE", 100.0)
    options = (OPTIONS if task == "content" else PLACE) | {"switch_off": True, "estimator": "mc"}
    whole = sr.fit(network(), bars(task), **options)
    with pytest.raises(SystemExit):
        stopped = network()
        sr.fit(stopped, bars(task), resume=tmp_path, callbacks=[Stop(11)], **options)
    assert not any(m.silent for m in stopped.modules() if isinstance(m, Relaxed))
    model = network()
    model[4].weight.data.zero_()  # all of it comes from the checkpoint
    resumed = sr.fit(model, bars(task), resume=tmp_path, **options)
    assert whole.history[10].get("off") is None and whole.history[9]["off"]  # on trial then
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.evidence.log_evidence == resumed.evidence.log_evidence


@torch.no_grad()
def test_a_silent_path_is_not_computed() -> None:
    layer = Relaxed([Conv(1, 2, (SIZE, SIZE)), FFC(1, 2, (SIZE, SIZE))])
    x = bars("place")[0][:5]
    layer.silent = frozenset([1])
    assert torch.equal(layer(x), layer.path(0)(x))
    for weight in layer.path(1).parameters():
        weight.zero_()
    quiet = layer(x)
    layer.silent = frozenset()
    assert torch.equal(layer(x), quiet)


def test_a_network_without_free_paths_is_left_alone() -> None:
    torch.manual_seed(0)
    x: Tensor = torch.randn(40, 3)
    y = (x.sum(1) > 0).long()
    torch.manual_seed(0)
    a = sr.fit(nn.Linear(3, 2), (x, y), epochs=4, switch_off=True)
    torch.manual_seed(0)
    b = sr.fit(nn.Linear(3, 2), (x, y), epochs=4)
    assert a.evidence.log_evidence == b.evidence.log_evidence
