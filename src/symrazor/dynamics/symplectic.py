r"""Find the Hamiltonian structure of linear coordinates: masses, or another symplectic form.

Equations $\dot x = f(x)$ are Hamiltonian in linear coordinates if there are a constant, invertible,
antisymmetric matrix $\omega$ and an energy $H = \theta^\top \phi$ with $\omega f = \nabla H$. For
positions and velocities of masses M, $\omega = \begin{pmatrix} 0 & -M \\ M & 0 \end{pmatrix}$.

Over the states of the data, with coordinates in units of their spread, the fraction of
$\lVert \omega f \rVert^2$ that no gradient explains is a ratio of quadratic forms in $\omega$.
As in `field_invariants`, a stationary value is zero if it is not much larger than the changes that
the uncertainty of the parameters of f causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.field_invariants import MAX_RATE, MAX_RATIO, NUMERICAL_RATE, Combinations
from symrazor.dynamics.fields import ParametricField
from symrazor.dynamics.library import Library
from symrazor.dynamics.shooting import Fit

MAX_STATES = 400
"""Largest number of states at which the field is evaluated."""
DRAWS = 12
MIN_REGULAR = 1e-3
"""Smallest singular value of a symplectic form, relative to the largest, in units of the spread."""
MIN_ERRORS = 3.0
"""Entries below this many standard errors are zero."""
RANK_TOLERANCE = 1e-8
MAX_VELOCITY_BRACKET = 0.05
"""Part of a normalised form between two velocities that counts as zero."""


@dataclass(frozen=True)
class Structure:
    r"""A symplectic form and an energy.

    Args:
        form: [d, d], $\omega$; the mass of the first coordinate is 1 if there are masses.
        errors: [d, d], standard errors of its entries.
        energy: one combination of the functions of a library.
    """

    form: Float[Tensor, "d d"]
    errors: Float[Tensor, "d d"]
    energy: Combinations

    @property
    def masses(self) -> Float[Tensor, "n n"] | None:
        """Matrix of masses; None if velocities have brackets with each other."""
        n = len(self.form) // 2
        if bool(self.form[n:, n:].any()):
            return None
        mass = -self.form[:n, n:]
        return mass if float(torch.linalg.svdvals(mass)[-1]) > 0 else None

    @property
    def to_canonical(self) -> Float[Tensor, "d d"] | None:
        """The matrix that maps states to canonical ones; None if there are no masses."""
        mass, n = self.masses, len(self.form) // 2
        if mass is None:
            return None
        matrix = torch.eye(2 * n, dtype=mass.dtype)
        matrix[n:, n:], matrix[n:, :n] = mass.mT, -0.5 * self.form[:n, :n]
        return matrix


def find_structure(
    fit: Fit, libraries: Sequence[Library], x: Float[Tensor, "n d"]
) -> Structure | None:
    """Return the Hamiltonian structure with an energy in the first library that has one."""
    x = x[:: -(-len(x) // MAX_STATES)]
    drawn = fit.draws(DRAWS)
    for library in libraries:
        problem = _Problem(library, x)
        if len(problem.kept) and (found := problem.solve(fit.field, drawn)) is not None:
            return found
    return None


class _Problem:
    """The eigenproblem of a library at fixed states."""

    def __init__(self, library: Library, x: Float[Tensor, "n d"]) -> None:
        self.library, self.x, self.d = library, x, x.shape[1]
        self.spread = x.std(0).clamp_min(1e-300)
        gradients = library.gradients(x) * self.spread
        size = gradients.square().sum(-1).mean(0).sqrt()
        self.kept = (gradients.isfinite().all(-1).all(0) & (size > 0)).nonzero()[:, 0]
        self.size = size[self.kept]
        self.gradients = (
            (gradients[:, self.kept] / self.size[:, None]).transpose(1, 2).flatten(0, 1)
        )
        vectors, values, _ = torch.linalg.svd(self.gradients, full_matrices=False)
        self.basis = vectors[:, values > RANK_TOLERANCE * values[:1]]
        self.pairs = torch.triu_indices(self.d, self.d, 1)

    def solve(self, field: ParametricField, drawn: Sequence[ParametricField]) -> Structure | None:
        """Return form and energy of a field, or None if there are none."""
        rates, vectors = self.eigenproblem(field)
        others = [self.eigenproblem(other) for other in drawn]
        rank = min(len(values) for values, _ in ((rates, vectors), *others))
        by_errors = torch.stack([values[:rank] for values, _ in others]).mean(0) - rates[:rank]
        rates, vectors = rates[:rank], vectors[:, :rank]
        noise = MAX_RATIO * by_errors.clamp_min(NUMERICAL_RATE)
        good = (rates <= noise) & (rates + noise < MAX_RATE)
        count = int(good.to(torch.int).cumprod(0).sum())
        if not count:
            return None
        chosen = self.choose(vectors[:, :count])
        if not self.is_regular(chosen):
            return None
        form = self.matrix(chosen)
        spans = [v[:, :count] for _, v in others]
        forms = torch.stack([self.matrix(v @ _solve(v, chosen)) for v in spans])
        scale = self.unit(form)
        forms = torch.stack([other * (self.unit(other) / scale) for other in forms])
        errors = (forms - form).square().mean(0).sqrt()
        form = torch.where(form.abs() > MIN_ERRORS * errors, form, 0.0)
        energies = [self.energy(other, f) for other, f in zip(forms, drawn, strict=True)]
        theta, spread_of_theta = self.energy(form, field), torch.stack(energies).std(0)
        theta = self.energy(form, field, theta.abs() > MIN_ERRORS * spread_of_theta)
        units = self.spread[:, None] * self.spread
        full, full_errors = (torch.zeros(1, len(self.library), dtype=form.dtype) for _ in range(2))
        full[0, self.kept] = theta * scale / self.size
        full_errors[0, self.kept] = spread_of_theta * scale / self.size
        energy = Combinations(self.library, full, full_errors, rates[:1])
        return Structure(form * scale / units, errors * scale / units, energy)

    def eigenproblem(self, field: ParametricField) -> tuple[Tensor, Tensor]:
        """Return the unexplained fractions, ascending, and entries of the forms."""
        rows = self.images(field)
        left = rows - self.basis @ (self.basis.mT @ rows)
        metric = rows.mT @ rows
        values, vectors = torch.linalg.eigh(metric)
        independent = values > RANK_TOLERANCE * values[-1]
        whitening = vectors[:, independent] / values[independent].sqrt()
        rates, combined = torch.linalg.eigh(whitening.mT @ (left.mT @ left) @ whitening)
        return rates.clamp_min(0), whitening @ combined

    def images(self, field: ParametricField) -> Float[Tensor, "nd k"]:
        """Return the images of the velocities under each elementary form."""
        velocity = field(self.x) / self.spread
        i, j = self.pairs
        rows = velocity.new_zeros(len(velocity), self.d, len(i))
        k = torch.arange(len(i))
        rows[:, i, k], rows[:, j, k] = velocity[:, j], -velocity[:, i]
        return rows.flatten(0, 1)

    def choose(self, vectors: Float[Tensor, "k r"]) -> Float[Tensor, "k"]:
        """Return the form whose masses are nearest to 1 in the user's units, else a general one.

        Linear equations have many forms.
        """
        basis, n = torch.linalg.qr(vectors)[0], self.d // 2
        i, j = self.pairs
        _, values, mixes = torch.linalg.svd(basis[i >= n], full_matrices=True)
        zero = int((values < MAX_VELOCITY_BRACKET).sum()) + len(mixes) - len(values)
        with_masses = basis @ mixes[len(mixes) - zero :].mT
        mass = (i < n) & (j >= n)
        rows = -with_masses[mass] / (self.spread[i[mass]] * self.spread[j[mass]])[:, None]
        target = (j[mass] - i[mass] == n).to(rows)
        if zero:
            chosen: Tensor = with_masses @ _solve(rows, target)
            if self.is_regular(chosen):
                return chosen
        generator = torch.Generator().manual_seed(0)
        mix = torch.randn(basis.shape[1], generator=generator, dtype=basis.dtype)
        general: Tensor = basis @ mix
        return general

    def is_regular(self, entries: Float[Tensor, "k"]) -> bool:
        """Return whether a form is invertible."""
        values = torch.linalg.svdvals(self.matrix(entries))
        return float(values[-1]) > MIN_REGULAR * float(values[0])

    def matrix(self, entries: Float[Tensor, "k"]) -> Float[Tensor, "d d"]:
        """Return the antisymmetric matrix with these entries above the diagonal."""
        matrix = entries.new_zeros(self.d, self.d)
        i, j = self.pairs
        matrix[i, j], matrix[j, i] = entries, -entries
        return matrix

    def unit(self, form: Float[Tensor, "d d"]) -> float:
        """Return the factor that makes the first mass, or the largest entry, 1 in user's units."""
        user = form / (self.spread[:, None] * self.spread)
        mass = float(-user[0, self.d // 2])
        return 1 / (mass if abs(mass) > 1e-6 * float(user.abs().max()) else float(user.max()))

    def energy(
        self, form: Float[Tensor, "d d"], field: ParametricField, use: Tensor | None = None
    ) -> Float[Tensor, "k"]:
        """Return the coefficients of the energy whose gradient is nearest to the image."""
        use = torch.ones(len(self.kept), dtype=torch.bool) if use is None else use
        target = ((field(self.x) / self.spread) @ form.mT).flatten()
        theta = torch.zeros(len(self.kept), dtype=form.dtype)
        columns = self.gradients[:, use]
        theta[use] = _solve(columns, target)
        return theta


def _solve(columns: Float[Tensor, "n k"], target: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
    """Return the least squares solution."""
    solution: Tensor = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution
    return solution[:, 0]
