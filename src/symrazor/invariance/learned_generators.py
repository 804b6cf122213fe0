r"""Learn which linear flows leave labels unchanged, when nobody has listed them.

A matrix G moves an input x by $\exp(t\,G)\,x$. The label $y = f(x)$ is unchanged if

$$ \frac{d}{dt} f(e^{tG} x) = \nabla f(x)^\top G x = 0 \quad \text{for all } x , $$

and a map f is equivariant if $\nabla f(x)\, G x = G f(x)$. Both conditions are linear in G. With
the residual written as $R_n \,\mathrm{vec}\, G$, the generators are the directions in which

$$ C = \frac1N \sum_n R_n^\top R_n $$

vanishes. f is estimated by several small networks, each trained on a random half of the data. Their
mean gives C; their disagreement gives the part of C that is an error of the networks, which is
subtracted. An eigenvector of C is compared with that error, and with an average direction:

| the label changes along G by | decision |
|---|---|
| less than `MAX_CHANGE` of an average direction, errors included | generator |
| more than that, errors subtracted | not a symmetry |
| neither | undecided |

Exact symmetries close under commutators. Learned ones that do not are undecided, too.
Generators move inputs by one unit on average: $\mathrm{E}\,|G x|^2 = 1$. If they are, within the
errors, a rotation of two coordinates, a boost, a scaling or a shear, the exact matrix replaces the
learned one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.core.validation import join_names
from symrazor.groups.lie import LOG_FACTOR, RADIANS, LieAlgebra

MEMBERS, HIDDEN = 4, 64
"""Networks that estimate f, and their hidden units."""
STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 2000, 128, 5e-3, 1e-4
HELD_OUT_SHARE, MAX_HELD_OUT, MIN_INPUTS = 0.2, 500, 200
"""Share and largest number of inputs at which derivatives are taken, and fewest inputs in all."""
MAX_CHANGE = 0.02
"""Largest mean squared change of the label, as a share of that along an average direction."""
MIN_EXTENT = 1e-6
"""Share of the second moments below which inputs have no extent in a direction."""
ROUNDING, MAX_CLOSURE_ERROR = 0.1, 0.3
"""Largest distance of a matrix of norm 1 from the span that contains it, and largest share of the
commutators outside of the span."""


@dataclass(frozen=True)
class LearnedGenerators:
    """Linear flows that leave labels unchanged, or with which a map is equivariant.

    Args:
        algebra: the generators, with names where they match known ones.
        changes: mean squared change of the label along each, as a share of that along an average
            direction; an upper bound.
        undecided: number of further directions for which the data do not decide.
        dimensions: number of independent matrices that were compared.
        is_equivariant: whether the generators also act on the targets.
        unexplained: share of the variance of held-out targets that the networks do not predict.
    """

    algebra: LieAlgebra
    changes: tuple[float, ...]
    undecided: int
    dimensions: int
    is_equivariant: bool
    unexplained: float

    @property
    def generators(self) -> Float[Tensor, "k d d"]:
        """Return the matrices."""
        return self.algebra.generators

    @property
    def verdict(self) -> str:
        """The generators in words."""
        opening = (
            "The map is equivariant under" if self.is_equivariant else "Labels are unchanged by"
        )
        parts = []
        if self.algebra.dim:
            parts.append(f"{opening} {join_names(list(self.algebra.names))}.")
        elif not self.undecided:
            parts.append(f"No linear flow: none of {self.dimensions} directions is a symmetry.")
        if self.undecided:
            parts.append(
                f"Undecided for {self.undecided} of {self.dimensions} directions: the networks are "
                f"not accurate enough. Use more data, or more `steps`."
            )
        return " ".join(parts)


def learn_generators(
    x: Float[Tensor, "n ..."],
    y: Tensor,
    is_equivariant: bool = False,
    seed: int = 0,
    steps: int = STEPS,
) -> LearnedGenerators:
    """Learn all matrices whose flows leave the labels of vectors or point clouds unchanged.

    Args:
        x: vectors [n, d], or point clouds [n, points, d], of which all points move by one matrix.
        y: classes [n], or targets [n] or [n, k].
        is_equivariant: ask for flows that act on the targets, of the shape of x or with another
            number of points, in the same way.
        seed: of all random numbers.
        steps: training steps of the networks.
    """
    points = checked_points(x, y)
    if is_equivariant:
        y = (y if y.dim() == 3 else y.unsqueeze(1)).float()
        if y.dim() != 3 or y.shape[2] != points.shape[2]:
            raise ValueError(
                f"Targets must be vectors of {points.shape[2]} numbers, got {list(y.shape[1:])}."
            )
    basis = _extent(points)
    points = points @ basis
    y = y @ basis if is_equivariant else y
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        networks = LabelNetworks(points, y, is_equivariant)
        networks.train(steps)
    change, error, unexplained = networks.changes()
    size = points.shape[2]
    moments = torch.einsum("npi,npj->ij", points, points).double() / len(points)
    metric = torch.kron(torch.eye(size, dtype=torch.float64), moments)
    values, directions = _eigenvectors(change, metric)
    typical = float(values.mean().clamp(min=1e-30))
    errors = torch.einsum("ij,ik,kj->j", directions, error, directions)
    is_null = values + errors <= MAX_CHANGE * typical
    is_broken = values - errors > MAX_CHANGE * typical
    learned = directions[:, is_null].T.unflatten(1, (size, size))
    algebra = _named(basis.double() @ learned @ basis.double().T)
    upper = ((values + errors)[is_null] / typical).clamp(min=0).tolist()
    undecided = int((~is_null & ~is_broken).sum())
    if closure_error(algebra) > MAX_CLOSURE_ERROR:
        algebra, upper, undecided = algebra.masked(()), [], undecided + algebra.dim
    return LearnedGenerators(algebra, tuple(upper), undecided, size**2, is_equivariant, unexplained)


def checked_points(x: Tensor, y: Tensor) -> Float[Tensor, "n p d"]:
    """Return inputs as point clouds; raise ValueError for another shape, or too few of them."""
    if x.dim() not in (2, 3) or not x.is_floating_point() or len(x) != len(y):
        raise ValueError(
            f"x must be vectors [n, d] or point clouds [n, points, d] with as many labels, got "
            f"{list(x.shape)} of {x.dtype} and {len(y)} labels."
        )
    if len(x) < MIN_INPUTS:
        raise ValueError(f"Generators and orders need at least {MIN_INPUTS} inputs, got {len(x)}.")
    return (x if x.dim() == 3 else x.unsqueeze(1)).float()


def closure_error(algebra: LieAlgebra) -> float:
    """Return the share of the commutators that is outside of the span; 0 for a Lie algebra."""
    A = algebra.generators
    brackets = algebra.bracket(A[:, None], A[None])
    size = float(brackets.norm())
    if size <= ROUNDING * float(A.norm()) ** 2:  # commutative, up to errors of the generators
        return 0.0
    return float(algebra.coordinates(brackets)[1].norm()) / size


def _extent(points: Float[Tensor, "n p d"]) -> Float[Tensor, "d e"]:
    """Return an orthonormal basis of the span of all points: the identity if it is everything."""
    moments = torch.einsum("npi,npj->ij", points, points)
    values, vectors = torch.linalg.eigh(moments)
    is_occupied = values > MIN_EXTENT * values.max()
    return torch.eye(len(values)) if bool(is_occupied.all()) else vectors[:, is_occupied]


def _eigenvectors(change: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return ascending eigenvalues and eigenvectors g of `change`, with g' metric g = 1."""
    root = torch.linalg.inv(torch.linalg.cholesky(metric))
    values, vectors = torch.linalg.eigh(root @ change @ root.T)
    return values, root.T @ vectors


class LabelNetworks:
    """Small networks with two hidden layers, side by side, each trained on half of the inputs.

    Of targets that are numbers, the networks learn what a linear map does not predict.
    """

    def __init__(self, x: Float[Tensor, "n p d"], y: Tensor, is_equivariant: bool) -> None:
        self.x, self.y, self.is_equivariant = x, y, is_equivariant
        self.classes = 0 if y.is_floating_point() else int(y.max()) + 1
        n = len(x)
        count = min(MAX_HELD_OUT, int(HELD_OUT_SHARE * n))
        order = torch.randperm(n)
        self.held_out, train = order[:count], order[count:]
        self.halves = torch.stack(
            [train[torch.randperm(len(train))[: len(train) // 2]] for _ in range(MEMBERS)]
        )
        flat = x.flatten(1)
        self.mean, self.deviation = flat.mean(0), flat.std(0).clamp(min=1e-12)
        if not self.classes:
            target = y.flatten(1) if y.dim() > 1 else y.unsqueeze(1)
            self.y_mean, self.y_deviation = target.mean(0), target.std().clamp(min=1e-12)
            self.target = (target - self.y_mean) / self.y_deviation
            inputs = (flat[train] - self.mean) / self.deviation
            self.linear = torch.linalg.pinv(inputs) @ self.target[train]
            self.rest = (self.target[train] - inputs @ self.linear).std().clamp(min=1e-6)
        outputs = self.classes or self.target.shape[1]
        sizes = [flat.shape[1], HIDDEN, HIDDEN, outputs]
        self.weights = [
            (torch.randn(MEMBERS, a, b) / math.sqrt(a)).requires_grad_() for a, b in pairwise(sizes)
        ]
        self.biases = [torch.zeros(MEMBERS, 1, b, requires_grad=True) for b in sizes[1:]]

    def __call__(self, x: Float[Tensor, "m n i"]) -> Float[Tensor, "m n o"]:
        """Return the standardised targets or logits that each network predicts for its inputs."""
        h = standard = (x - self.mean) / self.deviation
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            h = F.silu(torch.baddbmm(bias, h, weight))
        output = torch.baddbmm(self.biases[-1], h, self.weights[-1])
        return output if self.classes else standard @ self.linear + self.rest * output

    def predict(self, x: Float[Tensor, "m n i"]) -> Float[Tensor, "m n o"]:
        """Return the standardised targets or probabilities that each network predicts."""
        output = self(x)
        return output.softmax(2) if self.classes else output

    def train(self, steps: int) -> None:
        """Train all networks."""
        parameters = [*self.weights, *self.biases]
        optimiser = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, steps)
        flat = self.x.flatten(1)
        for _ in range(steps):
            index = self.halves[:, torch.randint(self.halves.shape[1], (BATCH,))]
            predicted = self(flat[index])
            if self.classes:
                loss = F.cross_entropy(predicted.flatten(0, 1), self.y[index].flatten())
            else:
                loss = F.mse_loss(predicted, self.target[index]) / self.rest**2
            optimiser.zero_grad()
            (MEMBERS * loss).backward()
            optimiser.step()
            schedule.step()

    def changes(self) -> tuple[Float[Tensor, "g g"], Float[Tensor, "g g"], float]:
        """Return C and its error, as quadratic forms of generators, and the unexplained variance.

        The squared mean of K residuals exceeds the square of the truth by their variance over K.
        """
        change = error = torch.zeros(())
        x = self.x[self.held_out].flatten(1).expand(MEMBERS, -1, -1).clone().requires_grad_()
        predicted = self.predict(x)
        for residual in self._residuals(x, predicted):
            mean = residual.mean(0)
            deviation = (residual - mean).flatten(0, 1)
            variance = deviation.T @ deviation / (MEMBERS - 1)
            change = change + (mean.T @ mean - variance / MEMBERS) / len(mean)
            error = error + variance / len(mean)
        unexplained = float(self.errors(self.x[self.held_out]).mean()) / self.variance
        return change, error, unexplained

    @property
    def held_out_target(self) -> Float[Tensor, "n o"]:
        """Return the standardised targets of the inputs that were set aside, or their classes."""
        if self.classes:
            return F.one_hot(self.y[self.held_out], self.classes).float()
        return self.target[self.held_out]

    @property
    def variance(self) -> float:
        """Return the variance of these targets, summed over outputs."""
        return float(self.held_out_target.var(0).sum())

    @torch.no_grad()
    def errors(self, x: Float[Tensor, "n p d"]) -> Float[Tensor, " n"]:
        """Return the squared error of the mean prediction for each input that was set aside.

        Args:
            x: these inputs, moved or not.
        """
        predicted = self.predict(x.flatten(1).expand(MEMBERS, -1, -1)).mean(0)
        return (predicted - self.held_out_target).square().sum(1)

    def _residuals(self, x: Tensor, predicted: Tensor) -> Iterator[Float[Tensor, "m n g"]]:
        """Yield the residual of every output, linear in the d x d entries of a generator."""
        points = self.x[self.held_out]
        size = points.shape[2]
        for output in range(predicted.shape[2]):
            (slope,) = torch.autograd.grad(predicted[..., output].sum(), x, retain_graph=True)
            slope = slope.unflatten(2, points.shape[1:])
            residual = torch.einsum("mnpi,npj->mnij", slope, points)
            if self.is_equivariant:
                moved = predicted.detach() + self.y_mean / self.y_deviation
                point, row = divmod(output, size)
                residual[:, :, row] -= moved.unflatten(2, (-1, size))[:, :, point]
            yield residual.flatten(2).double()


def _named(learned: Float[Tensor, "k d d"]) -> LieAlgebra:
    """Return the algebra of learned generators, by known matrices where these span the same."""
    size = learned.shape[-1]
    if not len(learned):
        return LieAlgebra((), (), torch.zeros(0, size, size, dtype=torch.float64))
    rows = torch.linalg.qr(learned.flatten(1).T)[0].T
    chosen: list[tuple[str, str, Tensor]] = []
    taken = torch.zeros(0, size * size, dtype=torch.float64)
    for name, unit, matrix in known_generators(size):
        flat = matrix.flatten() / matrix.norm()
        is_new = float((flat - taken.T @ (taken @ flat)).norm()) > 0.5
        is_inside = float((flat - rows.T @ (rows @ flat)).norm()) < ROUNDING
        if is_new and is_inside and len(chosen) < len(learned):
            chosen.append((name, unit, matrix))
            taken = torch.linalg.qr(torch.stack([m.flatten() for *_, m in chosen]).T)[0].T
    residual = rows - rows @ taken.T @ taken
    left = len(learned) - len(chosen)
    unnamed = torch.linalg.svd(residual)[2][:left].unflatten(1, (size, size)) if left else []
    for matrix in unnamed:
        name, unit, scaled = _described(matrix)
        is_taken = name in [n for n, *_ in chosen]
        chosen.append((f"{name} ({len(chosen) + 1})" if is_taken else name, unit, scaled))
    return LieAlgebra(
        tuple(name for name, *_ in chosen),
        tuple(unit for _, unit, _ in chosen),
        torch.stack([matrix for *_, matrix in chosen]),
    )


def known_generators(size: int) -> Iterator[tuple[str, str, Float[Tensor, "d d"]]]:
    """Yield names, units and matrices: scaling, rotations, boosts, stretches and shears."""
    zero = torch.zeros(size, size, dtype=torch.float64)

    def at(*entries: tuple[int, int, float]) -> Tensor:
        matrix = zero.clone()
        for i, j, value in entries:
            matrix[i, j] = value
        return matrix

    pairs = [(i, j) for i in range(size) for j in range(i + 1, size)]
    yield "scaling", LOG_FACTOR, torch.eye(size, dtype=torch.float64)
    for i, j in pairs:
        yield f"rotation of x{i + 1} and x{j + 1}", RADIANS, at((i, j, -1), (j, i, 1))
    for i, j in pairs:
        yield f"boost of x{i + 1} and x{j + 1}", LOG_FACTOR, at((i, j, 1), (j, i, 1))
    for i in range(size):
        yield f"scaling of x{i + 1}", LOG_FACTOR, at((i, i, 1))
    for i, j in pairs:
        yield f"squeeze of x{i + 1} and x{j + 1}", LOG_FACTOR, at((i, i, 1), (j, j, -1))
    for i, j in [*pairs, *((j, i) for i, j in pairs)]:
        yield f"shear of x{i + 1} along x{j + 1}", "", at((i, j, 1))


def _described(matrix: Float[Tensor, "d d"]) -> tuple[str, str, Float[Tensor, "d d"]]:
    """Return a name, the unit and the scaled matrix of a generator of norm 1."""
    antisymmetric = (matrix - matrix.T) / 2
    if float((matrix - antisymmetric).norm()) < ROUNDING:
        rates = torch.linalg.eigvals(antisymmetric).imag
        scaled = antisymmetric / rates.max()
        if len(matrix) != 3:
            return "rotation", RADIANS, scaled
        axis = torch.stack([scaled[2, 1], scaled[0, 2], scaled[1, 0]])
        numbers = ", ".join(f"{float(v):.2f}" for v in axis)
        return f"rotation about ({numbers})", RADIANS, scaled
    if float(antisymmetric.norm()) < ROUNDING:
        return "stretch", LOG_FACTOR, matrix - antisymmetric
    return "linear flow", "", matrix
