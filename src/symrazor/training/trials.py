r"""Networks without some of their free paths, tried while they train: the razor itself.

A free path that does no harm is not the same as one that is needed. F-FC can compute maps that are
equivariant (the mean of a channel, added to every pixel), and a convolution beside it then has no
reason to learn what does the same. The evidence of the network as it is cannot tell; that of the
network without the path, after some more training, can.

So, from the middle of a training on, some free paths are put on trial: as many as together raise
the negative log likelihood by less than `AFFORDABLE` at once, those that matter least first. The
training is continued twice from the same state, with these paths and without them, on the same
batches at the same learning rates, and measured at every evidence step on the same data with the
same probes. The branch that has lost weights has to make that good first, so the gap between the
two is followed (`verdict`) until it is clear, at the latest at the end of the training: where the
branch without the paths has as much evidence as the other (to `SAME`), it is the one that goes on,
and the paths stay off. Else the branch with the paths goes on as if nothing had been tried, and
half of the paths are tried next; a path that fails alone is needed, and is not tried again.

Both branches have had the same training. To compare with the evidence from before the trial would
count what any further training brings as a merit of the branch without the paths. The price is
that the epochs of a trial are trained twice.

A path that is off has weights of exactly zero, which every training step leaves there, and the
largest precision: no output, no effective parameters, no part in the evidence. It is not computed
either, so that training and evidence take less time from then on.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import linear_regression
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import foreach_zero_
from symrazor.core.evidence import Evidence
from symrazor.core.parameters import weights
from symrazor.core.prior import LOG_PRECISION_BOUNDS
from symrazor.core.progress import Record
from symrazor.inference.razor import Razor
from symrazor.inference.razor_state import State, copy_state
from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed, free_groups, spatial_layers

log = logging.getLogger("symrazor")

AFFORDABLE = 0.5
"""Nats per datum that switching paths off may cost before any further training."""
SAME = 0.01
"""Nats per datum by which two estimates may differ and still count as equal."""
DEAD = 0.01
"""Share of a layer's effective parameters up to which a path is as good as off."""
FIRST, LAST = 0.5, 0.85
"""The part of a training in which a trial may begin."""


@runtime_checkable
class Run(Protocol):
    """What a trial has to know of a training."""

    razor: Razor
    history: list[Record]

    def nll(self) -> float:
        """How well the model fits, on the same data always and the same in every process."""

    def branch(self) -> State:
        """A copy of all that further training depends on."""

    def load_branch_(self, state: State) -> None:
        """Go on from `branch()`."""


@dataclass
class Trial:
    """Two branches of a training, one of which is under way.

    Args:
        paths: which one branch has and the other has not.
        begun: epoch at the end of which they parted.
        other: the state of the branch that waits.
        without: whether the branch under way is the one without the paths.
        gaps: by how much evidence per datum the branch without them was behind, look by look.
        rival: evidence per datum of the branch with the paths, to be compared with.
        gamma: effective parameters of that branch.
    """

    paths: list[str]
    begun: int
    other: State
    without: bool = False
    gaps: list[float] = field(default_factory=list)
    rival: float = 0.0
    gamma: Mapping[str, float] | None = None

    def state_dict(self) -> State:
        """As plain as the branch in it."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def verdict(gaps: Sequence[float], left: int) -> bool | None:
    """Whether paths stay off; None for: train both branches on.

    They stay off where the gap is at most `SAME` at the end of the training or, from the second
    look on, now and by the straight line through all looks at the end as well. A lead alone is not
    enough: the branch that has lost weights has fewer to pay for at once, while the other one's
    precisions still rise, and such a lead can melt. Paths stay on where the gap is larger than
    `SAME` and does not shrink, or shrinks by a factor that will not do.

    Args:
        gaps: by how much evidence per datum the branch without the paths was behind, look by look.
        left: evidence steps to come.
    """
    gap = gaps[-1]
    if left == 0:
        return gap <= SAME
    if len(gaps) == 1:
        return None
    if gap <= SAME:
        growth = linear_regression(range(len(gaps)), gaps).slope
        return True if gap + left * growth <= SAME else None
    closes = gap < gaps[-2] and gap * (gap / gaps[-2]) ** left <= SAME
    return None if closes else False


def _members(model: nn.Module, theta: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """All weights of each free path, whatever their priors.

    Not of a path with a part that is frozen: it would still have an output.
    """
    found = {}
    for path in sorted(free_groups(model)):
        module = model.get_submodule(path)
        assert isinstance(module, Path)
        own = [name for name in theta if name.startswith(f"{path}.")]
        if own and all(weight.requires_grad for weight in module.output_weights):
            found[path] = own
    return found


class Trials:
    """Which free paths of a model are off, and which of them on trial.

    Args:
        run: the training.

    Attributes:
        trial: the one under way, or None.
        needed: paths that failed alone.
    """

    def __init__(self, run: Run) -> None:
        """Nothing is off."""
        self.run, self.razor = run, run.razor
        theta = weights(self.razor.model)
        self.members = _members(self.razor.model, theta)
        self.theta = {name: theta[name] for names in self.members.values() for name in names}
        self.off = []
        self.needed: list[str] = []
        self.trial: Trial | None = None
        self.most = len(self.members)

    @property
    def off(self) -> list[str]:
        """Names of the paths that are off, as in "2.paths.1"."""
        return list(self._off)

    @off.setter
    def off(self, paths: Sequence[str]) -> None:
        self._off = list(paths)
        for name, layer in spatial_layers(self.razor.model).items():
            if isinstance(layer, Relaxed):
                own = [f"{name}.paths.{i}".removeprefix(".") for i in range(len(layer.paths))]
                layer.disabled = frozenset(i for i, path in enumerate(own) if path in self._off)

    def look(self, estimate: Evidence, progress: float, left: int) -> None:
        """After an evidence step: turn to the other branch, settle a trial, begin one.

        Args:
            estimate: what the step found.
            progress: the part of the training that is done.
            left: evidence steps to come.
        """
        self._hold_all_()
        gamma: Mapping[str, float] | None = estimate.effective_parameters
        if self.trial is not None:
            gamma = self._compare(self.trial, estimate, left)
        if gamma is not None and FIRST <= progress <= LAST and self.razor.best is not None:
            self._begin(gamma)

    def finish(self) -> None:
        """Let the model compute all paths again, those with weights of zero too."""
        for layer in self.razor.model.modules():
            if isinstance(layer, Relaxed):
                layer.disabled = frozenset()

    @torch.no_grad()
    def hold_(self) -> None:
        """Keep the weights of paths that are off at zero."""
        held: list[Tensor] = [self.theta[name] for path in self.off for name in self.members[path]]
        if held:
            foreach_zero_(held)

    def _hold_all_(self) -> None:
        """The largest precision for groups that are off altogether; that is no bound to report."""
        self.hold_()
        prior = self.razor.prior
        dead = {name for path in self.off for name in self.members[path]}
        for group, log_delta in zip(prior.names, prior.log_precision, strict=True):
            if dead.issuperset(prior.members(group)):
                log_delta.data.fill_(LOG_PRECISION_BOUNDS[1])
                if group in self.razor.at_bound:
                    self.razor.at_bound.remove(group)

    # Trials.

    def _begin(self, gamma: Mapping[str, float]) -> None:
        """Make the branch without some paths; the one with them goes on first."""
        chosen = self._affordable(self._alive(gamma))
        if not chosen:
            return
        off, present = self.off, self.run.branch()
        self.off = [*off, *chosen]
        self._hold_all_()
        self.razor.best = self.razor.best_state = None
        self.trial = Trial(chosen, len(self.run.history), self.run.branch())
        self.off = off
        self.run.load_branch_(present)
        log.info("on trial: %s", ", ".join(chosen))

    def _compare(self, trial: Trial, estimate: Evidence, left: int) -> Mapping[str, float] | None:
        """After an evidence step of one branch: the other one's turn, or the end of the trial.

        Returns:
            At the end, the effective parameters of the network that goes on.
        """
        own, gamma = float(estimate.per_datum), estimate.effective_parameters
        if not trial.without:
            trial.rival, trial.gamma = own, dict(gamma)
            self._turn(trial)
            return None
        trial.gaps.append(trial.rival - own)
        stay_off = verdict(trial.gaps, left)
        if not stay_off:
            self._turn(trial)
        if stay_off is None:
            return None
        self._end(trial, own)
        return gamma if stay_off else trial.gamma

    def give_up(self) -> bool:
        """Whether what diverged was the branch without some paths; the other one then goes on."""
        if self.trial is None or not self.trial.without:
            return False
        self._turn(self.trial)
        self._end(self.trial, None)
        return True

    def _end(self, trial: Trial, own: float | None) -> None:
        """Of the two branches, the one that goes on is under way.

        Args:
            trial: settled by now.
            own: evidence per datum without the paths, None if it has diverged.
        """
        if trial.without:
            self.most = len(self.members)
        else:
            self.needed += trial.paths if len(trial.paths) == 1 else []
            self.most = max(1, len(trial.paths) // 2)
        self.trial = None
        self.run.history[-1]["trial"] = {
            "paths": trial.paths,
            "with": trial.rival,
            "without": own,
            "stay_off": trial.without,
        }
        log.info("%s: %s", "stay off" if trial.without else "stay on", ", ".join(trial.paths))

    def _turn(self, trial: Trial) -> None:
        """To the other branch."""
        present = self.run.branch()
        self.run.load_branch_(trial.other)
        trial.other, trial.without = present, not trial.without
        kept = [path for path in self.off if path not in trial.paths]
        self.off = [*kept, *trial.paths] if trial.without else kept

    def _alive(self, gamma: Mapping[str, float]) -> list[str]:
        """Paths that may be tried and have more than `DEAD` of their layer's parameters."""
        found = []
        for path, names in self.members.items():
            layer = path.rpartition("paths.")[0]
            whole = sum(value for name, value in gamma.items() if name.startswith(layer))
            own = sum(gamma[name] for name in names)
            if own > DEAD * whole and path not in self.off and path not in self.needed:
                found.append(path)
        return found

    @torch.no_grad()
    def _affordable(self, candidates: Sequence[str]) -> list[str]:
        """Paths that can be switched off together, those that matter least first."""
        start, theta = self.run.nll(), copy_state(self.theta)
        cost = {}
        for path in candidates:
            self._zero(path)
            cost[path] = self.run.nll()
            self._put_back(path, theta)
        chosen: list[str] = []
        for path in sorted(cost, key=lambda path: cost[path])[: self.most]:
            self._zero(path)
            if not self.run.nll() <= start + AFFORDABLE:
                break
            chosen.append(path)
        for path in candidates:
            self._put_back(path, theta)
        return chosen

    def _zero(self, path: str) -> None:
        foreach_zero_([self.theta[name] for name in self.members[path]])

    def _put_back(self, path: str, theta: dict[str, Tensor]) -> None:
        for name in self.members[path]:
            self.theta[name].copy_(theta[name])

    # State.

    def state_dict(self) -> State:
        """All that the rest of the trials depends on."""
        return {
            "off": self.off,
            "needed": list(self.needed),
            "most": self.most,
            "trial": None if self.trial is None else self.trial.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`."""
        self.off, self.needed, self.most = state["off"], list(state["needed"]), state["most"]
        self.trial = None if state["trial"] is None else Trial(**state["trial"])
