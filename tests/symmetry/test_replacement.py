"""Test the replacement of BatchNorm by GroupNorm and its folding into the layer before it."""

from collections.abc import Callable

import pytest
import torch
from relax_networks import Looking, ResNet, same
from torch import Tensor, nn

import symrazor as sr
from symrazor.testing import assert_close


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_relax_names_the_batch_norm_layers() -> None:
    message = r"BatchNorm at \['blocks.0.norm1', .*symrazor.replace_batchnorm\(model\)"
    with pytest.raises(ValueError, match=message):
        sr.relax(ResNet(norm=nn.BatchNorm2d), torch.randn(2, 1, 8, 8))


def trained(norm: type = nn.BatchNorm2d) -> nn.Module:
    """Return a network whose BatchNorm layers have running statistics."""
    model = ResNet(norm=norm)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 2.0)
            nn.init.normal_(m.bias)
    for _ in range(5):
        model(2 + torch.randn(16, 1, 8, 8))
    return model.eval()


def test_batch_norm_becomes_group_norm() -> None:
    model, x = trained(), torch.randn(2, 1, 8, 8)
    model.blocks[0].norm1.weight.requires_grad_(False)
    new = sr.replace_batchnorm(model)
    assert isinstance(model.blocks[0].norm1, nn.BatchNorm2d)
    norm = new.blocks[0].norm1
    assert type(norm) is nn.GroupNorm and torch.equal(norm.weight, model.blocks[0].norm1.weight)
    assert not norm.weight.requires_grad and norm.bias.requires_grad and not norm.training
    same(new, x)
    assert_close(new(x)[:1], new(x[:1]), 1e-5)


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (3, 1), (4, 1), (6, 1), (7, 1), (8, 2), (20, 5), (64, 16), (96, 24), (512, 32)],
)
def test_number_of_groups(channels: int, groups: int) -> None:
    norm = sr.replace_batchnorm(nn.BatchNorm1d(channels, eps=0.1, affine=False).double())
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.eps, norm.weight) == (groups, 0.1, None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_folding_keeps_the_outputs(dtype: torch.dtype, tolerance: float) -> None:
    model, x = trained().to(dtype), torch.randn(4, 1, 8, 8, dtype=dtype)
    model.blocks[0].conv1.requires_grad_(False)
    folded = sr.replace_batchnorm(model, fold=True)
    assert isinstance(folded, ResNet) and isinstance(folded.blocks[1].norm2, nn.Identity)
    assert_close(folded(x), model(x), tolerance)
    assert not any(p.requires_grad for p in folded.blocks[0].conv1.parameters())
    assert all(p.requires_grad for p in folded.blocks[1].conv1.parameters())
    assert all(p.is_leaf and p.dtype == dtype for p in folded.parameters())
    same(folded, x, tolerance)


def test_folding_into_all_kinds_of_layers() -> None:
    torch.manual_seed(0)
    cases = [
        (nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), (4, 3)),
        (nn.Conv1d(2, 4, 3, groups=2), nn.BatchNorm1d(4, affine=False), (4, 2, 6)),
        (
            nn.Conv3d(1, 2, 3, padding=1, padding_mode="replicate"),
            nn.BatchNorm3d(2),
            (2, 1, 3, 4, 3),
        ),
    ]
    for layer, norm, shape in cases:
        model, x = nn.Sequential(layer, norm).double(), torch.randn(shape, dtype=torch.float64)
        model(3 * x + 1)
        folded = sr.replace_batchnorm(model.eval(), fold=True, example_input=x)
        assert_close(folded(x), model(x), 1e-12)
        assert all(p.requires_grad for p in folded.parameters())


def test_a_linear_layer_before_a_batch_norm_needs_an_example() -> None:
    torch.manual_seed(0)
    for length, message in ((5, "changed the outputs by"), (4, r"at \['1'\] follows")):
        x = torch.randn(6, length, 3)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(length), nn.Dropout())
        for i in range(3):
            model(x * torch.arange(1.0, 1 + length).unsqueeze(1) + i)
        model[1].eval()
        with pytest.raises(
            ValueError, match=r"at \['1'\] into a linear layer .*Pass example_input="
        ):
            sr.replace_batchnorm(model, fold=True)
        with pytest.raises(ValueError, match=message):
            sr.replace_batchnorm(model, fold=True, example_input=x)
        assert model.training and not model[1].training


class Fork(nn.Module):
    """A convolution whose output also bypasses the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Branching(Fork):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))
    model[2].weight = model[0].weight
    return model


def _twice() -> nn.Module:
    conv = nn.Conv2d(2, 2, 1)
    return nn.Sequential(conv, nn.BatchNorm2d(2), conv)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Fork().eval(),
            r"at \['norm'\] cannot be folded.*feeds nothing else. Use fold=False",
        ),
        (lambda: Branching().eval(), "torch.fx cannot trace .*TraceError: .*Use fold=False"),
        (lambda: _tied().eval(), r"at \['1'\] cannot be folded: .* shares no weights"),
        (lambda: _twice().eval(), r"at \['1'\] cannot be folded"),
        (
            lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(2)).eval(),
            r"at \['1'\] cannot be folded",
        ),
        (
            lambda: Fork().train(),
            r"at \['norm'\] uses batch statistics.*Call model.eval",
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)).eval(),
            r"at \['0'\] uses batch statistics",
        ),
        (lambda: nn.Sequential(nn.LazyBatchNorm2d()), "deepcopy cannot copy this model: .*uninit"),
    ],
)
def test_layers_that_cannot_be_folded_raise(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.replace_batchnorm(make(), fold=True)


def test_nothing_to_replace() -> None:
    model = Looking("type")
    for fold in (False, True):
        copied = sr.replace_batchnorm(model, fold=fold)
        assert copied is not model and torch.equal(copied.conv.weight, model.conv.weight)
