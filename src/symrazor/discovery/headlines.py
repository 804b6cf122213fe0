"""Put claims in one sentence: the headlines of the kinds of data."""

from collections.abc import Sequence

from symrazor.core.validation import join_names
from symrazor.discovery.claims import Claim
from symrazor.discovery.question import Wording

AXES = ("horizontal", "vertical")
IMAGE_WORDING = Wording(
    "Translation-invariant: position does not matter.",
    "Not translation-invariant: position matters.",
    "whether position matters",
)
SERIES_WORDING = Wording(
    "Invariant to shifts in time: it does not matter when something happens.",
    "Not invariant to shifts in time: it matters when something happens.",
    "whether it matters when something happens",
    {r"\bon position\b": "on time"},
)
SET_WORDING = Wording(
    "Permutation-invariant: the order of the points does not matter.",
    "Not permutation-invariant: the order of the points matters.",
    "whether the order of the points matters",
    {r"\bS\d+-equivariant": "permutation-equivariant"},
)
VECTOR_WORDING = Wording(
    "Linear: hidden layers do not improve the prediction.",
    "Not linear: hidden layers improve the prediction.",
    "whether hidden layers improve the prediction",
)


def describe_invariance(claims: Sequence[Claim]) -> str:
    """Return a headline: the groups under which the labels are invariant, as far as decided."""
    holds = [claim.name for claim in claims if claim.holds]
    broken = [claim.name for claim in claims if claim.holds is False]
    undecided = [claim.name for claim in claims if claim.holds is None]
    if not holds and undecided:
        question = f"whether the labels are invariant under {join_names(undecided, 'or')}"
        return f"Undecided: the data do not show {question}."
    if not holds:
        return f"Not invariant under {join_names(broken, 'or')}."
    exceptions = f", not under {join_names(broken, 'or')}" if broken else ""
    exceptions += f"; undecided for {join_names(undecided)}" if undecided else ""
    return f"Invariant under {join_names(holds)}{exceptions}."


def describe_shifts(claims: Sequence[Claim]) -> str:
    """Return a headline: whether position matters, or only along one axis."""
    both_axes, *axes = claims
    if both_axes.holds is None:
        return f"Undecided: the data do not show {IMAGE_WORDING.undecided}."
    if both_axes.holds:
        return IMAGE_WORDING.invariant
    free = [claim.name for claim in axes if claim.holds]
    if len(free) != 1:
        return IMAGE_WORDING.not_invariant
    does_not, matters = AXES if free[0] == "x-translation" else AXES[::-1]
    return (
        f"Translation-invariant along one axis: the {does_not} position does not matter, the "
        f"{matters} position matters."
    )
