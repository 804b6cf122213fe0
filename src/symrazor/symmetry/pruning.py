r"""Remove hidden units that the data do not support, and return the smaller dense network.

A unit without incoming weights is constant, so that it can be removed. The Savage-Dickey ratio
gives the odds of the network without it, from the posterior of its incoming weights and bias
$\theta_u \sim N(\mu_u, \Sigma_u)$ and their prior $N(0, \delta^{-1} I)$:

$$ \log \frac{p(D \mid \theta_u = 0)}{p(D)} = \log \frac{p(\theta_u = 0 \mid D)}{p(\theta_u = 0)}
   = -\tfrac12 \mu_u^\top \Sigma_u^{-1} \mu_u - \tfrac12 \log |\delta \Sigma_u| . $$

The first term is what the fit loses, with all other weights adapted; the second is the complexity
that is saved. Under a Kronecker block $H = G \otimes A$ with eigenvalues $\lambda_{oj}$ and
eigenvectors $U_G$, $U_A$, row u of the weight has

$$ \Sigma_u = U_A\, \mathrm{diag}_j \Big( \sum_o \frac{U_G[u, o]^2}{\lambda_{oj} + \delta} \Big)
   U_A^\top , $$

so that all odds follow from the eigenvectors at once. Units that replace each other all look
superfluous. `prune` therefore removes one unit after the other, and conditions the posterior of the
other units of the layer on its absence:

$$ \mu_r \leftarrow \mu_r - \Sigma_{ru} \Sigma_u^{-1} \mu_u , \qquad
   \Sigma_{rs} \leftarrow \Sigma_{rs} - \Sigma_{ru} \Sigma_u^{-1} \Sigma_{us} , $$

separately for each eigenvector of A, which costs $i\, o^2$ operations for $o$ units of $i$ inputs.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, fx, nn

from symrazor.data.batches import Loader
from symrazor.inference.evidence import log_curvatures
from symrazor.inference.razor import Razor
from symrazor.linalg.blocks import Dense, Diag, Kron

Weighted = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

THROUGH = (
    *(nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.Tanh, nn.Hardswish, nn.Softsign),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity, nn.Flatten),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)
"""Modules that keep channels apart and map zero to zero."""
THROUGH_FUNCTIONS: tuple[Callable[..., object], ...] = (
    *(F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.dropout, torch.relu, torch.tanh),
    *(torch.flatten, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, torch.nn.functional.tanh),
)
"""Functions that keep channels apart and map zero to zero."""
THROUGH_METHODS = ("relu", "tanh", "flatten")


@dataclass
class Pruned:
    """Result of `prune`.

    Args:
        model: the smaller network, in eval mode.
        kept: which units of each layer are kept.
        log_odds: log odds of the network without each unit, by layer.
    """

    model: nn.Module
    kept: dict[str, Bool[Tensor, " o"]]
    log_odds: dict[str, Float[Tensor, " o"]]

    def __repr__(self) -> str:
        parts = [f"{name}: {int(kept.sum())} of {len(kept)}" for name, kept in self.kept.items()]
        return f"Pruned({', '.join(parts)} units kept)"


@torch.no_grad()
def prune(razor: Razor, loader: Loader, keep: float | None = None) -> Pruned:
    """Remove hidden units of linear and convolutional layers, and return the smaller network.

    A layer can be pruned if its output reaches other layers only through operations that keep
    channels apart and map zero to zero (activations, pooling, flattening): not through residual
    additions and norms. Fold batch norms first (`sr.replace_batchnorm`). The network must be
    traceable by torch.fx.

    Args:
        razor: the razor of a trained network; the network is not changed.
        loader: its training data.
        keep: share of the network's weights that is kept, by removing units with the highest odds
            first; None to remove the units without which the evidence is higher.

    Raises:
        ValueError: if no layer can be pruned, or `keep` is not between 0 and 1.
    """
    if keep is not None and not 0 < keep <= 1:
        raise ValueError(f"keep must be above 0 and at most 1, got {keep}.")
    model = copy.deepcopy(razor.model).eval()
    consumers = consumers_of(model)
    posteriors = {n: v for n, v in unit_posteriors(razor, loader).items() if n in consumers}
    if not posteriors:
        raise ValueError(
            "No layer can be pruned: the outputs of all layers reach additions, norms or outputs "
            "of the network. Fold batch norms with sr.replace_batchnorm first."
        )
    modules = dict(model.named_modules())
    odds = {name: posterior.log_odds() for name, posterior in posteriors.items()}
    kept = _select(posteriors, modules, consumers, keep)
    for name, units in kept.items():
        _cut_outputs(modules[name], units)
        for consumer in consumers[name]:
            _cut_inputs(modules[consumer], units)
    return Pruned(model, kept, odds)


def unit_log_odds(razor: Razor, loader: Loader) -> dict[str, Float[Tensor, " o"]]:
    """Return the log odds of the network without each output unit, by layer.

    Above zero, the evidence of the network without the unit is higher.
    """
    return {name: units.log_odds() for name, units in unit_posteriors(razor, loader).items()}


@torch.no_grad()
def unit_posteriors(razor: Razor, loader: Loader) -> "dict[str, UnitPosterior]":
    """Return the posterior of the incoming weights and biases of every layer's units."""
    posterior = razor.posterior(loader)
    blocks = {name: block for block in posterior.curvature.blocks for name in block.names}
    curvatures = log_curvatures(razor.prior, posterior.curvature, posterior.mean)
    log_delta = {name: value.detach() for name, value in curvatures.items()}
    result: dict[str, UnitPosterior] = {}
    for layer in razor.layers:
        block = blocks.get(str(layer.weight))
        if not isinstance(layer.module, Weighted) or not isinstance(block, Kron):
            continue
        parts = _of_rows(block, posterior.mean[block.name], log_delta[block.name])
        if layer.bias is not None:
            parts.append(_of_bias(blocks[layer.bias], posterior.mean, log_delta))
        result[layer.name] = UnitPosterior(parts)
    return result


@dataclass
class Coordinates:
    """Independent coordinates of the weights of all units: Gaussians over the units.

    Args:
        mean: posterior means.
        covariance: posterior covariances between units.
        log_delta: log prior precision.
    """

    mean: Float[Tensor, "i o"]
    covariance: Float[Tensor, "i o o"]
    log_delta: Tensor

    def log_odds(self) -> Float[Tensor, " o"]:
        """Return the log odds of each unit's coordinates being zero."""
        variance = self.covariance.diagonal(dim1=1, dim2=2)
        terms = self.mean.square() / variance + variance.log() + self.log_delta
        return -0.5 * terms.sum(0)

    def remove(self, unit: int) -> None:
        """Condition on a unit's coordinates being zero; the unit becomes independent noise."""
        column = self.covariance[:, :, unit].clone()
        variance = column[:, unit].clone()
        self.mean -= column * (self.mean[:, unit] / variance).unsqueeze(1)
        self.covariance -= (column / variance.unsqueeze(1)).unsqueeze(2) * column.unsqueeze(1)
        self.covariance[:, unit, unit] = variance


class UnitPosterior:
    """Posterior of the incoming weights and biases of a layer's units.

    Args:
        parts: independent coordinates.
    """

    def __init__(self, parts: list[Coordinates]) -> None:
        self.parts = parts
        self.present = torch.ones_like(parts[0].mean[0], dtype=torch.bool)

    def log_odds(self) -> Float[Tensor, " o"]:
        """Return the log odds of the network without each unit, -infinity for removed ones."""
        total = torch.stack([part.log_odds() for part in self.parts]).sum(0)
        return total.masked_fill(~self.present, -math.inf)

    def remove(self, unit: int) -> None:
        """Remove a unit."""
        self.present[unit] = False
        for part in self.parts:
            part.remove(unit)


def _of_rows(block: Kron, weight: Tensor, log_delta: Tensor) -> list[Coordinates]:
    """Return the coordinates of a weight in the eigenbasis of its input factor."""
    values, left, right = block.eigenvectors
    log_delta = log_delta.double()
    delta = log_delta.exp()
    if len(values) > 1:
        raise ValueError("Grouped convolutions have no units that can be pruned.")
    W = block.to_blocks(weight.double())[0]
    identity = torch.eye(len(W), dtype=torch.float64, device=W.device)
    U = left[0]
    # Outside of the span of the eigenvectors, H is zero and the posterior is the prior.
    shrinkage = 1 / (values[0] + delta) - 1 / delta
    covariance = torch.einsum("og,gj,pg->jop", U, shrinkage, U) + identity / delta
    parts = [Coordinates((W @ right[0]).T.clone(), covariance, log_delta)]
    outside = W - W @ right[0] @ right[0].T
    if right.shape[1] > right.shape[2]:
        parts.append(_prior_only(outside, log_delta))
    return parts


def _prior_only(weight: Float[Tensor, "o i"], log_delta: Tensor) -> Coordinates:
    """Return coordinates that the data do not inform: only their length matters."""
    length = weight.norm(dim=1).unsqueeze(0)
    identity = torch.eye(len(weight), dtype=torch.float64, device=weight.device)
    return Coordinates(length, (identity / log_delta.exp()).unsqueeze(0), log_delta)


def _of_bias(
    block: object, mean: Mapping[str, Tensor], log_delta: Mapping[str, Tensor]
) -> Coordinates:
    """Return the coordinates of a bias."""
    assert isinstance(block, Dense | Diag)
    name = block.names[0]
    bias, log_precision = mean[name].double().flatten(), log_delta[name].double()
    identity = torch.eye(len(bias), dtype=torch.float64, device=bias.device)
    H = block.H.double() if isinstance(block, Dense) else torch.diag(block.h.double().flatten())
    covariance = torch.linalg.inv(H + log_precision.exp() * identity)
    return Coordinates(bias.unsqueeze(0).clone(), covariance.unsqueeze(0), log_precision)


def consumers_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the layers that read each prunable layer, directly or through `THROUGH`."""
    graph = fx.symbolic_trace(model).graph
    modules = dict(model.named_modules())
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    consumers: dict[str, list[str]] = {}
    for node in graph.nodes:
        name = str(node.target)
        if node.op != "call_module" or not isinstance(modules[name], Weighted):
            continue
        readers = _readers(node, modules)
        is_single = calls.count(name) == 1 and getattr(modules[name], "groups", 1) == 1
        if readers and is_single and all(calls.count(reader) == 1 for reader in readers):
            consumers[name] = readers
    return consumers


def _readers(node: fx.Node, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the layers that read a node; [] if anything else does."""
    readers: list[str] = []
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "call_module":
            module = modules[str(user.target)]
            if isinstance(module, Weighted) and getattr(module, "groups", 1) == 1:
                readers.append(str(user.target))
                continue
            passes = isinstance(module, THROUGH)
        elif user.op == "call_function":
            passes = user.target in THROUGH_FUNCTIONS
        else:
            passes = user.op == "call_method" and user.target in THROUGH_METHODS
        if not passes:
            return []
        pending += list(user.users)
    return list(dict.fromkeys(readers))


def _select(
    posteriors: "Mapping[str, UnitPosterior]",
    modules: Mapping[str, nn.Module],
    consumers: Mapping[str, list[str]],
    keep: float | None,
) -> dict[str, Tensor]:
    """Remove the unit with the highest odds again and again; return the units that are left.

    Every layer keeps one unit: without any it would cut the network.
    """
    total = sum(p.numel() for m in modules.values() for p in m.parameters(recurse=False))
    units_kept = {name: posterior.present for name, posterior in posteriors.items()}
    odds = {name: posterior.log_odds() for name, posterior in posteriors.items()}
    while True:
        candidates = [name for name, units in units_kept.items() if int(units.sum()) > 1]
        if not candidates:
            return units_kept
        name = max(candidates, key=lambda layer: float(odds[layer].max()))
        is_done = float(odds[name].max()) <= 0
        if keep is not None:
            is_done = _size(modules, consumers, units_kept) <= keep * total
        if is_done:
            return units_kept
        posteriors[name].remove(int(odds[name].argmax()))
        odds[name] = posteriors[name].log_odds()


def _size(
    modules: Mapping[str, nn.Module],
    consumers: Mapping[str, list[str]],
    units_kept: Mapping[str, Tensor],
) -> float:
    """Return the number of weights with these units."""
    shares: dict[str, float] = {}
    rows: dict[str, float] = {}
    for name, units in units_kept.items():
        share = float(units.double().mean())
        rows[name] = share
        for consumer in consumers[name]:
            shares[consumer] = share
    size = 0.0
    for name, module in modules.items():
        for local, value in module.named_parameters(recurse=False):
            of_inputs = shares.get(name, 1.0) if local == "weight" else 1.0
            size += value.numel() * rows.get(name, 1.0) * of_inputs
    return size


def _cut_outputs(module: nn.Module, units_kept: Tensor) -> None:
    """Remove output units of a layer in place."""
    assert isinstance(module, Weighted)
    module.weight = nn.Parameter(module.weight[units_kept], module.weight.requires_grad)
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias[units_kept], module.bias.requires_grad)
    count = int(units_kept.sum())
    if isinstance(module, nn.Linear):
        module.out_features = count
    else:
        module.out_channels = count


def _cut_inputs(module: nn.Module, units_kept: Tensor) -> None:
    """Remove the inputs of a layer that read removed units; a flattened unit has several."""
    assert isinstance(module, Weighted)
    repeats = module.weight.shape[1] // len(units_kept)
    columns = units_kept.repeat_interleave(repeats)
    module.weight = nn.Parameter(module.weight[:, columns], module.weight.requires_grad)
    count = int(columns.sum())
    if isinstance(module, nn.Linear):
        module.in_features = count
    else:
        module.in_channels = count
