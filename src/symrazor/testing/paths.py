"""Provide the test suite of paths; import it from `symrazor.testing`."""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from symrazor.core.likelihood import Categorical
from symrazor.curvature.coverage import layers, verify
from symrazor.curvature.estimate import Method, estimate_curvature
from symrazor.layers.path import Path, is_symrazor_module
from symrazor.linalg.blocks import Kron
from symrazor.symmetry.equivariance import representation_actions
from symrazor.testing.oracles import (
    Head,
    NoCopies,
    assert_close,
    assert_kernel_form,
    dense_block,
    dense_ggn,
)


class PathSuite(ABC):
    """Tests that every path of a relaxed layer must pass."""

    @abstractmethod
    def make(self) -> Path:
        """Return a small path of the type under test."""

    def _case(self) -> tuple[Path, Tensor]:
        torch.manual_seed(0)
        path = self.make().double()
        with torch.no_grad():
            for parameter in path.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return path, torch.randn(3, path.in_channels, *path.in_shape, dtype=torch.float64)

    def test_shapes(self) -> None:
        """The output is [n, d, *out_shape], also for one sample and in float32."""
        path, x = self._case()
        expected = (3, path.out_channels, *path.out_shape)
        assert path(x).shape == expected
        assert path.float()(x[:1].float()).shape == (1, *expected[1:])

    def test_gradients(self) -> None:
        """Gradients in input and parameters agree with finite differences."""
        path, x = self._case()
        parameters = {name: value.detach() for name, value in path.named_parameters()}
        names = list(parameters)

        def run(x: Tensor, *values: Tensor) -> Tensor:
            y: Tensor = functional_call(path, dict(zip(names, values, strict=True)), (x,))
            return y

        inputs = [x.requires_grad_(), *(v.requires_grad_() for v in parameters.values())]
        assert torch.autograd.gradcheck(run, inputs)

    def test_a_step_copies_nothing_from_the_host(self) -> None:
        """Forward and backward run without host copies, as CUDA graphs require."""
        path, x = self._case()
        path(x)
        path = path.to("meta")
        with NoCopies():
            path(torch.empty_like(x, device="meta")).sum().backward()
        assert all(value.grad is not None for value in path.parameters())

    def test_is_its_dense_matrix(self) -> None:
        """Without adaptive subsampling, the path is an affine map."""
        path, x = self._case()
        if path.group is not None and path.stride > 1:
            return  # adaptive subsampling depends on the input
        with torch.no_grad():
            size = path.in_channels * path.pixels_in
            units = torch.eye(size, dtype=torch.float64).reshape(size, *x.shape[1:])
            offset = path(torch.zeros_like(x[:1])).flatten(1)
            matrix = path(units).flatten(1) - offset
            assert_close(x.flatten(1) @ matrix + offset, path(x).flatten(1), 1e-12)

    def test_zero_scale_leaves_nothing(self) -> None:
        """At scale 0 the output is zero, biases included, and gradients are not zero."""
        path, x = self._case()
        half = copy.deepcopy(path)
        half.scale_(0.5)
        with torch.no_grad():
            assert_close(half(x), path(x) / 2, 1e-12)
        path.scale_(0.0)
        zero = path(x)
        assert not zero.any()
        gradients = torch.autograd.grad(zero.sum(), path.output_weights)
        assert all(float(g.abs().max()) > 0 for g in gradients)

    def test_balancing_changes_nothing_but_the_prior(self) -> None:
        """Balanced factors have equal norms and the same product."""
        path, x = self._case()
        if path.factors is None:
            return
        before = path(x).detach()
        with torch.no_grad():
            path.factors[0].mul_(5.0)
            path.factors[1].div_(5.0)
        path.balance_()
        assert_close(path(x), before, 1e-12)
        a, b = (factor.detach() for factor in path.factors)
        norms = a.square().flatten(2).sum(2), b.square().flatten(1, -2).sum(1).T
        assert_close(norms[0], norms[1], 1e-12)
        path.scale_(0.0)
        path.balance_()
        assert torch.equal(path.factors[0].detach(), a)  # a zero product keeps its other factor

    def test_translations_commute_with_the_path(self) -> None:
        """A translation-equivariant path maps shifted inputs to shifted outputs."""
        path, x = self._case()
        shifts = path.group == "translation" or path.transformations()
        if not shifts or not path.strict:
            return
        dims = list(range(2, x.dim()))
        with torch.no_grad():
            y = path(x)
            for shift in itertools.product(*(range(size) for size in path.in_shape)):
                shifted = path(torch.roll(x, shift, dims))
                backs = itertools.product(*(range(size) for size in path.out_shape))
                differences = [shifted - torch.roll(y, back, dims) for back in backs]
                errors = [difference.flatten(1).abs().amax(1) for difference in differences]
                error = float(torch.stack(errors).amin(0).max())
                assert error < 1e-12, f"shift {shift} changes the output by {error:.1e}"

    def test_its_group_commutes_with_the_path(self) -> None:
        """A path with representations commutes with generators and products of generators."""
        path, x = self._case()
        if path.representations is None or not path.strict:
            return
        with torch.no_grad():
            y = path(x)
            for action in representation_actions(*path.representations, 16, 0):
                assert_close(path(action.inputs(x)), action.outputs[0](y), 1e-11)

    def test_turns_commute_with_the_path(self) -> None:
        """A path commutes with the rotations and reflections that it declares."""
        path, x = self._case()
        with torch.no_grad():
            for before, after in path.transformations() if path.strict else ():
                assert_close(path(before(x)), after(path(x)), 1e-12)

    def test_a_datum_does_not_depend_on_its_batch(self) -> None:
        """The output of a sample does not depend on the rest of its batch."""
        path, x = self._case()
        with torch.no_grad():
            assert_close(path(x[1:2]), path(x)[1:2], 1e-12)

    def test_curvature_is_the_dense_ggn(self) -> None:
        """In a small network, the block of every weight equals the dense Gauss-Newton matrix."""
        path, x = self._case()
        model = Head(path, path.out_channels * path.pixels_out)
        y = torch.arange(len(x)) % 3
        verify(model, x)
        for block in estimate_curvature(
            model, Categorical(), [(x, y)], Method(structure="block")
        ).blocks:
            expected = dense_ggn(model, Categorical(), x, y, block.names)
            assert_close(dense_block(block), expected, 1e-8)

    def test_kernel_form_is_the_dense_ggn(self) -> None:
        """In a small network, the kernel form equals the dense Gauss-Newton matrix."""
        path, x = self._case()
        model = Head(path, path.out_channels * path.pixels_out)
        assert_kernel_form(model, x, torch.arange(len(x)) % 3, 1e-8)

    def test_kronecker_factors_by_their_definition(self) -> None:
        """A and G equal their definitions in terms of recorded inputs and autograd's cotangents."""
        path, x = self._case()
        model = Head(path, path.out_channels * path.pixels_out)
        y = torch.arange(len(x)) % 3
        recorded: dict[str, tuple[Tensor, Tensor]] = {}

        def note(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
            return lambda module, args, out: recorded.update({name: (args[0], out)})

        covered = layers(model)
        handles = [layer.module.register_forward_hook(note(layer.name)) for layer in covered]
        f = model(x)
        for handle in handles:
            handle.remove()
        roots = Categorical().hessian_root(f.detach())
        blocks = {
            block.names: block
            for block in estimate_curvature(model, Categorical(), [(x, y)]).blocks
        }
        for layer in covered:
            block = blocks[(layer.weight or "",)] if layer.weight else None
            if not isinstance(block, Kron):
                continue
            inputs, output = recorded[layer.name]
            a = layer.form.inputs(inputs)
            cotangents = [
                torch.autograd.grad(f, output, root, retain_graph=True)[0] for root in roots
            ]
            gs = [layer.form.outputs(g) for g in cotangents]
            A = torch.einsum("nski,nskj->kij", a, a)
            G = sum(torch.einsum("nsko,nskp->kop", g, g) for g in gs)
            assert_close(block.A.matrix, A, 1e-10)
            assert isinstance(G, Tensor)
            assert_close(block.G.matrix, G, 1e-10)
            assert block.scale == 1 / (gs[0].shape[0] * gs[0].shape[1])

    def test_copies_and_states(self) -> None:
        """Deep copies and state dictionaries reproduce the path."""
        path, x = self._case()
        torch.manual_seed(1)
        other = self.make().double()
        other.load_state_dict(path.state_dict())
        with torch.no_grad():
            assert torch.equal(other(x), path(x))
            assert torch.equal(copy.deepcopy(path)(x), path(x))

    def test_collapse(self) -> None:
        """The plain network has the same outputs and contains no symrazor module."""
        path, x = self._case()
        plain = path.plain()
        assert not [type(m).__name__ for m in plain.modules() if is_symrazor_module(m)]
        with torch.no_grad():
            for n in (3, 1):
                assert_close(plain(x[:n]), path(x[:n]), 1e-10)

    def test_compiles_in_one_graph(self) -> None:
        """torch.compile finds no graph break."""
        path, x = self._case()
        torch.compiler.reset()  # graphs of other paths with the same forward count to a limit
        compiled = torch.compile(path, fullgraph=True, backend="eager")
        with torch.no_grad():
            assert_close(compiled(x), path(x), 1e-12)
