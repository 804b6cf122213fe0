r"""Try to remove free paths during training, and let the evidence decide.

A free path that does no harm is not necessarily needed. F-FC can compute equivariant maps (such as
the mean of a channel, added to every pixel), and a convolution beside it then has no reason to
learn them. The evidence of the whole network cannot tell; the evidence of the network without the
path, after some more training, can.

From the middle of a training on, some free paths are therefore put on trial: those that matter
least first, as many as together raise the negative log likelihood by less than
`MAX_INITIAL_LOSS`. Training continues twice from the same state, with and without these paths, on
the same batches and learning rates, and both branches are measured at every evidence step on the
same data with the same probes. The branch without the paths first has to make up for the weights it
lost, so the gap between the branches is followed (`verdict`) until the outcome is clear, at the
latest until the end of training. If the branch without the paths reaches the evidence of the other
(up to `TOLERANCE`), it continues and the paths stay off. Otherwise the branch with the paths
continues as if nothing had happened, and half of the paths are tried next. A path that fails alone
is needed and is not tried again.

Both branches are trained equally long. A comparison with the evidence before the trial would credit
the branch without the paths with the gain of any further training. The price is that the epochs of
a trial are trained twice.

A path that is off has weights of exactly zero, which every training step keeps, and the largest
precision: it has no output, no effective parameters and no effect on the evidence. It is not
computed either, so training and evidence become faster.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import foreach_zero_
from symrazor.core.parameters import copy_state, weights
from symrazor.inference.evidence import Evidence
from symrazor.inference.razor_state import State
from symrazor.layers.path import Path
from symrazor.layers.relaxed import Relaxed, free_groups, spatial_layers

if TYPE_CHECKING:
    from symrazor.training.evidence_training import Training

log = logging.getLogger("symrazor")

MAX_INITIAL_LOSS = 0.5
"""Nats per datum that switching paths off may cost before any further training."""
TOLERANCE = 0.01
"""Nats per datum up to which two estimates count as equal."""
DEAD_SHARE = 0.01
"""Share of a layer's effective parameters up to which a path counts as off."""
EARLIEST, LATEST = 0.5, 0.85
"""Fractions of the training between which a trial may begin."""


@dataclass
class Trial:
    """Two branches of a training; one is active, the state of the other is stored.

    Args:
        paths: paths that one branch has and the other lacks.
        begun: number of epochs before the branches separated.
        other: state of the inactive branch.
        without: whether the active branch is the one without the paths.
        gaps: evidence per datum by which that branch was behind, at each evidence step.
        rival: evidence per datum of the branch with the paths.
        gamma: effective parameters of the branch with the paths.
    """

    paths: list[str]
    begun: int
    other: State
    without: bool = False
    gaps: list[float] = field(default_factory=list)
    rival: float = 0.0
    gamma: Mapping[str, float] | None = None


def verdict(gaps: Sequence[float], left: int) -> bool | None:
    """Return whether paths stay off, or None to continue both branches.

    Paths stay off if the gap is at most `TOLERANCE` at the end of training, or, from the second
    evidence step on, now and also at the end by linear extrapolation of all gaps. A lead alone is
    not enough: the branch without the paths has fewer parameters to pay for at once, while
    precisions of the other branch still rise, so the lead can shrink. Paths stay on if the gap
    exceeds `TOLERANCE` and does not shrink, or shrinks too slowly. Gaps are evidences per datum;
    `left` evidence steps remain.
    """
    gap = gaps[-1]
    if left == 0:
        return gap <= TOLERANCE
    if len(gaps) == 1:
        return None
    if gap <= TOLERANCE:
        growth = linear_regression(range(len(gaps)), gaps).slope
        return True if gap + left * growth <= TOLERANCE else None
    will_close = gap < gaps[-2] and gap * (gap / gaps[-2]) ** left <= TOLERANCE
    return None if will_close else False


def _path_weights(model: nn.Module, theta: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of all weights of each removable free path.

    A path with frozen output weights is not removable: it would still have an output.
    """
    members = {}
    for path in sorted(free_groups(model)):
        module = model.get_submodule(path)
        assert isinstance(module, Path)
        names = [name for name in theta if name.startswith(f"{path}.")]
        if names and all(weight.requires_grad for weight in module.output_weights):
            members[path] = names
    return members


class Trials:
    """Track which free paths of a model are off, and which are on trial.

    Attributes:
        trial: the current trial, or None.
        needed: paths that failed alone.
        max_paths: largest number of paths in the next trial.
    """

    def __init__(self, run: "Training") -> None:
        self.run, self.razor = run, run.razor
        theta = weights(self.razor.model)
        self.members = _path_weights(self.razor.model, theta)
        self.theta = {name: theta[name] for names in self.members.values() for name in names}
        self.off = []
        self.needed: list[str] = []
        self.trial: Trial | None = None
        self.max_paths = len(self.members)

    @property
    def off(self) -> list[str]:
        """Names of the paths that are off, as in "2.paths.1"."""
        return list(self._off)

    @off.setter
    def off(self, paths: Sequence[str]) -> None:
        self._off = list(paths)
        for name, layer in spatial_layers(self.razor.model).items():
            if isinstance(layer, Relaxed):
                names = [f"{name}.paths.{i}".removeprefix(".") for i in range(len(layer.paths))]
                layer.disabled = frozenset(i for i, path in enumerate(names) if path in self._off)

    def update(self, estimate: Evidence, progress: float, left: int) -> None:
        """Switch branches, decide the trial, or begin one, after an evidence step.

        `progress` is the fraction of the training that is done, `left` counts later evidence steps.
        """
        self._hold_off_()
        gamma: Mapping[str, float] | None = estimate.effective_parameters
        if self.trial is not None:
            gamma = self._compare(self.trial, estimate, left)
        can_begin = EARLIEST <= progress <= LATEST and self.razor.best is not None
        if gamma is not None and can_begin:
            self._begin(gamma)

    def finish(self) -> None:
        """Let the model compute all paths again, including those with zero weights."""
        for layer in self.razor.model.modules():
            if isinstance(layer, Relaxed):
                layer.disabled = frozenset()

    @torch.no_grad()
    def hold_(self) -> None:
        """Keep the weights of paths that are off at zero."""
        zero: list[Tensor] = [self.theta[name] for path in self.off for name in self.members[path]]
        if zero:
            foreach_zero_(zero)

    def _hold_off_(self) -> None:
        """Set weights that are off to zero, and prior groups that are off to the largest precision.

        These groups are not reported as being at a bound.
        """
        self.hold_()
        switched_off = {name for path in self.off for name in self.members[path]}
        for group in self.razor.prior.switch_off_(switched_off):
            if group in self.razor.at_bound:
                self.razor.at_bound.remove(group)

    def _begin(self, gamma: Mapping[str, float]) -> None:
        """Create the branch without some paths; the branch with them continues first."""
        chosen = self._affordable(self._candidates(gamma))
        if not chosen:
            return
        off, present = self.off, self.run.branch()
        self.off = [*off, *chosen]
        self._hold_off_()
        self.razor.best = self.razor.best_state = None
        self.trial = Trial(chosen, len(self.run.history), self.run.branch())
        self.off = off
        self.run.load_branch_(present)
        log.info("Trial without the free paths %s begins.", ", ".join(chosen))

    def _compare(self, trial: Trial, estimate: Evidence, left: int) -> Mapping[str, float] | None:
        """Switch to the other branch, or end the trial and return the survivor's gamma."""
        per_datum, gamma = float(estimate.per_datum), estimate.effective_parameters
        if not trial.without:
            trial.rival, trial.gamma = per_datum, dict(gamma)
            self._switch_branch(trial)
            return None
        trial.gaps.append(trial.rival - per_datum)
        stay_off = verdict(trial.gaps, left)
        if not stay_off:
            self._switch_branch(trial)
        if stay_off is None:
            return None
        self._end(trial, per_datum)
        return gamma if stay_off else trial.gamma

    def give_up(self) -> bool:
        """If the branch without the paths diverged, continue with the other one; return whether."""
        if self.trial is None or not self.trial.without:
            return False
        self._switch_branch(self.trial)
        self._end(self.trial, None)
        return True

    def _end(self, trial: Trial, evidence_without: float | None) -> None:
        """End a trial; `evidence_without` is per datum, None if that branch diverged."""
        if trial.without:
            self.max_paths = len(self.members)
        else:
            self.needed += trial.paths if len(trial.paths) == 1 else []
            self.max_paths = max(1, len(trial.paths) // 2)
        self.trial = None
        self.run.history[-1]["trial"] = {
            "paths": trial.paths,
            "with": trial.rival,
            "without": evidence_without,
            "stay_off": trial.without,
        }
        outcome = "stay off" if trial.without else "stay on"
        log.info("Trial ends: the free paths %s %s.", ", ".join(trial.paths), outcome)

    def _switch_branch(self, trial: Trial) -> None:
        present = self.run.branch()
        self.run.load_branch_(trial.other)
        trial.other, trial.without = present, not trial.without
        kept = [path for path in self.off if path not in trial.paths]
        self.off = [*kept, *trial.paths] if trial.without else kept

    def _candidates(self, gamma: Mapping[str, float]) -> list[str]:
        """Return paths that may be tried and have more than `DEAD_SHARE` of their layer."""
        candidates = []
        for path, names in self.members.items():
            layer = path.rpartition("paths.")[0]
            of_layer = sum(value for name, value in gamma.items() if name.startswith(layer))
            of_path = sum(gamma[name] for name in names)
            excluded = path in self.off or path in self.needed
            if of_path > DEAD_SHARE * of_layer and not excluded:
                candidates.append(path)
        return candidates

    @torch.no_grad()
    def _affordable(self, candidates: Sequence[str]) -> list[str]:
        """Return paths that can be switched off together, those that matter least first."""
        start, theta = self.run.nll(), copy_state(self.theta)

        def nll_without(path: str) -> float:
            foreach_zero_([self.theta[name] for name in self.members[path]])
            return self.run.nll()

        def restore(path: str) -> None:
            for name in self.members[path]:
                self.theta[name].copy_(theta[name])

        losses = {}
        for path in candidates:
            losses[path] = nll_without(path)
            restore(path)
        chosen: list[str] = []
        for path in sorted(losses, key=losses.__getitem__)[: self.max_paths]:
            if not nll_without(path) <= start + MAX_INITIAL_LOSS:
                break
            chosen.append(path)
        for path in candidates:
            restore(path)
        return chosen

    def state_dict(self) -> State:
        """Return everything that further trials depend on."""
        return {
            "off": self.off,
            "needed": list(self.needed),
            "max_paths": self.max_paths,
            "trial": None if self.trial is None else dict(vars(self.trial)),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`."""
        self.off, self.needed = state["off"], list(state["needed"])
        self.max_paths = state["max_paths"]
        self.trial = None if state["trial"] is None else Trial(**state["trial"])
