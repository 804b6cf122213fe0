"""Check the shape of the package: imports, no shadowed modules, docstrings, mirrored tests."""

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import symrazor as sr

PACKAGES = [
    "symrazor",
    *(m.name for m in pkgutil.walk_packages(sr.__path__, "symrazor.") if m.ispkg),
]

SOURCE, TESTS = Path(sr.__path__[0]), Path(__file__).parent
SEVERAL_MODULES = {
    "accelerate/test_cuda.py",
    "cli/test_wrong_files.py",
    "core/test_extensions.py",
    "curvature/test_factor_forms.py",
    "dynamics/test_errors.py",
    "layers/test_sparse_curvature.py",
    "runs/test_untrusted_files.py",
}
"""Tests of a behaviour that several modules of a package share."""


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
    assert len(sr.__all__) <= 40
    assert set(dir(sr)) == set(sr.__all__)
    internals = {"accelerate", "core", "linalg", "report", "files"} & set(dir(sr))
    assert not internals


def local_imports(text: str) -> list[int]:
    """Return the lines on which a function imports a module of the package."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        statement
        for function in ast.walk(ast.parse(text))
        if isinstance(function, functions)
        for statement in ast.walk(function)
    }
    lines = []
    for statement in inside:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = ["symrazor" if statement.level else statement.module or ""]
        else:
            continue
        lines += [statement.lineno for name in names if name.split(".")[0] == "symrazor"]
    return sorted(lines)


def test_functions_import_only_optional_dependencies() -> None:
    assert local_imports("import symrazor\ndef f():\n    import symrazor.core\n") == [3]
    assert local_imports("def f():\n    def g():\n        from . import core\n") == [3]
    assert not local_imports("def f():\n    import matplotlib\n")
    hidden = {file: local_imports(file.read_text()) for file in SOURCE.rglob("*.py")}
    assert {str(file): lines for file, lines in hidden.items() if lines} == {}


def is_named_after_a_module(test: str) -> bool:
    """Return whether a test is `test_<module>.py` or `test_<module>_<aspect>.py` in its package."""
    package = (SOURCE / test).parent
    words = Path(test).stem.split("_")[1:]
    names = ["_".join(words[:length]) for length in range(1, len(words) + 1)]
    return any((package / f"{name}.py").exists() or (package / name).is_dir() for name in names)


def test_tests_mirror_the_source_tree() -> None:
    assert is_named_after_a_module("curvature/test_convolution_grid.py")
    assert not is_named_after_a_module("curvature/test_nothing.py")
    files = [file.relative_to(TESTS) for file in TESTS.glob("*/**/test_*.py")]
    mirrored = [str(file) for file in files if (SOURCE / file.parts[0]).is_dir()]
    assert {file for file in mirrored if not is_named_after_a_module(file)} == SEVERAL_MODULES
    folders = {file.parts[0] for file in files} - {"docs"}
    modules = {path.stem for path in SOURCE.iterdir()}
    assert folders <= modules
