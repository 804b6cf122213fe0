r"""Average a network over transformed copies of its input (LILA).

$$ f(x; \eta) = \sum_s w_s\, g_\theta(T_s x), \qquad T_s \sim p_\eta $$

For classes, the average may also be the logarithm of $\sum_s w_s\, \mathrm{softmax}\,
g_\theta(T_s x)$, which unlike a mean of logits penalises uninformative copies, or the logarithm of
$\sum_s w_s \exp g_\theta(T_s x)$. The last one ("joint") is Bayes' rule for an input in an unknown
pose: $\exp g_y(x)$ stands for the joint density of y and of x in a standard pose, so that likely
poses dominate the sum.

The copies of one input are adjacent, [n, s, ...]: points of a lattice, moved by every
transformation, then every element of every choice. The curvature treats them as several uses of
each weight by the same input, and the evidence of f is differentiable in the widths $\eta$ and in
the probabilities in $w$. Invariance never lowers the training loss, but it
raises the evidence; the widths grow until they contradict the labels.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from symrazor.core.likelihood import Categorical, Likelihood
from symrazor.core.parameters import Hyper, real
from symrazor.core.validation import check_choice, check_positive_integer
from symrazor.curvature.weight_sharing import announce_copies
from symrazor.groups.lie import recurrence_steps
from symrazor.invariance.lie_distributions import LieDistribution
from symrazor.invariance.transformation import Choice, Lie, Transformation

MIN_WIDTH = 1e-4
"""Smallest width in a description; a parameter transform cannot represent 0."""
UNMEASURED = -1.0
"""Share of a pose that `find_reach_` has not measured."""
Part = Transformation | Choice | LieDistribution
Average = Literal["outputs", "probabilities", "joint"]
Copies = tuple[Shaped[Tensor, "n s ..."], Float[Tensor, " s"]]


class Augment(nn.Module):
    """Copies of every input, each moved by all transformations in order.

    In training every input has its own random points: a lattice of `n_samples` points with a random
    shift. In evaluation all inputs share one shift, drawn whenever training ends and kept in the
    state: the network is then a deterministic function, as the evidence requires. A loaded state
    brings its shift, which stays until training starts again.

    Args:
        transformations: applied in order, followed by every element of every choice. A
            `LieDistribution` is wrapped in `Lie`.
        n_samples: points per input (1 if there are only choices).
        seed: random seed of the shifts on a CPU; a GPU uses torch's generator of the device.

    Raises:
        ValueError: if there are no transformations, or n_samples is not a positive integer.
    """

    shift: Tensor
    lattice: Tensor
    reach: Tensor
    shares: Tensor

    def __init__(
        self, transformations: Part | Sequence[Part], n_samples: int = 20, seed: int = 0
    ) -> None:
        super().__init__()
        parts = _parts(transformations)
        check_positive_integer("n_samples", n_samples)
        self.moves = nn.ModuleList(part for part in parts if isinstance(part, Transformation))
        self.choices = nn.ModuleList(part for part in parts if isinstance(part, Choice))
        dim = sum(self._dims)
        self.n_samples = n_samples if dim else 1
        self.generator = torch.Generator().manual_seed(seed)
        self.loaded = False
        self.register_buffer("lattice", lattice(self.n_samples, dim))
        self.register_buffer("reach", torch.ones(dim))
        self.register_buffer("shares", torch.full((sum(self._sizes),), UNMEASURED))
        self.register_buffer("shift", torch.rand(dim, generator=self.generator))

    @property
    def _moving(self) -> list[Transformation]:
        return [part for part in self.moves if isinstance(part, Transformation)]

    @property
    def _dims(self) -> list[int]:
        return [move.dim for move in self._moving]

    @property
    def _sizes(self) -> list[int]:
        return [len(choice.probabilities) for choice in self._choosing]

    @property
    def _choosing(self) -> list[Choice]:
        return [part for part in self.choices if isinstance(part, Choice)]

    def copies(self, x: Shaped[Tensor, "n ..."], at: Tensor | None = None) -> Copies:
        """Return the copies and their weights.

        Args:
            x: inputs.
            at: points of the cube, [s, k] for all inputs or [n, s, k]; by default points of a
                lattice.
        """
        value: object = x
        if not isinstance(value, Tensor) or not value.dim():
            got = "a scalar" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"x must be a batch of inputs as a tensor, got {got}.")
        n, s = len(x), self.n_samples if at is None else at.shape[-2]
        moved = x.unsqueeze(1)
        if self._moving:
            places = None if at is None else at.to(x).expand(n, s, at.shape[-1]).flatten(0, 1)
            points = self.points(x) if places is None else places
            flat = moved.expand(n, s, *x.shape[1:]).flatten(0, 1)
            for move, part in zip(self._moving, points.split(self._dims, 1), strict=True):
                flat = move(flat, part)
            moved = flat.unflatten(0, (n, s))
        dtype = x.dtype if x.is_floating_point() else None  # tokens are integers
        weights = torch.full((s,), 1 / s, dtype=dtype, device=x.device)
        for choice in self._choosing:
            moved = choice(moved.flatten(0, 1)).unflatten(0, (n, len(weights))).flatten(1, 2)
            weights = (weights.unsqueeze(1) * choice.probabilities.to(weights)).flatten()
        return moved, weights

    def points(self, x: Tensor) -> Float[Tensor, "m k"]:
        """Return one point of the cube [-1, 1]^k for every copy of every input."""
        n, dim = len(x), self.lattice.shape[1]
        self.loaded = self.loaded and not self.training
        if not self.training:
            shift = self.shift.expand(n, 1, dim)
        elif x.is_cuda:  # the device's generator, which a CUDA graph advances correctly
            shift = torch.rand(n, 1, dim, device=x.device)
        else:
            shift = torch.rand(n, 1, dim, generator=self.generator)
        places = (self.lattice.to(x) + shift.to(x)) % 1
        return (2 * places - 1).flatten(0, 1)

    def refined(self, n_samples: int) -> "Augment":
        """Return a copy with another number of points, for a finer average after training."""
        check_positive_integer("n_samples", n_samples)
        refined = copy.deepcopy(self)
        dim = self.lattice.shape[1]
        refined.n_samples = n_samples if dim else 1
        refined.lattice = lattice(refined.n_samples, dim).to(self.lattice)
        return refined

    def train(self, mode: bool = True) -> "Augment":
        """Set the mode; evaluation starts with a new shift, or with a loaded one."""
        if self.training and not mode and not self.loaded and self.shift.numel():
            self.shift.copy_(torch.rand(self.shift.shape, generator=self.generator))
        self.loaded = self.loaded and not mode
        super().train(mode)
        return self

    def get_extra_state(self) -> Tensor:
        """Return the state of the generator, so that a resumed run draws the same numbers."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the generator; the next evaluation keeps the loaded shift."""
        self.generator.set_state(state.cpu())
        self.loaded = True

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return all widths and probabilities by name and unit, for inputs of a shape.

        Widths, probabilities and shares are read from the copies, or from the smaller ranges that
        `find_reach_` measured.
        """
        description: dict[str, float] = {}
        for move, reach in zip(self._moving, self.reach.split(self._dims), strict=True):
            description |= _narrowed(move, reach).describe(shape)
        for choice, shares in zip(self._choosing, self.shares.split(self._sizes), strict=True):
            is_measured = bool((shares >= 0).all())
            description |= (
                choice.describe_shares(shape, shares) if is_measured else choice.describe(shape)
            )
        return description

    def extra_repr(self) -> str:
        """Return the number of samples, for `print(model)`."""
        return f"{self.n_samples} samples"


class Mixture(nn.Module):
    """Several augmentations with learned mixture weights, for multimodal distributions.

    Args:
        parts: the components.
        shares: initial mixture weights; equal by default.
    """

    def __init__(self, parts: Sequence[Augment], shares: Sequence[float] | None = None) -> None:
        super().__init__()
        value: object = parts
        components = list(value) if isinstance(value, Iterable) else [value]
        parts = [part for part in components if isinstance(part, Augment)]
        if len(parts) < len(components):
            kinds = ", ".join(type(part).__name__ for part in components)
            raise ValueError(
                f"The components of a Mixture must be Augment, got {kinds}. Use Augment(part)."
            )
        equal = [1 / max(1, len(parts))] * len(parts)
        start = torch.tensor([float(share) for share in (equal if shares is None else shares)])
        if len(parts) < 2 or len(start) != len(parts) or not bool((start > 0).all()):
            raise ValueError(
                f"A Mixture needs two or more components with positive shares, got {len(parts)} "
                f"with {start.tolist()}. Example: Mixture([a, b], shares=[0.7, 0.3])."
            )
        self.parts = nn.ModuleList(parts)
        self.logits = Hyper(start.log(), real)

    def copies(self, x: Shaped[Tensor, "n ..."]) -> Copies:
        """Return the copies of all components, one component after the other."""
        share = self.logits.value.softmax(0)
        copies = [part.copies(x) for part in self.parts]  # type: ignore[operator]
        weights = [p.to(w) * w for p, (_, w) in zip(share, copies, strict=True)]
        return torch.cat([moved for moved, _ in copies], 1), torch.cat(weights)

    def refined(self, n_samples: int) -> "Mixture":
        """Return a copy with another number of points per component, see `Augment.refined`."""
        refined = copy.deepcopy(self)
        refined.parts = nn.ModuleList(part.refined(n_samples) for part in self.parts)  # type: ignore[operator]
        return refined

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Return the mixture weights and the widths of every component."""
        share = self.logits.value.detach().softmax(0).tolist()
        description: dict[str, float] = {}
        for number, (part, p) in enumerate(zip(self.parts, share, strict=True), 1):
            description[f"mode {number} (share)"] = p
            widths = part.describe(shape)  # type: ignore[operator]
            description |= {f"mode {number}: {name}": value for name, value in widths.items()}
        return description


def _parts(value: object) -> list[Transformation | Choice]:
    """Return transformations and choices as a list; wrap distributions in `Lie`."""
    is_sequence = isinstance(value, Iterable) and not isinstance(value, str)
    items = list(value) if is_sequence else [value]  # type: ignore[call-overload]
    items = [Lie(part) if isinstance(part, LieDistribution) else part for part in items]
    parts = [part for part in items if isinstance(part, (Transformation, Choice))]
    wrong = [repr(part) for part in items if not isinstance(part, (Transformation, Choice))]
    if wrong or not parts:
        raise ValueError(
            "Augment needs one or more transformations or choices, got "
            f"{', '.join(wrong) or 'none'}. Example: Augment([affine('rotation'), Flips()])."
        )
    return parts


def _narrowed(move: Transformation, reach: Float[Tensor, " k"]) -> Transformation:
    """Multiply the widths by the measured reach, if there is one width per dimension."""
    narrowed = copy.deepcopy(move)
    widths = [part for part in narrowed.modules() if isinstance(part, Hyper)]
    sizes = [width.raw.numel() for width in widths]
    if sum(sizes) != move.dim or bool((reach == 1).all()):
        return move
    for width, part_reach in zip(widths, reach.split(sizes), strict=True):
        narrow = width.value.detach().double() * part_reach.double().view_as(width.raw)
        width.value = narrow.clamp(min=MIN_WIDTH)
    return narrowed


def lattice(n: int, dim: int) -> Float[Tensor, "n k"]:
    r"""Return n points spread evenly over the unit cube, for any n.

    Point i is $(i/n, \{i s_1\}, \{i s_2\}, \dots)$ with the steps s of `recurrence_steps`.
    """
    if dim == 0:
        return torch.zeros(n, 0)
    number = torch.arange(n, dtype=torch.float64).unsqueeze(1)
    recurrence = (number * recurrence_steps(dim - 1)) % 1
    return torch.cat([number / n, recurrence], 1).float()


class Augmented(nn.Module):
    """A network averaged over transformed copies of its input.

    Args:
        network: any network, including relaxed ones.
        augment: makes the copies.
        at: name in `named_modules` of the module of `network` whose output is averaged; None for
            the outputs of the network. Averaging early is cheaper, averaging late is more
            expressive.
        average: "outputs"; or, for a network that returns logits of classes, "probabilities" or
            "joint" (exponentials of logits, see the module docstring). The result then are logits,
            too.

    Raises:
        ValueError: if the module does not exist, or if probabilities are to be averaged inside the
            network; later, if the likelihood is not categorical for such an average.
    """

    def __init__(
        self,
        network: nn.Module,
        augment: Augment | Mixture,
        at: str | None = None,
        average: Average = "outputs",
    ) -> None:
        super().__init__()
        value: object = network
        if not isinstance(value, nn.Module):
            raise ValueError(f"network must be a torch.nn.Module, got {type(value).__name__}.")
        if not hasattr(augment, "copies"):
            kind = type(augment).__name__
            raise ValueError(
                f"augment must be an Augment or a Mixture, got {kind}. Use Augment(...)."
            )
        check_choice("average", average, Average)
        if average != "outputs" and at is not None:
            raise ValueError(
                f"Probabilities are averaged at the end of the network; use at=None, not {at!r}."
            )
        if at is not None and at not in dict(network.named_modules()):
            names = ", ".join(name for name, _ in network.named_modules() if name)
            raise ValueError(
                f"The network has no module {at!r} to average at. Its modules are {names}."
            )
        self.network, self.augment, self.at, self.average = network, augment, at, average

    def forward(self, x: Shaped[Tensor, "n ..."]) -> Tensor:
        """Return the outputs, averaged at the end or at `at`."""
        copies, weights = self.augment.copies(x)
        announce_copies(weights)
        rows, calls = len(x) * len(weights), 0

        def average(f: Tensor) -> Tensor:
            split: Tensor = f.unflatten(0, (len(x), len(weights)))
            if self.average == "outputs":
                return torch.einsum("ns...,s->n...", split, weights.to(f))
            logits = split if self.average == "joint" else split.log_softmax(-1)
            terms = logits + weights.to(f).log().unsqueeze(1)
            announce_copies(terms.logsumexp(2).softmax(1))  # posterior of the pose
            return terms.logsumexp(1)

        def hook(module: nn.Module, args: Any, f: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls > 1 or not isinstance(f, Tensor) or not f.dim() or len(f) != rows:
                got = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
                raise ValueError(
                    f"Module {self.at!r} must be called once and return a tensor with {rows} rows, "
                    f"one for each copy, got {got} in call {calls}. Average at another module."
                )
            return average(f)

        if self.at is None:
            return average(self.network(copies.flatten(0, 1)))
        handle = self.network.get_submodule(self.at).register_forward_hook(hook)
        try:
            outputs: Tensor = self.network(copies.flatten(0, 1))
        finally:
            handle.remove()
        if calls == 0:
            raise ValueError(
                f"The network did not call {self.at!r}, where copies are averaged. Use at=None, or "
                "the name of a module that is called."
            )
        return outputs

    def check_likelihood(self, likelihood: Likelihood) -> None:
        """Raise ValueError if probabilities are averaged but the outputs are not logits."""
        if self.average != "outputs" and not isinstance(likelihood, Categorical):
            raise ValueError(
                f"average={self.average!r} needs a categorical likelihood, got "
                f"{type(likelihood).__name__}. Use average='outputs', or one logit per class."
            )

    def refined(self, n_samples: int) -> "Augmented":
        """Return the same network, not a copy, averaged over another number of points."""
        finer = self.augment.refined(n_samples)
        return Augmented(self.network, finer, self.at, self.average).train(self.training)

    def invariances(self, shape: Sequence[int]) -> dict[str, float]:
        """Return the learned widths and probabilities by name and unit."""
        return self.augment.describe(shape)
