r"""x -> transformed copies of x, with weights that add up to 1.

The copies of a datum follow each other, [n, s, ...]: points of a lattice, moved by every
transformation, then every element of every choice. They are differentiable in the widths, their
weights in the probabilities. What is averaged over them is for `averaged` to say.
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
"""Width that stands for none in a description: a transform has no 0."""
UNMEASURED = -1.0
"""Share of a pose before `find_reach_` has been asked."""
Part = Transformation | Choice | LieDistribution
Copies = tuple[Shaped[Tensor, "n s ..."], Float[Tensor, " s"]]


class Augment(nn.Module):
    """Copies of every datum, each moved by all transformations, one after the other.

    In training every datum has fresh points: a lattice of `n_samples` points, shifted at random.
    In evaluation all data share one shift, drawn whenever training ends and kept in the state: the
    network is then a fixed function of one datum, as the evidence needs it. A state that is loaded
    brings its shift, which stays until there is training again.

    Args:
        transformations: applied in order; then every element of every choice. A `LieDistribution`
            stands for `Lie` of it.
        n_samples: points for each datum (1 if there are only choices).
        seed: of the shifts on a CPU; a GPU uses torch's generator of the device.

    Raises:
        ValueError: nothing to do, or no samples.
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
        """Set the lattice up; see the class."""
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
        """The copies and their weights, which add up to 1.

        Args:
            x: data.
            at: points of the cube, [s, k] for all data or [n, s, k]; by default those of a lattice.
        """
        given: object = x
        if not isinstance(given, Tensor) or not given.dim():
            got = "one number" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"expected a tensor of data, got {got}; do: torch.as_tensor(...)")
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
        real = x.dtype if x.is_floating_point() else torch.get_default_dtype()  # tokens are whole
        weights = x.new_full((s,), 1 / s, dtype=real)
        for choice in self._choosing:
            moved = choice(moved.flatten(0, 1)).unflatten(0, (n, len(weights))).flatten(1, 2)
            weights = (weights.unsqueeze(1) * choice.probabilities.to(weights)).flatten()
        return moved, weights

    def points(self, x: Tensor) -> Float[Tensor, "m k"]:
        """One point of the cube for every copy of every datum."""
        n, dim = len(x), self.lattice.shape[1]
        self.loaded = self.loaded and not self.training
        if not self.training:
            shift = self.shift.expand(n, 1, dim)
        elif x.is_cuda:  # the device's own generator, which a CUDA graph knows how to move on
            shift = torch.rand(n, 1, dim, device=x.device)
        else:
            shift = torch.rand(n, 1, dim, generator=self.generator)
        places = (self.lattice.to(x) + shift.to(x)) % 1
        return (2 * places - 1).flatten(0, 1)

    def refined(self, n_samples: int) -> "Augment":
        """The same with another number of points: a finer average once training is over.

        Raises:
            ValueError: no points at all.
        """
        check_samples(n_samples)
        found = copy.deepcopy(self)
        dim = self.lattice.shape[1]
        found.n_samples = n_samples if dim else 1
        found.lattice = lattice(found.n_samples, dim).to(self.lattice)
        return found

    def train(self, mode: bool = True) -> "Augment":
        """Training, or evaluation, which begins with a new shift, or with one that was loaded."""
        if self.training and not mode and not self.loaded and self.shift.numel():
            fresh = torch.rand(self.shift.shape, generator=self.generator)
            self.shift.copy_(fresh)
        self.loaded = self.loaded and not mode
        super().train(mode)
        return self

    def get_extra_state(self) -> Tensor:
        """The generator's: a run that is taken up again draws what it would have drawn."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from `get_extra_state`; an evaluation that comes next keeps the loaded shift."""
        self.generator.set_state(state.cpu())
        self.loaded = True

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """All widths and probabilities, by name and unit, for data of a shape.

        Widths are those of the copies, or the ranges within them that `find_reach_` has found;
        probabilities too, or the shares.
        """
        found: dict[str, float] = {}
        parts = self.reach.split([move.dim for move in self._moving])
        for move, reach in zip(self._moving, parts, strict=True):
            found |= _narrowed(move, reach).describe(shape)
        measured = self.shares.split([len(choice.probabilities) for choice in self._choosing])
        for choice, q in zip(self._choosing, measured, strict=True):
            known = bool((q >= 0).all())
            found |= choice.describe_shares(shape, q) if known else choice.describe(shape)
        return found

    def extra_repr(self) -> str:
        """Size, for `print(model)`."""
        return f"{self.n_samples} samples"


class Mixture(nn.Module):
    """Several augmentations, each with a learned share: for distributions of several modes.

    Args:
        parts: the components.
        shares: where their probabilities start; even by default.
    """

    def __init__(self, parts: Sequence[Augment], shares: Sequence[float] | None = None) -> None:
        """Start at some shares."""
        super().__init__()
        several: object = parts
        given = list(several) if isinstance(several, Iterable) else [several]
        parts = [part for part in given if isinstance(part, Augment)]
        if len(parts) < len(given):
            kinds = ", ".join(type(part).__name__ for part in given)
            raise ValueError(f"expected components of type Augment, got {kinds}; do: Augment(part)")
        even = [1 / max(1, len(parts))] * len(parts)
        start = torch.tensor([float(share) for share in (even if shares is None else shares)])
        if len(parts) < 2 or len(start) != len(parts) or not bool((start > 0).all()):
            raise ValueError(
                f"expected two or more components with positive shares, got {len(parts)} with "
                f"{start.tolist()}; do: Mixture([a, b], shares=[0.7, 0.3]), say"
            )
        self.parts = nn.ModuleList(parts)
        self.logits = Hyper(start.log(), real)

    def copies(self, x: Shaped[Tensor, "n ..."]) -> Copies:
        """The copies of all components, one component after the other."""
        share = self.logits.value.softmax(0)
        found = [part.copies(x) for part in self.parts]  # type: ignore[operator]
        weights = [p.to(w) * w for p, (_, w) in zip(share, found, strict=True)]
        return torch.cat([moved for moved, _ in found], 1), torch.cat(weights)

    def refined(self, n_samples: int) -> "Mixture":
        """The same with another number of points in every component, see `Augment.refined`."""
        found = copy.deepcopy(self)
        found.parts = nn.ModuleList(part.refined(n_samples) for part in self.parts)  # type: ignore[operator]
        return found

    def describe(self, shape: Sequence[int]) -> dict[str, float]:
        """Shares, and the widths of every component."""
        share = self.logits.value.detach().softmax(0).tolist()
        found: dict[str, float] = {}
        for number, (part, p) in enumerate(zip(self.parts, share, strict=True), 1):
            found[f"mode {number} (share)"] = p
            own = part.describe(shape)  # type: ignore[operator]
            found |= {f"mode {number}: {name}": value for name, value in own.items()}
        return found


def check_samples(given: object) -> None:
    """Refuse what is no number of points."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(
            f"expected a whole n_samples of at least 1, got {given!r}; do: n_samples=20, say"
        )


def _parts(given: object) -> list[Transformation | Choice]:
    """As a list; distributions become transformations."""
    many = isinstance(given, Iterable) and not isinstance(given, str)
    found = list(given) if many else [given]  # type: ignore[call-overload]
    found = [Lie(part) if isinstance(part, LieDistribution) else part for part in found]
    parts = [part for part in found if isinstance(part, (Transformation, Choice))]
    wrong = [repr(part) for part in found if not isinstance(part, (Transformation, Choice))]
    if wrong or not parts:
        raise ValueError(
            f"expected one or more transformations or choices, got {', '.join(wrong) or 'none'}; "
            "do: Augment([affine('rotation'), Flips()]), say"
        )
    return parts


def _narrowed(move: Transformation, reach: Float[Tensor, " k"]) -> Transformation:
    """The same with its widths times the reach, if each number of a point has one width."""
    move = move if bool((reach == 1).all()) else copy.deepcopy(move)
    widths = [part for part in move.modules() if isinstance(part, Hyper)]
    sizes = [width.raw.numel() for width in widths]
    if bool((reach == 1).all()) or sum(sizes) != move.dim:
        return move
    for width, own in zip(widths, reach.split(sizes), strict=True):
        narrow = width.value.detach().double() * own.double().view_as(width.raw)
        width.value = narrow.clamp(min=MIN_WIDTH)
    return move


def lattice(n: int, dim: int) -> Float[Tensor, "n k"]:
    r"""A lattice in the unit cube: even in the first direction, golden in the others.

    Point i is $(i/n, \{i/g\}, \{i/g^2\}, \dots)$ with $g^k = g + 1$: evenly spread for any n.
    """
    if dim == 0:
        return torch.zeros(n, 0)
    number = torch.arange(n, dtype=torch.float64).unsqueeze(1)
    golden = 2.0
    for _ in range(40):  # the root of g^dim = g + 1
        golden = (1 + golden) ** (1 / dim) if dim > 1 else golden
    steps = golden ** -torch.arange(1, dim, dtype=torch.float64)
    others = (number * steps) % 1
    return torch.cat([number / n, others], 1).float()
