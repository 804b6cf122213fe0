"""Fit a sparse Gaussian process, for comparison with Table 2 of Learning Invariant Weights.

A reference without transformations: a Gaussian kernel with one lengthscale, learned inducing
points, one latent function per class under a softmax, and a variational bound on the evidence. The
paper's row is also a sparse Gaussian process, but regresses on labels. Needs `pip install
gpytorch`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from symrazor.experiments.liw import Options, check, load, save
from symrazor.experiments.liw_tables import VERSIONS
from symrazor.experiments.results import Run, table

NAME = "liw-gp"
PAPER = (91.19, 89.22, 72.10, 97.52)
CLASSES, RATE = 10, 0.02
INDUCING, STEPS, BATCH = (1024, 96), (5000, 200), (1000, 250)
"""At full size, and with `--small`."""


def gaussian_process(inducing: Tensor, classes: int) -> Any:
    """Return the latent functions and the likelihood of a sparse Gaussian process classifier.

    Args:
        inducing: Initial inducing points, [m, d].
        classes: Number of latent functions, all with the same kernel and inducing points.

    Raises:
        ValueError: gpytorch is not installed.
    """
    try:
        import gpytorch
    except ImportError as error:
        raise ValueError("This experiment needs gpytorch: pip install gpytorch") from error
    from gpytorch.variational import (
        CholeskyVariationalDistribution,
        IndependentMultitaskVariationalStrategy,
        VariationalStrategy,
    )

    class Latent(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        """One latent function per class."""

        def __init__(self) -> None:
            batch = torch.Size([classes])
            q = CholeskyVariationalDistribution(len(inducing), batch_shape=batch)
            base = VariationalStrategy(self, inducing, q, learn_inducing_locations=True)
            super().__init__(IndependentMultitaskVariationalStrategy(base, classes))
            self.mean = gpytorch.means.ZeroMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            apart = torch.pdist(inducing[:200]).median()
            self.kernel.base_kernel.lengthscale = 0.5 * apart
            self.kernel.outputscale = 10.0

        def forward(self, x: Tensor) -> Any:
            """Return the prior at some points."""
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(
        num_features=classes, num_classes=classes, mixing_weights=False
    )
    return Latent(), likelihood


def fit(x: Tensor, y: Tensor, options: Options, seed: int) -> Any:
    """Maximise the bound by Adam; return latent functions, likelihood and objective."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    latent, likelihood = gaussian_process(
        x[order[: INDUCING[options.small]].to(x.device)].clone(), CLASSES
    )
    import gpytorch

    latent, likelihood = latent.to(x.device), likelihood.to(x.device)
    objective = gpytorch.mlls.VariationalELBO(likelihood, latent, num_data=len(x))
    steps, size = options.steps or STEPS[options.small], options.batch or BATCH[options.small]
    optimiser = torch.optim.Adam(latent.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    torch.manual_seed(seed)  # gpytorch draws from the global generator
    for _ in range(steps):
        index = torch.randint(len(x), (size,), generator=generator).to(x.device)
        optimiser.zero_grad()
        (-objective(latent(x[index]), y[index])).backward()
        optimiser.step()
        schedule.step()
    return latent.eval(), likelihood.eval(), objective


@torch.no_grad()
def scores(fitted: Any, x: Tensor, y: Tensor, batch: int = 500) -> tuple[float, float]:
    """Return the bound per sample, if x and y are all training data, and the accuracy."""
    latent, likelihood, objective = fitted
    bound, right = 0.0, 0
    for part, target in zip(x.split(batch), y.split(batch), strict=True):
        at = latent(part)
        bound += float(objective(at, target)) * len(target)
        right += int((likelihood(at).probs.mean(0).argmax(-1) == target).sum())
    return bound / len(y), right / len(y)


def run(options: Options) -> str:
    """Compare table 2 with a sparse Gaussian process (needs gpytorch)."""
    check(NAME, options)
    runs: list[Run] = []
    for version in options.choose(VERSIONS):
        for seed in options.seed:
            train, test = load("mnist", (version,), options, seed)
            x, x_test = train.x[0].flatten(1), test.x[0].flatten(1)
            fitted = fit(x, train.y[0], options, seed)
            bound, _ = scores(fitted, x, train.y[0])
            _, accuracy = scores(fitted, x_test, test.y[0])
            new: Run = {"row": version, "seed": seed, "small": options.small}
            new |= {"elbo_per_datum": bound, "accuracy": 100 * accuracy}
            save(NAME, options, [new])
            runs.append(new)
    return markdown(runs)


def markdown(runs: Sequence[Run]) -> str:
    """Return accuracy next to the paper's, and the bound."""
    paper = dict(zip(VERSIONS, PAPER, strict=True))
    rows = [
        (
            r["row"],
            r["seed"],
            f"{r['accuracy']:.2f}",
            f"{paper[r['row']]:.2f}",
            f"{r['elbo_per_datum']:.3f}",
        )
        for r in runs
    ]
    return table(["version", "seed", "accuracy %", "paper (SGPR)", "bound / n"], rows)
