"""Train one network from one start: left-out samples, calibrated scores, and nested starts."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from discover_data import some_data
from scipy import stats
from scipy.special import log_softmax
from torch import Tensor, nn

from symrazor.core.likelihood import Bernoulli, Categorical, Gaussian
from symrazor.discovery import members
from symrazor.discovery.families import candidates_for, deep_sets, grid_family
from symrazor.discovery.members import (
    TEMPERATURES,
    Comparison,
    Job,
    Member,
    calibrated_scores,
    continue_from_,
    fit_temperature,
    guess_scores,
    has_learned,
    train_member,
)
from symrazor.discovery.question import Question, Structure
from symrazor.layers.relaxed import FREE_PATH_PRECISION, START_RATIO, Relaxed
from symrazor.training.options import DATA_PER_FREE_PRECISION, FitConfig


def logits(n: int = 200, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Return logits that are too sure, with labels of which they explain a part."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    y = (f + torch.randn(n, classes, generator=generator)).argmax(1)
    return 7 * f, y


# Left-out samples


def comparison(n: int, samples: int, seed: int = 0) -> Comparison:
    question = SimpleNamespace(train=(torch.zeros(n, 1), torch.zeros(n)), together=None)
    return Comparison(question, FitConfig(), samples, seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "samples"), [(25, 20), (103, 83), (40, 40)])
def test_starts_leave_out_disjoint_folds_that_cover_all_data(n: int, samples: int) -> None:
    shared = comparison(n, samples)
    folds = []
    for start in range(math.ceil(n / max(1, n - samples))):
        inside, outside = shared.split(start)
        assert len(inside) == samples and len(outside) == n - samples
        assert sorted([*inside.tolist(), *outside.tolist()]) == list(range(n))
        folds.append(outside.tolist())
    if n > samples:
        complete = [index for fold in folds[: n // (n - samples)] for index in fold]
        assert len(set(complete)) == len(complete)
        assert {index for fold in folds for index in fold} == set(range(n))
    assert torch.equal(shared.split(1)[1], comparison(n, samples).split(1)[1])


def test_at_most_so_many_samples_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_LEFT_OUT", 3)
    shared = comparison(30, 20)
    splits = [shared.split(start) for start in range(10)]
    assert all(len(inside) == 20 and len(outside) == 3 for inside, outside in splits)
    assert all(not set(i.tolist()) & set(o.tolist()) for i, o in splits)
    assert torch.cat([outside for _, outside in splits]).sort().values.tolist() == list(range(30))
    assert not torch.equal(splits[0][1], comparison(30, 20, seed=1).split(0)[1])


# Scores


def test_temperature_is_the_best_of_a_fine_grid() -> None:
    f, y = logits()
    low, high = map(math.log, TEMPERATURES)
    grid = torch.linspace(low, high, 2001, dtype=torch.float64)
    rows = torch.arange(len(y))
    loss = [-log_softmax(f / t, 1)[rows, y].mean() for t in grid.exp().tolist()]
    best = float(grid[int(torch.tensor(loss).argmin())])
    assert TEMPERATURES[0] < math.exp(best) < TEMPERATURES[1]
    assert math.log(fit_temperature(f, y)) == pytest.approx(best, abs=2 * float(grid[1] - grid[0]))


@pytest.mark.parametrize(("right", "scale"), [(75, 4.0), (90, 10.0), (60, 1.0)])
def test_temperature_in_closed_form(right: int, scale: float) -> None:
    """Two classes with one margin: the probability of a label becomes the share of right ones."""
    f = torch.tensor([[0.0, scale]], dtype=torch.float64).expand(100, 2)
    y = (torch.arange(100) < right).long()
    expected = scale / math.log(right / (100 - right))
    assert fit_temperature(f, y) == pytest.approx(expected, rel=1e-5)


def test_temperature_stays_in_its_range() -> None:
    f = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(10, 2)
    always_right, always_wrong = torch.ones(10).long(), torch.zeros(10).long()
    assert fit_temperature(f, always_right) == pytest.approx(TEMPERATURES[0], rel=1e-5)
    assert fit_temperature(f, always_wrong) == pytest.approx(TEMPERATURES[1], rel=1e-5)


def test_scores_of_classes() -> None:
    f, y = logits()
    scores, temperature = calibrated_scores(Categorical(), f, y)
    expected = log_softmax(f.numpy() / temperature, 1)[torch.arange(len(y)), y]
    assert temperature == fit_temperature(f, y) > 1
    torch.testing.assert_close(scores, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
    raw = torch.nn.functional.cross_entropy(f, y)
    assert -scores.mean() < raw  # calibration helps logits that are too sure


def test_scores_of_targets_have_the_noise_of_left_out_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    f, noise = torch.randn(2, 50, 2, generator=generator, dtype=torch.float64)
    y = f + noise * torch.tensor([0.1, 3.0])
    likelihood = Gaussian(noise=100.0, outputs=2)  # its own noise is far off
    scores, temperature = calibrated_scores(likelihood, f, y)
    scale = (y - f).square().mean(0).sqrt()
    expected = stats.norm.logpdf(y.numpy(), f.numpy(), scale.numpy()).sum(1)
    assert temperature == 1.0
    torch.testing.assert_close(scores, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def test_scores_of_other_likelihoods_are_their_own() -> None:
    f = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    y = (torch.arange(9) % 2)[:, None].double()
    scores, temperature = calibrated_scores(Bernoulli(), f, y)
    expected = stats.bernoulli.logpmf(y.numpy(), f.sigmoid().numpy()).sum(1)
    assert temperature == 1.0
    torch.testing.assert_close(scores, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def test_a_guess_by_hand() -> None:
    """Each class counts once more than it occurs, so that no label has probability zero."""
    labels, y = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 2])
    expected = torch.tensor([3 / 7, 2 / 7, 2 / 7], dtype=torch.float64).log()
    torch.testing.assert_close(guess_scores(Categorical(), labels, y), expected)
    new = guess_scores(Categorical(), torch.tensor([0, 0]), torch.tensor([2]))
    torch.testing.assert_close(new, torch.tensor([1 / 5], dtype=torch.float64).log())
    targets, y = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0, 3.0])
    variance = (0 + 4 + 1) / 3  # around the mean of the training labels, 2
    expected = torch.tensor([0.0, -2.0, -0.5], dtype=torch.float64) / variance
    expected -= 0.5 * math.log(2 * math.pi * variance)
    torch.testing.assert_close(guess_scores(Gaussian(), targets, y), expected)
    assert guess_scores(Bernoulli(), labels, y[:2]).tolist() == [-math.inf] * 2


def stub(gain: list[float]) -> Any:
    gains = torch.tensor(gain, dtype=torch.float64)
    return SimpleNamespace(left_out=gains - 2, guess=torch.full_like(gains, -2))


def test_learning_is_a_gain_of_two_standard_errors_and_two_nats() -> None:
    assert has_learned([stub([0.5] * 5)]) and not has_learned([stub([0.3] * 5)])
    noisy = [3.0, -2.0] * 50  # sum 50, standard error 25.1
    assert not has_learned([stub(noisy)])
    assert has_learned([stub(noisy), stub(noisy)])  # sum 100, standard error 35.4
    assert has_learned([stub([])])  # nothing is left out: nothing is known


# Nested starts


def grid(name: str) -> Callable[[], nn.Module]:
    return grid_family((1, 8, 8), 3).structure(name).make


PAIRS = {
    "relaxed": (grid("convolutional"), grid("relaxed"), torch.Size([6, 1, 8, 8])),
    "positional": (grid("convolutional"), grid("positional"), torch.Size([6, 1, 8, 8])),
    "sets": (
        lambda: deep_sets(2, 5, 3),
        lambda: deep_sets(2, 5, 3, free=True),
        torch.Size([6, 2, 5]),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_larger_network_starts_as_the_one_that_it_contains(name: str) -> None:
    make_strict, make_larger, shape = PAIRS[name]
    torch.manual_seed(0)
    strict, larger = make_strict(), make_larger()
    x = torch.randn(shape)
    learned = {group: float(i + 2) for i, group in enumerate(members.path_groups(strict))}
    likelihood = Gaussian(noise=0.3)
    state = {
        "model": strict.state_dict(),
        "likelihood": likelihood.state_dict(),
        "precisions": learned,
    }
    target = Gaussian(noise=1.0)
    precisions = continue_from_(larger, target, state, x)
    assert target.noise.value.item() == pytest.approx(0.3)
    assert set(precisions) == set(members.path_groups(larger)) > set(learned)
    new = {group: value for group, value in precisions.items() if group not in learned}
    assert {group: precisions[group] for group in learned} == learned
    expected = min(FREE_PATH_PRECISION, len(x) / DATA_PER_FREE_PRECISION)
    assert set(new.values()) == {expected}
    larger(x).square().sum().backward()
    untrained = [name for name, p in larger.named_parameters() if name not in state["model"]]
    assert any(larger.get_parameter(name).grad.abs().max() > 0 for name in untrained)  # type: ignore[union-attr]
    layers = [layer for layer in larger.modules() if isinstance(layer, Relaxed)]
    free = {layer: layer.removable_paths() for layer in layers}
    assert any(free.values()) == (name != "positional")
    with torch.no_grad():
        change = (larger(x) - strict(x)).square().mean().sqrt() / strict(x).std()
        # Dense free paths start at a tenth of the output, others at zero.
        assert 0 < change < 5 * START_RATIO if name == "sets" else change == 0
        for layer, paths in free.items():
            layer.disabled = frozenset(paths)
        torch.testing.assert_close(larger(x), strict(x), rtol=0, atol=0)


def test_a_network_cannot_start_from_one_that_it_does_not_contain() -> None:
    larger = grid("relaxed")()
    state = {"model": larger.state_dict(), "likelihood": {}, "precisions": {}}
    with pytest.raises(ValueError, match="cannot start from the trained state"):
        continue_from_(grid("convolutional")(), Categorical(), state, torch.zeros(2, 1, 8, 8))


# Jobs


def job_comparison() -> tuple[Comparison, Structure]:
    data = some_data("set", n=50)
    x, y = data.labelled
    train = x.transpose(1, 2), y  # networks take sets as [n, features, points]
    question = Question("a", "?", candidates_for(data), train, None, Categorical)
    config = FitConfig(lr=1e-2, device="cpu").change(estimator="mc", progress=False)
    return Comparison(question, config, 40, 0), question.family.structure("shared")


def test_phases_continue_and_the_better_one_is_kept() -> None:
    shared, structure = job_comparison()
    first = train_member(shared, Job("shared", 1, 0, 3))
    second = train_member(shared, Job("shared", 1, 1, 2, first))
    assert len(first.left_out) == len(second.left_out) == 10
    assert [record["epoch"] for record in second.history] == [1, 2, 3, 4, 5]
    assert second.seconds > first.seconds
    better = members.replace(first.evidence, log_likelihood=first.evidence.log_likelihood + 1e6)
    kept = train_member(shared, Job("shared", 1, 1, 2, members.replace(first, evidence=better)))
    assert kept.evidence is better and len(kept.history) == 5
    assert all(torch.equal(kept.state["model"][k], v) for k, v in first.state["model"].items())
    inside, outside = shared.split(1)
    x, y = shared.question.train
    trained = second.as_fit(structure, Categorical(), (x[inside], y[inside]))
    with torch.no_grad():
        f = trained.model(x[outside]).double()
    scores, temperature = calibrated_scores(Categorical(), f, y[outside])
    assert temperature == pytest.approx(second.temperature, rel=1e-5)
    torch.testing.assert_close(scores, second.left_out, rtol=1e-5, atol=1e-5)


def test_what_has_learned_nothing_is_no_start_for_a_larger_network() -> None:
    shared, _ = job_comparison()
    strict = train_member(shared, Job("shared", 0, 0, 2))

    def relaxed(gain: float) -> Member:
        # The larger network is another structure: it counts whatever the evidence of the first.
        best = members.replace(strict.evidence, log_likelihood=torch.tensor(1e6))
        scored = members.replace(strict, left_out=strict.guess + gain, evidence=best)
        return train_member(shared, Job("relaxed", 0, 1, 2, scored))

    fresh = train_member(shared, Job("relaxed", 0, 1, 2))
    weights, new = relaxed(-1.0).state["model"], fresh.state["model"]
    assert all(torch.equal(weights[name], new[name]) for name in new)
    continued = relaxed(1.0)
    assert not all(torch.equal(continued.state["model"][name], new[name]) for name in new)
    assert len(continued.history) == 4 and len(fresh.history) == 2
    assert continued.log_evidence < 1e5


def test_groups_of_samples_are_left_out_as_a_whole_and_all_of_them_once() -> None:
    together = torch.arange(60) // 4
    question = SimpleNamespace(train=(torch.zeros(60, 1), torch.zeros(60)), together=together)
    comparison = Comparison(question, FitConfig(), 48, 0)  # type: ignore[arg-type]
    seen = torch.zeros(60)
    for start in range(5):
        inside, outside = comparison.split(start)
        assert not set(together[inside].tolist()) & set(together[outside].tolist())
        assert 8 <= len(outside) <= 16 and len(inside) <= 48
        seen[outside] += 1
    assert bool((seen == 1).all())
