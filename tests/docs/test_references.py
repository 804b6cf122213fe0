"""Names and files that docstrings and pages cite exist.

A reference is a dotted name that begins with `symrazor.` or `sr.`, in the docstrings of the source
and in the prose and code of the pages, or the path of a Python file in a page. The architecture
page cites files relative to `src/symrazor/`, and each of its paragraphs and list items cites the
files in which the names that it mentions are defined.
"""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch

import symrazor as sr

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "symrazor"
SOURCES = sorted(SOURCE.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = re.compile(r"(?<![\w./@-])(?:symrazor|sr)((?:\.[A-Za-z_]\w*)+)(?![\w/]|-\w)")
FILES = {"css", "html", "js", "json", "md", "npz", "pt", "py", "safetensors", "toml"}
"""Last parts of dotted names that are names of files."""
ARCHITECTURE = ROOT / "docs" / "contributing" / "architecture.md"
CITED_FILE = re.compile(r"((?:\w+/)+\w+\.py)(?:::(\w+))?")
DEFINITION = re.compile(r"^\s*(?:(?:def|class) |(?=\w+(?::| =)))(\w+)", re.MULTILINE)
"""Name of a function, class, constant or field at the beginning of a line."""
BUILTINS = ("print",)
CODE_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`")


@cache
def resolves(name: str) -> bool:
    """Whether a name below `symrazor` is a module, or an attribute that a module leads to.

    Modules come first, because `symrazor` may have an attribute of the same name.
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


def _has(value: object, names: list[str]) -> bool:
    """Return whether attributes lead from an object along these names."""
    for name in names:
        # A field of a dataclass without a default is an annotation, not an attribute.
        if not hasattr(value, name):
            return name in getattr(value, "__annotations__", {})
        value = getattr(value, name)
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
    missing = {file: [n for text in docstrings(file) for n in unknown(text)] for file in SOURCES}
    assert {str(f.relative_to(ROOT)): names for f, names in missing.items() if names} == {}


def test_the_api_page_lists_all_public_names() -> None:
    """Names are grouped on the index; the public packages have pages of their own."""
    text = (ROOT / "docs" / "api" / "index.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: symrazor\.(\w+)$", text, re.MULTILINE)
    packages = [name for name in sr.__all__ if isinstance(getattr(sr, name), ModuleType)]
    pages = text.partition("```{toctree}")[2].partition("```")[0].split()
    assert sorted([*listed, *packages, "__version__"]) == sorted(sr.__all__)
    assert set(packages) <= set(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_in_pages_exist(page: Path) -> None:
    assert unknown(page.read_text()) == []


def missing_files(text: str) -> list[str]:
    """Return the cited Python files that do not exist, and the cited tests that a file lacks."""
    missing = []
    for path, test in CITED_FILE.findall(text):
        file = next((f for f in (ROOT / path, SOURCE / path) if f.exists()), None)
        if file is None or (test and f"def {test}(" not in file.read_text()):
            missing.append(f"{path}::{test}" if test else path)
    return missing


def test_missing_files_are_recognised() -> None:
    assert (
        missing_files("`curvature/weight_sharing.py`, `src/symrazor/curvature/weight_sharing.py`")
        == []
    )
    assert missing_files("tests/docs/test_references.py::test_missing_files_are_recognised") == []
    assert missing_files("curvature/no_such.py") == ["curvature/no_such.py"]
    cited = "tests/docs/test_docs.py::test_no_such"
    assert missing_files(f"(`{cited}`)") == [cited]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_pages_cite_exist(page: Path) -> None:
    assert missing_files(page.read_text()) == []


def names_elsewhere(text: str) -> list[str]:
    """Return the names in code style that no file cited in the same text defines."""
    files = [SOURCE / path for path, _ in CITED_FILE.findall(text) if (SOURCE / path).exists()]
    defined = {name for file in files for name in DEFINITION.findall(file.read_text())}
    names = [name for name in CODE_NAME.findall(text) if name not in BUILTINS]
    return [name for name in names if not set(name.removeprefix("sr.").split(".")) <= defined]


def walk() -> list[str]:
    """Return the numbered steps of the architecture page."""
    page = ARCHITECTURE.read_text()
    fit = page.partition("## From `sr.fit`")[2].partition("\n## ")[0].partition("\n```\n")[2]
    discover = page.partition("## From `sr.discover`")[2].partition("\n## ")[0].partition("\n")[2]
    return re.split(r"\n(?=\d+\. )|\n\n(?=\S)", f"{fit}\n\n{discover.strip()}")


def test_names_in_other_files_are_recognised() -> None:
    assert names_elsewhere("`Tape.cotangents` in `curvature/weight_sharing.py`") == []
    assert names_elsewhere("`no_such_name` in `curvature/weight_sharing.py`") == ["no_such_name"]
    assert names_elsewhere("`Tape` in `curvature/estimate.py`") == ["Tape"]  # imported, not defined


@pytest.mark.parametrize("step", walk(), ids=lambda step: step.strip()[:20])
def test_the_architecture_page_names_the_right_files(step: str) -> None:
    assert names_elsewhere(step) == []


def undefined(text: str) -> list[str]:
    """Return the names in code style that no file of the package defines."""
    defined = {name for file in SOURCES for name in DEFINITION.findall(file.read_text())}
    defined |= {part for file in SOURCES for part in file.relative_to(SOURCE).with_suffix("").parts}
    names = [name.removeprefix("sr.").split(".") for name in CODE_NAME.findall(text)]
    known = (*BUILTINS, *FILES)
    return [".".join(name) for name in names if name[-1] not in known and not set(name) <= defined]


def test_every_name_on_the_architecture_page_exists() -> None:
    assert undefined("`Tape.cotangents`, `sr.fit`, `curvature.sharing`") == []
    assert undefined("`Tape.no_such_name`") == ["Tape.no_such_name"]
    prose = re.sub(r"^```.*?^```", "", ARCHITECTURE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert undefined(prose) == []


def test_the_diagram_has_the_layers_that_are_checked() -> None:
    diagram = ARCHITECTURE.read_text().partition("```text\n")[2].partition("```")[0].splitlines()
    drawn = [line[:40].split() for line in diagram]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = [
        layer.split(" | ") for layer in project["tool"]["importlinter"]["contracts"][0]["layers"]
    ]
    level = {name: number for number, layer in enumerate(layers) for name in layer}
    assert {name for names in drawn for name in names} == set(level) - {"public"}
    heights = [level[name] for names in drawn for name in names]
    assert heights == sorted(heights)


NOT_IN_THE_EXAMPLE = {
    *("EkfacStructure", "GraphReplayScheduler", "PixelBias", "ProcessScheduler", "Sharing"),
    *("Structure.build", "Structure.collect"),  # those of its subclasses are called
    *("Razor.restore_best", "hyper_gradient", "plain_execution", "sr.reading"),
    *("every", "refine"),  # options
    *BUILTINS,
}
"""Names in the steps from `fit` to the verdict that the example does not call."""


def test_the_example_calls_what_the_steps_name() -> None:
    assert sr.fit and sr.relax  # imports the package: only calls are recorded below
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(SOURCE):
            called.update((name := frame.f_code.co_qualname, *name.split(".")))

    text = ARCHITECTURE.read_text().partition("## From `sr.fit`")[2].partition("\n## ")[0]
    example, steps = text.partition("```python\n")[2].split("\n```\n")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other threads have no profile function
    sys.setprofile(note)
    try:
        exec(f"{example}\nfit.collapse()", {})
    finally:
        sys.setprofile(None)
        torch.set_num_threads(threads)
    named = {name.removeprefix("sr.") for name in CODE_NAME.findall(steps)}
    assert named - called == {name.removeprefix("sr.") for name in NOT_IN_THE_EXAMPLE}
