"""Where to compute."""

import torch


def device_of(name: str) -> str:
    """A device by its name; "auto" is a GPU if there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
