"""Test the trials that remove free paths."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.parameters import copy_state
from symrazor.data import Tensors
from symrazor.layers import FC, FFC, SFC, Conv, Relaxed
from symrazor.layers import Path as LayerPath
from symrazor.training import trials
from symrazor.training.checkpoint import Checkpoints

SIZE = 6
OPTIONS: dict[str, Any] = {"epochs": 20, "batch_size": 32, "every": 2, "lr": 0.02, "seed": 3}
OPTIONS |= {"start": "given", "evidence_structure": None}
PLACE: dict[str, Any] = OPTIONS | {"batch_size": 16, "free_precision": 1.0}


def bars(task: str, n: int = 192, noise: float = 0.1) -> Tensors:
    """Return images of a bar, labelled by its orientation, its half of the image, or both."""
    generator = torch.Generator().manual_seed(0)
    x = noise * torch.randn(n, 1, SIZE, SIZE, generator=generator)
    upright = torch.randint(2, (n,), generator=generator).bool()
    rows, columns = torch.randint(SIZE, (2, n), generator=generator)
    for k in range(3):
        down = torch.where(upright, k, 0)
        across = torch.where(upright, 0, k)
        x[torch.arange(n), 0, (rows + down) % SIZE, (columns + across) % SIZE] += 1
    upper = rows < SIZE // 2
    answers = {"content": upright, "place": upper, "both": 2 * upright + upper}
    return x, answers[task].long()


def network(free: type[LayerPath] = FFC, classes: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    space: tuple[Any, ...] = (1, 8, (SIZE, SIZE))
    layer = Relaxed([Conv(*space), free(*space)])
    pool: list[nn.Module] = [nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
    return nn.Sequential(layer, *pool, nn.Linear(8, classes))


def free_path(model: nn.Module) -> LayerPath:
    layer = next(module for module in model.modules() if isinstance(module, Relaxed))
    return layer.path(1)


def outcome(fit: sr.Fit) -> dict[str, Any]:
    """Return everything that must be bit-identical."""
    actual = ("seconds", "off", "trial")
    return {
        "history": [{k: v for k, v in record.items() if k not in actual} for record in fit.history],
        "weights": {k: v.tolist() for k, v in fit.model.state_dict().items()},
        "precisions": {k: v.tolist() for k, v in fit.razor.prior.precisions.items()},
        "evidence": fit.evidence.to_dict(),
    }


@pytest.mark.parametrize(
    ("gaps", "left", "expected"),
    [
        ([-0.02], 4, None),  # one look is not enough
        ([-0.02], 0, True),
        ([-0.02, -0.03], 4, True),  # ahead, and more so
        ([-0.095, -0.004, 0.006], 11, None),  # a lead that melts (ELLA's network on CIFAR-10)
        ([-0.095, -0.004, 0.006, -0.021], 10, None),  # the last two looks alone would say more
        ([-0.095, -0.004, 0.006, -0.021, 0.032], 9, False),
        ([0.0], 0, True),
        ([0.04, 0.02], 0, False),
        ([0.04, 0.02, 0.008], 1, True),  # made good
        ([0.04, 0.02], 1, None),  # 0.01 at the end
        ([0.04, 0.02, 0.013], 0, False),
        ([0.4, 0.3], 3, False),  # 0.13 at the end
        ([0.02, 0.03], 3, False),
        ([-0.005, 0.0], 2, True),  # 0.01 at the end
        ([-0.005, 0.0], 4, None),  # 0.02 at the end: look again
    ],
)
def test_verdict(gaps: list[float], left: int, expected: bool | None) -> None:
    assert trials.verdict(gaps, left) is expected


@pytest.mark.parametrize("free", [FFC, FC])
def test_unneeded_path_is_switched_off(free: type[LayerPath]) -> None:
    kept = sr.fit(network(free), bars("content"), **OPTIONS)
    shaved = sr.fit(network(free), bars("content"), switch_off=True, **OPTIONS)
    assert kept.reading.layers[0].free_share > 0.05  # there is something to shave
    assert not any(bool(weight.any()) for weight in free_path(shaved.model).parameters())
    assert shaved.reading.layers[0].free_share < 1e-6
    assert shaved.reading.layers[0].error == pytest.approx(0, abs=1e-5)
    assert "bound" not in shaved.reading.verdict
    assert not any(m.disabled for m in shaved.model.modules() if isinstance(m, Relaxed))
    results = [record["trial"] for record in shaved.history if "trial" in record]
    assert [(entry["paths"], entry["stay_off"]) for entry in results] == [(["0.paths.1"], True)]
    assert results[0]["without"] >= results[0]["with"] - trials.TOLERANCE
    assert shaved.evidence.per_datum >= results[0]["with"] - 2 * trials.TOLERANCE
    plain = shaved.collapse(0.0)
    x = bars("content")[0]
    assert torch.allclose(plain(x), shaved.model(x), atol=1e-5)


@pytest.mark.parametrize("options", [{"learn_omega": "weight"}, {"learn_anchors": "weight"}, {}])
def test_all_priors_of_a_path_are_switched_off(options: dict[str, Any]) -> None:
    """Pixel biases belong to the prior of the lengthscales if these are random."""
    model = network()
    path = SFC(1, 8, (SIZE, SIZE), bias=True, **options)
    nn.init.normal_(path.offset.bias, std=0.3)
    model[0].paths[1] = path
    fit = sr.fit(model, bars("content"), switch_off=True, **OPTIONS)
    assert fit.history[-1]["off"] == ["0.paths.1"]
    assert not any(bool(weight.any()) for weight in path.parameters())
    assert float(fit.evidence.per_datum) == pytest.approx(fit.history[-1]["per_datum"], rel=1e-4)
    assert fit.reading.layers[0].free_share < 1e-6


def test_path_that_is_off_does_not_affect_a_full_curvature() -> None:
    """The oracle is the network without the path, with the learned precisions."""
    x, y = bars("content")
    model, wide = network().double(), (x.double(), y)
    fit = sr.fit(model, wide, switch_off=True, structure="full", **OPTIONS | {"every": 5})
    assert fit.history[-1]["off"] == ["0.paths.1"]
    alone = nn.Sequential(model[0].path(0), *model[1:])
    groups = {"conv": ["0.conv.*"], "weight": ["4.weight"], "bias": ["4.bias"]}
    learned = [float(fit.razor.prior.precisions[g]) for g in ("0.paths.0", "4.weight", "4.bias")]
    precision = dict(zip(groups, learned, strict=True))
    options: dict[str, Any] = {"prior_precision": precision, "prior_groups": groups}
    razor = sr.Razor(alone, "categorical", len(y), structure="full", **options)
    expected = razor.evidence([wide]).log_evidence
    assert float(fit.evidence.log_evidence) == pytest.approx(float(expected), rel=1e-9)


def test_path_with_a_frozen_part_is_not_tried() -> None:
    """It has an output even if its trainable weights are zero."""
    model = network()
    path = FFC(1, 8, (SIZE, SIZE), bias=True)
    nn.init.normal_(path.offset.bias, std=0.3).requires_grad_(False)
    model[0].paths[1] = path
    fit = sr.fit(model, bars("content"), switch_off=True, **OPTIONS)
    assert not any(record.get("off") for record in fit.history)


def test_needed_path_is_unchanged_by_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "MAX_INITIAL_LOSS", 100.0)
    plain = sr.fit(network(), bars("place"), **PLACE)
    told: list[dict[str, Any]] = []
    fit = sr.fit(network(), bars("place"), switch_off=True, callbacks=[told.append], **PLACE)
    results = [record["trial"] for record in fit.history if "trial" in record]
    assert [(entry["paths"], entry["stay_off"]) for entry in results] == [(["0.paths.1"], False)]
    assert not any(record.get("off") for record in fit.history)
    assert outcome(fit) == outcome(plain)  # a trial that failed leaves no trace
    assert told == fit.history  # each epoch once, of the network that went on
    seconds = [record["seconds"] for record in fit.history]
    assert seconds == sorted(seconds)


def test_paths_that_fail_together_are_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_INITIAL_LOSS", 100.0)
    monkeypatch.setattr(trials, "verdict", lambda gaps, left: False)
    torch.manual_seed(1)
    sizes = [(c, 4, (SIZE, SIZE)) for c in (1, 4)]
    layers = [Relaxed([Conv(*space), FFC(*space)]) for space in sizes]
    pool = [nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], *pool)
    fit = sr.fit(model, bars("content"), switch_off=True, **OPTIONS)
    tried = [record["trial"]["paths"] for record in fit.history if "trial" in record]
    assert [len(paths) for paths in tried] == [2, 1, 1]
    assert sorted(tried[1] + tried[2]) == sorted(tried[0])


def test_gain_from_further_training_does_not_decide_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle takes both decisions and compares the results."""
    monkeypatch.setattr(trials, "MAX_INITIAL_LOSS", 100.0)
    data, slow = bars("both", 600, 0.12), PLACE | {"lr": 0.0025, "switch_off": True}
    fit = sr.fit(network(classes=4), data, **slow)
    (trial,) = [record["trial"] for record in fit.history if "trial" in record]
    steps = [record for record in fit.history if "off" in record]
    before = max(record["per_datum"] for record in steps if record["epoch"] <= 10)
    assert trial["without"] > before  # more evidence than the network had with the path ...
    assert trial["with"] > trial["without"] + 0.05  # ... but not than it has now
    assert not trial["stay_off"]
    monkeypatch.setattr(trials, "TOLERANCE", 100.0)  # whatever is tried stays off
    wrong = sr.fit(network(classes=4), data, **slow)
    assert not any(bool(weight.any()) for weight in free_path(wrong.model).parameters())
    assert wrong.evidence.per_datum < fit.evidence.per_datum - 0.05


def test_diverged_branch_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_INITIAL_LOSS", 100.0)
    model = network()

    def spoil(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * float("nan") if model[0].disabled else x

    fit = sr.fit(model, bars("content"), switch_off=True, augment=spoil, **OPTIONS)
    (trial,) = [record["trial"] for record in fit.history if "trial" in record]
    assert trial["without"] is None and not trial["stay_off"]
    plain = sr.fit(network(), bars("content"), augment=lambda x, generator: x, **OPTIONS)
    assert outcome(fit) == outcome(plain)
    with pytest.raises(FloatingPointError):  # not on trial
        sr.fit(network(), bars("content"), augment=lambda x, _: x * float("nan"), **OPTIONS)


def test_path_with_a_large_initial_loss_is_not_tried() -> None:
    plain = sr.fit(network(), bars("place"), **PLACE)
    asked = sr.fit(network(), bars("place"), switch_off=True, **PLACE)
    assert float(plain.evidence.per_datum) > -0.5
    assert not any(record.get("off") for record in asked.history)
    assert plain.evidence.log_evidence == asked.evidence.log_evidence


class Stop:
    """An augmentation that changes nothing but sends SIGTERM in its nth call."""

    def __init__(self, step: int | None = None) -> None:
        self.left = step or -1

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return x


@pytest.mark.parametrize("task", ["content", "place"])
@pytest.mark.parametrize("steps", [(65, 14, 5), (72, 1, 11)], ids=["inside epochs", "at their end"])
def test_run_resumed_within_a_trial_is_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, steps: tuple[int, ...]
) -> None:
    """Stop in the branch with the paths, in the branch without, and again."""
    monkeypatch.setattr(trials, "MAX_INITIAL_LOSS", 100.0)
    options = (OPTIONS if task == "content" else PLACE) | {"batch_size": 32, "estimator": "mc"}
    options |= {"switch_off": True, "save_every": 100}
    whole = sr.fit(network(), bars(task), augment=Stop(), **options)
    for step in steps:
        stopped = network()
        with pytest.raises(SystemExit):
            sr.fit(stopped, bars(task), resume=tmp_path, augment=Stop(step), **options)
        assert not any(m.disabled for m in stopped.modules() if isinstance(m, Relaxed))
    saved = Checkpoints(tmp_path).load()
    assert saved is not None and saved["trials"]["trial"] is not None  # stopped in the middle
    assert saved["step"] == sum(steps) > 6 * saved["epoch"] + saved["batches_done"]  # went back
    told: list[dict[str, Any]] = []
    model = network()
    model[4].weight.data.zero_()  # all of it comes from the checkpoint
    resumed = sr.fit(
        model, bars(task), resume=tmp_path, augment=Stop(), callbacks=[told.append], **options
    )
    assert outcome(whole) == outcome(resumed)
    assert [record["epoch"] for record in told] == list(range(11, 21))
    results = [record["trial"] for record in resumed.history if "trial" in record]
    assert [entry["stay_off"] for entry in results] == [task == "content"]


class Priced:
    """A training in which a path with zero weights costs a given loss."""

    def __init__(self, prices: list[float]) -> None:
        torch.manual_seed(1)
        space: tuple[Any, ...] = (1, 1, (SIZE, SIZE))
        free = [Relaxed([Conv(*space), FFC(*space)]) for _ in prices]
        self.model = nn.Sequential(*free, nn.Flatten(), nn.Linear(SIZE**2, 2))
        self.razor = sr.Razor(self.model, "categorical", 192)
        for _ in range(2):  # trials begin after the first update of the prior
            self.latest = self.razor.step([bars("content")])
        self.history: list[dict[str, Any]] = [{}]
        self.prices = prices

    def nll(self) -> float:
        paths = [layer.path(1) for layer in self.model if isinstance(layer, Relaxed)]
        off = [not any(bool(weight.any()) for weight in path.parameters()) for path in paths]
        return 0.25 + sum(price for price, zero in zip(self.prices, off, strict=True) if zero)

    def branch(self) -> dict[str, Any]:
        return copy_state(self.model.state_dict())

    def load_branch_(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


@pytest.mark.parametrize(
    ("prices", "expected"),
    [
        ([0.3, 0.02, 0.15, 0.1], [1, 3, 2]),  # 0.02, 0.12, 0.27, and then 0.57
        ([0.2, 0.2, 0.09], [2, 0, 1]),  # 0.49 in all
        ([0.2, 0.2, 0.11], [2, 0]),  # 0.51 in all
        ([0.6, 0.7], None),
    ],
)
def test_paths_with_the_smallest_loss_are_tried_first(
    prices: list[float], expected: list[int] | None
) -> None:
    run = Priced(prices)
    before = run.branch()
    several = trials.Trials(run)
    several.update(run.latest, 0.6, 5)
    result = None if several.trial is None else several.trial.paths
    assert result == (None if expected is None else [f"{k}.paths.1" for k in expected])
    assert all(torch.equal(value, before[name]) for name, value in run.branch().items())


@torch.no_grad()
def test_disabled_path_is_not_computed() -> None:
    layer = Relaxed([Conv(1, 2, (SIZE, SIZE)), FFC(1, 2, (SIZE, SIZE))])
    x = bars("place")[0][:5]
    layer.disabled = frozenset([1])
    assert torch.equal(layer(x), layer.path(0)(x))
    for weight in layer.path(1).parameters():
        weight.zero_()
    quiet = layer(x)
    layer.disabled = frozenset()
    assert torch.equal(layer(x), quiet)


def test_network_without_free_paths_is_unchanged() -> None:
    torch.manual_seed(0)
    x: Tensor = torch.randn(40, 3)
    y = (x.sum(1) > 0).long()
    torch.manual_seed(0)
    a = sr.fit(nn.Linear(3, 2), (x, y), epochs=4, switch_off=True)
    torch.manual_seed(0)
    b = sr.fit(nn.Linear(3, 2), (x, y), epochs=4)
    assert a.evidence.log_evidence == b.evidence.log_evidence
