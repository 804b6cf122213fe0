r"""Learn a network whose features are averaged over learned transformations (invariant weights).

$$ \log p(D \mid \eta) \ge \mathrm{E}_{q(W_2)} \mathrm{E}_T \log p(y \mid \hat f(x; \eta))
   - \mathrm{KL}(q(W_2) \,\|\, p(W_2)) $$

(Learning Invariant Weights, eqs. 9 and 10). The bound is maximised in the posterior of the output
weights and in the widths $\eta$ of the transformations. Invariance does not improve the fit, but it
lowers the complexity of the weights.
"""

import copy
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from symrazor.core.parameters import Hyper
from symrazor.core.validation import check_choice
from symrazor.inference.evidence import Evidence
from symrazor.inference.variational.posteriors import BlockCholesky
from symrazor.invariance import mixture
from symrazor.invariance.features import Averaged, NetworkFeatures
from symrazor.invariance.lie_distributions import LieDistribution, Nodes, Random

Average = Literal["logits", "probs"]


class Sampling(NamedTuple):
    """How an average over transformations and weights is sampled.

    Attributes:
        samples: number S of transformations.
        draws: number of draws from the posterior of the output weights, in antithetic pairs.
        scheme: sampling scheme of the transformations, see
            `symrazor.invariance.lie_distributions.draw`.
        generator: random generator.
    """

    samples: int = 32
    draws: int = 2
    scheme: Random = "shifted"
    generator: torch.Generator | None = None


def check_labels(y: Tensor, classes: int, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless y holds labels 0..classes-1 of the given shape, at least one."""
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape != shape:
        raise ValueError(
            f"y must hold integer class labels of shape {list(shape)}, got {y.dtype} of shape "
            f"{list(y.shape)}."
        )
    if not y.numel():
        raise ValueError("The batch is empty.")
    lowest, highest = (int(value) for value in y.aminmax())
    if lowest < 0 or highest >= classes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"Labels must be between 0 and {classes - 1}, got {wrong}.")


class InvariantWeights(nn.Module):
    r"""The model $p(y \mid x) = \mathrm{softmax}(\alpha W_2 \bar\phi(x))$ with $W_2 \sim N(0, I)$.

    `average="logits"` averages the inputs of the softmax. By linearity this averages the features,
    so that outputs are drawn directly from their exact distribution (local reparameterisation).
    `average="probs"` averages probabilities, as in the paper, at S times the cost. Both give a
    lower bound on the evidence of their model.

    Args:
        features: the hidden layer; see `InvariantHead` for features of any network.
        distribution: distribution over transformations.
        classes: number of classes.
        average: see above.
        scale: initial prior standard deviation $\alpha$ of the outputs; learned.
    """

    def __init__(
        self,
        features: Averaged,
        distribution: LieDistribution,
        classes: int,
        average: Average = "logits",
        scale: float = 10.0,
    ) -> None:
        super().__init__()
        check_choice("average", average, Average)
        if classes < 2:
            raise ValueError(f"There must be at least 2 classes, got {classes}.")
        self.features, self.distribution, self.average = features, distribution, average
        self.lead = tuple(features.lead)
        if len(self.lead) > 1:
            raise ValueError(f"There can be at most one leading dimension, got {list(self.lead)}.")
        batch, like = self.lead[0] if self.lead else None, features.like
        self.posterior = BlockCholesky(
            (classes, features.width), 1.0, batch=batch, dtype=like.dtype, device=like.device
        )
        self.scale = Hyper(like.new_full(self.lead, scale))

    def averaged(self, x: Tensor, how: Sampling) -> Float[Tensor, "*lead n width"]:
        r"""Return $\alpha \bar\phi(x)$ at newly drawn transformations."""
        maps, _ = self._drawn(how)
        return self._scaled(self.features(x, maps))

    def features_per_map(
        self, x: Tensor, how: Sampling
    ) -> tuple[Float[Tensor, "*lead n s width"], Float[Tensor, " s"]]:
        r"""Return $\alpha \phi(T_s x)$ for newly drawn transformations, and their weights."""
        maps, weights = self._drawn(how)
        return self._scaled(self.features.per_map(x, maps)), weights

    def _drawn(self, how: Sampling) -> tuple[Tensor, Tensor]:
        return self.distribution.draw(how.samples, how.scheme, how.generator)

    def _scaled(self, features: Tensor) -> Tensor:
        ones = [1] * (features.dim() - len(self.lead))
        return self.scale.value.reshape(*self.lead, *ones) * features

    def log_likelihood(
        self, x: Tensor, y: Int64[Tensor, "*lead n"], how: Sampling
    ) -> Float[Tensor, "*lead n"]:
        """Estimate the expected log probability of each label by sampling."""
        log_p = self.log_probabilities(x, self._drawn(how), how.draws, how.generator)
        picked = log_p.gather(-1, y.expand(log_p.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        return picked.mean(0)

    def log_probabilities(
        self,
        x: Tensor,
        transformations: tuple[Tensor, Tensor],
        draws: int,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "draws *lead n classes"]:
        """Return log probabilities of classes, for draws from the posterior in antithetic pairs.

        Draws are independent for each input; `transformations` are maps and their weights.
        """
        maps, weights = transformations
        if self.average == "logits":
            h = self._scaled(self.features(x, maps, weights))
            return self.posterior.linear(h, draws, generator, draws > 1).log_softmax(-1)
        per_map = self._scaled(self.features.per_map(x, maps))
        outputs = mixture.outputs(self.posterior, per_map, draws, generator)
        return mixture.log_mixture(outputs, weights)[0]

    def evidence(
        self, x: Tensor, y: Int64[Tensor, "*lead n"], n_data: int, how: Sampling | None = None
    ) -> Evidence:
        """Return the lower bound for n_data data, estimated from a batch; values are [*lead].

        Args:
            x: inputs [*lead, n, ...].
            y: labels.
            n_data: number of data that the batch represents.
            how: sampling of transformations and weights.

        Raises:
            ValueError: if the inputs have another shape or a label is not a class.
        """
        if n_data < 1:
            raise ValueError(f"n_data must be at least 1, got {n_data}.")
        check_labels(y, self.posterior.shape[0], (*self.lead, x.shape[len(self.lead)]))
        per_datum = self.log_likelihood(x, y, Sampling() if how is None else how)
        fit = per_datum.mean(-1).double() * n_data
        return self.bound(fit, n_data)

    def bound(self, fit: Tensor, n_data: int) -> Evidence:
        r"""Return the evidence for a given expected log likelihood.

        Its complexity is the divergence $\tfrac12 [\|\mu\|^2 + \mathrm{tr}\,\Sigma - D -
        \log|\Sigma|]$.
        """
        q = self.posterior
        squares = q.mean.square().flatten(len(self.lead)).sum(-1, dtype=torch.float64)
        return Evidence(fit, -0.5 * squares, q.trace() - q.size - q.log_det(), n_data)

    @torch.no_grad()
    def select(self, places: Sequence[int]) -> "InvariantWeights":
        """Return the models at some indices as a new model; an index may appear twice."""
        count = self.lead[0] if self.lead else 0
        if not places or not all(0 <= place < count for place in places):
            raise ValueError(f"places must be between 0 and {count - 1}, got {list(places)}.")
        part = copy.deepcopy(self)
        part.lead = part.features.lead = part.posterior.lead = (len(places),)
        part.posterior.batch = len(places)
        for values in part._batched():
            values.data = values.data[list(places)]
        return part

    @torch.no_grad()
    def replace(self, places: Sequence[int], other: "InvariantWeights") -> None:
        """Replace the models at some indices by another batch; inverse of `select`."""
        if other.lead != (len(places),):
            raise ValueError(
                f"{len(places)} models must replace {len(places)} places, got {list(other.lead)}."
            )
        for values, new in zip(self._batched(), other._batched(), strict=True):
            values[list(places)] = new

    def _batched(self) -> list[Tensor]:
        """Return every tensor with the leading dimension of the models, in fixed order."""
        shared = {id(self.distribution.generators)}
        if self.distribution.mask.dim() == 1:
            shared.add(id(self.distribution.mask))
        return [v for v in (*self.parameters(), *self.buffers()) if id(v) not in shared]

    @torch.no_grad()
    def predict(
        self, x: Tensor, nodes: Nodes | None = None, draws: int = 8, batch: int = 500
    ) -> Float[Tensor, "*lead n classes"]:
        """Return class probabilities at fixed transformations, averaged over the posterior.

        Args:
            x: inputs [*lead, n, ...].
            nodes: nodes of the transformations; by default about 64 fixed ones.
            draws: number of draws from the posterior.
            batch: inputs per batch.
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
    """`InvariantWeights` on the features of any network.

    Features are averaged, output weights integrated out, and the network's weights are point
    estimates. Any torch optimiser can maximise `evidence` in all parameters.

    Args:
        network: inputs -> features, see `NetworkFeatures`.
        example: a few inputs.
        distribution: distribution over transformations of the input.
        classes: number of classes.
        average, scale: see `InvariantWeights`.
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
        super().__init__(NetworkFeatures(network, example), distribution, classes, average, scale)
