"""Compare every registered layer type with the dense Gauss-Newton matrix."""

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor import curvature
from symrazor.curvature.coverage import layers
from symrazor.testing import LayerSuite, assert_close, dense_block, dense_ggn


class TestLinear(LayerSuite):
    def make(self) -> nn.Module:
        return nn.Linear(4, 3)

    def inputs(self) -> Tensor:
        return torch.randn(5, 4)


class TestLinearWithoutBiasOnSequences(LayerSuite):
    def make(self) -> nn.Module:
        return nn.Linear(4, 3, bias=False)

    def inputs(self) -> Tensor:
        return torch.randn(5, 2, 3, 4)


class TestEmbedding(LayerSuite):
    def make(self) -> nn.Module:
        return nn.Embedding(7, 3)

    def inputs(self) -> Tensor:
        return torch.randint(0, 7, (5, 4))


class TestEmbeddingWithPadding(TestEmbedding):
    def make(self) -> nn.Module:
        return nn.Embedding(7, 3, padding_idx=2)

    def test_forward_is_the_format(self) -> None:
        """The padding row is a constant of the forward pass, not a weight: it has no curvature."""
        model, x, y = self._case()
        assert bool((x == 2).any())
        (block,) = curvature.estimate_curvature(
            model, "categorical", [(x, y)], curvature.Method(structure="block")
        ).blocks
        assert float(dense_block(block)[6:9].abs().max()) == 0


class TestLayerNorm(LayerSuite):
    def make(self) -> nn.Module:
        return nn.LayerNorm([3, 4])

    def inputs(self) -> Tensor:
        return torch.randn(5, 2, 3, 4)


class TestRMSNorm(LayerSuite):
    def make(self) -> nn.Module:
        return nn.RMSNorm(4)

    def inputs(self) -> Tensor:
        return torch.randn(5, 2, 4)


class TestGroupNorm(LayerSuite):
    def make(self) -> nn.Module:
        return nn.GroupNorm(2, 4)

    def inputs(self) -> Tensor:
        return torch.randn(5, 4, 3, 2)


class TestBatchNormInEvalMode(LayerSuite):
    def make(self) -> nn.Module:
        norm = nn.BatchNorm2d(3)
        norm.running_mean = torch.randn(3)
        norm.running_var = torch.rand(3) + 0.5
        return norm

    def inputs(self) -> Tensor:
        return torch.randn(5, 3, 2, 4)


class TestConv1d(LayerSuite):
    def make(self) -> nn.Module:
        return nn.Conv1d(2, 4, 4, stride=3, padding=2, dilation=2, groups=2)

    def inputs(self) -> Tensor:
        return torch.randn(4, 2, 11)


class TestConv3d(LayerSuite):
    def make(self) -> nn.Module:
        return nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(1, 1, 0))

    def inputs(self) -> Tensor:
        return torch.randn(3, 2, 3, 5, 2)


class TestConvSame(LayerSuite):
    def make(self) -> nn.Module:
        return nn.Conv2d(2, 3, 3, padding="same", dilation=2, bias=False)

    def inputs(self) -> Tensor:
        return torch.randn(4, 2, 5, 4)


class TestConvOnePosition(LayerSuite):
    """For one sample and one position the Kronecker block is exact."""

    def make(self) -> nn.Module:
        return nn.Conv2d(2, 3, 3)

    def inputs(self) -> Tensor:
        return torch.randn(4, 2, 3, 3)


class TestConvTranspose2d(LayerSuite):
    def make(self) -> nn.Module:
        return nn.ConvTranspose2d(4, 2, (3, 2), 2, (1, 0), output_padding=(1, 0), groups=2)

    def inputs(self) -> Tensor:
        return torch.randn(4, 4, 3, 4)


class TestConvTranspose1dDilated(LayerSuite):
    def make(self) -> nn.Module:
        return nn.ConvTranspose1d(2, 3, 3, stride=3, padding=5, dilation=2)

    def inputs(self) -> Tensor:
        return torch.randn(4, 2, 6)


def _conv(mode: str, stride: int) -> type[LayerSuite]:
    class Suite(LayerSuite):
        def make(self) -> nn.Module:
            return nn.Conv2d(2, 3, 3, stride, 1, padding_mode=mode)

        def inputs(self) -> Tensor:
            return torch.randn(4, 2, 5, 4)

    return Suite


TestConvZeros = _conv("zeros", 1)
TestConvCircular = _conv("circular", 1)
TestConvReflect = _conv("reflect", 1)
TestConvReplicate = _conv("replicate", 1)
TestConvZerosStrided = _conv("zeros", 2)
TestConvCircularStrided = _conv("circular", 2)


class Twice(nn.Module):
    """One module used twice, an in-place activation, and a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.act = nn.ELU(inplace=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.shared(x))
        return self.out(x + self.act(self.shared(h)))


def test_module_used_twice_in_place_activation_residual() -> None:
    torch.manual_seed(0)
    model, x, y = Twice().double(), torch.randn(6, 4).double(), torch.arange(6) % 3
    for structure in ("block", "full"):
        estimate = curvature.estimate_curvature(
            model, "categorical", [(x, y)], curvature.Method(structure=structure)
        )
        for block in estimate.blocks:
            expected = dense_ggn(model, sr.Categorical(), x, y, block.names)
            assert_close(dense_block(block), expected, 1e-8)


class Backwards(nn.Module):
    """Layers registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_order_of_registration_does_not_matter() -> None:
    torch.manual_seed(0)
    model, x, y = Backwards().double(), torch.randn(6, 4).double(), torch.arange(6) % 3
    (block,) = curvature.estimate_curvature(
        model, "categorical", [(x, y)], curvature.Method(structure="full")
    ).blocks
    assert_close(dense_block(block), dense_ggn(model, sr.Categorical(), x, y, block.names), 1e-8)


class ResNet(nn.Module):
    """Convolutions, GroupNorm and residual adds in channels-last or not."""

    def __init__(self, flatten_by_view: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
        self.body = nn.Sequential(
            nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        )
        self.head = nn.Linear(4 * 16, 3)
        self.flatten_by_view = flatten_by_view

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = h + self.body(h)
        return self.head(h.view(len(h), -1) if self.flatten_by_view else h.flatten(1))


@pytest.mark.parametrize("flatten_by_view", [False, True])
def test_residual_network_in_every_memory_layout(flatten_by_view: bool) -> None:
    torch.manual_seed(0)
    model = ResNet(flatten_by_view).double()
    x, y = torch.randn(5, 1, 4, 4).double(), torch.arange(5) % 3
    estimate = curvature.estimate_curvature(
        model, "categorical", [(x, y)], curvature.Method(structure="full")
    )
    (block,) = estimate.blocks
    assert_close(dense_block(block), dense_ggn(model, sr.Categorical(), x, y, block.names), 1e-8)


def _small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)
    ).double()
    return model, torch.randn(8, 1, 4, 4).double(), torch.arange(8) % 4


@pytest.mark.parametrize("flavour", ["expand", "reduce"])
def test_kron_flavours_match_their_definition(flavour: str) -> None:
    """Compare the two Kronecker flavours with brute-force sums."""
    model, x, y = _small()
    estimate = curvature.estimate_curvature(
        model, "categorical", [(x, y)], curvature.Method(flavour=flavour)
    )
    kron = next(block for block in estimate.blocks if block.names == ("0.weight",))
    conv = model[0]
    patches = nn.functional.unfold(x, 3, padding=1).transpose(1, 2)
    A, G, terms = 0.0, 0.0, 0
    for n in range(len(x)):
        h = conv(x[n : n + 1]).detach().requires_grad_()
        f = model[1:](h)
        p = f.detach().softmax(-1)[0]
        values, vectors = torch.linalg.eigh(torch.diag(p) - p.outer(p))
        root = vectors * values.clamp(min=0).sqrt()
        grads = [torch.autograd.grad(f, h, r[None], retain_graph=True)[0] for r in root.T]
        rows = [g.reshape(3, 16).T for g in grads]
        if flavour == "expand":
            A = A + patches[n].T @ patches[n]
            G = G + sum(r.T @ r for r in rows)
            terms += 16
        else:
            A = A + patches[n].mean(0).outer(patches[n].mean(0))
            G = G + sum(r.sum(0).outer(r.sum(0)) for r in rows)
            terms += 1
    assert_close(dense_block(kron), torch.kron(G, A) / terms, 1e-8)


def test_kron_is_exact_on_the_last_layer_of_a_linear_gaussian_model() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3).double(), torch.randn(20, 5).double()
    estimate = curvature.estimate_curvature(
        model, sr.Gaussian(0.7), [(x, torch.zeros(20, 3).double())]
    )
    for block in estimate.blocks:
        y = torch.zeros(20, 3).double()
        expected = dense_ggn(model, sr.Gaussian(0.7), x, y, block.names)
        assert_close(dense_block(block), expected, 1e-10)


def test_empirical_fisher_is_the_gram_of_gradients() -> None:
    model, x, y = _small()
    method = curvature.Method(structure="full", estimator="empirical")
    (block,) = curvature.estimate_curvature(model, "categorical", [(x, y)], method).blocks
    rows = []
    for n in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        parameters = [dict(model.named_parameters())[name] for name in block.names]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    J = torch.stack(rows)
    assert_close(dense_block(block), J.T @ J, 1e-10)


@pytest.mark.parametrize("probe", ["spectral", "label"])
def test_monte_carlo_fisher_is_unbiased(probe: str) -> None:
    model, x, y = _small()
    exact = curvature.estimate_curvature(
        model, "categorical", [(x, y)], curvature.Method(structure="full")
    ).blocks[0]
    method = curvature.Method(structure="full", estimator="mc", samples=1500, probe=probe)
    generator = torch.Generator().manual_seed(0)
    got = curvature.estimate_curvature(
        model, "categorical", [(x, y)], method, generator=generator
    ).blocks[0]
    assert_close(dense_block(got), dense_block(exact), 0.08)


def test_batches_add_up_and_subsets_scale() -> None:
    model, x, y = _small()
    whole = curvature.estimate_curvature(model, "categorical", [(x, y)])
    parts = curvature.estimate_curvature(model, "categorical", [(x[:3], y[:3]), (x[3:], y[3:])])
    half = curvature.estimate_curvature(model, "categorical", [(x[:4], y[:4])], n_data=8)
    alone = curvature.estimate_curvature(model, "categorical", [(x[:4], y[:4])])
    for a, b in zip(whole.blocks, parts.blocks, strict=True):
        assert_close(dense_block(a), dense_block(b), 1e-12)
    for a, b in zip(half.blocks, alone.blocks, strict=True):
        assert_close(dense_block(a), 2 * dense_block(b), 1e-12)
    assert float(half.log_likelihood) == pytest.approx(2 * float(alone.log_likelihood))


def test_partly_frozen_layers() -> None:
    model, x, y = _small()
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    estimate = curvature.estimate_curvature(
        model, "categorical", [(x, y)], curvature.Method(structure="full")
    )
    (block,) = estimate.blocks
    assert set(block.names) == {"0.bias", "3.weight"}
    assert_close(dense_block(block), dense_ggn(model, sr.Categorical(), x, y, block.names), 1e-8)


class Scaled(nn.Module):
    """A user-defined layer: y = (theta * mask) x."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.randn(3, 4))
        self.mask = torch.tensor([1.0, 0.0, 2.0, 1.0]).double()

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.theta * self.mask).T


@curvature.sharing.register
def _scaled(module: Scaled) -> curvature.Sharing:
    return curvature.Sharing(
        inputs=lambda x: (x * module.mask).reshape(len(x), 1, 1, -1),
        outputs=lambda g: g.reshape(len(g), 1, 1, -1),
        weight="theta",
        bias=None,
    )


class TestUsersOwnLayer(LayerSuite):
    def make(self) -> nn.Module:
        return Scaled()

    def inputs(self) -> Tensor:
        return torch.randn(5, 4)


def test_layers_are_listed_with_their_parameters() -> None:
    model, _, _ = _small()
    results = [(layer.name, layer.weight, layer.bias) for layer in layers(model)]
    assert results == [("0", "0.weight", "0.bias"), ("3", "3.weight", "3.bias")]
