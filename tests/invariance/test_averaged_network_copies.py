"""Test copies of inputs and the gradient of the evidence in their widths."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from augment_case import pictures, small_network
from torch import nn

import symrazor as sr
from symrazor.core.parameters import hyperparameters
from symrazor.groups.lie import so3
from symrazor.invariance import (
    AffineLie,
    Augment,
    Augmented,
    Blur,
    Brightness,
    Choice,
    Contrast,
    Flips,
    Mixture,
    Noise,
    QuarterTurns,
    Saturation,
    TimeShift,
    Transformation,
    affine,
    find_reach_,
    lie,
)
from symrazor.training.augmentation_baselines import LikelihoodConfig, fit_by_likelihood

Part = Transformation | Choice


IMAGES: dict[str, Callable[[], Part | list[Part]]] = {
    "rotation": lambda: affine("rotation", 0.4),
    "affine": lambda: affine("affine", 0.15),
    "flips": lambda: Flips((-1, -2), 0.2),
    "quarter turns": QuarterTurns,
    "brightness": Brightness,
    "contrast": lambda: Contrast(0.3),
    "blur": lambda: Blur(0.8),
    "noise": Noise,
    "all": lambda: [affine("translation", 0.2), Contrast(0.2), Flips((-1,), 0.3)],
}


AVERAGES = ["all, probabilities", "rotation, probabilities", "all, joint", "rotation, joint"]


@pytest.mark.parametrize("name", [*IMAGES, *AVERAGES])
def test_gradient_in_every_width_equals_finite_differences(name: str) -> None:
    name, _, average = name.partition(", ")
    x, y = pictures(), torch.tensor([0, 1, 2, 0, 1])
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())
    network, augment = nn.Sequential(convolution, small_network(72)), Augment(IMAGES[name](), 4)
    model = Augmented(network, augment, average=average or "outputs")  # type: ignore[arg-type]
    model = model.double().eval()
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    razor = sr.Razor(model, "categorical", 5)
    eta = hyperparameters(model)

    def value() -> float:
        return float(razor.evidence(batches).log_evidence)

    result = razor.hyper_gradient(batches, razor._curvature(batches, None))
    for key, raw in eta.items():
        fit, occam = result[key]
        for i in range(raw.numel()):
            entry, step = raw.data.view(-1), 1e-5
            entry[i] += step
            above = value()
            entry[i] -= 2 * step
            below = value()
            entry[i] += step
            slope = (above - below) / (2 * step)
            assert float((fit + occam).reshape(-1)[i]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_averages_by_hand_for_copies() -> None:
    x = pictures(3)
    network = small_network(36).double()
    augment = Augment([affine("rotation", 0.5), Flips((-1,), 0.25)], 4).double().eval()
    moved, weights = augment.copies(x)
    assert moved.shape == (3, 8, 1, 6, 6)
    torch.testing.assert_close(weights.sum(), weights.new_ones(()))
    expected = sum(w * network(moved[:, s]) for s, w in enumerate(weights))
    torch.testing.assert_close(Augmented(network, augment)(x), expected)
    mixed = sum(w * network(moved[:, s]).softmax(1) for s, w in enumerate(weights))
    result = Augmented(network, augment, average="probabilities")(x)
    torch.testing.assert_close(result.exp(), mixed)
    weighed = sum(w * network(moved[:, s]).exp() for s, w in enumerate(weights))
    joint = Augmented(network, augment, average="joint")(x)
    torch.testing.assert_close(joint.softmax(1), weighed / weighed.sum(1, keepdim=True))
    early = Augmented(network, augment, at="1")(x)
    hidden = sum(w * network[:2](moved[:, s]) for s, w in enumerate(weights))
    torch.testing.assert_close(early, network[2:](hidden))


def test_flips_and_turns_are_exact() -> None:
    x = pictures(2)
    flips = Flips((-1, -2), 0.2).double()
    torch.testing.assert_close(
        flips(x), torch.stack([x, x.flip(-1), x.flip(-2), x.flip(-1, -2)], 1)
    )
    p = flips.probabilities.detach()
    torch.testing.assert_close(p, torch.tensor([0.64, 0.16, 0.16, 0.04], dtype=torch.float64))
    turns = QuarterTurns().double()
    torch.testing.assert_close(turns(x)[:, 3], x.rot90(3, (-2, -1)))
    torch.testing.assert_close(turns.probabilities.sum(), torch.ones((), dtype=torch.float64))


def test_evaluation_is_deterministic_and_training_is_random() -> None:
    x = pictures()
    model = Augmented(small_network(36), Augment(affine("rotation", 1.0), 4)).double()
    assert not torch.equal(model(x), model(x))
    model.eval()
    first = model(x)
    assert torch.equal(first, model(x))
    torch.testing.assert_close(first[:2], model(x[:2]))
    assert torch.equal(copy.deepcopy(model)(x), first)
    model.train()
    model.eval()
    assert not torch.equal(first, model(x))  # a new shift for the next estimate
    other = Augmented(small_network(36), Augment(affine("rotation", 0.3), 4)).double().eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_a_refined_average_uses_more_points() -> None:
    x = pictures()
    parts = [affine("rotation", 1.0), Flips((-1,), 0.3)]
    model = Augmented(small_network(36), Augment(parts, 4), average="joint").double().eval()
    finer = model.refined(32)
    assert finer.network is model.network and not finer.training
    assert finer.augment.copies(x)[0].shape[1] == 64 and model.augment.copies(x)[0].shape[1] == 8
    torch.testing.assert_close(model.refined(4)(x), model(x))
    much = model.refined(2000)(x)
    assert (finer(x) - much).abs().max() < (model(x) - much).abs().max()
    assert Augment(Flips()).refined(7).n_samples == 1
    with pytest.raises(ValueError, match="positive integer, got 0"):
        model.refined(0)


def test_a_refined_mixture_refines_its_components() -> None:
    x, network = pictures(3), small_network(36).double()
    mixture = Mixture([Augment(affine("rotation", 0.5), 3), Augment(Flips())], [0.7, 0.3])
    model = Augmented(network, mixture).double().eval()
    finer = model.refined(11)
    assert (
        finer.augment.copies(x)[0].shape[1] == 11 + 2 and model.augment.copies(x)[0].shape[1] == 5
    )
    turned = Augmented(network, mixture.parts[0].refined(11)).eval()(x)
    mirrored = Augmented(network, mixture.parts[1]).eval()(x)
    torch.testing.assert_close(finer(x), 0.7 * turned + 0.3 * mirrored)


def test_a_fixed_augmentation_is_not_learned() -> None:
    """Widths without a gradient are not learned; the precisions are."""
    model = Augmented(small_network(36), Augment([affine("rotation", 0.5), Flips()], 3))
    model.augment.requires_grad_(False)
    before = model.invariances((1, 6, 6))
    data = (pictures(20).float(), torch.arange(20) % 3)
    fit = sr.fit(model, data, epochs=3, every=1, burn_in=0, progress=False)
    assert model.invariances((1, 6, 6)) == before
    assert len({record["log_evidence"] for record in fit.history}) == 3


def test_shifted_lattices_are_unbiased() -> None:
    augment = Augment([affine("rotation", 1.0), Brightness()], 5, seed=3).double()
    x = pictures(4000)
    points = augment.points(x).reshape(4000, 5, 2)
    torch.testing.assert_close(points.mean((0, 1)), x.new_zeros(2), atol=0.01, rtol=0)
    torch.testing.assert_close(
        points.square().mean((0, 1)), x.new_full((2,), 1 / 3), atol=0.01, rtol=0
    )


def test_mixture_weights_sum_to_one() -> None:
    x = pictures(3)
    parts = [Augment(affine("rotation", 0.2), 2), Augment(Flips(), 1)]
    mixture = Mixture(parts, [0.75, 0.25]).double().eval()
    moved, weights = mixture.copies(x)
    assert moved.shape[1] == len(weights) == 4
    torch.testing.assert_close(weights.sum(), weights.new_ones(()))
    torch.testing.assert_close(weights[:2].sum(), weights.new_tensor(0.75))
    assert mixture.describe((1, 6, 6))["mode 1 (share)"] == pytest.approx(0.75)
    razor = sr.Razor(Augmented(small_network(36), mixture).double().eval(), "categorical", 3)
    razor.step([(x, torch.tensor([0, 1, 2]))])


def _joint() -> Augmented:
    return Augmented(small_network(36, 1), Augment(Flips()), average="joint")


def test_a_distribution_is_wrapped_in_a_transformation() -> None:
    x = pictures()
    short = Augment(AffineLie("rotation", 0.3), 4).double().eval()
    long = Augment(affine("rotation", 0.3), 4).double().eval()
    torch.testing.assert_close(short.copies(x), long.copies(x))
    both = Augment([AffineLie("rotation", 0.3), Flips()], 4)
    assert list(both.describe((1, 6, 6))) == ["rotation (degrees)", "left-right flip (probability)"]


def test_the_plain_network_inside_is_saved_unchanged(tmp_path: Path) -> None:
    x = pictures().float()
    model = Augmented(small_network(36), Augment(affine("rotation", 0.5), 3))
    fit = sr.fit(model, (x, torch.arange(5) % 3), epochs=1, progress=False)
    plain = fit.collapse()
    assert plain is not model.network and torch.equal(plain(x), model.network(x))
    assert sr.save_network(plain, tmp_path / "network.safetensors", x).exists()
    with pytest.raises(ValueError, match="model.network itself"):
        sr.collapse(model, x)
    with pytest.raises(ValueError, match=r"Use fit.collapse\(\)"):
        sr.save_network(model, tmp_path / "network.safetensors", x)


def test_relaxing_an_averaged_network() -> None:
    """Relaxing the layers of an averaged network keeps its outputs."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), small_network(72))
    model = Augmented(network, Augment([affine("rotation", 0.5), Flips()], 3), average="joint")
    x, shift = pictures().float(), model.augment.shift.clone()
    relaxed = sr.relax(model, x)
    assert torch.equal(relaxed.augment.shift, shift) and relaxed.training
    fit = sr.fit(relaxed, (x, torch.arange(5) % 3), epochs=1, every=1, progress=False)
    assert "FFC" in str(fit.reading)
    plain = fit.collapse()
    torch.testing.assert_close(plain(x), relaxed.network.eval()(x), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Augment([]), "one or more transformations"),
        (lambda: Augment("rotation"), "choices, got 'rotation'. Example: Augment"),  # type: ignore[arg-type]
        (lambda: Augment(Flips), "one or more transformations"),  # type: ignore[arg-type]
        (lambda: Augment(affine(), 2.0), "n_samples must be a positive integer"),  # type: ignore[arg-type]
        (lambda: Augment(affine(), True), "n_samples must be a positive integer"),
        (lambda: affine("rotation", "a"), "widths must be numbers such as 0.1, got 'a'"),  # type: ignore[arg-type]
        (lambda: Augment(affine(), 2).copies([1.0]), "as a tensor, got list"),  # type: ignore[arg-type]
        (lambda: Augment(affine(), 2).copies(torch.tensor(1.0)), "got a scalar"),
        (lambda: Augment(Contrast(), 2).copies(pictures().byte()), "got torch.uint8. Use x.float"),
        (lambda: find_reach_(_joint(), (pictures(0), torch.arange(0))), "No samples in the data"),
        (lambda: Augment(affine(), 2).refined(2.5), "n_samples must be a positive integer"),  # type: ignore[arg-type]
        (lambda: Augmented(abs, Augment(Flips())), "torch.nn.Module, got builtin"),  # type: ignore[arg-type]
        (lambda: Mixture(Augment(Flips())), "two or more"),  # type: ignore[arg-type]
        (lambda: Flips((-1,), "a"), "below 1/2, got 'a'"),  # type: ignore[arg-type]
        (lambda: Flips((-1.0,)), "distinct negative integers"),  # type: ignore[arg-type]
        (lambda: Blur("a"), "Blur needs a positive, finite width, got 'a'"),  # type: ignore[arg-type]
        (lambda: Augment(Brightness(), 2).copies(torch.ones(2, 1)), "two numbers or more"),
        (
            lambda: fit_by_likelihood(_joint(), (pictures() * math.nan, torch.arange(5) % 3)),
            "x in the training data has 180 NaN",
        ),
        (
            lambda: fit_by_likelihood(
                Augmented(small_network(36), Augment(Flips())),
                (pictures().float(), torch.arange(5)),
            ),
            "Label 3 at position 3",
        ),
        (lambda: Augmented(small_network(4), Flips()), "Augment or a Mixture, got Flips"),  # type: ignore[arg-type]
        (lambda: Mixture([Flips(), Flips()]), "must be Augment, got Flips, Flips"),  # type: ignore[list-item]
        (lambda: Mixture([]), "two or more"),
        (lambda: Flips(-1), r"use Flips\(\(-1,\)\)"),  # type: ignore[arg-type]
        (lambda: Flips((-1,), 0.6), "above 0 and below 1/2"),
        (lambda: lie("rotation"), "must be a LieAlgebra"),  # type: ignore[arg-type]
        (lambda: Augment(AffineLie("rotation", torch.tensor([[0.1], [0.2]]))), "one width for"),
        (lambda: Augment(lie(so3()), 2).copies(pictures()), "vectors of 3 numbers"),
        (lambda: Augment(lie(so3()), 2).copies(torch.zeros(2, 5, 2)), "vectors of 3 numbers"),
        (lambda: TimeShift()(torch.zeros(2, 1, 1), torch.zeros(2, 1)), "two steps or more"),
        (lambda: sr.Razor(_joint(), "gaussian", 5), "Use average='outputs'"),
        (lambda: sr.Razor(_joint(), "bernoulli", 5), "got Bernoulli"),
        (
            lambda: fit_by_likelihood(_joint(), (pictures(), torch.zeros(5, 1)), "gaussian"),
            "needs a categorical likelihood",
        ),
        (lambda: Augment(affine(), 0), "n_samples must be a positive integer, got 0"),
        (lambda: affine("rotation", 30.0), "below 3.142 .*in radians"),
        (lambda: affine("rotation", 0.0), "Use a mask for a width of 0"),
        (lambda: Contrast(-0.1), "Contrast needs a positive, finite width, got -0.1"),
        (lambda: LikelihoodConfig(epochs=0), "epochs must be positive, got 0"),
        (lambda: LikelihoodConfig(strength=-1.0), "strength must be at least 0"),
        (lambda: LikelihoodConfig(lr="fast"), "lr must be a number"),  # type: ignore[arg-type]
        (
            lambda: Augmented(nn.Linear(2, 2), Augment(Flips()), at="x"),
            "no module 'x' to average at",
        ),
        (
            lambda: Augmented(small_network(4), Augment(Flips()), "1", "probabilities"),
            "at the end of the network",
        ),
        (lambda: Augmented(small_network(4), Augment(Flips()), average="x"), "'outputs', 'prob"),  # type: ignore[arg-type]
        (lambda: Flips((1,)), "distinct negative integers"),
        (lambda: QuarterTurns(1.5), "between 0 and 1"),
        (lambda: Mixture([Augment(Flips())]), "two or more"),
        (lambda: Saturation()(pictures(), torch.zeros(5, 1)), r"\[n, 3, h, w\]"),
        (lambda: TimeShift()(pictures(), torch.zeros(5, 1)), r"series \[n, channels, time\]"),
        (lambda: Flips((-3,))(torch.zeros(2, 4, 4)), "do not have the axes"),
        (lambda: affine()(torch.zeros(2, 1, 1, 4, 4), torch.zeros(2, 6)), "must be images"),
        (lambda: QuarterTurns()(torch.zeros(2, 1, 4, 5)), "square"),
    ],
)
def test_bad_input(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
