"""Count the source files whose functions run in `fit` -> reading and in `discover` -> report.

    python tools/count_files.py            # both counts
    python tools/count_files.py --files    # and the names of the files

The fewer files a call passes through, the fewer a reader has to open to follow it.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import symrazor as sr

PACKAGE = Path(sr.__file__).parent
LIMITS = {"fit -> reading": 35, "discover -> report": 60}
"""Number of files that each call should stay below."""


def files_of(call: Callable[[], object]) -> list[str]:
    """Return the files of the package in which a function was called, sorted by name."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    import threading

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = [Path(name) for name in seen if Path(name).is_relative_to(PACKAGE)]
    return sorted(str(path.relative_to(PACKAGE)) for path in inside)


def fit_and_read() -> str:
    """Fit a small relaxed network and return its reading as text."""
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 3
    cnn = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same", padding_mode="circular"),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = sr.relax(cnn, x[:2], groups=["translation"])
    return str(sr.fit(model, (x, y), likelihood="categorical", epochs=3).reading)


def discover_and_report() -> None:
    """Discover the structure of small images and write the run folder with its page."""
    x, y = torch.randn(60, 1, 8, 8), torch.arange(60) % 3
    with tempfile.TemporaryDirectory() as folder:
        sr.discover(x, y, minutes=0.05).save(Path(folder) / "run")


def main() -> None:
    """Print the counts, and with --files the names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files, too")
    arguments = parser.parse_args()
    for name, call in zip(LIMITS, (fit_and_read, discover_and_report), strict=True):
        files = files_of(call)
        print(f"{name}: {len(files)} files (limit {LIMITS[name]})")
        if arguments.files:
            print("\n".join(f"  {file}" for file in files))


if __name__ == "__main__":
    main()
