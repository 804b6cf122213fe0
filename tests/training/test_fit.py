"""Test `fit` on small data."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import symrazor as sr


def _blobs(n: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return three classes that depend on two of eight inputs; the others are noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    angle = torch.atan2(x[:, 1], x[:, 0]) + 0.1 * torch.randn(n, generator=generator)
    return x, ((angle + math.pi) / (2 * math.pi) * 3).long().clamp(0, 2)


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def _mislabelled(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the same data with one wrong label in ten."""
    x, y = _blobs(n, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    wrong = torch.rand(n, generator=generator) < 0.15
    return x, torch.where(wrong, torch.randint(0, 3, (n,), generator=generator), y)


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 0.01), ("sgd", 0.1)])
def test_evidence_increases_and_prevents_overfitting(optimizer: str, lr: float) -> None:
    options = {"epochs": 150, "batch_size": 20, "optimizer": optimizer, "lr": lr}
    options |= {"evidence_structure": "kron"}  # that of the first evidence
    data, test = _mislabelled(100, 0), _mislabelled(1000, 1)
    learned = sr.fit(_net(), data, test=test, **options)
    free = sr.fit(_net(), data, test=test, burn_in=10**9, prior_precision=1e-3, **options)
    first = next(r["log_evidence"] for r in learned.history if "log_evidence" in r)
    assert float(learned.evidence.log_evidence) > first + 10
    assert float(learned.evidence.log_likelihood) < float(free.evidence.log_likelihood)
    assert float(learned.evidence.log_evidence) > float(free.evidence.log_evidence) + 300
    assert learned.reading.test["nll"] < free.reading.test["nll"] - 0.1
    assert learned.reading.test["accuracy"] > free.reading.test["accuracy"] + 0.02


def test_precisions_switch_off_useless_inputs() -> None:
    """The first layer is split by input, and the prior removes the six noise inputs."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.useful, self.noise = nn.Linear(2, 16), nn.Linear(6, 16, bias=False)
            self.out = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.useful(x[:, :2]) + self.noise(x[:, 2:])))

    torch.manual_seed(0)
    fit = sr.fit(Split(), _blobs(300), epochs=120, batch_size=30, lr=5e-3)
    precisions = fit.razor.prior.precisions
    assert float(precisions["noise.weight"]) > 20 * float(precisions["useful.weight"])
    gamma = fit.evidence.effective_parameters
    assert gamma["noise.weight"] < 0.5 * gamma["useful.weight"]


def test_same_seed_gives_the_same_result() -> None:
    runs = [sr.fit(_net(), _blobs(), epochs=6, estimator="mc", seed=3) for _ in range(2)]
    assert runs[0].evidence.to_dict() == runs[1].evidence.to_dict()
    other = sr.fit(_net(), _blobs(), epochs=6, estimator="mc", seed=4)
    assert other.evidence.to_dict() != runs[0].evidence.to_dict()


def test_augmentation_has_its_own_random_numbers() -> None:
    drawn: list[float] = []

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        drawn.append(float(torch.rand((), generator=generator)))
        return x

    for seed in (3, 4):
        sr.fit(_net(), _blobs(), epochs=1, seed=seed, augment=augment)
    plain = [float(torch.rand((), generator=torch.Generator().manual_seed(s))) for s in (3, 4)]
    assert len({*drawn, *plain}) == len(drawn) + 2


def test_reading_json_and_prediction() -> None:
    test = _blobs(50, seed=1)
    fit = sr.fit(_net(), _blobs(), test=test, epochs=10, every=2)
    document = json.loads(fit.json)
    assert {"verdict", "evidence", "train", "test", "layers", "config", "versions"} <= set(document)
    assert document["train"]["n"] == 120
    assert document["evidence"]["log_evidence"] == pytest.approx(float(fit.evidence.log_evidence))
    assert [layer["name"] for layer in document["layers"]] == ["0", "2"]
    path = document["layers"][0]["paths"][0]
    assert path["path"] == "Linear"
    assert path["parameters"] == 8 * 16 + 16
    assert 0 < path["effective_parameters"] <= path["parameters"]
    assert "test: accuracy" in str(fit.reading)
    plain, averaged = fit.predict(test[0]).mean, fit.predict(test[0], how="probit").mean
    assert plain.shape == averaged.shape == (50, 3)
    assert (averaged.max(1).values < plain.double().max(1).values + 1e-6).all()
    assert not fit.model.training


def test_regression_learns_its_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) + 0.2 * torch.randn(200, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    fit = sr.fit(
        model, (x, y), "gaussian", test=(x, y), epochs=150, batch_size=40, lr=0.01, every=3
    )
    noise = fit.razor.likelihood.noise.value.item()
    assert 0.15 < noise < 0.27
    assert set(fit.reading.test) == {"mse", "nll"}
    variance = fit.predict(torch.tensor([[0.0], [6.0]]), how="probit").variance
    assert variance is not None
    assert variance[1] > variance[0] > 0.15**2


def test_keep_last_or_best() -> None:
    best = sr.fit(_net(), _blobs(), epochs=20, every=1, keep="best", evidence_structure=None)
    assert best.razor.best is not None
    assert float(best.evidence.log_evidence) == pytest.approx(
        float(best.razor.best.log_evidence), rel=1e-4
    )
    last = sr.fit(_net(), _blobs(), epochs=20, every=1, keep="last", evidence_structure=None)
    assert float(last.evidence.log_evidence) <= float(best.evidence.log_evidence) + 1e-3


def test_hyperparameters_do_not_follow_the_training_loss() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = sr.Hyper(1.0)
            self.body = _net()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x * self.scale.value)

    model = Net()
    sr.fit(model, _blobs(), epochs=3, burn_in=10**9)
    assert float(model.scale.value.detach()) == 1.0
    sr.fit(model, _blobs(), epochs=3, burn_in=0, every=1, keep="last")
    assert float(model.scale.value.detach()) != 1.0


def test_divergence_restores_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), _net()[2])
    with pytest.raises(FloatingPointError, match="Lower the learning rate"):
        sr.fit(model, _blobs(), optimizer="sgd", lr=1e20, epochs=20)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_too_large_sam_radius_is_reported() -> None:
    with pytest.raises(FloatingPointError, match=r"or the radius \(sam_radius=1e\+38\)"):
        sr.fit(_net(), _blobs(), sam_radius=1e38, epochs=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"optimizer": "lion"}, "optimizer must be .adamw"),
        ({"lr": -1.0}, "lr must be positive and finite"),
        ({"keep": "all"}, "keep must be .best"),
        ({"learning_rate": 0.1}, "Unknown option 'learning_rate'"),
        ({"structure": "kronecker"}, "structure must be one of"),
    ],
)
def test_invalid_options_are_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sr.fit(_net(), _blobs(), **change)


def test_invalid_models_and_devices_are_rejected() -> None:
    with pytest.raises(ValueError, match="has no parameters"):
        sr.fit(nn.Flatten(), _blobs())
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="has 0 CUDA devices"):
            sr.fit(_net(), _blobs(), device="cuda")


def test_invalid_data_leave_the_model_unchanged() -> None:
    x, y = _blobs()
    model = _net()
    before = copy.deepcopy(model.state_dict())
    spoiled = x.clone()
    spoiled[17, 2] = math.nan
    for data, test, message in (
        ((spoiled, y), None, "sample 17"),
        ((x, y + 1), None, "not between"),
        ((x, y[:-1]), None, "same number of samples"),
        ((x, y), (spoiled, y), "the test data"),
        ((x, y), (x, y + 1), "not between"),
        (([1.0], y), None, "a pair of tensors"),
        ((x.to_sparse(), y), None, "x in the training data must be dense"),
    ):
        with pytest.raises(ValueError, match=message):
            sr.fit(model, data, test=test, epochs=1)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class _Wayward(nn.Module):
    """A network whose curvature cannot be computed, for one of several reasons."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.how == "around":
            h = torch.cdist(h, self.first.weight)
        if self.how == "coupled":
            h = h - h.mean(0)
        if self.how == "random":
            h = h + torch.randn(8)
        y: torch.Tensor = self.last(h)
        return y


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        ("around", {}, "first.weight: used by the operation 'cdist'"),
        ("coupled", {}, "couples the samples"),
        ("random", {}, "not deterministic"),
        ("", {"prior_groups": "diagonal"}, "first.weight has one prior precision per weight"),
    ],
)
def test_models_without_evidence_are_rejected_before_training(
    how: str, options: dict[str, str], message: str
) -> None:
    model, epochs = _Wayward(how), list[object]()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        sr.fit(model, _blobs(), epochs=6, callbacks=[epochs.append], **options)
    assert not epochs
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("spoil", ["outputs", "weights"])
def test_divergence_in_the_last_step_restores_the_model(spoil: str) -> None:
    """No loss is computed afterwards; the evidence or the check of the weights detects it."""
    torch.manual_seed(0)
    x, y = _blobs()
    width = x.shape[1]
    hidden = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(width, 3))
    if spoil == "weights":
        model[0].weight.register_hook(lambda slope: slope * math.inf)
    with pytest.raises(FloatingPointError, match="diverged|The training loss is"):
        sr.fit(model, (x, y), epochs=1, batch_size=len(y), lr=1e18 if spoil == "outputs" else 1e-3)
    assert bool(torch.isfinite(model(x)).all())


def test_progress_bar_shows_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    sr.fit(_net(), _blobs(), test=_blobs(20, 1), epochs=4, every=1, progress=True)
    shown = capsys.readouterr().err
    assert "epoch 4/4" in shown
    assert "nll" in shown
    sr.fit(_net(), _blobs(), epochs=2, progress=False)
    assert capsys.readouterr().err == ""


def test_numpy_arrays_get_the_type_of_the_weights() -> None:
    x, y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 2
    assert x.dtype == np.float64
    fit = sr.fit(nn.Linear(3, 2), (x, y), test=(x, y), epochs=2, progress=False)
    assert torch.equal(fit.predict(x).mean, fit.predict(torch.from_numpy(x).float()).mean)
