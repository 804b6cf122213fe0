"""Candidates for images: invariance along both axes, along one, along none."""

from types import SimpleNamespace

import pytest
import torch
from discover_data import some_data

import symrazor as sr
from symrazor.core.likelihood import Categorical
from symrazor.discovery.budget import Plan
from symrazor.discovery.comparison import Compared
from symrazor.discovery.families import candidates_for, grid_family
from symrazor.discovery.members import Comparison
from symrazor.discovery.question import Question
from symrazor.layers.path import is_symrazor_module
from symrazor.layers.plain import Readout
from symrazor.testing.oracles import assert_close
from symrazor.training.options import FitConfig


@pytest.mark.parametrize("size", [(8, 8), (9, 14), (17, 12)])
def test_networks_are_invariant_along_their_axes_only(size: tuple[int, int]) -> None:
    family = grid_family((2, *size), 3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, *size, generator=generator)
    axes = {"convolutional": "xy", "x-invariant": "x", "y-invariant": "y", "positional": ""}
    for name, invariant in axes.items():
        torch.manual_seed(0)
        network = family.structure(name).make().requires_grad_(False)
        f = network(x)
        for axis, dim in (("x", 3), ("y", 2)):
            change = max(
                float((network(x.roll(shift, dim)) - f).abs().max() / f.std())
                for shift in (1, 3, 4)
            )
            assert (change < 1e-4) == (axis in invariant), (name, axis, change)


def test_all_of_them_start_from_the_plain_network() -> None:
    family = grid_family((1, 8, 8), 3)
    inner = {name for name, start in family.contains.items() if start == "convolutional"}
    assert inner == {"relaxed", "x-invariant", "y-invariant", "positional"}
    assert "x-invariant" not in [s.name for s in grid_family((1, 32), 3).structures]


@pytest.mark.parametrize(("group", "size"), [("p4", (8, 8)), ("pm", (9, 12)), ("p4m", (9, 9))])
def test_networks_of_a_point_group_with_and_without_positions(
    group: str, size: tuple[int, int]
) -> None:
    family = grid_family((1, *size), 3, (group,))
    x = torch.randn(6, 1, *size, generator=torch.Generator().manual_seed(0))
    turned = x.flip(3) if group == "pm" else x.rot90(1, (2, 3))
    for name in (group, f"{group}, positional", f"{group}, positional, wider"):
        torch.manual_seed(0)
        structure = next(s for s in (*family.structures, *family.wider.values()) if s.name == name)
        network = structure.make().requires_grad_(False)
        f = network(x)
        assert_close(network(turned), f, 1e-4)
        change = float((network(x.roll(2, 3)) - f).abs().max() / f.std())
        assert (change > 1e-2) == ("positional" in name)


def test_the_copies_of_an_average_are_made_on_its_device() -> None:
    """A list of positions would be copied from the host at every step on a GPU."""
    family = grid_family((1, 8, 8), 2, ["p4"])
    model = family.structure("p4, positional").make().to("meta")
    assert [value.is_meta for value in model.buffers()] == [True]


def test_the_average_of_a_positional_readout_over_all_shifts_is_a_plain_readout() -> None:
    """So networks that see positions gain nothing else by them."""
    torch.manual_seed(0)
    seeing, plain = Readout(3, 2, (4, 5), "position"), Readout(3, 2)
    seeing.requires_grad_(False)
    plain.requires_grad_(False)
    maps = torch.randn(7, 3, 4, 5)
    shifts = [maps.roll((i, j), (2, 3)) for i in range(4) for j in range(5)]
    average = torch.stack([seeing(shifted) for shifted in shifts]).mean(0)
    assert seeing.by_position is not None
    plain.linear.load_state_dict(seeing.linear.state_dict())
    plain.linear.bias += seeing.by_position.bias
    plain.mean.weight.copy_(seeing.mean.weight)
    plain.mean.weight += seeing.by_position.weight.unflatten(1, (3, -1)).sum(2)
    assert_close(plain(maps), average, 1e-5)


@pytest.mark.parametrize("group", [None, "p4"])
def test_every_network_is_exported_without_this_library(group: str | None) -> None:
    torch.manual_seed(0)
    family, x = grid_family((1, 8, 8), 3, group and (group,)), torch.randn(6, 1, 8, 8)
    for structure in (*family.structures, *family.wider.values()):
        network = structure.make().eval()
        if not any(is_symrazor_module(m) for m in network.modules()):
            continue
        plain = sr.collapse(network, x[:1])
        with torch.no_grad():
            assert_close(plain(x), network(x), 1e-4)
        assert not any(type(m).__module__.startswith("symrazor") for m in plain.modules())


@pytest.mark.parametrize(("gain", "names"), [(-1.0, 1), (0.0, 1), (3.0, 3)])
def test_single_axes_are_asked_about_only_if_position_matters(gain: float, names: int) -> None:
    data = some_data("image", n=100)
    question = Question("a", "?", candidates_for(data), data.labelled, None, Categorical)
    scores = torch.full((20,), -1.0, dtype=torch.float64)
    members = [
        SimpleNamespace(
            structure=structure.name,
            start=start,
            evidence=SimpleNamespace(n_data=80),
            log_evidence=100 * gain * (structure.name != "convolutional"),
            left_out=scores + gain * (structure.name != "convolutional"),
            guess=scores - 1,
        )
        for structure in question.family.structures
        for start in range(3)
    ]
    comparison = Comparison(question, FitConfig(), 80, 0)
    compared = Compared(comparison, Plan((1, 1), 80), members)  # type: ignore[arg-type]
    assert len(compared.claims) == names
