"""Names of conserved quantities, the group that they generate, and rates of decay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.algebra import classify_flow, closure, generators
from symrazor.dynamics.fields import EnergyField, NewtonianField, ParametricField
from symrazor.dynamics.findings import Findings, Quantity, format_terms, with_error
from symrazor.dynamics.libraries import polynomials
from symrazor.dynamics.library import Library
from symrazor.dynamics.mechanics import apply_symplectic_form

TOLERANCE = 0.05
"""Coefficients that agree up to this fraction have the same name: names are approximate."""
MAX_OUTSIDE = 0.05
"""Largest fraction of the Poisson brackets outside the span of an algebra."""
MAX_DECAY_ERROR = 0.02
"""Largest relative error of a rate of decay over the states."""
SHOWN_DECAYS = 2
MAX_EQUAL_ERRORS = 3.0
"""Masses that differ by at most this many standard errors are called the same."""


@dataclass
class Noether:
    """What follows from the conserved quantities.

    Args:
        entries: one for each quantity: name, formulas, results of the test; matrix and linear part
            of quadratic ones.
        group: name of the group that the quadratic quantities generate, "" if there is none.
        closure: how far these are from closing under Poisson brackets.
        constants: their structure constants.
        decay: what decays, in words.
        masses: of the coordinates, relative to the first, with standard errors, if estimated.
        form: symplectic form of coordinates that are not canonical, if it was found.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    group: str = ""
    closure: float = 0.0
    constants: list[Any] = field(default_factory=list)
    decay: str = ""
    masses: dict[str, tuple[float, float]] = field(default_factory=dict)
    form: list[list[float]] = field(default_factory=list)

    @property
    def coordinates(self) -> str:
        """What the data say about the coordinates, in words."""
        if self.masses:
            if all(
                abs(mass - 1) <= MAX_EQUAL_ERRORS * error for mass, error in self.masses.values()
            ):
                return "All coordinates have the same mass."
            values = ", ".join(
                f"{name} {with_error(mass, error) if error > 0 else f'{mass:.3g}'}"
                for name, (mass, error) in self.masses.items()
            )
            return f"Masses of the coordinates, relative to the first: {values}."
        return "A symplectic form of the coordinates was found." if self.form else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {
            "group": self.group,
            "closure": self.closure,
            "structure_constants": self.constants,
            "decay": self.decay,
            "masses": self.masses,
            "symplectic_form": self.form,
        }


def describe_findings(findings: Findings, x: Float[Tensor, "n d"]) -> Noether:
    """Return names, group and decay for the findings of trajectories with states x."""
    best = findings.fields.adequate
    canonical = to_canonical(findings)
    quantities = sorted(findings.quantities, key=lambda q: q.name != "energy")
    result = Noether([entry_of(q, canonical) for q in quantities])
    if canonical is not None:
        _add_group(result, findings, x, canonical)
    elif best is not None and not quantities:
        result.decay = describe_decay(best.fit.field, findings.names, x)
    result.masses = masses_of(findings)
    if findings.structure is not None:
        result.form = findings.structure.form.tolist()
    return result


def to_canonical(findings: Findings) -> Float[Tensor, "d d"] | None:
    """Return the matrix that maps states to canonical coordinates; None if they have none."""
    best, d = findings.fields.adequate, len(findings.names)
    if best is not None and isinstance(best.fit.field, EnergyField):
        return best.fit.field.to_canonical
    if findings.structure is not None:
        return findings.structure.to_canonical
    return torch.eye(d, dtype=torch.float64) if best is None and d % 2 == 0 else None


def masses_of(findings: Findings) -> dict[str, tuple[float, float]]:
    """Return the mass of each coordinate relative to the first, and its standard error.

    Empty if no masses were estimated, or if they form a matrix that is not diagonal.
    """
    best, n = findings.fields.adequate, len(findings.names) // 2
    if best is not None and isinstance(field := best.fit.field, NewtonianField):
        inverse, errors = field.inverse_masses, best.fit.errors[len(field.library) :]
        mass = 1 / inverse
        deviation = torch.cat([torch.zeros_like(errors[:1]), errors]) * mass**2
    elif findings.structure is not None and (matrix := findings.structure.masses) is not None:
        mass, deviation = matrix.diagonal(), findings.structure.errors[:n, n:].diagonal()
        if bool((matrix - torch.diag(mass)).any()):
            return {}
    else:
        return {}
    values = zip(mass.tolist(), deviation.tolist(), strict=True)
    return dict(zip(findings.names, values, strict=False))


def entry_of(quantity: Quantity, canonical: Float[Tensor, "d d"] | None = None) -> dict[str, Any]:
    """Return a quantity as plain numbers; a map to canonical coordinates allows names."""
    form = quadratic_form(quantity)
    name = quantity.name or ("" if canonical is None else name_of(quantity, canonical))
    entry: dict[str, Any] = {
        "name": name,
        "formula": quantity.shortest,
        "estimate": quantity.estimate,
        "library": quantity.library.title,
        "p_value": quantity.p_value,
        "limit": quantity.limit,
        "noise": quantity.noise,
        "by": "noise test",
        "coefficients": {
            name: [float(quantity.coefficients[k]), float(quantity.errors[k])]
            for k, name in enumerate(quantity.library.names)
            if float(quantity.coefficients[k])
        },
    }
    if quantity.simple is not None:
        entry["simple_p_value"] = quantity.simple.p_value
    if form is not None:
        entry |= {"matrix": form[0].tolist(), "linear": form[1].tolist()}
    return entry


def quadratic_form(quantity: Quantity) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"]] | None:
    """Return A and b of a quadratic quantity; None for others."""
    library = quantity.library
    d = len(library.coordinates)
    A = torch.zeros(d, d, dtype=quantity.coefficients.dtype)
    b = torch.zeros(d, dtype=quantity.coefficients.dtype)
    for term, c in zip(library.terms, quantity.coefficients.tolist(), strict=True):
        if not c:
            continue
        if len(term) > 2 or max(term) >= d:
            return None
        if len(term) == 1:
            b[term[0]] += c
        else:
            A[term[0], term[1]] += c
            A[term[1], term[0]] += c
    return A, b


def canonical_form(
    quantity: Quantity, canonical: Float[Tensor, "d d"]
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"]] | None:
    """Return A and b of a quadratic quantity in canonical coordinates; None for others."""
    form = quadratic_form(quantity)
    if form is None:
        return None
    inverse = torch.linalg.inv(canonical)
    return inverse.mT @ form[0] @ inverse, inverse.mT @ form[1]


def name_of(quantity: Quantity, canonical: Float[Tensor, "d d"]) -> str:
    """Return a name for a quantity of positions and momenta, "" if it has none."""
    form = canonical_form(quantity, canonical)
    if form is None:
        products = [name for name in quantity.library.names if "1/r" in name.split()[1:]]
        return "component of the Runge-Lenz vector" if products and _is_cubic(quantity) else ""
    A, b = form
    n = len(b) // 2
    small = TOLERANCE * float(torch.cat([A.flatten(), b]).abs().max())
    if float(A.abs().max()) <= small:
        return "momentum" if float(b[:n].abs().max()) <= small else ""
    if float(b.abs().max()) > small:
        return ""
    if float(A[:n, :n].abs().max()) + float(A[n:, n:].abs().max()) <= small:
        return _name_of_rotation(A[:n, n:])
    return _name_of_energy(torch.where(A.abs() > small, A, 0.0), quantity.library.coordinates)


def _name_of_rotation(cross: Float[Tensor, "n n"]) -> str:
    """Return the name of a combination of products of positions and momenta."""
    n, size = len(cross), float(cross.abs().max())
    if float((cross + cross.T).abs().max()) <= TOLERANCE * size:
        return "angular momentum"
    for dimension in (2, 3):
        if n % dimension == 0 and n > dimension:
            blocks = cross.reshape(n // dimension, dimension, n // dimension, dimension)
            spread = (blocks - blocks.mean(2, keepdim=True)).abs().max()
            if float(spread) <= TOLERANCE * size:
                return "angular momentum of the centre of mass"
    return ""


def _name_of_energy(A: Float[Tensor, "d d"], coordinates: Sequence[str]) -> str:
    """Return the name of a part of the energy of oscillators."""
    n = len(A) // 2
    used = [i for i in range(n) if float((A[i].abs() + A[n + i].abs()).max()) > 0]
    values = torch.linalg.eigvalsh(A)
    if len(used) == 1 and float(values[0] * values[-1]) >= 0:
        return f"energy of {coordinates[used[0]]}"
    cross = torch.diag(A).abs().max() + A[:n, n:].abs().max()
    return "exchange of energy" if len(used) == 2 and float(cross) == 0 else ""


def _is_cubic(quantity: Quantity) -> bool:
    return any(
        len(term) == 3
        for term, c in zip(quantity.library.terms, quantity.coefficients.tolist(), strict=True)
        if c
    )


def _add_group(
    result: Noether, findings: Findings, x: Float[Tensor, "n d"], canonical: Float[Tensor, "d d"]
) -> None:
    """Add the group of the quadratic quantities, or that of Kepler's problem."""
    forms = [form for q in findings.all if (form := canonical_form(q, canonical)) is not None]
    names = [entry["name"] for entry in result.entries]
    runge_lenz = sum("Runge-Lenz" in name for name in names)
    if runge_lenz and _brackets_are_angular_momenta(findings, x, canonical):
        dimension = x.shape[1] // 2 + 1
        result.group = f"SO({dimension}) on every surface of constant energy"
        return
    if not forms:
        return
    # Units in which all coordinates are about 1, the same for positions and for momenta.
    n, y = x.shape[1] // 2, x @ canonical.mT
    unit = y.square().mean(0).sqrt()
    unit = torch.cat([unit[:n].mean().expand(n), unit[n:].mean().expand(n)])
    A = torch.stack([a * unit[:, None] * unit for a, _ in forms])
    b = torch.stack([b * unit for _, b in forms])
    G = generators(A, b)
    G = G / G.flatten(1).norm(dim=1)[:, None, None]
    closed = closure(G)
    result.closure, result.constants = closed.outside, closed.constants.tolist()
    if closed.outside <= MAX_OUTSIDE:
        result.group = name_group(closed.constants, G)


def name_group(constants: Float[Tensor, "m m m"], G: Float[Tensor, "m d e"]) -> str:
    """Return the name of a group by its structure constants and flows."""
    m = len(constants)
    scale = max(1.0, float(constants.abs().max()))
    killing = torch.einsum("acd,bdc->ab", constants, constants)
    values = torch.linalg.eigvalsh(0.5 * (killing + killing.T))
    negative = int((values < -TOLERANCE * scale**2).sum())
    positive = int((values > TOLERANCE * scale**2).sum())
    derived = int((torch.linalg.svdvals(constants.flatten(0, 1)) > TOLERANCE * scale).sum())
    if derived == 0:
        return _name_of_commutative_group(G)
    root = math.isqrt(m)
    known = {
        (3, 3, 3): "SO(3)",
        (6, 6, 6): "SO(4)",
        (3, 1, 2): "SE(2)",
        (4, 1, 2): "SE(2) x U(1)",  # bodies in the plane: turns about the centre of mass, too
        (6, 3, 6): "SE(3)",
        (9, 6, 9): "SE(3) x SO(3)",
    }
    if positive == 0 and root * root == m and negative == derived == m - 1:
        return f"U({root})"
    name = known.get((m, negative, derived))
    return name if name is not None and positive == 0 else f"a group of dimension {m}"


def _name_of_commutative_group(G: Float[Tensor, "m d e"]) -> str:
    kinds = {classify_flow(g, TOLERANCE) for g in G}
    power = f"^{len(G)}" if len(G) > 1 else ""
    if kinds == {"rotation"}:
        return f"U(1){power}, rotations of phase space"
    return f"T({len(G)}), translations" if kinds == {"translation"} else ""


def _brackets_are_angular_momenta(
    findings: Findings, x: Float[Tensor, "n d"], canonical: Float[Tensor, "d d"]
) -> bool:
    """Return whether brackets of the Runge-Lenz vector are angular momenta times the energy."""
    vectors = [q for q in findings.all if "Runge-Lenz" in name_of(q, canonical)]
    momenta = [q for q in findings.all if name_of(q, canonical) == "angular momentum"]
    energy = next((q for q in findings.all if q.name == "energy"), None)
    if len(vectors) < 2 or not momenta or energy is None:
        return False
    few = x[:: -(-len(x) // 300)]
    inverse = torch.linalg.inv(canonical)
    first, second = (vector.gradient(few) @ inverse for vector in vectors[:2])
    bracket = (first * apply_symplectic_form(second)).sum(1)
    basis = torch.stack([energy(few) * momentum(few) for momentum in momenta], 1)
    solution = torch.linalg.lstsq(basis, bracket[:, None], driver="gelsd").solution
    left = bracket - (basis @ solution)[:, 0]
    return float(left.square().sum()) < TOLERANCE * float(bracket.square().sum())


# ------------------------------------------------------------------------------------------- decay


def describe_decay(field: ParametricField, names: list[str], x: Float[Tensor, "n d"]) -> str:
    """Return quadratic quantities that decay at a constant rate, and the rate of volume, in words.

    If the rates of change of functions are combinations of the same functions, eigenvectors of
    their matrix grow or decay exponentially.
    """
    few = x[:: -(-len(x) // 500)]
    library = Library("quadratic functions", names, [], polynomials(len(names), 2))
    values, velocity = library(few), field(few)
    rates = torch.einsum("nmd,nd->nm", library.gradients(few), velocity)
    size = values.std(0)
    matrix = torch.linalg.lstsq(values / size, rates / size, driver="gelsd").solution
    eigenvalues, vectors = torch.linalg.eig(matrix)
    sentences = []
    for k in range(len(eigenvalues)):
        rate = complex(eigenvalues[k])
        if abs(rate.imag) > 1e-6 * abs(rate) or rate.real >= 0:
            continue
        c = (vectors[:, k].real / size).double()
        C, dC = values @ c, rates @ c
        error = (dC - rate.real * C).square().mean().sqrt() / (rate.real * C).square().mean().sqrt()
        if float(error) > MAX_DECAY_ERROR:
            continue
        c = c / c[(c * size).abs().argmax()]
        sentences.append(f"{format_terms(c, library.names, size)} decays at rate {-rate.real:.3g}.")
    volume = _divergence(field, few)
    if float(volume.std()) <= TOLERANCE * float(volume.mean().abs()):
        change = "shrinks" if float(volume.mean()) < 0 else "grows"
        rate_ = abs(float(volume.mean()))
        sentences.append(f"The volume of phase space {change} at rate {rate_:.3g}.")
    return " ".join(sentences[:SHOWN_DECAYS] if len(sentences) > SHOWN_DECAYS else sentences)


def _divergence(field: ParametricField, x: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
    total = torch.zeros(len(x), dtype=x.dtype)
    for i, step in enumerate((1e-4 * x.std(0)).tolist()):
        shift = torch.zeros(x.shape[1], dtype=x.dtype)
        shift[i] = step
        total += (field(x + shift) - field(x - shift))[:, i] / (2 * step)
    return total
