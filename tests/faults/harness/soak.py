"""Many evidence estimates in one process: memory, open files and threads must not grow."""

import os
import resource
import threading
from pathlib import Path

import torch
from torch import nn

import symrazor as sr
from harness.outcome import Outcome
from symrazor.layers import FFC, Conv, Relaxed

WARM_UP = 100
MAX_GROWTH_BYTES = 16 << 20


def state() -> tuple[int, int, int]:
    """Return resident bytes, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tasks = len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    return pages * resource.getpagesize(), files, max(tasks, threading.active_count())


def attack(count: int) -> Outcome:
    """Estimate the evidence of two networks in turn, by two structures."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 1, 6, 6), torch.arange(20) % 3
    layer = Relaxed([Conv(1, 2, (6, 6)), FFC(1, 2, (6, 6))])
    relaxed = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(72, 3))
    dense = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))
    razors = [sr.Razor(model, "categorical", len(y)) for model in (relaxed, dense)]
    outcome, start = Outcome(), (0, 0, 0)
    for number in range(count + WARM_UP):
        if number == WARM_UP:
            start = state()
        razors[number % 2].evidence([(x, y)])
        outcome.tried += number >= WARM_UP
    growth = [end - begin for end, begin in zip(state(), start, strict=True)]
    if growth[0] > MAX_GROWTH_BYTES or growth[1] > 0 or growth[2] > 0:
        outcome.fail("over budget", f"bytes, files, threads grew by {growth}")
    return outcome
