"""Test the check of wheels; `release.yml` runs it on the built one."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "tools" / "check_wheel.py"


def test_files_that_are_not_of_the_package_are_named() -> None:
    spec = importlib.util.spec_from_file_location("check_wheel", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fine = ["symrazor/__init__.py", "symrazor/report/page.js", "symrazor-1.0.dist-info/RECORD"]
    wrong = ["tests/test_a.py", "symrazor/run/network.pt2", "pyproject.toml"]
    assert module.unexpected([*fine, *wrong]) == wrong


@pytest.mark.slow
def test_the_built_wheel_has_the_package_alone(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.build")
    import os

    folder = os.getcwd()
    os.chdir(FILE.parents[1])
    try:
        wheel = tmp_path / builder.build_wheel(str(tmp_path))
    finally:
        os.chdir(folder)
    with zipfile.ZipFile(wheel) as content:
        assert "symrazor/report/play.js" in content.namelist()
    subprocess.run([sys.executable, FILE, wheel], check=True)
