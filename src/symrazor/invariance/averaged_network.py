r"""A network averaged over transformed copies of its input (LILA).

$$ f(x; \eta) = \sum_s w_s\, g_\theta(T_s x), \qquad T_s \sim p_\eta $$

or, for classes, the logarithm of $\sum_s w_s\, \mathrm{softmax}\, g_\theta(T_s x)$ (a mean of
logits forgives copies that say nothing, a mean of probabilities does not), or that of
$\sum_s w_s \exp g_\theta(T_s x)$: Bayes' rule for a datum in an unknown pose, where
$\exp g_y(x)$ stands for the density of x in a standard pose together with y, so that a copy weighs
what it is worth.

The copies of a datum follow each other in the first dimension, [(n s), ...]: for the curvature they
are further uses of each weight by the same datum, and the evidence of f is differentiable in the
widths $\eta$ and the probabilities in $w$. Symmetry never lowers the training loss, but it raises
the evidence; so the widths grow until the labels object.
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
        network: any; relaxed ones too.
        augment: what makes the copies.
        at: name of the module of `network` whose output is averaged, as `named_modules` has it;
            None for the outputs of the network. Averaging early is cheaper, averaging late is
            more expressive.
        average: "outputs"; or, for a network whose outputs are logits of classes, "probabilities"
            or "joint" (the exponentials of logits, see the module). What comes out then are logits
            too.

    Raises:
        ValueError: a module that is not there, or probabilities inside of the network; and, later,
            a likelihood that is not of classes for an average that is.
    """

    def __init__(
        self,
        network: nn.Module,
        augment: Augment | Mixture,
        at: str | None = None,
        average: Average = "outputs",
    ) -> None:
        """Check that the place is there."""
        super().__init__()
        given: object = network
        if not isinstance(given, nn.Module):
            kind = type(given).__name__
            raise ValueError(f"expected the network as a torch.nn.Module, got {kind}")
        if not hasattr(augment, "copies"):
            kind = type(augment).__name__
            raise ValueError(f"expected an Augment or a Mixture, got {kind}; do: Augment(...)")
        if average not in ("outputs", "probabilities", "joint"):
            raise ValueError(
                f"expected average 'outputs', 'probabilities' or 'joint', got {average!r}"
            )
        if average != "outputs" and at is not None:
            raise ValueError(
                f"expected probabilities at the end of the network, got at={at!r}; do: at=None"
            )
        if at is not None and at not in dict(network.named_modules()):
            names = ", ".join(name for name, _ in network.named_modules() if name)
            raise ValueError(
                f"expected the name of a module to average at, among {names}; got {at!r}"
            )
        self.network, self.augment, self.at, self.average = network, augment, at, average

    def forward(self, x: Shaped[Tensor, "n ..."]) -> Tensor:
        """Outputs, averaged there or at `at`."""
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
            found: Tensor = self.network(copies.flatten(0, 1))
        finally:
            handle.remove()
        if calls == 0:
            raise ValueError(
                f"expected the network to call {self.at!r}, where copies are averaged, got a pass "
                "without it; do: at=None, or the name of a module that is used"
            )
        return found

    def _check_place(self, f: object, rows: int, calls: int) -> None:
        """One tensor with a row for each copy, and once in a pass."""
        good = isinstance(f, Tensor) and f.dim() > 0 and len(f) == rows
        if not good or calls > 1:
            got = list(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ValueError(
                f"expected module {self.at!r} to be called once, and to give a tensor with {rows} "
                f"rows, one for each copy, got {got} in call {calls}; do: average at another module"
            )

    def check_likelihood(self, likelihood: Likelihood) -> None:
        """Refuse averages of probabilities where outputs are not logits of classes."""
        if self.average != "outputs" and not isinstance(likelihood, Categorical):
            raise ValueError(
                f"expected a categorical likelihood for average={self.average!r}, got "
                f"{type(likelihood).__name__}; do: average='outputs', or two logits for two classes"
            )

    def refined(self, n_samples: int) -> "Augmented":
        """The same network, not a copy of it, averaged over more points: for predictions.

        Raises:
            ValueError: no points at all.
        """
        finer = self.augment.refined(n_samples)
        return Augmented(self.network, finer, self.at, self.average).train(self.training)

    def invariances(self, shape: Sequence[int]) -> dict[str, float]:
        """What was learned: widths and probabilities by name and unit."""
        return self.augment.describe(shape)
