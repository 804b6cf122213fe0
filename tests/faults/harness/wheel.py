"""The package, built twice from copies of the repository: equal to the byte."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.outcome import Outcome

ROOT = Path(__file__).parents[3]
EPOCH = "1700000000"
"""Time stamp of the files in the package."""


def build(place: Path) -> str:
    """Build the wheel from a copy; return its SHA-256 sum."""
    for name in ("src", "LICENSE", "README.md", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, place / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "dist", "."]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"SOURCE_DATE_EPOCH": EPOCH}
    subprocess.run(command, cwd=place, env=environment, check=True)
    (wheel,) = (place / "dist").glob("symrazor-*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def attack() -> Outcome:
    """Build the wheel twice, in different folders."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        sums = [build(Path(first)), build(Path(second))]
    outcome.tried = 2
    if sums[0] != sums[1]:
        outcome.fail("different wheels", str(sums))
    return outcome
