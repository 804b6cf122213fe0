"""Provide the test suite of layers; import it from `symrazor.testing`."""

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from symrazor.accelerate.torch_internals import has_hooks
from symrazor.core.likelihood import Categorical
from symrazor.core.parameters import weights
from symrazor.curvature.coverage import layers, verify
from symrazor.curvature.estimate import Method, estimate_curvature
from symrazor.linalg.blocks import Kron
from symrazor.testing.oracles import Head, assert_close, assert_kernel_form, dense_block, dense_ggn


class LayerSuite(ABC):
    """Tests that every registered layer type must pass."""

    tolerance = 1e-8

    @abstractmethod
    def make(self) -> nn.Module:
        """Return a small layer of the type under test."""

    @abstractmethod
    def inputs(self) -> Tensor:
        """Return a batch of inputs of the layer, samples along the first dimension."""

    def _case(self) -> tuple[Head, Tensor, Tensor]:
        torch.manual_seed(0)
        layer, x = self.make().double().eval(), self.inputs()
        x = x.double() if x.is_floating_point() else x
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            features = layer(x[:1]).numel()
        y = torch.arange(len(x)) % 3
        return Head(layer, features), x, y

    def test_format_explains_gradient(self) -> None:
        """The format's gradient of every weight equals autograd's."""
        model, x, _ = self._case()
        verify(model, x)

    def test_blocks_are_a_bijection(self) -> None:
        """from_blocks undoes to_blocks."""
        model, _, _ = self._case()
        for layer in layers(model):
            if layer.weight is not None:
                weight = weights(model)[layer.weight].detach()
                blocks = layer.form.to_blocks(weight)
                assert blocks.dim() == 3
                assert torch.equal(layer.form.from_blocks(blocks), weight)

    def test_forward_is_the_format(self) -> None:
        """The layer computes y[n, s, k, o] = sum_i W[k, o, i] a[n, s, k, i] + b[k, o]."""
        model, x, _ = self._case()
        for layer in layers(model):
            form, theta = layer.form, weights(model)
            if layer.weight is None:
                continue
            a = form.inputs(x)
            W = form.to_blocks(theta[layer.weight])
            y = torch.einsum("koi,nski->nsko", W, a)
            if form.outputs(layer.module(x)).shape[2] == 1 and y.shape[2] > 1:
                y = y.sum(2, keepdim=True)
            if layer.bias is not None:
                y = y + theta[layer.bias].reshape(1, 1, *y.shape[2:])
            assert_close(y.detach(), form.outputs(layer.module(x)).detach(), 1e-12)

    def test_block_is_dense_ggn(self) -> None:
        """Structures "block", "full" and "diag" agree with the dense Gauss-Newton matrix."""
        model, x, y = self._case()
        batches = [(x[:2], y[:2]), (x[2:], y[2:])]
        for structure in ("block", "full", "diag"):
            method = Method(structure=structure)
            curvature = estimate_curvature(model, Categorical(), batches, method)
            for block in curvature.blocks:
                expected = dense_ggn(model, Categorical(), x, y, block.names)
                if structure == "diag":
                    expected = torch.diag(expected.diagonal())
                assert_close(dense_block(block), expected, self.tolerance)

    def test_kernel_form_is_dense_ggn(self) -> None:
        """The kernel form agrees with the dense Gauss-Newton matrix for any precisions."""
        model, x, y = self._case()
        assert_kernel_form(model, x, y, self.tolerance)

    def test_kron_of_one_datum_and_one_position_is_exact(self) -> None:
        """Dense blocks are exact; Kronecker factors are exact if the sum has one term."""
        model, x, y = self._case()
        curvature = estimate_curvature(model, Categorical(), [(x[:1], y[:1])])
        for block in curvature.blocks:
            expected = dense_ggn(model, Categorical(), x[:1], y[:1], block.names)
            one_term = not isinstance(block, Kron) or round(1 / block.scale) == 1
            if one_term:
                assert_close(dense_block(block), expected, self.tolerance)

    def test_short_cut_is_the_gram_of_the_inputs(self) -> None:
        """`input_factor`, if defined, equals the sum over n and s of a a'."""
        model, x, _ = self._case()
        for layer in layers(model):
            if layer.form.input_factor is not None:
                a = layer.form.inputs(x)
                expected = torch.einsum("nski,nskj->kij", a, a)
                assert_close(layer.form.input_factor(x), expected, 1e-10)

    def test_projection_is_the_product_of_inputs_and_matrix(self) -> None:
        """`project`, if defined, equals a times the matrix."""
        model, x, _ = self._case()
        for layer in layers(model):
            if layer.form.project is not None:
                a = layer.form.inputs(x)
                basis = torch.randn(a.shape[2], a.shape[3], 2, dtype=a.dtype)
                expected = torch.einsum("nski,kir->nskr", a, basis)
                assert_close(layer.form.project(x, basis), expected, 1e-10)

    def test_a_datum_does_not_depend_on_its_batch(self) -> None:
        """Samples do not interact, which the curvature requires."""
        model, x, _ = self._case()
        with torch.no_grad():
            assert_close(model(x[:1]), model(x)[:1], 1e-12)

    def test_nothing_is_changed(self) -> None:
        """Estimating the curvature does not change weights, gradients, mode or hooks."""
        model, x, y = self._case()
        before = copy.deepcopy(model.state_dict())
        estimate_curvature(model, Categorical(), [(x, y)])
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert not has_hooks(model)
