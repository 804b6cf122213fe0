"""Check that weights without curvature are reported by name, with the next action."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr
from symrazor import curvature
from symrazor.curvature.coverage import verify
from symrazor.testing import assert_close, dense_block, dense_ggn


class Masked(nn.Linear):
    """A Linear with another forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tril(), self.bias)


class HookedConv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * 2, bias)


class Renamed(nn.Linear):
    """A subclass with the same forward pass, which is supported."""

    def extra_repr(self) -> str:
        return "renamed"


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.gain


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def _razor(model: nn.Module) -> sr.Razor:
    return sr.Razor(model, "categorical", 10)


@pytest.mark.parametrize(
    ("model", "names", "hint"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            ["1.weight", "1.bias"],
            "1.weight, 1.bias: .*symrazor.replace_batchnorm",
        ),
        (nn.Embedding(3, 2, max_norm=1.0), ["weight"], "unset max_norm"),
    ],
)
def test_unsupported_weights_are_named(model: nn.Module, names: list[str], hint: str) -> None:
    with pytest.raises(sr.UnsupportedParameterError, match=hint) as error:
        _razor(model)
    assert set(names) <= set(error.value.reasons)
    assert len(str(error.value).splitlines()) == 2  # the reason names the next action


def _replaced_forward() -> nn.Module:
    model = nn.Linear(4, 3)
    model.forward = lambda x: F.linear(x, model.weight) ** 2 + model.bias  # type: ignore[method-assign]
    return model


def test_supported_models() -> None:
    _razor(Renamed(4, 3))
    frozen = Loose()
    frozen.gain.requires_grad_(False)
    _razor(frozen)
    batch_norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    _razor(batch_norm.eval())


class Watched(nn.Module):
    """Notes whether CUDA may use TF32 while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.allowed = nn.Linear(4, 3), list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.allowed.append(torch.backends.cudnn.allow_tf32)
        return self.layer(x)  # type: ignore[no-any-return]


def test_gradients_are_checked_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding errors looked like a wrong format on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    model = Watched()
    verify(model, torch.randn(2, 4))
    assert model.allowed and not any(model.allowed)
    assert torch.backends.cudnn.allow_tf32


class Rounded(nn.Module):
    """Depends on the batch by rounding errors only, as sums of large numbers do."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.layer, self.everywhere = nn.Linear(4, 3), everywhere

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.layer(x)
        return f * (1 + 0.01 * len(x)) if self.everywhere or f.dtype == torch.float32 else f


def test_rounding_is_no_error_and_coupling_is() -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    verify(Rounded(everywhere=False), x)
    with pytest.raises(ValueError, match="couples the samples"):
        verify(Rounded(everywhere=True), x)


class Sideways(nn.Module):
    """Uses a weight a second time outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + F.linear(x, self.fc.weight)


class Bypassed(nn.Module):
    """Never calls its module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight, self.fc.bias)


class Untracked(torch.autograd.Function):
    """A function of the user, whose use of a weight no rule can see."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class Hidden(Sideways):
    """Uses a weight a second time in an unknown function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + Untracked.apply(x, self.fc.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Masked(4, 4),
        lambda: nn.Sequential(HookedConv(1, 2, 3), nn.Flatten()),
        lambda: nn.Sequential(Loose(), nn.PReLU()),
        Tied,
        _replaced_forward,
        Sideways,
        Bypassed,
    ],
)
def test_use_outside_of_the_module_is_recorded(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    is_image = any(isinstance(m, HookedConv) for m in model.modules())
    x = torch.randn(7, *([1, 3, 3] if is_image else [4])).double()
    y = torch.arange(7) % 2
    (block,) = curvature.estimate_curvature(
        model, "categorical", [(x, y)], curvature.Method(structure="full")
    ).blocks
    expected = dense_ggn(model, sr.Categorical(), x, y, block.names)
    assert_close(dense_block(block), expected, 1e-10)


def test_use_that_no_rule_sees_is_detected() -> None:
    torch.manual_seed(0)
    model, x = Hidden(), torch.randn(10, 4)
    with pytest.raises(sr.UnsupportedParameterError, match="do not explain its gradient") as error:
        _razor(model).evidence([(x, torch.arange(10) % 4)])
    assert "fc.weight" in error.value.reasons


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T * 2


@curvature.sharing.register
def _wrong(module: Wrong) -> curvature.Sharing:
    return curvature.Sharing(
        inputs=lambda x: x.reshape(len(x), 1, 1, -1),
        outputs=lambda g: g.reshape(len(g), 1, 1, -1),
        bias=None,
    )


def test_a_wrong_format_is_detected() -> None:
    torch.manual_seed(0)
    with pytest.raises(sr.UnsupportedParameterError, match="registered format wrong"):
        _razor(Wrong()).evidence([(torch.randn(10, 4), torch.arange(10) % 3)])


def test_dropout_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    data = [(torch.randn(10, 4), torch.arange(10) % 3)]
    razor = _razor(model)
    with pytest.raises(ValueError, match=r"dropout in training mode at \['1'\].*model\.eval"):
        razor.evidence(data)
    assert model.training
    model.eval()
    razor.evidence(data)


def test_batch_norm_switched_to_training_mode_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    razor = _razor(model)
    model.train()
    with pytest.raises(sr.UnsupportedParameterError, match="BatchNorm on batch statistics"):
        razor.evidence([(torch.randn(10, 4), torch.arange(10) % 3)])


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.second(h)
        h.add_(1)
        return y + h


def test_input_overwritten_in_place() -> None:
    with pytest.raises((ValueError, RuntimeError), match="in-?place"):
        _razor(Overwrites()).evidence([(torch.randn(10, 4), torch.arange(10) % 4)])


class Flattens(nn.Module):
    """Folds the samples into a longer first dimension, but not sample after sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.reshape(len(x), 2, 2).transpose(0, 1).reshape(-1, 2)
        h = torch.tanh(self.a(steps)).reshape(2, len(x), 3)
        return self.b(h.transpose(0, 1).flatten(1))


class SequenceFirst(nn.Module):
    """Transposes samples and steps, which have the same size for two samples of two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.reshape(len(x), 2, 2).transpose(0, 1)
        return self.b(torch.tanh(self.a(steps)).transpose(0, 1).flatten(1))


class ZeroHead(Hidden):
    """Has a head of zeros, below which every gradient is zero and hides errors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(super().forward(x)))


@pytest.mark.parametrize("kind", [Flattens, SequenceFirst, ZeroHead])
def test_errors_that_a_summed_gradient_would_hide(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(10, 4), torch.arange(10) % 3
    with pytest.raises(sr.UnsupportedParameterError, match=r"first dimension|explain"):
        _razor(model).evidence([(x, y)])
    with pytest.raises(sr.UnsupportedParameterError, match=r"first dimension|explain"):
        curvature.estimate_curvature(model, "categorical", [(x, y)])


def test_small_gradients_are_compared_as_strictly() -> None:
    torch.manual_seed(0)
    with pytest.raises(sr.UnsupportedParameterError, match="explain"):
        _razor(Hidden()).evidence([(1e-4 * torch.randn(10, 4), torch.arange(10) % 4)])


class Noisy(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return F.dropout(h, 0.5, True) if self.how == "random" else h - h.mean(0)


@pytest.mark.parametrize(("how", "hint"), [("random", "second call"), ("coupled", "sample alone")])
def test_random_and_coupled_outputs(how: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        _razor(Noisy(how)).evidence([(torch.randn(10, 4), torch.arange(10) % 3)])


def test_batch_norm_without_weights_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    data = [(torch.randn(10, 4), torch.arange(10) % 3)]
    for evaluate in (
        _razor(model).evidence,
        lambda d: curvature.estimate_curvature(model, "categorical", d),
    ):
        with pytest.raises(ValueError, match=r"batch statistics at \['1'\]"):
            evaluate(data)
    assert float(model[1].running_mean.abs().max()) == 0


def test_changes_to_the_model_are_detected() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    data = [(torch.randn(10, 4), torch.arange(10) % 3)]
    razor = _razor(model)
    razor.evidence(data)
    model[2] = nn.Linear(8, 3)
    assert float(razor.evidence(data).log_det) == float(_razor(model).evidence(data).log_det)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"have changed since this Razor was made: 0.weight"):
        razor.evidence(data)


def test_half_precision_and_compiled_models() -> None:
    data = [(torch.randn(10, 4).half(), torch.arange(10) % 3)]
    with pytest.raises(ValueError, match="Use bfloat16 or float32"):
        _razor(nn.Linear(4, 3).half()).evidence(data)
    with pytest.raises(ValueError, match="pass the module it was made from"):
        _razor(torch.compile(nn.Linear(4, 3), backend="eager"))


class Keeps(nn.Module):
    """Stores an activation, so that it cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        return self.last


def test_a_model_that_cannot_be_copied_is_verified_as_it_is() -> None:
    model = Keeps()
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    model(x)
    before = model.fc.weight.detach().clone()
    expected = _razor(model.fc).evidence([(x, y)])
    assert float(_razor(model).evidence([(x, y)]).log_det) == float(expected.log_det)
    assert torch.equal(model.fc.weight.detach(), before)
