r"""Uncertainty of a plain network from the Laplace posterior of its last linear layer.

With features $\phi$ (and a constant 1) the outputs are $f = W \phi$. The Gauss-Newton matrix of $W$
is approximated by $A \otimes G$, with $A = \sum_n \phi_n \phi_n^\top$ and $G$ the mean Hessian of
the negative log likelihood in the outputs; for a Gaussian likelihood this is exact. The covariance
of the outputs at $\phi$ is then $U \mathrm{diag}(v) U^\top$ with

$$ v_k = \sum_d \frac{(u_d^\top \phi)^2}{\lambda_d \mu_k + \delta}, $$

where $\lambda_d, u_d$ are eigenvalues and -vectors of $A$, and $\mu_k$ and the columns of $U$ those
of $G$. The prior precision $\delta$ maximises the evidence of the layer by MacKay's fixed point,
$\delta = \gamma / \|W\|^2$ with $\gamma = \sum_{dk} \lambda_d \mu_k / (\lambda_d \mu_k + \delta)$.

The posterior is a few matrices, so that it is stored beside the network, as
`uncertainty.safetensors`, and exported with it.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from symrazor.core.files import reader, write_atomically
from symrazor.core.likelihood import Categorical, Gaussian, Likelihood
from symrazor.inference.posterior import Prediction

UNCERTAINTY = "uncertainty.safetensors"
_TENSORS = ("features", "weights", "outputs", "scale", "noise", "factor")
BATCH_SIZE = 500
MAX_FEATURES = 2048
"""Largest number of features of a last layer; larger ones get no posterior."""
MAX_SAMPLES = 20_000
"""Training samples from which the curvature of the last layer is computed."""
MAX_CURVATURE_VALUES = 1 << 24
"""Numbers of output Hessians in memory at a time."""
PRECISIONS = (1e-6, 1e8)
"""Range of the prior precision."""
FIXED_POINT_STEPS = 100
LOG_FACTORS = (-0.6, 0.6)
"""Range of the factor of averaged logits, as powers of ten."""


@dataclass(frozen=True)
class LastLayer:
    """The posterior of the last layer of a network.

    Args:
        head: names of the linear layers in the network whose outputs add up to its outputs: the
            last one, or the last two. "The layer" below means both together.
        features: eigenvectors of A.
        weights: for each eigenvector of A and of G, the variance of the weight.
        outputs: eigenvectors of G.
        scale: change of each output of the network per unit of output of the layer.
        noise: variance of the noise of each target in units of the layer; empty for classes.
        factor: factor of the logits of classes before they are averaged over the posterior.
        averaged: whether predictions are averaged over the posterior; if not, only `epistemic`
            depends on it.
    """

    head: tuple[str, ...]
    features: Float[Tensor, "d d"]
    weights: Float[Tensor, "d k"]
    outputs: Float[Tensor, "k k"]
    scale: Float[Tensor, " k"]
    noise: Float[Tensor, " _"]
    factor: Float[Tensor, ""]
    averaged: bool = True

    def variances(self, phi: Float[Tensor, "n d-1"]) -> Float[Tensor, "n k"]:
        """Return the variances v of the layer's outputs along the eigenvectors of G."""
        extended = torch.cat([phi.double(), torch.ones_like(phi[:, :1], dtype=torch.float64)], 1)
        return (extended @ self.features.double()).square() @ self.weights

    def predict(self, f: Float[Tensor, "n k"], phi: Float[Tensor, "n d-1"]) -> Prediction:
        """Return the prediction for outputs f of the network and inputs phi of its last layer."""
        v = self.variances(phi)
        if len(self.noise):
            epistemic = v @ self.outputs.square().T * self.scale.square()
            weight_variance = epistemic if self.averaged else torch.zeros_like(epistemic)
            variance = self.noise * self.scale.square() + weight_variance
            return Prediction(f.double(), variance, epistemic.sqrt())
        logits = f.double()
        if self.averaged:
            logits = self._probit(logits * self.factor, v)
        p = logits.softmax(1)
        # The probabilities to first order: dp = (diag(p) - p p^T) df.
        basis = self.outputs * self.scale.unsqueeze(1)
        rows = max(1, MAX_CURVATURE_VALUES // basis.numel())
        variance = torch.cat(
            [
                ((q.unsqueeze(2) * (basis - (q @ basis).unsqueeze(1))).square() @ w).squeeze(2)
                for q, w in zip(p.split(rows), v.unsqueeze(2).split(rows), strict=True)
            ]
        )
        return Prediction(p, None, torch.minimum(variance, p * (1 - p)).sqrt())

    def _probit(self, logits: Tensor, v: Tensor) -> Tensor:
        """Return logits of the mean probabilities, by the probit approximation of each class.

        It takes the variance of the logit minus the mean of the others, so that it is the usual
        approximation for two classes, and that the same shift of all logits has no effect.
        """
        k = logits.shape[1]
        basis = self.outputs * self.scale.unsqueeze(1) * self.factor
        basis = (basis - basis.mean(0)) * (k / max(1, k - 1))
        spread = v @ basis.square().T
        return (logits - logits.mean(1, keepdim=True)) / (1 + math.pi / 8 * spread).sqrt()


@contextmanager
def recorded_inputs(network: nn.Module, head: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the last input of each layer of a head: name -> input."""
    inputs: dict[str, Tensor] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[name] = args[0]

        return record

    handles = [
        network.get_submodule(name).register_forward_pre_hook(recorder(name)) for name in head
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def find_head(network: nn.Module, x: Tensor) -> tuple[str, ...]:
    """Return the linear layers of which the outputs of a network are the sum, or none.

    These are the last linear layer, or the last two or three, on one vector per sample.
    """
    calls: list[str] = []
    layers = {name: m for name, m in network.named_modules() if isinstance(m, nn.Linear)}
    handles = [
        m.register_forward_pre_hook(lambda _, args, name=name: calls.append(name))
        for name, m in layers.items()
    ]
    try:
        f = network(x)
    finally:
        for handle in handles:
            handle.remove()
    for size in (1, 2, 3):
        head = tuple(calls[-size:])
        if len(head) < size or f.ndim != 2 or any(calls.count(name) > 1 for name in head):
            return ()
        with recorded_inputs(network, head) as inputs:
            network(x)
        if any(
            phi.ndim != 2 or len(phi) != len(x) or layers[name].out_features != f.shape[1]
            for name, phi in inputs.items()
        ):
            return ()
        if sum(phi.shape[1] for phi in inputs.values()) >= MAX_FEATURES:
            return ()
        total = torch.stack([layers[name](phi).double() for name, phi in inputs.items()]).sum(0)
        if _is_affine(total, f.double()):
            return head
    return ()


def _is_affine(g: Tensor, f: Tensor) -> bool:
    """Return whether every column of f is a linear function of the same column of g."""
    g, f = g - g.mean(0), f - f.mean(0)
    norm = (g.square().sum(0) * f.square().sum(0)).sqrt()
    return bool(((g * f).sum(0).abs() >= 0.9999 * norm).all())


@torch.no_grad()
def features_of(network: nn.Module, head: Sequence[str], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs of a network and inputs of its head, side by side, on the CPU."""
    weight = next(network.parameters())
    outputs, features = [], []
    for part in x.split(BATCH_SIZE):
        with recorded_inputs(network, head) as inputs:
            outputs.append(network(part.to(weight.device)).cpu())
        features.append(torch.cat([inputs[name] for name in head], 1).cpu())
    return torch.cat(outputs), torch.cat(features)


@torch.no_grad()
def last_layer_posterior(
    network: nn.Module, x: Tensor, likelihood: Likelihood, scale: Tensor | float = 1.0
) -> LastLayer | None:
    """Return the posterior of the last layer of a trained network.

    Args:
        network: the network in eval mode.
        x: training inputs.
        likelihood: the trained likelihood, of classes or with Gaussian noise.
        scale: change of the outputs per unit of output of the last layer: the scale of the targets,
            or one divided by the temperature of the logits.

    Returns:
        The posterior; None for another likelihood, or if the network does not end with a linear
        layer on less than `MAX_FEATURES` features.
    """
    if type(likelihood) not in (Categorical, Gaussian) or x.ndim < 2:
        return None
    weight = next(network.parameters(), None)
    head = () if weight is None else find_head(network, x[:BATCH_SIZE].to(weight.device))
    if not head:
        return None
    n = len(x)
    if n > MAX_SAMPLES:
        generator = torch.Generator().manual_seed(0)
        x = x[torch.randperm(n, generator=generator)[:MAX_SAMPLES].sort().values]
    _, phi = features_of(network, head, x)
    layers: list[Any] = [network.get_submodule(name) for name in head]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    matrices = [layer.weight for layer in layers]
    matrices += [torch.stack(biases).sum(0).unsqueeze(1)] if biases else []
    W = torch.cat(matrices, 1).double().cpu()
    ones = torch.ones(len(phi), W.shape[1] - phi.shape[1], dtype=torch.float64)
    extended = torch.cat([phi.double(), ones], 1)
    likelihood = copy.deepcopy(likelihood).cpu()
    G = _mean_hessian(likelihood, extended @ W.T)
    lam, U = torch.linalg.eigh(extended.T @ extended * (n / len(phi)))
    mu, V = torch.linalg.eigh(G)
    products = lam.clamp(min=0).unsqueeze(1) * mu.clamp(min=0)
    delta = _evidence_precision(products, float(W.square().sum()))
    noise = torch.zeros(0, dtype=torch.float64)
    if isinstance(likelihood, Gaussian):
        noise = likelihood.noise.value.detach().double().square().expand(len(mu)).clone()
    variances = 1 / (products + delta)
    if not biases:  # the constant has no weight, hence no variance
        U = torch.block_diag(U, torch.ones(1, 1).double())
        variances = torch.cat([variances, torch.zeros_like(variances[:1])])
    return LastLayer(
        head,
        U,
        variances,
        V,
        torch.as_tensor(scale, dtype=torch.float64).expand(len(mu)).clone(),
        noise,
        torch.ones((), dtype=torch.float64),
        averaged=len(noise) > 0,
    )


@torch.no_grad()
def predict(
    network: nn.Module, x: Tensor, posterior: LastLayer | None, is_classifier: bool
) -> Prediction:
    """Return the prediction of a plain network at x, with its uncertainty if that is known.

    Args:
        network: returns logits, or targets.
        x: inputs.
        posterior: the posterior of its last layer; None if there is none.
        is_classifier: whether the outputs are logits.
    """
    if posterior is not None:
        return posterior.predict(*features_of(network, posterior.head, x))
    weight = next(network.parameters(), x)
    f = torch.cat([network(part.to(weight.device)).cpu() for part in x.split(BATCH_SIZE)])
    return Prediction(f.softmax(-1) if is_classifier else f)


def write_posterior(posterior: LastLayer, folder: Path) -> None:
    """Write a posterior beside its network."""
    about = {"head": posterior.head, "averaged": posterior.averaged}
    tensors = {name: getattr(posterior, name).contiguous() for name in _TENSORS}
    tensors["features"] = tensors["features"].float()  # the largest part; unit vectors
    write_atomically(folder / UNCERTAINTY, save(tensors, {"posterior": json.dumps(about)}))


@reader
def read_posterior(file: Path, network: nn.Module) -> LastLayer:
    """Read the posterior of a network; ValueError if the file does not fit the network."""
    with safe_open(file, "pt") as opened:
        about = json.loads((opened.metadata() or {})["posterior"])
    tensors = load_file(file)
    values: dict[str, Any] = {name: tensors[name] for name in _TENSORS}
    values["features"] = values["features"].double()
    names = tuple(map(str, about["head"]))
    posterior = LastLayer(names, **values, averaged=bool(about["averaged"]))
    modules = dict(network.named_modules())
    head = [modules.get(name) for name in posterior.head]
    layers = [layer for layer in head if isinstance(layer, nn.Linear)]
    d = sum(layer.in_features for layer in layers)
    k = layers[0].out_features if len(layers) == len(head) > 0 else 0
    shapes = {
        "features": (d + 1, d + 1),
        "weights": (d + 1, k),
        "outputs": (k, k),
        "scale": (k,),
    }
    fits = all(tensors[name].shape == shape for name, shape in shapes.items())
    fits &= posterior.noise.shape in ((0,), (k,)) and posterior.factor.shape == ()
    fits &= all(t.dtype == torch.float64 and bool(t.isfinite().all()) for t in values.values())
    if k == 0 or not fits:
        raise ValueError(f"the posterior of {', '.join(names)[:80]!r} does not fit the network")
    return posterior


def _mean_hessian(likelihood: Likelihood, f: Tensor) -> Float[Tensor, "k k"]:
    """Return the mean Hessian of the negative log likelihood in the outputs."""
    total = torch.zeros(f.shape[1], f.shape[1], dtype=torch.float64)
    for part in f.split(max(1, MAX_CURVATURE_VALUES // f.shape[1] ** 2)):
        root = likelihood.hessian_root(part).double()
        total += torch.einsum("cni,cnj->ij", root, root)
    return total / len(f)


def _evidence_precision(products: Tensor, square_norm: float) -> float:
    """Return MacKay's fixed point of the prior precision."""
    delta = 1.0
    for _ in range(FIXED_POINT_STEPS):
        gamma = float((products / (products + delta)).sum())
        delta = min(max(gamma / max(square_norm, 1e-12), PRECISIONS[0]), PRECISIONS[1])
    return delta


class Unseen(NamedTuple):
    """Data that a trained network has not seen.

    Args:
        posterior: the posterior of its last layer.
        f: outputs of the network.
        phi: inputs of its last layer.
        y: labels.
    """

    posterior: LastLayer
    f: Tensor
    phi: Tensor
    y: Tensor


def calibrated(data: Sequence[Unseen]) -> tuple[LastLayer, dict[str, float]]:
    """Choose between averaged and plug-in predictions by data that the networks have not seen.

    Both are calibrated on these data first: averaged logits by a factor (those of the networks have
    their temperature), and targets by the variance of the noise.

    Args:
        data: one or more networks of one structure, each with its data.

    Returns:
        The posterior of the first network, with the `noise`, `factor` and `averaged` of the better
        predictions, and the mean negative log likelihood of "plug-in" and "averaged" predictions.
    """
    scores, best = {}, {}
    for name, averaged in (("plug-in", False), ("averaged", True)):
        tried = _calibrations(replace(data[0].posterior, averaged=averaged), data)
        best[name] = min(tried, key=lambda candidate: _nll(data, candidate))
        scores[name] = _nll(data, best[name])
    return best[min(scores, key=lambda name: scores[name])], scores


def _calibrations(posterior: LastLayer, data: Sequence[Unseen]) -> list[LastLayer]:
    """Return the posterior with all calibrations to try."""
    if len(posterior.noise):
        errors = torch.cat([_errors(d) for d in data]).mean(0).clamp(min=1e-12)
        noise = errors / posterior.scale.square()
        shares = torch.logspace(-2, 0, 41, dtype=torch.float64) if posterior.averaged else [1.0]
        return [replace(posterior, noise=noise * share) for share in shares]
    if not posterior.averaged:
        return [posterior]
    factors = torch.logspace(*LOG_FACTORS, 41, dtype=torch.float64)
    return [replace(posterior, factor=factor) for factor in factors]


def _errors(data: Unseen) -> Tensor:
    return (data.f - data.y.reshape(data.f.shape)).double().square()


def _nll(data: Sequence[Unseen], chosen: LastLayer) -> float:
    """Return the mean negative log likelihood of the labels with the calibration of `chosen`."""
    losses = []
    for d in data:
        calibration = {name: getattr(chosen, name) for name in ("noise", "factor", "averaged")}
        prediction = replace(d.posterior, **calibration).predict(d.f, d.phi)
        if prediction.variance is None:
            p = prediction.mean.gather(1, d.y.reshape(-1, 1))
            losses.append(-p.clamp(min=1e-300).log())
        else:
            variance = prediction.variance
            losses.append(0.5 * (_errors(d) / variance + (2 * math.pi * variance).log()).sum(1))
    return float(torch.cat([loss.flatten() for loss in losses]).mean())
