r"""The log evidence by symrazor and by laplace-torch, compared term by term; run by `peers.py`.

All three compute $\log p(D \mid \theta) - \tfrac12 \theta^\top \Delta \theta -
\tfrac12 \log |I + \Delta^{-1} H|$ with the same constants and, for weights, the same
$H = G \otimes A$ ("expand"). They differ in the block of a bias that is used at many positions s:

    symrazor (exact):  sum_n (sum_s g_ns)(sum_s g_ns)'     peers:  G = sum_n sum_s g_ns g_ns'

so the comparison is made term by term: with the bias blocks as they are, with symrazor's replaced
by its own G, and on copies of the net without biases; for untrained and for trained weights; and
once in float64, where rounding explains nothing. Which of the two bias blocks is the GGN is settled
by autograd. What should agree must agree to `TOLERANCE`, or in float64 to `TOLERANCE_64`.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from laplace.curvature import AsdlGGN
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from peers_laplace import BATCH, PEERS, Loader, fit_peer, peer_evidence
from symrazor.bench.evidence import data, network
from symrazor.core.parameters import weights
from symrazor.core.prior import GaussianPrior
from symrazor.curvature.estimate import estimate_curvature
from symrazor.inference.evidence import laplace_evidence
from symrazor.linalg.blocks import Dense, Kron

TOLERANCE, TOLERANCE_64 = 1e-3, 1e-9
Factors = dict[str, list[Tensor]]


@dataclass
class Terms:
    """What an exact estimate is made of, at unit prior precisions.

    Args:
        log_evidence: as the library reports it.
        log_likelihood: its first term.
        log_prior: its second term.
        factors: tensor name -> [G, A] with H = G x A, or [H].
        gradient: tensor name -> derivative of the log evidence in its log precision.
    """

    log_evidence: float
    log_likelihood: float
    log_prior: float
    factors: Factors
    gradient: dict[str, float]

    def log_det(self, names: Iterable[str]) -> float:
        """The log |I + H| of some tensors, in float64 whoever made the factors."""
        return sum(log_det(self.factors[name]) for name in names)


def log_det(factors: list[Tensor]) -> float:
    spectra = [torch.linalg.eigvalsh(f.double()).clamp(min=0) for f in factors]
    values = spectra[0] if len(spectra) == 1 else torch.outer(*spectra)
    return float(torch.log1p(values).sum())


def own_terms(model: nn.Module, loader: Loader) -> Terms:
    """The estimate by symrazor."""
    theta = weights(model)
    prior = GaussianPrior(theta, 1.0)
    found = estimate_curvature(model, "categorical", loader).prepare()
    evidence = laplace_evidence(found, prior, theta)
    gradients = torch.autograd.grad(evidence.log_evidence, list(prior.parameters()))
    evidence = evidence.detach()
    factors: Factors = {}
    for block in found.blocks:
        if isinstance(block, Kron):
            factors[block.name] = [block.G.matrix[0], block.A.matrix[0] * block.scale]
        else:
            assert isinstance(block, Dense)
            factors[block.names[0]] = [block.H]
    return Terms(
        float(evidence.log_evidence),
        float(evidence.log_likelihood),
        float(evidence.log_prior),
        factors,
        {name: float(g) for name, g in zip(prior.names, gradients, strict=True)},
    )


def peer_terms(model: nn.Module, loader: Loader, backend: type) -> Terms:
    """The estimate by laplace-torch."""
    laplace = fit_peer(model, loader, backend)
    value, gradient = peer_evidence(laplace)
    names = [name for name, _ in model.named_parameters()]
    return Terms(
        value,
        laplace.log_likelihood.item(),
        -0.5 * laplace.scatter.item(),
        dict(zip(names, laplace.H_facs.kfacs, strict=True)),
        dict(zip(names, gradient.tolist(), strict=True)),
    )


def with_peer_biases(terms: Terms, conv_biases: Iterable[str]) -> Terms:
    """Our terms, if the block of a convolution's bias were the G of its weight."""
    factors = dict(terms.factors)
    gradient, value = dict(terms.gradient), terms.log_evidence
    for name in conv_biases:
        G = terms.factors[name.replace("bias", "weight")][0]
        value += 0.5 * (log_det(factors[name]) - log_det([G]))
        gradient[name] += 0.5 * (effective([G]) - effective(factors[name]))
        factors[name] = [G]
    return Terms(value, terms.log_likelihood, terms.log_prior, factors, gradient)


def effective(factors: list[Tensor]) -> float:
    """Effective parameters tr H (H + I)^-1 of a dense block."""
    values = torch.linalg.eigvalsh(factors[0].double()).clamp(min=0)
    return float((values / (1 + values)).sum())


def without_biases(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.bias = None
    return model


def learnable_data(n: int) -> tuple[Tensor, Tensor]:
    """Ten smooth patterns in noise."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 10, (n,), generator=generator)
    patterns = F.interpolate(
        torch.randn(10, 3, 4, 4, generator=generator), size=32, mode="bilinear"
    )
    return patterns[y] + 0.5 * torch.randn(n, 3, 32, 32, generator=generator), y


def trained(alpha: int, loader: Loader, epochs: int = 5) -> nn.Module:
    """A few epochs of SGD from weights that neither shrink nor grow the signal."""
    model = network(alpha)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    return model


@dataclass(frozen=True)
class Line:
    """One compared quantity.

    Args:
        quantity: what is compared.
        own: symrazor's value, if it is one number.
        peer: the peer's.
        distance: relative to the peer's.
        tolerance: what the distance must not exceed; None where the two are defined differently.
    """

    quantity: str
    own: float | None
    peer: float | None
    distance: float
    tolerance: float | None

    @property
    def agrees(self) -> bool:
        """Whether the two agree, or need not."""
        return self.tolerance is None or self.distance <= self.tolerance

    @property
    def cells(self) -> list[str]:
        """The line as text."""
        verdict = "agrees" if self.agrees else "DISAGREES"
        return [
            self.quantity,
            *("" if value is None else f"{value:.10g}" for value in (self.own, self.peer)),
            f"{self.distance:.1e}",
            verdict if self.tolerance is not None else "other bias blocks",
        ]


def numbers(quantity: str, own: float, peer: float, tolerance: float | None) -> Line:
    return Line(quantity, own, peer, abs(own - peer) / max(abs(peer), 1e-300), tolerance)


def matrices(quantity: str, pairs: Iterable[tuple[Tensor, Tensor]], tolerance: float) -> Line:
    """The pair that agrees least."""
    return Line(quantity, None, None, max(relative(a, b) for a, b in pairs), tolerance)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def tensors_of(model: nn.Module) -> dict[str, list[str]]:
    """Kind of tensor -> names; the last convolution of the net has one position only."""
    kinds: dict[str, list[str]] = {"weights": [], "Linear biases": [], "Conv biases": []}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            kinds["weights"].append(f"{prefix}.weight")
            if module.bias is not None:
                kinds[f"{'Conv' if isinstance(module, nn.Conv2d) else 'Linear'} biases"].append(
                    f"{prefix}.bias"
                )
    return {kind: names for kind, names in kinds.items() if names}


def lines(own: Terms, peer: Terms, kinds: dict[str, list[str]], tolerance: float) -> list[Line]:
    """Everything that can be compared, term by term."""
    biases = kinds.get("Conv biases", [])
    found = [
        numbers("log likelihood", own.log_likelihood, peer.log_likelihood, tolerance),
        numbers("log prior", own.log_prior, peer.log_prior, tolerance),
    ]
    for kind, names in kinds.items():
        limit = None if kind == "Conv biases" else tolerance
        found.append(numbers(f"log det, {kind}", own.log_det(names), peer.log_det(names), limit))
    limit = None if biases else tolerance
    found.append(numbers("log evidence", own.log_evidence, peer.log_evidence, limit))
    alike = with_peer_biases(own, biases)
    if biases:
        dets = alike.log_det(biases), peer.log_det(biases)
        found.append(numbers("log det, Conv biases, ours = G", *dets, tolerance))
        values = alike.log_evidence, peer.log_evidence
        found.append(numbers("log evidence, ours = G", *values, tolerance))
    for side, label in enumerate("GA"):
        pairs = [(own.factors[n][side], peer.factors[n][side]) for n in kinds["weights"]]
        found.append(matrices(f"worst factor {label}", pairs, tolerance))
    ours, theirs = (
        torch.tensor([terms.gradient[name] for name in peer.gradient], dtype=torch.float64)
        for terms in (alike, peer)
    )
    return [*found, matrices("gradient in log precisions", [(ours, theirs)], tolerance)]


def bias_table(model: nn.Module, loader: Loader, backend: type) -> list[tuple[str, float, float]]:
    """Distance of every convolution's bias block from its GGN: (name, ours, theirs)."""
    names = tensors_of(model)["Conv biases"]
    truth = bias_ggn(model, loader.x, names)
    own = own_terms(copy.deepcopy(model), loader).factors
    peer = peer_terms(copy.deepcopy(model), loader, backend).factors
    return [
        (name, relative(own[name][0], truth[name]), relative(peer[name][0], truth[name]))
        for name in names
    ]


def bias_ggn(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, Tensor]:
    """sum_n J_n' (diag p - pp') J_n of each named tensor, in float64, by definition."""
    model, x = copy.deepcopy(model).double(), x.double()
    everything = {name: value.detach() for name, value in model.named_parameters()}
    some = {name: everything[name] for name in names}

    def outputs(part: dict[str, Tensor], one: Tensor) -> Tensor:
        f: Tensor = functional_call(model, {**everything, **part}, one.unsqueeze(0))
        return f[0]

    jacobians = vmap(jacrev(outputs), (None, 0))(some, x)
    p = model(x).detach().softmax(1)
    hessian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return {name: torch.einsum("nci,ncd,ndj->ij", J, hessian, J) for name, J in jacobians.items()}


def cases(alpha: int, n: int) -> Iterator[tuple[str, nn.Module, Loader, float]]:
    """(title, net, data, tolerance) of each comparison."""
    noise, learnable = Loader(*data(n), BATCH), Loader(*learnable_data(n), BATCH)
    for title, model, loader in (
        ("untrained", network(alpha), noise),
        ("trained", trained(alpha, learnable), learnable),
    ):
        yield title, model, loader, TOLERANCE
        yield f"{title}, no biases", without_biases(model), loader, TOLERANCE
    double = Loader(learnable.x[:BATCH].double(), learnable.y[:BATCH], BATCH)
    yield f"trained, float64, {BATCH} data", copy.deepcopy(model).double(), double, TOLERANCE_64


@dataclass(frozen=True)
class Comparison:
    """One table of compared quantities, and whether everything in it agrees that should."""

    title: str
    header: list[str]
    cells: list[list[str]]
    agrees: bool


def compare_values(alpha: int, n: int) -> Iterator[Comparison]:
    """All comparisons on one network."""
    for title, model, loader, tolerance in cases(alpha, n):
        own = own_terms(copy.deepcopy(model), loader)
        for name, backend in PEERS.items():
            peer = peer_terms(copy.deepcopy(model), loader, backend)
            found = lines(own, peer, tensors_of(model), tolerance)
            yield Comparison(
                f"8-conv, alpha={alpha}, {title}",
                ["quantity", "symrazor", name, "relative", ""],
                [line.cells for line in found],
                all(line.agrees for line in found),
            )
    biases = bias_table(model, Loader(loader.x[:50], loader.y[:50], 50), AsdlGGN)
    yield Comparison(
        f"8-conv, alpha={alpha}, trained, float64: distance of bias blocks from the GGN",
        ["bias", "symrazor", "laplace-torch"],
        [[name, f"{a:.1e}", f"{b:.1e}"] for name, a, b in biases],
        all(ours <= TOLERANCE_64 for _, ours, _ in biases),
    )
