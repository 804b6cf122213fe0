r"""Priors $p(\theta \mid \eta)$ on the weights, with hyperparameters learned by the evidence.

`Prior` is the interface that `Razor` and the Laplace evidence use; `GaussianPrior` implements it. A
new family derives from `Prior`: see docs/how-to/add-a-prior.md.
"""

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from symrazor.core.validation import check_choice

LOG_PRECISION_BOUNDS = (math.log(1e-8), math.log(1e12))

SMALLEST_POSITIVE = torch.finfo(torch.float64).tiny
"""Lower bound of numbers whose logarithm is taken."""

GroupRule = Literal["tensor", "scalar", "layer", "diagonal"]
Groups = GroupRule | Mapping[str, Sequence[str]]
PriorGroups = Literal["path"] | Groups
"""How options group weights: by path of a relaxed layer, or as `Prior` does."""

Theta = Mapping[str, Tensor]
"""Weights by name."""
Parameters = Mapping[str, nn.Parameter]

LogDeterminant = Callable[[Mapping[str, Tensor]], Tensor]
r"""Maps log curvatures of the prior, by tensor, to $\log |I + \Lambda^{-1} H|$."""


class Prior(nn.Module, ABC):
    r"""Interface of a prior on the weights: its log density, its curvature and its updates.

    The weights are partitioned into named groups that share hyperparameters. A family has to
    implement `log_prob`, `log_curvature` and `precision_of`; all other methods have defaults that
    derive from these. Its learned hyperparameters are its `nn.Parameter`s.

    `Prior(theta, precision, groups)` makes a `GaussianPrior`.

    Args:
        theta: the weights, by name.
        groups: "tensor" (one group per parameter tensor), "scalar" (one group), "layer" (the
            tensors of one module together), "diagonal" (one precision per weight), or a mapping
            group name -> glob patterns of parameter names that cover each tensor exactly once.

    Attributes:
        group_of: tensor name -> group name.
        names: names of the groups.
        diagonal: whether the curvature may differ between the weights of one tensor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "Prior":  # noqa: D102
        return super().__new__(GaussianPrior if cls is Prior else cls)

    def __init__(self, theta: Theta, groups: Groups = "tensor") -> None:
        super().__init__()
        if not theta:
            raise ValueError("The model has no trainable weights.")
        self.group_of = _assign_groups(list(theta), groups)
        self.diagonal = groups == "diagonal"
        self.names = list(dict.fromkeys(self.group_of.values()))

    @abstractmethod
    def log_prob(self, theta: Theta) -> Tensor:
        r"""Return $\log p(\theta \mid \eta)$ in float64, differentiable in weights and $\eta$."""

    @abstractmethod
    def log_curvature(self, theta: Theta) -> dict[str, Tensor]:
        r"""Return the log diagonal of $\Lambda = -\nabla^2_\theta \log p(\theta)$ of each tensor.

        $\Lambda$ is what the prior adds to the Hessian. It must be diagonal and positive. A value
        is 0-dimensional where all weights of the tensor have the same curvature (which Kronecker
        blocks need), and of the tensor's shape otherwise.
        """

    @abstractmethod
    def precision_of(self, name: str) -> Tensor:
        """Return the inverse prior variance of a tensor's weights, for readings and reports."""

    def members(self, group: str) -> list[str]:
        """Return the names of the tensors of a group."""
        return [name for name, owner in self.group_of.items() if owner == group]

    @property
    def precisions(self) -> dict[str, Tensor]:
        """Precision of every group, detached."""
        return {g: self.precision_of(self.members(g)[0]).detach() for g in self.names}

    def evidence_term(self, theta: Theta) -> Tensor:
        r"""Return the prior's term of the Laplace evidence, beside $\log |I + \Lambda^{-1} H|$.

        $$ \log p(\theta) + \tfrac{P}{2} \log 2\pi - \tfrac12 \log |\Lambda| , $$

        the log density relative to the peak of a Gaussian of precision $\Lambda$.
        """
        log_curvature = self.log_curvature(theta)
        log_det = [log_curvature[k].expand_as(v).double().sum() for k, v in theta.items()]
        n_weights = sum(value.numel() for value in theta.values())
        constant = 0.5 * n_weights * math.log(2 * math.pi)
        return self.log_prob(theta) + constant - 0.5 * torch.stack(log_det).sum()

    def penalty(self, theta: Theta) -> Tensor:
        r"""Return $-\log p(\theta)$ up to a constant, differentiable in the weights."""
        return -self.log_prob(theta)

    def add_penalty_gradient_(self, theta: Parameters, scale: float) -> None:
        """Add the gradient of `scale * penalty` to the `.grad` of each weight."""
        for value, gradient in zip(theta.values(), self._gradients(theta), strict=True):
            scaled = gradient * scale
            value.grad = scaled if value.grad is None else value.grad.add_(scaled)

    def shrink_(self, theta: Parameters, scale: float, step_sizes: Mapping[str, Any]) -> None:
        r"""Take an implicit gradient step on `scale * penalty`, stable for any curvature.

        $$ \theta \leftarrow \theta - \frac{r s\, g}{1 + r s\, \Lambda} , $$

        with step size r, scale s and gradient g of the penalty: one Newton step of the implicit
        Euler method, exact for a Gaussian.
        """
        log_curvature = self.log_curvature(theta)
        for (name, value), gradient in zip(theta.items(), self._gradients(theta), strict=True):
            rate = step_sizes[name] * scale
            curvature = log_curvature[name].detach().exp().to(value.dtype)
            value.data.sub_(rate * gradient / (1 + rate * curvature))

    def _gradients(self, theta: Parameters) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(self.penalty(theta), list(theta.values()))

    def weight_decays(self, theta: Theta, scale: float) -> list[Tensor]:
        """Return, for each tensor, the gradient of `scale * penalty` divided by the weight.

        A family whose gradient is not proportional to the weight raises ValueError.
        """
        raise ValueError(
            f"{type(self).__name__} cannot act as a weight decay, which Muon needs. Use "
            "optimizer='adamw' or 'sgd'."
        )

    def fixed_point_(
        self, log_det: LogDeterminant, theta: Theta, steps: int, damping: float
    ) -> None:
        """Move the hyperparameters towards the fixed point of the evidence.

        Args:
            log_det: the log-determinant, differentiable in the log curvatures.
            theta: the weights, fixed.
            steps: number of updates.
            damping: fraction of the way that each update takes.

        Raises:
            ValueError: the family has no fixed-point update.
        """
        raise ValueError(
            f"{type(self).__name__} has no fixed-point update. Use Razor(..., update='adam')."
        )

    def clamp_(self) -> list[str]:
        """Keep the hyperparameters inside their bounds and return the groups at a bound."""
        return []

    def switch_off_(self, names: Collection[str]) -> list[str]:
        """Give groups with all their tensors in `names` the narrowest prior; return the groups."""
        return []

    def restrict(self, theta: Theta) -> "Prior":
        """Return the same prior for a subset of the weights, if the family supports this."""
        raise ValueError(f"{type(self).__name__} cannot be restricted to some of its weights.")

    def __repr__(self) -> str:
        values = torch.cat([value.flatten() for value in self.precisions.values()])
        low, high = float(values.min()), float(values.max())
        spread = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        return f"{type(self).__name__}({len(self.names)} groups, precision {spread})"


class GaussianPrior(Prior):
    r"""Gaussian prior $\theta \sim N(0, \Delta^{-1})$ with $\Delta$ diagonal and learned.

    Each group has one precision $\delta_g$ (for `groups="diagonal"`, each weight has its own).

    Args:
        theta: the weights, by name.
        precision: starting precision of every group, or group name -> precision.
        groups: see `Prior`.
    """

    log_precision: nn.ParameterList

    def __init__(
        self, theta: Theta, precision: float | Mapping[str, float] = 1.0, groups: Groups = "tensor"
    ) -> None:
        super().__init__(theta, groups)
        self.log_precision = nn.ParameterList()
        if isinstance(precision, Mapping) and set(precision) != set(self.names):
            raise ValueError(
                f"prior_precision must name each of the groups {self.names} once, got "
                f"{list(precision)}."
            )
        low, high = (math.exp(bound) for bound in LOG_PRECISION_BOUNDS)
        for name in self.names:
            start = precision[name] if isinstance(precision, Mapping) else precision
            if not 0.99 * low <= start <= 1.01 * high:
                raise ValueError(
                    f"The prior precision of group {name!r} must be between {low:g} and {high:g}, "
                    f"got {start}."
                )
            shape = theta[name].shape if self.diagonal else ()
            device = next(iter(theta.values())).device
            value = torch.full(shape, math.log(start), dtype=torch.float64, device=device)
            self.log_precision.append(nn.Parameter(value.clamp(*LOG_PRECISION_BOUNDS)))

    def log_precision_of(self, name: str) -> Tensor:
        """Return the log precision of a tensor: 0-dim, or of the tensor's shape if diagonal."""
        log_delta: Tensor = self.log_precision[self.names.index(self.group_of[name])]
        return log_delta

    def precision_of(self, name: str) -> Tensor:
        """Return the precision of a tensor."""
        return self.log_precision_of(name).exp()

    def log_curvature(self, theta: Theta) -> dict[str, Tensor]:
        r"""Return $\log \delta$ of each tensor, whatever the weights are."""
        return {name: self.log_precision_of(name) for name in theta}

    def squared_norm(self, theta: Theta) -> Tensor:
        r"""Return $\theta^\top \Delta \theta$ in float64, differentiable in both."""
        terms = [
            (self.precision_of(name) * value.double().square()).sum()
            for name, value in theta.items()
        ]
        return torch.stack(terms).sum()

    def log_prob(self, theta: Theta) -> Tensor:
        r"""Return $\tfrac12 [\log |\Delta| - P \log 2\pi - \theta^\top \Delta \theta]$."""
        log_det = [self.log_precision_of(k).expand_as(v).sum() for k, v in theta.items()]
        n_weights = sum(value.numel() for value in theta.values())
        constant = n_weights * math.log(2 * math.pi)
        return 0.5 * (torch.stack(log_det).sum() - constant) + self.evidence_term(theta)

    def evidence_term(self, theta: Theta) -> Tensor:
        r"""Return $-\tfrac12 \theta^\top \Delta \theta$."""
        return -0.5 * self.squared_norm(theta)

    def penalty(self, theta: Theta) -> Tensor:
        r"""Return $\tfrac12 \theta^\top \Delta \theta$ in the dtype of the weights."""
        terms = [
            (self.precision_of(name).detach().to(value.dtype) * value.square()).sum()
            for name, value in theta.items()
        ]
        return 0.5 * torch.stack(terms).sum()

    @torch.no_grad()
    def weight_decays(self, theta: Theta, scale: float) -> list[Tensor]:
        """Return each tensor's precision times `scale`, in the tensor's dtype.

        The log precisions of all groups are stacked first, so that few kernels are launched.
        """
        if self.diagonal:
            return [(self.precision_of(k) * scale).to(v.dtype) for k, v in theta.items()]
        groups = torch.stack(list(self.log_precision)).exp() * scale
        by_group = groups.to(next(iter(theta.values())).dtype).unbind()
        index = {name: number for number, name in enumerate(self.names)}
        return [by_group[index[self.group_of[k]]].to(v.dtype) for k, v in theta.items()]

    @torch.no_grad()
    def add_penalty_gradient_(self, theta: Parameters, scale: float) -> None:
        r"""Add $s \Delta \theta$ to each `.grad`, with one kernel per tensor."""
        for value, decay in zip(theta.values(), self.weight_decays(theta, scale), strict=True):
            if value.grad is None:
                value.grad = decay * value
            else:
                value.grad.addcmul_(value, decay)

    @torch.no_grad()
    def shrink_(self, theta: Parameters, scale: float, step_sizes: Mapping[str, Any]) -> None:
        r"""Replace $\theta$ by $\theta / (1 + r s \delta)$, the exact implicit step."""
        decays = self.weight_decays(theta, scale)
        for (name, value), decay in zip(theta.items(), decays, strict=True):
            value.div_(1 + step_sizes[name] * decay)

    def fixed_point_(
        self, log_det: LogDeterminant, theta: Theta, steps: int, damping: float
    ) -> None:
        r"""Move every $\log\delta$ towards $\log \gamma / \lVert\theta\rVert^2$ (MacKay 1992).

        There the evidence is stationary. The effective parameters $\gamma$ of a group are minus
        the derivative of the log-determinant in its log precision. All groups move at once.
        """
        squares = self._group_squares(theta)
        for _ in range(steps):
            parameters = list(self.log_precision)
            with torch.enable_grad():
                value = log_det(self.log_curvature(theta))
                slopes: Sequence[Tensor | None] = torch.autograd.grad(
                    value, parameters, allow_unused=True
                )
            gamma = [
                torch.zeros_like(p) if slope is None else -slope
                for p, slope in zip(parameters, slopes, strict=True)
            ]
            target = self.fixed_point_targets(torch.cat([g.flatten() for g in gamma]), squares)
            flat = torch.cat([p.detach().flatten() for p in parameters])
            self.set_(flat + damping * (target - flat))

    def fixed_point_targets(
        self, gamma: Float[Tensor, " g"], squares: Float[Tensor, " g"]
    ) -> Float[Tensor, " g"]:
        r"""Return $\log \gamma / \lVert\theta\rVert^2$."""
        return gamma.clamp(min=SMALLEST_POSITIVE).log() - squares.clamp(min=SMALLEST_POSITIVE).log()

    @torch.no_grad()
    def _group_squares(self, theta: Theta) -> Float[Tensor, " g"]:
        r"""Return $\lVert\theta\rVert^2$ of every group, or of every weight if diagonal."""
        sums = []
        for group in self.names:
            squares = [theta[name].double().square() for name in self.members(group)]
            total = (
                squares[0] if self.diagonal else torch.stack([part.sum() for part in squares]).sum()
            )
            sums.append(total.flatten())
        return torch.cat(sums)

    @torch.no_grad()
    def set_(self, flat: Float[Tensor, " p"]) -> None:
        """Set all log precisions, group after group, to the nearest values inside the bounds."""
        inside = flat.clamp(*LOG_PRECISION_BOUNDS)
        for log_delta, value in zip(self.log_precision, self._split(inside), strict=True):
            log_delta.copy_(value.view_as(log_delta))

    @torch.no_grad()
    def clamp_(self) -> list[str]:
        """Keep log precisions inside the bounds and return the groups at a bound."""
        low, high = LOG_PRECISION_BOUNDS
        flat = torch.cat([log_delta.flatten() for log_delta in self.log_precision])
        self.set_(flat)
        is_at_bound = self._split((flat <= low) | (flat >= high))
        at_bound = torch.stack([part.any() for part in is_at_bound]).tolist()
        return [name for name, touches in zip(self.names, at_bound, strict=True) if touches]

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        """Split a vector of all log precisions by groups."""
        parts: Sequence[Tensor] = flat.split([value.numel() for value in self.log_precision])
        return parts

    @torch.no_grad()
    def switch_off_(self, names: Collection[str]) -> list[str]:
        """Give groups with all their tensors in `names` the largest precision."""
        groups = [group for group in self.names if set(self.members(group)) <= set(names)]
        for group in groups:
            self.log_precision[self.names.index(group)].data.fill_(LOG_PRECISION_BOUNDS[1])
        return groups

    @torch.no_grad()
    def restrict(self, theta: Theta) -> "GaussianPrior":
        """Return a prior of some of the weights with the same precisions, one group per tensor."""
        restricted = GaussianPrior(theta, groups="diagonal" if self.diagonal else "tensor")
        for name in theta:
            restricted.log_precision_of(name).copy_(self.log_precision_of(name))
        return restricted


def _as_list(patterns: str | Sequence[str]) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _assign_groups(names: list[str], groups: Groups) -> dict[str, str]:
    """Return parameter name -> group name."""
    if isinstance(groups, Mapping):
        return {name: _group_by_pattern(name, groups) for name in names}
    check_choice("groups", groups, GroupRule)
    if groups == "scalar":
        return dict.fromkeys(names, "all")
    if groups == "layer":
        return {name: name.rpartition(".")[0] or name for name in names}
    return {name: name for name in names}


def _group_by_pattern(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    matching = [
        group
        for group, patterns in groups.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _as_list(patterns))
    ]
    if len(matching) != 1:
        raise ValueError(
            f"Parameter {name!r} must be in exactly one prior group, but matches "
            f"{matching or 'none'}. Change the glob patterns."
        )
    return matching[0]
