r"""Models $f(x) = w^\top \phi_\eta(x)$ with fixed features: everything about them is exact.

The talk's first part. Features are bumps or random cosines, of a width that is learned; they can be
made invariant to a finite group, entirely or by a learned amount $\lambda$,

$$ \phi^\lambda(x) = (1 - \lambda)\, \phi(x) + \frac{\lambda}{|G|} \sum_{g \in G} \phi(g x) , $$

which for the reflection $x \mapsto -x$ is $(1 - \tfrac\lambda2) \phi(x) + \tfrac\lambda2 \phi(-x)$.
Weights have the prior $N(0, \sigma_w^2)$, so the evidence of $\omega^2$, $\lambda$, $\sigma_w^2$
and the noise is known in closed form (`evidence.exact`), and its gradient, too.
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
    r"""The group $\{1, -1\}$ of d-dimensional space: even functions are its invariants."""
    eye = torch.eye(dim, dtype=F64)
    return torch.stack([eye, -eye])


def rotations(n: int) -> Float[Tensor, "n 2 2"]:
    """The n rotations of the plane by multiples of 360 / n degrees."""
    if n < 1:
        raise ValueError(f"expected at least 1 rotation, got {n}")
    angle = 2 * math.pi * torch.arange(n, dtype=F64) / n
    c, s = angle.cos(), angle.sin()
    return torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)


class Features(nn.Module, ABC):
    """A map from inputs [n, d] to features [n, m], with its own hyperparameters."""

    dim: int

    @abstractmethod
    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """The features of each input."""


class RBF(Features):
    r"""Bumps $\phi_m(x) = M^{-1/2} \exp(-\tfrac12 \omega^2 \|x - c_m\|^2)$.

    Args:
        centres: $c_m$, [m, d].
        omega2: $\omega^2$ to start with: large for narrow bumps.
    """

    def __init__(self, centres: Float[Tensor, "m d"], omega2: float = 1.0) -> None:
        """Keep the centres in float64."""
        super().__init__()
        if centres.dim() != 2 or not len(centres):
            raise ValueError(f"expected centres [m, d], got {list(centres.shape)}")
        self.dim = centres.shape[1]
        self.centres: Tensor
        self.register_buffer("centres", centres.to(F64))
        self.omega2 = Hyper(torch.tensor(omega2, dtype=F64))

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """Bumps around the centres."""
        squared = (x.unsqueeze(1) - self.centres).square().sum(-1)
        return (-0.5 * self.omega2.value * squared).exp() / math.sqrt(len(self.centres))


class Fourier(Features):
    r"""Random cosines $\phi_m(x) = \sqrt{2/M} \cos(\omega^2 v_m^\top x + b_m)$.

    Args:
        size: number M of features.
        dim: of the inputs.
        omega2: $\omega^2$ to start with: large for high frequencies.
        seed: of $v_m \sim N(0, 1)$ and $b_m \sim U[0, 2\pi]$.
    """

    def __init__(self, size: int, dim: int = 1, omega2: float = 1.0, seed: int = 0) -> None:
        """Draw the frequencies."""
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"expected at least 1 feature and dimension, got {size} and {dim}")
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
        """Cosines of the inputs."""
        waves = (self.omega2.value * (x @ self.directions.T) + self.phases).cos()
        return math.sqrt(2 / len(self.phases)) * waves


class Symmetrised(Features):
    r"""Features averaged over a finite group, entirely or in part: $\phi^\lambda$ above.

    Args:
        features: the features to average.
        group: one matrix for each element, [g, d, d]; by default the reflection.
        amount: $\lambda$ to start with, learned; None for the invariant features, $\lambda = 1$.

    Raises:
        ValueError: matrices of another size or that are no group, an amount that is not inside.
    """

    def __init__(
        self,
        features: Features,
        group: Float[Tensor, "g d d"] | None = None,
        amount: float | None = None,
    ) -> None:
        """Keep the group's matrices in float64."""
        super().__init__()
        self.features, self.dim = features, features.dim
        matrices = reflection(self.dim) if group is None else group.to(F64)
        if matrices.dim() != 3 or not len(matrices) or matrices.shape[1:] != (self.dim, self.dim):
            raise ValueError(
                f"expected a group as matrices [g, {self.dim}, {self.dim}], got "
                f"{list(matrices.shape)}"
            )
        _check_group(matrices)
        if amount is not None and not 0 < amount < 1:
            raise ValueError(
                f"expected an amount of symmetry above 0 and below 1 to start with, got {amount}; "
                "do: amount=None for invariant features, or the features themselves for none"
            )
        self.group: Tensor
        self.register_buffer("group", matrices)
        self.amount = None if amount is None else Hyper(torch.tensor(amount, dtype=F64), INSIDE)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """The average over the group, mixed with the features themselves."""
        moved = torch.einsum("gij,nj->gni", self.group, x)
        average: Tensor = self.features(moved.flatten(0, 1))
        average = average.unflatten(0, (len(self.group), len(x))).mean(0)
        if self.amount is None:
            return average
        return torch.lerp(self.features(x), average, self.amount.value)


def _check_group(matrices: Float[Tensor, "g d d"]) -> None:
    """Refuse matrices some of whose products are not among them."""
    flat = matrices.flatten(1)
    products = torch.einsum("aij,bjk->abik", matrices, matrices).flatten(0, 1).flatten(1)
    apart = torch.cdist(products, flat).amin(1)
    if not bool((apart < 1e-6 * (1 + flat.norm(dim=1).amax())).all()):
        raise ValueError(
            f"expected a group, got {len(flat)} matrices whose products are not all among them; "
            "do add the missing ones"
        )


class BasisModel(nn.Module):
    r"""$y = w^\top \phi(x) + \epsilon$, $w \sim N(0, \sigma_w^2)$, $\epsilon \sim N(0, \sigma^2)$.

    Args:
        features: with hyperparameters of their own.
        variance: $\sigma_w^2$ to start with.
        noise: $\sigma$ to start with.
    """

    def __init__(self, features: Features, variance: float = 1.0, noise: float = 0.1) -> None:
        """Make variance and noise hyperparameters."""
        super().__init__()
        self.features = features
        self.variance = Hyper(torch.tensor(variance, dtype=F64))
        self.noise = Hyper(torch.tensor(noise, dtype=F64))

    def posterior(self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> LinearGaussian:
        """Exact evidence and posterior mean, differentiable in every hyperparameter."""
        return exact_evidence(self._phi(x), y, 1 / self.variance.value, self.noise.value)

    def log_evidence(self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        r"""$\log N(y \mid 0, \sigma_w^2 \Phi \Phi^\top + \sigma^2 I)$."""
        return self.posterior(x, y).evidence.log_evidence

    def learn(
        self,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, " n"],
        objective: Literal["evidence", "likelihood"] = "evidence",
        steps: int = 200,
        lr: float = 0.1,
    ) -> list[dict[str, float]]:
        """Move all hyperparameters that are not frozen, by Adam on a cosine.

        Args:
            x: inputs.
            y: targets.
            objective: the evidence; or the likelihood of the best weights, which is what ordinary
                training minimises the loss of, and which knows nothing of symmetry. It has no best
                noise and weight variance: freeze them.
            steps: of the optimiser.
            lr: its first step size, in logarithms (and in the logit of the amount).

        Returns:
            For every step: the objective and the hyperparameters that it was taken at; then those
            that came out.
        """
        if objective not in ("evidence", "likelihood"):
            raise ValueError(f"expected objective 'evidence' or 'likelihood', got {objective!r}")
        moving = list(hyperparameters(self).values())
        if not moving or steps < 0:
            raise ValueError(
                f"expected hyperparameters to move and steps of at least 0, got {len(moving)} "
                f"hyperparameters that are not frozen and {steps} steps"
            )
        optimiser = torch.optim.Adam(moving, lr=lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        history = []
        for step in range(steps + 1):
            optimiser.zero_grad()
            found = self.posterior(x, y).evidence
            value = found.log_evidence if objective == "evidence" else found.log_likelihood
            history.append({"objective": float(value.detach()), **self.values()})
            if step < steps:
                (-value).backward()
                optimiser.step()
                schedule.step()
        return history

    def values(self) -> dict[str, float]:
        """The hyperparameters by name."""
        return {
            name: float(module.value.detach())
            for name, module in self.named_modules()
            if isinstance(module, Hyper)
        }

    @torch.no_grad()
    def predict(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"], new: Float[Tensor, "k d"]
    ) -> Prediction:
        """Predictive mean and variance at `new`, given data x, y; exact."""
        found = self.posterior(x, y)
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
        mean = (at @ found.mean).unsqueeze(1)
        return Prediction(mean, (spread.clamp_min(0) + sigma2).unsqueeze(1))

    def _phi(self, x: Tensor) -> Tensor:
        dim = self.features.dim
        if x.dim() != 2 or x.shape[1] != dim:
            raise ValueError(f"expected inputs [n, {dim}], got {list(x.shape)}")
        phi: Tensor = self.features(x.to(F64))
        return phi
