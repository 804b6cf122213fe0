"""Test evidence steps in Lightning's training."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import symrazor as sr
from symrazor.data import TensorLoader, digits
from symrazor.data.batches import loader_sizes
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.training.events import JsonLines, read_events

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_case import (
    Module,
    X,
    Y,
    evidence_step,
    make_loader,
    make_net,
    make_trainer,
    same_weights,
    with_adam,
)

from symrazor.lightning import EvidenceCallback


def test_relaxed_network_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Relaxed([Conv(1, 8, (8, 8), stride=2), FFC(1, 8, (8, 8), stride=2)])
    layer.scale_free_paths(30.0)
    net = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
    module = Module(net, lambda net: torch.optim.Adam(net.parameters(), lr=1e-2))
    callback = EvidenceCallback(every=2, network=lambda module: module.net, estimator="mc")
    loader = DataLoader(TensorDataset(*digits("train")), 64, shuffle=True)
    logger = CSVLogger(tmp_path, "", "")
    trainer = make_trainer(callback, max_epochs=9, logger=logger, log_every_n_steps=5)
    trainer.fit(module, loader)
    assert [record["epoch"] for record in callback.history] == [2, 4, 6, 8, 9]
    values = [record["log_evidence"] for record in callback.history]
    assert values[-1] > values[0] + 300
    assert float(trainer.callback_metrics["evidence/log_evidence"]) == pytest.approx(values[-1])
    with (tmp_path / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["evidence/log_evidence"]]
    assert [float(row["evidence/log_evidence"]) for row in logged] == pytest.approx(values)
    assert "precision/0.paths.1" in logged[0]
    assert callback.razor is not None
    assert callback.razor.config.burn_in == 9 * 23 // 5
    assert callback.razor.training_steps == 9 * 23
    start = {"net.0.paths.0": 1.0, "net.0.paths.1": 30.0, "net.3.weight": 1.0, "net.3.bias": 1.0}
    moves = {
        k: math.log(v / start[f"net.{k}"]) for k, v in callback.history[-1]["precisions"].items()
    }
    assert min(abs(move) for move in moves.values()) > 0.1, moves
    found = callback.reading(X[:32])
    assert [path.path for path in found.layers[0].paths] == ["Conv", "FFC"]
    assert found.equivariance_error["translation"] > 0
    x, y = digits("test")
    assert float((module.eval()(x).argmax(1) == y).double().mean()) > 0.93


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    def trainer(callback: EvidenceCallback) -> pl.Trainer:
        saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        return make_trainer(callback, saver, max_epochs=6, enable_checkpointing=True)

    whole, module = evidence_step(estimator="mc"), Module()
    trainer(whole).fit(module, make_loader())
    file = tmp_path / "epoch=2.ckpt"
    state = torch.load(file, weights_only=True)["callbacks"][whole.state_key]
    assert [record["epoch"] for record in state["history"]] == [2]
    resumed, other = evidence_step(estimator="mc"), Module()
    trainer(resumed).fit(other, make_loader(), ckpt_path=str(file), weights_only=True)
    assert resumed.history == whole.history
    assert resumed.razor is not None
    assert whole.razor is not None
    assert resumed.razor.prior.precisions == whole.razor.prior.precisions
    assert same_weights(module.net, other.net, 0.0)
    assert resumed.restore_best().to_dict() == whole.restore_best().to_dict()
    assert same_weights(module.net, other.net, 0.0)


def test_second_fit_continues_the_first() -> None:
    callback, module = evidence_step(), Module()
    make_trainer(callback).fit(module, make_loader())
    learned = callback.history[-1]["precisions"]
    saved = callback.state_dict()
    make_trainer(callback, max_epochs=1).fit(module, make_loader())
    assert callback.razor is not None
    assert callback.razor.training_steps == 5 * 6
    assert [record["epoch"] for record in callback.history] == [2, 4, 1]
    fresh = evidence_step()
    assert fresh.state_dict() == {}
    fresh.load_state_dict({})
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["razor"] is saved["razor"]
    third = Module()
    third.net.load_state_dict(module.net.state_dict())
    make_trainer(fresh, max_epochs=1).fit(third, make_loader())
    now = fresh.history[-1]["precisions"]
    assert now != learned
    assert all(abs(math.log(now[group] / learned[group])) < 1 for group in now)


def test_best_state_and_reading(tmp_path: Path) -> None:
    callback, module = evidence_step(every=1), Module()
    make_trainer(callback).fit(module, make_loader())
    best = callback.restore_best()
    found = callback.reading(X[:8])
    assert found.evidence["log_evidence"] == pytest.approx(float(best.log_evidence), rel=1e-6)
    assert found.evidence["log_evidence"] == pytest.approx(float(callback.evidence().log_evidence))
    write = JsonLines(tmp_path / "events.jsonl")
    for record in callback.history:
        write(record)
    assert read_events(write.path) == callback.history


class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(X, Y, strict=True)


def test_data_without_a_length() -> None:
    """The number of steps is unknown, so there is no burn-in."""
    callback = EvidenceCallback(every=1, network=lambda module: module.net, estimator="mc")
    make_trainer(callback, max_epochs=1).fit(Module(), DataLoader(Stream(), 40))
    assert callback.razor is not None
    assert (callback.razor.n_data, callback.razor.config.burn_in) == (len(X), 0)


def test_last_epoch_always_has_an_evidence_step() -> None:
    callback = evidence_step(every=5)
    make_trainer(callback, max_epochs=-1, max_steps=7).fit(Module(), make_loader())
    assert [record["epoch"] for record in callback.history] == [2]


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
def test_training_modes_are_restored_and_transfer_hooks_are_used() -> None:
    class Doubling(Module):
        def on_after_batch_transfer(self, batch: list[Tensor], index: int) -> list[Tensor]:
            return [2 * batch[0], batch[1]]

        def on_train_epoch_end(self) -> None:
            assert self.net[4].training
            assert not self.net[1].training

    net = make_net().append(nn.Dropout(0.1))
    net[1].eval()
    callback, module = evidence_step(), Doubling(net)
    make_trainer(callback).fit(module, make_loader())
    by_hand = sr.Razor(net.eval(), "categorical", 240)
    by_hand.prior.load_state_dict(callback.state_dict()["razor"]["prior"])
    expected = by_hand.evidence([(2 * X, Y)])
    assert float(callback.evidence().log_evidence) == pytest.approx(
        float(expected.log_evidence), rel=1e-6
    )


def test_loaders_of_all_kinds() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(X, Y, strict=True))

    sampler = torch.utils.data.SubsetRandomSampler(range(100))
    assert loader_sizes(make_loader()) == (240, 240)
    assert loader_sizes(DataLoader(TensorDataset(X, Y), 50, drop_last=True)) == (240, 200)
    assert loader_sizes(DataLoader(TensorDataset(X, Y), 50, sampler=sampler)) == (100, 100)
    assert loader_sizes(DataLoader(Stream(), 50)) == (240, 240)
    assert loader_sizes(TensorLoader(X, Y, 50, drop_last=True)) == (240, 200)
    assert loader_sizes([(X[:7], Y[:7]), (X[:3], Y[:3])]) == (10, 10)
    train = DataLoader(TensorDataset(X, Y), 50, drop_last=True)
    for callback in (evidence_step(), evidence_step(subset=60), evidence_step(loader=[(X, Y)])):
        make_trainer(callback).fit(Module(), train)
        assert callback.razor is not None
        assert callback.razor.n_data == 240
    pairs = {"a": make_loader(), "b": make_loader()}
    with pytest.raises(ValueError, match=r"must be one DataLoader.*loader=\.\.\."):
        make_trainer(evidence_step()).fit(Module(), pairs)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_reduced_precision_training(precision: Any) -> None:
    callback = evidence_step(network=None)
    make_trainer(callback, precision=precision).fit(Module(), make_loader())
    values = [record["log_evidence"] for record in callback.history]
    assert values[-1] > values[0]
    assert "net.1.weight" in callback.history[-1]["precisions"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_gpu_training_is_read_after_the_module_moved_to_the_cpu(precision: Any) -> None:
    callback, module = evidence_step(), Module(optimiser=with_adam)
    for _ in range(2):  # the second fit takes the razor back to the GPU
        make_trainer(callback, accelerator="gpu", devices=1, precision=precision).fit(
            module, make_loader()
        )
        assert callback.razor is not None
        found = callback.reading(X[:8]).evidence["log_evidence"]
        again = callback.razor.evidence([(X.to(module.device), Y.to(module.device))])
        assert found == pytest.approx(float(again.log_evidence), rel=1e-4)
    values = [record["log_evidence"] for record in callback.history]
    assert values[-1] > values[0]
