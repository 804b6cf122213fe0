"""Test the steps to the posterior mode, and options of `fit` around them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.layers import FFC, Conv, Relaxed
from symrazor.training.optimisers import Stepper
from symrazor.training.options import FitConfig, Schedule


def _problem(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return model, torch.randn(24, 3).double(), torch.randint(0, 2, (24,))


def _stepper(model: nn.Module, n: int = 24, precision: float = 3.0, **options: Any) -> Stepper:
    razor = sr.Razor(model, "categorical", n, prior_precision=precision)
    return Stepper(razor, FitConfig(**options), 100)


def _gradient(model: nn.Module, x: Tensor, y: Tensor, radius: float | None) -> list[Tensor]:
    """Return the gradient at a distance `radius` uphill, by autograd; the model is unchanged."""
    theta = list(model.parameters())
    slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), theta)
    if radius is None:
        return list(slopes)
    norm = torch.cat([g.flatten() for g in slopes]).norm()
    names = [name for name, _ in model.named_parameters()]
    up = {n: t + radius * g / norm for n, t, g in zip(names, theta, slopes, strict=True)}
    loss = nn.functional.cross_entropy(torch.func.functional_call(model, up, (x,)), y)
    return list(torch.autograd.grad(loss, list(up.values())))


@pytest.mark.parametrize("radius", [None, 0.2])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_first_step_matches_the_formula(optimizer: str, radius: float | None) -> None:
    """In the first step, momentum equals the gradient and Adam's update its sign."""
    model, x, y = _problem()
    stepper = _stepper(model, optimizer=optimizer, lr=0.1, warmup=0.0, sam_radius=radius)
    before = [t.detach().clone() for t in model.parameters()]
    slopes = _gradient(model, x, y, radius)
    nll = stepper.step(x, y)
    if optimizer == "adamw":
        total = [g + 3 / 24 * b for g, b in zip(slopes, before, strict=True)]
        expected = [b - 0.1 * g.sign() for b, g in zip(before, total, strict=True)]
    else:
        shrunk = 1 + 0.1 / (1 - 0.9) * 3 / 24
        expected = [(b - 0.1 * g) / shrunk for b, g in zip(before, slopes, strict=True)]
    for t, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(t.detach(), e, rtol=1e-5, atol=1e-6)
    model.load_state_dict(stepper.last_good)
    assert nll == pytest.approx(nn.functional.cross_entropy(model(x), y).item())
    assert stepper.done == stepper.razor.training_steps == 1


@pytest.mark.parametrize("plain_steps", [0, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_sharpness_aware_steps_use_the_uphill_gradient(optimizer: str, plain_steps: int) -> None:
    """Compare five steps with the same optimiser, given gradients and prior by hand."""
    (model, x, y), (twin, _, _) = _problem(), _problem()
    options = {"optimizer": optimizer, "lr": 0.05, "warmup": 0.0}
    stepper = _stepper(model, sam_radius=0.3, sam_from=plain_steps / 100, **options)
    fed = _stepper(twin, **options)
    for number in range(5):
        stepper.step(x, y)
        rate = 0.05 * Schedule.with_warmup(100)(number)
        fed.optimiser.param_groups[0]["lr"] = rate
        slopes = _gradient(twin, x, y, 0.3 if number >= plain_steps else None)
        for t, g in zip(twin.parameters(), slopes, strict=True):
            t.grad = g + 3 / 24 * t.detach() if optimizer == "adamw" else g
        fed.optimiser.step()
        if optimizer == "sgd":
            with torch.no_grad():
                for t in twin.parameters():
                    t.div_(1 + rate / (1 - 0.9) * 3 / 24)
        for t, e in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(t, e, rtol=1e-9, atol=1e-12)
    plain, _, _ = _problem()
    other = _stepper(plain, **options)
    for _ in range(5):
        other.step(x, y)
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert moved > 1e-3  # the radius has an effect


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.2), ("adamw", 0.05), ("muon", 0.05)])
def test_training_converges_to_the_posterior_mode(optimizer: str, lr: float) -> None:
    model, x, y = _problem()
    options = {"optimizer": optimizer, "lr": lr, "batch_size": 24, "epochs": 1500}
    sr.fit(model, (x, y), burn_in=10**9, every=1500, prior_precision=3.0, **options)
    loss = nn.functional.cross_entropy(model(x), y)
    loss = loss + 3 / 48 * sum(p.square().sum() for p in model.parameters())
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    assert max(float(g.abs().max()) for g in slopes) < 1e-4


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_sharpness_aware_steps_skip_disabled_paths(optimizer: str) -> None:
    """Their weights have no gradient and follow the prior alone, towards zero."""
    torch.manual_seed(0)
    layer = Relaxed([Conv(1, 2, (4, 4)), FFC(1, 2, (4, 4))])
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
    x, y = torch.randn(24, 1, 4, 4), torch.randint(0, 2, (24,))
    layer.disabled = frozenset({1})
    stepper = _stepper(model, optimizer=optimizer, lr=0.01, warmup=0.0, sam_radius=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepper.step(x, y)
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]) or not p.any(), name
        if "paths.1" in name:
            assert bool((p.abs() <= before[name].abs() + 0.01).all()), name
            if optimizer != "adamw":
                torch.testing.assert_close(p / p.norm(), before[name] / before[name].norm())


def test_model_is_restored_when_the_uphill_loss_is_not_finite() -> None:
    model, x, y = _problem()
    stepper = _stepper(model, optimizer="sgd", sam_radius=1e308)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match="The training loss is"):
        stepper.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_loading_keeps_the_tensor_of_the_learning_rate() -> None:
    model, x, y = _problem()
    stepper = _stepper(model)
    stepper.step(x, y)
    rate = torch.tensor(0.1)
    stepper.optimiser.param_groups[0]["lr"] = rate
    stepper.load_state_dict(stepper.state_dict())
    assert stepper.optimiser.param_groups[0]["lr"] is rate


def test_patience_stops_after_evidence_steps_without_a_new_best() -> None:
    """Train a good model on noise, so that its evidence rarely rises."""

    def noise(x: Tensor, generator: torch.Generator) -> Tensor:
        return 3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    model, x, _ = _problem()
    y = (x[:, 0] > 0).long()
    sr.fit(model, (x, y), epochs=200, lr=0.05)
    options = {"epochs": 20, "batch_size": 4, "every": 2, "damping": 1e-9, "augment": noise}
    spoilt = {"lr": 0.05, "warmup": 0.0, "evidence_structure": None, **options}
    fit = sr.fit(model, (x, y), patience=2, burn_in=18, **spoilt)
    values = [r["log_evidence"] for r in fit.history if "log_evidence" in r]
    # The first step is in the burn-in, and the second one before the first update of the prior.
    best = max(range(2, len(values)), key=values.__getitem__)
    assert len(values) == best + 1 + 2
    assert fit.reading.train["epochs"] == len(fit.history) == 2 * len(values) < 20
    assert float(fit.evidence.log_evidence) == pytest.approx(values[best], rel=1e-6)
    assert len(sr.fit(model, (x, y), burn_in=10**9, patience=1, **spoilt).history) == 20


def test_augmentation_is_applied_to_training_batches_only() -> None:
    model, x, y = _problem()
    seen: list[int] = []

    def spoil(batch: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(len(batch))
        return 10 * torch.randn(batch.shape, generator=generator).to(batch)

    options: dict[str, Any] = {"epochs": 3, "batch_size": 10, "every": 1, "lr": 1e-12}
    plain = sr.fit(_problem()[0], (x, y), test=(x, y), keep="last", burn_in=10**9, **options)
    fit = sr.fit(model, (x, y), test=(x, y), keep="last", burn_in=10**9, augment=spoil, **options)
    assert seen == [10, 10, 4] * 3
    for with_it, without in zip(fit.history, plain.history, strict=True):
        assert with_it["nll"] != pytest.approx(without["nll"], rel=1e-3)
        for name in ("log_evidence", "test_accuracy", "test_nll"):
            assert with_it[name] == pytest.approx(without[name], rel=1e-6)


@pytest.mark.parametrize("wrong", [lambda x, g: x[:3], lambda x, g: None])
def test_augmentation_must_keep_the_number_of_examples(wrong: Any) -> None:
    model, x, y = _problem()
    with pytest.raises(ValueError, match="augment must return a tensor of 24 examples, got"):
        sr.fit(model, (x, y), augment=wrong)


def test_augmentation_must_keep_the_dtype() -> None:
    model, x, y = _problem()
    other = torch.float32 if x.dtype == torch.float64 else torch.float64
    with pytest.raises(ValueError, match=f"like its input, got {other} on cpu. End"):
        sr.fit(model, (x, y), augment=lambda x, g: x.to(other))


def test_exceptions_in_callbacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model, x, y = _problem()
    seen: list[dict[str, float]] = []

    def fails(record: dict[str, float]) -> None:
        record.clear()
        raise RuntimeError("disk is gone")

    fit = sr.fit(model, (x, y), epochs=3, every=3, callbacks=[fails, seen.append])
    assert seen == fit.history
    assert "log_evidence" in seen[2]
    assert caplog.text.count("A callback raised an exception") == 3
    assert "disk is gone" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmup": 1.0}, r"warmup must be in \[0, 1\)"),
        ({"sam_radius": 0.0}, "sam_radius must be positive and finite"),
        ({"sam_radius": 0.1, "sam_from": 1.0}, r"sam_from must be in \[0, 1\)"),
        ({"sam_from": 0.5}, "sam_from=0.5 has no effect without a sam_radius"),
        ({"optimizer": "sam"}, "Unknown optimizer 'sam'. Use optimizer='sgd', sam_radius=0.05"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"save_every": 0}, "save_every must be at least 1"),
        ({"augment": 3}, "augment must be a function or None, got 3"),
        ({"label_smoothing": 0.1}, "not a likelihood"),
    ],
)
def test_invalid_options_are_rejected(change: dict[str, Any], message: str) -> None:
    model, x, y = _problem()
    with pytest.raises(ValueError, match=message):
        sr.fit(model, (x, y), **change)
