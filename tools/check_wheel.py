"""Check that a wheel has the package alone, and that it does the main job where it is installed.

    python tools/check_wheel.py dist/symrazor-0.1.0-py3-none-any.whl
    python tools/check_wheel.py dist/*.whl --run     # in an environment with this wheel

With `--run`, the interpreter that runs this file analyses a small table, predicts and exports, in a
folder outside of the repository. A fresh environment then shows that the runtime dependencies are
enough.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROWS = 60
SUFFIXES = {".py", ".js", ".css", ".html", ".npz", ".txt", ".typed"}


def unexpected(names: list[str]) -> list[str]:
    """Return the files of a wheel that are not of the package or its metadata."""
    wrong = []
    for name in names:
        top, _, inner = name.partition("/")
        is_metadata = top.startswith("symrazor-") and top.endswith(".dist-info")
        is_package = top == "symrazor" and Path(inner).suffix in SUFFIXES
        if not is_metadata and not is_package:
            wrong.append(name)
    return wrong


def run(folder: Path) -> None:
    """Analyse a small table, predict and export with the installed command."""
    rows = [f"{k},{(7 * k) % 11},{3 * k - (7 * k) % 11}" for k in range(ROWS)]
    (folder / "table.csv").write_text("\n".join(["a,b,y", *rows]) + "\n", encoding="utf-8")
    for command in (
        "discover table.csv --epochs 4 --quiet",
        "predict run table.csv --out predictions.csv",
        "report run --quiet",
        "export run --out network.pt2",
    ):
        subprocess.run([sys.executable, "-m", "symrazor", *command.split()], cwd=folder, check=True)
    count = len((folder / "predictions.csv").read_text(encoding="utf-8").splitlines())
    if count != ROWS + 1:
        sys.exit(f"predictions.csv has {count} lines instead of {ROWS + 1}.")


def main() -> None:
    """Check a wheel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--run", action="store_true", help="also use the installed command")
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as wheel:
        wrong = unexpected(wheel.namelist())
    if wrong:
        sys.exit(f"{arguments.wheel} has files that are not of the package: {', '.join(wrong)}")
    if arguments.run:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder))
    print(f"{arguments.wheel.name}: fine")


if __name__ == "__main__":
    main()
