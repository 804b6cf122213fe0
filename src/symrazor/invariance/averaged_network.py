r"""Average a network over transformed copies of its input (LILA).

$$ f(x; \eta) = \sum_s w_s\, g_\theta(T_s x), \qquad T_s \sim p_\eta $$

For classes, the average may also be the logarithm of $\sum_s w_s\, \mathrm{softmax}\,
g_\theta(T_s x)$, which unlike a mean of logits penalises uninformative copies, or the logarithm of
$\sum_s w_s \exp g_\theta(T_s x)$. The last one ("joint") is Bayes' rule for an input in an unknown
pose: $\exp g_y(x)$ stands for the joint density of y and of x in a standard pose, so that likely
poses dominate the sum.

The copies of one input are adjacent in the first dimension, [(n s), ...]. The curvature treats them
as several uses of each weight by the same input, and the evidence of f is differentiable in the
widths $\eta$ and in the probabilities in $w$. Invariance never lowers the training loss, but it
raises the evidence; the widths grow until they contradict the labels.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from symrazor.core.likelihood import Categorical, Likelihood
from symrazor.curvature.tape import announce_copies
from symrazor.invariance.copies import Augment, Mixture

Average = Literal["outputs", "probabilities", "joint"]


class Augmented(nn.Module):
    """A network averaged over transformed copies of its input.

    Args:
        network: any network, including relaxed ones.
        augment: makes the copies.
        at: name in `named_modules` of the module of `network` whose output is averaged; None for
            the outputs of the network. Averaging early is cheaper, averaging late is more
            expressive.
        average: "outputs"; or, for a network that returns logits of classes, "probabilities" or
            "joint" (exponentials of logits, see the module docstring). The result then are logits,
            too.

    Raises:
        ValueError: if the module does not exist, or if probabilities are to be averaged inside the
            network; later, if the likelihood is not categorical for such an average.
    """

    def __init__(
        self,
        network: nn.Module,
        augment: Augment | Mixture,
        at: str | None = None,
        average: Average = "outputs",
    ) -> None:
        super().__init__()
        value: object = network
        if not isinstance(value, nn.Module):
            kind = type(value).__name__
            raise ValueError(f"network must be a torch.nn.Module, got {kind}.")
        if not hasattr(augment, "copies"):
            kind = type(augment).__name__
            raise ValueError(
                f"augment must be an Augment or a Mixture, got {kind}. Use Augment(...)."
            )
        if average not in ("outputs", "probabilities", "joint"):
            raise ValueError(
                f"average must be 'outputs', 'probabilities' or 'joint', got {average!r}."
            )
        if average != "outputs" and at is not None:
            raise ValueError(
                f"Probabilities are averaged at the end of the network; use at=None, not {at!r}."
            )
        if at is not None and at not in dict(network.named_modules()):
            names = ", ".join(name for name, _ in network.named_modules() if name)
            raise ValueError(
                f"The network has no module {at!r} to average at. Its modules are {names}."
            )
        self.network, self.augment, self.at, self.average = network, augment, at, average

    def forward(self, x: Shaped[Tensor, "n ..."]) -> Tensor:
        """Return the outputs, averaged at the end or at `at`."""
        copies, weights = self.augment.copies(x)
        announce_copies(weights)
        calls = 0

        def average(f: Tensor) -> Tensor:
            split: Tensor = f.unflatten(0, (len(x), len(weights)))
            if self.average != "outputs":
                log_weights = weights.to(f).log().unsqueeze(1)
                logits = split if self.average == "joint" else split.log_softmax(-1)
                terms = logits + log_weights
                announce_copies(terms.logsumexp(2).softmax(1))  # posterior of the pose
                return terms.logsumexp(1)
            return torch.einsum("ns...,s->n...", split, weights.to(f))

        def hook(module: nn.Module, args: Any, f: Any) -> Tensor:
            nonlocal calls
            calls += 1
            self._check_place(f, len(x) * len(weights), calls)
            return average(f)

        if self.at is None:
            return average(self.network(copies.flatten(0, 1)))
        handle = self.network.get_submodule(self.at).register_forward_hook(hook)
        try:
            outputs: Tensor = self.network(copies.flatten(0, 1))
        finally:
            handle.remove()
        if calls == 0:
            raise ValueError(
                f"The network did not call {self.at!r}, where copies are averaged. Use at=None, or "
                "the name of a module that is called."
            )
        return outputs

    def _check_place(self, f: object, rows: int, calls: int) -> None:
        """Check that the module returned one tensor with a row per copy, once per pass."""
        is_valid = isinstance(f, Tensor) and f.dim() > 0 and len(f) == rows
        if not is_valid or calls > 1:
            got = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ValueError(
                f"Module {self.at!r} must be called once and return a tensor with {rows} rows, one "
                f"for each copy, got {got} in call {calls}. Average at another module."
            )

    def check_likelihood(self, likelihood: Likelihood) -> None:
        """Raise ValueError if probabilities are averaged but the outputs are not logits."""
        if self.average != "outputs" and not isinstance(likelihood, Categorical):
            raise ValueError(
                f"average={self.average!r} needs a categorical likelihood, got "
                f"{type(likelihood).__name__}. Use average='outputs', or one logit per class."
            )

    def refined(self, n_samples: int) -> "Augmented":
        """Return the same network, not a copy, averaged over another number of points.

        Raises:
            ValueError: if n_samples is not a positive integer.
        """
        finer = self.augment.refined(n_samples)
        return Augmented(self.network, finer, self.at, self.average).train(self.training)

    def invariances(self, shape: Sequence[int]) -> dict[str, float]:
        """Return the learned widths and probabilities by name and unit."""
        return self.augment.describe(shape)
