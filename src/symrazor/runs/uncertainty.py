"""Write and read the posterior of a network in a run folder, `uncertainty.safetensors`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from symrazor.core.files import reader, write_atomically
from symrazor.inference.last_layer import LastLayer

UNCERTAINTY = "uncertainty.safetensors"
_TENSORS = ("features", "weights", "outputs", "scale", "noise", "factor")


def write_posterior(posterior: LastLayer, folder: Path) -> None:
    """Write a posterior beside its network."""
    about = {"head": posterior.head, "averaged": posterior.averaged}
    tensors = {name: getattr(posterior, name).contiguous() for name in _TENSORS}
    tensors["features"] = tensors["features"].float()  # the largest part; unit vectors
    write_atomically(folder / UNCERTAINTY, save(tensors, {"posterior": json.dumps(about)}))


@reader
def read_posterior(file: Path, network: nn.Module) -> LastLayer:
    """Read the posterior of a network; ValueError if the file does not fit the network."""
    with safe_open(file, "pt") as opened:
        about = json.loads((opened.metadata() or {})["posterior"])
    tensors = load_file(file)
    values: dict[str, Any] = {name: tensors[name] for name in _TENSORS}
    values["features"] = values["features"].double()
    names = tuple(map(str, about["head"]))
    posterior = LastLayer(names, **values, averaged=bool(about["averaged"]))
    modules = dict(network.named_modules())
    head = [modules.get(name) for name in posterior.head]
    layers = [layer for layer in head if isinstance(layer, nn.Linear)]
    d = sum(layer.in_features for layer in layers)
    k = layers[0].out_features if len(layers) == len(head) > 0 else 0
    shapes = {
        "features": (d + 1, d + 1),
        "weights": (d + 1, k),
        "outputs": (k, k),
        "scale": (k,),
    }
    fits = all(tensors[name].shape == shape for name, shape in shapes.items())
    fits &= posterior.noise.shape in ((0,), (k,)) and posterior.factor.shape == ()
    fits &= all(t.dtype == torch.float64 and bool(t.isfinite().all()) for t in values.values())
    if k == 0 or not fits:
        raise ValueError(f"the posterior of {', '.join(names)[:80]!r} does not fit the network")
    return posterior
