"""Define a question of `discover`: its data, its candidate networks and its options."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symrazor.accelerate.devices import resolve_device
from symrazor.core.likelihood import Likelihood
from symrazor.core.validation import replace_options, short_repr
from symrazor.data import Tensors
from symrazor.groups import Group, from_file
from symrazor.groups.constructors import is_group_file
from symrazor.layers.plain import fully_connected
from symrazor.training.loop import NotebookBar, in_notebook
from symrazor.training.options import FitConfig

Tell = Callable[[str], object]
MakeLikelihood = Callable[[], Likelihood]
MIN_LOG_ODDS = 3.0
"""Nats of evidence below which two networks are not separated: odds of 20 to 1."""
UserGroup = str | Group
"""A group as users pass it: its name or the group itself."""


class Step(str):
    """A message that one step of a stage is done.

    Args:
        stage: what is running.
        done: steps that are done.
        total: steps of the stage.
        best: the best network so far, or "".
        seconds_left: estimated time to the end, or None.
        last: the step that was done last, or "".
    """

    stage: str
    done: int
    total: int
    best: str
    seconds_left: float | None

    def __new__(
        cls,
        stage: str,
        done: int,
        total: int,
        best: str = "",
        seconds_left: float | None = None,
        last: str = "",
    ) -> "Step":
        """Return the message "stage: done of total, last" with its parts as attributes."""
        step = super().__new__(cls, f"  {stage}: {done} of {total}{last and f', {last}'}")
        step.stage, step.done, step.total = stage, done, total
        step.best, step.seconds_left = best, seconds_left
        return step

    @property
    def status(self) -> str:
        """The best network so far and the time that is left."""
        notes = [f"best so far: {self.best}"] if self.best else []
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            notes.append(f"{minutes}:{seconds:02d} left")
        return ", ".join(notes)


@contextmanager
def shown_messages(tell: Tell | None, progress: bool | None) -> Iterator[Tell]:
    """Yield the function that takes messages: `tell`, or one that moves a bar in a notebook.

    Args:
        tell: function of the caller; None for a bar in a notebook, and nothing elsewhere.
        progress: False for no bar.
    """
    if tell is not None or progress is False or not in_notebook():
        yield tell or (lambda text: None)
        return
    with NotebookBar() as bar:

        def move(text: str) -> None:
            if isinstance(text, Step):
                status = ", ".join(filter(None, (text.stage, text.status)))
                bar.update(text.done / max(1, text.total), status)
            else:
                bar.update(None, text.strip())

        yield move


@dataclass(frozen=True)
class Structure:
    """One candidate network.

    Args:
        name: name in tables and documents.
        make: builds the network with weights from torch's global random state.
        label: name in sentences, with its article ("a plain CNN").
    """

    name: str
    make: Callable[[], nn.Module]
    label: str


def fully_connected_structure(shape: Sequence[int], outputs: int) -> Structure:
    """Return the candidate without any symmetry."""
    make = partial(fully_connected, shape, outputs)
    return Structure("fully connected", make, "a fully connected network")


@dataclass(frozen=True)
class Symmetry:
    """A property of the data that `discover` decides.

    Args:
        name: the property, such as "translation", "permutation" or "linear".
        structure: name of the structure that has the property built in.
        rivals: names of the structures without the property.
        follows_from: name of a symmetry that implies this one; this one is asked about only if the
            other does not hold. "" for none.
    """

    name: str
    structure: str
    rivals: Sequence[str]
    follows_from: str = ""


@dataclass(frozen=True)
class Wording:
    """Put the answer to a question in words.

    Headlines start with an adjective, as in "Translation-invariant: position does not matter.".

    Args:
        invariant: headline if the data have the symmetry.
        not_invariant: headline if they do not.
        undecided: the question, as it follows "Undecided: the data do not show".
        terms: regular expression -> replacement, applied to the sentence about the layers.
    """

    invariant: str
    not_invariant: str
    undecided: str = "whether the symmetry holds"
    terms: Mapping[str, str] = field(default_factory=dict)

    def apply_terms(self, text: str) -> str:
        """Replace general terms by those of this kind of data."""
        for pattern, replacement in self.terms.items():
            text = re.sub(pattern, replacement, text)
        return text


def slug(name: str) -> str:
    """Return a name as a folder name: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


NEUTRAL = Wording(
    "Equivariant: the data support the symmetry of the layers.",
    "Not equivariant: a layer breaks the symmetry.",
)


@dataclass(frozen=True)
class Family:
    """All candidates for one data set.

    Args:
        structures: the networks.
        relaxed: name of the structure whose symmetry is learned; "" if all are fixed.
        built_in: name of the structure that has the symmetry of `relaxed` built in.
        symmetries: the properties to decide; by default that of `built_in` against all others.
        wording: headlines for the relaxed structure; by default those of the kind of data.
        describe: returns a headline from the claims, where `wording` cannot say enough.
        groups: name -> group that permutes the positions of the data. Its equivariance error is
            measured for every candidate, and features of vectors share one scale.
        ordinary: a fast network without a symmetry, for the final training only.
        wider: structure -> a wider network with the same symmetry, for the final training.
        permutes_points: whether to measure the effect of permuting the points of a set.
        optional: names of structures that are left out if the time is too short for all.
    """

    structures: Sequence[Structure]
    relaxed: str = ""
    built_in: str = ""
    symmetries: Sequence[Symmetry] = ()
    wording: Wording | None = None
    describe: Callable[..., str] | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    ordinary: Structure | None = None
    wider: Mapping[str, Structure] = field(default_factory=dict)
    permutes_points: bool = False
    optional: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.built_in and not self.symmetries:
            rivals = [s.name for s in self.structures if s.name != self.built_in]
            default = (Symmetry("symmetry", self.built_in, rivals),)
            object.__setattr__(self, "symmetries", default)

    @cached_property
    def contains(self) -> dict[str, str]:
        """Structure -> the structure that it contains, from whose trained state it can start.

        A structure contains the one that is built in if it has all of its weights, by name.
        """
        if not self.built_in:
            return {}
        with torch.random.fork_rng([]):
            shapes = {
                s.name: {(k, v.shape) for k, v in s.make().state_dict().items()}
                for s in self.structures
            }
        inner = shapes.pop(self.built_in)
        return {name: self.built_in for name, outer in shapes.items() if inner < outer}

    def structure(self, name: str) -> Structure:
        """Return the structure of a name."""
        ordinary = [] if self.ordinary is None else [self.ordinary]
        candidates = [*self.structures, *ordinary, *self.wider.values()]
        return next(structure for structure in candidates if structure.name == name)

    def label(self, name: str) -> str:
        """Return the name of a candidate in sentences."""
        return self.structure(name).label


def as_groups(groups: object) -> tuple[UserGroup, ...]:
    """Return names and groups as a tuple, and read groups that are files.

    Args:
        groups: a name, a file that ends with .json, a `Group`, or a sequence of these.

    Raises:
        ValueError: no group, a value of another type, or a file without a valid group.
        OSError: a file that cannot be read.
    """
    is_sequence = isinstance(groups, Sequence) and not isinstance(groups, str)
    entries: Sequence[object] = groups if is_sequence else [groups]  # type: ignore[assignment]
    if not entries:
        raise ValueError("groups is empty. Name at least one group, or omit the option.")
    parsed: list[UserGroup] = []
    for entry in entries:
        group = str(entry) if isinstance(entry, Path) else entry
        if not isinstance(group, str | Group):
            raise ValueError(
                "A group must be a name, a file that ends with .json, or a Group, got "
                f"{type(group).__name__}."
            )
        parsed.append(from_file(str(group)) if is_group_file(group) else group)
    return tuple(parsed)


def groups_as_json(groups: Sequence[UserGroup] | None) -> list[Any] | None:
    """Return names and generators as lists; two groups of one name can differ."""
    if groups is None:
        return None
    entries: list[Any] = []
    for group in groups:
        if isinstance(group, str):
            entries.append(group)
        else:
            lie_generators = None if group.lie is None else group.lie.generators
            generators = (group.permutations, group.matrices, lie_generators)
            entries.append([group.name, *(None if p is None else p.tolist() for p in generators)])
    return entries


@dataclass(frozen=True, repr=False)
class Options:
    """Options of `discover`.

    Args:
        minutes: time for everything. With `epochs`, it only limits the learned invariances and
            says how much an exact evidence may cost.
        epochs: passes over the data for each start of each candidate, in place of a time limit.
        starts: starts of each candidate, with different initial weights and left-out samples. With
            `minutes`, more follow where the decision is close.
        seed: seed of splits, initial weights, shuffling and random probes.
        device: "auto" (CUDA if available), "cpu", "cuda", ...
        groups: symmetries to relax: names, files that end with .json, or `symrazor.groups.Group`s.
            None for the default of the kind of data.
        held_out: share of the data held out for the report, unless the data have a test set.
        invariances: whether to learn invariances of images to rotations, shifts, scales and flips.
            None for yes with `minutes` and no with `epochs`.
        positions: whether trajectories are positions only; momenta are then finite differences.
        out: run folder. An unfinished run of the same command is resumed from it.
        progress: whether to show progress bars; None for yes in a terminal.
    """

    minutes: float = 2.0
    epochs: int | None = None
    starts: int = 3
    seed: int = 0
    device: str = "auto"
    groups: tuple[UserGroup, ...] | None = None
    held_out: float = 0.2
    invariances: bool | None = None
    positions: bool = False
    out: Path | None = None
    progress: bool | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check ranges and read groups that are files."""
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes must be positive, got {self.minutes}.")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}.")
        if self.starts < 1:
            raise ValueError(f"starts must be at least 1, got {self.starts}.")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit into 64 bits, got {self.seed}.")
        try:
            device_type = "auto" if self.device == "auto" else torch.device(self.device).type
        except RuntimeError:
            raise ValueError(f"Unknown device {self.device!r}. Use auto, cpu or cuda.") from None
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"Device {self.device!r} is not available: no CUDA on this machine. Use --device "
                "auto."
            )
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be at least 0 and below 1, got {self.held_out}.")
        if self.groups is not None:
            object.__setattr__(self, "groups", as_groups(self.groups))

    def change(self, **changes: Any) -> "Options":
        """Return a copy with some options replaced; ValueError for an unknown option."""
        if changes.get("out") is not None:
            changes["out"] = Path(changes["out"])
        return replace_options(self, changes)

    def unfinished_folder(self, question: str) -> Path | None:
        """Return the folder for checkpoints of a question; None without a run folder."""
        return None if self.out is None else self.out / "unfinished" / slug(question)

    def resolved_device(self) -> str:
        """Return the device to train on."""
        return resolve_device(self.device)


@dataclass(frozen=True)
class Question:
    """One question to a data set.

    Args:
        name: short name, used for folders.
        text: the question in words.
        family: the candidates.
        train: prepared training data.
        test: prepared held-out data.
        likelihood: returns a new likelihood.
        config: training options; None to plan them for the available time.
        together: a number for each training sample; samples with the same number stay on one side
            of every split. None if every sample is on its own.
    """

    name: str
    text: str
    family: Family
    train: Tensors
    test: Tensors | None
    likelihood: MakeLikelihood
    config: FitConfig | None = None
    together: Tensor | None = None


def folds_of(together: Tensor, size: int, seed: int) -> Tensor:
    """Return a fold for each sample, of about `size` samples; groups of samples are not divided."""
    groups, group = together.unique(return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(groups), generator=generator)
    counts = group.bincount(minlength=len(groups))
    before = torch.zeros(len(groups), dtype=torch.int64)
    before[order] = counts[order].cumsum(0) - counts[order]
    return (before // max(1, size))[group]


def subsample(n: int, count: int, seed: int) -> Tensor:
    """Return at most `count` random indices below n, sorted."""
    if count >= n:
        return torch.arange(n)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:count].sort().values


def select(data: Tensors, index: Tensor) -> Tensors:
    """Return the samples of an index."""
    return data[0][index], data[1][index]
