"""Names of symrazor in docstrings and pages exist.

A reference is a dotted name that begins with `symrazor.` or `sr.`, in the docstrings of the source
and in the prose and code of the pages. The names of files and commands are no references.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "symrazor").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = re.compile(r"(?<![\w./@-])(?:symrazor|sr)((?:\.[A-Za-z_]\w*)+)(?![\w/]|-\w)")
FILES = {"css", "html", "js", "json", "md", "npz", "pt", "py", "safetensors", "toml"}
"""Last parts of dotted names that are names of files."""


@cache
def resolves(name: str) -> bool:
    """Whether a name below `symrazor` is a module, or an attribute that a module leads to.

    Modules come first: `symrazor.discovery` is a function that hides the package of that name.
    """
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        try:
            module = importlib.import_module(".".join(["symrazor", *parts[:length]]))
        except ImportError as error:
            # A module that needs an extra package exists, whether that is installed or not.
            if (error.name or "symrazor").split(".")[0] != "symrazor":
                return True
            continue
        if _has(module, parts[length:]):
            return True
    return False


def _has(found: object, names: list[str]) -> bool:
    """Whether attributes lead from an object along some names."""
    for name in names:
        # A field of a dataclass without a default is an annotation, not an attribute.
        if not hasattr(found, name):
            return name in getattr(found, "__annotations__", {})
        found = getattr(found, name)
    return True


def unknown(text: str) -> list[str]:
    """Return the references of a text that lead nowhere."""
    names = [match[1].removeprefix(".") for match in REFERENCE.finditer(text)]
    names = [name for name in names if name.split(".")[-1] not in FILES]
    return [name for name in dict.fromkeys(names) if not resolves(name)]


def docstrings(file: Path) -> Iterator[str]:
    """Yield the docstrings of a file, those below constants and fields as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.value.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see `symrazor.relax` and `sr.fit(...)`.", []),
        ("`symrazor.layers.relaxed.start_near_`", []),
        ("`sr.Fit.collapse` and `sr.Fit.model`", []),
        ("symrazor.toml, https://symrazor.example, import symrazor.", []),
        ("`symrazor.relax_linear`", ["relax_linear"]),
        ("`sr.no_such_name` or `sr.Fit.no_such_method`", ["no_such_name", "Fit.no_such_method"]),
        ("`symrazor.no_such_module.name`", ["no_such_module.name"]),
    ],
)
def test_references_are_recognised(text: str, expected: list[str]) -> None:
    assert unknown(text) == expected


def test_references_in_docstrings_exist() -> None:
    found = {file: [n for text in docstrings(file) for n in unknown(text)] for file in SOURCES}
    assert {str(f.relative_to(ROOT)): names for f, names in found.items() if names} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_in_pages_exist(page: Path) -> None:
    assert unknown(page.read_text()) == []
