"""Gaussian priors on the weights, with learned precisions."""

import fnmatch
import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

LOG_PRECISION_BOUNDS = (math.log(1e-8), math.log(1e12))

Groups = str | Mapping[str, Sequence[str]]


class Prior(nn.Module):
    r"""Gaussian prior $\theta \sim N(0, \Delta^{-1})$ with $\Delta$ diagonal and learned.

    The weights are partitioned into named groups, each with one precision $\delta_g$ (or, for
    `groups="diagonal"`, one precision for every single weight).

    Args:
        theta: the weights, by name.
        precision: starting precision of every group, or group name -> precision.
        groups: "tensor" (one group per parameter tensor), "scalar" (one for all), "layer" (the
            tensors of one module together), "diagonal" (one precision per weight), or a mapping
            group name -> glob patterns of parameter names, which must cover each tensor once.
    """

    log_precision: nn.ParameterList

    def __init__(
        self,
        theta: Mapping[str, Tensor],
        precision: float | Mapping[str, float] = 1.0,
        groups: Groups = "tensor",
    ) -> None:
        """Partition `theta` into groups; see the class."""
        super().__init__()
        if not theta:
            raise ValueError("expected at least one trainable weight, got a model without any")
        self.group_of = _assign(list(theta), groups)
        self.diagonal = groups == "diagonal"
        self.names = list(dict.fromkeys(self.group_of.values()))
        self.log_precision = nn.ParameterList()
        if isinstance(precision, Mapping) and set(precision) != set(self.names):
            raise ValueError(
                f"expected a precision for each of the groups {self.names}, got {list(precision)}"
            )
        low, high = (math.exp(bound) for bound in LOG_PRECISION_BOUNDS)
        for name in self.names:
            start = precision[name] if isinstance(precision, Mapping) else precision
            if not 0.99 * low <= start <= 1.01 * high:
                raise ValueError(
                    f"expected a positive prior precision between {low:g} and {high:g} for group "
                    f"{name!r}, got {start}"
                )
            shape = theta[name].shape if self.diagonal else ()
            device = next(iter(theta.values())).device
            value = torch.full(shape, math.log(start), dtype=torch.float64, device=device)
            self.log_precision.append(nn.Parameter(value.clamp(*LOG_PRECISION_BOUNDS)))

    def members(self, group: str) -> list[str]:
        """Names of the tensors of a group."""
        return [name for name, owner in self.group_of.items() if owner == group]

    def log_of(self, parameter: str) -> Tensor:
        """Log precision that acts on a tensor: 0-dim, or of the tensor's shape if diagonal."""
        log_delta: Tensor = self.log_precision[self.names.index(self.group_of[parameter])]
        return log_delta

    def precision_of(self, parameter: str) -> Tensor:
        """Precision that acts on a tensor."""
        return self.log_of(parameter).exp()

    def precisions_of(self, theta: Mapping[str, Tensor], scale: float) -> list[Tensor]:
        """Precisions that act on tensors, times a scale, in each tensor's type; few kernels.

        The logarithms of all groups become one tensor, from which each takes its own.
        """
        if self.diagonal:
            return [(self.precision_of(k) * scale).to(v.dtype) for k, v in theta.items()]
        groups = torch.stack(list(self.log_precision)).exp() * scale
        each = groups.to(next(iter(theta.values())).dtype).unbind()
        order = {name: number for number, name in enumerate(self.names)}
        return [each[order[self.group_of[k]]].to(v.dtype) for k, v in theta.items()]

    @property
    def precisions(self) -> dict[str, Tensor]:
        """Precision of every group, detached."""
        pairs = zip(self.names, self.log_precision, strict=True)
        return {name: log_delta.detach().exp() for name, log_delta in pairs}

    def scatter(self, theta: Mapping[str, Tensor]) -> Tensor:
        r"""$\theta^\top \Delta \theta$ in float64, differentiable in the precisions and theta."""
        terms = [
            (self.precision_of(name) * value.double().square()).sum()
            for name, value in theta.items()
        ]
        return torch.stack(terms).sum()

    @torch.no_grad()
    def set_(self, flat: Float[Tensor, " p"]) -> None:
        """Set all log precisions, group after group, to the nearest values inside the bounds."""
        inside = flat.clamp(*LOG_PRECISION_BOUNDS)
        for own, value in zip(self.log_precision, self._split(inside), strict=True):
            own.copy_(value.view_as(own))

    @torch.no_grad()
    def clamp_(self) -> list[str]:
        """Keep log precisions inside the bounds; returns the groups that touch one."""
        low, high = LOG_PRECISION_BOUNDS
        flat = torch.cat([own.flatten() for own in self.log_precision])
        self.set_(flat)
        parts = self._split((flat <= low) | (flat >= high))
        touching = torch.stack([part.any() for part in parts]).tolist()
        return [name for name, touches in zip(self.names, touching, strict=True) if touches]

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        """By groups."""
        parts: Sequence[Tensor] = flat.split([own.numel() for own in self.log_precision])
        return parts


def _as_list(patterns: str | Sequence[str]) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _assign(names: list[str], groups: Groups) -> dict[str, str]:
    """Parameter name -> group name."""
    if isinstance(groups, Mapping):
        assigned: dict[str, str] = {}
        for name in names:
            owners = [
                group
                for group, patterns in groups.items()
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in _as_list(patterns))
            ]
            if len(owners) != 1:
                raise ValueError(
                    f"expected parameter {name!r} in exactly one prior group, got {owners or None};"
                    " mend the glob patterns"
                )
            assigned[name] = owners[0]
        return assigned
    if groups == "scalar":
        return dict.fromkeys(names, "all")
    if groups in ("tensor", "diagonal"):
        return {name: name for name in names}
    if groups == "layer":
        return {name: name.rpartition(".")[0] or name for name in names}
    raise ValueError(
        f"expected groups 'tensor', 'scalar', 'layer', 'diagonal' or a mapping, got {groups!r}"
    )
