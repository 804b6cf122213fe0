"""Vectors under groups of matrices."""

import pytest
import torch

import symrazor as sr
from symrazor.data import dataset
from symrazor.discovery.families import candidates_for
from symrazor.groups import Group, LieAlgebra, cyclic_permutations


def plane(size: int = 3) -> Group:
    generator = torch.zeros(1, size, size, dtype=torch.float64)
    generator[0, 0, 1], generator[0, 1, 0] = -1.0, 1.0
    return Group.from_matrices("turn", lie=LieAlgebra(("turn",), ("radians",), generator))


def data(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    x = 3 * torch.randn(n, 3, generator=torch.Generator().manual_seed(0)) + 1
    return x, x[:, :2].norm(dim=1)


def test_candidates_and_their_claims() -> None:
    family = candidates_for(dataset(*data()), [plane()])
    assert [s.name for s in family.structures] == ["relaxed", "turn", "fully connected"]
    assert family.contains == {"relaxed": "turn"}
    (symmetry,) = family.symmetries
    assert (symmetry.structure, list(symmetry.rivals)) == ("turn", ["relaxed", "fully connected"])
    two = candidates_for(dataset(*data()), [plane(), Group.from_matrices("flip", [-torch.eye(3)])])
    assert [s.name for s in two.structures] == ["turn", "flip", "fully connected"]


def test_discover_measures_the_invariance_about_the_origin() -> None:
    x, y = data()
    discovery = sr.discover(x, y, groups=plane(), epochs=2, starts=2)
    (result,) = discovery.results
    assert result.preparation is not None
    assert float(result.preparation.mean.abs().max()) == 0.0
    rms = result.data.x.double().square().mean().sqrt()
    torch.testing.assert_close(result.preparation.scale, rms.reshape(1))
    errors = {c.name: c.fit.reading.equivariance_error["turn"] for c in discovery.candidates}
    assert errors["turn"] < 1e-4 < errors["fully connected"]
    assert [claim.name for claim in result.answer.claims] == ["turn"]


def test_groups_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError, match="matrices of 4 rows, but vectors have 3 features"):
        candidates_for(dataset(*data()), [plane(4)])
    with pytest.raises(ValueError, match=r"must permute positions|need permutations"):
        candidates_for(dataset(*data()), [plane(), cyclic_permutations(3)])
