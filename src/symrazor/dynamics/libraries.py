"""Libraries of functions of the state in which conserved quantities are sought.

A `Library` holds products of variables. Variables are the coordinates and functions of them: sines
and cosines, powers, logarithms, exponentials and inverse distances. `libraries_for` lists libraries
from simple to rich, so that a quantity is found in its simplest form.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

MAX_FUNCTIONS = 320
"""Functions in a library, at most; larger ones take long and need many states."""
MAX_RADIANS = 40.0
"""Coordinates beyond this size are not taken for angles."""
MIN_RADIANS = 0.5
"""Nor are coordinates that stay below this size: sines of small angles are linear."""
MAX_EXPONENT = 12.0
"""Arguments of exponentials are at most this large."""
MIN_RELATIVE_DISTANCE = 0.03
"""Smallest distance, relative to its mean, for which its inverse is offered: noise ruins others."""


@dataclass(frozen=True)
class Variable:
    """A function of the state and its gradient.

    Args:
        name: for formulas.
        function: states [n, d] -> values [n] and gradients [n, d].
    """

    name: str
    function: Callable[[Tensor], tuple[Tensor, Tensor]]


class Library:
    """m products of variables.

    Args:
        title: in words.
        variables: factors of the products.
        terms: each a tuple of indices of variables, repeated for powers.
    """

    def __init__(
        self, title: str, variables: Sequence[Variable], terms: Iterable[Sequence[int]]
    ) -> None:
        self.title, self.variables = title, list(variables)
        self.terms = list(dict.fromkeys(tuple(sorted(term)) for term in terms))
        self.degree = max(len(term) for term in self.terms)
        one = len(self.variables)
        rows = [[*term, *[one] * (self.degree - len(term))] for term in self.terms]
        self.index = torch.tensor(rows).mT

    def __len__(self) -> int:
        return len(self.terms)

    @property
    def names(self) -> list[str]:
        """Names of the functions, such as "q1^2 p2"."""
        return [_product_name([self.variables[i].name for i in term]) for term in self.terms]

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """Return the values of all functions."""
        factors = self._variables(x)[0][:, self.index]
        values: Tensor = factors.prod(1)
        return values

    def gradients(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m d"]:
        """Return the gradients of all functions, by the product rule."""
        values, slopes = self._variables(x)
        total = x.new_zeros(len(x), len(self), x.shape[1])
        for k in range(self.degree):
            total += self._cofactors(values, k)[..., None] * slopes[:, self.index[k]]
        return total

    def combined_gradients(
        self, x: Float[Tensor, "n d"], coefficients: Float[Tensor, "m j"]
    ) -> Float[Tensor, "n j d"]:
        """Return the gradients of j combinations, faster than from `gradients`."""
        values, slopes = self._variables(x)
        m, j = coefficients.shape
        by_variable = x.new_zeros(len(x), slopes.shape[1] * j)
        for k in range(self.degree):
            weights = x.new_zeros(m, slopes.shape[1], j)
            weights[torch.arange(m), self.index[k]] = coefficients
            by_variable += self._cofactors(values, k) @ weights.flatten(1)
        return torch.einsum("nvj,nvd->njd", by_variable.unflatten(1, (-1, j)), slopes)

    def _cofactors(self, values: Tensor, k: int) -> Float[Tensor, "n m"]:
        """Return the products of all factors but the k-th."""
        others = [values[:, self.index[j]] for j in range(self.degree) if j != k]
        return torch.stack(others).prod(0) if others else values.new_ones(len(values), len(self))

    def _variables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [n, v + 1] and gradients [n, v + 1, d]; the last variable is 1."""
        results = [variable.function(x) for variable in self.variables]
        values = torch.stack([*(value for value, _ in results), torch.ones_like(x[:, 0])], 1)
        slopes = torch.stack([*(slope for _, slope in results), torch.zeros_like(x)], 1)
        return values, slopes


def _product_name(factors: Sequence[str]) -> str:
    parts = []
    for name in dict.fromkeys(factors):
        power = factors.count(name)
        parts.append(name if power == 1 else f"{name}^{power}")
    return " ".join(parts)


# --------------------------------------------------------------------------------------- variables


def coordinate(name: str, i: int) -> Variable:
    """Return a coordinate."""
    return elementary(name, {i: 1.0}, lambda u: (u, torch.ones_like(u)))


def elementary(
    name: str, weights: dict[int, float], function: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Variable:
    """Return a function, given with its derivative, of a weighted sum of coordinates."""

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        direction = x.new_zeros(x.shape[1])
        for i, weight in weights.items():
            direction[i] = weight
        value, slope = function(x @ direction)
        return value, slope[:, None] * direction

    return Variable(name, evaluate)


def radial(
    name: str, pairs: Sequence[tuple[int, int | None]], function: Callable[[Tensor], Any]
) -> Variable:
    """Return a function, given with its derivative, of the squared length of a vector.

    The entries of the vector are coordinates i, or differences of coordinates i and j.
    """

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        entries = [x[:, i] if j is None else x[:, i] - x[:, j] for i, j in pairs]
        value, slope = function(torch.stack(entries).square().sum(0))
        gradient = torch.zeros_like(x)
        for (i, j), entry in zip(pairs, entries, strict=True):
            gradient[:, i] += 2 * slope * entry
            if j is not None:
                gradient[:, j] -= 2 * slope * entry
        return value, gradient

    return Variable(name, evaluate)


def custom(name: str, function: Callable[[Tensor], Tensor]) -> Variable:
    """Return a user's differentiable function, states [n, d] -> values [n]."""

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            states = x.detach().requires_grad_()
            value = function(states)
            if value.shape != x.shape[:1]:
                raise ValueError(
                    f"Function {name!r} must return one number per state: {list(x.shape)} -> "
                    f"[{len(x)}], got shape {list(value.shape)}."
                )
            (slope,) = torch.autograd.grad(value.sum(), states)
        return value.detach(), slope

    return Variable(name, evaluate)


def _sin(u: Tensor) -> tuple[Tensor, Tensor]:
    return u.sin(), u.cos()


def _cos(u: Tensor) -> tuple[Tensor, Tensor]:
    return u.cos(), -u.sin()


def _log(u: Tensor) -> tuple[Tensor, Tensor]:
    positive = u.clamp_min(1e-300)
    return positive.log(), 1 / positive


def _exp(u: Tensor) -> tuple[Tensor, Tensor]:
    value = u.clamp_max(2 * MAX_EXPONENT).exp()
    return value, value


def _inverse_root(u: Tensor) -> tuple[Tensor, Tensor]:
    value = u.clamp_min(1e-300).rsqrt()
    return value, -0.5 * value**3


def _inverse(u: Tensor) -> tuple[Tensor, Tensor]:
    value = 1 / u.clamp_min(1e-300)
    return value, -value.square()


def _power(exponent: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda u: (u**exponent, exponent * u ** (exponent - 1))


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
    base = [coordinate(name, i) for i, name in enumerate(names)]
    own = [custom(name, function) for name, function in (functions or {}).items()]
    own_terms = [(d + k,) for k in range(len(own))]
    libraries = []

    def add(title: str, extra: Sequence[Variable], terms: Iterable[Sequence[int]]) -> None:
        library = Library(title, [*base, *own, *extra], [*terms, *own_terms])
        if len(library) <= limit:
            libraries.append(library)

    first = d + len(own)
    for degree, title in ((1, "linear"), (2, "quadratic")):
        add(f"{title} functions", [], polynomials(d, degree))
    families = potentials(x, names)
    for title, extra in families.items():
        new = range(first, first + len(extra))
        add(f"quadratic functions and {title}", extra, [*polynomials(d, 2), *((k,) for k in new)])
    add("cubic functions", [], polynomials(d, 3))
    for title, extra in families.items():
        new = range(first, first + len(extra))
        if title == "sines and cosines":
            trigonometric = [(k,) for k in new] + [*combinations(new, 2)]
            factors = [(), *polynomials(d, 2)]
            terms = [(*f, *t) for f, t in product(factors, trigonometric)]
            add(f"products of quadratic functions and {title}", extra, [*polynomials(d, 2), *terms])
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
            elementary(f"{label} {names[i]}", {i: 1.0}, function)
            for i in angles
            for label, function in (("sin", _sin), ("cos", _cos))
        ]
    pairs = list(combinations(positions, 2)) if d > 2 else []
    differences = {f"({names[i]} - {names[j]})": {i: 1.0, j: -1.0} for i, j in pairs}
    single = {names[i]: {i: 1.0} for i in positions}
    families["powers"] = [
        elementary(f"{name}^{k}", weights, _power(k))
        for name, weights in (single | differences).items()
        for k in (3, 4)
    ]
    positive = [i for i in range(d) if float(x[:, i].min()) > 0]
    if positive:
        families["logarithms"] = [elementary(f"log {names[i]}", {i: 1.0}, _log) for i in positive]
    bounded = {
        name: weights
        for name, weights in (differences or single).items()
        if float(_sum(x, weights).abs().max()) < MAX_EXPONENT
    }
    if bounded and d <= 8:
        families["exponentials"] = [
            elementary(
                f"exp({'-' if sign < 0 else ''}{name})",
                {i: sign * weight for i, weight in weights.items()},
                _exp,
            )
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
            ("inverse distances", f"1/{label}", _inverse_root),
            ("inverse squared distances", f"1/{label}^2", _inverse),
            ("logarithms of distances", f"log {label}", _log),
        ):
            key = f"{title} {kind}".strip()
            families.setdefault(key, []).append(radial(name, pairs, function))
    return families
