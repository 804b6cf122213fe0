"""Define the exceptions that a training loop may want to catch on their own.

Bad arguments raise `ValueError`.
"""

from collections.abc import Mapping, Sequence

GENERAL_ADVICE = (
    "Freeze them (requires_grad_(False)), make them hyperparameters (symrazor.Hyper), or register "
    "their layer (see docs/how-to/add-a-layer.md)."
)


class UnsupportedParameterError(ValueError):
    """Some trainable parameters have no curvature.

    The evidence integrates over every weight. A weight without curvature would make it wrong
    without any sign of it, so no weight is skipped.

    Args:
        reasons: parameter name -> the problem and the next action.
        advice: the next action where the reasons name none.
    """

    def __init__(self, reasons: Mapping[str, str], advice: str = GENERAL_ADVICE) -> None:
        self.reasons = dict(reasons)
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            by_reason.setdefault(reason, []).append(name)
        lines = [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
        count = f"{len(self.reasons)} trainable parameter(s) have no curvature:"
        super().__init__("\n".join([count, *lines, *([advice] if advice else [])]))


class DivergenceError(ValueError, FloatingPointError):
    """The outputs or the evidence are not finite because the weights have diverged."""


class CurvatureError(RuntimeError):
    """A curvature factor is not finite or not positive semi-definite."""


class AmbiguousDataError(ValueError):
    """Data that can be read in several ways.

    Args:
        problem: what is ambiguous, in one sentence.
        answers: option, its value, and what the data are then.
    """

    def __init__(self, problem: str, answers: Sequence[tuple[str, str, str]]) -> None:
        self.problem, self.answers = problem, tuple(answers)
        options = "; ".join(f"--{option} {value} ({text})" for option, value, text in answers)
        super().__init__(f"{problem} Choose one: {options}.")


class OtherRunError(ValueError):
    """A checkpoint belongs to a run with other data, another model or other options."""


class OptionError(Exception):
    """Options that a configuration rejects.

    It is not a ValueError: tyro would put its internal name of the section in front of the message.
    """
