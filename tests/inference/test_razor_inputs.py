"""Reject data, weights and options that a Razor cannot use, by name."""

import copy
import math

import pytest
import torch
from razor_case import data, mlp
from torch import Tensor, nn

import symrazor as sr

X, Y = data()


def test_dictionary_and_tuple_inputs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3).double(), nn.Linear(1, 3).double()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.a(left) + self.b(right)

    torch.manual_seed(0)
    razor = sr.Razor(Pair(), "categorical", 40)
    left, right = X[:, :2], X[:, 2:]
    a = razor.evidence([((left, right), Y)])
    b = razor.evidence([({"left": left, "right": right}, Y)])
    assert float(a.log_evidence) == float(b.log_evidence)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "loader is empty"),
        ([(X[:30], Y[:30])], "The loader yielded 30 samples, but n_data or subset is 40"),
        ([(torch.full_like(X, math.nan), Y)], "NaN"),
        ([(X.index_fill(0, torch.tensor([7]), math.inf), Y)], "sample 7"),
        ([(X, Y + 1)], "not between 0 and 2"),
        ([(X, Y[:20])], "same number of samples"),
        ([(X, Y.double())], "Class labels must be integers"),
        ([X], r"must give pairs \(x, y\)"),
    ],
)
def test_bad_data_name_the_culprit_and_change_nothing(
    batches: list[tuple[Tensor, Tensor]], message: str
) -> None:
    model = mlp()
    razor = sr.Razor(model, "categorical", 40)
    before = copy.deepcopy((model.state_dict(), razor.state_dict()))
    with pytest.raises(ValueError, match=message):
        razor.step(batches)
    after = (model.state_dict(), razor.state_dict())
    assert all(torch.equal(before[0][k], v) for k, v in after[0].items())
    assert all(torch.equal(before[1]["prior"][k], v) for k, v in after[1]["prior"].items())
    assert after[1]["training_steps"] == before[1]["training_steps"]


def test_weights_that_are_not_finite() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    razor = sr.Razor(model, "categorical", 40)
    with pytest.raises(ValueError, match="model outputs .* are not finite"):
        razor.step([(X, Y)])


def test_generator_loader_is_rejected_where_two_passes_are_needed() -> None:
    model = nn.Linear(3, 1).double()
    razor = sr.Razor(model, "gaussian", 40)
    with pytest.raises(ValueError, match="can be read only once"):
        razor.step((X, Y.double()) for _ in range(1))
    sr.Razor(mlp(), "categorical", 40).step((X, Y) for _ in range(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"structure": "kronecker"},
            "structure must be",
        ),
        ({"estimator": "fisher"}, "estimator must be"),
        ({"update": "sgd"}, "update must be 'mackay' or 'adam', got 'sgd'"),
        ({"prior_precision": 0.0}, "precision of group .* must be between"),
        ({"prior_precision": -1.0}, "precision of group .* must be between"),
        (
            {"prior_groups": "tensors"},
            "prior_groups must be 'path', .* or a mapping, got",
        ),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"damping": 0.0}, "damping"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"prior_group": 1.0}, "Unknown option 'prior_group'. Did you mean 'prior_groups'"),
        ({"prior_precision": 1e20}, "between 1e-08 and 1e\\+12"),
        ({"prior_precision": {"0.weight": 1.0}}, "must name each of the groups"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.Razor(mlp(), "categorical", 40, **options)
    with pytest.raises(ValueError, match="n_data must be a positive integer, got 0"):
        sr.Razor(mlp(), "categorical", 0)


def test_a_pair_of_arrays_is_data() -> None:
    """Float64 arrays get the type of the weights; a pair is the same as a list of batches."""
    model = mlp().float()
    expected = sr.Razor(model, "categorical", 40).evidence([(X.float(), Y)])
    for pair in ((X.float(), Y), (X.numpy(), Y.numpy()), [X.numpy(), Y.numpy()]):
        found = sr.Razor(model, "categorical", 40).evidence(pair)
        assert float(found.log_evidence) == pytest.approx(float(expected.log_evidence), rel=1e-6)
    many = [part.numpy() for part in (X.repeat(20, 1), Y.repeat(20))]  # several batches
    assert sr.Razor(model, "categorical", 800).step(many).n_data == 800
