r"""Networks without some of their free paths, tried while they train: the razor itself.

A free path that does no harm is not the same as one that is needed. F-FC can compute maps that are
equivariant (the mean of a channel, added to every pixel), and a convolution beside it then has no
reason to learn what does the same. The evidence of the network as it is cannot tell; that of the
network without the path, after some more training, can.

So, from the middle of a training on, free paths are switched off: as many as together raise the
negative log likelihood by less than `AFFORDABLE` at once, those that matter least first. Training
goes on. If one of the next `LOOKS` evidence steps finds as much evidence as any step before (to
`SAME`), the paths stay off. Else the state from before comes back, with half of the paths to try
next; a path that fails alone is needed, and is not tried again.

A path that is off has weights of exactly zero, which every training step leaves there, and the
largest precision: no output, no effective parameters, no part in the evidence. It is not computed
either, so that training and evidence take less time from then on.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symrazor.evidence.value import Evidence
from symrazor.hyper import LOG_PRECISION_BOUNDS, weights
from symrazor.layers.relaxed import Relaxed, free_groups, path_groups, spatial_layers
from symrazor.razor.razor import Razor
from symrazor.razor.state import State, copied

log = logging.getLogger("symrazor")

AFFORDABLE = 0.5
"""Nats per datum that switching paths off may cost before any further training."""
SAME = 0.01
"""Nats per datum by which two estimates may differ and still count as equal."""
DEAD = 0.01
"""Share of a layer's effective parameters up to which a path is as good as off."""
LOOKS = 2
"""Evidence steps in which the loss has to be made good."""
FIRST, LAST = 0.5, 0.85
"""The part of a training in which a trial may begin."""

Nll = Callable[[], float]
"""Mean negative log likelihood of the model as it is, the same in every process."""


class Trials:
    """Which free paths of a model are off, and whether that is settled.

    Args:
        razor: of the model.
        nll: how well the model fits, always on the same data.
    """

    def __init__(self, razor: Razor, nll: Nll) -> None:
        """Nothing is off."""
        self.razor, self.nll = razor, nll
        free, theta = free_groups(razor.model), weights(razor.model)
        groups = path_groups(razor.model)
        self.members = {path: groups[path] for path in sorted(free) if path in groups}
        self.theta = {name: theta[name] for names in self.members.values() for name in names}
        self.off = []
        self.needed: list[str] = []
        self.before: State | None = None
        self.looks, self.most = 0, len(self.members)

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
                layer.silent = frozenset(i for i, path in enumerate(own) if path in self._off)

    def look(self, estimate: Evidence, progress: float) -> None:
        """After an evidence step: settle the trial under way, or begin one.

        Args:
            estimate: what the step found.
            progress: the part of the training that is done.
        """
        if self.before is not None:
            self._settle(float(estimate.per_datum), progress >= 1)
        elif FIRST <= progress <= LAST and self.razor.best is not None:
            self._begin(estimate.effective_parameters, float(self.razor.best.per_datum))
        self.hold_()
        self._tighten()

    def finish(self) -> None:
        """Let the model compute all paths again, those with weights of zero too."""
        for layer in self.razor.model.modules():
            if isinstance(layer, Relaxed):
                layer.silent = frozenset()

    @torch.no_grad()
    def hold_(self) -> None:
        """Keep the weights of paths that are off at zero."""
        held: list[Tensor] = [self.theta[name] for path in self.off for name in self.members[path]]
        if held:
            torch._foreach_zero_(held)

    def _tighten(self) -> None:
        """The largest precision for groups that are off altogether; that is no bound to report."""
        prior = self.razor.prior
        dead = {name for path in self.off for name in self.members[path]}
        for group, log_delta in zip(prior.names, prior.log_precision, strict=True):
            if dead.issuperset(prior.members(group)):
                log_delta.data.fill_(LOG_PRECISION_BOUNDS[1])
                if group in self.razor.at_bound:
                    self.razor.at_bound.remove(group)

    # Trials.

    def _begin(self, gamma: Mapping[str, float], per_datum: float) -> None:
        model, razor = copied(self.razor.model.state_dict()), self.razor.state_dict()
        before = {"per_datum": per_datum, "off": self.off, "model": model, "razor": razor}
        chosen = self._affordable(self._alive(gamma))
        if not chosen:
            return
        self.before, self.looks = before, 0
        self.off = [*self.off, *chosen]
        self.razor.best = self.razor.best_state = None
        log.info("switched off on trial: %s", ", ".join(chosen))

    def _settle(self, per_datum: float, last: bool) -> None:
        assert self.before is not None
        self.looks += 1
        tried = [path for path in self.off if path not in self.before["off"]]
        if per_datum >= self.before["per_datum"] - SAME:
            log.info("stay off: %s", ", ".join(tried))
            self.before, self.most = None, len(self.members)
        elif last or self.looks >= LOOKS:
            log.info("back on: %s", ", ".join(tried))
            self.needed += tried if len(tried) == 1 else []
            self.most = max(1, len(tried) // 2)
            self._restore()

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
        """Paths that can be switched off together, those that matter least first; now at zero."""
        start, theta = self.nll(), copied(self.theta)
        cost = {}
        for path in candidates:
            self._zero(path)
            cost[path] = self.nll()
            self._put_back(path, theta)
        chosen: list[str] = []
        for path in sorted(cost, key=lambda path: cost[path]):
            self._zero(path)
            if len(chosen) >= self.most or not self.nll() <= start + AFFORDABLE:
                self._put_back(path, theta)
                break
            chosen.append(path)
        return chosen

    def _zero(self, path: str) -> None:
        torch._foreach_zero_([self.theta[name] for name in self.members[path]])

    def _put_back(self, path: str, theta: dict[str, Tensor]) -> None:
        for name in self.members[path]:
            self.theta[name].copy_(theta[name])

    # State.

    def _restore(self) -> None:
        """What was before a trial; the optimiser keeps its memory of it."""
        assert self.before is not None
        self.razor.model.load_state_dict(self.before["model"])
        self.razor.load_state_dict(self.before["razor"])
        self.off, self.before = self.before["off"], None

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the trials depends on."""
        return {
            "off": self.off,
            "needed": list(self.needed),
            "before": self.before,
            "looks": self.looks,
            "most": self.most,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.off, self.needed = state["off"], list(state["needed"])
        self.before, self.looks, self.most = state["before"], state["looks"], state["most"]
