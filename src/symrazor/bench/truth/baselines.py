"""Baselines: methods that answer without the evidence.

- `cross_validation`: the fixed architecture with the best five-fold cross-validated likelihood.
- `maximum_likelihood`: one network with symmetric and free paths, trained without a prior.
- `residual_pathway_prior`: the same network with a fixed prior that prefers the symmetric paths
  (Finzi, Benton and Wilson 2021).
- `augerino`: learned ranges of augmentation with a fixed regulariser (Benton et al. 2020).
- `best_on_test_set`: the fixed architecture with the best test score. No method can know it; it is
  the lower bound of the regret.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from symrazor.bench.truth.networks import Architecture
from symrazor.bench.truth.task import Answer, Claim, Prediction, Problem, Range
from symrazor.bench.truth.training import (
    Trained,
    folds,
    negative_log_likelihood,
    train,
    train_and_predict,
    validation_losses,
)
from symrazor.bench.truth.transformations import transformed
from symrazor.invariance.averaged_network import Augment, Augmented
from symrazor.invariance.transformation import Flips, affine
from symrazor.layers import Relaxed
from symrazor.symmetry.relax import relax
from symrazor.symmetry.widths import invariances_of
from symrazor.training.augmentation_baselines import LikelihoodConfig, fit_by_likelihood

FOLDS = 5
STATED = 0.95
"""Probability from which cross-validation states its answer."""
MAX_CHANGE = 0.1
"""Largest change of the outputs of a network that is called invariant, relative to their spread."""
ELEMENTS = 8
"""Random elements of a group by which the change is measured."""
SYMMETRIC_PRECISION, FREE_PRECISION = 1.0, 10.0
"""Prior precisions of the weights of residual pathways."""
AUGERINO_STRENGTH, AUGERINO_COPIES, AUGERINO_EPOCHS = 0.05, 4, 40
AUGERINO_WIDTHS = {
    "rotation": 0.3,
    "x-translation": 0.1,
    "y-translation": 0.1,
    "x-scale": 0.1,
    "y-scale": 0.1,
}
"""Transformation -> initial width: radians, half-widths of the image, log factors."""


def cross_validation(problem: Problem) -> Answer:
    """Answer by the fixed architecture that five-fold cross-validation prefers."""
    pairs = folds(problem.labelled, FOLDS, problem.seed)
    losses: dict[str, Tensor] = {}
    for name, architecture in problem.architectures.items():
        curves = [validation_losses(architecture, *pair, problem.seed)[0] for pair in pairs]
        curve = torch.cat(curves, 1)
        losses[name] = curve[curve.mean(1).argmin()]
    winner = problem.architectures[min(losses, key=lambda name: float(losses[name].mean()))]
    claims = tuple(_compared(claim, losses, problem.architectures) for claim in winner.holds)
    return Answer(claims, {}, train_and_predict(winner, problem))


def _compared(
    claim: str, losses: Mapping[str, Tensor], architectures: Mapping[str, Architecture]
) -> Claim:
    """Compare the best architecture with a symmetry with the best one without it."""
    best = {}
    for holds in (True, False):
        named = [name for name in losses if architectures[name].holds[claim] is holds]
        best[holds] = min((losses[name] for name in named), key=lambda loss: float(loss.mean()))
    gains = best[False] - best[True]
    margin, error = float(gains.sum()), float(gains.std()) * math.sqrt(len(gains))
    probability = 0.5 * (1 + math.erf(abs(margin) / max(error, 1e-9) / math.sqrt(2)))
    stated = margin > 0 if probability >= STATED else None
    return Claim(claim, stated, probability, abs(margin), error)


def best_on_test_set(problem: Problem) -> Answer:
    """Answer by the fixed architecture with the best test score: a bound, not a method."""
    if problem.y is None:
        return Answer()
    assert problem.test_y is not None
    scores: dict[str, tuple[float, Prediction]] = {}
    for name, architecture in problem.architectures.items():
        prediction = train_and_predict(architecture, problem)
        loss = negative_log_likelihood(prediction, problem.test_y).mean()
        scores[name] = (float(loss), prediction)
    winner = min(scores, key=lambda name: scores[name][0])
    holds = problem.architectures[winner].holds
    claims = tuple(Claim(name, held, 1.0) for name, held in holds.items())
    return Answer(claims, {}, scores[winner][1])


def maximum_likelihood(problem: Problem) -> Answer:
    """Answer by the invariance of a network with all paths, trained without a prior."""
    return _all_paths(problem, _no_penalty)


def residual_pathway_prior(problem: Problem) -> Answer:
    """Answer by the invariance of a network with all paths and a fixed prior."""
    return _all_paths(problem, _pathway_penalty)


def _all_paths(problem: Problem, penalty: Callable[[nn.Module], Tensor]) -> Answer:
    if problem.y is None:
        return Answer()
    trained = train(
        Architecture(partial(_with_all_paths, problem)), problem.labelled, problem.seed, penalty
    )
    names = next(iter(problem.architectures.values())).holds
    claims = tuple(Claim(name, _is_symmetric(problem, trained, name)) for name in names)
    return Answer(claims, {}, trained.predict(problem.test_x))


class Sum(nn.Module):
    """The sum of a symmetric network and one without the symmetry."""

    def __init__(self, symmetric: nn.Module, free: nn.Module) -> None:
        super().__init__()
        self.symmetric, self.free = symmetric, free

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        out: Tensor = self.symmetric(x) + self.free(x)
        return out


def _with_all_paths(problem: Problem) -> nn.Module:
    """Return a relaxed CNN for shifts of grids, else a sum of the most and the least symmetric."""
    networks = list(problem.architectures.values())
    symmetric = max(networks, key=lambda network: sum(network.holds.values()))
    free = problem.architectures["dense"]
    is_grid = problem.kind in ("image", "series", "volume")
    if is_grid and set(symmetric.holds) == {"translation"}:
        return relax(symmetric.make(), problem.x[:2], ["translation"])
    return Sum(symmetric.make(), free.make())


def _no_penalty(model: nn.Module) -> Tensor:
    return torch.zeros(())


def _pathway_penalty(model: nn.Module) -> Tensor:
    """Return the negative log density of the prior, up to a constant."""
    free: set[int] = set()
    for module in model.modules():
        if isinstance(module, Sum):
            free |= {id(p) for p in module.free.parameters()}
        if isinstance(module, Relaxed):
            paths = [path for path in module.paths if not path.group]
            free |= {id(p) for path in paths for p in path.parameters()}
    terms = [
        (FREE_PRECISION if id(p) in free else SYMMETRIC_PRECISION) * p.square().sum()
        for p in model.parameters()
    ]
    return torch.stack(terms).sum() / 2


@torch.no_grad()
def _is_symmetric(problem: Problem, trained: Trained, symmetry: str) -> bool:
    """Return whether the outputs for the test inputs change by little."""
    generator = torch.Generator().manual_seed(problem.seed)
    x = (problem.test_x - trained.mean) / trained.scale
    f = trained.model(x)
    if symmetry == "linear":
        middle = trained.model((x + x.flip(0)) / 2)
        changes = [(middle - (f + f.flip(0)) / 2).square().mean()]
    else:
        moved = [transformed(problem, symmetry, x, generator) for _ in range(ELEMENTS)]
        changes = [(trained.model(z) - f).square().mean() for z in moved]
    spread = (f - f.mean(0)).square().mean()
    return float((torch.stack(changes).mean() / spread).sqrt()) < MAX_CHANGE


def augerino(problem: Problem) -> Answer:
    """Answer by the ranges that the training loss with a regulariser learns; pictures only."""
    if problem.kind != "image":
        return Answer()
    x, y = problem.labelled
    mean, scale = x.mean(), x.std()
    network = problem.architectures.get("true range", problem.architectures.get("plain"))
    network = network or problem.architectures["positional"]
    with torch.random.fork_rng([]):
        torch.manual_seed(problem.seed)
        moves = affine(tuple(AUGERINO_WIDTHS), AUGERINO_WIDTHS)
        augment = Augment([moves, Flips((-1,), 0.1)], AUGERINO_COPIES, problem.seed)
        model = Augmented(network.make(), augment)
        config = LikelihoodConfig(
            AUGERINO_STRENGTH, AUGERINO_EPOCHS, seed=problem.seed, progress=False
        )
        fit_by_likelihood(model, ((x - mean) / scale, y), config=config)
    learned = invariances_of(model, x.shape[1:])
    ranges = common_names(
        {name: Range(entry.width, entry.width, entry.width) for name, entry in learned.items()}
    )
    return Answer((), ranges, Trained(model, mean, scale).predict(problem.test_x))


def common_names(ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Return ranges by the names of the benchmark: "flip", and "scale" for the larger factor."""
    axes = [ranges[name] for name in ("x-scale", "y-scale")]
    return {
        **ranges,
        "scale": max(axes, key=lambda axis: axis.estimate),
        "flip": ranges["left-right flip"],
    }
