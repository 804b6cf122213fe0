"""S-FC and F-FC in both orders of products and both memory layouts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, jacrev, vmap
from torch.utils.flop_counter import FlopCounterMode

from symrazor.layers import FFC, SFC
from symrazor.layers.basis import evaluate_basis
from symrazor.layers.factored import SparseBlocks, basis_first
from symrazor.testing import assert_close

ROLES: list[dict[str, Any]] = [
    {},
    {"form": "sum", "learn_omega": "weight"},
    {"learn_omega": "hyper", "learn_anchors": "weight"},
]
DATA = {"basis first": (1, 4), "written out": (200, 3)}
"""Numbers of data, and channels of (4, 6) -> (2, 3) pixels, at which both factors take an order."""


def _path(channels: int, **options: Any) -> SFC:
    torch.manual_seed(0)
    path = SFC(channels, channels + 1, (4, 6), 2, anchors=(9, 5), bias=True, **options).double()
    with torch.no_grad():
        for parameter in path.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return path


def _phi(part: SparseBlocks) -> Tensor:
    basis = part.basis
    return evaluate_basis(basis.anchors, basis.shape, basis.value("omega"), basis.form)


def _by_definition(path: SFC, x: Tensor) -> Tensor:
    theta2 = torch.einsum("cdp,ps->dcs", path.first.values, _phi(path.first))
    theta1 = torch.einsum("dpc,po->odc", path.second.values, _phi(path.second))
    h = torch.einsum("dcs,ncs->ndc", theta2, x.flatten(2))
    y = torch.einsum("odc,ndc->ndo", theta1, h) + path.offset.bias
    return y.unflatten(2, path.out_shape)


def _orders(path: SFC, data: int) -> set[bool]:
    return {
        basis_first(data, part.features, *part.basis.matrix().shape)
        for part in (path.first, path.second)
    }


@pytest.mark.parametrize("order", DATA)
@pytest.mark.parametrize("options", ROLES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_both_orders_by_definition(order: str, options: Any, channels_last: bool) -> None:
    """Outputs and all gradients agree with the definition."""
    data, channels = DATA[order]
    path = _path(channels, **options)
    assert _orders(path, data) == {order == "basis first"}
    x = torch.randn(data, channels, 4, 6, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    x.requires_grad_()
    wanted = [x, *path.parameters()]
    y, expected = path(x), _by_definition(path, x)
    tolerance = 1e-12 if options else 1e-5  # anchors that are fixed were rounded to float32
    assert y.is_contiguous()
    assert_close(y, expected, tolerance)
    g = torch.randn_like(expected)
    gradients = torch.autograd.grad(y, wanted, g)
    for gradient, reference in zip(
        gradients, torch.autograd.grad(expected, wanted, g), strict=True
    ):
        assert_close(gradient, reference, 100 * tolerance)


@pytest.mark.parametrize(("data", "channels"), [(1, 4), (8, 1)])
@pytest.mark.parametrize("options", ROLES)
def test_gradients_by_finite_differences(data: int, channels: int, options: Any) -> None:
    """First derivatives in both modes and second derivatives are correct."""
    torch.manual_seed(0)
    path = SFC(channels, channels, (4,), anchors=2, **options).double()
    assert _orders(path, data) == {channels == 4}
    x = torch.randn(data, channels, 4, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in path.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in path.parameters()]

    def output(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = functional_call(path, dict(zip(names, values, strict=True)), (x,))
        return y

    inputs = (x, *values)
    assert torch.autograd.gradcheck(output, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(output, inputs)


@pytest.mark.parametrize("data", [1, 7, 20, 128])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("channels", [3, 24])
def test_the_order_is_the_cheaper_one(data: int, size: int, channels: int) -> None:
    """The order with fewer multiply-adds, as counted by torch, is chosen."""
    first = SFC(channels, channels, (size, size)).first
    u, phi, x = first.values, first.basis.matrix(), torch.randn(data, channels, size * size)

    def work(run: Callable[[], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()
        return counter.get_total_flops()

    def written() -> Tensor:
        W = (u.flatten(0, 1) @ phi).unflatten(0, u.shape[:2])
        return torch.bmm(W, x.permute(1, 2, 0))

    def projected() -> Tensor:
        seen = (x.flatten(0, 1) @ phi.T).unflatten(0, x.shape[:2])
        return torch.bmm(u, seen.permute(1, 2, 0))

    assert work(lambda: first(x)) == min(work(written), work(projected))


@pytest.mark.parametrize(("channels", "wide"), [(2, True), (6, True), (7, False)])
def test_wide_products_by_definition(channels: int, wide: bool) -> None:
    """F-FC with few channels and many pixels copies images in contiguous rows."""
    torch.manual_seed(0)
    path = FFC(channels, 3, (4, 6), bias=True).double()
    assert (path.first.wide, path.second.wide) == (False, wide)
    nn.init.normal_(path.offset.bias)
    x = torch.randn(5, channels, 4, 6, dtype=torch.float64, requires_grad=True)
    wanted = [x, *path.parameters()]
    y, W, V = path(x), path.first.weight, path.second.weight
    expected = torch.einsum("doc,cds,ncs->ndo", V, W, x.flatten(2)) + path.offset.bias
    assert y.is_contiguous()
    assert_close(y.flatten(2), expected, 1e-12)
    g = torch.randn_like(y)
    gradients = torch.autograd.grad(y, wanted, g)
    truth = torch.autograd.grad(expected, wanted, g.flatten(2))
    for gradient, reference in zip(gradients, truth, strict=True):
        assert_close(gradient, reference, 1e-12)


@pytest.mark.parametrize("options", ROLES)
def test_transforms_of_functions(options: Any) -> None:
    """vmap over data and over weights, and Jacobians in both modes, at both orders."""
    path = _path(3, **options)
    x = torch.randn(6, 5, 3, 4, 6, dtype=torch.float64)
    whole = path(x.flatten(0, 1)).unflatten(0, (6, 5))
    assert_close(vmap(path)(x), whole, 1e-11)
    assert_close(vmap(lambda image: path(image.unsqueeze(0))[0])(x[0]), whole[0], 1e-11)
    theta = {k: torch.stack([v.detach(), 2 * v.detach()]) for k, v in path.named_parameters()}
    outputs = vmap(lambda values: functional_call(path, values, (x[0],)))(theta)
    assert_close(outputs[0], whole[0], 1e-11)
    single = {k: v[1] for k, v in theta.items()}
    assert_close(outputs[1], functional_call(path, single, (x[0],)), 1e-11)
    forward, reverse = (
        jac(lambda values: functional_call(path, values, (x[0],)))(single)
        for jac in (jacfwd, jacrev)
    )
    for name in single:
        assert_close(forward[name], reverse[name], 1e-10)


@pytest.mark.parametrize("options", ROLES)
def test_construction_reads_no_values_from_the_device(options: Any) -> None:
    """Both passes run on meta tensors, so that a CUDA graph can record them."""
    path = SFC(2, 3, (4, 6), anchors=5, **options).to("meta")
    for data in (1, 200):
        y = path(torch.empty(data, 2, 4, 6, device="meta"))
        assert y.shape == (data, 3, 4, 6)
        torch.autograd.grad(y.sum(), list(path.parameters()))


def test_an_export_takes_any_batch_size() -> None:
    path = SFC(3, 2, (4, 4), learn_omega="weight")
    example = torch.randn(5, 3, 4, 4)
    exported = torch.export.export(path, (example,), dynamic_shapes=({0: torch.export.Dim("n")},))
    for data in (2, 300):
        x = torch.randn(data, 3, 4, 4)
        assert_close(exported.module()(x), path(x), 1e-5)


def test_changed_lengthscales_take_effect() -> None:
    """Phi is recomputed after an in-place change, also without gradients."""
    path = _path(3, learn_omega="weight", learn_anchors="weight")
    x = torch.randn(4, 3, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(2):
            path.first.basis.omega.mul_(0.7)
            path.second.basis.offsets.add_(0.1)
            assert_close(path(x), _by_definition(path, x), 1e-12)
    assert_close(copy.deepcopy(path)(x), path(x), 1e-14)


def test_state_dictionaries_are_unchanged() -> None:
    path = SFC(2, 3, (4, 4), bias=True, learn_omega="weight")
    tensors = ("values", "basis.omega", "basis.start", "basis.offsets")
    names = {f"{part}.{name}" for part in ("first", "second") for name in tensors}
    assert set(path.state_dict()) == names | {"offset.bias"}
    assert set(FFC(2, 3, (4, 4)).state_dict()) == {"first.weight", "second.weight"}
