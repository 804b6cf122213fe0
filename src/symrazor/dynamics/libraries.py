"""Libraries of functions of the state in which conserved quantities are sought.

Variables are the coordinates and functions of them: sines and cosines, powers, logarithms,
exponentials and inverse distances. `libraries_for` lists libraries from simple to rich, so that a
quantity is found in its simplest form.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, combinations_with_replacement, product

import torch
from jaxtyping import Float
from torch import Tensor

from symrazor.dynamics.library import Custom, Library, Scalar, Variable

MAX_FUNCTIONS = 320
"""Functions in a library, at most; larger ones take long and need many states."""
MAX_RADIANS = 40.0
"""Coordinates beyond this size are not taken for angles."""
MIN_RADIANS = 0.5
"""Nor are coordinates that stay below this size: sines of small angles are linear."""
MAX_EXPONENT = 12.0
"""Arguments of exponentials are at most this large."""
QUADRATIC = "quadratic functions"
LINKED_BODIES = "products of quadratic functions and two harmonics"
MIN_RELATIVE_DISTANCE = 0.03
"""Smallest distance, relative to its mean, for which its inverse is offered: noise ruins others."""


def form(weights: dict[int, float], d: int) -> Float[Tensor, "1 d"]:
    """Return a linear form of d coordinates."""
    row = torch.zeros(1, d, dtype=torch.float64)
    for i, weight in weights.items():
        row[0, i] = weight
    return row


def _power(exponent: int) -> Scalar:
    def value(u: Tensor) -> Tensor:
        result = u
        for _ in range(exponent - 1):
            result = result * u
        return result

    def slope(u: Tensor) -> Tensor:
        result = exponent * u
        for _ in range(exponent - 2):
            result = result * u
        return result

    return Scalar(value, slope)


SINE = Scalar(torch.sin, torch.cos)
COSINE = Scalar(torch.cos, lambda u: -torch.sin(u))
EXPONENTIAL = Scalar(torch.exp, torch.exp)
LOGARITHM = Scalar(lambda u: torch.log(u.clamp_min(1e-300)), lambda u: 1 / u.clamp_min(1e-300))
INVERSE = Scalar(lambda u: 1 / u.clamp_min(1e-300), lambda u: -1 / u.clamp_min(1e-150).square())
INVERSE_ROOT = Scalar(
    lambda u: u.clamp_min(1e-300).rsqrt(),
    lambda u: -0.5 * u.clamp_min(1e-100).rsqrt() / u.clamp_min(1e-100),
)
LOGARITHM_OF_ROOT = Scalar(
    lambda u: 0.5 * torch.log(u.clamp_min(1e-300)), lambda u: 0.5 / u.clamp_min(1e-300)
)
"""The logarithm of a distance, as a function of the squared distance."""
CUBE, FOURTH_POWER = _power(3), _power(4)

# --------------------------------------------------------------------------------------- libraries


def libraries_for(
    x: Float[Tensor, "n d"],
    names: Sequence[str],
    functions: dict[str, Callable[[Tensor], Tensor]] | None = None,
    limit: int = MAX_FUNCTIONS,
) -> list[Library]:
    """Return libraries for these states, from simple to rich.

    Args:
        x: observed states, in the user's units.
        names: of the coordinates.
        functions: further functions of the state, by name; they join every library.
        limit: largest number of functions; larger libraries are left out.
    """
    d = x.shape[1]
    own = [Custom(name, function) for name, function in (functions or {}).items()]
    libraries = []

    def add(title: str, extra: Sequence[Variable], terms: Iterable[Sequence[int]]) -> None:
        own_terms = [(d + len(extra) + k,) for k in range(len(own))]
        library = Library(title, names, extra, [*terms, *own_terms], own)
        if len(library) <= limit:
            libraries.append(library)

    first = d
    for degree, title in ((1, "linear functions"), (2, QUADRATIC)):
        add(title, [], polynomials(d, degree))
    families = potentials(x, names)
    for title, extra in families.items():
        new = range(first, first + len(extra))
        add(f"{QUADRATIC} and {title}", extra, [*polynomials(d, 2), *((k,) for k in new)])
    add("cubic functions", [], polynomials(d, 3))
    for title, extra in families.items():
        new = range(first, first + len(extra))
        if title == "sines and cosines":
            harmonics = [*extra, *second_harmonics(extra, names)]
            waves = [(k,) for k in range(first, first + len(harmonics))]
            simple = [*polynomials(d, 2), *waves]
            add(f"{QUADRATIC} and two harmonics", harmonics, simple)
            # Kinetic energies and momenta of linked bodies.
            factors = [*polynomials(d, 2)] if d % 2 or d == 2 else _of_velocities(d)
            terms = [(*f, *t) for f, t in product(factors, waves)]
            add(LINKED_BODIES, harmonics, [*simple, *terms])
        elif title != "powers":
            mixed = [(i, k) for i in range(d) for k in new]
            terms = [*polynomials(d, 3), *((k,) for k in new), *mixed]
            add(f"cubic functions and products with {title}", extra, terms)
    add("quartic functions", [], polynomials(d, 4))
    return libraries


def polynomials(d: int, degree: int) -> list[tuple[int, ...]]:
    """Return the monomials of degree 1 to `degree` as tuples of indices."""
    return [
        term
        for order in range(1, degree + 1)
        for term in combinations_with_replacement(range(d), order)
    ]


def second_harmonics(waves: Sequence[Variable], names: Sequence[str]) -> list[Variable]:
    """Return sines and cosines of doubled angles, differences and sums."""
    angles = [wave.forms for wave in waves[::2]]
    labels = [names[int(angle[0].argmax())] for angle in angles]
    forms = {f"2 {label}": 2 * angle for label, angle in zip(labels, angles, strict=True)}
    for (a, first), (b, second) in combinations(zip(labels, angles, strict=True), 2):
        forms |= {f"({a} - {b})": first - second, f"({a} + {b})": first + second}
    return [
        Variable(f"{label} {angle}", function, weights)
        for angle, weights in forms.items()
        for label, function in (("sin", SINE), ("cos", COSINE))
    ]


def _of_velocities(d: int) -> list[tuple[int, ...]]:
    """Return the monomials of degree 1 and 2 of the second half of the coordinates."""
    return [term for term in polynomials(d, 2) if min(term) >= d // 2]


def potentials(x: Float[Tensor, "n d"], names: Sequence[str]) -> dict[str, list[Variable]]:
    """Return families of functions of positions, and of their differences, that suit the data.

    With an even number of coordinates, the first half are positions.
    """
    d = x.shape[1]
    positions = range(d // 2 if d % 2 == 0 and d > 2 else d)
    families: dict[str, list[Variable]] = {}
    angles = [i for i in positions if MIN_RADIANS < float(x[:, i].abs().max()) < MAX_RADIANS]
    if angles:
        families["sines and cosines"] = [
            Variable(f"{label} {names[i]}", function, form({i: 1.0}, d))
            for i in angles
            for label, function in (("sin", SINE), ("cos", COSINE))
        ]
    pairs = list(combinations(positions, 2)) if d > 2 else []
    differences = {f"({names[i]} - {names[j]})": {i: 1.0, j: -1.0} for i, j in pairs}
    single = {names[i]: {i: 1.0} for i in positions}
    families["powers"] = [
        Variable(f"{name}^{k}", power, form(weights, d))
        for name, weights in (single | differences).items()
        for k, power in ((3, CUBE), (4, FOURTH_POWER))
    ]
    positive = [i for i in range(d) if float(x[:, i].min()) > 0]
    if positive:
        families["logarithms"] = [
            Variable(f"log {names[i]}", LOGARITHM, form({i: 1.0}, d)) for i in positive
        ]
    bounded = {
        name: weights
        for name, weights in (differences or single).items()
        if float(_sum(x, weights).abs().max()) < MAX_EXPONENT
    }
    if bounded and d <= 8:
        families["exponentials"] = [
            Variable(f"exp({'-' if sign < 0 else ''}{name})", EXPONENTIAL, sign * form(weights, d))
            for name, weights in bounded.items()
            for sign in (1, -1)
        ]
    return families | _distances(x, names, positions)


def _sum(x: Tensor, weights: dict[int, float]) -> Tensor:
    return torch.stack([weight * x[:, i] for i, weight in weights.items()]).sum(0)


def _distances(
    x: Float[Tensor, "n d"], names: Sequence[str], positions: Sequence[int]
) -> dict[str, list[Variable]]:
    """Return functions of the length of the position, and of distances between bodies."""
    vectors: list[tuple[str, list[tuple[int, int | None]]]] = []
    n, d = len(positions), x.shape[1]
    if n in (2, 3) and d == 2 * n:
        vectors.append(("r", [(i, None) for i in positions]))
    for dimension in (1, 2, 3):  # bodies one after the other: x1 y1 x2 y2
        bodies = n // dimension
        if n % dimension or d == 2:
            continue
        for a, b in combinations(range(bodies), 2):
            label = f"r{a + 1}{b + 1}" if dimension > 1 else f"|{names[a]} - {names[b]}|"
            if dimension == 3 and n % 2 == 0:  # the distances in the plane have the plain name
                label += "_3d"
            first, second = a * dimension, b * dimension
            vectors.append((label, [(first + k, second + k) for k in range(dimension)]))
    if d % 2 == 0:  # points in the plane: x1 ... xn, y1 ... yn
        for a, b in combinations(range(d // 2), 2):
            vectors.append((f"d{a + 1}{b + 1}", [(a, b), (d // 2 + a, d // 2 + b)]))
    families: dict[str, list[Variable]] = {}
    for label, pairs in vectors:
        entries = [x[:, i] if j is None else x[:, i] - x[:, j] for i, j in pairs]
        distance = torch.stack(entries).norm(dim=0)
        if float(distance.min()) <= MIN_RELATIVE_DISTANCE * float(distance.mean()):
            continue
        kind = "of points" if label.startswith("d") else ""
        for title, name, function in (
            ("inverse distances", f"1/{label}", INVERSE_ROOT),
            ("inverse squared distances", f"1/{label}^2", INVERSE),
            ("logarithms of distances", f"log {label}", LOGARITHM_OF_ROOT),
        ):
            key = f"{title} {kind}".strip()
            forms = [form({i: 1.0} if j is None else {i: 1.0, j: -1.0}, d) for i, j in pairs]
            families.setdefault(key, []).append(Variable(name, function, torch.cat(forms), True))
    return families
