r"""Basis functions and their evidence: the first part of the talk.

An even function is learned from few noisy data. The output has four parts: four models (low
frequencies, medium and symmetric, medium, high), the error by number of features, the amount of
symmetry that evidence and likelihood select, and a deep network. The talk does not give its data,
so only the order of its results can be compared.

In the deep network $W_3\, \mathrm{relu}(W_2 \cos(\omega^2 W_1 x))$, $W_1$ is fixed, so that
$\omega^2$ alone sets the frequencies; $W_2$ and $W_3$ are weights. The frequency follows the
gradient of the training loss (maximum likelihood), of the Laplace evidence (a `Razor`), or of the
evidence lower bound (a `Variational` network).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

import symrazor as sr
from symrazor.core.parameters import hyperparameters
from symrazor.experiments.options import Common
from symrazor.experiments.results import table, write_json
from symrazor.experiments.talk_figure import Results, draw
from symrazor.inference.basis_models import F64, BasisModel, Features, Fourier, Symmetrised
from symrazor.training.variational import fit_variational

NOISE = 0.2
"""Noise standard deviation. The lower bound keeps it fixed: it would explain all data by noise."""
N_FEATURES = 300
FEATURE_COUNTS = (5, 10, 20, 40, 100, 300, 1000)
PANELS = {  # name -> omega^2, symmetric, (log evidence, train error, test error) of the talk
    "low frequencies": (0.5, False, (-38.75, 0.88, 1.22)),
    "medium, symmetric": (4.0, True, (-16.97, 0.06, 0.28)),
    "medium": (4.0, False, (-21.25, 0.06, 0.59)),
    "high frequencies": (30.0, False, (-20.36, 0.00, 0.85)),
}
DEEP_STARTS = (1.0, 4.0, 20.0)
"""Initial frequencies of the deep network. Every objective has several optima in the frequency, and
a training ends in one near its start: the start with the best objective is reported."""
DEEP_STEPS = 400
EVIDENCE_EVERY = 10
HYPER_LR = 0.3
"""Learning rate of the logarithm of omega^2, if it is updated at every step."""


@dataclass(frozen=True)
class Options(Common):
    """Options of the experiment.

    Args:
        small: leave out the deep network.
        device: the experiment runs on the CPU.
        seed: of the data and the features.
        json: write all results to this file.
        figure: draw the figure into this PNG file.
    """

    device: Literal["cpu"] = "cpu"
    seed: int = 0
    figure: Path | None = None


def truth(x: Tensor) -> Tensor:
    """Return the true function, which is even and has two frequencies."""
    return torch.cos(3 * x) * torch.exp(-0.15 * x.square()) + 0.3 * torch.cos(7 * x)


def sample(n: int, seed: int, half: float = 2.5) -> tuple[Tensor, Tensor]:
    """Return n noisy data with inputs in [-half, half]."""
    generator = torch.Generator().manual_seed(seed)
    x = half * (2 * torch.rand(n, 1, generator=generator, dtype=F64) - 1)
    noise = NOISE * torch.randn(n, 1, generator=generator, dtype=F64)
    return x, (truth(x) + noise).squeeze(1)


def grid(half: float = 3.0) -> tuple[Tensor, Tensor]:
    """Return test inputs and noise-free targets."""
    x = torch.linspace(-half, half, 400, dtype=F64).unsqueeze(1)
    return x, truth(x).squeeze(1)


def features(size: int, omega2: float, symmetric: bool, seed: int) -> Features:
    """Return random Fourier features, or their average over x and -x."""
    waves = Fourier(size, omega2=omega2, seed=seed)
    return Symmetrised(waves) if symmetric else waves


def errors(model: BasisModel, data: tuple[Tensor, Tensor], half: float = 3.0) -> dict[str, float]:
    """Return mean squared errors of the predictive mean on training data and on the grid."""
    new, target = grid(half)
    train = model.predict(*data, data[0]).mean.squeeze(1) - data[1]
    test = model.predict(*data, new).mean.squeeze(1) - target
    return {"train": float(train.square().mean()), "test": float(test.square().mean())}


def four_panels(results: Results, seed: int) -> None:
    """Compute the exact evidence of four models with fixed frequencies and known noise."""
    data = sample(24, seed)
    results.curves |= {"x": data[0].flatten().tolist(), "y": data[1].tolist()}
    results.curves |= {"grid": grid()[0].flatten().tolist(), "truth": grid()[1].tolist()}
    for name, (omega2, symmetric, _) in PANELS.items():
        model = BasisModel(features(N_FEATURES, omega2, symmetric, seed), 1.0, NOISE)
        value = float(model.log_evidence(*data).detach())
        results.panels.append({"model": name, "log_evidence": value, **errors(model, data)})
        prediction = model.predict(*data, grid()[0])
        assert prediction.variance is not None
        results.curves[name] = prediction.mean.flatten().tolist()
        results.curves[f"{name} spread"] = prediction.variance.sqrt().flatten().tolist()


def error_by_size(results: Results, seed: int, repeats: int = 5) -> None:
    """Compute errors by number of features with a flat prior, which is maximum likelihood."""
    for symmetric in (False, True):
        for size in FEATURE_COUNTS:
            runs = []
            for repeat in range(repeats):
                data = sample(40, seed + 100 + repeat)
                model = BasisModel(features(size, 6.0, symmetric, repeat), 1e3, NOISE)
                runs.append(errors(model, data, half=2.5))
            row = {key: mean(run[key] for run in runs) for key in ("train", "test")}
            results.sizes.append({"symmetric": symmetric, "features": size, **row})


def amounts_of_symmetry(results: Results, seed: int) -> None:
    """Learn the amount of symmetry and the frequency by evidence and by likelihood."""
    data = sample(24, seed)
    for objective in ("evidence", "likelihood"):
        waves = Fourier(N_FEATURES, omega2=1.5, seed=seed)
        model = BasisModel(Symmetrised(waves, amount=0.5), 1.0, NOISE)
        if objective == "likelihood":
            model.variance.requires_grad_(False)
            model.noise.requires_grad_(False)
        history = model.learn(*data, objective, steps=150)
        for name in ("features.amount", "features.features.omega2"):
            key = f"{objective} {'amount' if name.endswith('amount') else 'omega2'}"
            results.amounts[key] = [step[name] for step in history]


class CosineNetwork(nn.Module):
    r"""$W_3\, \mathrm{relu}(W_2 \cos(\omega^2 W_1 x))$ with a learned $\omega^2$.

    Args:
        omega2: initial $\omega^2$.
        width: of both hidden layers.
        seed: of the three matrices.
    """

    def __init__(self, omega2: float, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.W1: Tensor
        self.register_buffer("W1", torch.randn(width, 1, generator=generator))
        self.omega2 = sr.Hyper(omega2)
        self.W2, self.W3 = nn.Linear(width, width, bias=False), nn.Linear(width, 1, bias=False)
        for layer in (self.W2, self.W3):
            drawn = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.data = drawn * (2 / width) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        hidden = torch.cos(self.omega2.value * (x @ self.W1.T))
        output: Tensor = self.W3(torch.relu(self.W2(hidden)))
        return output


def maximum_likelihood(omega2: float, x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Learn weights and frequency by the training loss."""
    model = CosineNetwork(omega2, seed=seed)
    theta, eta = sr.weights(model).values(), hyperparameters(model).values()
    groups = [{"params": list(theta), "lr": 1e-2}, {"params": list(eta), "lr": HYPER_LR}]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, DEEP_STEPS)
    path = [omega2]
    for _ in range(DEEP_STEPS):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
        schedule.step()
        path.append(float(model.omega2.value.detach()))
    return {"path": path, "log_evidence": None, "predict": model}


def laplace(omega2: float, x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Learn weights by their posterior; frequency, precisions and noise by the Laplace evidence."""
    model = CosineNetwork(omega2, seed=seed)
    likelihood = sr.Gaussian(NOISE)
    razor = sr.Razor(model, likelihood, len(y), burn_in=DEEP_STEPS // 8, damping=0.3, lr=0.2)
    theta = list(sr.weights(model).values())
    optimiser = torch.optim.Adam(theta, lr=1e-2)
    path = [omega2]
    for step in range(DEEP_STEPS):
        optimiser.zero_grad()
        loss = likelihood.nll(model(x), y).mean() + razor.penalty()
        loss.backward()
        optimiser.step()
        if (step + 1) % EVIDENCE_EVERY == 0:
            razor.step([(x, y)])
        path.append(float(model.omega2.value.detach()))
    log_evidence = float(razor.evidence([(x, y)]).log_evidence)
    return {"path": path, "log_evidence": log_evidence, "predict": model}


def bound(omega2: float, x: Tensor, y: Tensor, seed: int) -> dict[str, Any]:
    """Learn posteriors, frequency and precisions by the evidence lower bound."""
    model = CosineNetwork(omega2, seed=seed)
    path = [omega2]
    fit = fit_variational(
        model,
        (x, y),
        sr.Gaussian(NOISE),
        epochs=DEEP_STEPS,
        batch_size=len(y),
        every=DEEP_STEPS,
        lr=2e-2,
        hyper_lr=HYPER_LR,
        noise_update="fixed",
        prior_precision=16.0,
        seed=seed,
        progress=False,
        callbacks=[lambda record: path.append(float(model.omega2.value.detach()))],
    )
    log_evidence = float(fit.evidence.log_evidence)
    return {
        "path": path,
        "log_evidence": log_evidence,
        "predict": lambda new: fit.predict(new).mean,
    }


DEEP_METHODS: dict[str, Callable[[float, Tensor, Tensor, int], dict[str, Any]]] = {
    "maximum likelihood": maximum_likelihood,
    "Laplace evidence": laplace,
    "lower bound": bound,
}


def deep_demo(results: Results, seed: int) -> None:
    """Learn the frequency of a deep network by three objectives."""
    x, y = (part.float() for part in sample(40, seed))
    new, target = (part.float() for part in grid(2.5))
    for name, learn in DEEP_METHODS.items():
        rows = []
        for start in DEEP_STARTS:
            run = learn(start, x, y.unsqueeze(1), seed)
            with torch.no_grad():
                train = run["predict"](x).squeeze(1) - y
                test = run["predict"](new).squeeze(1) - target
            row = {"method": name, "omega2": run["path"][-1], "log_evidence": run["log_evidence"]}
            row |= {"train": float(train.square().mean()), "test": float(test.square().mean())}
            rows.append(row | {"path": run["path"]})
        results.deep.append(max(rows, key=_objective))


def _objective(row: dict[str, Any]) -> float:
    """Return the log evidence of a run; for maximum likelihood, the negative training error."""
    value = row["log_evidence"]
    return -row["train"] if value is None else float(value)


def same_order(panels: Sequence[dict[str, Any]]) -> bool:
    """Return whether the order by evidence is the reverse of the order by test error."""
    by_evidence = sorted(panels, key=lambda row: -row["log_evidence"])
    tests = [row["test"] for row in by_evidence]
    return tests == sorted(tests)


def run(options: Options) -> str:
    """Compare basis functions and a deep network by evidence and by loss.

    Raises:
        OSError: a file cannot be written.
    """
    started = time.perf_counter()
    results, seed = Results(), options.seed
    four_panels(results, seed)
    error_by_size(results, seed)
    amounts_of_symmetry(results, seed)
    if not options.small:
        deep_demo(results, seed)
    results.seconds = time.perf_counter() - started
    write_json(options.json, {"experiment": "talk-basis", "seed": seed, **vars(results)})
    if options.figure is not None:
        draw(results, options.figure)
    return markdown(results)


def markdown(results: Results) -> str:
    """Return tables of the results beside the results of the talk."""
    panels = []
    for row in results.panels:
        cells = [row["model"]]
        keys = (("log_evidence", 2), ("train", 3), ("test", 3))
        for (key, digits), talk in zip(keys, PANELS[row["model"]][2], strict=True):
            cells += [f"{row[key]:.{digits}f}", f"{talk:.2f}"]
        panels.append(cells)
    comparison = "equals" if same_order(results.panels) else "differs from"
    half = len(results.sizes) // 2
    sizes = [
        [models[0]["features"], *(f"{row[key]:.3f}" for row in models for key in ("train", "test"))]
        for models in zip(results.sizes[:half], results.sizes[half:], strict=True)
    ]
    ends = {key: values[-1] for key, values in results.amounts.items()}
    amounts = [
        (objective, f"{ends[f'{objective} amount']:.3f}", f"{ends[f'{objective} omega2']:.2f}")
        for objective in ("evidence", "likelihood")
    ]
    parts = [
        table(["panel", "log evidence", "talk", "train", "talk", "test", "talk"], panels),
        f"The order by evidence {comparison} the order by test error.",
        table(["features", "train", "test", "train, symmetric", "test, symmetric"], sizes),
        table(["learned by", "amount of symmetry", "omega^2"], amounts),
    ]
    if results.deep:
        head = ["deep network", "omega^2", "log evidence", "train", "test"]
        parts.append(table(head, map(_deep_cells, results.deep)))
    return "\n\n".join([*parts, f"{results.seconds:.1f} s"])


def _deep_cells(row: dict[str, Any]) -> list[str]:
    value = row["log_evidence"]
    evidence = "" if value is None or not math.isfinite(value) else f"{value:.1f}"
    frequency = f"{row['path'][0]:g} to {row['omega2']:.2f}"
    return [row["method"], frequency, evidence, f"{row['train']:.3f}", f"{row['test']:.3f}"]
