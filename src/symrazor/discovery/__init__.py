"""Find the structure of a data set: train candidate networks and compare their evidence.

`discover` is the entry point. May import: everything except `cli`, `experiments` and `bench`.
"""

from symrazor.discovery.answer import Answer, Candidate
from symrazor.discovery.api import discover, discover_digits
from symrazor.discovery.question import Options
from symrazor.discovery.result import Discovery

__all__ = [
    "Answer",
    "Candidate",
    "Discovery",
    "Options",
    "discover",
    "discover_digits",
]
