"""Count the source files whose functions run in `fit` -> reading and in `discover` -> report.

    python tools/count_files.py            # both counts
    python tools/count_files.py --files    # and the names of the files

The fewer files a call passes through, the fewer a reader has to open to follow it.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import symrazor as sr

PACKAGE = Path(sr.__file__).parent
LIMITS = {"fit -> reading": 35, "discover -> report": 60}
"""Goal for the number of files of each call."""


def files_of(call: Callable[[], object]) -> list[str]:
    """Return the files of the package in which a function was called, sorted by name."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = [Path(name) for name in seen if Path(name).is_relative_to(PACKAGE)]
    return sorted(str(path.relative_to(PACKAGE)) for path in inside)


def fit_and_read(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    """Fit a relaxed network and return its reading as text."""
    return str(sr.fit(model, (x, y), likelihood="categorical", epochs=3).reading)


def relaxed_network(x: torch.Tensor) -> nn.Module:
    """Return a small relaxed network for images with one channel."""
    cnn = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same", padding_mode="circular"),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return sr.relax(cnn, x[:2], groups=["translation"])


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
    torch.set_num_threads(1)  # with several, trainings run in processes that are not seen
    x, y = torch.randn(64, 1, 8, 8), torch.arange(64) % 3
    fit = partial(fit_and_read, relaxed_network(x), x, y)
    calls: list[Callable[[], object]] = [fit, discover_and_report]
    for name, call in zip(LIMITS, calls, strict=True):
        files = files_of(call)
        print(f"{name}: {len(files)} files (goal: at most {LIMITS[name]})")
        if arguments.files:
            print("\n".join(f"  {file}" for file in files))


if __name__ == "__main__":
    main()
