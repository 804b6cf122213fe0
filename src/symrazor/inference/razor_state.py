"""The state of a Razor: all that is needed to go on, apart from the model, and back."""

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


def razor_state(razor: "Razor") -> State:
    """Tensors, numbers and nested dicts, copied."""
    best = None
    if razor.best is not None:
        best = {**razor.best.to_dict(), "gamma": dict(razor.best.effective_parameters)}
    eta = razor.eta_optimiser
    return {
        "prior": copy_state(razor.prior.state_dict()),
        "likelihood": copy_state(razor.likelihood.state_dict()),
        "tensors": _tensors(razor),
        "precision_optimiser": deepcopy(razor.precision_optimiser.state_dict()),
        "eta_optimiser": None if eta is None else deepcopy(eta.state_dict()),
        "generator": razor.generator.get_state(),
        "training_steps": razor.training_steps,
        "n_data": razor.n_data,
        "best": best,
        "best_state": razor.best_state,
    }


def load_razor_state(razor: "Razor", state: State) -> None:
    """Put a Razor where `saved` found one.

    Raises:
        ValueError: a state of another data set or another model; nothing is changed then.
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
    """That a state is one, of this data set and this model."""
    if "tensors" not in state:
        raise ValueError("expected what Razor.state_dict() returned, got something else")
    if state["n_data"] != razor.n_data:
        raise ValueError(f"expected a state for {razor.n_data} data, got {state['n_data']}")
    mine, theirs = razor.prior.state_dict(), state["prior"]
    if {k: v.shape for k, v in mine.items()} != {k: v.shape for k, v in theirs.items()}:
        raise ValueError(
            f"expected a state with {len(mine)} prior groups of the same shapes, got "
            f"{len(theirs)}; was it saved for another model or other prior_groups?"
        )
    if state["tensors"] != _tensors(razor):
        raise ValueError(
            "expected a state for the weights and hyperparameters of this model, got one for "
            f"{state['tensors']}"
        )


def _tensors(razor: "Razor") -> dict[str, list[int]]:
    """Names and shapes of what a state belongs to."""
    return {k: list(v.shape) for k, v in {**weights(razor.model), **razor.eta}.items()}


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with tensors (and whatever a module calls its extra state) of its own."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
        for key, value in state.items()
    }


_RAZORS: "WeakKeyDictionary[nn.Module, ReferenceType[Razor]]" = WeakKeyDictionary()


def remember_razor(model: nn.Module, razor: "Razor") -> None:
    """Note the Razor of a model; neither is kept alive by it."""
    _RAZORS[model] = ref(razor)


def latest_razor(model: nn.Module) -> "Razor | None":
    """The Razor that was made last for this very model, while it is alive."""
    found = _RAZORS.get(model)
    return None if found is None else found()
