"""The evidence step in a LightningModule's own training, with the real Lightning."""

import csv
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import symrazor as sr
from symrazor.data import TensorLoader, digits
from symrazor.events import JsonLines, read_events
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.loading import sizes
from symrazor.optimisers import step_sizes

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from symrazor.lightning import EvidenceCallback

Optimiser = Callable[[nn.Module], torch.optim.Optimizer]
X, Y = (part[:240] for part in digits("train"))
EPOCHS, BATCH = 4, 40


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def _momentum(net: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": net[1].parameters()}, {"params": net[3].parameters(), "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.8)


def _adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=5e-3)


def _schedule(optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.995)


class Module(pl.LightningModule):
    """A network, its loss, an optimiser with a schedule by step."""

    def __init__(self, net: nn.Module | None = None, optimiser: Optimiser = _momentum) -> None:
        super().__init__()
        self.net = _net() if net is None else net
        self.optimiser = optimiser
        self.callback: EvidenceCallback | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if self.callback is None else loss + self.callback.penalty()

    def configure_optimizers(self) -> Any:
        optimiser = self.optimiser(self.net)
        return [optimiser], [{"scheduler": _schedule(optimiser), "interval": "step"}]


def _evidence(**options: Any) -> EvidenceCallback:
    start = {"every": 2, "network": lambda module: module.net, "burn_in": 0}
    return EvidenceCallback("categorical", **(start | options))


class Shuffled(torch.utils.data.Sampler[int]):
    """A new order for every pass that is really read, whoever else makes iterators."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(X), generator=self.generator).tolist()

    def __len__(self) -> int:
        return len(X)


def _loader(sampler: Shuffled | None = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), BATCH, sampler=sampler)


def _trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    start: dict[str, Any] = {"max_epochs": EPOCHS, "accelerator": "cpu"} | dict.fromkeys(
        quiet, False
    )
    return pl.Trainer(callbacks=list(callbacks), **(start | options))


def _same(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=tolerance, atol=1e-6) for p, q in pairs)


def test_a_relaxed_network_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = Relaxed([Conv(1, 8, (8, 8), stride=2), FFC(1, 8, (8, 8), stride=2)])
    layer.scale_free_paths(30.0)
    net = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
    module = Module(net, lambda net: torch.optim.Adam(net.parameters(), lr=1e-2))
    callback = EvidenceCallback(every=2, network=lambda module: module.net, estimator="mc")
    loader = DataLoader(TensorDataset(*digits("train")), 64, shuffle=True)
    logger = CSVLogger(tmp_path, "", "")
    trainer = _trainer(callback, max_epochs=9, logger=logger, log_every_n_steps=5)
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


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("optimiser", [_momentum, _adam])
def test_equals_the_same_loop_written_by_hand(
    optimiser: Optimiser, clip: float | None, accumulate: int
) -> None:
    callback, module = _evidence(), Module(optimiser=optimiser)
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
    _trainer(callback, **options).fit(module, _loader(Shuffled()))

    net, loader = _net(), _loader(Shuffled())
    razor = sr.Razor(net, "categorical", 240)
    steps, theta = optimiser(net), sr.weights(net)
    schedule, values = _schedule(steps), []
    for epoch in range(1, EPOCHS + 1):
        for i, (x, y) in enumerate(loader, 1):
            (F.cross_entropy(net(x), y) / accumulate).backward()
            if i % accumulate:
                continue
            if optimiser is _adam:
                razor.penalty().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            steps.step()
            steps.zero_grad()
            if optimiser is _momentum:
                razor.shrink_(step_sizes(steps, theta))
            schedule.step()
        if epoch % 2 == 0:
            values.append(float(razor.step(loader).log_evidence))
    assert _same(module.net, net)
    assert [r["log_evidence"] for r in callback.history] == pytest.approx(values, rel=1e-5)
    assert callback.razor is not None
    for group, value in razor.prior.precisions.items():
        learned = callback.razor.prior.precisions[group]
        assert float(learned) == pytest.approx(float(value), rel=1e-4)


def test_the_prior_in_the_loss_is_the_prior_in_the_gradient() -> None:
    ends = []
    for prior in ("gradient", "loss"):
        callback, module = _evidence(prior=prior), Module(optimiser=_adam)
        module.callback = callback if prior == "loss" else None
        _trainer(callback, accumulate_grad_batches=2, gradient_clip_val=0.3).fit(module, _loader())
        ends.append(module.net)
        assert callback.razor is not None
        assert callback.razor.training_steps == EPOCHS * 6 // (1 if prior == "loss" else 2)
    assert _same(*ends, tolerance=1e-4)


def _convex() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    nn.init.zeros_(net[1].weight)
    nn.init.zeros_(net[1].bias)
    return net


def _slopes(net: nn.Sequential, razor: sr.Razor) -> tuple[float, float]:
    """At the posterior mode: 0, and the norm of the prior's pull."""
    parts = F.cross_entropy(net(X.double()), Y), razor.penalty()
    loss, prior = (torch.autograd.grad(part, net[1].weight)[0] for part in parts)
    return float((loss + prior).norm() / prior.norm()), float(loss.norm())


def test_stationary_points() -> None:
    """SGD and Adam end at the posterior mode; decoupled decay with Adam does not."""

    class Plain(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimiser(self.net)

    def train(prior: str, optimiser: Optimiser) -> tuple[float, float]:
        net = _convex()
        whole: Any = [(X.double(), Y)]
        steps = DataLoader(whole, batch_size=None, sampler=[0] * 600)
        options: dict[str, Any] = {"burn_in": 10**9, "prior_precision": 20.0}
        callback = _evidence(prior=prior, loader=whole, **options)
        _trainer(callback, max_epochs=1).fit(Plain(net, optimiser), steps)
        assert callback.razor is not None
        return _slopes(net, callback.razor)

    off, mode = train("auto", lambda net: torch.optim.SGD(net.parameters(), 0.5, momentum=0.8))
    assert off < 1e-3
    adam = partial(torch.optim.Adam, lr=1e-2)
    assert train("auto", lambda net: adam(net.parameters()))[0] < 1e-3
    off, fitted = train("shrink", lambda net: adam(net.parameters()))
    assert off > 0.5
    assert fitted < 0.1 * mode  # hardly any prior is left: nearly the best fit


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.6}, {"nesterov": True}, {"dampening": 0.3}], ids=str
)
def test_step_sizes_of_sgd_lead_to_the_mode(options: dict[str, Any]) -> None:
    net = _convex()
    razor = sr.Razor(net, "categorical", 240, prior_precision=20.0)
    start = {"lr": 0.5, "momentum": 0.5} if options else {"lr": 1.0}
    optimiser = torch.optim.SGD(net.parameters(), **(start | options))
    for _ in range(1000):
        optimiser.zero_grad()
        F.cross_entropy(net(X.double()), Y).backward()
        optimiser.step()
        razor.shrink_(step_sizes(optimiser, sr.weights(net)))
    assert _slopes(net, razor)[0] < 1e-3


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def trainer(callback: EvidenceCallback) -> pl.Trainer:
        saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        return _trainer(callback, saver, max_epochs=6, enable_checkpointing=True)

    whole, module = _evidence(estimator="mc"), Module()
    trainer(whole).fit(module, _loader())
    file = tmp_path / "epoch=2.ckpt"
    state = torch.load(file, weights_only=True)["callbacks"][whole.state_key]
    assert [record["epoch"] for record in state["history"]] == [2]
    resumed, other = _evidence(estimator="mc"), Module()
    trainer(resumed).fit(other, _loader(), ckpt_path=str(file), weights_only=True)
    assert resumed.history == whole.history
    assert resumed.razor is not None
    assert whole.razor is not None
    assert resumed.razor.prior.precisions == whole.razor.prior.precisions
    assert _same(module.net, other.net, 0.0)
    assert resumed.restore_best().to_dict() == whole.restore_best().to_dict()
    assert _same(module.net, other.net, 0.0)


def test_a_second_fit_goes_on() -> None:
    callback, module = _evidence(), Module()
    _trainer(callback).fit(module, _loader())
    learned = callback.history[-1]["precisions"]
    saved = callback.state_dict()
    _trainer(callback, max_epochs=1).fit(module, _loader())
    assert callback.razor is not None
    assert callback.razor.training_steps == 5 * 6
    assert [record["epoch"] for record in callback.history] == [2, 4, 1]
    fresh = _evidence()
    assert fresh.state_dict() == {}
    fresh.load_state_dict({})
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["razor"] is saved["razor"]
    third = Module()
    third.net.load_state_dict(module.net.state_dict())
    _trainer(fresh, max_epochs=1).fit(third, _loader())
    now = fresh.history[-1]["precisions"]
    assert now != learned
    assert all(abs(math.log(now[group] / learned[group])) < 1 for group in now)


def test_the_best_state_and_the_reading(tmp_path: Path) -> None:
    callback, module = _evidence(every=1), Module()
    _trainer(callback).fit(module, _loader())
    best = callback.restore_best()
    found = callback.reading(X[:8])
    assert found.evidence["log_evidence"] == pytest.approx(float(best.log_evidence), rel=1e-6)
    assert found.evidence["log_evidence"] == pytest.approx(float(callback.evidence().log_evidence))
    write = JsonLines(tmp_path / "events.jsonl")
    for record in callback.history:
        write(record)
    assert read_events(write.path) == callback.history


def test_hyperparameters_follow_the_evidence_alone() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = sr.Hyper(1.0)
            self.body = _net()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * self.scale.value)

    for burn_in, still in ((10**9, True), (0, False)):
        net = Scaled()
        _trainer(_evidence(burn_in=burn_in)).fit(Module(net, _adam), _loader())
        assert (float(net.scale.value.detach()) == 1.0) == still


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")
def test_modes_come_back_and_transfer_hooks_are_used() -> None:
    class Doubling(Module):
        def on_after_batch_transfer(self, batch: list[Tensor], index: int) -> list[Tensor]:
            return [2 * batch[0], batch[1]]

        def on_train_epoch_end(self) -> None:
            assert self.net[4].training
            assert not self.net[1].training

    net = _net().append(nn.Dropout(0.1))
    net[1].eval()
    callback, module = _evidence(), Doubling(net)
    _trainer(callback).fit(module, _loader())
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
    assert sizes(_loader()) == (240, 240)
    assert sizes(DataLoader(TensorDataset(X, Y), 50, drop_last=True)) == (240, 200)
    assert sizes(DataLoader(TensorDataset(X, Y), 50, sampler=sampler)) == (100, 100)
    assert sizes(DataLoader(Stream(), 50)) == (240, 240)
    assert sizes(TensorLoader(X, Y, 50, drop_last=True)) == (240, 200)
    assert sizes([(X[:7], Y[:7]), (X[:3], Y[:3])]) == (10, 10)
    train = DataLoader(TensorDataset(X, Y), 50, drop_last=True)
    for callback in (_evidence(), _evidence(subset=60), _evidence(loader=[(X, Y)])):
        _trainer(callback).fit(Module(), train)
        assert callback.razor is not None
        assert callback.razor.n_data == 240
    pairs = {"a": _loader(), "b": _loader()}
    with pytest.raises(ValueError, match=r"one training DataLoader.*loader=\.\.\."):
        _trainer(_evidence()).fit(Module(), pairs)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions_of_training(precision: Any) -> None:
    callback = _evidence(network=None)
    _trainer(callback, precision=precision).fit(Module(), _loader())
    values = [record["log_evidence"] for record in callback.history]
    assert values[-1] > values[0]
    assert "net.1.weight" in callback.history[-1]["precisions"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_on_a_gpu_and_read_after_lightning_took_the_module_off_it(precision: Any) -> None:
    callback, module = _evidence(), Module(optimiser=_adam)
    for _ in range(2):  # the second fit takes the razor back to the GPU
        _trainer(callback, accelerator="gpu", devices=1, precision=precision).fit(module, _loader())
        assert callback.razor is not None
        found = callback.reading(X[:8]).evidence["log_evidence"]
        again = callback.razor.evidence([(X.to(module.device), Y.to(module.device))])
        assert found == pytest.approx(float(again.log_evidence), rel=1e-4)
    values = [record["log_evidence"] for record in callback.history]
    assert values[-1] > values[0]


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_skipped_batch_and_an_interrupted_training_leave_nothing_behind() -> None:
    class Skipping(Module):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            if index == 3 and self.current_epoch == 1:
                raise RuntimeError("the cable")
            return None if index % 2 else super().training_step(batch, index)

    for optimiser in (_momentum, _adam):
        callback, module = _evidence(every=1), Skipping(optimiser=optimiser)
        with pytest.raises(RuntimeError, match="the cable"):
            _trainer(callback).fit(module, _loader())
        assert callback.razor is not None
        assert callback.razor.training_steps == 3 + 2
        assert not module.trainer.optimizers[0]._optimizer_step_post_hooks
        assert len(callback.history) == 1


class Manual(Module):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual(), "automatic optimization, got manual"),
        (Module(optimiser=lambda net: torch.optim.AdamW(net.parameters())), "weight_decay=0.0"),
        (Module(optimiser=lambda net: torch.optim.SGD(net[1].parameters(), 0.1)), "'3.bias'"),
        (Module(optimiser=lambda net: torch.optim.LBFGS(net.parameters())), "with LBFGS"),
    ],
)
def test_what_is_refused(module: Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _trainer(_evidence()).fit(module, _loader())


def test_misuse() -> None:
    with pytest.raises(ValueError, match="one process, got world_size 2"):
        _evidence().setup(_trainer(devices=2), Module(), "fit")
    _evidence().setup(_trainer(devices=2), Module(), "test")
    with pytest.raises(ValueError, match="every of at least 1"):
        _evidence(every=0)
    with pytest.raises(ValueError, match="expected prior 'auto'"):
        _evidence(prior="decay")
    with pytest.raises(ValueError, match="training that has begun"):
        _evidence(prior="loss").penalty()
    with pytest.raises(ValueError, match="count twice"):
        _evidence().penalty()
    with pytest.raises(ValueError, match="got no call of it"):
        _trainer(_evidence(prior="loss")).fit(Module(), _loader())
    with pytest.raises(ValueError, match="expected options among"):
        _trainer(_evidence(structures="kron")).fit(Module(), _loader())


def test_lightning_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "symrazor.lightning")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install symrazor\[lightning\]"):
        importlib.import_module("symrazor.lightning")
