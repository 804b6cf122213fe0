"""Define tasks with a known answer, the problems drawn from them, and the answers of methods."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from symrazor.bench.truth.networks import Architecture
from symrazor.data import Tensors, cifar10, digits, fashion_mnist, mnist
from symrazor.groups import Group

Half = Literal["develop", "report"]
Kind = Literal["image", "volume", "series", "set", "vector", "trajectory"]
Split = Literal["train", "test"]
Fact = bool | int
"""Whether a symmetry holds, or a number of conserved quantities."""
Status = Literal["estimated", "no evidence", "not tested"]
N_TEST = 1000
OFFICIAL = {"mnist": mnist, "fashion-mnist": fashion_mnist, "cifar-10": cifar10}
"""Data sets that are not part of the package."""
Sample = Callable[..., tuple[Tensor, Tensor | None]]
Architectures = Callable[["Shape"], Mapping[str, Architecture]]


@dataclass(frozen=True)
class Claim:
    """One stated answer.

    Args:
        name: symmetry: "translation", "permutation", the name of a group, "linear", or "conserved
            quantities".
        holds: the answer; None if undecided.
        probability: probability of the stated answer, or of the leading one if undecided.
        margin: nats in favour of the answer; NaN if the method has none.
        standard_error: standard error of the margin.
    """

    name: str
    holds: Fact | None
    probability: float = 0.5
    margin: float = float("nan")
    standard_error: float = float("nan")


@dataclass(frozen=True)
class Range:
    """An estimated range of a transformation that leaves labels unchanged.

    Args:
        estimate: largest angle in degrees, shift in pixels or scale factor; probability of a flip.
        low: lower end of the interval of the estimate.
        high: upper end of the interval.
        status: whether there is an estimate, and why not.
    """

    estimate: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    status: Status = "estimated"


@dataclass(frozen=True)
class Normal:
    """Normal predictions: a mean for each input, and a common or individual deviation."""

    mean: Float[Tensor, " n"]
    deviation: Float[Tensor, "..."]


Prediction = Float[Tensor, "n classes"] | Normal
"""Log probabilities of the classes, or normal distributions of the targets."""


@dataclass(frozen=True)
class Answer:
    """The answer of a method to a task.

    Args:
        claims: stated answers. Claims that the task does not ask about are not scored.
        ranges: transformation -> estimated range.
        prediction: for the test inputs; None if the method predicts nothing.
    """

    claims: tuple[Claim, ...] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Shape:
    """What architectures depend on: the shape of one input, the number of outputs, and groups."""

    inputs: tuple[int, ...]
    outputs: int
    groups: tuple[str | Group, ...] = ()


@dataclass(frozen=True)
class Problem:
    """The data of one task and seed, and how to ask about them.

    Args:
        x: training inputs.
        y: training labels: integers for classes, float32 for regression; None for trajectories.
        test_x: test inputs.
        test_y: test labels, which only an oracle may use.
        kind: kind of the inputs, as an option of `discover`.
        groups: groups to ask about, as an option of `discover`; None for the default of the kind.
        times: times of trajectories.
        architectures: name -> network, for methods that choose between fixed architectures.
        seed: seed of the data, and of the method.
    """

    x: Tensor
    y: Tensor | None
    test_x: Tensor
    test_y: Tensor | None
    kind: Kind
    groups: tuple[str | Group, ...] | None = None
    times: Tensor | None = None
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_regression(self) -> bool:
        """Whether labels are real numbers."""
        return self.y is not None and self.y.is_floating_point()

    @property
    def labelled(self) -> Tensors:
        """Training inputs and labels."""
        if self.y is None:
            raise ValueError("Trajectories have no labels.")
        return self.x, self.y


@dataclass(frozen=True)
class Draw:
    """Source of random numbers and real data for one split of a problem.

    Args:
        n: number of samples to draw.
        split: training or test data. Real data of the two splits are disjoint.
        generator: source of the samples.
        seed: seed of everything that both splits share, such as a hidden basis.
        data: folder with official data sets, in subfolders or not.
    """

    n: int
    split: Split
    generator: torch.Generator
    seed: int
    data: Path | None = None

    def shared(self) -> torch.Generator:
        """Return a new generator with the same numbers for both splits."""
        return torch.Generator().manual_seed(self.seed)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers uniform on [0, 1)."""
        return torch.rand(self.n, *shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(self.n, *shape, generator=self.generator)

    def integers(self, count: int, *shape: int) -> Int64[Tensor, "n *shape"]:
        """Draw integers below `count`."""
        return torch.randint(count, (self.n, *shape), generator=self.generator)

    def digits(self, *classes: int) -> Tensors:
        """Draw embedded digits of some classes (all by default), labelled by their index."""
        return self._chosen(*digits(self.split), classes or tuple(range(10)))

    def official(self, name: str, *classes: int) -> Tensors:
        """Draw images of an official data set, labelled by the index of their class.

        Raises:
            ValueError: there is no data folder.
        """
        if self.data is None:
            raise ValueError(f"No data. Use --data DIR with the files of {name}.")
        x, y = OFFICIAL[name](self.data, self.split)
        return self._chosen(x, y, classes or tuple(range(10)))

    def _chosen(self, x: Tensor, y: Tensor, classes: tuple[int, ...]) -> Tensors:
        """Return n random samples; samples repeat only if there are too few."""
        members = torch.isin(y, torch.tensor(classes)).nonzero().flatten()
        repeats = -(-self.n // len(members))
        orders = [torch.randperm(len(members), generator=self.generator) for _ in range(repeats)]
        index = members[torch.cat(orders)[: self.n]]
        labels = torch.full((10,), -1)
        labels[list(classes)] = torch.arange(len(classes))
        return x[index], labels[y[index]]


@dataclass(frozen=True)
class Task:
    """A data set whose symmetry is known.

    Args:
        name: of the task.
        half: "develop" may be used to adjust a method; "report" must not influence it.
        kind: kind of the inputs.
        sample: draws inputs and labels; its docstring says why the answer is known.
        claims: known answers by name.
        ranges: known ranges by transformation, in the units of `Range`.
        architectures: returns the fixed architectures. Every one states what it assumes.
        oracle: name of the architecture with the known answer built in.
        groups: returns the groups to ask about, from the seed of the problem.
        n: number of training data.
        n_test: number of test data.
        knobs: keyword arguments of `sample`, such as `noise`.
        needs: official data set that the task needs; "" for none.
    """

    name: str
    half: Half
    kind: Kind
    sample: Sample
    claims: Mapping[str, Fact] = field(default_factory=dict)
    ranges: Mapping[str, float] = field(default_factory=dict)
    architectures: Architectures | None = None
    oracle: str = ""
    groups: Callable[[int], tuple[str | Group, ...]] | None = None
    n: int = 1000
    n_test: int = N_TEST
    knobs: Mapping[str, float] = field(default_factory=dict)
    needs: str = ""

    @property
    def reason(self) -> str:
        """Why the answer is known."""
        return " ".join((self.sample.__doc__ or "").split())

    def change(self, n: int | None = None, **knobs: float) -> "Task":
        """Return a copy with another amount of training data, or with other knobs."""
        return replace(self, n=n or self.n, knobs={**self.knobs, **knobs})

    def make(self, seed: int, data: Path | None = None) -> Problem:
        """Return the problem of a seed.

        Args:
            seed: of the data. The same seed gives the same problem on every machine.
            data: folder with official data sets, for tasks that need one.
        """
        # Tasks must not share random numbers: digits in one place would be digits in another.
        key = f"{self.name} {seed}".encode()
        shared = int.from_bytes(hashlib.sha256(key).digest()[:6], "big")
        splits: list[tuple[Tensor, Tensor | None]] = []
        for offset, (split, count) in enumerate((("train", self.n), ("test", self.n_test)), 1):
            generator = torch.Generator().manual_seed(shared + offset)
            draw = Draw(count, split, generator, shared, data)  # type: ignore[arg-type]
            splits.append(self.sample(draw, **self.knobs))
        (x, y), (test_x, test_y) = splits
        groups = None if self.groups is None else self.groups(shared)
        architectures: Mapping[str, Architecture] = {}
        if self.architectures is not None and y is not None:
            outputs = 1 if y.is_floating_point() else int(y.max()) + 1
            architectures = self.architectures(Shape(tuple(x.shape[1:]), outputs, groups or ()))
        times = None
        if self.kind == "trajectory":
            times, y, test_y = y, None, None
        return Problem(x, y, test_x, test_y, self.kind, groups, times, architectures, seed)
