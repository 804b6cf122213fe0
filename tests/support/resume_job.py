"""Small runs for test_resume*.py, `run` with every kind of state; as a program it ends by a signal.

python resume_job.py CASE DIRECTORY SIGNAL STEP: train and save to DIRECTORY; at training step STEP
(or, for a negative one, when the tensors of checkpoint -STEP are on disk) send the signal.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.invariance import Augment, Augmented, Noise, affine
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.training import checkpoint

CASES = ("adamw", "sgd", "sgd sam", "muon", "muon sam", "relaxed", "augmented")


class Wave(nn.Module):
    """A hyperparameter in the forward pass, and dropout, which draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency = sr.Hyper(2.0)
        self.inner, self.outer = nn.Linear(1, 12), nn.Linear(12, 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(torch.cos(self.frequency.value * self.inner(x))))


def jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.05 * torch.randn(x.shape, generator=generator, device=x.device)


def run(case: str, **options: Any) -> sr.Fit:
    """Train a case from its start, or as the options say; 12 epochs of 5 steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {
        "epochs": 12,
        "batch_size": 11,
        "every": 2,
        "burn_in": 10,
        "save_every": 3,
        "augment": jitter,
        "estimator": "mc",
        "seed": 5,
    } | options
    if case in ("relaxed", "augmented"):
        x = torch.randn(50, 1, 6, 6)
        y = (x.flatten(1).sum(1) / 6).round().long().clamp(-1, 1) + 1
        layer = Relaxed([Conv(1, 3, (6, 6)), FFC(1, 3, (6, 6))])
        model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(108, 3))
        if case == "augmented":
            model = Augmented(model, Augment([affine("rotation", 0.4), Noise()], 3))
        return sr.fit(model, (x, y), test=(x, y), update="adam", **options)
    x = torch.rand(50, 1) * 6 - 3
    waves = torch.cat([torch.sin(2.5 * x), torch.cos(2 * x)], 1)
    data = (x, waves + 0.1 * torch.randn(50, 2))
    optimizer, _, sam = case.partition(" ")
    options |= {"optimizer": optimizer, "sam_radius": 0.05 if sam else None}
    options["sam_from"] = 0.4 if case == "muon sam" else 0.0
    return sr.fit(Wave(), data, "gaussian", test=data, **options)


def outcome(fit: sr.Fit) -> dict[str, Any]:
    """Everything that has to be equal to the last bit; seconds are not."""
    return {
        "history": [{k: v for k, v in r.items() if k != "seconds"} for r in fit.history],
        "weights": {k: v.tolist() for k, v in fit.model.state_dict().items()},
        "precisions": {k: v.tolist() for k, v in fit.razor.prior.precisions.items()},
        "likelihood": {k: v.tolist() for k, v in fit.razor.likelihood.state_dict().items()},
        "evidence": fit.evidence.to_dict(),
        "effective": fit.evidence.effective_parameters,
        "test": fit.reading.test,
    }


def small_fit(
    directory: Path | None, width: int = 4, shift: float = 0.0, n: int = 20, **options: Any
) -> sr.Fit:
    torch.manual_seed(0)
    x = torch.randn(30, 3)[:n]
    data = (x + shift, (x[:, :1] > 0).long().squeeze(1))
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    options = {"batch_size": 8, "every": 1, "resume": directory} | options
    return sr.fit(model, data, **options)


def short_fit(directory: Path, **options: Any) -> sr.Fit:
    return small_fit(directory, **({"epochs": 2} | options))


class Interrupted:
    """Augmentation that sends this process a signal in its nth call."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.left = number, step

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        return jitter(x, generator)


def _kill_while_saving(number: int, which: int) -> None:
    write, seen = checkpoint.save_file, []

    def save_file(*args: Any) -> None:
        write(*args)
        seen.append(args)
        if len(seen) == which:
            os.kill(os.getpid(), number)

    checkpoint.save_file = save_file


if __name__ == "__main__":
    case, directory, name, step = sys.argv[1:]
    number = getattr(signal, name)
    if int(step) < 0:
        _kill_while_saving(number, -int(step))
    run(case, save=directory, augment=Interrupted(number, int(step)))
