"""symrazor learns which symmetries a network should have, from training data alone.

The public names are those of `symrazor.public`. They are imported, with torch, when one of them is
first used, so that `symrazor --help` and `symrazor --version` start at once.
"""

# Importing startup first lets Ctrl-C end the command while torch is still loading.
from symrazor.core import startup as _startup  # isort: skip  # noqa: F401

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from symrazor.core.version import __version__ as __version__

if _TYPE_CHECKING:
    from symrazor.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> _Any:
        """Return a public name, or a package, which is then imported."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'symrazor' has no attribute {name!r}")
        public = _import_module("symrazor.public")
        globals().update({key: getattr(public, key) for key in public.__all__})
        if name in public.__all__ or name == "__all__":
            return getattr(public, name)
        try:  # for example sr.inference, which `symrazor.public` has imported
            return _import_module(f"symrazor.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"module 'symrazor' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    """Return the public names; the other packages are importable, but not part of `sr`."""
    return sorted(_import_module("symrazor.public").__all__)
