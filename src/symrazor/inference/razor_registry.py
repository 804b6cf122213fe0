"""The Razor that was made last for a model, while both are alive."""

from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

if TYPE_CHECKING:
    from symrazor.inference.razor import Razor

_RAZORS: "WeakKeyDictionary[nn.Module, ReferenceType[Razor]]" = WeakKeyDictionary()


def remember(model: nn.Module, razor: "Razor") -> None:
    """Note the Razor of a model; neither is kept alive by it."""
    _RAZORS[model] = ref(razor)


def latest_razor(model: nn.Module) -> "Razor | None":
    """The Razor that was made last for this very model, while it is alive."""
    found = _RAZORS.get(model)
    return None if found is None else found()
