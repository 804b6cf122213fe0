"""Conserved quantities that were found in trajectories, with the results of their tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxtyping import Bool, Float
from torch import Tensor

from symrazor.dynamics.library import Library
from symrazor.dynamics.noise import NoiseEstimate
from symrazor.dynamics.simulators import Choice
from symrazor.dynamics.symplectic import Structure

MAX_NOISE = 5.0
"""Noise variance in a quantity, relative to its variance, above which it cannot be seen to vary."""
MIN_TERM, MAX_TERMS = 0.02, 8
"""Terms of a formula: their smallest contribution relative to the largest one, and their number."""


@dataclass(frozen=True)
class Quantity:
    """A combination of functions of the state, with the result of its test.

    Args:
        library: the functions.
        coefficients: [m]; the largest contribution has coefficient 1.
        errors: [m], their standard errors (jackknife over the folds).
        p_value: probability of a larger variation if the quantity is conserved.
        variation: estimated fraction of its variance within trajectories, without noise.
        limit: upper confidence limit of this fraction.
        noise: noise variance in the quantity, relative to its variance.
        spread: [m], standard deviation of each function over the data.
        simple: a formula with simple coefficients that the data cannot tell from the estimate.
        name: "energy" if it generates the motion.
    """

    library: Library
    coefficients: Float[Tensor, "m"]
    errors: Float[Tensor, "m"]
    p_value: float
    variation: float
    limit: float
    noise: float
    spread: Float[Tensor, "m"]
    simple: "Simple | None" = None
    name: str = ""

    @property
    def varies(self) -> bool:
        """Whether it differs between states by more than noise explains."""
        return 0 <= self.noise < MAX_NOISE

    @property
    def terms(self) -> int:
        """Number of terms that contribute."""
        return int(_contributing(self.coefficients, self.spread).sum())

    @property
    def formula(self) -> str:
        """The largest terms, such as "q^2 + 0.667 p^2"."""
        return format_terms(self.coefficients, self.library.names, self.spread)

    @property
    def estimate(self) -> str:
        """The formula with standard errors in parentheses, such as "0.501(2) p^2"."""
        return format_terms(self.coefficients, self.library.names, self.spread, self.errors)

    @property
    def shortest(self) -> str:
        """The simple formula if there is one, else the estimated one."""
        return self.formula if self.simple is None else self.simple.formula

    @cached_property
    def nonzero(self) -> tuple[Library, Float[Tensor, "k"]]:
        """The functions with nonzero coefficients, and these coefficients."""
        used = self.coefficients.nonzero()[:, 0]
        return self.library.subset(used.tolist()), self.coefficients[used]

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        """Return the values of the quantity."""
        library, coefficients = self.nonzero
        return library(x) @ coefficients

    def gradient(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return its gradients."""
        library, coefficients = self.nonzero
        return library.combined_gradients(x, coefficients[:, None])[:, 0]


@dataclass(frozen=True)
class Simple:
    """A quantity with simple coefficients, and the p-value of its test."""

    coefficients: Float[Tensor, "m"]
    formula: str
    p_value: float


def format_terms(
    coefficients: Float[Tensor, "m"],
    names: Sequence[str],
    spread: Float[Tensor, "m"],
    errors: Float[Tensor, "m"] | None = None,
) -> str:
    """Return the terms by their contribution to the variance, the largest first."""
    size, used = (coefficients * spread).abs(), _contributing(coefficients, spread)
    order = [int(k) for k in size.argsort(descending=True) if used[k]]
    first = next((k for k in order[:MAX_TERMS] if coefficients[k] > 0), None)
    if first is not None:  # no minus sign in front
        order.remove(first)
        order.insert(0, first)
    parts = []
    for k in order[:MAX_TERMS]:
        c = float(coefficients[k])
        if errors is not None and float(errors[k]) > 0:
            number = f"{with_error(abs(c), float(errors[k]))} "
        else:
            number = f"{abs(c):.3g} ".removeprefix("1 ")
        parts.append(f"{'-' if c < 0 else '+'} {number}{names[k]}")
    if len(order) > MAX_TERMS:
        parts.append(f"+ ... ({len(order) - MAX_TERMS} more terms)")
    return " ".join(parts).removeprefix("+ ")


def _contributing(
    coefficients: Float[Tensor, "m"], spread: Float[Tensor, "m"]
) -> Bool[Tensor, "m"]:
    """Return which terms contribute, relative to the largest one."""
    size = (coefficients * spread).abs()
    return size > MIN_TERM * size.max()


def with_error(value: float, error: float) -> str:
    """Return a number with its standard error in units of the last digit, such as "0.501(2)"."""
    digits = max(0, -math.floor(math.log10(error)))
    last = round(error * 10**digits)
    return f"{value:.{digits}f}({last})" if digits <= 12 else f"{value:.6g}"


@dataclass
class Findings:
    """Result of `find_conserved`.

    Args:
        quantities: functionally independent conserved quantities.
        functions: further conserved quantities, which are functions of these; quadratic functions
            of them, such as squares and products, are left out.
        undecided: combinations that may be conserved; the data cannot tell.
        relations: functions with the same value in all states, such as q^2 for a direction q.
        libraries: titles of the libraries that were searched.
        skipped: libraries that were not searched, and equations that were not confirmed, with the
            reason.
        noise: of the states.
        fields: fitted vector fields.
        structure: masses or symplectic form of coordinates that are not canonical.
        names: of the coordinates.
    """

    quantities: list[Quantity] = field(default_factory=list)
    functions: list[Quantity] = field(default_factory=list)
    undecided: list[Quantity] = field(default_factory=list)
    relations: list[Quantity] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    noise: NoiseEstimate | None = None
    fields: Choice = field(default_factory=Choice)
    structure: Structure | None = None
    names: list[str] = field(default_factory=list)

    @property
    def is_decided(self) -> bool:
        """Whether it is known for every combination of the libraries if it is conserved."""
        return not self.undecided and not self.skipped

    @property
    def all(self) -> list[Quantity]:
        """All conserved quantities, dependent ones included."""
        return [*self.quantities, *self.functions]
