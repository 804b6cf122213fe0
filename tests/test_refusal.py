"""Nothing is skipped silently: every weight without curvature is named, with what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import symrazor as sr


class Masked(nn.Linear):
    """A Linear that is not one any more."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.tril(), self.bias)


class HookedConv(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * 2, bias)


class Renamed(nn.Linear):
    """A subclass that adds nothing to the forward pass is fine."""

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
        (nn.Sequential(Masked(4, 3)), ["0.weight", "0.bias"], "Masked overrides forward of Linear"),
        (HookedConv(1, 2, 3), ["weight", "bias"], "overrides _conv_forward of Conv2d"),
        (Loose(), ["gain"], "no curvature is registered for layers of type Loose"),
        (Tied(), ["a.weight"], "shared by the modules 'a' and 'b'"),
        (nn.Sequential(nn.LSTM(4, 3)), ["0.weight_ih_l0"], "type LSTM"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            ["1.weight", "1.bias"],
            "call model.eval",
        ),
        (nn.Sequential(nn.PReLU()), ["0.weight"], "type PReLU"),
        (nn.Embedding(3, 2, max_norm=1.0), ["weight"], "unset max_norm"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
            ["parametrizations.weight.original0", "parametrizations.weight.original1"],
            "no curvature is registered",
        ),
    ],
)
def test_refused_by_name(model: nn.Module, names: list[str], hint: str) -> None:
    with pytest.raises(sr.UnsupportedParameterError, match=hint) as error:
        _razor(model)
    assert set(names) <= set(error.value.reasons)
    assert "requires_grad_(False)" in str(error.value)


def test_forward_replaced_on_the_instance_is_refused() -> None:
    model = nn.Linear(4, 3)
    model.forward = lambda x: F.linear(x, model.weight) ** 2  # type: ignore[method-assign]
    with pytest.raises(sr.UnsupportedParameterError, match="overrides forward"):
        _razor(model)


def test_what_is_accepted() -> None:
    _razor(Renamed(4, 3))
    frozen = Loose()
    frozen.gain.requires_grad_(False)
    _razor(frozen)
    batch_norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    _razor(batch_norm.eval())


class Sideways(nn.Module):
    """Uses a weight a second time behind its module's back."""

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


@pytest.mark.parametrize("kind", [Sideways, Bypassed])
def test_use_outside_of_the_module_is_found_by_the_gradient(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(10, 4)
    with pytest.raises(sr.UnsupportedParameterError, match="do not explain its gradient") as error:
        _razor(model).evidence([(x, torch.arange(10) % 4)])
    assert "fc.weight" in error.value.reasons


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T * 2


@sr.sharing.register
def _wrong(module: Wrong) -> sr.Sharing:
    return sr.Sharing(
        inputs=lambda x: x.reshape(len(x), 1, 1, -1),
        outputs=lambda g: g.reshape(len(g), 1, 1, -1),
        bias=None,
    )


def test_a_wrong_format_is_found_by_the_gradient() -> None:
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
