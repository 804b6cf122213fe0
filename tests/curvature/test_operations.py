# Over 400 lines: the networks that are compared stand beside their tests.
"""Compare weights outside of registered layers with dense Gauss-Newton matrices and twins."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import symrazor as sr
from symrazor.core.parameters import weights
from symrazor.curvature import Method, estimate_curvature
from symrazor.curvature.coverage import layers
from symrazor.linalg.blocks import Dense, Diag, Kron
from symrazor.testing import assert_close

T = 3
"""Steps of the sequences [n, 3, 4]."""


class Reading(nn.Module):
    """A module, a smooth nonlinearity, and a trainable read-out to three logits."""

    def __init__(self, body: nn.Module, features: int, pick: Callable[[object], Tensor]) -> None:
        super().__init__()
        self.body, self.pick = body, pick
        self.head = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.pick(self.body(x))).flatten(1)
        return self.head(hidden)


class Attends(nn.Module):
    """Multi-head attention of a sequence to itself, or to a part of it."""

    def __init__(self, cross: bool = False, need_weights: bool = False, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.cross, self.need_weights = cross, need_weights

    def forward(self, x: Tensor) -> Tensor:
        other = torch.cos(x[:, :2, : self.attention.kdim]) if self.cross else x
        mask = torch.ones(len(x), other.shape[1]).bool()
        mask[:, 0] = False
        y, _ = self.attention(
            x,
            other,
            other,
            key_padding_mask=mask & (x[:, :1, 0] > 0),
            need_weights=self.need_weights,
        )
        return y


class Tokens(nn.Module):
    """A language model with positions from a table; the head may be the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(3, 4), nn.Embedding(5, 4)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, :, 0] > 0).long() + (x[:, :, 1] > 0)
        h = self.words(index) + self.positions(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.body(h)) + h)[:, -1]


class Patches(nn.Module):
    """A class token, positions, a transformer layer and a layer scale, without a module each."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, T + 1, 4))
        self.scale = nn.Parameter(torch.rand(4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.layer(h).mul_(self.scale)[:, 0]


class Products(nn.Module):
    """Weights in matrix products, einsum, tables, and as functions of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
        self.c = nn.Parameter(torch.randn(3, 3))
        self.heads = nn.Parameter(torch.randn(3, 2, 2))
        self.batched = nn.Parameter(torch.randn(T, 3, 2))
        self.gain = nn.Parameter(torch.randn(()))
        self.table = nn.Parameter(torch.randn(4, 3))
        self.slope = nn.Parameter(torch.rand(T))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.b, x.reshape(-1, 4), self.a).view(len(x), -1, 3)
        h = torch.tanh(h @ self.c.T) * self.gain.exp() + self.table[(x[..., 0] > 0).long()]
        h = F.prelu(self.c @ h, self.slope)
        h = (
            torch.einsum("ntk,kij->ntij", h @ F.normalize(self.c, dim=0), self.heads).sum(-1)
            + h[..., :2]
        )
        return h.tanh().unsqueeze(-2).matmul(torch.tanh(self.batched).mT).flatten(1)[:, :3]


class LowRank(nn.Module):
    """A frozen layer with a low-rank adapter, beside it or merged into its weight."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(4, 4), merged
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)
        return self.base(x) + x @ self.down.T @ self.up.T


class ChannelsFirstNorm(nn.LayerNorm):
    """The LayerNorm of ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        last = x.permute(0, 2, 3, 1)
        return F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps).permute(
            0, 3, 1, 2
        )


class StandardisedConv(nn.Conv2d):
    """A convolution whose filters are standardised."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Images(nn.Module):
    """Depth-wise convolutions and norms of the kinds that subclasses change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, groups=1),
            ChannelsFirstNorm(2),
            StandardisedConv(2, 4, 3, padding="same", groups=2),
            nn.InstanceNorm2d(4, affine=True),
            nn.GroupNorm(2, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x.unsqueeze(1))
        return y


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda h: self.block(h) * self.scale, x, use_reentrant=False)
        return y


class LearnedBias(nn.Module):
    """Attention with a learned relative position in its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.relative = nn.Parameter(torch.randn(2 * T - 1, 2))
        self.register_buffer("index", torch.arange(T)[:, None] - torch.arange(T) + T - 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        bias = self.relative[self.index].permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _first(value: object) -> Tensor:
    assert isinstance(value, tuple)
    return value[0]


def _all(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _recurrent(kind: type[nn.RNNBase], **options: object) -> Reading:
    body = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True, **options)
    return Reading(body, T * 2 * (2 if "proj_size" in options else 3), _first)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Reading(Attends(), 4 * T, _all),
    "attention with weights": lambda: Reading(Attends(need_weights=True, bias=False), 4 * T, _all),
    "attention with further keys": lambda: Reading(
        Attends(add_bias_kv=True, add_zero_attn=True), 4 * T, _all
    ),
    "cross attention": lambda: Reading(Attends(cross=True), 4 * T, _all),
    "cross attention of sizes": lambda: Reading(Attends(cross=True, kdim=3, vdim=3), 4 * T, _all),
    "transformer": lambda: Reading(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True, activation="gelu"), 2
        ),
        4 * T,
        _all,
    ),
    "gru": lambda: _recurrent(nn.GRU),
    "lstm": lambda: _recurrent(nn.LSTM),
    "lstm with projections": lambda: _recurrent(nn.LSTM, proj_size=2),
    "rnn": lambda: _recurrent(nn.RNN, bias=False),
    "tokens": lambda: Tokens(tied=False),
    "tied tokens": lambda: Tokens(tied=True),
    "patches": lambda: Reading(Patches(), 4, _all),
    "products": Products,
    "adapter": lambda: Reading(LowRank(merged=False), 4 * T, _all),
    "merged adapter": lambda: Reading(LowRank(merged=True), 4 * T, _all),
    "weight norm": lambda: Reading(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), 2 * T, _all
    ),
    "images": lambda: Reading(Images(), 4 * 4 * T, _all),
    "checkpoint": lambda: Reading(Checkpointed(), 4 * T, _all),
    "relative positions": lambda: Reading(LearnedBias(), 4 * T, _all),
}


def _case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = NETWORKS[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(5, T, 4).double(), torch.arange(5) % 3


def _dense(model: nn.Module, x: Tensor, order: tuple[str, ...]) -> Tensor:
    """Return the Gauss-Newton matrix of a classifier from one gradient per sample and output."""
    theta = [weights(model)[name] for name in order]
    total = torch.zeros((), dtype=torch.float64)
    for sample in x:
        f = model(sample.unsqueeze(0))[0]
        rows = []
        for output in f:
            gradients = torch.autograd.grad(output, theta, retain_graph=True, allow_unused=True)
            parts = [
                torch.zeros_like(p) if g is None else g
                for g, p in zip(gradients, theta, strict=True)
            ]
            rows.append(torch.cat([part.flatten() for part in parts]))
        J, p = torch.stack(rows), f.detach().softmax(0)
        total = total + J.T @ (torch.diag(p) - p.outer(p)) @ J
    return total


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", NETWORKS)
def test_full_matrix_kernel_and_bounds(name: str) -> None:
    model, x, y = _case(name)
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    (block,) = estimate_curvature(model, "categorical", data, Method(structure="full")).blocks
    assert isinstance(block, Dense)
    assert set(block.names) == set(weights(model))
    expected = _dense(model, x, block.names)
    assert_close(block.H, expected, 1e-10)

    def log_det(structure: str) -> float:
        razor = sr.Razor(model, "categorical", len(x), structure=structure, prior_precision=0.3)
        return float(razor.evidence(data).log_det)

    value = float(torch.logdet(torch.eye(len(expected)).double() + expected / 0.3))
    assert log_det("full") == pytest.approx(value, rel=1e-9)
    assert log_det("kernel") == pytest.approx(value, rel=1e-7)
    assert log_det("block") >= value * (1 - 1e-9)
    assert log_det("ekfac") >= log_det("block") * (1 - 1e-7)
    assert math.isfinite(log_det("kron"))


class Twin(nn.Module):
    """Attention or a GRU written with registered layers only."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.kind = "gru" if isinstance(original, nn.GRU) else "attention"
        if isinstance(original, nn.GRU):
            pairs = [
                (original.weight_ih_l0, original.bias_ih_l0),
                (original.weight_hh_l0, original.bias_hh_l0),
            ]
        else:
            assert isinstance(original, Attends)
            inner = original.attention
            pairs = [
                (inner.in_proj_weight, inner.in_proj_bias),
                (inner.out_proj.weight, inner.out_proj.bias),
            ]
        self.first, self.second = (nn.Linear(*w.shape[::-1]) for w, _ in pairs)
        for layer, (w, b) in zip((self.first, self.second), pairs, strict=True):
            layer.load_state_dict({"weight": w.detach(), "bias": b.detach()})

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gru":
            h, outputs = torch.zeros(len(x), 3).to(x), []
            for gates in self.first(x).unbind(1):
                r, z, new = gates.chunk(3, -1)
                hr, hz, hn = self.second(h).chunk(3, -1)
                update = torch.sigmoid(z + hz)
                h = (1 - update) * torch.tanh(new + torch.sigmoid(r + hr) * hn) + update * h
                outputs.append(h)
            return torch.stack(outputs, 1)
        q, k, v = self.first(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        shares = (q @ k.mT / 2**0.5).masked_fill(self._mask(x)[:, None, None], -math.inf)
        return self.second((shares.softmax(-1) @ v).transpose(1, 2).flatten(2))

    @staticmethod
    def _mask(x: Tensor) -> Tensor:
        mask = torch.ones(len(x), x.shape[1]).bool()
        mask[:, 0] = False
        return mask & (x[:, :1, 0] > 0)


@pytest.mark.parametrize("kind", ["attention", "gru"])
@pytest.mark.parametrize("options", [{}, {"flavour": "reduce"}, {"structure": "ekfac"}])
def test_factors_equal_those_of_registered_layers(kind: str, options: dict[str, str]) -> None:
    torch.manual_seed(0)
    body = Attends() if kind == "attention" else nn.GRU(4, 3, batch_first=True)
    features, pick = (4 * T, _all) if kind == "attention" else (3 * T, _first)
    model = Reading(body, features, pick).double()
    twin = Reading(Twin(body), features, _all).double()
    twin.head.load_state_dict(model.head.state_dict())
    x, y = torch.randn(6, T, 4).double(), torch.arange(6) % 3
    assert_close(model(x), twin(x), 1e-12)
    values = [
        float(sr.Razor(m, "categorical", 6, **options).evidence([(x, y)]).log_det)
        for m in (model, twin)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


class Functional(nn.Module):
    """The layers of `reference` by functions of torch, some weights used by two of them."""

    def __init__(self, reference: nn.Sequential) -> None:
        super().__init__()
        self.inner = reference

    def forward(self, x: Tensor) -> Tensor:
        conv, norm, head = self.inner[0], self.inner[1], self.inner[4]
        h = F.conv2d(x, conv.weight, conv.bias, 2, 1)
        h = F.group_norm(h, 2, norm.weight, norm.bias)
        return F.linear(torch.tanh(h).flatten(1), head.weight, head.bias)


def test_functional_use_of_registered_layers() -> None:
    """Blocks of F.linear are those of the module; other functions have exact blocks."""
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    model = Functional(reference)
    x, y = torch.randn(5, 1, 4, 4).double(), torch.arange(5) % 3
    results = []
    for m in (reference, model):
        blocks = estimate_curvature(m, "categorical", [(x, y)]).blocks
        results.append({b.names[0].removeprefix("inner."): b for b in blocks})
    expected, got = results
    assert {name: type(b) for name, b in got.items()} == {
        "0.weight": Dense,
        "0.bias": Dense,
        "1.weight": Dense,
        "1.bias": Dense,
        "4.weight": Kron,
        "4.bias": Dense,
    }
    for name, block in expected.items():
        if name == "0.weight":
            continue
        other = got[name]
        log_precision = {block.names[0]: torch.tensor(0.1)}
        assert float(other.logdet({other.names[0]: torch.tensor(0.1)})) == pytest.approx(
            float(block.logdet(log_precision)), rel=1e-9
        )


def test_a_module_in_two_places_is_one_layer() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert [layer.registered is None for layer in layers(model)] == [False]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", ["transformer", "gru", "tied tokens", "patches", "products"])
def test_fit_reads_and_predicts(name: str) -> None:
    """The whole of `fit`: training, evidence steps, reading, posterior."""
    model, x, y = _case(name)
    fit = sr.fit(model, (x, y), epochs=2, every=1, burn_in=0, test=(x, y), progress=False)
    total = sum(path.parameters for layer in fit.reading.layers for path in layer.paths)
    assert total == sum(value.numel() for value in weights(model).values())
    assert str(fit.reading)
    for how in ("probit", "sampling"):
        mean = fit.predict(x, how=how).mean
        assert_close(mean.sum(1), torch.ones(5).double(), 1e-6)


def test_large_positions_get_a_diagonal() -> None:
    """A weight without Kronecker factors and with many entries has a diagonal block."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.randn(70, 60))
            self.head = nn.Linear(60, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x + self.positions).mean(1))

    torch.manual_seed(0)
    model, x, y = Positions(), torch.randn(4, 70, 60), torch.arange(4) % 3
    for structure in ("kron", "ekfac"):
        method = Method(structure=structure)
        blocks = estimate_curvature(model, "categorical", [(x, y)], method).blocks
        (block,) = [b for b in blocks if b.names == ("positions",)]
        assert isinstance(block, Diag)
        assert float(block.h.sum()) > 0


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(3, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x.unsqueeze(0), self.filters.squeeze(1).unsqueeze(0)).squeeze(0)


class AcrossSamples(nn.Module):
    """Adds one row of a weight to each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows[: len(x)]


@pytest.mark.parametrize(
    ("model", "x", "hint"),
    [
        (Unknown(), torch.randn(4, 2), "operation 'cdist'"),
        (AcrossSamples(), torch.randn(2, 3), "does not broadcast over samples"),
    ],
)
def test_operations_without_a_rule_are_named(model: nn.Module, x: Tensor, hint: str) -> None:
    with pytest.raises(sr.UnsupportedParameterError, match=hint) as error:
        sr.Razor(model, "categorical", len(x)).evidence([(x, torch.arange(len(x)) % 3)])
    assert set(error.value.reasons) == set(weights(model))
