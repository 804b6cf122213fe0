"""Test interrupted trainings under Lightning, and rejected options."""

import importlib
import sys

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

from lightning_case import (
    Module,
    evidence_step,
    make_loader,
    make_trainer,
    with_adam,
    with_momentum,
)

from symrazor.lightning import EvidenceCallback


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_skipped_batches_and_exceptions_leave_no_hooks() -> None:
    class Skipping(Module):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            if index == 3 and self.current_epoch == 1:
                raise RuntimeError("the cable")
            return None if index % 2 else super().training_step(batch, index)

    for optimiser in (with_momentum, with_adam):
        callback, module = evidence_step(every=1), Skipping(optimiser=optimiser)
        with pytest.raises(RuntimeError, match="the cable"):
            make_trainer(callback).fit(module, make_loader())
        assert callback.razor is not None
        assert callback.razor.training_steps == 3 + 2
        assert not module.trainer.optimizers[0]._optimizer_step_post_hooks
        assert len(callback.history) == 1


class Manual(Module):
    """A module with manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Manual(), "Manual optimization is not supported"),
        (Module(optimiser=lambda net: torch.optim.AdamW(net.parameters())), "weight_decay=0.0"),
        (Module(optimiser=lambda net: torch.optim.SGD(net[1].parameters(), 0.1)), "'3.bias'"),
        (
            Module(optimiser=lambda net: torch.optim.LBFGS(net.parameters())),
            "LBFGS needs the prior",
        ),
    ],
)
def test_unsupported_trainings_are_rejected(module: Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(evidence_step()).fit(module, make_loader())


def test_invalid_options_and_calls_are_rejected() -> None:
    with pytest.raises(ValueError, match="Only one process is supported, got world_size 2"):
        evidence_step().setup(make_trainer(devices=2), Module(), "fit")
    evidence_step().setup(make_trainer(devices=2), Module(), "test")
    for wrong in (0, 2.5, "a", True):
        with pytest.raises(ValueError, match="every must be a positive integer, got"):
            evidence_step(every=wrong)
        with pytest.raises(ValueError, match="subset must be a positive integer, got"):
            evidence_step(subset=wrong)
    for other in (nn.Linear(3, 2), 3):
        with pytest.raises(ValueError, match="network must be a function .* Use network=lambda"):
            EvidenceCallback(network=other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prior must be 'auto'"):
        evidence_step(prior="decay")
    with pytest.raises(ValueError, match="Training has not started"):
        evidence_step(prior="loss").penalty()
    with pytest.raises(ValueError, match="count the prior twice"):
        evidence_step().penalty()
    with pytest.raises(ValueError, match="training_step never called"):
        make_trainer(evidence_step(prior="loss")).fit(Module(), make_loader())
    with pytest.raises(ValueError, match="Unknown option"):
        make_trainer(evidence_step(structures="kron")).fit(Module(), make_loader())


def test_missing_lightning_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "symrazor.lightning")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install symrazor\[lightning\]"):
        importlib.import_module("symrazor.lightning")
