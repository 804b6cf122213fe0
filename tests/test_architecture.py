"""Check the shape of the package: no shadowed modules, a documented purpose for every package."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import symrazor as sr

PACKAGES = [
    "symrazor",
    *(m.name for m in pkgutil.walk_packages(sr.__path__, "symrazor.") if m.ispkg),
]


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_name_shadows_a_module(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name == "__main__":
            continue
        importlib.import_module(f"{name}.{module.name}")
        attribute = getattr(package, module.name)
        assert isinstance(attribute, ModuleType), f"{name}.{module.name} is {attribute!r}"


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "symrazor"])
def test_every_package_says_what_it_is_for_and_what_it_may_import(name: str) -> None:
    text = importlib.import_module(name).__doc__ or ""
    assert len(text.splitlines()[0]) > 20
    assert "May import" in text or name.count(".") > 1


def test_the_public_names_exist_and_are_few() -> None:
    missing = [name for name in sr.__all__ if not hasattr(sr, name)]
    assert not missing
    assert len(sr.__all__) <= 52
    internals = {"accelerate", "core", "linalg", "report", "files"} & set(sr.__all__)
    assert not internals
