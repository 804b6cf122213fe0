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

so that all odds follow from the eigenvectors at once. Odds of several units together are the sum of
their odds only if the units are independent: train the smaller network again, and prune again.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, fx, nn

from symrazor.data.batches import Loader
from symrazor.inference.laplace import log_curvatures
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
    odds = {n: v for n, v in unit_log_odds(razor, loader).items() if n in consumers}
    if not odds:
        raise ValueError(
            "No layer can be pruned: the outputs of all layers reach additions, norms or outputs "
            "of the network. Fold batch norms with sr.replace_batchnorm first."
        )
    modules = dict(model.named_modules())
    kept = {name: values <= 0 for name, values in odds.items()}
    if keep is not None:
        kept = _by_share(odds, modules, consumers, keep)
    for name, values in odds.items():
        if not bool(kept[name].any()):  # a layer without units would cut the network
            kept[name][values.argmin()] = True
    for name, units in kept.items():
        _cut_outputs(modules[name], units)
        for consumer in consumers[name]:
            _cut_inputs(modules[consumer], units)
    return Pruned(model, kept, odds)


def unit_log_odds(razor: Razor, loader: Loader) -> dict[str, Float[Tensor, " o"]]:
    """Return the log odds of the network without each output unit, by layer.

    Above zero, the evidence of the network without the unit is higher.
    """
    posterior = razor.posterior(loader)
    blocks = {name: block for block in posterior.curvature.blocks for name in block.names}
    log_delta = log_curvatures(razor.prior, posterior.curvature, posterior.mean)
    result: dict[str, Tensor] = {}
    for layer in razor.layers:
        block = blocks.get(str(layer.weight))
        if not isinstance(layer.module, Weighted) or not isinstance(block, Kron):
            continue
        odds = _of_rows(block, posterior.mean[block.name], log_delta[block.name])
        if layer.bias is not None:
            odds = odds + _of_bias(blocks[layer.bias], posterior.mean, log_delta)
        result[layer.name] = odds
    return result


def _savage_dickey(
    mean: Float[Tensor, "o i"], variance: Float[Tensor, "o i"], log_delta: Tensor
) -> Float[Tensor, " o"]:
    """Return the log odds of rows that are zero, with independent entries."""
    terms = mean.square() / variance + variance.log() + log_delta
    return -0.5 * terms.sum(-1)


def _of_rows(block: Kron, weight: Tensor, log_delta: Tensor) -> Float[Tensor, " o"]:
    """Return the log odds of all rows of a weight under its Kronecker block."""
    values, left, right = block.eigenvectors
    delta = log_delta.double().exp()
    W = block.to_blocks(weight.double())
    inside = W @ right
    # Outside of the span of the eigenvectors, H is zero and the posterior is the prior.
    missing_rows = (1 - left.square().sum(2)).clamp(min=0)
    spread = left.square() @ (1 / (values + delta)) + missing_rows.unsqueeze(2) / delta
    odds = _savage_dickey(inside, spread, log_delta.double())
    outside = W.square().sum(2) - inside.square().sum(2)
    return (odds - 0.5 * delta * outside.clamp(min=0)).flatten()


def _of_bias(
    block: object, mean: Mapping[str, Tensor], log_delta: Mapping[str, Tensor]
) -> Float[Tensor, " o"]:
    """Return the log odds of each entry of a bias that is zero."""
    assert isinstance(block, Dense | Diag)
    name = block.names[0]
    delta = log_delta[name].double().exp()
    if isinstance(block, Dense):
        H = block.H.double()
        variance = torch.linalg.inv(H + delta * torch.eye(len(H)).to(H)).diagonal()
    else:
        variance = 1 / (block.h.double().flatten() + delta)
    bias = mean[name].double().flatten().unsqueeze(1)
    return _savage_dickey(bias, variance.unsqueeze(1), log_delta[name].double())


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
        found = _readers(node, modules)
        is_single = calls.count(name) == 1 and getattr(modules[name], "groups", 1) == 1
        if found and is_single and all(calls.count(reader) == 1 for reader in found):
            consumers[name] = found
    return consumers


def _readers(node: fx.Node, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the layers that read a node; [] if anything else does."""
    found: list[str] = []
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "call_module":
            module = modules[str(user.target)]
            if isinstance(module, Weighted) and getattr(module, "groups", 1) == 1:
                found.append(str(user.target))
                continue
            passes = isinstance(module, THROUGH)
        elif user.op == "call_function":
            passes = user.target in THROUGH_FUNCTIONS
        else:
            passes = user.op == "call_method" and user.target in THROUGH_METHODS
        if not passes:
            return []
        pending += list(user.users)
    return list(dict.fromkeys(found))


def _by_share(
    odds: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    consumers: Mapping[str, list[str]],
    keep: float,
) -> dict[str, Tensor]:
    """Return the units to keep such that at most this share of all weights remains."""
    total = sum(p.numel() for m in modules.values() for p in m.parameters(recurse=False))
    kept = {name: torch.ones_like(values, dtype=torch.bool) for name, values in odds.items()}
    ranked = sorted(
        ((float(v), name, u) for name, values in odds.items() for u, v in enumerate(values)),
        reverse=True,
    )
    for _, name, unit in ranked:
        if _size(modules, consumers, kept) <= keep * total:
            break
        if int(kept[name].sum()) > 1:
            kept[name][unit] = False
    return kept


def _size(
    modules: Mapping[str, nn.Module],
    consumers: Mapping[str, list[str]],
    kept: Mapping[str, Tensor],
) -> float:
    """Return the number of weights with these units."""
    shares: dict[str, float] = {}
    rows: dict[str, float] = {}
    for name, units in kept.items():
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


def _cut_outputs(module: nn.Module, kept: Tensor) -> None:
    """Remove output units of a layer in place."""
    assert isinstance(module, Weighted)
    module.weight = nn.Parameter(module.weight[kept], module.weight.requires_grad)
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias[kept], module.bias.requires_grad)
    count = int(kept.sum())
    if isinstance(module, nn.Linear):
        module.out_features = count
    else:
        module.out_channels = count


def _cut_inputs(module: nn.Module, kept: Tensor) -> None:
    """Remove the inputs of a layer that read removed units; a flattened unit has several."""
    assert isinstance(module, Weighted)
    repeats = module.weight.shape[1] // len(kept)
    columns = kept.repeat_interleave(repeats)
    module.weight = nn.Parameter(module.weight[:, columns], module.weight.requires_grad)
    count = int(columns.sum())
    if isinstance(module, nn.Linear):
        module.in_features = count
    else:
        module.in_channels = count
