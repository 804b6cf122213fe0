"""Code of a page or a notebook, with trainings of a few epochs or steps."""

import re

LONG = re.compile(r"""\b((?:epochs|steps)"?\s*[=:]\s*)\d\d+\b(?!, dt)""")


def shortened(block: str) -> str:
    """The same code, but ten or more epochs or steps of training are three; simulations stay."""
    return LONG.sub(r"\g<1>3", block)
