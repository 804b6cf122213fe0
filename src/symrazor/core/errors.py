"""The library's own exceptions.

Bad arguments raise `ValueError` with "expected ..., got ..."; these classes exist because a
training loop may want to catch them apart.
"""

from collections.abc import Mapping


class UnsupportedParameterError(ValueError):
    """Trainable parameters for which no curvature can be computed, each with its reason.

    The evidence integrates over every weight, so a weight without curvature would make it wrong
    without a sign of it. Nothing is skipped: the parameters are named here instead.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        """Build the message from `reasons`, parameter name -> what is wrong and what to do."""
        self.reasons = dict(reasons)
        lines = "\n".join(f"  {name}: {reason}" for name, reason in self.reasons.items())
        super().__init__(
            f"{len(self.reasons)} trainable parameter(s) have no curvature:\n{lines}\n"
            "Freeze them (requires_grad_(False)), make them hyperparameters (symrazor.Hyper), or "
            "register their layer (see docs/how-to/add-a-layer.md)."
        )


class DivergenceError(ValueError, FloatingPointError):
    """Outputs or an evidence that are not finite: the weights have diverged."""


class CurvatureError(RuntimeError):
    """A curvature factor that cannot be used: not finite, or not positive semi-definite."""
