"""Where to compute."""

from functools import cache

import torch


def device_of(name: str) -> str:
    """A device by its name; "auto" is a GPU if there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside the usual one of a GPU, given with its number.

    Always the same: cuBLAS keeps a workspace (32 MB on a recent GPU) for each stream of each
    thread, for good.
    """
    return torch.cuda.Stream(device)


@cache
def third_stream(device: torch.device) -> torch.cuda.Stream:
    """One more, beside the second; always the same, too."""
    return torch.cuda.Stream(device)
