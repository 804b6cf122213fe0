"""Test Lie algebras and their exponentials."""

import itertools
import math

import pytest
import torch

from symrazor.groups import lie
from symrazor.testing import assert_close

ALGEBRAS = {
    "affine2": lie.affine2(),
    "translation2": lie.translation2(),
    "rotation2": lie.rotation2(),
    "scale2": lie.scale2(),
    "se2": lie.se2(),
    "so2": lie.so2(),
    "so3": lie.so3(),
    "sl2": lie.sl2(),
}


@pytest.mark.parametrize("name", ALGEBRAS)
def test_algebras_are_closed(name: str) -> None:
    algebra = ALGEBRAS[name]
    algebra.check()
    f = algebra.structure_constants()
    A = algebra.generators
    for i, j in itertools.product(range(algebra.dim), repeat=2):
        combined = torch.einsum("l,lab->ab", f[i, j], A)
        assert float((A[i] @ A[j] - A[j] @ A[i] - combined).abs().max()) < 1e-12
    jacobi = torch.einsum("ijm,mkl->ijkl", f, f)
    cyclic = jacobi + jacobi.permute(2, 0, 1, 3) + jacobi.permute(1, 2, 0, 3)
    assert float(cyclic.abs().max()) < 1e-12


def test_exponentials_have_closed_forms() -> None:
    angle = torch.tensor([0.7], dtype=torch.float64)
    c, s = math.cos(0.7), math.sin(0.7)
    assert_close(lie.so2().exp(angle), torch.tensor([[c, -s], [s, c]]).double(), 1e-7)
    moved = lie.translation2().exp(torch.tensor([0.2, -0.3], dtype=torch.float64))
    assert_close(moved[:2, 2], torch.tensor([0.2, -0.3], dtype=torch.float64), 1e-12)
    scaled = lie.scale2().exp(torch.tensor([math.log(2.0)], dtype=torch.float64))
    assert_close(scaled.diagonal(), torch.tensor([2.0, 2.0, 1.0]).double(), 1e-12)
    area = lie.sl2().exp(torch.randn(5, 3, dtype=torch.float64))
    assert_close(torch.linalg.det(area), torch.ones(5).double(), 1e-10)


def test_exponentials_are_differentiable_and_batched() -> None:
    algebra = lie.affine2()
    c = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert algebra.exp(c).shape == (2, 3, 3, 3)
    assert torch.autograd.gradcheck(algebra.exp, c[0, :1].detach().requires_grad_())
    assert algebra.exp(c.float()).dtype == torch.float32


def test_invalid_algebras_raise_and_name_the_generators() -> None:
    open_ones = lie.so3().masked(("x-rotation", "y-rotation"))
    with pytest.raises(ValueError, match=r"bracket \[x-rotation, y-rotation\] is outside"):
        open_ones.check()
    with pytest.raises(ValueError, match="Unknown generators"):
        lie.so3().masked(("w",))
    with pytest.raises(ValueError, match="linearly dependent"):
        lie.LieAlgebra.of(torch.ones(2, 2, 2)).check()
    with pytest.raises(ValueError, match=r"real matrices \[k, d, d\]"):
        lie.LieAlgebra.of(torch.ones(2, 2, 3))
    with pytest.raises(ValueError, match="needs a name and a unit"):
        lie.LieAlgebra(("a",), (), torch.ones(1, 2, 2))
