"""What a reading is made of, whichever way it was learned."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from symrazor.core.hyper import Prior


@runtime_checkable
class Weighed(Protocol):
    """A module and its weight tensors, by name."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def tensors(self) -> Iterable[str]: ...  # noqa: D102


@runtime_checkable
class Learned(Protocol):
    """What a reading is made of: a `Razor`, or a `Variational` network."""

    @property
    def model(self) -> nn.Module: ...  # noqa: D102

    @property
    def prior(self) -> Prior: ...  # noqa: D102

    @property
    def layers(self) -> Sequence[Weighed]: ...  # noqa: D102

    @property
    def at_bound(self) -> list[str]: ...  # noqa: D102

    @property
    def config(self) -> Any: ...  # noqa: D102
