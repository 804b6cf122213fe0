r"""Conserved quantities to be judged: what a trained network changes least.

Of all quadratic functions, or of all combinations of given functions, the first m in the order of
$E\{C, H\}^2 / E|\nabla C|^2$, with flows about as long as the states, and rounded to whole
coefficients where they are nearly whole.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.conserved import ConservedQuantities, Quadratic
from symrazor.dynamics.measures import FlowTimes
from symrazor.dynamics.observables import Combination
from symrazor.dynamics.simple import WithinSpan, simplified, whole_rows, worth
from symrazor.dynamics.start import mean_field, nearly_conserved, slowest, typical_size
from symrazor.dynamics.symmetrised import SymmetrisedNetwork

LENGTH = 1.0
"""Root mean square length of the flows of a proposal, relative to that of the states."""
SOLVED = 0.5
"""The same for flows that are solved for, which may leave the data fast."""


class Proposals:
    """All combinations of what is on offer, in the order in which a model conserves them.

    Args:
        offered: a model with quadratic quantities, or a combination of functions; its values are
            not used.
        judge: whose dynamics are looked at.
        x: states of the data.

    Raises:
        ValueError: quantities of another kind.
    """

    rates: Float[Tensor, "f"]
    """Mean squared rates, relative to the dynamics, ascending."""

    def __init__(
        self, offered: SymmetrisedNetwork, judge: SymmetrisedNetwork, x: Float[Tensor, "n d"]
    ) -> None:
        """Solve the eigenvalue problem."""
        like, times = offered.conserved, offered.times
        if not isinstance(like, Quadratic | Combination) or times is None:
            kind = "none" if like is None else type(like).__name__
            raise ValueError(f"expected Quadratic or Combination quantities on offer, got {kind}")
        self.offered, self.like, self.times = offered, like, times
        states, field = mean_field(judge, x)
        self.size = typical_size(x)
        if isinstance(like, Quadratic):
            self.rates, self.A, self.b = nearly_conserved(field, states)
        else:
            self.rates, self.rows = slowest(_slopes(like, states.double()), field)

    def jumps(self, count: int) -> list[int]:
        """The m, up to the number on offer, where the rates rise most; the steepest first."""
        return jumps(self.rates, min(self.like.count, len(self.rates) - 1), count)

    def first(self, m: int) -> SymmetrisedNetwork:
        """The offered network (shared) with the first m quantities, held as they are."""
        own = FlowTimes(m, self.times.measure, self.times.draws)
        if m == 1:
            own = FlowTimes(1, "cube", "quasi")
        like = self.like
        reach = LENGTH if isinstance(like, Quadratic) else SOLVED
        length = reach * self.size / (like.scale * own.variance**0.5 * m**0.5)
        made = self._quadratic(m, length) if isinstance(like, Quadratic) else self._mix(m, length)
        model = SymmetrisedNetwork(self.offered.network, made, own)
        if isinstance(made, Quadratic):
            model = simplified(model) or model
        found = model.conserved
        if found is not None:
            found.requires_grad_(False).to(next(like.parameters()))
        return model

    def _quadratic(self, m: int, length: float) -> Quadratic:
        like = self.like
        cap = like.norm_cap if isinstance(like, Quadratic) else 16.0
        made = Quadratic(self.A.shape[-1], m, scale=like.scale, norm_cap=cap)
        with torch.no_grad():
            made.A_raw.copy_(length * self.A[:m])
            made.b.copy_(length * self.b[:m])
        return made

    def _mix(self, m: int, length: float) -> Combination:
        like = self.like
        assert isinstance(like, Combination)
        made = Combination(like.functions, m, scale=like.scale, steps=like.steps)
        rows = self.rows[:m]
        whole = whole_rows(rows)
        if whole is not None:  # the learned ones, projected
            rows = torch.linalg.lstsq(whole.mT, rows.mT).solution.mT @ whole
            made.rounded = True
        with torch.no_grad():
            made.coefficients.copy_(length * rows)
        return made


def _slopes(like: Combination, x: Float[Tensor, "m d"]) -> Float[Tensor, "m f d"]:
    """Gradients of the functions of a combination."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        values = [function(x).sum() for function in like.functions]
        found = [torch.autograd.grad(value, x)[0] for value in values]
    return torch.stack(found, dim=1)


def jumps(rates: Float[Tensor, "f"], most: int, count: int) -> list[int]:
    """The m of 1..most with the largest ratio of the next rate to the m-th, best first."""
    safe = rates.clamp_min(1e-12)
    ratio = safe[1 : most + 1] / safe[:-1][:most]
    return [int(m) + 1 for m in ratio.argsort(descending=True)[:count]]


def is_rounded(conserved: ConservedQuantities | None) -> bool:
    """Whether the span of the quantities was rounded to whole coefficients."""
    return isinstance(conserved, WithinSpan) or (
        isinstance(conserved, Combination) and conserved.rounded
    )


def charge(conserved: ConservedQuantities | None, n_data: int) -> float:
    """Nats for the free coefficients of the span; nothing for a rounded one."""
    if conserved is None or is_rounded(conserved):
        return 0.0
    if isinstance(conserved, Quadratic):
        d = conserved.A.shape[-1]
        return worth(conserved.count, d * (d + 3) // 2, n_data)
    assert isinstance(conserved, Combination)
    return worth(conserved.count, len(conserved.functions), n_data)
