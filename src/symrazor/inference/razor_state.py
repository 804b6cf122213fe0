"""Save and load the state of a `Razor`, and find the latest `Razor` of a model."""

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn

from symrazor.core.evidence import Evidence
from symrazor.core.parameters import weights

if TYPE_CHECKING:
    from symrazor.inference.razor import Razor

State = dict[str, Any]

_RAZORS: "WeakKeyDictionary[nn.Module, ReferenceType[Razor]]" = WeakKeyDictionary()


def remember_razor(model: nn.Module, razor: "Razor") -> None:
    """Register the latest Razor of a model, without keeping either alive."""
    _RAZORS[model] = ref(razor)


def latest_razor(model: nn.Module) -> "Razor | None":
    """Return the latest Razor of this model, or None."""
    reference = _RAZORS.get(model)
    return None if reference is None else reference()


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
        "n_data": razor.n_data,
        "best": best,
        "best_state": razor.best_state,
    }


def load_razor_state(razor: "Razor", state: State) -> None:
    """Load what `razor_state` returned.

    Raises:
        ValueError: the state belongs to another data set or model; nothing is changed.
    """
    _check(razor, state)
    razor.likelihood.load_state_dict(state["likelihood"])
    razor.prior.load_state_dict(state["prior"])
    razor.precision_optimiser.load_state_dict(state["precision_optimiser"])
    if razor.eta_optimiser is not None:
        razor.eta_optimiser.load_state_dict(state["eta_optimiser"])
    razor.generator.set_state(state["generator"])
    razor.training_steps = state["training_steps"]
    razor.best_state = state["best_state"]
    razor.best = razor.latest = None
    if state["best"] is not None:
        razor.best = Evidence.from_dict(state["best"], razor.n_data, dict(state["best"]["gamma"]))


def _check(razor: "Razor", state: State) -> None:
    """Check that a state belongs to this data set and this model."""
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


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors (and other values) are copies."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
        for key, value in state.items()
    }
