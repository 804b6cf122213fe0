r"""Training by the evidence lower bound.

$$ \mathrm{ELBO}/N = E_q[\log p(y \mid x, H_{\theta,\eta})]
   - \tfrac1N \sum_l \mathrm{KL}(q_l \,\|\, N(0, v_l^*)) $$

with the best prior variance $v_l^*$ of every layer in closed form (the collapsed divergence). The
posterior q and the conserved quantities eta maximise the same bound: a symmetry that the data have
costs no fit and needs less of a posterior.
"""

import copy
import time
from collections.abc import Callable
from contextlib import closing

from symrazor.dynamics.config import TrainConfig
from symrazor.dynamics.hamiltonian import SymmetrisedNetwork
from symrazor.dynamics.journal import Journal, Page
from symrazor.dynamics.loop import Loop
from symrazor.dynamics.trained import Record, Trained, evidence_bound
from symrazor.dynamics.trajectories import Transitions
from symrazor.training.interrupt import Interruption

Progress = Callable[[Record], None]


def train(
    model: SymmetrisedNetwork,
    data: Transitions,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> Trained:
    """Maximise the bound (or the likelihood) by Adam, with a cosine to zero.

    A step whose flows or gradients overflow is skipped and counted; training goes on.

    Args:
        model: changed in place.
        data: transitions, see `transitions`.
        config: options.
        progress: called with each record.
        journal: keeps checkpoints; a training that is in it goes on, or has its result at once.

    Raises:
        ValueError: data that do not fit the model or the target.
        FloatingPointError: nothing but such steps.
        KeyboardInterrupt: SIGINT, and with a journal a checkpoint was written.
        SystemExit: SIGTERM, with a journal, and a checkpoint was written.
    """
    config = config or TrainConfig()
    _check(model, data, config)
    page = None if journal is None else journal.next(model, data, config)
    loop = Loop(model, data, config)
    if page is not None and page.loop is not None:
        loop.load_state_dict(page.loop)
    if page is None or page.result is None:
        result = _run(loop, progress, page)
        result.bound = evidence_bound(result, data)
        if page is not None:
            page.finish(loop.state_dict(), {"bound": result.bound})
        return result
    if "error" in page.result:
        raise FloatingPointError(page.result["error"])
    result = loop.result()
    result.bound = page.result["bound"]
    return result


def _check(model: SymmetrisedNetwork, data: Transitions, config: TrainConfig) -> None:
    """Refuse data of another phase space, and windows of several steps as velocities."""
    phase, got = model.network.phase, data.x.shape[1]
    if phase != got:
        raise ValueError(f"expected states of {phase} entries, as the network has, got {got}")
    if config.target == "derivative" and data.y.shape[1] != 1:
        raise ValueError(
            f"expected velocities for target='derivative', got windows of {data.y.shape[1]} steps; "
            "do make them with velocities(trajectories)"
        )


def _run(loop: Loop, progress: Progress | None, page: Page | None) -> Trained:
    """Take the steps that are left."""
    config = loop.config
    started = time.monotonic() - loop.seconds
    with Interruption(page is not None) as stop, closing(loop):
        while loop.done < config.steps and loop.share < 1:
            loop.step(loop.share)
            loop.tick(time.monotonic() - started)
            if loop.done % config.record == 0 or loop.done == config.steps or loop.share >= 1:
                try:
                    loop.history.append(loop.read())
                except FloatingPointError as error:
                    if page is not None:
                        page.finish(loop.state_dict(), {"error": str(error)})
                    raise
                if progress is not None:
                    progress(loop.history[-1])
            if page is not None:
                page.turn(stop, loop.state_dict)
    return loop.result()


def seconds_per_step(
    model: SymmetrisedNetwork, data: Transitions, config: TrainConfig, steps: int = 8
) -> float:
    """What a step of training costs here, from a few steps of a copy.

    Args:
        model: not changed.
        data: transitions.
        config: of the training.
        steps: that are timed, after as many that are not.
    """
    started = 0.0
    with closing(Loop(copy.deepcopy(model), data, config)) as loop:
        for step in range(2 * steps):
            if step == steps:
                loop.skipped()  # waits for a device
                started = time.monotonic()
            loop.step(0.0)
        loop.skipped()
        return (time.monotonic() - started) / steps
