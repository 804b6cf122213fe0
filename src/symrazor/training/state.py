"""The state of a run between two training steps: all that the rest of it depends on, and back.

A run is the model, the optimiser, the Razor (precisions, hyperparameters, best state, probes), four
random generators and a few counters. The order of the data is not stored: the generator that
shuffles is, as it was when the epoch began, together with the number of batches done since. So a
run can go on in the middle of an epoch.

A branch is the part of it that makes two runs from the same point comparable (`trials`): everything
but the number of steps taken in all, the time, and the trials themselves.
"""

import logging
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from symrazor.inference.razor_state import copy_state
from symrazor.training.checkpoint import State, compare, fingerprint
from symrazor.training.options import FitConfig

if TYPE_CHECKING:
    from symrazor.training.loop import Training

log = logging.getLogger("symrazor")

_ANOTHER_STREAM = 1_000_003  # seed + this: augmentation must not repeat the numbers of shuffling


def belongs_to(run: "Training") -> State:
    """What a checkpoint has to be resumed with."""
    x, y = run.data.x, run.data.y
    return {
        "options": run.options.fixed(),
        "data": {"x": _kind(x), "y": _kind(y), "fingerprint": fingerprint(x, y)},
        "likelihood": {"class": type(run.razor.likelihood).__name__},
        "model": {k: _kind(v) for k, v in run.razor.model.state_dict().items()},
    }


def course(options: FitConfig) -> str:
    """What may change when a run is resumed, but not from one process to the next.

    Where processes end at different epochs, or not all of them ask whether to stop, some would wait
    for the others for ever.
    """
    saves = options.save is not None or options.resume is not None
    return f"patience={options.patience}, keep={options.keep!r}, saves={saves}"


def branch_of(run: "Training") -> State:
    """A copy that later steps leave as it is."""
    rng = {"shuffle": run.epoch_start, "torch": torch.get_rng_state()}
    device = run.data.x.device
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    if run.options.augment is not None:
        rng[f"augment_{device.type}"] = run.augmenting.get_state()
    return {
        "batches_done": run.batches_done,
        "summed_nll": float(run.summed_nll),
        "stale": run.stale,
        "burn_in": run.burn_in.state_dict(),
        "history": list(run.history),
        "at_bound": list(run.razor.at_bound),
        "model": copy_state(run.razor.model.state_dict()),
        "optimiser": deepcopy(run.stepper.state_dict()),
        "razor": run.razor.state_dict(),
        "rng": rng,
    }


def load_branch_(run: "Training", state: State) -> None:
    """Go on from `branch_of`, on any device; bit for bit on the same one."""
    run.razor.load_state_dict(state["razor"])
    run.razor.at_bound = list(state["at_bound"])
    run.razor.model.train(state["batches_done"] > 0)  # as it was: a change may draw numbers
    run.razor.model.load_state_dict(state["model"])
    run.stepper.load_state_dict(state["optimiser"])
    run.stepper.record_anew()  # the optimiser's memory is elsewhere now
    run.burn_in.load_state_dict(state["burn_in"])
    _load_generators(run, state["rng"])
    run.batches_done = state["batches_done"]
    run.summed_nll.fill_(state["summed_nll"])
    run.stale, run.history = state["stale"], list(state["history"])


def state_of(run: "Training") -> State:
    """All of a run, for a checkpoint."""
    return {
        "belongs_to": run.belongs_to,
        "step": run.taken,
        "epoch": len(run.history),
        "seconds": run.seconds,
        "trials": None if run.trials is None else run.trials.state_dict(),
        **branch_of(run),
    }


def load_(run: "Training", state: State) -> None:
    """Continue from `state_of`.

    Raises:
        ValueError: a state of another model, other data or options; nothing is changed then.
    """
    missing = sorted(set(state_of(run)) - set(state))
    if missing:
        raise ValueError(
            f"expected a checkpoint of fit, got one without {missing}; do: continue with the "
            "version of symrazor that wrote it, or save to a new directory"
        )
    _check(run, state["belongs_to"])
    if (torch_then := state["versions"].get("torch")) != str(torch.__version__):
        log.warning(
            "the run was saved by torch %s and goes on with torch %s: equal up to rounding",
            torch_then,
            torch.__version__,
        )
    load_branch_(run, state)
    run.taken, run.seconds = state["step"], state["seconds"]
    if run.trials is not None:
        run.trials.load_state_dict(state["trials"])


def augmenting(seed: int, device: torch.device) -> torch.Generator:
    """The generator of the augmentation."""
    return torch.Generator(device).manual_seed(seed + _ANOTHER_STREAM)


def _check(run: "Training", saved: State) -> None:
    """Refuse a checkpoint of another run; options that are newer than it are at their defaults."""
    then, now = FitConfig().fixed() | saved["options"], run.belongs_to["options"]
    if then["epochs"] != now["epochs"]:
        raise ValueError(
            f"expected epochs={then['epochs']} as in the checkpoint, got {now['epochs']}: the "
            "learning rate of every step depends on it, those taken included; do: pass the "
            "epochs the run was started with, or fit again with the trained model and a new "
            "directory"
        )
    compare("options", then, now)
    for name in ("data", "likelihood", "model"):
        compare(name, saved[name], run.belongs_to[name])


def _load_generators(run: "Training", rng: dict[str, Tensor]) -> None:
    run.epoch_start = rng["shuffle"]
    run.data.generator.set_state(rng["shuffle"])
    torch.set_rng_state(rng["torch"])
    device = run.data.x.device
    if device.type == "cuda" and "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"], device)
    if run.options.augment is None:
        return
    if f"augment_{device.type}" in rng:
        run.augmenting.set_state(rng[f"augment_{device.type}"])
    else:  # no two kinds of devices draw the same numbers
        run.augmenting.manual_seed(run.options.seed + _ANOTHER_STREAM + run.stepper.done)
        log.warning("the run goes on with other augmentations on %s", device.type)


def _kind(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
