"""Code of a page or a notebook, with short trainings on few data."""

import re

LONG = re.compile(r"""\b((?:epochs|steps)"?\s*[=:]\s*)\d\d+\b(?!, dt)""")
LARGE = re.compile(r"\b((?:train_)?size=\(?)\d{3,}\b")


def shortened(block: str) -> str:
    """Return code with 3 instead of ten or more epochs or steps, and at most 100 training data.

    Simulations keep their steps.
    """
    return LARGE.sub(r"\g<1>100", LONG.sub(r"\g<1>3", block))
