"""The state of a Razor: the best one, saved and loaded, copied, and shared by threads."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from razor_case import data, mlp, train
from torch import nn

import symrazor as sr


def test_best_state_is_kept_and_restored() -> None:
    x, y = data()
    model = mlp()
    razor = sr.Razor(model, "categorical", 40)
    with pytest.raises(ValueError, match="call step\\(\\) twice after the burn-in"):
        razor.restore_best()
    train(model, razor, x, y)
    razor.step([(x, y)])
    assert razor.best is None  # the evidence of initial precisions does not count
    best = razor.step([(x, y)])
    good = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert razor.step([(x, y)]).log_evidence < best.log_evidence
    razor.restore_best()
    assert all(torch.equal(good[k], v) for k, v in model.state_dict().items())
    assert float(razor.evidence([(x, y)]).log_evidence) == pytest.approx(float(best.log_evidence))


@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_state_dict_continues_bit_for_bit(estimator: str) -> None:
    x, y = data()

    def run(model: nn.Module, razor: sr.Razor, rounds: int) -> list[float]:
        values = []
        for _ in range(rounds):
            train(model, razor, x, y, 3)
            values.append(float(razor.step([(x, y)]).log_evidence))
        return values

    options = {"estimator": estimator, "update": "adam"}
    model = mlp()
    razor = sr.Razor(model, "categorical", 40, **options)
    run(model, razor, 3)
    saved = copy.deepcopy(razor.state_dict())
    twin = copy.deepcopy(model)
    expected = run(model, razor, 3)
    other = sr.Razor(twin, "categorical", 40, **options)
    other.load_state_dict(saved)
    assert run(twin, other, 3) == expected
    assert float(other.best.log_evidence) == float(razor.best.log_evidence)


def test_state_of_another_model_is_rejected() -> None:
    razor = sr.Razor(mlp(), "categorical", 40)
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    with pytest.raises(ValueError, match="a model with other weights or hyperparameters"):
        razor.load_state_dict(sr.Razor(other, "categorical", 40).state_dict())
    with pytest.raises(ValueError, match="not saved by Razor.state_dict"):
        razor.load_state_dict({})
    with pytest.raises(ValueError, match="n_data=39, but this Razor has n_data=40"):
        razor.load_state_dict(sr.Razor(mlp(), "categorical", 39).state_dict())
    with pytest.raises(ValueError, match="do not match the 4 of this Razor"):
        razor.load_state_dict(
            sr.Razor(mlp(), "categorical", 40, prior_groups="scalar").state_dict()
        )


def test_threads_do_not_disturb_each_other() -> None:
    """One model, several threads at once: each gets the evidence it would get alone."""
    x, y = data(200)
    model = mlp()
    razors = [sr.Razor(model, "categorical", 200) for _ in range(4)]
    alone = float(razors[0].evidence([(x, y)]).log_evidence)
    with ThreadPoolExecutor(4) as pool:
        evidence = list(pool.map(lambda r: float(r.evidence([(x, y)]).log_evidence), razors))
    assert evidence == pytest.approx([alone] * 4, rel=1e-12)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_one_and_two_torch_threads_agree(structure: str) -> None:
    x, y = data(200)
    batches = [(x[i : i + 40], y[i : i + 40]) for i in range(0, 200, 40)]
    razor = sr.Razor(mlp(), "categorical", 200, structure=structure)
    before = torch.get_num_threads()
    values = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            values.append(float(razor.evidence(batches).log_det))
    finally:
        torch.set_num_threads(before)
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_without_gradients_and_after_a_deep_copy() -> None:
    x, y = data()
    razor = sr.Razor(mlp(), "categorical", 40)
    expected = float(razor.evidence([(x, y)]).log_evidence)
    with torch.no_grad():
        assert float(razor.evidence([(x, y)]).log_evidence) == expected
        razor.step([(x, y)])
    twin = copy.deepcopy(razor)
    with torch.no_grad():
        twin.model[0].weight.mul_(2)
    fresh = sr.Razor(twin.model, "categorical", 40)
    assert float(twin.evidence([(x, y)]).log_likelihood) == float(
        fresh.evidence([(x, y)]).log_likelihood
    )
