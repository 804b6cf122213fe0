"""A LightningModule, its data, its Trainer and an evidence step for it."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from symrazor.data import digits
from symrazor.lightning import EvidenceCallback

Optimiser = Callable[[nn.Module], torch.optim.Optimizer]
X, Y = (part[:240] for part in digits("train"))
EPOCHS, BATCH = 4, 40


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def with_momentum(net: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": net[1].parameters()}, {"params": net[3].parameters(), "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.8)


def with_adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=5e-3)


def make_schedule(optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.995)


class Module(pl.LightningModule):
    """A network, its loss, an optimiser with a schedule by step."""

    def __init__(self, net: nn.Module | None = None, optimiser: Optimiser = with_momentum) -> None:
        super().__init__()
        self.net = make_net() if net is None else net
        self.optimiser = optimiser
        self.callback: EvidenceCallback | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if self.callback is None else loss + self.callback.penalty()

    def configure_optimizers(self) -> Any:
        optimiser = self.optimiser(self.net)
        return [optimiser], [{"scheduler": make_schedule(optimiser), "interval": "step"}]


def evidence_step(**options: Any) -> EvidenceCallback:
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


def make_loader(sampler: Shuffled | None = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), BATCH, sampler=sampler)


def make_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    start: dict[str, Any] = {"max_epochs": EPOCHS, "accelerator": "cpu"} | dict.fromkeys(
        quiet, False
    )
    return pl.Trainer(callbacks=list(callbacks), **(start | options))


def same_weights(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=tolerance, atol=1e-6) for p, q in pairs)
