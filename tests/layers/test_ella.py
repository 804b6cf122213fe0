"""Test the networks of the ELLA paper."""

import pytest
import torch

import symrazor as sr
from symrazor.layers.ella import PATHS, ella_network

PLAIN_BIASES = 450  # of the reference's F-FC and S-FC inside their product: ours have none


PIXEL_BIASES = 1685  # of the reference's F-FC, one per output pixel


@pytest.mark.parametrize(
    ("paths", "count"),
    [
        ("fc", 133_635_690),
        ("conv", 338_770),
        ("fc+conv", 133_635_690 + 338_770 - 109_450),
        ("f-fc", 1_542_625 - PLAIN_BIASES - PIXEL_BIASES),
        ("f-fc+conv", 1_771_945 - PLAIN_BIASES - PIXEL_BIASES),
    ],
)
def test_dense_parameter_counts_are_the_papers(paths: str, count: int) -> None:
    with torch.device("meta"):
        network = ella_network(paths, 3, 10)
    assert sum(p.numel() for p in network.parameters()) == count


@pytest.mark.parametrize(
    ("paths", "count"),
    [
        ("s-fc", 831_820 - PLAIN_BIASES),
        ("s-conv", 211_620),
        ("s-fc+s-conv", 1_010_280 - PLAIN_BIASES),
    ],
)
def test_sparse_parameter_counts_are_the_papers(paths: str, count: int) -> None:
    network = ella_network(paths, 3, 10)
    assert sum(p.numel() for p in network.parameters()) == count
    shaped = ella_network(paths, 3, 10, prior="omega")
    lengthscales = 8 * {"s-fc": 2, "s-conv": 1, "s-fc+s-conv": 3}[paths]
    assert sum(p.numel() for p in shaped.parameters()) == count + lengthscales


@pytest.mark.parametrize(("size", "blocks"), [(32, 8), (16, 5)])
@pytest.mark.parametrize("paths", PATHS)
def test_every_network_maps_images_to_classes(paths: str, size: int, blocks: int) -> None:
    torch.manual_seed(0)
    network = ella_network(paths, 2, 7, alpha=1, size=size)
    layers = [m for m in network if isinstance(m, sr.layers.Relaxed)]
    assert len(layers) == blocks
    assert all(len(layer.paths) == paths.count("+") + 1 for layer in layers)
    x = torch.randn(3, 2, size, size)
    f = network(x)
    assert f.shape == (3, 7)
    invariant = torch.allclose(network(torch.roll(x, (3, -5), (2, 3))), f, atol=1e-5)
    assert invariant == (paths in ("conv", "s-conv", "gconv"))
    turned = torch.allclose(network(torch.rot90(x, 1, (2, 3))), f, atol=1e-5)
    assert turned == (paths == "gconv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": "hconv"}, "paths must be one of .* got 'hconv'"),
        ({"size": 28}, "size must be 32 or 16, got 28"),
        ({"prior": "omega"}, "'omega' for sparse paths, got 'omega'"),
    ],
)
def test_other_networks_are_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ella_network(**{"paths": "conv", "in_channels": 1, "classes": 10, **change})  # type: ignore[arg-type]
