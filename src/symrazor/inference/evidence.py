r"""Define `Evidence`, the options of its estimate, and the Laplace evidence.

Every estimator of the evidence returns an `Evidence`. That of a network is, by Laplace,

$$ \log p(D \mid \eta) \approx \log p(D \mid \theta_*, \eta)
   - \tfrac12 \theta_*^\top \Delta \theta_* - \tfrac12 \log |I + \Delta^{-1} H_\eta| $$

for a Gaussian prior; `Prior.evidence_term` and `Prior.log_curvature` define the second and third
term of other families. It is differentiable in every hyperparameter. The derivative in $\eta$ is
taken at fixed weights: at a mode the first two terms are stationary in $\theta$, and the drift of
the curvature with the mode is neglected. Hyperparameters of the forward pass enter the
log-determinant through $H_\eta$: see `symrazor.inference.hyper_updates`.

`structure="auto"` chooses the structure of the curvature by what the exact evidence would cost. The
evidence of the full Gauss-Newton matrix is exact in this respect, and unlike Kronecker factors it
is not biased against weight sharing. It is used if its cost fits the budget below: as a matrix over
weights ("full") for few weights, else over samples and outputs ("kernel"). Otherwise two lower
bounds are computed, EKFAC and blocks of samples, and the higher one is used.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from symrazor.core.errors import DivergenceError
from symrazor.core.parameters import weights
from symrazor.core.prior import GaussianPrior, Prior, PriorGroups
from symrazor.core.validation import check_at_least, short_repr
from symrazor.curvature.estimate import AUTO, Curvature, Method
from symrazor.curvature.kernel import Kernel
from symrazor.curvature.subset_kernel import SubsetKernel
from symrazor.curvature.task import DEFAULT_MEMORY
from symrazor.curvature.weight_sharing import Layer
from symrazor.layers.relaxed import FREE_PATH_PRECISION, free_groups, path_groups
from symrazor.linalg.blocks import per_weight_precision_error

if TYPE_CHECKING:
    from symrazor.inference.razor import Razor

ByName = Mapping[str, Tensor]

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


@dataclass(frozen=True)
class Evidence:
    r"""The log evidence $\log p(D \mid \eta)$ of a whole data set, with all constants.

    Natural logarithm; log_evidence = log_likelihood + log_prior - log_det / 2. The terms below are
    those of exact and Laplace estimates. A variational estimate is a lower bound: its
    `log_likelihood` is an expectation under the posterior, and its `log_det` holds the part of the
    divergence that is not in `log_prior`, so that `complexity` is the divergence
    (`inference.variational.bound`).

    Args:
        log_likelihood: $\log p(D \mid \theta_*, \eta)$ at the present weights, divided by the
            temperature.
        log_prior: $-\tfrac12 \theta_*^\top \Delta \theta_*$, the log prior density relative to its
            peak.
        log_det: $\log |I + \Delta^{-1} H|$, twice the log ratio of the prior's to the posterior's
            volume. The Gaussian normalisers $(2\pi)^{P/2}$ of the two cancel.
        n_data: number of data.
        effective_parameters: tensor name -> $\gamma = \mathrm{tr}\, H (H + \Delta)^{-1}$, between 0
            and the number of weights: how many of them the data determined.
        structure: structure of the curvature in words, "" if there is none.
        gap: uncertainty in nats, or None. For the higher of two lower bounds it is the distance
            to the lower one. For a kernel form, the exact value is at most this much higher.
    """

    log_likelihood: Tensor
    log_prior: Tensor
    log_det: Tensor
    n_data: int
    effective_parameters: dict[str, float] = field(default_factory=dict)
    structure: str = ""
    gap: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the curvature is the full Gauss-Newton matrix."""
        return self.structure == Method(structure="full").description

    @property
    def complexity(self) -> Tensor:
        """The Occam factor in nats: log_likelihood - log_evidence."""
        return 0.5 * self.log_det - self.log_prior

    @property
    def log_evidence(self) -> Tensor:
        """The log marginal likelihood."""
        return self.log_likelihood - self.complexity

    @property
    def per_datum(self) -> Tensor:
        """log_evidence / n_data."""
        return self.log_evidence / self.n_data

    def check_finite(self) -> None:
        """Raise DivergenceError if the value is infinite or NaN."""
        if not math.isfinite(float(self.log_evidence.detach())):
            raise DivergenceError(
                f"The evidence is not finite ({self}). The weights may have diverged: lower the "
                "learning rate."
            )

    def detach(self) -> "Evidence":
        """Return the same values without a graph."""
        terms = ("log_likelihood", "log_prior", "log_det")
        return replace(self, **{name: getattr(self, name).detach() for name in terms})

    @classmethod
    def from_dict(
        cls, values: Mapping[str, float], n_data: int, effective_parameters: dict[str, float]
    ) -> "Evidence":
        """Return the evidence that `to_dict` was called on."""
        log_likelihood, log_prior, log_det = (
            torch.tensor(values[term], dtype=torch.float64)
            for term in ("log_likelihood", "log_prior", "log_det")
        )
        return cls(log_likelihood, log_prior, log_det, n_data, effective_parameters)

    def to_dict(self) -> dict[str, float]:
        """Return the terms as plain numbers."""
        return {
            "log_evidence": float(self.log_evidence),
            "log_likelihood": float(self.log_likelihood),
            "log_prior": float(self.log_prior),
            "log_det": float(self.log_det),
            "per_datum": float(self.per_datum),
        }

    def __repr__(self) -> str:
        with torch.no_grad():
            return (
                f"Evidence({float(self.log_evidence):.3f} = "
                f"fit {float(self.log_likelihood):.3f} - "
                f"complexity {float(self.complexity):.3f}, "
                f"{float(self.per_datum):.4f} per data point)"
            )


def log_curvatures(prior: Prior, curvature: Curvature, theta: ByName) -> dict[str, Tensor]:
    """Return the prior's log curvature of every tensor that has a curvature block."""
    names = [name for block in curvature.blocks for name in block.names]
    return prior.log_curvature({name: theta[name] for name in names})


def laplace_evidence(curvature: Curvature, prior: Prior, theta: ByName) -> Evidence:
    """Return the Laplace evidence, differentiable in prior, weights and curvature blocks."""
    log_curvature = log_curvatures(prior, curvature, theta)
    return Evidence(
        curvature.log_likelihood,
        prior.evidence_term(theta),
        curvature.stacked.logdet(log_curvature),
        curvature.n_data,
        effective_parameters(curvature, log_curvature),
        curvature.method.description,
        _gap(curvature, log_curvature),
    )


def _gap(curvature: Curvature, log_curvature: Mapping[str, Tensor]) -> float | None:
    """Return the distance to another bound, or the width of the interval of a kernel form."""
    for block in curvature.blocks:
        if isinstance(block, SubsetKernel):
            lower, upper = block.bounds(log_curvature)
            return 0.5 * float((upper - lower).detach())
    kernels = [block for block in curvature.blocks if isinstance(block, Kernel)]
    if curvature.gap is not None or not kernels:
        return curvature.gap
    return 0.5 * sum(kernel.residual(log_curvature) for kernel in kernels)


def tightest(estimates: Sequence[Curvature], prior: Prior, theta: ByName) -> Curvature:
    """Return the estimate with the highest evidence, of several lower bounds, with its lead."""
    if len(estimates) == 1:
        return estimates[0]
    log_curvature = log_curvatures(prior, estimates[0], theta)
    values = [float(c.prepare().stacked.logdet(log_curvature).detach()) for c in estimates]
    best = min(range(len(values)), key=values.__getitem__)
    return replace(estimates[best], gap=0.5 * (max(values) - min(values)))


def effective_parameters(curvature: Curvature, log_curvature: ByName) -> dict[str, float]:
    r"""Return $\gamma = \mathrm{tr}\, H (H + \Delta)^{-1}$ of each tensor.

    $\gamma$ is minus the derivative of the log-determinant in the log curvature of the prior, so
    one backward pass computes it for every structure.
    """
    leaves = {name: v.detach().clone().requires_grad_() for name, v in log_curvature.items()}
    log_det = curvature.stacked.logdet(leaves)
    gradients = torch.autograd.grad(log_det, list(leaves.values()), retain_graph=True)
    gamma = torch.stack([-g.sum() for g in gradients]).tolist()  # one synchronisation for all
    return dict(zip(leaves, gamma, strict=True))


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


def remember_razor(model: nn.Module, razor: "Razor") -> None:
    """Register the latest Razor of a model, without keeping either alive."""
    _RAZORS[model] = ref(razor)


def latest_razor(model: nn.Module) -> "Razor | None":
    """Return the latest Razor of this model, or None."""
    reference = _RAZORS.get(model)
    return None if reference is None else reference()


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
