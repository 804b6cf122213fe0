"""Add a kind of data from outside the package."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import symrazor as sr
from symrazor.data import Dataset, dataset, shapes
from symrazor.discovery import DataKind, Family, Structure, Wording, families, register_kind
from symrazor.discovery.question import UserGroup
from symrazor.layers import FC, Circulant, Relaxed
from symrazor.runs.predictions import predict

SITES = 7
WORDING = Wording("Invariant to rotations of the ring.", "Not invariant to rotations of the ring.")


def _network(data: Dataset, free: bool) -> nn.Module:
    channels, sites = data.x.shape[1:]
    paths: list[nn.Module] = [Circulant(channels, 4, sites)]
    if free:
        paths.append(FC(channels, 4, (sites,), out_shape=(sites,)))
    pool = [nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    return nn.Sequential(Relaxed(paths), nn.ReLU(), *pool, nn.Linear(4, data.outputs))


def _candidates(data: Dataset, groups: Sequence[UserGroup] | None) -> Family:
    structures = [
        Structure("relaxed", partial(_network, data, True), "a relaxed ring network"),
        Structure("ring", partial(_network, data, False), "a ring network"),
    ]
    return Family(structures, "relaxed", "ring")


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register rings of seven sites for one test."""
    monkeypatch.setattr(families, "_KINDS", dict(families._KINDS))
    monkeypatch.setitem(shapes.SHAPES, "ring", "")  # removed after the test
    monkeypatch.setattr(shapes, "_RECOGNISERS", {})
    axes = "[n, channels, sites]"
    recognise = lambda x, y: x.ndim == 3 and x.shape[2] == SITES  # noqa: E731
    register_kind(DataKind("ring", _candidates, WORDING, axes, recognise))
    yield


@pytest.mark.usefixtures("ring")
def test_a_registered_kind_is_recognised_compared_and_saved(tmp_path: Path) -> None:
    x = torch.randn(60, 2, SITES, generator=torch.Generator().manual_seed(0))
    y = x.square().mean((1, 2))
    discovery = sr.discover(x, y, epochs=2, starts=2)
    assert discovery.to_dict()["kind"] == "ring"
    assert {c.name for c in discovery.candidates} == {"relaxed", "ring"}
    assert "ring network" in discovery.verdict
    undecided = f"Undecided: the data do not show {WORDING.undecided}."
    headlines = (WORDING.invariant, WORDING.not_invariant, undecided)
    assert any(headline in discovery.verdict for headline in headlines)
    (claim,) = discovery.results[0].answer.claims
    assert (claim.name, claim.rival, claim.starts) == ("symmetry", "relaxed", 2)
    discovery.save(tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=x[:5].numpy())
    predictions = predict(tmp_path / "run", tmp_path / "new.npz")
    torch.testing.assert_close(predictions.values, discovery.predict(x[:5]).mean)


@pytest.mark.usefixtures("ring")
def test_other_kinds_are_recognised_as_before() -> None:
    y = torch.arange(30) % 2
    assert dataset(torch.randn(30, 2, 16), y).kind == "series"
    assert dataset(torch.randn(30, 5), y).kind == "vector"
    assert dataset(torch.randn(30, 2, SITES), y, kind="series").kind == "series"


def test_the_final_network_for_vectors_may_be_wider() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    family = families.candidates_for(dataset(x, x[:, :1], kind="vector"))
    assert set(family.wider) == {"one hidden layer", "two hidden layers"}
    first, *_, last = family.wider["two hidden layers"].make().parameters()
    assert (first.shape, last.shape) == ((256, 3), (1,))
