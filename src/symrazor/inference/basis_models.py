r"""Linear models $f(x) = w^\top \phi_\eta(x)$ whose evidence and posterior are exact.

Features are Gaussian bumps or random cosines of a learned width. Averaging over a finite group
makes them invariant, completely or by a learned amount $\lambda$,

$$ \phi^\lambda(x) = (1 - \lambda)\, \phi(x) + \frac{\lambda}{|G|} \sum_{g \in G} \phi(g x) , $$

which for the reflection $x \mapsto -x$ is $(1 - \tfrac\lambda2) \phi(x) + \tfrac\lambda2 \phi(-x)$.
Weights have the prior $N(0, \sigma_w^2)$. The evidence is therefore a closed-form, differentiable
function of $\omega^2$, $\lambda$, $\sigma_w^2$ and the noise (`symrazor.inference.exact`).
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, hyperparameters, interval
from symrazor.inference.exact import LinearGaussian, exact_evidence
from symrazor.inference.posterior import Prediction

F64 = torch.float64
INSIDE = interval(0.0, 1.0)


def reflection(dim: int = 1) -> Float[Tensor, "2 d d"]:
    r"""Return the group $\{1, -1\}$ of d-dimensional space, whose invariants are even functions."""
    eye = torch.eye(dim, dtype=F64)
    return torch.stack([eye, -eye])


def rotations(n: int) -> Float[Tensor, "n 2 2"]:
    """Return the n rotations of the plane by multiples of 360 / n degrees."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    angle = 2 * math.pi * torch.arange(n, dtype=F64) / n
    c, s = angle.cos(), angle.sin()
    return torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)


class Features(nn.Module, ABC):
    """A map from inputs [n, d] to features [n, m], with its own hyperparameters."""

    dim: int

    @abstractmethod
    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """Return the features of each input."""


class Fourier(Features):
    r"""Random cosines $\phi_m(x) = \sqrt{2/M} \cos(\omega^2 v_m^\top x + b_m)$.

    Args:
        size: number M of features.
        dim: dimension of the inputs.
        omega2: initial $\omega^2$; large values give high frequencies.
        seed: seed of $v_m \sim N(0, 1)$ and $b_m \sim U[0, 2\pi]$.
    """

    def __init__(self, size: int, dim: int = 1, omega2: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"size and dim must be at least 1, got {size} and {dim}.")
        generator = torch.Generator().manual_seed(seed)
        self.dim = dim
        self.directions: Tensor
        self.phases: Tensor
        directions = torch.randn(size, dim, generator=generator, dtype=F64)
        phases = 2 * math.pi * torch.rand(size, generator=generator, dtype=F64)
        self.register_buffer("directions", directions)
        self.register_buffer("phases", phases)
        self.omega2 = Hyper(torch.tensor(omega2, dtype=F64))

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """Evaluate the cosines at the inputs."""
        waves = (self.omega2.value * (x @ self.directions.T) + self.phases).cos()
        return math.sqrt(2 / len(self.phases)) * waves


class Symmetrised(Features):
    r"""Features $\phi^\lambda$ averaged over a finite group, completely or in part.

    Args:
        features: the features to average.
        group: one matrix per element, [g, d, d]; by default the reflection.
        amount: initial $\lambda$, which is learned; None fixes $\lambda = 1$ (invariant features).
    """

    def __init__(
        self,
        features: Features,
        group: Float[Tensor, "g d d"] | None = None,
        amount: float | None = None,
    ) -> None:
        super().__init__()
        self.features, self.dim = features, features.dim
        matrices = reflection(self.dim) if group is None else group.to(F64)
        if matrices.dim() != 3 or not len(matrices) or matrices.shape[1:] != (self.dim, self.dim):
            raise ValueError(
                f"group must have the shape [g, {self.dim}, {self.dim}], got "
                f"{list(matrices.shape)}."
            )
        _check_group(matrices)
        if amount is not None and not 0 < amount < 1:
            raise ValueError(
                f"amount must lie between 0 and 1 (exclusive), got {amount}. Use amount=None for "
                "invariant features, or the features without Symmetrised for no symmetry."
            )
        self.group: Tensor
        self.register_buffer("group", matrices)
        self.amount = None if amount is None else Hyper(torch.tensor(amount, dtype=F64), INSIDE)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """Interpolate between the features and their average over the group."""
        moved = torch.einsum("gij,nj->gni", self.group, x)
        average: Tensor = self.features(moved.flatten(0, 1))
        average = average.unflatten(0, (len(self.group), len(x))).mean(0)
        if self.amount is None:
            return average
        return torch.lerp(self.features(x), average, self.amount.value)


def _check_group(matrices: Float[Tensor, "g d d"]) -> None:
    """Raise ValueError unless the matrices are closed under multiplication."""
    flat = matrices.flatten(1)
    products = torch.einsum("aij,bjk->abik", matrices, matrices).flatten(0, 1).flatten(1)
    apart = torch.cdist(products, flat).amin(1)
    if not bool((apart < 1e-6 * (1 + flat.norm(dim=1).amax())).all()):
        raise ValueError(
            f"The {len(flat)} matrices are not a group: some of their products are missing. Add "
            "the missing matrices."
        )


class BasisModel(nn.Module):
    r"""$y = w^\top \phi(x) + \epsilon$, $w \sim N(0, \sigma_w^2)$, $\epsilon \sim N(0, \sigma^2)$.

    Args:
        features: the feature map, with its hyperparameters.
        variance: initial $\sigma_w^2$.
        noise: initial $\sigma$.
    """

    def __init__(self, features: Features, variance: float = 1.0, noise: float = 0.1) -> None:
        super().__init__()
        self.features = features
        self.variance = Hyper(torch.tensor(variance, dtype=F64))
        self.noise = Hyper(torch.tensor(noise, dtype=F64))

    def posterior(self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> LinearGaussian:
        """Compute the exact evidence and posterior mean, differentiable in all hyperparameters."""
        return exact_evidence(self._phi(x), y, 1 / self.variance.value, self.noise.value)

    def log_evidence(self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        r"""Return $\log N(y \mid 0, \sigma_w^2 \Phi \Phi^\top + \sigma^2 I)$."""
        return self.posterior(x, y).evidence.log_evidence

    def learn(
        self,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, " n"],
        objective: Literal["evidence", "likelihood"] = "evidence",
        steps: int = 200,
        lr: float = 0.1,
    ) -> list[dict[str, float]]:
        """Train all hyperparameters that are not frozen, by Adam with a cosine schedule.

        Args:
            x: inputs.
            y: targets.
            objective: "evidence", or "likelihood" for the likelihood at the posterior mean, which
                corresponds to ordinary training. The likelihood has no optimum in the noise and the
                weight variance: freeze both.
            steps: number of optimiser steps.
            lr: initial step size for the logarithms (for the amount: the logit).

        Returns:
            The objective and the hyperparameters before every step and after the last one.
        """
        if objective not in ("evidence", "likelihood"):
            raise ValueError(f"objective must be 'evidence' or 'likelihood', got {objective!r}.")
        trainable = list(hyperparameters(self).values())
        if not trainable or steps < 0:
            raise ValueError(
                "learn needs steps >= 0 and at least one hyperparameter that is not frozen, got "
                f"{steps} steps and {len(trainable)} trainable hyperparameters."
            )
        optimiser = torch.optim.Adam(trainable, lr=lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        history = []
        for step in range(steps + 1):
            optimiser.zero_grad()
            evidence = self.posterior(x, y).evidence
            value = evidence.log_evidence if objective == "evidence" else evidence.log_likelihood
            history.append({"objective": float(value.detach()), **self.values()})
            if step < steps:
                (-value).backward()
                optimiser.step()
                schedule.step()
        return history

    def values(self) -> dict[str, float]:
        """Return the hyperparameters by name."""
        return {
            name: float(module.value.detach())
            for name, module in self.named_modules()
            if isinstance(module, Hyper)
        }

    @torch.no_grad()
    def predict(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"], new: Float[Tensor, "k d"]
    ) -> Prediction:
        """Compute the exact predictive mean and variance at `new`, given the data x, y."""
        posterior = self.posterior(x, y)
        phi, at = self._phi(x), self._phi(new)
        sigma2, prior = self.noise.value.square(), self.variance.value
        if len(phi) <= phi.shape[1]:
            gram = prior * phi @ phi.T + sigma2 * torch.eye(len(phi), dtype=F64, device=phi.device)
            cross = prior * at @ phi.T
            reduced = (cross * torch.linalg.solve(gram, cross.T).T).sum(1)
            spread = prior * at.square().sum(1) - reduced
        else:
            eye = torch.eye(phi.shape[1], dtype=F64, device=phi.device)
            inverse = torch.linalg.inv(phi.T @ phi / sigma2 + eye / prior)
            spread = ((at @ inverse) * at).sum(1)
        mean = (at @ posterior.mean).unsqueeze(1)
        return Prediction(mean, (spread.clamp_min(0) + sigma2).unsqueeze(1))

    def _phi(self, x: Tensor) -> Tensor:
        dim = self.features.dim
        if x.dim() != 2 or x.shape[1] != dim:
            raise ValueError(f"x must have the shape [n, {dim}], got {list(x.shape)}.")
        phi: Tensor = self.features(x.to(F64))
        return phi
