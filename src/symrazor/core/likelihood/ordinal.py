"""The ordinal likelihood of labels with an order, such as grades."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from symrazor.core.likelihood.base import (
    Columns,
    Likelihood,
    Outputs,
    check_values,
    device_of,
    register_likelihood,
)
from symrazor.core.parameters import Hyper, real


@register_likelihood("ordinal")
class Ordinal(Likelihood):
    r"""Ordered classes $0..K-1$: $p(y \le j) = \sigma(b_j - f)$ with learned thresholds $b_j$.

    The root is that of the Fisher information, as the Hessian depends on y:
    $\Lambda(f) = \sum_j p_j\, (\partial_f \log p_j)^2$.

    Args:
        classes: number K of classes.
    """

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        if classes < 2:
            raise ValueError(f"An ordinal likelihood needs at least 2 classes, got {classes}.")
        self.classes = classes
        quantiles = torch.arange(1, classes, dtype=torch.float64) / classes
        thresholds = quantiles.logit()
        self.first = Hyper(thresholds[0], real)
        self.gaps = Hyper(thresholds.diff()) if classes > 2 else None

    @property
    def thresholds(self) -> Float[Tensor, " b"]:
        """The K - 1 thresholds, in increasing order."""
        first = self.first.value.reshape(1)
        return first if self.gaps is None else torch.cat([first, self.gaps.value]).cumsum(0)

    def _log_p(self, f: Outputs) -> Float[Tensor, "n k"]:
        r"""Return $\log p_j = \log[\sigma(b_j - f) - \sigma(b_{j-1} - f)]$, finite for any f.

        $\sigma(u) - \sigma(v) = \sigma(u)\, \sigma(-v)\, (1 - e^{v - u})$.
        """
        b = self.thresholds.to(f.dtype)
        above, below = F.logsigmoid(b - f), F.logsigmoid(f - b)
        gaps = torch.log(-torch.expm1(-b.diff()))
        inner = above[:, 1:] + below[:, :-1] + gaps
        return torch.cat([above[:, :1], inner, below[:, -1:]], 1)

    def _slopes(self, f: Outputs) -> Float[Tensor, "n k"]:
        r"""Return $\partial_f \log p_j$."""
        b = self.thresholds.to(f.dtype)
        above, below = -torch.sigmoid(f - b), torch.sigmoid(b - f)
        return torch.cat([above[:, :1], above[:, 1:] + below[:, :-1], below[:, -1:]], 1)

    def nll(self, f: Outputs, y: Tensor) -> Float[Tensor, " n"]:
        """Return the negative log probability of each label."""
        return -self._log_p(f).gather(1, y.long().reshape(-1, 1)).squeeze(1)

    def residual(self, f: Outputs, y: Tensor) -> Outputs:
        """Return the gradient of `nll`."""
        return -self._slopes(f).gather(1, y.long().reshape(-1, 1))

    def hessian_root(self, f: Outputs) -> Columns:
        """Return the root of the Fisher information."""
        information = (self._log_p(f).exp() * self._slopes(f).square()).sum(1, keepdim=True)
        return information.clamp(min=torch.finfo(f.dtype).tiny).sqrt().unsqueeze(0)

    def sample(self, f: Outputs, generator: torch.Generator | None) -> Tensor:
        """Draw a class per datum."""
        p = self.mean(f.detach()).to(device_of(generator, f))
        return torch.multinomial(p, 1, generator=generator).squeeze(1).to(f.device)

    def mean(self, f: Outputs) -> Float[Tensor, "n k"]:
        """Return class probabilities."""
        return self._log_p(f).exp()

    def _scores(self, mean: Tensor, y: Tensor, nll: float) -> dict[str, float]:
        predicted = mean.argmax(1)
        return {
            "accuracy": float((predicted == y).double().mean()),
            "nll": nll,
            "mean_absolute_error": float((predicted - y).abs().double().mean()),
        }

    def check(self, f: Tensor, y: Tensor) -> None:
        """Check for one output and integer labels 0..K-1."""
        super().check(f, y)
        if f.shape[1] != 1:
            raise ValueError(f"An ordinal likelihood needs one output, got {f.shape[1]}.")
        if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
            raise ValueError(
                f"Class labels must be integers of shape [n], got {y.dtype} {list(y.shape)}."
            )
        check_values(
            y, (y < 0) | (y >= self.classes), f"Labels must be between 0 and {self.classes - 1}"
        )
