"""Options of a `Razor`, the prior that it starts with, and its state in checkpoints and records.

`structure="auto"` chooses the structure of the curvature by what the exact evidence would cost. The
evidence of the full Gauss-Newton matrix is exact in this respect, and unlike Kronecker factors it
is not biased against weight sharing. It is used if its cost fits the budget below: as a matrix over
weights ("full") for few weights, else over samples and outputs ("kernel"). Otherwise two lower
bounds are computed, EKFAC and blocks of samples, and the higher one is used.
"""

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn

from symrazor.core.parameters import weights
from symrazor.core.prior import GaussianPrior, PriorGroups
from symrazor.core.validation import check_at_least, short_repr
from symrazor.curvature.task import AUTO, DEFAULT_MEMORY, Method
from symrazor.curvature.weight_sharing import Layer
from symrazor.inference.evidence import Evidence
from symrazor.layers.relaxed import FREE_PATH_PRECISION, free_groups, path_groups
from symrazor.linalg.blocks import per_weight_precision_error

if TYPE_CHECKING:
    from symrazor.inference.razor import Razor

State = dict[str, Any]

MAX_FULL_WEIGHTS = 3000
"""Weights up to which the matrix over weights is used."""
MAX_KERNEL_ROWS = 6000
"""Samples times outputs up to which the matrix over them is used: at most 10 s on two CPU cores."""
MAX_KERNEL_PRODUCTS = 2e12
"""Squared rows times weights: a bound of the multiplications for all inner products of rows."""
MAX_READING_PRODUCTS = 2e11
"""Multiplications of an exact evidence that `fit` computes by default: seconds on a CPU core."""
MAX_BLOCK_PRODUCTS = 2e11
"""Multiplications for the inner products within blocks of samples."""
MIN_BLOCK = 10
"""Smallest block of samples that is worth its cost."""

_RAZORS: "WeakKeyDictionary[nn.Module, ReferenceType[Razor]]" = WeakKeyDictionary()


@dataclass(frozen=True, repr=False)
class RazorConfig(Method):
    """How a `Razor` estimates the evidence and updates the hyperparameters.

    Args:
        structure: structure of the curvature. "kron" (Kronecker factors), "ekfac" (a lower bound of
            the evidence), "diag", "block" (dense per tensor), "full" or "kernel" (all weights, as a
            matrix over weights or over samples), a name given to `register_structure`, or "auto"
            (the exact matrix if it is affordable, else the higher of two lower bounds).
        estimator: "exact", "mc" or "empirical".
        samples: probes per datum for "mc".
        probe: "spectral" or "label", for "mc".
        flavour: "expand" or "reduce", for "kron".
        blocks: "own" or "averaged" output factors of block-wise layers, for "kron".
        copies: "reduce" or "expand" over copies of a datum (see `Augmented`), for "kron".
        block: number of samples in a block for "kernel", which gives a lower bound of the evidence;
            None for all samples together.
        outputs: "joint", "independent" (a lower bound) or "sampled" (a lower bound on average) over
            the outputs of a sample, for "kernel".
        grouping: blocks of consecutive samples ("order") or of samples of one "class", for
            "kernel".
        scaling: how "kernel" scales a subset to all data: "matrix" or "geometric" (the mean of two
            bounds, see `minibatch_size`).
        update: "mackay" (fixed point) or "adam".
        prior_precision: starting precision, for all groups or by group name.
        free_precision: starting precision of free paths beside an equivariant one, where
            `prior_precision` is one number and groups are "path". None for 30, unless `fit` starts
            near the symmetric network (see `FitConfig`).
        prior_groups: "path" (the tensors of a path together, any other tensor alone), "tensor",
            "scalar", "layer", "diagonal" or a mapping name -> glob patterns.
        temperature: T of the tempered likelihood p^(1/T).
        damping: fraction of the way to the fixed point that an update takes, in log precision.
        inner_steps: updates of the precisions per estimate.
        lr: learning rate of Adam in log precisions and hyperparameters.
        burn_in: training steps (calls of penalty or shrink_) before the first update.
        pieces: number of parts of a batch that are processed one after the other if the network has
            hyperparameters. The gradient in them then needs no more memory than a training step.
        seed: seed of the "mc" estimator.
        tf32: whether evidence steps may use TF32 on a GPU.
        memory: largest memory, in GiB, for the output Hessians of a batch, which grow with the
            square of the number of classes. A batch that needs more is divided.
    """

    update: Literal["mackay", "adam"] = "mackay"
    prior_precision: float | Mapping[str, float] = 1.0
    free_precision: float | None = None
    prior_groups: PriorGroups = "path"
    temperature: float = 1.0
    damping: float = 0.5
    inner_steps: int = 5
    lr: float = 0.1
    burn_in: int = 0
    pieces: int = 2
    seed: int = 0
    tf32: bool = False
    memory: float = DEFAULT_MEMORY

    __repr__ = short_repr

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory > 0:
            raise ValueError(f"memory must be positive, got {self.memory} GiB.")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be above 0 and at most 1, got {self.damping}.")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}.")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr of the razor must be positive and finite, got {self.lr}.")
        if self.free_precision is not None and not self.has_free_precision:
            other = "prior_groups" if self.prior_groups != "path" else "prior_precision"
            raise ValueError(
                f"free_precision={self.free_precision} conflicts with {other}="
                f"{getattr(self, other)!r}, which sets the precision of every group. Give free "
                "paths their precision in prior_precision={group: precision, ...} and omit "
                "free_precision."
            )
        check_at_least(self, 1, "pieces")
        check_at_least(self, 0, "inner_steps", "burn_in")

    @property
    def has_free_precision(self) -> bool:
        """Whether free paths start with `free_precision` instead of `prior_precision`."""
        return self.prior_groups == "path" and not isinstance(self.prior_precision, Mapping)

    @property
    def method(self) -> Method:
        """The options of the curvature."""
        return Method(**{f.name: getattr(self, f.name) for f in fields(Method)})


def starting_prior(model: nn.Module, config: RazorConfig) -> GaussianPrior:
    """Return the prior of a config, with `free_precision` for free paths where it applies."""
    if config.prior_groups != "path":
        return GaussianPrior(weights(model), config.prior_precision, config.prior_groups)
    groups, precision = path_groups(model), config.prior_precision
    if not isinstance(precision, Mapping):
        free = FREE_PATH_PRECISION if config.free_precision is None else config.free_precision
        names = free_groups(model)
        precision = {group: free if group in names else precision for group in groups}
    return GaussianPrior(weights(model), precision, groups)


def check_no_kronecker(layers: Iterable[Layer]) -> None:
    """Raise ValueError if a layer has a Kronecker block, which needs one precision per tensor."""
    for layer in layers:
        if layer.factored_weight is not None:
            raise per_weight_precision_error(layer.factored_weight)


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


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors (and other values) are copies."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
        for key, value in state.items()
    }


def record_of(razor: "Razor", evidence: Evidence) -> dict[str, Any]:
    r"""Return the entries that an evidence step adds to the record of its epoch, as plain numbers.

    The terms of the evidence ("log_evidence", "log_likelihood", "log_prior", "log_det",
    "per_datum"), "complexity" $= \tfrac12$ log_det - log_prior, "precisions" {group: value} after
    the step, and "effective_parameters" {tensor: value}. A group with one precision per weight is
    recorded as their mean.
    """
    return {
        **evidence.to_dict(),
        "complexity": float(evidence.complexity.detach()),
        "precisions": {
            group: float(value.mean()) for group, value in razor.prior.precisions.items()
        },
        "effective_parameters": {k: float(v) for k, v in evidence.effective_parameters.items()},
    }


def exact_method(method: Method, n_weights: int, n_rows: int) -> Method | None:
    """Return the structure of the exact matrix that is cheaper, or None if both cost too much.

    Args:
        method: other options; exact structures use the exact estimator.
        n_weights: number of weights.
        n_rows: number of samples times columns of the root of the output Hessian.
    """
    is_full_affordable = n_weights <= MAX_FULL_WEIGHTS
    if is_full_affordable and n_weights <= n_rows:
        return replace(method, structure="full", estimator="exact")
    if n_rows <= MAX_KERNEL_ROWS and n_rows**2 * n_weights <= MAX_KERNEL_PRODUCTS:
        return replace(method, structure="kernel", estimator="exact")
    return replace(method, structure="full", estimator="exact") if is_full_affordable else None


def exact_products(method: Method, n_weights: int, n_rows: int) -> float:
    """Return the multiplications of an exact evidence, approximately; infinite if unaffordable."""
    exact = exact_method(method, n_weights, n_rows)
    if exact is None:
        return math.inf
    is_kernel = exact.structure == "kernel"
    size, length = (n_rows, n_weights) if is_kernel else (n_weights, n_rows)
    return float(size) ** 2 * (length + size)


def resolve(method: Method, n_weights: int, n_data: int, n_columns: int) -> list[Method]:
    """Return the methods to try for `structure="auto"`: the exact one, or lower bounds."""
    if method.structure != AUTO:
        return [method]
    exact = exact_method(method, n_weights, n_data * n_columns)
    if exact is not None:
        return [exact]
    bounds = [replace(method, structure="ekfac")]
    block = int(MAX_BLOCK_PRODUCTS / (n_data * n_columns**2 * n_weights))
    if block >= MIN_BLOCK:
        block = min(block, n_data)
        bounds.append(replace(method, structure="kernel", block=block, estimator="exact"))
    return bounds
