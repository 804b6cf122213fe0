"""Public test suites: a new layer or likelihood inherits its tests.

    class TestMyLayer(symrazor.testing.LayerSuite):
        def make(self):
            return MyLayer(3, 4)
        def inputs(self):
            return torch.randn(5, 3)

Everything is checked in float64 against an oracle that knows nothing of the weight-sharing format:
the dense Gauss-Newton matrix from per-datum Jacobians by automatic differentiation.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from symrazor.curvature import Method, curvature, layers, verify
from symrazor.equivariance import representation_actions
from symrazor.groups.suite import GroupSuite as GroupSuite  # noqa: PLC0414
from symrazor.hyper import weights
from symrazor.layers.path import Path
from symrazor.layers.trace import is_ours
from symrazor.likelihood import Categorical, Likelihood
from symrazor.linalg import Block, Dense, Diag, Kron


def output_hessian(
    likelihood: Likelihood, f: Float[Tensor, " k"], y: Tensor
) -> Float[Tensor, "k k"]:
    """Hessian of the negative log likelihood of one datum in its outputs, by autodiff."""

    def nll(outputs: Tensor) -> Tensor:
        return likelihood.nll(outputs.unsqueeze(0), y.unsqueeze(0)).sum()

    found: Tensor = hessian(nll)(f.detach())
    return found


def dense_ggn(
    model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, order: tuple[str, ...]
) -> Float[Tensor, "p p"]:
    """Sum over data of J' Lambda J, weights in the given order, by jacrev and autodiff Hessians."""
    theta = {name: value.detach() for name, value in weights(model).items()}

    def outputs(parameters: Mapping[str, Tensor], one: Tensor) -> Tensor:
        f: Tensor = functional_call(model, dict(parameters), (one.unsqueeze(0),))
        return f.squeeze(0)

    total = torch.zeros((), dtype=torch.float64)
    for one, label in zip(x, y, strict=True):
        J = jacrev(outputs)(theta, one)
        rows = torch.cat([J[name].reshape(len(J[name]), -1) for name in order], 1)
        Lambda = output_hessian(likelihood, outputs(theta, one), label)
        total = total + rows.T @ Lambda @ rows
    return total.detach()


def dense_block(block: Block) -> Float[Tensor, "p p"]:
    """Any curvature block written out as a matrix, in the layout of its parameters."""
    match block:
        case Dense():
            dense: Tensor = block.H
            return dense
        case Diag():
            return torch.diag(block.h.reshape(-1))
        case Kron():
            k = max(block.A.blocks, block.G.blocks)
            A, G = block.A.matrix.expand(k, -1, -1), block.G.matrix.expand(k, -1, -1)
            blocked = torch.block_diag(
                *(torch.kron(g, a) * block.scale for g, a in zip(G, A, strict=True))
            )
            shape = (k, G.shape[1], A.shape[1])
            place = block.from_blocks(torch.arange(blocked.shape[0]).reshape(shape)).reshape(-1)
            written: Tensor = blocked[place][:, place]
            return written
        case _:
            raise ValueError(f"expected Dense, Diag or Kron, got {type(block).__name__}")


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest difference at most `tolerance` times the largest entry expected."""
    scale = float(expected.detach().abs().max()) or 1.0
    error = float((got.detach() - expected.detach()).abs().max()) / scale
    assert error <= tolerance, f"relative error {error:.2e} exceeds {tolerance:.0e}"


class Head(nn.Module):
    """A layer under test, a smooth nonlinearity, and a fixed read-out to three logits."""

    readout: Tensor

    def __init__(self, layer: nn.Module, features: int) -> None:
        """Put `layer` below a random read-out of its flattened output."""
        super().__init__()
        self.layer = layer
        generator = torch.Generator().manual_seed(0)
        readout = torch.randn(features, 3, generator=generator, dtype=torch.float64)
        self.register_buffer("readout", readout / features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden: Tensor = torch.tanh(self.layer(x)).flatten(1)
        return hidden @ self.readout


class LayerSuite(ABC):
    """Tests that every registered layer type must pass."""

    tolerance = 1e-8

    @abstractmethod
    def make(self) -> nn.Module:
        """A small layer of the type under test."""

    @abstractmethod
    def inputs(self) -> Tensor:
        """A batch for it, data along the first dimension."""

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
        """The format's gradient of every weight is autograd's."""
        model, x, _ = self._case()
        verify(model, x)

    def test_blocks_are_a_bijection(self) -> None:
        """from_blocks undoes to_blocks."""
        model, _, _ = self._case()
        for layer in layers(model):
            if layer.weight is not None:
                weight = weights(model)[layer.weight].detach()
                there = layer.form.to_blocks(weight)
                assert there.dim() == 3
                assert torch.equal(layer.form.from_blocks(there), weight)

    def test_forward_is_the_format(self) -> None:
        """y[n, s, k, o] = sum_i W[k, o, i] a[n, s, k, i] + b[k, o] is what the layer computes."""
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
        """Structures "block", "full" and "diag" against the dense Gauss-Newton matrix."""
        model, x, y = self._case()
        batches = [(x[:2], y[:2]), (x[2:], y[2:])]
        for structure in ("block", "full", "diag"):
            found = curvature(model, Categorical(), batches, Method(structure=structure))
            for block in found.blocks:
                expected = dense_ggn(model, Categorical(), x, y, block.names)
                if structure == "diag":
                    expected = torch.diag(expected.diagonal())
                assert_close(dense_block(block), expected, self.tolerance)

    def test_kron_of_one_datum_and_one_position_is_exact(self) -> None:
        """Kronecker factors are exact where the sum has one term, and dense blocks always."""
        model, x, y = self._case()
        found = curvature(model, Categorical(), [(x[:1], y[:1])])
        for block in found.blocks:
            expected = dense_ggn(model, Categorical(), x[:1], y[:1], block.names)
            one_term = not isinstance(block, Kron) or round(1 / block.scale) == 1
            if one_term:
                assert_close(dense_block(block), expected, self.tolerance)

    def test_short_cut_is_the_gram_of_the_inputs(self) -> None:
        """`input_factor`, where given, equals the sum over n and s of a a'."""
        model, x, _ = self._case()
        for layer in layers(model):
            if layer.form.input_factor is not None:
                a = layer.form.inputs(x)
                expected = torch.einsum("nski,nskj->kij", a, a)
                assert_close(layer.form.input_factor(x), expected, 1e-10)

    def test_a_datum_does_not_depend_on_its_batch(self) -> None:
        """The layer itself treats data independently, without which no curvature exists."""
        model, x, _ = self._case()
        with torch.no_grad():
            assert_close(model(x[:1]), model(x)[:1], 1e-12)

    def test_nothing_is_changed(self) -> None:
        """Curvature leaves weights, gradients, mode and hooks as they were."""
        model, x, y = self._case()
        before = copy.deepcopy(model.state_dict())
        curvature(model, Categorical(), [(x, y)])
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert not any(m._forward_hooks for m in model.modules())


class PathSuite(ABC):
    """Tests that every path of a relaxed layer must pass."""

    @abstractmethod
    def make(self) -> Path:
        """A small path of the type under test."""

    def _case(self) -> tuple[Path, Tensor]:
        torch.manual_seed(0)
        path = self.make().double()
        with torch.no_grad():
            for parameter in path.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return path, torch.randn(3, path.in_channels, *path.in_shape, dtype=torch.float64)

    def test_shapes(self) -> None:
        """The output is [n, d, *out_shape], also for one datum and in float32."""
        path, x = self._case()
        expected = (3, path.out_channels, *path.out_shape)
        assert path(x).shape == expected
        assert path.float()(x[:1].float()).shape == (1, *expected[1:])

    def test_gradients(self) -> None:
        """Gradients in input and parameters by finite differences."""
        path, x = self._case()
        parameters = {name: value.detach() for name, value in path.named_parameters()}
        names = list(parameters)

        def run(x: Tensor, *values: Tensor) -> Tensor:
            y: Tensor = functional_call(path, dict(zip(names, values, strict=True)), (x,))
            return y

        inputs = [x.requires_grad_(), *(v.requires_grad_() for v in parameters.values())]
        assert torch.autograd.gradcheck(run, inputs)

    def test_is_its_dense_matrix(self) -> None:
        """At fixed places of subsampling the path is affine: a matrix of its own, and an offset."""
        path, x = self._case()
        if path.group is not None and path.stride > 1:
            return  # an adaptive subsampling chooses its places by the input
        with torch.no_grad():
            size = path.in_channels * path.pixels_in
            units = torch.eye(size, dtype=torch.float64).reshape(size, *x.shape[1:])
            offset = path(torch.zeros_like(x[:1])).flatten(1)
            matrix = path(units).flatten(1) - offset
            assert_close(x.flatten(1) @ matrix + offset, path(x).flatten(1), 1e-12)

    def test_zero_scale_leaves_nothing(self) -> None:
        """The limit of zero prior variance: no output, not even a bias, and no dead gradient."""
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
        """Factors of equal norm make the same map, with the smallest sum of squares."""
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
        """A path that claims the group of translations maps shifted inputs to shifted outputs."""
        path, x = self._case()
        if path.group != "translation" or not path.strict:
            return
        dims = list(range(2, x.dim()))
        with torch.no_grad():
            y = path(x)
            for shift in itertools.product(*(range(size) for size in path.in_shape)):
                moved = path(torch.roll(x, shift, dims))
                backs = itertools.product(*(range(size) for size in path.out_shape))
                errors = [(moved - torch.roll(y, b, dims)).flatten(1).abs().amax(1) for b in backs]
                error = float(torch.stack(errors).amin(0).max())
                assert error < 1e-12, f"shift {shift} changes the output by {error:.1e}"

    def test_its_group_commutes_with_the_path(self) -> None:
        """A path with representations commutes with every generator, and with words in them."""
        path, x = self._case()
        if path.representations is None or not path.strict:
            return
        with torch.no_grad():
            y = path(x)
            for action in representation_actions(*path.representations, 16, 0):
                assert_close(path(action.inputs(x)), action.outputs[0](y), 1e-11)

    def test_a_datum_does_not_depend_on_its_batch(self) -> None:
        """Alone or among others, a sample has the same output."""
        path, x = self._case()
        with torch.no_grad():
            assert_close(path(x[1:2]), path(x)[1:2], 1e-12)

    def test_curvature_is_the_dense_ggn(self) -> None:
        """All weights of the path have exact blocks, in a tiny network."""
        path, x = self._case()
        model = Head(path, path.out_channels * path.pixels_out)
        y = torch.arange(len(x)) % 3
        verify(model, x)
        for block in curvature(model, Categorical(), [(x, y)], Method(structure="block")).blocks:
            expected = dense_ggn(model, Categorical(), x, y, block.names)
            assert_close(dense_block(block), expected, 1e-8)

    def test_kronecker_factors_by_their_definition(self) -> None:
        """A and G from recorded inputs and autograd's cotangents, with no help of the engine."""
        path, x = self._case()
        model = Head(path, path.out_channels * path.pixels_out)
        y = torch.arange(len(x)) % 3
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def note(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
            return lambda module, args, out: seen.update({name: (args[0], out)})

        found = layers(model)
        handles = [layer.module.register_forward_hook(note(layer.name)) for layer in found]
        f = model(x)
        for handle in handles:
            handle.remove()
        roots = Categorical().hessian_root(f.detach())
        blocks = {block.names: block for block in curvature(model, Categorical(), [(x, y)]).blocks}
        for layer in found:
            block = blocks[(layer.weight or "",)] if layer.weight else None
            if not isinstance(block, Kron):
                continue
            inputs, output = seen[layer.name]
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
        """Deep copies and state dictionaries carry everything."""
        path, x = self._case()
        torch.manual_seed(1)
        other = self.make().double()
        other.load_state_dict(path.state_dict())
        with torch.no_grad():
            assert torch.equal(other(x), path(x))
            assert torch.equal(copy.deepcopy(path)(x), path(x))

    def test_collapse(self) -> None:
        """The plain network equals the path, at every batch size, without a class of ours."""
        path, x = self._case()
        plain = path.plain()
        assert not [type(m).__name__ for m in plain.modules() if is_ours(m)]
        with torch.no_grad():
            for n in (3, 1):
                assert_close(plain(x[:n]), path(x[:n]), 1e-10)

    def test_compiles_in_one_graph(self) -> None:
        """No host synchronisation and no control flow on data: one graph for torch.compile."""
        path, x = self._case()
        torch.compiler.reset()  # graphs of other paths with the same forward count to a limit
        compiled = torch.compile(path, fullgraph=True, backend="eager")
        with torch.no_grad():
            assert_close(compiled(x), path(x), 1e-12)


class LikelihoodSuite(ABC):
    """Tests that every likelihood must pass."""

    outputs = 4
    extreme = 30.0

    @abstractmethod
    def make(self) -> Likelihood:
        """The likelihood under test."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log probability of each datum from an independent source (torch.distributions)."""

    def _case(self, n: int = 6) -> tuple[Likelihood, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        f = torch.randn(n, self.outputs, generator=generator, dtype=torch.float64)
        likelihood = self.make()
        return likelihood, f, likelihood.sample(f, generator)

    def test_nll(self) -> None:
        """Equal to the independent log probability, constants included."""
        likelihood, f, y = self._case()
        likelihood.check(f, y)
        assert_close(likelihood.nll(f, y), -self.log_prob(f, y), 1e-12)

    def test_residual(self) -> None:
        """The gradient of nll by autograd."""
        likelihood, f, y = self._case()
        f.requires_grad_()
        expected = torch.autograd.grad(likelihood.nll(f, y).sum(), f)[0]
        assert_close(likelihood.residual(f, y).detach(), expected, 1e-12)

    def test_root(self) -> None:
        """R R' is the Hessian of nll by autodiff."""
        likelihood, f, y = self._case()
        root = likelihood.hessian_root(f).detach()
        product = torch.einsum("cnk,cnl->nkl", root, root)
        for n in range(len(f)):
            assert_close(product[n], output_hessian(likelihood, f[n], y[n]).detach(), 1e-10)

    def test_sampled_roots_are_unbiased(self) -> None:
        """The mean over many draws is the Hessian; spectral draws have its trace every time."""
        likelihood, f, y = self._case(2)
        generator = torch.Generator().manual_seed(1)
        for probe in ("spectral", "label"):
            draws = likelihood.sampled_root(f, 40_000, generator, probe).detach()
            product = torch.einsum("snk,snl->nkl", draws, draws)
            for n in range(len(f)):
                assert_close(product[n], output_hessian(likelihood, f[n], y[n]).detach(), 0.05)
        trace = likelihood.hessian_root(f).square().sum((0, 2)).detach()
        one = likelihood.sampled_root(f, 1, generator).detach()
        assert_close(one.square().sum((0, 2)), trace, 1e-10)

    def test_extremes_are_finite(self) -> None:
        """Values and gradients stay finite where probabilities reach 0 and 1."""
        likelihood = self.make()
        for dtype in (torch.float32, torch.float64):
            f = self.extreme * torch.eye(self.outputs, dtype=dtype) - self.extreme / 2
            f.requires_grad_()
            y = likelihood.sample(f, torch.Generator().manual_seed(0))
            evaluate: list[Callable[[], Tensor]] = [
                lambda: likelihood.nll(f, y),  # noqa: B023
                lambda: likelihood.hessian_root(f),  # noqa: B023
                lambda: likelihood.sampled_root(f, 3),  # noqa: B023
            ]
            for function in evaluate:
                value = function()
                gradient = torch.autograd.grad(value.sum() + 0 * f.sum(), f)[0]
                assert bool(torch.isfinite(value).all() and torch.isfinite(gradient).all())
