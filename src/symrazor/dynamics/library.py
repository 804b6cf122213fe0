"""Evaluate products of functions of the state, and their gradients.

A `Library` holds products of variables: coordinates, functions of one number, and functions of the
user. `symrazor.dynamics.libraries` chooses libraries that suit the data.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Scalar:
    """A function of one number, with its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Variable:
    """A function of the state.

    Args:
        name: for formulas.
        function: of a number.
        forms: [k, d], linear forms of the state. The number is the form if there is one and
            `radial` is false, else the sum of their squares.
        radial: whether the forms are squared.
    """

    name: str
    function: Scalar
    forms: Float[Tensor, "k d"]
    radial: bool = False


@dataclass(frozen=True)
class Custom:
    """A user's differentiable function, states [n, d] -> values [n]."""

    name: str
    function: Callable[[Tensor], Tensor]

    def value(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        """Return the values; raise ValueError for another shape."""
        value = self.function(x)
        if value.shape != x.shape[:1]:
            raise ValueError(
                f"Function {self.name!r} must return one number per state: {list(x.shape)} -> "
                f"[{len(x)}], got shape {list(value.shape)}."
            )
        return value

    def slope(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return the gradients."""
        with torch.enable_grad():
            states = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.value(states).sum(), states)
        return slope


@dataclass(frozen=True)
class _Group:
    """Variables with the same function: forms [v, d], or forms [e, d] of the variables `owner`."""

    function: Scalar
    forms: Float[Tensor, "e d"]
    owner: Float[Tensor, "e v"] | None

    def argument(self, x: Tensor) -> Tensor:
        linear = x @ self.forms.mT
        return linear if self.owner is None else linear.square() @ self.owner

    def value(self, x: Tensor) -> Tensor:
        return self.function.value(self.argument(x))

    def pull_back(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of the weighted sum over the variables; weights [n, j, v]."""
        slope = weights * self.function.slope(self.argument(x)).unsqueeze(1)
        if self.owner is None:
            return slope @ self.forms
        linear = 2 * (x @ self.forms.mT).unsqueeze(1)
        return (slope @ self.owner.mT * linear) @ self.forms

    def slopes(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n v d"]:
        """Return the gradients of all variables."""
        slope = self.function.slope(self.argument(x))
        if self.owner is None:
            return slope[:, :, None] * self.forms
        linear = 2 * (x @ self.forms.mT)
        inner = torch.einsum("ev,ne,ed->nvd", self.owner, linear, self.forms)
        return slope[:, :, None] * inner


class Library:
    """m products of variables.

    Values and gradients are matrix products and functions of one number, so that `torch.fx` can
    trace them, unless there are functions of the user.

    Args:
        title: in words.
        coordinates: names of the coordinates, the first d variables.
        variables: further factors of the products.
        terms: each a tuple of indices of variables, repeated for powers.
        own: the user's functions, variables after the others.
    """

    def __init__(
        self,
        title: str,
        coordinates: Sequence[str],
        variables: Sequence[Variable],
        terms: Iterable[Sequence[int]],
        own: Sequence[Custom] = (),
    ) -> None:
        self.title, self.coordinates, self.own = title, list(coordinates), list(own)
        self.variables = list(variables)
        self.terms = list(dict.fromkeys(tuple(sorted(term)) for term in terms))
        # Variables with the same function are evaluated together.
        kinds = list(dict.fromkeys((v.function, v.radial) for v in variables))
        in_order = [
            [k for k, v in enumerate(variables) if (v.function, v.radial) == kind] for kind in kinds
        ]
        self.groups = [_group([variables[k] for k in members]) for members in in_order]
        order = [k for members in in_order for k in members]
        d, others = len(self.coordinates), len(variables)
        places = [*range(d), *(d + order.index(k) for k in range(others))]
        places += range(d + others, d + others + len(self.own))
        self.variable_names = [
            *self.coordinates, *(v.name for v in variables), *(v.name for v in self.own)
        ]  # fmt: skip
        self.degree = max(len(term) for term in self.terms)
        one = len(self.variable_names)
        rows = [[*(places[i] for i in t), *[one] * (self.degree - len(t))] for t in self.terms]
        self.index = torch.tensor(rows).mT
        choose = torch.nn.functional.one_hot(self.index, one + 1).double()  # [degree, m, v + 1]
        self._select, self._chosen = choose.flatten(0, 1).mT.contiguous(), choose

    def __len__(self) -> int:
        return len(self.terms)

    def subset(self, index: Sequence[int]) -> "Library":
        """Return the library of some functions, with the variables that they need."""
        terms = [self.terms[k] for k in index]
        d, others = len(self.coordinates), len(self.variables)
        used = sorted({i for term in terms for i in term if d <= i < d + others})
        own = sorted({i for term in terms for i in term if i >= d + others})
        place = {i: i for i in range(d)} | {i: d + k for k, i in enumerate([*used, *own])}
        return Library(
            self.title,
            self.coordinates,
            [self.variables[i - d] for i in used],
            [tuple(place[i] for i in term) for term in terms],
            [self.own[i - d - others] for i in own],
        )

    def depending_on(self, coordinate: int) -> list[int]:
        """Return the indices of the functions that may change with a coordinate."""
        d, others = len(self.coordinates), len(self.variables)
        varying = {coordinate, *range(d + others, d + others + len(self.own))}
        for k, variable in enumerate(self.variables, d):
            if bool((variable.forms[:, coordinate] != 0).any()):
                varying.add(k)
        return [k for k, term in enumerate(self.terms) if not varying.isdisjoint(term)]

    @property
    def names(self) -> list[str]:
        """Names of the functions, such as "q1^2 p2"."""
        return [_product_name([self.variable_names[i] for i in term]) for term in self.terms]

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m"]:
        """Return the values of all functions."""
        values = _product(self._factors(x))
        assert values is not None
        return values

    def gradients(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n m d"]:
        """Return the gradients of all functions, by the product rule."""
        n, d = x.shape
        slopes = [group.slopes(x) for group in self.groups]
        slopes += [function.slope(x).unsqueeze(1) for function in self.own]
        by_variable = torch.cat([*slopes, x.new_zeros(n, 1, d)], 1)
        factors = self._factors(x)
        total = x.new_zeros(n, len(self), d)
        for k, variable in enumerate(self.index):
            cofactor = _product(factors, k)
            cofactor = torch.ones_like(factors[0]) if cofactor is None else cofactor
            # The gradient of a coordinate has one entry.
            rows = (variable < d).nonzero()[:, 0]
            total[:, rows, variable[rows]] += cofactor[:, rows]
            rows = (variable >= d).nonzero()[:, 0]
            total[:, rows] += cofactor[:, rows, None] * by_variable[:, variable[rows] - d]
        return total

    def combined_gradients(
        self, x: Float[Tensor, "n d"], coefficients: Float[Tensor, "m j"]
    ) -> Float[Tensor, "n j d"]:
        """Return the gradients of j combinations."""
        j, variables = coefficients.shape[1], self._chosen.shape[2]
        factors = self._factors(x)
        total = None
        for k in range(self.degree):
            weights = torch.einsum("mv,mj->mjv", self._chosen[k], coefficients).flatten(1)
            cofactor = _product(factors, k)
            part = weights.sum(0, keepdim=True) if cofactor is None else cofactor @ weights
            total = part if total is None else total + part
        assert total is not None
        return self._pull_back(x, total.unflatten(1, (j, variables)))

    def weighted_gradient(
        self, x: Float[Tensor, "n d"], weights: Float[Tensor, "#n m"]
    ) -> Float[Tensor, "n d"]:
        """Return the gradient of one combination, whose coefficients may depend on the state."""
        factors = self._factors(x)
        total = None
        for k in range(self.degree):
            cofactor = _product(factors, k)
            part = (weights if cofactor is None else cofactor * weights) @ self._chosen[k]
            total = part if total is None else total + part
        assert total is not None
        return self._pull_back(x, total.unsqueeze(1)).squeeze(1)

    def _pull_back(
        self, x: Float[Tensor, "n d"], by_variable: Float[Tensor, "#n j v"]
    ) -> Float[Tensor, "n j d"]:
        """Return gradients in the state from those in the variables."""
        start = len(self.coordinates)
        gradient = by_variable[:, :, :start]
        for group in self.groups:
            end = start + _width(group)
            gradient = gradient + group.pull_back(x, by_variable[:, :, start:end])
            start = end
        for number, function in enumerate(self.own, start):
            gradient = gradient + by_variable[:, :, number, None] * function.slope(x)[:, None]
        return gradient + 0 * x.unsqueeze(1)  # one row per state, also for linear functions

    def _factors(self, x: Float[Tensor, "n d"]) -> Sequence[Float[Tensor, "n m"]]:
        """Return the k-th factor of all functions for each k."""
        values = [x, *(group.value(x) for group in self.groups)]
        values += [function.value(x).unsqueeze(1) for function in self.own]
        values.append(0 * x[:, :1] + 1)
        stacked = torch.cat(values, 1) @ self._select
        factors: Sequence[Tensor] = stacked.chunk(self.degree, 1)
        return [factors[k] for k in range(self.degree)]


def _product(factors: Sequence[Tensor], without: int | None = None) -> Tensor | None:
    """Return the product of all factors but one; None if there is no factor."""
    result = None
    for k, factor in enumerate(factors):
        if k != without:
            result = factor if result is None else result * factor
    return result


def _group(members: Sequence[Variable]) -> _Group:
    forms, first = torch.cat([variable.forms for variable in members]), members[0]
    if not first.radial:
        return _Group(first.function, forms, None)
    counts = torch.tensor([len(variable.forms) for variable in members])
    owner = torch.arange(len(members)).repeat_interleave(counts)
    return _Group(first.function, forms, torch.nn.functional.one_hot(owner).double())


def _width(group: _Group) -> int:
    return len(group.forms) if group.owner is None else group.owner.shape[1]


def _product_name(factors: Sequence[str]) -> str:
    parts = []
    for name in dict.fromkeys(factors):
        power = factors.count(name)
        parts.append(name if power == 1 else f"{name}^{power}")
    return " ".join(parts)
