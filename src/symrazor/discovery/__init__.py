"""Find the structure of a data set: train candidate networks and compare their evidence.

`discover` is the entry point; `register_kind` adds a kind of data. May import: everything except
`cli`, `experiments` and `bench`.
"""

from symrazor.discovery.answer import Answer, Candidate
from symrazor.discovery.api import discover
from symrazor.discovery.digits import discover_digits
from symrazor.discovery.families import DataKind, register_kind
from symrazor.discovery.question import Family, Options, Structure, Wording
from symrazor.discovery.result import Discovery

__all__ = [
    "Answer",
    "Candidate",
    "DataKind",
    "Discovery",
    "Family",
    "Options",
    "Structure",
    "Wording",
    "discover",
    "discover_digits",
    "register_kind",
]
