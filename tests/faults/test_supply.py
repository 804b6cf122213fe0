"""What is installed: lowest versions, the lock file and the bill of materials."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_has_a_lowest_version() -> None:
    lowest = _tool("lowest_versions").lowest_versions
    pins = lowest((ROOT / "pyproject.toml").read_text())
    assert len(pins) == len(PROJECT["dependencies"]) - 1  # torch is pinned elsewhere
    with pytest.raises(ValueError, match="'numpy' has no lower bound"):
        lowest('[project]\ndependencies = ["numpy"]')


def test_the_lock_file_has_hashes_of_everything_and_no_addresses() -> None:
    text = (ROOT / "requirements-dev.lock").read_text()
    assert "://" not in text and "find-links" not in text
    entries = re.split(r"\n(?=[a-z])", text.replace("\\\n", " "))
    locked = {re.split("==", entry, maxsplit=1)[0]: entry for entry in entries}
    assert all("--hash=sha256:" in entry for entry in entries)
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *extras["dev"], *extras["docs"]]
    names = {re.split("[>=<;]", name)[0].lower() for name in needed} - {"torch"}
    assert names <= set(locked), "Run: make lock"
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    for pin in pins:
        name, _, version = pin.lower().replace("_", "-").partition("==")
        if name in locked:
            assert locked[name].startswith(f"{name}=={version} "), "Run: make lock"


def test_the_bill_of_materials_lists_what_symrazor_needs() -> None:
    bill = _tool("sbom").bill()
    names = {part["name"] for part in bill["components"]}
    assert {"torch", "numpy", "safetensors", "tyro", "pillow"} <= names
    assert not {"pytest", "onnx", "symrazor"} & names
    assert bill["metadata"]["component"]["name"] == "symrazor"
    assert bill == _tool("sbom").bill()


def test_an_audit_without_advisories_says_that_nothing_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = _tool("audit")
    file = tmp_path / "answer.json"
    assert "No such file" in audit.problem(file.as_uri())
    for text, reason in (("<html>", "Expecting"), ('{"vulnerabilities": []}', "no advisories")):
        file.write_text(text)
        assert reason in audit.problem(file.as_uri())
    monkeypatch.setattr(audit.problem, "__defaults__", (file.as_uri(),))
    assert audit.main() == 2
    assert "NOT CHECKED: no package was compared" in capsys.readouterr().err
    file.write_text('{"vulnerabilities": [{"id": "CVE-2023-4863"}]}')
    assert audit.problem(file.as_uri()) == ""
