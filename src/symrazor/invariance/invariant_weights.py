r"""Invariant weights: a network whose features are averaged over learned transformations.

$$ \log p(D \mid \eta) \ge \mathrm{E}_{q(W_2)} \mathrm{E}_T \log p(y \mid \hat f(x; \eta))
   - \mathrm{KL}(q(W_2) \,\|\, p(W_2)) $$

(Learning Invariant Weights, eqs. 9 and 10). The bound is raised in the posterior of the output
weights and in the widths $\eta$ of the transformations alike: invariance does not help the fit, but
it leaves less for the weights to say.
"""

import copy
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from symrazor.core.evidence import Evidence
from symrazor.core.parameters import Hyper
from symrazor.inference.variational.posteriors import BlockCholesky
from symrazor.invariance import mixture
from symrazor.invariance.features import Averaged, NetworkFeatures
from symrazor.invariance.lie_distributions import LieDistribution, Nodes, Random

Average = Literal["logits", "probs"]


class Sampling(NamedTuple):
    """How an average is taken.

    Attributes:
        samples: number S of transformations.
        draws: from the posterior of the output weights, in antithetic pairs.
        scheme: of the transformations, see `symrazor.invariance.lie_distributions`.
        generator: of all random numbers.
    """

    samples: int = 32
    draws: int = 2
    scheme: Random = "shifted"
    generator: torch.Generator | None = None


def check_labels(y: Tensor, classes: int, shape: tuple[int, ...]) -> None:
    """Refuse what are not labels 0..classes-1 of the data.

    Raises:
        ValueError: another type or shape, no labels, or a label that is no class.
    """
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape != shape:
        raise ValueError(
            f"expected integer class labels of shape {list(shape)}, got {y.dtype} {list(y.shape)}"
        )
    if not y.numel():
        raise ValueError("expected at least 1 datum, got none")
    least, most = (int(value) for value in y.aminmax())
    if least < 0 or most >= classes:
        wrong = least if least < 0 else most
        raise ValueError(f"expected labels between 0 and {classes - 1}, got {wrong}")


class InvariantWeights(nn.Module):
    r"""$p(y \mid x) = \mathrm{softmax}(\alpha W_2 \bar\phi(x))$ with $W_2 \sim N(0, I)$.

    `average="logits"` averages what enters the softmax: by linearity the features, once, so that
    outputs are drawn directly with their exact distribution (local reparameterisation).
    `average="probs"` averages probabilities, as the paper writes; S times the cost. Both bound the
    evidence of their model from below.

    Args:
        features: the hidden layer; for features of a network of your own see `InvariantHead`.
        distribution: over transformations.
        classes: number of classes.
        average: see above.
        scale: where the prior deviation $\alpha$ of the outputs starts; learned.
    """

    def __init__(
        self,
        features: Averaged,
        distribution: LieDistribution,
        classes: int,
        average: Average = "logits",
        scale: float = 10.0,
    ) -> None:
        """Start at the prior: mean 0, covariance I."""
        super().__init__()
        if average not in ("logits", "probs"):
            raise ValueError(f"expected average='logits' or 'probs', got {average!r}")
        if classes < 2:
            raise ValueError(f"expected at least 2 classes, got {classes}")
        self.features, self.distribution, self.average = features, distribution, average
        self.lead = tuple(features.lead)
        if len(self.lead) > 1:
            raise ValueError(f"expected at most one leading dimension, got {list(self.lead)}")
        batch = self.lead[0] if self.lead else None
        like = features.like
        self.posterior = BlockCholesky(
            (classes, features.width), 1.0, batch=batch, dtype=like.dtype, device=like.device
        )
        self.scale = Hyper(torch.full(self.lead, scale, dtype=like.dtype, device=like.device))

    def averaged(self, x: Tensor, how: Sampling) -> Float[Tensor, "*lead n width"]:
        r"""$\alpha \bar\phi(x)$ at transformations drawn anew."""
        maps, _ = self.distribution.draw(how.samples, how.scheme, how.generator)
        averaged: Tensor = self.scale.value[..., None, None] * self.features(x, maps)
        return averaged

    def every(
        self, x: Tensor, how: Sampling
    ) -> tuple[Float[Tensor, "*lead n s width"], Float[Tensor, " s"]]:
        r"""$\alpha \phi(T_s x)$ under each of transformations drawn anew, and their weights."""
        maps, weights = self.distribution.draw(how.samples, how.scheme, how.generator)
        return self.scale.value[..., None, None, None] * self.features.every(x, maps), weights

    def log_likelihood(
        self, x: Tensor, y: Int64[Tensor, "*lead n"], how: Sampling
    ) -> Float[Tensor, "*lead n"]:
        """Expected log probability of each label, by draws of outputs and transformations."""
        drawn = self.distribution.draw(how.samples, how.scheme, how.generator)
        log_p = self.log_probabilities(x, drawn, how.draws, how.generator)
        picked = log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        return picked.mean(0)

    def log_probabilities(
        self,
        x: Tensor,
        transformations: tuple[Tensor, Tensor],
        draws: int,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "draws *lead n classes"]:
        """Log probabilities of the classes, for draws from the posterior in antithetic pairs.

        Args:
            x: inputs [*lead, n, ...].
            transformations: maps and their weights.
            draws: from the posterior, anew for each datum.
            generator: of the draws.
        """
        maps, weights = transformations
        if self.average == "logits":
            h = self.scale.value[..., None, None] * self.features(x, maps, weights)
            return self.posterior.linear(h, draws, generator, draws > 1).log_softmax(-1)
        every = self.scale.value[..., None, None, None] * self.features.every(x, maps)
        return mixture.log_mixture(
            mixture.outputs(self.posterior, every, draws, generator), weights
        )[0]

    def evidence(
        self, x: Tensor, y: Int64[Tensor, "*lead n"], n_data: int, how: Sampling | None = None
    ) -> Evidence:
        """The lower bound for n_data data, from a batch of them; [*lead] values.

        Args:
            x: inputs [*lead, n, ...].
            y: labels.
            n_data: number of data the batch stands for.
            how: transformations and draws.

        Raises:
            ValueError: inputs of another shape, labels that are none of the classes.
        """
        if n_data < 1:
            raise ValueError(f"expected n_data of at least 1, got {n_data}")
        check_labels(y, self.posterior.shape[0], (*self.lead, x.shape[len(self.lead)]))
        per_datum = self.log_likelihood(x, y, Sampling() if how is None else how)
        fit = per_datum.mean(-1).double() * n_data
        return self.bound(fit, n_data)

    def bound(self, fit: Tensor, n_data: int) -> Evidence:
        r"""The evidence with a given expected log likelihood.

        Its complexity is the divergence $\tfrac12 [\|\mu\|^2 + \mathrm{tr}\,\Sigma - D -
        \log|\Sigma|]$.
        """
        q = self.posterior
        squares = q.mean.square().flatten(len(self.lead)).sum(-1, dtype=torch.float64)
        return Evidence(fit, -0.5 * squares, q.trace() - q.size - q.log_det(), n_data)

    @torch.no_grad()
    def rescale(self) -> Float[Tensor, "*lead"]:
        r"""Set the outputs' scale to the best one in closed form, and leave the outputs alone.

        The weights $\alpha W_2$ have prior variance $\alpha^2$, whose best value is the mean of
        their squares under the posterior, $v^* = \alpha^2 (\mathrm{tr}\,\Sigma + \|\mu\|^2) / D$:
        with $k^2 = v^* / \alpha^2$ the scale becomes $k \alpha$, and $W_2$ is divided by k. The fit
        stays, the divergence falls to the collapsed one. Where the gradient vanishes, k = 1.

        Returns:
            The factors k.
        """
        q = self.posterior
        k = (q.second_moment() / q.size).sqrt().to(q.mean)
        q.mean.div_(k[..., None, None])
        q.root.log_diagonal.sub_(k.log()[..., None, None])
        q.root.lower.div_(k[..., None, None, None])
        self.scale.value = self.scale.value * k
        return k

    @torch.no_grad()
    def select(self, places: Sequence[int]) -> "InvariantWeights":
        """Some of the models side by side as a model of their own; a place may appear twice.

        Args:
            places: which of them.

        Raises:
            ValueError: a model without a leading dimension, a place that it does not have.
        """
        count = self.lead[0] if self.lead else 0
        if not places or not all(0 <= place < count for place in places):
            raise ValueError(f"expected places between 0 and {count - 1}, got {list(places)}")
        part = copy.deepcopy(self)
        part.lead = part.features.lead = part.posterior.lead = (len(places),)
        part.posterior.batch = len(places)
        for values in part._batched():
            values.data = values.data[list(places)]
        return part

    @torch.no_grad()
    def replace(self, places: Sequence[int], other: "InvariantWeights") -> None:
        """Put the models of another batch in some places: the inverse of `select`."""
        if other.lead != (len(places),):
            raise ValueError(f"expected {len(places)} models, got {list(other.lead)}")
        for mine, new in zip(self._batched(), other._batched(), strict=True):
            mine[list(places)] = new

    def _batched(self) -> list[Tensor]:
        """Every tensor with the leading dimension of the models, in one order."""
        rest = [self.distribution.generators]
        if self.distribution.mask.dim() == 1:
            rest.append(self.distribution.mask)
        shared = {id(values) for values in rest}
        return [v for v in (*self.parameters(), *self.buffers()) if id(v) not in shared]

    @torch.no_grad()
    def predict(
        self, x: Tensor, nodes: Nodes | None = None, draws: int = 8, batch: int = 500
    ) -> Float[Tensor, "*lead n classes"]:
        """Class probabilities: fixed transformations, averaged over the posterior.

        Args:
            x: inputs [*lead, n, ...].
            nodes: of the transformations; about 64 fixed ones by default.
            draws: from the posterior.
            batch: data at a time.
        """
        nodes = self.distribution.nodes(64) if nodes is None else nodes
        generator = torch.Generator(x.device).manual_seed(0)
        maps = self.distribution.at(nodes)
        parts = [
            self.log_probabilities(part, maps, draws, generator).exp().mean(0)
            for part in x.split(batch, len(self.lead))
        ]
        return torch.cat(parts, len(self.lead))


class InvariantHead(InvariantWeights):
    """`InvariantWeights` on a network of your own: features are averaged, outputs integrated out.

    The network's weights are point estimates. Any torch optimiser can raise `evidence` in
    everything at once.

    Args:
        network: inputs -> features, see `NetworkFeatures`.
        example: a few inputs.
        distribution: over transformations of the input.
        classes: number of classes.
        average: see `InvariantWeights`.
        scale: see `InvariantWeights`.
    """

    def __init__(
        self,
        network: nn.Module,
        example: Tensor,
        distribution: LieDistribution,
        classes: int,
        average: Average = "logits",
        scale: float = 10.0,
    ) -> None:
        """Wrap the network; see the class."""
        super().__init__(NetworkFeatures(network, example), distribution, classes, average, scale)
