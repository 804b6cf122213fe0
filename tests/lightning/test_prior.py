"""Test the ways in which the prior acts in Lightning's loop."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import symrazor as sr
from symrazor.training.optimisers import step_sizes

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")

from lightning_case import (
    EPOCHS,
    Module,
    Optimiser,
    Shuffled,
    X,
    Y,
    evidence_step,
    make_loader,
    make_net,
    make_schedule,
    make_trainer,
    same_weights,
    with_adam,
    with_momentum,
)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("optimiser", [with_momentum, with_adam])
def test_training_equals_a_handwritten_loop(
    optimiser: Optimiser, clip: float | None, accumulate: int
) -> None:
    callback, module = evidence_step(), Module(optimiser=optimiser)
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
    make_trainer(callback, **options).fit(module, make_loader(Shuffled()))

    net, loader = make_net(), make_loader(Shuffled())
    razor = sr.Razor(net, "categorical", 240)
    steps, theta = optimiser(net), sr.weights(net)
    schedule, values = make_schedule(steps), []
    for epoch in range(1, EPOCHS + 1):
        for i, (x, y) in enumerate(loader, 1):
            (F.cross_entropy(net(x), y) / accumulate).backward()
            if i % accumulate:
                continue
            if optimiser is with_adam:
                razor.penalty().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            steps.step()
            steps.zero_grad()
            if optimiser is with_momentum:
                razor.shrink_(step_sizes(steps, theta))
            schedule.step()
        if epoch % 2 == 0:
            values.append(float(razor.step(loader).log_evidence))
    assert same_weights(module.net, net)
    assert [r["log_evidence"] for r in callback.history] == pytest.approx(values, rel=1e-5)
    assert callback.razor is not None
    for group, value in razor.prior.precisions.items():
        learned = callback.razor.prior.precisions[group]
        assert float(learned) == pytest.approx(float(value), rel=1e-4)


def test_prior_in_the_loss_equals_prior_in_the_gradient() -> None:
    ends = []
    for prior in ("gradient", "loss"):
        callback, module = evidence_step(prior=prior), Module(optimiser=with_adam)
        module.callback = callback if prior == "loss" else None
        make_trainer(callback, accumulate_grad_batches=2, gradient_clip_val=0.3).fit(
            module, make_loader()
        )
        ends.append(module.net)
        assert callback.razor is not None
        assert callback.razor.training_steps == EPOCHS * 6 // (1 if prior == "loss" else 2)
    assert same_weights(*ends, tolerance=1e-4)


def _convex() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    nn.init.zeros_(net[1].weight)
    nn.init.zeros_(net[1].bias)
    return net


def _slopes(net: nn.Sequential, razor: sr.Razor) -> tuple[float, float]:
    """Return the norms of the gradients of log posterior and prior."""
    parts = F.cross_entropy(net(X.double()), Y), razor.penalty()
    loss, prior = (torch.autograd.grad(part, net[1].weight)[0] for part in parts)
    return float((loss + prior).norm() / prior.norm()), float(loss.norm())


def test_stationary_points_of_all_modes() -> None:
    """SGD and Adam end at the posterior mode; decoupled decay with Adam does not."""

    class Plain(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimiser(self.net)

    def train(prior: str, optimiser: Optimiser) -> tuple[float, float]:
        net = _convex()
        whole: Any = [(X.double(), Y)]
        steps = DataLoader(whole, batch_size=None, sampler=[0] * 600)
        options: dict[str, Any] = {"burn_in": 10**9, "prior_precision": 20.0}
        callback = evidence_step(prior=prior, loader=whole, **options)
        make_trainer(callback, max_epochs=1).fit(Plain(net, optimiser), steps)
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


def test_hyperparameters_follow_the_evidence_alone() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = sr.Hyper(1.0)
            self.body = make_net()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * self.scale.value)

    for burn_in, still in ((10**9, True), (0, False)):
        net = Scaled()
        make_trainer(evidence_step(burn_in=burn_in)).fit(Module(net, with_adam), make_loader())
        assert (float(net.scale.value.detach()) == 1.0) == still
