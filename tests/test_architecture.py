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
FOLDERS = ("src", "tests", "benchmarks", "tools")
SEVERAL_MODULES = {
    "accelerate/test_cuda.py",
    "cli/test_wrong_files.py",
    "core/test_extensions.py",
    "data/test_large_files.py",
    "curvature/test_factor_forms.py",
    "curvature/test_half_precision.py",
    "dynamics/test_errors.py",
    "layers/test_sparse_curvature.py",
    "runs/test_untrusted_files.py",
}
"""Tests of a behaviour that several modules of a package share."""

TESTED_BY = {
    "bench/conserved_systems.py": "bench/test_conserved.py",
    "cli/bench.py": "cli/test_app.py",
    "cli/data.py": "data/test_download.py",
    "cli/discover.py": "discovery/test_api.py",
    "cli/discover_work.py": "discovery/test_api.py",
    "cli/experiment.py": "cli/test_app.py",
    "cli/run_folder.py": "runs/test_training.py",
    "cli/run_folder_work.py": "runs/test_training.py",
    "cli/terminal.py": "cli/test_app.py",
    "core/choices.py": "cli/test_app.py",
    "core/errors.py": "curvature/test_coverage.py",
    "core/prior.py": "inference/test_razor.py",
    "core/tensor_files.py": "core/test_files.py",
    "core/text.py": "core/test_files_reading.py",
    "core/version.py": "cli/test_app.py",
    "curvature/attention.py": "curvature/test_operations.py",
    "curvature/convolution_edges.py": "curvature/test_convolution_grid.py",
    "curvature/gradient_structures.py": "curvature/test_structures.py",
    "curvature/layer_formats.py": "curvature/test_weight_sharing.py",
    "curvature/operation_rules.py": "curvature/test_operations.py",
    "curvature/operation_use.py": "curvature/test_operations.py",
    "curvature/recurrent.py": "curvature/test_operations.py",
    "serving/session.py": "serving/test_server.py",
    "data/categories.py": "data/test_csv_files.py",
    "data/parquet_pages.py": "data/test_other_files.py",
    "data/shapes.py": "data/test_datasets.py",
    "data/times.py": "discovery/test_trajectories.py",
    "curvature/subset_kernel.py": "curvature/test_kernel.py",
    "discovery/question.py": "discovery/test_api.py",
    "discovery/result.py": "discovery/test_api.py",
    "dynamics/config.py": "dynamics/test_errors.py",
    "dynamics/conserving.py": "dynamics/test_simulators.py",
    "dynamics/eigen_search.py": "dynamics/test_invariants.py",
    "dynamics/eigenproblem.py": "dynamics/test_invariants.py",
    "dynamics/field_invariants.py": "dynamics/test_simulators.py",
    "dynamics/fields.py": "dynamics/test_simulators.py",
    "dynamics/findings.py": "dynamics/test_invariants.py",
    "dynamics/hamiltonian.py": "dynamics/test_training.py",
    "dynamics/library.py": "dynamics/test_libraries.py",
    "dynamics/mechanics.py": "dynamics/test_systems.py",
    "dynamics/noether.py": "dynamics/test_discovery.py",
    "dynamics/result.py": "dynamics/test_discovery.py",
    "dynamics/rollouts.py": "dynamics/test_discovery.py",
    "dynamics/samples.py": "dynamics/test_invariants.py",
    "dynamics/shooting.py": "dynamics/test_simulators.py",
    "dynamics/trained.py": "dynamics/test_training.py",
    "experiments/figures.py": "experiments/test_liw_figures.py",
    "experiments/images.py": "experiments/test_ella_tables.py",
    "experiments/liw_table1.py": "experiments/test_liw.py",
    "experiments/liw_tables.py": "experiments/test_liw.py",
    "experiments/noether_controls.py": "experiments/test_noether.py",
    "experiments/noether_discover.py": "experiments/test_noether.py",
    "experiments/noether_systems.py": "experiments/test_noether.py",
    "experiments/options.py": "experiments/test_ella.py",
    "experiments/registry.py": "experiments/test_ella.py",
    "experiments/rotated_share.py": "experiments/test_ella_tables.py",
    "experiments/talk_figure.py": "experiments/test_talk_basis.py",
    "groups/generators.py": "groups/test_group.py",
    "groups/maps.py": "layers/test_equivariant.py",
    "inference/hyper_updates.py": "inference/test_evidence.py",
    "inference/variational/config.py": "training/test_variational.py",
    "inference/variational/gaussian.py": "inference/variational/test_posteriors.py",
    "inference/variational/local_reparameterisation.py": "inference/variational/test_network.py",
    "invariance/features.py": "invariance/test_invariant_weights.py",
    "layers/group_filter.py": "layers/test_gconv.py",
    "layers/merging.py": "symmetry/test_collapse.py",
    "layers/subsampling.py": "layers/test_path.py",
    "linalg/jacobian_rows.py": "curvature/test_kernel.py",
    "linalg/kernel_solvers.py": "curvature/test_kernel.py",
    "linalg/low_rank_solver.py": "curvature/test_kernel.py",
    "public.py": "test_architecture.py",
    "runs/folder.py": "runs/test_untrusted_files.py",
    "runs/records.py": "runs/test_training.py",
    "symmetry/vocabulary.py": "symmetry/test_architecture.py",
    "testing/groups.py": "groups/test_group.py",
    "testing/layers.py": "curvature/test_weight_sharing.py",
    "testing/likelihoods.py": "core/test_likelihood.py",
    "testing/oracles.py": "curvature/test_weight_sharing.py",
    "testing/paths.py": "layers/test_path.py",
}
"""Modules without a test file of their own name, and the test that covers most of each."""


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
    assert len(sr.__all__) <= 43
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
    folders = {file.parts[0] for file in files} - {"docs", "faults"}
    modules = {path.stem for path in SOURCE.iterdir()}
    assert folders <= modules


def has_own_test(module: str) -> bool:
    """Return whether a module, or the subpackage that it is in, has a test file of its name."""
    path = Path(module)
    folder, name = TESTS / path.parent, path.stem
    patterns = (f"test_{name}.py", f"test_{name}_*.py", f"{name}/test_*.py")
    own = any(next(folder.glob(pattern), None) for pattern in patterns)
    return own or (folder.parent / f"test_{path.parent.name}.py").exists()


def test_the_test_of_every_module_is_known() -> None:
    """Add a test file of the module's name, or name the test that covers it in `TESTED_BY`."""
    assert has_own_test("curvature/convolution.py") and has_own_test("sklearn.py")
    assert has_own_test("bench/truth/task.py")
    assert not has_own_test("core/text.py")
    modules = [str(file.relative_to(SOURCE)) for file in SOURCE.rglob("[!_]*.py")]
    assert {module for module in modules if not has_own_test(module)} == set(TESTED_BY)
    assert [test for test in TESTED_BY.values() if not (TESTS / test).exists()] == []


MAX_LINES = 400
"""Lines up to which a file needs no reason for its length."""


def lacks_reason(text: str) -> bool:
    """Return whether a file is long and its first line does not say why."""
    return len(text.splitlines()) > MAX_LINES and not text.startswith("# Over 400 lines: ")


def test_long_files_say_why() -> None:
    """Split the file by its ideas, or begin it with `# Over 400 lines: ` and the reason."""
    assert lacks_reason("x\n" * 401) and not lacks_reason("x\n" * 400)
    assert not lacks_reason("# Over 400 lines: one idea.\n" + "x\n" * 401)
    root = TESTS.parent
    files = [file for name in FOLDERS for file in (root / name).rglob("*.py")]
    assert len(files) > 500
    assert [str(f.relative_to(root)) for f in files if lacks_reason(f.read_text())] == []


def test_least_squares_name_their_driver() -> None:
    """The default driver of torch on the CPU, "gelsy", pivots by memory that nobody has written."""
    calls = [
        (file, call)
        for file in SOURCE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("linalg.lstsq")
    ]
    drivers = [{word.arg: ast.unparse(word.value) for word in call.keywords} for _, call in calls]
    assert len(calls) > 5
    assert {driver.get("driver") for driver in drivers} <= {"'gels'", "'gelsd'"}
