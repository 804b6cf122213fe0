"""Wrong options, data and models raise before training starts, in one line that names them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import symrazor as sr
from symrazor.core.validation import (
    check_choice,
    counted,
    describe_type,
    matches_type,
    replace_options,
)
from symrazor.discovery import Options


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _data(n: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, generator=generator), torch.arange(n) % 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": "10"}, "epochs must be an integer, got '10'"),
        ({"epochs": 2.5}, "epochs must be an integer, got 2.5"),
        ({"epochs": True}, "epochs must be an integer, got True"),
        ({"epochs": None}, "epochs must be an integer, got None"),
        ({"batch_size": 2.5}, "batch_size must be an integer"),
        ({"every": 2.5}, "every must be an integer"),
        ({"save_every": 1.5}, "save_every must be an integer"),
        ({"patience": 1.5}, "patience must be an integer or None, got 1.5"),
        ({"subset": 0}, "subset must be at least 1, got 0."),
        ({"subset": 2.5}, "subset must be an integer or None"),
        ({"burn_in": -1}, "burn_in must be at least 0, got -1."),
        ({"burn_in": "a"}, "burn_in must be an integer or None, got 'a'"),
        ({"evidence_batch": 2.5}, "evidence_batch must be an integer or None"),
        ({"lr": "x"}, "lr must be a number or None, got 'x'"),
        ({"lr": float("inf")}, "lr must be positive and finite, got inf."),
        ({"warmup": "a"}, "warmup must be a number"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"seed": 2**64}, "seed must be between -2^63 and 2^63 - 1, got 18446"),
        ({"batch_size": 10**20}, "batch_size must be between -2^63"),
        ({"save": 3}, "save must be a string, a path or None, got 3"),
        ({"switch_off": "yes"}, "switch_off must be True or False, got 'yes'"),
        ({"device": None}, "device must be a string, got None"),
        ({"device": "nonsense"}, "Unknown device 'nonsense'. Use 'auto', 'cpu' or 'cuda'."),
        ({"device": "cuda:99"}, "Device 'cuda:99' is not available: this machine has "),
        ({"razor": 3}, "razor must be a RazorConfig, got 3."),
        ({"damping": "a"}, "damping must be a number, got 'a'"),
        ({"samples": 1.5}, "samples must be an integer, got 1.5"),
        ({"inner_steps": -1}, "inner_steps must be at least 0, got -1"),
        ({"config": {"epochs": 1}}, "config must be a FitConfig, got dict."),
        ({"callbacks": print}, "callbacks must be a list of functions"),
        ({"callbacks": [3]}, "callbacks must be a list of functions"),
    ],
    ids=str,
)
def test_options_of_the_wrong_type(options: dict[str, Any], message: str) -> None:
    model, data = _model(), _data()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError) as error:
        sr.fit(model, data, **options)
    assert str(error.value).startswith(message)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_numpy_numbers_and_torch_devices_are_accepted() -> None:
    options = {"epochs": np.int64(1), "lr": np.float32(0.01), "seed": np.int32(3)}
    fitted = sr.fit(_model(), _data(), device=torch.device("cpu"), prior_precision=2, **options)
    assert len(fitted.history) == 1


X, Y = _data()
PAIR = (
    "The training data must be a pair of tensors or NumPy arrays (x, y), a DataLoader or a data "
    "set, got"
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, f"{PAIR} Tensor"),
        (None, f"{PAIR} NoneType"),
        ((X, Y, Y), f"{PAIR} tuple"),
        ((X.tolist(), Y.tolist()), f"{PAIR} (list, list). Use torch.as_tensor"),
        (DataLoader(TensorDataset(X)), "The loader must give pairs (x, y)"),
        ((X.double(), Y), "The model cannot process x of the training data, of shape [20, 3]"),
        ((X[:, :2], Y), "The model cannot process x of the training data, of shape [20, 2]"),
    ],
)
def test_invalid_training_data(data: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        sr.fit(_model(), data, epochs=1)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (X, "The test data must be a pair of tensors or NumPy arrays"),
        ((X,), "The test data must be a pair of tensors or NumPy arrays"),
        ((X[:, :2], Y), "The model cannot process x of the test data"),
        ((X, Y + 1), "Label 2 at position 1 of the batch is not between 0 and 1"),
    ],
)
def test_test_data_are_checked_before_training(test: Any, message: str) -> None:
    seen: list[Any] = []
    with pytest.raises(ValueError) as error:
        sr.fit(_model(), _data(), test=test, epochs=2, every=2, callbacks=[seen.append])
    assert str(error.value).startswith(message)
    assert not seen


def test_models_that_are_not_modules() -> None:
    with pytest.raises(ValueError, match="The model must be a torch.nn.Module, got function"):
        sr.fit(_data, _data(), epochs=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The model must be a torch.nn.Module, got str"):
        sr.Razor("model", "categorical", 20)  # type: ignore[arg-type]


OUTPUTS = "The model must return a tensor [1, k] or [1, k, *positions] for one example, got"


class LinearThen(nn.Module):
    """A linear layer followed by a function."""

    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.how = nn.Linear(3, 2), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.fc(x))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda f: (f, f), f"{OUTPUTS} tuple."),
        (
            lambda f: {"logits": f},
            f"{OUTPUTS} dict.",
        ),
        (lambda f: f[:, 0], f"{OUTPUTS} [1]."),
        (
            lambda f: f[:, :, None],
            "Model outputs must have shape [n, k], got [20, 2, 1]. For one label per pixel",
        ),
        (lambda f: f.half(), "The model outputs are float16, whose range is too small"),
        (lambda f, g: f, "The model cannot process x of the training data, of shape [20, 3]"),
    ],
)
def test_outputs_are_checked_before_training(how: Any, message: str) -> None:
    model = LinearThen(how)
    before = model.fc.weight.detach().clone()
    with pytest.raises(ValueError) as error:
        sr.fit(model, _data(), epochs=2, every=2)
    assert str(error.value).startswith(message)
    assert torch.equal(model.fc.weight, before)


@pytest.mark.parametrize("estimator", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_dtype(kind: torch.dtype, estimator: str) -> None:
    def evidence(y: Tensor) -> float:
        torch.manual_seed(0)
        fit = sr.fit(_model(), (X, y), test=(X, y), epochs=1, estimator=estimator)
        return fit.reading.evidence["log_evidence"]

    assert evidence(Y.to(kind)) == evidence(Y)


def test_a_model_with_running_statistics_is_checked_in_eval_mode() -> None:
    """One datum has no statistics of its own; the model's mode stays as it was when refused."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers)
    with pytest.raises(ValueError, match="is not between 0 and 1"):
        sr.fit(model, (X, Y + 1), epochs=1)
    assert all(module.training for module in model.modules())
    assert len(sr.fit(model, (X, Y), epochs=1).history) == 1


def test_types_in_words() -> None:
    assert [counted(n, "epoch") for n in (0, 1, 1200)] == ["0 epochs", "1 epoch", "1,200 epochs"]
    assert describe_type(int | None) == "an integer or None"
    assert describe_type(dict[str, float]) == "a mapping"
    assert describe_type(Literal["a", "b"] | None) == "'a', 'b' or None"
    assert all(matches_type(value, float) for value in (np.float64(1), 1, torch.tensor(1.0)))
    assert not any(matches_type(value, float) for value in (True, torch.ones(2), "1"))
    assert not matches_type(1.0, int)


def test_choices_come_from_the_annotation() -> None:
    """A `Literal` is the only list of choices; an unknown option names the closest one."""
    with pytest.raises(ValueError, match="update must be 'mackay' or 'adam', got 'newton'"):
        sr.RazorConfig(update="newton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="how must be 'a' or 'b', got 'c'"):
        check_choice("how", "c", Literal["a", "b"])
    with pytest.raises(ValueError, match="Unknown option 'dampin'. Did you mean 'damping'?"):
        replace_options(sr.RazorConfig(), {"dampin": 0.1})
    assert replace_options(sr.RazorConfig(), {"damping": 0.1}).damping == 0.1


def test_fit_trains_inside_no_grad() -> None:
    with torch.no_grad():
        off = sr.fit(_model(), _data(), epochs=2)
    on = sr.fit(_model(), _data(), epochs=2)
    assert float(off.evidence.log_evidence) == float(on.evidence.log_evidence)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), r"of shape \[20, 3\] and dtype float64 \(its weights are float32"),
        (lambda x: x[:, :2], r"cannot process x, of shape \[20, 2\] and dtype float32"),
    ],
)
@pytest.mark.parametrize("how", ["map", "probit"])
def test_predictions_of_invalid_inputs(
    change: Callable[[Tensor], Any], message: str, how: Any
) -> None:
    fit = sr.fit(_model(), _data(), epochs=1)
    with pytest.raises(ValueError, match=message):
        fit.predict(change(_data()[0]), how)


def test_predictions_take_arrays() -> None:
    fit = sr.fit(_model(), _data(), epochs=1)
    x = _data()[0]
    torch.testing.assert_close(fit.predict(x.numpy()).mean, fit.predict(x).mean)


@pytest.mark.parametrize("name", ["seed", "burn_in"])
def test_razor_options_that_fit_sets_itself_raise(name: str) -> None:
    razor = replace(sr.RazorConfig(), **{name: 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"RazorConfig\({name}=3\) .* FitConfig\({name}=3\)"):
        sr.fit(_model(), _data(), razor=razor)


def test_options_show_only_what_differs_from_the_defaults() -> None:
    assert repr(sr.RazorConfig()) == "RazorConfig()"
    config = sr.FitConfig(epochs=3, razor=sr.RazorConfig(structure="diag"))
    assert repr(config) == "FitConfig(epochs=3, razor=RazorConfig(structure='diag'))"
    assert repr(Options(minutes=3)) == "Options(minutes=3)"
    assert repr((sr.positive, sr.interval(0, 1))) == (
        "(Transform(positive), Transform(between 0 and 1))"
    )
