"""Make transformed copies of inputs, with weights that sum to 1.

The copies of one input are adjacent, [n, s, ...]: points of a lattice, moved by every
transformation, then every element of every choice. The copies are differentiable in the widths, and
their weights in the probabilities. `averaged_network` averages over them.
"""

import copy
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from symrazor.core.parameters import Hyper, real
from symrazor.invariance.lie_distributions import LieDistribution
from symrazor.invariance.transformation import Choice, Lie, Transformation

MIN_WIDTH = 1e-4
"""Smallest width in a description; a parameter transform cannot represent 0."""
UNMEASURED = -1.0
"""Share of a pose that `find_reach_` has not measured."""
Part = Transformation | Choice | LieDistribution
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
        self,
        transformations: Part | Sequence[Part],
        n_samples: int = 20,
        seed: int = 0,
    ) -> None:
        super().__init__()
        parts = _parts(transformations)
        check_samples(n_samples)
        self.moves = nn.ModuleList(part for part in parts if isinstance(part, Transformation))
        self.choices = nn.ModuleList(part for part in parts if isinstance(part, Choice))
        dim = sum(move.dim for move in self._moving)
        self.n_samples = n_samples if dim else 1
        self.generator = torch.Generator().manual_seed(seed)
        self.loaded = False
        self.register_buffer("lattice", lattice(self.n_samples, dim))
        self.register_buffer("reach", torch.ones(dim))
        sizes = [len(choice.probabilities) for choice in self._choosing]
        self.register_buffer("shares", torch.full((sum(sizes),), UNMEASURED))
        self.register_buffer("shift", torch.rand(dim, generator=self.generator))

    @property
    def _moving(self) -> list[Transformation]:
        return [part for part in self.moves if isinstance(part, Transformation)]

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
            start = 0
            for move in self._moving:
                flat = move(flat, points[:, start : start + move.dim])
                start += move.dim
            moved = flat.unflatten(0, (n, s))
        real = (
            x.dtype if x.is_floating_point() else torch.get_default_dtype()
        )  # tokens are integers
        weights = x.new_full((s,), 1 / s, dtype=real)
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
        """Return a copy with another number of points, for a finer average after training.

        Raises:
            ValueError: if n_samples is not a positive integer.
        """
        check_samples(n_samples)
        refined = copy.deepcopy(self)
        dim = self.lattice.shape[1]
        refined.n_samples = n_samples if dim else 1
        refined.lattice = lattice(refined.n_samples, dim).to(self.lattice)
        return refined

    def train(self, mode: bool = True) -> "Augment":
        """Set the mode; evaluation starts with a new shift, or with a loaded one."""
        if self.training and not mode and not self.loaded and self.shift.numel():
            fresh = torch.rand(self.shift.shape, generator=self.generator)
            self.shift.copy_(fresh)
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

        Widths are those of the copies, or the ranges within them that `find_reach_` measured;
        likewise for probabilities and shares.
        """
        description: dict[str, float] = {}
        parts = self.reach.split([move.dim for move in self._moving])
        for move, reach in zip(self._moving, parts, strict=True):
            description |= _narrowed(move, reach).describe(shape)
        measured = self.shares.split([len(choice.probabilities) for choice in self._choosing])
        for choice, shares in zip(self._choosing, measured, strict=True):
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


def check_samples(value: object) -> None:
    """Raise ValueError unless the value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"n_samples must be an integer of at least 1, got {value!r}.")


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
    move = move if bool((reach == 1).all()) else copy.deepcopy(move)
    widths = [part for part in move.modules() if isinstance(part, Hyper)]
    sizes = [width.raw.numel() for width in widths]
    if bool((reach == 1).all()) or sum(sizes) != move.dim:
        return move
    for width, part_reach in zip(widths, reach.split(sizes), strict=True):
        narrow = width.value.detach().double() * part_reach.double().view_as(width.raw)
        width.value = narrow.clamp(min=MIN_WIDTH)
    return move


def lattice(n: int, dim: int) -> Float[Tensor, "n k"]:
    r"""Return a lattice in the unit cube: equidistant in the first dimension, golden in the others.

    Point i is $(i/n, \{i/g\}, \{i/g^2\}, \dots)$ with $g^k = g + 1$: evenly spread for any n.
    """
    if dim == 0:
        return torch.zeros(n, 0)
    number = torch.arange(n, dtype=torch.float64).unsqueeze(1)
    golden = 2.0
    for _ in range(40):  # fixed-point iteration for g^dim = g + 1
        golden = (1 + golden) ** (1 / dim) if dim > 1 else golden
    steps = golden ** -torch.arange(1, dim, dtype=torch.float64)
    others = (number * steps) % 1
    return torch.cat([number / n, others], 1).float()
