"""Save and load the state of a `Razor` in checkpoints."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from symrazor.core.parameters import copy_state, weights
from symrazor.inference.evidence import Evidence

if TYPE_CHECKING:
    from symrazor.inference.razor import Razor

State = dict[str, Any]


def razor_state(razor: "Razor") -> State:
    """Return a copy of all state but the model's: tensors, numbers and nested dicts."""
    best = None
    if razor.best is not None:
        best = {**razor.best.to_dict(), "gamma": dict(razor.best.effective_parameters)}
    eta_optimiser = razor.eta_optimiser
    return {
        "prior": copy_state(razor.prior.state_dict()),
        "likelihood": copy_state(razor.likelihood.state_dict()),
        "tensors": _tensor_shapes(razor),
        "precision_optimiser": deepcopy(razor.precision_optimiser.state_dict()),
        "eta_optimiser": None if eta_optimiser is None else deepcopy(eta_optimiser.state_dict()),
        "generator": razor.generator.get_state(),
        "training_steps": razor.training_steps,
        "is_updated": razor.is_updated,
        "n_data": razor.n_data,
        "best": best,
        "best_state": razor.best_state,
    }


def load_razor_state(razor: "Razor", state: State) -> None:
    """Load what `razor_state` returned; a state of another model or data set changes nothing."""
    _check(razor, state)
    razor.likelihood.load_state_dict(state["likelihood"])
    razor.prior.load_state_dict(state["prior"])
    razor.precision_optimiser.load_state_dict(state["precision_optimiser"])
    if razor.eta_optimiser is not None:
        razor.eta_optimiser.load_state_dict(state["eta_optimiser"])
    razor.generator.set_state(state["generator"])
    razor.training_steps = state["training_steps"]
    razor.is_updated = state.get("is_updated", state["best"] is not None)
    for name, values in (state["best_state"] or {}).items():
        if _shapes(values) != _shapes(getattr(razor, name).state_dict()):
            raise ValueError(f"The best state of the checkpoint has another {name}.")
    razor.best_state = state["best_state"]
    razor.best = razor.latest = None
    if state["best"] is not None:
        razor.best = Evidence.from_dict(state["best"], razor.n_data, dict(state["best"]["gamma"]))


def _shapes(values: State) -> dict[str, Any]:
    """Return the shape of each tensor; None for a module's extra state."""
    return {key: getattr(value, "shape", None) for key, value in values.items()}


def _check(razor: "Razor", state: State) -> None:
    if "tensors" not in state:
        raise ValueError("The state was not saved by Razor.state_dict().")
    if state["n_data"] != razor.n_data:
        raise ValueError(
            f"The state belongs to a Razor with n_data={state['n_data']}, but this Razor has "
            f"n_data={razor.n_data}. Create the Razor with the same n_data."
        )
    prior, saved = razor.prior.state_dict(), state["prior"]
    if {k: v.shape for k, v in prior.items()} != {k: v.shape for k, v in saved.items()}:
        raise ValueError(
            f"The state has {len(saved)} prior groups, which do not match the {len(prior)} of this "
            "Razor. Check the model and prior_groups."
        )
    if state["tensors"] != _tensor_shapes(razor):
        raise ValueError(
            "The state belongs to a model with other weights or hyperparameters: "
            f"{state['tensors']}."
        )


def _tensor_shapes(razor: "Razor") -> dict[str, list[int]]:
    return {k: list(v.shape) for k, v in {**weights(razor.model), **razor.eta}.items()}
