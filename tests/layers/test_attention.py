"""Positions in attention: the symmetries of each path, and their effective parameters."""

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers.attention import PositionAttention, position_parameters
from symrazor.testing import assert_close, dense_ggn


def _tokens(size: tuple[int, ...] = (3, 4)) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(5, size[0] * size[1], 6, dtype=torch.float64)


def test_attention_without_positions_is_permutation_equivariant() -> None:
    layer = PositionAttention(6, 2, (3, 4), relative=False, absolute=False).double()
    x, order = _tokens(), torch.randperm(12)
    assert_close(layer(x[:, order]), layer(x)[:, order], 1e-12)


def test_relative_scores_depend_on_differences() -> None:
    layer = PositionAttention(6, 2, (3, 4))
    positions = [(r, c) for r in range(3) for c in range(4)]
    numbers: dict[tuple[int, int], set[int]] = {}
    for s, p in enumerate(positions):
        for t, q in enumerate(positions):
            shift = (p[0] - q[0], p[1] - q[1])
            numbers.setdefault(shift, set()).add(int(layer.index[s, t]))
    assert len(numbers) == 5 * 7
    assert all(len(found) == 1 for found in numbers.values())
    assert {n for found in numbers.values() for n in found} == set(range(35))


def test_relative_attention_is_translation_equivariant_away_from_the_border() -> None:
    """With all other tokens masked by their values, a pattern that moves moves its outputs."""
    layer = PositionAttention(6, 2, (4, 4), absolute=False).double()
    nn.init.zeros_(layer.qkv.bias)
    pattern = torch.randn(2, 2, 6, dtype=torch.float64)

    def placed(row: int, column: int) -> Tensor:
        x = torch.zeros(4, 4, 6, dtype=torch.float64)
        x[row : row + 2, column : column + 2] = pattern
        q, k, _ = layer.qkv(x.reshape(1, 16, 6)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        mask = torch.stack([table[layer.index] for table in layer.relative])
        scores = (q @ k.mT / 3**0.5 + mask).reshape(2, 4, 4, 4, 4)
        return scores[:, row : row + 2, column : column + 2, row : row + 2, column : column + 2]

    assert_close(placed(0, 0), placed(2, 1), 1e-12)


def test_circular_attention_is_equivariant_to_all_shifts() -> None:
    layer = PositionAttention(6, 2, (3, 4), absolute=False, circular=True).double()
    assert [len(table) for table in layer.relative] == [12, 12]
    x = _tokens().unflatten(1, (3, 4))
    moved = layer(x.roll((1, 2), (1, 2)).flatten(1, 2)).unflatten(1, (3, 4))
    assert_close(moved, layer(x.flatten(1, 2)).unflatten(1, (3, 4)).roll((1, 2), (1, 2)), 1e-12)
    bordered = PositionAttention(6, 2, (3, 4), absolute=False).double()
    assert (bordered(x.roll(1, 2).flatten(1, 2)) - bordered(x.flatten(1, 2))).abs().max() > 1e-6


@pytest.mark.parametrize("options", [{}, {"absolute": False}, {"relative": False}])
def test_outputs_equal_those_of_explicit_attention(options: dict[str, bool]) -> None:
    layer, x = PositionAttention(6, 2, (3, 4), **options).double(), _tokens()
    moved = x
    if layer.absolute is not None:
        moved = x + layer.absolute - layer.absolute.mean(0)
    outputs = []
    for head in range(2):
        q, k, v = (layer.qkv(moved)[..., 6 * p + 3 * head :][..., :3] for p in range(3))
        scores = q @ k.mT / 3**0.5
        if len(layer.relative):
            scores = scores + layer.relative[head][layer.index]
        outputs.append(scores.softmax(-1) @ v)
    assert_close(layer(x), layer.out(torch.cat(outputs, -1)), 1e-12)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = PositionAttention(4, 2, (2, 3)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.attention(x)).mean(1))
        return y


def test_effective_parameters_of_positions() -> None:
    """Every path has its own prior group; the full matrix agrees with the dense one."""
    torch.manual_seed(0)
    model = Network().double()
    x, y = torch.randn(9, 6, 4, dtype=torch.float64), torch.arange(9) % 2
    razor = sr.Razor(model, "categorical", 9, structure="full", prior_precision=0.5)
    assert {f"attention.{name}" for name in ("absolute", "relative.0", "relative.1")} <= set(
        razor.prior.names
    )
    evidence = razor.evidence([(x, y)])
    order = tuple(name for layer in razor.layers for name in layer.tensors)
    H = dense_ggn(model, sr.Categorical(), x, y, order)
    shares = torch.linalg.solve(H + 0.5 * torch.eye(len(H), dtype=torch.float64), H).diagonal()
    sizes = [sr.weights(model)[name].numel() for name in order]
    expected = dict(zip(order, (float(part.sum()) for part in shares.split(sizes)), strict=True))
    found = position_parameters(model, evidence.effective_parameters)["attention"]
    for name, path in (
        ("absolute", "absolute"),
        ("head 0", "relative.0"),
        ("head 1", "relative.1"),
    ):
        assert found[name] == pytest.approx(expected[f"attention.{path}"], rel=1e-6)
        assert found[name] > 0


def test_invalid_sizes() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        PositionAttention(5, 2, (2, 2))
    with pytest.raises(ValueError, match="Expected 4 tokens"):
        PositionAttention(4, 2, (2, 2))(torch.zeros(1, 5, 4))
