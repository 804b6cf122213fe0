r"""The deep network of the talk, $W_3\, \mathrm{relu}(W_2 \cos(\omega^2 W_1 x))$.

$W_1$ is fixed, so that $\omega^2$ alone sets the frequencies; $W_2$ and $W_3$ are weights. The
frequency follows the gradient of the training loss (maximum likelihood), of the Laplace evidence (a
`Razor`), or of the evidence lower bound (a `Variational` network).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import symrazor as sr

STEPS = 400
EVIDENCE_EVERY = 10
HYPER_LR = 0.3
"""Learning rate of the logarithm of omega^2, if it is updated at every step."""
NOISE = 0.2
"""Initial noise standard deviation; fixed for the bound, which would explain all data by noise."""


class CosineNetwork(nn.Module):
    r"""$W_3\, \mathrm{relu}(W_2 \cos(\omega^2 W_1 x))$ with a learned $\omega^2$.

    Args:
        omega2: initial $\omega^2$.
        width: of both hidden layers.
        seed: of the three matrices.
    """

    def __init__(self, omega2: float, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.W1: Tensor
        self.register_buffer("W1", torch.randn(width, 1, generator=generator))
        self.omega2 = sr.Hyper(omega2)
        self.W2, self.W3 = nn.Linear(width, width, bias=False), nn.Linear(width, 1, bias=False)
        for layer in (self.W2, self.W3):
            drawn = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.data = drawn * (2 / width) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        hidden = torch.cos(self.omega2.value * (x @ self.W1.T))
        output: Tensor = self.W3(torch.relu(self.W2(hidden)))
        return output


def maximum_likelihood(omega2: float, x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Learn weights and frequency by the training loss."""
    model = CosineNetwork(omega2, seed=seed)
    theta, eta = sr.weights(model).values(), sr.hyperparameters(model).values()
    groups = [{"params": list(theta), "lr": 1e-2}, {"params": list(eta), "lr": HYPER_LR}]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    path = [omega2]
    for _ in range(STEPS):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
        schedule.step()
        path.append(float(model.omega2.value.detach()))
    return {"path": path, "log_evidence": None, "predict": model}


def laplace(omega2: float, x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Learn weights by their posterior; frequency, precisions and noise by the Laplace evidence."""
    model = CosineNetwork(omega2, seed=seed)
    likelihood = sr.Gaussian(NOISE)
    razor = sr.Razor(model, likelihood, len(y), burn_in=STEPS // 8, damping=0.3, lr=0.2)
    theta = list(sr.weights(model).values())
    optimiser = torch.optim.Adam(theta, lr=1e-2)
    path = [omega2]
    for step in range(STEPS):
        optimiser.zero_grad()
        loss = likelihood.nll(model(x), y).mean() + razor.penalty()
        loss.backward()
        optimiser.step()
        if (step + 1) % EVIDENCE_EVERY == 0:
            razor.step([(x, y)])
        path.append(float(model.omega2.value.detach()))
    log_evidence = float(razor.evidence([(x, y)]).log_evidence)
    return {"path": path, "log_evidence": log_evidence, "predict": model}


def bound(omega2: float, x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Learn posteriors, frequency and precisions by the evidence lower bound."""
    model = CosineNetwork(omega2, seed=seed)
    path = [omega2]
    fit = sr.fit_variational(
        model,
        (x, y),
        sr.Gaussian(NOISE),
        epochs=STEPS,
        batch_size=len(y),
        every=STEPS,
        lr=2e-2,
        hyper_lr=HYPER_LR,
        noise_update="fixed",
        prior_precision=16.0,
        seed=seed,
        progress=False,
        callbacks=[lambda record: path.append(float(model.omega2.value.detach()))],
    )
    log_evidence = float(fit.evidence.log_evidence)
    return {
        "path": path,
        "log_evidence": log_evidence,
        "predict": lambda new: fit.predict(new).mean,
    }


METHODS: dict[str, Callable[[float, Tensor, Tensor, int], dict[str, Any]]] = {
    "maximum likelihood": maximum_likelihood,
    "Laplace evidence": laplace,
    "lower bound": bound,
}
