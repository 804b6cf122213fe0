"""Headlines: claims in one sentence."""

import pytest

from symrazor.discovery.claims import Claim, Margin
from symrazor.discovery.headlines import describe_invariance, describe_shifts


def claim(name: str, holds: bool | None) -> Claim:
    return Claim(name, holds, 0.99, "positional", Margin(0.0, 1.0), None, 3)


@pytest.mark.parametrize(
    ("translation", "x", "y", "headline"),
    [
        (True, True, True, "Translation-invariant: position does not matter."),
        (None, True, True, "Undecided: the data do not show whether position matters."),
        (False, None, False, "Not translation-invariant: position matters."),
        (False, True, True, "Not translation-invariant: position matters."),
        (
            False,
            True,
            None,
            "Translation-invariant along one axis: the horizontal position does not matter, the "
            "vertical position matters.",
        ),
        (
            False,
            False,
            True,
            "Translation-invariant along one axis: the vertical position does not matter, the "
            "horizontal position matters.",
        ),
    ],
)
def test_headlines(translation: bool | None, x: bool | None, y: bool | None, headline: str) -> None:
    claims = [claim("translation", translation)]
    if translation is False:
        claims += [claim("x-translation", x), claim("y-translation", y)]
    assert describe_shifts(claims) == headline


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        ((False,), "Not invariant under a."),
        ((False, False), "Not invariant under a or b."),
        ((True, True), "Invariant under a and b."),
        ((False, True), "Invariant under b, not under a."),
        ((None, True), "Invariant under b; undecided for a."),
        (
            (None, False),
            "Undecided: the data do not show whether the labels are invariant under a.",
        ),
    ],
)
def test_headlines_name_the_groups(holds: tuple[bool | None, ...], expected: str) -> None:
    claims = [claim(name, held) for name, held in zip("ab", holds, strict=False)]
    assert describe_invariance(claims) == expected
